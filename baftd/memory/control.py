"""The control page of a rank: 4 KiB of shared memory that client, copy engine and daemon see at once.

The daemon creates the file, the client writes it; the engine's gate, its progress and the fence are words in
it, so that opening a window costs no message. `FIELDS` below is the one table of offsets; the C extension
exports its own and a test compares them. All words are little-endian and naturally aligned; this module reads
and writes whole words, which the CPUs we run on do in one piece. Only the engine relies on their order.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from baftd.errors import FormatError, NoRoom

__all__ = ["FIELDS", "MAGIC", "PAGE_BYTES", "VERSION", "ControlPage", "Field", "Gate"]

PAGE_BYTES = 4096
MAGIC = int.from_bytes(b"BAFTCTL\x01", "little")
VERSION = 1


class Gate(enum.IntEnum):
    """Low four bits of the gate word; the rest counts changes."""

    CLOSED = 0
    OPEN = 1
    """All the time from boundary to fence, at `pace`: no windows are known."""
    FLUSH = 2
    WINDOW = 3
    """A window: at most `budget` bytes."""
    OUTSIDE = 4
    """Between windows, at `outside_pace`."""


@dataclass(frozen=True)
class Field:
    """Place of one word: offset and size (4 or 8) in bytes."""

    offset: int
    size: int
    meaning: str


FIELDS: dict[str, Field] = {
    # who: written once by the daemon
    "magic": Field(0x000, 8, "MAGIC, written last by create()"),
    "version": Field(0x008, 4, "layout of this page"),
    "rank": Field(0x00C, 4, "rank the page belongs to"),
    # whose: written by the client when it takes the page
    "pid": Field(0x040, 8, "process that trains"),
    "pid_start": Field(0x048, 8, "its start time in clock ticks since boot"),
    "epoch": Field(0x050, 8, "epoch of its token"),
    # training: written by the training thread
    "step": Field(0x080, 8, "newest boundary"),
    "updates": Field(0x088, 8, "optimizer updates at that boundary"),
    "fence": Field(0x090, 8, "newest step whose fence was passed (sealed or dropped)"),
    "held_ns": Field(0x098, 8, "time the training thread was held for the last snapshot"),
    "held_total_ns": Field(0x0A0, 8, "the same, sum since the client took the page"),
    # gate: written by whoever opens and closes windows; a futex
    "gate": Field(0x0C0, 4, "Gate in the low four bits, a count of changes above"),
    # windows: written with the gate; the engine goes by its own copy of window and budget
    "pace": Field(0x100, 8, "bytes a second while the gate is OPEN, 0: unlimited"),
    "window_opened": Field(0x108, 8, "times the gate went to OPEN or WINDOW"),
    "window_closed": Field(0x110, 8, "times it went back"),
    "window": Field(0x118, 8, "number of the open window since the copy was armed, plus 1; 0: none is open"),
    "budget": Field(0x120, 8, "most bytes in the newest window; 2**64 - 1: no limit"),
    "outside_pace": Field(0x128, 8, "bytes a second while the gate is OUTSIDE"),
    # engine: written by the copying threads
    "bytes_copied": Field(0x140, 8, "of the armed copy, in the slot and visible"),
    "bytes_total": Field(0x148, 8, "of the armed copy"),
    "chunks_done": Field(0x150, 8, "digest chunks finished"),
    "copies": Field(0x158, 8, "copies armed since the engine began"),
    "engine": Field(0x160, 4, "EngineState of baft_client.engine"),
    "bytes_inside": Field(0x168, 8, "of the newest copy, copied in windows"),
    "bytes_outside": Field(0x170, 8, "of the newest copy, copied outside of them; the rest: at the fence"),
    "spent": Field(0x178, 8, "bytes copied in the newest window that had a budget and was seen by the engine"),
    # tests only: read by an engine that was built with EngineHooks(hold=True)
    "hold_at": Field(0x180, 8, "chunk before which such an engine stops"),
}
"""Every word of the page."""


class ControlPage:
    """A mapped control page. `get` and `set` by field name; `gate` for the mode alone.

    A process that opened it may close it at any time; a native engine has a mapping of its own.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over `fd`, an open control file of PAGE_BYTES; use `create` or `open`."""
        self.path = path
        self._fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        # Not struct.pack_into: with a byte order given it writes byte by byte, and a reader could see half a word.
        self._words = memoryview(self._map).cast("Q")
        self._halves = memoryview(self._map).cast("I")
        self._closed = False

    @classmethod
    def create(cls, path: Path | str, *, rank: int) -> ControlPage:
        """Make the file (it must not exist), reserve its memory and write magic, version and rank.

        Raises NoRoom when the file system is full, FileExistsError when the path is taken.
        """
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.posix_fallocate(fd, 0, PAGE_BYTES)  # a full tmpfs is an error here, SIGBUS at the first write
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NoRoom(
                        f"no room for the control page {path}: {error.strerror}.",
                        hint=f"Free memory there (`df {path.parent}`) or make the file system larger.",
                    ) from error
                raise
            page = cls(path, fd)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        page.set("version", VERSION)
        page.set("rank", rank)
        page.set("magic", MAGIC)
        return page

    @classmethod
    def open(cls, path: Path | str) -> ControlPage:
        """Map an existing page for reading and writing. Raises FormatError when it is not one."""
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size < PAGE_BYTES:
                raise FormatError(f"{path} is no control page: {facts.st_size} bytes instead of {PAGE_BYTES}.")
            page = cls(path, fd)
        except BaseException:
            os.close(fd)
            raise
        magic, version = page.get("magic"), page.get("version")
        if magic == MAGIC and version == VERSION:
            return page
        page.close()
        if magic != MAGIC:
            raise FormatError(f"{path} is no control page: it begins with {magic:#x} instead of {MAGIC:#x}.")
        raise FormatError(
            f"control page {path} has version {version}, this program knows {VERSION}.",
            hint="Run daemon and training processes from the same release of baftd.",
        )

    @property
    def fd(self) -> int:
        """The open file, for an engine that maps it itself."""
        return self._fd

    @property
    def closed(self) -> bool:
        """`close` was called; `get` and `set` raise ValueError."""
        return self._closed

    def get(self, field: str) -> int:
        """Value of a word, unsigned."""
        place = FIELDS[field]
        return self._words[place.offset >> 3] if place.size == 8 else self._halves[place.offset >> 2]

    def set(self, field: str, value: int) -> None:
        """Write a word; a value that does not fit raises ValueError."""
        place = FIELDS[field]
        if place.size == 8:
            self._words[place.offset >> 3] = value
        else:
            self._halves[place.offset >> 2] = value

    def read(self) -> dict[str, int]:
        """All words, for a report; each one is whole, together they are no snapshot."""
        return {name: self.get(name) for name in FIELDS}

    @property
    def gate(self) -> Gate:
        """The gate's mode; an unknown one counts as CLOSED, as in the engine."""
        mode = self.get("gate") & 15
        return Gate(mode) if mode in tuple(Gate) else Gate.CLOSED

    def close(self) -> None:
        """Unmap and close; does not remove the file. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._words.release()
        self._halves.release()
        self._map.close()
        os.close(self._fd)

    def __enter__(self) -> ControlPage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
