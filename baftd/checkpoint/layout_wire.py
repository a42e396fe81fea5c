"""A layout as bytes: what is equal is written once. Pure.

    4 bytes "BLO1", then one MessagePack array:

    0  number of ranks
    1  places: [ranks, axes, coordinates + 1 (0: none) for each axis, stage lists, which of them, nodes, which of them]
    2  types: [[dtype, itemsize, kind], ...]
    3  patterns: [[shape, crossing, boxes of each part, for each dimension nil (whole) or [starts, stops]], ...]
    4  forms: sets of ranks, less their first: [numbers, ...]
    5  holdings: [[pattern, form of each part, first rank of each part], ...]
    6  tensors: [names, type of each, holding of each, {number: aliases}]
    7  own tensors: [[name, type, shape, owners, aliases], ...]

Every list of numbers is [0, the numbers ...] or, where that is shorter, [1, first, count, step, first, count, step
...]. So ranks at equal distances, and equal slices, take a few bytes however many they are, and a stage's holdings
differ from those of the next one in their first ranks alone. Tables are in the order in which the tensors, sorted by
name and owner, first need them: equal layouts have equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar, cast

import msgpack

from baftd.checkpoint.identity import MAX_WORLD
from baftd.checkpoint.ranges import Box
from baftd.checkpoint.shard import BytesLike, Kind
from baftd.checkpoint.tensor_layout import Holding, Pattern, RankPlace, TensorLayout
from baftd.errors import FormatError

__all__ = ["MAX_LAYOUT_BYTES", "MAX_NUMBERS", "pack", "unpack"]

MAGIC: Final = b"BLO1"
MAX_LAYOUT_BYTES: Final = 256 << 20
MAX_NUMBERS: Final = 1 << 26
"""Numbers that all lists of one layout may stand for together: a few bytes can say a long list."""

_T = TypeVar("_T")


# -------------------------------------------------------------------------------------------------- encoding


class _Table(dict[Any, int]):
    """Numbers values in the order in which they first come."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number


def pack(world: int, places: Sequence[RankPlace], tensors: Sequence[TensorLayout]) -> bytes:
    """A checked layout as bytes. `places` sorted by rank, `tensors` by name and owner."""
    types, patterns, forms, holdings = _Table(), _Table(), _Table(), _Table()
    names: list[str] = []
    type_of: list[int] = []
    holding_of: list[int] = []
    aliases: dict[int, list[str]] = {}
    own: dict[tuple[str, int, tuple[int, ...], tuple[str, ...]], list[int]] = {}
    for tensor in tensors:
        kind = types[(tensor.dtype, tensor.itemsize, tensor.kind)]
        if tensor.owner is not None:
            own.setdefault((tensor.name, kind, tensor.shape, tensor.aliases), []).append(tensor.owner)
            continue
        if tensor.aliases:
            aliases[len(names)] = list(tensor.aliases)
        names.append(tensor.name)
        type_of.append(kind)
        holding_of.append(holdings[tensor.holding])
    written: list[Any] = []
    for holding in holdings:
        form_of = [forms[tuple(rank - ranks[0] for rank in ranks)] for ranks in holding.ranks]
        first = [ranks[0] for ranks in holding.ranks]
        written.append([patterns[holding.pattern], _numbers(form_of), _numbers(first)])
    value = [
        world,
        _places(places),
        [list(one) for one in types],
        [_pattern(pattern) for pattern in patterns],
        [_numbers(form) for form in forms],
        written,
        [names, _numbers(type_of), _numbers(holding_of), aliases],
        [[name, kind, shape, _numbers(owners), others] for (name, kind, shape, others), owners in own.items()],
    ]
    return MAGIC + cast("bytes", msgpack.packb(value, use_bin_type=True))


def _places(places: Sequence[RankPlace]) -> list[Any]:
    axes = sorted({axis for place in places for axis in place.coordinates})
    stages, nodes = _Table(), _Table()
    stage_of = _numbers([stages[place.stages] for place in places])
    node_of = _numbers([nodes[place.node] for place in places])
    return [
        _numbers([place.rank for place in places]),
        axes,
        [_numbers([place.coordinates.get(axis, -1) + 1 for place in places]) for axis in axes],
        [list(one) for one in stages],
        stage_of,
        list(nodes),
        node_of,
    ]


