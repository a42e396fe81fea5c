"""Which elements of a whole tensor the placements of a DTensor leave on this rank.

Everything is reckoned a dimension at a time with *runs*: consecutive indices (start, stop) in the order in which the
local tensor holds them. `Shard` cuts as torch.chunk does: pieces of ceil(n / parts), the last ones shorter or missing
(torch.distributed.tensor.placement_types, `Shard.local_shard_size_and_offset`). `_StridedShard(split_factor=f)` first
cuts into f pieces, then each of them, and holds its share of every piece: several runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, TypeAlias

__all__ = ["Box", "Part", "Runs", "parts_of", "runs_of", "strided_runs"]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) a dimension; () for a tensor of no dimension."""
Runs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """One rectangle of a whole tensor that a rank holds, and where in the rank's own tensor it lies."""

    box: Box
    """In the coordinates of the whole."""
    local: Box
    """In the coordinates of the rank's own tensor; of the same extents as `box`."""

    @property
    def where(self) -> tuple[slice, ...]:
        """`local` as an index: `tensor[part.where]` is a view of the part's elements."""
        return tuple(slice(start, stop) for start, stop in self.local)


def parts_of(runs: Sequence[Runs]) -> tuple[Part, ...]:
    """The rectangles that runs of every dimension make, in the order in which the local tensor holds them.

    A dimension of which nothing is held has no run: the result is then one empty rectangle.
    """
    if not all(runs):
        empty = tuple((each[0][0], each[-1][1]) if len(each) == 1 else (0, sum(b - a for a, b in each)) for each in runs)
        return (Part(empty, tuple((0, stop - start) for start, stop in empty)),)
    found = []
    for pieces in product(*(tuple(_placed(each)) for each in runs)):
        found.append(Part(tuple(piece for piece, _ in pieces), tuple(local for _, local in pieces)))
    return tuple(found)


def _placed(runs: Runs) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Each run with its place in the local tensor."""
    at = 0
    for start, stop in runs:
        yield (start, stop), (at, at + stop - start)
        at += stop - start


def runs_of(tensor: Any) -> list[list[Runs]]:
    """What the placements of a DTensor can mean on this rank: for each reading, the runs of every dimension.

    Empty where they say no part of a whole: a partial sum, an unknown placement, a rank outside of the mesh. There are
    two readings only where `_StridedShard` stands for an order of cutting and the sizes do not divide. `fully_shard`
    over tensor parallel then cuts in that order (`DTensorSpec._maybe_convert_StridedShard_to_shard_order`), while
    `distribute_tensor` cuts from left to right: only the local shape tells which.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    cuts: list[tuple[int, int, int, int, int]] = []  # mesh dimension, tensor dimension, factor, parts, mine
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        axis = getattr(placement, "dim", None)
        if placement.is_partial() or not isinstance(axis, int):
            return []
        if placement.is_shard() or hasattr(placement, "split_factor"):
            cuts.append((dim, axis, int(getattr(placement, "split_factor", 1)), mesh.size(dim), coordinate[dim]))
        else:
            return []
    shape = tuple(tensor.shape)
    if any(axis >= len(shape) for _, axis, *_ in cuts):
        return []
    orders = _orders(tensor, cuts, mesh)
    readings = []
    for order in orders:
        runs: list[Runs] = [((0, size),) if size else () for size in shape]
        for _, axis, factor, parts, mine in order:
            runs[axis] = strided_runs(runs[axis], factor, parts, mine)
        if runs not in readings:
            readings.append(runs)
    return readings


def _orders(
    tensor: Any, cuts: list[tuple[int, int, int, int, int]], mesh: Any
) -> list[list[tuple[int, int, int, int, int]]]:
    """The orders in which the cuts may have been made, the likeliest first."""
    spec = getattr(tensor, "_spec", None)
    explicit = getattr(spec, "shard_order", None)
    if explicit is not None:  # no _StridedShard: the spec itself says the order
        order = [dim for entry in explicit for dim in entry.mesh_dims]
        return [sorted(cuts, key=lambda cut: order.index(cut[0]) if cut[0] in order else cut[0])]
    if all(cut[2] == 1 for cut in cuts):
        return [cuts]
    decoded = _decoded(cuts)
    return [cuts] if decoded is None else [decoded, cuts]


def _decoded(cuts: list[tuple[int, int, int, int, int]]) -> list[tuple[int, int, int, int, int]] | None:
    """The order of plain cuts for which the `_StridedShard`s stand; None if they stand for none.

    Right to left, each cut comes behind those of its dimension that together have as many parts as its factor.
    """
    orders: dict[int, list[tuple[int, int, int, int, int]]] = {}
    for cut in reversed(cuts):
        done = orders.setdefault(cut[1], [])
        for place in range(len(done) + 1):
            if prod(each[3] for each in done[:place]) == cut[2]:
                done.insert(place, (cut[0], cut[1], 1, cut[3], cut[4]))
                break
        else:
            return None
    return [cut for each in orders.values() for cut in each]


def strided_runs(runs: Runs, factor: int, parts: int, mine: int) -> Runs:
    """What part `mine` of `parts` holds of `runs`, which are cut into `factor` pieces first."""
    found: list[tuple[int, int]] = []
    for piece in (_chunk(runs, factor, i) for i in range(factor)):
        for start, stop in _chunk(piece, parts, mine):
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
    return tuple(found)


def _chunk(runs: Runs, parts: int, mine: int) -> Runs:
    """Piece `mine` of torch.chunk(parts) of consecutive runs."""
    length = sum(stop - start for start, stop in runs)
    size = -(-length // parts)
    return _cut(runs, min(length, mine * size), min(length, (mine + 1) * size))


def _cut(runs: Runs, begin: int, end: int) -> Runs:
    """Elements `begin` to `end` of runs laid one behind the other."""
    found = []
    at = 0
    for start, stop in runs:
        low, high = max(begin, at), min(end, at + stop - start)
        if low < high:
            found.append((start + low - at, start + high - at))
        at += stop - start
    return tuple(found)
