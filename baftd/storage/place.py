"""Where a checkpoint lies in a durable directory, and the steps by which something gets its name there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from baftd.checkpoint.identity import CheckpointId, Token, step_directory
from baftd.errors import BaftError, Fenced, FormatError, UsageError, VerificationFailed
from baftd.storage.fence import Fence
from baftd.storage.files import FileOps
from baftd.storage.formats import CheckpointManifest, ShardManifest
from baftd.storage.interface import ShardRecord
from baftd.storage.inventory import Inventory
from baftd.storage.names import CHECKPOINT_MANIFEST, Writer, shard_manifest_name
from baftd.storage.problems import translate
from baftd.storage.small import write_small

__all__ = ["Place", "Writing", "make_job"]


def make_job(ops: FileOps, root: str, job: str) -> None:
    """The directory of `job` and all above it, each one's name on the device."""
    missing = []
    above = root
    while True:
        try:
            ops.stat(above)
            break
        except FileNotFoundError:
            missing.append(above)
            above = os.path.dirname(above)
    for path in reversed(missing):
        _make_directory(ops, path)
    try:
        ops.stat(f"{root}/{job}")
    except FileNotFoundError:
        # Everything above is on the device before the job's directory is made: where that exists, they are. (A process
        # that died may have made directories without syncing their names.)
        path = root
        while path != "/":
            path = os.path.dirname(path)
            try:
                ops.fsync_directory(path)
            except PermissionError:
                break  # not ours to read, so it was not we who made anything in it
        _make_directory(ops, f"{root}/{job}")
    ops.fsync_directory(root)


def _make_directory(ops: FileOps, path: str) -> None:
    try:
        ops.mkdir(path)
    except FileExistsError:
        return  # another rank, node or an earlier process was faster


@dataclass(frozen=True)
class Place:
    """A checkpoint's directory under `root`, and who looks after it."""

    ops: FileOps
    writer: Writer
    root: str
    job: str
    checkpoint: CheckpointId

    @property
    def job_path(self) -> str:
        """Directory of the job."""
        return f"{self.root}/{self.job}"

    @property
    def path(self) -> str:
        """Directory of the checkpoint."""
        return f"{self.job_path}/{step_directory(self.checkpoint)}"

    @property
    def fence(self) -> Fence:
        """The job's fence."""
        return Fence(self.ops, self.writer, self.job, self.job_path)

    @property
    def inventory(self) -> Inventory:
        """What lies in the directory."""
        return Inventory(self.ops, self.writer, self.job, self.checkpoint, self.path)

    @contextmanager
    def writing(self, token: Token, what: str, path: str, need: int) -> Iterator[Writing]:
        """Write under `token`; errors of the file system become ours. One that comes from being fenced (the directory
        is deleted under a stale writer) says so. `need`: bytes, for the message of a full file system."""
        writing = Writing(self, token)
        try:
            yield writing
        except BaftError as error:
            error.message = " ".join([error.message, *writing.left])
            raise
        except OSError as error:
            try:
                if isinstance(error, FileNotFoundError):
                    self.fence.check(token)
                free = self.ops.free_bytes(self.root)
            except OSError:
                free = None
            except Fenced as fenced:
                raise fenced from error
            where = f"{what} of {self.checkpoint} of job {self.job}"
            explanation = translate(error, where, path, need=need, free=free)
            explanation.message = " ".join([explanation.message, *writing.left])
            raise explanation from error


@dataclass
class Writing:
    """One attempt to write something into `place` under `token`."""

    place: Place
    token: Token
    left: list[str] = field(default_factory=list)
    """A sentence for each temporary file that could not be removed."""

    def enter(self) -> None:
        """Make the directory for good; raises `Fenced` unless `token` is the newest."""
        ops, place = self.place.ops, self.place
        make_job(ops, place.root, place.job)
        place.fence.open(self.token)
        _make_directory(ops, place.path)
        ops.fsync_directory(place.job_path)

    def existing(self, manifest: ShardManifest) -> ShardRecord | None:
        """The record of the same shard when it is there already; makes room for `manifest` when another one is."""
        ops, place = self.place.ops, self.place
        names = ops.listdir(place.path)
        if shard_manifest_name(manifest.rank) in names:
            try:
                found, record = place.inventory.shard(manifest.rank)
                same = found.written_on(manifest.node) == manifest
            except (FormatError, FileNotFoundError):
                same = False
            if same:
                ops.fsync_directory(place.path)  # its writer may have died before it did so
                return record
        if CHECKPOINT_MANIFEST in names:
            raise UsageError(
                f"{place.path} is committed and cannot take another shard of rank {manifest.rank}.",
                hint="Delete the checkpoint first, if it is damaged.",
            )
        if shard_manifest_name(manifest.rank) in names:
            ops.unlink(f"{place.path}/{shard_manifest_name(manifest.rank)}")
            ops.fsync_directory(place.path)
        return None

    def check_part(self, record: ShardRecord, world: int) -> ShardRecord:
        """The shard that `record` is about, as it lies here; raises `VerificationFailed` if it is not that one."""
        refusal = f"{self.place.path} cannot be committed"
        try:
            manifest, stored = self.place.inventory.shard(record.rank, record.manifest_digest)
        except FormatError as error:
            raise VerificationFailed(f"{refusal}: rank {record.rank}: {error.message}") from error
        except FileNotFoundError as error:
            raise VerificationFailed(
                f"{refusal}: rank {record.rank}: {error.filename} is missing.",
                hint="All nodes of a job need the same durable_dir, on a file system that they share.",
            ) from error
        if (manifest.token, manifest.world) != (self.token, world):
            raise VerificationFailed(
                f"{refusal}: the shard of rank {record.rank} was written by epoch {manifest.epoch}, "
                f"incarnation {manifest.incarnation}, with {manifest.world} ranks."
            )
        if replace(record, path=stored.path) != stored:
            raise VerificationFailed(f"{refusal}: the shard of rank {record.rank} is another one.")
        return stored

    def is_committed(self, manifest: CheckpointManifest) -> bool:
        """Whether `manifest` is there already; raises `UsageError` if another one is."""
        try:
            found = self.place.inventory.checkpoint_manifest()
        except (FileNotFoundError, FormatError):
            return False  # a damaged one is replaced: all shards were just looked at
        same = (found.incarnation, found.plan_digest, found.parts) == (
            manifest.incarnation,
            manifest.plan_digest,
            manifest.parts,
        )
        if not same:
            raise UsageError(f"{self.place.path} is committed already, with other shards or under another plan")
        return True

    @contextmanager
    def temporary(self, final: str) -> Iterator[str]:
        """A temporary path for a file to be called `final`, removed after an error."""
        path = f"{self.place.path}/{self.place.writer.temporary(final)}"
        try:
            yield path
        except BaseException:
            try:
                self.place.ops.unlink(path)
            except FileNotFoundError:
                pass  # not made, or named
            except OSError as second:
                self.left.append(f"{path} could not be removed ({second.strerror}): `baftd gc` will do it.")
            raise

    def name(self, temporary: str, final: str) -> None:
        """Give a synced file its name, for good, unless the token was overtaken meanwhile."""
        self.place.fence.check(self.token)
        self.place.ops.rename(temporary, final)
        self.place.ops.fsync_directory(self.place.path)

    def publish(self, name: str, data: bytes) -> None:
        """A small file, whole or not at all."""
        with self.temporary(name) as temporary:
            write_small(self.place.ops, temporary, data)
            self.name(temporary, f"{self.place.path}/{name}")
