"""One job on one node: what becomes of its ranks' slots between training processes and the coordinator.

Events come from training processes (`declare`, `begin`, `seal`, `skip`, `writer_dead`), from the daemon's own workers
(`digested`, `persisted`, `received`) and from the coordinator (`joined`, `view`, `answer`). Each returns a `Ready`.

Kept promises: a slot is granted only when nothing in it can be wanted (`SlotTable.fate`); every verified shard of the
job's token is reported until it is answered; a step that was said to be gone never comes back; a process of an older
token gets nothing, and a slot it may still write to is given to nobody else for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from baftd.checkpoint.facts import Ready, Record, ShardFacts, Writer
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.node_reports import NodeReports
from baftd.checkpoint.node_slots import Client, Out
from baftd.checkpoint.orders import (
    Digest,
    DropShard,
    GrantSlot,
    NodeInstruction,
    ReceiveSlot,
    Refuse,
    RefuseGrant,
    TellCadence,
)
from baftd.checkpoint.slots import DAEMON, HeaderFacts, SlotState, rebuild_table
from baftd.errors import RankError

__all__ = ["NodeJob"]


class NodeJob(NodeReports):
    """One job on one node. `history` mirrors what the coordinator has said of the job's epochs.

    Records of kinds `epoch`, `quarantine` and `highest` belong into the node's manifest (they outlive its memory, and
    teach a coordinator that was wiped), the others into the job's journal beside the slots: see `is_lasting`.
    """

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
        out = Out()
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

    # ------------------------------------------------------------ training processes

    def declare(
        self, rank: int, writer: Writer, token: Token, *, world: int, tree_digest: bytes, slots: Sequence[int]
    ) -> Ready[NodeInstruction]:
        """The process lays out its shard, in slots `slots` (indices; files exist). Other slots of the rank retire.

        Said again after a reconnect or for a new layout; grants that were not used are repeated. Raises `RankError`
        when another process of the same token claims the rank.
        """
        out = Out()
        known = self._clients.get(rank)
        if known is not None and known.token == token and known.writer != writer:
            raise RankError(
                f"rank {rank} of job {self.job} is claimed by {writer} and by {known.writer} on node {self.node}.",
                hint="Give every process its own rank.",
            )
        if self._fenced(rank, writer, token, out):
            return out.ready()
        client = Client(writer, token, world, tree_digest, self._passed.get((token, rank), -1))
        self._clients[rank] = client
        self._has_loaded(rank, token, out)  # else it would not train: known again, if the daemon died after it was said
        table = self._table(rank)
        table.lay(slots)
        self._drop_unused(rank, table, writer, out)
        for slot in table:
            if slot.writer == writer and slot.state is SlotState.FILLING and slot.step is None:
                out.announce.append(GrantSlot(rank, writer, token, slot.index, slot.generation))
        if self._view is not None:
            out.announce.append(TellCadence(rank, writer, token, self._view.cadence))
            self._tell_committed(rank, client, None, out)
        return self._settle(out)

    def shed(self, rank: int, writer: Writer, keep: Collection[int]) -> Ready[NodeInstruction]:
        """There is no room for the layout that the process is about to declare, which has a use for the slots `keep` of
        the rank: of all others those go in which nothing is wanted. It must declare before it fills a slot again."""
        out = Out()
        table = self._table(rank)
        table.lay(keep)
        self._drop_unused(rank, table, writer, out)
        return self._settle(out)

    def lay_slots(self, rank: int, slots: Sequence[int]) -> Ready[NodeInstruction]:
        """More slots for the rank, beside those it has: made for a fetch, or ready to be filled now."""
        self._table(rank).lay({*slots, *(slot.index for slot in self._table(rank) if not slot.retired)})
        return self._settle(Out())

    def begin(
        self, rank: int, writer: Writer, token: Token, step: int, slot: int, generation: int
    ) -> Ready[NodeInstruction]:
        """The process fills a granted slot with state(step)."""
        out = Out()
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
        out = Out()
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

    def _unfit(self, client: Client, shard: ShardFacts, rank: int) -> str:
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
        out = Out()
        held = self._sealed(rank, slot, generation)
        if held is None or held.shard is None:
            return out.ready()
        if any(held.shard.root_digest) and held.shard.root_digest != shard.root_digest:
            return self.digest_failed(rank, slot, generation, "its bytes are not those its header speaks of")
        self._verify(rank, held, shard, out)
        return self._settle(out)

    def digest_failed(self, rank: int, slot: int, generation: int, reason: str) -> Ready[NodeInstruction]:
        """The sealed content is not what it claims to be: it is dropped, and the step with it."""
        out = Out()
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
        out = Out()
        held = self._granted(rank, writer, slot, generation) if slot is not None else None
        if held is not None:
            self._clear(rank, held, out)
        if not self._fenced(rank, writer, token, out) and step not in self._table(rank).held(token):
            out.records += self.history.see_step(step)
            self._skip(rank, token, step, reason, out)
        return self._settle(out)

    def give_up(self, rank: int, writer: Writer, slot: int, generation: int) -> Ready[NodeInstruction]:
        """The process fills the slot no more, and for which step it did is not believed: none is skipped for it."""
        out = Out()
        held = self._granted(rank, writer, slot, generation)
        if held is not None:
            self._clear(rank, held, out)
        return self._settle(out)

    def writer_dead(
        self, writer: Writer, headers: Mapping[tuple[int, int], HeaderFacts | None]
    ) -> Ready[NodeInstruction]:
        """A process is gone. `headers` has, read after its death, the header of each slot in `granted_to(writer)`.

        A slot it was filling is dropped; one it had sealed without being able to say so is taken.
        """
        out = Out()
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

    # ------------------------------------------------------------ restore

    def receive(
        self, rank: int, fitting: Collection[int] | None = None, *, made: Collection[int] = ()
    ) -> Ready[NodeInstruction]:
        """A slot is needed for a shard to be fetched: `ReceiveSlot`, or `RefuseGrant` (to `DAEMON`).

        `fitting`: indices of the slots that are large enough; None: all are. `made`: slots just made for it. The rank
        need not be one of the running start: all that saved the checkpoint are fetched.
        """
        out = Out()
        table = self._table(rank)
        if made:
            table.lay({*made, *(slot.index for slot in table if not slot.retired)})
        slot = self._choose(table, fitting)
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
        out = Out()
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
        out = Out()
        held = self._granted(rank, DAEMON, slot, generation)
        if held is not None:
            self._clear(rank, held, out)
        return self._settle(out)

    def damaged(self, rank: int, checkpoint: CheckpointId, reason: str) -> Ready[NodeInstruction]:
        """The bytes of a verified shard are not (or no more) what their digest says: they are dropped.

        The coordinator must be told as well (`source_failed`), so that nobody plans with them.
        """
        out = Out()
        slot = self.holding(rank, checkpoint)
        if slot is not None and not slot.persisting and not slot.sending:
            self._clear(rank, slot, out)
            out.announce.append(DropShard(rank, checkpoint, reason))
        return self._settle(out)

    def restored(self, rank: int, token: Token) -> Ready[NodeInstruction]:
        """The process of this rank has loaded what its epoch begins from, out of slots of this node."""
        out = Out()
        self._has_loaded(rank, token, out)
        return out.ready()
