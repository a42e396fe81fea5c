"""The bottom layer of a node's core: its slots, who may fill them, and when they are free.

A slot is granted only when nothing in it can be wanted (`SlotTable.fate`), and one that a process may still write to is
given to nobody else for as long as that process lives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from baftd.checkpoint.facts import JobView, Ready, Record, ShardFacts, Writer
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.orders import (
    FenceWriter,
    FreeSlot,
    GrantSlot,
    NodeInstruction,
    Refuse,
    RefuseGrant,
    RemoveRank,
    RemoveSlot,
)
from baftd.checkpoint.slots import DAEMON, Fate, Reason, Slot, SlotState, SlotTable, slot_record

__all__ = ["Client", "NodeSlots", "Out"]


@dataclass
class Client:
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
class Out:
    """What an event leads to, in the making."""

    records: list[Record] = field(default_factory=list)
    announce: list[NodeInstruction] = field(default_factory=list)

    def ready(self) -> Ready[NodeInstruction]:
        return Ready(tuple(self.records), tuple(self.announce))


class NodeSlots:
    """Slots of one job's ranks on one node, and the processes that may fill them."""

    table_class: Callable[[int], SlotTable] = SlotTable

    def __init__(self, job: str, node: str, incarnation: str, *, history: History | None = None) -> None:
        self.job = job
        self.node = node
        self.incarnation = incarnation
        self.history = history or History()
        self.tables: dict[int, SlotTable] = {}
        self._view: JobView | None = None
        self._away = False
        self._joined = False
        self._holds = 0
        self._clients: dict[int, Client] = {}
        self._passed: dict[tuple[Token, int], int] = {}

    @property
    def token(self) -> Token | None:
        """The job's newest token known here."""
        return self.history.token

    @property
    def last_view(self) -> JobView | None:
        """The coordinator's last word; None if it has said nothing since this daemon started."""
        return self._view

    def describe(self, rank: int) -> list[str]:
        """One line a slot of the rank."""
        table = self.tables.get(rank)
        return table.describe(self.history, self._view) if table else []

    def holding(self, rank: int, checkpoint: CheckpointId) -> Slot | None:
        """The slot in which this node holds the verified shard of a checkpoint on the line."""
        epoch, table = self.history.find(checkpoint.epoch), self.tables.get(rank)
        return table.content(epoch.token, checkpoint.step) if epoch is not None and table is not None else None

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

    # ------------------------------------------------------------ while a restore is planned

    def hold(self) -> None:
        """A restore is being planned from what lies here: nothing is freed or overwritten until `release`.

        Between the inventory and the epoch that pins what it chose, a step may be committed that supersedes the choice
        (of a live predecessor, or of a sealed slot that a restarted daemon has just digested).
        """
        self._holds += 1

    def release(self) -> Ready[NodeInstruction]:
        """The end of a `hold`: what can be freed and granted is."""
        self._holds -= 1
        return self._settle(Out())

    # ------------------------------------------------------------ inside

    @property
    def _online(self) -> bool:
        return self._joined and not self._away

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

    def _fenced(self, rank: int, writer: Writer, token: Token, out: Out) -> bool:
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

    def _standing(self, rank: int, token: Token) -> tuple[int, tuple[int, ...]]:
        held = self._table(rank).held(token)
        return max([self._passed.get((token, rank), -1), *held]), held

    def _make_verified(self, rank: int, slot: Slot, shard: ShardFacts, out: Out) -> None:
        slot.state, slot.shard, slot.writer = SlotState.VERIFIED, shard, None
        out.records.append(slot_record("verified", rank, slot))

    def _settle(self, out: Out) -> Ready[NodeInstruction]:
        """Free what nobody can want, and grant what can be granted."""
        history, view, verified, empty = self.history, self._view, SlotState.VERIFIED, SlotState.FREE
        for rank, table in self.tables.items():
            beyond = self._is_beyond(rank)
            for slot in list(table.slots.values()):
                slot.retired = slot.retired or beyond
                if slot.state is verified and slot.shard is not None and view is not None:
                    if not slot.dead and table.judge(slot.shard, slot, history, view).fate is Fate.FREE:
                        slot.dead = True
                    if not self._holds and self._may_go(table, slot, view):
                        self._clear(rank, slot, out)
                if slot.retired and slot.state is empty:
                    table.remove(slot.index)
                    out.announce.append(RemoveSlot(rank, slot.index))
            if beyond and not table.slots and not table.gone:
                table.gone = True
                out.announce.append(RemoveRank(rank))
        for rank, client in self._clients.items():
            self._offer(rank, client, out)
        return out.ready()

    def _is_beyond(self, rank: int) -> bool:
        """Whether the running start has no such rank: it was saved by more ranks than it has now. Its slots are granted
        no more, and go as soon as nothing in them is wanted."""
        head, view = self.history.head, self._view
        return (
            head is not None
            and view is not None
            and view.token == head.token
            and rank >= head.world
            and rank not in self._clients
        )

    def _may_go(self, table: SlotTable, slot: Slot, view: JobView) -> bool:
        """Whether verified content is given up. What may be overwritten at need is not kept in a slot that is granted
        no more: the new layout needs its memory."""
        reason = table.reason(slot, self.history, view)
        return (slot.dead and reason.fate is Fate.FREE) or (slot.retired and reason is Reason.LEFT)

    def _offer(self, rank: int, client: Client, out: Out) -> None:
        """Grant one slot ahead of the one being filled; only a free one then, since rotating costs a snapshot."""
        if client.token != self.token or (self._view is not None and self._view.finished):
            return
        table = self._table(rank)
        mine = [s for s in table if s.state is SlotState.FILLING and s.writer == client.writer]
        if any(slot.step is None for slot in mine):
            return
        slot = self._choose(table)
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

    def _choose(self, table: SlotTable, fitting: Collection[int] | None = None) -> Slot | None:
        slot = table.choose(self.history, self._view, fitting)
        return None if slot is not None and self._holds and slot.state is not SlotState.FREE else slot

    def _why_none(self, rank: int) -> str:
        table = self._table(rank)
        usable = [slot for slot in table if not slot.retired]
        if not usable:
            return f"rank {rank} has no slots on node {self.node}"
        whys = [f"slot {slot.index}: {table.why(slot, self.history, self._view)}" for slot in usable]
        away = "the coordinator is away; " if not self._online else ""
        away += "a restore is being planned; " if self._holds else ""
        return f"{away}no slot of rank {rank} is free: {'; '.join(whys)}"

    def _grant(self, rank: int, slot: Slot, writer: Writer, token: Token, out: Out) -> None:
        if slot.state is not SlotState.FREE:
            self._clear(rank, slot, out)
        slot.generation += 1
        slot.state, slot.writer, slot.token = SlotState.FILLING, writer, token
        out.records.append(slot_record("grant", rank, slot))

    def _drop_unused(self, rank: int, table: SlotTable, writer: Writer, out: Out) -> None:
        """A process lays out anew, so it fills nothing: what it was granted of its old layout is free."""
        for slot in table:
            if slot.writer == writer and slot.state is SlotState.FILLING and slot.retired:
                self._clear(rank, slot, out)

    def _clear(self, rank: int, slot: Slot, out: Out) -> None:
        slot.clear()
        out.records.append(slot_record("free", rank, slot))
        out.announce.append(FreeSlot(rank, slot.index, slot.generation))