def _pattern(pattern: Pattern) -> list[Any]:
    boxes = [box for part in pattern.parts for box in part]
    columns: list[Any] = []
    for axis, size in enumerate(pattern.shape):
        intervals = [box[axis] for box in boxes]
        if all(interval == (0, size) for interval in intervals):
            columns.append(None)
        else:
            columns.append([_numbers([start for start, _ in intervals]), _numbers([stop for _, stop in intervals])])
    return [list(pattern.shape), pattern.crossing, _numbers([len(part) for part in pattern.parts]), columns]


def _numbers(values: Sequence[int]) -> list[int]:
    """A list of numbers, as itself or as runs of equal distances."""
    runs: list[int] = [1]
    at, count = 0, len(values)
    while at < count:
        start, end = at, at + 1
        step = values[end] - values[at] if end < count else 0
        while end < count and values[end] - values[end - 1] == step:
            end += 1
        runs += (values[start], end - start, step)
        if len(runs) > count:
            return [0, *values]
        at = end
    return runs if len(runs) < count + 1 else [0, *values]


# -------------------------------------------------------------------------------------------------- decoding


def unpack(data: BytesLike) -> tuple[int, list[RankPlace], list[TensorLayout]]:
    """The inverse of `pack`: ranks, places and tensors, their form checked but not yet whether they fit together.

    Raises FormatError for anything that is not what `pack` writes.
    """
    view = memoryview(data).cast("B")
    if len(view) > MAX_LAYOUT_BYTES:
        raise FormatError(f"a layout of {len(view)} bytes is longer than {MAX_LAYOUT_BYTES}.")
    if bytes(view[:4]) != MAGIC:
        raise FormatError(f"a layout begins with {MAGIC!r}, these bytes with {bytes(view[:4])!r}.")
    try:
        value = msgpack.unpackb(view[4:], raw=False, strict_map_key=False)
        return _Reader().layout(value)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, msgpack.UnpackException) as error:
        raise FormatError(f"the bytes are no layout: {error or type(error).__name__}") from error


