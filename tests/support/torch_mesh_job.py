"""Ranks that spread tensors over meshes by every means torch has, and compare what baftd reads off them with torch's
own collectives: `full_tensor` gathers a whole, `redistribute` cuts it anew.

    python -m tests.support.torch_mesh_job --kind all --out DIR

Every comparison that fails ends the rank with an AssertionError. Rank 0 prints how many were made.
"""

from __future__ import annotations

import argparse
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from baft_torch._models import ModelTree
from baft_torch._state import TrainingState
from baftd.checkpoint.layout import Layout
from baftd.checkpoint.reshard import Wanted, plan_reads, runs
from baftd.checkpoint.saved_set import SavedSet
from tests.support.torch_fake import fill, holder, numbered, saved_of, state_of


class Net(nn.Module):
    """Sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 9)
        self.down = nn.Linear(9, 5)
        with torch.no_grad():
            for k, param in enumerate(self.parameters()):
                param.copy_(numbered(*param.shape) + 1000 * k)


def nets(world: int) -> Iterator[tuple[str, nn.Module]]:
    """The model under every arrangement of fully_shard and tensor parallel."""
    halves, quarters = world // 2, world // 4

    def tensor_parallel(mesh: DeviceMesh) -> Net:
        net = Net()
        return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})  # type: ignore[return-value]

    yield "fsdp", fully_shard(Net(), mesh=init_device_mesh("cpu", (world,)))
    hybrid = init_device_mesh("cpu", (2, halves), mesh_dim_names=("replicate", "shard"))
    yield "hsdp", fully_shard(Net(), mesh=hybrid)
    grid = init_device_mesh("cpu", (halves, 2), mesh_dim_names=("dp", "tp"))
    yield "fsdp of tp", fully_shard(tensor_parallel(grid["tp"]), mesh=grid["dp"])
    cube = init_device_mesh("cpu", (2, quarters, 2), mesh_dim_names=("replicate", "shard", "tp"))
    yield "hsdp of tp", fully_shard(tensor_parallel(cube["tp"]), mesh=cube["replicate", "shard"])
    yield "tp", tensor_parallel(init_device_mesh("cpu", (world,)))


def check_nets(rank: int, world: int) -> int:
    """Parameters and moments: what all ranks declare is the whole that `full_tensor` gathers."""
    done = 0
    for what, net in nets(world):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for param in net.parameters():
            param.grad = param.detach() * 2
        optimizer.step()
        state = TrainingState(ModelTree(net, world=world), [optimizer])
        held = gathered(saved_of(state))
        layout = Layout.of_entries({each: [entry for entry, _ in saved] for each, saved in held.items()})
        for name, param in net.named_parameters():
            moment = optimizer.state[param]["momentum_buffer"]
            for full, tensor in ((f"model.{name}", param), (f"optim.0.{name}.momentum_buffer", moment)):
                assert isinstance(tensor, DTensor)
                whole = tensor.full_tensor().detach().numpy()
                seen = np.full(whole.shape, np.nan, np.float32)
                for entry, data in (each for saved in held.values() for each in saved if each[0].name == full):
                    fill(seen, entry, data)
                assert np.array_equal(seen, whole), (what, full)
                replicas = {len(cell.holders) for cell in layout.tensor(full).cells()}
                assert len(replicas) == 1, (what, full, replicas)
                done += 1
    return done


def check_redistribute(rank: int, world: int) -> int:
    """From one spread to another: the ranges that are read are those that `redistribute` sends."""
    rng = random.Random(7)
    meshes = [init_device_mesh("cpu", sizes) for sizes in ((world,), (2, world // 2))]
    done = 0
    for number in range(16):
        mesh = meshes[number % 2]
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
        before, after = ([_placement(rng, len(shape)) for _ in range(mesh.ndim)] for _ in range(2))
        tensor = distribute_tensor(numbered(*shape), mesh, before)
        held = gathered(saved_of(state_of(holder(w=tensor), rank=rank, world=world)))
        target = tensor.redistribute(mesh, after)
        state = state_of(holder(w=target), rank=rank, world=world)
        (item,) = state.by_name().values()
        saved = SavedSet.of({each: [(str(entry.ranges), entry) for entry, _ in found] for each, found in held.items()})
        bytes_of = {(each, entry.ranges): data for each, found in held.items() for entry, data in found}
        made = torch.full_like(target.to_local(), float("nan"))
        wanted = [Wanted("model.w", "F32", item.held.shape, part.box, 4) for part in item.held.parts]
        for part, one in zip(item.held.parts, plan_reads(saved, wanted, rank=rank), strict=True):
            buffer = bytearray(one.wanted.nbytes)
            for read in one.reads:
                source = bytes_of[(read.source.rank, read.source.entry.ranges)]
                for run in runs(read, one.wanted):
                    buffer[run.target : run.target + run.nbytes] = source[run.source : run.source + run.nbytes]
            if buffer:
                made[part.where] = torch.frombuffer(buffer, dtype=torch.float32).view(part.shape)
        assert torch.equal(made, target.to_local()), (shape, before, after)
        done += 1
    return done


def _placement(rng: random.Random, dims: int) -> Any:
    return Replicate() if rng.random() < 0.25 else Shard(rng.randrange(dims))


def gathered(mine: list[Any]) -> dict[int, list[Any]]:
    """What every rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return dict(enumerate(found))


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--steps", default="0")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", default="0")
    parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    counts = check_nets(rank, world), check_redistribute(rank, world)
    print(f"rank {rank} compared {counts[0]} wholes and {counts[1]} redistributions", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
