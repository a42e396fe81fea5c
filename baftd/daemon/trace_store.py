"""The newest steps of every rank of this node, as the ranks told them: for `baftd trace`.

Kept as they came (`events` is not unpacked), within two bounds: a number of steps and a number of bytes for each rank.
What is older is gone; `TraceReply.kept` says which steps were there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from baftd.telemetry.spans import Spans
from baftd.wire.messages import DaemonSpan, RankStep, TraceReply, TraceRequest

__all__ = ["KEPT_BYTES", "KEPT_STEPS", "TraceStore"]

KEPT_STEPS = 256
"""Of each rank."""
KEPT_BYTES = 32 << 20
"""Of events of all ranks of a job on this node; each rank has its part."""
REPLY_BYTES = 64 << 20
"""Most bytes of events in one answer: a message may have 96 MiB."""


class _Ring:
    """One rank's steps, oldest first."""

    __slots__ = ("nbytes", "steps")

    def __init__(self) -> None:
        self.steps: deque[RankStep] = deque()
        self.nbytes = 0

    def add(self, step: RankStep, most: int) -> None:
        self.steps.append(step)
        self.nbytes += len(step.events)
        while len(self.steps) > KEPT_STEPS or (self.nbytes > most and len(self.steps) > 1):
            self.nbytes -= len(self.steps.popleft().events)


class TraceStore:
    """The steps of one job. Belongs to the event loop."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Ring] = {}

    def add(self, step: RankStep) -> None:
        """Keep one step; the rank's older ones give way."""
        ring = self._ranks.get(step.rank)
        if ring is None:
            ring = self._ranks[step.rank] = _Ring()
        ring.add(step, KEPT_BYTES // len(self._ranks))

    def forget(self, ranks: Iterable[int] | None = None) -> None:
        """Drop what is kept of `ranks`; None: of all. A new start of the job counts its steps anew."""
        for rank in list(self._ranks) if ranks is None else ranks:
            self._ranks.pop(rank, None)

    @property
    def nbytes(self) -> int:
        """Of the events kept."""
        return sum(ring.nbytes for ring in self._ranks.values())

    def kept(self) -> tuple[int, int]:
        """First and last step of which anything is kept; (0, 0): nothing is."""
        rings = [ring.steps for ring in self._ranks.values() if ring.steps]
        return (min(steps[0].step for steps in rings), max(steps[-1].step for steps in rings)) if rings else (0, 0)

    def reply(self, message: TraceRequest, node: str, epoch: int, spans: Spans) -> TraceReply:
        """The answer to a request: the newest steps of those asked for that fit into a message, and what the daemon did
        in the meantime."""
        chosen = sorted(
            (
                step
                for ring in self._ranks.values()
                for step in ring.steps
                if message.first <= step.step <= message.last
            ),
            key=lambda step: (-step.step, step.rank),
        )
        room, found = REPLY_BYTES, []
        for step in chosen:
            room -= len(step.events) + 64
            if room < 0:
                break
            found.append(step)
        found.sort(key=lambda step: (step.step, step.rank))
        begin = min((step.begun for step in found), default=0)
        end = max((step.begun + step.period for step in found), default=-1)
        work = [DaemonSpan(**span._asdict()) for span in spans.within(begin, end)] if found else []
        return TraceReply(
            id=message.id, job=message.job, node=node, epoch=epoch, kept=self.kept(), steps=found, spans=work
        )
