"""Reading a saved state into another layout: which byte ranges of whose shards a rank of the new layout needs. Pure.

    saved = SavedSet.of({rank: image.entries.items() ...}, same_bytes)
    fills = plan_reads(saved, [Wanted(...), ...], rank=me)    # exact cover of each box, or one error that names all
    for fill in fills:
        for read in fill.reads:
            for run in runs(read, fill.wanted): ...           # contiguous bytes; or `geometry` for strided views

What is wanted is found by name, so the moments of an optimizer follow their parameters. Nothing of a tensor is read
but the ranges that are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from baftd.checkpoint.ranges import Box, intersection, row_major, said, said_all, subtract, volume, whole
from baftd.checkpoint.saved_set import (
    Problem,
    SameBytes,
    SavedPart,
    SavedSet,
    SavedTensor,
    WholeTensor,
    boxes_of,
    error_of,
    is_flat,
)
from baftd.checkpoint.shard import TensorEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from baftd.checkpoint.layout import Layout
    from baftd.checkpoint.savers import Assignment

__all__ = [
    "Fill",
    "Geometry",
    "Problem",
    "Read",
    "Run",
    "SameBytes",
    "SavedPart",
    "SavedSet",
    "SavedTensor",
    "Wanted",
    "WholeTensor",
    "boxes_of",
    "error_of",
    "find_reads",
    "geometry",
    "plan_reads",
    "reshard",
    "runs",
]


@dataclass(frozen=True)
class Wanted:
    """What a rank of the new layout needs of one tensor: a box, as a row-major buffer of its elements.

    shape: of the whole tensor. box: in its coordinates. itemsize: bytes an element.
    from_rank: take it as that rank saved it, whatever others have (an adapter's choice for what differs among ranks).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    itemsize: int
    from_rank: int | None = None

    @property
    def nbytes(self) -> int:
        """Of the box."""
        return volume(self.box) * self.itemsize

    @classmethod
    def of(
        cls, name: str, dtype: str, shape: tuple[int, ...], ranges: Sequence[tuple[int, int]] | None, itemsize: int
    ) -> tuple[Wanted, ...]:
        """For ranges as in a `TensorEntry` (None: the whole tensor; one range over a tensor of another number of
        dimensions: of the flattened one). The buffers of several follow each other without a gap, in this order."""
        boxes = (whole(shape),) if ranges is None else boxes_of(shape, tuple(ranges))
        return tuple(cls(name, dtype, shape, box, itemsize) for box in boxes)


@dataclass(frozen=True)
class Read:
    """Elements of `box` (in the whole tensor's coordinates), all of which `source` holds."""

    source: SavedTensor
    box: Box


@dataclass(frozen=True)
class Fill:
    """Reads that cover the box of `wanted`, each element exactly once."""

    wanted: Wanted
    reads: tuple[Read, ...]


class Run(NamedTuple):
    """Contiguous bytes. `source` counts from the first byte of the saved entry, `target` from the wanted buffer's."""

    source: int
    target: int
    nbytes: int


class Geometry(NamedTuple):
    """A strided view of a read: `shape` in elements, offsets and strides in bytes (relative as in `Run`)."""

    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]


# ---------------------------------------------------------------------------------------------- which ranges to read


def plan_reads(
    saved: SavedSet, wanted: Sequence[Wanted], *, rank: int | None = None, load: dict[int, int] | None = None
) -> tuple[Fill, ...]:
    """Reads for everything wanted, in that order. Deterministic.

    Among replicas a part is read from the reader's own rank, else from the image that the part before it came from,
    else from the one of which least is read so far.

    Args:
        saved: what there is.
        wanted: what the reader needs.
        rank: of the reader, in the new layout.
        load: bytes read so far by image, shared by readers that are planned together; updated.

    Raises:
        LayoutError: something wanted was not saved, or not so; all of it is named (at most 20 spelled out).
    """
    fills, problems = find_reads(saved, wanted, rank=rank, load=load)
    if problems:
        raise error_of(problems)
    return fills


