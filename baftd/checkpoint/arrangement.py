"""How boxes lie to one another: overlaps, holes, and the disjoint cells that they make. Pure.

Thousands of ranks make thousands of boxes, too many to look at pair by pair: they are swept along one dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baftd.checkpoint.ranges import Box, Cell, said_all, subtract, volume, whole
from baftd.errors import LayoutError

__all__ = ["MAX_OVERLAPS", "Arrangement"]

_Ints: TypeAlias = npt.NDArray[np.int64]

_PAIRS_AT_ONCE = 1 << 20
"""Candidate pairs looked at in one go: bounds the memory that finding overlaps takes."""
MAX_OVERLAPS = 1 << 22
"""Pairs of ranges of one tensor that may overlap: nested divisions of thousands of ranks have some thousands."""


class Arrangement:
    """Different boxes of one tensor, none of them empty, and how they lie to one another.

    The boxes are sorted; numbers stand for their places in that order.
    """

    def __init__(self, boxes: Sequence[Box], dimensions: int) -> None:
        self.boxes = boxes
        corners = np.array(boxes, dtype=np.int64).reshape(len(boxes), dimensions, 2)
        self._low: _Ints = corners[:, :, 0]
        self._high: _Ints = corners[:, :, 1]

    @cached_property
    def volumes(self) -> list[int]:
        """Elements of each box."""
        sizes: list[int] = np.prod(self._high - self._low, axis=1, dtype=np.int64).tolist()
        return sizes

    @cached_property
    def overlaps(self) -> tuple[_Ints, _Ints]:
        """Pairs of boxes that share elements: two arrays of numbers, the first smaller, sorted.

        Raises LayoutError where they are more than `MAX_OVERLAPS`.
        """
        none = np.empty(0, np.int64)
        firsts, seconds, total = [none], [none], 0
        for first, second in self._meeting():
            total += len(first)
            if total > MAX_OVERLAPS:
                raise LayoutError(
                    f"{len(self.boxes)} ranges overlap one another in more than {MAX_OVERLAPS} pairs.",
                    ranges=said_all(self.boxes),
                )
            firsts.append(np.minimum(first, second))
            seconds.append(np.maximum(first, second))
        first, second = np.concatenate(firsts), np.concatenate(seconds)
        order = np.lexsort((second, first))
        return first[order], second[order]

    @property
    def overlap(self) -> tuple[int, int] | None:
        """A pair of boxes that share elements; None where there is none."""
        for first, second in self._meeting():
            if len(first):
                return min(int(first[0]), int(second[0])), max(int(first[0]), int(second[0]))
        return None

    def _meeting(self) -> Iterator[tuple[_Ints, _Ints]]:
        """Pairs that share elements, some millions of candidates at a time."""
        for first, second in self._candidates():
            meet = ((self._low[first] < self._high[second]) & (self._low[second] < self._high[first])).all(axis=1)
            yield first[meet], second[meet]

    def _is_grid(self) -> bool:
        """The boxes are all combinations of disjoint intervals of each dimension, and so do not overlap."""
        count, dimensions = self._low.shape
        combinations = 1
        for axis in range(dimensions):
            intervals = np.unique(np.stack((self._low[:, axis], self._high[:, axis]), axis=1), axis=0)
            if (intervals[1:, 0] < intervals[:-1, 1]).any():
                return False
            combinations *= len(intervals)
        return combinations == count

    @cached_property
    def first_crossing(self) -> tuple[int, int] | None:
        """The first pair of boxes that overlap, neither within the other."""
        first, second = self.overlaps
        if not len(first):
            return None
        crossing = np.flatnonzero(~(self._within(first, second) | self._within(second, first)))
        return (int(first[crossing[0]]), int(second[crossing[0]])) if len(crossing) else None

    def hole(self, shape: Sequence[int]) -> Box | None:
        """A range of a tensor of this shape that no box covers; None where there is none."""
        if self._covered() >= prod(shape):
            return None
        holes = [whole(shape)]
        for box in self.boxes:
            holes = [part for hole in holes for part in subtract(hole, box)]
        return min(box for box, _ in _join([(hole, ()) for hole in holes]))

    def cells(self, holders: Sequence[tuple[int, ...]]) -> tuple[Cell, ...]:
        """Disjoint cells of all boxes, sorted; `holders[i]` are the ranks of box i, ascending."""
        made = []
        for numbers in self._components():
            if len(numbers) == 1:
                made.append(Cell(self.boxes[numbers[0]], holders[numbers[0]]))
                continue
            together: dict[tuple[int, ...], tuple[int, ...]] = {}
            for box, signature in _cut(self.boxes, numbers):
                if signature not in together:
                    together[signature] = tuple(sorted({rank for number in signature for rank in holders[number]}))
                made.append(Cell(box, together[signature]))
        made.sort(key=lambda cell: cell.box)
        return tuple(made)

    def _covered(self) -> int:
        """Elements that lie in some box."""
        first, second = self.overlaps
        if not len(first):
            return sum(self.volumes)
        if self.first_crossing is None:
            inner = set(np.where(self._within(first, second), first, second).tolist())
            return sum(size for number, size in enumerate(self.volumes) if number not in inner)
        return sum(volume(cell.box) for cell in self.cells([()] * len(self.boxes)))

    def _within(self, inner: _Ints, outer: _Ints) -> npt.NDArray[np.bool_]:
        inside: npt.NDArray[np.bool_] = (
            (self._low[outer] <= self._low[inner]) & (self._high[inner] <= self._high[outer])
        ).all(axis=1)
        return inside

    def _candidates(self) -> Iterator[tuple[_Ints, _Ints]]:
        """Pairs that overlap along the dimension in which the fewest do, some millions at a time."""
        count, dimensions = self._low.shape
        if count < 2 or not dimensions:
            return
        best: tuple[int, _Ints, _Ints] | None = None
        for axis in range(dimensions):
            order = np.argsort(self._low[:, axis], kind="stable")
            low = self._low[order, axis]
            # Box k of this order meets those after it that begin before it ends.
            meets = np.searchsorted(low, self._high[order, axis], side="left") - np.arange(1, count + 1)
            total = int(meets.sum())
            if not total:
                return
            if best is None or total < best[0]:
                best = total, order, meets
        assert best is not None
        total, order, meets = best
        if total > _PAIRS_AT_ONCE and self._is_grid():
            return
        ends = np.cumsum(meets)
        begin = 0
        while begin < count:
            already = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, already + _PAIRS_AT_ONCE, side="right")))
            part = meets[begin:end]
            first = np.repeat(np.arange(begin, end), part)
            second = np.arange(int(part.sum())) - np.repeat(np.cumsum(part) - part, part) + first + 1
            if len(first):
                yield order[first], order[second]
            begin = end

    def _components(self) -> list[list[int]]:
        """Numbers of boxes that hang together by overlaps, each list and the lists ascending."""
        parent = list(range(len(self.boxes)))

        def root(number: int) -> int:
            while parent[number] != number:
                parent[number] = parent[parent[number]]
                number = parent[number]
            return number

        first, second = self.overlaps
        for one, other in zip(first.tolist(), second.tolist(), strict=True):
            a, b = root(one), root(other)
            parent[max(a, b)] = min(a, b)
        grouped: dict[int, list[int]] = {}
        for number in range(len(self.boxes)):
            grouped.setdefault(root(number), []).append(number)
        return list(grouped.values())


def _cut(boxes: Sequence[Box], numbers: Sequence[int]) -> list[tuple[Box, tuple[int, ...]]]:
    """Disjoint boxes that cover those with these numbers, each with the numbers of all that it lies in.

    Halves the region at the middle one of the corners inside it until every box covers all of a part or nothing of
    it, then joins neighbours that were cut for the sake of others.
    """
    hull = tuple(
        (min(boxes[n][axis][0] for n in numbers), max(boxes[n][axis][1] for n in numbers))
        for axis in range(len(boxes[numbers[0]]))
    )
    done: list[tuple[Box, tuple[int, ...]]] = []
    open_: list[tuple[Box, list[int]]] = [(hull, list(numbers))]
    while open_:
        region, inside = open_.pop()
        corners: list[int] = []
        cut_axis = 0
        for axis, (start, stop) in enumerate(region):
            found = {corner for n in inside for corner in boxes[n][axis] if start < corner < stop}
            if len(found) > len(corners):
                corners, cut_axis = sorted(found), axis
        if not corners:
            done.append((region, tuple(inside)))
            continue
        at = corners[len(corners) // 2]
        start, stop = region[cut_axis]
        for part in ((start, at), (at, stop)):
            half = (*region[:cut_axis], part, *region[cut_axis + 1 :])
            left = [n for n in inside if boxes[n][cut_axis][0] < part[1] and part[0] < boxes[n][cut_axis][1]]
            if left:
                open_.append((half, left))
    return _join(done)


def _join(parts: list[tuple[Box, tuple[int, ...]]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Join boxes of equal signature that touch along one dimension and are equal in the others."""
    axis, unchanged, dimensions = 0, 0, len(parts[0][0])
    while unchanged < dimensions:
        rows: dict[tuple[tuple[int, ...], Box, Box], list[tuple[int, int]]] = {}
        for box, signature in parts:
            rows.setdefault((signature, box[:axis], box[axis + 1 :]), []).append(box[axis])
        joined: list[tuple[Box, tuple[int, ...]]] = []
        for (signature, before, after), intervals in rows.items():
            intervals.sort()
            start, stop = intervals[0]
            for low, high in [*intervals[1:], (-1, -1)]:
                if low == stop:
                    stop = high
                    continue
                joined.append(((*before, (start, stop), *after), signature))
                start, stop = low, high
        unchanged = unchanged + 1 if len(joined) == len(parts) else 1
        parts = joined
        axis = (axis + 1) % dimensions
    return parts
