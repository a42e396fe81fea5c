"""A slot: a file on tmpfs that holds one header block and one image.

The daemon makes it, reserves every page and reads it with `preadv`; the training process maps it. Nobody truncates
it: a page lost under a mapping is SIGBUS, while a file that is too short for `preadv` is an error with a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

import xxhash

from baftd.checkpoint.shard import CHUNK, DIGEST_BYTES, PAGE, Chunk
from baftd.errors import FormatError, NoRoom, UsageError
from baftd.memory.header import (
    CHECKSUM_OFFSET,
    HEADER_BYTES,
    HEADER_USED,
    MAGIC,
    STATE_OFFSET,
    SlotHeader,
    SlotState,
    pack_state,
    unpack_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    import numpy.typing as npt

__all__ = ["IMAGE_OFFSET", "SlotFile", "file_size"]

IMAGE_OFFSET = HEADER_BYTES
RESERVE_STEP = 256 << 20
PREFAULT_STEP = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def file_size(image_capacity: int) -> int:
    """Bytes of a slot file for images of at most `image_capacity` bytes."""
    return IMAGE_OFFSET + -(-image_capacity // PAGE) * PAGE


class SlotFile:
    """An open slot. Offsets and lengths of images count from the first byte of the image.

    Make one with `create`, `open_rw` or `open_ro`. Not safe for use by several threads at once, except `prefault`,
    `pread_into` and `digest_chunks`.
    """

    def __init__(self, path: str, fd: int, size: int, writable: bool) -> None:
        self.path = path
        self.fd = fd
        self.size = size
        self.writable = writable
        self._map: mmap.mmap | None = None
        self._view: npt.NDArray[np.uint8] | None = None
        self._filling: int | None = None
        """Generation that this object has marked FILLING, and nothing else since."""

    # ------------------------------------------------------------------------------------ making and opening

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], image_capacity: int, *, mode: int = 0o600, numa_node: int = -1
    ) -> SlotFile:
        """Make a slot for images of at most `image_capacity` bytes and reserve all its memory; it begins FREE.

        Pages are reserved, not yet touched: see `prefault`. The name appears when the slot is complete; a process that
        dies before leaves nothing. Raises NoRoom with nothing left behind; FileExistsError.
        """
        path = os.fspath(path)
        if image_capacity <= 0:
            raise UsageError(f"a slot for images of {image_capacity} bytes makes no sense.")
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        size = file_size(image_capacity)
        named = False
        try:
            fd, named = _new_file(path, mode)
        except OSError as error:
            if error.errno in _FULL:
                raise NoRoom(
                    f"slot {path} cannot be made: its file system takes no more files ({error.strerror}).",
                    hint="Remove old slots, or mount the tmpfs with a larger nr_inodes.",
                ) from error
            raise
        try:
            with _preferred_node(numa_node):
                # In steps: a signal makes one call start over, and a full tmpfs shows early.
                for offset in range(0, size, RESERVE_STEP):
                    os.posix_fallocate(fd, offset, min(RESERVE_STEP, size - offset))
            _write(fd, MAGIC + pack_state(SlotState.FREE, 0), 0)
            if not named:
                _give_name(fd, path)
        except OSError as error:
            room = _room(fd)
            _abandon(fd, path if named else None)
            if error.errno in _FULL:
                raise NoRoom(
                    f"slot {path} needs {size / 1e6:.1f} MB, but {room} ({error.strerror}).",
                    hint="Enlarge the tmpfs (mount -o remount,size=...; Docker: --shm-size) or remove old slots "
                    "(baftd gc --dry-run shows them).",
                ) from error
            raise
        except BaseException:
            _abandon(fd, path if named else None)
            raise
        return cls(path, fd, size, writable=True)

    @classmethod
    def open_rw(cls, path: str | os.PathLike[str]) -> SlotFile:
        """Open a slot for writing. Raises FileNotFoundError, PermissionError, FormatError."""
        return cls._open(os.fspath(path), os.O_RDWR)

    @classmethod
    def open_ro(cls, path: str | os.PathLike[str]) -> SlotFile:
        """Open a slot for reading. Raises FileNotFoundError, PermissionError, FormatError."""
        return cls._open(os.fspath(path), os.O_RDONLY)

    @classmethod
    def _open(cls, path: str, flags: int) -> SlotFile:
        try:
            fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise FormatError(f"slot {path} is not a regular file.") from error
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise FormatError(f"slot {path} is not a regular file.")
            if found.st_size <= IMAGE_OFFSET or found.st_size % PAGE:
                raise FormatError(f"slot {path} has {found.st_size} bytes: it was truncated, or is no slot.")
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, found.st_size, writable=flags == os.O_RDWR)

    @property
    def capacity(self) -> int:
        """Bytes of the longest image that fits."""
        return self.size - IMAGE_OFFSET

    def fileno(self) -> int:
        """The descriptor, for sendfile and poll."""
        return self.fd

    def close(self) -> None:
        """Close the descriptor and unmap. A view handed out by `image` keeps the mapping until it is gone itself."""
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _unmap(self) -> None:
        self._view = None
        if self._map is not None:
            # BufferError: somebody still holds a view. The mapping then ends with the last view, never under it.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None

    def __enter__(self) -> SlotFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ header

    def read_header(self) -> SlotHeader | None:
        """The header; None if the slot is FREE. Raises FormatError, naming the file, if it makes no sense."""
        try:
            header = SlotHeader.decode(os.pread(self.fd, HEADER_USED, 0))
            if header is not None and header.image_length > self.capacity:
                raise FormatError(f"slot header: an image of {header.image_length} bytes in {self.capacity} of room.")
        except FormatError as error:
            raise FormatError(f"{self.path}: {error}") from error
        return header

    def read_state(self) -> tuple[SlotState, int]:
        """State and generation alone. Raises FormatError."""
        word = os.pread(self.fd, 16, 0)
        if word[:8] != MAGIC or len(word) < 16:
            raise FormatError(f"{self.path}: slot header: not a slot of baftd, or truncated.")
        return unpack_state(word[8:])

    def write_header(self, header: SlotHeader) -> None:
        """Write the fields, then the state word.

        A slot that changes hands is first marked FILLING, so that no reader takes the old state for the new fields;
        where this object has marked it so itself, it is so. After a kill between two calls of pwrite the checksum or
        the generation tells.
        """
        block = header.encode()
        if self._filling != header.generation:
            _write(self.fd, pack_state(SlotState.FILLING, header.generation), STATE_OFFSET)
        _write(self.fd, block[CHECKSUM_OFFSET:HEADER_USED], CHECKSUM_OFFSET)
        if header.state is SlotState.FILLING:
            self._filling = header.generation
            return
        self._filling = None
        _write(self.fd, block[STATE_OFFSET:CHECKSUM_OFFSET], STATE_OFFSET)

    def set_state(self, state: SlotState, generation: int) -> None:
        """Change the state word alone."""
        self._filling = None
        _write(self.fd, pack_state(state, generation), STATE_OFFSET)

    def free(self, generation: int) -> None:
        """Mark the slot FREE. The magic is written as well, which filling it never does: a damaged one is mended."""
        self._filling = None
        _write(self.fd, MAGIC + pack_state(SlotState.FREE, generation), 0)

    # ------------------------------------------------------------------------------------ memory

    def prefault(
        self,
        progress: Callable[[int, int], None] | None = None,
        cancel: Callable[[], bool] | None = None,
        numa_node: int = -1,
        pace: Callable[[int], object] | None = None,
    ) -> int:
        """Touch every page for writing without changing a byte; return the bytes that were touched.

        In the daemon this makes the pages (charged to it). In a training process that has mapped the slot (`address`,
        `image`) it fills the page table; a slot that was not mapped before is not mapped after, for mapped pages count
        as the daemon's resident set. `progress` is called with (done, total) bytes after each 64 MiB, `cancel` asked
        before each, `pace` called with its bytes, and may wait. Releases the GIL. Raises NoRoom where memory runs out.
        """
        mapped_before = self._map is not None
        address = self._mapped_address()
        done = 0
        try:
            with _preferred_node(numa_node):
                while done < self.size and not (cancel is not None and cancel()):
                    step = min(PREFAULT_STEP, self.size - done)
                    if pace is not None:
                        pace(step)
                    self._populate(address + done, done, step)
                    done += step
                    if progress is not None:
                        progress(done, self.size)
        finally:
            if not mapped_before:
                self._unmap()
        return done

    def _populate(self, address: int, offset: int, length: int) -> None:
        code = errno.EINTR
        while code == errno.EINTR:
            if _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
                return
            code = ctypes.get_errno()
        if code == errno.EINVAL:
            # An older kernel: read one byte a page. The file is reserved, so this makes the page too.
            assert self._map is not None
            self._map[offset : offset + length : PAGE]
        elif code in _FULL:
            raise NoRoom(f"slot {self.path}: no memory for its pages ({os.strerror(code)}).")
        else:
            raise OSError(code, f"slot {self.path} cannot be prefaulted (truncated?): {os.strerror(code)}")

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes of the image. Raises FormatError if the file ends before."""
        buffer = bytearray(length)
        self.pread_into(buffer, offset)
        return bytes(buffer)

    def pread_into(self, buffer: bytearray | memoryview, offset: int) -> None:
        """Fill `buffer` from the image. Raises FormatError if the file ends before."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            count = os.preadv(self.fd, [view[done:]], IMAGE_OFFSET + offset + done)
            if count == 0:
                raise FormatError(
                    f"slot {self.path} ends at byte {IMAGE_OFFSET + offset + done}, before byte "
                    f"{IMAGE_OFFSET + offset + len(view)}: somebody truncated it."
                )
            done += count

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write into the image (fetched shards). Raises UsageError past the end: a slot never grows."""
        if offset < 0 or offset + len(data) > self.capacity:
            raise UsageError(f"{len(data)} bytes at {offset} do not fit slot {self.path} of {self.capacity} bytes.")
        _write(self.fd, data, IMAGE_OFFSET + offset)

    def digest_chunks(
        self,
        chunks: Iterable[Chunk],
        cancel: Callable[[], bool] | None = None,
        pace: Callable[[int], object] | None = None,
    ) -> bytes:
        """xxh3-128 of each chunk, one after the other; fewer if `cancel` said so. Releases the GIL.

        `pace` is called with the length of each chunk before it is read, and may wait.
        Raises FormatError if the file ends before a chunk does.
        """
        view = memoryview(bytearray(CHUNK))
        found = bytearray()
        for offset, length in chunks:
            if pace is not None:
                pace(length)
            if cancel is not None and cancel():
                break
            part = view[:length]
            self.pread_into(part, offset)
            found += xxhash.xxh3_128_digest(part)
        assert len(found) % DIGEST_BYTES == 0
        return bytes(found)

    # ------------------------------------------------------------------------------------ training process

    def image(self) -> npt.NDArray[np.uint8]:
        """The image as an array of `capacity` bytes over the mapped file, writable if the slot was opened so."""
        if self._view is None:
            import numpy as np  # late: the daemon maps nothing and does without numpy

            self._view = np.frombuffer(self._mapped(), dtype=np.uint8)[IMAGE_OFFSET:]
        return self._view

    @property
    def address(self) -> int:
        """Address of the first byte of the mapped image; valid until `close`."""
        return self._mapped_address() + IMAGE_OFFSET

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            if os.fstat(self.fd).st_size < self.size:
                raise FormatError(f"slot {self.path} was truncated: mapping it would end in SIGBUS.")
            access = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
            self._map = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED, prot=access)
        return self._map

    def _mapped_address(self) -> int:
        mapped = self._mapped()
        if not self.writable:
            return int(self.image().ctypes.data) - IMAGE_OFFSET
        first = ctypes.c_char.from_buffer(mapped)
        return ctypes.addressof(first)


