"""The durable tier in a directory of a file system: local, or shared by all nodes.

A shard is written under a temporary name, synced, renamed, and its directory synced; then its manifest the same way.
So a manifest is never named before the bytes that it is about are on the device. `MANIFEST` of the checkpoint is
written by whoever commits, once every shard's manifest is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from baftd.checkpoint.identity import CheckpointId, Token, check_job_name
from baftd.checkpoint.shard import root_digest
from baftd.errors import JobNameError, NoRoom, UsageError, VerificationFailed
from baftd.storage.fence import Fence
from baftd.storage.files import FileOps, OsFiles
from baftd.storage.formats import (
    CheckpointManifest,
    PartOfCheckpoint,
    ShardManifest,
    check_chunks,
    manifest_digest,
    pack_lengths,
)
from baftd.storage.interface import (
    Cancel,
    ChunkTable,
    DurableCheckpoint,
    FetchedShard,
    Limiter,
    ShardRecord,
    Sink,
    Sweep,
    VerifyLine,
)
from baftd.storage.names import CHECKPOINT_MANIFEST, Writer, checkpoint_of, shard_manifest_name, shard_name
from baftd.storage.place import Place, make_job
from baftd.storage.problems import explained
from baftd.storage.reader import BulkReader
from baftd.storage.removal import Removal
from baftd.storage.verify import verify_shard
from baftd.storage.writer import BLOCK, PAGE, THREADS, Bounds, BulkWriter

__all__ = ["DirectoryTier"]


class DirectoryTier:
    """A `Tier` in the directory `root`, which is made when the first shard is written.

    `node`: this node's name; it stands in manifests and in temporary names. `file_ops`: the file operations.
    `readback`: read every shard again from the device before it is named. `clock`: monotonic seconds, of deadlines.
    `alive`: whether a process (pid, start in ticks) runs on this machine.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        node: str,
        file_ops: FileOps | None = None,
        readback: bool = False,
        clock: Callable[[], float] = time.monotonic,
        alive: Callable[[int, int], bool] | None = None,
        block: int = BLOCK,
        threads: int = THREADS,
    ) -> None:
        if block <= 0 or block % PAGE:
            raise UsageError(f"a write block of {block} bytes is not a multiple of {PAGE}")
        self.root = os.path.abspath(root)
        self.node = node
        self._ops: FileOps = file_ops if file_ops is not None else OsFiles()
        self._readback = readback
        self._clock = clock
        self._writer = Writer.of_node(node, alive)
        self._block = block
        self._threads = threads

    # ------------------------------------------------------------------------------------------ tokens

    def open_epoch(self, job: str, token: Token) -> None:
        """See `Tier.open_epoch`."""
        with explained(f"opening epoch {token.epoch} of job {job}", self._job_path(job)):
            make_job(self._ops, self.root, check_job_name(job))
            self._fence(job).open(token)

    def newest_token(self, job: str) -> Token | None:
        """See `Tier.newest_token`. Raises `FormatError` when the fence's file is damaged."""
        with explained(f"reading the newest epoch of job {job}", self._job_path(job)):
            try:
                return self._fence(job).newest()
            except FileNotFoundError:
                return None

    # ------------------------------------------------------------------------------------------ writing

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
        """See `Tier.write_shard`. `source_offset` is a multiple of 4096; `source_fd` can be mapped."""
        place = self._place(job, checkpoint)
        check_chunks(chunk_table, length, digests)
        if source_offset % PAGE:
            raise UsageError(f"the image begins at {source_offset} of its file, not at a multiple of {PAGE}")
        if token.epoch != checkpoint.epoch:
            raise UsageError(f"a token of epoch {token.epoch} cannot write {checkpoint} of job {job}")
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} is not one of a world of {world}")
        manifest = ShardManifest(
            job=job,
            epoch=checkpoint.epoch,
            incarnation=token.incarnation,
            step=checkpoint.step,
            updates=updates,
            parent=(parent.epoch, parent.step) if parent else None,
            rank=rank,
            world=world,
            node=self.node,
            nbytes=length,
            root_digest=root_digest(digests, length),
            tree_digest=tree_digest,
            plan=plan,
            lengths=pack_lengths(chunk_table),
            digests=digests,
        )
        encoded = manifest.encode()
        bounds = Bounds(self._clock, limiter, cancel, deadline, progress)
        shard = f"{place.path}/{shard_name(rank)}"
        with place.writing(token, f"writing the shard of rank {rank}", shard, length) as writing:
            writing.enter()
            existing = writing.existing(manifest)
            if existing is not None:
                return existing
            with writing.temporary(shard_name(rank)) as temporary:
                writer = BulkWriter(
                    self._ops,
                    source_fd,
                    source_offset,
                    length,
                    chunk_table,
                    digests,
                    bounds,
                    f"rank {rank}: {shard}",
                    self._block,
                    self._threads,
                )
                fd = writer.write(temporary)
                try:
                    self._ops.fsync(fd)
                    if self._readback:
                        BulkReader(
                            self._ops, chunk_table, digests, Bounds(self._clock), f"rank {rank}: {shard} read back"
                        ).read_open(fd)
                finally:
                    self._ops.close(fd)
                writing.name(temporary, shard)
            writing.publish(shard_manifest_name(rank), encoded)
        return manifest.record(shard, manifest_digest(encoded))

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
        """See `Tier.commit`."""
        place = self._place(job, checkpoint)
        ordered = sorted(records, key=lambda record: record.rank)
        if [record.rank for record in ordered] != list(range(world)):
            raise VerificationFailed(
                f"{place.path} cannot be committed: it takes one shard of each of {world} ranks, there are those of "
                f"{[record.rank for record in ordered][:8]}."
            )
        manifest = CheckpointManifest(
            job=job,
            epoch=checkpoint.epoch,
            incarnation=token.incarnation,
            step=checkpoint.step,
            updates=updates,
            parent=(parent.epoch, parent.step) if parent else None,
            world=world,
            plan_digest=plan_digest,
            nbytes=sum(record.nbytes for record in ordered),
            committed_by=self.node,
            parts=[
                PartOfCheckpoint(
                    rank=record.rank,
                    node=record.node,
                    nbytes=record.nbytes,
                    root_digest=record.root_digest,
                    tree_digest=record.tree_digest,
                    manifest_digest=record.manifest_digest,
                    plan=record.plan,
                )
                for record in ordered
            ],
        )
        with place.writing(token, "committing", f"{place.path}/{CHECKPOINT_MANIFEST}", 0) as writing:
            place.fence.check(token)
            stored = [writing.check_part(record, world) for record in ordered]
            committed = writing.is_committed(manifest)
            # Names may come from a process that died before it synced the directory.
            self._ops.fsync_directory(place.path)
            if not committed:
                writing.publish(CHECKPOINT_MANIFEST, manifest.encode())
        return DurableCheckpoint(
            job=job,
            checkpoint=checkpoint,
            state="complete",
            path=place.path,
            token=token,
            parent=parent,
            updates=updates,
            world=world,
            nbytes=manifest.nbytes,
            plan_digest=plan_digest,
            parts=tuple(stored),
        )

    # ------------------------------------------------------------------------------------------ reading

    def jobs(self) -> Sequence[str]:
        """See `Tier.jobs`."""
        with explained("listing jobs", self.root):
            try:
                names = self._ops.listdir(self.root)
            except FileNotFoundError:
                return []
            return sorted(name for name in names if self._is_job(name))

    def list(self, job: str) -> Sequence[DurableCheckpoint]:
        """See `Tier.list`."""
        path = self._job_path(job)
        with explained(f"listing the checkpoints of job {job}", path):
            try:
                names = self._ops.listdir(path)
            except FileNotFoundError:
                return []
            checkpoints = sorted((c for c in map(checkpoint_of, names) if c is not None), reverse=True)
            found = [self._place(job, checkpoint).inventory.describe() for checkpoint in checkpoints]
        return [one for one in found if one is not None]

    def describe(self, job: str, checkpoint: CheckpointId) -> DurableCheckpoint | None:
        """See `Tier.describe`."""
        place = self._place(job, checkpoint)
        with explained(f"reading {checkpoint} of job {job}", place.path):
            return place.inventory.describe()

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
        """See `Tier.verify`. `progress` is told the bytes read, of all shards together."""
        place = self._place(job, checkpoint)
        with explained(f"verifying {checkpoint} of job {job}", place.path):
            found = place.inventory.describe()
        if found is None:
            return [VerifyLine(False, f"{place.path}: there is no such checkpoint.")]
        lines = []
        if found.state != "complete":
            lines.append(VerifyLine(False, f"{found.path} is {found.state}: {found.reason}"))
        done = 0
        for record in found.parts:
            if ranks is not None and record.rank not in ranks:
                continue
            base = done
            told = (lambda read, base=base: progress(base + read)) if progress is not None else None
            bounds = Bounds(self._clock, limiter, cancel, None, told)
            lines.append(verify_shard(self._ops, place.inventory, record, bounds, self._threads))
            done += record.nbytes
        return lines

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
        """See `Tier.fetch`."""
        place = self._place(job, checkpoint)
        shard = f"{place.path}/{shard_name(rank)}"
        with explained(f"reading the shard of rank {rank}", shard):
            try:
                committed = place.inventory.checkpoint_manifest()
            except FileNotFoundError as error:
                raise VerificationFailed(f"{place.path} has no {CHECKPOINT_MANIFEST}: it is not complete.") from error
            if rank >= committed.world:
                raise UsageError(f"{place.path} holds the shards of {committed.world} ranks, not one of rank {rank}")
            try:
                manifest, record = place.inventory.shard(rank, committed.parts[rank].manifest_digest)
            except FileNotFoundError as error:
                raise VerificationFailed(f"rank {rank}: {error.filename} is missing.") from error
            if manifest.nbytes > sink.room:
                raise NoRoom(f"rank {rank}: {shard} has {manifest.nbytes} bytes, there is room for {sink.room}.")
            table = manifest.chunks()
            bounds = Bounds(self._clock, None, cancel, deadline, progress)
            what = f"rank {rank}: {shard}"
            BulkReader(self._ops, table, manifest.digests, bounds, what, sink, threads=self._threads).read(shard)
        return FetchedShard(record, manifest.updates, manifest.world, tuple(table), manifest.digests)

    # ------------------------------------------------------------------------------------------ removing

    def delete(self, job: str, checkpoint: CheckpointId, *, token: Token | None = None) -> int:
        """See `Tier.delete`."""
        place = self._place(job, checkpoint)
        with explained(f"deleting {checkpoint} of job {job}", place.path):
            try:
                if token is not None:
                    place.fence.check(token)
                return Removal(self._ops, self._writer, place.job_path).delete(checkpoint)
            except FileNotFoundError:
                return 0

    def sweep(self, job: str, *, dry_run: bool = False) -> Sweep:
        """See `Tier.sweep`."""
        path = self._job_path(job)
        with explained(f"sweeping job {job}", path):
            try:
                removal = Removal(self._ops, self._writer, path)
                if not dry_run:
                    removal.settle()
                    self._ops.fsync_directory(self.root)
                return removal.sweep(dry_run=dry_run)
            except FileNotFoundError:
                return Sweep()

    # ------------------------------------------------------------------------------------------ helpers

    def _job_path(self, job: str) -> str:
        return f"{self.root}/{check_job_name(job)}"

    def _is_job(self, name: str) -> bool:
        try:
            check_job_name(name)
            names = self._ops.listdir(f"{self.root}/{name}")
        except (JobNameError, NotADirectoryError, FileNotFoundError):
            return False
        except OSError:
            return True  # `list` of that job will say why; it must not hide the others
        return any(checkpoint_of(inner) is not None or inner.startswith("EPOCH-") for inner in names)

    def _place(self, job: str, checkpoint: CheckpointId) -> Place:
        return Place(self._ops, self._writer, self.root, check_job_name(job), checkpoint)

    def _fence(self, job: str) -> Fence:
        return Fence(self._ops, self._writer, job, self._job_path(job))
