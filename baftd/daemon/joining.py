"""How training processes come in: hello, the rendezvous of all ranks, the restore, and the answer that ends it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from baftd import __version__
from baftd.checkpoint.facts import EpochFacts, Inventory
from baftd.checkpoint.identity import Token
from baftd.checkpoint.recovery import name_ranks
from baftd.daemon.clients import Client, ClientTable
from baftd.daemon.context import Context
from baftd.daemon.digesting import NO_PLACE
from baftd.daemon.job import JobOnNode, wire_token
from baftd.daemon.rendezvous import Completed, Failed, Instruction, Predecessor, Waiting
from baftd.daemon.restore import Brought, Restorer
from baftd.daemon.training import Trainer
from baftd.errors import BaftError, ProtocolError, RankError, TryAgain, UsageError
from baftd.memory.processes import start_time
from baftd.wire.codec import error_reply
from baftd.wire.messages import (
    Ack,
    Committed,
    ErrorReply,
    Hello,
    Restored,
    Resume,
    ResumePlan,
    ResumeProgress,
    Welcome,
)
from baftd.wire.server import Peer

__all__ = ["Joining"]

CHECK_EVERY = 0.25
"""Seconds between two looks at a rendezvous that waits: for missing ranks, or for a predecessor to fall silent."""

LOAD_TIMEOUT = 1800.0
"""Seconds that the ranks may take to load what they were given, before the missing ones are named."""


BELIEVED = 1 << 16
"""How far above the newest epoch known here a training process's own may lie."""


@dataclass
class _Loading:
    """A plan was announced; each rank is to say that it has loaded it."""

    token: Token
    world: int
    brought: Brought | None
    waiting: dict[int, int] = field(default_factory=dict)
    """Rank that has answered -> id of its request."""
    timer: asyncio.TimerHandle | None = None


