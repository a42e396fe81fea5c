"""What a fence may wait: the budget over a few steps, never more over many."""

from __future__ import annotations

from math import inf

import pytest

from baft_client.allowance import PERIODS, Allowance

STEP = 100_000_000
"""ns."""


def test_before_a_budget_nothing_is_limited_and_with_one_it_is_there_at_once() -> None:
    allowance = Allowance()
    for _ in range(5):
        assert allowance.seconds == inf, "nobody knows how long a step is, and no plan has a budget"
        allowance.passed(STEP, 0.0)
    allowance.passed(STEP, 0.01)
    assert allowance.seconds == pytest.approx(PERIODS * 0.001)


def test_it_fills_up_to_some_steps_and_no_further() -> None:
    allowance = Allowance()
    for _ in range(50):
        allowance.passed(STEP, 0.01)
        allowance.begun()
    assert allowance.seconds == pytest.approx(PERIODS * 0.001)
    allowance.waited(7_000_000)
    assert allowance.seconds == pytest.approx(0.001)
    allowance.passed(STEP, 0.01)
    assert allowance.seconds == pytest.approx(0.002)


def test_over_many_steps_fences_wait_for_no_more_than_the_budget() -> None:
    allowance, waited, steps = Allowance(), 0.0, 400
    for _ in range(steps):
        allowance.passed(STEP, 0.01)
        allowance.begun()
        now = allowance.seconds
        allowance.waited(int(now * 1e9))
        waited += now
    assert waited <= 0.01 * (steps + PERIODS) * STEP * 1e-9 + 1e-6


def test_what_a_longer_interval_has_saved_serves_its_fence() -> None:
    allowance = Allowance()
    for _ in range(3):
        for _ in range(30):
            allowance.passed(STEP, 0.01)
        allowance.begun()
        fence = allowance.seconds
        allowance.waited(int(0.03 * 1e9))
    assert fence >= 0.03


def test_a_fence_that_woke_up_late_does_not_cost_the_next_ones_their_snapshot() -> None:
    """On busy cores a wait of 7 ms can end after 100: that was the machine."""
    allowance = Allowance()
    allowance.passed(STEP, 0.01)
    allowance.waited(1_000_000_000)
    assert allowance.seconds == 0.0
    allowance.passed(STEP, 0.01)
    assert allowance.seconds == pytest.approx(0.001)
