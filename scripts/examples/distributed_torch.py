"""DDP or FSDP2 with a snapshot at every step: the same three lines as in a single process.

    baftd start
    torchrun --nproc-per-node 2 scripts/examples/distributed_torch.py --kind ddp
    torchrun --nproc-per-node 2 scripts/examples/distributed_torch.py --kind fsdp2

Kill any process and start again. Every rank saves what it holds; the daemon commits a step when all ranks have it.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import baft_torch  # baftd


def main() -> None:
    """Train on random numbers, different ones on each rank."""
    parser = argparse.ArgumentParser(description="A data-parallel training with a snapshot at every step.")
    parser.add_argument("--kind", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    if args.kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)

    with baft_torch.attach(model, optimizer, job=f"torch-{args.kind}") as ckpt:  # baftd
        for step in range(ckpt.resume(), args.steps):  # baftd
            x = torch.randn(32, 64)
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step()  # baftd
            if rank == 0 and (step + 1) % 20 == 0:
                print(f"step {step + 1:4}  loss {loss.item():.6f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
