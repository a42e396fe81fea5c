"""Where nobody has said who else holds the same: parts on meshes that span a part of the ranks, buffers of each rank.

What is equal in every byte wherever ranks meet is taken for one; what differs is refused, or chosen by who says so now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from baft_torch._agreement import Agreement
from baft_torch._layout import JobLayout
from baft_torch._models import ModelTree
from baft_torch._reshard import ReshardPlan, plan_reshard
from baft_torch._restore import load as load_as_it_is
from baft_torch._state import TrainingState
from baftd.checkpoint.mesh import ParallelDescription
from baftd.errors import ModelMismatch
from tests.support.torch_image import MemoryImage, snapshot
from tests.support.torch_layouts import MemoryShards, as_rank

WHOLE = torch.arange(1.0, 16.0).reshape(5, 3)


def state_of(module: nn.Module, optimizers: Sequence[Any] = (), *, rank: int, world: int, **told: Any) -> TrainingState:
    layout = JobLayout(rank, world, parallel=told.get("parallel"), source=told.get("layout"))
    return TrainingState(ModelTree(module, world=world, layout=layout), optimizers)


def take(state: TrainingState) -> MemoryImage:
    return snapshot(state, extra={}, rng={})


def load(images: Mapping[int, MemoryImage], state: TrainingState, *, rank: int = 0, **options: Any) -> ReshardPlan:
    shards = MemoryShards(images)
    plan = plan_reshard(shards, shards.smalls, state, rank=rank, **options)
    plan.apply(state)
    return plan


# ---------------------------------------------------------------- a mesh of a part of the ranks


def on_one_axis(
    rank: int, shape: tuple[int, int], *, axis: int = 0, whole: torch.Tensor = WHOLE, **told: Any
) -> tuple[nn.Module, Any, TrainingState]:
    """A parameter, and its moment, that `fully_shard` of one axis of a mesh leaves: nothing says what it is on the
    other axis (tensor parallelism leaves a norm equal there, expert parallelism has another expert)."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))["ab"[axis]]
    made = nn.Module()
    made.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    moment = distribute_tensor(whole * 2, mesh, [Shard(0)], src_data_rank=None)
    optimizer.state[made.weight]["momentum_buffer"] = moment
    return made, optimizer, state_of(made, [optimizer], rank=rank, world=shape[0] * shape[1], **told)


def saved_on_one_axis(**more: Any) -> dict[int, MemoryImage]:
    images = {}
    for rank in range(4):
        with as_rank(rank, 4):
            images[rank] = take(on_one_axis(rank, (2, 2), **more)[2])
    return images


@pytest.mark.parametrize("shape", [(1, 2), (3, 1), (2, 3)])
def test_equal_parts_on_a_part_of_the_ranks_are_cut_anew(shape: tuple[int, int]) -> None:
    images = saved_on_one_axis()
    assert images[0].entries["model.weight"].ranges is None, "nobody said that they are replicas"
    world = shape[0] * shape[1]
    for rank in range(world):
        with as_rank(rank, world):
            made, optimizer, _ = on_one_axis(rank, shape)
            expected = made.weight.to_local(), optimizer.state[made.weight]["momentum_buffer"].to_local()
            live, other, state = on_one_axis(rank, shape, whole=WHOLE * 0)
            other.state.clear()
            load(images, state, rank=rank)
            moment = other.state[live.weight]["momentum_buffer"]
            assert torch.equal(live.weight.to_local(), expected[0])
            assert torch.equal(moment.to_local(), expected[1])
            assert moment.placements == live.weight.placements


