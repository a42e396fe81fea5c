"""Why a job has its rung and interval: sentences that are true of the numbers beside them."""

from __future__ import annotations

import pytest

from baftd.pipeline.interval import Interval
from baftd.pipeline.ladder import Budget, Choice, SecondCosts, choose
from baftd.pipeline.overhead import Estimate
from baftd.pipeline.pacing import RankFacts
from baftd.pipeline.reasons import job_reason

AUTO = Interval()
FACTS = RankFacts(
    rank=3, bytes=64 << 20, step=0.1, windows=(0.01, 0.01), usable=(0.02,), rate=8e9, rate_outside=8e9, held=0.00091
)
"""Windows hold the snapshot, and the thread is held for 0.91 % of a step."""


def choice() -> Choice:
    return choose([FACTS], Budget(0.01), SecondCosts(0.0, 0.0), AUTO)


def reason(interval: int, fixed: Interval = AUTO, measured: Estimate | None = None, budget: float = 0.01) -> str:
    return job_reason(choice(), 3, {3: FACTS}, interval, Budget(budget), fixed, measured)


def test_the_planned_part_of_the_budget_explains_an_interval_that_looks_too_long() -> None:
    why = reason(2)
    assert "64 MiB a snapshot" in why
    assert "costs 0.91 % of a step, every 2 steps 0.4" in why
    planned = "0.8 of it is planned with, and a shorter interval is tried with patience"
    assert why.endswith(f", within the budget of 1 % ({planned}).")
    assert reason(1).endswith("a snapshot at every step costs 0.91 %, within the budget of 1 %.")
    assert "patience" not in reason(2, Interval(steps=2)), "nothing is tried where the interval is set"


@pytest.mark.parametrize(("value", "above"), [(0.013, True), (0.0121, True), (0.0119, False), (0.0095, False)])
def test_what_is_measured_above_the_budget_is_never_said_to_be_within(value: float, above: bool) -> None:
    """With an error of 0.1 %: above by more than two of them, or not surely."""
    measured = Estimate(value, 0.001, 40, 0)
    why = reason(1, measured=measured)
    assert ("measured above the budget of 1 %" in why) is above
    assert ("within" not in why) is above
    assert reason(1, Interval(steps=1), measured).endswith("by an interval that is set.") is above


def test_what_is_expected_above_the_budget_is_over_it_whatever_is_measured() -> None:
    for measured in (None, Estimate(0.0001, 0.0001, 40, 0), Estimate(0.5, 0.0001, 40, 0)):
        assert reason(1, measured=measured, budget=0.005).endswith("over the budget of 0.5 %.")


def test_no_figure_is_an_exponent_and_measured_ones_are_told_elsewhere() -> None:
    why = reason(1 << 19, measured=Estimate(1e-9, 1e-9, 40, 0), budget=1e-8)
    assert "budget of 0.000001 %" in why
    assert "e-0" not in why
    assert "measured" not in why
    assert "costs 100 %" in job_reason(
        Choice(1, choice().ranks, 3, 0.1, 0.1, 0.1, 0.1), 3, {3: FACTS}, 1, Budget(0.01), AUTO, None
    )
