"""A small training with a checkpointer, of which a test makes each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import baft_torch


class Loop:
    """A small training whose losses depend on everything that is saved."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def gradients(self) -> torch.Tensor:
        """One forward and backward on random data."""
        x = torch.randn(6, 8)
        loss = (self.model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        return loss.detach()

    def update(self) -> float:
        """One update; returns the loss."""
        loss = self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def weights(self) -> list[torch.Tensor]:
        """Copies."""
        return [p.detach().clone() for p in self.model.parameters()]


def settle(ckpt: baft_torch.Checkpointer) -> None:
    """Until the newest snapshot is committed and a slot is granted: nothing depends on the daemon's speed then."""
    ckpt._fence_quietly()
    assert ckpt._session.settle(10.0)


def train(ckpt: baft_torch.Checkpointer, loop: Loop, steps: int) -> list[float]:
    """Steps, each committed before the next; returns the losses."""
    losses = []
    for _ in range(steps):
        losses.append(loop.update())
        ckpt.step()
        settle(ckpt)
    return losses
