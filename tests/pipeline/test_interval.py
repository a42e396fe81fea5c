"""Intervals: the fewest steps within a budget, and Young's and Daly's optima against the cost that they approximate."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.errors import UsageError
from baftd.pipeline.interval import LONGEST, Interval, daly, steps_for, young


@settings(deadline=None)
@given(
    cost=st.floats(0, 1e4, allow_nan=False), budget=st.floats(1e-4, 0.5), step=st.floats(1e-4, 1e3, allow_nan=False)
)
def test_the_fewest_steps_that_stay_within_the_budget(cost: float, budget: float, step: float) -> None:
    steps = steps_for(cost, budget, step)
    assert 1 <= steps <= LONGEST
    if steps < LONGEST:
        assert cost <= budget * step * steps * (1 + 1e-6)
    if steps > 1:
        assert cost > budget * step * (steps - 1) * (1 - 1e-6)


def test_a_quotient_that_is_whole_but_for_rounding_is_whole() -> None:
    assert 0.07 / 0.01 > 7
    assert steps_for(0.07, 0.01, 1.0) == 7


def test_nothing_known_of_the_step_gives_the_longest_interval_and_no_error() -> None:
    assert steps_for(1.0, 0.01, 0.0) == steps_for(1e300, 0.01, 1e-300) == LONGEST
    assert steps_for(0.0, 0.01, 0.0) == steps_for(-1.0, 0.01, 1.0) == 1


def test_fixed_intervals() -> None:
    assert Interval().auto
    assert Interval(steps=3).fixed_steps(0.5) == 3
    assert Interval(seconds=10).fixed_steps(0.6) == 16
    assert Interval(seconds=10).fixed_steps(60) == 1
    assert Interval(seconds=10).fixed_steps(0) == 1
    for wrong in ((-1, 0.0), (1, 1.0), (0, -1.0), (0, float("inf")), (0, float("nan"))):
        with pytest.raises(UsageError):
            Interval(*wrong)


def _run(write: float, mtbf: float, interval: float) -> float:
    """Seconds that a second of work takes on average: exponential failures, restarts free (Daly's complete model)."""
    return mtbf * (exp((interval + write) / mtbf) - 1) / interval


def _optimum(write: float, mtbf: float) -> float:
    """By golden sections."""
    low, high = write / 1e4, 10 * mtbf
    for _ in range(200):
        a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
        if _run(write, mtbf, a) < _run(write, mtbf, b):
            high = b
        else:
            low = a
    return (low + high) / 2


@pytest.mark.parametrize("part", [1e-5, 1e-3, 0.01, 0.1, 0.5, 1.0])
def test_daly_loses_no_more_than_a_thousandth_against_the_true_optimum(part: float) -> None:
    mtbf = 86400.0
    write = part * mtbf
    best = _run(write, mtbf, _optimum(write, mtbf))
    assert _run(write, mtbf, daly(write, mtbf)) <= best * 1.001
    assert daly(write, mtbf) == pytest.approx(_optimum(write, mtbf), rel=0.05)


def test_young_is_the_first_order_of_it() -> None:
    assert young(0.5, 10_000) == pytest.approx(100.0)
    assert young(1e-4, 1e6) == pytest.approx(daly(1e-4, 1e6), rel=1e-3)


def test_a_write_that_outlasts_failures_is_made_once_between_them() -> None:
    assert daly(200.0, 100.0) == 100.0


@pytest.mark.parametrize("wrong", [(0, 1), (1, 0), (-1, 1), (float("inf"), 1), (1, float("nan"))])
def test_times_that_cannot_be_are_refused(wrong: tuple[float, float]) -> None:
    for formula in (young, daly):
        with pytest.raises(UsageError):
            formula(*wrong)
