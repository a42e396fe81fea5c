"""The manifests of the durable tier: values, their bytes, and the checks that make damage an error. Pure.

Both are CRC-framed MessagePack (`baftd.checkpoint.framing`). Fields unknown to this version are ignored; another
format version is refused by name.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta, Struct

from baftd.checkpoint.framing import encode_record, read_manifest
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.shard import CHUNK, root_digest
from baftd.errors import FormatError, UsageError
from baftd.limits import LARGEST
from baftd.storage.interface import ChunkTable, ShardRecord

__all__ = [
    "CheckpointManifest",
    "FencePost",
    "PartOfCheckpoint",
    "ShardManifest",
    "check_chunks",
    "manifest_digest",
]

VERSION = 1
_BATCH = 4096
"""Parts in one record of a checkpoint's manifest."""

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Epoch = Annotated[int, Meta(ge=1, le=LARGEST)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
World = Annotated[int, Meta(ge=1, le=1 << 20)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Plan = Annotated[bytes, Meta(max_length=16)]
Incarnation = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Text = Annotated[str, Meta(max_length=4096)]

T = TypeVar("T", bound=Struct)


class FencePost(Struct, frozen=True, kw_only=True):
    """Content of an `EPOCH-<n>` file: whose epoch it is."""

    job: Text
    epoch: Epoch
    incarnation: Incarnation

    def encode(self) -> bytes:
        """The file's bytes."""
        return encode_record(_fields(self, "baftd.epoch"))

    @classmethod
    def decode(cls, data: bytes, where: str) -> FencePost:
        """The inverse; raises `FormatError` naming `where`."""
        (record,) = read_manifest(data, where)
        return _typed(record, "baftd.epoch", cls, where)


class ShardManifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of `rank-<r>.manifest`: what the shard file beside it holds, and what its chunks must be."""

    job: Text
    epoch: Epoch
    incarnation: Incarnation
    step: Count
    updates: Count
    parent: tuple[Epoch, Count] | None
    """(epoch, step) where this epoch branched off."""
    rank: Rank
    world: World
    node: Text
    nbytes: Count
    """Of the shard file."""
    root_digest: Digest
    tree_digest: Digest
    plan: Plan = b""
    """Under which replicated ranges were divided; empty: they were not."""
    lengths: bytes
    """Lengths of the chunks in order, 4 bytes each, little-endian; their sum is `nbytes`."""
    digests: bytes
    """16 bytes a chunk, xxh3-128 as `xxhash.xxh3_128_digest` gives it."""

    @property
    def checkpoint(self) -> CheckpointId:
        """(epoch, step)."""
        return CheckpointId(self.epoch, self.step)

    @property
    def token(self) -> Token:
        """The token it was written under."""
        return Token(self.epoch, self.incarnation)

    @property
    def parent_checkpoint(self) -> CheckpointId | None:
        """Where the epoch branched off."""
        return CheckpointId(*self.parent) if self.parent else None

    def chunks(self) -> list[tuple[int, int]]:
        """(offset, length) of every chunk."""
        table = []
        offset = 0
        for (length,) in struct.iter_unpack("<I", self.lengths):
            table.append((offset, length))
            offset += length
        return table

    def encode(self) -> bytes:
        """The file's bytes."""
        return encode_record(_fields(self, "baftd.shard"))

    @classmethod
    def decode(cls, data: bytes, where: str) -> ShardManifest:
        """The inverse; raises `FormatError` naming `where` when anything in it contradicts the rest."""
        (record,) = read_manifest(data, where)
        found = _typed(record, "baftd.shard", cls, where)
        if len(found.lengths) % 4:
            raise FormatError(f"{where} is damaged: its chunk table has {len(found.lengths)} bytes.")
        try:
            check_chunks(found.chunks(), found.nbytes, found.digests)
        except UsageError as error:
            raise FormatError(f"{where} is damaged: {error.message}.") from error
        if root_digest(found.digests, found.nbytes) != found.root_digest:
            raise FormatError(f"{where} is damaged: its chunk digests do not give its root digest.")
        if found.rank >= found.world:
            raise FormatError(f"{where} is damaged: rank {found.rank} of a world of {found.world}.")
        return found

    def written_on(self, node: str) -> ShardManifest:
        """The same, as if written on `node`: after a restart another node may write a rank's shard again."""
        return msgspec.structs.replace(self, node=node)

    def record(self, path: str, digest: bytes) -> ShardRecord:
        """What a commit names. `path`: of the shard file; `digest`: of this manifest's bytes."""
        return ShardRecord(
            rank=self.rank,
            node=self.node,
            path=path,
            nbytes=self.nbytes,
            root_digest=self.root_digest,
            tree_digest=self.tree_digest,
            manifest_digest=digest,
            plan=self.plan,
        )


class PartOfCheckpoint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One shard in a checkpoint's manifest; its files are named by its rank."""

    rank: Rank
    node: Text
    nbytes: Count
    root_digest: Digest
    tree_digest: Digest
    manifest_digest: Digest
    plan: Plan = b""


class CheckpointManifest(Struct, frozen=True, kw_only=True):
    """Content of `MANIFEST`, the last file of a checkpoint: its presence says that every shard is there."""

    job: Text
    epoch: Epoch
    incarnation: Incarnation
    step: Count
    updates: Count
    parent: tuple[Epoch, Count] | None
    world: World
    plan_digest: Digest
    nbytes: Count
    """Of all shard files."""
    committed_by: Text
    """Node that wrote it."""
    parts: list[PartOfCheckpoint] = []
    """By rank, each rank once."""

    @property
    def checkpoint(self) -> CheckpointId:
        """(epoch, step)."""
        return CheckpointId(self.epoch, self.step)

    def encode(self) -> bytes:
        """The file's bytes: one record about the checkpoint, then records of 4,096 parts each."""
        head = _fields(self, "baftd.checkpoint")
        parts = head.pop("parts")
        head["part_count"] = len(parts)
        batches = [encode_record(parts[at : at + _BATCH]) for at in range(0, len(parts), _BATCH)]
        return encode_record(head) + b"".join(batches)

    @classmethod
    def decode(cls, data: bytes, where: str) -> CheckpointManifest:
        """The inverse; raises `FormatError` naming `where` when anything in it contradicts the rest."""
        head, *batches = read_manifest(data, where, records=None)
        if not all(isinstance(batch, list) for batch in batches):
            raise FormatError(f"{where} is damaged: a list of parts is not a list.")
        parts = [part for batch in batches for part in batch]
        if not isinstance(head, dict) or head.get("part_count") != len(parts):
            raise FormatError(f"{where} is damaged: it does not hold as many parts as it says.")
        found = _typed({**head, "parts": parts}, "baftd.checkpoint", cls, where)
        if [part.rank for part in found.parts] != list(range(found.world)):
            raise FormatError(f"{where} is damaged: its parts are not those of ranks 0 to {found.world - 1}.")
        if sum(part.nbytes for part in found.parts) != found.nbytes:
            raise FormatError(f"{where} is damaged: its parts do not add up to {found.nbytes} bytes.")
        return found


def manifest_digest(data: bytes) -> bytes:
    """16 bytes that stand for a manifest's bytes."""
    return bytes(xxhash.xxh3_128_digest(data))


def check_chunks(table: ChunkTable, length: int, digests: bytes) -> None:
    """Raise `UsageError` unless `table` covers [0, length) in order and has a digest for every chunk."""
    if len(digests) != 16 * len(table):
        raise UsageError(f"{len(table)} chunks have {len(digests)} bytes of digests, not 16 each")
    end = 0
    for number, (offset, size) in enumerate(table):
        if offset != end or not 0 < size <= CHUNK:
            raise UsageError(f"chunk {number} is {size} bytes at {offset}, expected 1 to {CHUNK} at {end}")
        end += size
    if end != length or length == 0:
        raise UsageError(f"the chunks cover {end} bytes, the image has {length}")


def pack_lengths(table: ChunkTable) -> bytes:
    """The lengths of a chunk table as a manifest holds them."""
    return struct.pack(f"<{len(table)}I", *(size for _, size in table))


def _fields(value: Struct, kind: str) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return {"format": kind, "version": VERSION, **plain}


def _typed(record: Any, kind: str, target: type[T], where: str) -> T:
    if not isinstance(record, dict) or record.get("format") != kind:
        raise FormatError(f"{where} is not a {kind} file.")
    if record.get("version") != VERSION:
        raise FormatError(
            f"{where} has version {record.get('version')!r} of the format {kind}; this baftd reads {VERSION}.",
            hint="Use a baftd of the version that wrote it, or a newer one.",
        )
    try:
        return msgspec.convert(record, target, strict=True)
    except msgspec.ValidationError as error:
        raise FormatError(f"{where} is damaged: {error}.") from error
