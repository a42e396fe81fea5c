"""Boxes, ranges of flattened tensors and cells, against arrays that count every element."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.arrangement import Arrangement
from baftd.checkpoint.ranges import (
    Box,
    contains,
    flat_boxes,
    intersection,
    outside,
    refine,
    said,
    said_all,
    subtract,
    tiling_problem,
    volume,
    whole,
)

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    return tuple(tuple(sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))) for size in shape)


@st.composite
def shape_and_boxes(draw: st.DrawFn, most: int = 8) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, draw(st.lists(boxes_in(shape), max_size=most))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def marked(shape: Sequence[int], box: Box) -> np.ndarray:
    mask = np.zeros(shape, dtype=bool)
    mask[slices(box)] = True
    return mask


def counted(shape: Sequence[int], boxes: Sequence[Box]) -> np.ndarray:
    return sum((marked(shape, box).astype(int) for box in boxes), np.zeros(shape, dtype=int))


@settings(max_examples=80, deadline=None)
@given(drawn=shape_and_boxes(most=2))
def test_two_boxes(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    a, b = (*boxes, whole(shape), whole(shape))[:2]
    mask_a, mask_b = marked(shape, a), marked(shape, b)
    assert volume(a) == mask_a.sum()
    shared = intersection(a, b)
    assert (shared is None) == (not (mask_a & mask_b).any())
    if shared is not None:
        assert (marked(shape, shared) == (mask_a & mask_b)).all()
    assert (counted(shape, subtract(a, b)) == (mask_a & ~mask_b)).all()
    assert all(volume(part) for part in subtract(a, b))
    assert contains(a, b) == (not (mask_b & ~mask_a).any())


@settings(max_examples=80, deadline=None)
@given(data=st.data(), shape=shapes)
def test_flat_ranges_are_boxes_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    boxes = flat_boxes(shape, start, stop)
    numbers = np.arange(count).reshape(shape)
    found = [int(n) for box in boxes for n in numbers[slices(box)].ravel()]
    assert found == list(range(start, stop)), "the elements of the range, in its order"
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 13)])
def test_a_flat_range_outside_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"no range of a tensor of shape \(3, 4\)"):
        flat_boxes((3, 4), start, stop)


@settings(max_examples=100, deadline=None)
@given(drawn=shape_and_boxes(most=5))
def test_tiling(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    problem = tiling_problem(boxes, shape)
    assert (problem == "") == bool((counted(shape, boxes) == 1).all()), problem


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut in two again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 7))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(*box[axis]))
        boxes += [
            (*box[:axis], part, *box[axis + 1 :]) for part in ((box[axis][0], at), (at, box[axis][1]))
        ]
    return shape, draw(st.permutations(boxes))


@settings(max_examples=100, deadline=None)
@given(tiling=tilings(), data=st.data())
def test_a_tiling_with_a_flaw(tiling: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = tiling
    assert tiling_problem(boxes, shape) == ""
    one = data.draw(st.sampled_from([box for box in boxes if volume(box)]))
    lost = [box for box in boxes if box != one]
    assert tiling_problem(lost, shape).endswith("is missing")
    assert tiling_problem([*boxes, one], shape) == f"the range {said(one)} is there twice"
    axis = data.draw(st.integers(0, len(shape) - 1))
    start, stop = one[axis]
    large = (*one[:axis], (start, stop + 1), *one[axis + 1 :])
    assert ("outside" if stop == shape[axis] else "overlap") in tiling_problem([*lost, large], shape)


@settings(max_examples=100, deadline=None)
@given(drawn=shape_and_boxes(), data=st.data())
def test_cells_are_disjoint_complete_and_name_every_holder(
    drawn: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = drawn
    held: dict[int, list[Box]] = {}
    for box in boxes:  # each rank's own boxes are disjoint
        rank = data.draw(st.integers(0, 9))
        if all(intersection(box, other) is None for other in held.get(rank, [])):
            held.setdefault(rank, []).append(box)
    cells = refine(held)
    assert (counted(shape, [cell.box for cell in cells]) <= 1).all()
    for rank, own in held.items():
        mine = [cell.box for cell in cells if rank in cell.holders]
        assert (counted(shape, mine) == counted(shape, own)).all()
        assert all(any(contains(box, cell) for box in own) for cell in mine), "a cell lies within one box"
    assert all(list(cell.holders) == sorted(set(cell.holders)) for cell in cells)
    assert list(cells) == sorted(cells)
    shuffled = dict(data.draw(st.permutations(list(held.items()))))
    assert refine(shuffled) == cells


def test_cells_of_what_does_not_overlap_stay_whole() -> None:
    rows = [((start, start + 3), (0, 8)) for start in range(0, 12, 3)]
    assert [cell.box for cell in refine({r: [box] for r, box in enumerate(rows)})] == rows
    assert refine({0: [rows[0]], 5: [rows[0]], 3: [rows[1]]}) == ((rows[0], (0, 5)), (rows[1], (3,)))


def test_nested_and_crossing_cells() -> None:
    halves = {0: [((0, 6),)], 1: [((6, 12),)]}
    thirds = {2: [((0, 4),)], 3: [((4, 8),)], 4: [((8, 12),)]}
    assert refine(halves | thirds) == (
        (((0, 4),), (0, 2)),
        (((4, 6),), (0, 3)),
        (((6, 8),), (1, 3)),
        (((8, 12),), (1, 4)),
    )
    assert refine({7: [((0, 12),)]} | halves) == ((((0, 6),), (0, 7)), (((6, 12),), (1, 7)))
    inner = refine({0: [((0, 3), (0, 3))], 1: [((1, 2), (1, 2))]})
    assert ((((1, 2), (1, 2)), (0, 1))) in inner
    assert sum(volume(cell.box) for cell in inner) == 9


def test_edges() -> None:
    assert refine({}) == ()
    assert refine({0: [()], 1: [()]}) == (((), (0, 1)),), "the element of a 0-dimensional tensor"
    assert refine({0: [((3, 3),)], 1: []}) == ()
    assert tiling_problem([()], ()) == ""
    assert tiling_problem([], ()) == "the range [] is missing"
    assert tiling_problem([], (0, 3)) == ""
    assert tiling_problem([((0, 0), (0, 3))], (0, 3)) == ""
    assert tiling_problem([((0, 4),)], (4, 4)) == "the range [0:4] is outside of shape (4, 4)"
    assert tiling_problem([((0, 3),), ((2, 4),)], (4,)) == "the ranges [0:3] and [2:4] overlap"
    assert outside(((2, 1),), (4,))
    assert not outside(((4, 4),), (4,))
    assert said(((0, 4), (2, 8))) == "[0:4, 2:8]"
    assert said_all([]) == "nothing"
    assert said_all([((0, 1),)] * 5) == "[0:1], [0:1], [0:1] and 2 more"


@settings(max_examples=100, deadline=None)
@given(drawn=shape_and_boxes(most=7))
def test_an_arrangement_finds_overlaps_and_crossings(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = drawn
    boxes = sorted({box for box in boxes if volume(box)})
    arrangement = Arrangement(boxes, len(shape))
    pairs = list(itertools.combinations(range(len(boxes)), 2))
    meeting = [(i, j) for i, j in pairs if intersection(boxes[i], boxes[j]) is not None]
    assert list(zip(*(column.tolist() for column in arrangement.overlaps), strict=True)) == meeting
    crossing = [
        (i, j) for i, j in meeting if not contains(boxes[i], boxes[j]) and not contains(boxes[j], boxes[i])
    ]
    assert arrangement.first_crossing == (crossing[0] if crossing else None)
    hole = arrangement.hole(shape)
    free = counted(shape, boxes) == 0
    assert (hole is None) == (not free.any())
    assert hole is None or free[slices(hole)].all()


def test_thousands_of_boxes_take_no_time() -> None:
    """A grid, flat ranges, and a whole tensor beside its slices: none may be looked at pair by pair."""
    began = time.perf_counter()
    grid = [((r, r + 1), (c, c + 4)) for r in range(64) for c in range(0, 256, 4)]
    assert tiling_problem(grid, (64, 256)) == ""
    ends = [0, *range(1007, 4_096_000, 1000), 4_096_000]
    flat = [box for start, stop in itertools.pairwise(ends) for box in flat_boxes((4096, 1000), start, stop)]
    assert len(flat) > 8000
    assert tiling_problem(flat, (4096, 1000)) == ""
    held = {k: [((k, k + 1),)] for k in range(4096)} | {5000: [((0, 4096),)]}
    cells = refine(held)
    assert len(cells) == 4096
    assert cells[17] == (((17, 18),), (17, 5000))
    assert time.perf_counter() - began < 5, "seconds even on a busy machine; pair by pair it is minutes"
