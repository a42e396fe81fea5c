"""A rank of single messages that also tells how long its steps take: what a machine of given speed would say.

It copies as its copy plan says (the newest one that it was sent), so that the daemon sees its own plans at work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from baft_client.declared import wire_entry
from baftd.checkpoint.shard import TensorEntry
from baftd.pipeline.events import Event, EventKind, pack_event
from baftd.wire.messages import Cadence, CopyPlan, Declare, Declared, Message, ScheduleSaid, Timings
from tests.support.wire_rank import JOB, WireRank

__all__ = ["Machine", "PacedRank", "held_by"]

NO_LIMIT = (1 << 64) - 1
MS = 1_000_000


def held_by(rank: int, nbytes: int) -> list[TensorEntry]:
    """One tensor of the rank's own."""
    return [TensorEntry(f"own.{rank}", "U8", (nbytes,), nbytes)]


@dataclass(frozen=True)
class Machine:
    """How a rank's steps go. Milliseconds; rates in bytes a millisecond."""

    busy: float = 20.0
    """Of each of two operations."""
    windows: Sequence[float] = (4.0, 4.0)
    """One behind each operation."""
    inside: float = 2e6
    """Copied in windows: 2 GB/s."""
    fence: float = 1e6
    beside: float = 0.5
    """A millisecond of copying beside computation makes it so many milliseconds longer."""


class PacedRank(WireRank):
    """See the module. `machine` may change between steps."""

    def __init__(self, *args: object, machine: Machine | None = None, nbytes: int = 8 << 20, job: str = JOB) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.job = job
        self.machine = machine or Machine()
        self.nbytes = nbytes
        self.plans: list[CopyPlan] = []
        self.cadences: list[Cadence] = []
        self.loses = 0
        """Messages of a cadence that never come to it."""
        self.at = 10**12 + 1000 * self.rank
        """ns of CLOCK_MONOTONIC: of a machine that began some minutes ago."""

    def _next(self, deadline: float, what: str) -> Message:
        reply = super()._next(deadline, what)
        if isinstance(reply, CopyPlan):
            self.plans.append(reply)
        elif isinstance(reply, Cadence) and self.loses:
            self.loses -= 1
        elif isinstance(reply, Cadence):
            self.cadences.append(reply)
        elif isinstance(reply, Declared):
            self.cadences.append(reply.cadence)
        return reply

    @property
    def copy_plan(self) -> CopyPlan | None:
        """The copy plan in force."""
        return max(self.plans, key=lambda plan: plan.generation, default=None)

    def listen(self, seconds: float = 0.0) -> None:
        """Take what the daemon has sent, for at least so long."""
        deadline = time.monotonic() + seconds
        while self._socket.poll(max(0, ceil((deadline - time.monotonic()) * 1000))):
            self._next(deadline + 1, "nothing")

    def lay_out(self, schedule: ScheduleSaid | None = None) -> Declared:
        """Declare one tensor of `nbytes` and, where there is one, the pipeline's schedule."""
        assert self.token is not None
        self.entries = held_by(self.rank, self.nbytes)
        message = Declare(
            token=self.token, rank=self.rank, entries=[wire_entry(entry) for entry in self.entries], small_bytes=100,
            schedule=schedule,
        )  # fmt: skip
        self.declared = self.ask(message, Declared)
        self.grants += self.declared.grants
        return self.declared

    def due(self, step: int) -> bool:
        """Whether the cadence takes a step."""
        from baftd.checkpoint.facts import Cadence as Known

        newest = self.cadences[-1]
        earlier = tuple(Known(*one) for one in newest.earlier)
        return Known(newest.from_step, newest.every, newest.probe, earlier).due(step)

    def _goes_by(self) -> tuple[int, int, int]:
        newest = self.cadences[-1]
        return newest.from_step, newest.every, newest.probe

    def tell(self, step: int, *, copied: bool | None = None) -> Timings:
        """What happened between the boundaries of `step` and the next."""
        assert self.token is not None
        timings = self.timings(step, self.due(step) if copied is None else copied)
        self.say(timings)
        return timings

    def timings(self, step: int, copied: bool) -> Timings:
        """The step as this machine does it, under the plan in force."""
        assert self.token is not None
        plan, machine = self.copy_plan, self.machine
        left = self.nbytes if copied else 0
        begun = at = self.at
        events: list[Event] = []
        inside = outside = 0
        pace = plan.outside / 1e3 if plan is not None else 0.0
        for ordinal, length in enumerate(machine.windows):
            busy = machine.busy
            taken = min(left, int(busy * pace))
            if taken:
                copying = taken / machine.inside
                busy += machine.beside * copying
                events.append(Event(EventKind.COPY_OUTSIDE, -1, -1, at, at + int(copying * MS), taken))
                left -= taken
                outside += taken
            events.append(Event(EventKind.FORWARD, 0, ordinal, at, at + int(busy * MS)))
            at += int(busy * MS)
            end = at + int(length * MS)
            budget = NO_LIMIT
            if plan is not None:
                budget = plan.windows[ordinal] if ordinal < len(plan.windows) else plan.further
            events.append(Event(EventKind.WAIT_RECV, 0, ordinal, at, end))
            events.append(Event(EventKind.WINDOW, int(EventKind.WAIT_RECV), ordinal, at, end, budget))
            taken = min(left, budget, int(length * machine.inside))
            if taken:
                events.append(
                    Event(EventKind.COPY_INSIDE, -1, ordinal, at, at + int(taken / machine.inside * MS), taken)
                )
                left -= taken
                inside += taken
            at = end
        held = int(left / machine.fence * MS)
        if left:
            events.append(Event(EventKind.COPY_FENCE, -1, -1, at, at + held, left))
            events.append(Event(EventKind.FENCE, -1, -1, at, at + held, left))
            at += held
        self.at = at
        return Timings(
            token=self.token, rank=self.rank, step=step, begun=begun, period=at - begun,
            events=b"".join(map(pack_event, events)), plan=plan.generation if plan is not None else 0, copied=copied,
            in_windows=inside, outside=outside, at_fence=left, fence_ns=held, held_ns=held, cadence=self._goes_by(),
        )  # fmt: skip
