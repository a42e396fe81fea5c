"""Background work: so many bytes until a deadline, spread over a part of the time that there is for them.

A digest or a durable write at full speed takes memory bandwidth and cores from training for a moment; spread, it takes
little at any time. Whoever does the work asks before each part of it (`Work.__call__`), in its own thread: it is held
back until the part is due, and runs at low priority. When what is left may not be done by the deadline at the speed
seen so far, or somebody waits for the result (`Work.hurry`), it is held back no more and gets the daemon's own
priority.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from baftd.daemon.priority import Priorities

__all__ = ["MOST_SPREAD", "Spread", "Work"]

SPREAD = 0.5
"""Part of the time until the deadline over which the bytes are spread."""
MOST_SPREAD = 60.0
"""Seconds; a shard that is written for longer is kept from being superseded for longer."""
LATE = 1.5
"""Work is raised when what is left takes, at the speed seen so far, this many times less than what is left of the time
and no more."""
NEWER = 0.3
"""Weight of the part done last in what a byte takes."""
PART = 4 << 20
"""Bytes that go through without asking again: what is asked for in smaller pieces waits for that much at once."""


class Spread:
    """A token bucket that fills evenly from the beginning: when each part of `total` bytes is due. No clock of its own.

    `within`: seconds from `now` to the deadline; None: there is none, and nothing is held back.
    """

    def __init__(self, total: int, within: float | None, now: float) -> None:
        self._total = max(1, total)
        self._begun = now
        self._within = within
        self._seconds = min(SPREAD * within, MOST_SPREAD) if within is not None else 0.0
        self._booked = 0
        self._part = 0
        self._at = now
        self._cost: float | None = None
        """Seconds a byte, the newer parts counting more."""

    def book(self, nbytes: int, now: float) -> float:
        """Book a part; seconds to wait before it, 0 where it is due."""
        self._cost = self._cost_at(now)
        due = self._begun + self._seconds * min(1.0, self._booked / self._total)
        wait = max(0.0, due - now)
        self._booked += nbytes
        self._part, self._at = nbytes, now + wait
        return wait

    def unwaited(self, seconds: float) -> None:
        """The last wait was cut short by that much."""
        self._at -= seconds

    def late(self, now: float) -> bool:
        """Whether what is left may not be done by the deadline, at the speed seen of late."""
        if self._within is None:
            return False
        left = self._begun + self._within - now
        cost = self._cost_at(now)
        if cost is None:
            return left < (1 - SPREAD) * self._within  # it has not even begun
        return cost * max(0, self._total - self._booked) * LATE > left

    def _cost_at(self, now: float) -> float | None:
        """Seconds a byte when the part that was booked last is done `now`."""
        if self._part <= 0:
            return self._cost
        cost = max(0.0, now - self._at) / self._part
        return cost if self._cost is None else NEWER * cost + (1 - NEWER) * self._cost


class Work:
    """One piece of background work. Called, in the thread that does it, with the bytes of each part before that part.

    It is a `baftd.storage.interface.Limiter`: what it returns is what `limit` (a hard one) wants waited. Thread-safe.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        within: float | None,
        priorities: Priorities,
        clock: Callable[[], float],
        limit: Callable[[int], float] | None = None,
        over: Callable[[Work], None] = lambda work: None,
    ) -> None:
        """`total`: bytes; `within`: seconds to the deadline, None: there is none; `over` is called at the end."""
        self.what = what
        self.total = total
        self._spread = Spread(total, within, clock())
        self._priorities = priorities
        self._clock = clock
        self._limit = limit
        self._over = over
        self._lock = threading.Lock()
        self._hurried = threading.Event()
        self._pending = 0
        self.held_back = 0.0
        """Seconds for which threads were held back."""
        self.late = False
        """It was raised because the deadline came near."""

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hurried.set()
        self._over(self)

    @property
    def raised(self) -> bool:
        """Whether it runs at the daemon's own priority, held back by nothing but `limit`."""
        return self._hurried.is_set()

    def hurry(self) -> None:
        """Somebody waits for it, or it is to end: threads that are held back go on at once."""
        self._hurried.set()

    def __call__(self, nbytes: int) -> float:
        """Wait until `nbytes` more may be done; seconds that the hard limit wants waited beside that."""
        if not self.raised:
            self._hold_back(nbytes)
        if self.raised:
            self._priorities.lift()
        else:
            self._priorities.lower()
        return self._limit(nbytes) if self._limit is not None else 0.0

    def _hold_back(self, nbytes: int) -> None:
        with self._lock:
            self._pending += nbytes
            if self._pending < min(PART, self.total):
                return
            nbytes, self._pending = self._pending, 0
            now = self._clock()
            if self._spread.late(now):
                self.late = True
                self._hurried.set()
                return
            wait = self._spread.book(nbytes, now)
        if wait > 0:
            began = self._clock()
            self._hurried.wait(wait)
            waited = self._clock() - began
            with self._lock:
                self.held_back += waited
                self._spread.unwaited(max(0.0, wait - waited))
