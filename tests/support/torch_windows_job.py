"""Ranks whose waits are watched without a daemon: DDP, FSDP2, and receives outside of torch's pipelines.

    python -m tests.support.torch_windows_job --kind ddp --steps 3 --out DIR

Rank 1 is late: it sleeps in every backward pass (DDP, FSDP2), or before it sends. Each rank writes to
DIR/events-<rank>.json the losses, and for each step a list of [kind, for what (windows only), begin, end] in ms since
the step began.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from baft_client.recorder import Recorder
from baft_client.windows import NO_LIMIT, Windows
from baft_torch._waits import Waits
from baftd.pipeline.events import EventKind, unpack_events

LATE = 0.08
"""Seconds that rank 1 is late."""
KINDS = ("ddp", "no_sync", "fsdp2", "receive")


class Late(torch.autograd.Function):
    """Sleeps in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """The same."""
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The same, later."""
        time.sleep(ctx.seconds)
        return grad, None


class Net(nn.Module):
    """Two layers; the gradient of the first is late on rank 1."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 64) to the same."""
        return self.second(Late.apply(self.first(x).relu(), self.seconds))


class Watch:
    """The windows of one rank."""

    def __init__(self, modules: list[nn.Module], params: list[torch.Tensor]) -> None:
        self.recorder = Recorder()
        self.windows = Windows(self.recorder)
        self.waits = Waits(self.windows, self.recorder, modules=modules, params=params)
        self.steps: list[list[tuple[str, str, float, float]]] = []
        self.begun = time.monotonic_ns()

    def boundary(self) -> None:
        """End a step."""
        self.windows.end()
        self.waits.boundary()
        data, lost = self.recorder.take()
        assert not lost
        self.steps.append(
            [
                (
                    event.kind.name,
                    EventKind(event.stage).name if event.kind is EventKind.WINDOW else "",
                    (event.begin - self.begun) / 1e6,
                    (event.end - self.begun) / 1e6,
                )
                for event in unpack_events(data)
            ]
        )
        self.windows.begin((), NO_LIMIT, 0)
        self.begun = time.monotonic_ns()


def data_parallel(kind: str, rank: int, steps: int) -> tuple[Watch, list[str]]:
    """Train, and clip gradients; the losses as hexadecimal floats."""
    torch.manual_seed(3)
    model: nn.Module = Net(LATE if rank == 1 else 0.0)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in (model.first, model.second, model):
            fully_shard(layer, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    watch = Watch([model], list(model.parameters()))
    optimizer.register_step_pre_hook(lambda *_: watch.waits.fence())
    found = []
    for step in range(steps):
        x = torch.full((4, 64), 0.1 * (step + rank + 1))
        if kind == "no_sync":
            with model.no_sync():
                model(x).pow(2).mean().backward()
        loss = model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item().hex())
        watch.boundary()
    watch.waits.close()
    return watch, found


def receives(rank: int, steps: int) -> tuple[Watch, list[str]]:
    """Send and receive, as pipelines of other makers do."""
    watch, t = Watch([], []), torch.zeros(1024)
    for step in range(steps):
        if rank == 1:
            time.sleep(LATE)
            dist.send(t + step, 0)
            work = dist.isend(t, 0)
        else:
            dist.recv(t, 1)
            work = dist.irecv(t, 1)
        work.wait()
        watch.boundary()
    watch.waits.close()
    return watch, []


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", default="0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    kinds: dict[str, Callable[[], tuple[Watch, list[str]]]] = {"receive": lambda: receives(rank, args.steps)}
    watch, found = kinds.get(args.kind, lambda: data_parallel(args.kind, rank, args.steps))()
    (args.out / f"events-{rank}.json").write_text(json.dumps({"steps": watch.steps, "losses": found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
