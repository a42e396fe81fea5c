"""The control page of a rank: 4 KiB of shared memory that client, copy engine and daemon see at once.

The daemon creates the file, the client writes it; the engine's gate, its progress and the fence are words in
it, so that opening a window costs no message. `FIELDS` below is the one table of offsets; the C extension
exports its own and a test compares them. All words are little-endian and naturally aligned; this module reads
and writes whole words, which the CPUs we run on do in one piece. Only the engine relies on their order.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["FIELDS", "MAGIC", "PAGE_BYTES", "VERSION", "ControlPage", "Field", "Gate"]

PAGE_BYTES = 4096
MAGIC = int.from_bytes(b"BAFTCTL\x01", "little")
VERSION = 1


class Gate(enum.IntEnum):
    """Low four bits of the gate word; the rest counts changes."""

    CLOSED = 0
    OPEN = 1
    FLUSH = 2
    QUIT = 3


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
    "heartbeat": Field(0x058, 8, "raised by the client's I/O thread"),
    # training: written by the training thread
    "step": Field(0x080, 8, "newest boundary"),
    "updates": Field(0x088, 8, "optimizer updates at that boundary"),
    "fence": Field(0x090, 8, "newest step whose fence was passed (sealed or dropped)"),
    "held_ns": Field(0x098, 8, "time the training thread was held for the last snapshot"),
    "held_total_ns": Field(0x0A0, 8, "the same, sum since the client took the page"),
    # gate: written by whoever opens and closes windows; a futex
    "gate": Field(0x0C0, 4, "Gate in the low four bits, a count of changes above"),
    # windows: written with the gate; 0x118-0x13F stay free for byte budgets
    "pace": Field(0x100, 8, "bytes a second while the gate is open, 0: unlimited"),
    "window_opened": Field(0x108, 8, "times the gate was opened"),
    "window_closed": Field(0x110, 8, "times it was closed"),
    # engine: written by the copying threads
    "bytes_copied": Field(0x140, 8, "of the armed copy, in the slot and visible"),
    "bytes_total": Field(0x148, 8, "of the armed copy"),
    "chunks_done": Field(0x150, 8, "digest chunks finished"),
    "copies": Field(0x158, 8, "copies armed since the engine began"),
    "engine": Field(0x160, 4, "EngineState of baft_client.engine"),
    # tests only: read by an engine that was built with EngineHooks(hold=True)
    "hold_at": Field(0x180, 8, "chunk before which such an engine stops"),
}
"""Every word of the page."""


class ControlPage:
    """A mapped control page. `get` and `set` by field name; `gate` for the mode alone.

    A process that opened it may close it at any time; an engine has a mapping of its own.
    """

    path: Path

    @classmethod
    def create(cls, path: Path | str, *, rank: int) -> ControlPage:
        """Make the file (it must not exist), reserve its memory and write magic, version and rank.

        Raises NoRoom when the file system is full, FileExistsError when the path is taken.
        """
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path | str) -> ControlPage:
        """Map an existing page for reading and writing. Raises FormatError when it is not one."""
        raise NotImplementedError

    @property
    def fd(self) -> int:
        """The open file, for an engine that maps it itself."""
        raise NotImplementedError

    def get(self, field: str) -> int:
        """Value of a word, unsigned."""
        raise NotImplementedError

    def set(self, field: str, value: int) -> None:
        """Write a word."""
        raise NotImplementedError

    @property
    def gate(self) -> Gate:
        """The gate's mode."""
        raise NotImplementedError

    def close(self) -> None:
        """Unmap and close; does not remove the file. May be called twice."""
        raise NotImplementedError

    def __enter__(self) -> ControlPage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
