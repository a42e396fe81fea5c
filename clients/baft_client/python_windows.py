"""What the Python engine may copy when, and the record of it: windows with a budget, paces, windows by the clock.

The native engine has the same in `_windows.c`; `CopyEngine` says what both promise. Neither class has a lock: the
engine holds its own.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baft_client.engine import NO_LIMIT, SPANS
from baftd.memory.control import Gate
from baftd.pipeline.events import Event, EventKind, pack_event

__all__ = ["BLOCK", "Grant", "Grants", "Spans"]

BLOCK = 256 << 10
"""Bytes between two looks at a window, or at a pace."""
_WHOLE = 1 << 20
"""The same where the gate is open all the time: each look costs the GIL, 5 ms where the trainer computes in Python."""
_FINEST = 4096
"""Blocks are not cut finer at the end of a budget."""
_PAUSE = 5_000_000
"""ns between two blocks of one span, at most."""
_LONG = 20_000_000
"""ns; a paced copy is told in pieces of this length."""


class Grant(NamedTuple):
    """What the next block may be."""

    kind: EventKind
    window: int
    """Its number; of one by the clock -2 - its index; -1: none."""
    serial: int
    """Tells windows of one number apart."""
    nbytes: int
    pace: int
    """Bytes a second; 0: any."""


class Grants:
    """Which block may be copied now, and as what."""

    def __init__(self) -> None:
        self.mode = Gate.CLOSED
        self.pace = 0
        """After `open`, bytes a second; 0: unlimited."""
        self.wake = 0
        """When to ask again (ns of CLOCK_MONOTONIC) after a refusal; 0: when something changes."""
        self.copied = {EventKind.COPY_INSIDE: 0, EventKind.COPY_OUTSIDE: 0, EventKind.COPY_FENCE: 0}
        self._outside = 0
        self._budget = self._spent = 0
        self._serial = self._first = 0
        self._timed: npt.NDArray[np.uint64] | None = None
        self._timed_at = self._timed_spent = self._lists = 0

    def arm(self) -> None:
        """A copy begins: windows are numbered anew."""
        self._timed = None
        self._first = self._serial
        self.copied = dict.fromkeys(self.copied, 0)

    def open_window(self, budget: int) -> None:
        """Begin one."""
        self.mode, self._budget, self._spent = Gate.WINDOW, budget, 0
        self._serial += 1

    def close_window(self, outside: int) -> None:
        """End it."""
        self._outside = outside
        self.mode = Gate.OUTSIDE if outside else Gate.CLOSED

    def set_timed(self, rows: npt.NDArray[np.uint64]) -> None:
        """Windows by the clock, from the first one."""
        self._timed = rows
        self._timed_at = self._timed_spent = 0
        self._lists += 1

    def rest(self) -> None:
        """Gate closed, no window by the clock."""
        self._timed = None
        self.mode = Gate.CLOSED

    @property
    def idle(self) -> bool:
        """Nothing may be copied, now or later, until something changes."""
        return self.mode == Gate.CLOSED and self._timed is None

    def look(self, now: int, want: int) -> Grant | None:
        """What a block of up to `want` bytes may be at `now`; None: nothing, and `wake` is set."""
        self.wake = 0
        if self.mode == Gate.WINDOW:
            n = _cut(self._budget, self._spent, min(want, BLOCK))
            if n:
                return Grant(EventKind.COPY_INSIDE, self._serial - self._first - 1, self._serial, n, 0)
        by_clock = self._look_at_clock(now, min(want, BLOCK))
        if by_clock is not None:
            return by_clock
        if self.mode == Gate.OPEN:
            return Grant(EventKind.COPY_OUTSIDE, -1, 0, min(want, BLOCK if self.pace else _WHOLE), self.pace)
        if self.mode == Gate.OUTSIDE:
            return Grant(EventKind.COPY_OUTSIDE, -1, 0, min(want, BLOCK), self._outside)
        return None

    def _look_at_clock(self, now: int, want: int) -> Grant | None:
        rows = self._timed
        if rows is None:
            return None
        while self._timed_at < len(rows):
            begin, end, budget = (int(value) for value in rows[self._timed_at])
            if now < begin:
                self.wake = begin
                return None
            n = _cut(budget, self._timed_spent, want) if now < end else 0
            if n:
                return Grant(EventKind.COPY_INSIDE, -2 - self._timed_at, self._lists, n, 0)
            self._timed_at += 1
            self._timed_spent = 0
        return None

    def spend(self, grant: Grant) -> None:
        """Count the block of `grant` against its window."""
        if grant.kind == EventKind.COPY_INSIDE:
            if grant.window < -1:
                self._timed_spent += grant.nbytes
            else:
                self._spent += grant.nbytes


def _cut(budget: int, spent: int, want: int) -> int:
    """What a block of `want` bytes may take of a budget."""
    left = max(0, budget - spent)
    return want if budget == NO_LIMIT or want <= left else left // _FINEST * _FINEST


class Spans:
    """When blocks were copied, block after block of one window as one span."""

    def __init__(self) -> None:
        self.lost = 0
        self._events: deque[Event] = deque()
        self._key = (0, 0)

    def add(self, grant: Grant, copy: int, begin: int, end: int) -> None:
        """The block of `grant` was copied from `begin` to `end`, as a part of copy number `copy`."""
        key = (grant.serial, copy)
        last = self._events[-1] if self._events else None
        if (
            last is not None
            and (last.kind, last.micro, self._key) == (grant.kind, grant.window, key)
            and begin - last.end <= _PAUSE
            and not (grant.pace and end - last.begin > _LONG)
        ):
            self._events[-1] = last._replace(end=end, amount=last.amount + grant.nbytes)
        elif len(self._events) < SPANS:
            self._events.append(Event(grant.kind, -1, grant.window, begin, end, grant.nbytes))
            self._key = key
        else:
            self.lost += 1

    def take(self) -> bytes:
        """Records of all spans so far, which go."""
        events, self._events = self._events, deque()
        return b"".join(map(pack_event, events))
