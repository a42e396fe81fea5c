"""The fallback copy engine: a Python thread, for where the C extension is missing.

It keeps every promise of `CopyEngine`, more slowly: between two blocks the thread needs the GIL, which a trainer
busy in Python hands over after 5 ms only (a copy of 256 MiB then takes seconds instead of 30 ms). Each block is
copied by `memmove` and digested by python-xxhash, both without the GIL. Its progress goes by message only: the
control page is left alone, but for a test that holds it at a chunk boundary.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from baft_client.engine import (
    CHUNK,
    NO_LIMIT,
    EngineHooks,
    EngineState,
    Segment,
    SegmentTable,
    check_addresses,
    check_timed,
    pack_segments,
)
from baftd.errors import UsageError
from baftd.memory.control import ControlPage

__all__ = ["PythonEngine", "PythonTable", "digest_chunks"]

BLOCK = 1 << 20
"""Bytes between two looks at the gate."""
_SAMPLES = 16


def _memory(address: int, nbytes: int) -> memoryview:
    """The bytes at `address`."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def digest_chunks(address: int, nbytes: int, *, threads: int = 1) -> bytes:
    """xxh3-128 of every chunk of a range, 16 bytes each."""

    def one(at: int) -> bytes:
        digest: bytes = xxhash.xxh3_128_digest(_memory(address + at, min(CHUNK, nbytes - at)))
        return digest

    if threads < 2 or nbytes <= CHUNK:
        return b"".join(one(at) for at in range(0, nbytes, CHUNK))
    with ThreadPoolExecutor(threads) as pool:
        return b"".join(pool.map(one, range(0, nbytes, CHUNK)))


