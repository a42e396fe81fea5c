"""What a durable tier is: the values it deals in and the operations every implementation offers.

A tier keeps checkpoints, each one made of shards (one a rank). Every node writes the shards of its own ranks;
whoever commits writes the checkpoint's manifest, last. Without that manifest it is incomplete and never restored from.
All operations block and are meant for a worker thread; they are safe to call from several threads as long as no two
of them concern the same shard. Offsets, lengths and rates are in bytes, deadlines in seconds of the tier's clock.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from baftd.checkpoint.identity import CheckpointId, Token
from baftd.errors import FormatError, NoRoom, UsageError

__all__ = [
    "BufferSink",
    "Cancel",
    "ChunkTable",
    "DurableCheckpoint",
    "FetchedShard",
    "FileSink",
    "Limiter",
    "ShardRecord",
    "Sink",
    "Sweep",
    "Tier",
    "VerifyLine",
]

ChunkTable = Sequence[tuple[int, int]]
"""(offset, length) of every chunk of an image, in order, covering [0, length) without gaps."""

Limiter = Callable[[int], float]
"""Called with the number of bytes about to be written; returns the seconds to wait before writing them."""


class Cancel(Protocol):
    """How a caller stops a long operation: `threading.Event` is one."""

    def is_set(self) -> bool:
        """True once the operation shall stop."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until set or `timeout` seconds; True when set."""
        ...


