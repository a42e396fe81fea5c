"""Fair division: against all subsets of holders (Hall's condition), and against moving anything by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.fair import divide_fairly, water_fill

Amounts = list[tuple[list[int], int]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Amounts, dict[int, int], dict[int, int]]:
    """(amounts, loads, capacities) of up to seven holders. Loads and capacities are often equal, as in real jobs."""
    ranks = range(draw(st.integers(1, 7)))
    capacity = {rank: draw(st.sampled_from([1, 1, 7, 12])) for rank in ranks}
    load = {rank: draw(st.sampled_from([0, 0, 300, 4096])) for rank in ranks}
    holders = st.sets(st.sampled_from(list(ranks)), min_size=1).map(sorted)
    amounts = draw(st.lists(st.tuples(holders, st.one_of(st.just(0), st.integers(1, 10_000))), max_size=6))
    return amounts, load, capacity


def loads_after(amounts: Amounts, load: dict[int, int], taken: list[dict[int, int]]) -> dict[int, int]:
    """What each holder carries in the end; checks that everything was taken by those who may."""
    total = dict(load)
    for (holders, amount), parts in zip(amounts, taken, strict=True):
        assert sum(parts.values()) == amount
        assert set(parts) <= set(holders)
        assert all(part > 0 for part in parts.values())
        for holder, part in parts.items():
            total[holder] += part
    return total


def lowest_peak(amounts: Amounts, load: dict[int, int], capacity: dict[int, int]) -> Fraction:
    """What the fullest holder carries at best: the fullest set of holders, with all that only they may take."""
    everyone = sorted(capacity)
    return max(
        Fraction(
            sum(load[rank] for rank in some) + sum(amount for holders, amount in amounts if set(holders) <= set(some)),
            sum(capacity[rank] for rank in some),
        )
        for some in chain.from_iterable(combinations(everyone, size) for size in range(1, len(everyone) + 1))
    )


@given(problems())
@settings(max_examples=150, deadline=None)
def test_the_fullest_is_as_low_as_it_can_be(problem: tuple[Amounts, dict[int, int], dict[int, int]]) -> None:
    amounts, load, capacity = problem
    total = loads_after(amounts, load, divide_fairly(amounts, load, capacity))
    peak = max(Fraction(total[rank], capacity[rank]) for rank in capacity)
    assert peak <= lowest_peak(amounts, load, capacity) + len(amounts)  # less than 1 is lost by rounding, each time


@given(problems())
@settings(max_examples=150, deadline=None)
def test_nothing_can_be_moved_to_somebody_less_filled(
    problem: tuple[Amounts, dict[int, int], dict[int, int]],
) -> None:
    amounts, load, capacity = problem
    taken = divide_fairly(amounts, load, capacity)
    total = loads_after(amounts, load, taken)
    lost = len(amounts) + 1
    for (holders, _), parts in zip(amounts, taken, strict=True):
        for giver in parts:
            for other in holders:
                assert Fraction(total[giver] - lost, capacity[giver]) <= Fraction(total[other] + lost, capacity[other])


@given(problems())
@settings(max_examples=30, deadline=None)
def test_order_of_holders_changes_nothing(problem: tuple[Amounts, dict[int, int], dict[int, int]]) -> None:
    amounts, load, capacity = problem
    turned = [(holders[::-1], amount) for holders, amount in amounts]
    assert divide_fairly(amounts, load, capacity) == divide_fairly(turned, load, capacity)


def test_a_holder_without_capacity_takes_only_what_nobody_else_can() -> None:
    taken = divide_fairly([([0, 1], 100), ([1, 2], 30)], {}, {0: 5, 1: 0, 2: 0})
    assert taken == [{0: 100}, {1: 15, 2: 15}]


def test_water_fills_from_below() -> None:
    assert water_fill(10, [0, 1, 2], {0: 100, 1: 4}, {0: 1, 1: 1, 2: 1}) == {1: 3, 2: 7}
    assert water_fill(9, [0, 1], {}, {0: 1, 1: 2}) == {0: 3, 1: 6}
    assert water_fill(1, [3, 4], {}, {3: 1, 4: 1}) == {3: 1}  # a tie goes to the lower number


def test_a_long_chain_of_neighbours() -> None:
    """Each amount may go to two neighbours only: what lies at one end must be handed on through all of them."""
    count = 300
    amounts: Amounts = [([rank, rank + 1], 1000) for rank in range(count)]
    amounts.append(([0], 300_000))
    total = loads_after(
        amounts,
        dict.fromkeys(range(count + 1), 0),
        divide_fairly(amounts, {}, dict.fromkeys(range(count + 1), 1)),
    )
    assert total[0] == 300_000
    assert max(total[rank] for rank in range(1, count + 1)) - min(total[rank] for rank in range(1, count + 1)) <= 2


def test_chained_stages_of_four_thousand_ranks_take_no_time() -> None:
    """Tied ends, amounts that a whole stage and the whole job hold, and no two ranks alike."""
    capacity = {rank: 10**9 + rank * 7919 for rank in range(4096)}
    load = {rank: 10**8 + rank * 104_729 % 10**8 for rank in range(4096)}
    amounts: Amounts = []
    for stage in range(0, 4096, 256):
        amounts += [(list(range(first, first + 32)), 10**10 + first) for first in range(stage, stage + 256, 32)]
        amounts.append((list(range(stage, stage + 256)), 10**8))
    amounts.append(([*range(256), *range(3840, 4096)], 10**9))
    amounts.append((list(range(4096)), 10**6))
    total = loads_after(amounts, load, divide_fairly(amounts, load, capacity))
    sets = [range(first, first + 32) for first in range(0, 4096, 32)] + [range(s, s + 256) for s in range(0, 4096, 256)]
    confined = max(
        Fraction(
            sum(load[rank] for rank in some)
            + sum(amount for holders, amount in amounts if holders[0] in some and holders[-1] in some),
            sum(capacity[rank] for rank in some),
        )
        for some in sets
    )
    assert 0 <= max(Fraction(total[rank], capacity[rank]) for rank in capacity) - confined < Fraction(1, 10**6)
