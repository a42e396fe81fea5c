"""The copy engine: carries a rank's tensors into its slot beside the training thread.

    table = engine.prepare(segments)              once for each layout
    engine.start(address, capacity, table)        at a boundary: arms the copy, returns at once
    engine.open_window(budget)                    a window: at most so many bytes, as fast as they go
    engine.close_window(outside)                  its end: nothing, or that many bytes a second, until the next
    engine.timed(windows)                         or windows by the clock, which nobody has to open
    engine.open()                                 or all the time, where no windows are known
    engine.flush(deadline)                        at the fence: the rest, at full speed
    engine.digests_of()                           16 bytes for each chunk, for `Seal`
    engine.copied(), engine.spans()               what was copied where, and when
    engine.cancel()                               instead: no source is touched after it returns

Two implementations of one interface, load_engine.py picks: native_engine.py (one pthread, no GIL, from the
extension `baft_client._engine`) and python_engine.py (a Python thread, the fallback).

The caller holds every source storage from `start` until `flush` has returned True or `cancel` has returned.
Addresses are plain integers; an engine trusts them as a C program would.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from baftd.checkpoint.shard import CHUNK
from baftd.errors import UsageError

__all__ = [
    "CHUNK",
    "NO_LIMIT",
    "SPANS",
    "CopyEngine",
    "EngineHooks",
    "EngineState",
    "Segment",
    "SegmentTable",
    "check_addresses",
    "check_timed",
    "copy_verify",
    "first_difference",
    "pack_segments",
]

NO_LIMIT = (1 << 64) - 1
"""Budget of a window that may take all there is."""
SPANS = 1024
"""Spans that an engine keeps for `spans()`; what comes beyond is counted and lost."""


@dataclass(frozen=True)
class Segment:
    """A contiguous range of source bytes and its place in the image."""

    source: int
    """Address of the first byte."""
    offset: int
    """Of the destination, in bytes from the destination address given to `start`."""
    nbytes: int
    itemsize: int = 1
    """Bytes of one element: the canary samples whole elements."""


class EngineState(enum.IntEnum):
    """What the engine does now (also a word of the control page)."""

    IDLE = 0
    """Nothing armed."""
    WAITING = 1
    """Armed; the gate is closed, the window's budget is used up, or the pace makes it wait."""
    COPYING = 2
    DONE = 3
    """All bytes of the armed table are in the slot."""
    PAUSED = 4
    """Stopped for a fork of this process."""
    HELD = 5
    """Stopped at a chunk boundary by a test's hook."""
    ABSENT = 6
    """No thread: stopped, or this is a forked child."""


@dataclass(frozen=True)
class EngineHooks:
    """What a test may inject by constructor argument; no setting can name it.

    With either, the calling thread does not help in `flush`, so that chunks are copied in order.
    """

    throttle: int = 0
    """Bytes a second at most, in `flush` too; 0: unlimited."""
    hold: bool = False
    """Stop before chunk number `ControlPage.hold_at` until that field is raised (state HELD)."""


class SegmentTable(Protocol):
    """Segments prepared for an engine, reusable at every step."""

    @property
    def count(self) -> int:
        """Number of segments."""

    @property
    def total(self) -> int:
        """Bytes of all segments."""

    @property
    def chunks(self) -> int:
        """Number of digests: each segment has ceil(nbytes / CHUNK), an empty one none."""

    def update(self, addresses: npt.NDArray[np.uint64]) -> None:
        """Set the source address of every segment (uint64, shape (count,)); UsageError while a copy of it runs."""