def _new_file(path: str, mode: int) -> tuple[int, bool]:
    """(descriptor, whether it has its name already): a file without a name where the system knows such."""
    if os.path.exists("/proc/self/fd"):
        try:
            return os.open(os.path.dirname(path) or ".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode), False
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), True


def _give_name(fd: int, path: str) -> None:
    """Link a file without a name. Raises FileExistsError: nobody's file is ever replaced."""
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Only with a directory does Python let the kernel follow /proc's link to the file.
        os.link(f"/proc/self/fd/{fd}", os.path.basename(path), src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.close(directory)


def _abandon(fd: int, path: str | None) -> None:
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    os.close(fd)


def _write(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _room(fd: int) -> str:
    found = os.fstatvfs(fd)
    return f"{found.f_bavail * found.f_frsize / 1e6:.1f} MB of {found.f_blocks * found.f_frsize / 1e6:.1f} MB are free"


@contextlib.contextmanager
def _preferred_node(node: int) -> Any:
    """Let this thread's new pages come from a NUMA node, where the machine has it; otherwise change nothing."""
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if node < 0 or node >= 64 or number is None or sys.maxsize <= 1 << 32:
        yield
        return
    mask = ctypes.c_uint64(1 << node)
    chosen = _libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_PREFERRED), ctypes.byref(mask), ctypes.c_ulong(65))
    try:
        yield
    finally:
        if chosen == 0:
            _libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_DEFAULT), None, ctypes.c_ulong(0))
