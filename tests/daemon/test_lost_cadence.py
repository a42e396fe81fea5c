"""Word of a cadence is lost on its way to a rank: its timings show it, and it is told again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from baftd.checkpoint.facts import Cadence
from baftd.checkpoint.identity import Token
from baftd.daemon.training import TELL_AGAIN, Trainer
from baftd.telemetry import get_logger
from baftd.telemetry.counters import JOB_COUNTERS, Counters
from baftd.wire import messages
from tests.daemon.test_pacing import AUTO, SLOW, A, job_of, paced, until
from tests.support.daemon import Daemon, RunDirs


def test_a_rank_that_lost_the_word_of_an_interval_takes_the_same_steps_again(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 2, machine=SLOW) as ranks:
        heard, deaf = ranks
        deaf.loses = 1 << 30

        def told_again() -> bool:
            return heard.cadences[-1].every > 1 and job_of(daemon).counters["cadences_told_again"] > 1

        step = until(ranks, 1, told_again, lambda: f"{heard.cadences[-1]}: {job_of(daemon)}")
        assert deaf.cadences[-1].every == 1
        deaf.loses = 0

        def agreed() -> bool:
            return deaf.cadences[-1] == heard.cadences[-1]

        until(ranks, step, agreed, lambda: f"{deaf.cadences[-1]}, not {heard.cadences[-1]}: {job_of(daemon)}")


def test_ranks_that_heard_everything_are_told_nothing_twice(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 2, machine=SLOW) as ranks:
        until(ranks, 1, lambda: ranks[0].cadences[-1].every > 1, lambda: f"{job_of(daemon)}")
        assert job_of(daemon).counters["cadences_told_again"] == 0


# ---------------------------------------------------------------- the rule, by a clock of its own


class Bench:
    """A daemon's trainer with one rank, and a job whose cadence the test sets."""

    def __init__(self, cadence: Cadence) -> None:
        self.now = 100.0
        self.sent: list[messages.Cadence] = []
        server = SimpleNamespace(send=lambda peer, message: self.sent.append(message))
        context = SimpleNamespace(server=server, clock=lambda: self.now)
        self.token = Token(3, A)
        self.counters = Counters(JOB_COUNTERS)
        self.job = SimpleNamespace(counters=self.counters, log=get_logger("test"))
        self.decided(cadence)
        self.client = SimpleNamespace(rank=1, peer="peer", outdated=None)
        self._trainer = Trainer(cast(Any, context), cast(Any, None))

    def decided(self, cadence: Cadence) -> None:
        self.job.view = SimpleNamespace(cadence=cadence, token=self.token)

    def tells(self, after: float, known: tuple[int, int, int]) -> int:
        """The rank's timings come `after` seconds later; returns how often it has been told again so far."""
        self.now += after
        self._trainer._check_cadence(cast(Any, self.job), cast(Any, self.client), self.token, known)
        assert self.counters["cadences_told_again"] == len(self.sent)
        return len(self.sent)


JOBS = Cadence(40, 5, 8, (Cadence(0, 1),))
SHORTLY, LONG = 0.4 * TELL_AGAIN, 1.1 * TELL_AGAIN


@pytest.mark.parametrize("known", [(40, 1, 8), (40, 5, 0), (8, 5, 8), (0, 1, 0), (1 << 52, 1 << 52, 1 << 52)])
def test_whatever_differs_is_told_again_and_not_at_every_step(known: tuple[int, int, int]) -> None:
    bench = Bench(JOBS)
    assert bench.tells(0, known) == 0, "word of it may be on its way"
    assert [bench.tells(SHORTLY, known) for _ in range(9)] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    said = bench.sent[0]
    assert (said.from_step, said.every, said.probe, said.earlier) == (40, 5, 8, [(0, 1, 0)])
    assert said.token == messages.WireToken(3, A)
    assert bench.tells(LONG, (40, 5, 8)) == 3
    assert bench.tells(LONG, (40, 5, 8)) == 3


def test_long_steps_are_told_with_the_second() -> None:
    bench = Bench(JOBS)
    assert [bench.tells(30.0, (0, 1, 0)) for _ in range(2)] == [0, 1]


def test_a_rank_that_says_nothing_of_it_is_told_nothing() -> None:
    bench = Bench(JOBS)
    assert [bench.tells(LONG, (0, 0, 0)) for _ in range(5)] == [0] * 5


def test_a_newer_decision_begins_anew() -> None:
    bench = Bench(JOBS)
    bench.tells(0, (0, 1, 0))
    bench.decided(Cadence(60, 7))
    assert bench.tells(LONG, (40, 5, 8)) == 0
    assert bench.tells(LONG, (40, 5, 8)) == 1
    assert bench.sent[0].every == 7


def test_what_another_start_agreed_is_told_to_nobody() -> None:
    bench = Bench(JOBS)
    bench.token = Token(4, A)
    assert [bench.tells(LONG, (0, 1, 0)) for _ in range(3)] == [0] * 3
