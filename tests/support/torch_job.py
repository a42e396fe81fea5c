"""A training job of one or more processes, plain, DDP, FSDP2 or a pipeline, that can kill itself at a named point.

    python -m tests.support.torch_job --kind ddp --steps 12 --out DIR [--no-baft] [--kill STEP:POINT:RANK]

Ranks come from the launcher's variables. Each rank appends "step loss" lines, the loss as a hexadecimal float, to
DIR/losses-<start>-<rank>. Points are, in the order in which they come in a step: data, forward, backward, fence (the
copy is over, the update has not begun), update (it has), boundary (ckpt.step() has returned).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import baft_torch

DIM, WORDS, LENGTH, BATCH, MICRO = 32, 24, 6, 4, 4
SETTLE = 30.0
"""Seconds to wait for the commit of the last snapshot and a slot for the next."""
KINDS = ("plain", "ddp", "fsdp2", "pipeline")


class Lines(Dataset[torch.Tensor]):
    """Short sequences; some words are drawn anew each time, from torch, numpy and random (`draws`)."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> torch.Tensor:
        line = (torch.arange(LENGTH + 1) * (index % 5 + 1) + index) % WORDS
        if not self.draws:
            return line
        line[0] = random.randrange(WORDS)
        line[1] = int(np.random.randint(WORDS))
        line[2] = int(torch.randint(WORDS, ()))
        return line


class Block(nn.Module):
    """Attention-free transformer block with dropout and batch norm, whose buffers change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM), nn.Dropout(0.2))
        self.bn = nn.BatchNorm1d(DIM)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """(batch, length, DIM) to the same."""
        h = h + self.mlp(self.norm(h)) + h.roll(1, dims=1)
        return self.bn(h.transpose(1, 2)).transpose(1, 2).contiguous()


class Embed(nn.Module):
    """Words to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length) to (batch, length, DIM)."""
        return self.words(x)


class _Sleep(torch.autograd.Function):
    """Occupies a device and no CPU."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, seconds: float) -> torch.Tensor:
        """The same tensor, later."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Twice as long."""
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Slow(nn.Module):
    """Takes its time, and has some weight to copy: `nbytes` of it, and twice as much in the optimizer."""

    def __init__(self, seconds: float, nbytes: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.table = nn.Parameter(torch.linspace(-1.0, 1.0, nbytes // 4))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Of any shape to the same."""
        slept: torch.Tensor = _Sleep.apply(h * (1 + self.table.mean()), self.seconds)  # type: ignore[no-untyped-call]
        return slept


def layers(count: int) -> list[nn.Module]:
    """The whole model, as layers."""
    return [Embed(), *(Block() for _ in range(count)), nn.Linear(DIM, WORDS)]


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of (batch, length, WORDS) against (batch, length)."""
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


class Setup:
    """Model, loader and one step of the given kind for this rank."""

    def __init__(self, kind: str, rank: int, world: int, workers: int, slow: tuple[float, int] | None = None) -> None:
        torch.manual_seed(11)
        random.seed(rank)
        np.random.seed(rank)
        self.kind, self.rank, self.world = kind, rank, world
        self.schedule: Any = None
        made = layers(2 if kind != "pipeline" else max(2, world - 2))
        if kind == "pipeline":
            self.model: nn.Module = self._stage(made, slow)
        else:
            self.model = nn.Sequential(*made)
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        if kind == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (world,))
            for module in self.model:  # type: ignore[union-attr]
                fully_shard(module, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2e-2, total_steps=100)
        size = BATCH * (MICRO if kind == "pipeline" else 1)
        # Numbers that worker processes draw begin anew with them, after a restart as in each epoch.
        self.loader = StatefulDataLoader(
            Lines(draws=not workers),
            batch_size=size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        # Replicas see other data and other dropout; stages of a pipeline see the same data.
        torch.manual_seed(100 if kind == "pipeline" else 100 + rank)
        if kind == "pipeline":
            random.seed(0)
            np.random.seed(0)
        self._batches: Any = None

    def _stage(self, made: list[nn.Module], slow: tuple[float, int] | None) -> nn.Module:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        per = -(-len(made) // self.world)
        mine = nn.Sequential(*made[self.rank * per : (self.rank + 1) * per])
        if slow is not None:
            mine.append(Slow(*slow))
        device = torch.device("cpu")
        stage = PipelineStage(mine, self.rank, self.world, device)
        self.schedule = Schedule1F1B(stage, n_microbatches=MICRO, loss_fn=loss_of)
        return mine

    def batch(self) -> torch.Tensor:
        """The next one, over epochs."""
        while True:
            if self._batches is None:
                self._batches = iter(self.loader)
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = None

    def forward_backward(self, batch: torch.Tensor, at: Callable[[str], None]) -> float | None:
        """Compute gradients; the loss, where this rank knows it."""
        x, y = batch[:, :-1], batch[:, 1:].contiguous()
        if self.schedule is None:
            loss = loss_of(self.model(x), y)
            at("forward")
            loss.backward()
            return loss.item()
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(x)
        elif self.rank == self.world - 1:
            self.schedule.step(target=y, losses=losses)
        else:
            self.schedule.step()
        at("forward")
        return float(torch.stack(losses).mean()) if losses else float(next(self.model.parameters()).detach().sum())


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", default="0")
    parser.add_argument("--job", default="job")
    parser.add_argument("--no-baft", action="store_true")
    parser.add_argument("--kill", default="")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--slow", default="", help="SECONDS:BYTES of each stage's forward, and of its weight")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if args.kind != "plain":
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    seconds, _, nbytes = args.slow.partition(":")
    setup = Setup(args.kind, rank, world, args.workers, (float(seconds), int(nbytes)) if args.slow else None)
    kill_step, kill_point, kill_rank = (args.kill or "-1:none:-1").split(":")
    step = 0

    def at(point: str) -> None:
        if step == int(kill_step) and point == kill_point and rank == int(kill_rank):
            os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.ExitStack() as stack:
        ckpt = None
        if not args.no_baft:
            ckpt = stack.enter_context(
                baft_torch.attach(
                    setup.model,
                    setup.optimizer,
                    job=args.job,
                    schedule=setup.schedule,
                    dataloader=setup.loader,
                    extra={"lr": setup.scheduler},
                    audit=1,
                )
            )
        # Registered after attach, so they come after its fence.
        setup.optimizer.register_step_pre_hook(lambda *_: at("fence"))
        first = ckpt.resume() if ckpt else 0
        print(f"rank {rank} begins at step {first}", flush=True)
        out = stack.enter_context((args.out / f"losses-{args.start}-{rank}").open("a", buffering=1))
        for step in range(first, args.steps):
            batch = setup.batch()
            at("data")
            loss = setup.forward_backward(batch, at)
            at("backward")
            setup.optimizer.step()
            at("update")
            setup.scheduler.step()
            setup.optimizer.zero_grad()
            out.write(f"{step} {loss.hex() if loss is not None else 'none'}\n")
            if ckpt:
                # A step may be skipped on a machine too busy to free a slot in time; the tests count steps.
                ckpt._session.settle(SETTLE)
                ckpt.step()
            at("boundary")
        if ckpt:
            print(f"rank {rank} torn {ckpt.counters.torn} sealed {ckpt.counters.sealed}", flush=True)
    if args.kind != "plain":
        torch.distributed.barrier()  # the rank that holds the store must not be the first to go
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
