"""Bulk writing: the image of a slot into a file, past the page cache, digested as it goes.

Blocks of 16 MiB are mapped from the slot, written with O_DIRECT by two niced threads, and each chunk is digested
*after* the write that took its last byte: a slot that changes at any moment before that is caught. (Measured on two
cores, 1 GiB: 0.93-0.95 of a bare O_DIRECT write; reading blocks into buffers of our own first reached 0.65-0.70.)

Whoever may write to a slot may also cut it off, and touching a mapped page that is gone is SIGBUS. So only the kernel
follows the map, for which it is an error; the bytes that are digested are read with `preadv`, through a buffer that
stays in the processor's cache. Where O_DIRECT is refused the same blocks go through the page cache, their write-back
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
PIECE = 256 << 10
"""Bytes read and digested at once."""
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
    `Tier.write_shard`.
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
        piece = memoryview(bytearray(min(PIECE, self.length)))
        while not stop.is_set():
            with self._lock:
                start = self._next
                self._next += self.block
            if start >= self.length:
                break
            size = min(self.block, self.length - start)
            self.bounds.admit(size, f"writing {self.what}")
            self._put(fd, start, size)
            if not self._direct:
                self.ops.start_writeback(fd, start, size)
                if behind is not None:
                    self.ops.finish_writeback(fd, *behind)
                behind = (start, size)
            self._digest(offsets, start, size, piece)
            with self._lock:
                self._written += size
                written = self._written
            if self.bounds.progress is not None:
                self.bounds.progress(written)

    def _map(self, start: int, size: int) -> memoryview:
        """[start, start + size) of the image, both multiples of a page, as memory that only the kernel may touch.
        Unmapped when the last reference to it goes."""
        self._check_whole()
        window = mmap.mmap(
            self.source_fd,
            size,
            flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0),
            prot=mmap.PROT_READ,
            offset=self.source_offset + start,
        )
        return memoryview(window)

    def _check_whole(self) -> None:
        if os.fstat(self.source_fd).st_size < self.source_offset + self.length:
            raise VerificationFailed(f"{self.what}: the slot was cut to less than {self.length} bytes of image.")

    def _read(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` from the image."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self.source_fd, [buffer[done:]], self.source_offset + start + done)
            if got == 0:
                raise VerificationFailed(f"{self.what}: the slot was cut while it was read.")
            done += got

    def _put(self, fd: int, start: int, size: int) -> None:
        whole = size - size % PAGE
        try:
            if whole:
                self._put_all(fd, self._map(start, whole), start)
            if whole < size:  # only in the last block: the image's end, on a page of its own
                page = memoryview(mmap.mmap(-1, PAGE))
                self._read(page[: size - whole], start + whole)
                self._put_all(fd, page, start + whole)
        except OSError:
            self._check_whole()  # cut under the map the slot gives the kernel EFAULT, or nothing to write
            raise

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

    def _digest(self, offsets: list[int], start: int, size: int, piece: memoryview) -> None:
        """Digest the chunks whose last bytes were just written; others wait for the block they reach into."""
        end = start + size
        number = bisect.bisect_right(offsets, start) - 1
        while number < len(self.table) and offsets[number] < end:
            offset, length = self.table[number]
            last = offset >= start and offset + length <= end
            if not last:
                with self._lock:
                    self._missing[number] -= 1
                    last = self._missing[number] == 0
            if last:
                self._compare(number, piece)
            number += 1

    def _compare(self, number: int, piece: memoryview) -> None:
        offset, size = self.table[number]
        found = xxhash.xxh3_128()
        for at in range(0, size, len(piece)):
            part = piece[: min(len(piece), size - at)]
            self._read(part, offset + at)
            found.update(part)
        if found.digest() != self.digests[16 * number : 16 * number + 16]:
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
