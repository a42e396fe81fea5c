"""Windows: spans in which the training thread waits anyway, granted to the copy engine.

    session.windows.register("pipeline")          once: windows of this source will come at every step
    session.windows.enter(EventKind.WAIT_RECV)    before the wait
    ...the wait...
    session.windows.leave()                       after it

`with session.windows.waiting(kind):` is the same. Opening and closing are words in the rank's control page, no message.
How many bytes a window may take is said by the daemon's copy plan, by the window's number in the step; without a plan
it may take what it can. While no source is registered the engine copies all the time.

Right at all times: a window within a window is the same window; a `leave` without an `enter` does nothing; a window
that is never left ends at the fence, at the boundary at the latest. Nothing here takes a lock or raises.

Windows belong to the thread that trains (the one that calls `boundary`) and to threads that Python did not start:
backward hooks run in those while the training thread waits for them. A wait in another Python thread (a loader's, an
evaluation's) says nothing about the training thread, and is passed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from baft_client.recorder import Recorder
from baftd.pipeline.events import EventKind

__all__ = ["NO_LIMIT", "Windows"]

NO_LIMIT = (1 << 64) - 1
"""Budget of a window that may take what it can."""


class Gate(Protocol):
    """The part of `CopyEngine` that windows need."""

    def open_window(self, budget: int = ..., /) -> None:
        """Copy up to `budget` bytes."""

    def close_window(self, outside: int = ..., /) -> None:
        """Stop within 256 KiB; with `outside` go on at that many bytes a second."""


class Anchor(Protocol):
    """The part of `DeviceCopier` that windows need."""

    def anchor(self, ordinal: int, budget: int) -> None:
        """Copy up to `budget` bytes after the operation that was launched last."""


class Windows:
    """The windows of one rank. `register`, `enter`, `leave`, `waiting` and `anchor` are for adapters and loops, the rest
    is the session's."""

    def __init__(self, recorder: Recorder, *, now: Callable[[], int] = time.monotonic_ns) -> None:
        """`recorder` gets a WINDOW event for each; `now` gives ns of CLOCK_MONOTONIC."""
        self.sources: tuple[str, ...] = ()
        """Who says that it opens windows."""
        self.passed_over = 0
        """Waits in threads that do not train."""

    # ------------------------------------------------------------ for adapters and loops

    def register(self, source: str) -> None:
        """Windows of `source` come from now on, at every step: from the next boundary on the engine copies in windows
        (and at the pace that the plan allows outside), and no longer all the time."""

    def unregister(self, source: str) -> None:
        """They do not come any more. Does nothing for an unknown source."""

    def enter(self, kind: EventKind) -> None:
        """The calling thread waits from here on: the engine may copy. Within a window it only counts. Takes < 2 us."""

    def leave(self) -> None:
        """The wait is over. The engine stops within 256 KiB. Does nothing where no window of this thread is open."""

    @contextmanager
    def waiting(self, kind: EventKind) -> Iterator[None]:
        """`enter` and `leave` around a wait."""
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

    def anchor(self, kind: EventKind) -> None:
        """Device-anchored: called right after an operation was launched on a device. The gap that follows the operation
        there is a window: the copy stream waits for the operation and gets the plan's budget. The host goes on."""
