"""A rank that hears late of another cadence says which steps it has left out, so that none stays open for ever."""

from __future__ import annotations

from baft_client.source import OutcomeKind
from baftd.wire.messages import Begin, Cadence, Skip
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
