"""Two ranks that wait for each other in turns, and whose windows go wrong for some steps.

    python -m tests.support.torch_fault_job --kind vanish --steps 40 --out DIR

In the middle third of the steps: vanish (nobody waits for anybody, both compute as long), shrink (the waits are short),
overlap (windows within windows, left in another order, and across the fence), unclosed (windows that are never left),
raise (what is waited for raises). Each rank writes DIR/steps-<rank>.json: what was told to the daemon of each period,
counters, and whether a second start finds, bit for bit, what the first one had at that boundary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import baft_torch
from baft_client.engine import EngineHooks
from baft_client.session import Session
from baftd.pipeline.events import EventKind, unpack_events
from baftd.wire.messages import Timings

KINDS = ("vanish", "shrink", "overlap", "unclosed", "raise")
ELEMENTS = 2 << 20
"""Of the parameter; the optimizer has as many: 16 MiB in all."""
TURNS, OPERATION = 4, 0.008
"""Turns of a step, and the seconds that each rank computes in one while the other waits."""


class Model(nn.Module):
    """One large parameter and one that learns."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.weight = nn.Parameter(torch.rand(ELEMENTS))

    def forward(self, factor: float) -> torch.Tensor:
        """A number."""
        return (self.weight * factor).sum()


class Rank:
    """One rank, and what it does in a step."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank
        self.model = Model(rank)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.token = torch.zeros(1)

    def turn(self, seconds: float) -> None:
        """Each computes once while the other waits for it."""
        for first in (0, 1):
            if first == self.rank:
                time.sleep(seconds)
                dist.isend(self.token, 1 - self.rank).wait()
            else:
                dist.irecv(self.token, 1 - self.rank).wait()

    def step(self, number: int, ckpt: baft_torch.Checkpointer, *, wrong: bool) -> None:
        """Compute, in turns, and update."""
        windows = ckpt._session.windows
        kind = self.kind if wrong else ""
        for _ in range(TURNS):
            if kind == "vanish":
                time.sleep(2 * OPERATION)
            elif kind == "shrink":
                self.turn(OPERATION / 100)
                time.sleep(2 * OPERATION)
            elif kind == "overlap":
                windows.enter(EventKind.WAIT_DATA)
                self.turn(OPERATION)
                windows.enter(EventKind.WAIT_COLLECTIVE)
                windows.leave()
                windows.leave()
                windows.leave()
            elif kind == "unclosed":
                self.turn(OPERATION)
                windows.enter(EventKind.WAIT_DATA)
            elif kind == "raise":
                self.turn(OPERATION)
                work = dist.all_reduce(self.token, async_op=True)
                try:
                    work.wait("soon")  # type: ignore[arg-type]
                except TypeError:
                    work.wait()
            else:
                self.turn(OPERATION)
        self.model(1e-4 * (number + 1)).backward()
        if kind == "overlap":
            windows.enter(EventKind.TAIL)
        self.optimizer.step()
        if kind == "overlap":
            windows.leave()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Of all that is saved of the model and its optimizer."""
        found = hashlib.sha256(self.model.weight.detach().numpy().tobytes())
        for state in self.optimizer.state.values():
            found.update(state["momentum_buffer"].numpy().tobytes())
        return found.hexdigest()


def throttle(rate: int) -> None:
    """Sessions attached from now on have an engine that copies so many bytes a second at most."""

    class Throttled(Session):
        """With such an engine."""

        @classmethod
        def attach(cls, *args: Any, **kwargs: Any) -> Session:
            """See there."""
            return super().attach(*args, **kwargs, engine_hooks=EngineHooks(throttle=rate))

    baft_torch.Session = Throttled  # type: ignore[attr-defined,misc]


def watch(ckpt: baft_torch.Checkpointer) -> list[Timings]:
    """Every batch that is told to the daemon from now on."""
    told: list[Timings] = []
    periods = ckpt._session._periods
    tell = periods._tell

    def both(make: Callable[[], Timings]) -> None:
        message = make()
        told.append(message)
        tell(lambda: message)

    periods._tell = both
    return told


def events_of(message: Timings) -> list[tuple[str, int, int, int]]:
    """(kind, begin, end, amount) of windows, fences, and what the engine did; times in ns since the period began."""
    kinds = (EventKind.WINDOW, EventKind.FENCE, EventKind.COPY_INSIDE, EventKind.COPY_OUTSIDE, EventKind.COPY_FENCE)
    found = [each for each in unpack_events(message.events) if each.kind in kinds]
    return [(e.kind.name, e.begin - message.begun, e.end - message.begun, e.amount) for e in found]


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", default="0")
    parser.add_argument("--throttle", type=int, default=0, help="bytes a second that the engine copies at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    if args.throttle:
        throttle(args.throttle)
    mine = Rank(args.kind, rank)
    ckpt = baft_torch.attach(mine.model, mine.optimizer, job="faulty", audit=1)
    ckpt._session.windows.register("turns")
    told = watch(ckpt)
    assert ckpt.resume() == 0
    had: dict[int, str] = {}
    third = args.steps // 3
    for number in range(args.steps):
        mine.step(number, ckpt, wrong=third <= number < 2 * third)
        ckpt.step()
        had[ckpt.steps] = mine.digest()
    ckpt.fence()
    assert ckpt._session.settle(20.0)
    counters = ckpt.counters
    ckpt.close()
    dist.barrier()  # all have left
    again = Rank(args.kind, rank + 7)
    second = baft_torch.attach(again.model, again.optimizer, job="faulty")
    resumed = second.resume(takeover=True)
    result: dict[str, Any] = {
        "told": [{**{name: getattr(each, name) for name in FIELDS}, "events": events_of(each)} for each in told],
        "sealed": counters.sealed, "torn": counters.torn, "audits": counters.audits,
        "skipped": dict(counters.skipped), "boundaries": counters.boundaries,
        "resumed": resumed, "same": again.digest() == had[resumed],
    }  # fmt: skip
    (args.out / f"steps-{rank}.json").write_text(json.dumps(result))
    second.close()
    dist.barrier()
    dist.destroy_process_group()


FIELDS = ("step", "period", "copied", "plan", "in_windows", "outside", "at_fence", "fence_ns", "overruns", "lost")

if __name__ == "__main__":
    main()
