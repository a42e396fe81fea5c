"""Virtual time: events in a heap, one seeded random source, a network that delays, repeats and loses."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

__all__ = ["Scheduler", "Violation"]


class Violation(AssertionError):
    """An invariant of the design does not hold."""


class Scheduler:
    """Runs callbacks in the order of their virtual time; the same seed gives the same run."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.tracing = trace
        self.lines: list[str] = []
        self.lossy = True
        self.loss, self.doubled, self.late = 0.08, 0.06, 0.08
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` after `delay` seconds of virtual time."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, call, args))

    def send(self, call: Callable[..., None], *args: Any) -> None:
        """A message between machines: it may take long, come twice, overtake others, or never arrive."""
        rng = self.rng
        if not self.lossy:
            self.at(0.02, call, *args)
            return
        luck = rng.random()
        if luck < self.loss:
            return
        if luck > 1.0 - self.doubled:
            self.at(rng.expovariate(0.7), call, *args)
        late = rng.random() < self.late
        self.at(rng.expovariate(0.5 if late else 8.0), call, *args)

    def run(self, until: float, after_each: Callable[[], None]) -> None:
        """Run until the queue is empty or `until` is reached; `after_each` checks the invariants."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, call, args = heapq.heappop(queue)
            self.events += 1
            call(*args)
            after_each()
        self.now = max(self.now, until)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self.rng.random() < probability

    def trace(self, who: str, text: str) -> None:
        """A line of the trace. Call it only where `tracing` is set: making the text costs time."""
        self.lines.append(f"{self.now:8.3f}  {who:<12} {text}")
