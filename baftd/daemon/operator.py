"""`baftd restore`: fence, plan, fetch, verify and pin what the next start of a job goes on from.

It opens an epoch under an incarnation that no process has. Every older token is fenced by that, the lineage records
the choice, and the next `resume()` finds exactly that checkpoint as the newest on its line.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from baftd.checkpoint.facts import Held
from baftd.checkpoint.identity import Token
from baftd.daemon.clients import Client, ClientTable
from baftd.daemon.context import Context
from baftd.daemon.job import JobOnNode
from baftd.daemon.restore import Restorer
from baftd.errors import NothingRestorable, TryAgain
from baftd.wire.messages import Progress, RestoreReply, RestoreRequest, RestoreSource
from baftd.wire.server import Peer

__all__ = ["Operator"]

LEASE = 3600.0
"""Seconds for which a restore may hold the right to change a job's restore plan."""


class Operator:
    """Answers `RestoreRequest`."""

    def __init__(
        self,
        context: Context,
        clients: ClientTable,
        restorer: Restorer,
        open_job: Callable[[str], Awaitable[JobOnNode]],
        known: Callable[[], Awaitable[set[str]]],
    ) -> None:
        """`known` names the jobs that have left a trace anywhere."""
        self._context = context
        self._clients = clients
        self._restorer = restorer
        self._open_job = open_job
        self._known = known

    async def restore(self, peer: Peer, message: RestoreRequest) -> None:
        """Fix the next restore plan of a job, or with `dry_run` show what it would be."""
        started = self._context.clock()
        names = await self._known()
        if message.job not in names:
            raise NothingRestorable(
                f"job {message.job} is not known on node {self._context.node}.",
                hint=f"Known: {', '.join(sorted(names))}." if names else "No job is known here.",
            )
        job = await self._open_job(message.job)
        holder = f"baftd restore (pid {peer.pid} on node {self._context.node})"
        await self._context.coordinator.lease(job.name, holder, LEASE)
        job.pinned = True
        try:
            await self._restore(job, peer, message, started)
        finally:
            job.pinned = False
            await self._context.coordinator.release(job.name, holder)

    async def _restore(self, job: JobOnNode, peer: Peer, message: RestoreRequest, started: float) -> None:
        live = self._alive(job)
        if live and not message.dry_run and not message.force:
            names = ", ".join(f"{client} on node {self._context.node}" for client in live[:8])
            if job.pace.advances(self._context.clock()):
                raise TryAgain(f"job {job.name} is training: {names}.", hint="Stop it first, or fence it with --force.")
        token: Token | None = None
        with job.held():
            plan = await self._restorer.plan(job, world=None, step=message.step, at_most=message.at_most)
            passed_over = plan.passed_over
            if plan.checkpoint is None:
                raise NothingRestorable(
                    f"no step of job {job.name} is committed yet: there is nothing to restore.",
                    hint="Start it as always: it begins at step 0.",
                )
            if not message.dry_run:
                incarnation = secrets.token_hex(16)
                token, plan = await self._restorer.open(job, incarnation, plan.world, plan=plan)
        if token is not None:

            def told(what: str, done: int, total: int) -> None:
                progress = Progress(id=message.id, what=what, done=done, total=total)
                self._context.loop_call(self._context.server.send, peer, progress)

            brought = await self._restorer.bring(job, token, plan, None, told)
            plan, passed_over = brought.plan, brought.passed_over
        reply = RestoreReply(
            id=message.id,
            job=job.name,
            epoch=plan.checkpoint.epoch if plan.checkpoint else 0,
            step=plan.step,
            updates=plan.updates,
            world=plan.world,
            sources=[
                RestoreSource(rank, held.source.tier, self._where(job, held), held.shard.image_length)
                for rank, held in sorted(plan.sources.items())
            ],
            passed_over=[text[:4000] for text in passed_over],
            fenced=[f"{client} on node {self._context.node}" for client in live],
            lost_steps=max(0, plan.lost_steps),
            seconds=self._context.clock() - started,
            dry_run=message.dry_run,
        )
        job.log.info("restore_fixed", step=plan.step, dry_run=message.dry_run, lost_steps=plan.lost_steps)
        self._context.server.send(peer, reply)

    def _alive(self, job: JobOnNode) -> list[Client]:
        return [
            client
            for client in self._clients.of_job(job.name)
            if client.state in ("training", "restoring") and self._clients.still_alive(client)
        ]

    def _where(self, job: JobOnNode, held: Held) -> str:
        if held.source.tier == "memory":
            return job.arena.slot_path(held.shard.rank, int(held.source.place["slot"]))
        return str(held.source.place["path"])