def find_reads(
    saved: SavedSet, wanted: Sequence[Wanted], *, rank: int | None = None, load: dict[int, int] | None = None
) -> tuple[tuple[Fill, ...], tuple[Problem, ...]]:
    """As `plan_reads`, but with all problems beside the fills of what has none."""
    load = {} if load is None else load
    fills: list[Fill] = []
    problems: list[Problem] = []
    for want in wanted:
        found = _fill(saved, want, rank, load)
        if isinstance(found, Fill):
            fills.append(found)
        else:
            problems.append(found)
    return tuple(fills), tuple(problems)


def _fill(saved: SavedSet, want: Wanted, rank: int | None, load: dict[int, int]) -> Fill | Problem:
    if not volume(want.box):
        return Fill(want, ())
    found = saved.look_up(want.name, want.from_rank)
    if isinstance(found, Problem):
        return Problem(want.name, rank, said(want.box), found.why, found.hint)
    if (found.dtype, found.shape) != (want.dtype, want.shape):
        why = f"it was saved as {found.dtype} {list(found.shape)} and is wanted as {want.dtype} {list(want.shape)}"
        return Problem(want.name, rank, said(want.box), why)
    if found.itemsize != want.itemsize:
        why = f"its elements were saved with {found.itemsize or 'no whole number of'} bytes, {want.itemsize} are wanted"
        return Problem(want.name, rank, said(want.box), why)
    cells, missing = _cover(found.near(want.box), want.box, rank)
    if missing:
        return Problem(want.name, rank, said_all(missing), "nobody saved this part of it")
    reads: list[Read] = []
    last: int | None = None
    for box, part in sorted(cells, key=lambda cell: cell[0]):
        source = _choose(part.holders, rank, last, load)
        last = source.rank
        load[last] = load.get(last, 0) + volume(box) * want.itemsize
        reads.append(Read(source, box))
    return Fill(want, tuple(reads))


def _cover(parts: Sequence[SavedPart], box: Box, rank: int | None) -> tuple[list[tuple[Box, SavedPart]], list[Box]]:
    """Disjoint boxes that cover `box`, each with a part that holds it; and what no part holds."""
    common = [(cut, part) for part in parts if (cut := intersection(part.box, box)) is not None]
    if len(common) == 1 and common[0][0] == box:
        return common, []
    if len(common) > 1:
        # Where parts overlap, the reader's own come first, then those that give most at once.
        common.sort(key=lambda cell: (not _has(cell[1], rank), -volume(cell[0]), cell[0]))
    cells: list[tuple[Box, SavedPart]] = []
    left: list[Box] = [box]
    for cut, part in common:
        rest: list[Box] = []
        for piece in left:
            taken = intersection(piece, cut)
            if taken is None:
                rest.append(piece)
                continue
            cells.append((taken, part))
            rest += subtract(piece, taken)
        left = rest
        if not left:
            break
    return cells, sorted(left)


def _has(part: SavedPart, rank: int | None) -> bool:
    return any(tensor.rank == rank for tensor in part.holders)


def _choose(holders: Sequence[SavedTensor], rank: int | None, last: int | None, load: Mapping[int, int]) -> SavedTensor:
    if len(holders) == 1:
        return holders[0]
    for preferred in (rank, last):
        for tensor in holders:
            if tensor.rank == preferred:
                return tensor
    # Readers that know nothing of each other start at different images.
    turn = (rank or 0) % len(holders)
    order = [*holders[turn:], *holders[:turn]]
    return min(order, key=lambda tensor: load.get(tensor.rank, 0))


