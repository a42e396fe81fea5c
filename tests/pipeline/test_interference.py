"""The cost of copying as operations show it."""

from __future__ import annotations

import random

import pytest

from baftd.pipeline.events import EventKind, unpack_events
from baftd.pipeline.interference import Interference
from baftd.pipeline.pacing import RankPlan
from baftd.pipeline.timeline import Step
from tests.pipeline.trainer import Job, Machine


def _learn(job: Job, steps: int, copied: list[bool] | None = None) -> Interference:
    found = Interference()
    chance = random.Random(5)
    for number in range(steps):
        with_copy = copied[number % len(copied)] if copied else chance.random() < 0.7
        records = job.step(number, with_copy)
        found.add([Step.of(r.rank, r.step, r.begun, r.period, unpack_events(r.events)) for r in records])
    return found


def test_the_machines_own_cost_is_found_within_its_error() -> None:
    for seed, cost in enumerate((0.0, 0.05, 0.3)):
        job = Job(2, 500_000_000, 0.07, 0.035, machine=Machine(inside=cost, scatter=0.02), seed=seed)
        found = _learn(job, 120).cost(EventKind.COPY_INSIDE)
        assert found is not None
        # Both ranks copy in turn, and each delays the other: the step loses twice what one copy costs.
        assert abs(found.value - 2 * cost) <= 4 * found.error
        assert found.error < 0.06


def test_ranks_that_are_slowed_together_delay_the_step_once() -> None:
    """Of four ranks two compute while two copy: the two lose the same seconds."""
    job = Job(4, 200_000_000, 0.07, 0.035, machine=Machine(inside=0.2, scatter=0.002))
    found = _learn(job, 60).cost(EventKind.COPY_INSIDE)
    assert found is not None
    assert found.value == pytest.approx(0.4, rel=0.1)


def test_what_two_kinds_of_copying_cost_together_is_shared_out_between_them() -> None:
    """An operation that meets both at once cannot tell them apart, but knows the sum."""
    machine = Machine(inside=0.0, outside=0.5, scatter=0.002)
    job = Job(2, 2_000_000_000, 0.07, 0.035, machine=machine)
    job.plans = {rank: (1, RankPlan(windows=(1 << 26,) * 4, outside=2_000_000_000)) for rank in (0, 1)}
    found = _learn(job, 80)
    record = job.step(80, True)[0]
    inside, outside = found.cost(EventKind.COPY_INSIDE), found.cost(EventKind.COPY_OUTSIDE)
    assert inside is not None
    assert outside is not None
    together = inside.value * record.in_windows + outside.value * record.outside
    assert together == pytest.approx(2 * machine.outside * record.outside, rel=0.1)


def test_nothing_is_said_before_there_are_steps_of_both_kinds() -> None:
    job = Job(2, 500_000_000, 0.07, 0.035)
    assert _learn(job, 40, [True]).cost(EventKind.COPY_INSIDE) is None, "no operation is known undisturbed"
    assert _learn(job, 40, [False]).cost(EventKind.COPY_INSIDE) is None
    assert _learn(job, 4, [False, True]).cost(EventKind.COPY_INSIDE) is None


def test_few_undisturbed_runs_make_a_large_error() -> None:
    """However many steps are copied: what they are compared with is not known better."""
    def after(copied: list[bool]) -> float:
        job = Job(2, 500_000_000, 0.07, 0.035, machine=Machine(scatter=0.03), seed=3)
        found = _learn(job, 100, copied).cost(EventKind.COPY_INSIDE)
        assert found is not None
        return found.error

    assert after([False] * 3 + [True] * 97) > 2 * after([False, True])


def test_a_copy_beside_which_nobody_computes_costs_nothing() -> None:
    job = Job(2, 100_000_000, 0.02, 0.02, machine=Machine(inside=0.5))
    found = Interference()
    for number in range(8):
        records = job.step(number, True)
        steps = [Step.of(r.rank, r.step, r.begun, r.period, unpack_events(r.events)) for r in records]
        alone = [one for one in steps if one.rank == 0]
        found.add(alone)  # the rank that waits copies; who computes is on another node
    cost = found.cost(EventKind.COPY_INSIDE)
    assert cost is not None
    assert cost.value == 0.0


def test_a_rank_that_leaves_is_forgotten() -> None:
    job = Job(2, 500_000_000, 0.07, 0.035)
    found = _learn(job, 20, [False])
    found.forget(0)
    found.forget(1)
    for number in range(20, 40):
        records = job.step(number, True)
        found.add([Step.of(r.rank, r.step, r.begun, r.period, unpack_events(r.events)) for r in records])
    assert found.cost(EventKind.COPY_INSIDE) is None
