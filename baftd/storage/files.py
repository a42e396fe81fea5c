"""The file operations of the durable tier, in one place, so that tests can record, fail or kill at any of them.

Everything that changes or reads the durable directory goes through `FileOps`; nothing else in this room calls `os`
on it. Errors are the `OSError` of the kernel; `baftd.storage.problems` turns them into ours.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from typing import Protocol

__all__ = ["DIRECT", "FileOps", "OsFiles"]

DIRECT = getattr(os, "O_DIRECT", 0)

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
_SYNC_WRITE = 2
_SYNC_WAIT = 1 | 2 | 4


class FileOps(Protocol):
    """What a durable directory needs of a file system. Paths are absolute; descriptors are plain integers."""

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        """`os.open` with close-on-exec and without following a symbolic link."""
        ...

    def close(self, fd: int) -> None:
        """Close. An error is raised: after a failed close the bytes count as lost."""
        ...

    def set_direct(self, fd: int, on: bool) -> None:
        """Turn O_DIRECT on or off; raises EINVAL where the file system refuses."""
        ...

    def preallocate(self, fd: int, length: int) -> bool:
        """Reserve blocks for [0, length) and extend the file. False where not supported (never emulated by writing)."""
        ...

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """One write; may be short."""
        ...

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        """One read into `buffer`; 0 at the end of the file, may be short."""
        ...

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        """Begin writing a range to the device; nothing where not supported."""
        ...

    def finish_writeback(self, fd: int, offset: int, length: int) -> None:
        """Wait for a range that was started, then drop it from the page cache. No substitute for `fsync`."""
        ...

    def truncate(self, fd: int, length: int) -> None:
        """`os.ftruncate`."""
        ...

    def fsync(self, fd: int) -> None:
        """`os.fsync`: data, length and metadata of the file are on the device after it returned."""
        ...

    def fsync_directory(self, path: str) -> None:
        """Names made, renamed and removed in the directory are on the device after it returned."""
        ...

    def rename(self, source: str, target: str) -> None:
        """`os.rename`: replaces `target` atomically."""
        ...

    def link(self, source: str, target: str) -> None:
        """`os.link`: fails with EEXIST if `target` exists, atomically."""
        ...

    def unlink(self, path: str) -> None:
        """`os.unlink`."""
        ...

    def mkdir(self, path: str) -> None:
        """`os.mkdir`; the umask decides about the rights."""
        ...

    def rmdir(self, path: str) -> None:
        """`os.rmdir`."""
        ...

    def listdir(self, path: str) -> list[str]:
        """Names, unsorted."""
        ...

    def stat(self, path: str) -> os.stat_result:
        """`os.lstat`."""
        ...

    def size(self, fd: int) -> int:
        """Length of an open file."""
        ...

    def free_bytes(self, path: str) -> int:
        """Room that this user can still fill in the file system of `path`."""
        ...


class OsFiles:
    """`FileOps` on the operating system."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def set_direct(self, fd: int, on: bool) -> None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | DIRECT if on else flags & ~DIRECT)

    def preallocate(self, fd: int, length: int) -> bool:
        # Not os.posix_fallocate: where the file system cannot, the C library writes a byte into every block.
        size = ctypes.c_long(length)
        while self._libc.fallocate(fd, 0, ctypes.c_long(0), size) != 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code in _UNSUPPORTED:
                return False
            raise OSError(code, os.strerror(code))
        return True

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        self._sync_range(fd, offset, length, _SYNC_WRITE)

    def finish_writeback(self, fd: int, offset: int, length: int) -> None:
        self._sync_range(fd, offset, length, _SYNC_WAIT)
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def stat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def free_bytes(self, path: str) -> int:
        room = os.statvfs(path)
        return room.f_bavail * room.f_frsize

    def _sync_range(self, fd: int, offset: int, length: int, flags: int) -> None:
        result = self._libc.sync_file_range(fd, ctypes.c_long(offset), ctypes.c_long(length), ctypes.c_uint(flags))
        if result != 0:
            code = ctypes.get_errno()
            if code not in (*_UNSUPPORTED, errno.ESPIPE, errno.EINTR):
                raise OSError(code, os.strerror(code))
