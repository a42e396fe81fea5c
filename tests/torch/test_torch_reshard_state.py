"""What goes into another layout along with parameters, and what is refused: buffers, tied tensors, stages, state."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from baft_torch._agreement import Agreement
from baft_torch._layout import JobLayout
from baft_torch._models import ModelTree
from baft_torch._reshard import ReshardPlan, plan_reshard
from baft_torch._restore import load as load_as_it_is
from baft_torch._state import TrainingState
from baftd.errors import ModelMismatch
from tests.support.torch_image import MemoryImage, snapshot
from tests.support.torch_layouts import MemoryShards, as_rank


def schedule_of(modules: Sequence[nn.Module], numbers: Sequence[int], count: int, rank: int, size: int) -> Any:
    """What of a schedule of torch.distributed.pipelining says which stages a rank has."""
    stages = [
        SimpleNamespace(submod=module, stage_index=n, num_stages=count, group_size=size, group_rank=rank)
        for module, n in zip(modules, numbers, strict=True)
    ]
    return SimpleNamespace(_stages=stages)


def stage(*numbers: int, salt: int = 1) -> nn.ModuleDict:
    """Layers under the numbers that they have in the whole."""
    made = nn.ModuleDict()
    for number in numbers:
        torch.manual_seed(100 * salt + number)
        made[str(number)] = nn.Linear(3, 3)
    return made


def trained(modules: Sequence[nn.Module], optimizers: Sequence[Any] | None = None, steps: int = 2) -> list[Any]:
    """The optimizers, after updates whose gradients depend on the parameters alone."""
    made = list(optimizers or [torch.optim.AdamW(module.parameters(), lr=0.125) for module in modules])
    for _ in range(steps):
        for optimizer in made:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = p.detach().sin()
            optimizer.step()
            optimizer.zero_grad()
    return made


def state_of(
    modules: Any, optimizers: Sequence[Any], *, rank: int = 0, world: int = 1, **options: Any
) -> TrainingState:
    layout = JobLayout(rank, world, names=options.pop("names", None), source=options.pop("layout", None))
    return TrainingState(ModelTree(modules, options.pop("schedule", None), world=world, layout=layout), optimizers)


def take(state: TrainingState, **small: Any) -> MemoryImage:
    return snapshot(state, **{"extra": {}, "rng": {}, **small})


def load(images: Sequence[MemoryImage], state: TrainingState, *, rank: int = 0, **options: Any) -> ReshardPlan:
    shards = MemoryShards(dict(enumerate(images)))
    plan = plan_reshard(shards, shards.smalls, state, rank=rank, **options)
    plan.apply(state)
    return plan


def refused(images: Sequence[MemoryImage], state: TrainingState, **options: Any) -> str:
    before = dict(snapshot(state).data)
    with pytest.raises(ModelMismatch) as caught:
        load(images, state, **options)
    assert snapshot(state).data == before
    return str(caught.value)


def moments(optimizers: Sequence[Any], modules: Sequence[nn.Module]) -> dict[str, bytes]:
    """State of every parameter by the parameter's name."""
    names = {p: name for module in modules for name, p in module.named_parameters()}
    found = {}
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                found[f"{names[p]}.{key}"] = value.numpy().tobytes()
    return found


# ---------------------------------------------------------------- pipelines


def pipeline(layers: Sequence[Sequence[Sequence[int]]], *, salt: int = 1, steps: int = 2) -> list[MemoryImage]:
    """What the ranks of a pipeline save: for each rank its chunks, for each chunk its layers. One optimizer a chunk."""
    images = []
    size, count = len(layers), sum(map(len, layers))
    for rank, chunks in enumerate(layers):
        modules = [stage(*chunk, salt=salt) for chunk in chunks]
        numbers = [chunk * size + rank for chunk in range(len(chunks))]
        optimizers = trained(modules, steps=steps)
        schedule = schedule_of(modules, numbers, count, rank, size)
        images.append(take(state_of(modules, optimizers, rank=rank, world=size, schedule=schedule)))
    return images


