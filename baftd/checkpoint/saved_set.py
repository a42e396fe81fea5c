"""What ranks saved of each tensor, put together by name: which boxes of it there are, and in whose image. Pure.

Who holds what is known from ranges alone: entries of one name and equal ranges are replicas, whoever saved them. A
tensor saved without ranges is its rank's own; it can be read where one rank has it, or all have the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from baftd.checkpoint.ranges import Box, flat_boxes, said, volume, whole
from baftd.checkpoint.shard import NATIVE_DTYPES, TensorEntry
from baftd.errors import LayoutError

__all__ = [
    "Problem",
    "SameBytes",
    "SavedPart",
    "SavedSet",
    "SavedTensor",
    "WholeTensor",
    "boxes_of",
    "error_of",
    "is_flat",
]

MAX_NAMED = 20
"""Problems spelled out in one error; of the rest only the number is said."""
MANY = 16
"""Parts of one tensor from which they are searched by numpy."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor (or a range of one) in the image of the rank that saved it; `entry` as its header describes it."""

    rank: int
    stored_name: str
    entry: TensorEntry


SameBytes = Callable[[SavedTensor, SavedTensor, Box], bool]
"""Whether two saved tensors hold the same bytes of a box (of the whole tensor) that both have."""


@dataclass(frozen=True)
class Problem:
    """Why a wanted tensor cannot be read. `ranges` in words; empty where the whole tensor is meant."""

    tensor: str
    rank: int | None
    ranges: str
    why: str
    hint: str = ""

    def __str__(self) -> str:
        where = f" {self.ranges}" if self.ranges else ""
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"tensor {self.tensor!r}{where}{rank}: {self.why}"


def error_of(problems: Sequence[Problem], what: str = "the saved state does not give this layout") -> LayoutError:
    """One error that names all problems; for `raise`."""
    named = "; ".join(map(str, problems[:MAX_NAMED]))
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    first = problems[0]
    hint = next((problem.hint for problem in problems if problem.hint), "")
    return LayoutError(f"{what}: {named}{more}.", hint=hint, tensor=first.tensor, rank=first.rank, ranges=first.ranges)


@dataclass(frozen=True)
class SavedPart:
    """A box of a tensor and the saved tensors that hold it, by rank."""

    box: Box
    holders: tuple[SavedTensor, ...]


