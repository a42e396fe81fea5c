"""A file system in memory that knows what a power cut may take away.

`MemoryFiles` implements `baftd.storage.files.FileOps`. Beside its present state it keeps what is on the device:
bytes of a file from its last fsync, names in a directory from its last fsync of the directory. What came after is
pending, and a power cut keeps any subset of it: of the changes of a directory each one on its own (a rename is one
change), of the data of a file any subset of the writes
(of more than five: the first or last half), torn ones, or only the new length (zeros).
`states` enumerates the outcomes, `outcome` builds the file system that one of them leaves.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Killed", "MemoryFiles", "Op"]


class Killed(BaseException):
    """The process is dead: raised by the operation at which it was killed and by every later one."""


@dataclass(frozen=True)
class Op:
    """One operation that changes something, or syncs it."""

    kind: str
    path: str
    target: str = ""
    idle: bool = False
    """A sync of something that has nothing pending."""


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, bytes) of a write; (length, None) of a new length."""

    def apply(self, change: tuple[int, bytes | None]) -> None:
        _change(self.data, change)
        self.pending.append(change)

    def sync(self) -> None:
        self.durable = bytes(self.data)
        self.pending.clear()

    def variants(self) -> list[bytes]:
        """What the device may hold; the first is the least."""
        if not self.pending:
            return [self.durable]
        half = len(self.pending) // 2
        if len(self.pending) <= 5:
            masks = list(range(1 << len(self.pending)))
        else:
            low = (1 << half) - 1
            masks = [0, low, ((1 << len(self.pending)) - 1) ^ low, (1 << len(self.pending)) - 1]
        found = []
        for mask in masks:
            data = bytearray(self.durable)
            for bit, change in enumerate(self.pending):
                if mask >> bit & 1:
                    _change(data, change)
            found.append(bytes(data))
        torn = bytearray(self.data)
        for offset, written in self.pending:
            if written is not None:
                middle = len(written) // 2
                torn[offset + middle : offset + len(written)] = bytes(len(written) - middle)
        length_only = bytearray(self.durable[: len(self.data)])
        length_only.extend(bytes(len(self.data) - len(length_only)))
        found += [bytes(torn[: len(self.data)]), bytes(length_only)]
        return list(dict.fromkeys(found))


