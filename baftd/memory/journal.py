"""An append-only file of records that says what happened, so that a daemon that comes back knows it.

Framing is that of `checkpoint/framing.py`. One journal lies beside a job's slots (on tmpfs: no fsync, gone with them),
others in the state directory (fsync after each append). An append that was cut off leaves a torn tail: what stands
before it is whole, the tail is cut off when the journal is opened. Damage in the middle is another matter: the records
behind it are found again by their frame and given separately, and the damaged file is kept beside the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from baftd.checkpoint.framing import encode_record, replay, salvage
from baftd.errors import BaftError, NoRoom

__all__ = ["REWRITE_BYTES", "FileOps", "Journal", "Record", "Replay", "read_journal"]

Record: TypeAlias = Mapping[str, Any]

REWRITE_BYTES: Final = 4 << 20
"""From this size on a journal asks to be rewritten with only what still matters."""
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}


class FileOps:
    """The file operations of a journal, in one place, so that a test can fail or kill at any of them."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        """`os.open`, never through a symbolic link, closed on exec."""
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)

    def read(self, fd: int) -> bytes:
        """The whole file."""
        parts = []
        while part := os.read(fd, 1 << 20):
            parts.append(part)
        return b"".join(parts)

    def write(self, fd: int, data: bytes) -> int:
        """`os.write`: may write less than all."""
        return os.write(fd, data)

    def truncate(self, fd: int, length: int) -> None:
        """`os.ftruncate`."""
        os.ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        """`os.fsync`."""
        os.fsync(fd)

    def rename(self, source: str, destination: str) -> None:
        """`os.rename`."""
        os.rename(source, destination)

    def sync_directory(self, path: str) -> None:
        """Make names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """`os.close`."""
        os.close(fd)


@dataclass(frozen=True)
class Replay:
    """What a journal held.

    records: all records up to the first problem. later: records that were found behind damage; what they build upon
    may be missing. problem: one sentence for the log, or None. torn: the problem is only a cut-off last append.
    """

    records: tuple[dict[str, Any], ...]
    later: tuple[dict[str, Any], ...] = ()
    problem: str | None = None
    torn: bool = False
    good_bytes: int = 0

    @property
    def all_records(self) -> tuple[dict[str, Any], ...]:
        """Everything that can still be read, in order."""
        return self.records + self.later


def read_journal(path: str | os.PathLike[str], *, ops: FileOps | None = None) -> Replay:
    """Read a journal without changing it. A file that is not there holds nothing. Raises OSError."""
    path = os.fspath(path)
    ops = ops or FileOps()
    try:
        fd = ops.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return Replay(())
    try:
        return _interpret(path, ops.read(fd))
    finally:
        ops.close(fd)


def _interpret(path: str, data: bytes) -> Replay:
    found = replay(data)
    records, strange = _dicts(found.records)
    if found.problem is None:
        return Replay(records, problem=_strange(path, strange), good_bytes=found.good_bytes)
    later, strange_later = _dicts(salvage(data, found.good_bytes))
    if found.torn and not later:
        problem = f"journal {path}: the last append was cut off ({found.problem} of {len(data)}); it is dropped."
        return Replay(records, problem=problem, torn=True, good_bytes=found.good_bytes)
    problem = (
        f"journal {path} is damaged: {found.problem} of {len(data)}; {len(records)} records before and {len(later)} "
        f"behind it can be read{' (some are not ours)' if strange or strange_later else ''}."
    )
    return Replay(records, later, problem, False, found.good_bytes)


def _dicts(values: Iterable[Any]) -> tuple[tuple[dict[str, Any], ...], int]:
    values = tuple(values)
    kept = tuple(value for value in values if isinstance(value, dict))
    return kept, len(values) - len(kept)


def _strange(path: str, count: int) -> str | None:
    return f"journal {path}: {count} records are not of baftd and were passed over." if count else None


