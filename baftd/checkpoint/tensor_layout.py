"""Who holds which ranges of one tensor, shared by all tensors of equal shape that are held alike. Pure.

`Pattern` is the geometry: a shape, and parts made of boxes. `Holding` says which ranks hold which part. `TensorLayout`
gives a holding a name and a type. A model has thousands of tensors but few patterns, so that overlaps and cells are
worked out once a pattern, and ten thousand tensors on thousands of ranks take little room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from baftd.checkpoint.arrangement import Arrangement
from baftd.checkpoint.ranges import Box, Cell, outside, said, said_all, volume, whole
from baftd.checkpoint.shard import MAX_BYTES, MAX_NAME, NATIVE_DTYPES, Kind
from baftd.errors import LayoutError

__all__ = ["Holding", "Pattern", "RankPlace", "TensorLayout"]

DTYPE = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,63}")


def _is_text(name: str) -> bool:
    """Whether it can be written as UTF-8."""
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands. stages: pipeline stages it holds, several for interleaved or bidirectional schedules.
    coordinates: its place on each named mesh axis. node: the machine it runs on. Empty where nothing is known."""

    rank: int
    stages: tuple[int, ...] = ()
    coordinates: Mapping[str, int] = field(default_factory=dict)
    node: str = ""

    def problem(self) -> str:
        """What is wrong with it, by itself; empty if nothing is."""
        stages, coordinates = (0, *self.stages), (0, *self.coordinates.values())
        if min(stages) < 0 or max(stages) > MAX_BYTES or len(set(self.stages)) < len(self.stages):
            return f"stages {self.stages} are not different numbers from 0 on"
        if min(coordinates) < 0 or max(coordinates) >= MAX_BYTES:
            return f"coordinates {dict(self.coordinates)} are not numbers from 0 on"
        for text in (*self.coordinates, self.node):
            if len(text) > MAX_NAME or not _is_text(text):
                return f"a name is not Unicode text of at most {MAX_NAME} characters"
        return ""


