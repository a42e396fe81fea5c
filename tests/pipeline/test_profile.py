"""What a profile keeps of a rank's steps, beliefs about costs, and levels that do not swing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.pipeline.costs import Belief, Paired, believe
from baftd.pipeline.events import Event, EventKind, unpack_events
from baftd.pipeline.interference import SecondCost
from baftd.pipeline.profile import KEPT, WAKE, Basis, Known, Profile, low
from baftd.pipeline.steady import MOST_PATIENCE, PATIENCE, Steady
from baftd.pipeline.timeline import Step
from tests.pipeline.trainer import Job, Machine

K = EventKind
MS = 10**6


def _step(number: int, windows: list[float], *events: Event) -> Step:
    """Windows of so many ms, 10 ms apart, in a step of a second."""
    spans = [
        Event(K.WINDOW, K.WAIT_RECV, at, at * 100 * MS, at * 100 * MS + int(length * MS))
        for at, length in enumerate(windows)
    ]
    return Step.of(0, number, 0, 1000 * MS, [*spans, *events])


def test_medians_are_of_the_newest_steps_and_the_first_is_dropped() -> None:
    profile = Profile(0)
    for number, seconds in enumerate([10.0, 1.0, 1.1]):
        profile.add(seconds, copied=False)
        profile.look(_step(number, [80.0 if number == 0 else 8.0]), False)
    assert profile.step_seconds == 1.1, "of three the slow first one counts"
    profile.add(1.2, copied=False)
    profile.look(_step(3, [8.0]), False)
    assert profile.step_seconds == pytest.approx(1.1)
    assert max(profile.usable()) == pytest.approx(0.008 - WAKE), "the first step's window is gone"
    for number in range(4, 4 + KEPT):
        profile.add(2.0, copied=False)
        profile.look(_step(number, [4.0]), False)
    assert (profile.step_seconds, profile.steps) == (2.0, KEPT)
    assert profile.windows() == pytest.approx((0.004,))


def test_windows_that_most_steps_do_not_have_are_not_planned_with() -> None:
    profile = Profile(0)
    for number in range(9):
        profile.look(_step(number, [5.0, 3.0] + ([50.0] if number % 4 == 0 else [])), False)
    assert profile.windows() == pytest.approx((0.005, 0.003))


def test_a_snapshot_without_windows_is_known_a_step_without_is_not_judged() -> None:
    profile = Profile(0)
    profile.look(_step(0, [5.0]), False)
    profile.look(_step(1, []), False)
    assert len(profile.usable()) == 1
    profile.look(_step(2, []), True)
    assert profile.usable() == pytest.approx((0.005 - WAKE, 0.0))


def test_rates_and_bytes_of_each_kind_of_copying() -> None:
    profile = Profile(0)
    events = (
        Event(K.COPY_INSIDE, -1, 0, 1 * MS, 3 * MS, 20_000_000),
        Event(K.COPY_OUTSIDE, -1, -1, 20 * MS, 30 * MS, 50_000_000),
        Event(K.COPY_FENCE, -1, -1, 900 * MS, 904 * MS, 16_000_000),
        Event(K.COPY_FENCE, -1, -1, 900 * MS, 904 * MS, 16_000_000),
    )
    for number in range(5):
        profile.add(1.0, copied=True, in_windows=20_000_000, outside=50_000_000, at_fence=32_000_000, fence=0.004)
        profile.look(_step(number, [5.0, 5.0], *events), True)
    assert profile.rate(K.COPY_INSIDE) == pytest.approx(1e10)
    assert profile.rate(K.COPY_OUTSIDE) == pytest.approx(5e9)
    assert profile.rate(K.COPY_FENCE) == pytest.approx(8e9), "two threads at once"
    assert profile.bytes() == (20_000_000, 50_000_000, 32_000_000)
    assert profile.gaps() == {}, "no wait was recorded"


def test_what_a_snapshot_holds_is_beyond_what_any_boundary_does() -> None:
    profile = Profile(0)
    for number in range(20):
        profile.add(1.0, copied=number % 2 == 0, held=0.003 if number % 2 == 0 else 0.001)
    assert profile.held == pytest.approx(0.002)


def test_stage_times_are_medians_over_micro_batches() -> None:
    profile = Profile(1)
    job = Job(2, 0, 0.02, 0.01, machine=Machine(scatter=0.02))
    for number in range(9):
        record = job.step(number, False)[1]
        profile.look(Step.of(1, number, record.begun, record.period, unpack_events(record.events)), False)
    times = profile.stage_times()
    assert set(times) == {1}
    assert times[1].forward == pytest.approx(0.02, rel=0.05)
    assert times[1].backward == pytest.approx(0.02, rel=0.05)
    assert (times[1].input_grad, times[1].reduce) == (0.0, 0.0)


def test_drift_is_more_than_a_tenth_and_more_than_chance() -> None:
    def basis(step: float, error: float = 0.0, count: int = 4) -> Basis:
        return Basis(Known(step, error), Known(0.1, 0.0), Known(9e9, 0.0), count)

    assert not basis(1.0).drifted(basis(1.09))
    assert basis(1.0).drifted(basis(1.11))
    assert basis(1.0).drifted(basis(0.89))
    assert not basis(1.0, 0.05).drifted(basis(1.15, 0.05)), "three errors of both are 21 %"
    assert basis(1.0, 0.05).drifted(basis(1.25, 0.05))
    assert basis(1.0).drifted(basis(1.0, count=6))
    assert not basis(1.0, count=100).drifted(basis(1.0, count=101))


def test_low_is_what_nine_in_ten_exceed() -> None:
    assert low([]) == 0.0
    assert low([3.0]) == 3.0
    assert low(range(100)) == 10
    assert low([5.0, 1.0, 2.0]) == 1.0


# ---------------------------------------------------------------- beliefs


def test_a_handful_of_steps_overrules_the_guess() -> None:
    found = believe(Belief(), SecondCost(2.4, 0.02, 8), None, None, 0.5)
    assert found.inside == pytest.approx(2.4, rel=0.1)
    assert found.inside_error >= 0.3 * found.inside, "but not what operations cannot see"
    assert (found.outside, found.outside_error) == (Belief().outside, Belief().outside_error)


def test_pairs_overrule_operations() -> None:
    found = believe(Belief(), SecondCost(0.1, 0.01, 60), None, Paired(0.03, 0.001, 0.1, 0.0), 0.5)
    assert 0.1 * found.inside + found.fixed == pytest.approx(0.03, rel=0.05)
    assert found.inside > 0.2, "most of it is copying, which may cost more than operations show"


def test_what_a_small_snapshot_costs_is_no_copying() -> None:
    """Half a millisecond of copying cannot explain five."""
    found = believe(Belief(), SecondCost(0.1, 0.01, 60), None, Paired(0.005, 0.0005, 0.0005, 0.0), 0.035)
    assert found.costs.fixed == pytest.approx(0.005, rel=0.1)
    assert found.inside == pytest.approx(0.1, rel=0.2)


def test_what_was_believed_of_another_rung_fades() -> None:
    dear = Belief(outside=4.0, fixed=0.1)
    assert dear.faded(0) == dear
    assert dear.faded(256).outside == pytest.approx((4.0 + Belief().outside) / 2)
    assert dear.faded(10_000).costs.outside == pytest.approx(Belief().outside)
    assert dear.faded(10_000).costs.fixed == pytest.approx(0.0, abs=1e-9)


def test_what_pairs_say_goes_to_what_is_less_known() -> None:
    found = believe(Belief(), SecondCost(0.1, 0.001, 60), None, Paired(0.05, 0.0005, 0.1, 0.1), 0.1)
    assert abs(found.inside - 0.1) < abs(found.outside - 0.15)
    assert 0.1 * (found.inside + found.outside) == pytest.approx(0.05, rel=0.05)


@settings(deadline=None)
@given(
    inside=st.floats(-1, 5), outside=st.floats(-1, 5), error=st.floats(0, 1), seconds=st.floats(-1, 5),
    noise=st.floats(0, 1), times=st.tuples(st.floats(0, 1), st.floats(0, 1)), step=st.floats(0, 10),
)  # fmt: skip
def test_measuring_makes_no_belief_less_certain_than_the_model_and_no_cost_negative(
    inside: float, outside: float, error: float, seconds: float, noise: float, times: tuple[float, float], step: float
) -> None:
    seen = believe(Belief(), SecondCost(inside, error, 5), SecondCost(outside, error, 5), None, step)
    paired = believe(
        Belief(), SecondCost(inside, error, 5), SecondCost(outside, error, 5), Paired(seconds, noise, *times), step
    )
    assert paired.inside_error <= seen.inside_error * (1 + 1e-9)
    assert paired.outside_error <= seen.outside_error * (1 + 1e-9)
    assert min(paired.costs.inside, paired.costs.outside, seen.costs.inside) >= 0


def test_another_rung_begins_with_what_was_learnt_but_no_surer_than_at_first() -> None:
    carried = Belief(1.0, 0.01, 2.0, 0.6).carried()
    assert (carried.inside, carried.outside) == (1.0, 2.0)
    assert (carried.inside_error, carried.outside_error) == (Belief().inside_error, 0.6)


# ---------------------------------------------------------------- patience


def test_worse_at_once_better_with_patience_that_doubles() -> None:
    level = Steady(1)
    step, waits = 0, []
    for _ in range(10):
        level.to(3, step)
        assert level.level == 3
        began = step
        while level.wait(step):
            step += 1
        waits.append(step - began)
        level.to(1, step)
        step += 1
    assert waits[0] == PATIENCE
    assert all(later in (2 * sooner, MOST_PATIENCE) for sooner, later in pairwise(waits))
    assert waits[-1] == MOST_PATIENCE


@settings(deadline=None)
@given(seed=st.integers(0, 10**6))
def test_noise_changes_a_level_a_bounded_number_of_times(seed: int) -> None:
    chance = random.Random(seed)
    level, changes = Steady(1), 0
    for step in range(8_000):
        wanted = chance.choice((1, 2))
        if wanted > level.level or (wanted < level.level and not level.wait(step)):
            level.to(wanted, step)
            changes += 1
    assert changes <= 40