def test_four_stages_become_two_with_two_chunks_and_one_optimizer_for_all() -> None:
    images = pipeline([[[0]], [[1]], [[2]], [[3]]])
    reference = [stage(0, 1, 2, 3)]
    expected = moments(trained(reference), reference)
    for rank, layers in enumerate([((0,), (2,)), ((1,), (3,))]):
        modules = [stage(*chunk, salt=2) for chunk in layers]
        both = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1.0)
        schedule = schedule_of(modules, [rank, rank + 2], 4, rank, 2)
        state = state_of(modules, [both], rank=rank, world=2, schedule=schedule)
        plan = load(images, state, rank=rank, agreement=None)
        found = moments([both], modules)
        assert found == {k: v for k, v in expected.items() if k in found}
        assert len(found) == 2 * 2 * 3
        assert both.param_groups[0]["lr"] == 0.125
        for module in modules:
            for name, p in module.named_parameters():
                assert torch.equal(p, reference[0].get_parameter(name))
        assert plan.common.not_carried == ()
        again = [take(state)]
    # and the second rank's state, taken again, is found in the saved one's names
    assert {"model.stage1.1.weight", "optim.0.stage3.3.bias.exp_avg"} <= set(again[0].entries)


def test_replicas_of_stages_become_one_rank() -> None:
    images = []
    for rank in range(4):  # two stages, each on two ranks
        with as_rank(rank, 4):
            number = rank // 2
            groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
            module = stage(number)
            optimizers = trained([module])
            wrapped = nn.parallel.DistributedDataParallel(module, process_group=groups[number])
            schedule = schedule_of([wrapped], [number], 2, number, 2)
            images.append(take(state_of([wrapped], optimizers, rank=rank, world=4, schedule=schedule)))
    assert images[3].entries["model.stage1.1.weight"].ranges == ((0, 3), (0, 3))
    live, reference = stage(0, 1, salt=2), stage(0, 1)
    expected = moments(trained([reference]), [reference])
    optimizers = trained([live], steps=0)
    load(images, state_of(live, optimizers), agreement=Agreement())
    assert moments(optimizers, [live]) == expected


def test_a_layer_that_moved_to_another_stage_is_found_there() -> None:
    images = pipeline([[[0, 1, 2]], [[3]]])
    modules = [stage(0, 1, salt=2)]
    optimizers = trained(modules, steps=0)
    load(images, state_of(modules, optimizers, world=2, schedule=schedule_of(modules, [0], 2, 0, 2)))
    assert torch.equal(modules[0]["1"].weight, trained_stage(0, 1)["1"].weight)  # type: ignore[arg-type]
    modules = [stage(2, 3, salt=2)]
    optimizers = trained(modules, steps=0)
    load(images, state_of(modules, optimizers, rank=1, world=2, schedule=schedule_of(modules, [1], 2, 1, 2)), rank=1)
    assert torch.equal(modules[0]["2"].weight, trained_stage(2)["2"].weight)  # type: ignore[arg-type]


def trained_stage(*numbers: int) -> nn.ModuleDict:
    made = stage(*numbers)
    trained([made])
    return made


