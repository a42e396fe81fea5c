"""The real file operations with a record of what was done, and a fault at the operation that a test names."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baftd.storage.files import OsFiles
from tests.support.memory_files import Killed, Op

__all__ = ["FaultyFiles"]


class FaultyFiles(OsFiles):
    """`before` is called with every operation that changes, syncs or opens something; what it raises happens instead.

    After a `Killed` every further operation is `Killed` too, as for a process that is gone; `bury` closes what it had
    open. `log` holds the operations that were carried out.
    """

    def __init__(self, before: Callable[[Op, int], None] | None = None) -> None:
        super().__init__()
        self.before = before
        self.log: list[Op] = []
        self.dead = False
        self._paths: dict[int, str] = {}
        self._lock = threading.RLock()

    @contextmanager
    def _op(self, kind: str, path: str, target: str = "") -> Iterator[None]:
        op = Op(kind, path, target)
        with self._lock:
            if self.dead:
                raise Killed
            try:
                if self.before is not None:
                    self.before(op, len(self.log))
            except Killed:
                self.dead = True
                raise
            self.log.append(op)
            yield

    def bury(self) -> None:
        """Close the descriptors of a killed process."""
        for fd in list(self._paths):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._paths.clear()

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        with self._op("create" if flags & os.O_CREAT else "open", path):
            fd = super().open(path, flags, mode)
            self._paths[fd] = path
            return fd

    def close(self, fd: int) -> None:
        with self._op("close", self._paths[fd]):
            self._paths.pop(fd)
            super().close(fd)

    def preallocate(self, fd: int, length: int) -> bool:
        with self._op("preallocate", self._paths[fd]):
            return super().preallocate(fd, length)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._op("pwrite", self._paths[fd]):
            return super().pwrite(fd, data, offset)

    def truncate(self, fd: int, length: int) -> None:
        with self._op("truncate", self._paths[fd]):
            super().truncate(fd, length)

    def fsync(self, fd: int) -> None:
        with self._op("fsync", self._paths[fd]):
            super().fsync(fd)

    def fsync_directory(self, path: str) -> None:
        with self._op("fsync_directory", path):
            super().fsync_directory(path)

    def rename(self, source: str, target: str) -> None:
        with self._op("rename", source, target):
            super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        with self._op("link", source, target):
            super().link(source, target)

    def unlink(self, path: str) -> None:
        with self._op("unlink", path):
            super().unlink(path)

    def mkdir(self, path: str) -> None:
        with self._op("mkdir", path):
            super().mkdir(path)

    def rmdir(self, path: str) -> None:
        with self._op("rmdir", path):
            super().rmdir(path)

    def stat(self, path: str) -> os.stat_result:
        if self.dead:
            raise Killed
        return super().stat(path)

    def listdir(self, path: str) -> list[str]:
        if self.dead:
            raise Killed
        return super().listdir(path)
