"""Removing what nobody wants: slots of jobs that are over, leftovers in the durable directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping

from baftd.daemon.clients import ClientTable
from baftd.daemon.context import Context
from baftd.daemon.job import JobOnNode
from baftd.errors import BaftError
from baftd.memory.arena import Claim, Swept, sweep
from baftd.wire.messages import GcReply, GcRequest
from baftd.wire.server import Peer

__all__ = ["Housekeeping"]

SWEEP_EVERY = 600.0
"""Seconds between two looks for slots that are past `memory_retention`."""


class Housekeeping:
    """`release` frees the memory of a job that the daemon has open."""

    def __init__(
        self,
        context: Context,
        clients: ClientTable,
        jobs: MutableMapping[str, JobOnNode],
        release: Callable[[JobOnNode], None],
    ) -> None:
        self._context = context
        self._clients = clients
        self._jobs = jobs
        self._release = release
        self._finished: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        context.make_room = self.make_room

    def start(self) -> None:
        """Sweep from time to time."""
        self._timer = asyncio.get_running_loop().call_later(SWEEP_EVERY, self._again)

    def close(self) -> None:
        """Sweep no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _again(self) -> None:
        self._context.tasks.start(self._sweep_and_go_on(), "sweep")

    async def _sweep_and_go_on(self) -> None:
        try:
            await self.sweep()
        finally:
            self.start()

    def claim(self, name: str) -> Claim:
        """What the daemon knows of a job that has files in the arena."""
        job = self._jobs.get(name)
        if job is None:
            return Claim.FINISHED if name in self._finished else Claim.UNKNOWN
        if job.orphans or job.rendezvous.incarnations or job.pinned:
            return Claim.LIVE
        if any(client.alive and client.state not in ("finished", "left") for client in self._clients.of_job(name)):
            return Claim.LIVE
        return Claim.FINISHED if job.view is not None and job.view.finished else Claim.UNFINISHED

    async def sweep(self, need: int = 0) -> list[Swept]:
        """Remove slots of finished jobs and of those past their retention; more, oldest first, until `need` bytes
        have become free, if they can be had at all."""
        coordinator = self._context.coordinator
        for name in self._context.root.jobs():
            if name not in self._jobs and (await coordinator.view(name)).finished:
                self._finished.add(name)
        removed = self._sweep(need, dry_run=False)
        self._finished.clear()
        for swept in removed:
            self._context.counters.add("swept_files")
            self._context.log.info("swept", job=swept.job, bytes=swept.bytes, why=swept.reason)
        return removed

    def _sweep(self, need: int, *, dry_run: bool) -> list[Swept]:
        # The clock of files is the wall clock; it only says which of this node's files are oldest.
        found = sweep(
            self._context.root,
            claim=self.claim,
            retention=self._context.settings.memory_retention,
            now=time.time(),
            need=need,
            dry_run=True,
        )
        if not dry_run:
            for swept in found:
                self._remove(swept.job)
        return found

    def _remove(self, name: str) -> None:
        job = self._jobs.get(name)
        if job is not None:
            self._release(job)
        else:
            self._context.root.job(name).remove()

    async def make_room(self, need: int) -> int:
        """Free memory for a job that starts: slots of unfinished jobs go, oldest first. Returns the bytes freed."""
        return sum(swept.bytes for swept in await self.sweep(need))

    async def gc(self, peer: Peer, message: GcRequest) -> None:
        """`baftd gc`: what the rules let go; of a named job also what they would still keep."""
        lines: list[str] = []
        total = 0
        found = [s for s in self._sweep(0, dry_run=True) if message.job in (None, s.job)]
        if message.job is not None and not found and message.job in self._context.root.jobs():
            arena = self._context.root.job(message.job)
            claim = self.claim(message.job)
            if claim is Claim.LIVE or arena.holders():
                lines.append(f"{arena.path}: kept, processes of job {message.job} are alive")
            else:
                found = [Swept(message.job, arena.path, arena.usage(), f"{claim.value}; asked for by name")]
        for swept in found:
            lines.append(f"{swept.path}: {swept.reason}")
            total += swept.bytes
            if not message.dry_run:
                self._remove(swept.job)
                self._context.counters.add("swept_files")
        more, size = await self._sweep_durable(message)
        reply = GcReply(id=message.id, lines=[*lines, *more], bytes=total + size)
        self._context.server.send(peer, reply)

    async def _sweep_durable(self, message: GcRequest) -> tuple[list[str], int]:
        tier, workers = self._context.tier, self._context.workers
        if tier is None:
            return [], 0
        lines: list[str] = []
        total = 0
        try:
            names = await workers.urgent(lambda: list(tier.jobs()))
            for name in names:
                if message.job not in (None, name):
                    continue
                swept = await workers.urgent(lambda name=name: tier.sweep(name, dry_run=message.dry_run))
                lines += [*swept.lines, *swept.problems]
                total += swept.nbytes
        except (BaftError, OSError) as error:
            lines.append(f"{self._context.settings.durable_dir}: {error}")
        return lines, total
