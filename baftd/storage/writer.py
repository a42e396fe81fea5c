"""Bulk writing: the image of a slot into a file, past the page cache, digested as it goes.

Blocks of 16 MiB are mapped from the slot, written with O_DIRECT by two niced threads, and each chunk is digested
*after* the write that took its last byte: a slot that changes at any moment before that is caught, and nothing is
copied on the way. (Measured on two cores, 1 GiB: 0.93-0.95 of a bare O_DIRECT write; reading into buffers of our
own first reached 0.65-0.70.) Where O_DIRECT is refused the same blocks go through the page cache, their write-back
started at once and waited for one block later, so that the cache holds no more than a few blocks.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from baftd.errors import BaftError, Degraded, VerificationFailed
from baftd.storage.files import DIRECT, FileOps
from baftd.storage.interface import Cancel, ChunkTable, Limiter

__all__ = ["BLOCK", "PAGE", "Bounds", "BulkWriter", "run_niced"]

PAGE = 4096
"""Memory, offsets and lengths of direct input/output are multiples of it."""
BLOCK = 16 << 20
"""Bytes mapped and written at once."""
THREADS = 2
NICE = 10


@dataclass(frozen=True)
class Bounds:
    """What may slow down or stop a bulk operation. `deadline`: seconds of `clock`."""

    clock: Callable[[], float]
    limiter: Limiter | None = None
    cancel: Cancel | None = None
    deadline: float | None = None
    progress: Callable[[int], None] | None = None

    def admit(self, nbytes: int, what: str) -> None:
        """Wait for the limiter's leave to move `nbytes`; raises `Degraded` when cancelled or past the deadline."""
        self._check(what)
        delay = self.limiter(nbytes) if self.limiter is not None else 0.0
        if delay <= 0:
            return
        if self.deadline is not None:
            delay = min(delay, max(0.0, self.deadline - self.clock()))
        (self.cancel if self.cancel is not None else threading.Event()).wait(delay)
        self._check(what)

    def _check(self, what: str) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise Degraded(f"{what} was cancelled. Nothing of it is left behind.")
        if self.deadline is not None and self.clock() >= self.deadline:
            raise Degraded(
                f"{what} did not finish before its deadline. Nothing of it is left behind.",
                hint="The storage is too slow for this cadence: raise durable_every, or the limit durable_rate.",
            )


