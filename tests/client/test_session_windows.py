"""Windows in a session: what is copied in them under a plan, without one, under a wrong one; what the daemon hears."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from baft_client.periods import Copied, overruns
from baft_client.source import OutcomeKind
from baft_client.windows import NO_LIMIT
from baftd.memory.control import Gate
from baftd.pipeline.events import Event, EventKind, pack_event, unpack_events
from baftd.wire.messages import Begin, CopyPlan, Declare, Declared, Fence, ScheduleSaid, Seal, Timings, WireToken
from tests.support.engines import soon
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.trainer import INCARNATION, Places, Trainer

BLOCK = 256 << 10
TENSORS, SIZE = 4, 256 << 10
TOTAL = TENSORS * SIZE * 4
"""Bytes of the stable tensors of `trainer`: 4 MiB."""
RECV = EventKind.WAIT_RECV


@pytest.fixture
def daemon(scripted: ScriptedDaemon) -> ScriptedDaemon:
    return scripted


def plan(daemon: ScriptedDaemon, trainer: Trainer, generation: int = 1, **fields: object) -> None:
    """Send a copy plan and wait until the session has it."""
    assert daemon.token is not None
    fields.setdefault("rung", "windows")
    fields.setdefault("token", daemon.token)
    fields.setdefault("rank", 0)
    daemon.push(CopyPlan(generation=generation, **fields))  # type: ignore[arg-type]
    soon(lambda: trainer.session._standing.plan is not None and trainer.session._standing.plan.generation == generation,
         "the plan is there")  # fmt: skip


def begin(trainer: Trainer) -> None:
    """A boundary that begins a snapshot."""
    trainer.update()
    trainer.wait_for_grant()
    assert trainer.boundary().kind is OutcomeKind.BEGAN


def progress(trainer: Trainer) -> int:
    engine = trainer.session._layout._engine
    assert engine is not None
    return engine.progress()


def stays(trainer: Trainer, copied: int) -> None:
    """The engine is given time to copy more than it may."""
    threading.Event().wait(0.03)
    assert progress(trainer) == copied


def window(trainer: Trainer, until: int) -> None:
    """A wait that lasts until so many bytes are copied."""
    with trainer.session.windows.waiting(RECV):
        soon(lambda: progress(trainer) >= until, f"{until} bytes are copied")


def timings(daemon: ScriptedDaemon, trainer: Trainer, step: int) -> Timings:
    """What the daemon heard of the period from the boundary of `step` on, which has ended."""
    trainer.session._link._wake()
    soon(lambda: any(isinstance(m, Timings) and m.step == step for m in daemon.received), f"timings of step {step}")
    found = [m for m in daemon.received if isinstance(m, Timings) and m.step == step]
    assert len(found) == 1, "a period is told of once"
    return found[0]


def kinds(message: Timings) -> list[EventKind]:
    return [event.kind for event in unpack_events(message.events)]


# ---------------------------------------------------------------- which bytes go where


def test_without_a_source_the_engine_copies_all_the_time(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    begin(trainer)
    soon(lambda: progress(trainer) == TOTAL, "everything is copied without any window")
    with trainer.session.windows.waiting(RECV):
        pass
    assert trainer.fence().kind is OutcomeKind.SEALED
    begin(trainer)
    heard = timings(daemon, trainer, 2)
    assert (heard.in_windows, heard.outside, heard.at_fence, heard.overruns) == (0, TOTAL, 0, 0)


def test_with_a_source_and_no_plan_windows_take_what_they_can(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.session.windows.register("test")
    begin(trainer)
    stays(trainer, 0)
    window(trainer, TOTAL)
    assert trainer.fence().kind is OutcomeKind.SEALED
    begin(trainer)
    heard = timings(daemon, trainer, 2)
    assert (heard.copied, heard.plan) == (True, 0)
    assert (heard.in_windows, heard.outside, heard.at_fence) == (TOTAL, 0, 0)
    assert heard.overruns == 0


def test_a_plan_says_what_each_window_takes(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.session.windows.register("test")
    plan(daemon, trainer, windows=[BLOCK, 0, 4 * BLOCK], further=2 * BLOCK)
    begin(trainer)
    done = 0
    for budget in (1, 0, 4, 2, 2):
        done += budget * BLOCK
        window(trainer, done)
        stays(trainer, done)
    assert trainer.fence().kind is OutcomeKind.SEALED
    begin(trainer)
    heard = timings(daemon, trainer, 2)
    assert (heard.in_windows, heard.outside, heard.at_fence) == (done, 0, TOTAL - done)
    assert (heard.plan, heard.overruns) == (1, 0)
    assert heard.fence_ns > 0
    assert heard.held_ns > heard.fence_ns
    events = list(unpack_events(heard.events))
    assert [e.amount // BLOCK for e in events if e.kind is EventKind.WINDOW] == [1, 0, 4, 2, 2]
    inside = [(e.micro, e.amount // BLOCK) for e in events if e.kind is EventKind.COPY_INSIDE]
    assert inside == [(0, 1), (2, 4), (3, 2), (4, 2)]
    fences = [e for e in events if e.kind is EventKind.FENCE]
    assert [fence.amount for fence in fences] == [TOTAL - done]
    assert sum(e.amount for e in events if e.kind is EventKind.COPY_FENCE) == TOTAL - done


def test_outside_of_windows_it_goes_on_at_the_pace_of_the_plan(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.session.windows.register("test")
    plan(daemon, trainer, windows=[BLOCK], outside=40 << 20, rung="overlap")
    begin(trainer)
    window(trainer, BLOCK)
    soon(lambda: progress(trainer) == TOTAL, "the rest is copied beside the step")
    assert trainer.fence().kind is OutcomeKind.SEALED
    begin(trainer)
    heard = timings(daemon, trainer, 2)
    assert heard.at_fence == 0
    assert heard.outside >= TOTAL - BLOCK - 2 * BLOCK, "a little went before the window"
    assert heard.outside + heard.in_windows == TOTAL


def test_the_rung_fence_copies_nothing_before(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    plan(daemon, trainer, rung="fence")
    begin(trainer)
    stays(trainer, 0)
    assert trainer.fence().kind is OutcomeKind.SEALED
    begin(trainer)
    heard = timings(daemon, trainer, 2)
    assert (heard.in_windows, heard.outside, heard.at_fence, heard.overruns) == (0, 0, TOTAL, 0)


def test_a_plan_is_in_force_from_the_next_boundary_on(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.session.windows.register("test")
    plan(daemon, trainer, windows=[BLOCK])
    begin(trainer)
    plan(daemon, trainer, generation=2, windows=[3 * BLOCK])
    window(trainer, BLOCK)
    stays(trainer, BLOCK)
    trainer.fence()
    begin(trainer)
    window(trainer, 3 * BLOCK)
    stays(trainer, 3 * BLOCK)
    trainer.fence()
    begin(trainer)
    assert [timings(daemon, trainer, step).plan for step in (2, 3)] == [1, 2]


def test_a_plan_that_comes_while_the_slots_are_mapped_is_for_the_new_layout(
    trainer: Trainer, daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts anew as well. The one that was there before is for other bytes."""
    session = trainer.session
    session.windows.register("test")
    plan(daemon, trainer, generation=5, windows=[2 * BLOCK])
    declare, meanwhile = session._layout.declare, [True, False]

    def slowly(*args: Any, **more: Any) -> Declared:
        reply = declare(*args, **more)
        if meanwhile.pop(0):
            plan(daemon, trainer, generation=1, windows=[BLOCK])
        return reply

    monkeypatch.setattr(session._layout, "declare", slowly)
    for name in ("more", "yet more"):
        trainer.arrays[name] = np.zeros(SIZE, dtype=np.float32)
        trainer.versions[name] = 0
        trainer.build()
        trainer.update()
        assert trainer.boundary().kind is OutcomeKind.BEGAN
        found = session._standing.plan
        if name == "more":
            assert (found and found.generation, session._snapshots.plan) == (1, found)
            window(trainer, BLOCK)
            stays(trainer, BLOCK)
        else:
            assert (found, session._snapshots.plan) == (None, None)
        assert trainer.fence().kind is OutcomeKind.SEALED
    assert not meanwhile, "both layouts were declared"
    plan(daemon, trainer, generation=1)