@dataclass(frozen=True)
class Pattern:
    """A shape, and the different ways in which ranks hold ranges of it.

    parts: the boxes of each, in storage order, those without elements left out; a part may be empty.
    crossing: boxes may overlap without one lying within the other (two divisions of one tensor side by side).
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Box, ...], ...]
    crossing: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.parts, self.crossing))

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Elements of each part."""
        return tuple(sum(map(volume, boxes)) for boxes in self.parts)

    @cached_property
    def _owners(self) -> dict[Box, tuple[int, ...]]:
        """The different boxes, sorted, and the parts that have each."""
        owners: dict[Box, list[int]] = {}
        for number, boxes in enumerate(self.parts):
            for box in boxes:
                owners.setdefault(box, []).append(number)
        return {box: tuple(owners[box]) for box in sorted(owners)}

    @cached_property
    def _arrangement(self) -> Arrangement:
        return Arrangement(list(self._owners), len(self.shape))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Disjoint cells that cover the tensor, sorted by box. Their `holders` are numbers of parts."""
        if not self._owners:
            return ()
        return self._arrangement.cells(list(self._owners.values()))

    def problem(self) -> _Problem | None:
        """What is wrong: a range outside, two that overlap as they may not, or a hole. None if nothing is."""
        for box, parts in self._owners.items():
            if outside(box, self.shape):
                return _Problem("outside", parts[:1], (box,))
        if not self._owners:
            return None if not prod(self.shape) else _Problem("hole", (), (), whole(self.shape))
        twice = self._twice()
        if twice is not None:
            return twice
        boxes = self._arrangement.boxes
        crossing = None if self.crossing else self._arrangement.first_crossing
        if crossing is not None:
            first, second = (boxes[number] for number in crossing)
            return _Problem("overlap", (self._owners[first][0], self._owners[second][0]), (first, second))
        hole = self._arrangement.hole(self.shape)
        if hole is None:
            return None
        beside = min(boxes, key=lambda box: (_apart(box, hole), box))
        return _Problem("hole", (self._owners[beside][0],), (beside,), hole)

    def _twice(self) -> _Problem | None:
        """Two boxes of one part that share elements: its ranks would hold them twice."""
        for number, boxes in enumerate(self.parts):
            if len(set(boxes)) < len(boxes):
                box = next(box for box in boxes if boxes.count(box) > 1)
                return _Problem("twice", (number, number), (box, box))
        distinct, owners = self._arrangement.boxes, list(self._owners.values())
        for first, second in zip(*(column.tolist() for column in self._arrangement.overlaps), strict=True):
            both = set(owners[first]).intersection(owners[second])
            if both:
                return _Problem("twice", (min(both), min(both)), (distinct[first], distinct[second]))
        return None


@dataclass(frozen=True)
class _Problem:
    kind: str
    parts: tuple[int, ...]
    boxes: tuple[Box, ...]
    hole: Box = ()


def _apart(box: Box, other: Box) -> int:
    """How many elements lie between two boxes, summed over the dimensions."""
    return sum(max(0, r - q, p - s) for (p, q), (r, s) in zip(box, other, strict=True))


@dataclass(frozen=True)
class Holding:
    """Which ranks hold which part of a pattern. ranks[i]: ascending, those that hold part i; no rank holds two parts;
    parts are in the order of their first ranks. Make one with `Holding.of` or `Holding.of_groups`."""

    pattern: Pattern
    ranks: tuple[tuple[int, ...], ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.pattern, self.ranks))

    @staticmethod
    def of(shape: Sequence[int], held: Mapping[int, Sequence[Box]], *, crossing: bool = False) -> Holding:
        """From the boxes of each rank, in storage order. A rank may hold none (an empty shard)."""
        groups: dict[tuple[Box, ...], list[int]] = {}
        for rank, boxes in held.items():
            groups.setdefault(tuple(boxes), []).append(rank)
        return Holding.of_groups(shape, groups.items(), crossing=crossing)

    @staticmethod
    def of_groups(
        shape: Sequence[int], groups: Iterable[tuple[Sequence[Box], Iterable[int]]], *, crossing: bool = False
    ) -> Holding:
        """From the boxes, in storage order, and all ranks that hold them: no loop over every rank is needed.

        Raises ValueError when a rank appears twice.
        """
        ranks_of: dict[tuple[Box, ...], list[int]] = {}
        for boxes, ranks in groups:
            filled = tuple(tuple((int(start), int(stop)) for start, stop in box) for box in boxes if _filled(box))
            ranks_of.setdefault(filled, []).extend(ranks)
        parts = [(tuple(sorted(map(int, ranks))), boxes) for boxes, ranks in ranks_of.items() if ranks]
        parts.sort()
        pattern = Pattern(tuple(map(int, shape)), tuple(boxes for _, boxes in parts), crossing)
        made = Holding(pattern, tuple(ranks for ranks, _ in parts))
        everyone = made.rank_array
        if len(everyone) > 1:
            ordered = np.sort(everyone)
            twice = ordered[1:][ordered[1:] == ordered[:-1]]
            if len(twice):
                raise ValueError(f"rank {int(twice[0])} is named twice among the holders")
        return made

    @staticmethod
    def own(shape: Sequence[int], rank: int) -> Holding:
        """A whole tensor on one rank."""
        return Holding.of_groups(shape, [((whole(shape),), (rank,))])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.pattern.shape

    @cached_property
    def held(self) -> Mapping[int, tuple[Box, ...]]:
        """The boxes of each rank, in storage order; ranks ascending."""
        pairs = [
            (rank, boxes) for ranks, boxes in zip(self.ranks, self.pattern.parts, strict=True) for rank in ranks
        ]
        return dict(sorted(pairs))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Disjoint cells that cover the tensor, sorted by box, with the ranks that hold each. A cell lies within one
        box of each of its holders."""
        together: dict[tuple[int, ...], tuple[int, ...]] = {}
        made = []
        for box, parts in self.pattern.cells:
            if parts not in together:
                ranks = [self.ranks[part] for part in parts]
                together[parts] = ranks[0] if len(ranks) == 1 else tuple(sorted(rank for one in ranks for rank in one))
            made.append(Cell(box, together[parts]))
        return tuple(made)

    @cached_property
    def rank_array(self) -> npt.NDArray[np.int64]:
        """All ranks, part after part."""
        return np.array([rank for ranks in self.ranks for rank in ranks], dtype=np.int64)

    @cached_property
    def element_array(self) -> npt.NDArray[np.int64]:
        """Elements that each rank of `rank_array` holds."""
        counts = [len(ranks) for ranks in self.ranks]
        return np.repeat(np.array(self.pattern.elements, dtype=np.int64), counts)

    def check(self, name: str, world: int) -> None:
        """Raise LayoutError naming tensor, rank and range unless the ranges are of a tensor of this shape, cover it,
        and overlap only where they are equal or one lies within the other (any way at all with `crossing`)."""
        for ranks in self.ranks:
            if ranks[0] < 0 or ranks[-1] >= world:
                rank = ranks[0] if ranks[0] < 0 else ranks[-1]
                raise LayoutError(
                    f"tensor {name!r}: rank {rank} is named as a holder, but there are {world} ranks.",
                    tensor=name,
                    rank=rank,
                    ranges=said_all(self.held[rank]),
                )
        if not self.ranks:
            raise LayoutError(f"tensor {name!r} of shape {self.shape} is held by no rank.", tensor=name)
        try:
            problem = self.pattern.problem()
        except LayoutError as error:
            rank = self.ranks[0][0]
            message = f"tensor {name!r}, held by rank {rank} and others: {error.message}"
            raise LayoutError(message, tensor=name, rank=rank, ranges=error.ranges) from None
        if problem is not None:
            raise self._error(name, problem)

    def _error(self, name: str, problem: _Problem) -> LayoutError:
        at = [self.ranks[part][0] for part in problem.parts]
        words = [said(box) for box in problem.boxes]
        if problem.kind == "outside":
            return LayoutError(
                f"tensor {name!r}: rank {at[0]} holds {words[0]}, which is no range of shape {self.shape}.",
                tensor=name,
                rank=at[0],
                ranges=words[0],
            )
        if problem.kind == "twice":
            return LayoutError(
                f"tensor {name!r}: rank {at[0]} holds {words[0]} and {words[1]}, which share elements.",
                tensor=name,
                rank=at[0],
                ranges=" and ".join(words),
            )
        if problem.kind == "overlap":
            return LayoutError(
                f"tensor {name!r} of shape {self.shape}: rank {at[0]} holds {words[0]} and rank {at[1]} holds "
                f"{words[1]}; they overlap, and neither lies within the other.",
                hint="Ranges of one tensor must be equal, nested or apart; crossing=True allows two divisions of it.",
                tensor=name,
                rank=at[1],
                ranges=" and ".join(words),
            )
        hole = said(problem.hole)
        rank = at[0] if at else self.ranks[0][0]
        nearest = f"the nearest range is {words[0]} of rank {rank}" if at else f"rank {rank} holds nothing of it either"
        return LayoutError(
            f"tensor {name!r} of shape {self.shape}: no rank holds {hole}; {nearest}.",
            tensor=name,
            rank=rank,
            ranges=hole,
        )


