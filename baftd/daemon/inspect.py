"""Answers to `baftd status`, `list`, `show`, `verify` and `plan`: what there is, read without changing anything."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baftd import __version__
from baftd.checkpoint.facts import JobView, ShardFacts
from baftd.checkpoint.history import BadSource, History
from baftd.checkpoint.identity import CheckpointId
from baftd.daemon.bubbles import bubbles, pacing_status
from baftd.daemon.clients import ClientTable
from baftd.daemon.context import Context
from baftd.daemon.durable import DurableWriter
from baftd.daemon.job import JobOnNode
from baftd.daemon.layouts import describe_layout
from baftd.errors import BaftError, Degraded, UsageError
from baftd.storage.interface import DurableCheckpoint, VerifyLine
from baftd.wire.messages import (
    BubblesReply,
    BubblesRequest,
    CheckpointRow,
    ClientStatus,
    JobStatus,
    LayoutRequest,
    ListReply,
    ListRequest,
    Progress,
    StatusReply,
    StatusRequest,
    Tier,
    TraceReply,
    TraceRequest,
    VerifyReply,
    VerifyRequest,
)
from baftd.wire.server import Peer

__all__ = ["Inspector", "own_memory"]


def own_memory() -> int:
    """Resident bytes of this process that are its own: without the slots' shared pages."""
    sizes: dict[str, int] = {}
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("VmRSS", "RssShmem"):
                sizes[name] = int(value.split()[0]) * 1024
    return sizes.get("VmRSS", 0) - sizes.get("RssShmem", 0)


@dataclass
class _Found:
    """What is known of one checkpoint."""

    memory: dict[int, ShardFacts] = field(default_factory=dict)
    durable: DurableCheckpoint | None = None


