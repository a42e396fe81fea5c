"""What was told of a layout is enough to go on in another one: degrees with Megatron's attributes, flat shards by hand,
several ranges of one tensor, experts with job-wide names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from baft_torch._reshard import plan_reshard
from baft_torch._state import TrainingState
from baftd.checkpoint.mesh import ParallelDescription
from baftd.errors import ModelMismatch
from tests.support.torch_fake import holder, numbered, state_of
from tests.support.torch_image import snapshot
from tests.support.torch_layouts import MemoryShards

Make = Callable[[int, float], TrainingState]
"""The state of a rank; its elements are those of the whole times a number."""


def moved(old: Make, old_world: int, new: Make, new_world: int) -> None:
    """Save every rank of one layout, restore every rank of another, and compare with what it should hold."""
    images = {rank: snapshot(old(rank, 1.0), extra={}, rng={}) for rank in range(old_world)}
    shards = MemoryShards(images)
    for rank in range(new_world):
        expected = dict(snapshot(new(rank, 1.0)).data)
        state = new(rank, -3.0)
        plan_reshard(shards, shards.smalls, state, rank=rank).apply(state)
        assert dict(snapshot(state).data) == expected


def cut(whole: torch.Tensor, dim: int | None, stride: int, tp: int, mine: int) -> nn.Parameter:
    """A parameter as Megatron cuts and marks it."""
    if dim is None or tp == 1:
        made = nn.Parameter(whole.clone())
    else:
        pieces = torch.split(whole, whole.shape[dim] // tp // stride, dim)
        made = nn.Parameter(torch.cat(pieces[mine::tp], dim).contiguous())
    marks = {"tensor_model_parallel": dim is not None, "partition_dim": -1 if dim is None else dim}
    for name, value in {**marks, "partition_stride": stride}.items():
        setattr(made, name, value)
    return made


def with_moments(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        optimizer.state[param] = {
            "step": torch.tensor(3.0), "exp_avg": param.detach() * 2, "exp_avg_sq": param.detach() * 4,
        }  # fmt: skip
    return optimizer


def megatron(text: str, world: int) -> Make:
    degrees = ParallelDescription.parse(text, world)

    def make(rank: int, scale: float) -> TrainingState:
        place = degrees.coordinates(rank)
        chunks = []
        for stage in degrees.stages(rank):
            per = 4 // degrees.virtual_stages
            layers = {}
            for number in range(stage * per, stage * per + per):
                whole = (numbered(8, 4) + 100 * number) * scale
                spread = (degrees.tp, place["tp"])
                layers[str(number)] = holder(
                    qkv=cut(whole, 0, 2, *spread), proj=cut(whole, 1, 1, *spread), norm=cut(whole[0], None, 1, *spread)
                )
            chunks.append(nn.ModuleDict(layers))
        model = nn.ModuleList(chunks)
        return state_of(chunks, [with_moments(model)], rank=rank, world=world, parallel=text)

    return make


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tp=2,dp=2", "tp=4"), ("tp=4", "dp=2"), ("dp=1", "tp=2,pp=2"), ("tp=2,pp=2", "pp=4"),
        ("pp=2,vpp=2,dp=2", "tp=2"), ("pp=4", "pp=2,vpp=2,tp=2"),
    ],
)  # fmt: skip
def test_megatrons_degrees_change_in_both_directions(old: str, new: str) -> None:
    def world(text: str) -> int:
        return ParallelDescription.parse(text).world

    moved(megatron(old, world(old)), world(old), megatron(new, world(new)), world(new))


def test_flat_shards_and_separate_ranges_by_hand() -> None:
    whole = numbered(6, 4)

    def flat(rank: int, scale: float) -> TrainingState:
        """As a distributed optimizer keeps them: elements 0 to 10 and 10 to 24 of the flattened tensor."""
        start, stop = ((0, 10), (10, 24))[rank]
        model = holder(w=nn.Parameter(whole.reshape(-1)[start:stop] * scale))
        return state_of(model, rank=rank, world=2, layout={"model.w": ((6, 4), [(start, stop)])})

    def rows(rank: int, scale: float) -> TrainingState:
        """Every third row, two at a time."""
        mine = [rank, rank + 3]
        ranges = [[(row, row + 1), (0, 4)] for row in mine]
        model = holder(w=nn.Parameter(whole[mine] * scale))
        return state_of(model, rank=rank, world=3, layout={"model.w": ((6, 4), ranges)})

    def all_of_it(rank: int, scale: float) -> TrainingState:
        return state_of(holder(w=nn.Parameter(whole * scale)))

    moved(flat, 2, rows, 3)
    moved(rows, 3, flat, 2)
    moved(rows, 3, all_of_it, 1)
    moved(all_of_it, 1, flat, 2)


def experts(world: int, *, wide: bool) -> Make:
    """Four experts, spread over all ranks; each rank counts its own from 0."""
    per, text = 4 // world, f"dp={world},ep={world}"

    def make(rank: int, scale: float) -> TrainingState:
        def expert(number: int) -> nn.Module:
            param = cut((numbered(2, 3) + 100 * number) * scale, None, 1, 1, 0)
            param.allreduce = False  # type: ignore[attr-defined]
            return holder(w=param)

        model = nn.ModuleDict({
            "experts": nn.ModuleList(expert(rank * per + k) for k in range(per)),
            "gate": holder(w=cut(numbered(4) * scale, None, 1, 1, 0)),
        })  # fmt: skip

        def names(name: str) -> str:
            return re.sub(r"experts\.(\d+)", lambda found: f"experts.{rank * per + int(found[1])}", name)

        return state_of(
            model, [with_moments(model)], rank=rank, world=world, parallel=text, names=names if wide else None
        )

    return make


def test_experts_with_job_wide_names_are_spread_anew_and_others_are_refused_by_name() -> None:
    for old, new in ((2, 4), (4, 1), (1, 2), (2, 2)):
        moved(experts(old, wide=True), old, experts(new, wide=True), new)
    with pytest.raises(ModelMismatch, match=r"model\.ep\dof4\.experts\.0\.w"):
        moved(experts(2, wide=False), 2, experts(4, wide=False), 4)
