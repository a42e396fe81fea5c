"""A limit on bytes a second, shared by all writes of a node."""

from __future__ import annotations

import threading
from collections.abc import Callable

from baftd.errors import UsageError

__all__ = ["TokenBucket"]


class TokenBucket:
    """A `Limiter`: called with a number of bytes, it books them and returns the seconds to wait before writing them.

    Bytes are booked in the order of the calls, so several writers share the rate fairly; a request larger than the
    burst is allowed and paid for by the next one. `rate`: bytes a second. `burst`: bytes that an idle bucket lets
    through at once. `clock`: monotonic seconds.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        if rate <= 0 or burst < 0:
            raise UsageError(f"a rate of {rate} bytes a second with a burst of {burst} lets nothing through")
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._level = burst
        self._at = clock()

    def __call__(self, nbytes: int) -> float:
        """Book `nbytes`; seconds to wait before writing them, 0 when they may go at once."""
        with self._lock:
            now = self._clock()
            self._level = min(self._burst, self._level + max(0.0, now - self._at) * self._rate)
            self._at = now
            self._level -= nbytes
            return max(0.0, -self._level / self._rate)
