"""The in-process coordinator's files, on the journal of the memory room."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from baftd.checkpoint.facts import Record
from baftd.coordination.files import OpenedLog
from baftd.memory.journal import FileOps, Journal

__all__ = ["JournalFiles"]


class _Log:
    """`RecordLog` on a `Journal`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    @property
    def wants_rewrite(self) -> bool:
        return self._journal.wants_rewrite

    def append(self, *records: Record, sync: bool) -> None:
        self._journal.append(*records, sync=sync)

    def rewrite(self, records: Iterable[Record]) -> None:
        self._journal.rewrite(records)

    def close(self) -> None:
        self._journal.close()


class JournalFiles:
    """`StateFiles` on the file system. `ops`: the file operations, so that tests can end the process at any of them."""

    def __init__(self, ops: FileOps | None = None) -> None:
        self._ops = ops or FileOps()

    def directories(self, path: Path) -> Sequence[str]:
        """Names of the directories in `path`."""
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return ()

    def make_directory(self, path: Path) -> None:
        """Make a directory and the missing ones above it, for this user only."""
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            self._ops.sync_directory(str(directory.parent))

    def open_log(self, path: Path) -> OpenedLog:
        """Open, or make, a journal that is synced."""
        journal, found = Journal.open(path, fsync=True, ops=self._ops)
        return OpenedLog(_Log(journal), found.all_records, found.problem)

    def read(self, path: Path) -> bytes | None:
        """Content of a small file."""
        try:
            fd = self._ops.open(str(path), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return self._ops.read(fd)
        finally:
            self._ops.close(fd)

    def replace(self, path: Path, data: bytes) -> None:
        """Temporary file, fsync, rename, fsync of the directory."""
        temporary = f"{path}.new"
        fd = self._ops.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            done = 0
            while done < len(data):
                done += self._ops.write(fd, data[done:])
            self._ops.fsync(fd)
        finally:
            self._ops.close(fd)
        self._ops.rename(temporary, str(path))
        self._ops.sync_directory(str(path.parent))

    def remove(self, path: Path) -> None:
        """Remove a file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
