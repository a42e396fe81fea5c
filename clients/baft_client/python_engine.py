"""The fallback copy engine: a Python thread, for where the C extension is missing.

It keeps every promise of `CopyEngine`, more slowly: between two blocks the thread needs the GIL, which a trainer
busy in Python hands over after 5 ms only (a copy of 256 MiB then takes seconds instead of 30 ms). Each block is
copied by `memmove` and digested by python-xxhash, both without the GIL; what may be copied when is in
python_windows.py. Its progress goes by message only: the
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
from baft_client.python_windows import BLOCK, Grant, Grants, Spans
from baftd.errors import UsageError
from baftd.memory.control import ControlPage, Gate
from baftd.pipeline.events import EventKind

__all__ = ["PythonEngine", "PythonTable", "digest_chunks"]

_FLUSHED = 1 << 20
"""Bytes of a block in `flush`."""
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
        self._flushing = self._quit = self._paused = self._held = self._copying = False
        self._grants = Grants()
        self._spans = Spans()
        self._not_before = self._pace = self._copies = 0
        self._changes = 0
        """Counts what the thread must look at again, so that it does not sleep over one."""
        self._unpaced = False
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
            self._copies += 1
            self._grants.arm()
            mine.users += bool(mine.chunks)
            if self._hooks.hold and self._control is not None:
                self._publish(self.state)
                self._control.set("copies", self._control.get("copies") + 1)
            self._notify()

    def open(self) -> None:
        """Open the gate."""
        if not self._absent:
            with self._changed:
                self._grants.mode = Gate.OPEN
                self._notify()

    def open_window(self, budget: int = NO_LIMIT) -> None:
        """Begin a window."""
        if not self._absent:
            with self._changed:
                self._grants.open_window(budget)
                if budget and self._left:
                    self._notify()

    def close_window(self, outside: int = 0) -> None:
        """End it."""
        if not self._absent:
            with self._changed:
                self._grants.close_window(outside)
                if outside and self._left:
                    self._notify()

    def timed(self, windows: Sequence[tuple[int, int, int]]) -> None:
        """Windows by the clock."""
        rows = check_timed(windows)
        if not self._absent:
            with self._changed:
                if self._left:
                    self._grants.set_timed(rows)
                    self._notify()

    def set_pace(self, bytes_per_second: int) -> None:
        """Limit the speed while the gate is open."""
        if not self._absent:
            with self._changed:
                self._grants.pace, self._not_before = bytes_per_second, 0
                self._notify()

    def flush(self, deadline: float) -> bool:
        """Copy the rest in the calling thread: the engine's would have to fight for the GIL."""
        if self._absent:
            return False
        table, until = self._table, time.monotonic() + deadline
        with self._changed:
            self._grants.rest()
            self._flushing = True
        try:
            while self._left and self._table is table:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                if self._paused or not self._step(fence=True):
                    with self._changed:
                        self._changed.wait(min(left, self._wait_time()))
            return self._table is table
        finally:
            with self._changed:
                self._grants.rest()
                self._flushing = False
                self._notify()

    def cancel(self) -> None:
        """Give the copy up."""
        if self._absent:
            return
        with self._changed:
            table, left = self._table, self._left
            self._table = None
            self._grants.rest()
            self._notify()
        with self._turn:  # a block that was under way is over now, and nobody begins another
            if table is not None and left and table.users:
                table.users -= 1

    def progress(self) -> int:
        """Bytes in the slot."""
        return self._copied if self._table is not None and not self._absent else 0

    def copied(self) -> tuple[int, int, int]:
        """Bytes in windows, outside, in flush."""
        inside, outside, fence = self._grants.copied.values()
        return inside, outside, fence

    def spans(self) -> bytes:
        """When it was copying."""
        if self._absent:
            return b""
        with self._changed:
            return self._spans.take()

    @property
    def spans_lost(self) -> int:
        """Spans without room."""
        return self._spans.lost

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
            self._notify()
        self._thread.join()
        self._publish(EngineState.ABSENT)

    # ------------------------------------------------------------------ copying

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _wait_time(self) -> float:
        """Seconds until the next look: some time hence for a pace or a window by the clock, 1 ms for a hook."""
        wake = self._grants.wake
        return max(0.0, min((wake - time.monotonic_ns()) * 1e-9, 1.0)) if wake else 0.001

    def _publish(self, state: EngineState) -> None:
        if self._hooks.hold and self._control is not None and not self._control.closed:
            self._control.set("bytes_copied", self._copied)
            self._control.set("chunks_done", self._chunk)
            self._control.set("engine", state)

    def _may_copy(self) -> bool:
        return self._left and not self._paused and not self._quit and (self._flushing or not self._grants.idle)

    def _paced(self, grant: Grant, now: int) -> bool:
        """Whether throttle and pace let the block of `grant` begin; else the grants' `wake` says when."""
        pace = min((p for p in (self._hooks.throttle, grant.pace) if p), default=0)
        if not pace:
            self._unpaced = True
            return True
        # A window leaves its pace no credit, and what was copied before it is not forgotten.
        if pace != self._pace or (self._unpaced and self._not_before < now):
            self._not_before = now
        self._pace, self._unpaced = pace, False
        if now < self._not_before:
            self._grants.wake = min(self._grants.wake or self._not_before, self._not_before)
            return False
        self._not_before = max(self._not_before, now - 10_000_000) + grant.nbytes * 10**9 // pace
        return True

    def _next_block(self, table: PythonTable, now: int, *, fence: bool) -> Grant | None:
        """What may be copied at `now` of the chunk under way; None: nothing."""
        want = table.order[self._chunk][2] - self._at
        if fence:
            self._grants.wake = 0
            limit = BLOCK if self._hooks.throttle else _FLUSHED
            grant: Grant | None = Grant(EventKind.COPY_FENCE, -1, 0, min(want, limit), 0)
        else:
            grant = self._grants.look(now, min(want, BLOCK) if self._hooks.throttle else want)
        return grant if grant is not None and self._paced(grant, now) else None

    def _step(self, *, fence: bool) -> bool:
        """Copy one block if that is allowed now; False: it is not (gate, budget, pace, hook, fork)."""
        with self._turn:
            with self._changed:
                table = self._table
                if table is None or not self._may_copy():
                    return False
                if self._hooks.hold and self._at == 0 and self._control is not None:
                    self._held = self._chunk >= self._control.get("hold_at")
                    if self._held:
                        self._grants.wake = 0
                        self._publish(EngineState.HELD)
                        return False
                now = time.monotonic_ns()
                grant = self._next_block(table, now, fence=fence)
                if grant is None:
                    return False
                self._grants.spend(grant)
                segment, begin, length = table.order[self._chunk]
                source, offset = int(table.rows[segment, 0]), int(table.rows[segment, 1])
                at, n, copy = self._at, grant.nbytes, self._copies
                if at == 0:
                    self._hash = xxhash.xxh3_128()
                self._copying = True
            place = begin + at
            self._hash.update(_memory(source + place, n))
            ctypes.memmove(self._destination + offset + place, source + place, n)
            with self._changed:
                self._copying = False
                self._spans.add(grant, copy, now, time.monotonic_ns())
                self._grants.copied[grant.kind] += n
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
                        self._notify()
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
        seen = engine._changes
        mine = not engine._flushing and engine._step(fence=False)
        with changed:
            sleep = None
            if not mine and seen == engine._changes:
                if engine._flushing or not engine._may_copy() or not (engine._grants.wake or engine._held):
                    sleep = 1.0  # whatever ends this state notifies
                else:
                    sleep = engine._wait_time()
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
            engine._notify()


_installed = False


def _install_fork_handlers() -> None:
    global _installed
    if not _installed:
        _installed = True
        os.register_at_fork(before=_pause_all, after_in_parent=_go_on)