def test_plans_of_others_and_older_ones_are_not_taken(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    standing = trainer.session._standing
    plan(daemon, trainer, generation=5, windows=[BLOCK])
    assert daemon.token is not None
    daemon.push(CopyPlan(token=daemon.token, rank=0, generation=4, rung="windows"))
    daemon.push(CopyPlan(token=daemon.token, rank=1, generation=9, rung="windows"))
    daemon.push(CopyPlan(token=WireToken(9, INCARNATION), rank=0, generation=9, rung="windows"))
    plan(daemon, trainer, generation=6, windows=[2 * BLOCK])
    assert standing.plan is not None
    assert standing.plan.windows == [2 * BLOCK]


def test_the_plan_of_another_layout_is_dropped(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.session.windows.register("test")
    plan(daemon, trainer, generation=7, windows=[BLOCK], further=0)
    trainer.arrays["w0"] = trainer.arrays["w0"][: SIZE // 2].copy()
    trainer.build()
    begin(trainer)
    window(trainer, TOTAL - SIZE * 2)  # all of it: the budget was for other bytes
    assert trainer.fence().kind is OutcomeKind.SEALED
    plan(daemon, trainer, generation=1, windows=[2 * BLOCK])  # a daemon may count anew after it
    begin(trainer)
    assert timings(daemon, trainer, 2).plan == 0
    window(trainer, 2 * BLOCK)
    stays(trainer, 2 * BLOCK)


def test_a_restarted_daemon_counts_plans_anew(where: Places) -> None:
    with where.daemon() as daemon, Trainer(where, tensors=TENSORS, size=SIZE) as trainer:
        trainer.join()
        trainer.one_step()
        trainer.session.windows.register("test")
        plan(daemon, trainer, generation=9, windows=[BLOCK])
        daemon.stop()
        soon(lambda: trainer.session._standing.outages == 1, "the daemon is away")
        trainer.update()
        trainer.boundary()
        trainer.fence()
        assert trainer.session._standing.plan is not None, "the last plan stays"
        daemon.start()
        assert trainer.session._link.wait_up(10)
        begin(trainer)
        window(trainer, BLOCK)
        stays(trainer, BLOCK)
        plan(daemon, trainer, generation=1, windows=[3 * BLOCK])
        trainer.fence()
        begin(trainer)
        assert 1 not in [m.step for m in daemon.received if isinstance(m, Timings)], "nobody was there to hear of it"
        window(trainer, 3 * BLOCK)
        stays(trainer, 3 * BLOCK)


# ---------------------------------------------------------------- windows that misbehave


@pytest.mark.parametrize("left", [True, False])
def test_a_window_never_left_ends_at_the_fence_and_nothing_is_torn(
    trainer: Trainer, daemon: ScriptedDaemon, left: bool
) -> None:
    trainer.session.windows.register("test")
    begin(trainer)
    expected = trainer.bytes()
    trainer.session.windows.enter(RECV)
    assert trainer.fence().kind is OutcomeKind.SEALED
    for array in trainer.arrays.values():
        array += 1  # what changes after the fence is in no slot
    assert trainer.session.settle(20)
    image = daemon.image()
    with open(image.path, "rb") as file:
        saved = file.read()
    assert all(value in saved for value in expected.values())
    if left:
        trainer.session.windows.leave()
    stays(trainer, TOTAL)
    begin(trainer)
    stays(trainer, 0)
    assert trainer.fence().kind is OutcomeKind.SEALED
    assert trainer.session.counters.torn == 0


def test_windows_that_never_come_put_off_one_copy_and_no_more(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    """Without a plan: a source that promised windows and opens none."""
    trainer.session.windows.register("test")
    begin(trainer)
    stays(trainer, 0)
    assert trainer.fence().kind is OutcomeKind.SEALED
    begin(trainer)
    soon(lambda: progress(trainer) == TOTAL, "it is copied all the time again")
    with trainer.session.windows.waiting(RECV):
        pass
    trainer.fence()
    begin(trainer)
    stays(trainer, 0)
    trainer.fence()
    begin(trainer)
    assert [timings(daemon, trainer, step).at_fence for step in (2, 3, 4)] == [TOTAL, 0, TOTAL]


def test_windows_that_vanish_or_shrink_under_a_plan_are_overruns(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.session.windows.register("test")
    plan(daemon, trainer, windows=[8 * BLOCK, 8 * BLOCK])
    begin(trainer)
    window(trainer, 8 * BLOCK)
    assert trainer.fence().kind is OutcomeKind.SEALED  # the second did not come
    begin(trainer)
    window(trainer, 8 * BLOCK)
    window(trainer, 9 * BLOCK)  # too short: with the native engine it may have got a few blocks more
    assert trainer.fence().kind is OutcomeKind.SEALED
    begin(trainer)
    vanished, shrunk = timings(daemon, trainer, 2), timings(daemon, trainer, 3)
    assert (vanished.in_windows, vanished.at_fence, vanished.overruns) == (8 * BLOCK, 8 * BLOCK, 1)
    assert shrunk.in_windows + shrunk.at_fence == TOTAL
    assert shrunk.overruns == (shrunk.in_windows < TOTAL)
    assert trainer.session.counters.sealed == 3


def test_a_dropped_snapshot_leaves_no_window_open(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.session.windows.register("test")
    begin(trainer)
    trainer.session.windows.enter(RECV)
    trainer.session.cancel("a test")
    control = trainer.session._layout._control
    assert control is not None
    assert control.gate is Gate.CLOSED
    trainer.session.windows.leave()
    with trainer.session.windows.waiting(RECV):
        assert control.gate is Gate.CLOSED, "there is nothing to copy"
    begin(trainer)
    stays(trainer, 0)
    window(trainer, TOTAL)
    assert trainer.fence().kind is OutcomeKind.SEALED


def test_a_fenced_session_opens_nothing(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.session.windows.register("test")
    begin(trainer)
    daemon.push(Fence(token=WireToken(2, "f" * 32), reason="a newer start"))
    soon(lambda: trainer.session.fenced, "it is fenced")
    before = progress(trainer)
    with trainer.session.windows.waiting(RECV):
        pass
    assert trainer.fence().kind is OutcomeKind.SKIPPED
    trainer.update()
    assert trainer.boundary().kind in (OutcomeKind.SKIPPED, OutcomeKind.NOT_DUE)
    with trainer.session.windows.waiting(RECV):
        pass
    assert progress(trainer) == before


@pytest.mark.parametrize("armed", [True, False])
def test_when_the_session_is_over_windows_are_nothing(trainer: Trainer, armed: bool) -> None:
    trainer.session.windows.register("test")
    if armed:
        begin(trainer)
    trainer.session.windows.enter(RECV)
    trainer.close()
    trainer.session.windows.leave()
    with trainer.session.windows.waiting(RECV):
        pass
    assert not list(unpack_events(trainer.session.recorder.take()[0]))[1:], "one window, which ended with the session"


def test_a_forked_child_leaves_the_parents_gate_alone(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.session.windows.register("test")
    plan(daemon, trainer, windows=[BLOCK, BLOCK, BLOCK])
    begin(trainer)
    window(trainer, BLOCK)
    trainer.session.windows.enter(RECV)
    soon(lambda: progress(trainer) == 2 * BLOCK, "the second window's share")
    control = trainer.session._layout._control
    assert control is not None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            trainer.session.windows.leave()
            with trainer.session.windows.waiting(RECV):
                pass
            trainer.session.fence()
            trainer.session.pass_by(99)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    opened = control.get("window_opened")
    trainer.session.windows.leave()
    window(trainer, 3 * BLOCK)
    stays(trainer, 3 * BLOCK)
    assert trainer.fence().kind is OutcomeKind.SEALED
    if trainer.session._layout._engine is not None and trainer.session._layout._engine.name == "native":
        assert control.get("window_opened") == opened + 1
    begin(trainer)
    assert timings(daemon, trainer, 2).in_windows == 3 * BLOCK


# ---------------------------------------------------------------- what the daemon hears


def test_every_period_is_told_of_once_with_its_events(where: Places) -> None:
    with where.daemon(every=2) as daemon, Trainer(where) as trainer:
        trainer.join()
        session = trainer.session
        trainer.one_step()  # declares; no cadence is known before
        assert daemon.token is not None
        for step in range(2, 6):
            session.recorder.add(EventKind.FORWARD, 0, step - 1, 1, 2)
            trainer.fence()
            trainer.update()
            if session.due(step):
                trainer.wait_for_grant()
                trainer.boundary()
            else:
                trainer.step += 1
                session.pass_by(step)
        heard = [timings(daemon, trainer, step) for step in range(1, 5)]
    assert [message.copied for message in heard] == [True, True, False, True]
    for step, message in enumerate(heard, 1):
        events = list(unpack_events(message.events))
        assert [event.micro for event in events if event.kind is EventKind.FORWARD] == [step]
        (boundary,) = [event for event in events if event.kind is EventKind.BOUNDARY]
        assert EventKind.FENCE in kinds(message)
        assert boundary.end == message.begun + message.period
        assert message.held_ns > 0
        assert message.lost == 0
    for one, next_ in pairwise(heard):
        assert one.begun + one.period == next_.begun


def test_the_schedule_is_declared(where: Places, daemon: ScriptedDaemon) -> None:
    said = ScheduleSaid(name="Schedule1F1B", ranks=4, place=1, stages=4, own=[1], micro=8)
    with Trainer(where) as trainer:
        trainer.session.schedule = said
        trainer.join()
        trainer.one_step()
    assert daemon.wait_for(Declare)[0].schedule == said


def test_a_forced_snapshot_of_the_same_step_goes_on_with_its_period(where: Places) -> None:
    with where.daemon(every=4) as daemon, Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        trainer.wait_for_grant()
        trainer.update()
        assert trainer.boundary().kind is OutcomeKind.NOT_DUE
        trainer.step -= 1
        assert trainer.boundary(force=True).kind is OutcomeKind.BEGAN
        trainer.fence()
        trainer.update()
        trainer.boundary()
        assert timings(daemon, trainer, 2).copied
        assert [message.step for message in daemon.wait_for(Begin, count=2)] == [1, 2]


def test_what_a_step_was_goes_with_what_the_boundary_says(where: Places, daemon: ScriptedDaemon) -> None:
    """The I/O thread is woken once: the timings lie before the Begin of the same boundary."""
    with Trainer(where) as trainer:
        trainer.join()
        for _ in range(3):
            trainer.update()
            trainer.boundary()
            trainer.fence()
            trainer.wait_for_grant()
        daemon.wait_for(Seal, count=3)
    order = [
        (type(message).__name__, message.step)
        for message in daemon.received
        if isinstance(message, Timings | Begin | Seal)
    ]
    assert order == [
        ("Begin", 1), ("Seal", 1), ("Timings", 1), ("Begin", 2), ("Seal", 2), ("Timings", 2), ("Begin", 3), ("Seal", 3),
    ]  # fmt: skip


def test_periods_in_which_something_else_went_on_are_told_apart(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()

        def step() -> None:
            trainer.update()
            if trainer.step:
                trainer.wait_for_grant()
            trainer.boundary()

        step()
        trainer.fence()
        step()  # 1 ends
        with trainer.session.paused():
            pass
        step()  # 2 ends
        trainer.fence()
        with trainer.session.paused():
            trainer.boundary()  # 3 ends
            trainer.boundary()  # 4 ends
        trainer.boundary()  # 5 ends
        trainer.fence()
        trainer.session.save(durable=False)
        step()  # 6 ends
        trainer.fence()
        step()  # 7 ends
        told = [timings(daemon, trainer, step).apart for step in range(1, 8)]
    assert told == [False, True, True, True, True, True, False]


def test_lost_events_are_told_of(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        trainer.session.recorder.add(EventKind.FORWARD, 0, 0, -5, 1)
        trainer.boundary()
        assert timings(daemon, trainer, 1).lost == 1


# ---------------------------------------------------------------- overruns


def spans(*copied: tuple[EventKind, int, int]) -> bytes:
    return b"".join(pack_event(Event(kind, -1, micro, at, at + 1, amount)) for at, (kind, micro, amount) in
                    enumerate(copied))  # fmt: skip


INSIDE, OUTSIDE, FENCE = EventKind.COPY_INSIDE, EventKind.COPY_OUTSIDE, EventKind.COPY_FENCE


@pytest.mark.parametrize(
    ("granted", "copied", "planned", "expected"),
    [
        ([10, 10], spans((INSIDE, 0, 10), (INSIDE, 1, 10)), [10, 10], 0),
        ([10, 10], spans((INSIDE, 0, 4), (INSIDE, 1, 10), (FENCE, -1, 6)), [10, 10], 1),
        ([10, 10], spans((FENCE, -1, 20)), [10, 10], 2),
        ([10], spans((INSIDE, 0, 10), (FENCE, -1, 10)), [10, 10], 1),  # the second did not come
        ([10], spans((INSIDE, 0, 10), (FENCE, -1, 10)), [10], 0),  # the plan left it to the fence
        ([10, 0, 10], spans((INSIDE, 0, 10), (INSIDE, 2, 10)), [10, 0, 10], 0),
        ([10, 10, 10], spans((INSIDE, 0, 10), (INSIDE, 1, 10)), [10, 10, 10], 0),  # nothing was left for the third
        ([NO_LIMIT, NO_LIMIT], spans((INSIDE, 0, 2), (FENCE, -1, 18)), None, 0),
        ([10, 10], spans((INSIDE, 0, 10), (OUTSIDE, -1, 4), (INSIDE, 1, 6)), [10, 10], 0),  # done by then
        ([], spans((OUTSIDE, -1, 20)), [], 0),
    ],
)
def test_overruns(granted: list[int], copied: bytes, planned: list[int] | None, expected: int) -> None:
    token = WireToken(1, INCARNATION)
    in_force = None if planned is None else CopyPlan(token=token, rank=0, generation=1, rung="windows", windows=planned)
    at_fence = sum(event.amount for event in unpack_events(copied) if event.kind is FENCE)
    assert overruns(granted, Copied(20, 0, 0, at_fence, copied), in_force) == expected