class Journal:
    """An open journal. Make one with `open`. One writer at a time."""

    def __init__(self, path: str, fd: int, size: int, fsync: bool, ops: FileOps) -> None:
        self.path = path
        self.size = size
        """Bytes in the file."""
        self._fd = fd
        self._fsync = fsync
        self._ops = ops
        self._rewritten_size = 0
        self._broken = ""

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, fsync: bool = False, ops: FileOps | None = None
    ) -> tuple[Journal, Replay]:
        """Open a journal, make it if it is not there, and read what it holds.

        A torn tail is cut off. A damaged journal is kept as `<path>.damaged`, and a new one written with all records
        that can be read. Raises OSError, NoRoom.
        """
        path = os.fspath(path)
        ops = ops or FileOps()
        fd = ops.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            found = _interpret(path, ops.read(fd))
            if found.torn:
                ops.truncate(fd, found.good_bytes)
                if fsync:
                    ops.fsync(fd)
            if fsync:
                ops.sync_directory(os.path.dirname(path) or ".")
        except BaseException:
            ops.close(fd)
            raise
        journal = cls(path, fd, found.good_bytes, fsync, ops)
        if found.problem and not found.torn:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{path}.damaged")
                os.link(path, f"{path}.damaged")
                journal.rewrite(found.all_records)
            except BaseException:
                journal.close()
                raise
        return journal, found

    @property
    def wants_rewrite(self) -> bool:
        """The journal has grown enough that `rewrite` with what still matters is worth it."""
        return self.size > REWRITE_BYTES and self.size > 2 * self._rewritten_size

    def append(self, *records: Record, sync: bool | None = None) -> None:
        """Add records; when this returns they are in the file, with `sync` (None: as it was opened) on the disk.

        Raises NoRoom where the file system is full, OSError, FormatError for a record that is not plain data. After
        an error the journal is as before; if even that cannot be had, every append raises until `rewrite`.
        """
        if self._broken:
            raise BaftError(f"journal {self.path} takes no records: {self._broken}.", hint="It must be rewritten.")
        data = b"".join(encode_record(dict(record)) for record in records)
        try:
            self._write(self._fd, data)
            if self._fsync if sync is None else sync:
                self._ops.fsync(self._fd)
        except OSError as error:
            self._take_back(error)
            raise self._full(error) from error
        self.size += len(data)

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the content, atomically: temporary file, fsync, rename, fsync of the directory.

        Raises as `append`; after an error the old content stands.
        """
        data = b"".join(encode_record(dict(record)) for record in records)
        temporary = f"{self.path}.new"
        ops = self._ops
        fd = ops.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        try:
            self._write(fd, data)
            ops.fsync(fd)
            ops.rename(temporary, self.path)
        except OSError as error:
            self._discard(fd, temporary)
            raise self._full(error) from error
        except BaseException:
            self._discard(fd, temporary)
            raise
        old, self._fd = self._fd, fd
        ops.close(old)
        self.size = self._rewritten_size = len(data)
        self._broken = ""
        if self._fsync:
            ops.sync_directory(os.path.dirname(self.path) or ".")

    def close(self) -> None:
        """Close the file; records that were appended stay."""
        if self._fd >= 0:
            self._ops.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, fd: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += self._ops.write(fd, data[done:])

    def _discard(self, fd: int, temporary: str) -> None:
        self._ops.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(temporary)

    def _take_back(self, error: OSError) -> None:
        """Cut off what a failed append left. Appended bytes whose fsync failed may or may not be on the disk: a
        later fsync would not tell, so such a journal must be rewritten."""
        try:
            self._ops.truncate(self._fd, self.size)
            if self._fsync:
                self._ops.fsync(self._fd)
        except OSError as second:
            self._broken = f"an append failed ({error.strerror}) and could not be taken back ({second.strerror})"

    def _full(self, error: OSError) -> Exception:
        if error.errno in _FULL:
            return NoRoom(
                f"journal {self.path} cannot grow: {error.strerror}.", hint="Make room on its file system."
            )
        return error

