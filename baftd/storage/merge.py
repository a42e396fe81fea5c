"""Whole tensors out of the parts that ranks saved: which piece goes where. Pure.

A tensor saved with ranges is put together from them; equal ranges saved by several ranks are replicas and taken once
if their digests agree. Nothing else is assumed: a tensor without ranges is its rank's own, and where several ranks
have one of that name, each is kept as `rank<r>.<name>`. So are parts that do not fit together, with a note.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from baftd.checkpoint.image import ParsedImage
from baftd.checkpoint.ranges import Box, tiling_problem, whole
from baftd.checkpoint.shard import NATIVE_DTYPES, Placement, TensorEntry
from baftd.errors import UsageError

__all__ = ["Merged", "Merger", "Piece"]


@dataclass(frozen=True)
class Piece:
    """A saved tensor (or range of one), and the part of the whole that it is."""

    rank: int
    offset: int
    """Of its bytes in the image of `rank`."""
    entry: TensorEntry
    box: Box
    """In elements of the whole, in the dimensions of `Merged.grid`."""


@dataclass(frozen=True)
class Merged:
    """A tensor of the merged set."""

    name: str
    dtype: str
    """Logical: a tag of safetensors, or a foreign name."""
    shape: tuple[int, ...]
    itemsize: int
    grid: tuple[int, ...]
    """Shape in which the pieces' boxes count: `shape`, or its flattened length."""
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.itemsize

    @property
    def native(self) -> bool:
        """Whether every safetensors reader knows the type; others are written as flat U8."""
        return self.dtype in NATIVE_DTYPES


@dataclass
class Merger:
    """Merges the images of one checkpoint. `digests_of(rank, placement)`: those of its chunks, joined."""

    images: Mapping[int, ParsedImage]
    digests_of: Callable[[int, Placement], bytes]
    notes: list[str] = field(default_factory=list)
    """What a person should know about the result, one sentence each."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of tied tensors, and the name that each is stored under."""

    def merge(self) -> list[Merged]:
        """All tensors by name. Raises `UsageError` when two would have one name."""
        by_name: dict[str, list[tuple[int, Placement]]] = defaultdict(list)
        for rank in sorted(self.images):
            for placement in self.images[rank].placements:
                by_name[placement.entry.name].append((rank, placement))
        found: list[Merged] = []
        for name, saved in sorted(by_name.items()):
            found += self._one(name, saved)
        self._check_names(found)
        return found

    def _one(self, name: str, saved: list[tuple[int, Placement]]) -> list[Merged]:
        ranged = [one for one in saved if one[1].entry.ranges is not None]
        own = [one for one in saved if one[1].entry.ranges is None]
        found: list[Merged] = []
        if ranged:
            whole = self._whole(name, ranged)
            if isinstance(whole, Merged):
                found.append(whole)
                self._alias(whole.name, (placement.entry for _, placement in ranged))
            else:
                self.notes.append(f"{name}: {whole}; each rank's part is kept under its own name.")
                found += self._apart(name, ranged)
        if len(own) == 1 and not ranged:
            rank, placement = own[0]
            found.append(_alone(name, rank, placement))
            self._alias(name, [placement.entry])
        elif own:
            found += self._apart(name, own)
        return found

    def _whole(self, name: str, saved: Sequence[tuple[int, Placement]]) -> Merged | str:
        """The tensor that the parts make, or why they make none."""
        first = saved[0][1].entry
        shape = first.global_shape or ()
        if any((p.entry.dtype, p.entry.global_shape) != (first.dtype, first.global_shape) for _, p in saved):
            return "ranks disagree about its type or shape"
        itemsize = _itemsize(saved)
        if itemsize is None:
            return f"elements of type {first.dtype} are not whole bytes"
        flat = len(first.ranges or ()) != len(shape) or any(len(p.entry.ranges or ()) != len(shape) for _, p in saved)
        grid: tuple[int, ...] = (prod(shape),) if flat else shape
        elements = prod(grid)
        pieces: dict[Box, tuple[Piece, bytes]] = {}
        for rank, placement in saved:
            box = tuple(placement.entry.ranges or ())
            if len(box) != len(grid):
                return "some ranks saved ranges of it, others of its flattened form"
            if not placement.nbytes and elements:
                continue  # nothing of it fell to this rank
            digests = self.digests_of(rank, placement)
            known = pieces.get(box)
            if known is None:
                pieces[box] = Piece(rank, placement.offset, placement.entry, box), digests
            elif known[1] != digests:
                return f"the replicas of ranks {known[0].rank} and {rank} differ"
        problem = tiling_problem(pieces, grid)
        if problem:
            return problem
        return Merged(name, first.dtype, shape, itemsize, grid, tuple(piece for piece, _ in pieces.values()))

    def _apart(self, name: str, saved: Iterable[tuple[int, Placement]]) -> list[Merged]:
        found = []
        for rank, placement in saved:
            ranges = placement.entry.ranges
            suffix = "@" + ",".join(f"{start}:{stop}" for start, stop in ranges) if ranges is not None else ""
            found.append(_alone(f"rank{rank}.{name}{suffix}", rank, placement))
        return found

    def _alias(self, name: str, entries: Iterable[TensorEntry]) -> None:
        for entry in entries:
            for alias in entry.aliases:
                self.aliases[alias] = name

    def _check_names(self, found: Sequence[Merged]) -> None:
        seen: set[str] = set()
        for one in found:
            if one.name in seen:
                raise UsageError(f"two tensors would be called {one.name!r} in the merged files")
            seen.add(one.name)
        for alias in seen & self.aliases.keys():
            del self.aliases[alias]


def _alone(name: str, rank: int, placement: Placement) -> Merged:
    entry = placement.entry
    itemsize = _itemsize([(rank, placement)])
    if itemsize is None:  # bytes without elements
        entry = TensorEntry(entry.name, entry.dtype, (placement.nbytes,), placement.nbytes, entry.kind)
        itemsize = 1
    piece = Piece(rank, placement.offset, entry, whole(entry.shape))
    return Merged(name, entry.dtype, entry.shape, itemsize, entry.shape, (piece,))


def _itemsize(saved: Sequence[tuple[int, Placement]]) -> int | None:
    """Bytes an element; None where that is not a whole number."""
    dtype = saved[0][1].entry.dtype
    if dtype in NATIVE_DTYPES:
        return NATIVE_DTYPES[dtype]
    sizes = {divmod(p.nbytes, prod(p.entry.shape)) for _, p in saved if prod(p.entry.shape)}
    if not sizes:
        return 1
    size, rest = sizes.pop()
    return size if not sizes and not rest and size else None
