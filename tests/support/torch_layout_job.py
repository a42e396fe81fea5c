"""A job that is started in one layout after another, and compares what it restored with torch's own checkpoint.

    python -m tests.support.torch_layout_job --kind fsdp2 --steps 6 --out DIR [--loaded STEP] [--durable]

The model is trained to `--steps`. Then the ranks write the same state by torch.distributed.checkpoint (DCP) into
DIR/dcp-<steps>. A start that finds DIR/dcp-<first step> makes a twin of its model and optimizer, loads that into it by
DCP, and compares every parameter and every tensor of the optimizer's state, bit for bit; then both train on, and their
losses must be equal. What is found wrong ends the rank with a message.
"""

from __future__ import annotations

import argparse
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import baft_torch

DIM, WORDS, LENGTH, BATCH = 12, 20, 5, 8
LAYERS = 2
KINDS = ("plain", "ddp", "fsdp2", "pipeline", "interleaved")
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Words(nn.Module):
    """Words to vectors, or (given vectors) vectors to words."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, DIM) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length) to (batch, length, DIM), or that to (batch, length, WORDS)."""
        return x @ self.weight.t() if x.is_floating_point() else nn.functional.embedding(x, self.weight)


class Block(nn.Module):
    """Mixes neighbours; odd sizes, so that shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 3 * DIM + 1)
        self.down = nn.Linear(3 * DIM + 1, DIM, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """(batch, length, DIM) to the same."""
        return h + self.scale * self.down(nn.functional.gelu(self.up(self.norm(h)))) + 0.1 * h.roll(1, dims=1)


class Net(nn.Module):
    """All layers, or those of a stage, under the numbers that they have in the whole."""

    def __init__(self, layers: range | None = None, *, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            made: list[nn.Module] = [Words(), *(Block() for _ in range(LAYERS)), Words()]
        if tied:
            made[-1].weight = made[0].weight  # type: ignore[assignment]
        which = range(len(made)) if layers is None else layers
        self.layers = nn.ModuleDict({str(i): made[i] for i in which})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all of them."""
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of (batch, length, WORDS) against (batch, length)."""
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


class Trained:
    """Models and optimizers of one rank in one layout."""

    def __init__(self, kind: str, rank: int, world: int, *, tied: bool, extra_layer: bool = False) -> None:
        self.kind, self.rank, self.world = kind, rank, world
        self.schedule: Any = None
        if kind in ("pipeline", "interleaved"):
            self._stages(2 if kind == "interleaved" else 1)
        else:
            self.models = [self._wrapped(Net(tied=tied), extra_layer)]
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in self.models]

    def _wrapped(self, net: Net, extra_layer: bool) -> nn.Module:
        if extra_layer:
            with torch.random.fork_rng():
                net.layers["more"] = Block()
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(net)
        if self.kind == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.world,))
            for layer in net.layers.values():
                if isinstance(layer, Block):
                    fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        return net

    def _stages(self, chunks: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        count = self.world * chunks
        total = LAYERS + 2
        per = -(-total // count)
        numbers = [chunk * self.world + self.rank for chunk in range(chunks)]
        self.models = [Net(range(n * per, min(total, (n + 1) * per))) for n in numbers]
        stages = [
            PipelineStage(model, n, count, torch.device("cpu")) for model, n in zip(self.models, numbers, strict=True)
        ]
        if chunks == 1:
            self.schedule = Schedule1F1B(stages[0], n_microbatches=4, loss_fn=loss_of)
        else:
            self.schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_of)  # type: ignore[arg-type]

    def update(self, step: int) -> str:
        """One update on the data of `step`; the loss, where this rank knows it, as hexadecimal."""
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
        if self.kind in ("ddp", "fsdp2"):
            batch = batch[self.rank :: self.world]
        x, y = batch[:, :-1], batch[:, 1:].contiguous()
        losses: list[torch.Tensor] = []
        if self.schedule is None:
            loss = loss_of(self.models[0](x), y)
            loss.backward()
            losses.append(loss.detach())
        elif self.rank == 0:
            self.schedule.step(x)
        elif self.rank == self.world - 1:
            self.schedule.step(target=y, losses=losses)
        else:
            self.schedule.step()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return float(torch.stack(losses).mean()).hex() if losses else "none"

    def state_dict(self) -> dict[str, Any]:
        """Models and optimizers by names that hold in the whole job, as DCP wants them."""
        found: dict[str, Any] = {}
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            found.update({f"model.{k}": v for k, v in get_model_state_dict(model).items()})
            state = get_optimizer_state_dict(model, optimizer, options=OPTIONS)
            found.update({f"optim.{k}": v for k, v in state.items()})
        return found

    def load_dcp(self, path: Path) -> None:
        """Take the state from a checkpoint that DCP wrote, in whatever layout."""
        state = self.state_dict()
        dcp.load(state, checkpoint_id=path)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            own = {k: state[f"model.{k}"] for k in get_model_state_dict(model)}
            set_model_state_dict(model, own)
            names = get_optimizer_state_dict(model, optimizer, options=OPTIONS)
            set_optimizer_state_dict(model, optimizer, {k: state[f"optim.{k}"] for k in names}, options=OPTIONS)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and the optimizers' state on this rank, by name."""
        found: dict[str, torch.Tensor] = {}
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            found.update({f"{i}.{k}": v for k, v in model.state_dict().items()})
            for name, param in model.named_parameters():
                for key, value in optimizer.state.get(param, {}).items():
                    found[f"{i}.{name}.{key}"] = value
            for g, group in enumerate(optimizer.param_groups):
                for key in ("lr", "weight_decay", "eps"):
                    found[f"{i}.group{g}.{key}"] = torch.tensor(group[key], dtype=torch.float64)
        return found


