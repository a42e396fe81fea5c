"""One job on one node: what becomes of its ranks' slots between training processes and the coordinator.

Events come from training processes (`declare`, `begin`, `seal`, `skip`, `writer_dead`), from the daemon's own workers
(`digested`, `persisted`, `received`) and from the coordinator (`joined`, `view`, `answer`). Each returns a `Ready`.

Kept promises: a slot is granted only when nothing in it can be wanted (`SlotTable.fate`); every verified shard of the
job's token is reported until it is answered; a step that was said to be gone never comes back; a process of an older
token gets nothing, and a slot it may still write to is given to nobody else for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baftd.checkpoint.facts import (
    Answer,
    Held,
    Inventory,
    JobView,
    Ready,
    Record,
    Report,
    RestoredRank,
    ShardFacts,
    Skipped,
    Source,
    Tier,
    Verdict,
    Writer,
    newer_incarnation,
)
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
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
from baftd.checkpoint.slots import DAEMON, Fate, HeaderFacts, Slot, SlotState, SlotTable, rebuild_table, slot_record
from baftd.errors import RankError

__all__ = ["NodeJob"]


@dataclass
class _Client:
    """The process that trains a rank here, once it has declared its layout."""

    writer: Writer
    token: Token
    world: int
    tree_digest: bytes
    passed: int = -1
    """Newest step it has sealed or skipped."""
    refused: str = ""
    """The reason given with the last `RefuseGrant`; empty after a grant."""


@dataclass
class _Out:
    """What an event leads to, in the making."""

    records: list[Record] = field(default_factory=list)
    announce: list[NodeInstruction] = field(default_factory=list)

    def ready(self) -> Ready[NodeInstruction]:
        return Ready(tuple(self.records), tuple(self.announce))


class NodeJob:
    """One job on one node. `history` mirrors what the coordinator has said of the job's epochs.

    Records of kinds `epoch`, `quarantine` and `highest` belong into the node's manifest (they outlive its memory, and
    teach a coordinator that was wiped), the others into the job's journal beside the slots: see `is_lasting`.
    """

    table_class: Callable[[int], SlotTable] = SlotTable

    def __init__(self, job: str, node: str, incarnation: str, *, history: History | None = None) -> None:
        self.job = job
        self.node = node
        self.incarnation = incarnation
        self.history = history or History()
        self.tables: dict[int, SlotTable] = {}
        self._view: JobView | None = None
        self._store = ""
        self._joined = False
        self._away = False
        self._clients: dict[int, _Client] = {}
        self._passed: dict[tuple[Token, int], int] = {}
        self._skips: dict[int, Skipped] = {}
        self._durable: dict[tuple[int, int], Report] = {}
        self._durable_answered: set[tuple[int, int]] = set()
        self._durable_failed: dict[tuple[int, int], str] = {}
        self._restored: dict[int, tuple[CheckpointId, bool]] = {}

    @classmethod
    def rebuild(
        cls,
        job: str,
        node: str,
        incarnation: str,
        *,
        history: History,
        records: Iterable[Record],
        headers: Mapping[tuple[int, int], HeaderFacts | None],
    ) -> tuple[NodeJob, Ready[NodeInstruction]]:
        """The core of a daemon that was restarted beside its slots.

        `records`: the job's journal. `headers`: what each slot file that exists says of itself, by (rank, slot); None
        for one that cannot be read. Slots whose writer is gone must be told with `writer_dead` afterwards. Nothing is
        freed or overwritten before the coordinator has spoken; only free slots are granted.
        """
        self = cls(job, node, incarnation, history=history)
        out = _Out()
        kept = list(records)
        for rank in sorted({rank for rank, _ in headers}):
            table = self.table_class(rank)
            own = {slot: facts for (owner, slot), facts in headers.items() if owner == rank}
            out.records += rebuild_table(table, kept, own)
            self.tables[rank] = table
            for slot in table:
                if slot.state is SlotState.SEALED and slot.shard is not None:
                    out.announce.append(Digest(rank, slot.index, slot.generation, slot.shard))
                elif slot.state is SlotState.VERIFIED:
                    slot.reported = True  # it may have been
                if slot.shard is not None:
                    out.records += self.history.see_step(slot.shard.step)
        return self, out.ready()

    # ------------------------------------------------------------ asking

    @property
    def token(self) -> Token | None:
        """The job's newest token known here."""
        return self.history.token

    @property
    def last_view(self) -> JobView | None:
        """The coordinator's last word; None if it has said nothing since this daemon started."""
        return self._view

    def inventory(self) -> Inventory:
        """What this node holds and knows, for a coordinator or a restore."""
        shards = tuple(
            Held(slot.shard, Source("memory", self.node, {"rank": rank, "slot": slot.index, "gen": slot.generation}))
            for rank, table in sorted(self.tables.items())
            for slot in table.contents()
            if slot.shard is not None
        )
        return Inventory(
            self.node,
            self.incarnation,
            shards,
            self.history.epochs(),
            self.history.highest_step,
            (),
            tuple(self.history.quarantined.items()),
        )

    def describe(self, rank: int) -> list[str]:
        """One line a slot of the rank."""
        table = self.tables.get(rank)
        return table.describe(self.history, self._view) if table else []

    def holding(self, rank: int, checkpoint: CheckpointId) -> Slot | None:
        """The slot in which this node holds the verified shard of a checkpoint on the line."""
        epoch, table = self.history.find(checkpoint.epoch), self.tables.get(rank)
        return table.content(epoch.token, checkpoint.step) if epoch is not None and table is not None else None

    # ------------------------------------------------------------ training processes

    def declare(
        self, rank: int, writer: Writer, token: Token, *, world: int, tree_digest: bytes, slots: Sequence[int]
    ) -> Ready[NodeInstruction]:
        """The process lays out its shard, in slots `slots` (indices; files exist). Other slots of the rank retire.

        Said again after a reconnect or for a new layout; grants that were not used are repeated. Raises `RankError`
        when another process of the same token claims the rank.
        """
        out = _Out()
        known = self._clients.get(rank)
        if known is not None and known.token == token and known.writer != writer:
            raise RankError(
                f"rank {rank} of job {self.job} is claimed by {writer} and by {known.writer} on node {self.node}.",
                hint="Give every process its own rank.",
            )
        if self._fenced(rank, writer, token, out):
            return out.ready()
        client = _Client(writer, token, world, tree_digest, self._passed.get((token, rank), -1))
        self._clients[rank] = client
        table = self._table(rank)
        table.lay(slots)
        for slot in table:
            if slot.writer == writer and slot.state is SlotState.FILLING and slot.retired:
                self._clear(rank, slot, out)  # it lays out anew, so it fills nothing
            elif slot.writer == writer and slot.state is SlotState.FILLING and slot.step is None:
                out.announce.append(GrantSlot(rank, writer, token, slot.index, slot.generation))
        if self._view is not None:
            out.announce.append(TellCadence(rank, writer, token, self._view.cadence))
            self._tell_committed(rank, client, None, out)
        return self._settle(out)

    def lay_slots(self, rank: int, slots: Sequence[int]) -> Ready[NodeInstruction]:
        """Slots made for a fetch, before any process has declared a layout."""
        self._table(rank).lay({*slots, *(slot.index for slot in self._table(rank) if not slot.retired)})
        return Ready()

    def begin(
        self, rank: int, writer: Writer, token: Token, step: int, slot: int, generation: int
    ) -> Ready[NodeInstruction]:
        """The process fills a granted slot with state(step)."""
        out = _Out()
        held = self._granted(rank, writer, slot, generation)
        fenced = self._fenced(rank, writer, token, out)
        if held is not None:
            held.step = step  # also of a fenced process: it may still be writing
        elif not fenced and generation > self._generation(rank, slot):
            out.announce.append(Refuse(rank, writer, "begin", f"slot {slot} was not granted at {generation}"))
        if fenced:
            return out.ready()
        out.records += self.history.see_step(step)
        return self._settle(out)

    def seal(
        self, rank: int, writer: Writer, shard: ShardFacts, slot: int, generation: int, *, digested: bool
    ) -> Ready[NodeInstruction]:
        """The slot holds state(step), the witnesses agreed. Not `digested`: `shard` has no digests, compute them."""
        out = _Out()
        held = self._granted(rank, writer, slot, generation)
        if self._fenced(rank, writer, shard.token, out):
            if held is not None:  # it says itself that it has stopped writing there
                self._clear(rank, held, out)
            return self._settle(out)
        if held is None:
            if generation > self._generation(rank, slot):
                out.announce.append(Refuse(rank, writer, "seal", f"slot {slot} was not granted at {generation}"))
            return out.ready()
        client = self._clients.get(rank)
        if client is None or client.token != shard.token:
            out.announce.append(Refuse(rank, writer, "declare", f"rank {rank} has not declared its layout"))
            return out.ready()
        problem = self._unfit(client, shard, rank)
        if problem:
            self._clear(rank, held, out)
            out.announce.append(DropShard(rank, shard.checkpoint, problem))
            return self._settle(out)
        held.state, held.shard, held.step = SlotState.SEALED, shard, shard.step
        self._pass(rank, shard.token, shard.step)
        out.records += self.history.see_step(shard.step)
        if digested:
            self._verify(rank, held, shard, out)
        else:
            out.announce.append(Digest(rank, held.index, held.generation, shard))
        return self._settle(out)

    def _unfit(self, client: _Client, shard: ShardFacts, rank: int) -> str:
        if shard.rank != rank or shard.world != client.world:
            return f"it is of rank {shard.rank} of {shard.world}, not of rank {rank} of {client.world}"
        if shard.tree_digest != client.tree_digest:
            return "its layout is not the declared one"
        if shard.step in self._table(rank).held(shard.token):
            return "the step is held already"
        if shard.step <= client.passed:
            return f"the rank has passed step {client.passed} already"
        return ""

    def digested(self, rank: int, slot: int, generation: int, shard: ShardFacts) -> Ready[NodeInstruction]:
        """The daemon has computed the digests of a sealed slot; a root digest in the header must agree with them."""
        out = _Out()
        held = self._sealed(rank, slot, generation)
        if held is None or held.shard is None:
            return out.ready()
        if any(held.shard.root_digest) and held.shard.root_digest != shard.root_digest:
            return self.digest_failed(rank, slot, generation, "its bytes are not those its header speaks of")
        self._verify(rank, held, shard, out)
        return self._settle(out)

    def digest_failed(self, rank: int, slot: int, generation: int, reason: str) -> Ready[NodeInstruction]:
        """The sealed content is not what it claims to be: it is dropped, and the step with it."""
        out = _Out()
        held = self._sealed(rank, slot, generation)
        if held is not None and held.shard is not None:
            shard = held.shard
            out.announce.append(DropShard(rank, shard.checkpoint, reason))
            self._clear(rank, held, out)
            self._skip(rank, shard.token, shard.step, reason, out)
        return self._settle(out)

    def skip(
        self,
        rank: int,
        writer: Writer,
        token: Token,
        step: int,
        reason: str,
        slot: int | None = None,
        generation: int = 0,
    ) -> Ready[NodeInstruction]:
        """No snapshot of the step from this rank. `slot` and `generation` are set when one had been begun for it."""
        out = _Out()
        held = self._granted(rank, writer, slot, generation) if slot is not None else None
        if held is not None:
            self._clear(rank, held, out)
        if not self._fenced(rank, writer, token, out) and step not in self._table(rank).held(token):
            out.records += self.history.see_step(step)
            self._skip(rank, token, step, reason, out)
        return self._settle(out)

    def _skip(self, rank: int, token: Token, step: int, reason: str, out: _Out) -> None:
        if token != self.token:
            return
        self._pass(rank, token, step)
        known = self._skips.get(rank)
        if known is None or known.token != token or known.step <= step:
            self._skips[rank] = Skipped(self._store, self.node, self.incarnation, token, rank, step, reason, -1, ())
        if self._online:
            out.announce.append(SendSkip(self._fill_skip(self._skips[rank])))

    def writer_dead(
        self, writer: Writer, headers: Mapping[tuple[int, int], HeaderFacts | None]
    ) -> Ready[NodeInstruction]:
        """A process is gone. `headers` has, read after its death, the header of each slot in `granted_to(writer)`.

        A slot it was filling is dropped; one it had sealed without being able to say so is taken.
        """
        out = _Out()
        for rank, slot in self.granted_to(writer):
            held = self.tables[rank].slots[slot]
            header = headers.get((rank, slot))
            shard = header.shard if header is not None else None
            if (
                header is not None
                and shard is not None
                and header.state in (SlotState.SEALED, SlotState.VERIFIED)
                and header.generation == held.generation
                and shard.token == self.token
                and shard.rank == rank
                and shard.step not in self._table(rank).held(shard.token)
                and shard.step > self._passed.get((shard.token, rank), -1)
            ):
                held.state, held.shard, held.step = SlotState.SEALED, shard, shard.step
                self._pass(rank, shard.token, shard.step)
                out.announce.append(Digest(rank, slot, held.generation, shard))
            else:
                self._clear(rank, held, out)
        for rank in [rank for rank, client in self._clients.items() if client.writer == writer]:
            del self._clients[rank]
        return self._settle(out)

    def granted_to(self, writer: Writer) -> list[tuple[int, int]]:
        """(rank, slot) of every slot that the process may be writing to."""
        return [
            (rank, slot.index)
            for rank, table in self.tables.items()
            for slot in table
            if slot.state is SlotState.FILLING and slot.writer == writer
        ]

    def writers(self) -> set[Writer]:
        """Processes that may be writing to a slot: after a rebuild, those of them that are dead must be told."""
        return {
            slot.writer
            for table in self.tables.values()
            for slot in table
            if slot.state is SlotState.FILLING and slot.writer is not None and slot.writer != DAEMON
        }

    # ------------------------------------------------------------ the coordinator

    @property
    def _online(self) -> bool:
        return self._joined and not self._away

    def joined(self, view: JobView) -> Ready[NodeInstruction]:
        """The coordinator has taken this node in (again): all that is owed is sent."""
        out = _Out()
        self._away = False
        self._take_view(view, out)
        if view.store == self._store:  # else it is the late word of a coordinator that is no more
            self._joined = True
            self._send_owed(out)
        return self._settle(out)

    def not_joined(self) -> Ready[NodeInstruction]:
        """The coordinator says that it does not know this node (any more)."""
        out = _Out()
        self._joined = False
        out.announce.append(SendJoin(self.inventory()))
        return out.ready()

    def away(self) -> Ready[NodeInstruction]:
        """The coordinator does not answer. Training goes on in the slots that may rotate."""
        self._away = True
        return self._settle(_Out())

    def resend(self) -> Ready[NodeInstruction]:
        """Say again whatever has not been answered: on a timer, and when the coordinator is back."""
        out = _Out()
        self._away = False
        if not self._joined:
            out.announce.append(SendJoin(self.inventory()))
        else:
            self._send_owed(out)
        return out.ready()

    def take_view(self, view: JobView) -> Ready[NodeInstruction]:
        """The coordinator has published a view."""
        out = _Out()
        self._take_view(view, out)
        return self._settle(out)

    def take_answer(self, answer: Answer) -> Ready[NodeInstruction]:
        """The coordinator has answered a report, a skip or a `RestoredRank`."""
        out = _Out()
        if answer.node != self.node or answer.incarnation != self.incarnation:
            return out.ready()
        if answer.verdict is Verdict.STALE_NODE:
            out.announce.append(Superseded(self.incarnation))
            return out.ready()
        self._take_view(answer.view, out)
        if answer.view.store != self._store:
            return self._settle(out)  # of a coordinator that is no more: whether it knew says nothing
        if answer.verdict is Verdict.UNKNOWN:
            self._join(out)
        elif answer.token == self.token:
            self._mark(answer, out)
        return self._settle(out)

    def _mark(self, answer: Answer, out: _Out) -> None:
        rank, step = answer.rank, answer.step
        if answer.tier == "memory":
            slot = self._table(rank).content(answer.token, step)
            if slot is None:
                return
            slot.answered = True
            if answer.verdict in (Verdict.DEAD, Verdict.QUARANTINED, Verdict.REFUSED):
                slot.dead = True
            if answer.verdict in (Verdict.QUARANTINED, Verdict.REFUSED) and slot.shard is not None:
                out.announce.append(DropShard(rank, slot.shard.checkpoint, answer.detail))
        elif answer.tier == "durable":
            if (rank, step) in self._durable:
                self._durable_answered.add((rank, step))
        else:
            owed = self._skips.get(rank)
            if answer.verdict is Verdict.DEAD and owed is not None and owed.step <= step:
                del self._skips[rank]
            restored = self._restored.get(rank)
            if restored is not None and restored[0].step == step and answer.verdict is not Verdict.DEAD:
                self._restored[rank] = (restored[0], True)

    def _take_view(self, view: JobView, out: _Out) -> None:
        if self._store and view.store != self._store:
            if not newer_incarnation(view.store, self._store):
                return
            self._forget_answers()
            self._join(out)
        elif self._view is not None and view.version <= self._view.version and view.store == self._view.store:
            return
        self._store = view.store
        epoch = view.token.epoch if view.token is not None else 0
        if epoch < self.history.epoch:  # it was wiped, and knows less than we do
            self._join(out)
            return
        before, self._view = self._view, view
        old_token = self.token
        out.records += self.history.adopt(view.line)
        for checkpoint in view.quarantined:
            out.records += self.history.quarantine(checkpoint, "by the coordinator")
        if self.token != old_token:
            self._change_token(out)
        self._take_persist(view, out)
        for rank, client in self._clients.items():
            self._tell_committed(rank, client, before, out)
            if before is None or before.cadence != view.cadence:
                out.announce.append(TellCadence(rank, client.writer, client.token, view.cadence))

    def _forget_answers(self) -> None:
        for table in self.tables.values():
            for slot in table:
                slot.answered = False
        self._durable_answered.clear()
        self._restored = {rank: (checkpoint, False) for rank, (checkpoint, _) in self._restored.items()}

    def _join(self, out: _Out) -> None:
        if self._joined:
            self._joined = False
            out.announce.append(SendJoin(self.inventory()))

    def _change_token(self, out: _Out) -> None:
        token = self.token
        for rank in [rank for rank, client in self._clients.items() if client.token != token]:
            client = self._clients.pop(rank)
            out.announce.append(FenceWriter(rank, client.writer, self._fence_reason()))
        self._passed = {key: step for key, step in self._passed.items() if key[0] == token}
        self._skips.clear()
        self._durable.clear()
        self._durable_answered.clear()
        self._durable_failed.clear()
        self._restored.clear()

    def _tell_committed(self, rank: int, client: _Client, before: JobView | None, out: _Out) -> None:
        view = self._view
        if view is None:
            return
        news: tuple[tuple[Tier, CheckpointId | None, CheckpointId | None], ...] = (
            ("memory", view.committed, before.committed if before else None),
            ("durable", view.durable, before.durable if before else None),
        )
        for tier, now, then in news:
            if now is not None and now != then and now.epoch == client.token.epoch:
                out.announce.append(TellCommitted(rank, client.writer, client.token, now.step, tier))

    # ------------------------------------------------------------ durable tier

    def _take_persist(self, view: JobView, out: _Out) -> None:
        token = view.token
        wanted = set(view.persist)
        for owed in [key for key in self._durable if key[1] not in wanted]:
            del self._durable[owed]
            self._durable_answered.discard(owed)
        self._durable_failed = {key: why for key, why in self._durable_failed.items() if key[1] in wanted}
        for rank, table in self.tables.items():
            for slot in table.contents():
                assert slot.shard is not None
                current = slot.shard.token == token and slot.shard.step in wanted
                if slot.persisting and not current:
                    out.announce.append(CancelPersist(rank, slot.shard.checkpoint))
                elif current and not slot.persisting and not self._settled_durable(rank, slot.shard.step):
                    slot.persisting = True
                    out.announce.append(StartPersist(rank, slot.index, slot.generation, slot.shard))
        if token is None:
            return
        for rank, client in self._clients.items():
            for step in wanted:
                if client.token != token or self._settled_durable(rank, step):
                    continue
                # Not `held`: a step that is superseded in memory meanwhile is still there, pinned by its durable write.
                if not any(
                    s.shard is not None and (s.shard.token, s.shard.step) == (token, step) for s in self._table(rank)
                ):
                    self._fail_durable(rank, step, f"node {self.node} holds no verified shard of it", out)

    def _settled_durable(self, rank: int, step: int) -> bool:
        return (rank, step) in self._durable or (rank, step) in self._durable_failed

    def persisted(self, rank: int, checkpoint: CheckpointId, place: Record) -> Ready[NodeInstruction]:
        """The durable write of the rank's shard is complete; `place` is the storage room's record of it."""
        out = _Out()
        slot = self._persisting(rank, checkpoint)
        if slot is not None and slot.shard is not None:
            slot.persisting = False
            if self._wants(checkpoint):
                report = Report(self._store, self.node, self.incarnation, slot.shard, "durable", -1, (), place)
                self._durable[(rank, checkpoint.step)] = report
                if self._online:
                    out.announce.append(SendReport(self._fill_report(report)))
        return self._settle(out)

    def persist_failed(self, rank: int, checkpoint: CheckpointId, reason: str) -> Ready[NodeInstruction]:
        """The durable write has failed, or was stopped after `CancelPersist`."""
        out = _Out()
        slot = self._persisting(rank, checkpoint)
        if slot is not None:
            slot.persisting = False
            if self._wants(checkpoint):
                self._fail_durable(rank, checkpoint.step, reason, out)
        return self._settle(out)

    def _persisting(self, rank: int, checkpoint: CheckpointId) -> Slot | None:
        table = self.tables.get(rank)
        return next(
            (s for s in table or () if s.persisting and s.shard is not None and s.shard.checkpoint == checkpoint), None
        )

    def _wants(self, checkpoint: CheckpointId) -> bool:
        view = self._view
        return (
            view is not None
            and view.token is not None
            and view.token.epoch == checkpoint.epoch
            and checkpoint.step in view.persist
        )

    def _fail_durable(self, rank: int, step: int, reason: str, out: _Out) -> None:
        self._durable_failed[(rank, step)] = reason
        if self._online and self.token is not None:
            out.announce.append(SendPersistFailed(self.token, step, rank, reason))

    # ------------------------------------------------------------ restore

    def receive(self, rank: int, fitting: Collection[int] | None = None) -> Ready[NodeInstruction]:
        """A slot is needed for a shard to be fetched: `ReceiveSlot`, or `RefuseGrant` (to `DAEMON`).

        `fitting`: indices of the slots that are large enough; None: all are.
        """
        out = _Out()
        table = self._table(rank)
        slot = table.choose(self.history, self._view, fitting)
        if self.token is None:
            return out.ready()
        if slot is None:
            out.announce.append(RefuseGrant(rank, DAEMON, self.token, self._why_none(rank)))
            return out.ready()
        self._grant(rank, slot, DAEMON, self.token, out)
        out.announce.append(ReceiveSlot(rank, slot.index, slot.generation))
        return out.ready()

    def received(self, rank: int, slot: int, generation: int, shard: ShardFacts) -> Ready[NodeInstruction]:
        """The fetched image is in the slot and verified. It must be what the head epoch begins from."""
        out = _Out()
        held = self._granted(rank, DAEMON, slot, generation)
        if held is not None:
            view = self._view
            if view is None or shard.checkpoint != view.restored or not self.history.on_line(shard.token, shard.step):
                self._clear(rank, held, out)
                out.announce.append(DropShard(rank, shard.checkpoint, "no start of the job begins from it any more"))
            else:
                held.step = shard.step
                held.reported = held.answered = True
                self._make_verified(rank, held, shard, out)
        return self._settle(out)

    def receive_failed(self, rank: int, slot: int, generation: int) -> Ready[NodeInstruction]:
        """The fetch came to nothing: the slot is free again."""
        out = _Out()
        held = self._granted(rank, DAEMON, slot, generation)
        if held is not None:
            self._clear(rank, held, out)
        return self._settle(out)

    def damaged(self, rank: int, checkpoint: CheckpointId, reason: str) -> Ready[NodeInstruction]:
        """The bytes of a verified shard are not (or no more) what their digest says: they are dropped.

        The coordinator must be told as well (`source_failed`), so that nobody plans with them.
        """
        out = _Out()
        slot = self.holding(rank, checkpoint)
        if slot is not None and not slot.persisting and not slot.sending:
            self._clear(rank, slot, out)
            out.announce.append(DropShard(rank, checkpoint, reason))
        return self._settle(out)

    def restored(self, rank: int, token: Token) -> Ready[NodeInstruction]:
        """The process of this rank has loaded what its epoch begins from, out of a slot of this node."""
        out = _Out()
        head = self.history.head
        if head is None or head.token != token or head.parent is None:
            return out.ready()
        if self.holding(rank, head.parent) is None:
            return out.ready()
        self._restored[rank] = (head.parent, False)
        if self._online:
            out.announce.append(
                SendRestored(RestoredRank(self._store, self.node, self.incarnation, token, rank, head.parent))
            )
        return out.ready()

    # ------------------------------------------------------------ inside

    def _table(self, rank: int) -> SlotTable:
        return self.tables.setdefault(rank, self.table_class(rank))

    def _generation(self, rank: int, slot: int) -> int:
        table = self.tables.get(rank)
        held = table.slots.get(slot) if table else None
        return held.generation if held else -1

    def _granted(self, rank: int, writer: Writer, slot: int | None, generation: int) -> Slot | None:
        """The slot, if it is still granted to this writer under this generation."""
        table = self.tables.get(rank)
        held = table.slots.get(slot) if table is not None and slot is not None else None
        if held is None or held.state is not SlotState.FILLING:
            return None
        return held if held.generation == generation and held.writer == writer else None

    def _sealed(self, rank: int, slot: int, generation: int) -> Slot | None:
        table = self.tables.get(rank)
        held = table.slots.get(slot) if table is not None else None
        if held is None or held.state is not SlotState.SEALED:
            return None
        return held if held.generation == generation else None

    def _fence_reason(self) -> str:
        token = self.token
        return f"epoch {token.epoch} of job {self.job} has taken over" if token else f"job {self.job} is not known"

    def _fenced(self, rank: int, writer: Writer, token: Token, out: _Out) -> bool:
        if token == self.token:
            return False
        if token.epoch > self.history.epoch:
            out.announce.append(Refuse(rank, writer, "token", f"epoch {token.epoch} is not known on node {self.node}"))
            return True
        out.announce.append(FenceWriter(rank, writer, self._fence_reason()))
        return True

    def _pass(self, rank: int, token: Token, step: int) -> None:
        passed = self._passed[(token, rank)] = max(step, self._passed.get((token, rank), -1))
        client = self._clients.get(rank)
        if client is not None and client.token == token:
            client.passed = passed

    def _verify(self, rank: int, slot: Slot, shard: ShardFacts, out: _Out) -> None:
        self._make_verified(rank, slot, shard, out)
        if shard.token == self.token and self._online:
            self._report(rank, slot, out)
        if self._view is not None:
            self._take_persist(self._view, out)

    def _make_verified(self, rank: int, slot: Slot, shard: ShardFacts, out: _Out) -> None:
        slot.state, slot.shard, slot.writer = SlotState.VERIFIED, shard, None
        out.records.append(slot_record("verified", rank, slot))

    def _report(self, rank: int, slot: Slot, out: _Out) -> None:
        assert slot.shard is not None
        slot.reported = True
        out.announce.append(
            SendReport(
                self._fill_report(Report(self._store, self.node, self.incarnation, slot.shard, "memory", -1, ()))
            )
        )

    def _fill_report(self, report: Report) -> Report:
        """With what the rank holds at this moment."""
        passed, held = self._standing(report.shard.rank, report.shard.token)
        return Report(
            self._store, report.node, report.incarnation, report.shard, report.tier, passed, held, report.place
        )

    def _fill_skip(self, skip: Skipped) -> Skipped:
        passed, held = self._standing(skip.rank, skip.token)
        return Skipped(
            self._store, skip.node, skip.incarnation, skip.token, skip.rank, skip.step, skip.reason, passed, held
        )

    def _standing(self, rank: int, token: Token) -> tuple[int, tuple[int, ...]]:
        held = self._table(rank).held(token)
        return max([self._passed.get((token, rank), -1), *held]), held

    def _send_owed(self, out: _Out) -> None:
        token = self.token
        if token is None:
            return
        for rank, table in self.tables.items():
            for slot in table.contents():
                if slot.shard is not None and slot.shard.token == token and not (slot.answered or slot.dead):
                    self._report(rank, slot, out)
            skip = self._skips.get(rank)
            if skip is not None:
                out.announce.append(SendSkip(self._fill_skip(skip)))
            restored = self._restored.get(rank)
            if restored is not None and not restored[1] and self.holding(rank, restored[0]) is not None:
                out.announce.append(
                    SendRestored(RestoredRank(self._store, self.node, self.incarnation, token, rank, restored[0]))
                )
        for key, report in self._durable.items():
            if key not in self._durable_answered:
                out.announce.append(SendReport(self._fill_report(report)))
        for (rank, step), reason in self._durable_failed.items():
            out.announce.append(SendPersistFailed(token, step, rank, reason))

    def _settle(self, out: _Out) -> Ready[NodeInstruction]:
        """Free what nobody can want, and grant what can be granted."""
        history, view, verified, empty = self.history, self._view, SlotState.VERIFIED, SlotState.FREE
        for rank, table in self.tables.items():
            for slot in list(table.slots.values()):
                if slot.state is verified and slot.shard is not None and view is not None:
                    if not slot.dead and table.judge(slot.shard, slot, history, view).fate is Fate.FREE:
                        slot.dead = True
                    if slot.dead and table.fate(slot, history, view) is Fate.FREE:
                        self._clear(rank, slot, out)
                if slot.retired and slot.state is empty:
                    del table.slots[slot.index]
                    out.announce.append(RemoveSlot(rank, slot.index))
        for rank, client in self._clients.items():
            self._offer(rank, client, out)
        return out.ready()

    def _offer(self, rank: int, client: _Client, out: _Out) -> None:
        """Grant one slot ahead of the one being filled; only a free one then, since rotating costs a snapshot."""
        if client.token != self.token or (self._view is not None and self._view.finished):
            return
        table = self._table(rank)
        mine = [s for s in table if s.state is SlotState.FILLING and s.writer == client.writer]
        if any(slot.step is None for slot in mine):
            return
        slot = table.choose(self.history, self._view)
        if slot is not None and mine and slot.state is not SlotState.FREE:
            return
        if slot is not None:
            self._grant(rank, slot, client.writer, client.token, out)
            out.announce.append(GrantSlot(rank, client.writer, client.token, slot.index, slot.generation))
            client.refused = ""
        elif not mine:
            reason = self._why_none(rank)
            if reason != client.refused:
                client.refused = reason
                out.announce.append(RefuseGrant(rank, client.writer, client.token, reason))

    def _why_none(self, rank: int) -> str:
        table = self._table(rank)
        usable = [slot for slot in table if not slot.retired]
        if not usable:
            return f"rank {rank} has no slots on node {self.node}"
        whys = [f"slot {slot.index}: {table.why(slot, self.history, self._view)}" for slot in usable]
        away = "the coordinator is away; " if not self._online else ""
        return f"{away}no slot of rank {rank} is free: {'; '.join(whys)}"

    def _grant(self, rank: int, slot: Slot, writer: Writer, token: Token, out: _Out) -> None:
        if slot.state is not SlotState.FREE:
            self._clear(rank, slot, out)
        slot.generation += 1
        slot.state, slot.writer, slot.token = SlotState.FILLING, writer, token
        out.records.append(slot_record("grant", rank, slot))

    def _clear(self, rank: int, slot: Slot, out: _Out) -> None:
        slot.clear()
        out.records.append(slot_record("free", rank, slot))
        out.announce.append(FreeSlot(rank, slot.index, slot.generation))