def reshard(
    old: Layout,
    savers: Assignment,
    new: Layout,
    *,
    same_bytes: SameBytes | None = None,
    base: Callable[[str], str] = str,
    exact: bool = False,
) -> dict[int, tuple[Fill, ...]]:
    """What each rank of `new` reads out of the shards that `savers` made of `old`: a fill for each box that it holds,
    by tensor in the order of `new`, then in storage order. Loads of the images are balanced over all ranks.

    `same_bytes`, `base` and `exact` as for `SavedSet.of`: a tensor that several ranks have for themselves moves only
    where its bytes are known to be equal.

    Raises:
        LayoutError: as `plan_reads`, for all ranks together.
    """
    saved: dict[int, list[tuple[str, TensorEntry]]] = {}
    for rank in range(old.world):
        saved[rank] = []
        for number, box in savers.of(rank):
            tensor = old.tensors[number]
            part = tuple(stop - start for start, stop in box)
            declared = tensor.owner is None
            entry = TensorEntry(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=part,
                nbytes=prod(part) * tensor.itemsize,
                kind=tensor.kind,
                global_shape=tensor.shape if declared else None,
                ranges=box if declared else None,
                aliases=tensor.aliases,
            )
            saved[rank].append((f"{tensor.name}@{said(box)}", entry))
    found = SavedSet.of(saved, same_bytes, base=base, exact=exact)
    wanted: dict[int, list[Wanted]] = {rank: [] for rank in range(new.world)}
    for tensor in new.tensors:
        for rank, boxes in tensor.held.items():
            wanted[rank] += [Wanted(tensor.name, tensor.dtype, tensor.shape, box, tensor.itemsize) for box in boxes]
    fills: dict[int, tuple[Fill, ...]] = {}
    problems: list[Problem] = []
    load: dict[int, int] = {}
    for rank, wants in wanted.items():
        fills[rank], more = find_reads(found, wants, rank=rank, load=load)
        problems += more
    if problems:
        raise error_of(problems)
    return fills


# ---------------------------------------------------------------------------------------------- where the bytes lie


def geometry(read: Read, wanted: Wanted) -> Geometry:
    """Where the elements of a read lie in the saved entry and in the wanted buffer. Strides of the entry and ranges
    over the flattened tensor are honoured."""
    size = wanted.itemsize
    entry = read.source.entry
    shape = tuple(stop - start for start, stop in read.box)
    starts = [start for start, _ in read.box]
    if entry.ranges is not None and is_flat(wanted.shape, entry.ranges):
        strides = row_major(wanted.shape)
        offset = sum(s * step for s, step in zip(starts, strides, strict=True)) - entry.ranges[0][0]
    else:
        origin = [start for start, _ in entry.ranges] if entry.ranges is not None else [0] * len(starts)
        strides = entry.strides if entry.strides is not None else row_major(entry.shape)
        offset = sum((s - o) * step for s, o, step in zip(starts, origin, strides, strict=True))
    into = row_major(tuple(stop - start for start, stop in wanted.box))
    target = sum((s - start) * step for s, (start, _), step in zip(starts, wanted.box, into, strict=True))
    return Geometry(
        shape,
        offset * size,
        tuple(step * size for step in strides),
        target * size,
        tuple(step * size for step in into),
    )


def runs(read: Read, wanted: Wanted) -> Iterator[Run]:
    """The longest runs of bytes that are contiguous both in the saved entry and in the wanted buffer, by target."""
    found = geometry(read, wanted)
    # Dimensions as (count, source stride, target stride), innermost last; neighbours that continue each other merge.
    merged: list[tuple[int, int, int]] = []
    steps = zip(found.shape, found.source_strides, found.target_strides, strict=True)
    for count, source, target in steps:
        if count == 1:
            continue
        if merged and merged[-1][1] == count * source and merged[-1][2] == count * target:
            count *= merged.pop()[0]
        merged.append((count, source, target))
    length = wanted.itemsize
    if merged and merged[-1][1:] == (length, length):
        length *= merged.pop()[0]
    last: Run | None = None
    for index in product(*(range(count) for count, _, _ in merged)):
        source_at, target_at = found.source_offset, found.target_offset
        for i, (_, source, target) in zip(index, merged, strict=True):
            source_at += i * source
            target_at += i * target
        # Of an entry in another memory order, two may meet where an outer dimension goes on.
        if last is not None and (last.source + last.nbytes, last.target + last.nbytes) == (source_at, target_at):
            last = Run(last.source, last.target, last.nbytes + length)
            continue
        if last is not None:
            yield last
        last = Run(source_at, target_at, length)
    if last is not None:
        yield last
