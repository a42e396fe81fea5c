"""Random ways in which ranks hold a tensor, as entries with bytes; and how they are read back run by run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from baftd.checkpoint.ranges import Box
from baftd.checkpoint.reshard import Fill, Wanted, runs
from baftd.checkpoint.shard import TensorEntry, check_entries

ITEMSIZES = {"U8": 1, "BF16": 2, "X3": 3, "F32": 4, "F64": 8, "C128": 16}
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Tensor:
    """A whole tensor: `data` has its shape and a last dimension of the bytes of an element."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    def cut(self, box: Box) -> Bytes:
        """The bytes of a box, row-major."""
        return np.ascontiguousarray(self.data[tuple(slice(start, stop) for start, stop in box)])


Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Held:
    """Ranges of a tensor that a rank holds, as an entry says it: a box, or one range over the flattened tensor; `order`
    is the order of dimensions in memory, slowest first (None: row-major)."""

    ranges: Ranges
    flat: bool
    order: tuple[int, ...] | None = None


def tensor_of(name: str, dtype: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A tensor of random bytes."""
    draw = np.random.default_rng(seed)
    return Tensor(name, dtype, shape, draw.integers(0, 256, (*shape, ITEMSIZES[dtype]), dtype=np.uint8))


def entry_of(tensor: Tensor, held: Held) -> tuple[TensorEntry, bytes]:
    """How a rank saves what it holds, and the bytes of it in memory order."""
    part = tuple(stop - start for start, stop in held.ranges)
    if held.flat:
        start, stop = held.ranges[0]
        data, strides = tensor.data.reshape(-1, tensor.itemsize)[start:stop], None
    else:
        data, strides = tensor.cut(held.ranges), None
        if held.order is not None:
            data = np.ascontiguousarray(data.transpose(*held.order, len(part)))
            steps, step = [0] * len(part), 1
            for axis in reversed(held.order):
                steps[axis] = step
                step *= max(part[axis], 1)
            strides = tuple(steps)
    entry = TensorEntry(
        tensor.name, tensor.dtype, part, prod(part) * tensor.itemsize, "stable", tensor.shape, held.ranges,
        strides=strides,
    )  # fmt: skip
    return entry, data.tobytes()


@dataclass
class Images:
    """What ranks saved: entries by (rank, stored name), and their bytes."""

    entries: dict[int, list[tuple[str, TensorEntry]]]
    data: dict[tuple[int, str], bytes]

    @classmethod
    def of(cls, saved: Mapping[int, Iterable[tuple[Tensor, Held]]]) -> Images:
        """From what each rank holds of each tensor."""
        made = cls({}, {})
        for rank, holdings in saved.items():
            described = [entry_of(tensor, held) for tensor, held in holdings]
            names = check_entries([entry for entry, _ in described])
            made.entries[rank] = [(name, entry) for name, (entry, _) in zip(names, described, strict=True)]
            made.data.update(((rank, name), data) for name, (_, data) in zip(names, described, strict=True))
        return made

    def read(self, fill: Fill) -> bytes:
        """Copy runs; every byte of the target must come exactly once."""
        target = np.zeros(fill.wanted.nbytes, dtype=np.uint8)
        written = np.zeros(fill.wanted.nbytes, dtype=np.int64)
        for read in fill.reads:
            source = np.frombuffer(self.data[read.source.rank, read.source.stored_name], dtype=np.uint8)
            last = None
            for run in runs(read, fill.wanted):
                assert run.nbytes > 0
                assert 0 <= run.source <= run.source + run.nbytes <= len(source)
                assert 0 <= run.target <= run.target + run.nbytes <= len(target)
                assert last is None or last.target + last.nbytes <= run.target
                joined = last is not None and (last.source + last.nbytes, last.target + last.nbytes) == run[:2]
                assert not joined, "two runs that are one"
                target[run.target : run.target + run.nbytes] = source[run.source : run.source + run.nbytes]
                written[run.target : run.target + run.nbytes] += 1
                last = run
        assert (written == 1).all(), "each element once"
        return target.tobytes()


# ---------------------------------------------------------------------------------------------- strategies

dtypes = st.sampled_from(sorted(ITEMSIZES))
shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> dict[int, list[Held]]:
    """Who holds which ranges of a tensor, so that all of it is held: grids, uneven and with empty parts, ranges of the
    flattened tensor, whole copies, boxes beside them that overlap; several parts a rank, replicas, empty ranks."""
    ranks = st.sets(st.integers(0, world - 1), min_size=1, max_size=min(world, 3))
    held: dict[int, set[Held]] = {rank: set() for rank in range(world)}
    kind = draw(st.sampled_from(["grid", "grid", "flat", "whole", "overlapping"]))
    if kind == "flat":
        size = prod(shape)
        cuts = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=4))), size]
        # Of a tensor of one dimension a range is a box.
        parts = [Held(((start, stop),), len(shape) != 1) for start, stop in pairwise(cuts)]
    else:
        parts = [Held(box, False) for box in draw(_grids(shape, 1 if kind == "whole" else 3))]
        if kind == "overlapping":
            parts += [Held(box, False) for box in draw(_grids(shape, 2))]
    for part in parts:
        for rank in draw(ranks):
            order = draw(st.permutations(range(len(shape)))) if not part.flat and draw(st.booleans()) else None
            if all(part.ranges != other.ranges for other in held[rank]):
                held[rank].add(Held(part.ranges, part.flat, None if order is None else tuple(order)))
    return {rank: sorted(found, key=lambda one: one.ranges) for rank, found in held.items()}


@st.composite
def _grids(draw: st.DrawFn, shape: tuple[int, ...], most: int) -> list[Box]:
    """Boxes that tile a shape: each dimension cut at random, into empty parts too."""
    axes = []
    for size in shape:
        cuts = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=most - 1))), size]
        axes.append(list(pairwise(cuts)))
    return sorted(set(product(*axes)))


def wanted_of(tensor: Tensor, held: Sequence[Held]) -> list[Wanted]:
    """What a rank with these holdings needs."""
    return [
        one
        for part in held
        for one in Wanted.of(tensor.name, tensor.dtype, tensor.shape, part.ranges, tensor.itemsize)
    ]
