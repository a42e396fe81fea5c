"""Index ranges of tensors: boxes, the ranges of a flattened tensor as boxes, disjoint cells of overlapping boxes. Pure.

A box is one (start, stop) a dimension, in elements of the whole tensor; `()` is the one element of a 0-dimensional
tensor. A box without elements is legal everywhere and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from baftd.errors import LayoutError

__all__ = [
    "Arrangement",
    "Box",
    "Cell",
    "contains",
    "flat_boxes",
    "intersection",
    "outside",
    "refine",
    "said",
    "said_all",
    "subtract",
    "tiling_problem",
    "volume",
    "whole",
]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""One (start, stop) a dimension."""

_Ints: TypeAlias = npt.NDArray[np.int64]

_PAIRS_AT_ONCE = 1 << 20
"""Candidate pairs looked at in one go: bounds the memory that finding overlaps takes."""
MAX_OVERLAPS = 1 << 22
"""Pairs of ranges of one tensor that may overlap: nested divisions of thousands of ranks have some thousands."""


class Cell(NamedTuple):
    """A range that no other cell shares, and the ranks that hold it, ascending. It lies within one box of each."""

    box: Box
    holders: tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements in a box."""
    return prod(max(0, stop - start) for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share; None where that is no element. `()` and `()` share `()`."""
    shared = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of `inner` lies in `outer` (one without elements lies in any)."""
    return not volume(inner) or all(p <= r and s <= q for (p, q), (r, s) in zip(outer, inner, strict=True))


def subtract(a: Box, b: Box) -> tuple[Box, ...]:
    """What is left of `a` without `b`: disjoint boxes, at most two a dimension, in row-major order of their corners."""
    shared = intersection(a, b)
    if shared is None:
        return (a,) if volume(a) else ()
    left: list[Box] = []
    for axis, ((start, stop), (low, high)) in enumerate(zip(a, shared, strict=True)):
        for part in ((start, low), (high, stop)):
            if part[0] < part[1]:
                left.append((*shared[:axis], part, *a[axis + 1 :]))
    return tuple(sorted(left))


def said(box: Box) -> str:
    """A box in words: `[0:4, 2:8]`; `[]` for the element of a 0-dimensional tensor."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def said_all(boxes: Sequence[Box], most: int = 3) -> str:
    """Boxes in words, at most `most` of them: `[0:4], [8:12] and 5 more`; `nothing` where there is none."""
    if not boxes:
        return "nothing"
    words = ", ".join(said(box) for box in boxes[:most])
    return words if len(boxes) <= most else f"{words} and {len(boxes) - most} more"


def outside(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box cannot be a range of a tensor of this shape: other dimensions, beyond it, or stop before start."""
    return len(box) != len(shape) or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Elements `start` to `stop` of the row-major flattened tensor, as boxes in the order of their elements.

    Each box is contiguous in the flattened tensor; there are at most 2 * dimensions - 1. Raises ValueError where the
    range is not one of the tensor (padding beyond its end is no part of it: cut it off first).
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"elements {start}:{stop} are no range of a tensor of shape {tuple(shape)}")
    return tuple(_flat(tuple(shape), start, stop)) if start < stop else ()


def _flat(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of a range that is not empty."""
    if len(shape) <= 1:
        yield ((start, stop),) if shape else ()
        return
    row = prod(shape[1:])
    first, skipped = divmod(start, row)
    last, rest = divmod(stop, row)
    if first == last:
        for box in _flat(shape[1:], skipped, rest):
            yield ((first, first + 1), *box)
        return
    if skipped:
        for box in _flat(shape[1:], skipped, row):
            yield ((first, first + 1), *box)
        first += 1
    if first < last:
        yield ((first, last), *whole(shape[1:]))
    if rest:
        for box in _flat(shape[1:], 0, rest):
            yield ((last, last + 1), *box)


def tiling_problem(boxes: Iterable[Box], shape: Sequence[int]) -> str:
    """Why `boxes` do not cover a tensor of `shape` exactly once, in words; empty when they do.

    Near-linear in the number of boxes for a grid, and for anything else that is a tiling or almost one.
    """
    listed = list(boxes)
    for box in listed:
        if outside(box, shape):
            return f"the range {said(box)} is outside of shape {tuple(shape)}"
    filled = sorted(box for box in listed if volume(box))
    for left, right in pairwise(filled):
        if left == right:
            return f"the range {said(left)} is there twice"
    arrangement = Arrangement(filled, len(shape))
    pair = arrangement.overlap
    if pair is not None:
        return f"the ranges {said(filled[pair[0]])} and {said(filled[pair[1]])} overlap"
    hole = arrangement.hole(shape)
    return "" if hole is None else f"the range {said(hole)} is missing"


def refine(held: Mapping[int, Sequence[Box]]) -> tuple[Cell, ...]:
    """Disjoint cells that cover what the ranks hold, each with all ranks that hold it, sorted by box.

    Each rank's own boxes must not overlap one another. Boxes that are equal, or meet no other, stay whole: only those
    that overlap in part, or are nested, are cut. Raises LayoutError for more overlaps than any division has.
    """
    ranks_of: dict[Box, list[int]] = {}
    for rank in sorted(held):
        for box in held[rank]:
            if volume(box):
                ranks_of.setdefault(box, []).append(rank)
    boxes = sorted(ranks_of)
    if not boxes:
        return ()
    return Arrangement(boxes, len(boxes[0])).cells([tuple(ranks_of[box]) for box in boxes])


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
