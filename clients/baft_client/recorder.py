"""Events of a step, put down as they happen: 32 bytes each, in memory that was there before.

    recorder.add(EventKind.FORWARD, stage, micro, begin, end)

An adapter calls it some hundred times a step from inside the user's loop, so it takes no lock, makes no object that
stays, and raises nothing: an event for which there is no room is counted as lost.
"""

from __future__ import annotations

import struct

from baftd.pipeline.events import EVENT_BYTES, EventKind, pack_event_into

__all__ = ["ROOM", "Recorder"]

ROOM = 8192
"""Events that the period between two boundaries has room for."""


class Recorder:
    """Collects the events of the period between two boundaries.

    `add` may be called from any thread (hooks of a backward pass run in threads of the framework): each event has a
    place of its own. One that another thread is writing while the batch is taken is missing there.
    """

    __slots__ = ("_buffer", "_next", "_room", "lost")

    def __init__(self, room: int = ROOM) -> None:
        """`room`: events between two boundaries."""
        self._room = room
        self._buffer = bytearray(room * EVENT_BYTES)
        self._next = iter(range(0, room * EVENT_BYTES, EVENT_BYTES)).__next__
        self.lost = 0
        """Events of this period that there was no room for, or that are none (a time before 0)."""

    def add(self, kind: EventKind, stage: int, micro: int, begin: int, end: int, amount: int = 0) -> None:
        """Put an event down. Fields as in `baftd.pipeline.events`; times are ns of CLOCK_MONOTONIC."""
        try:
            place = self._next()
        except StopIteration:
            self.lost += 1
            return
        try:
            pack_event_into(self._buffer, place, kind, stage, micro, begin, end, amount)
        except struct.error:
            self._buffer[place : place + EVENT_BYTES] = bytes(EVENT_BYTES)
            self.lost += 1

    def take(self) -> tuple[bytes, int]:
        """The records of the period that ends now, and how many events were lost. The next period begins."""
        end = self._room * EVENT_BYTES
        try:
            used = self._next()
        except StopIteration:
            used = end
        batch, lost = bytes(memoryview(self._buffer)[:used]), self.lost
        self._buffer[:used] = bytes(used)
        self._next = iter(range(0, end, EVENT_BYTES)).__next__
        self.lost = 0
        return batch, lost
