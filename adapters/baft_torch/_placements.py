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
from typing import Any, NamedTuple, TypeAlias

from baftd.checkpoint.ranges import Box

__all__ = ["Cutting", "Part", "Runs", "parts_of", "runs_of", "strided_runs"]

Runs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """One rectangle of a whole tensor that a rank holds, and where in the rank's own tensor it lies."""

    box: Box
    """In the coordinates of the whole."""
    local: Box
    """In the coordinates of the rank's own tensor; of the same extents as `box`, or of one dimension where the rank
    holds a range of the flattened whole."""

    @property
    def where(self) -> tuple[slice, ...]:
        """`local` as an index: `tensor[part.where]` is a view of the part's elements."""
        return tuple(slice(start, stop) for start, stop in self.local)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of `box`."""
        return tuple(stop - start for start, stop in self.box)


def parts_of(runs: Sequence[Runs]) -> tuple[Part, ...]:
    """The rectangles that runs of every dimension make, in the order in which the local tensor holds them.

    A dimension of which nothing is held has no run: the result is then one empty rectangle.
    """
    if not all(runs):
        empty = tuple(each[0] if len(each) == 1 else (0, sum(stop - start for start, stop in each)) for each in runs)
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


class _Cut(NamedTuple):
    """What one placement does: a tensor dimension is cut over a mesh dimension."""

    mesh_dim: int
    dim: int
    factor: int
    parts: int
    mine: int


class Cutting(NamedTuple):
    """How a DTensor is cut."""

    runs: list[Runs]
    """Of every dimension, on this rank."""
    irregular: frozenset[int]
    """Dimensions of which some rank holds several runs."""
    cut: bool
    """Not every rank holds all of it."""


def runs_of(tensor: Any) -> Cutting | str:
    """What the placements of a DTensor leave on this rank; or, as the end of a sentence, why that is no part of a
    whole."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return "this rank is not in its device mesh"
    cuts: list[_Cut] = []
    shape = tuple(int(size) for size in tensor.shape)
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate() or (placement.is_partial() and mesh.size(mesh_dim) == 1):
            continue
        if placement.is_partial():
            return f"it is a partial sum ({placement} over {_axis(mesh, mesh_dim)}), which is part of no whole"
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int) or not 0 <= dim < len(shape) or type(placement).__name__ not in _SHARDS:
            return f"the placement {placement} over {_axis(mesh, mesh_dim)} is not known"
        factor = int(getattr(placement, "split_factor", 1))
        cuts.append(_Cut(mesh_dim, dim, factor, int(mesh.size(mesh_dim)), int(coordinate[mesh_dim])))
    runs: list[Runs] = [((0, size),) if size else () for size in shape]
    order = _order(tensor, cuts)
    for cut in order:
        runs[cut.dim] = strided_runs(runs[cut.dim], cut.factor, cut.parts, cut.mine)
    several = frozenset(cut.dim for cut in order if cut.factor > 1 and cut.parts > 1)
    return Cutting(runs, several, any(cut.parts > 1 for cut in cuts))


_SHARDS = ("Shard", "_StridedShard")


def _axis(mesh: Any, mesh_dim: int) -> str:
    names = mesh.mesh_dim_names
    return f"mesh axis {names[mesh_dim]!r}" if names else f"mesh axis {mesh_dim}"


def _order(tensor: Any, cuts: list[_Cut]) -> list[_Cut]:
    """The cuts in the order in which they were made: left to right, or as `DTensorSpec.shard_order` says.

    `_StridedShard` over an outer axis says that the inner ones were cut first, as `fully_shard` over tensor parallel
    does: torch reads it so (`DTensorSpec.use_strided_shard_as_shard_order`), and where sizes do not divide, no other
    reading is right (`compute_local_shape_and_global_offset` of torch 2.13 is not, there).
    """
    explicit = getattr(getattr(tensor, "_spec", None), "shard_order", None)
    if explicit is not None:
        order = [mesh_dim for entry in explicit for mesh_dim in entry.mesh_dims]
        return sorted(cuts, key=lambda cut: order.index(cut.mesh_dim))
    return _decoded(cuts) or cuts


def _decoded(cuts: list[_Cut]) -> list[_Cut] | None:
    """The order of plain cuts for which the `_StridedShard`s stand; None if they stand for none.

    Right to left, each cut comes behind those of its dimension that together have as many parts as its factor
    (`DTensorSpec._maybe_convert_StridedShard_to_shard_order`).
    """
    orders: dict[int, list[_Cut]] = {}
    for cut in reversed(cuts):
        done = orders.setdefault(cut.dim, [])
        for place in range(len(done) + 1):
            if prod(each.parts for each in done[:place]) == cut.factor:
                done.insert(place, cut._replace(factor=1))
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
