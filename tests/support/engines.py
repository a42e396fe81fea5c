"""Copy engines for tests: sources, a slot of plain memory, a control page, one of each engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from baft_client.engine import CHUNK, CopyEngine, EngineHooks, EngineState, Segment, SegmentTable
from baft_client.load_engine import load_engine
from baftd.memory.control import ControlPage

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20


def noise(nbytes: int, seed: int = 0) -> Bytes:
    """Bytes that differ everywhere."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def expected_digests(arrays: Sequence[Bytes]) -> bytes:
    """What an engine has to say of contiguous sources."""
    return b"".join(
        xxhash.xxh3_128_digest(array[at : at + CHUNK].data) for array in arrays for at in range(0, array.nbytes, CHUNK)
    )


def soon(condition: Callable[[], bool], what: str, timeout: float = 20.0) -> None:
    """Wait for `condition`, at most `timeout` seconds."""
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, f"not within {timeout} s: {what}"
        time.sleep(0.0005)


class Rig:
    """An engine, its control page, and a destination that checks its own margins."""

    MARGIN = 4096

    def __init__(
        self, directory: Path, name: Literal["native", "python"], *, room: int = 0, hooks: EngineHooks | None = None
    ) -> None:
        self.control = ControlPage.create(directory / f"{time.monotonic_ns()}.control", rank=0)
        self.engine: CopyEngine = load_engine(self.control, prefer=name, hooks=hooks)
        self.arrays: list[Bytes] = []
        self._memory = np.full(room + 2 * self.MARGIN, 0xAA, dtype=np.uint8)
        self.image = self._memory[self.MARGIN : self.MARGIN + room]

    def table(self, arrays: Sequence[Bytes], *, gap: int = 0, itemsize: int = 1) -> SegmentTable:
        """A table of the arrays, packed into the image with `gap` bytes between them; makes the image as large."""
        self.arrays = list(arrays)
        self.offsets = [0] * len(arrays)
        at = gap
        for index, array in enumerate(arrays):
            self.offsets[index] = at
            at += array.nbytes + gap
        if at > self.image.nbytes:
            self._memory = np.full(at + 2 * self.MARGIN, 0xAA, dtype=np.uint8)
            self.image = self._memory[self.MARGIN : self.MARGIN + at]
        return self.engine.prepare(
            [
                Segment(array.ctypes.data if array.nbytes else 0, offset, array.nbytes, itemsize)
                for array, offset in zip(arrays, self.offsets, strict=True)
            ]
        )

    def start(self, table: SegmentTable) -> None:
        """Arm a copy into the image, wiped before."""
        self._memory[:] = 0xAA
        self.engine.start(self.image.ctypes.data, self.image.nbytes, table)

    def check(self) -> None:
        """Every source is in its place, digested, and nothing else was touched."""
        assert self.engine.state == EngineState.DONE
        rest = self._memory.copy()
        for array, offset in zip(self.arrays, self.offsets, strict=True):
            place = slice(self.MARGIN + offset, self.MARGIN + offset + array.nbytes)
            assert np.array_equal(self._memory[place], array)
            rest[place] = 0xAA
        assert (rest == 0xAA).all()
        assert self.engine.digests_of() == (expected_digests(self.arrays) if self.engine.digests else b"")

    def close(self) -> None:
        """Stop the engine and remove the page."""
        self.engine.stop()
        self.control.close()
        self.control.path.unlink()
