"""What a daemon did and when: the newest spans of its own work on a job, for `baftd trace`.

Recording one costs about a microsecond and a bounded piece of memory, so it is always on.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Span", "Spans"]

KEPT = 4096
"""Spans of a job: some hundred steps of four ranks, half a megabyte."""


class Span(NamedTuple):
    """One piece of work. `begun` and `duration` are nanoseconds of CLOCK_MONOTONIC."""

    what: str
    """digest, durable, manifest, commit, restore, retention"""
    begun: int
    duration: int
    rank: int = -1
    """-1: of no single rank."""
    step: int = 0
    bytes: int = 0


class Spans:
    """The newest spans. `add` may be called from any thread; reading belongs to one that may see a span late."""

    def __init__(self, kept: int = KEPT) -> None:
        self._spans: deque[Span] = deque(maxlen=kept)

    def add(self, what: str, begun: int, *, rank: int = -1, step: int = 0, bytes: int = 0) -> None:
        """Note work that began at `begun` (ns of CLOCK_MONOTONIC) and ends now."""
        self._spans.append(Span(what, begun, max(0, time.monotonic_ns() - begun), rank, step, bytes))

    @contextlib.contextmanager
    def span(self, what: str, *, rank: int = -1, step: int = 0, bytes: int = 0) -> Iterator[None]:
        """Note what is done within, also where it fails."""
        begun = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(what, begun, rank=rank, step=step, bytes=bytes)

    def newest(self) -> list[Span]:
        """All that are kept, in the order in which they ended."""
        return list(self._spans)

    def within(self, begin: int, end: int) -> list[Span]:
        """Those that were under way between two moments (ns of CLOCK_MONOTONIC)."""
        return [span for span in self.newest() if span.begun <= end and span.begun + span.duration >= begin]
