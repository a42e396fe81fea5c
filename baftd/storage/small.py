"""Small files of a durable directory: read whole, written whole under a temporary name, synced, named, synced again."""

from __future__ import annotations

import os

from baftd.errors import FormatError
from baftd.storage.files import FileOps

__all__ = ["read_small", "write_small"]


def write_small(ops: FileOps, path: str, data: bytes) -> None:
    """Create `path` (it must not exist), write `data`, fsync. Does not sync the directory. Raises `OSError`."""
    fd = ops.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += ops.pwrite(fd, view[done:], done)
        ops.fsync(fd)
    finally:
        ops.close(fd)


def read_small(ops: FileOps, path: str, limit: int) -> bytes:
    """The whole content; raises `FormatError` when it is longer than `limit` bytes, `OSError` of the file system."""
    fd = ops.open(path, os.O_RDONLY)
    try:
        size = ops.size(fd)
        if size > limit:
            raise FormatError(f"{path} is damaged: it has {size} bytes, more than the {limit} that it can have.")
        buffer = bytearray(size)
        view = memoryview(buffer)
        done = 0
        while done < size:
            got = ops.pread_into(fd, view[done:], done)
            if got == 0:
                break
            done += got
        return bytes(view[:done])
    finally:
        ops.close(fd)
