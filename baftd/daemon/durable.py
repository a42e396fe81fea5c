"""The durable tier's work on this node: writing shards, naming checkpoints complete, retention.

The coordinator decides which steps become durable. Everything here is weak: a full or read-only directory costs a
warning and a counter, never a training step.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from baftd.checkpoint.commit import Committed, Retain, WriteManifest
from baftd.checkpoint.facts import Held, Source
from baftd.checkpoint.identity import CheckpointId
from baftd.checkpoint.orders import CancelPersist, StartPersist
from baftd.daemon.background import Work
from baftd.daemon.context import Context
from baftd.daemon.job import JobOnNode
from baftd.daemon.waiting import Waiters
from baftd.errors import BaftError, Degraded, NoRoom
from baftd.memory.slot_file import IMAGE_OFFSET
from baftd.storage.interface import ShardRecord, Tier
from baftd.storage.retention import to_delete

__all__ = ["DurableWriter"]


@dataclass(frozen=True)
class _Write:
    """The write of one shard."""

    cancel: threading.Event
    work: Work

    def stop(self) -> None:
        self.cancel.set()
        self.work.hurry()  # it may be held back


class DurableWriter:
    """Carries out durable work of all jobs. Only made where a durable tier is on."""

    def __init__(self, context: Context, tier: Tier, waiters: Waiters) -> None:
        self._context = context
        self._tier = tier
        self._waiters = waiters
        self._running: dict[tuple[str, CheckpointId, int], _Write] = {}
        self._warned: dict[str, str] = {}
        self.last_failure: dict[str, str] = {}
        """Job -> why its last durable write failed; gone with the next success."""
        self._naming = 0
        self._retaining = 0
        self._draining = False
        self._changed = asyncio.Event()
        waiters.wanted = self._hurry

    async def drained(self, jobs: Iterable[JobOnNode]) -> None:
        """Return when nothing is being written and no decided step is left to be written."""
        jobs = list(jobs)
        self._draining = True
        for write in self._running.values():
            write.work.hurry()
        while self._running or self._naming or any(job.view is not None and job.view.persist for job in jobs):
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------------ shards

    def attach(self, job: JobOnNode) -> None:
        """Carry out this job's orders."""
        job.persist = lambda order: self._start(job, order)
        job.cancel_persist = lambda order: self._cancel(job, order)

    def _start(self, job: JobOnNode, order: StartPersist) -> None:
        key = (job.name, order.shard.checkpoint, order.rank)
        if key in self._running:
            return
        work = self._context.workers.work("durable", order.shard.image_length, within=self._until_next(job))
        if self._draining or self._waiters.anybody(job):
            work.hurry()
        write = self._running[key] = _Write(threading.Event(), work)
        self._context.tasks.start(self._write(job, order, write), f"durable write of {job.name} rank {order.rank}")

    def _until_next(self, job: JobOnNode) -> float | None:
        """Seconds until the next step is to become durable, as far as that is known."""
        every, step = self._context.settings.durable_every, job.pace.median_step
        return min((seconds for seconds in (every.seconds, every.steps * step) if seconds), default=None)

    def _cancel(self, job: JobOnNode, order: CancelPersist) -> None:
        write = self._running.get((job.name, order.checkpoint, order.rank))
        if write is not None:
            write.stop()

    def _hurry(self, job: JobOnNode) -> None:
        """Somebody waits for a step of the job to be durable."""
        for (name, _, _), write in self._running.items():
            if name == job.name:
                write.work.hurry()

    async def _write(self, job: JobOnNode, order: StartPersist, write: _Write) -> None:
        shard = order.shard
        key = (job.name, shard.checkpoint, order.rank)
        try:
            with write.work:
                record = await self._write_where_room(job, order, write)
            job.counters.add("late_work", write.work.late)
        except asyncio.CancelledError:
            write.stop()
            raise
        except (BaftError, OSError) as error:
            self._running.pop(key, None)
            self._changed.set()
            self._failed(job, order.rank, shard.checkpoint, error)
            job.apply(job.core.persist_failed(order.rank, shard.checkpoint, str(error)))
            return
        self._running.pop(key, None)
        self._changed.set()
        if job.closed:
            return
        job.counters.add("durable_bytes", record.nbytes)
        job.open_manifest().hold(Held(shard, Source("durable", "", record.to_fields())), self._context.incarnation)
        job.apply(job.core.persisted(order.rank, shard.checkpoint, record.to_fields()))

    async def _write_where_room(self, job: JobOnNode, order: StartPersist, write: _Write) -> ShardRecord:
        """Write the shard; on a full disk once more when what retention is deleting has gone."""
        durable = self._context.workers.durable
        try:
            return await durable(self._write_shard, job, order, write)
        except NoRoom:
            if not self._retaining:
                raise
        while self._retaining:
            self._changed.clear()
            await self._changed.wait()
        return await durable(self._write_shard, job, order, write)

    def _write_shard(self, job: JobOnNode, order: StartPersist, write: _Write) -> ShardRecord:
        shard = order.shard
        with job.spans.span("durable", rank=order.rank, step=shard.step, bytes=shard.image_length):
            return self._write_paced(job, order, write)

    def _write_paced(self, job: JobOnNode, order: StartPersist, write: _Write) -> ShardRecord:
        shard, file = order.shard, job.files.get(order.rank, order.slot)
        layout = job.files.layout_of(order.rank, order.slot, shard.tree_digest)
        epoch = job.core.history.find(shard.token.epoch)
        return self._tier.write_shard(
            job.name,
            shard.checkpoint,
            order.rank,
            file.fd,
            IMAGE_OFFSET,
            shard.image_length,
            layout.chunks(shard.small_length),
            shard.digests,
            token=shard.token,
            tree_digest=shard.tree_digest,
            plan=shard.plan,
            updates=shard.updates,
            world=shard.world,
            parent=epoch.parent if epoch is not None else None,
            limiter=write.work,
            cancel=write.cancel,
        )

    def _failed(self, job: JobOnNode, rank: int | None, checkpoint: CheckpointId, error: BaseException) -> None:
        text = str(error)
        self.last_failure[job.name] = text
        job.counters.add("durable_failed")
        kind = re.sub(r"[0-9]+", "#", text)  # the same trouble at another step
        again = self._warned.get(job.name) == kind
        self._warned[job.name] = kind
        say = job.log.debug if again else job.log.warning  # the same reason is said once, and counted
        say("durable_write_failed", rank=rank, step=checkpoint.step, why=text, note="training goes on")
        failure = error if isinstance(error, BaftError) else Degraded(f"durable write of {checkpoint} failed: {error}.")
        self._waiters.failed(job, checkpoint, failure)

    # ------------------------------------------------------------------ checkpoints

    def write_manifest(self, job: JobOnNode, order: WriteManifest) -> None:
        """Every part is durable: name the checkpoint complete."""
        self._context.tasks.start(self._commit(job, order), f"manifest of {job.name} {order.checkpoint}")

    async def _commit(self, job: JobOnNode, order: WriteManifest) -> None:
        coordinator = self._context.coordinator
        self._naming += 1
        try:
            await self._name(job, order)
        except (BaftError, OSError) as error:
            self._failed(job, None, order.checkpoint, error)
            await coordinator.durable_failed(job.name, order.token, order.checkpoint.step, 0, str(error))
        else:
            await coordinator.manifest_written(job.name, order.checkpoint)
        finally:
            self._naming -= 1
            self._changed.set()

    async def _name(self, job: JobOnNode, order: WriteManifest) -> None:
        records = [ShardRecord.from_fields(part.place or {}) for part in order.parts]
        with job.spans.span("manifest", step=order.checkpoint.step):
            await self._write_name(job, order, records)

    async def _write_name(self, job: JobOnNode, order: WriteManifest, records: list[ShardRecord]) -> None:
        await self._context.workers.durable(
            lambda: self._tier.commit(
                job.name,
                order.checkpoint,
                records,
                plan_digest=order.plan_digest,
                token=order.token,
                updates=order.updates,
                world=order.world,
                parent=order.parent,
            )
        )

    def committed(self, job: JobOnNode, news: Committed) -> None:
        """A checkpoint is durable."""
        job.counters.add("durable_written")
        self._warned.pop(job.name, None)
        self.last_failure.pop(job.name, None)
        job.log.info(
            "durable", step=news.checkpoint.step, epoch=news.checkpoint.epoch, path=self.path(job, news.checkpoint)
        )

    def path(self, job: JobOnNode, checkpoint: CheckpointId) -> str:
        """Directory of a durable checkpoint."""
        return str((self._context.settings.durable_dir or "") / job.name / str(checkpoint))  # type: ignore[operator]

    # ------------------------------------------------------------------ retention

    def retain(self, job: JobOnNode, news: Retain) -> None:
        """Delete what retention lets go."""
        self._context.tasks.start(self._make_room(job, news), f"retention of {job.name}")

    async def _make_room(self, job: JobOnNode, news: Retain) -> None:
        self._retaining += 1
        try:
            await self._retain(job, news)
        finally:
            self._retaining -= 1
            self._changed.set()

    async def _retain(self, job: JobOnNode, news: Retain) -> None:
        token = job.token
        if token is None:
            return
        settings = self._context.settings
        history = job.core.history
        workers = self._context.workers
        found = await workers.durable(lambda: list(self._tier.list(job.name)))
        gone = to_delete(
            found,
            keep_last=settings.durable_keep,
            keep_every=settings.durable_keep_every,
            pinned=news.pinned,
            busy=[checkpoint for name, checkpoint, _ in self._running if name == job.name],
            abandoned=history.is_abandoned,
            quarantined=list(history.quarantined),
            current_epoch=token.epoch,
        )
        ranks = {checkpoint.checkpoint: range(checkpoint.world) for checkpoint in found}
        for checkpoint in gone:
            try:
                freed = await workers.durable(
                    lambda checkpoint=checkpoint: self._tier.delete(job.name, checkpoint, token=token)
                )
            except (BaftError, OSError) as error:
                job.log.warning("not_removed", step=checkpoint.step, epoch=checkpoint.epoch, why=str(error))
                continue
            if job.manifest is not None and not job.closed:
                for rank in ranks.get(checkpoint, ()):
                    job.manifest.release("durable", checkpoint, rank)
            job.counters.add("durable_removed")
            job.log.info("removed", step=checkpoint.step, epoch=checkpoint.epoch, bytes=freed)