@dataclass(frozen=True)
class WholeTensor:
    """All that was saved of one tensor. itemsize: bytes an element; 0: they are not whole bytes, or there are none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    parts: tuple[SavedPart, ...]
    _bounds: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = field(default=None, repr=False, compare=False)

    def near(self, box: Box) -> Sequence[SavedPart]:
        """The parts that may have an element in common with `box`; of many only those that do."""
        if self._bounds is None:
            return self.parts
        low = np.array([start for start, _ in box], dtype=np.int64)
        high = np.array([stop for _, stop in box], dtype=np.int64)
        hit = ((self._bounds[0] < high) & (self._bounds[1] > low)).all(axis=1)
        return [self.parts[i] for i in np.nonzero(hit)[0]]


@dataclass
class SavedSet:
    """All tensors of a saved state, of all ranks, found by name.

    `base`: what makes names of both layouts comparable (an adapter takes the number of the pipeline stage out of them).
    `exact`: where several saved names have one base, the equal name is meant: right only if the new layout has as many
    pipeline stages as the saved one, and counts layers in each anew.
    """

    same_bytes: SameBytes | None
    base: Callable[[str], str]
    exact: bool = False
    _by_base: dict[str, list[tuple[str, SavedTensor]]] = field(default_factory=dict, repr=False)
    _found: dict[tuple[str, int | None], WholeTensor | Problem] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        saved: Mapping[int, Iterable[tuple[str, TensorEntry]]],
        same_bytes: SameBytes | None = None,
        *,
        base: Callable[[str], str] = str,
        exact: bool = False,
    ) -> SavedSet:
        """From the (stored name, entry) pairs of each rank. Other names of an entry count like its own.

        `same_bytes` None: unknown; then a rank's own tensor is readable only where no other rank has one of its name.
        """
        found = cls(same_bytes, base, exact)
        for rank in sorted(saved):
            for stored_name, entry in saved[rank]:
                tensor = SavedTensor(rank, stored_name, entry)
                for name in (entry.name, *entry.aliases):
                    found._by_base.setdefault(base(name), []).append((name, tensor))
        return found

    def names(self) -> tuple[str, ...]:
        """Base names of all tensors, sorted."""
        return tuple(sorted(self._by_base))

    def holders(self, name: str) -> tuple[SavedTensor, ...]:
        """All that was saved under a name, by rank; empty for an unknown one."""
        return tuple(tensor for _, tensor in self._by_base.get(self.base(name), ()))

    def find(self, name: str, from_rank: int | None = None) -> WholeTensor:
        """What was saved of a tensor. `from_rank`: by that rank alone.

        Raises:
            LayoutError: nobody saved it, ranks disagree about it, or it differs among the ranks that own one each.
        """
        found = self.look_up(name, from_rank)
        if isinstance(found, Problem):
            raise error_of([found])
        return found

    def look_up(self, name: str, from_rank: int | None = None) -> WholeTensor | Problem:
        """As `find`, without raising."""
        base = self.base(name)
        saved = self._by_base.get(base, [])
        key = name if self.exact and any(exact == name for exact, _ in saved) else base
        known = self._found.get((key, from_rank))
        if known is None:
            if from_rank is not None:
                saved = [one for one in saved if one[1].rank == from_rank]
            known = self._found[(key, from_rank)] = self._describe(name, saved, from_rank)
        return known

    def _describe(
        self, name: str, saved: Sequence[tuple[str, SavedTensor]], from_rank: int | None
    ) -> WholeTensor | Problem:
        if not saved:
            who = "nobody" if from_rank is None else f"rank {from_rank} has not"
            return Problem(name, None, "", f"{who} saved it")
        groups: dict[str, list[SavedTensor]] = {}
        for exact, tensor in saved:
            groups.setdefault(exact, []).append(tensor)
        if self.exact and name in groups:
            groups = {name: groups[name]}
        found: WholeTensor | None = None
        for tensors in groups.values():
            one = self._group(name, tensors)
            if isinstance(one, Problem):
                return one
            if found is None:
                found = one
                continue
            both = self._united(found, one)
            if both is None:
                ranks = _ranks(tensor for _, tensor in saved)
                return Problem(
                    name,
                    None,
                    "",
                    f"{', '.join(sorted(groups)[:4])} of {ranks} could all be meant, and they differ",
                    "Tell tensors apart by names that do not repeat in each pipeline stage: attach(names=...).",
                )
            found = both
        assert found is not None
        return found

    def _group(self, name: str, tensors: Sequence[SavedTensor]) -> WholeTensor | Problem:
        """What the tensors of one exact name make together."""
        first = tensors[0].entry
        declared = [tensor for tensor in tensors if tensor.entry.ranges is not None]
        own = [tensor for tensor in tensors if tensor.entry.ranges is None]
        if declared and own:
            why = f"{_ranks(declared)} saved declared parts of it, {_ranks(own)} one without ranges"
            return Problem(name, None, "", why)
        shape = first.shape if own else first.global_shape or ()
        for tensor in tensors:
            entry = tensor.entry
            its_shape = entry.shape if own else entry.global_shape
            if (entry.dtype, its_shape) != (first.dtype, shape):
                why = (
                    f"rank {tensors[0].rank} saved {first.dtype} {list(shape)}, "
                    f"rank {tensor.rank} {entry.dtype} {list(its_shape or ())}"
                )
                return Problem(name, None, "", why)
            if own and tensor is not tensors[0] and not self._equal(tensors[0], tensor, whole(shape), unknown=False):
                differ = "and they differ" if self.same_bytes is not None else "and nobody knows whether they are equal"
                why = f"each of {_ranks(own)} saved one of its own, {differ}: it belongs to no other rank"
                return Problem(name, None, "", why)
        parts: dict[Box, list[SavedTensor]] = {}
        for tensor in tensors:
            for box in _held(tensor.entry):
                parts.setdefault(box, []).append(tensor)
        for box, holders in parts.items():
            # Replicas of a stable range are replicas; what changes between updates may have changed on each rank alone.
            for other in holders[1:]:
                if other.entry.kind == "volatile" and not self._equal(holders[0], other, box, unknown=True):
                    why = f"ranks {holders[0].rank} and {other.rank} saved different bytes of it"
                    return Problem(name, None, said(box), why)
        return _whole_tensor(name, first.dtype, shape, _itemsize(tensors), parts)

    def _united(self, a: WholeTensor, b: WholeTensor) -> WholeTensor | None:
        """Two names of one base: one tensor if every part is there twice with the same bytes, else None."""
        if (a.dtype, a.shape) != (b.dtype, b.shape) or {p.box for p in a.parts} != {p.box for p in b.parts}:
            return None
        others = {part.box: part.holders for part in b.parts}
        for part in a.parts:
            if not self._equal(part.holders[0], others[part.box][0], part.box, unknown=False):
                return None
        parts = {part.box: [*part.holders, *others[part.box]] for part in a.parts}
        return _whole_tensor(a.name, a.dtype, a.shape, a.itemsize or b.itemsize, parts)

    def _equal(self, a: SavedTensor, b: SavedTensor, box: Box, *, unknown: bool) -> bool:
        if a == b:
            return True
        return unknown if self.same_bytes is None else self.same_bytes(a, b, box)


def _whole_tensor(
    name: str, dtype: str, shape: tuple[int, ...], itemsize: int, parts: Mapping[Box, Iterable[SavedTensor]]
) -> WholeTensor:
    ordered = tuple(
        SavedPart(box, tuple(sorted(parts[box], key=lambda tensor: (tensor.rank, tensor.stored_name))))
        for box in sorted(parts)
    )
    bounds = None
    if len(ordered) >= MANY and shape:
        table = np.array([part.box for part in ordered], dtype=np.int64).reshape(len(ordered), len(shape), 2)
        bounds = table[:, :, 0], table[:, :, 1]
    return WholeTensor(name, dtype, shape, itemsize, ordered, bounds)


def _itemsize(tensors: Sequence[SavedTensor]) -> int:
    size = NATIVE_DTYPES.get(tensors[0].entry.dtype)
    if size is not None:
        return size
    sizes = {divmod(t.entry.nbytes, prod(t.entry.shape)) for t in tensors if prod(t.entry.shape)}
    if len(sizes) != 1:
        return 0
    size, rest = sizes.pop()
    return 0 if rest else size


def boxes_of(shape: tuple[int, ...], ranges: Sequence[tuple[int, int]]) -> tuple[Box, ...]:
    """Boxes of ranges as a `TensorEntry` has them, in storage order: one a dimension, or one over the flattened tensor.
    Empty ones are left out."""
    if is_flat(shape, ranges):
        return flat_boxes(shape, *ranges[0])
    box = tuple(ranges)
    return (box,) if volume(box) else ()


def is_flat(shape: Sequence[int], ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether ranges of a `TensorEntry` are one over the flattened tensor."""
    return len(ranges) != len(shape)


def _held(entry: TensorEntry) -> tuple[Box, ...]:
    if entry.ranges is None or entry.global_shape is None:
        return boxes_of(entry.shape, whole(entry.shape))
    return boxes_of(entry.global_shape, entry.ranges)


def _ranks(tensors: Iterable[SavedTensor]) -> str:
    ranks = sorted({tensor.rank for tensor in tensors})
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"
