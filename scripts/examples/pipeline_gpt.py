"""A small GPT, trained as a pipeline on the text of Python's own manual, with a snapshot at every step.

    baftd start
    torchrun --nproc-per-node 2 scripts/examples/pipeline_gpt.py

Each process holds one stage (torch.distributed.pipelining, Schedule1F1B, gloo). Kill any process at any moment and
start again: the run goes on with the losses it would have had. What is baftd's are the lines marked so.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import baft_torch  # baftd

CONTEXT, MICRO_BATCHES, MICRO_BATCH = 64, 4, 4


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each behind a layer norm, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """(batch, CONTEXT, width) to the same."""
        batch, length, width = h.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm1(h)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return h + self.drop(self.mlp(self.norm2(h)))


class Stage(nn.Module):
    """The layers of one stage: the first also embeds, the last also predicts."""

    def __init__(self, stage: int, stages: int, words: int, width: int, blocks: int) -> None:
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks // stages)))
        if self.last:
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Characters (batch, CONTEXT) or the stage before's output, to logits or what the next stage wants."""
        if self.first:
            h = self.words(h) + self.places.weight
        h = self.blocks(h)
        return self.head(self.norm(h)) if self.last else h


class Text:
    """Random windows of the text, in an order of its own that a checkpoint can hold."""

    def __init__(self) -> None:
        text = "\n".join(body for _, body in sorted(pydoc_data.topics.topics.items()))
        self.letters = sorted(set(text))
        index = {letter: i for i, letter in enumerate(self.letters)}
        self.data = torch.tensor([index[letter] for letter in text])
        self.order = torch.Generator().manual_seed(7)

    def __iter__(self) -> Text:
        return self

    def __next__(self) -> torch.Tensor:
        """(MICRO_BATCHES * MICRO_BATCH, CONTEXT + 1) characters."""
        starts = torch.randint(len(self.data) - CONTEXT - 1, (MICRO_BATCHES * MICRO_BATCH,), generator=self.order)
        return torch.stack([self.data[start : start + CONTEXT + 1] for start in starts])

    def state_dict(self) -> dict[str, Any]:
        """Where the order is."""
        return {"order": self.order.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.order.set_state(state["order"])


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy per character."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    """Train one stage."""
    parser = argparse.ArgumentParser(description="A small GPT as a pipeline, with a snapshot at every step.")
    parser.add_argument("--job", default="gpt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--log", type=Path, help="write a line for each step: step, loss (hexadecimal), seconds")
    parser.add_argument("--every", type=int, default=1, help="a boundary after every N-th step only (for measuring)")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, stages = torch.distributed.get_rank(), torch.distributed.get_world_size()
    text = Text()
    torch.manual_seed(rank)
    model = Stage(rank, stages, len(text.letters), args.width, args.blocks)
    stage = PipelineStage(model, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)

    with baft_torch.attach(  # baftd
        model, optimizer, job=args.job, schedule=schedule, dataloader=text, extra={"lr": warm_up}
    ) as ckpt:
        began = time.perf_counter()
        first = ckpt.resume()  # baftd
        print(f"resumed step={first} seconds={time.perf_counter() - began:.3f}", flush=True)
        batches = iter(text)
        began = time.perf_counter()
        for step in range(first, args.steps):
            batch = next(batches)
            losses: list[torch.Tensor] = []
            if stage.is_first:
                schedule.step(batch[:, :-1])
            elif stage.is_last:
                schedule.step(target=batch[:, 1:].contiguous(), losses=losses)
            else:
                schedule.step()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
            now = time.perf_counter()
            report(args.log, step, losses, now - began)
            began = now
            if (step + 1) % args.every == 0:
                ckpt.step()  # baftd
    torch.distributed.destroy_process_group()


def report(log: Path | None, step: int, losses: list[torch.Tensor], seconds: float) -> None:
    """Say how far training is; the last stage knows the loss."""
    loss = torch.stack(losses).mean().item() if losses else float("nan")
    if log is not None:
        with log.open("a") as out:
            out.write(f"{step} {loss.hex()} {seconds:.6f}\n")
    elif losses and (step + 1) % 10 == 0:
        print(f"step {step + 1:4}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
