"""Which elements the placements of a DTensor leave on each rank, against torch's own cutting of real tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from baft_torch._placements import Part, parts_of, runs_of
from baftd.checkpoint.ranges import Box, tiling_problem, volume

MANY = settings(max_examples=150, deadline=None)


@dataclass
class Mesh:
    """A device mesh as one rank sees it."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None = None

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate

    def size(self, dim: int) -> int:
        return self.shape[dim]


@dataclass
class Sharded:
    """What is read of a DTensor."""

    shape: tuple[int, ...]
    device_mesh: Mesh
    placements: tuple[Any, ...]
    _spec: Any = None


@dataclass(frozen=True)
class Case:
    """A tensor spread over a mesh."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Any, ...]

    def ranks(self) -> list[tuple[int, ...]]:
        return list(product(*(range(size) for size in self.mesh)))

    def parts(self, coordinate: tuple[int, ...], spec: Any = None) -> tuple[Part, ...]:
        found = runs_of(Sharded(self.shape, Mesh(self.mesh, coordinate), self.placements, spec))
        assert not isinstance(found, str), found
        return parts_of(found[0])

    def elements(self) -> torch.Tensor:
        """The whole, each element its own number."""
        return torch.arange(prod(self.shape)).reshape(self.shape)


@st.composite
def cases(draw: st.DrawFn, *, strided: bool) -> Case:
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    kinds: list[st.SearchStrategy[Any]] = [st.just(Replicate())]
    if shape:
        kinds.append(st.builds(Shard, st.integers(0, len(shape) - 1)))
        if strided:
            kinds.append(st.builds(_strided, st.integers(0, len(shape) - 1), st.integers(2, 3)))
    return Case(shape, mesh, tuple(draw(st.lists(st.one_of(kinds), min_size=len(mesh), max_size=len(mesh)))))


def _strided(dim: int, factor: int) -> Any:
    return _StridedShard(dim, split_factor=factor)


def cut(tensor: torch.Tensor, case: Case, coordinate: tuple[int, ...], order: list[int]) -> torch.Tensor:
    """torch's own cutting, one mesh dimension after the other."""
    for dim in order:
        placement = case.placements[dim]
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(tensor, case.mesh[dim], with_padding=False)
            tensor = pieces[coordinate[dim]]
    return tensor


def assert_holds(whole: torch.Tensor, parts: tuple[Part, ...], local: torch.Tensor) -> None:
    """`parts` say exactly which elements of `whole` `local` has, and where in it."""
    seen = torch.zeros_like(local, dtype=torch.bool)
    for part in parts:
        box = whole[tuple(slice(start, stop) for start, stop in part.box)]
        assert tuple(box.shape) == part.shape
        if box.numel():
            assert torch.equal(local[part.where], box)
            seen[part.where] = True
    assert bool(seen.all())


def covered_alike(case: Case, held: dict[tuple[int, ...], tuple[Part, ...]]) -> None:
    """Together the ranks hold every element exactly once, or each of its replicas does."""
    boxes: Counter[Box] = Counter(part.box for parts in held.values() for part in parts if volume(part.box))
    assert tiling_problem(boxes, case.shape) == ""
    replicas = prod(size for size, each in zip(case.mesh, case.placements, strict=True) if each.is_replicate())
    assert set(boxes.values()) <= {replicas}


@given(cases(strided=False))
@MANY
def test_shards_are_what_torch_cuts_and_says(case: Case) -> None:
    whole = case.elements()
    held = {}
    for coordinate in case.ranks():
        parts = held[coordinate] = case.parts(coordinate)
        assert len(parts) == 1
        assert_holds(whole, parts, cut(whole, case, coordinate, list(range(len(case.mesh)))))
        shape, offset = _compute_local_shape_and_global_offset(
            case.shape, case.mesh, list(coordinate), list(case.placements)
        )
        assert parts[0].shape == tuple(shape)
        if volume(parts[0].box):
            assert tuple(start for start, _ in parts[0].box) == tuple(offset)
    covered_alike(case, held)


