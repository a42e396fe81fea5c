"""The copy engine: carries a rank's tensors into its slot beside the training thread.

    table = engine.prepare(segments)              once for each layout
    engine.start(address, capacity, table)        at a boundary: arms the copy, returns at once
    engine.open() / engine.close_window()         the gate; closing takes effect within 256 KiB
    engine.flush(deadline)                        at the fence: the rest, at full speed
    engine.digests_of()                           16 bytes for each chunk, for `Seal`
    engine.cancel()                               instead: no source is touched after it returns

Two implementations of one interface, `load_engine` picks: `NativeEngine` (here; one pthread, no GIL, from
the extension `baft_client._engine`) and `PythonEngine` (python_engine.py; a Python thread, the fallback).

The caller holds every source storage from `start` until `flush` has returned True or `cancel` has returned.
Addresses are plain integers; an engine trusts them as a C program would.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from baftd.memory.control import ControlPage

__all__ = [
    "CHUNK",
    "CopyEngine",
    "EngineHooks",
    "EngineState",
    "Segment",
    "SegmentTable",
    "load_engine",
]

CHUNK = 4 << 20
"""Bytes covered by one digest, at most; equal to `baftd.checkpoint.shard.CHUNK`."""


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
    """Armed; the gate is closed, or the pace makes it wait."""
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

    def prepare(self, segments: Sequence[Segment]) -> SegmentTable:
        """A table for `start`, `canary` and `compare`. UsageError for overlapping destinations or bad sizes."""

    def start(self, destination: int, capacity: int, table: SegmentTable) -> None:
        """Arm a copy of `table` to address `destination` (of `capacity` writable bytes) and return at once.

        The gate is left as it is. UsageError if a copy is unfinished, the table does not fit, or the engine is ABSENT.
        """

    def open(self) -> None:
        """Open the gate: the armed copy runs, at the pace set."""

    def close_window(self) -> None:
        """Close the gate. Returns at once; the thread stops within 256 KiB."""

    def set_pace(self, bytes_per_second: int) -> None:
        """Copy at most this fast while the gate is open; 0: full speed (the beginning). `flush` ignores it."""

    def flush(self, deadline: float) -> bool:
        """Copy the rest at full speed, whatever gate and pace say; the GIL is released.

        True: every byte is in the slot; the gate is closed. False: `deadline` seconds passed or the copy was
        cancelled; the gate is closed, the copy still armed. True at once when nothing is armed or left.
        """

    def cancel(self) -> None:
        """Give the armed copy up and close the gate. No source or slot byte is touched after it returned."""

    def progress(self) -> int:
        """Bytes of the armed copy that are in the slot."""

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


def first_difference(before: bytes, after: bytes, count: int) -> int:
    """Index of the first segment whose canary differs; -1: none. `count` is the number of segments."""
    if before == after:
        return -1
    if len(before) != len(after) or count < 1:
        return 0
    a = np.frombuffer(before, dtype=np.uint8).reshape(count, -1)
    b = np.frombuffer(after, dtype=np.uint8).reshape(count, -1)
    return int(np.nonzero((a != b).any(axis=1))[0][0])


def load_engine(
    control: ControlPage | None,
    *,
    prefer: Literal["auto", "native", "python"] = "auto",
    nice: int = 0,
    hooks: EngineHooks | None = None,
) -> CopyEngine:
    """Start an engine gated by `control` (None: by a private page).

    "auto" takes the native one where the extension was built, else the Python one, which says so once;
    "native" raises UsageError where it was not built. `nice` is added to the thread's niceness (native only).
    """
    raise NotImplementedError
