"""What is declared of DTensors on every kind of mesh: ranges, replicas, several entries, what stays a rank's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from baftd.checkpoint.layout import Layout
from baftd.errors import LayoutError
from tests.support.torch_fake import become, entries_of, fake_ranks, fill, holder, numbered, saved_of, state_of


@pytest.fixture
def ranks() -> Iterator[Callable[[int, int], None]]:
    with fake_ranks() as be:
        yield be


def shard(whole: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    made = distribute_tensor(whole, mesh, list(placements), src_data_rank=None)
    assert isinstance(made, DTensor)
    return made


def declared(world: int, make: Callable[[int], Any], **told: Any) -> dict[int, dict[str, Any]]:
    """Entries of every rank by name, several of one name as a list of ranges."""
    found: dict[int, dict[str, Any]] = {}
    for rank in range(world):
        become(rank, world)
        ranges: dict[str, Any] = defaultdict(list)
        for entry in entries_of(state_of(make(rank), rank=rank, world=world, **told)):
            ranges[entry.name].append(entry.ranges)
        found[rank] = {name: each[0] if len(each) == 1 else each for name, each in ranges.items()}
    return found


@st.composite
def spreads(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
    kinds: list[st.SearchStrategy[Any]] = [st.just(Replicate())]
    if shape:
        kinds.append(st.builds(Shard, st.integers(0, len(shape) - 1)))
        kinds.append(st.builds(lambda n: _StridedShard(0, split_factor=n), st.integers(2, 3)))
    return mesh, shape, tuple(draw(st.lists(st.one_of(kinds), min_size=len(mesh), max_size=len(mesh))))


@given(spreads())
@settings(max_examples=30, deadline=None)
def test_what_all_ranks_save_is_the_whole_each_range_with_its_replicas(spread: Any) -> None:
    sizes, shape, placements = spread
    if any(isinstance(each, _StridedShard) for each in placements):
        placements = _left_to_right(placements)
    world = prod(sizes)
    whole = numbered(*shape)
    seen = np.full(shape, np.nan, np.float32)
    entries = {}
    with fake_ranks() as be:
        for rank in range(world):
            be(rank, world)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
            state = state_of(holder(w=shard(whole, mesh, *placements)), rank=rank, world=world)
            assert state.remarks() == []
            saved = saved_of(state)
            entries[rank] = [entry for entry, _ in saved]
            for entry, data in saved:
                assert entry.global_shape == shape
                fill(seen, entry, data)
            assert state.models.coordinates() == dict(zip("abc", mesh.get_coordinate() or (), strict=False))
    assert np.array_equal(seen, whole.numpy())
    layout = Layout.of_entries(entries).tensor("model.w")
    replicas = prod(size for size, each in zip(sizes, placements, strict=True) if each.is_replicate())
    assert {len(cell.holders) for cell in layout.cells()} == {replicas}


def _left_to_right(placements: tuple[Any, ...]) -> tuple[Any, ...]:
    """distribute_tensor cuts strided placements from left to right, where they may mean another order: one at most,
    as the last that cuts dimension 0, means just that."""
    last = max(i for i, each in enumerate(placements) if isinstance(each, _StridedShard))
    return tuple(
        Replicate() if i != last and not each.is_replicate() and each.dim == 0 else each
        for i, each in enumerate(placements)
    )


def test_hybrid_sharding_has_replicas_of_each_shard(ranks: Any) -> None:
    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return holder(w=shard(numbered(5, 2), mesh, Replicate(), Shard(0)))

    found = declared(4, make)
    assert [found[rank]["model.w"] for rank in range(4)] == [((0, 3), (0, 2)), ((3, 5), (0, 2))] * 2


def test_data_and_tensor_parallel_share_one_dimension_or_cut_two(ranks: Any) -> None:
    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return holder(
            two=shard(numbered(4, 6), mesh, Shard(0), Shard(1)),
            one=shard(numbered(6), mesh, Shard(0), Shard(0)),
        )

    found = declared(4, make)
    assert [found[rank]["model.two"] for rank in range(4)] == list(product([(0, 2), (2, 4)], [(0, 3), (3, 6)]))
    assert [found[rank]["model.one"] for rank in range(4)] == [((0, 2),), ((2, 3),), ((3, 5),), ((5, 6),)]


class Stage:
    """What is read of a pipeline stage."""

    def __init__(self, module: Any, index: int, group_rank: int, group_size: int, num_stages: int) -> None:
        self.submod, self.stage_index, self.num_stages = module, index, num_stages
        self.group_rank, self.group_size = group_rank, group_size


class Schedule:
    """What is read of a schedule."""

    def __init__(self, *stages: Stage) -> None:
        self._stages = stages


def test_a_mesh_within_a_stage_of_the_world_mesh(ranks: Any) -> None:
    """pp x dp x tp: with the schedule each stage has names of its own, and its four ranks share its tensors."""
    for rank in range(8):
        become(rank, 8)
        world = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        pp, dp, tp = world.get_coordinate() or (0, 0, 0)
        stage, only_dp = world["dp", "tp"], world["dp"]
        model = holder(
            w=shard(numbered(4, 2), stage, Replicate(), Shard(0)),
            norm=shard(numbered(4), only_dp, Shard(0)),
        )
        schedule = Schedule(Stage(model, pp, pp, 2, 2))
        state = state_of(model, rank=rank, world=8, schedule=schedule)
        entries = {entry.name: entry.ranges for entry in entries_of(state)}
        assert entries[f"model.stage{pp}.w"] == ((2 * tp, 2 * tp + 2), (0, 2))
        # Its mesh is a part of the stage: that tp ranks hold the same is not said by anything.
        assert entries[f"model.stage{pp}.norm"] is None
        ((name, remark, count),) = state.remarks()
        assert (name, count) == (f"model.stage{pp}.norm", 1)
        assert "2 of the 4 ranks of its stage" in remark
        assert "parallel=" in remark
        assert state.small()["not_transferable"] == {name: remark}
        assert state.stages == (pp,)
        assert state.stage_count == 2
        assert state.models.coordinates() == {"pp": pp, "dp": dp, "tp": tp}
        assert state.small()["stages"] == [pp]
        item = state.by_name()[f"model.stage{pp}.norm"]
        assert (item.base, item.held.shape, item.held.box) == ("model.norm", (4,), ((2 * dp, 2 * dp + 2),))
        assert item.held.problem == ""  # it can be filled from another layout
        # The job says so: then it is.
        told = state_of(model, rank=rank, world=8, schedule=schedule, parallel="pp=2,dp=2,tp=2")
        entries = {entry.name: entry.ranges for entry in entries_of(told)}
        assert entries[f"model.stage{pp}.norm"] == ((2 * dp, 2 * dp + 2),)
        # And without a schedule a mesh of four of eight ranks says nothing of the others.
        alone = state_of(model, rank=rank, world=8)
        assert [entry.ranges for entry in entries_of(alone)] == [None, None]
        named = state_of(model, rank=rank, world=8, names=lambda name, pp=pp: name.replace("model.", f"model.{pp}."))
        assert {entry.name: entry.ranges for entry in entries_of(named)}[f"model.{pp}.norm"] is not None


@pytest.mark.filterwarnings("ignore")
def test_real_schedules_say_the_stages_of_a_rank_and_how_many_ranks_share_them(ranks: Any) -> None:
    """Interleaved stages, each replicated by DDP over the two ranks of its pipeline place."""
    found: dict[int, dict[str, Any]] = {}
    for rank in range(4):
        become(rank, 4)
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        pp = world["pp"].get_local_rank()
        chunks: list[Any] = [
            DistributedDataParallel(torch.nn.Linear(2, 2, bias=False), process_group=world["dp"].get_group())
            for _ in range(2)
        ]
        stages = [
            PipelineStage(chunk, pp + 2 * k, 4, torch.device("cpu"), group=world["pp"].get_group())
            for k, chunk in enumerate(chunks)
        ]
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)  # type: ignore[arg-type]
        state = state_of(chunks, rank=rank, world=4, schedule=schedule)
        found[rank] = {entry.name: entry.ranges for entry in entries_of(state)}
        assert (state.stages, state.stage_count, state.data_parallel) == ((pp, pp + 2), 4, 2)
        # The same modules without their schedule: names "0.weight" on two ranks that are no replicas.
        assert {entry.ranges for entry in entries_of(state_of(chunks, rank=rank, world=4))} == {None}
    for rank, entries in found.items():
        assert entries == {f"model.stage{rank // 2 + 2 * k}.weight": ((0, 2), (0, 2)) for k in range(2)}


def test_several_ranges_of_one_tensor_become_several_entries(ranks: Any) -> None:
    whole = numbered(8, 3)

    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        return holder(w=shard(whole, mesh, _StridedShard(0, split_factor=2)))

    found = declared(2, make)
    assert found[0] == {"model.w": [((0, 2), (0, 3)), ((4, 6), (0, 3))]}
    assert found[1] == {"model.w": [((2, 4), (0, 3)), ((6, 8), (0, 3))]}
    become(1, 2)
    state = state_of(make(1), rank=1, world=2)
    (head,) = {id(item): item for item in state.by_name().values()}.values()
    assert [row.stored_name for row in head.rows] == ["model.w@2:4,0:3", "model.w@6:8,0:3"]
    assert [row.target().tolist() for row in head.rows] == [whole[2:4].tolist(), whole[6:8].tolist()]
    data = {entry.ranges: data for entry, data in saved_of(state)}
    assert data[((6, 8), (0, 3))] == whole[6:8].numpy().tobytes()
    before = entries_of(state)
    state.rebuild()
    assert all(old is new for old, new in zip(before, entries_of(state), strict=True))
    # The base moves to other memory: both entries follow.
    moved = state.items[0].live
    moved._local_tensor.data = moved._local_tensor.data + 100
    assert {entry.ranges: np.frombuffer(data, np.float32)[0] for entry, data in saved_of(state)} == {
        ((2, 4), (0, 3)): 106.0, ((6, 8), (0, 3)): 118.0,
    }  # fmt: skip


def test_several_ranges_of_a_transposed_tensor_are_copied_row_by_row(ranks: Any) -> None:
    become(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    local = numbered(3, 4).t()
    made = DTensor.from_local(
        local, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=torch.Size((8, 3)), stride=(1, 8)
    )
    saved = saved_of(state_of(holder(w=made), world=2))
    assert [(entry.kind, entry.ranges) for entry, _ in saved] == [
        ("volatile", ((0, 2), (0, 3))), ("volatile", ((4, 6), (0, 3))),
    ]  # fmt: skip
    assert b"".join(data for _, data in saved) == local.contiguous().numpy().tobytes()


def test_ranges_that_interleave_in_memory_stay_with_their_rank(ranks: Any) -> None:
    for rank in range(2):
        become(rank, 2)
        mesh = init_device_mesh("cpu", (2,))
        state = state_of(holder(w=shard(numbered(3, 5), mesh, _StridedShard(1, split_factor=2))), rank=rank, world=2)
        (entry,) = entries_of(state)
        assert entry.ranges is None
        ((_, remark, _),) = state.remarks()
        assert "along dimension 1" in remark
        assert state.small()["not_transferable"] == {"model.w": remark}


def test_partial_sums_stay_with_their_rank_and_are_never_the_whole(ranks: Any) -> None:
    become(0, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    made = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    state = state_of(holder(w=made), world=2)
    assert [entry.ranges for entry in entries_of(state)] == [None]
    assert "partial sum" in state.small()["not_transferable"]["model.w"]


def test_a_local_tensor_that_its_placements_do_not_fit_is_an_error_with_a_way_out(ranks: Any) -> None:
    become(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    size = torch.Size((6, 2))
    made = DTensor.from_local(torch.ones(5, 2), mesh, [Shard(0)], run_check=False, shape=size, stride=(2, 1))
    with pytest.raises(LayoutError, match=r"'model\.w'.*\[3, 2\].*\[5, 2\]") as caught:
        state_of(holder(w=made), world=2)
    assert caught.value.tensor == "model.w"
    assert "layout=" in (caught.value.hint or "")
    state = state_of(holder(w=made), world=2, layout={"model.w": ((6, 2), [(0, 5), (0, 2)])})
    assert [entry.ranges for entry in entries_of(state)] == [((0, 5), (0, 2))]
    state = state_of(holder(w=made), world=2, layout={"model.*": "own"})
    assert [entry.ranges for entry in entries_of(state)] == [None]


def test_empty_shards_are_declared_as_empty_ranges(ranks: Any) -> None:
    def make(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (4,))
        return holder(w=shard(numbered(5, 2), mesh, Shard(0)), zero=shard(numbered(0, 2), mesh, Shard(1)))

    found = declared(4, make)
    spans = [found[rank]["model.w"][0] for rank in range(4)]
    assert spans[:3] == [(0, 2), (2, 4), (4, 5)]
    assert spans[3][0] == spans[3][1]
    become(3, 4)
    assert all(data == b"" for _, data in saved_of(state_of(make(3), rank=3, world=4)))


def test_a_rank_that_happens_to_hold_all_of_a_cut_tensor_says_no_more_than_the_others(ranks: Any) -> None:
    for rank in range(2):
        become(rank, 2)
        mesh = init_device_mesh("cpu", (2,))
        param = shard(numbered(1, 4), mesh, Shard(0)).requires_grad_()
        optimizer = torch.optim.AdamW([param])
        moment = shard(numbered(1, 4), mesh, Shard(0))
        optimizer.state[param] = {"step": torch.tensor(1.0), "row": torch.ones(1), "moment": moment}
        state = state_of(holder(), [optimizer], rank=rank, world=2)
        assert {entry.ranges for entry in entries_of(state)} == {None}  # of no attached module
        assert set(state.small()["not_transferable"]) == {f"optim.0.group0.0{name}" for name in ("", ".row", ".moment")}
        assert state.held_of_state(param, (4,)).problem
        assert state.held_of_state(param, ()).declared is False
