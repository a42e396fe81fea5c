"""Overhead from pairs of steps: unbiased under drift and noise, honest about its error, and not misled by outliers."""

from __future__ import annotations

import random
from math import exp, sqrt
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.pipeline.overhead import FEWEST, Estimate, OverheadEstimator, median_and_error


def _estimate(
    seed: int, *, overhead: float, every: int = 1, probe: int = 4, noise: float = 0.02, drift: float = 0.0,
    steps: int = 2000, outliers: float = 0.0,
) -> Estimate | None:  # fmt: skip
    chance = random.Random(seed)
    estimator = OverheadEstimator()
    for step in range(steps):
        copied = step % every == 0 and not (every == 1 and chance.random() < 1 / probe)
        seconds = 0.5 * exp(drift * step) * exp(chance.gauss(0, noise))
        if chance.random() < outliers:
            seconds *= 1 + 5 * chance.random()
        estimator.add(step, seconds * (1 + overhead) if copied else seconds, copied)
    return estimator.estimate()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    overhead=st.floats(-0.01, 0.3),
    every=st.integers(1, 4),
    noise=st.floats(0.001, 0.05),
    drift=st.floats(-0.001, 0.001),
)
def test_what_is_measured_is_what_is(seed: int, overhead: float, every: int, noise: float, drift: float) -> None:
    found = _estimate(seed, overhead=overhead, every=every, noise=noise, drift=drift)
    assert found is not None
    assert found.pairs >= 50
    assert abs(found.value - overhead) <= 5 * found.error + 1e-3
    assert found.error <= 4 * noise / sqrt(found.pairs)


def test_it_is_not_biased_and_its_error_is_the_true_one() -> None:
    found = [_estimate(seed, overhead=0.02, every=3, noise=0.03, steps=600, drift=5e-4) for seed in range(80)]
    values = [one.value for one in found if one is not None]
    errors = [one.error for one in found if one is not None]
    assert len(values) == 80
    mean = sum(values) / len(values)
    spread = sqrt(sum((one - mean) ** 2 for one in values) / len(values))
    assert abs(mean - 0.02) < 4 * spread / sqrt(len(values))
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.3)


def test_every_step_is_part_of_one_pair_at_most() -> None:
    """Pairs that share a step are not independent: their error would be taken for too small."""
    estimator = OverheadEstimator()
    for step in range(300):
        estimator.add(step, 1.0, step % 2 == 0)
    assert estimator.pairs == 99
    estimator = OverheadEstimator()
    for step in range(300):
        estimator.add(step, 1.0, step % 4 == 0)
    assert estimator.pairs == 74


def test_steps_that_something_else_disturbed_do_not_count() -> None:
    clean = _estimate(3, overhead=0.02, every=3, noise=0.01)
    dirty = _estimate(3, overhead=0.02, every=3, noise=0.01, outliers=0.05)
    assert clean is not None
    assert dirty is not None
    assert dirty.dropped > clean.dropped
    assert abs(dirty.value - 0.02) < 0.005


def test_dropping_looks_at_outer_steps_only() -> None:
    """A copy that costs much is no outlier: were the middle step judged, it would be dropped and never seen."""
    estimator = OverheadEstimator()
    for step in range(300):
        estimator.add(step, 3.0 if step % 3 == 0 else 1.0, step % 3 == 0)
    found = estimator.estimate()
    assert found is not None
    assert found.value == pytest.approx(2.0)
    assert found.dropped == 0


@pytest.mark.parametrize("every", [1, 3, 4, 7])
def test_what_the_daemon_does_with_a_snapshot_afterwards_counts_too(every: int) -> None:
    chance = random.Random(2)
    estimator = OverheadEstimator()
    before = False
    for step in range(4000):
        copied = step % every == 0 and not (every == 1 and chance.random() < 1 / 8)
        seconds = (1 + 0.02 * copied + 0.01 * before) * exp(chance.gauss(0, 0.005))
        estimator.add(step, seconds, copied)
        before = copied
    found = estimator.estimate()
    assert found is not None
    assert abs(found.value - 0.03) < 4 * found.error + 1e-3
    assert found.error < 0.002


def test_gaps_and_impossible_steps_make_no_pairs() -> None:
    estimator = OverheadEstimator()
    for step in range(0, 300, 2):
        estimator.add(step, 1.0, step % 4 == 0)
    for step, seconds in enumerate((1.0, float("nan"), 1.0, -1.0, 1.0, 0.0, 1.0, float("inf"), 1.0), 1000):
        estimator.add(step, seconds, step % 2 == 0)
    assert estimator.pairs == 0
    assert estimator.estimate() is None


def test_too_few_pairs_are_no_answer_and_old_ones_are_forgotten() -> None:
    estimator = OverheadEstimator(pairs=32)
    for step in range(3 * (FEWEST - 1)):
        estimator.add(step, 1.0, step % 3 == 1)
    assert estimator.estimate() is None
    for step in range(100, 1000):
        estimator.add(step, 1.5 if step % 3 == 1 else 1.0, step % 3 == 1)
    found = estimator.estimate()
    assert found is not None
    assert (found.pairs, round(found.value, 6)) == (32, 0.5)
    estimator.forget()
    assert estimator.estimate() is None


def test_the_error_of_a_median_of_normal_samples() -> None:
    normal = NormalDist(5, 2)
    samples = [normal.inv_cdf((n + 0.5) / 4000) for n in range(4000)]
    middle, error = median_and_error(samples)
    assert middle == pytest.approx(5, abs=1e-6)
    assert error == pytest.approx(1.2533 * 2 / sqrt(4000), rel=0.01)
    with pytest.raises(ValueError, match="standard error"):
        median_and_error([1.0])