class PythonTable:
    """Segments as numpy rows (source, offset, nbytes, itemsize)."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.rows = pack_segments(segments)
        self.count = len(segments)
        self.total = int(self.rows[:, 2].sum())
        self.extent = int((self.rows[:, 1] + self.rows[:, 2]).max(initial=0))
        self.order = [
            (index, at, min(CHUNK, s.nbytes - at))
            for index, s in enumerate(segments)
            for at in range(0, s.nbytes, CHUNK)
        ]
        """Chunks: (segment, first byte in it, length)."""
        self.users = 0
        self._samples: list[npt.NDArray[np.uint8]] | None = None
        self._picks = [_pick(s.nbytes // s.itemsize) for s in segments]

    @property
    def chunks(self) -> int:
        """Number of digests."""
        return len(self.order)

    def update(self, addresses: npt.NDArray[np.uint64]) -> None:
        """New source addresses; UsageError while a copy of the table runs."""
        addresses = check_addresses(addresses, self.count)
        if self.users:
            raise UsageError("the sources of a segment table cannot change now: a copy of it runs.")
        if not np.array_equal(self.rows[:, 0], addresses):
            self.rows[:, 0] = addresses
            self._samples = None

    def samples(self) -> Iterator[bytes]:
        """The sampled elements of each segment."""
        if self._samples is None:
            self._samples = [
                np.frombuffer(_memory(int(source), int(nbytes)), dtype=np.uint8).reshape(-1, int(itemsize))
                if nbytes
                else np.empty((0, 1), dtype=np.uint8)
                for source, _, nbytes, itemsize in self.rows
            ]
        for elements, pick in zip(self._samples, self._picks, strict=True):
            yield elements[pick].tobytes()


def _pick(elements: int) -> npt.NDArray[np.intp]:
    """Indices of up to 16 elements, evenly spread, first and last included."""
    m = min(elements, _SAMPLES)
    if elements <= _SAMPLES:
        return np.arange(m, dtype=np.intp)
    return np.array([k * (elements - 1) // (_SAMPLES - 1) for k in range(_SAMPLES)], dtype=np.intp)


def _python(table: SegmentTable) -> PythonTable:
    if not isinstance(table, PythonTable):
        raise UsageError(f"a {type(table).__name__} is not for the Python engine; use its own prepare().")
    return table


class PythonEngine:
    """`CopyEngine` on a Python thread. Its methods are described there.

    Whoever copies a block holds `_turn` meanwhile; `_changed` guards everything else. `_turn` may be taken while
    `_changed` is not held, never the other way round for long: whoever holds it copies one block.
    """

    name: Literal["native", "python"] = "python"
    digests: bool = True

    def __init__(self, control: ControlPage | None, *, hooks: EngineHooks | None = None) -> None:
        self._hooks = hooks or EngineHooks()
        self._control = control
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._open = self._flushing = self._quit = self._paused = self._held = self._copying = False
        self._pace = 0
        self._not_before = 0.0
        self._table: PythonTable | None = None
        self._destination = 0
        self._chunk = self._at = self._copied = 0
        self._hash: Any = None
        self._digests: list[bytes] = []
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._changed), name="baft-copy", daemon=True
        )
        self._thread.start()
        _install_fork_handlers()
        _living.add(self)

    # ------------------------------------------------------------------ control

    @property
    def _absent(self) -> bool:
        return self._quit or os.getpid() != self._pid

    @property
    def _left(self) -> bool:
        return self._table is not None and self._chunk < self._table.chunks

    @property
    def state(self) -> EngineState:
        """What it does now."""
        if self._absent:
            return EngineState.ABSENT
        if self._table is None:
            return EngineState.IDLE
        if not self._left:
            return EngineState.DONE
        if self._paused:
            return EngineState.PAUSED
        if self._copying:
            return EngineState.COPYING
        return EngineState.HELD if self._held else EngineState.WAITING

    @property
    def busy(self) -> bool:
        """A thread is inside a block."""
        return self._copying

    def prepare(self, segments: Sequence[Segment]) -> PythonTable:
        """A table of numpy rows."""
        return PythonTable(segments)

    def start(self, destination: int, capacity: int, table: SegmentTable) -> None:
        """Arm a copy."""
        mine = _python(table)
        if self._absent or self._left:
            raise UsageError(f"the copy engine ({self.state.name}) cannot start: it is stopped or has a copy left.")
        if mine.extent > capacity:
            raise UsageError(f"the segments end at byte {mine.extent}, the destination at {capacity}.")
        with self._changed:
            self._table, self._destination = mine, destination
            self._chunk = self._at = self._copied = 0
            self._digests = []
            self._held = False
            mine.users += bool(mine.chunks)
            if self._hooks.hold and self._control is not None:
                self._publish(self.state)
                self._control.set("copies", self._control.get("copies") + 1)
            self._changed.notify_all()

    def open(self) -> None:
        """Open the gate."""
        self._set_gate(True)

    def open_window(self, budget: int = NO_LIMIT) -> None:
        """Begin a window."""
        self._set_gate(True)

    def close_window(self, outside: int = 0) -> None:
        """End it."""
        self._set_gate(False)

    def timed(self, windows: Sequence[tuple[int, int, int]]) -> None:
        """Windows by the clock."""
        check_timed(windows)

    def _set_gate(self, value: bool) -> None:
        if not self._absent:
            with self._changed:
                self._open = value
                self._changed.notify_all()

    def set_pace(self, bytes_per_second: int) -> None:
        """Limit the speed in windows."""
        if not self._absent:
            with self._changed:
                self._pace, self._not_before = bytes_per_second, 0.0
                self._changed.notify_all()

    def flush(self, deadline: float) -> bool:
        """Copy the rest in the calling thread: the engine's would have to fight for the GIL."""
        if self._absent:
            return False
        table, until = self._table, time.monotonic() + deadline
        with self._changed:
            self._open = False
            self._flushing = True
        try:
            while self._left and self._table is table:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                if self._paused or not self._step(throttle_only=True):
                    with self._changed:
                        self._changed.wait(min(left, self._wait_time(0.001)))
            return self._table is table
        finally:
            with self._changed:
                self._flushing = False
                self._changed.notify_all()

    def cancel(self) -> None:
        """Give the copy up."""
        if self._absent:
            return
        with self._changed:
            table, left = self._table, self._left
            self._table = None
            self._open = False
            self._changed.notify_all()
        with self._turn:  # a block that was under way is over now, and nobody begins another
            if table is not None and left and table.users:
                table.users -= 1

    def progress(self) -> int:
        """Bytes in the slot."""
        return self._copied if self._table is not None and not self._absent else 0

    def copied(self) -> tuple[int, int, int]:
        """Bytes inside, outside, in flush."""
        return 0, self._copied, 0

    def spans(self) -> bytes:
        """When it was copying."""
        return b""

    @property
    def spans_lost(self) -> int:
        """Spans without room."""
        return 0

    def digests_of(self) -> bytes:
        """Digests of the finished copy."""
        if self._table is None or self._left or self._absent:
            raise UsageError("no digests: the copy is not done.")
        return b"".join(self._digests)

    def canary(self, table: SegmentTable) -> bytes:
        """8 bytes for each segment."""
        return b"".join(xxhash.xxh3_64_digest(sample) for sample in _python(table).samples())

    def compare(self, table: SegmentTable, destination: int) -> tuple[int, int] | None:
        """First (segment, byte) that differs."""
        mine = _python(table)
        for index, begin, length in mine.order:
            source, offset = int(mine.rows[index, 0]), int(mine.rows[index, 1])
            one = np.frombuffer(_memory(source + begin, length), dtype=np.uint8)
            other = np.frombuffer(_memory(destination + offset + begin, length), dtype=np.uint8)
            if not np.array_equal(one, other):
                return index, begin + int(np.argmax(one != other))
        return None

    def copy_digest(self, source: int, destination: int, nbytes: int, *, threads: int = 1) -> bytes:
        """Copy now."""
        ctypes.memmove(destination, source, nbytes)
        return digest_chunks(source, nbytes, threads=threads)

    def digest(self, address: int, nbytes: int, *, threads: int = 1) -> bytes:
        """Digest now."""
        return digest_chunks(address, nbytes, threads=threads)

    def stop(self) -> None:
        """End and join the thread."""
        if self._absent:
            return
        self.cancel()
        with self._changed:
            self._quit = True
            self._changed.notify_all()
        self._thread.join()
        self._publish(EngineState.ABSENT)

    # ------------------------------------------------------------------ copying

    def _wait_time(self, least: float) -> float:
        return max(least, min(self._not_before - time.monotonic(), 1.0))

    def _publish(self, state: EngineState) -> None:
        if self._hooks.hold and self._control is not None and not self._control.closed:
            self._control.set("bytes_copied", self._copied)
            self._control.set("chunks_done", self._chunk)
            self._control.set("engine", state)

    def _may_copy(self) -> bool:
        return self._left and not self._paused and not self._quit and (self._open or self._flushing)

    def _step(self, *, throttle_only: bool) -> bool:
        """Copy one block if that is allowed now; False: it is not (gate, pace, hook, fork)."""
        with self._turn:
            with self._changed:
                table = self._table
                if table is None or not self._may_copy():
                    return False
                if self._hooks.hold and self._at == 0 and self._control is not None:
                    self._held = self._chunk >= self._control.get("hold_at")
                    if self._held:
                        self._publish(EngineState.HELD)
                        return False
                paces = [p for p in (self._hooks.throttle, 0 if throttle_only else self._pace) if p]
                now = time.monotonic()
                if paces and now < self._not_before:
                    return False
                segment, begin, length = table.order[self._chunk]
                source, offset = int(table.rows[segment, 0]), int(table.rows[segment, 1])
                at = self._at
                n = min(BLOCK, length - at)
                if paces:
                    n = min(n, 256 << 10)  # smoother
                    self._not_before = max(self._not_before, now - 0.01) + n / min(paces)
                if at == 0:
                    self._hash = xxhash.xxh3_128()
                self._copying = True
            place = begin + at
            self._hash.update(_memory(source + place, n))
            ctypes.memmove(self._destination + offset + place, source + place, n)
            with self._changed:
                self._copying = False
                if self._table is not table:
                    return True  # cancelled meanwhile
                self._at += n
                self._copied += n
                if self._at == length:
                    self._digests.append(self._hash.digest())
                    self._at = 0
                    self._chunk += 1
                    if not self._left:
                        table.users -= 1
                        self._changed.notify_all()
                self._publish(self.state)
            return True


_living: weakref.WeakSet[PythonEngine] = weakref.WeakSet()


def _run(reference: weakref.ref[PythonEngine], changed: threading.Condition) -> None:
    """The thread: holds no reference while it sleeps, so that a forgotten engine can end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        engine = reference()
        if engine is None or engine._quit:
            return
        mine = not engine._flushing and engine._step(throttle_only=False)
        with changed:
            sleep = None
            if not mine:
                if engine._flushing or not engine._may_copy():
                    sleep = 1.0  # whatever ends this state notifies
                else:
                    sleep = engine._wait_time(0.001)
            del engine
            if sleep is not None:
                changed.wait(sleep)


def _pause_all() -> None:
    for engine in list(_living):
        engine._paused = True
    for engine in list(_living):
        # Within a block the thread holds `_turn`; a fork does not wait longer than that, nor for ever.
        if engine._turn.acquire(timeout=2.0):
            engine._turn.release()


def _go_on() -> None:
    for engine in list(_living):
        engine._paused = False
        with engine._changed:
            engine._changed.notify_all()


_installed = False


def _install_fork_handlers() -> None:
    global _installed
    if not _installed:
        _installed = True
        os.register_at_fork(before=_pause_all, after_in_parent=_go_on)
