"""From a declaration written by hand (`declaration.py`) to the layout: boxes of every tensor for every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Literal, TypeAlias

from baftd.checkpoint.layout import Holding, Layout, LayoutBuilder, RankPlace
from baftd.checkpoint.mesh import Mesh
from baftd.checkpoint.ranges import Box, outside, said, volume, whole
from baftd.errors import LayoutError, UsageError
from baftd.formats.declaration import Declaration, OptimizerRule, Split, TensorRule, parse_declaration
from baftd.formats.megatron import flat_parts

__all__ = ["declared_layout", "layout_from_declaration"]

_MOST_TENSORS = 2_000_000

_Coordinates: TypeAlias = "Mapping[str, int]"
_Groups: TypeAlias = "list[tuple[tuple[Box, ...], tuple[int, ...]]]"
"""Boxes in storage order, and all ranks that hold them."""


def layout_from_declaration(text: str, source: str, form: Literal["toml", "json"]) -> Layout:
    """Read a declaration and make its layout. source: the file's name, for errors.

    Raises UsageError for its form and LayoutError for ranges that make no layout; both name the file and the tensor.
    """
    return declared_layout(parse_declaration(text, source, form))


def declared_layout(declaration: Declaration) -> Layout:
    """The layout. Raises LayoutError (of the tensor and rank) and UsageError, both with the file's name."""
    try:
        return _Maker(declaration).layout()
    except LayoutError as error:
        if error.message.startswith(declaration.source):
            raise
        raise LayoutError(
            f"{declaration.source}: {error.message}",
            hint=error.hint,
            tensor=error.tensor,
            rank=error.rank,
            ranges=error.ranges,
        ) from None


