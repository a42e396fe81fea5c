"""Training steps of the overhead benchmark: pipeline stages that sleep, multiply matrices, or compute in Python.

A sleeping stage occupies its "device" and no core, a multiplying one a core and the memory, a spinning one the
interpreter. Each keeps a state of a given size beside its weights, in tensors of 16 MiB, as optimizer moments would be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

__all__ = ["Marking", "Operations", "all_reduced_norm", "make_schedule", "state_of"]

WIDTH = 64
TENSOR = 16 << 20


class _Wait(torch.autograd.Function):
    """The identity, which takes its time in both directions; `spin`: in Python, holding the interpreter's lock."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float, spin: bool) -> torch.Tensor:
        """x as it is, after `forward` seconds."""
        ctx.backward_seconds, ctx.spin = backward, spin
        _pass(forward, spin)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient as it is, after `backward` seconds."""
        _pass(ctx.backward_seconds, ctx.spin)
        return grads[0], None, None, None


def _pass(seconds: float, spin: bool) -> None:
    if not spin:
        time.sleep(seconds)
        return
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class _Waiting(nn.Module):
    """One small layer and a given time."""

    def __init__(self, forward: float, backward: float, spin: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self._times = (forward, backward, spin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, WIDTH) to the same."""
        out: torch.Tensor = _Wait.apply(torch.tanh(self.layer(x)), *self._times)  # type: ignore[no-untyped-call]
        return out


class _Multiplying(nn.Module):
    """`layers` real products of (batch, width) with (width, width)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to the same."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _with_state(module: nn.Module, nbytes: int) -> nn.Module:
    """Adds the state: parameters that no gradient reaches, which the optimizer marks at each update."""
    count = max(1, nbytes // TENSOR)
    for number in range(count):
        size = nbytes // count // 4
        module.register_parameter(f"state{number}", nn.Parameter(torch.rand(size), requires_grad=False))
    return module


def make_stages(spec: dict[str, Any], rank: int, stages: Sequence[int]) -> list[nn.Module]:
    """Modules of the stages that a rank holds. spec: kind, forward and backward (seconds of a stage), uneven (a factor
    for every stage), width and layers, state (bytes of the rank)."""
    torch.manual_seed(rank)
    made: list[nn.Module] = []
    for stage in stages:
        factor = spec["uneven"][stage] if spec.get("uneven") else 1.0
        module: nn.Module
        if spec["kind"] == "matmul":
            module = _Multiplying(spec["width"], max(1, round(spec["layers"] * factor)))
        else:
            module = _Waiting(spec["forward"] * factor, spec["backward"] * factor, spec["kind"] == "spin")
        made.append(_with_state(module, spec["state"] // len(stages)))
    return made


def state_of(modules: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The tensors of the state, by name."""
    return {
        f"{number}.{name}": parameter.detach()
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if name.startswith("state")
    }


class Marking(torch.optim.SGD):
    """SGD that also changes some elements of every tensor of the state, in place."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__([p for module in modules for p in module.parameters() if p.requires_grad], lr=1e-3)
        self._marked = list(state_of(modules).values())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        loss = super().step(closure)
        for tensor in self._marked:
            tensor[:: 1 << 20] += 1.0
        return loss


class Operations:
    """The benchmark's own record of when a stage computed: (kind, stage, micro-batch, begin, end) in seconds."""

    KINDS: ClassVar = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}

    def __init__(self, stages: Sequence[Any]) -> None:
        self.seen: list[tuple[str, int, int, float, float]] = []
        for stage in stages:
            for name, kind in self.KINDS.items():
                self._wrap(stage, name, kind)

    def _wrap(self, stage: Any, name: str, kind: str) -> None:
        inner, index, seen = getattr(stage, name), stage.stage_index, self.seen

        def timed(number: int, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(number, *args, **kwargs)
            finally:
                what = "I" if kind == "B" and kwargs.get("full_backward", True) is False else kind
                seen.append((what, index, number, begin, time.perf_counter()))

        setattr(stage, name, timed)


def make_schedule(spec: dict[str, Any], rank: int, world: int) -> tuple[Any, list[nn.Module], list[Any], Any, Any]:
    """(schedule, modules, stages, input of the first stage or None, target of the last or None). spec also has:
    schedule (name of the class), micro, batch."""
    name, micro = spec["schedule"], spec["micro"]
    chunks = 1 if name in ("Schedule1F1B", "ScheduleGPipe") else 2
    total = world * chunks
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        numbers = [rank, total - 1 - rank]
    else:
        numbers = [rank + world * chunk for chunk in range(chunks)]
    modules = make_stages(spec, rank, numbers)
    stages = [
        PipelineStage(module, number, total, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    kind = getattr(torch_schedules, name)
    width = spec["width"] if spec["kind"] == "matmul" else WIDTH
    schedule = kind(stages[0] if chunks == 1 else stages, n_microbatches=micro, loss_fn=nn.MSELoss())
    shape = (spec["batch"] * micro, width)
    source = torch.randn(shape) if 0 in numbers else None
    target = torch.randn(shape) if total - 1 in numbers else None
    return schedule, modules, stages, source, target


def all_reduced_norm(modules: Sequence[nn.Module]) -> torch.Tensor:
    """The gradient norm over all ranks, as clipping needs it."""
    grads = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    total = torch.stack([grad.square().sum() for grad in grads]).sum()
    dist.all_reduce(total)
    return total.sqrt()
