"""Deleting checkpoints, and what interrupted writers and deletions left behind.

Order of a deletion, each line on the device before the next begins:

    1. MANIFEST goes: the checkpoint is incomplete, nobody restores from it
    2. the directory is renamed to `.trash~...`: nobody looks at what is in it any more
    3. the files go, then the directory

so that no interruption leaves a manifest whose bytes are missing. (Where a rename is atomic, as POSIX has it, step 2
alone would do; mounted object stores rename a directory file by file.) `sweep` finishes what stopped in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from baftd.checkpoint.identity import CheckpointId, step_directory
from baftd.storage.files import FileOps
from baftd.storage.interface import Sweep
from baftd.storage.names import (
    CHECKPOINT_MANIFEST,
    Writer,
    checkpoint_of,
    is_temporary,
    is_trash,
    trash_target,
)

__all__ = ["Removal"]


@dataclass(frozen=True)
class Removal:
    """Removes things from one job's directory, `path`. Raises the `OSError`s of the file system."""

    ops: FileOps
    writer: Writer
    path: str

    def delete(self, checkpoint: CheckpointId) -> int:
        """Remove a checkpoint; bytes freed, 0 when there is no such directory."""
        name = step_directory(checkpoint)
        directory = f"{self.path}/{name}"
        try:
            names = self.ops.listdir(directory)
        except FileNotFoundError:
            return 0
        except NotADirectoryError:
            names = []  # a file of that name goes too
        if CHECKPOINT_MANIFEST in names:
            self._unlink(f"{directory}/{CHECKPOINT_MANIFEST}")
            self.ops.fsync_directory(directory)
        trash = f"{self.path}/{self.writer.trash(name)}"
        try:
            self.ops.rename(directory, trash)
        except FileNotFoundError:
            return 0  # another node was faster
        self.ops.fsync_directory(self.path)
        freed = self._empty(trash)
        self.ops.fsync_directory(self.path)
        return freed

    def settle(self) -> None:
        """Every name that is seen now is on the device afterwards: a process that died may have left names that a
        power cut would still take away."""
        for name in self.ops.listdir(self.path):
            if checkpoint_of(name) is not None:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or not ours
                    self.ops.fsync_directory(f"{self.path}/{name}")
        self.ops.fsync_directory(self.path)

    def sweep(self, *, dry_run: bool) -> Sweep:
        """Finish deletions, and remove temporary files of processes of this node that are gone."""
        lines: list[str] = []
        problems: list[str] = []
        total = 0
        for kind, path in self._leftovers():
            try:
                size = self._size(path)
                if not dry_run:
                    size = self._empty(path) if kind == "trash" else self._unlink(path)
            except OSError as error:
                problems.append(f"{path} could not be removed: {error.strerror}.")
                continue
            total += size
            why = "a deletion that was interrupted" if kind == "trash" else "its writer is gone"
            lines.append(f"{path}: {size} bytes, {why}")
        if lines and not dry_run:
            self.ops.fsync_directory(self.path)
        return Sweep(tuple(lines), total, tuple(problems))

    def _leftovers(self) -> Iterator[tuple[str, str]]:
        for name in sorted(self.ops.listdir(self.path)):
            path = f"{self.path}/{name}"
            if is_trash(name) and checkpoint_of(trash_target(name)) is not None:
                yield "trash", path
            elif self._is_dead(name):
                yield "temporary", path
            elif checkpoint_of(name) is not None:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or not ours
                    for inner in sorted(self.ops.listdir(path)):
                        if self._is_dead(inner):
                            yield "temporary", f"{path}/{inner}"

    def _is_dead(self, name: str) -> bool:
        return is_temporary(name) and self.writer.is_ours(name) and not self.writer.is_live(name)

    def _empty(self, directory: str) -> int:
        """Remove a directory that has lost its name, and all in it; bytes freed."""
        try:
            names = self.ops.listdir(directory)
        except FileNotFoundError:
            return 0
        except NotADirectoryError:
            return self._unlink(directory)
        freed = sum(self._unlink(f"{directory}/{name}") for name in names)
        with contextlib.suppress(FileNotFoundError):  # another node was faster
            self.ops.rmdir(directory)
        return freed

    def _unlink(self, path: str) -> int:
        try:
            size = self.ops.stat(path).st_size
            self.ops.unlink(path)
        except FileNotFoundError:
            return 0  # another node was faster
        return size

    def _size(self, path: str) -> int:
        try:
            names = self.ops.listdir(path)
        except NotADirectoryError:
            return self.ops.stat(path).st_size
        return sum(self.ops.stat(f"{path}/{name}").st_size for name in names)
