"""Copy plans and the ladder: where bytes go, what that costs, and which rung is taken."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.errors import ProtocolError
from baftd.pipeline.interval import Interval
from baftd.pipeline.ladder import RUNGS, Budget, SecondCosts, choose, options
from baftd.pipeline.pacing import (
    BLOCK,
    NO_LIMIT,
    RankFacts,
    RankPlan,
    copy_plan,
    expected_left,
    pace_for,
    spend_needed,
    sure_bytes,
    timed_plan,
    window_bytes,
)  # fmt: skip
from baftd.pipeline.profile import WAKE
from baftd.wire.codec import decode_reply, encode
from baftd.wire.messages import CopyPlan, WireToken

MB, MIB = 10**6, 1 << 20
FREE = SecondCosts(0.0, 0.0)
BUDGET = Budget(0.01)


def facts(nbytes: int = 500 * MB, windows: tuple[float, ...] = (0.05, 0.05, 0.05, 0.05), **more: object) -> RankFacts:
    """A rank whose windows are always the same."""
    usable = (sum(max(0.0, one - WAKE) for one in windows),) * 5
    base = RankFacts(0, nbytes, step=0.7, windows=windows, usable=usable, spend=0.95, rate=9e9, rate_outside=9e9)
    return replace(base, **more)  # type: ignore[arg-type]


_windows = st.lists(st.floats(0, 0.5), max_size=12).map(tuple)


@settings(deadline=None)
@given(
    windows=_windows, nbytes=st.integers(1, 10**10), rate=st.floats(1e6, 2e10), spend=st.floats(0.1, 0.95)
)
def test_no_window_is_given_more_than_its_part_and_all_are_in_blocks(
    windows: tuple[float, ...], nbytes: int, rate: float, spend: float
) -> None:
    plan = copy_plan(facts(nbytes, windows, rate=rate), spend)
    assert len(plan.windows) == len(windows)
    for seconds, granted in zip(windows, plan.windows, strict=True):
        assert granted % BLOCK == 0
        assert granted <= seconds * rate * spend + BLOCK / 2
    assert 0 < plan.further <= NO_LIMIT
    assert plan.outside == 0


def test_a_window_that_is_over_before_the_engine_is_awake_takes_nothing() -> None:
    assert window_bytes(WAKE, 9e9, 1.0) == window_bytes(0.0, 9e9, 1.0) == 0
    assert window_bytes(WAKE + 0.01, 9e9, 1.0) == BLOCK * round(0.01 * 9e9 / BLOCK)


def test_no_more_of_the_windows_is_granted_than_needed_and_never_more_than_learnt() -> None:
    assert spend_needed(facts(10 * MB)) == 0.4
    assert spend_needed(facts(1000 * MB)) == pytest.approx(ceil(1.25 * 1000 / (9000 * 0.1996) * 20) / 20)
    assert spend_needed(facts(10**10)) == 0.95
    assert spend_needed(facts(10 * MB, spend=0.2)) == 0.2
    assert spend_needed(facts(10 * MB, windows=())) == 0.95


def test_what_is_left_is_counted_over_the_steps_that_were_seen() -> None:
    uneven = facts(100 * MB, usable=(0.01, 0.02, 0.005), rate=1e10)
    assert expected_left(uneven, 1.0) == pytest.approx((0 + 0 + 50 * MB) / 3)
    assert expected_left(uneven, 0.5) == pytest.approx((50 * MB + 0 + 75 * MB) / 3)
    assert expected_left(uneven, 1.0, carried=60 * MB) == 0
    assert sure_bytes(uneven, 1.0) == 50 * MB
    assert expected_left(facts(7, (), usable=()), 1.0) == 7


def test_the_pace_is_as_slow_as_will_do() -> None:
    calm = facts(500 * MB, (), usable=(), hurry=1.25)
    pace = pace_for(350 * MB, calm)
    assert pace == pytest.approx(350 * MB / 0.7 * 1.25, abs=1 << 20)
    assert pace_for(10**12, calm) == pytest.approx(9e9, abs=1 << 20)
    assert pace_for(1, calm) == 1 << 20


@settings(deadline=None)
@given(gaps=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.2)), max_size=8), nbytes=st.integers(0, 10**9))
def test_clock_anchored_windows_lie_within_their_gaps_and_hold_no_more_than_the_snapshot(
    gaps: list[tuple[float, float]], nbytes: int
) -> None:
    spans = [(begin, begin + length) for begin, length in gaps]
    found = timed_plan(spans, nbytes, 9e9, 0.4)
    assert sum(granted for _, _, granted in found) <= nbytes
    for begin, end, granted in found:
        assert granted > 0
        assert any(first * 1e9 <= begin + 1 and end <= last * 1e9 + 1 for first, last in spans)


# ---------------------------------------------------------------- numbers that cannot be

_absurd = st.one_of(st.floats(0, 1e308), st.sampled_from([inf, nan, 2.0**53, 2.0**64, 7e22]))
_sizes = st.integers(0, 1 << 80)


def _on_the_wire(plan: RankPlan) -> None:
    """A rank can read it."""
    sent = CopyPlan(
        token=WireToken(1, "a" * 32), rank=0, generation=1, rung=plan.rung, windows=list(plan.windows),
        further=plan.further, outside=plan.outside, timed=list(plan.timed),
    )  # fmt: skip
    assert decode_reply([encode(sent)]) == sent
    assert 0 <= plan.left <= NO_LIMIT


def test_what_a_message_takes_is_no_limit() -> None:
    _on_the_wire(RankPlan((NO_LIMIT,), NO_LIMIT, NO_LIMIT, NO_LIMIT, timed=((NO_LIMIT, NO_LIMIT, NO_LIMIT),)))
    with pytest.raises(ProtocolError):
        _on_the_wire(RankPlan((NO_LIMIT + 1,)))


@settings(deadline=None)
@given(seconds=_absurd, rate=_absurd, spend=st.floats(0, 1), outside=_sizes, left=_sizes)
def test_no_number_of_a_plan_is_beyond_what_a_message_takes(
    seconds: float, rate: float, spend: float, outside: int, left: int
) -> None:
    granted = window_bytes(seconds, rate, spend)
    assert 0 <= granted <= NO_LIMIT
    assert granted % BLOCK == 0
    absurd = facts(windows=(seconds, 0.05), usable=(seconds,) * 3, rate=rate, rate_outside=rate, step=seconds)
    assert 0 <= sure_bytes(absurd, spend) <= NO_LIMIT
    _on_the_wire(copy_plan(absurd, spend, outside=outside, left=left))
    _on_the_wire(RankPlan(outside=pace_for(float(left), absurd)))
    _on_the_wire(RankPlan(outside=pace_for(rate, absurd)))
    _on_the_wire(RankPlan(timed=timed_plan([(0.0, seconds), (seconds, 2 * seconds)], left, rate, spend)))


def test_a_copy_of_no_time_is_granted_no_more_than_there_is() -> None:
    """2^64 - 1 bytes in 51 us."""
    rate = (2**64 - 1) / 51e-6
    assert window_bytes(0.2, rate, 0.95) == NO_LIMIT // BLOCK * BLOCK
    assert pace_for(1e30, facts(rate_outside=rate)) == NO_LIMIT // MIB * MIB


# ---------------------------------------------------------------- the ladder


def _rung(one: RankFacts, costs: SecondCosts = FREE, fixed: Interval | None = None) -> tuple[str, int, str]:
    choice = choose([one], BUDGET, costs, fixed or Interval())
    return choice.ranks[0].rung, choice.interval, choice.rung


def test_the_rungs_in_their_order() -> None:
    assert _rung(facts()) == ("windows", 1, "windows")
    assert _rung(facts(held_bytes=10**10)) == ("divided", 1, "divided")
    assert _rung(facts(held_bytes=600 * MB)) == ("windows", 1, "windows"), "undivided it would fit as well"
    assert _rung(facts(2000 * MB)) == ("overlap", 1, "overlap")
    dear = SecondCosts(0.0, 5.0)
    assert _rung(facts(1740 * MB), dear) == ("fence", 1, "fence")
    device = facts(2000 * MB, device_free=10**9, device_rate=1e12)
    assert _rung(device, dear) == ("device", 1, "device")
    assert _rung(facts(10_000 * MB), SecondCosts(0.0, 1.0))[2] == "interval"


def test_a_device_without_room_is_no_rung() -> None:
    dear = SecondCosts(0.0, 5.0)
    for free, rate in ((10 * MB, 1e12), (10**10, 0.0)):
        rungs = [one.rung for one in options(facts(2000 * MB, device_free=free, device_rate=rate), dear)]
        assert "device" not in rungs


def test_windows_are_used_before_anything_else_and_the_rest_is_small() -> None:
    overlap = next(one for one in options(facts(2000 * MB), FREE) if one.rung == "overlap")
    assert sum(overlap.plan.windows) == pytest.approx(0.95 * 0.1996 * 9e9, rel=0.01)
    assert 0 < overlap.plan.outside < 2e9
    assert overlap.inside * 9e9 + overlap.outside * 9e9 == pytest.approx(2000 * MB)


@settings(deadline=None)
@given(
    nbytes=st.integers(1, 10**10), windows=_windows, held=st.floats(0, 0.01),
    inside=st.floats(0, 1), outside=st.floats(0, 3), spend=st.floats(0.1, 0.95),
)  # fmt: skip
def test_the_interval_is_never_longer_than_needed_and_the_budget_holds(
    nbytes: int, windows: tuple[float, ...], held: float, inside: float, outside: float, spend: float
) -> None:
    one = facts(nbytes, windows, held=held, spend=spend)
    costs = SecondCosts(inside, outside)
    choice = choose([one], BUDGET, costs, Interval())
    offered = options(one, costs)
    assert offered, "a rank can always do something"
    least = min(option.cost for option in offered)
    assert choice.overhead(choice.interval) <= BUDGET.planned * (1 + 1e-6)
    if choice.interval > 1:
        assert least / ((choice.interval - 1) * one.step) > BUDGET.planned * (1 - 1e-6)
    earlier = [option for option in offered if RUNGS.index(option.rung) < RUNGS.index(choice.ranks[0].rung)]
    affordable = BUDGET.planned * choice.interval * one.step
    assert all(option.cost > affordable * (1 - 1e-6) for option in earlier), "an earlier rung would have done"
    for option in offered:
        assert option.plan.left >= 0
        assert option.inside >= -1e-9
        assert option.outside >= 0


def test_the_slowest_rank_decides_and_is_named() -> None:
    ranks = [replace(facts(), rank=rank, held=held) for rank, held in enumerate((0.001, 0.02, 0.003))]
    choice = choose(ranks, BUDGET, FREE, Interval())
    assert choice.slowest == 1
    assert choice.interval == ceil(0.02 / (0.008 * 0.7))


def test_what_a_rung_did_not_hold_is_counted_against_it() -> None:
    one = facts()
    assert _rung(one)[:2] == ("windows", 1)
    assert _rung(replace(one, short=(("windows", 0.02),))) == ("windows", ceil(0.02 / (0.008 * 0.7)), "interval")


def test_a_rank_stays_on_its_rung_for_little() -> None:
    """Windows that hold all but 2 % are not taken, but not left either."""
    sure = 0.1996 * 9e9 * 0.95
    little = facts(int(sure * 1.02))
    assert options(little, FREE)[0].rung != "windows"
    assert options(replace(little, rung="windows"), FREE)[0].rung == "windows"
    assert options(replace(facts(int(sure * 1.1)), rung="windows"), FREE)[0].rung != "windows"
    kept = choose([facts(int(sure * 0.995), rung="overlap")], BUDGET, FREE, Interval(), keep={0: "overlap"})
    assert kept.ranks[0].rung == "overlap"


def test_fixed_intervals_hold_whatever_they_cost() -> None:
    one = facts(held=0.1)
    assert _rung(one, fixed=Interval(steps=2))[1] == 2
    assert _rung(one, fixed=Interval(seconds=7.0))[1] == 10
    assert choose([one], BUDGET, FREE, Interval(seconds=7.0), now=11).interval == 11, "a tenth off is near enough"
    assert choose([one], BUDGET, FREE, Interval(seconds=7.0), now=20).interval == 10


def test_no_ranks_are_no_error() -> None:
    choice = choose([], BUDGET, FREE, Interval())
    assert (choice.interval, choice.slowest, choice.rung, choice.overhead(1)) == (1, -1, "windows", 0.0)