class CopyEngine(Protocol):
    """What a session may ask of an engine. Not for several threads at once, except `cancel` and the properties."""

    name: Literal["native", "python"]
    digests: bool
    """False: it copies without digests (`digests_of` is empty) and the daemon digests."""

    @property
    def state(self) -> EngineState:
        """What it does now; ABSENT after `stop` and in a forked child."""

    @property
    def busy(self) -> bool:
        """A thread is inside a block at this moment: after closing, whether the window still has its effect."""

    def prepare(self, segments: Sequence[Segment]) -> SegmentTable:
        """A table for `start`, `canary` and `compare`. UsageError for overlapping destinations or bad sizes."""

    def start(self, destination: int, capacity: int, table: SegmentTable) -> None:
        """Arm a copy of `table` to address `destination` (of `capacity` writable bytes) and return at once.

        The gate is left as it is. UsageError if a copy is unfinished, the table does not fit, or the engine is ABSENT.
        """

    def open(self) -> None:
        """Open the gate for all the time, not as a window: the armed copy runs, at the pace set."""

    def open_window(self, budget: int = NO_LIMIT) -> None:
        """Begin a window: the armed copy runs at full speed until `budget` bytes of it are copied in this window.

        Returns at once. A budget is never exceeded; less than 4 KiB of it may stay unused, since blocks are not cut
        finer. Windows are numbered from 0 from `start` on, also those with nothing to copy and those with budget 0
        (which wake nobody). A window that is open already ends.
        """

    def close_window(self, outside: int = 0) -> None:
        """Close the gate, or go on at `outside` bytes a second until the next window. Returns at once.

        The thread stops (or takes up that pace) within 256 KiB; after `open` the Python engine within 1 MiB. Windows of
        `timed` stay in force.
        """

    def timed(self, windows: Sequence[tuple[int, int, int]]) -> None:
        """Windows by the clock for the armed copy: (begin, end, bytes), times in ns of CLOCK_MONOTONIC.

        The copying thread carries them out by itself, whatever the gate says; a window of `open_window` goes first
        while it has bytes left. `start`, `flush` and `cancel` end them; a second call replaces them. Ignored
        while no copy is armed. UsageError when they overlap, are not in order of time, or end before they begin.
        """

    def set_pace(self, bytes_per_second: int) -> None:
        """Copy at most this fast after `open`; 0: full speed (the beginning). Windows and `flush` ignore it."""

    def flush(self, deadline: float) -> bool:
        """Copy the rest at full speed, whatever gate and pace say; the GIL is released.

        True: every byte is in the slot; the gate is closed. False: `deadline` seconds passed (the gate is closed,
        the copy still armed), the copy was cancelled meanwhile, or the engine is ABSENT. True at once when
        nothing is armed or left.
        """

    def cancel(self) -> None:
        """Give the armed copy up and close the gate. No source or slot byte is touched after it returned."""

    def progress(self) -> int:
        """Bytes of the armed copy that are in the slot."""

    def copied(self) -> tuple[int, int, int]:
        """Bytes of the newest copy that were copied in windows, outside of them, and in `flush`.

        They stay after the copy is done or cancelled; `start` sets them to 0.
        """

    def spans(self) -> bytes:
        """When it was copying, since the last call: records of `baftd.pipeline.events`, by time of their beginning.

        Kind COPY_INSIDE, COPY_OUTSIDE or COPY_FENCE; stage -1; micro the number of the window, of one of `timed`
        -2 - its index there, else -1; amount in bytes. A span ends where the window does, after 5 ms without a block,
        and after 20 ms where a pace holds it. Who sees that a copy is DONE finds all spans of it. Those of `flush`
        overlap: two threads copy then.
        """

    @property
    def spans_lost(self) -> int:
        """Spans for which there was no room (`SPANS`), since the engine began."""

    def digests_of(self) -> bytes:
        """16 bytes (xxh3-128) for each chunk in order of the segments; UsageError before the copy is done."""

    def canary(self, table: SegmentTable) -> bytes:
        """A record of equal size for each segment, made of up to 16 elements of it, first and last included."""

    def compare(self, table: SegmentTable, destination: int) -> tuple[int, int] | None:
        """First (segment, byte in it) whose source differs from the copy at `destination`; None: all equal."""

    def copy_digest(self, source: int, destination: int, nbytes: int, *, threads: int = 1) -> bytes:
        """Copy now, in the calling thread, and return the chunks' digests (16 bytes each)."""

    def digest(self, address: int, nbytes: int, *, threads: int = 1) -> bytes:
        """Digests of the chunks of a range (16 bytes each)."""

    def stop(self) -> None:
        """Cancel, end the thread and join it. Done by itself before the interpreter exits."""


