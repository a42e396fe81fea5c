"""The governor against simulated jobs whose true cost of copying it does not know."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baftd.errors import FormatError
from baftd.pipeline.events import Event, EventKind, pack_event
from baftd.pipeline.governor import Governor, RankSetup, StepRecord
from baftd.pipeline.interval import Interval
from baftd.pipeline.ladder import RUNGS
from baftd.pipeline.operations import StageTimes, Times
from baftd.pipeline.schedules import build
from baftd.pipeline.simulate import simulate
from baftd.pipeline.timeline import MOST
from tests.pipeline.trainer import Job, Machine, Run

MB = 10**6
BUDGET = 0.01


def trained(job: Job, steps: int, fixed: Interval | None = None, budget: float = BUDGET, probe: int = 64) -> Run:
    run = Run(job, Governor(fixed or Interval(), budget, probe))
    run.steps(steps)
    return run


def cost(run: Run, last: int) -> float:
    """True overhead over whole intervals: what a snapshot costs on average, spread over the interval in force."""
    spent = [seconds for copied, seconds in run.job.spent[-last:] if copied]
    return sum(spent) / len(spent) / (run.every * run.job.step_seconds)


# ---------------------------------------------------------------- the benchmark's jobs, in short


@pytest.mark.parametrize("nbytes", [218 * MB, 537 * MB])
def test_a_device_that_computes_elsewhere_has_a_snapshot_at_every_step_inside_windows(nbytes: int) -> None:
    job = Job(4, nbytes, 0.08, 0.08, machine=Machine(rate=5e9))
    run = trained(job, 200)
    assert run.intervals == [1]
    assert run.governor.decision is not None
    assert run.governor.decision.rung == "windows"
    assert all(nbytes == inside for inside in job.inside_bytes[20:])
    assert max(job.fence_bytes[20:]) == 0
    assert run.overhead(100) < 0.001
    assert run.decisions[-1][0] < 100, "it settles"


def test_busy_cores_and_a_large_state_are_snapshot_as_often_as_the_budget_allows() -> None:
    job = Job(2, 1074 * MB, 0.07, 0.035, machine=Machine(inside=0.065, outside=0.4, scatter=0.05))
    run = trained(job, 400)
    assert run.every in (3, 4)
    assert cost(run, 200) < BUDGET
    decision = run.governor.decision
    assert decision is not None
    assert decision.rung == "interval"
    assert {plan.rung for plan in decision.plans.values()} == {"windows"}
    estimate = run.governor.overhead
    assert estimate is not None
    assert abs(estimate.value - cost(run, 200)) < 4 * estimate.error


def test_what_fits_the_budget_is_snapshot_at_every_step_though_it_costs_something() -> None:
    job = Job(2, 319 * MB, 0.07, 0.035, machine=Machine(inside=0.04, outside=0.4, scatter=0.03))
    run = trained(job, 300)
    assert run.every == 1
    assert cost(run, 100) < BUDGET


@pytest.mark.parametrize("outside", [0.02, 0.4, 3.0])
def test_without_windows_it_overlaps_or_waits_at_the_fence_within_the_budget(outside: float) -> None:
    job = Job(2, 319 * MB, 0.06, 0.0, 8, pipeline=False, machine=Machine(outside=outside, scatter=0.01))
    run = trained(job, 600)
    decision = run.governor.decision
    assert decision is not None
    assert {plan.rung for plan in decision.plans.values()} == {"overlap" if outside < 1 else "fence"}
    assert cost(run, 200) < BUDGET
    assert (run.every == 1) == (outside < 0.1)


@pytest.mark.parametrize("nbytes", [200_000, 20 * MB])
def test_very_short_steps_get_an_interval_that_holds(nbytes: int) -> None:
    job = Job(1, nbytes, 0.001, 0.0, 5, pipeline=False, machine=Machine(outside=0.4, scatter=0.05))
    run = Run(job, Governor(Interval(), BUDGET, 64), decide_every=100)
    run.steps(3000)
    assert 1 < run.every < 60
    assert cost(run, 1000) < BUDGET * 1.05
    assert len(run.intervals) <= 6


def test_a_first_step_ten_times_slower_leads_nowhere_for_long() -> None:
    job = Job(4, 537 * MB, 0.08, 0.02, machine=Machine(rate=5e9), first_slow=10)
    run = Run(job, Governor(Interval(), BUDGET, 64), decide_every=1)
    run.steps(60)
    steady = trained(Job(4, 537 * MB, 0.08, 0.02, machine=Machine(rate=5e9)), 60)
    mine, theirs = run.governor.decision, steady.governor.decision
    assert mine is not None
    assert theirs is not None
    assert mine.rung == theirs.rung
    for rank in range(4):
        assert sum(mine.plans[rank].windows) == pytest.approx(sum(theirs.plans[rank].windows), rel=0.1)


# ---------------------------------------------------------------- what changes


def test_windows_that_vanish_are_answered_and_their_return_is_too() -> None:
    def change(number: int, job: Job) -> None:
        job.window = 0.0 if 60 <= number < 200 else 0.05

    job = Job(2, 500 * MB, 0.08, 0.05, machine=Machine(outside=0.05), change=change)
    run = trained(job, 60)
    assert run.governor.decision is not None
    assert run.governor.decision.rung == "windows"
    run.steps(60)
    assert {plan.rung for plan in run.governor.decision.plans.values()} == {"overlap"}
    assert max(job.fence_bytes[-10:]) == 0
    run.steps(400)
    assert {plan.rung for plan in run.governor.decision.plans.values()} == {"windows"}


def test_windows_that_shrink_by_a_tenth_and_more_make_a_new_plan() -> None:
    def change(number: int, job: Job) -> None:
        job.window = 0.05 if number < 60 else 0.04

    job = Job(2, 100 * MB, 0.08, 0.05, machine=Machine(scatter=0.002), change=change)
    run = trained(job, 60)
    generations = dict(job.plans)
    run.steps(30)
    for rank in (0, 1):
        before, after = generations[rank][1], job.plans[rank][1]
        assert job.plans[rank][0] > generations[rank][0], "generations count up"
        assert sum(after.windows) == pytest.approx(0.8 * sum(before.windows), rel=0.05)


def test_chance_makes_no_new_plan() -> None:
    chance = random.Random(3)

    def change(number: int, job: Job) -> None:
        job.window = 0.05 * chance.uniform(0.6, 1.4)

    job = Job(2, 300 * MB, 0.08, 0.05, change=change)
    run = trained(job, 600)
    assert len([step for step, decision in run.decisions if step > 100 and decision.changed]) <= 6


def test_an_interval_in_force_is_where_a_new_governor_begins() -> None:
    governor = Governor(Interval(), BUDGET, 64)
    governor.cadence(12, 0, 0)
    job = Job(2, 1074 * MB, 0.07, 0.035, machine=Machine(inside=0.25, outside=0.4, scatter=0.02))
    run = Run(job, governor)
    run.every = 12
    run.steps(20)
    assert governor.decision is not None
    assert governor.decision.interval == 12, "what is better is tried with patience"
    assert governor.decision.probe == 0


def test_a_longer_interval_of_another_node_is_what_counts() -> None:
    run = trained(Job(2, 218 * MB, 0.08, 0.08, machine=Machine(held=0.002)), 100)
    governor = run.governor
    assert governor.decision is not None
    alone = governor.decision.snapshot
    governor.cadence(10, 0, 100)
    governor.decide()
    assert governor.decision.snapshot == pytest.approx(alone, rel=0.2)
    assert governor.decision.interval == 1, "its own need is unchanged"
    assert governor.decision.probe == 0


def test_intervals_of_the_user_hold_and_the_reason_says_what_they_cost() -> None:
    job = Job(2, 1074 * MB, 0.07, 0.035, machine=Machine(inside=0.13, scatter=0.02))
    run = trained(job, 150, Interval(steps=1))
    assert run.intervals == [1]
    assert {decision.probe for _, decision in run.decisions} == {0}
    assert run.governor.decision is not None
    assert "over the budget of 1 % by an interval that is set" in run.governor.decision.why

    run = trained(Job(2, 100 * MB, 0.07, 0.03), 100, Interval(seconds=5.65))
    assert run.governor.decision is not None
    assert run.governor.decision.interval == 10


def test_probes_are_rare_and_denser_while_the_side_of_the_budget_is_unclear() -> None:
    run = trained(Job(2, 218 * MB, 0.08, 0.08, machine=Machine(rate=5e9)), 200)
    probes = [decision.probe for _, decision in run.decisions]
    assert probes[0] == 8
    assert probes[-1] == 64
    assert {decision.probe for _, decision in trained(Job(2, 218 * MB, 0.08, 0.08), 60, probe=0).decisions} == {0}


def test_reasons_name_the_rank_and_the_numbers() -> None:
    job = Job(2, 1074 * MB, 0.07, 0.028, machine=Machine(inside=0.05, outside=0.3))
    run = trained(job, 150)
    assert run.governor.decision is not None
    why = run.governor.decision.why
    for part in ("Rank ", "1 GiB", "windows of", "every", "budget of 1 %"):
        assert part in why
    assert all(plan.why for plan in run.governor.decision.plans.values())


# ---------------------------------------------------------------- what is declared


def test_before_anything_is_measured_only_ranks_whose_schedule_promises_windows_have_a_plan() -> None:
    governor = Governor(Interval(), BUDGET, 64)
    governor.declare(RankSetup(0, 10 * MB, schedule=build("1F1B", 2, 4), place=0))
    governor.declare(RankSetup(1, 10 * MB))
    decision = governor.decide()
    assert decision is not None
    assert decision.changed == (0,)
    assert set(decision.plans) == {0}
    assert decision.plans[0].outside == 0
    assert (decision.interval, decision.step_seconds) == (1, 0.0)
    assert governor.decide() is None
    assert governor.capacity(0) is None


def test_the_first_plan_takes_windows_for_no_longer_than_the_schedule_foretells() -> None:
    """A first step in which one receive hung for a second: no such window will come again."""
    schedule = build("1F1B", 2, 4)
    times = Times.uniform(2, StageTimes(forward=0.02, backward=0.04), barrier=True)
    line = simulate(schedule, times)
    governor = Governor(Interval(), BUDGET, 64)
    for rank in (0, 1):
        governor.declare(RankSetup(rank, 100 * MB, schedule=schedule, place=rank))
    for rank in (0, 1):
        begun, behind = 10**12, line.gaps(rank)[0].end

        def at(moment: float, begun: int = begun, behind: float = behind) -> int:
            return begun + int((moment + (1.0 if moment >= behind else 0.0)) * 1e9)

        events = [Event(*operation, at(first), at(last - 1e-9)) for operation, first, last in line.operations[rank]]
        for number, gap in enumerate(line.gaps(rank)):
            events.append(Event(EventKind.WAIT_RECV, -1, -1, at(gap.begin), at(gap.end)))
            events.append(Event(EventKind.WINDOW, EventKind.WAIT_RECV, number, at(gap.begin), at(gap.end)))
        period = int((line.period + 1.0) * 1e9)
        governor.add(StepRecord(rank, 0, begun, period, b"".join(pack_event(event) for event in events)))
    governor.decide()
    for rank in (0, 1):
        assert governor.profile(rank).window_seconds > 1.0, "it was measured"
        capacity = governor.capacity(rank)
        assert capacity is not None
        assert capacity <= 0.45 * line.idle(rank) * 4e9


def test_a_rank_with_a_schedule_and_no_operations_gets_clock_anchored_windows() -> None:
    schedule = build("1F1B", 4, 8)
    governor = Governor(Interval(), BUDGET, 0)
    governor.declare(RankSetup(0, 500 * MB, schedule=schedule, place=1))
    for step in range(6):
        boundary = pack_event(Event(EventKind.BOUNDARY, -1, -1, 10**12, 10**12 + 10**5))
        governor.add(StepRecord(0, step, 10**12 + step * 10**9, 10**9, boundary, copied=step > 0))
    decision = governor.decide()
    assert decision is not None
    timed = decision.plans[0].timed
    assert timed
    assert all(0 <= begin < end <= 10**9 for begin, end, _ in timed)
    assert sum(granted for _, _, granted in timed) <= 500 * MB


def test_a_new_size_makes_a_new_plan_and_keeps_what_was_learnt() -> None:
    job = Job(2, 200 * MB, 0.08, 0.05)
    run = trained(job, 60)
    steps = run.governor.profile(0).steps
    run.governor.declare(RankSetup(0, 100 * MB))
    assert run.governor.profile(0).steps == steps
    decision = run.governor.decide()
    assert decision is not None
    assert decision.changed == (0,)


def test_ranks_come_and_go() -> None:
    job = Job(4, 200 * MB, 0.08, 0.05)
    run = trained(job, 40)
    run.governor.forget(3)
    assert run.governor.capacity(3) is None
    with pytest.raises(KeyError):
        run.governor.profile(3)
    for record in job.step(run.number, True):
        run.governor.add(record)  # what a rank that has left still says is ignored
    run.governor.decide()
    assert run.governor.decision is not None
    assert set(run.governor.decision.plans) == {0, 1, 2}
    for rank in (0, 1, 2):
        run.governor.forget(rank)
    assert run.governor.decide() is None


def test_capacity_and_summary() -> None:
    job = Job(2, 200 * MB, 0.08, 0.05, machine=Machine(rate=5e9))
    run = trained(job, 60)
    capacity = run.governor.capacity(0)
    assert capacity is not None
    assert capacity == pytest.approx(0.95 * 4 * 0.05 * 5e9, rel=0.05)
    summary = run.governor.summary(0)
    assert (summary.rank, summary.rung, summary.bytes) == (0, "windows", 200 * MB)
    assert (summary.in_windows, summary.outside, summary.at_fence) == (200 * MB, 0, 0)
    assert summary.window_seconds == pytest.approx(0.2, rel=0.01)
    assert summary.copy_rate == pytest.approx(5e9, rel=0.01)
    assert run.governor.profile(0).gaps()["steady"].bytes + run.governor.profile(0).gaps()["cooldown"].bytes > 0


# ---------------------------------------------------------------- what nobody should send


def test_a_torn_batch_changes_nothing() -> None:
    job = Job(2, 200 * MB, 0.08, 0.05)
    run = trained(job, 40)
    governor = run.governor
    before = (governor.profile(0).taken, governor.summary(0), governor.estimate)
    record = job.step(run.number, True)[0]
    for wrong in (record._replace(events=b"x" * 31), record._replace(period=0), record._replace(period=-5),
                  record._replace(period=1 << 62, events=b"")):  # fmt: skip
        with pytest.raises(FormatError):
            governor.add(wrong)
        assert (governor.profile(0).taken, governor.summary(0), governor.estimate) == before
    governor.add(record)
    assert governor.profile(0).taken == before[0] + 1
    governor.add(record)
    assert governor.profile(0).taken == before[0] + 1, "the same step twice counts once"


def test_a_period_apart_from_training_teaches_nothing() -> None:
    """An evaluation, or another checkpoint, in steps without a snapshot would make ours look cheap."""
    job = Job(2, 1074 * MB, 0.07, 0.035, machine=Machine(inside=0.065, scatter=0.01))
    run = Run(job, Governor(Interval(), BUDGET, 64))
    chance = random.Random(1)
    original = job.step

    def step(number: int, copied: bool) -> list[StepRecord]:
        records = original(number, copied)
        if not copied and chance.random() < 0.4:
            slow = int(records[0].period * 1.17)
            return [record._replace(period=slow, apart=True) for record in records]
        return records

    job.step = step  # type: ignore[method-assign]
    run.steps(400)
    assert cost(run, 100) < BUDGET


_number = st.one_of(st.integers(-(2**63), 2**64), st.integers(0, 10**10))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    numbers=st.lists(st.tuples(_number, _number, _number, _number, _number, _number, st.booleans()), max_size=30),
    events=st.binary(max_size=320),
)
def test_garbage_is_refused_or_clipped_and_never_breaks_it(
    numbers: list[tuple[int, int, int, int, int, int, bool]], events: bytes
) -> None:
    governor = Governor(Interval(), BUDGET, 64)
    governor.declare(RankSetup(0, 100 * MB))
    for step, (period, inside, outside, fence, held, plan, copied) in enumerate(numbers):
        record = StepRecord(0, step, 10**12, period, events[: len(events) // 32 * 32], plan, copied, inside, outside,
                            inside, fence, held, outside)  # fmt: skip
        try:
            governor.add(record)
        except FormatError:
            continue
        decision = governor.decide()
        if decision is not None:
            assert decision.interval >= 1
            assert decision.snapshot >= 0
            assert decision.rung in RUNGS
            for plan_ in decision.plans.values():
                assert all(granted >= 0 for granted in plan_.windows)
                assert plan_.outside >= 0
                assert plan_.further >= 0


def test_the_largest_batch_is_taken_in_and_decided_on_in_bounded_time() -> None:
    governor = Governor(Interval(), BUDGET, 64)
    governor.declare(RankSetup(0, 100 * MB))
    chance = random.Random(0)
    events = []
    for number in range(MOST // 2):
        begin = 10**12 + int(chance.random() * 9e8)
        kind = (EventKind.WINDOW, EventKind.FORWARD, EventKind.COPY_INSIDE, EventKind.WAIT_RECV)[number % 4]
        stage = EventKind.WAIT_RECV if kind is EventKind.WINDOW else number % 30_000
        events.append(pack_event(Event(kind, stage, number, begin, begin + 10**7, 1000)))
    batch = b"".join(events)
    began = time.process_time()
    for step in range(2):
        governor.add(StepRecord(0, step, 10**12, 10**9, batch, copied=True))
        governor.decide()
    assert time.process_time() - began < 10


# ---------------------------------------------------------------- any machine, any change


class Governed(RuleBasedStateMachine):
    """A job whose windows shrink, vanish and grow, and whose costs change, under the governor's eyes."""

    @initialize(
        inside=st.sampled_from([0.0, 0.05, 0.2]), outside=st.sampled_from([0.0, 0.2, 1.0]),
        nbytes=st.sampled_from([10 * MB, 200 * MB, 1000 * MB]), window=st.sampled_from([0.0, 0.005, 0.04]),
        scatter=st.sampled_from([0.002, 0.01]), pipeline=st.booleans(), seed=st.integers(0, 1000),
    )  # fmt: skip
    def begin(
        self, inside: float, outside: float, nbytes: int, window: float, scatter: float, pipeline: bool, seed: int
    ) -> None:
        machine = Machine(inside, outside, scatter=scatter)
        self.job = Job(2, nbytes, 0.04, window, 2, pipeline=pipeline, machine=machine, seed=seed)
        self.run_ = Run(self.job, Governor(Interval(), BUDGET, 64), decide_every=1)

    @rule(steps=st.integers(1, 30))
    def train(self, steps: int) -> None:
        self.run_.steps(steps)

    @rule(window=st.sampled_from([0.0, 0.002, 0.02, 0.06]))
    def windows_change(self, window: float) -> None:
        self.job.window = window

    @rule(nbytes=st.sampled_from([MB, 100 * MB, 700 * MB]))
    def size_changes(self, nbytes: int) -> None:
        self.job.nbytes = nbytes
        for rank in range(2):
            self.run_.governor.declare(RankSetup(rank, nbytes))

    @rule(scatter=st.sampled_from([0.002, 0.02]))
    def noise_changes(self, scatter: float) -> None:
        self.job.machine = replace(self.job.machine, scatter=scatter)

    def teardown(self) -> None:
        """Left alone it settles: within the budget, or it says why not, and it does not swing."""
        if not hasattr(self, "run_"):
            return
        self.run_.steps(250)
        before = len(self.run_.decisions)
        intervals = len(self.run_.intervals)
        self.run_.steps(150)
        decision = self.run_.governor.decision
        assert decision is not None
        assert len(self.run_.intervals) - intervals <= 3
        assert len(self.run_.decisions) - before <= 12
        if any(copied for copied, _ in self.job.spent[-150:]):
            spent = [seconds for copied, seconds in self.job.spent[-150:] if copied]
            part = sum(spent) / len(spent) / (self.run_.every * self.job.step_seconds)
            assert part <= BUDGET * 1.2 or "over the budget" in decision.why

    @invariant()
    def plans_are_sound(self) -> None:
        decision = self.run_.governor.decision if hasattr(self, "run_") else None
        if decision is None:
            return
        assert decision.interval >= 1
        assert decision.probe >= 0
        assert decision.rung in RUNGS
        assert (decision.interval > 1) == (decision.rung == "interval")
        for rank, (_, plan) in self.job.plans.items():
            assert decision.plans[rank].rung == plan.rung, "what was decided was told"


TestGoverned = Governed.TestCase
TestGoverned.settings = settings(
    max_examples=12, stateful_step_count=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
