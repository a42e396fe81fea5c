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
from threading import get_ident
from typing import Protocol

from baft_client.recorder import Recorder
from baftd.pipeline.events import EventKind

__all__ = ["NO_LIMIT", "Anchor", "Gate", "Windows"]

NO_LIMIT = (1 << 64) - 1
"""Budget of a window that may take what it can."""
MOST = 1 << 16
"""Windows of a period that are told apart; those beyond are passed over."""


class Gate(Protocol):
    """The part of `CopyEngine` that windows need. Harmless from any thread, and where nothing is armed."""

    def open_window(self, budget: int = ..., ordinal: int = ...) -> None:
        """Copy up to `budget` bytes, in the window that has this number in the step."""

    def close_window(self, outside: int = ...) -> None:
        """Stop within 256 KiB; with `outside` go on at that many bytes a second."""


class Anchor(Protocol):
    """The part of `DeviceCopier` that windows need."""

    def anchor(self, ordinal: int, budget: int) -> None:
        """Copy up to `budget` bytes after the operation that was launched last."""


class Windows:
    """The windows of one rank. Adapters and loops use the methods down to `anchor`, the session those below."""

    __slots__ = (
        "_add", "_began", "_budget", "_budgets", "_depth", "_device", "_further", "_gate", "_granted", "_home",
        "_kind", "_now", "_outside", "_owner", "passed_over", "sources",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, *, now: Callable[[], int] = time.monotonic_ns) -> None:
        """`recorder` gets a WINDOW event for each; `now` gives ns of CLOCK_MONOTONIC."""
        self.sources: tuple[str, ...] = ()
        """Who says that it opens windows."""
        self.passed_over = 0
        """Waits in threads that do not train, and windows beyond the most that a period may have."""
        self._add = recorder.add
        self._now = now
        self._home = get_ident()
        self._gate: Gate | None = None
        """The engine, while a copy is armed that windows carry; None: nothing to grant."""
        self._device: Anchor | None = None
        self._budgets: Sequence[int] = ()
        self._further = NO_LIMIT
        self._outside = 0
        self._granted: list[int] = []
        """Budgets of the windows of this period, 0 where nothing was granted."""
        self._owner = 0
        """Ident of the thread whose window is open; 0: none is."""
        self._depth = 0
        self._kind = EventKind.TAIL
        self._budget = 0
        self._began = 0

    # ------------------------------------------------------------ for adapters and loops

    def register(self, source: str) -> None:
        """Windows of `source` come from now on, at every step: from the next boundary on the engine copies in windows
        (and at the pace that the plan allows outside of them), and no longer all the time."""
        if source not in self.sources:
            self.sources = (*self.sources, source)

    def unregister(self, source: str) -> None:
        """They come no more. Does nothing for an unknown source."""
        self.sources = tuple(known for known in self.sources if known != source)

    def enter(self, kind: EventKind) -> None:
        """The calling thread waits from here on: the engine may copy. Within a window it is counted only."""
        me = get_ident()
        if self._owner:
            if self._owner == me:
                self._depth += 1
            return
        if me != self._home and not _from_outside():
            self.passed_over += 1
            return
        ordinal = len(self._granted)
        if ordinal >= MOST:
            self.passed_over += 1
            return
        gate = self._gate
        budget = 0
        if gate is not None:
            budget = self._budgets[ordinal] if ordinal < len(self._budgets) else self._further
        self._owner = me
        self._depth = 1
        self._kind = kind
        self._budget = budget
        self._granted.append(budget)
        self._began = self._now()
        if budget and gate is not None:
            gate.open_window(budget, ordinal)

    def leave(self) -> None:
        """The wait is over. The engine stops within 256 KiB. Does nothing where this thread has no window open."""
        if self._owner != get_ident():
            return
        self._depth -= 1
        if not self._depth:
            self._close()

    def _close(self) -> None:
        gate, budget = self._gate, self._budget
        if budget and gate is not None:
            gate.close_window(self._outside)
        self._owner = 0
        self._add(EventKind.WINDOW, self._kind, len(self._granted) - 1, self._began, self._now(), budget)

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
        there is a window: the copy stream waits for the operation and has the plan's budget. The host goes on."""
        device, ordinal = self._device, len(self._granted)
        if device is None or (get_ident() != self._home and not _from_outside()) or ordinal >= MOST:
            return
        budget = self._budgets[ordinal] if ordinal < len(self._budgets) else self._further
        self._granted.append(budget)
        now = self._now()
        if budget:
            device.anchor(ordinal, budget)
        self._add(EventKind.WINDOW, kind, ordinal, now, now, budget)

    # ------------------------------------------------------------ for the session

    def begin(self, budgets: Sequence[int], further: int, outside: int) -> list[int]:
        """A period begins, in the thread that trains; a window left open ends. Returns the budgets that the windows
        of the former period were given.

        Args:
            budgets: most bytes for each window of the period, in the order in which they are opened.
            further: the same for each beyond those.
            outside: bytes a second outside of windows; 0: none.
        """
        self.disarm()
        self._home = get_ident()
        former, self._granted = self._granted, []
        self._budgets, self._further, self._outside = budgets, further, outside
        return former

    def arm(self, gate: Gate | None, device: Anchor | None = None) -> None:
        """There is something to copy, and windows carry it."""
        self._device = device
        self._gate = gate

    def disarm(self) -> None:
        """There is nothing (left) to copy. A window that is still open ends here."""
        if self._owner:
            self._close()
            self._owner = 0
        self._gate = self._device = None

    def forget(self) -> None:
        """In a forked child: the engine is the parent's, and nothing may touch its words. Takes no lock."""
        self._gate = self._device = None
        self._owner = 0


def _from_outside() -> bool:
    """Whether the calling thread is one that Python did not start."""
    return isinstance(threading.current_thread(), threading._DummyThread)