@pytest.mark.parametrize("name", ["model.weight", "optim.0.weight.momentum_buffer"])
def test_parts_that_differ_on_a_part_of_the_ranks_are_refused(name: str) -> None:
    images = saved_on_one_axis()
    images[3].data[name] = bytes(reversed(images[3].data[name]))  # type: ignore[index]
    with as_rank(0, 1):
        live = nn.Module()
        live.weight = nn.Parameter(torch.zeros(5, 3))
        optimizer = torch.optim.SGD(live.parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(ModelMismatch, match=rf"tensor '{name}' of rank 0 cannot be taken over: its device mesh"):
            load(images, state_of(live, [optimizer], rank=0, world=1))
        assert not live.weight.any()


TOLD: dict[str, Any] = {"parallel": ParallelDescription(tp=2, dp=2)}


@pytest.mark.parametrize(("then", "now"), [({}, {}), ({}, TOLD), (TOLD, {})], ids=["unsaid", "said-now", "said-then"])
def test_another_order_of_the_axes_is_not_the_same_layout(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Shards of the same shape: without their ranges a rank would have taken what is another's now."""
    even = WHOLE[:4]
    images = saved_on_one_axis(whole=even, **then)
    for rank, fits in ((0, True), (1, False), (2, False)):
        with as_rank(rank, 4):
            expected = dict(take(on_one_axis(rank, (2, 2), axis=1, whole=even)[2]).data)
            live, _, state = on_one_axis(rank, (2, 2), axis=1, whole=even * 0, **now)
            if not fits:
                with pytest.raises(ModelMismatch, match=r"model\.weight was saved as the part .* of \[4, 3\] and is"):
                    load_as_it_is(images[rank], state, images[rank].small)
                assert not live.weight.to_local().any()
            load(images, state, rank=rank)
            assert dict(take(state).data) == expected


# ---------------------------------------------------------------- buffers of each rank


def with_statistics(rank: int, world: int, value: float, **told: Any) -> tuple[nn.Module, TrainingState]:
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(value)  # type: ignore[union-attr]
    return norm, state_of(norm, rank=rank, world=world, **told)


def test_buffers_of_each_rank_are_refused_until_it_is_said_that_one_is_meant() -> None:
    images = {rank: take(with_statistics(rank, 2, 1.0 + rank)[1]) for rank in range(2)}
    live, state = with_statistics(0, 1, 9.0)
    with pytest.raises(ModelMismatch, match=r"'model\.running_mean', a buffer, differs among ranks 0, 1") as caught:
        load(images, state)
    assert "attach(layout={'model.running_mean': 'replicated'}) takes those of rank 0" in caught.value.hint
    assert live.running_mean.tolist() == [9.0] * 3
    live, state = with_statistics(0, 1, 9.0, layout={"model.running_*": "replicated"})
    plan = load(images, state)
    assert live.running_mean.tolist() == [1.0] * 3
    assert plan.said == [
        "buffers differ between replicas (model.running_mean): those of the first one (rank 0) are taken, since "
        "attach(layout=) calls them replicated"
    ]


def test_buffers_of_two_groups_of_replicas_are_not_one() -> None:
    """DistributedDataParallel over a part of the ranks says nothing of the ranks beside."""
    images = {}
    for rank in range(4):
        with as_rank(rank, 4):
            groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
            norm = nn.BatchNorm1d(3)
            wrapped = nn.parallel.DistributedDataParallel(norm, process_group=groups[rank // 2])
            norm.running_mean.fill_(1.0 + rank // 2)  # type: ignore[union-attr]
            images[rank] = take(state_of(wrapped, rank=rank, world=4))
    live, state = with_statistics(0, 1, 9.0)
    with pytest.raises(ModelMismatch, match=r"'model\.running_mean', a buffer, differs among ranks 0, 1, 2, 3"):
        load(images, state)
    assert live.running_mean.tolist() == [9.0] * 3


# ---------------------------------------------------------------- another rank fails


class AnotherFails(Agreement):
    """The answers of a start in which another rank takes everything, and cannot be given what it needs."""

    def __init__(self) -> None:
        super().__init__(world=1)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        return [True for _ in flags]


def test_a_rank_loads_nothing_when_another_one_cannot_be_given_what_it_needs() -> None:
    images = {rank: take(with_statistics(rank, 2, 1.0)[1]) for rank in range(2)}
    live, state = with_statistics(0, 1, 9.0)
    with pytest.raises(ModelMismatch, match="another rank of this start cannot be given what it needs"):
        load(images, state, agreement=AnotherFails())
    assert live.running_mean.tolist() == [9.0] * 3
