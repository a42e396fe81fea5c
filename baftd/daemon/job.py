"""One job on this node: its core (`NodeJob`), slot files, journal and manifest, and the carrying out of instructions.

Every event of the core goes through `apply`: its records are written first, then its instructions are carried out in
order. What goes to the coordinator is queued and sent by one task, so that reports keep their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from baftd.checkpoint import facts
from baftd.checkpoint.facts import (
    EpochFacts,
    JobView,
    Ready,
    Record,
    ShardFacts,
    Writer,
    checkpoint_from,
    is_lasting,
    token_from,
)
from baftd.checkpoint.identity import Token
from baftd.checkpoint.node import NodeJob
from baftd.checkpoint.orders import (
    CancelPersist,
    Digest,
    DropShard,
    FenceWriter,
    FreeSlot,
    GrantSlot,
    NodeInstruction,
    ReceiveSlot,
    Refuse,
    RefuseGrant,
    RemoveRank,
    RemoveSlot,
    SendJoin,
    SendPersistFailed,
    SendReport,
    SendRestored,
    SendSkip,
    StartPersist,
    Superseded,
    TellCadence,
    TellCommitted,
)
from baftd.checkpoint.slots import SlotState, table_records
from baftd.daemon.background import Work
from baftd.daemon.clients import Client, ClientTable
from baftd.daemon.context import Context
from baftd.daemon.pacing import JobPacing
from baftd.daemon.rendezvous import Pace, Rendezvous
from baftd.daemon.slot_files import SlotFiles
from baftd.errors import BaftError, Degraded, FormatError, Unreachable
from baftd.memory.arena import JobArena
from baftd.memory.journal import Journal
from baftd.memory.manifest import NodeManifest
from baftd.memory.processes import lock_holder
from baftd.telemetry.counters import JOB_COUNTERS, Counters
from baftd.telemetry.spans import Spans
from baftd.wire.messages import (
    Cadence,
    Committed,
    ErrorReply,
    Fence,
    Grant,
    NoGrant,
    Reply,
    WireToken,
)

__all__ = ["JobOnNode", "wire_cadence", "wire_token"]

RESEND_AFTER = 1.0
"""Seconds until what the coordinator did not answer is sent again."""


def wire_token(token: Token) -> WireToken:
    """A token as messages carry it."""
    return WireToken(token.epoch, token.incarnation)


def wire_cadence(cadence: facts.Cadence, token: WireToken) -> Cadence:
    """A cadence as messages carry it."""
    return Cadence(
        token=token,
        from_step=cadence.from_step,
        every=cadence.every,
        probe=cadence.probe,
        earlier=[(one.from_step, one.every, one.probe) for one in cadence.earlier],
    )


@dataclass
class Training:
    """What the training processes of a job report about their speed, for `baftd status`."""

    held_ms: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    last_skip: str = ""
    reasons: dict[int, str] = field(default_factory=dict)
    sealing: dict[int, int] = field(default_factory=dict)
    """Steps that are not committed yet -> when the first rank of this node sealed them, ns of CLOCK_MONOTONIC."""

    def sealed(self, step: int) -> None:
        """A rank has sealed its snapshot of a step."""
        if step not in self.sealing:
            self.sealing[step] = time.monotonic_ns()
            for old in sorted(self.sealing)[:-64]:
                del self.sealing[old]

    def committed(self, step: int) -> int | None:
        """The step is committed: when its first seal was; None: it is not known."""
        began = self.sealing.get(step)
        self.sealing = {later: when for later, when in self.sealing.items() if later > step}
        return began

    def skipped(self, rank: int, step: int, reason: str) -> bool:
        """Note a skip; whether the rank's last one had the same reason."""
        self.last_skip = f"rank {rank}, step {step}: {reason}"
        kind = re.sub(r"[0-9]+", "#", reason)
        repeated = self.reasons.get(rank) == kind
        self.reasons[rank] = kind
        return repeated