def local_stages(salt: int = 1) -> list[nn.Module]:
    """Two stages that both count their layers from 0."""
    made: list[nn.Module] = []
    for number in range(2):
        torch.manual_seed(10 * salt + number)
        made.append(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        made[-1][1].running_mean.fill_(float(number))  # type: ignore[index]
    return made


def test_layers_counted_anew_in_each_stage_are_told_apart_by_the_stage_or_by_names() -> None:
    def images(**options: Any) -> list[MemoryImage]:
        taken = []
        for rank, module in enumerate(local_stages()):
            optimizers = trained([module])
            schedule = schedule_of([module], [rank], 2, rank, 2)
            taken.append(take(state_of([module], optimizers, rank=rank, world=2, schedule=schedule, **options)))
        return taken

    expected = local_stages()
    trained(expected)
    # Still two stages, on one rank: the number of the stage tells them apart.
    live = local_stages(2)
    load(images(), state_of(live, trained(live, steps=0), schedule=schedule_of(live, [0, 1], 2, 0, 1)))
    for a, b in zip(expected, live, strict=True):
        assert torch.equal(a[0].weight, b[0].weight)  # type: ignore[index]
        assert torch.equal(a[1].running_mean, b[1].running_mean)  # type: ignore[index]
    # No stages any more: nobody knows which "0" is meant.
    whole = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    text = refused(images(), state_of(whole, trained([whole], steps=0)))
    assert "'model.0.weight'" in text
    assert "ranks 0, 1 could all be meant, and they differ" in text
    assert "'model.1.running_mean', a buffer, differs among ranks 0, 1" in text
    assert "attach(names=...)" in text

    def names(name: str) -> str:
        _, stage, layer, rest = name.split(".")
        return f"model.{2 * int(stage.removeprefix('stage')) + int(layer)}.{rest}"

    load(images(names=names), state_of(whole, trained([whole], steps=0)), agreement=Agreement())
    assert torch.equal(whole[2].weight, expected[1][0].weight)  # type: ignore[index]
    assert whole[3].running_mean.tolist() == [1.0, 1.0, 1.0]  # type: ignore[union-attr]


def test_tied_tensors_of_two_stages_become_one_if_they_are_equal_and_come_apart_again() -> None:
    class Ends(nn.Module):
        """First and last layer of a model, with one weight."""

        def __init__(self, *which: str, salt: int = 1) -> None:
            super().__init__()
            torch.manual_seed(salt)
            weight = nn.Parameter(torch.randn(4, 3))
            for name in which:
                setattr(self, name, nn.Linear(3, 4, bias=False))
                getattr(self, name).weight = weight

    def stages(second: int = 1) -> list[MemoryImage]:
        images = []
        for rank, (which, salt) in enumerate([("emb", 1), ("head", second)]):
            module = Ends(which, salt=salt)
            schedule = schedule_of([module], [rank], 2, rank, 2)
            images.append(take(state_of([module], trained([module]), rank=rank, world=2, schedule=schedule)))
        return images

    alone = Agreement()
    tied = Ends("emb", "head", salt=5)
    optimizers = trained([tied], steps=0)
    load(stages(), state_of(tied, optimizers), agreement=alone)
    expected = Ends("emb")
    trained([expected])
    assert torch.equal(tied.head.weight, expected.emb.weight)  # type: ignore[union-attr]
    assert tied.head.weight is tied.emb.weight
    text = refused(stages(second=2), state_of(tied, trained([tied], steps=0)))
    assert "model.emb.weight and model.head.weight are one tensor here, and differ where they were saved" in text
    assert "emb.weight and head.weight are one parameter here, and their exp_avg differ" in text
    # The other way round: the second stage finds it under the name that it has there.
    images = [take(state_of(tied, optimizers))]
    for rank, which in enumerate(["emb", "head"]):
        module = Ends(which, salt=7)
        made = trained([module], steps=0)
        schedule = schedule_of([module], [rank], 2, rank, 2)
        load(images, state_of([module], made, rank=rank, world=2, schedule=schedule), rank=rank)
        assert torch.equal(getattr(module, which).weight, expected.emb.weight)  # type: ignore[union-attr]
        assert made[0].state[getattr(module, which).weight]["step"].item() == 2.0


def test_without_resharding_another_layout_is_refused_with_what_to_do() -> None:
    images = pipeline([[[0]], [[1]]])
    live = [stage(0, 1, salt=2)]
    with pytest.raises(ModelMismatch, match=r"1\.weight is in the model but was not saved.*resume\(reshard=True\)"):
        load_as_it_is(images[0], state_of(live, trained(live, steps=0)), images[0].small)


def test_what_no_rank_of_the_new_layout_takes_is_named() -> None:
    images = pipeline([[[0]], [[1]]])
    live = [stage(1, salt=2)]
    text = refused(images, state_of(live, trained(live, steps=0)), agreement=Agreement())
    assert "model.0.weight was saved by rank 0 and no rank of this layout has it" in text
    assert "optim.0.bias.exp_avg was saved by rank 0" in text
    assert "model.1" not in text
    with as_rank(0, 2):  # the other rank is asked, and (being nobody) has nothing either
        text = refused(images, state_of(live, trained(live, steps=0), world=2), agreement=Agreement())
    assert "model.0.weight" in text


# ---------------------------------------------------------------- groups and odd state


def groups_of(module: nn.Module, decay: float) -> Any:
    weights = [p for p in module.parameters() if p.ndim > 1]
    biases = [p for p in module.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": weights, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}])


def test_groups_are_filled_by_what_held_their_parameters() -> None:
    def images(second: float) -> list[MemoryImage]:
        taken = []
        for rank, decay in enumerate([0.25, second]):
            module = stage(rank)
            optimizers = trained([module], [groups_of(module, decay)])
            taken.append(take(state_of(module, optimizers, rank=rank, world=2)))
        return taken

    live = stage(0, 1, salt=2)
    optimizer = groups_of(live, 0.0)
    load(images(0.25), state_of(live, [optimizer]))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    turned = groups_of(live, 0.0)
    turned.param_groups.reverse()
    load(images(0.25), state_of(live, [turned]))
    assert [group["weight_decay"] for group in turned.param_groups] == [0.0, 0.25]
    text = refused(images(0.5), state_of(live, [groups_of(live, 0.0)]))
    assert "optimizer 0, group 0: its parameters came from groups whose options differ" in text
    assert "weight_decay (0.25 and 0.5) (rank 0, optimizer 0, group 0; rank 1, optimizer 0, group 0)" in text


def test_names_of_parameters_in_groups_are_those_of_the_new_layout() -> None:
    images = []
    for rank in range(2):
        module = stage(rank)
        optimizers = trained([module], [torch.optim.AdamW(module.named_parameters(), lr=0.125)])
        images.append(take(state_of(module, optimizers, rank=rank, world=2)))
    live = stage(0, 1, salt=2)
    optimizer = torch.optim.AdamW(live.named_parameters(), lr=1.0)
    load(images, state_of(live, [optimizer]))
    (group,) = optimizer.param_groups
    assert group["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert group["lr"] == 0.125


def test_a_zero_redundancy_optimizer_and_the_one_within_it_give_each_other_their_state() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def job(rank: int, salt: int, steps: int) -> tuple[nn.Module, Any, TrainingState]:
        module = stage(0, 1, 2, salt=salt)
        wrapped = nn.parallel.DistributedDataParallel(module)
        options = {"lr": 0.0, "weight_decay": 0.0}  # nobody sends the updated parameters here
        zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **options)  # type: ignore[arg-type]
        trained([module], [zero], steps=steps)
        return module, zero, state_of(wrapped, [zero], rank=rank, world=2)

    plain = stage(0, 1, 2)
    reference = trained([plain], [torch.optim.AdamW(plain.parameters(), lr=0.0, weight_decay=0.0)])
    expected = moments(reference, [plain])
    images, held = [], []
    for rank in range(2):
        with as_rank(rank, 2):
            module, zero, state = job(rank, 1, 2)
            images.append(take(state))
            held.append(moments([zero.optim], [module]))
            live, other, state = job(rank, 2, 0)
            load([take(state_of(plain, reference))], state, rank=rank)
            assert moments([other.optim], [live]) == held[rank]
            assert torch.equal(live["2"].weight, plain["2"].weight)  # type: ignore[arg-type]
    assert held[0].keys().isdisjoint(held[1])
    assert {**held[0], **held[1]} == expected
    live = stage(0, 1, 2, salt=2)
    optimizers = trained([live], [torch.optim.AdamW(live.parameters(), lr=1.0)], steps=0)
    load(images, state_of(live, optimizers), agreement=Agreement())
    assert moments(optimizers, [live]) == expected
    assert optimizers[0].param_groups[0]["lr"] == 0.0


class Odd(torch.optim.Optimizer):
    """State of every kind: a plain tensor beside a DTensor, containers with tensors, scalars, another shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                local = p.detach().to_local() if hasattr(p, "to_local") else p.detach()
                self.state[p] = {
                    "calls": 3,
                    "note": ("a", None, 2.5),
                    "local": local * 2,
                    "double": p.detach().double() * 3,
                    "history": [p.detach() * 4, {"again": p.detach() * 5}],
                    "count": torch.tensor([7.0]),
                }
        self.state["all"] = {"seen": 11}  # type: ignore[index]


def test_state_of_every_kind_is_cut_with_its_parameter() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def job(world: int, salt: int) -> tuple[nn.Module, Odd]:
        torch.manual_seed(salt)
        module = nn.Linear(3, 5)
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
        return module, Odd(module.parameters())

    images = []
    for rank in range(4):
        with as_rank(rank, 4):
            module, optimizer = job(4, 1)
            optimizer.step()
            images.append(take(state_of(module, [optimizer], rank=rank, world=4)))
    for rank in range(3):
        with as_rank(rank, 3):
            expected, reference = job(3, 1)
            reference.step()
            live, other = job(3, 2)
            load(images, state_of(live, [other], rank=rank, world=3), rank=rank, agreement=Agreement())
            want = take(state_of(expected, [reference], rank=rank, world=3))
            got = take(state_of(live, [other], rank=rank, world=3))
            assert got.data == want.data
            assert got.small == want.small
            assert other.state["all"] == {"seen": 11}  # type: ignore[index]
    images[2].small["optimizers"][0]["other"]["weight"]["calls"] = 4
    with as_rank(0, 3):
        live, other = job(3, 2)
        text = refused(images, state_of(live, [other], world=3))
    assert "weight has another 'calls' on each of ranks 0, 1, 2, 3" in text


def test_a_dtensor_of_another_shape_than_its_parameter_is_cut_where_the_parameter_is() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    class Factored(torch.optim.SGD):
        """A factor of the second moment for each row and each column."""

        def factor(self, mesh: Any) -> None:
            for p in self.param_groups[0]["params"]:
                local = p.detach().to_local()
                rows = DTensor.from_local(
                    local.sum(1, keepdim=True), mesh, [Shard(0)], run_check=False, shape=(5, 1), stride=(1, 1)
                )
                columns = DTensor.from_local(torch.arange(3.0)[None], mesh, [Replicate()], run_check=False)
                self.state[p] = {"row": rows, "column": columns}

    def job(rank: int, world: int, salt: int) -> tuple[nn.Module, Factored, Any]:
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(salt)
        module = nn.Linear(3, 5, bias=False)
        size = -(-5 // world)
        local = module.weight.detach()[rank * size : (rank + 1) * size].clone()
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1))
        module.weight = nn.Parameter(sharded)
        return module, Factored(module.parameters(), lr=0.1), mesh

    images = []
    for rank in range(2):
        with as_rank(rank, 2):
            module, optimizer, mesh = job(rank, 2, 1)
            optimizer.factor(mesh)
            images.append(take(state_of(module, [optimizer], rank=rank, world=2)))
    for rank in range(4):
        with as_rank(rank, 4):
            expected, reference, mesh = job(rank, 4, 1)
            reference.factor(mesh)
            live, other, _ = job(rank, 4, 2)
            load(images, state_of(live, [other], rank=rank, world=4), rank=rank)
            want = take(state_of(expected, [reference], rank=rank, world=4))
            assert take(state_of(live, [other], rank=rank, world=4)).data == want.data
            assert other.state[live.weight]["row"].placements == (Shard(0),)
            assert other.state[live.weight]["column"].placements == (Replicate(),)


def test_fp32_state_of_a_bf16_parameter_and_a_parameter_in_another_memory_order_keep_their_bits() -> None:
    def job(salt: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(salt)
        module = nn.Conv2d(2, 3, 2).to(torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return module, optimizer

    module, optimizer = job(1)
    for p in module.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.randn_like(p, dtype=torch.float32)
    live, other = job(2)
    load([take(state_of(module, [optimizer]))], state_of(live, [other]))
    for p, q in zip(module.parameters(), live.parameters(), strict=True):
        assert torch.equal(p, q)
        assert q.stride() == p.stride()
        a, b = optimizer.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"]
        assert torch.equal(a, b)
        assert (b.dtype, b.stride()) == (torch.float32, a.stride())


# ---------------------------------------------------------------- buffers, extra states


class Seen(nn.Module):
    """A batch norm, and a module with state beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(2)
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def replicas(means: Sequence[float], counts: Sequence[int], *, ddp: bool) -> list[MemoryImage]:
    images = []
    for rank, (mean, count) in enumerate(zip(means, counts, strict=True)):
        with as_rank(rank, len(means)):
            torch.manual_seed(1)
            module = Seen()
            module.bn.running_mean.fill_(mean)  # type: ignore[union-attr]
            module.count = count
            wrapped = nn.parallel.DistributedDataParallel(module) if ddp else module
            images.append(take(state_of(wrapped, [], rank=rank, world=len(means)), rng={"torch": b"same"}))
    return images


def test_buffers_that_differ_come_from_the_first_replica_where_ddp_would_take_them_from_it() -> None:
    live = Seen()
    plan = load(replicas([0.5, 0.75], [4, 4], ddp=True), state_of(live, []))
    assert live.bn.running_mean.tolist() == [0.5, 0.5]  # type: ignore[union-attr]
    assert live.count == 4
    assert len(plan.said) == 1
    assert "buffers differ between replicas (model.bn.running_mean): those of the first one (rank 0)" in plan.said[0]
    assert plan.common.not_carried == ()
    assert plan.common.rng == {"torch": b"same"}


def test_buffers_of_equal_bytes_carry_over_and_others_that_nobody_speaks_for_are_refused() -> None:
    live = Seen()
    plan = load(replicas([0.5, 0.5], [4, 5], ddp=False), state_of(live, []))
    assert live.bn.running_mean.tolist() == [0.5, 0.5]  # type: ignore[union-attr]
    assert plan.said == []
    assert plan.common.not_carried == ("modules.model",)
    assert live.count == 0
    text = refused(replicas([0.5, 0.75], [4, 4], ddp=False), state_of(live, []))
    assert "'model.bn.running_mean', a buffer, differs among ranks 0, 1" in text


def test_a_partial_sum_is_part_of_nothing_though_all_ranks_have_the_same_bytes() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    images = []
    for rank in range(2):
        with as_rank(rank, 2):
            module = nn.Module()
            partial = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
            module.register_buffer("total", partial)
            images.append(take(state_of(module, [], rank=rank, world=2)))
    live = nn.Module()
    live.register_buffer("total", torch.zeros(3))
    text = refused(images, state_of(live, []))
    assert "tensor 'model.total' of rank 0 cannot be taken over: it is a partial sum" in text


def test_extra_and_loader_must_be_attached_as_they_were() -> None:
    live = Seen()
    images = [take(state_of(Seen(), []), extra={"a": {"n": 1}}, loader={"position": None}) for _ in range(2)]
    text = refused(images, state_of(live, []), extra={"b"})
    assert "extra a was saved and is not attached" in text
    assert "extra b is attached and was not saved" in text
    assert "it was saved with a data loader attached" in text
    plan = load(images, state_of(live, []), extra={"a"}, loader=True)
    assert plan.common.not_carried == ()  # both images say that one rank sees the data, and so does this start
    assert plan.common.loader == {"position": None}
    assert plan.common.extra == {"a": {"n": 1}}
    other = state_of(live, [], world=3)
    plan = load(images, other, extra={"a"}, loader=True)
    assert plan.common.not_carried == ("dataloader",)
    images[1].small["extra"]["a"] = {"n": 2}
    images[1].small["loader"] = {"position": 2}
    plan = load(images, state_of(live, []), extra={"a"}, loader=True)
    assert plan.common.not_carried == ("dataloader", "extra.a")
