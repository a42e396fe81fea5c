"""The files in which the in-process coordinator keeps its state, behind one small interface.

The room that knows how journals are written is `memory`; the daemon hands its implementation in. Tests hand in one
that fails or ends the process at a chosen operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baftd.checkpoint.facts import Record

__all__ = ["OpenedLog", "RecordLog", "StateFiles"]


class RecordLog(Protocol):
    """An append-only file of records."""

    @property
    def wants_rewrite(self) -> bool:
        """Whether the file has grown enough to be worth a rewrite."""
        ...

    def append(self, *records: Record, sync: bool) -> None:
        """Add records; with `sync` they survive a power loss once this returns. Raises `NoRoom`, `OSError`."""
        ...

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the content atomically, and durably. Raises `NoRoom`, `OSError`."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


@dataclass(frozen=True)
class OpenedLog:
    """A log and what it held. `problem`: one sentence where some of it could not be read."""

    log: RecordLog
    records: Sequence[Record]
    problem: str | None = None


class StateFiles(Protocol):
    """Files below the state directory. All of it blocks; paths are absolute."""

    def directories(self, path: Path) -> Sequence[str]:
        """Names of the directories in `path`; empty where it does not exist."""
        ...

    def make_directory(self, path: Path) -> None:
        """Make a directory (0700), durably; nothing if it is there."""
        ...

    def open_log(self, path: Path) -> OpenedLog:
        """Open, or make, a log. A torn tail is cut off; what is damaged is kept aside and rewritten."""
        ...

    def read(self, path: Path) -> bytes | None:
        """Content of a small file; None where it does not exist."""
        ...

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file atomically and durably."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file; nothing where it does not exist."""
        ...

    def remove_directory(self, path: Path) -> None:
        """Remove a directory if it is empty."""
        ...