@dataclass(eq=False)
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    durable: dict[str, _File | _Directory] = field(default_factory=dict)
    pending: list[dict[str, _File | _Directory | None]] = field(default_factory=list)

    def change(self, names: dict[str, _File | _Directory | None]) -> None:
        _rename(self.entries, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()


_Node = _File | _Directory


class MemoryFiles:
    """`FileOps` in memory. `before` is called with every operation before it happens (and may raise)."""

    def __init__(self, root: _Directory | None = None, before: Callable[[Op], None] | None = None) -> None:
        self.root = root or _Directory()
        self.before = before
        self.after: Callable[[Op], None] | None = None
        self.drop: Callable[[Op, int], bool] = lambda op, number: False
        """Says of a sync whether to forget it. For tests of the test."""
        self.log: list[Op] = []
        self.direct = True
        self._open: dict[int, tuple[str, _File]] = {}
        self._numbers = itertools.count(1 << 20)
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------- FileOps

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        with self._lock:
            parent, name = self._parent(path)
            node = parent.entries.get(name)
            if flags & os.O_CREAT and node is None:
                with self._op("create", path):
                    node = _File()
                    parent.change({name: node})
            elif flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "File exists", path)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            if isinstance(node, _Directory):
                raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
            fd = next(self._numbers)
            self._open[fd] = (path, node)
            return fd

    def close(self, fd: int) -> None:
        self._open.pop(fd)

    def set_direct(self, fd: int, on: bool) -> None:
        if on and not self.direct:
            raise OSError(errno.EINVAL, "Invalid argument")

    def preallocate(self, fd: int, length: int) -> bool:
        path, file = self._open[fd]
        with self._op("preallocate", path):
            if length > len(file.data):
                file.apply((length, None))
        return True

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        path, file = self._open[fd]
        with self._op("pwrite", path):
            file.apply((offset, bytes(data)))
        return len(data)

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            data = self._open[fd][1].data[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            return len(data)

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        pass  # promises nothing

    def finish_writeback(self, fd: int, offset: int, length: int) -> None:
        pass  # promises nothing

    def truncate(self, fd: int, length: int) -> None:
        path, file = self._open[fd]
        with self._op("truncate", path):
            file.apply((length, None))

    def fsync(self, fd: int) -> None:
        path, file = self._open[fd]
        with self._op("fsync", path, idle=not file.pending) as dropped:
            if not dropped:
                file.sync()

    def fsync_directory(self, path: str) -> None:
        directory = self._directory(path)
        with self._op("fsync_directory", path, idle=not directory.pending) as dropped:
            if not dropped:
                directory.sync()

    def rename(self, source: str, target: str) -> None:
        parent, name = self._parent(source)
        other, new = self._parent(target)
        assert parent is other, "a rename between directories is not modelled"
        node = self._existing(source)
        with self._op("rename", source, target):
            parent.change({name: None, new: node})

    def link(self, source: str, target: str) -> None:
        parent, name = self._parent(target)
        if name in parent.entries:
            raise FileExistsError(errno.EEXIST, "File exists", source, None, target)
        node = self._existing(source)
        with self._op("link", source, target):
            parent.change({name: node})

    def unlink(self, path: str) -> None:
        self._existing(path)
        parent, name = self._parent(path)
        with self._op("unlink", path):
            parent.change({name: None})

    def mkdir(self, path: str) -> None:
        parent, name = self._parent(path)
        if name in parent.entries:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        with self._op("mkdir", path):
            parent.change({name: _Directory()})

    def rmdir(self, path: str) -> None:
        if self._directory(path).entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        parent, name = self._parent(path)
        with self._op("rmdir", path):
            parent.change({name: None})

    def listdir(self, path: str) -> list[str]:
        with self._lock:
            return list(self._directory(path).entries)

    def stat(self, path: str) -> os.stat_result:
        node = self._existing(path)
        mode, size = (stat.S_IFDIR, 0) if isinstance(node, _Directory) else (stat.S_IFREG, len(node.data))
        return os.stat_result((mode | 0o600, 0, 0, 1, 0, 0, size, 0, 0, 0))

    def size(self, fd: int) -> int:
        return len(self._open[fd][1].data)

    def free_bytes(self, path: str) -> int:
        return 1 << 40

    # ------------------------------------------------------------------------------------- power cuts

    def tree(self) -> dict[str, bytes]:
        """Every file by path."""
        found: dict[str, bytes] = {}

        def walk(path: str, directory: _Directory) -> None:
            for name, node in directory.entries.items():
                if isinstance(node, _Directory):
                    walk(f"{path}/{name}", node)
                else:
                    found[f"{path}/{name}"] = bytes(node.data)

        walk("", self.root)
        return found

    def states(self, seed: int, exhaustive: int = 256, samples: int = 48) -> Iterator[MemoryFiles]:
        """What a power cut now may leave: all outcomes if there are at most `exhaustive`, else the extremes, those
        with one change lost or one kept, and `samples` drawn with `seed`."""
        with self._lock:
            directories, files = self._unsettled()
            sizes = [2 ** len(directory.pending) for directory in directories]
            sizes += [len(file.variants()) for file in files]
            total = 1
            for size in sizes:
                total *= size
            choices: Iterator[Sequence[int]]
            if total <= exhaustive:
                choices = itertools.product(*(range(size) for size in sizes))
            else:
                choices = iter(self._sampled(directories, files, sizes, random.Random(seed), samples))
            for choice in choices:
                yield self._outcome(directories, files, choice)

    def _sampled(
        self,
        directories: list[_Directory],
        files: list[_File],
        sizes: list[int],
        draw: random.Random,
        samples: int,
    ) -> list[tuple[int, ...]]:
        nothing = [0] * len(sizes)
        names_only = [2 ** len(d.pending) - 1 for d in directories] + [0] * len(files)
        everything = [size - 1 for size in sizes]
        found = [tuple(nothing), tuple(names_only), tuple(everything)]
        for number, directory in enumerate(directories):
            for bit in range(len(directory.pending)):
                for base in (nothing, names_only):
                    changed = list(base)
                    changed[number] ^= 1 << bit
                    found.append(tuple(changed))
        found += [tuple(draw.randrange(size) for size in sizes) for _ in range(samples)]
        return list(dict.fromkeys(found))

    def _unsettled(self) -> tuple[list[_Directory], list[_File]]:
        directories: list[_Directory] = []
        files: list[_File] = []
        seen: set[int] = set()
        todo: list[_Node] = [self.root]
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, _File):
                if node.pending:
                    files.append(node)
                continue
            if node.pending:
                directories.append(node)
            todo += [*node.durable.values(), *node.entries.values()]
            todo += [child for names in node.pending for child in names.values() if child is not None]
        return directories, files

    def _outcome(self, directories: list[_Directory], files: list[_File], choice: Sequence[int]) -> MemoryFiles:
        kept = {id(directory): mask for directory, mask in zip(directories, choice, strict=False)}
        content = {id(file): file.variants()[n] for file, n in zip(files, choice[len(directories) :], strict=True)}
        made: dict[int, _Node] = {}

        def build(node: _Node) -> _Node:
            if id(node) in made:
                return made[id(node)]
            if isinstance(node, _File):
                data = content.get(id(node), node.durable)
                made[id(node)] = _File(bytearray(data), data)
                return made[id(node)]
            entries = dict(node.durable)
            for bit, names in enumerate(node.pending):
                if kept.get(id(node), 0) >> bit & 1:
                    _rename(entries, names)
            copy = _Directory()
            made[id(node)] = copy
            copy.entries = {name: build(child) for name, child in entries.items()}
            copy.durable = dict(copy.entries)
            return copy

        root = build(self.root)
        assert isinstance(root, _Directory)
        return MemoryFiles(root)

    # ------------------------------------------------------------------------------------- helpers

    def _op(self, kind: str, path: str, target: str = "", *, idle: bool = False) -> _Doing:
        return _Doing(self, Op(kind, path, target, idle))

    def _directory(self, path: str) -> _Directory:
        node: _Node = self.root
        for name in path.strip("/").split("/"):
            if not name:
                continue
            if isinstance(node, _File):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
            child = node.entries.get(name)
            if child is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            node = child
        if isinstance(node, _File):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
        return node

    def _parent(self, path: str) -> tuple[_Directory, str]:
        above, _, name = path.rpartition("/")
        return self._directory(above), name

    def _existing(self, path: str) -> _Node:
        if path == "/":
            return self.root
        parent, name = self._parent(path)
        if name not in parent.entries:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return parent.entries[name]


class _Doing:
    """One operation: `before` may raise, then it happens (a sync may be dropped), then `after` looks."""

    def __init__(self, files: MemoryFiles, op: Op) -> None:
        self._files = files
        self._op = op

    def __enter__(self) -> bool:
        files = self._files
        files._lock.acquire()
        try:
            if files.before is not None:
                files.before(self._op)
        except BaseException:
            files._lock.release()
            raise
        files.log.append(self._op)
        return self._op.kind.startswith("fsync") and files.drop(self._op, len(files.log) - 1)

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None and self._files.after is not None:
                self._files.after(self._op)
        finally:
            self._files._lock.release()


def _change(data: bytearray, change: tuple[int, bytes | None]) -> None:
    at, written = change
    if written is None:
        del data[at:]
        data.extend(bytes(at - len(data)))
        return
    if len(data) < at:
        data.extend(bytes(at - len(data)))
    data[at : at + len(written)] = written


def _rename(entries: dict[str, _Node], names: dict[str, _Node | None]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node
