"""Index ranges of tensors: boxes, the ranges of a flattened tensor as boxes, disjoint cells of overlapping boxes. Pure.

A box is one (start, stop) a dimension, in elements of the whole tensor; `()` is the one element of a 0-dimensional
tensor. A box without elements is legal everywhere and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

__all__ = [
    "Box",
    "Cell",
    "contains",
    "flat_boxes",
    "intersection",
    "outside",
    "refine",
    "row_major",
    "said",
    "said_all",
    "subtract",
    "tiling_problem",
    "volume",
    "whole",
]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""One (start, stop) a dimension."""


class Cell(NamedTuple):
    """A range that no other cell shares, and the ranks that hold it, ascending. It lies within one box of each."""

    box: Box
    holders: tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor of this shape whose last dimension lies closest together."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


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
    from baftd.checkpoint.arrangement import Arrangement  # numpy: not for those who only have a few boxes

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
    from baftd.checkpoint.arrangement import Arrangement

    return Arrangement(boxes, len(boxes[0])).cells([tuple(ranks_of[box]) for box in boxes])
