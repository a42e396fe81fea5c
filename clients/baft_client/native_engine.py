"""The copy engine proper: a Python face for the C extension `baft_client._engine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from baft_client.engine import (
    NO_LIMIT,
    EngineHooks,
    EngineState,
    Segment,
    SegmentTable,
    check_addresses,
    check_timed,
    pack_segments,
)
from baft_client.python_engine import digest_chunks
from baftd.errors import UsageError
from baftd.memory.control import ControlPage

try:
    from baft_client import _engine
except ImportError as error:  # built without a compiler, or installed for another interpreter
    AVAILABLE = False
    WHY_NOT = str(error)
else:
    AVAILABLE = True
    WHY_NOT = ""

__all__ = ["AVAILABLE", "WHY_NOT", "NativeEngine", "NativeTable"]


class NativeTable:
    """Segments in C memory."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.native = _engine.Table(pack_segments(segments).tobytes())

    @property
    def count(self) -> int:
        """Number of segments."""
        return self.native.count

    @property
    def total(self) -> int:
        """Bytes of all segments."""
        return self.native.total

    @property
    def chunks(self) -> int:
        """Number of digests."""
        return self.native.chunks

    def update(self, addresses: npt.NDArray[np.uint64]) -> None:
        """New source addresses; UsageError while a copy of the table runs."""
        addresses = check_addresses(addresses, self.native.count)
        try:
            self.native.update(addresses.ctypes.data, len(addresses))
        except RuntimeError as error:
            raise UsageError(f"the sources of a segment table cannot change now: {error}.") from error


def _native(table: SegmentTable) -> _engine.Table:
    if not isinstance(table, NativeTable):
        raise UsageError(f"a {type(table).__name__} is not for the native engine; use its own prepare().")
    return table.native


class NativeEngine:
    """`CopyEngine` on a pthread. Its methods are described there."""

    name: Literal["native", "python"] = "native"

    def __init__(self, control: ControlPage | None, *, nice: int = 0, hooks: EngineHooks | None = None) -> None:
        hooks = hooks or EngineHooks()
        self.digests: bool = _engine.digests
        self._engine = _engine.Engine(control.fd if control else -1, nice, hooks.throttle, hooks.hold)

    @property
    def state(self) -> EngineState:
        """What it does now."""
        return EngineState(self._engine.state)

    @property
    def busy(self) -> bool:
        """A thread is inside a block."""
        return self._engine.busy

    def prepare(self, segments: Sequence[Segment]) -> NativeTable:
        """A table in C memory."""
        return NativeTable(segments)

    def start(self, destination: int, capacity: int, table: SegmentTable) -> None:
        """Arm a copy."""
        try:
            self._engine.start(destination, capacity, _native(table))
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"the copy engine ({self.state.name}) cannot start: {error}.") from error

    def open(self) -> None:
        """Open the gate."""
        self._engine.open()

    def open_window(self, budget: int = NO_LIMIT) -> None:
        """Begin a window."""
        self._engine.window(budget)

    def close_window(self, outside: int = 0) -> None:
        """End it."""
        self._engine.close(outside)

    def timed(self, windows: Sequence[tuple[int, int, int]]) -> None:
        """Windows by the clock."""
        rows = check_timed(windows)
        self._engine.timed(rows.ctypes.data, len(rows))

    def set_pace(self, bytes_per_second: int) -> None:
        """Limit the speed in windows."""
        self._engine.pace(bytes_per_second)

    def flush(self, deadline: float) -> bool:
        """Copy the rest, the calling thread helping."""
        return self._engine.flush(deadline, True)

    def cancel(self) -> None:
        """Give the copy up."""
        self._engine.cancel()

    def progress(self) -> int:
        """Bytes in the slot."""
        return self._engine.progress

    def copied(self) -> tuple[int, int, int]:
        """Bytes in windows, outside, in flush."""
        return self._engine.copied()

    def spans(self) -> bytes:
        """When it was copying."""
        return self._engine.spans()

    @property
    def spans_lost(self) -> int:
        """Spans without room."""
        return self._engine.spans_lost

    def digests_of(self) -> bytes:
        """Digests of the finished copy."""
        try:
            return self._engine.digests()
        except RuntimeError as error:
            raise UsageError(f"no digests: {error}.") from error

    def canary(self, table: SegmentTable) -> bytes:
        """8 bytes for each segment."""
        return _engine.canary(_native(table))

    def compare(self, table: SegmentTable, destination: int) -> tuple[int, int] | None:
        """First (segment, byte) that differs."""
        return _engine.compare(_native(table), destination)

    def copy_digest(self, source: int, destination: int, nbytes: int, *, threads: int = 1) -> bytes:
        """Copy now."""
        digests = _engine.bulk(source, destination, nbytes, threads)
        return digests if self.digests else digest_chunks(source, nbytes)

    def digest(self, address: int, nbytes: int, *, threads: int = 1) -> bytes:
        """Digest now."""
        return _engine.bulk(address, 0, nbytes, threads) if self.digests else digest_chunks(address, nbytes)

    def stop(self) -> None:
        """End and join the thread."""
        self._engine.stop()