class Inspector:
    """Answers questions. Reads the durable tier in worker threads."""

    def __init__(
        self,
        context: Context,
        clients: ClientTable,
        jobs: Mapping[str, JobOnNode],
        durable: DurableWriter | None,
        started: float,
    ) -> None:
        self._context = context
        self._clients = clients
        self._jobs = jobs
        self._durable = durable
        self._started = started

    async def answer(
        self,
        peer: Peer,
        message: StatusRequest | ListRequest | LayoutRequest | BubblesRequest | TraceRequest | VerifyRequest,
    ) -> None:
        """Answer one question."""
        if isinstance(message, StatusRequest):
            self._context.server.send(peer, self._status(message))
        elif isinstance(message, ListRequest):
            rows = [row for name in await self._names(message.job) for row in await self._rows(name)]
            self._context.server.send(peer, ListReply(id=message.id, rows=rows))
        elif isinstance(message, LayoutRequest):
            self._context.server.send(peer, await describe_layout(self._context, self._jobs, message))
        elif isinstance(message, BubblesRequest | TraceRequest):
            self._context.server.send(peer, await self._told(message))
        else:
            self._context.server.send(peer, await self._verify(peer, message))

    async def _told(self, message: BubblesRequest | TraceRequest) -> BubblesReply | TraceReply:
        """What ranks have told of their steps."""
        job = self._jobs.get(message.job)
        if job is None:
            raise UsageError(
                f"job {message.job} has nothing on node {self._context.node}: no rank, and no snapshot in memory.",
                hint="With a job that finishes goes what its ranks have told. `baftd status` shows what is there.",
            )
        told = job.pacing.told
        if told is None:
            raise UsageError(
                f"no rank of job {message.job} has declared anything on node {self._context.node} since this daemon "
                f"started, {self._context.clock() - self._started:.0f} s ago.",
                hint="They do at their first boundary; `baftd status` shows what runs.",
            )
        if isinstance(message, BubblesRequest):
            return await bubbles(job, told, message)
        return told.traces.reply(message, self._context.node, told.epoch, job.spans)

    async def known(self) -> set[str]:
        """Jobs that have left a trace: in memory, in the history, in the durable tier."""
        names = {*self._jobs, *self._context.root.jobs(), *await self._context.coordinator.jobs()}
        tier = self._context.tier
        if tier is not None:
            try:
                names.update(await self._context.workers.urgent(lambda: list(tier.jobs())))
            except (BaftError, OSError) as error:
                self._context.log.warning("durable_unreadable", why=str(error))
        return names

    async def _names(self, only: str | None) -> list[str]:
        if only is not None:
            return [only]
        return sorted(await self.known())

    # ------------------------------------------------------------------ status

    def _status(self, message: StatusRequest) -> StatusReply:
        context, settings = self._context, self._context.settings
        counters = context.counters.as_dict()
        counters["bad_messages"] = sum(context.server.counters.refused.values())
        counters["foreign_peers"] = context.server.counters.refused.get("uid", 0)
        return StatusReply(
            id=message.id,
            node=context.node,
            pid=os.getpid(),
            version=__version__,
            uptime=context.clock() - self._started,
            coordinator=context.coordinator.name,
            shm_dir=str(settings.shm_dir),
            durable_dir=str(settings.durable_dir or ""),
            rss_bytes=own_memory(),
            counters=counters,
            jobs=[self._job(job) for name, job in sorted(self._jobs.items()) if message.job in (None, name)],
        )

    def _job(self, job: JobOnNode) -> JobStatus:
        view = job.view
        head = view.line[0] if view is not None and view.line else None
        committed: dict[str, int] = {}
        if view is not None:
            for tier, newest in (("memory", view.committed), ("durable", view.durable)):
                if newest is not None:
                    committed[tier] = newest.step
        held = job.training.held_ms
        known = {client.rank: client for client in self._clients.of_job(job.name)}
        ranks = sorted({*known, *(rank for rank, table in job.core.tables.items() if table.slots)})
        statuses: list[ClientStatus] = []
        for rank in ranks:
            client = known.get(rank)
            slots = job.core.describe(rank)
            if client is None:
                statuses.append(ClientStatus(rank=rank, pid=0, state="dead", slots=slots))
            else:
                statuses.append(
                    ClientStatus(rank=rank, pid=client.pid, state=client.state, step=client.step, slots=slots)
                )
        return JobStatus(
            job=job.name,
            epoch=job.core.history.epoch,
            world=head.world if head else 0,
            highest_step=job.core.history.highest_step,
            committed=committed,
            clients=statuses,
            counters=job.counters.as_dict(),
            last_skip=job.training.last_skip,
            durable_failure=self._durable.last_failure.get(job.name, "")[:4000] if self._durable is not None else "",
            held_ms_median=statistics.median(held) if held else 0.0,
            slot_bytes=job.files.usage(),
            restored=view.restored.step if view is not None and view.restored is not None else None,
            pacing=pacing_status(job),
        )

    # ------------------------------------------------------------------ list

    async def _find(self, name: str) -> tuple[dict[CheckpointId, _Found], History, JobView]:
        found: dict[CheckpointId, _Found] = {}
        job = self._jobs.get(name)
        if job is not None:
            for held in job.core.inventory().shards:
                found.setdefault(held.shard.checkpoint, _Found()).memory[held.shard.rank] = held.shard
        tier = self._context.tier
        if tier is not None:
            durable = await self._context.workers.urgent(lambda: list(tier.list(name)))
            for checkpoint in durable:
                found.setdefault(checkpoint.checkpoint, _Found()).durable = checkpoint
        coordinator = self._context.coordinator
        return found, await coordinator.history(name), await coordinator.view(name)

    async def _rows(self, name: str) -> list[CheckpointRow]:
        found, history, view = await self._find(name)
        rows = [self._row(name, checkpoint, what, history, view) for checkpoint, what in found.items()]
        return sorted(rows, key=lambda row: (row.epoch, row.step), reverse=True)

    def _row(self, name: str, checkpoint: CheckpointId, what: _Found, history: History, view: JobView) -> CheckpointRow:
        epoch = history.find(checkpoint.epoch)
        durable = what.durable
        facts = next(iter(what.memory.values()), None)
        world = epoch.world if epoch else (facts.world if facts else durable.world if durable else 0)
        bad = [source for source in history.bad_sources if source.checkpoint == checkpoint]
        damaged = {source.tier for source in bad}
        tiers: list[Tier] = []
        if world and len(what.memory) == world and "memory" not in damaged:
            tiers.append("memory")
        if durable is not None and durable.state == "complete" and "durable" not in damaged:
            tiers.append("durable")
        state, reason = "committed", ""
        if checkpoint in history.quarantined:
            state, reason = "quarantined", history.quarantined[checkpoint]
        elif epoch is not None and history.is_abandoned(checkpoint):
            state, reason = "abandoned", "training went on from an earlier step"
        elif bad:
            state = "committed" if tiers else "quarantined"
            reason = "; ".join(f"rank {source.rank} ({source.tier}): {source.reason}" for source in bad)
        elif not tiers:
            state = "incomplete"
            reason = durable.reason if durable is not None else f"{len(what.memory)} of {world} shards are here"
            if checkpoint.epoch == history.epoch and checkpoint.step in view.dead:
                state, reason = "dead", "a rank has no snapshot of it"
        return CheckpointRow(
            job=name,
            epoch=checkpoint.epoch,
            step=checkpoint.step,
            updates=facts.updates if facts else durable.updates if durable else 0,
            tiers=tiers,
            parts=max(len(what.memory), len(durable.parts) if durable else 0),
            world=world,
            bytes=sum(shard.image_length for shard in what.memory.values()) or (durable.nbytes if durable else 0),
            state=state,
            pinned=checkpoint in (view.restored, view.durable),
            path=durable.path if durable is not None else "",
            reason=reason[:4000],
        )

    # ------------------------------------------------------------------ verify

    async def _verify(self, peer: Peer, message: VerifyRequest) -> VerifyReply:
        found, _, _ = await self._find(message.job)
        chosen = sorted(
            checkpoint
            for checkpoint in found
            if message.step in (None, checkpoint.step) and message.epoch in (None, checkpoint.epoch)
        )
        if not chosen:
            what = f"step {message.step} of job {message.job}" if message.step is not None else f"job {message.job}"
            raise UsageError(f"nothing of {what} is here.", hint="`baftd list` shows what there is.")
        lines: list[str] = []
        good = True
        for number, checkpoint in enumerate(chosen):
            progress = Progress(id=message.id, what=str(checkpoint), done=number, total=len(chosen))
            self._context.server.send(peer, progress)
            for ok, line in await self._verify_one(message.job, checkpoint, found[checkpoint]):
                good = good and ok
                lines.append(line)
        return VerifyReply(id=message.id, ok=good, lines=lines)

    async def _verify_one(self, name: str, checkpoint: CheckpointId, what: _Found) -> list[tuple[bool, str]]:
        workers, job = self._context.workers, self._jobs.get(name)
        lines: list[tuple[bool, str]] = []
        bad: list[BadSource] = []
        for rank, shard in sorted(what.memory.items()):
            slot = job.core.holding(rank, checkpoint) if job is not None else None
            if job is None or slot is None:
                continue
            where = f"{checkpoint} rank {rank} memory {job.arena.slot_path(rank, slot.index)}"
            generation = slot.generation
            try:
                seen = await workers.urgent(job.files.verify, rank, slot.index, workers.cancel)
                problem = "" if seen.root_digest == shard.root_digest else "its bytes are not those of its digest"
            except Degraded:
                raise
            except (BaftError, OSError) as error:
                problem = str(error)
            if slot.generation != generation or slot.shard != shard:
                continue  # it was granted anew while it was read: the step is superseded
            lines.append(
                (not problem, f"{'BAD  ' if problem else 'ok   '} {where} {problem or f'{shard.image_length} bytes'}")
            )
            if problem:
                bad.append(BadSource(checkpoint, rank, "memory", self._context.node, problem))
        durable = await self._verify_durable(name, checkpoint, what.durable)
        for line in durable:
            lines.append((line.ok, f"{'ok   ' if line.ok else 'BAD  '} {checkpoint} durable {line.text}"))
            if not line.ok and line.rank is not None:
                bad.append(BadSource(checkpoint, line.rank, "durable", "", line.text))
        token = (await self._context.coordinator.view(name)).token
        for source in bad:
            if token is not None:
                await self._context.coordinator.source_failed(name, token, source)
            if job is not None and source.tier == "memory":
                job.apply(job.core.damaged(source.rank, checkpoint, source.reason))
        return lines

    async def _verify_durable(
        self, name: str, checkpoint: CheckpointId, known: DurableCheckpoint | None
    ) -> Sequence[VerifyLine]:
        """Findings about a durable checkpoint; none for one that is only being written, or was removed meanwhile."""
        tier, workers = self._context.tier, self._context.workers
        if tier is None or known is None or known.state == "incomplete":
            return ()
        found = await workers.urgent(lambda: list(tier.verify(name, checkpoint, cancel=workers.cancel)))
        if all(line.ok for line in found):
            return found
        now = await workers.urgent(tier.describe, name, checkpoint)
        return found if now is not None and now.state != "incomplete" else ()
