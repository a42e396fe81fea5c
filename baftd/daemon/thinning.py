"""Of which steps the events are looked at: to unpack all of them would take a core from the training of a fast job."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

__all__ = ["CLOSELY_AGAIN", "LOOKED_AT_FIRST", "SHARE", "Thinning"]

LOOKED_AT_FIRST = 8
"""Steps of a job whose events are all looked at."""
CLOSELY, CLOSELY_AGAIN = 64, 16
"""Steps whose events are looked at as often as `APART` allows: of a job that begins, and after a plan was replaced. One
more for each step whose windows or fence were not as planned."""
APART = 0.25
"""Seconds from one such step to the next: of those with a snapshot, and of those without."""
SHARE = 0.00125
"""Part of a core that looking at further events may take: of steps with a snapshot, and as much of those without."""


@dataclass
class Thinning:
    """Which steps' events are looked at: the same of all ranks, and those with a snapshot apart from those without."""

    chosen: OrderedDict[int, bool] = field(default_factory=OrderedDict)
    steps: int = 0
    close: int = CLOSELY
    due: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    paid: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})

    def wants(self, step: int, copied: bool, now: float) -> bool:
        """Whether the events of a step count."""
        known = self.chosen.get(step)
        if known is not None:
            return known
        self.steps += 1
        closely = self.close > 0 and now >= self.due[copied]
        wanted = self.steps <= LOOKED_AT_FIRST or closely or now >= max(self.due[copied], self.paid[copied])
        if wanted:
            self.due[copied] = self.paid[copied] = now + APART
            self.close = max(0, self.close - 1)
        self.chosen[step] = wanted
        while len(self.chosen) > 64:
            self.chosen.popitem(last=False)
        return wanted

    def took(self, copied: bool, seconds: float) -> None:
        """Looking at one rank's events took so much of a core."""
        self.paid[copied] += seconds / SHARE

    def closely(self, steps: int) -> None:
        """Look at further steps as often as it goes."""
        self.close = max(self.close, min(CLOSELY_AGAIN, self.close + steps))
