"""What goes wrong: torn states, no daemon, no slot, no room, a newer start. Training goes on; strict raises."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest

from baft_client.engine import EngineHooks
from baft_client.shard_writer import ALL_WITNESSES
from baft_client.source import OutcomeKind
from baftd.errors import (
    BaftError,
    Degraded,
    Fenced,
    NoRoom,
    StateTreeError,
    TornSnapshot,
    Unreachable,
)
from baftd.memory.header import SlotState
from baftd.wire.messages import Begin, Committed, Declare, Fence, Grant, Hello, NoGrant, Seal, Skip, WireToken
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.trainer import INCARNATION, Places, Trainer


@pytest.fixture
def daemon(scripted: ScriptedDaemon) -> ScriptedDaemon:
    return scripted


def wait_for(ready: Callable[[], object], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---------------------------------------------------------------- the witnesses


def few_rows(trainer: Trainer) -> None:
    trainer.arrays["w1"][501:504] = -1  # none of the 16 sampled elements


def by_pointer(trainer: Trainer) -> None:
    trainer.arrays["w1"] += 1


def swapped(trainer: Trainer) -> None:
    trainer.arrays["w1"] = trainer.arrays["w1"].copy()


def versioned(trainer: Trainer) -> None:
    trainer.versions["w1"] += 1


def counted(trainer: Trainer) -> None:
    trainer.updates += 1


CATCHES: dict[Callable[[Trainer], None], set[str]] = {
    # what happens between boundary and fence -> which witness alone sees it
    counted: {"updates"},
    versioned: {"identity"},
    swapped: {"identity"},
    by_pointer: {"canary", "audit"},
    few_rows: {"audit"},
}


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("witness", [*sorted(ALL_WITNESSES), "audit", "none"])
@pytest.mark.parametrize("change", CATCHES, ids=lambda change: change.__name__)
def test_each_witness_alone_catches_its_own_and_no_other(
    where: Places, daemon: ScriptedDaemon, change: Callable[[Trainer], None], witness: str, engine: str
) -> None:
    witnesses = frozenset({witness}) & ALL_WITNESSES
    with Trainer(where, witnesses=witnesses, audit=int(witness == "audit"), engine=engine) as trainer:
        trainer.join()
        trainer.update()
        assert trainer.boundary().kind is OutcomeKind.BEGAN
        change(trainer)
        outcome = trainer.fence()
        if witness not in CATCHES[change]:
            assert outcome.kind is OutcomeKind.SEALED
            return
        assert outcome.kind is OutcomeKind.TORN
        assert outcome.reason.startswith(f"{witness}: ")
        assert outcome.name == ("" if change is counted else "w1")
        assert not outcome
        assert trainer.session.counters.torn == 1
        assert trainer.session.counters.skipped == {"torn": 1}
        skip = daemon.wait_for(Skip)[0]
        begin = daemon.wait_for(Begin)[0]
        assert (skip.torn, skip.step, skip.slot, skip.generation) == (True, 1, begin.slot, begin.generation)
        if outcome.name:
            assert "'w1'" in skip.reason
        header = daemon.ranks[0].files[begin.slot].read_header()
        assert header is not None
        assert header.state is SlotState.FILLING, "a torn slot never says SEALED"
        trainer.wait_for_grant()
        assert trainer.one_step().kind is OutcomeKind.SEALED, "the next one is sound"


@pytest.mark.parametrize("engine", ["native", "python"])
def test_audit_sees_a_write_that_came_before_the_copy(where: Places, daemon: ScriptedDaemon, engine: str) -> None:
    """Slot and source agree then; only what the boundary saw tells."""
    hooks = EngineHooks(hold=True)
    with Trainer(where, audit=1, witnesses=frozenset(), engine=engine, engine_hooks=hooks) as trainer:
        trainer.join()
        trainer.boundary()
        few_rows(trainer)  # the engine is held before its first chunk
        control = trainer.session._layout._control
        assert control is not None
        control.set("hold_at", 1 << 62)
        outcome = trainer.fence()
        assert (outcome.kind, outcome.name) == (OutcomeKind.TORN, "w1")
        assert "not what the boundary saw" in outcome.reason


def test_recheck_reads_all_identities_at_once(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        stable = [name for name in trainer.arrays if name != "buffer"]
        recheck = lambda: (trainer.identity(name) for name in stable)  # noqa: E731
        trainer.boundary(recheck=recheck)
        assert trainer.fence().kind is OutcomeKind.SEALED
        trainer.wait_for_grant()
        trainer.boundary(recheck=recheck)
        trainer.versions["w2"] += 1
        outcome = trainer.fence()
        assert (outcome.kind, outcome.name) == (OutcomeKind.TORN, "w2")
        trainer.wait_for_grant()
        trainer.boundary(recheck=list)
        assert trainer.fence().reason.startswith("identity: ")


def test_a_copy_that_does_not_end_in_time_is_dropped(
    where: Places, daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baft_client.snapshotting.FLUSH_TIMEOUT", 0.2)
    with Trainer(where, engine_hooks=EngineHooks(hold=True)) as trainer:
        trainer.join()
        trainer.boundary()
        outcome = trainer.fence()
        assert outcome.kind is OutcomeKind.TORN
        assert outcome.reason.startswith("late: 0 of 12000 bytes")
        assert trainer.session.counters.skipped == {"late": 1}
        assert trainer.session.counters.torn == 0
        assert not daemon.wait_for(Skip)[0].torn


def test_storages_are_held_until_the_seal(where: Places, daemon: ScriptedDaemon) -> None:
    """Dropping the array between boundary and fence must not pull the memory away under the engine."""
    import sys
    import weakref

    class Storage(np.ndarray[Any, Any]):  # weakly referable
        pass

    with Trainer(where, witnesses=frozenset(), engine_hooks=EngineHooks(hold=True)) as trainer:
        trainer.join()
        held = np.arange(1000, dtype=np.float32).view(Storage)
        trainer.arrays["w1"] = held
        trainer.boundary()
        gone = weakref.ref(held)
        trainer.arrays["w1"] = np.zeros(1000, dtype=np.float32)
        for source in trainer.sources:
            source.keep = None
        del held
        assert gone() is not None, sys.getrefcount(gone())
        control = trainer.session._layout._control
        assert control is not None
        control.set("hold_at", 1 << 62)
        assert trainer.fence().kind is OutcomeKind.SEALED
        assert gone() is None


# ---------------------------------------------------------------- no slot, no room, no small state


def test_no_grant_is_a_skip_with_the_daemons_words(where: Places, caplog: pytest.LogCaptureFixture) -> None:
    with where.daemon(slots=2) as daemon, Trainer(where) as trainer:
        trainer.join()
        daemon.commit = False
        trainer.one_step()
        trainer.wait_for_grant()
        trainer.one_step()
        daemon.wait_for(Seal, count=2)
        assert daemon.token is not None
        daemon.push(NoGrant(token=daemon.token, reason="slot 0 is pinned for step 1, 3 s old"))
        wait_for(lambda: trainer.session._standing.no_grant)
        for _ in range(3):
            outcome = trainer.one_step()
            assert outcome.kind is OutcomeKind.SKIPPED
            assert "slot 0 is pinned for step 1, 3 s old" in outcome.reason
        assert trainer.session.counters.skipped == {"no_slot": 3}
        trainer.fence()  # step 5 could still have been taken until now
        assert [skip.step for skip in daemon.wait_for(Skip, count=3)] == [3, 4, 5]
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and "no_slot" in r.getMessage()]
    assert len(warned) == 1, "once for each kind, then counted"


def test_a_grant_is_used_once(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        begin = daemon.wait_for(Begin)[0]
        trainer.wait_for_grant()
        before = trainer.session._standing.granted
        assert daemon.token is not None
        daemon.push(Grant(token=daemon.token, slot=begin.slot, generation=begin.generation))
        daemon.push(Committed(token=daemon.token, step=1, tier="durable"))
        wait_for(lambda: trainer.session._standing.committed.get("durable") == 1)
        assert trainer.session._standing.granted == before, "said twice, it would write into a sealed slot"


def test_no_room_is_told_once_and_not_asked_for_at_every_step(where: Places, daemon: ScriptedDaemon) -> None:
    daemon.refuse[Declare] = NoRoom("3 slots of 10 GB need 30 GB, /dev/shm has 1 GB.", hint="Enlarge it.")
    with Trainer(where) as trainer:
        trainer.join()
        for _ in range(3):
            outcome = trainer.one_step()
            assert outcome.kind is OutcomeKind.SKIPPED
            assert "3 slots of 10 GB need 30 GB" in outcome.reason
        assert len(daemon.wait_for(Declare)) == 1
        assert trainer.session.counters.skipped == {"no_room": 3}
        assert "no_room" in daemon.wait_for(Skip)[0].reason
        daemon.refuse.clear()
        trainer.session._snapshots.declare_again = 0.0
        assert trainer.one_step().kind is OutcomeKind.SEALED


def test_the_former_layout_is_declared_anew_where_another_found_no_room(where: Places, daemon: ScriptedDaemon) -> None:
    """Its slots may have gone to make room for the other."""
    with Trainer(where) as trainer:
        trainer.join()
        assert trainer.one_step().kind is OutcomeKind.SEALED
        daemon.refuse[Declare] = NoRoom("12 GB are needed")
        trainer.small["more"] = b"x" * (8 << 20)
        assert "12 GB" in trainer.one_step().reason
        del trainer.small["more"]
        daemon.refuse.clear()
        trainer.session._snapshots.declare_again = 0.0
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert trainer.session.counters.declares == 2


def test_small_state_that_is_not_data_skips_with_its_path(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.small["schedule"] = {"lambdas": [lambda: 1]}
        outcome = trainer.one_step()
        assert outcome.kind is OutcomeKind.SKIPPED
        assert "schedule" in outcome.reason
        assert "lambdas" in outcome.reason
        del trainer.small["schedule"]
        assert trainer.one_step().kind is OutcomeKind.SEALED


def test_an_unexpected_failure_of_ours_stays_ours(
    where: Places, daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        trainer.wait_for_grant()
        writer = trainer.session._layout.writer
        assert writer is not None

        def broken(*args: object, **options: object) -> None:
            raise ZeroDivisionError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(writer, "begin", broken)
            assert trainer.boundary().reason == "error: ZeroDivisionError: a bug"
        assert daemon.wait_for(Skip)[0].slot is not None, "the granted slot must not be lost"
        trainer.wait_for_grant()
        assert trainer.boundary().kind is OutcomeKind.BEGAN
        with monkeypatch.context() as patch:
            patch.setattr(writer, "seal", broken)
            assert trainer.fence().reason == "error: ZeroDivisionError: a bug"
        assert "session_failed" in caplog.text
        assert "Traceback" in caplog.text
        assert trainer.session.counters.skipped == {"error": 2}


def test_a_step_without_a_slot_may_still_be_taken_until_the_state_changes(where: Places) -> None:
    with where.daemon(slots=2) as daemon, Trainer(where, strict=True) as trainer:
        trainer.join()
        trainer.one_step()
        assert trainer.session.settle(5)
        daemon.commit = False
        trainer.one_step()
        daemon.wait_for(Seal, count=2)
        trainer.update()
        assert trainer.boundary().reason.startswith("no_slot")
        assert not trainer.session.taken(3)
        seal = daemon.wait_for(Seal, count=2)[1]
        assert daemon.token is not None
        daemon.ranks[0].free.append(seal.slot)
        daemon.push(Grant(token=daemon.token, slot=seal.slot, generation=seal.generation + 1))
        daemon.ranks[0].granted[seal.slot] = seal.generation + 1
        trainer.step -= 1
        assert trainer.boundary(force=True).kind is OutcomeKind.BEGAN, "waits for the slot"
        assert trainer.session.taken(3)
        assert trainer.session.counters.skipped == {}
        assert trainer.fence().kind is OutcomeKind.SEALED
        assert daemon.wait_for(Seal, count=3)[2].step == 3
        assert not [message for message in daemon.received if isinstance(message, Skip)]


# ---------------------------------------------------------------- strict


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("no_slot", Degraded, "no_slot"),
        ("no_room", NoRoom, "30 GB"),
        ("torn", TornSnapshot, "step 1"),
        ("small", StateTreeError, "schedule"),
        ("no_daemon", Unreachable, "no_daemon"),
        ("bug", BaftError, "ZeroDivisionError"),
    ],
)
def test_strict_raises_at_the_next_call(
    where: Places,
    daemon: ScriptedDaemon,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: type[Exception],
    words: str,
) -> None:
    with Trainer(where, strict=True) as trainer:
        trainer.join()
        if fault == "no_slot":
            daemon.grant = False
        elif fault == "no_room":
            daemon.refuse[Declare] = NoRoom("30 GB are needed")
        elif fault == "small":
            trainer.small["schedule"] = print
        elif fault == "no_daemon":
            daemon.stop()
            wait_for(lambda: trainer.session._standing.outages)
        elif fault == "bug":
            monkeypatch.setattr("baftd.checkpoint.state_tree.encode", lambda value: 1 // 0)
        outcome = trainer.boundary()
        if fault == "torn":
            trainer.updates += 1
            outcome = trainer.fence()
        assert not outcome, "this call does not raise"
        with pytest.raises(error, match=words):
            trainer.boundary()


# ---------------------------------------------------------------- a daemon that goes and comes


def test_training_goes_on_without_the_daemon_and_says_so_once(where: Places, caplog: pytest.LogCaptureFixture) -> None:
    daemon = where.daemon().start()
    with Trainer(where) as trainer:
        trainer.join()
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert trainer.session.settle(5)
        for outage in (1, 2):
            daemon.stop()
            wait_for(lambda: trainer.session._standing.outages == outage)  # noqa: B023
            took = []
            for _ in range(20):
                began = time.perf_counter()
                assert trainer.one_step().kind is OutcomeKind.SKIPPED
                took.append(time.perf_counter() - began)
            assert median(took) < 0.5, "nothing waits"
            daemon.start()
            trainer.wait_for_grant()
            assert trainer.one_step().kind is OutcomeKind.SEALED
            assert trainer.session.settle(5)
        assert trainer.session.counters.skipped == {"no_daemon": 40}
        assert trainer.session.counters.declares == 1, "the slots are still there"
    assert len([r for r in caplog.records if "event=daemon_away" in r.getMessage()]) == 2
    assert len([r for r in caplog.records if "kind=no_daemon" in r.getMessage() and r.levelno >= logging.WARNING]) == 2
    assert [hello.token is not None for hello in daemon.wait_for(Hello, count=3)] == [False, True, True]
    daemon.close()


def test_a_copy_in_progress_is_sealed_with_the_new_daemon(where: Places) -> None:
    daemon = where.daemon().start()
    with Trainer(where) as trainer:
        trainer.join()
        trainer.boundary()
        daemon.wait_for(Begin)
        daemon.stop()
        wait_for(lambda: trainer.session._standing.outages)
        expected = trainer.bytes()
        assert trainer.fence().kind is OutcomeKind.SEALED
        daemon.start()
        assert daemon.wait_for(Seal)[0].step == 1
        assert len(daemon.wait_for(Begin, count=2)) == 2, "unacknowledged messages are sent again, in order"
        assert trainer.session.settle(5)
        kinds = [type(message).__name__ for message in daemon.received if isinstance(message, Hello | Begin | Seal)]
        assert kinds == ["Hello", "Begin", "Hello", "Begin", "Seal"]
        image = daemon.image()
        with open(image.path, "rb") as file:
            data = file.read()
        assert all(value in data for value in expected.values())
        trainer.session.fence()
    daemon.close()


def test_sealed_but_uncommitted_steps_are_told_again_and_committed_ones_not(where: Places) -> None:
    daemon = where.daemon().start()
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        assert trainer.session.settle(5)
        daemon.commit = False
        trainer.one_step()
        daemon.wait_for(Seal, count=2)
        daemon.stop()
        daemon.received.clear()
        daemon.start()
        hello = daemon.wait_for(Hello)[0]
        assert hello.token == daemon.token
        daemon.wait_for(Seal)
        assert [m.step for m in daemon.received if isinstance(m, Begin | Seal)] == [2, 2]
        trainer.session.close()
    daemon.close()


def test_a_long_outage_keeps_seals_rather_than_skips(where: Places) -> None:
    daemon = where.daemon().start()
    with Trainer(where) as trainer:
        trainer.join()
        daemon.commit = False
        trainer.one_step()
        daemon.wait_for(Seal)
        daemon.stop()
        wait_for(lambda: trainer.session._standing.outages)
        for _ in range(200):
            trainer.one_step()
        trainer.fence()
        daemon.received.clear()
        daemon.start()
        assert daemon.wait_for(Seal)[0].step == 1
        skips = daemon.wait_for(Skip, count=62)
        assert skips[-1].step == trainer.step
        trainer.session.close()
    daemon.close()


def test_a_daemon_that_lost_the_layout_gets_it_again(where: Places) -> None:
    daemon = where.daemon().start()
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        assert trainer.session.settle(5)
        daemon.stop()
        for shard in daemon.ranks.values():
            for file in shard.files:
                file.close()
        for path in where.shm.glob("rank-*"):
            path.unlink()
        daemon.knows_layout = False
        daemon.start()
        wait_for(lambda: trainer.session._standing.must_declare)
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert trainer.session.settle(5)
        assert len(daemon.wait_for(Declare, count=2)) == 2
    daemon.close()


def test_a_daemon_that_forgot_the_connection_is_greeted_again(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        assert trainer.session.settle(5)
        assert daemon._loop is not None
        assert daemon.server is not None
        daemon._loop.call_soon_threadsafe(daemon.server.forget, daemon.peers[0])
        trainer.wait_for_grant()
        trainer.one_step()
        assert daemon.wait_for(Hello, count=2)[1].token == daemon.token
        daemon.wait_for(Seal, count=2)


def test_a_frozen_daemon_is_given_up_and_found_again(where: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baft_client.io_thread.SILENCE", 0.5)
    monkeypatch.setattr("baft_client.io_thread.PING_EVERY", 0.1)
    with where.daemon() as daemon, Trainer(where) as trainer:
        trainer.session._link._silence, trainer.session._link._ping_every = 0.5, 0.1
        trainer.join()
        assert daemon._loop is not None
        daemon._loop.call_soon_threadsafe(time.sleep, 1.5)
        wait_for(lambda: trainer.session._standing.outages)
        daemon.wait_for(Hello, count=2)
        wait_for(lambda: trainer.session._link.state.value == "up")
        assert trainer.one_step().kind is OutcomeKind.SEALED


# ---------------------------------------------------------------- fenced


@pytest.mark.parametrize("how", ["message", "welcome", "refusal"])
def test_a_fenced_session_writes_nothing_more_and_lives(where: Places, how: str) -> None:
    daemon = where.daemon().start()
    with Trainer(where, engine_hooks=EngineHooks(hold=True)) as trainer:
        trainer.join()
        trainer.boundary()
        begin = daemon.wait_for(Begin)[0]
        if how == "message":
            daemon.push(Fence(token=WireToken(2, "ab" * 16), reason="start 2 of the job has taken over"))
        else:
            daemon.stop()
            if how == "welcome":
                daemon.fenced = True
            else:
                daemon.refuse[Hello] = Fenced("start 2 of the job has taken over")
            daemon.start()
        wait_for(lambda: trainer.session.fenced)
        before = open(daemon.ranks[0].files[begin.slot].path, "rb").read()  # noqa: SIM115
        control = trainer.session._layout._control
        assert control is not None
        control.set("hold_at", 1 << 62)
        assert trainer.fence().reason.startswith("fenced")
        for _ in range(3):
            assert trainer.one_step().reason.startswith("fenced")
        assert not trainer.session.due(trainer.step + 1)
        after = open(daemon.ranks[0].files[begin.slot].path, "rb").read()  # noqa: SIM115
        assert after == before, "an older start may write nothing"
        assert not [m for m in daemon.received if isinstance(m, Seal)]
        if how != "welcome":
            with pytest.raises(Fenced):
                trainer.session.save()
    daemon.close()


def test_fences_of_older_starts_are_not_for_us(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        daemon.push(Fence(token=WireToken(1, "ab" * 16), reason="not newer"))
        daemon.push(Committed(token=WireToken(1, "ab" * 16), step=99, tier="memory"))
        trainer.wait_for_grant()
        assert trainer.session.settle(5)
        assert not trainer.session.fenced
        assert trainer.session._standing.committed["memory"] == 1


def test_fenced_is_raised_by_a_strict_session(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where, strict=True) as trainer:
        trainer.join()
        trainer.one_step()
        daemon.push(Fence(token=WireToken(2, INCARNATION), reason="taken over"))
        wait_for(lambda: trainer.session.fenced)
        trainer.boundary()
        with pytest.raises(Fenced, match="taken over"):
            trainer.boundary()
