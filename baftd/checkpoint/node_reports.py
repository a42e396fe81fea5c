"""The middle layer of a node's core: what it owes the coordinator, and what it makes of the answers.

Every verified shard of the job's token is reported until it is answered, every skip and every restored rank as well. A
view of the coordinator says everything at once, so a lost or late one needs no care.
"""

from __future__ import annotations

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
    newer_incarnation,
)
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.node_slots import Client, NodeSlots, Out
from baftd.checkpoint.orders import (
    CancelPersist,
    DropShard,
    FenceWriter,
    NodeInstruction,
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
from baftd.checkpoint.slots import Slot

__all__ = ["NodeReports"]


class NodeReports(NodeSlots):
    """Everything between a node and the coordinator of a job, the durable tier included."""

    def __init__(self, job: str, node: str, incarnation: str, *, history: History | None = None) -> None:
        super().__init__(job, node, incarnation, history=history)
        self._store = ""
        self._skips: dict[int, Skipped] = {}
        self._durable: dict[tuple[int, int], Report] = {}
        self._durable_answered: set[tuple[int, int]] = set()
        self._durable_failed: dict[tuple[int, int], str] = {}
        self._restored: dict[int, tuple[CheckpointId, bool]] = {}

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

    def joined(self, view: JobView) -> Ready[NodeInstruction]:
        """The coordinator has taken this node in (again): all that is owed is sent."""
        out = Out()
        self._away = False
        self._take_view(view, out)
        epoch = view.token.epoch if view.token is not None else 0
        # Else it is the late word of a coordinator that is no more, or of one that has not learnt what we know.
        if view.store == self._store and epoch >= self.history.epoch:
            self._joined = True
            self._send_owed(out)
        return self._settle(out)

    def not_joined(self) -> Ready[NodeInstruction]:
        """The coordinator says that it does not know this node (any more)."""
        out = Out()
        self._joined = False
        out.announce.append(SendJoin(self.inventory()))
        return out.ready()

    def away(self) -> Ready[NodeInstruction]:
        """The coordinator does not answer. Training goes on in the slots that may rotate."""
        self._away = True
        return self._settle(Out())

    def resend(self) -> Ready[NodeInstruction]:
        """Say again whatever has not been answered: on a timer, and when the coordinator is back."""
        out = Out()
        self._away = False
        if not self._joined:
            out.announce.append(SendJoin(self.inventory()))
        else:
            self._send_owed(out)
        return out.ready()

    def take_view(self, view: JobView) -> Ready[NodeInstruction]:
        """The coordinator has published a view."""
        out = Out()
        return self._settle(out) if self._take_view(view, out) else out.ready()

    def take_answer(self, answer: Answer) -> Ready[NodeInstruction]:
        """The coordinator has answered a report, a skip or a `RestoredRank`."""
        out = Out()
        if answer.node != self.node or answer.incarnation != self.incarnation:
            return out.ready()
        if answer.verdict is Verdict.STALE_NODE:
            out.announce.append(Superseded(self.incarnation))
            return out.ready()
        changed = self._take_view(answer.view, out)
        if answer.view.store == self._store:  # else of a coordinator that is no more: whether it knew says nothing
            if answer.verdict is Verdict.UNKNOWN:
                self._join(out)
            elif answer.token == self.token:
                self._mark(answer, out)
                changed = changed or answer.verdict is not Verdict.PENDING
        return self._settle(out) if changed else out.ready()

    def _mark(self, answer: Answer, out: Out) -> None:
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

    def _take_view(self, view: JobView, out: Out) -> bool:
        """Whether the view was news."""
        if self._store and view.store != self._store:
            if not newer_incarnation(view.store, self._store):
                return False
            self._forget_answers()
            self._join(out)
        elif self._view is not None and view.version <= self._view.version and view.store == self._view.store:
            return False
        self._store = view.store
        epoch = view.token.epoch if view.token is not None else 0
        if epoch < self.history.epoch:  # it was wiped, and knows less than we do
            self._join(out)
            return False
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
        return True

    def _forget_answers(self) -> None:
        for table in self.tables.values():
            for slot in table:
                slot.answered = False
        self._durable_answered.clear()
        self._restored = {rank: (checkpoint, False) for rank, (checkpoint, _) in self._restored.items()}

    def _join(self, out: Out) -> None:
        if self._joined:
            self._joined = False
            out.announce.append(SendJoin(self.inventory()))

    def _change_token(self, out: Out) -> None:
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

    def _tell_committed(self, rank: int, client: Client, before: JobView | None, out: Out) -> None:
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

    # ------------------------------------------------------------ what is owed

    def _verify(self, rank: int, slot: Slot, shard: ShardFacts, out: Out) -> None:
        self._make_verified(rank, slot, shard, out)
        if shard.token == self.token and self._online:
            self._report(rank, slot, out)
        if self._view is not None:
            self._take_persist(self._view, out)

    def _skip(self, rank: int, token: Token, step: int, reason: str, out: Out) -> None:
        if token != self.token:
            return
        self._pass(rank, token, step)
        known = self._skips.get(rank)
        if known is None or known.token != token or known.step <= step:
            self._skips[rank] = Skipped(self._store, self.node, self.incarnation, token, rank, step, reason, -1, ())
        if self._online:
            out.announce.append(SendSkip(self._fill_skip(self._skips[rank])))

    def _report(self, rank: int, slot: Slot, out: Out) -> None:
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

    def _send_owed(self, out: Out) -> None:
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
            if restored is not None and not restored[1]:
                self._send_restored(rank, token, restored[0], out)
        for key, report in self._durable.items():
            if key not in self._durable_answered:
                out.announce.append(SendReport(self._fill_report(report)))
        for (rank, step), reason in self._durable_failed.items():
            out.announce.append(SendPersistFailed(token, step, rank, reason))

    def _has_loaded(self, rank: int, token: Token, out: Out) -> None:
        """Owe the coordinator the word that a rank has loaded what the head epoch began from, until that has committed
        a step of its own."""
        head, view = self.history.head, self._view
        if head is None or head.token != token or head.parent is None or (view is not None and view.begun):
            return
        if self._restored.get(rank, (None, False)) == (head.parent, True):
            return
        self._restored[rank] = (head.parent, False)
        if self._online:
            self._send_restored(rank, token, head.parent, out)

    def _send_restored(self, rank: int, token: Token, checkpoint: CheckpointId, out: Out) -> None:
        held = tuple(sorted(owner for owner in self.tables if self.holding(owner, checkpoint) is not None))
        out.announce.append(
            SendRestored(RestoredRank(self._store, self.node, self.incarnation, token, rank, checkpoint, held))
        )

    # ------------------------------------------------------------ durable tier

    def _take_persist(self, view: JobView, out: Out) -> None:
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
        out = Out()
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
        out = Out()
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

    def _fail_durable(self, rank: int, step: int, reason: str, out: Out) -> None:
        self._durable_failed[(rank, step)] = reason
        if self._online and self.token is not None:
            out.announce.append(SendPersistFailed(self.token, step, rank, reason))
