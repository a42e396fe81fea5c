"""Who saves which bytes: ranges that several ranks hold are divided among them, so that all windows fill alike. Pure.

Bytes that only one rank holds (its own tensors, its shard of a sharded optimizer), and volatile tensors, are saved by
their rank always; they are its load to begin with. All ranges with the same holders are one *class*. How many bytes of
each class each holder takes is found exactly (`fair.py`: load divided by capacity, as even as can be, the fullest
first). Then tensors are handed out, the largest first, each to the rank with the most bytes still to take; one that
is larger than that is cut between rows.

Capacity: bytes that a rank can copy in its windows in one step. The fullest rank carries at most 1/64 more than at the
fractional optimum, or one element for each of its classes where these are larger than that: an element cannot be cut.
Rows are cut where they are short enough for this bound; within a row only where a single one is too large. Loads count
tensors alone, not the small state, which every rank saves for itself.

Tensors may be kept from being cut (`whole`: each of their ranges has one saver, but all of it) or from being divided at
all (`kept`: every holder saves what it has).

The same layout and capacities give the same assignment on every machine: it need not be sent, its digest is enough.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from baftd.checkpoint.fair import divide_fairly
from baftd.checkpoint.ranges import Box, Cell, flat_boxes, said, volume
from baftd.errors import UsageError

if TYPE_CHECKING:
    from baftd.checkpoint.layout import Layout
    from baftd.checkpoint.tensor_layout import Holding

__all__ = [
    "Assignment",
    "Gap",
    "Mode",
    "Piece",
    "ReplicaClass",
    "Share",
    "coverage_problem",
    "divide",
    "everyone",
    "first_gap",
    "written",
]

Mode: TypeAlias = Literal["divided", "all"]

SLACK = 64
"""A rank may be given this part of its load more than its exact share, so that cuts fall between rows."""


class Share(NamedTuple):
    """A range that a rank saves. `tensor`: its place in `Layout.tensors`; `box`: in elements of the whole tensor."""

    tensor: int
    box: Box


class Piece(NamedTuple):
    """Elements `start` to `stop` (row-major) of a cell that several ranks hold. `cell`: its place in the cells of the
    tensor."""

    tensor: int
    cell: int
    start: int
    stop: int


@dataclass(frozen=True)
class ReplicaClass:
    """All ranges with the same holders; what a rank has for itself is one with a single holder.

    nbytes: of one copy. taken: bytes that each holder saves; ranks that save nothing of it are left out.
    """

    holders: tuple[int, ...]
    nbytes: int
    taken: Mapping[int, int]


class _Group(NamedTuple):
    """Tensors that are held alike, by their places in `Layout.tensors`, ascending."""

    holding: Holding
    itemsize: int
    replicated: bool
    tensors: tuple[int, ...]
    name_bytes: int
    """Of all their names together, in an image's header."""
    whole: bool = False
    """Their cells are not cut."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """Who saves what of a layout. Make one with `divide` or `everyone`.

    mode: "divided": every byte of a replicated range has one saver; "all": every holder saves all it holds.
    capacity: by rank; None where none was given: all count as equal.
    loads: bytes that each rank saves, by rank. entries: ranges that it saves. name_bytes: of their names in an
    image's header, together.
    classes: in the order of their holders.
    """

    layout: Layout
    mode: Mode
    capacity: tuple[int, ...] | None
    loads: tuple[int, ...]
    entries: tuple[int, ...]
    name_bytes: tuple[int, ...]
    classes: tuple[ReplicaClass, ...]
    optimum: float
    """The lowest possible `fill` of the fullest rank that has a window, if elements could be cut; 0 if none has."""
    _groups: tuple[_Group, ...]
    _pieces: Mapping[int, tuple[Piece, ...]]

    def of(self, rank: int) -> tuple[Share, ...]:
        """What a rank saves, by tensor, then by box. Worked out anew at each call."""
        shares: list[Share] = []
        for number in self._groups_of.get(rank, ()):
            group = self._groups[number]
            if self.mode == "all" or not group.replicated:
                boxes: Sequence[Box] = group.holding.held[rank]
            else:
                boxes = self._sole[number].get(rank, ())
            shares += [Share(tensor, box) for tensor in group.tensors for box in boxes]
        for piece in self._pieces.get(rank, ()):
            cell = self.layout.tensors[piece.tensor].cells()[piece.cell]
            shares += [Share(piece.tensor, box) for box in _boxes(cell.box, piece.start, piece.stop)]
        return tuple(sorted(shares))

    def held_by(self, holders: tuple[int, ...]) -> tuple[Share, ...]:
        """The ranges of the class with these holders, by tensor, then by box. Worked out anew at each call."""
        shares: list[Share] = []
        for group in self._groups:
            boxes: Sequence[Box] = ()
            if group.replicated:
                boxes = [cell.box for cell in group.holding.cells if cell.holders == holders]
            elif len(holders) == 1:
                boxes = group.holding.held.get(holders[0], ())
            shares += [Share(tensor, box) for tensor in group.tensors for box in boxes]
        return tuple(sorted(shares))

    def bytes_of(self, rank: int) -> int:
        """Bytes that a rank saves."""
        return self.loads[rank]

    @property
    def total(self) -> int:
        """Bytes that all ranks save together."""
        return sum(self.loads)

    def fill(self, rank: int) -> float | None:
        """Load divided by capacity (without capacities: the load); None for a rank with a load and no window."""
        if self.capacity is None:
            return float(self.loads[rank])
        if not self.capacity[rank]:
            return None if self.loads[rank] else 0.0
        return self.loads[rank] / self.capacity[rank]

    @cached_property
    def peak(self) -> float:
        """The largest fill of a rank that has a window."""
        return max((fill for rank in range(len(self.loads)) if (fill := self.fill(rank)) is not None), default=0.0)

    @cached_property
    def fullest(self) -> int:
        """The rank with the largest fill; one without a window, but with a load, is fuller than any other."""
        ranks = range(len(self.loads))
        return max(ranks, key=lambda rank: (rank in self._no_window, self.fill(rank) or self.loads[rank], -rank))

    @property
    def windowless(self) -> tuple[int, ...]:
        """Ranks that must save something and have no window to do it in: what they hold, nobody else can save."""
        return tuple(sorted(self._no_window))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that identify the assignment and its layout."""
        state = hashlib.blake2b(self.layout.digest(), digest_size=16, person=b"baft savers")
        state.update(self.mode.encode())
        for rank in sorted(self._pieces):
            state.update(np.array([(rank, 0, 0, 0), *self._pieces[rank]], dtype="<i8").tobytes())
        return state.digest()

    @cached_property
    def held(self) -> tuple[tuple[int, int], ...]:
        """Ranges that each rank holds, saved by it or not, and bytes of their names as in `name_bytes`; by rank."""
        entries, names = [0] * len(self.loads), [0] * len(self.loads)
        for group in self._groups:
            _add_held(group, [0] * len(self.loads), entries, names)
        return tuple(zip(entries, names, strict=True))

    @cached_property
    def _no_window(self) -> frozenset[int]:
        return frozenset(rank for rank in range(len(self.loads)) if self.fill(rank) is None)

    @cached_property
    def _groups_of(self) -> Mapping[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for number, group in enumerate(self._groups):
            for rank in group.holding.rank_array.tolist():
                found[rank].append(number)
        return found

    @cached_property
    def _sole(self) -> list[Mapping[int, list[Box]]]:
        """For each group the boxes that only one rank holds, by rank."""
        return [_sole_boxes(group.holding.cells) if group.replicated else {} for group in self._groups]


def divide(
    layout: Layout,
    capacity: Mapping[int, int] | None = None,
    *,
    whole: Collection[int] = (),
    kept: Collection[int] = (),
) -> Assignment:
    """Divide replicated ranges among their holders.

    whole: numbers of tensors whose cells must not be cut: the fullest rank may then carry one of them more than its
    share. kept: those of which every holder saves all it has.

    capacity: bytes that each rank can copy in its windows in a step; None: all are equal. A rank with 0 has no window
    and saves only what no rank with one holds. Raises UsageError when a rank is missing or its capacity is negative.
    """
    given = None if capacity is None else _checked(layout.world, capacity)
    groups = _grouped(layout, frozenset(whole), frozenset(kept))
    loads, entries, names = ([0] * layout.world for _ in range(3))
    members: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)  # holders -> (bytes, group, cell)
    for number, group in enumerate(groups):
        if not group.replicated:
            _add_held(group, loads, entries, names)
            continue
        count = len(group.tensors)
        for index, (box, holders) in enumerate(group.holding.cells):
            nbytes = volume(box) * group.itemsize
            if len(holders) > 1:
                members[holders].append((nbytes, number, index))
            else:
                loads[holders[0]] += nbytes * count
                entries[holders[0]] += count
                names[holders[0]] += group.name_bytes
    classes = [ReplicaClass((rank,), nbytes, {rank: nbytes}) for rank, nbytes in enumerate(loads) if nbytes]
    weights = dict(enumerate(given)) if given is not None else dict.fromkeys(range(layout.world), 1)
    shared = sorted(members)
    sizes = [sum(nbytes * len(groups[number].tensors) for nbytes, number, _ in members[key]) for key in shared]
    taken = divide_fairly(list(zip(shared, sizes, strict=True)), dict(enumerate(loads)), weights)
    goal = list(loads)
    classes_of = [0] * layout.world
    for parts in taken:
        for rank, part in parts.items():
            goal[rank] += part
            classes_of[rank] += 1
    slack = [goal[rank] // (SLACK * max(1, classes_of[rank])) for rank in range(layout.world)]
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for holders, size, parts in zip(shared, sizes, taken, strict=True):
        given_out = _hand_out(members[holders], groups, parts, slack, pieces)
        classes.append(ReplicaClass(holders, size, given_out))
        for rank, nbytes in given_out.items():
            loads[rank] += nbytes
    for rank, some in pieces.items():
        for piece in some:
            tensor = layout.tensors[piece.tensor]
            # A piece that begins or ends within a row is several boxes.
            boxes = len(_boxes(tensor.cells()[piece.cell].box, piece.start, piece.stop))
            entries[rank] += boxes
            names[rank] += boxes * written(tensor.name)
    fills = (goal[rank] / weights[rank] for rank in range(layout.world) if weights[rank])
    return Assignment(
        layout=layout,
        mode="divided",
        capacity=given,
        loads=tuple(loads),
        entries=tuple(entries),
        name_bytes=tuple(names),
        classes=tuple(sorted(classes, key=lambda one: one.holders)),
        optimum=max(fills, default=0.0),
        _groups=groups,
        _pieces={rank: tuple(some) for rank, some in sorted(pieces.items())},
    )


def everyone(layout: Layout, capacity: Mapping[int, int] | None = None) -> Assignment:
    """Every holder saves all it holds. `capacity` as in `divide`; it changes nothing but what `fill` says."""
    given = None if capacity is None else _checked(layout.world, capacity)
    groups = _grouped(layout)
    loads, entries, names, alone = ([0] * layout.world for _ in range(4))
    sizes: dict[tuple[int, ...], int] = defaultdict(int)
    for group in groups:
        _add_held(group, loads, entries, names)
        if not group.replicated:
            _add_held(group, alone)
            continue
        for box, holders in group.holding.cells:
            sizes[holders] += volume(box) * group.itemsize * len(group.tensors)
    for rank, nbytes in enumerate(alone):
        if nbytes:
            sizes[rank,] += nbytes
    made = Assignment(
        layout=layout,
        mode="all",
        capacity=given,
        loads=tuple(loads),
        entries=tuple(entries),
        name_bytes=tuple(names),
        classes=tuple(ReplicaClass(key, sizes[key], dict.fromkeys(key, sizes[key])) for key in sorted(sizes)),
        optimum=0.0,
        _groups=groups,
        _pieces={},
    )
    object.__setattr__(made, "optimum", made.peak)  # nothing can be moved
    return made


@dataclass(frozen=True)
class Gap:
    """Where an assignment does not save a layout; `str` says it in words. rank: who is to save there, if anybody."""

    tensor: str
    ranges: str
    rank: int | None
    what: str

    def __str__(self) -> str:
        return f"tensor {self.tensor!r}: {self.what}"


def coverage_problem(layout: Layout, assignment: Assignment) -> str:
    """Why an assignment does not save a layout, naming tensor, rank and range; empty when it does."""
    gap = first_gap(layout, assignment)
    return "" if gap is None else str(gap)


def first_gap(layout: Layout, assignment: Assignment) -> Gap | None:
    """Where an assignment first fails to save a layout; None when it saves all of it.

    Divided: every element of a replicated tensor has exactly one saver, and that one holds it. A layout's cells are
    disjoint and cover its tensors (it was refused otherwise), and what one rank holds alone is saved by it, so what is
    to be proved are the pieces of cells with several holders. Raises UsageError when it divides another layout.
    """
    if assignment.layout is not layout and assignment.layout.digest() != layout.digest():
        raise UsageError("the assignment divides another layout.")
    if assignment.mode == "all":
        return None
    given: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for rank, pieces in assignment._pieces.items():
        for piece in pieces:
            given[piece.tensor, piece.cell].append((piece.start, piece.stop, rank))
    for group in assignment._groups:
        if not group.replicated:
            continue
        for index, cell in enumerate(group.holding.cells):
            if len(cell.holders) == 1:
                continue
            size = volume(cell.box)
            for tensor in group.tensors:
                gap = _cell_gap(layout.tensors[tensor].name, cell, size, given.pop((tensor, index), []))
                if gap is not None:
                    return gap
    for (tensor, _), some in given.items():
        rank = some[0][2]
        return Gap(layout.tensors[tensor].name, "", rank, f"rank {rank} is to save a range that is not divided")
    return None


def _cell_gap(name: str, cell: Cell, size: int, given: list[tuple[int, int, int]]) -> Gap | None:
    """Where pieces do not cover a cell once."""
    at = 0
    for start, stop, rank in [*sorted(given), (size, size + 1, None)]:
        if rank is not None and rank not in cell.holders:
            words = said(cell.box)
            return Gap(name, words, rank, f"rank {rank} is to save of {words}, which it does not hold")
        if rank is not None and not 0 <= start < stop <= size:
            return Gap(
                name, said(cell.box), rank, f"rank {rank} is to save elements {start}:{stop} of {said(cell.box)}"
            )
        if start != at:
            what = "has no saver" if start > at else "has two savers"
            words = ", ".join(map(said, _boxes(cell.box, *sorted((start, at)))))
            return Gap(name, words, rank, f"{words} {what}")
        at = stop
    return None


def written(name: str) -> int:
    """Bytes of a name in an image's JSON header: it stands there twice, once in JSON that is a text within JSON, and
    all but printable ASCII is escaped."""
    if name.isascii() and name.isprintable() and '"' not in name and "\\" not in name:
        return 2 * len(name)
    once = json.dumps(name)[1:-1]
    return len(once) + len(json.dumps(once)) - 2


def _checked(world: int, capacity: Mapping[int, int]) -> tuple[int, ...]:
    for rank in range(world):
        if rank not in capacity:
            raise UsageError(f"the capacity of rank {rank} is missing.", hint=f"Give one for each of {world} ranks.")
        if capacity[rank] < 0:
            raise UsageError(f"rank {rank} cannot take {capacity[rank]} bytes a step; 0 says that it has no window.")
    return tuple(capacity[rank] for rank in range(world))


def _grouped(
    layout: Layout, whole: frozenset[int] = frozenset(), kept: frozenset[int] = frozenset()
) -> tuple[_Group, ...]:
    """All tensors, in groups that are held alike."""
    found: dict[tuple[int, int, bool, bool], list[int]] = defaultdict(list)
    for holding, numbers in layout.by_holding:
        for number in numbers:
            tensor = layout.tensors[number]
            replicated = tensor.replicated and number not in kept
            found[id(holding), tensor.itemsize, replicated, number in whole].append(number)
    return tuple(
        _Group(
            layout.tensors[numbers[0]].holding,
            itemsize,
            replicated,
            tuple(numbers),
            sum(written(layout.tensors[number].name) for number in numbers),
            uncut,
        )
        for (_, itemsize, replicated, uncut), numbers in found.items()
    )


def _add_held(
    group: _Group, loads: list[int], entries: list[int] | None = None, names: list[int] | None = None
) -> None:
    """Count a group of which every holder saves what it holds."""
    count = len(group.tensors)
    pattern = group.holding.pattern
    for ranks, boxes, elements in zip(group.holding.ranks, pattern.parts, pattern.elements, strict=True):
        for rank in ranks:
            loads[rank] += elements * group.itemsize * count
            if entries is not None and names is not None:
                entries[rank] += len(boxes) * count
                names[rank] += len(boxes) * group.name_bytes


def _sole_boxes(cells: Sequence[Cell]) -> Mapping[int, list[Box]]:
    found: dict[int, list[Box]] = defaultdict(list)
    for box, holders in cells:
        if len(holders) == 1:
            found[holders[0]].append(box)
    return found


def _hand_out(
    members: Sequence[tuple[int, int, int]],
    groups: Sequence[_Group],
    goal: Mapping[int, int],
    slack: Sequence[int],
    pieces: dict[int, list[Piece]],
) -> dict[int, int]:
    """Hand the cells of one class out, the largest first, each to the rank with the most bytes still to take.

    members: (bytes, group, cell). goal: bytes for each rank, all of the class together. Returns what each got.

    What is still to be taken always adds up to what is still to be handed out, so there is always a rank that may
    take; it exceeds its goal at most once, by its slack or by one element.
    """
    open_ = [(-nbytes, rank) for rank, nbytes in goal.items()]
    heapq.heapify(open_)
    got: dict[int, int] = defaultdict(int)
    ordered = sorted(members, key=lambda one: (-one[0], one[1], one[2]))
    for _, number, index in ordered:
        group = groups[number]
        box, itemsize = group.holding.cells[index].box, group.itemsize
        size = volume(box)
        for tensor in group.tensors:
            at = 0
            while at < size:
                rest, rank = -open_[0][0], open_[0][1]
                if group.whole or (size - at) * itemsize <= rest + slack[rank]:
                    end = size
                else:
                    unit = _unit(box, slack[rank] // itemsize)
                    end = (at + rest // itemsize) // unit * unit
                    if end <= at:
                        end = min(size, at - at % unit + unit)
                some = pieces[rank]
                if at and some and some[-1][:2] == (tensor, index) and some[-1].stop == at:
                    some[-1] = some[-1]._replace(stop=end)
                else:
                    some.append(Piece(tensor, index, at, end))
                given = (end - at) * itemsize
                got[rank] += given
                if given < rest:
                    heapq.heapreplace(open_, (given - rest, rank))
                else:
                    heapq.heappop(open_)
                at = end
    return dict(sorted(got.items()))


def _unit(box: Box, most: int) -> int:
    """Elements that stay together when a box is cut: as many whole rows as make at most `most`, a power of two of
    them; rows of a later dimension where one of an earlier is too large; at least one element."""
    inner = prod(stop - start for start, stop in box)
    for start, stop in box:
        inner //= stop - start
        if inner <= most:
            return int(inner << ((most // inner).bit_length() - 1))
    return 1


def _boxes(box: Box, start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of a box, row-major, as boxes of the whole tensor."""
    if stop - start == volume(box):
        return [box]
    local = flat_boxes(tuple(high - low for low, high in box), start, stop)
    return [tuple((low + a, low + b) for (a, b), (low, _) in zip(one, box, strict=True)) for one in local]
