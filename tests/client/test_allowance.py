"""What a fence may wait: the budget over a few steps, never more over many. First the rule, then in a session."""

from __future__ import annotations

import threading
import time
from math import inf
from typing import Any

import numpy as np
import pytest

from baft_client.allowance import LENGTHS, PERIODS, Allowance
from baft_client.engine import EngineHooks
from baft_client.source import Outcome, OutcomeKind
from baftd.wire.messages import CopyPlan
from tests.support.engines import soon
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.trainer import Places, Trainer

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
    assert allowance.seconds == pytest.approx(0.001)
    allowance.passed(STEP, 0.01)
    allowance.passed(STEP, 0.01)
    assert allowance.seconds == pytest.approx(0.002)


def steady(periods: int = 20) -> Allowance:
    """A job of equal steps, each with a snapshot whose fence waits for nothing."""
    allowance = Allowance()
    for _ in range(periods):
        allowance.passed(STEP, 0.01)
        allowance.begun()
    return allowance


@pytest.mark.parametrize("apart", [True, False])
def test_an_hour_of_evaluation_allows_no_longer_fence(apart: bool) -> None:
    """Said to be apart, or not said."""
    allowance = steady()
    allowance.passed(36_000 * STEP, 0.01, apart=apart)
    assert allowance.seconds == pytest.approx(PERIODS * 0.001)
    allowance.begun()
    allowance.passed(STEP, 0.01)
    assert allowance.seconds == pytest.approx(PERIODS * 0.001)


def test_a_period_apart_earns_nothing_and_says_nothing_of_others() -> None:
    allowance = steady()
    allowance.waited(6_000_000)
    for _ in range(LENGTHS + 3):
        allowance.passed(1000 * STEP, 0.01, apart=True)
        allowance.begun()
    assert allowance.seconds == pytest.approx(0.002)
    first = Allowance()
    first.passed(STEP, 0.01, apart=True)
    assert first.seconds == inf, "no length is known yet"


def test_a_compilation_in_the_first_period_is_forgotten_with_the_next() -> None:
    allowance = Allowance()
    allowance.passed(1200 * STEP, 0.01)
    allowance.begun()
    allowance.passed(STEP, 0.01)
    assert allowance.seconds == pytest.approx(PERIODS * 0.001)
    before_any_plan = Allowance()
    for length in (1200 * STEP, STEP, STEP):
        before_any_plan.passed(length, 0.0)
    before_any_plan.passed(STEP, 0.01)
    assert before_any_plan.seconds == pytest.approx(PERIODS * 0.001)


def test_a_very_short_period_takes_nothing_of_what_was_kept() -> None:
    allowance = steady()
    for _ in range(LENGTHS // 2):
        allowance.passed(STEP // 100, 0.01)
        allowance.begun()
        assert allowance.seconds == pytest.approx(PERIODS * 0.001)


def test_the_size_follows_steps_that_became_longer_for_good() -> None:
    allowance = steady()
    for _ in range(PERIODS + LENGTHS):
        allowance.passed(10 * STEP, 0.01)
        allowance.begun()
    assert allowance.seconds == pytest.approx(PERIODS * 0.01)


@pytest.mark.parametrize(("period", "apart"), [(STEP, True), (STEP // 100, False)])
def test_every_limited_fence_may_wait_for_the_budget_of_a_period(period: int, apart: bool) -> None:
    allowance = steady()
    for _ in range(4):
        allowance.passed(period, 0.01, apart=apart)
        allowance.begun()
        assert allowance.seconds >= 0.001 * (1 - 1e-9)
        allowance.waited(100_000_000)


class Held:
    """A session whose copies stand still at their first chunk until the test lets them go on."""

    def __init__(self, where: Places, engine: str) -> None:
        self.trainer = Trainer(where, engine=engine, size=30_000, engine_hooks=EngineHooks(hold=True))
        self.generation = 0

    def __enter__(self) -> Held:
        self.trainer.join()
        return self

    def __exit__(self, *exc: object) -> None:
        self.trainer.close()

    def let(self, chunks: int) -> None:
        """So many chunks may be copied."""
        control = self.trainer.session._layout._control
        assert control is not None
        control.set("hold_at", chunks)

    def plan(self, daemon: ScriptedDaemon) -> None:
        """A plan under which everything is copied at the fence."""
        assert daemon.token is not None
        self.generation += 1
        pushed = CopyPlan(token=daemon.token, rank=0, generation=self.generation, rung="fence", budget=BUDGET)
        daemon.push(pushed)
        standing = self.trainer.session._standing
        soon(lambda: standing.plan is not None and standing.plan.generation == self.generation, "the plan is there")

    def step(self, held: float, **options: Any) -> Outcome:
        """A step whose copy takes so many seconds at its fence. The period before it is known to be of usual length."""
        time.sleep(PERIOD)
        self.trainer.update()
        if not options:
            self.trainer.wait_for_grant()
        if self.trainer.session._layout._control is not None:
            self.let(0)
        assert self.trainer.boundary(**options).kind is OutcomeKind.BEGAN
        timer = threading.Timer(held, self.let, [1 << 30])
        timer.start()
        try:
            return self.trainer.fence()
        finally:
            timer.join()


BUDGET, PERIOD = 0.1, 0.2
"""20 ms of a period, 160 ms in all."""


@pytest.mark.parametrize("engine", ["native", "python"])
def test_fences_without_a_limit_cost_later_ones_nothing(where: Places, scripted: ScriptedDaemon, engine: str) -> None:
    """A forced one, and that of a layout declared anew, each take all that the next ones may wait."""
    with Held(where, engine) as job:
        assert job.step(0.0, force=True).kind is OutcomeKind.SEALED
        job.plan(scripted)
        assert [job.step(0.0).kind for _ in range(3)] == [OutcomeKind.SEALED] * 3
        allowance = job.trainer.session._snapshots._allowance
        before = allowance.seconds
        assert PERIODS * BUDGET * PERIOD <= before < inf

        assert job.step(PERIOD, force=True).kind is OutcomeKind.SEALED
        assert allowance.seconds >= 0.9 * before
        assert job.step(3.5 * BUDGET * PERIOD).kind is OutcomeKind.SEALED

        arrays = job.trainer.arrays
        arrays["more"] = np.zeros(30_000, dtype=np.float32)
        job.trainer.versions["more"] = 0
        job.trainer.build()
        kept = allowance.seconds
        assert job.step(PERIOD, force=True).kind is OutcomeKind.SEALED
        assert job.trainer.session.counters.declares == 2
        assert allowance.seconds >= 0.9 * kept
        job.plan(scripted)
        assert job.step(3.5 * BUDGET * PERIOD).kind is OutcomeKind.SEALED
        assert job.trainer.session.counters.skipped == {}

        assert job.step(2 * PERIODS * BUDGET * PERIOD).reason.startswith("late: "), "limited fences still are"
