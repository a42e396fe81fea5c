"""How long a fence may wait: no longer than the budget allows over a few steps.

A snapshot whose windows did not come is not worth a step that stands still: it is given up as `late`, which is counted
and said, and the next one is planned for windows as they are now.
"""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median_low

__all__ = ["Allowance"]

PERIODS = 8
"""Steps whose allowance may be kept for one fence, at least; and twice the steps from one snapshot to the next."""
LENGTHS = 9
"""Periods whose median says how long one is: neither a compilation nor a very short step may stand for all others."""


class Allowance:
    """A token bucket of time: every period adds `budget` times its length, every fence takes what it has waited."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=LENGTHS)
        self._one = 0.0
        """What the budget allows in a usual period."""
        self._credit = 0.0
        self._most = 0.0
        self._since = 0
        self._apart = 1

    def passed(self, period: int, budget: float, *, apart: bool = False) -> None:
        """A period of so many ns is over, in which snapshots might cost that part of it (0.01: 1 %).

        `apart`: something else went on in it (an evaluation), so that its length says nothing and earns nothing."""
        if not apart:
            self._lengths.append(period)
        fresh = not self._most
        self._since = 1 if fresh else self._since + 1
        self._one = budget * median_low(self._lengths) if self._lengths else 0.0
        self._most = max(PERIODS, 2 * max(self._apart, self._since)) * self._one
        earned = 0.0 if apart else budget * period
        self._credit = self._most if fresh else min(self._most, self._credit + earned)

    def begun(self) -> None:
        """A snapshot has begun: so many periods have passed since the last one."""
        self._apart, self._since = max(1, self._since), 0

    @property
    def seconds(self) -> float:
        """The longest that a fence may wait now: the budget of one usual period at least, whatever former fences took.
        Without limit before any period has passed: nobody knows how long one is, so nobody knows what the budget would
        be."""
        return max(self._credit, self._one) * 1e-9 if self._most else inf

    def waited(self, nanoseconds: int) -> None:
        """A limited fence has waited; what others took was never to be kept within a budget. What it took beyond its
        allowance is not charged to the next one, whose windows may be as they should."""
        self._credit = max(0.0, self._credit - nanoseconds)