def differences(mine: Trained, twin: Trained) -> list[str]:
    """Names of tensors that are not of the same kind, or not equal in every bit."""
    found = []
    one, other = mine.tensors(), twin.tensors()
    for name in sorted({*one, *other}):
        a, b = one.get(name), other.get(name)
        if a is None or b is None or type(a) is not type(b) or a.dtype != b.dtype:
            found.append(f"{name}: {type(a)} {type(b)}")
            continue
        x, y = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))  # type: ignore[attr-defined]
        if x.shape != y.shape or x.contiguous().numpy().tobytes() != y.contiguous().numpy().tobytes():
            found.append(name)
    return found


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", default="0")
    parser.add_argument("--no-reshard", action="store_true")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--extra-layer", action="store_true")
    parser.add_argument("--vanish", type=int, default=-1, help="rank that dies when the others ask for its layout")
    parser.add_argument("--loader", action="store_true")
    parser.add_argument("--durable", action="store_true", help="finish the job: the next start has durable shards only")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    try:
        run(args, rank, world)
    finally:
        torch.distributed.destroy_process_group()


def run(args: argparse.Namespace, rank: int, world: int) -> None:
    """One start of the job."""
    job = Trained(args.kind, rank, world, tied=args.tied, extra_layer=args.extra_layer)
    schedule = torch.optim.lr_scheduler.ConstantLR(job.optimizers[0], factor=1.0)
    extra: dict[str, Any] = {"schedule": schedule, "rank": {"number": rank}}
    torch.manual_seed(rank)
    random.seed(3)
    np.random.seed(3)
    loader = StatefulDataLoader(list(range(64)), batch_size=4) if args.loader else None  # type: ignore[arg-type]
    ckpt = baft_torch.attach(
        job.models, job.optimizers, job="layouts", schedule=job.schedule, dataloader=loader, extra=extra, audit=1
    )
    if rank == args.vanish:
        ckpt._agreement.any = lambda _: os._exit(3)  # type: ignore[method-assign,assignment]
    try:
        first = ckpt.resume(reshard=not args.no_reshard)
        print(f"rank {rank} begins at step {first}", flush=True)
        print(f"rank {rank} not carried: {','.join(ckpt.not_carried)}", flush=True)
        print(f"rank {rank} updates {ckpt.updates}", flush=True)
        twin = None
        reference = args.out / f"dcp-{first}"
        if reference.exists():
            twin = Trained(args.kind, rank, world, tied=args.tied)
            twin.load_dcp(reference)
            wrong = differences(job, twin)
            assert not wrong, wrong
            print(f"rank {rank} compared {len(job.tensors())} tensors", flush=True)
        batches = iter(loader) if loader is not None else None
        for step in range(first, args.steps):
            if batches is not None:
                next(batches)
            loss = job.update(step)
            if twin is not None:
                assert twin.update(step) == loss, step
                assert not differences(job, twin), step
            ckpt.step()
            ckpt.fence()
            assert ckpt._session.settle(30.0)
        print(f"rank {rank} torn {ckpt.counters.torn} sealed {ckpt.counters.sealed}", flush=True)
        dcp.save(job.state_dict(), checkpoint_id=args.out / f"dcp-{args.steps}")
        if args.durable:
            ckpt.finish()
    finally:
        ckpt.close()
    torch.distributed.barrier()  # the rank that holds the store must not be the first to go


if __name__ == "__main__":
    main()