def _filled(box: Box) -> bool:
    """Whether a box is to be kept: it has elements, or makes no sense (then `Pattern.problem` says so)."""
    return all(start != stop for start, stop in box)


@dataclass(frozen=True)
class TensorLayout:
    """A tensor and who holds it.

    itemsize: bytes an element. kind: "stable" or "volatile", as in `TensorEntry`.
    holding: shared with all tensors that are held alike.
    owner: the rank that has it for itself, because nothing is known of it; None for one with declared ranges.
    aliases: other names of the same bytes (tied tensors).
    """

    name: str
    dtype: str
    itemsize: int
    kind: Kind
    holding: Holding
    owner: int | None = None
    aliases: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.holding.pattern.shape

    @property
    def held(self) -> Mapping[int, tuple[Box, ...]]:
        """The boxes of each rank, in storage order. Do not change it: it is shared."""
        return self.holding.held

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.itemsize

    @property
    def replicated(self) -> bool:
        """Whether ranks that hold one range are replicas, so that one of them may save it for all. Only of a stable
        tensor: a volatile one (batch-norm statistics, say) may differ, and every holder saves what it has."""
        return self.kind == "stable" and self.owner is None

    def cells(self) -> tuple[Cell, ...]:
        """Disjoint cells that cover the tensor, with the ranks that hold each."""
        return self.holding.cells

    def problem(self) -> str:
        """What is wrong with name, type and sizes; empty if nothing is."""
        for name in (self.name, *self.aliases):
            if not 0 < len(name) <= MAX_NAME or not _is_text(name):
                return f"its name is not Unicode text of 1 to {MAX_NAME} characters"
        if self.dtype not in NATIVE_DTYPES and not DTYPE.fullmatch(self.dtype):
            return f"dtype {self.dtype!r} is not a name"
        if self.kind not in ("stable", "volatile"):
            return f"kind {self.kind!r} is neither 'stable' nor 'volatile'"
        if not 1 <= self.itemsize <= MAX_BYTES:
            return f"an element of {self.itemsize} bytes is out of range"
        sizes = (0, *self.shape)
        if min(sizes) < 0 or max(sizes) > MAX_BYTES or self.nbytes > MAX_BYTES:
            return f"shape {self.shape} of {self.dtype} is out of range"
        return ""
