"""The neutral layout of a job: for each tensor its shape and type, and which ranks hold which ranges of it. Pure.

Nothing here knows a framework or a strategy. Ranks that hold equal ranges of a stable tensor are replicas, and nothing
else is assumed: stages may have different numbers of replicas, a stage may live on two devices (Chimera, DualPipe),
optimizers may be divided in any way (whole tensors, rows, ranges of the flattened tensor, unevenly, not at all),
experts may differ from rank to rank, and a tied embedding lies on the first and the last stage because both hold it. A
tensor of which nothing is known belongs to its rank alone.

Layouts are equal, and have one digest, whatever the order in which they were put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from baftd.checkpoint.identity import MAX_WORLD
from baftd.checkpoint.layout_wire import pack, unpack
from baftd.checkpoint.ranges import Box, Cell, flat_boxes, said, said_all
from baftd.checkpoint.shard import NATIVE_DTYPES, BytesLike, Kind, TensorEntry, digest
from baftd.checkpoint.tensor_layout import Holding, Pattern, RankPlace, TensorLayout
from baftd.errors import FormatError, LayoutError

__all__ = ["Box", "Cell", "Holding", "Layout", "LayoutBuilder", "Pattern", "RankPlace", "TensorLayout"]


class LayoutBuilder:
    """Puts a layout together. `world`: number of ranks. Order of calls does not matter."""

    def __init__(self, world: int) -> None:
        if not 1 <= world <= MAX_WORLD:
            raise LayoutError(f"a layout of {world} ranks is none: 1 to {MAX_WORLD} are possible.")
        self.world = world
        self._places: dict[int, RankPlace] = {}
        self._tensors: dict[tuple[str, int], TensorLayout] = {}
        self._holdings: dict[Holding, Holding] = {}
        self._patterns: dict[Pattern, Pattern] = {}
        self._own: dict[tuple[tuple[int, ...], int], Holding] = {}

    def place(self, place: RankPlace) -> None:
        """Say where a rank stands. Raises LayoutError for a rank outside, or placed twice."""
        if not 0 <= place.rank < self.world:
            raise LayoutError(f"rank {place.rank} is placed, but there are {self.world} ranks.", rank=place.rank)
        if place.rank in self._places:
            raise LayoutError(f"rank {place.rank} is placed twice.", rank=place.rank)
        problem = place.problem()
        if problem:
            raise LayoutError(f"rank {place.rank} cannot be placed: {problem}.", rank=place.rank)
        self._places[place.rank] = place

    def add(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        held: Mapping[int, Sequence[Box]] | Holding,
        *,
        itemsize: int | None = None,
        kind: Kind = "stable",
        crossing: bool = False,
        aliases: Iterable[str] = (),
    ) -> None:
        """Add a tensor and the boxes that each rank holds of it, in storage order (none: an empty shard).

        A `Holding` says it for many ranks at once (`Holding.of_groups`), and is meant to be used for many tensors.
        itemsize: bytes an element, for types other than safetensors'. crossing: ranges may overlap in any way.
        Raises LayoutError for what is wrong by itself; coverage is looked at in `build`.
        """
        if not isinstance(held, Holding):
            try:
                held = Holding.of(shape, held, crossing=crossing)
            except (ValueError, OverflowError) as error:
                raise LayoutError(f"tensor {name!r}: {error}.", tensor=name) from error
        elif held.shape != tuple(shape):
            raise LayoutError(f"tensor {name!r} has shape {tuple(shape)}, its holding {held.shape}.", tensor=name)
        self._put(name, dtype, itemsize, kind, held, None, aliases)

    def own(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        rank: int,
        *,
        itemsize: int | None = None,
        kind: Kind = "stable",
        aliases: Iterable[str] = (),
    ) -> None:
        """Add a tensor that belongs to `rank` alone. Other ranks may have one of that name: theirs is another."""
        key = (tuple(shape), rank)
        if key not in self._own:
            self._own[key] = Holding.own(shape, rank)
        self._put(name, dtype, itemsize, kind, self._own[key], rank, aliases)

    def _put(
        self,
        name: str,
        dtype: str,
        itemsize: int | None,
        kind: Kind,
        holding: Holding,
        owner: int | None,
        aliases: Iterable[str],
    ) -> None:
        size = NATIVE_DTYPES.get(dtype, itemsize)
        if size is None or (itemsize is not None and itemsize != size):
            if size is None:
                known = f"{', '.join(NATIVE_DTYPES)} are known, a type of another name needs its itemsize"
                raise LayoutError(f"tensor {name!r} is of type {dtype!r}: {known}.", tensor=name)
            raise LayoutError(
                f"tensor {name!r} of type {dtype} and itemsize {itemsize}: an element has {size} bytes.", tensor=name
            )
        others = tuple(sorted(set(aliases)))
        tensor = TensorLayout(name, dtype, size, kind, self._shared(holding), owner, others)
        problem = tensor.problem()
        if problem:
            raise LayoutError(f"tensor {name!r} cannot be in a layout: {problem}.", tensor=name, rank=owner)
        key = (name, -1 if owner is None else owner)
        if key in self._tensors:
            where = "" if owner is None else f" by rank {owner}"
            raise LayoutError(f"tensor {name!r} is declared twice{where}.", tensor=name, rank=owner)
        self._tensors[key] = tensor

    def take(self, tensor: TensorLayout) -> None:
        """Add a tensor of another layout. Raises LayoutError as `add` does."""
        self._put(
            tensor.name, tensor.dtype, tensor.itemsize, tensor.kind, tensor.holding, tensor.owner, tensor.aliases
        )

    def _shared(self, holding: Holding) -> Holding:
        """The holding, or an equal one that is known already; of known patterns in any case."""
        known = self._holdings.get(holding)
        if known is None:
            pattern = self._patterns.setdefault(holding.pattern, holding.pattern)
            known = self._holdings[holding] = (
                holding if pattern is holding.pattern else Holding(pattern, holding.ranks)
            )
        return known

    def build(self) -> Layout:
        """Check everything and return the layout.

        Raises LayoutError naming tensor, rank and range: ranges outside of a shape, that overlap without being equal
        or nested, or leave a hole; a rank that does not exist; a rank without a coordinate that others have.
        """
        tensors = tuple(self._tensors[key] for key in sorted(self._tensors))
        checked: set[int] = set()
        for tensor in tensors:
            if id(tensor.holding) not in checked:
                checked.add(id(tensor.holding))
                tensor.holding.check(tensor.name, self.world)
        layout = Layout(self.world, tuple(self._places[rank] for rank in sorted(self._places)), tensors)
        self._check_coordinates(layout)
        return layout

    def _check_coordinates(self, layout: Layout) -> None:
        axes = sorted({axis for place in layout.places for axis in place.coordinates})
        if not axes:
            return
        for rank in range(self.world):
            place = self._places.get(rank)
            missing = axes if place is None else [axis for axis in axes if axis not in place.coordinates]
            if not missing:
                continue
            tensor = next((tensor for tensor in layout.tensors if rank in tensor.held), None)
            held = "" if tensor is None else said_all(tensor.held[rank])
            what = "nothing" if tensor is None else f"{held} of tensor {tensor.name!r}"
            raise LayoutError(
                f"rank {rank} has no coordinate {' and '.join(map(repr, missing))} on the mesh; it holds {what}.",
                hint=f"Other ranks have {', '.join(axes)}: every rank needs them, or none.",
                tensor="" if tensor is None else tensor.name,
                rank=rank,
                ranges=held,
            )


class Layout:
    """Who holds what in a whole job. Made by `LayoutBuilder.build`, `Layout.of_entries` or `Layout.decode`.

    places: of the ranks that are placed, ascending. tensors: sorted by name, then owner; numbers of tensors elsewhere
    are places in it.
    """

    def __init__(self, world: int, places: tuple[RankPlace, ...], tensors: tuple[TensorLayout, ...]) -> None:
        self.world = world
        self.places = places
        self.tensors = tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    @cached_property
    def _numbers(self) -> dict[tuple[str, int | None], int]:
        return {(tensor.name, tensor.owner): number for number, tensor in enumerate(self.tensors)}

    @cached_property
    def _placed(self) -> dict[int, RankPlace]:
        return {place.rank: place for place in self.places}

    def index(self, name: str, owner: int | None = None) -> int:
        """Number of a tensor. Raises LayoutError where there is none."""
        number = self._numbers.get((name, owner))
        if number is None:
            whose = "" if owner is None else f" of rank {owner} alone"
            raise LayoutError(f"the layout has no tensor {name!r}{whose}.", tensor=name, rank=owner)
        return number

    def tensor(self, name: str, owner: int | None = None) -> TensorLayout:
        """The tensor with declared ranges of that name, or the one that `owner` has for itself."""
        return self.tensors[self.index(name, owner)]

    def place(self, rank: int) -> RankPlace | None:
        """Where a rank stands; None where nothing was said of it."""
        return self._placed.get(rank)

    @cached_property
    def by_holding(self) -> tuple[tuple[Holding, tuple[int, ...]], ...]:
        """Each holding with the numbers of the tensors that are held so, in order of the first of them.

        What depends on who holds what, and not on names, need be worked out only once for each.
        """
        grouped: dict[int, tuple[Holding, list[int]]] = {}
        for number, tensor in enumerate(self.tensors):
            grouped.setdefault(id(tensor.holding), (tensor.holding, []))[1].append(number)
        return tuple((holding, tuple(numbers)) for holding, numbers in grouped.values())

    @cached_property
    def bytes_by_rank(self) -> npt.NDArray[np.int64]:
        """Bytes that each rank holds, replicas counted on each; length `world`."""
        total = np.zeros(self.world, dtype=np.int64)
        for holding, numbers in self.by_holding:
            weight = sum(self.tensors[number].itemsize for number in numbers)
            total[holding.rank_array] += holding.element_array * weight  # no rank is in a holding twice
        return total

    def bytes_of(self, rank: int) -> int:
        """Bytes that a rank holds."""
        return int(self.bytes_by_rank[rank])

    @cached_property
    def held_bytes(self) -> int:
        """Bytes on all ranks together: what is saved when every holder saves all it has."""
        return int(self.bytes_by_rank.sum())

    @cached_property
    def unique_bytes(self) -> int:
        """Bytes to save when of all replicas one is saved: every stable element once, volatile ones on each holder."""
        total = 0
        for holding, numbers in self.by_holding:
            once, all_ = prod(holding.shape), int(holding.element_array.sum())
            for number in numbers:
                tensor = self.tensors[number]
                total += tensor.itemsize * (once if tensor.replicated else all_)
        return total

    def encode(self) -> bytes:
        """The layout as bytes (`layout_wire.py`): equal bytes for equal layouts."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        return pack(self.world, self.places, self.tensors)

    @cached_property
    def _digest(self) -> bytes:
        return digest(self._encoded)

    def digest(self) -> bytes:
        """xxh3-128 of the encoded layout, 16 bytes."""
        return self._digest

    @staticmethod
    def decode(data: BytesLike) -> Layout:
        """The inverse of `encode`. Raises FormatError for anything that is not a whole and consistent layout."""
        world, places, tensors = unpack(data)
        try:
            builder = LayoutBuilder(world)
            for place in places:
                builder.place(place)
            for tensor in tensors:
                builder.take(tensor)
            return builder.build()
        except LayoutError as error:
            raise FormatError(f"the bytes describe a layout that cannot be: {error.message}") from error

    @staticmethod
    def of_entries(
        entries: Mapping[int, Iterable[TensorEntry]], places: Iterable[RankPlace] = (), *, world: int | None = None
    ) -> Layout:
        """From what each rank declared. A tensor without ranges is its rank's own.

        Entries of one name on one rank are its ranges in storage order. A range of the flattened tensor becomes boxes.
        Where any rank calls a tensor volatile, it is. `world`: where not all ranks have entries.
        Raises LayoutError as `build` does, and where ranks disagree about a tensor's type or shape.
        """
        builder = LayoutBuilder(max(entries, default=0) + 1 if world is None else world)
        for place in places:
            builder.place(place)
        declared: dict[str, _Declared] = {}
        for rank in sorted(entries):
            for entry in entries[rank]:
                itemsize = _itemsize(entry)
                if entry.ranges is None or entry.global_shape is None or itemsize == 0:
                    _own(builder, entry, rank, itemsize)
                    continue
                known = declared.get(entry.name)
                if known is None:
                    known = declared[entry.name] = _Declared(entry, rank)
                known.take(entry, rank, itemsize)
        for name, one in declared.items():
            builder.add(
                name,
                one.first.dtype,
                one.first.global_shape or (),
                one.held,
                itemsize=one.itemsize or 1,
                kind=one.kind,
                aliases=one.aliases,
            )
        return builder.build()