@dataclass
class BulkWriter:
    """Writes one image. `what` names it in errors ("rank 3: /ckpt/gpt/step-8.e1/rank-00003.safetensors").

    `source_fd` holds the image at `source_offset`, a multiple of the page size. `table` and `digests` as in
    `Tier.write_shard`. `copy`: read blocks into memory of our own instead of mapping them, for a source that somebody
    who is not trusted could cut off under the map (touching it then is SIGBUS, not an error).
    """

    ops: FileOps
    source_fd: int
    source_offset: int
    length: int
    table: ChunkTable
    digests: bytes
    bounds: Bounds
    what: str
    block: int = BLOCK
    threads: int = THREADS
    copy: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next: int = 0
    _written: int = 0
    _missing: dict[int, int] = field(default_factory=dict)
    _direct: bool = False

    def write(self, path: str) -> int:
        """Create `path` (it must not exist) and fill it. Returns the open descriptor; the data is not synced yet.

        Raises `VerificationFailed` when a chunk is not what its digest says, `OSError` of the file system, and what
        `Bounds.admit` raises. The file is left to the caller.
        """
        offsets = [offset for offset, _ in self.table]
        for number, (offset, size) in enumerate(self.table):
            self._missing[number] = (offset + size - 1) // self.block - offset // self.block + 1
        fd = self.ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._direct = self._go_direct(fd)
            self.ops.preallocate(fd, _up(self.length))
            blocks = -(-self.length // self.block)
            run_niced(min(self.threads, blocks), lambda stop: self._work(fd, offsets, stop))
            self.ops.truncate(fd, self.length)
        except BaseException:
            self.ops.close(fd)
            raise
        return fd

    def _go_direct(self, fd: int) -> bool:
        if not DIRECT:
            return False
        try:
            self.ops.set_direct(fd, True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def _work(self, fd: int, offsets: list[int], stop: threading.Event) -> None:
        behind: tuple[int, int] | None = None
        own = memoryview(mmap.mmap(-1, self.block)) if self.copy else None
        while not stop.is_set():
            with self._lock:
                start = self._next
                self._next += self.block
            if start >= self.length:
                break
            size = min(self.block, self.length - start)
            self.bounds.admit(size, f"writing {self.what}")
            view = self._map(start, size, own)
            self._put(fd, view, start)
            if not self._direct:
                self.ops.start_writeback(fd, start, size)
                if behind is not None:
                    self.ops.finish_writeback(fd, *behind)
                behind = (start, size)
            self._digest(offsets, view, start)
            with self._lock:
                self._written += size
                written = self._written
            if self.bounds.progress is not None:
                self.bounds.progress(written)

    def _map(self, start: int, size: int, own: memoryview | None = None) -> memoryview:
        """[start, start + size) of the image as memory. Unmapped when the last reference to it goes.

        `own`: page-aligned memory to use where the source is copied.
        """
        if os.fstat(self.source_fd).st_size < self.source_offset + self.length:
            raise VerificationFailed(f"{self.what}: the slot was cut to less than {self.length} bytes of image.")
        down = start % PAGE
        if self.copy:
            return self._copied(start, size, own)
        window = mmap.mmap(
            self.source_fd,
            size + down,
            flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0),
            prot=mmap.PROT_READ,
            offset=self.source_offset + start - down,
        )
        return memoryview(window)[down:]

    def _copied(self, start: int, size: int, own: memoryview | None) -> memoryview:
        buffer = (own if own is not None else memoryview(mmap.mmap(-1, _up(size))))[:size]
        done = 0
        while done < size:
            got = os.preadv(self.source_fd, [buffer[done:]], self.source_offset + start + done)
            if got == 0:
                raise VerificationFailed(f"{self.what}: the slot was cut while it was read.")
            done += got
        return buffer

    def _put(self, fd: int, view: memoryview, start: int) -> None:
        whole = len(view) - len(view) % PAGE
        self._put_all(fd, view[:whole], start)
        if whole < len(view):  # only in the last block: the image's end, on a page of its own
            page = mmap.mmap(-1, PAGE)
            page[: len(view) - whole] = view[whole:]
            self._put_all(fd, memoryview(page), start + whole)

    def _put_all(self, fd: int, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                wrote = self.ops.pwrite(fd, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # Some file systems accept the flag and refuse the write (overlay, some NFS), or want more alignment.
                self._direct = False
                self.ops.set_direct(fd, False)
                continue
            if self._direct and done + wrote < len(data):
                wrote -= wrote % PAGE  # a short write: go on from the last page boundary
            if wrote == 0:
                raise OSError(errno.EIO, "the file system took no bytes")
            done += wrote

    def _digest(self, offsets: list[int], view: memoryview, start: int) -> None:
        """Digest the chunks whose last bytes were just written; others wait for the block they reach into."""
        end = start + len(view)
        number = bisect.bisect_right(offsets, start) - 1
        while number < len(self.table) and offsets[number] < end:
            offset, size = self.table[number]
            if offset >= start and offset + size <= end:
                self._compare(number, view[offset - start : offset - start + size])
            else:
                with self._lock:
                    self._missing[number] -= 1
                    last = self._missing[number] == 0
                if last:
                    self._compare(number, self._map(offset, size))
            number += 1

    def _compare(self, number: int, data: memoryview) -> None:
        if xxhash.xxh3_128_digest(data) != self.digests[16 * number : 16 * number + 16]:
            offset, size = self.table[number]
            raise VerificationFailed(
                f"{self.what}: chunk {number} of {len(self.table)} (bytes {offset} to {offset + size} of the image) "
                "is not what its digest says; the slot has changed since it was sealed. The shard was not written."
            )


def run_niced(threads: int, work: Callable[[threading.Event], None]) -> None:
    """Run `work(stop)` in `threads` threads of low priority and wait for them; the first error stops all and is raised.

    `work` returns when there is nothing left to do or `stop` is set.
    """
    stop = threading.Event()
    errors: list[BaseException] = []

    def body() -> None:
        try:
            with contextlib.suppress(PermissionError):  # in some sandboxes
                me = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, me, max(NICE, os.getpriority(os.PRIO_PROCESS, me)))
            work(stop)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits, and raised there
            errors.append(error)
            stop.set()

    crew = [threading.Thread(target=body, name=f"baftd-bulk-{number}", daemon=True) for number in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if errors:
        # An error of ours says more than the kernel's that followed it.
        raise next((error for error in errors if isinstance(error, BaftError)), errors[0])


def _up(length: int) -> int:
    return -(-length // PAGE) * PAGE
