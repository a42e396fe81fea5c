"""The daemon: one process a node. Owns the sockets, the loop, the timers, and the order in which things begin and end.

Start: lock and socket first (so that there is one daemon), then the arena, the node's identity, the coordinator, the
jobs that have slots here, the sweep, and only then the first message is read. End: running durable writes are
awaited, slots stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from baftd.checkpoint.commit import Policy
from baftd.checkpoint.identity import check_job_name
from baftd.coordination.inprocess import InProcessCoordinator
from baftd.daemon.clients import Client, ClientTable
from baftd.daemon.context import Context
from baftd.daemon.decisions import Decisions
from baftd.daemon.durable import DurableWriter
from baftd.daemon.housekeeping import Housekeeping
from baftd.daemon.inspect import Inspector
from baftd.daemon.job import JobOnNode
from baftd.daemon.joining import Joining
from baftd.daemon.operator import Operator
from baftd.daemon.rebuild import open_job
from baftd.daemon.restore import Restorer
from baftd.daemon.state_files import JournalFiles
from baftd.daemon.training import Trainer
from baftd.daemon.waiting import Waiters
from baftd.daemon.workers import Workers
from baftd.errors import BaftError, UsageError
from baftd.memory.arena import ArenaRoot
from baftd.memory.journal import FileOps
from baftd.memory.manifest import node_identity
from baftd.settings import Settings
from baftd.storage.directory import DirectoryTier
from baftd.storage.files import FileOps as StorageOps
from baftd.storage.files import OsFiles
from baftd.storage.limiter import TokenBucket
from baftd.telemetry import get_logger
from baftd.wire.codec import error_reply
from baftd.wire.messages import (
    Ack,
    Begin,
    BubblesRequest,
    Declare,
    ErrorReply,
    Finish,
    GcRequest,
    Hello,
    LayoutRequest,
    Leave,
    ListRequest,
    Request,
    Restored,
    RestoreRequest,
    Resume,
    Save,
    Seal,
    Skip,
    StatusRequest,
    StopRequest,
    Timings,
    TraceRequest,
    VerifyRequest,
)
from baftd.wire.server import Incoming, Peer, Server

__all__ = ["Seams", "Service", "run_daemon", "serve"]

DRAIN_TIMEOUT = 600.0
"""Seconds that running durable writes get when the daemon is asked to stop."""


@dataclass
class Seams:
    """What tests replace: file operations that fail or end the process at a chosen point, the clock."""

    journal_ops: FileOps = field(default_factory=FileOps)
    """Of journals beside slots and of the state directory."""
    storage_ops: StorageOps = field(default_factory=OsFiles)
    """Of the durable directory."""
    clock: Callable[[], float] = time.monotonic
    random_bits: Callable[[], int] = lambda: secrets.randbits(64)


class Service:
    """One daemon. `serve` runs it until it is asked to stop."""

    def __init__(self, settings: Settings, seams: Seams | None = None) -> None:
        self.settings = settings
        self.seams = seams or Seams()
        self.jobs: dict[str, JobOnNode] = {}
        self.started = self.seams.clock()
        self._opening: dict[str, asyncio.Lock] = {}
        self._log = get_logger("daemon")
        self._stop = asyncio.Event()
        self._force = False
        self._tick: asyncio.TimerHandle | None = None

    async def serve(self) -> None:
        """Run until SIGTERM, SIGINT or a `StopRequest`. Raises `TryAgain` when another daemon runs, `UsageError`."""
        settings = self.settings
        server = Server(settings.socket, allow_uids=settings.clients, clock=self.seams.clock)
        server.bind()
        try:
            await self._begin(server)
            await self._receive()
        finally:
            await self._end(server)

    # ------------------------------------------------------------------ begin and end

    async def _begin(self, server: Server) -> None:
        settings, seams = self.settings, self.seams
        asyncio.get_running_loop().set_exception_handler(self._escaped)
        root = ArenaRoot(settings.shm_dir)
        try:
            settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.create(settings.clients)
        except OSError as error:
            raise UsageError(
                f"{error.filename} cannot be made: {error.strerror}.",
                hint="Set state_dir and shm_dir to directories that this user may write to.",
            ) from error
        incarnation, fresh = node_identity(
            settings.state_dir, settings.node, root, seams.random_bits, ops=seams.journal_ops
        )
        tier = self._make_tier()
        every = settings.durable_every
        coordinator = InProcessCoordinator(
            settings.state_dir,
            policy=Policy(
                interval=settings.first_interval,
                interval_fixed=settings.interval is not None and bool(settings.interval.steps),
                durable=tier is not None,
                durable_steps=every.steps or None,
                durable_seconds=every.seconds or None,
            ),
            files=JournalFiles(seams.journal_ops),
            random_bits=seams.random_bits,
            clock=seams.clock,
        )
        rate = settings.durable_rate
        context = self.context = Context(
            settings=settings,
            incarnation=incarnation,
            root=root,
            server=server,
            coordinator=coordinator,
            workers=Workers(clock=seams.clock, limit=TokenBucket(rate, rate, seams.clock) if rate else None),
            clock=seams.clock,
            tier=tier,
            journal_ops=seams.journal_ops,
        )
        self.clients = ClientTable(self._client_died, clock=seams.clock, last_heard=server.last_heard)
        self.waiters = Waiters(server)
        self.durable = DurableWriter(context, tier, self.waiters) if tier is not None else None
        self.restorer = Restorer(context)
        self.trainer = Trainer(context, self.waiters)
        self.joining = Joining(context, self.clients, self.restorer, self.trainer)
        self.housekeeping = Housekeeping(context, self.clients, self.jobs, self.release)
        self.inspector = Inspector(context, self.clients, self.jobs, self.durable, self.started)
        self.operator = Operator(context, self.clients, self.restorer, self.job, self.inspector.known)
        await coordinator.start(
            settings.node, incarnation, Decisions(context, self.jobs, self.waiters, self.durable, self.release)
        )
        if tier is not None:
            await self._sweep_durable(tier)
        await self.housekeeping.sweep()  # before jobs are taken up, which writes to their files
        for name in root.jobs():
            try:
                await self.job(name)
            except (BaftError, OSError) as error:
                self._log.error("job_not_taken_up", job=name, why=str(error))
        self._log.info(
            "started", node=settings.node, incarnation=incarnation, new_memory=fresh, socket=settings.socket,
            shm=settings.shm_dir, durable=settings.durable_dir, jobs=sorted(self.jobs),
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # not in the main thread: a test's service
                loop.add_signal_handler(number, self.stop)
        self._schedule_tick()
        self.housekeeping.start()

    def _escaped(self, loop: asyncio.AbstractEventLoop, what: dict[str, Any]) -> None:
        """An exception that no task and no handler took: logged and counted, the loop goes on."""
        error = what.get("exception")
        if hasattr(self, "context"):
            self.context.counters.add("internal_errors")
        self._log.error("escaped", what=what.get("message"), error=repr(error))

    def _make_tier(self) -> DirectoryTier | None:
        settings = self.settings
        if settings.durable_dir is None:
            return None
        return DirectoryTier(
            settings.durable_dir,
            node=settings.node,
            file_ops=self.seams.storage_ops,
            readback=settings.durable_readback,
            clock=self.seams.clock,
        )

    async def _sweep_durable(self, tier: DirectoryTier) -> None:
        """Finish what a daemon that was killed left half done, before anything there is believed."""
        try:
            for name in await self.context.workers.urgent(tier.jobs):
                swept = await self.context.workers.urgent(tier.sweep, name)
                for line in (*swept.lines, *swept.problems):
                    self._log.info("swept", job=name, what=line)
        except (BaftError, OSError) as error:
            self._log.warning("durable_unreadable", path=self.settings.durable_dir, why=str(error))

    async def _end(self, server: Server) -> None:
        if hasattr(self, "context"):
            if self.durable is not None and not self._force:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.durable.drained(self.jobs.values()), DRAIN_TIMEOUT)
            if self._tick is not None:
                self._tick.cancel()
            self.housekeeping.close()
            self.context.workers.stop()
            await self.context.tasks.close()
            self.clients.close()
            for job in self.jobs.values():
                self.joining.close(job)
                job.close()
                if not job.arena.slots():
                    job.arena.remove()  # nothing but an empty journal
            await self.context.coordinator.close()
            self.context.workers.close()
            self.context.root.remove_if_empty()
        await server.close()
        self._log.info("stopped")

    def stop(self, *, force: bool = False) -> None:
        """End `serve` soon. With `force` running durable writes are given up."""
        self._force = self._force or force
        self._stop.set()

    # ------------------------------------------------------------------ messages

    async def _receive(self) -> None:
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            while not stopping.done():
                receiving = asyncio.ensure_future(self.context.server.recv())
                await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    receiving.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await receiving
                    return
                await self._take(receiving.result())
        finally:
            stopping.cancel()

    async def _take(self, incoming: Incoming) -> None:
        """Act on one message. Those that a client sends without waiting for an answer are done before the next one is
        read, so that its order is kept; what may take long goes on as a task."""
        self.context.counters.add("messages")
        peer, message = incoming.peer, incoming.message
        handler = self._handler(peer, message)
        if isinstance(message, Begin | Seal | Skip | Timings | Resume | Leave):
            await self._guard(peer, message, handler)
        else:
            self.context.tasks.start(self._guard(peer, message, handler), f"{type(message).__name__} of {peer.pid}")

    def _handler(self, peer: Peer, message: Request) -> Callable[[], Awaitable[None]]:
        if isinstance(message, Hello):
            return lambda: self._hello(peer, message)
        asked = StatusRequest | ListRequest | LayoutRequest | VerifyRequest | BubblesRequest | TraceRequest
        if isinstance(message, asked):
            return lambda: self.inspector.answer(peer, message)
        if isinstance(message, RestoreRequest):
            return lambda: self.operator.restore(peer, message)
        if isinstance(message, GcRequest):
            return lambda: self.housekeeping.gc(peer, message)
        if isinstance(message, StopRequest):
            return lambda: self._stop_asked(peer, message)
        return lambda: self._of_client(peer, message)

    async def _guard(self, peer: Peer, message: Request, handler: Callable[[], Awaitable[None]]) -> None:
        try:
            await handler()
        except BaftError as error:
            self.context.counters.add("errors_answered")
            reply = error_reply(error, id=message.id)
            if not reply.field:
                reply.field = str(type(message).__struct_config__.tag)
            self.context.server.send(peer, reply)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - no message may end the daemon; it is logged, counted and answered
            self.context.counters.add("internal_errors")
            self._log.exception("message_failed", message=type(message).__name__, pid=peer.pid)
            text = f"the daemon failed to handle {type(message).__name__}: {type(error).__name__}: {error}"
            self.context.server.send(peer, ErrorReply(id=message.id, code="error", message=text[:4000]))

    async def _hello(self, peer: Peer, message: Hello) -> None:
        job = await self.job(message.job)
        await self.joining.hello(job, peer, message)

    async def _of_client(self, peer: Peer, message: Request) -> None:
        client = self.clients.of_peer(peer)
        if client is None:
            raise UsageError("this connection belongs to no training process: say hello first.")
        if not client.alive:
            return  # it was still in the queue when the process died; what it had sealed was read from its slots
        job = self.jobs.get(client.job) or await self.job(client.job)
        if isinstance(message, Resume):
            if message.job != client.job or message.rank != client.rank:
                raise UsageError(f"{client} of job {client.job} asks to resume rank {message.rank} of {message.job}.")
            self.joining.resume(job, client, message)
        elif isinstance(message, Restored):
            await self.joining.restored(job, client, message)
        elif isinstance(message, Declare):
            await self.trainer.declare(job, client, message)
            self.joining.trains(job, client)
        elif isinstance(message, Begin):
            self.trainer.begin(job, client, message)
        elif isinstance(message, Seal):
            self.trainer.seal(job, client, message)
        elif isinstance(message, Skip):
            self.trainer.skip(job, client, message)
        elif isinstance(message, Timings):
            self.trainer.timings(job, client, message)
        elif isinstance(message, Save):
            await self.trainer.save(job, client, message)
        elif isinstance(message, Finish):
            await self.trainer.finish(job, client, message)
        elif isinstance(message, Leave):
            self.trainer.leave(job, client, message)

    async def _stop_asked(self, peer: Peer, message: StopRequest) -> None:
        self.context.server.send(peer, Ack(id=message.id))
        self._log.info("stop_asked", pid=peer.pid, force=message.force)
        self.stop(force=message.force)

    # ------------------------------------------------------------------ jobs

    async def job(self, name: str) -> JobOnNode:
        """The job on this node, taken up or begun."""
        check_job_name(name)
        lock = self._opening.setdefault(name, asyncio.Lock())
        async with lock:
            job = self.jobs.get(name)
            if job is None:
                job = await open_job(self.context, self.clients, name)
                if self.durable is not None:
                    self.durable.attach(job)
                self.jobs[name] = job
                # What was published between the join and now went to nobody.
                job.apply(job.core.take_view(await self.context.coordinator.view(name)))
                job.pacing.look()
            return job

    def release(self, job: JobOnNode) -> None:
        """Free a job's memory: its files, its directory, and ours if nothing else is left."""
        self.joining.close(job)
        job.close()
        self.jobs.pop(job.name, None)
        strange = job.arena.remove()
        if strange:
            job.log.warning("foreign_files", files=strange[:8])
        self.context.root.remove_if_empty()

    def _client_died(self, client: Client) -> None:
        job = self.jobs.get(client.job)
        if job is None:
            self.clients.remove(client)
            return
        job.counters.add("lost_ranks")
        job.log.warning("rank_died", rank=client.rank, pid=client.pid, step=client.step)
        job.pacing.lost(client)
        try:
            job.client_died(client)
        finally:
            self.joining.died(job, client)

    # ------------------------------------------------------------------ time

    def _schedule_tick(self) -> None:
        self.context.tasks.start(self._tick_now(), "tick")

    async def _tick_now(self) -> None:
        wait = await self.context.coordinator.tick()
        if self._tick is not None:
            self._tick.cancel()
        delay = min(max(wait, 0.05), 60.0) if wait is not None else 60.0
        self._tick = asyncio.get_running_loop().call_later(delay, self._schedule_tick)


async def serve(settings: Settings, seams: Seams | None = None) -> None:
    """Run a daemon in the running loop. See `Service.serve`."""
    await Service(settings, seams).serve()


def run_daemon(settings: Settings, seams: Seams | None = None) -> None:
    """Run a daemon until it is asked to stop. Blocks. Raises as `Service.serve`."""
    asyncio.run(serve(settings, seams))
