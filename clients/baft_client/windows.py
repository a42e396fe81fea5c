"""Windows: spans in which the training thread waits anyway, granted to the copy engine.

    session.windows.register("pipeline")          once: windows of this source will come at every step
    session.windows.enter(EventKind.WAIT_RECV)    before the wait
    ...the wait...
    session.windows.leave()                       after it

`with session.windows.waiting(kind):` is the same. Opening and closing are words in the rank's control page, no message.
How many bytes a window may take is said by the daemon's copy plan, by the window's number in the step; without a plan
it may take what it can. While no source is registered the engine copies all the time.

Where tensors lie on a device, `enter` is the moment behind which the device may copy: its copy stream waits for the
operation that was launched last and has the window's budget; the host goes on.

Right at all times: a window within a window is the same window; a `leave` without an `enter` does nothing; a window
that is never left ends at the fence, at the boundary at the latest; from the fence to the boundary there are none: what
they could copy is about to change. Nothing here takes a lock or raises.

Windows belong to the thread that trains (the one that calls `boundary`) and to threads that Python did not start:
backward hooks run in those while the training thread waits for them. A wait in another Python thread (a loader's, an
evaluation's) says nothing about the training thread, and is passed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Protocol

from baft_client.engine import NO_LIMIT
from baft_client.recorder import Recorder
from baftd.pipeline.events import EventKind

__all__ = ["NO_LIMIT", "Anchor", "Gate", "Windows", "from_outside"]

MOST = 1 << 16
"""Windows that a period may have; what comes beyond is none."""
_WINDOW = EventKind.WINDOW
_python_threads: Mapping[int, threading.Thread] = threading._active  # type: ignore[attr-defined]


class Gate(Protocol):
    """The part of `CopyEngine` that windows need. Harmless from any thread, and where nothing is armed."""

    def open_window(self, budget: int = ...) -> None:
        """Copy up to `budget` bytes. Counts windows from 0 on, like the period."""

    def close_window(self, outside: int = ...) -> None:
        """Stop within 256 KiB; with `outside` go on at that many bytes a second."""


class Anchor(Protocol):
    """The part of `DeviceCopier` that windows need."""

    def anchor(self, ordinal: int, budget: int) -> None:
        """Copy up to `budget` bytes behind the operation that was launched last. Does not wait; raises nothing."""

    def passed(self, ordinal: int) -> None:
        """What the host waited for in that window has been launched: the device's gap ends behind it."""


class Windows:
    """The windows of one rank. Adapters and loops use the methods down to `waiting`, the session those below."""

    __slots__ = (
        "_add", "_began", "_budget", "_budgets", "_depth", "_device", "_further", "_gate", "_granted", "_home",
        "_kind", "_most", "_now", "_outside", "_owner", "passed_over", "sources", "timed_from",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, *, now: Callable[[], int] = time.monotonic_ns) -> None:
        """`recorder` gets a WINDOW event for each; `now` gives ns of CLOCK_MONOTONIC."""
        self.sources: tuple[str, ...] = ()
        """Who says that it opens windows."""
        self.passed_over = 0
        """Waits in threads that do not train."""
        self.timed_from = -1
        """Number of the first clock-anchored window of this period; -1: there is none."""
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
        self._most = 0
        """Windows that this period may have: none before the first boundary and from the fence on."""
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
        if me != self._home and not from_outside():
            self.passed_over += 1
            return
        ordinal = len(self._granted)
        if ordinal >= self._most:
            return
        gate, device = self._gate, self._device
        budget = 0
        if gate is not None or device is not None:
            budget = self._budgets[ordinal] if ordinal < len(self._budgets) else self._further
        self._owner = me
        self._depth = 1
        self._kind = kind
        self._budget = budget
        self._granted.append(budget)
        self._began = self._now()
        if gate is not None:
            gate.open_window(budget)
        if device is not None:
            device.anchor(ordinal, budget)

    def leave(self) -> None:
        """The wait is over. The engine stops within 256 KiB. Does nothing where this thread has no window open."""
        if self._owner != get_ident():
            return
        if self._depth > 1:
            self._depth -= 1
        else:
            self._close()

    def _close(self) -> None:
        gate, device = self._gate, self._device
        if gate is not None:
            gate.close_window(self._outside)
        if device is not None:
            device.passed(len(self._granted) - 1)
        self._owner = 0
        self._add(_WINDOW, self._kind, len(self._granted) - 1, self._began, self._now(), self._budget)

    @contextmanager
    def waiting(self, kind: EventKind) -> Iterator[None]:
        """`enter` and `leave` around a wait."""
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

    # ------------------------------------------------------------ for the session

    def begin(self, budgets: Sequence[int], further: int, outside: int) -> None:
        """A period begins, in the thread that trains.

        Args:
            budgets: most bytes for each window of the period, in the order in which they are opened.
            further: the same for each beyond those.
            outside: bytes a second outside of windows; 0: none.
        """
        self._home = get_ident()
        self._granted = []
        self.timed_from = -1
        self._most = MOST
        self._budgets, self._further, self._outside = budgets, further, outside

    def arm(self, gate: Gate | None, device: Anchor | None) -> None:
        """There is something to copy, and windows carry it."""
        self._device = device
        self._gate = gate

    def timed(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Count clock-anchored windows (begin, end, bytes) among the period's."""
        self.timed_from = len(self._granted)
        for number, (begin, end, budget) in enumerate(spans, self.timed_from):
            self._granted.append(budget)
            self._add(_WINDOW, EventKind.SCHEDULE, number, begin, end, budget)

    def end(self) -> list[int]:
        """The fence, or the boundary: what was to be copied is about to change. A window that is still open ends, and
        no other is opened before `begin`. Returns the budgets of the period's windows."""
        self._most = 0
        self.disarm()
        return self._granted

    def disarm(self) -> None:
        """There is nothing (left) to copy; windows are only counted."""
        if self._owner:
            self._close()
        self._gate = self._device = None

    def forget(self) -> None:
        """In a forked child: the engine is the parent's, and nothing may touch its words. Takes no lock."""
        self._gate = self._device = None
        self._owner = self._most = 0


def from_outside() -> bool:
    """Whether the calling thread is one that Python did not start.

    Not by `threading.current_thread()`: it would make a thread object for each of those, to stay for ever."""
    known = _python_threads.get(get_ident())
    return known is None or isinstance(known, threading._DummyThread)
