"""Watching a training's waits without a daemon: a gate that remembers its windows, and a net to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Work
from torch.distributed import _functional_collectives as functional

from baft_client.recorder import Recorder
from baft_client.windows import NO_LIMIT, Windows
from baft_torch._waits import Waits
from baftd.pipeline.events import Event, EventKind, unpack_events


class Gate:
    """Where the engine would be: remembers the windows it was given."""

    def __init__(self) -> None:
        self.open = False
        self.said: list[str] = []

    def open_window(self, budget: int = NO_LIMIT) -> None:
        """A window opens."""
        assert not self.open
        self.open = True
        self.said.append("open")

    def close_window(self, outside: int = 0) -> None:
        """It closes."""
        self.open = False
        self.said.append("close")


class Watch:
    """Waits with windows and a recorder of their own."""

    def __init__(self, **options: Any) -> None:
        self.recorder, self.gate = Recorder(), Gate()
        self.windows = Windows(self.recorder)
        self.waits = Waits(self.windows, self.recorder, **options)
        self.step()

    def step(self) -> None:
        """A boundary, after which there is something to copy."""
        self.waits.boundary()
        self.windows.begin((), NO_LIMIT, 0)
        self.windows.arm(self.gate, None)

    def fence(self) -> None:
        """As a session's."""
        self.waits.fence()
        self.windows.disarm()

    def events(self) -> list[Event]:
        """Since the last call, in their order."""
        data, lost = self.recorder.take()
        assert lost == 0
        return sorted(unpack_events(data), key=lambda event: event.begin)

    def windows_of(self) -> list[EventKind]:
        """What windows were opened for since the last call."""
        return [EventKind(event.stage) for event in self.events() if event.kind is EventKind.WINDOW]


@contextmanager
def watches() -> Iterator[Callable[..., Watch]]:
    """Makes a Watch, which is closed at the end; torch is as it was then."""
    before = Work.wait, functional.wait_tensor
    made: list[Watch] = []

    def make(**options: Any) -> Watch:
        made.append(Watch(**options))
        return made[-1]

    yield make
    for watch in made:
        watch.waits.close()
        watch.waits.close()
        assert not watch.gate.open
    assert (Work.wait, functional.wait_tensor) == before


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of one rank: its collectives are over at once, and go the way of all others."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    """Something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 4) to (batch, 1)."""
        return self.second(self.first(x).relu())


def net(watching: Callable[..., Watch]) -> tuple[Watch, Net]:
    """A net whose passes are watched."""
    model = Net()
    return watching(modules=[model], params=list(model.parameters())), model


def backward(model: nn.Module) -> None:
    """Forward and backward."""
    model(torch.ones(3, 4)).pow(2).sum().backward()
