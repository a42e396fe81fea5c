"""Fair division of amounts among holders: who takes how much so that all are filled as evenly as possible. Pure.

An *amount* (bytes, in `savers.py`) may go to any of its holders, in any parts. Each holder has a capacity and a load
that it carries anyway. Wanted is the division whose loads divided by capacities are lexicographically smallest when
sorted from the largest down: the highest is as low as possible (the optimum of the maximum-flow problem), then the
second highest, and so on. It exists and is unique in the loads (a flow into a polymatroid with weights), and is found
exactly by the decomposition algorithm (S. Fujishige, Lexicographically optimal base of a polymatroid with respect to
a weight vector, Math. of Operations Research 5, 1980; H. Groenevelt, European J. of Operational Research 54, 1991):

    suppose that everybody could be filled to the common average; ask a maximum flow. If all goes in, that is it.
    If not, the minimum cut names the holders that must stay above the average together with all amounts confined to
    them; these and the others are independent problems, solved in the same way.

One amount alone is solved in closed form (water-filling). All arithmetic is in whole numbers, so the result is the
same on every machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import gcd

__all__ = ["divide_fairly", "water_fill"]


def divide_fairly(
    amounts: Sequence[tuple[Sequence[int], int]], load: Mapping[int, int], capacity: Mapping[int, int]
) -> list[dict[int, int]]:
    """What each holder takes of each amount: a dict for each of `amounts`, whose values add up to it exactly.

    amounts: (holders, amount), amounts not negative, at least one holder each, none twice.
    load: what a holder carries anyway (absent: 0).
    capacity: of every holder, not negative. One without any takes nothing as long as another holder has some; where
    none has any, all count as equal.

    Whole numbers: a part differs from its exact value by less than 1.
    """
    usable: list[tuple[int, ...]] = []
    for holders, _ in amounts:
        with_room = tuple(sorted(holder for holder in holders if capacity[holder] > 0))
        usable.append(with_room or tuple(sorted(holders)))
    weight = {holder: capacity[holder] or 1 for holders in usable for holder in holders}
    carried = {holder: load.get(holder, 0) for holder in weight}
    taken: list[dict[int, int]] = [{} for _ in amounts]
    todo = [({number: holders for number, holders in enumerate(usable) if amounts[number][1] > 0}, frozenset(weight))]
    while todo:
        members, within = todo.pop()
        for part in _components(members, within):
            if len(part) == 1:
                ((number, holders),) = part.items()
                taken[number] = water_fill(amounts[number][1], holders, carried, weight)
                continue
            problem = _Problem(part, {number: amounts[number][1] for number in part}, carried, weight)
            above = problem.solve()
            if above is None:
                for number, parts in problem.taken().items():
                    taken[number] = parts
                continue
            high_amounts, high_holders = above
            rest = within - high_holders
            todo.append(({number: part[number] for number in part if number in high_amounts}, high_holders))
            todo.append(({number: part[number] for number in part if number not in high_amounts}, rest))
    return taken


def water_fill(
    amount: int, holders: Sequence[int], load: Mapping[int, int], capacity: Mapping[int, int]
) -> dict[int, int]:
    """Divide one amount so that those who take of it end at one level of load / capacity, which the others exceed.

    Capacities are positive. The parts add up to `amount`; who takes nothing is left out.
    """
    by_level = sorted(holders, key=lambda holder: (_Ratio(load.get(holder, 0), capacity[holder]), holder))
    total_load = total_capacity = count = 0
    for count, holder in enumerate(by_level):
        mine, room = load.get(holder, 0), capacity[holder]
        # Filling all before this one up to its level takes mine / room * total_capacity - total_load.
        if count and mine * total_capacity - total_load * room >= amount * room:
            break
        total_load += mine
        total_capacity += room
    else:
        count = len(by_level)
    wet = by_level[:count]
    above, below = amount + total_load, total_capacity  # the level, as a fraction
    exact = {holder: (above * capacity[holder] - load.get(holder, 0) * below, below) for holder in sorted(wet)}
    return _whole(amount, exact)


class _Ratio:
    """A fraction that is only compared: quicker than `fractions.Fraction`, which reduces each one."""

    __slots__ = ("above", "below")

    def __init__(self, above: int, below: int) -> None:
        self.above, self.below = above, below

    def __lt__(self, other: _Ratio) -> bool:
        return self.above * other.below < other.above * self.below

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ratio) and self.above * other.below == other.above * self.below

    __hash__ = None  # type: ignore[assignment]


def _whole(amount: int, exact: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Whole numbers that add up to `amount`, each within 1 of its exact value (a fraction): what is cut off goes to
    the largest remainders."""
    parts = {holder: above // below for holder, (above, below) in exact.items()}
    short = amount - sum(parts.values())
    if short:
        ranked = sorted(
            exact, key=lambda holder: (_Ratio(-(exact[holder][0] % exact[holder][1]), exact[holder][1]), holder)
        )
        for holder in ranked[:short]:
            parts[holder] += 1
    return {holder: part for holder, part in parts.items() if part}


def _components(members: Mapping[int, tuple[int, ...]], within: frozenset[int]) -> list[dict[int, tuple[int, ...]]]:
    """The amounts in groups that share no holder; holders outside of `within` are left out."""
    root: dict[int, int] = {}

    def find(one: int) -> int:
        while root[one] != one:
            root[one] = root[root[one]]
            one = root[one]
        return one

    kept = {number: tuple(h for h in holders if h in within) for number, holders in members.items()}
    for holders in kept.values():
        for holder in holders:
            root.setdefault(holder, holder)
        first = find(holders[0])
        for holder in holders[1:]:
            root[find(holder)] = first
    groups: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for number, holders in kept.items():
        groups[find(holders[0])][number] = holders
    return list(groups.values())


class _Problem:
    """Amounts that share holders. Holders alike in all respects (what they hold, capacity, load) are one node."""

    def __init__(
        self,
        members: Mapping[int, tuple[int, ...]],
        sizes: Mapping[int, int],
        load: Mapping[int, int],
        capacity: Mapping[int, int],
    ) -> None:
        self._numbers = sorted(members)
        self._sizes = [sizes[number] for number in self._numbers]
        held: dict[int, list[int]] = defaultdict(list)
        for index, number in enumerate(self._numbers):
            for holder in members[number]:
                held[holder].append(index)
        alike: dict[tuple[tuple[int, ...], int, int], list[int]] = defaultdict(list)
        for holder in sorted(held):
            alike[tuple(held[holder]), capacity[holder], load.get(holder, 0)].append(holder)
        self._groups = list(alike.values())
        self._capacity = [len(group) * key[1] for key, group in alike.items()]
        self._load = [len(group) * key[2] for key, group in alike.items()]
        self._holds = [key[0] for key in alike]
        self._holders: list[list[int]] = [[] for _ in self._numbers]
        for node, indices in enumerate(self._holds):
            for index in indices:
                self._holders[index].append(node)
        self._flow: list[dict[int, int]] = [{} for _ in self._numbers]
        self._scale = 1

    def solve(self) -> tuple[set[int], frozenset[int]] | None:
        """Try to fill everybody to the common level. None: it worked, `taken` has the result. Else the amounts and
        the holders that stay above it, together."""
        above = sum(self._sizes) + sum(self._load)
        below = sum(self._capacity)
        common = gcd(above, below)
        above, below = above // common, below // common
        self._scale = below
        room = [c * above - carried * below for c, carried in zip(self._capacity, self._load, strict=True)]
        left = [size * below for size in self._sizes]
        _saturate(self._holders, self._holds, left, room, self._flow)
        amounts, nodes = _reachable(self._holders, self._holds, left, room, self._flow)
        if not nodes:
            return None
        holders = frozenset(holder for node in nodes for holder in self._groups[node])
        return {self._numbers[index] for index in amounts}, holders

    def taken(self) -> dict[int, dict[int, int]]:
        """What each holder takes of each amount."""
        result = {}
        for index, number in enumerate(self._numbers):
            exact = {
                holder: (flow, self._scale * len(self._groups[node]))
                for node, flow in sorted(self._flow[index].items())
                if flow
                for holder in self._groups[node]
            }
            result[number] = _whole(self._sizes[index], exact)
        return result


def _saturate(
    holders: Sequence[Sequence[int]],
    holds: Sequence[Sequence[int]],
    left: list[int],
    room: list[int],
    flow: list[dict[int, int]],
) -> None:
    """A maximum flow from amounts (`left`) to nodes (`room`, negative: none), by Dinic's algorithm.

    `left`, `room` and `flow` are changed to what remains and what flows. Arcs have no limit of their own.
    """
    for index, nodes in enumerate(holders):  # a first flow, so that few paths remain to be looked for
        for node in nodes:
            part = min(left[index], room[node])
            if part > 0:
                flow[index][node] = part
                left[index] -= part
                room[node] -= part
            if not left[index]:
                break
    while True:
        depth, node_depth = _levels(holders, holds, left, room, flow)
        if node_depth is None:
            return
        _blocking(holders, holds, left, room, flow, depth, node_depth)


def _levels(
    holders: Sequence[Sequence[int]],
    holds: Sequence[Sequence[int]],
    left: Sequence[int],
    room: Sequence[int],
    flow: Sequence[Mapping[int, int]],
) -> tuple[list[int], list[int] | None]:
    """Distance of each amount and node from the amounts with something left; None when no room can be reached."""
    depth = [0 if rest else -1 for rest in left]
    node_depth = [-1] * len(room)
    layer = [index for index, rest in enumerate(left) if rest]
    while layer:
        reached = []
        found = False
        for index in layer:
            for node in holders[index]:
                if node_depth[node] < 0:
                    node_depth[node] = depth[index] + 1
                    reached.append(node)
                    found = found or room[node] > 0
        if found:
            return depth, node_depth
        layer = []
        for node in reached:
            for index in holds[node]:
                if depth[index] < 0 and flow[index].get(node, 0):
                    depth[index] = node_depth[node] + 1
                    layer.append(index)
    return depth, None


def _blocking(
    holders: Sequence[Sequence[int]],
    holds: Sequence[Sequence[int]],
    left: list[int],
    room: list[int],
    flow: list[dict[int, int]],
    depth: Sequence[int],
    node_depth: Sequence[int],
) -> None:
    """Send along shortest paths until each is blocked. A path alternates: amount, node, amount that gives way, ..."""
    next_node = [0] * len(holders)
    next_amount = [0] * len(room)
    for start in range(len(left)):
        while left[start]:
            path = [start]  # amounts at even places, nodes at odd ones
            while path:
                if len(path) % 2:
                    index = path[-1]
                    arcs = holders[index]
                    while next_node[index] < len(arcs) and node_depth[arcs[next_node[index]]] != depth[index] + 1:
                        next_node[index] += 1
                    if next_node[index] < len(arcs):
                        path.append(arcs[next_node[index]])
                    else:
                        path.pop()
                        if path:
                            next_amount[path[-1]] += 1
                    continue
                node = path[-1]
                if room[node] > 0:
                    break
                backs = holds[node]
                while next_amount[node] < len(backs) and not (
                    depth[backs[next_amount[node]]] == node_depth[node] + 1
                    and flow[backs[next_amount[node]]].get(node, 0)
                ):
                    next_amount[node] += 1
                if next_amount[node] < len(backs):
                    path.append(backs[next_amount[node]])
                else:
                    path.pop()
                    next_node[path[-1]] += 1
            if not path:
                break
            gives_way = [flow[path[at + 1]][path[at]] for at in range(1, len(path) - 1, 2)]
            part = min(left[start], room[path[-1]], *gives_way)
            left[start] -= part
            room[path[-1]] -= part
            for at in range(0, len(path), 2):
                flow[path[at]][path[at + 1]] = flow[path[at]].get(path[at + 1], 0) + part
                if at:
                    flow[path[at]][path[at - 1]] -= part


def _reachable(
    holders: Sequence[Sequence[int]],
    holds: Sequence[Sequence[int]],
    left: Sequence[int],
    room: Sequence[int],
    flow: Sequence[Mapping[int, int]],
) -> tuple[set[int], set[int]]:
    """Amounts and nodes on the side of the minimum cut that is too full: what cannot go in, and what that could push
    away; nodes without room from the start belong to it."""
    amounts = {index for index, rest in enumerate(left) if rest}
    nodes = {node for node, rest in enumerate(room) if rest < 0}
    todo = [(True, index) for index in amounts] + [(False, node) for node in nodes]
    while todo:
        is_amount, one = todo.pop()
        if is_amount:
            for node in holders[one]:
                if node not in nodes:
                    nodes.add(node)
                    todo.append((False, node))
        else:
            for index in holds[one]:
                if index not in amounts and flow[index].get(one, 0):
                    amounts.add(index)
                    todo.append((True, index))
    return amounts, nodes