@given(cases(strided=True))
@MANY
def test_strided_shards_are_several_ranges_in_the_order_of_the_local_tensor(case: Case) -> None:
    whole = case.elements()
    decoded = order_that_torch_reads(case)
    held = {}
    for coordinate in case.ranks():
        parts = held[coordinate] = case.parts(coordinate)
        if decoded is None:
            local = cut(whole, case, coordinate, list(range(len(case.mesh))))
        else:
            plain = Case(case.shape, case.mesh, tuple(_unstrided(each) for each in case.placements))
            local = cut(whole, plain, coordinate, decoded)
        assert_holds(whole, parts, local)
    covered_alike(case, held)


def order_that_torch_reads(case: Case) -> list[int] | None:
    """Mesh dimensions in the order in which a DTensorSpec of these placements means them to be cut."""
    order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(case.placements, Mesh(case.mesh, ()))  # type: ignore[arg-type]
    return None if order is None else [dim for entry in order for dim in entry.mesh_dims]


def _unstrided(placement: Any) -> Any:
    return Shard(placement.dim) if hasattr(placement, "split_factor") else placement


@given(cases(strided=False), st.randoms(use_true_random=False))
@MANY
def test_an_order_of_cutting_that_the_spec_names_is_followed(case: Case, random: Any) -> None:
    order = list(range(len(case.mesh)))
    random.shuffle(order)
    whole = case.elements()
    by_dim: dict[int, list[int]] = {}
    for dim in order:
        if not case.placements[dim].is_replicate():
            by_dim.setdefault(case.placements[dim].dim, []).append(dim)
    spec = _Spec(tuple(_Entry(tuple(dims)) for _, dims in sorted(by_dim.items())))
    for coordinate in case.ranks():
        assert_holds(whole, case.parts(coordinate, spec), cut(whole, case, coordinate, order))


@dataclass
class _Entry:
    mesh_dims: tuple[int, ...]


@dataclass
class _Spec:
    shard_order: tuple[_Entry, ...]


def test_fully_shard_over_tensor_parallel_where_sizes_do_not_divide() -> None:
    """9 rows over 4 x 2: torch's compute_local_shape_and_global_offset gives the last row to the wrong rank."""
    case = Case((9,), (4, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    rows = {
        (dp, tp): [list(range(*box[0])) for box in (part.box for part in case.parts((dp, tp)))]
        for dp, tp in case.ranks()
    }
    assert rows == {
        (0, 0): [[0, 1]], (1, 0): [[2, 3]], (2, 0): [[4]], (3, 0): [[]],
        (0, 1): [[5]], (1, 1): [[6]], (2, 1): [[7]], (3, 1): [[8]],
    }  # fmt: skip


def test_partial_sums_and_unknown_placements_are_parts_of_nothing() -> None:
    def said(*placements: Any, mesh: tuple[int, ...] = (2, 2)) -> Any:
        return runs_of(Sharded((4, 4), Mesh(mesh, (0, 1), ("dp", "tp")), placements))

    found = said(Shard(0), Partial())
    assert isinstance(found, str)
    assert "partial sum" in found
    assert "'tp'" in found
    assert not isinstance(said(Shard(0), Partial(), mesh=(2, 1)), str)  # a sum of one term is whole
    assert "not known" in said(Shard(5), Replicate())
    outside = Sharded((4,), Mesh((2,), None), (Shard(0),))  # type: ignore[arg-type]
    assert runs_of(outside) == "this rank is not in its device mesh"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4)])
def test_tensors_without_elements_or_dimensions_have_one_part(shape: tuple[int, ...]) -> None:
    case = Case(shape, (3,), (Shard(0) if shape else Replicate(),))
    for coordinate in case.ranks():
        (part,) = case.parts(coordinate)
        assert len(part.box) == len(shape)
        assert volume(part.box) == prod(shape)