class Joining:
    """Answers hello, resume and restored of all jobs."""

    def __init__(self, context: Context, clients: ClientTable, restorer: Restorer, trainer: Trainer) -> None:
        self._context = context
        self._clients = clients
        self._restorer = restorer
        self._trainer = trainer
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._loading: dict[str, _Loading] = {}
        self._restoring: set[str] = set()
        self._broken: dict[str, tuple[Token, BaftError]] = {}
        """Job -> a start of it that could not load, and why: ranks that come later are told the same."""

    # ------------------------------------------------------------------ hello

    async def hello(self, job: JobOnNode, peer: Peer, message: Hello) -> None:
        """A process says who it is, for the first time or after a reconnect."""
        if message.rank >= message.world:
            raise RankError(
                f"job {job.name}: rank {message.rank} does not exist in a world of {message.world} ranks.",
                hint="RANK counts from 0; is WORLD_SIZE of another launcher in the environment?",
            )
        said = Token(message.token.epoch, message.token.incarnation) if message.token else None
        if said is not None:
            await self._learn(job, said, message.world)
            if job.closed:
                raise TryAgain(f"job {job.name} was removed from node {self._context.node} meanwhile.")
        fenced = said is not None and said != job.token
        pid = peer.pid
        client = Client(
            job=job.name,
            incarnation=message.incarnation,
            rank=message.rank,
            world=message.world,
            pid=pid or message.pid,
            # Of a process in another PID namespace only its own word is there; nothing but its lock is trusted then.
            pid_start=(start_time(pid) or 0) if pid else message.pid_start,
            visible=pid > 0,
            peer=peer,
            framework=message.framework,
            lock_path=job.arena.create_lock(message.rank),
        )
        client = self._clients.add(client)
        if said is None:
            try:
                job.rendezvous.hello(
                    client.rank, client.world, client.incarnation, client.pid, client.pid_start, self._context.clock()
                )
            except RankError:
                self._clients.remove(client)
                raise
        job.adopted(job.writer_of(client))
        if said is not None:
            self._context.counters.add("reconnects")
            client.token = said
        history = job.core.history
        welcome = Welcome(
            id=message.id,
            node=self._context.node,
            node_incarnation=self._context.incarnation,
            daemon_version=__version__,
            known_epoch=history.epoch,
            highest_step=history.highest_step,
            fenced=fenced,
            lock_path=client.lock_path,
        )
        self._context.server.send(peer, welcome)
        job.log.info("hello", rank=client.rank, pid=client.pid, world=client.world, token=said is not None)
        if said is not None and not fenced:
            self._go_on(job, client)

    async def _learn(self, job: JobOnNode, said: Token, world: int) -> None:
        """A process trains under an epoch that nobody here remembers (state and slots were lost): believe it."""
        if said.epoch > job.core.history.epoch + BELIEVED:
            raise ProtocolError(
                f"job {job.name}: a token of epoch {said.epoch} cannot be: the newest known here is "
                f"{job.core.history.epoch}.",
                field="token.epoch",
            )
        if said.epoch > job.core.history.epoch:
            epoch = EpochFacts(said, world, None, revision=-1)
            inventory = Inventory(self._context.node, NO_PLACE, (), (epoch,))
            await self._context.coordinator.join(job.name, inventory)
            job.log.warning("epoch_learnt", epoch=said.epoch, why="a training process trains under it")

    def _go_on(self, job: JobOnNode, client: Client) -> None:
        """The process trains already: tell it what it must know, and grant again."""
        client.state = "training"
        job.pace.touch(self._context.clock())
        assert client.token is not None
        token, view, send = wire_token(client.token), job.view, self._context.server.send
        if view is not None:
            send(client.peer, self._trainer.cadence(job, token))
            for tier, newest in (("memory", view.committed), ("durable", view.durable)):
                if newest is not None and newest.epoch == client.token.epoch:
                    send(client.peer, Committed(token=token, step=newest.step, tier=tier))  # type: ignore[arg-type]
        if not self._trainer.declare_again(job, client):
            text = f"the layout of rank {client.rank} is not known here any more."
            send(client.peer, ErrorReply(code="usage", message=text, field="declare"))
        job.pacing.greeted(client)

    # ------------------------------------------------------------------ rendezvous

    def resume(self, job: JobOnNode, client: Client, message: Resume) -> None:
        """A rank takes part in the rendezvous."""
        client.asked["resume"] = message.id
        loading = self._loading.get(job.name)
        if loading is not None and loading.token.incarnation == client.incarnation and loading.brought is not None:
            self._announce_to(job, client, loading.brought, 0.0)  # said again after a reconnect
            return
        if client.token is not None:
            raise UsageError(f"{client} of job {job.name} trains already: it cannot resume.")
        now = self._context.clock()
        job.rendezvous.hello(client.rank, client.world, client.incarnation, client.pid, client.pid_start, now)
        job.rendezvous.resume(
            client.incarnation,
            client.rank,
            fresh=message.fresh,
            takeover=message.takeover,
            reshard=message.reshard,
            now=now,
        )
        client.state = "joining"
        self.check(job)

    def check(self, job: JobOnNode) -> None:
        """Act on what the rendezvous says now; look again as long as it waits."""
        timer = self._timers.pop(job.name, None)
        if timer is not None:
            timer.cancel()
        if job.closed:
            return
        for instruction in job.rendezvous.check(self._context.clock(), self._predecessor(job)):
            self._act(job, instruction)
        if job.rendezvous.next_deadline:
            loop = asyncio.get_running_loop()
            self._timers[job.name] = loop.call_later(CHECK_EVERY, self.check, job)

    def _predecessor(self, job: JobOnNode) -> Predecessor | None:
        """Processes of the job's token, if all of them live and they advance. One that has lost a rank commits nothing
        any more: nobody waits for it."""
        token = job.token
        if token is None or not job.pace.advances(self._context.clock()):
            return None
        known = [client for client in self._clients.of_job(job.name) if client.incarnation == token.incarnation]
        training = [client for client in known if client.state == "training"]
        if not training or any(not self._clients.still_alive(client) for client in training):
            return None
        if len(training) < len(known):
            return None
        node = self._context.node
        return Predecessor(
            token.incarnation, token.epoch, tuple(f"{client} on node {node}" for client in training), (node,)
        )

    def _act(self, job: JobOnNode, instruction: Instruction) -> None:
        if isinstance(instruction, Waiting):
            for client in self._clients.of_job(job.name):
                if client.rank in instruction.ranks and "resume" in client.asked and client.alive:
                    progress = ResumeProgress(
                        id=client.asked["resume"],
                        phase=instruction.phase,
                        missing=list(instruction.missing[:64]),
                        waited=instruction.waited,
                        deadline=instruction.deadline,
                    )
                    self._context.server.send(client.peer, progress)
        elif isinstance(instruction, Failed):
            job.log.warning("rendezvous_failed", why=str(instruction.error))
            self._fail(job, instruction.incarnation, instruction.error)
        else:
            self._context.tasks.start(self._restore(job, instruction), f"restore of {job.name}")

    def _members(self, job: JobOnNode, incarnation: str) -> list[Client]:
        return [client for client in self._clients.of_job(job.name) if client.incarnation == incarnation]

    def _fail(self, job: JobOnNode, incarnation: str, error: BaftError) -> None:
        """Tell every rank of a start that its resume has failed."""
        job.rendezvous.close(incarnation)
        for client in self._members(job, incarnation):
            asked = client.asked.pop("resume", None)
            if asked is not None and client.alive:
                self._context.server.send(client.peer, error_reply(error, id=asked))

    # ------------------------------------------------------------------ restore

    async def _restore(self, job: JobOnNode, completed: Completed) -> None:
        if job.name in self._restoring:  # another start is at it: this one is next
            job.rendezvous.retry(completed.incarnation)
            return
        self._restoring.add(job.name)
        try:
            await self._restore_now(job, completed)
        except BaftError as error:
            job.log.error("restore_failed", why=str(error), code=error.code)
            self._fail(job, completed.incarnation, error)
        except Exception as error:
            self._fail(job, completed.incarnation, BaftError(f"the daemon failed to restore: {error!r}"))
            raise
        finally:
            self._restoring.discard(job.name)
            self.check(job)

    async def _restore_now(self, job: JobOnNode, completed: Completed) -> None:
        started, begun = self._context.clock(), time.monotonic_ns()
        self._drop_loading(job)
        world, reshard = completed.world, completed.reshard
        token, plan = await self._restorer.open(
            job, completed.incarnation, world, fresh=completed.fresh, reshard=reshard
        )
        self._drop_dead(job, completed.incarnation)

        def told(what: str, done: int, total: int) -> None:
            self._context.loop_call(self._say_progress, job, completed.incarnation, what, done, total, started)

        brought = await self._restorer.bring(job, token, plan, world, told, reshard=reshard)
        seconds = self._context.clock() - started
        nbytes = sum(image.length for image in brought.images.values())
        job.spans.add("restore", begun, step=brought.plan.step, bytes=nbytes)
        loading = _Loading(token, world, brought)
        loading.timer = asyncio.get_running_loop().call_later(LOAD_TIMEOUT, self._too_slow, job, loading)
        self._loading[job.name] = loading
        job.counters.add("restores")
        job.counters.add("passed_over", len(brought.passed_over))
        job.rendezvous.close(completed.incarnation)
        job.log.info(
            "restore_plan", step=brought.plan.step, epoch=token.epoch, seconds=round(seconds, 3),
            lost_steps=brought.plan.lost_steps, passed_over=list(brought.passed_over), world=world,
            saved_by=len(brought.images), reshard=reshard,
        )  # fmt: skip
        for client in self._members(job, completed.incarnation):
            self._announce_to(job, client, brought, seconds)

    def _say_progress(self, job: JobOnNode, incarnation: str, what: str, done: int, total: int, started: float) -> None:
        now = self._context.clock()
        for client in self._members(job, incarnation):
            if "resume" in client.asked and now - client.told >= 1.0:
                client.told = now
                phase = f"restoring {what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
                progress = ResumeProgress(id=client.asked["resume"], phase=phase, waited=now - started)
                self._context.server.send(client.peer, progress)

    def _announce_to(self, job: JobOnNode, client: Client, brought: Brought, seconds: float) -> None:
        asked = client.asked.pop("resume", None)
        if asked is None:
            return
        plan = brought.plan
        client.state = "restoring"
        reply = ResumePlan(
            id=asked,
            token=wire_token(brought.token),
            step=plan.step,
            updates=plan.updates,
            epoch=plan.checkpoint.epoch if plan.checkpoint else 0,
            source=brought.images.get(client.rank) if plan.world == client.world else None,
            tier=brought.tier(client.rank),
            passed_over=[text[:4000] for text in brought.passed_over],
            durable=self._context.tier is not None,
            seconds=seconds,
            world=plan.world if plan.checkpoint else 0,
            shards=brought.shards(),
            divided=plan.divided and not brought.reshard,
        )
        self._context.server.send(client.peer, reply)

    def _drop_dead(self, job: JobOnNode, incarnation: str) -> None:
        for client in self._clients.of_job(job.name):
            if client.incarnation != incarnation and not client.alive:
                self._clients.remove(client)

    # ------------------------------------------------------------------ loaded

    async def restored(self, job: JobOnNode, client: Client, message: Restored) -> None:
        """A rank has loaded its image, or could not."""
        token = self._trainer.admit(job, client, message.token, message.rank)
        broken = self._broken.get(job.name)
        if broken is not None and broken[0] == token:
            raise broken[1]
        client.asked["restored"] = message.id
        loading = self._loading.get(job.name)
        if loading is None or loading.token != token:
            # The daemon was restarted after it had announced the plan.
            loading = self._loading[job.name] = _Loading(token, client.world, None)
            loading.timer = asyncio.get_running_loop().call_later(LOAD_TIMEOUT, self._too_slow, job, loading)
        if not message.ok:
            await self._cannot_load(job, client, loading, message.reason)
            return
        job.apply(job.core.restored(client.rank, token))
        loading.waiting[client.rank] = message.id
        self._loaded(job)

    def trains(self, job: JobOnNode, client: Client) -> None:
        """A rank declares or takes steps: it has loaded, whatever became of the message that said so."""
        loading = self._loading.get(job.name)
        if loading is not None and client.token == loading.token and client.rank not in loading.waiting:
            loading.waiting[client.rank] = 0
            self._loaded(job)

    def _loaded(self, job: JobOnNode) -> None:
        loading = self._loading[job.name]
        if len(loading.waiting) < loading.world:
            return
        self._drop_loading(job)
        job.pace.touch(self._context.clock())
        for client in self._members(job, loading.token.incarnation):
            client.token = loading.token
            client.state = "training"
            asked = client.asked.pop("restored", None)
            if asked is not None:
                # Before the first boundary, so that no rank chooses for itself whether to take it.
                self._context.server.send(client.peer, self._trainer.cadence(job, wire_token(loading.token)))
                self._context.server.send(client.peer, Ack(id=asked))
        job.tidy()  # an earlier start of more ranks may have left locks and control pages
        job.log.info("restored", epoch=loading.token.epoch, step=loading.brought.plan.step if loading.brought else None)

    async def _cannot_load(self, job: JobOnNode, client: Client, loading: _Loading, reason: str) -> None:
        """One rank failed: all ranks stop. What it was given is read once more; only bytes that are wrong are
        quarantined."""
        error = BaftError(
            f"job {job.name}: rank {client.rank} (pid {client.pid} on node {self._context.node}) could not load "
            f"what it was given: {reason}",
        )
        damaged: list[int] = []
        for bad in await self._restorer.check_again(job, loading.brought, client.rank) if loading.brought else ():
            job.counters.add("quarantined")
            await self._context.coordinator.source_failed(job.name, loading.token, bad)
            job.apply(job.core.damaged(bad.rank, bad.checkpoint, bad.reason))
            damaged.append(bad.rank)
        if damaged:
            error.hint = f"The bytes of {name_ranks(damaged)} were damaged; the next start goes on from an older step."
        job.log.error("load_failed", rank=client.rank, damaged=damaged, why=reason)
        self._stop_loading(job, loading, error)

    def _stop_loading(self, job: JobOnNode, loading: _Loading, error: BaftError) -> None:
        self._drop_loading(job)
        self._broken[job.name] = (loading.token, error)
        for client in self._members(job, loading.token.incarnation):
            for kind in ("resume", "restored"):
                asked = client.asked.pop(kind, None)
                if asked is not None and client.alive:
                    self._context.server.send(client.peer, error_reply(error, id=asked))

    def _too_slow(self, job: JobOnNode, loading: _Loading) -> None:
        if self._loading.get(job.name) is not loading:
            return
        missing = [rank for rank in range(loading.world) if rank not in loading.waiting]
        error = TryAgain(
            f"job {job.name}: {name_ranks(missing)} did not say within {LOAD_TIMEOUT:.0f} s that the state was loaded."
        )
        job.log.error("load_timeout", why=str(error))
        self._stop_loading(job, loading, error)

    def _drop_loading(self, job: JobOnNode) -> None:
        loading = self._loading.pop(job.name, None)
        if loading is not None and loading.timer is not None:
            loading.timer.cancel()

    # ------------------------------------------------------------------ deaths

    def died(self, job: JobOnNode, client: Client) -> None:
        """A process is gone: those that wait for it are told; those that waited for it to end go on."""
        for instruction in job.rendezvous.gone(client.incarnation, client.rank, client.pid):
            self._act(job, instruction)
        loading = self._loading.get(job.name)
        if loading is not None and loading.token.incarnation == client.incarnation:
            error = TryAgain(
                f"job {job.name}: rank {client.rank} (pid {client.pid} on node {self._context.node}) died while "
                "the ranks were loading.",
                hint="Start the job again; the output of that rank says why it died.",
            )
            self._stop_loading(job, loading, error)
        self.check(job)

    def close(self, job: JobOnNode) -> None:
        """The job ends here: no timer is left."""
        timer = self._timers.pop(job.name, None)
        if timer is not None:
            timer.cancel()
        self._drop_loading(job)
