"""The copy engine: carries a rank's tensors into its slot beside the training thread.

    table = engine.prepare(segments)              once for each layout
    engine.start(address, capacity, table)        at a boundary: arms the copy, returns at once
    engine.open() / engine.close_window()         the gate; closing takes effect within 256 KiB
    engine.flush(deadline)                        at the fence: the rest, at full speed
    engine.digests_of()                           16 bytes for each chunk, for `Seal`
    engine.cancel()                               instead: no source is touched after it returns

Two implementations of one interface, `load_engine` picks: native_engine.py (one pthread, no GIL, from the
extension `baft_client._engine`) and python_engine.py (a Python thread, the fallback).

The caller holds every source storage from `start` until `flush` has returned True or `cancel` has returned.
Addresses are plain integers; an engine trusts them as a C program would.
"""

from __future__ import annotations

import atexit
import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from baftd.checkpoint.shard import CHUNK
from baftd.errors import UsageError
from baftd.memory.control import ControlPage
from baftd.telemetry.log import get_logger

__all__ = [
    "CHUNK",
    "CopyEngine",
    "EngineHooks",
    "EngineState",
    "Segment",
    "SegmentTable",
    "check_addresses",
    "copy_verify",
    "first_difference",
    "load_engine",
    "pack_segments",
]

_log = get_logger("client")


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

        True: every byte is in the slot; the gate is closed. False: `deadline` seconds passed (the gate is closed,
        the copy still armed), the copy was cancelled meanwhile, or the engine is ABSENT. True at once when
        nothing is armed or left.
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


_said_python = False


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
    global _said_python
    from baft_client import native_engine
    from baft_client.python_engine import PythonEngine

    if prefer not in ("auto", "native", "python"):
        raise UsageError(f"no such engine: {prefer!r}.", hint="Set engine to auto, native or python.")
    if prefer == "native" and not native_engine.AVAILABLE:
        raise UsageError(
            f"the native copy engine was not built: {native_engine.WHY_NOT}.",
            hint="Install a C compiler and libxxhash-dev and install baftd again, or set engine to auto.",
        )
    if hooks is not None and hooks.hold and control is None:
        raise UsageError("EngineHooks(hold=True) needs a control page: its hold_at says where to stop.")
    engine: CopyEngine
    if native_engine.AVAILABLE and prefer != "python":
        engine = native_engine.NativeEngine(control, nice=nice, hooks=hooks)
    else:
        if prefer == "auto" and not _said_python:
            _said_python = True
            _log.warning(
                "python_engine",
                why=native_engine.WHY_NOT,
                note="copies in a Python thread, slowly while the trainer computes in Python",
                next="install a C compiler and libxxhash-dev, then install baftd again",
            )
        engine = PythonEngine(control, hooks=hooks)
    _engines.add(engine)
    return engine


_engines: weakref.WeakSet[CopyEngine] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Join every copying thread while the tensors it reads still exist."""
    for engine in list(_engines):
        engine.stop()
