"""Hypothesis strategies for layouts: tensors held whole, in boxes, flat, nested, by several ranks, not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from hypothesis import strategies as st

from baftd.checkpoint.layout import Box, Layout, LayoutBuilder, RankPlace
from baftd.checkpoint.ranges import flat_boxes, volume, whole

__all__ = ["Declared", "holdings", "layouts", "put_together", "tilings"]

Held = dict[int, list[Box]]


@dataclass(frozen=True)
class Declared:
    """One tensor as it is added to a builder."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    held: Held
    owner: int | None
    kind: str
    crossing: bool = False

    def add_to(self, builder: LayoutBuilder) -> None:
        more: dict[str, Any] = {"kind": self.kind, "itemsize": 8 if self.dtype == "C64" else None}
        if self.owner is None:
            builder.add(self.name, self.dtype, self.shape, self.held, crossing=self.crossing, **more)
        else:
            builder.own(self.name, self.dtype, self.shape, self.owner, **more)


def shapes(least: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(least, 6), max_size=3).map(tuple)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Disjoint boxes that cover the shape, some maybe empty."""
    if not shape or draw(st.booleans()):  # flat
        count = prod(shape)
        ends = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
        cuts = zip([0, *ends], [*ends, count], strict=True)
        return [box for start, stop in cuts for box in flat_boxes(shape, start, stop)]
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(*box[axis]))
        boxes += [(*box[:axis], part, *box[axis + 1 :]) for part in ((box[axis][0], at), (at, box[axis][1]))]
    return boxes


@st.composite
def holdings(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> tuple[Held, bool]:
    """Boxes of each rank, and whether they cross."""
    ranks = st.integers(0, world - 1)
    held: Held = {}
    for box in draw(tilings(shape)):
        for rank in draw(st.lists(ranks, min_size=1, max_size=3, unique=True)):
            held.setdefault(rank, []).append(box)
    for rank in draw(st.lists(ranks, max_size=2)):
        held.setdefault(rank, [])  # an empty shard
    crossing = False
    free = [rank for rank in range(world) if rank not in held]
    if free and draw(st.booleans()):  # a second division beside the first
        other = [box for box in draw(tilings(shape)) if volume(box)]
        crossing = len(other) > 1
        for box in other:
            held.setdefault(draw(st.sampled_from(free)), []).append(box)
    return {rank: held[rank] for rank in draw(st.permutations(sorted(held)))} or {0: []}, crossing


@st.composite
def declared(draw: st.DrawFn, world: int, number: int) -> Declared:
    shape = draw(shapes())
    held, crossing = draw(holdings(shape, world))
    return Declared(
        name=f"layer.{number % 4}.w" if number % 3 else f"t{number}",
        dtype=draw(st.sampled_from(["F32", "BF16", "U8", "C64"])),
        shape=shape,
        held=held,
        owner=draw(st.none() | st.integers(0, world - 1)),
        kind=draw(st.sampled_from(["stable", "stable", "volatile"])),
        crossing=crossing,
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[RankPlace], list[Declared]]:
    """World, places and tensors (names and owners unique) of a layout that is right."""
    world = draw(st.integers(1, 7))
    tensors = {
        (one.name, one.owner): one
        for one in (draw(declared(world, number)) for number in range(draw(st.integers(0, 6))))
    }
    places: list[RankPlace] = []
    if draw(st.booleans()):
        coordinates = st.fixed_dictionaries({"dp": st.integers(0, 9), "tp": st.integers(0, 1)})
        stages = st.lists(st.integers(0, 5), max_size=2, unique=True).map(tuple)
        places = [
            RankPlace(rank, draw(stages), draw(coordinates), draw(st.sampled_from(["", "n0", "n1"])))
            for rank in range(world)
        ]
    return world, places, list(tensors.values())


def put_together(
    drawn: tuple[int, list[RankPlace], list[Declared]],
    order: Callable[[list[Any]], list[Any]] = list,
) -> Layout:
    """Build a drawn layout, its calls in the order that `order` gives."""
    world, places, tensors = drawn
    builder = LayoutBuilder(world)
    for one in order([*places, *tensors]):
        if isinstance(one, RankPlace):
            builder.place(one)
        else:
            one.add_to(builder)
    return builder.build()
