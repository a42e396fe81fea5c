"""A small PyTorch training with a snapshot at every step.

    baftd start
    python scripts/examples/plain_torch.py

Kill it at any moment (Ctrl-C, kill -9) and start it again: it goes on at the step after the last snapshot, and its
losses are those it would have had. `--steps N` ends it elsewhere, `--fresh` begins anew.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import baft_torch


def main() -> None:
    """Train a two-layer network on random numbers."""
    parser = argparse.ArgumentParser(description="A small training with a snapshot at every step.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    with baft_torch.attach(model, optimizer, job="plain-torch", extra={"lr": scheduler}) as ckpt:
        for step in range(ckpt.resume(fresh=args.fresh), args.steps):
            x = torch.randn(32, 64)
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ckpt.step()
            if (step + 1) % 20 == 0:
                print(f"step {step + 1:4}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