class JobOnNode:
    """See the module's docstring. Belongs to the event loop."""

    def __init__(
        self,
        name: str,
        context: Context,
        clients: ClientTable,
        *,
        core: NodeJob,
        arena: JobArena,
        journal: Journal,
        manifest: NodeManifest | None,
        layouts: Iterable[Record] = (),
    ) -> None:
        """`manifest` None: nothing lasting is known of the job yet; it is made with the first epoch.
        `layouts`: records of declared layouts that the journal held."""
        self.name = name
        self.context = context
        self.clients = clients
        self.core = core
        self.arena = arena
        self.files = SlotFiles(arena)
        self.journal = journal
        self.manifest = manifest
        self.log = context.log.bind(job=name)
        self.counters = Counters(JOB_COUNTERS)
        self.spans = Spans()
        self.training = Training()
        self.pace = Pace()
        self.rendezvous = Rendezvous(
            name,
            node=context.node,
            gather_wait=context.settings.rendezvous_timeout,
            restore_wait=context.settings.restore_wait,
            several_nodes=context.coordinator.several_nodes,
        )
        self.layouts: dict[int, Record] = {int(record["rank"]): dict(record) for record in layouts}
        """Rank -> what it has declared: survives the daemon in the journal."""
        self.persist: Callable[[StartPersist], None] = self._no_tier
        self.cancel_persist: Callable[[CancelPersist], None] = lambda order: None
        self._catching_up: set[asyncio.Future[None]] = set()
        self.orphans: dict[Writer, Callable[[], None]] = {}
        """Processes that held a slot when the daemon started and have not come back -> how to stop watching them."""
        self.pinned = False
        """An operator's restore is at work: nothing of the job may be swept."""
        self.closed = False
        self.pacing = JobPacing(self)
        self._trees: tuple[bytes, ...] = ()
        self._generation = 0
        self._journal_broken = False
        self._digests: dict[asyncio.Task[None], Work] = {}
        self._outbox: deque[Callable[[], Awaitable[Ready[NodeInstruction] | None]]] = deque()
        self._wake = asyncio.Event()
        self._resend: asyncio.TimerHandle | None = None
        self._sender = context.tasks.start(self._send(), f"reports of {name}")

    # ------------------------------------------------------------------ asking

    @property
    def token(self) -> Token | None:
        """The only token that may write."""
        return self.core.token

    @property
    def view(self) -> JobView | None:
        """The coordinator's last word."""
        return self.core.last_view

    def client_of(
        self, order: GrantSlot | RefuseGrant | TellCommitted | TellCadence | FenceWriter | Refuse
    ) -> Client | None:
        """Whom an order of the core is for. One process may hold several sessions, one after the other: each has an
        incarnation of its own, and only one that is not the token's is ever fenced."""
        sessions = [
            client
            for client in self.clients.of_job(self.name)
            if (client.rank, client.pid, client.pid_start) == (order.rank, order.writer.pid, order.writer.start)
        ]
        current = self.token.incarnation if self.token is not None else ""
        if isinstance(order, FenceWriter):
            sessions = [client for client in sessions if client.incarnation != current]
        elif not isinstance(order, Refuse):
            sessions = [client for client in sessions if client.incarnation == order.token.incarnation]
        return sessions[-1] if sessions else None

    def writer_of(self, client: Client) -> Writer:
        """How the core knows a process."""
        return Writer(client.pid, client.pid_start)

    # ------------------------------------------------------------------ instructions

    def apply(self, ready: Ready[NodeInstruction], *, keep_grants: list[Grant] | None = None) -> None:
        """Write the records, then carry the instructions out. With `keep_grants` grants go there instead."""
        if self.closed:
            return
        if ready.records:
            self._write(ready.records)
        for order in ready.announce:
            if isinstance(order, GrantSlot) and keep_grants is not None:
                keep_grants.append(Grant(token=wire_token(order.token), slot=order.slot, generation=order.generation))
            else:
                self._carry_out(order)

    def _write(self, records: Iterable[Record]) -> None:
        lasting = [record for record in records if is_lasting(record)]
        for record in lasting:
            self._write_lasting(record)
        # Lineage lies beside the slots too: a state directory that is lost must not make slots worthless.
        short = [record for record in records if not is_lasting(record) or record["k"] == "epoch"]
        if short:
            self._append(short)

    def _append(self, records: list[Record]) -> None:
        """Write to the journal beside the slots. A tmpfs without room for it must not stop training: the slots' own
        headers say what a lost record would have, and the journal is written anew as soon as it can be."""
        try:
            if self._journal_broken or self.journal.wants_rewrite:
                self.journal.rewrite(self.journal_records())
            else:
                self.journal.append(*records)
        except (BaftError, OSError) as error:
            if not self._journal_broken:
                self.context.counters.add("journal_repairs")
                self.log.error(
                    "journal_not_written", why=str(error), note="slots are judged by their headers meanwhile"
                )
            self._journal_broken = True
        else:
            self._journal_broken = False

    def remember_layout(self, rank: int, record: Record) -> None:
        """Keep what a rank has declared."""
        if self.layouts.get(rank) != record:
            self.layouts[rank] = record
            self._append([record])

    def journal_records(self) -> list[Record]:
        """The whole journal in as few records as possible."""
        records: list[Record] = [{"k": "epoch", **epoch.to_record()} for epoch in self.core.history.epochs()]
        records += self.layouts.values()
        for table in self.core.tables.values():
            records += table_records(table)
        return records

    def _write_lasting(self, record: Record) -> None:
        kind = record["k"]
        if kind == "highest":
            if self.manifest is not None:
                self.manifest.note_step(int(record["step"]))
            return
        manifest = self.open_manifest()
        if kind == "epoch":
            try:
                manifest.begin_epoch(EpochFacts.from_record(record))
            except FormatError as error:
                self.log.error("epoch_conflict", why=str(error))
        elif kind == "quarantine":
            checkpoint = checkpoint_from(record["checkpoint"])
            if checkpoint is not None:
                manifest.quarantine(checkpoint, str(record["reason"]))

    def open_manifest(self) -> NodeManifest:
        """The node's manifest of the job; made when first needed."""
        if self.manifest is None:
            directory = self.context.settings.state_dir / self.name
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.manifest, problem = NodeManifest.open(directory / "manifest", ops=self.context.journal_ops)
            if problem:
                self.context.counters.add("journal_repairs")
                self.log.warning("manifest_damaged", why=problem)
        return self.manifest

    def _carry_out(self, order: NodeInstruction) -> None:
        if isinstance(order, SendReport | SendSkip | SendRestored | SendJoin | SendPersistFailed):
            self._outbox.append(lambda: self._to_coordinator(order))
            self._wake.set()
        elif isinstance(order, GrantSlot | RefuseGrant | TellCommitted | TellCadence | FenceWriter | Refuse):
            self._tell(order)
        elif isinstance(order, FreeSlot):
            try:
                self.files.free(order.rank, order.slot, order.generation)
            except (OSError, FormatError) as error:
                self.log.warning("slot_not_freed", rank=order.rank, slot=order.slot, why=str(error))
        elif isinstance(order, RemoveSlot):
            self.files.remove(order.rank, order.slot)
        elif isinstance(order, RemoveRank):
            self.tidy()
        elif isinstance(order, Digest):
            within = self._until_next_snapshot()
            work = self.context.workers.work("digest", order.shard.image_length, within=within)
            task = self.context.tasks.start(self._digest(order, work), f"digest of {self.name} rank {order.rank}")
            self._digests[task] = work
            task.add_done_callback(self._digests.pop)
        elif isinstance(order, StartPersist):
            self.persist(order)
        elif isinstance(order, CancelPersist):
            self.cancel_persist(order)
        elif isinstance(order, DropShard):
            step = order.checkpoint.step
            self.log.warning(
                "shard_dropped", rank=order.rank, step=step, epoch=order.checkpoint.epoch, why=order.reason
            )
        elif isinstance(order, Superseded):
            self.log.error("superseded", why="another daemon runs under the name of this node", node=self.context.node)
        else:
            assert isinstance(order, ReceiveSlot)  # taken by whoever called `receive`

    def _tell(self, order: GrantSlot | RefuseGrant | TellCommitted | TellCadence | FenceWriter | Refuse) -> None:
        client = self.client_of(order)
        if client is None:
            return
        reply: Reply
        if isinstance(order, GrantSlot):
            reply = Grant(token=wire_token(order.token), slot=order.slot, generation=order.generation)
        elif isinstance(order, RefuseGrant):
            self.counters.add("no_slot")
            self.log.info("no_slot", rank=order.rank, why=order.reason)
            reply = NoGrant(token=wire_token(order.token), reason=order.reason[:4000])
        elif isinstance(order, TellCommitted):
            reply = Committed(token=wire_token(order.token), step=order.step, tier=order.tier)
        elif isinstance(order, TellCadence):
            reply = wire_cadence(order.cadence, wire_token(order.token))
        elif isinstance(order, FenceWriter):
            if self.token is None:
                return
            self.counters.add("fenced")
            self.log.warning("fenced", rank=order.rank, pid=client.pid, why=order.reason)
            reply = Fence(token=wire_token(self.token), reason=order.reason)
        else:
            self.log.warning("refused", rank=order.rank, what=order.message, why=order.reason)
            reply = ErrorReply(code="usage", message=order.reason, field=order.message)
        self.context.server.send(client.peer, reply)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, no slot of this job loses its content: a restore is planned from it."""
        self.core.hold()
        try:
            yield
        finally:
            self.apply(self.core.release())

    async def caught_up(self) -> None:
        """Return when everything that was sealed so far is digested and reported."""
        for work in self._digests.values():
            work.hurry()
        if self._digests:
            await asyncio.wait(set(self._digests))  # not those that begin meanwhile: a live process seals on and on
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def passed() -> None:
            if not done.done():
                done.set_result(None)

        if self.closed:
            return
        self._outbox.append(passed)
        self._wake.set()
        self._catching_up.add(done)
        try:
            await done
        finally:
            self._catching_up.discard(done)

    def _give_up_reports(self) -> None:
        """Nothing queued will be sent now: nobody waits for it."""
        self._outbox.clear()
        for done in self._catching_up:
            if not done.done():
                done.set_result(None)

    async def _digest(self, order: Digest, work: Work) -> None:
        step, nbytes = order.shard.step, order.shard.image_length

        def digest() -> ShardFacts:
            with self.spans.span("digest", rank=order.rank, step=step, bytes=nbytes):
                return self.files.verify(order.rank, order.slot, self.context.workers.cancel, work)

        try:
            with work:
                found = await self.context.workers.background(digest)
            self.counters.add("late_work", work.late)
        except Degraded:
            return  # the daemon ends; the next one digests the slot
        except (BaftError, OSError) as error:
            self.apply(self.core.digest_failed(order.rank, order.slot, order.generation, str(error)))
            return
        self.apply(self.core.digested(order.rank, order.slot, order.generation, found))
        self.mark_verified(order.rank, order.slot, order.generation)

    def _until_next_snapshot(self) -> float | None:
        """Seconds from one snapshot to the next: then a slot must be free. None: it is not known yet."""
        step, view = self.pace.median_step, self.view
        return step * view.cadence.every if step > 0 and view is not None else None

    def mark_verified(self, rank: int, slot: int, generation: int) -> None:
        """Write VERIFIED into the header of a slot that the core takes for verified."""
        table = self.core.tables.get(rank)
        held = table.slots.get(slot) if table is not None else None
        if held is None or held.generation != generation or held.state is not SlotState.VERIFIED or held.shard is None:
            return
        self.counters.add("verified")
        try:
            self.files.mark_verified(rank, slot, held.shard)
        except (OSError, FormatError) as error:
            self.log.warning("slot_not_marked", rank=rank, slot=slot, why=str(error))

    def _no_tier(self, order: StartPersist) -> None:
        self.apply(self.core.persist_failed(order.rank, order.shard.checkpoint, "no durable tier is on"))

    # ------------------------------------------------------------------ to the coordinator

    async def _send(self) -> None:
        """Send what is queued, one after the other. What cannot be sent now is said again by `resend`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                send = self._outbox.popleft()
                try:
                    answer = await send()
                except Unreachable as error:
                    self._give_up_reports()
                    self.log.warning("coordinator_away", why=str(error))
                    self.apply(self.core.away())
                    self._resend_later()
                except (BaftError, OSError) as error:
                    self.log.warning("report_not_taken", why=str(error))
                    self._resend_later()
                else:
                    if answer is not None:
                        self.apply(answer)

    async def _to_coordinator(
        self, order: SendReport | SendSkip | SendRestored | SendJoin | SendPersistFailed
    ) -> Ready[NodeInstruction] | None:
        coordinator = self.context.coordinator
        if isinstance(order, SendReport):
            return self.core.take_answer(await coordinator.report(self.name, order.report))
        if isinstance(order, SendSkip):
            return self.core.take_answer(await coordinator.skip(self.name, order.skipped))
        if isinstance(order, SendRestored):
            return self.core.take_answer(await coordinator.restored(self.name, order.restored))
        if isinstance(order, SendJoin):
            return self.core.joined((await coordinator.join(self.name, order.inventory)).view)
        await coordinator.durable_failed(self.name, order.token, order.step, order.rank, order.reason)
        return None

    def _resend_later(self) -> None:
        if self._resend is None:
            self._resend = asyncio.get_running_loop().call_later(RESEND_AFTER, self._say_again)

    def _say_again(self) -> None:
        self._resend = None
        if not self.closed:
            self.apply(self.core.resend())

    # ------------------------------------------------------------------ events from elsewhere

    def is_granted(self, writer: Writer, rank: int, slot: int, generation: int) -> bool:
        """Whether the slot is still the writer's under this generation."""
        table = self.core.tables.get(rank)
        held = table.slots.get(slot) if table is not None else None
        return (
            held is not None
            and held.state is SlotState.FILLING
            and held.generation == generation
            and held.writer == writer
        )

    def granted_to_others(self, writer: Writer, rank: int) -> set[int]:
        """Slots of the rank that another process may be writing to."""
        table = self.core.tables.get(rank)
        return {slot.index for slot in table or () if slot.state is SlotState.FILLING and slot.writer != writer}

    def restored_slots(self) -> dict[tuple[int, int], int]:
        """Bytes of each slot that holds what this start began from and will go when it has committed a step: those of
        ranks that it does not have, of layouts that it does not use, and of ranks that have not laid out theirs."""
        view, head = self.view, self.core.history.head
        if view is None or view.restored is None or head is None:
            return {}
        return {
            (rank, slot.index): self.files.get(rank, slot.index).size
            for rank, table in self.core.tables.items()
            for slot in table.contents()
            if slot.shard is not None and slot.shard.checkpoint == view.restored
            if slot.retired or rank >= head.world or not self.declared(rank)
        }

    def declared(self, rank: int) -> bool:
        """Whether the rank's process of this start has laid out its slots."""
        record = self.layouts.get(rank)
        return record is not None and token_from(record["token"]) == self.token

    def adopted(self, writer: Writer) -> None:
        """A process that held a slot when the daemon started has come back: it is watched as a client now."""
        orphan = self.orphans.pop(writer, None)
        if orphan is not None:
            orphan()

    def layout_generation(self) -> int:
        """How many commit plans the job had: it grows when a rank declares another layout."""
        trees = tuple(bytes(self.layouts[rank]["tree"]) for rank in sorted(self.layouts))
        if trees != self._trees:
            self._trees = trees
            self._generation += 1
        return self._generation

    def client_died(self, client: Client) -> None:
        """A training process is gone: its half-filled slot is dropped, one that it had sealed is taken."""
        writer = self.writer_of(client)
        headers = self.files.headers(self.core.granted_to(writer))
        self.apply(self.core.writer_dead(writer, headers))
        self.tidy()

    def tidy(self) -> None:
        """Remove what is left of ranks that the running start does not have: control page, lock, declared layout. A
        rank of which a slot is left, or a process that may still want something, keeps them until that ends."""
        head = self.core.history.head
        if head is None or self.closed:
            return
        known = {client.rank for client in self.clients.of_job(self.name)}
        kept = {rank for rank, table in self.core.tables.items() if table.slots}
        kept |= {c.rank for c in self.clients.of_job(self.name) if c.alive and c.state not in ("finished", "left")}
        for rank in self.arena.ranks():
            if rank < head.world or rank in kept:
                continue
            if rank not in known and lock_holder(self.arena.lock_path(rank)) is not None:
                continue  # it lived through a restart of the daemon, and will say hello
            self.layouts.pop(rank, None)
            self.arena.remove_rank(rank)
            self.log.info("rank_removed", rank=rank, why=f"the running start has {head.world} ranks")

    def close(self) -> None:
        """Close files; slots and journal stay where they are."""
        self.closed = True
        self.pacing.close()
        for stop in self.orphans.values():
            stop()
        self.orphans.clear()
        self._sender.cancel()
        self._give_up_reports()
        if self._resend is not None:
            self._resend.cancel()
        self.files.close()
        self.journal.close()
        if self.manifest is not None:
            self.manifest.close()
