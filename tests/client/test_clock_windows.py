"""Clock-anchored windows: only behind a gate that has been seen to fire, and by the copying thread's own clock."""

from __future__ import annotations

import threading

import pytest

from baft_client.source import OutcomeKind
from baftd.pipeline.events import EventKind, unpack_events
from baftd.wire.messages import CopyPlan, Skip, Timings
from tests.support.engines import soon
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.trainer import Trainer

BLOCK = 256 << 10
TENSORS, SIZE = 4, 256 << 10
TOTAL = TENSORS * SIZE * 4
MS = 1_000_000
LATER = 3_600_000 * MS
"""An hour: a window that does not come in a test."""


@pytest.fixture
def daemon(scripted: ScriptedDaemon) -> ScriptedDaemon:
    return scripted


def plan(daemon: ScriptedDaemon, trainer: Trainer, *timed: tuple[int, int, int], generation: int = 1) -> None:
    assert daemon.token is not None
    daemon.push(CopyPlan(token=daemon.token, rank=0, generation=generation, rung="windows", timed=list(timed)))
    standing = trainer.session._standing
    soon(lambda: standing.plan is not None and standing.plan.generation == generation, "the plan is there")


def begin(trainer: Trainer) -> None:
    trainer.wait_for_grant()
    assert trainer.boundary().kind is OutcomeKind.BEGAN


def launch(trainer: Trainer, *, fires: bool = True, thread: bool = False) -> None:
    """A step in one piece: the update lies in it, with or without a gate in front of it."""
    if fires:
        if thread:
            gate = threading.Thread(target=lambda: trainer.session.clock_windows.gate_fired(trainer.updates))
            gate.start()
            gate.join(20)
            assert not gate.is_alive()
        else:
            trainer.session.clock_windows.gate_fired(trainer.updates)
    trainer.update()


def progress(trainer: Trainer) -> int:
    engine = trainer.session._layout._engine
    assert engine is not None
    return engine.progress()


def learn(trainer: Trainer) -> None:
    """A step in which the gate is seen."""
    assert not trainer.session.clock_windows.step_begin()
    launch(trainer)
    assert trainer.session.clock_windows.believed


def test_without_a_gate_everything_is_copied_before_the_launch(
    trainer: Trainer, daemon: ScriptedDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    plan(daemon, trainer, (0, LATER, BLOCK))
    for _ in range(3):
        begin(trainer)
        assert not trainer.session.clock_windows.step_begin()
        assert progress(trainer) == TOTAL
        launch(trainer, fires=False)
    counters = trainer.session.counters
    assert (counters.sealed, counters.torn, counters.skipped) == (4, 0, {})
    assert caplog.text.count("no_gate") == 1, "said once"


def test_behind_a_gate_that_was_seen_the_plan_is_carried_out(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    learn(trainer)
    plan(daemon, trainer, (0, LATER, 3 * BLOCK), (LATER, 2 * LATER, BLOCK))
    begin(trainer)
    assert trainer.session.clock_windows.step_begin()
    soon(lambda: progress(trainer) == 3 * BLOCK, "the first window's bytes, with no thread of ours awake")
    threading.Event().wait(0.03)
    assert progress(trainer) == 3 * BLOCK
    launch(trainer, thread=True)
    assert trainer.session.counters.sealed == 2
    begin(trainer)
    trainer.session._link._wake()
    soon(lambda: any(isinstance(m, Timings) and m.step == 2 for m in daemon.received), "its timings")
    (heard,) = [m for m in daemon.received if isinstance(m, Timings) and m.step == 2]
    assert (heard.in_windows, heard.at_fence, heard.overruns) == (3 * BLOCK, TOTAL - 3 * BLOCK, 1)
    inside = [event for event in unpack_events(heard.events) if event.kind is EventKind.COPY_INSIDE]
    assert {event.micro for event in inside} == {0}
    windows = [event for event in unpack_events(heard.events) if event.kind is EventKind.WINDOW]
    assert [(event.micro, event.amount) for event in windows] == [(0, 3 * BLOCK), (1, BLOCK)]
    assert windows[0].end - windows[0].begin == LATER


def test_a_launch_whose_gate_stays_silent_costs_the_snapshot_and_the_trust(
    trainer: Trainer, daemon: ScriptedDaemon
) -> None:
    learn(trainer)
    plan(daemon, trainer, (LATER, 2 * LATER, BLOCK))
    begin(trainer)
    assert trainer.session.clock_windows.step_begin()
    launch(trainer, fires=False)
    begin(trainer)
    skip = daemon.wait_for(Skip)[0]
    assert skip.step == 2
    assert "gate" in skip.reason
    assert not trainer.session.clock_windows.step_begin(), "not believed any more"
    assert progress(trainer) == TOTAL
    launch(trainer)
    begin(trainer)
    assert trainer.session.clock_windows.step_begin(), "seen again, believed again"
    launch(trainer)
    counters = trainer.session.counters
    assert (counters.sealed, counters.torn) == (3, 0)


def test_a_fence_after_a_launch_without_its_gate_seals_nothing(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    learn(trainer)
    begin(trainer)
    assert trainer.session.clock_windows.step_begin()
    for array in trainer.arrays.values():
        array += 1  # an update that no counter tells of
    assert trainer.fence().kind is OutcomeKind.NOTHING
    assert daemon.wait_for(Skip)[0].step == 2
    assert trainer.session.counters.sealed == 1


def test_windows_move_with_a_launch_that_comes_late(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    clock, at = trainer.session.clock_windows, [0]
    clock._now = lambda: trainer.session._periods.begun + at[0]
    learn(trainer)
    plan(daemon, trainer, (LATER, LATER + 5 * MS, BLOCK))
    begins = []
    for at[0] in (2 * MS, 2 * MS, 2 * MS, 2 * MS, 9 * MS):
        begin(trainer)
        start = trainer.session._periods.begun
        assert clock.step_begin()
        launch(trainer)
        events = trainer.session.recorder.take()[0]
        begins += [event.begin - start for event in unpack_events(events) if event.kind is EventKind.WINDOW]
    assert begins[-1] == LATER + 7 * MS
    assert begins[-2] == LATER


def test_a_plan_that_makes_no_sense_costs_no_step(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    learn(trainer)
    plan(daemon, trainer, (LATER, 1, BLOCK))
    begin(trainer)
    assert not trainer.session.clock_windows.step_begin()
    launch(trainer)
    begin(trainer)
    assert trainer.session.counters.sealed == 1
    assert sum(trainer.session.counters.skipped.values()) == 1


def test_nothing_is_said_of_a_launch_without_a_snapshot(trainer: Trainer) -> None:
    clock = trainer.session.clock_windows
    learn(trainer)
    assert not clock.step_begin()
    launch(trainer, fires=False)
    assert not clock.missed(), "there was nothing to lose"
    assert not clock.believed
