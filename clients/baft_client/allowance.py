"""How long a fence may wait: no longer than the budget allows over a few steps.

A snapshot whose windows did not come is not worth a step that stands still: it is given up as `late`, which is counted
and said, and the next one is planned for windows as they are now.
"""

from __future__ import annotations

from math import inf

__all__ = ["Allowance"]

PERIODS = 8
"""Steps whose allowance may be kept for one fence, at least; and twice the steps from one snapshot to the next."""


class Allowance:
    """A token bucket of time: every period adds `budget` times its length, every fence takes what it has waited."""

    def __init__(self) -> None:
        self._credit = 0.0
        self._most = 0.0
        self._since = 0
        self._apart = 1

    def passed(self, period: int, budget: float) -> None:
        """A period of so many ns is over, in which snapshots might cost that part of it (0.01: 1 %)."""
        earned = budget * period
        fresh = not self._most
        self._since = 1 if fresh else self._since + 1
        self._most = max(PERIODS, 2 * max(self._apart, self._since)) * earned
        self._credit = self._most if fresh else min(self._most, self._credit + earned)

    def begun(self) -> None:
        """A snapshot has begun: so many periods have passed since the last one."""
        self._apart, self._since = max(1, self._since), 0

    @property
    def seconds(self) -> float:
        """The longest that a fence may wait now. Without limit before any period has passed: nobody knows how long one
        is, so nobody knows what the budget would be."""
        return self._credit * 1e-9 if self._most else inf

    def waited(self, nanoseconds: int) -> None:
        """A fence has waited. What it took beyond its allowance is not charged to the next one, whose windows may be as
        they should: that one is allowed the budget of its own step at least."""
        self._credit = max(0.0, self._credit - nanoseconds)
