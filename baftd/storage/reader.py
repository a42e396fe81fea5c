"""Bulk reading: a shard file from the device, each chunk compared with its digest.

Runs of whole chunks of up to 8 MiB are read with O_DIRECT (what the device holds, not what the page cache remembers)
into page-aligned buffers of two niced threads. Where O_DIRECT is refused the cache is used and dropped behind.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from dataclasses import dataclass, field

import xxhash

from baftd.errors import VerificationFailed
from baftd.storage.files import DIRECT, FileOps
from baftd.storage.interface import ChunkTable, Sink
from baftd.storage.writer import PAGE, Bounds, run_niced

__all__ = ["RUN", "BulkReader"]

RUN = 8 << 20
"""Bytes of whole chunks read at once; one chunk is never longer."""
THREADS = 2


@dataclass
class BulkReader:
    """Reads one shard file. `what` names it in errors."""

    ops: FileOps
    table: ChunkTable
    digests: bytes
    bounds: Bounds
    what: str
    sink: Sink | None = None
    stop_at_first: bool = True
    """Raise at the first damaged chunk; otherwise read on and return all of them. A sink never sees damaged bytes
    only with the former."""
    threads: int = THREADS
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next: int = 0
    _read: int = 0
    _size: int = 0
    _direct: bool = False
    _bad: list[int] = field(default_factory=list)

    def read(self, path: str) -> list[int]:
        """Numbers of the chunks that are damaged, ascending; empty for a whole file.

        Raises `VerificationFailed` naming the first damaged chunk when `stop_at_first`, `OSError` of the file
        system, and what `Bounds.admit` raises.
        """
        fd = self.ops.open(path, os.O_RDONLY)
        try:
            return self.read_open(fd)
        finally:
            self.ops.close(fd)

    def read_open(self, fd: int) -> list[int]:
        """The same for an open file."""
        try:
            if DIRECT:
                self.ops.set_direct(fd, True)
                self._direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self._size = self.ops.size(fd)
        if not self._direct:
            self.ops.finish_writeback(fd, 0, self._size)  # so that the device is read, as far as possible
        runs = _runs(self.table)
        run_niced(max(1, min(self.threads, len(runs))), lambda stop: self._work(fd, runs, stop))
        return sorted(self._bad)

    def describe(self, number: int) -> str:
        """One sentence about a damaged chunk."""
        offset, size = self.table[number]
        return (
            f"{self.what}: chunk {number} of {len(self.table)} (bytes {offset} to {offset + size}) "
            "is not what its digest says"
        )

    def _work(self, fd: int, runs: list[tuple[int, int]], stop: threading.Event) -> None:
        room = max((self._extent(first, last)[1] for first, last in runs), default=0)
        buffer = memoryview(mmap.mmap(-1, room + PAGE)) if room else memoryview(b"")
        while not stop.is_set():
            with self._lock:
                number = self._next
                self._next += 1
            if number >= len(runs):
                break
            first, last = runs[number]
            start, size = self._extent(first, last)
            self.bounds.admit(size, f"reading {self.what}")
            down = start % PAGE
            got = self._fill(fd, buffer[: _up(down + size)], start - down)
            view = buffer[down : down + max(0, min(got - down, size))]
            self._take(first, last, start, view)
            with self._lock:
                self._read += size
                read = self._read
            if self.bounds.progress is not None:
                self.bounds.progress(read)

    def _extent(self, first: int, last: int) -> tuple[int, int]:
        start = self.table[first][0]
        return start, sum(self.table[last]) - start

    def _fill(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read until `buffer` is full or the file ends; bytes read."""
        done = 0
        while done < len(buffer):
            try:
                got = self.ops.pread_into(fd, buffer[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = False
                self.ops.set_direct(fd, False)
                continue
            if got == 0:
                break
            if self._direct and got % PAGE and offset + done + got < self._size:
                got -= got % PAGE  # cut short in the middle of the file: go on from a page boundary
                if got == 0:
                    raise OSError(errno.EIO, "the file system gave less than a page")
            done += got
            if self._direct and done % PAGE:
                break
        if not self._direct:
            self.ops.finish_writeback(fd, offset, len(buffer))
        return done

    def _take(self, first: int, last: int, start: int, view: memoryview) -> None:
        for number in range(first, last + 1):
            offset, size = self.table[number]
            data = view[offset - start : offset - start + size]
            if len(data) == size and xxhash.xxh3_128_digest(data) == self.digests[16 * number : 16 * number + 16]:
                continue
            if self.stop_at_first:
                raise VerificationFailed(f"{self.describe(number)}.")
            with self._lock:
                self._bad.append(number)
        if self.sink is not None:
            self.sink.write(start, view)


def _runs(table: ChunkTable) -> list[tuple[int, int]]:
    """(first, last) chunk of every run of at most `RUN` bytes."""
    runs: list[tuple[int, int]] = []
    first = 0
    for number, (offset, size) in enumerate(table):
        if offset + size - table[first][0] > RUN and number > first:
            runs.append((first, number - 1))
            first = number
    if table:
        runs.append((first, len(table) - 1))
    return runs


def _up(length: int) -> int:
    return -(-length // PAGE) * PAGE