@dataclass(frozen=True)
class ShardRecord:
    """A shard that is durable: verified, synced, named. What a node reports and what a commit is made of."""

    rank: int
    node: str
    path: str
    """Of the shard file, for people. A commit looks for its own tier's place of the shard, never here."""
    nbytes: int
    root_digest: bytes
    """16 bytes: `baftd.checkpoint.shard.root_digest` of the chunk digests and the length."""
    tree_digest: bytes
    """16 bytes: identity of the image's layout."""
    manifest_digest: bytes
    """16 bytes: xxh3-128 of the shard's manifest, by which a commit names it."""
    plan: bytes = b""
    """16 bytes: the plan under which replicated ranges were divided; empty: they were not."""

    def to_fields(self) -> dict[str, Any]:
        """Plain values for a journal or a message."""
        return {
            "rank": self.rank,
            "node": self.node,
            "path": self.path,
            "nbytes": self.nbytes,
            "root_digest": self.root_digest,
            "tree_digest": self.tree_digest,
            "manifest_digest": self.manifest_digest,
            "plan": self.plan,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ShardRecord:
        """The inverse of `to_fields`; raises `FormatError` naming a field that is missing or of another type."""
        kinds: dict[str, type] = {
            "rank": int,
            "node": str,
            "path": str,
            "nbytes": int,
            "root_digest": bytes,
            "tree_digest": bytes,
            "manifest_digest": bytes,
        }
        for name, kind in kinds.items():
            value = fields.get(name)
            if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
                raise FormatError(f"shard record: field {name!r} is {value!r}, not a {kind.__name__}")
            if name.endswith("_digest") and len(fields[name]) != 16:
                raise FormatError(f"shard record: field {name!r} has {len(fields[name])} bytes, not 16")
        plan = fields.get("plan", b"")
        if not isinstance(plan, bytes) or len(plan) not in (0, 16):
            raise FormatError(f"shard record: field 'plan' is {plan!r}, not 16 bytes")
        return cls(**{name: fields[name] for name in kinds}, plan=plan)


@dataclass(frozen=True)
class DurableCheckpoint:
    """What a tier holds under one (epoch, step). Only `complete` ones may be restored from."""

    job: str
    checkpoint: CheckpointId
    state: Literal["complete", "incomplete", "damaged"]
    path: str
    reason: str = ""
    """Why it is not complete: what is missing or damaged."""
    token: Token | None = None
    parent: CheckpointId | None = None
    """Where its epoch branched off; None: the job's first epoch, or unknown."""
    updates: int = 0
    world: int = 0
    nbytes: int = 0
    """Of all shards of a complete one; of the files that are there for others."""
    plan_digest: bytes = b""
    parts: tuple[ShardRecord, ...] = ()
    """By rank. Of an incomplete one: the shards that are there whole."""
    being_written: bool = False
    """A live process of this node is writing to it."""


@dataclass(frozen=True)
class VerifyLine:
    """One finding of `verify`: a shard (or, with rank None, the checkpoint's manifest)."""

    ok: bool
    text: str
    rank: int | None = None
    chunk: int | None = None
    """Index of the first damaged chunk."""
    nbytes: int = 0


@dataclass(frozen=True)
class FetchedShard:
    """A shard that was read, verified and handed over."""

    record: ShardRecord
    updates: int
    world: int
    chunks: tuple[tuple[int, int], ...]
    digests: bytes
    """16 bytes a chunk, recomputed from the bytes handed over."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep removed (or would remove): one line a file, and the bytes."""

    lines: tuple[str, ...] = ()
    nbytes: int = 0
    problems: tuple[str, ...] = field(default=())
    """What could not be removed, and why."""


class Sink(Protocol):
    """Where the bytes of a fetched shard go. Written in any order, by several threads at once, never overlapping."""

    @property
    def room(self) -> int:
        """Bytes that fit."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Take `data` to `offset` of the image. `data` is reused after the call."""
        ...


class FileSink:
    """A sink that is part of an open file, such as the image of a slot."""

    def __init__(self, fd: int, offset: int, room: int) -> None:
        """`fd` stays the caller's. The image begins at `offset`; at most `room` bytes are written."""
        self._fd = fd
        self._offset = offset
        self.room = room

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`; raises `OSError` (ENOSPC and others) as the file system does."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], self._offset + offset + done)


class BufferSink:
    """A sink that is memory of this process: a writable buffer or an address."""

    def __init__(self, memory: memoryview) -> None:
        """`memory`: writable, contiguous, one byte an item."""
        if memory.readonly or memory.format not in ("B", "<B") or not memory.contiguous:
            raise UsageError("a fetch needs writable contiguous memory of unsigned bytes")
        self._memory = memory
        self.room = len(memory)

    @classmethod
    def at(cls, address: int, room: int) -> BufferSink:
        """Memory at `address`; the caller keeps it mapped until the fetch has returned."""
        return cls(memoryview((ctypes.c_ubyte * room).from_address(address)).cast("B"))

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data`, without the GIL (assigning to a memoryview would hold it for the whole block)."""
        if offset < 0 or offset + len(data) > self.room:
            raise NoRoom(f"{len(data)} bytes at {offset} do not fit into {self.room} bytes of memory")
        target = (ctypes.c_ubyte * len(data)).from_buffer(self._memory, offset)
        source = data if not data.readonly else bytearray(data)
        ctypes.memmove(target, (ctypes.c_ubyte * len(data)).from_buffer(source), len(data))


class Tier(Protocol):
    """A durable tier. Implementations: `baftd.storage.directory.DirectoryTier`."""

    def open_epoch(self, job: str, token: Token) -> None:
        """Fence every older token of `job`: after the return (durable) they can name nothing more.

        Raises `Fenced` when a newer token, or another incarnation of the same epoch, is there already.
        """
        ...

    def newest_token(self, job: str) -> Token | None:
        """The token of the fence; None when no epoch was opened here."""
        ...

    def write_shard(
        self,
        job: str,
        checkpoint: CheckpointId,
        rank: int,
        source_fd: int,
        source_offset: int,
        length: int,
        chunk_table: ChunkTable,
        digests: bytes,
        *,
        token: Token,
        tree_digest: bytes,
        plan: bytes = b"",
        updates: int,
        world: int,
        parent: CheckpointId | None = None,
        limiter: Limiter | None = None,
        cancel: Cancel | None = None,
        deadline: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> ShardRecord:
        """Make `length` bytes at `source_offset` of `source_fd` durable as the shard of `rank`.

        `plan`: as in `ShardRecord`.
        `digests`: 16 bytes a chunk of `chunk_table`; every chunk that is handed to the storage is digested again and
        compared. Calling it again for a shard that is there already with the same digests returns its record.
        `progress` is told the bytes written so far, by worker threads, not always in order.

        Raises `VerificationFailed` (rank, file and chunk named; nothing is named in the tier), `Fenced`, `NoRoom`,
        `Degraded` (read-only, not permitted, input/output error, cancelled, past the deadline), `UsageError`.
        After an error no part of this attempt is left behind.
        """
        ...

    def commit(
        self,
        job: str,
        checkpoint: CheckpointId,
        records: Sequence[ShardRecord],
        *,
        plan_digest: bytes,
        token: Token,
        updates: int,
        world: int,
        parent: CheckpointId | None = None,
    ) -> DurableCheckpoint:
        """Name the checkpoint complete: write its manifest, last. Repeating it is harmless.

        Raises `VerificationFailed` when a shard is missing or not the one in `records`; `Fenced`, `NoRoom`, `Degraded`.
        """
        ...

    def jobs(self) -> Sequence[str]:
        """Names of the jobs that have something here, sorted."""
        ...

    def list(self, job: str) -> Sequence[DurableCheckpoint]:
        """What is there, newest (epoch, step) first. Reads manifests and sizes, not the shards' bytes."""
        ...

    def describe(self, job: str, checkpoint: CheckpointId) -> DurableCheckpoint | None:
        """The same for one checkpoint; None when there is no trace of it."""
        ...

    def verify(
        self,
        job: str,
        checkpoint: CheckpointId,
        *,
        ranks: Sequence[int] | None = None,
        limiter: Limiter | None = None,
        cancel: Cancel | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Sequence[VerifyLine]:
        """Read every byte again and compare. Damage is a line in the answer, not an exception."""
        ...

    def fetch(
        self,
        job: str,
        checkpoint: CheckpointId,
        rank: int,
        sink: Sink,
        *,
        cancel: Cancel | None = None,
        deadline: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> FetchedShard:
        """Bring a shard of a complete checkpoint into `sink`, each chunk verified before the next block is taken.

        Raises `VerificationFailed` (file, rank and chunk named) or `NoRoom` (it does not fit the sink). The sink's
        content counts for nothing until the call has returned.
        """
        ...

    def delete(self, job: str, checkpoint: CheckpointId, *, token: Token | None = None) -> int:
        """Remove a checkpoint so that no interruption leaves a manifest of missing bytes. Returns the bytes freed
        (0 when it was not there). With a `token`, raises `Fenced` when that is not the newest."""
        ...

    def sweep(self, job: str, *, dry_run: bool = False) -> Sweep:
        """Remove what dead writers of this node and interrupted deletions left behind.

        A daemon calls it before it takes its inventory: afterwards no power cut can take away what `list` shows.
        """
        ...
