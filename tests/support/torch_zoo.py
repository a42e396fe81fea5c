"""Every optimizer of torch.optim in every implementation it has on this machine, and models to drive them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DIM = 16
Params = Iterable[torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One optimizer in one implementation."""

    name: str
    make: Callable[[Params], Any]
    closure: bool = False
    matrices_only: bool = False
    sparse: bool = False

    def __str__(self) -> str:
        return self.name


def _variant(name: str, mode: str, **options: Any) -> Variant:
    kind = getattr(torch.optim, name)
    modes = {"forloop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "": {}}
    extras = "".join(f"+{key}" for key in options)
    title = f"{name}{'-' if mode else ''}{mode}{extras}"
    return Variant(title, lambda params: kind(params, **{"lr": 1e-2, **options, **modes[mode]}))


_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_FOREACH = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


def variants() -> list[Variant]:
    """All of them. SparseAdam wants sparse gradients, LBFGS a closure, Muon matrices."""
    found = []
    for name in _FOREACH:
        options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        found += [_variant(name, mode, **options) for mode in ("forloop", "foreach")]
        if name in _FUSED:
            found.append(_variant(name, "fused", **options))
    found.append(_variant("SGD", "foreach"))  # without momentum there is no state at all
    for mode in ("forloop", "foreach", "fused"):
        found.append(_variant("AdamW", mode, amsgrad=True))
    found.append(_variant("RMSprop", "foreach", momentum=0.9, centered=True))
    found.append(Variant("Muon", lambda params: torch.optim.Muon(params, lr=1e-2), matrices_only=True))
    found.append(Variant("SparseAdam", lambda params: torch.optim.SparseAdam(list(params), lr=1e-2), sparse=True))
    found.append(
        Variant("LBFGS", lambda params: torch.optim.LBFGS(params, lr=1e-1, max_iter=2, history_size=3), closure=True)
    )
    return found


class Net(nn.Module):
    """A tied embedding, batch norm, dropout; or (sparse) a sparse embedding alone."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = sparse
        self.emb = nn.Embedding(12, DIM, sparse=sparse)
        if not sparse:
            self.a = nn.Linear(DIM, DIM)
            self.bn = nn.BatchNorm1d(DIM)
            self.drop = nn.Dropout(0.2)
            self.out = nn.Linear(DIM, 12, bias=False)
            self.out.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 12) of token numbers (batch,)."""
        h = self.emb(x)
        if self.sparse:
            return h
        return self.out(self.drop(torch.relu(self.bn(self.a(h)))))


@dataclass
class Trainer:
    """A model with one variant's optimizer; `step` is one update, deterministic given the state."""

    variant: Variant
    model: Net
    optimizer: Any

    @classmethod
    def make(cls, variant: Variant, seed: int = 0) -> Trainer:
        """From a seed."""
        torch.manual_seed(seed)
        model = Net(sparse=variant.sparse)
        params = [p for p in model.parameters() if p.ndim == 2 or not variant.matrices_only]
        return cls(variant, model, variant.make(params))

    def loss(self, number: int) -> torch.Tensor:
        """Of batch `number`."""
        x = (torch.arange(6) * 5 + number) % 12
        out = self.model(x)
        return out.pow(2).mean() if self.variant.sparse else nn.functional.cross_entropy(out, (x + 1) % 12)

    def step(self, number: int) -> float:
        """One update; returns the loss before it."""
        if self.variant.closure:

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.loss(number)
                loss.backward()
                return loss

            return float(self.optimizer.step(closure).detach())
        loss = self.loss(number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())