class _Reader:
    """Takes a value apart. Its methods raise ValueError, TypeError or LookupError for what is not of the form."""

    def __init__(self) -> None:
        self._left = MAX_NUMBERS

    def layout(self, value: Any) -> tuple[int, list[RankPlace], list[TensorLayout]]:
        world, places, types, patterns, forms, holdings, tensors, own = _list(value, 8)
        if not 1 <= _int(world) <= MAX_WORLD:
            raise ValueError(f"{world} ranks are out of range")
        known_types = [self._type(one) for one in _list(types)]
        known_patterns = [self._pattern(one) for one in _list(patterns)]
        known_forms = [self._numbers(one) for one in _list(forms)]
        known_holdings = [self._holding(one, known_patterns, known_forms) for one in _list(holdings)]
        names, type_of, holding_of, aliases = _list(tensors, 4)
        found: list[TensorLayout] = []
        rows = zip(_list(names), self._numbers(type_of), self._numbers(holding_of), strict=True)
        if not isinstance(aliases, dict):
            raise TypeError("aliases are no map")
        for number, (name, kind, held) in enumerate(rows):
            others = _texts(aliases.pop(number, []))
            found.append(TensorLayout(_text(name), *_at(known_types, kind), _at(known_holdings, held), None, others))
        if aliases:
            raise ValueError("aliases of tensors that are not there")
        alone: dict[tuple[tuple[int, ...], int], Holding] = {}
        for one in _list(own):
            name, kind, shape, owners, others = _list(one, 5)
            size, name, others = tuple(map(_size, _list(shape))), _text(name), _texts(others)
            for owner in self._numbers(owners):
                if (size, owner) not in alone:
                    alone[size, owner] = Holding.own(size, owner)
                found.append(TensorLayout(name, *_at(known_types, kind), alone[size, owner], owner, others))
        return world, self._places(places), found

    def _numbers(self, value: Any) -> list[int]:
        how, *rest = map(_int, _list(value))
        if how == 0:
            self._spend(len(rest))
            return rest
        if how != 1 or len(rest) % 3:
            raise ValueError("a list of numbers is neither plain nor runs")
        found: list[int] = []
        for first, count, step in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            if count < 1:
                raise ValueError(f"a run of {count} numbers")
            self._spend(count)
            found += range(first, first + count * step, step) if step else [first] * count
        return found

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(f"it stands for more than {MAX_NUMBERS} numbers")

    def _type(self, value: Any) -> tuple[str, int, Kind]:
        dtype, itemsize, kind = _list(value, 3)
        return _text(dtype), _size(itemsize), cast("Kind", _text(kind))

    def _pattern(self, value: Any) -> Pattern:
        size, crossing, counts, columns = _list(value, 4)
        shape = tuple(map(_size, _list(size)))
        if not isinstance(crossing, bool):
            raise TypeError("a flag is neither true nor false")
        lengths = self._numbers(counts)
        if min(lengths, default=0) < 0:
            raise ValueError("a part of less than no boxes")
        total = sum(lengths)
        self._spend(total * max(1, len(shape)))
        intervals: list[list[tuple[int, int]]] = []
        for length, column in zip(shape, _list(columns), strict=True):
            if column is None:
                intervals.append([(0, length)] * total)
                continue
            starts, stops = map(self._numbers, _list(column, 2))
            intervals.append(list(zip(starts, stops, strict=True)))
        boxes: list[Box] = list(zip(*intervals, strict=True)) if shape else [()] * total
        if len(boxes) != total:
            raise ValueError(f"{len(boxes)} boxes where {total} belong")
        for box in boxes:
            if any(start < 0 or stop <= start for start, stop in box):
                raise ValueError("a box without elements")
        parts: list[tuple[Box, ...]] = []
        at = 0
        for length in lengths:
            parts.append(tuple(boxes[at : at + length]))
            at += length
        return Pattern(shape, tuple(parts), crossing)

    def _holding(self, value: Any, patterns: Sequence[Pattern], forms: Sequence[list[int]]) -> Holding:
        number, form_of, first_of = _list(value, 3)
        pattern = _at(patterns, number)
        groups: list[tuple[Sequence[Box], Iterable[int]]] = []
        rows = zip(pattern.parts, self._numbers(form_of), self._numbers(first_of), strict=True)
        for boxes, form, first in rows:
            ranks = _at(forms, form)
            self._spend(len(ranks))
            groups.append((boxes, [first + rank for rank in ranks]))
        return Holding.of_groups(pattern.shape, groups, crossing=pattern.crossing)

    def _places(self, value: Any) -> list[RankPlace]:
        ranks, axes, coordinates, stages, stage_of, nodes, node_of = _list(value, 7)
        names = _texts(axes)
        columns = [self._numbers(one) for one in _list(coordinates)]
        known_stages = [tuple(map(_size, _list(one))) for one in _list(stages)]
        known_nodes = _texts(nodes)
        found = []
        rows = zip(self._numbers(ranks), self._numbers(stage_of), self._numbers(node_of), strict=True)
        for row, (rank, stage, node) in enumerate(rows):
            where = {
                axis: column[row] - 1 for axis, column in zip(names, columns, strict=True) if column[row]
            }
            found.append(RankPlace(rank, _at(known_stages, stage), where, _at(known_nodes, node)))
        return found


def _list(value: Any, length: int | None = None) -> list[Any]:
    if type(value) is not list or (length is not None and len(value) != length):
        raise TypeError("a list is missing or has another length")
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("a number is none")
    return value


def _size(value: Any) -> int:
    if _int(value) < 0:
        raise ValueError(f"the size {value} is negative")
    return int(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("a text is none")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, _list(value)))


def _at(table: Sequence[_T], number: Any) -> _T:
    """An entry of a table; a negative number is none."""
    return table[_size(number)]
