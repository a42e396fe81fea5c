"""Restoring into another layout, without processes: every rank of both layouts is played in turn (fake process group).

What each rank must hold is made by torch itself: models with known whole weights, and with known whole moments as
weights, are sharded by torch in both layouts; what was restored is compared with that, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from baft_torch._layout import JobLayout
from baft_torch._models import ModelTree
from baft_torch._reshard import ReshardPlan, plan_reshard
from baft_torch._state import TrainingState
from baftd.checkpoint.mesh import ParallelDescription
from baftd.errors import ModelMismatch
from tests.support.torch_image import snapshot
from tests.support.torch_layouts import MemoryShards, as_rank

KINDS = {"plain": 1, "fsdp1": 1, "fsdp2": 2, "fsdp3": 3, "fsdp4": 4, "ddp2": 2, "hsdp4": 4, "tp2": 2, "fsdp_tp4": 4}
"""Layouts with their number of ranks."""


class Net(nn.Module):
    """Odd sizes, so that shards are uneven and some are empty; a tied embedding."""

    def __init__(self, *, extra_layer: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 5)
        self.one = nn.Linear(5, 7)
        self.two = nn.Linear(7, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 12, bias=False)
        self.head.weight = self.emb.weight
        if extra_layer:
            self.three = nn.Linear(5, 3)


def fill(model: nn.Module, salt: int) -> nn.Module:
    """Weights that depend on the name and on `salt`."""
    with torch.no_grad():
        for i, (_, p) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(1000 * salt + i)
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


def wrap(kind: str, model: nn.Module) -> nn.Module:
    """Shard a whole model as the layout says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    world = KINDS[kind]
    if kind == "plain":
        return model
    if kind.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model)
    shape, names = ((2, 2), ("a", "b")) if kind in ("hsdp4", "fsdp_tp4") else ((world,), ("a",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if "tp" in kind:
        plan = {"one": ColwiseParallel(), "two": RowwiseParallel()}
        parallelize_module(model, mesh[names[-1]], plan, src_data_rank=None)  # type: ignore[arg-type]
    if kind != "tp2":
        over = mesh["a"] if kind == "fsdp_tp4" else mesh
        for layer in (model.one, model.two):
            fully_shard(layer, mesh=over)  # type: ignore[arg-type]
        fully_shard(model, mesh=over)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.25)


class Job:
    """One rank with a model, an optimizer and moments, all made of whole tensors by torch."""

    def __init__(self, kind: str, salt: int, *, moments: bool = True, net: Callable[[], nn.Module] = Net) -> None:
        self.model = wrap(kind, fill(net(), salt))
        self.optimizer: Any = adamw(self.model)
        if moments:
            self.optimizer.param_groups[0]["lr"] = 0.125
            first, second = (wrap(kind, fill(net(), salt + n)) for n in (1, 2))
            for p, m, v in zip(*(each.parameters() for each in (self.model, first, second)), strict=True):
                state = {"step": torch.tensor(3.0), "exp_avg": m.detach(), "exp_avg_sq": v.detach()}
                self.optimizer.state[p] = state
        # Tensors that tensor parallelism leaves plain, and those that are sharded over another axis alone, say nothing
        # of the ranks beside: the description does.
        parallel = ParallelDescription(tp=2, dp=KINDS[kind] // 2) if "tp" in kind else None
        layout = JobLayout(torch.distributed.get_rank(), KINDS[kind], parallel)
        tree = ModelTree(self.model, world=KINDS[kind], layout=layout)
        self.state = TrainingState(tree, [self.optimizer])

    def contents(self) -> dict[str, bytes]:
        """Bytes of every tensor by name."""
        return dict(snapshot(self.state).data)


def saved(kind: str, salt: int = 1, **options: Any) -> MemoryShards:
    """What the ranks of a layout save."""
    images = {}
    for rank in range(KINDS[kind]):
        with as_rank(rank, KINDS[kind]):
            images[rank] = snapshot(Job(kind, salt, **options).state, extra={}, rng={"torch": b"%d" % rank})
    return MemoryShards(images)


def load(shards: MemoryShards, job: Job, rank: int) -> ReshardPlan:
    plan = plan_reshard(shards, shards.smalls, job.state, rank=rank)
    plan.apply(job.state)
    return plan


PAIRS = [(a, b) for a in KINDS for b in KINDS if a != b]
OFTEN = set(zip(KINDS, [*list(KINDS)[4:], *list(KINDS)[:4]], strict=True)) | {("fsdp4", "fsdp2"), ("ddp2", "fsdp2")}
"""Each layout once from and once to."""
CASES = [
    pytest.param(*pair, id=f"{pair[0]}-{pair[1]}", marks=() if pair in OFTEN else pytest.mark.full) for pair in PAIRS
]


@pytest.mark.parametrize(("old", "new"), CASES)
def test_every_rank_of_the_new_layout_holds_what_torch_itself_would_give_it(old: str, new: str) -> None:
    shards = saved(old)
    for rank in range(KINDS[new]):
        with as_rank(rank, KINDS[new]):
            expected = Job(new, 1).contents()
            job = Job(new, 7, moments=False)
            load(shards, job, rank)
            assert job.contents() == expected
            assert job.optimizer.param_groups[0]["lr"] == 0.125
            for p in job.model.parameters():
                state = job.optimizer.state[p]
                assert type(state["exp_avg"]) is type(p.detach())
                assert state["step"].item() == 3.0


def test_only_what_is_wanted_is_read() -> None:
    shards = saved("plain")
    whole = sum(entry.nbytes for entry in shards.entries(0).values())
    with as_rank(3, 4):
        job = Job("fsdp4", 7, moments=False)
        load(shards, job, 3)
        mine = sum(len(data) for data in job.contents().values())
    assert shards.bytes_read == mine < whole / 2


def test_restored_again_and_again_nothing_is_lost() -> None:
    """reshard(reshard(x)) = x."""
    shards = saved("fsdp3")
    first = shards.images
    for kind in ("fsdp2", "fsdp_tp4", "plain", "fsdp3"):
        images = {}
        for rank in range(KINDS[kind]):
            with as_rank(rank, KINDS[kind]):
                job = Job(kind, 7, moments=False)
                load(shards, job, rank)
                images[rank] = snapshot(job.state, extra={}, rng={})
        shards = MemoryShards(images)
    for rank, image in first.items():
        assert shards.images[rank].data == image.data


# ---------------------------------------------------------------- any mesh, any placements


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Shape of a mesh, and for each of its axes the dimension that it shards (None: it replicates)."""
    shape = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 1, 2)]))
    return shape, tuple(draw(st.sampled_from([None, 0, 1])) for _ in shape)


def sharded(whole: torch.Tensor, mesh: tuple[tuple[int, ...], tuple[int | None, ...]]) -> tuple[nn.Module, Any]:
    """A parameter and a moment that torch has cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    shape, dims = mesh
    where = init_device_mesh("cpu", shape)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    made = nn.Module()
    made.weight = nn.Parameter(distribute_tensor(whole, where, placements, src_data_rank=None))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    moment = distribute_tensor(whole * 2, where, placements, src_data_rank=None)
    optimizer.state[made.weight]["momentum_buffer"] = moment
    return made, optimizer


@settings(max_examples=25, deadline=None)
@given(meshes(), meshes(), st.integers(0, 7), st.integers(1, 7))
def test_from_any_mesh_to_any_other(old: Any, new: Any, rows: int, columns: int) -> None:
    whole = torch.arange(1.0, rows * columns + 1).reshape(rows, columns)
    ranks = [torch.Size(mesh[0]).numel() for mesh in (old, new)]

    def state_on(rank: int, world: int, module: nn.Module, optimizer: Any) -> TrainingState:
        return TrainingState(ModelTree(module, world=world, layout=JobLayout(rank, world)), [optimizer])

    images = {}
    for rank in range(ranks[0]):
        with as_rank(rank, ranks[0]):
            images[rank] = snapshot(state_on(rank, ranks[0], *sharded(whole, old)), extra={}, rng={})
    shards = MemoryShards(images)
    for rank in range(ranks[1]):
        with as_rank(rank, ranks[1]):
            expected, moment = sharded(whole, new)
            live, optimizer = sharded(whole * 0, new)
            optimizer.state.clear()
            state = state_on(rank, ranks[1], live, optimizer)
            plan_reshard(shards, shards.smalls, state, rank=rank).apply(state)
            assert torch.equal(live.weight.to_local(), expected.weight.to_local())
            found = optimizer.state[live.weight]["momentum_buffer"]
            assert torch.equal(found.to_local(), moment.state[expected.weight]["momentum_buffer"].to_local())
            assert found.placements == live.weight.placements


# ---------------------------------------------------------------- what does not fit is named, and nothing is changed


def refused(shards: MemoryShards, job: Job, rank: int = 0) -> str:
    before = job.contents()
    with pytest.raises(ModelMismatch) as caught:
        plan_reshard(shards, shards.smalls, job.state, rank=rank)
    assert job.contents() == before
    return str(caught.value)


def test_a_layer_that_nobody_saved_is_named_with_rank_and_range() -> None:
    shards = saved("fsdp4")
    with as_rank(1, 2):
        text = refused(shards, Job("fsdp2", 7, moments=False, net=lambda: Net(extra_layer=True)), 1)
    assert "step 3, saved by 4 ranks" in text
    assert re.search(r"'model\.three\.weight' \[2:3, 0:5\] of rank 1: nobody saved it", text)
    assert "optimizer 0 has the parameter three.bias, which no saved optimizer had" in text


def test_a_shard_that_is_missing_is_named() -> None:
    shards = saved("fsdp4")
    del shards.images[2].entries["optim.0.one.weight.exp_avg"]  # type: ignore[attr-defined]
    with as_rank(1, 2):
        text = refused(shards, Job("fsdp2", 7, moments=False), 1)
    assert re.search(r"optim\.0?\.?one\.weight\.exp_avg' \[4:6, 0:5\] of rank 1: nobody saved this part", text)


def test_another_optimizer_other_options_and_other_shapes_are_all_named_at_once() -> None:
    shards = saved("fsdp2")
    shards.images[1].small["optimizers"][0]["groups"][0]["lr"] = 0.5
    with as_rank(0, 1):
        job = Job("plain", 7, moments=False)
        text = refused(shards, job)
        assert "lr (0.125 and 0.5) (rank 0, optimizer 0, group 0; rank 1, optimizer 0, group 0)" in text
        job.model.one = nn.Linear(5, 9)
        job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
        job.state = TrainingState(ModelTree(job.model), [job.optimizer])
        text = refused(shards, job)
    assert re.search(r"'model\.one\.weight'.* saved as F32 \[7, 5\] and is wanted as F32 \[9, 5\]", text)
    assert "two.weight was held by AdamW and is held by SGD" in text


def test_a_rank_without_a_step_count_of_its_own_takes_the_one_that_all_agree_on() -> None:
    shards = saved("fsdp2")
    data = shards.images[1].data
    data["optim.0.one.weight.step"] = torch.tensor(4.0).numpy().tobytes()  # type: ignore[index]
    with as_rank(0, 1):
        text = refused(shards, Job("plain", 7, moments=False))
    assert "one.weight.step" in text
    assert "ranks 0, 1" in text


def test_an_optimizer_that_is_saved_as_one_piece_cannot_be_cut() -> None:
    with as_rank(0, 1):
        model = fill(Net(), 1)
        optimizer = torch.optim.LBFGS(model.parameters())
        shards = MemoryShards({0: snapshot(TrainingState(ModelTree(model), [optimizer]), extra={}, rng={})})
    with as_rank(1, 2):
        text = refused(shards, Job("fsdp2", 7, moments=False), 1)
    assert "optimizer 0 of rank 0 (LBFGS) was saved as one piece, which cannot be cut" in text
