"""A rank that hears late of another cadence says which steps it has left out, so that none stays open for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from baft_client.source import OutcomeKind
from baftd.errors import BaftError, LayoutError, NoRoom, TryAgain, Unreachable
from baftd.wire.messages import Begin, Cadence, Declare, Seal, Skip, Timings
from tests.support.engines import soon
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.trainer import Places, Trainer


def started(where: Places, daemon: ScriptedDaemon) -> Trainer:
    """A rank that takes every 10th step, and has made 14 of them."""
    trainer = Trainer(where).join()
    trainer.one_step()  # declares, and learns the cadence
    for _ in range(13):
        trainer.one_step()
        assert trainer.session.settle(5)
    assert [message.step for message in daemon.wait_for(Begin)] == [1, 10]
    return trainer


def push(trainer: Trainer, daemon: ScriptedDaemon, from_step: int, every: int, probe: int = 0) -> None:
    assert daemon.token is not None
    earlier = [(0, daemon.every, 0)]
    daemon.push(Cadence(token=daemon.token, from_step=from_step, every=every, probe=probe, earlier=earlier))
    standing = trainer.session._standing
    with standing.changed:
        known = standing.changed.wait_for(lambda: standing._cadence and standing._cadence.from_step == from_step, 5)
    assert known


def test_a_late_cadence_is_answered_with_the_newest_step_that_was_left_out(where: Places) -> None:
    with where.daemon(every=10) as daemon, started(where, daemon) as trainer:
        push(trainer, daemon, 11, 3)
        said = daemon.wait_for(Skip)[0]
        assert said.step == 12, "14 and 13 are not taken by it"
        assert "cadence" in said.reason
        assert trainer.session._standing.late_cadences == 1
        assert trainer.one_step().kind is OutcomeKind.SEALED, "step 15 is taken as everywhere"


def test_the_step_that_the_rank_is_at_stays_open_until_its_state_changes(where: Places) -> None:
    with where.daemon(every=10) as daemon, started(where, daemon) as trainer:
        push(trainer, daemon, 11, 7)
        trainer.step -= 1
        assert trainer.boundary(force=True).kind is OutcomeKind.BEGAN, "14 is taken by it, and may still be"
        assert trainer.fence().kind is OutcomeKind.SEALED
        assert [message.step for message in daemon.wait_for(Seal, count=3)][-1] == 14
        assert not [message for message in daemon.received if isinstance(message, Skip)]


@pytest.mark.parametrize("change", ["fence", "boundary", "finish"])
def test_an_open_step_is_told_of_when_its_state_changes(where: Places, change: str) -> None:
    with where.daemon(every=10) as daemon, started(where, daemon) as trainer:
        push(trainer, daemon, 11, 7)
        {"fence": trainer.fence, "boundary": trainer.one_step, "finish": trainer.session.finish}[change]()
        assert [said.step for said in daemon.wait_for(Skip)] == [14]


def test_steps_before_an_open_one_are_told_of_at_once(where: Places) -> None:
    with where.daemon(every=10) as daemon, started(where, daemon) as trainer:
        push(trainer, daemon, 10, 2)
        assert [said.step for said in daemon.wait_for(Skip)] == [12]
        trainer.step -= 1
        assert trainer.boundary(force=True).kind is OutcomeKind.BEGAN
        assert trainer.fence().kind is OutcomeKind.SEALED
        assert [said.step for said in daemon.wait_for(Seal, count=3)][-1] == 14


def test_a_cadence_that_comes_in_time_needs_no_skip(where: Places) -> None:
    with where.daemon(every=10) as daemon, started(where, daemon) as trainer:
        push(trainer, daemon, 15, 1)
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert daemon.wait_for(Begin, count=3)[-1].step == 15
        assert trainer.session._standing.late_cadences == 0
        assert not [message for message in daemon.received if isinstance(message, Skip)]


def test_a_step_that_was_forced_is_not_called_left_out(where: Places) -> None:
    with where.daemon(every=10) as daemon, started(where, daemon) as trainer:
        assert trainer.boundary(force=True).kind is OutcomeKind.BEGAN
        push(trainer, daemon, 15, 1)
        assert trainer.fence().kind is OutcomeKind.SEALED
        trainer.wait_for_grant()
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert daemon.wait_for(Begin, count=4)[-1].step == 16
        assert not [message for message in daemon.received if isinstance(message, Skip)]


def test_each_period_tells_which_cadence_the_rank_goes_by(where: Places) -> None:
    with where.daemon(every=10) as daemon, started(where, daemon) as trainer:
        assert {message.cadence for message in daemon.wait_for(Timings, count=12)[1:]} == {(0, 10, 0)}
        push(trainer, daemon, 21, 4, 3)
        heard = len(daemon.wait_for(Timings))
        trainer.one_step()
        trainer.one_step()
        assert daemon.wait_for(Timings, count=heard + 2)[-1].cadence == (21, 4, 3)


# ---------------------------------------------------------------- the first boundary, where the cadence leaves it out


def early(where: Places, daemon: ScriptedDaemon, **session: Any) -> Trainer:
    """A rank that knows before its first boundary that only every 10th step is taken."""
    trainer = Trainer(where, **session).join()
    assert daemon.token is not None
    daemon.push(Cadence(token=daemon.token, from_step=0, every=10))
    soon(lambda: not trainer.session.due(1), "the cadence is heard of")
    return trainer


def test_the_layout_is_declared_at_the_first_boundary_though_no_snapshot_is_due(where: Places) -> None:
    with where.daemon(every=10) as daemon, early(where, daemon) as trainer:
        session = trainer.session
        assert session.undeclared
        for _ in range(9):
            assert trainer.one_step().kind is OutcomeKind.NOT_DUE
            assert not session.undeclared
        assert len(daemon.wait_for(Declare)) == session.counters.declares == 1
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert session.counters.declares == session.counters.began == 1
        assert session.counters.skipped == {}
        heard = daemon.wait_for(Timings, count=8)
        assert [message.step for message in heard[:8]] == list(range(1, 9)), "the daemon knows of every period"
        assert not [message for message in daemon.received if isinstance(message, Skip)]


def test_nothing_is_declared_early_while_it_is_paused(where: Places) -> None:
    with where.daemon(every=10) as daemon, early(where, daemon) as trainer:
        with trainer.session.paused():
            assert not trainer.session.undeclared
            trainer.one_step()
        assert trainer.session.counters.declares == 0
        trainer.one_step()
        assert trainer.session.counters.declares == 1


def test_slots_that_do_not_fit_are_told_of_at_once_and_tried_again_when_due(
    where: Places, caplog: pytest.LogCaptureFixture
) -> None:
    with where.daemon(every=10) as daemon, early(where, daemon) as trainer, caplog.at_level(logging.WARNING):
        daemon.refuse[Declare] = NoRoom("12 GB are needed")
        for _ in range(9):
            assert trainer.one_step().kind is OutcomeKind.NOT_DUE
        assert len(daemon.wait_for(Declare)) == 1
        said = [record.getMessage() for record in caplog.records if "12 GB are needed" in record.getMessage()]
        assert len(said) == 1
        assert trainer.session.counters.skipped == {}
        assert not [message for message in daemon.received if isinstance(message, Skip)], "no step is dead for it"
        daemon.refuse.clear()
        trainer.session._snapshots.declare_again = 0.0
        assert trainer.one_step().kind is OutcomeKind.SEALED


def small_is_no_data(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    trainer.small["bad"] = object()


def there_is_no_room(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    daemon.refuse[Declare] = NoRoom("12 GB are needed")


def ranges_contradict(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    daemon.refuse[Declare] = LayoutError("w0 is held twice")


def nobody_answers(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    daemon.ignore.add(Declare)


def something_of_ours_breaks(trainer: Trainer, daemon: ScriptedDaemon) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    trainer.session._layout.declare = broken  # type: ignore[assignment,method-assign]


Spoil = Callable[[Trainer, ScriptedDaemon], None]
REFUSED: dict[Spoil, tuple[type[BaftError], str]] = {
    small_is_no_data: (BaftError, "bad"),
    there_is_no_room: (NoRoom, "12 GB are needed"),
    ranges_contradict: (LayoutError, "w0 is held twice"),
    nobody_answers: (Unreachable, "no answer"),
    something_of_ours_breaks: (BaftError, "step 1: the layout is not declared: ZeroDivisionError: ours"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("call", ["boundary", "fence", "pass_by"])
@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_a_strict_session_raises_what_was_refused_early_at_its_next_call(
    where: Places, spoil: Spoil, call: str, strict: bool
) -> None:
    error, said = REFUSED[spoil]
    options = {"declare_timeout": "200 ms"}
    with where.daemon(every=10) as daemon, early(where, daemon, strict=strict, options=options) as trainer:
        spoil(trainer, daemon)
        assert trainer.boundary().kind is OutcomeKind.NOT_DUE
        calls: dict[str, Callable[[], object]] = {
            "boundary": trainer.boundary, "fence": trainer.fence, "pass_by": lambda: trainer.session.pass_by(2),
        }  # fmt: skip
        if strict:
            with pytest.raises(error, match=said):
                calls[call]()
        calls[call]()  # once is enough
        assert trainer.session.counters.skipped == {}


@pytest.mark.parametrize("strict", [True, False])
def test_early_it_waits_for_other_ranks_from_boundary_to_boundary(where: Places, strict: bool) -> None:
    with where.daemon(every=10) as daemon, early(where, daemon, strict=strict) as trainer:
        daemon.refuse[Declare] = TryAgain("rank 1 has not declared yet")
        trainer.one_step()  # nor is that raised where it is strict
        assert trainer.session.undeclared
        daemon.refuse.clear()
        trainer.one_step()
        assert trainer.session.counters.declares == 1
        assert trainer.session.counters.skipped == {}


def test_small_state_that_is_no_data_costs_no_step_before_one_is_due(where: Places) -> None:
    with where.daemon(every=10) as daemon, early(where, daemon) as trainer:
        trainer.small["bad"] = object()
        assert trainer.one_step().kind is OutcomeKind.NOT_DUE
        del trainer.small["bad"]
        for _ in range(8):
            trainer.one_step()
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert trainer.session.counters.skipped == {}
