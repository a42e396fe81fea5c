"""Disturbances that pass: what the governor decides because of them must pass too, within some hundred steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from baftd.pipeline.governor import Governor, RankSetup, StepRecord
from baftd.pipeline.interval import Interval
from baftd.pipeline.recent import AGE, FORGOTTEN, Recent
from tests.pipeline.trainer import Job, Machine, Run

DELAY = 8
"""Steps until a published interval is in force."""
GB = 10**9


@dataclass
class Delayed(Run):
    """The interval comes into force some steps after it was decided."""

    pending: list[tuple[int, int, int]] = field(default_factory=list)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for at, every, probe in [one for one in self.pending if one[0] <= self.number]:
                self.every, self.probe = every, probe
                self.pending.remove((at, every, probe))
            every, probe = self.every, self.probe
            super().steps(1)
            if (self.every, self.probe) != (every, probe):
                self.pending.append((self.number + DELAY, self.every, self.probe))
                self.every, self.probe = every, probe


def disturbed(nbytes: int, change: Callable[[int, Job], None], inside: float, outside: float, seed: int = 0) -> Delayed:
    """Steps of 700 ms of which 140 are windows, at 5 GB/s. Two ranks take turns, so that each second of copying slows
    one of them half of the time."""
    machine = Machine(inside=inside / 2, outside=outside / 2, rate=5e9)
    job = Job(2, nbytes, 0.7 / 8, 0.14 / 4, machine=machine, change=change, seed=seed)
    return Delayed(job, Governor(Interval(), 0.01, 64))


@pytest.mark.parametrize(("nbytes", "most"), [(3 * GB // 10, 2), (GB, 14)])
def test_cold_pages_at_the_beginning_make_no_long_interval_for_hours(nbytes: int, most: int) -> None:
    def slow(number: int, job: Job) -> None:
        job.machine.rate = 0.3e9 if number < 12 else 5e9

    run = disturbed(nbytes, slow, 0.1, 0.4)
    run.steps(12)
    assert run.every > 1
    run.steps(400)
    assert run.every <= most
    run.steps(400)
    assert run.every <= most


def test_a_stall_of_seconds_is_forgotten_after_some_hundred_steps() -> None:
    def stall(number: int, job: Job) -> None:
        job.machine.held = 2.0 if 100 <= number < 140 else 0.2e-3

    run = disturbed(3 * GB // 10, stall, 0.05, 0.2)
    run.steps(100)
    assert run.every == 1
    run.steps(40)
    assert run.every > 8, "it costs three steps a snapshot now"
    run.steps(360)
    assert run.every <= 2


def test_a_rung_that_was_too_dear_is_tried_again_and_the_interval_falls_when_it_is_not_any_more() -> None:
    """At first copying beside computation costs four times its length: the rest is copied at the fence."""

    def vanish(number: int, job: Job) -> None:
        job.machine.inside, job.machine.outside = (0.5, 2.0) if number < 800 else (0.0, 0.0)

    run = disturbed(GB, vanish, 1.0, 4.0)
    run.steps(800)
    assert run.every > 16
    rungs = {rung for _, decision in run.decisions for rung in {plan.rung for plan in decision.plans.values()}}
    assert "fence" in rungs
    run.steps(2500)
    assert run.every <= 2
    assert run.overhead(400) < 0.01


def test_an_interval_rises_by_steps_each_of_which_is_shown_to_be_too_short() -> None:
    def dear(number: int, job: Job) -> None:
        job.machine.held = 3.0

    run = disturbed(3 * GB // 10, dear, 0.05, 0.2)
    run.steps(3000)
    rising = run.intervals
    assert all(after <= 4 * before for before, after in pairwise(rising))
    assert run.every > 150, "and reaches what the budget asks for"


@pytest.mark.parametrize("fixed", [2e-3, 5e-3])
def test_what_a_snapshot_costs_without_copying_much_counts(fixed: float) -> None:
    """3 MB in steps of 35 ms: nobody sees the daemon's work on the same cores but pairs of steps."""
    machine = Machine(inside=0.1, rate=5e9, fixed=fixed)
    run = Delayed(Job(2, 3_000_000, 0.035 / 8, 0.007 / 4, machine=machine, seed=3), Governor(Interval(), 0.01, 64))
    run.steps(3000)
    assert run.overhead(1000) < 0.012
    assert fixed / 0.035 / run.every < 0.012


@pytest.mark.parametrize(("nbytes", "scatter"), [(3 * GB // 10, 0.15), (3 * GB // 10, 0.3), (GB // 2, 0.15)])
def test_windows_that_scatter_make_no_plan_at_every_other_step(nbytes: int, scatter: float) -> None:
    """And what pairs have measured is not thrown away with each of these plans."""
    dice = random.Random(1)

    def scattering(number: int, job: Job) -> None:
        job.window = 0.14 / 4 * max(0.1, 1 + dice.gauss(0, scatter))

    run = disturbed(nbytes, scattering, 0.1, 0.4)
    run.steps(1500)
    assert sum(len(decision.changed) for _, decision in run.decisions) < 80
    assert run.overhead(800) < 0.01
    estimate = run.governor.estimate
    assert estimate is not None
    assert estimate.pairs > 40


@pytest.mark.parametrize("factor", [1e-3, 1e3, 1e6])
def test_a_rank_that_says_absurd_periods_neither_hides_nor_raises_what_snapshots_cost(factor: float) -> None:
    """Three ranks, of which one counts its time otherwise."""
    honest = Governor(Interval(), 0.01, 64)
    deceived = Governor(Interval(), 0.01, 64)
    for governor, lie in ((honest, 1.0), (deceived, factor)):
        for rank in range(3):
            governor.declare(RankSetup(rank, 100_000_000))
        for step in range(1, 100):
            for rank in range(3):
                seconds = 0.1 * (lie if rank == 2 else 1.0)
                governor.add(
                    StepRecord(rank, step, step * 10**8, int(seconds * 1e9), b"", 0, copied=True, held_ns=5 * 10**6)
                )
            governor.decide()
    assert honest.decision is not None
    assert deceived.decision is not None
    assert honest.decision.interval > 1
    assert deceived.decision.step_seconds == pytest.approx(0.1)
    assert deceived.decision.interval >= honest.decision.interval


def test_at_every_second_step_a_snapshot_is_left_out_now_and_then() -> None:
    """Or no step would be free of what the daemon does with a snapshot in the step after it, and nobody could tell."""
    run = disturbed(GB // 2, lambda _number, _job: None, 0.1, 0.4)
    run.steps(600)
    assert run.every == 2
    assert run.probe == 64


def test_recent_values_age_but_some_stay() -> None:
    recent: Recent[float] = Recent(17)
    for step in range(0, 100, 10):
        recent.add(step, float(step))
    assert list(recent) == [float(step) for step in range(30, 100, 10)]
    recent.add(1000, 1.0)
    assert list(recent) == [80.0, 90.0, 1.0]
    assert recent[-1] == 1.0
    assert recent[:2] == [80.0, 90.0]
    assert recent.known(1000 + FORGOTTEN)
    assert not recent.known(1001 + FORGOTTEN)
    assert len(recent) == 3
    assert not Recent[int](3).known(0)
    assert AGE < FORGOTTEN