class _Maker:
    """Makes one layout."""

    def __init__(self, declaration: Declaration) -> None:
        self._declaration = declaration
        self._world = declaration.world
        self._axes = dict(declaration.axes)
        mesh = Mesh(declaration.axes)
        self._coordinates: list[dict[str, int]] = [
            mesh.coordinates(rank) if declaration.axes else {} for rank in range(self._world)
        ]
        self._builder = LayoutBuilder(self._world)

    def layout(self) -> Layout:
        for rank in range(self._world):
            self._builder.place(self._place(rank))
        count = sum(prod(rule.each.values()) for rule in self._declaration.tensors)
        if count > _MOST_TENSORS:
            raise UsageError(f"{self._declaration.source}: {count} tensors are more than {_MOST_TENSORS}.")
        for rule in self._declaration.tensors:
            self._add(rule)
        return self._builder.build()

    def _place(self, rank: int) -> RankPlace:
        stages, at = self._declaration.stages, self._coordinates[rank]
        if isinstance(stages, str):
            held: tuple[int, ...] = (at[stages],) if stages else ()
        else:
            held = stages.get(rank, ())
        per_node = self._declaration.ranks_per_node
        node = ""
        if per_node:  # names sort as their numbers do
            node = f"node-{rank // per_node:0{len(str((self._world - 1) // per_node))}}"
        return RankPlace(rank, stages=held, coordinates=at, node=node)

    def _add(self, rule: TensorRule) -> None:
        """All tensors of one entry. Those that lie at the same coordinates share one holding."""
        optimizer = self._declaration.optimizers[rule.optimizer] if rule.optimizer else OptimizerRule(())
        known: dict[tuple[tuple[str, int], ...], tuple[_Groups, Holding, Holding]] = {}
        for name, at in _instances(rule, self._axes):
            key = tuple(sorted(at.items()))
            if key not in known:
                groups = self._groups(rule, at)
                held = Holding.of_groups(rule.shape, groups)
                divided = groups if rule.private else self._divide(rule, groups, optimizer)
                known[key] = groups, held, held if divided is groups else Holding.of_groups(rule.shape, divided)
            groups, held, shared = known[key]
            self._put(rule, name, rule.dtype, groups, held)
            for state, dtype in optimizer.states:
                self._put(rule, f"{name}.{state}", dtype, groups, shared)

    def _put(self, rule: TensorRule, name: str, dtype: str, groups: _Groups, held: Holding) -> None:
        if not rule.private:
            self._builder.add(name, dtype, rule.shape, held, itemsize=rule.itemsize, kind=rule.kind)
            return
        for _, ranks in groups:
            for rank in ranks:
                self._builder.own(name, dtype, rule.shape, rank, itemsize=rule.itemsize, kind=rule.kind)

    def _groups(self, rule: TensorRule, at: _Coordinates) -> _Groups:
        """Who holds what of the tensors of an entry that lie at these coordinates."""
        if rule.ranks is not None:
            return [(_ranges(rule, rank, texts), (rank,)) for rank, texts in rule.ranks.items()]
        cutting = [axis for cut in rule.split.values() for axis in cut.axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinates in enumerate(self._coordinates):
            if all(coordinates[axis] in places for axis, places in rule.only.items()) and all(
                coordinates[axis] == place for axis, place in at.items()
            ):
                found.setdefault(tuple(coordinates[axis] for axis in cutting), []).append(rank)
        groups: _Groups = []
        for places, ranks in found.items():
            box = _box(rule, dict(zip(cutting, places, strict=True)), self._axes)
            groups.append(((box,), tuple(ranks)))
        return groups

    def _divide(self, rule: TensorRule, groups: _Groups, optimizer: OptimizerRule) -> _Groups:
        """Ranks that hold the same and differ in the divided axes alone share it among themselves."""
        if not optimizer.divided:
            return groups
        kept = [axis for axis in self._axes if axis not in optimizer.divided]
        together: dict[tuple[tuple[Box, ...], tuple[int, ...]], list[int]] = {}
        for boxes, ranks in groups:
            for rank in ranks:
                place = tuple(self._coordinates[rank][axis] for axis in kept)
                together.setdefault((boxes, place), []).append(rank)
        divided: _Groups = []
        for (boxes, _), alike in together.items():
            if optimizer.by == "rows" and (len(boxes) != 1 or not rule.shape):
                what = f"{len(boxes)} ranges" if rule.shape else "a tensor without dimensions"
                raise LayoutError(
                    f"{rule.where}: rank {alike[0]} holds {what}, which cannot be divided by rows.",
                    hint='Say by = "flat" for its optimizer.',
                    tensor=rule.name,
                    rank=alike[0],
                )
            row = prod(stop - start for start, stop in boxes[0][1:]) if optimizer.by == "rows" else 1
            units = sum(map(volume, boxes)) // max(row, 1)
            part = -(-units // len(alike))
            for number, rank in enumerate(sorted(alike)):
                low, high = (min(units, part * place) * row for place in (number, number + 1))
                divided.append((flat_parts(boxes, low, high), (rank,)))
        return divided


def _instances(rule: TensorRule, axes: Mapping[str, int]) -> Iterator[tuple[str, dict[str, int]]]:
    """Name and coordinates of every tensor of an entry."""
    keys = list(rule.each)
    for numbers in product(*(range(rule.each[key]) for key in keys)):
        at = dict(zip(keys, numbers, strict=True))
        name = re.sub(r"\{([^{}]*)\}", lambda match, at=at: str(at[match[1]]), rule.name)  # type: ignore[misc]
        yield name, {axis: at[key] // (rule.each[key] // axes[axis]) for key, axis in rule.along.items()}


def _box(rule: TensorRule, at: _Coordinates, axes: Mapping[str, int]) -> Box:
    """The part of a tensor that ranks at these coordinates hold."""
    box = list(whole(rule.shape))
    for dimension, cut in rule.split.items():
        number, parts = 0, 1
        for axis in cut.axes:
            number, parts = number * axes[axis] + at[axis], parts * axes[axis]
        box[dimension] = _span(rule.shape[dimension], cut, number, parts)
    return tuple(box)


def _span(size: int, cut: Split, number: int, parts: int) -> tuple[int, int]:
    if cut.sizes:
        start = sum(cut.sizes[:number])
        return start, start + cut.sizes[number]
    part = -(-size // parts)
    return min(size, number * part), min(size, (number + 1) * part)


def _ranges(rule: TensorRule, rank: int, texts: Sequence[str]) -> tuple[Box, ...]:
    """The ranges that were written for a rank."""
    boxes = []
    for text in texts:
        box = _written(text, rule.shape)
        if box is None or outside(box, rule.shape):
            raise LayoutError(
                f"{rule.where}: rank {rank} has {text!r}, which is no range of shape {list(rule.shape)}.",
                hint=f"One START:STOP for each dimension, such as {said(whole(rule.shape))}.",
                tensor=rule.name,
                rank=rank,
                ranges=text,
            )
        boxes.append(box)
    return tuple(boxes)


def _written(text: str, shape: Sequence[int]) -> Box | None:
    """A box from "0:4, :" or "[0:4, 2:8]"; None where it has another form."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1].strip()
    parts = inner.split(",") if inner else []
    if len(parts) != len(shape):
        return None
    spans = []
    for part, size in zip(parts, shape, strict=True):
        match = re.fullmatch(r"\s*([0-9]{0,16})\s*:\s*([0-9]{0,16})\s*", part)
        if match is None:
            return None
        spans.append((int(match[1] or 0), int(match[2] or size)))
    return tuple(spans)
