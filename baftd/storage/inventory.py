"""What lies in a checkpoint's directory, told from its manifests and the sizes of its files. Trusts nothing."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace

from baftd.checkpoint.framing import HEADER_BYTES, MAX_RECORD
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.errors import FormatError
from baftd.storage.files import FileOps
from baftd.storage.formats import CheckpointManifest, ShardManifest, manifest_digest
from baftd.storage.interface import DurableCheckpoint, ShardRecord
from baftd.storage.names import (
    CHECKPOINT_MANIFEST,
    Writer,
    is_temporary,
    rank_of_manifest,
    shard_manifest_name,
    shard_name,
)
from baftd.storage.small import read_small

__all__ = ["Inventory"]

_MANIFEST_LIMIT = HEADER_BYTES + MAX_RECORD
_CHECKPOINT_LIMIT = 1 << 30


@dataclass(frozen=True)
class Inventory:
    """Reads the directory `path` of one checkpoint."""

    ops: FileOps
    writer: Writer
    job: str
    checkpoint: CheckpointId
    path: str

    def describe(self) -> DurableCheckpoint | None:
        """What is there; None when there is no such directory. One that cannot be read is damaged, with the reason:
        it must not hide the others."""
        found = DurableCheckpoint(job=self.job, checkpoint=self.checkpoint, state="incomplete", path=self.path)
        try:
            names = self.ops.listdir(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            return replace(found, state="damaged", reason=f"{self.path}: {error.strerror}")
        being_written = any(self.writer.is_live(name) for name in names if is_temporary(name))
        found = replace(found, being_written=being_written)
        if CHECKPOINT_MANIFEST not in names:
            return self._incomplete(found, names)
        try:
            manifest = self.checkpoint_manifest()
        except FormatError as error:
            return replace(found, state="damaged", reason=error.message, nbytes=self._size_of(names))
        except OSError as error:
            return replace(found, state="damaged", reason=f"{self.path}/{CHECKPOINT_MANIFEST}: {error.strerror}")
        return self._complete(found, manifest)

    def checkpoint_manifest(self) -> CheckpointManifest:
        """The decoded `MANIFEST`. Raises `FormatError` (damaged, or about another checkpoint) or `OSError`."""
        path = f"{self.path}/{CHECKPOINT_MANIFEST}"
        manifest = CheckpointManifest.decode(read_small(self.ops, path, _CHECKPOINT_LIMIT), path)
        if (manifest.job, manifest.checkpoint) != (self.job, self.checkpoint):
            raise FormatError(f"{path} is about {manifest.checkpoint} of job {manifest.job}, not this checkpoint.")
        return manifest

    def shard(self, rank: int, expected_digest: bytes | None = None) -> tuple[ShardManifest, ShardRecord]:
        """Manifest and record of a shard whose files are there at full length.

        `expected_digest`: of the manifest's bytes. Raises `FormatError` naming what is wrong, `OSError` else.
        """
        path = f"{self.path}/{shard_manifest_name(rank)}"
        data = read_small(self.ops, path, _MANIFEST_LIMIT)
        digest = manifest_digest(data)
        manifest = ShardManifest.decode(data, path)
        if (manifest.job, manifest.checkpoint, manifest.rank) != (self.job, self.checkpoint, rank):
            raise FormatError(
                f"{path} is about rank {manifest.rank} of {manifest.checkpoint} of job {manifest.job}, not this shard."
            )
        if expected_digest is not None and digest != expected_digest:
            raise FormatError(f"{path} is not the one that the checkpoint was committed with.")
        shard = f"{self.path}/{shard_name(rank)}"
        status = self.ops.stat(shard)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{shard} is not an ordinary file.")
        if status.st_size != manifest.nbytes:
            raise FormatError(f"{shard} has {status.st_size} bytes instead of {manifest.nbytes}.")
        return manifest, manifest.record(shard, digest)

    def _complete(self, found: DurableCheckpoint, manifest: CheckpointManifest) -> DurableCheckpoint:
        records = []
        problems = []
        for part in manifest.parts:
            try:
                _, record = self.shard(part.rank, part.manifest_digest)
            except FormatError as error:
                problems.append(f"rank {part.rank}: {error.message}")
            except OSError as error:
                problems.append(f"rank {part.rank}: {error.filename or self.path}: {error.strerror}.")
            else:
                records.append(record)
        return replace(
            found,
            state="damaged" if problems else "complete",
            reason=_some(problems),
            token=Token(manifest.epoch, manifest.incarnation),
            parent=CheckpointId(*manifest.parent) if manifest.parent else None,
            updates=manifest.updates,
            world=manifest.world,
            nbytes=manifest.nbytes,
            plan_digest=manifest.plan_digest,
            parts=tuple(records),
        )

    def _incomplete(self, found: DurableCheckpoint, names: Iterable[str]) -> DurableCheckpoint:
        ranks = sorted(rank for rank in map(rank_of_manifest, names) if rank is not None)
        shards = []
        problems = []
        for rank in ranks:
            try:
                shards.append(self.shard(rank))
            except FormatError as error:
                problems.append(f"rank {rank}: {error.message}")
            except OSError as error:
                problems.append(f"rank {rank}: {error.filename or self.path}: {error.strerror}.")
        world = max((manifest.world for manifest, _ in shards), default=0)
        missing = f"no {CHECKPOINT_MANIFEST}: {len(shards)} of {world or 'an unknown number of'} shards are there"
        first = shards[0][0] if shards else None
        return replace(
            found,
            reason=_some([missing, *problems]),
            token=first.token if first else None,
            parent=first.parent_checkpoint if first else None,
            updates=max((manifest.updates for manifest, _ in shards), default=0),
            world=world,
            nbytes=self._size_of(names),
            parts=tuple(record for _, record in shards),
        )

    def _size_of(self, names: Iterable[str]) -> int:
        total = 0
        for name in names:
            try:
                total += self.ops.stat(f"{self.path}/{name}").st_size
            except FileNotFoundError:
                continue  # renamed or removed meanwhile
        return total


def _some(problems: list[str]) -> str:
    """The first three, and how many more."""
    more = len(problems) - 3
    return "; ".join(problems[:3]) + (f"; and {more} more" if more > 0 else "")