class _Declared:
    """A tensor with ranges, as the ranks that have come by declared it."""

    def __init__(self, first: TensorEntry, rank: int) -> None:
        self.first = first
        self.itemsize: int | None = None
        self.kind: Kind = "stable"
        self.held: dict[int, list[Box]] = {}
        self.aliases: set[str] = set()
        self._rank = rank
        self._shape = first.global_shape or ()

    def take(self, entry: TensorEntry, rank: int, itemsize: int | None) -> None:
        """Add a range. itemsize: None for one without elements of a type of unknown size."""
        first, ranges = self.first, entry.ranges or ()
        if (entry.dtype, entry.global_shape) != (first.dtype, first.global_shape):
            raise LayoutError(
                f"tensor {entry.name!r}: rank {rank} has {said(ranges)} of {entry.dtype} {entry.global_shape}, "
                f"rank {self._rank} declared {first.dtype} {first.global_shape}.",
                tensor=entry.name,
                rank=rank,
                ranges=said(ranges),
            )
        if itemsize is not None and self.itemsize not in (None, itemsize):
            raise LayoutError(
                f"tensor {entry.name!r}: elements of {said(ranges)} on rank {rank} have {itemsize} bytes, "
                f"elsewhere {self.itemsize}.",
                tensor=entry.name,
                rank=rank,
                ranges=said(ranges),
            )
        self.itemsize = self.itemsize if itemsize is None else itemsize
        if entry.kind == "volatile":
            self.kind = "volatile"
        self.aliases.update(entry.aliases)
        boxes = self.held.setdefault(rank, [])
        if len(ranges) == len(self._shape):
            boxes.append(ranges)
            return
        try:
            boxes.extend(flat_boxes(self._shape, *ranges[0]))
        except (IndexError, ValueError) as error:
            raise LayoutError(
                f"tensor {entry.name!r}: {said(ranges)} of rank {rank} is no range of shape {self._shape}.",
                tensor=entry.name,
                rank=rank,
                ranges=said(ranges),
            ) from error


def _itemsize(entry: TensorEntry) -> int | None:
    """Bytes an element; 0 where that is no whole number, None where there is no element to tell by."""
    if entry.dtype in NATIVE_DTYPES:
        return NATIVE_DTYPES[entry.dtype]
    elements = prod(entry.shape)
    if not elements:
        return None
    return 0 if entry.nbytes % elements else entry.nbytes // elements


def _own(builder: LayoutBuilder, entry: TensorEntry, rank: int, itemsize: int | None) -> None:
    """Add what belongs to a rank alone. One whose elements are not whole bytes is added as bytes: no range of it can
    be told apart from the rest."""
    name = entry.name
    if entry.ranges is not None:
        name += "@" + ",".join(f"{start}:{stop}" for start, stop in entry.ranges)
    shape, size = (entry.shape, itemsize or 1) if itemsize != 0 else ((entry.nbytes,), 1)
    builder.own(name, entry.dtype, shape, rank, itemsize=size, kind=entry.kind, aliases=entry.aliases)