def pack_segments(segments: Sequence[Segment]) -> npt.NDArray[np.uint64]:
    """Segments as rows (source, offset, nbytes, itemsize), checked: what both engines prepare tables from."""
    rows = np.array([(s.source, s.offset, s.nbytes, s.itemsize) for s in segments], dtype=np.uint64).reshape(
        len(segments), 4
    )
    for index, s in enumerate(segments):
        if s.itemsize < 1 or s.nbytes % s.itemsize:
            raise UsageError(f"segment {index}: {s.nbytes} bytes are no whole number of {s.itemsize}-byte elements.")
        if s.source == 0 and s.nbytes:
            raise UsageError(f"segment {index}: {s.nbytes} bytes at address 0.")
    filled = rows[rows[:, 2] > 0]
    order = np.argsort(filled[:, 1], kind="stable")
    begins, ends = filled[order, 1], filled[order, 1] + filled[order, 2]
    if (ends < begins).any() or (ends[:-1] > begins[1:]).any():
        raise UsageError("two segments have overlapping places in the image.")
    return rows


def check_timed(windows: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.uint64]:
    """Windows by the clock as rows (begin, end, bytes) of uint64, else UsageError."""
    try:
        flat = array("Q", (value for begin, end, nbytes in windows for value in (begin, end, nbytes)))
    except (OverflowError, ValueError, TypeError) as error:
        raise UsageError(f"windows by the clock are (begin, end, bytes), whole numbers from 0: {error}.") from error
    rows = np.frombuffer(flat, dtype=np.uint64).reshape(-1, 3)
    wrong = rows[:, 1] <= rows[:, 0]
    wrong[1:] |= rows[1:, 0] < rows[:-1, 1]
    if wrong.any():
        index = int(np.argmax(wrong))
        raise UsageError(f"window {index} by the clock ends before it begins, or begins within the one before it.")
    return rows


def check_addresses(addresses: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint64]:
    """`addresses` as a contiguous uint64 array of `count`, else UsageError."""
    if addresses.dtype != np.uint64 or addresses.shape != (count,):
        raise UsageError(f"addresses are {addresses.dtype}{addresses.shape}, not uint64({count},).")
    return np.ascontiguousarray(addresses)


def first_difference(before: bytes, after: bytes, count: int) -> int:
    """Index of the first segment whose canary differs; -1: none. `count` is the number of segments."""
    if before == after:
        return -1
    if len(before) != len(after) or count < 1:
        return 0
    a = np.frombuffer(before, dtype=np.uint8).reshape(count, -1)
    b = np.frombuffer(after, dtype=np.uint8).reshape(count, -1)
    return int(np.nonzero((a != b).any(axis=1))[0][0])


def copy_verify(
    engine: CopyEngine, source: int, destination: int, nbytes: int, digests: bytes, *, threads: int = 1
) -> int:
    """Copy a range (restore: slot to tensor) and compare with its chunks' digests.

    Returns the index of the first chunk that is not what its digest says, -1 if all are. The bytes are in
    `destination` either way.
    """
    found = engine.copy_digest(source, destination, nbytes, threads=threads)
    if found == digests:
        return -1
    if len(found) != len(digests):
        raise UsageError(f"{len(digests) // 16} digests for {len(found) // 16} chunks.")
    return next(i for i in range(len(found) // 16) if found[16 * i : 16 * i + 16] != digests[16 * i : 16 * i + 16])
