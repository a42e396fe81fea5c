"""The lower half of a job's coordinator: nodes, reports, and what is committed in memory.

A memory commit of step s needs, under the head token, a verified shard of every rank, each in the memory of a node
whose incarnation is the one known to live now. It supersedes every older step. A step that some rank has passed
without holding it is dead at once, and so is one whose ranks have divided what they hold under different plans: there
may be ranges that none of them has saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baftd.checkpoint.commit_cadence import CadenceAgreement
from baftd.checkpoint.decisions import (
    Committed,
    CoordinatorInstruction,
    Dead,
    Joined,
    NotJoined,
    Part,
    Policy,
    Publish,
    Quarantined,
    Withdrawn,
    plan_digest,
)
from baftd.checkpoint.facts import (
    Answer,
    Inventory,
    JobView,
    Ready,
    Record,
    Report,
    RestoredRank,
    Skipped,
    Verdict,
    newer_incarnation,
)
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token

__all__ = ["DurableWrite", "MemoryCommits"]


@dataclass
class _Rank:
    """What a rank has said about itself: it has passed `passed`, and of the steps up to there holds `held`."""

    passed: int = -1
    held: frozenset[int] = frozenset()


@dataclass
class _Step:
    memory: dict[int, Part] = field(default_factory=dict)
    dead: str | None = None


@dataclass
class DurableWrite:
    """A checkpoint that is being made durable."""

    checkpoint: CheckpointId
    parts: dict[int, Part] = field(default_factory=dict)
    complete: bool = False


class MemoryCommits:
    """State of one job's coordinator, and its decisions about memory. `JobCoordinator` adds the rest."""

    agreement_class: type[CadenceAgreement] = CadenceAgreement

    def __init__(
        self, job: str, *, store: str, policy: Policy, history: History | None = None, now: float = 0.0
    ) -> None:
        self.job = job
        self.store = store
        self.policy = policy
        self.history = history or History()
        self.plan_generation = 0
        self._cadences = self.agreement_class(policy.interval, fixed=policy.interval_fixed)
        self._finished_epoch = 0
        self._durable: CheckpointId | None = None
        self._pending: DurableWrite | None = None
        self._version = 0
        self._view: JobView | None = None
        self._nodes: dict[str, str] = {}
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Forget what belonged to the epoch before."""
        head = self.history.head
        self._world = head.world if head else 0
        self._cadences.begin(self.history.epoch)
        self._ranks: dict[int, _Rank] = {}
        self._steps: dict[int, _Step] = {}
        self._loaded: dict[int, tuple[str, str]] = {}
        self._brought: dict[int, tuple[str, str]] = {}
        self._committed: CheckpointId | None = None
        self._committed_parts: dict[int, tuple[str, str]] = {}
        self._intact = False
        self._plan: bytes = b""
        self._pending = None
        if self._durable is not None and self.history.is_abandoned(self._durable):
            self._durable = None
        self._changed()

    # ------------------------------------------------------------ asking

    @property
    def token(self) -> Token | None:
        """The only token that may write; None before the first epoch."""
        return self.history.token

    @property
    def committed(self) -> CheckpointId | None:
        """Newest checkpoint committed in memory on the line."""
        return self._committed

    @property
    def durable(self) -> CheckpointId | None:
        """Newest durable checkpoint on the line."""
        return self._durable

    @property
    def intact(self) -> bool:
        """Whether every node that the memory commit stands on still lives in that incarnation."""
        return self._intact

    @property
    def places(self) -> Mapping[int, tuple[str, str]]:
        """(node, incarnation) of each rank's shard of the memory commit."""
        return dict(self._committed_parts)

    @property
    def nodes(self) -> Mapping[str, str]:
        """Nodes that have joined and are not lost, with their incarnations."""
        return dict(self._nodes)

    @property
    def view(self) -> JobView:
        """All that nodes must know."""
        if self._view is None:
            committed = self._committed.step if self._committed and self._committed.epoch == self.history.epoch else -1
            self._version += 1
            self._view = JobView(
                store=self.store,
                version=self._version,
                line=self.history.line,
                committed=self._committed,
                durable=self._durable,
                dead=tuple(s for s, step in self._steps.items() if step.dead is not None and s > committed),
                persist=(self._pending.checkpoint.step,) if self._pending else (),
                quarantined=tuple(self.history.quarantined),
                cadence=self._cadences.cadence,
                cadence_by=self._cadences.by,
                finished=self._finished_epoch == self.history.epoch > 0,
            )
        return self._view

    def _changed(self) -> None:
        self._view = None

    # ------------------------------------------------------------ nodes

    def join(
        self, node: str, incarnation: str, inventory: Inventory | None, now: float
    ) -> Ready[CoordinatorInstruction]:
        """A daemon has come (again). Its inventory teaches a coordinator that knows less.

        A newer incarnation withdraws the shards of the older one: that memory is gone.
        """
        known = self._nodes.get(node)
        if known is not None and newer_incarnation(known, incarnation):
            return Ready((), (Joined(node, incarnation, False, self.view),))
        announce: list[CoordinatorInstruction] = []
        records: tuple[Record, ...] = ()
        if known is not None and known != incarnation:
            announce += self._withdraw(node, known, f"node {node} has lost its memory")
            records = self._leaves(node, known).records  # the view follows below
        self._nodes[node] = incarnation
        if inventory is not None:
            records += self._learn(inventory, now)
        announce.append(Joined(node, incarnation, True, self.view))
        announce.append(Publish(self.view))
        return Ready(records, tuple(announce))

    def poll(self, node: str, incarnation: str) -> Ready[CoordinatorInstruction]:
        """A node asks how things stand (its heartbeat): the view, or that it must join again."""
        if self._nodes.get(node) == incarnation:
            return Ready((), (Joined(node, incarnation, True, self.view),))
        return Ready((), (NotJoined(node, incarnation),))

    def learn(self, inventory: Inventory, now: float) -> Ready[CoordinatorInstruction]:
        """What an inventory that is not a node's (a durable directory's manifests) proves to have been."""
        records = self._learn(inventory, now)
        return Ready(records, (Publish(self.view),) if records else ())

    def _learn(self, inventory: Inventory, now: float) -> tuple[Record, ...]:
        head = self.history.token
        records = list(self.history.merge(inventory.epochs))
        for checkpoint, reason in inventory.quarantined:
            records += self.history.quarantine(checkpoint, reason)
        records += self.history.see_step(inventory.highest_step)
        if self.history.token != head:
            self._begin(now)
        elif records:
            self._changed()
        return tuple(records)

    def node_lost(self, node: str, incarnation: str, reason: str) -> Ready[CoordinatorInstruction]:
        """The node does not answer any more (its lease is over). If it comes back it joins again."""
        if self._nodes.get(node) != incarnation:
            return Ready()
        del self._nodes[node]
        announce = self._withdraw(node, incarnation, f"node {node} is lost: {reason}")
        settled = self._leaves(node, incarnation)
        return Ready(settled.records, (*announce, *settled.announce))

    def _leaves(self, node: str, incarnation: str) -> Ready[CoordinatorInstruction]:
        """What a node that is gone had proposed counts no more."""
        return self._settle_cadence() if self._cadences.leave(node, incarnation) else Ready()

    def _settle_cadence(self) -> Ready[CoordinatorInstruction]:
        records, changed = self._cadences.settle(self._newest_passed(), self.history.highest_step)
        if changed:
            self._changed()
        return Ready(records, (Publish(self.view),) if changed else ())

    def _go_on(self, announce: list[CoordinatorInstruction]) -> tuple[Record, ...]:
        """Ranks have gone on: a change of the cadence that had to wait may be due."""
        if not self._cadences.waits:
            return ()
        settled = self._settle_cadence()
        announce += settled.announce
        return settled.records

    def _newest_passed(self) -> int | None:
        """The newest step that any rank of this start has sealed or skipped; None: none has spoken."""
        return max((rank.passed for rank in self._ranks.values()), default=None)

    def _withdraw(self, node: str, incarnation: str, reason: str) -> list[CoordinatorInstruction]:
        gone = (node, incarnation)
        for step in self._steps.values():
            for rank in [r for r, part in step.memory.items() if (part.node, part.incarnation) == gone]:
                del step.memory[rank]
        for places in (self._loaded, self._brought):
            for rank in [r for r, place in places.items() if place == gone]:
                del places[rank]
        ranks = tuple(rank for rank, place in self._committed_parts.items() if place == gone)
        if self._committed is None or not ranks or not self._intact:
            return []
        self._intact = False
        return [Withdrawn(self._committed, ranks, reason)]

    # ------------------------------------------------------------ what ranks say

    def skip(self, skipped: Skipped, now: float) -> Ready[CoordinatorInstruction]:
        """The rank has no snapshot of the step: it is dead for the whole job, at once."""
        refusal = self._admit(skipped, skipped.token, skipped.rank, None)
        records: tuple[Record, ...] = ()
        announce: list[CoordinatorInstruction] = []
        verdict, detail = refusal or (Verdict.DEAD, "")
        if refusal is None:
            announce = self._hear(skipped.rank, skipped.passed, skipped.held, skipped.reason)
            records = (*self.history.see_step(skipped.step), *self._go_on(announce))
        answer = Answer(
            skipped.node,
            skipped.incarnation,
            skipped.rank,
            skipped.token,
            skipped.step,
            None,
            verdict,
            self.view,
            detail,
        )
        return Ready(records, (*announce, answer, *self._news(announce)))

    def restored(self, restored: RestoredRank, now: float) -> Ready[CoordinatorInstruction]:
        """A rank has loaded what the head epoch began from. When all have, and every shard of it lies in the memory of
        some node, that checkpoint is whole in memory again.

        Its shards are those of the ranks that saved it, however many ranks have loaded it."""
        head = self.history.head
        refusal = self._admit(restored, restored.token, restored.rank, None)
        announce: list[CoordinatorInstruction] = []
        if refusal is None and (head is None or head.parent != restored.checkpoint):
            refusal = (Verdict.REFUSED, f"epoch {restored.token.epoch} does not begin from {restored.checkpoint}")
        verdict, detail = refusal or (Verdict.PENDING, "")
        if refusal is None and self._committed is not None:
            verdict = Verdict.COMMITTED
        elif refusal is None:
            place = (restored.node, restored.incarnation)
            self._loaded[restored.rank] = place
            self._brought.update(dict.fromkeys(restored.held, place))
            origin = self.history.find(restored.checkpoint.epoch)
            saved = range(origin.world) if origin is not None else ()
            if len(self._loaded) == self._world and saved and all(rank in self._brought for rank in saved):
                verdict = Verdict.COMMITTED
                announce += self._commit(restored.checkpoint, {rank: self._brought[rank] for rank in saved})
        answer = Answer(
            restored.node,
            restored.incarnation,
            restored.rank,
            restored.token,
            restored.checkpoint.step,
            None,
            verdict,
            self.view,
            detail,
        )
        return Ready((), (*announce, answer, *self._news(announce)))

    def _admit(
        self, message: Report | Skipped | RestoredRank, token: Token, rank: int, world: int | None
    ) -> tuple[Verdict, str] | None:
        """Why a message counts for nothing, or None."""
        node, incarnation = message.node, message.incarnation
        if message.store != self.store:
            return Verdict.UNKNOWN, "it was said to another coordinator"
        head = self.history.token
        if head is None or token.epoch > head.epoch:
            return Verdict.UNKNOWN, f"epoch {token.epoch} is not known here"
        known = self._nodes.get(node)
        if known is None or newer_incarnation(incarnation, known):
            return Verdict.UNKNOWN, f"node {node} has not joined"
        if known != incarnation:
            return Verdict.STALE_NODE, f"node {node} has joined with a newer incarnation"
        if token != head:
            return Verdict.FENCED, f"epoch {head.epoch} has taken over"
        if not 0 <= rank < self._world or (world is not None and world != self._world):
            return Verdict.REFUSED, f"rank {rank} of {world} does not belong to a world of {self._world}"
        return None

    def _hear(self, rank: int, passed: int, held: tuple[int, ...], reason: str) -> list[CoordinatorInstruction]:
        """A rank has passed `passed` and holds only `held`: what it does not hold, and is not committed, is dead."""
        known = self._ranks.setdefault(rank, _Rank())
        if passed > known.passed:
            known.passed, known.held = passed, frozenset(held)
        elif passed == known.passed:
            known.held &= frozenset(held)
        else:
            return []
        found: list[CoordinatorInstruction] = []
        epoch = self.history.epoch
        for number, state in self._steps.items():
            if state.dead is None and number <= known.passed and number not in known.held:
                state.dead = f"rank {rank}: {reason}"
                found.append(Dead(CheckpointId(epoch, number), rank, reason))
        forgotten = [
            number
            for number, state in self._steps.items()
            if state.dead is not None and not any(number in r.held for r in self._ranks.values())
        ]
        for number in forgotten:
            del self._steps[number]
        if found or forgotten:
            self._changed()
        return found

    def _missed(self, step: int) -> int | None:
        """A rank that has passed `step` without holding it."""
        return next((n for n, r in self._ranks.items() if r.passed >= step and step not in r.held), None)

    # ------------------------------------------------------------ memory commits

    def _take_memory(
        self, report: Report, records: list[Record], announce: list[CoordinatorInstruction]
    ) -> tuple[Verdict, str]:
        shard, epoch = report.shard, self.history.epoch
        checkpoint = shard.checkpoint
        if checkpoint in self.history.quarantined:
            return Verdict.QUARANTINED, self.history.quarantined[checkpoint]
        part = Part(shard, report.node, report.incarnation)
        if self._committed is not None and self._committed.epoch == epoch and shard.step <= self._committed.step:
            if shard.step < self._committed.step:
                return Verdict.DEAD, f"step {self._committed.step} is committed"
            self._committed_parts[shard.rank] = (report.node, report.incarnation)
            self._intact = self._all_live(self._committed_parts.values())
            return Verdict.COMMITTED, ""
        if shard.step not in self._ranks[shard.rank].held:
            return Verdict.DEAD, "the rank holds it no more"
        state = self._steps.get(shard.step)
        if state is None:
            missed = self._missed(shard.step)
            state = self._steps[shard.step] = _Step()
            if missed is not None:
                state.dead = f"rank {missed} has passed it"
                announce.append(Dead(checkpoint, missed, "the rank has passed it without a snapshot"))
            self._changed()
        if state.dead is not None:
            return Verdict.DEAD, state.dead
        before = state.memory.get(shard.rank)
        if before is not None and (before.shard.root_digest, before.shard.tree_digest) != (
            shard.root_digest,
            shard.tree_digest,
        ):
            reason = (
                f"two different shards claim rank {shard.rank} of step {shard.step}: "
                f"from node {before.node} and node {report.node}"
            )
            records += self._quarantine(checkpoint, reason, (before, part), announce)
            return Verdict.QUARANTINED, reason
        state.memory[shard.rank] = part
        other = next((p for p in state.memory.values() if p.shard.plan != shard.plan), None)
        if other is not None:
            state.dead = f"ranks {other.shard.rank} and {shard.rank} saved it under different plans"
            announce.append(Dead(checkpoint, shard.rank, state.dead))
            self._changed()
            return Verdict.DEAD, state.dead
        differing = self._disagreeing(state, part)
        if differing is not None:
            reason = (
                f"replicas of step {shard.step} differ: rank {differing.shard.rank} on node {differing.node} and "
                f"rank {shard.rank} on node {report.node} hold the same ranges with different bytes"
            )
            records += self._quarantine(checkpoint, reason, (differing, part), announce)
            return Verdict.QUARANTINED, reason
        if not self._complete(state):
            return Verdict.PENDING, ""
        trees = plan_digest([state.memory[rank].shard.tree_digest for rank in sorted(state.memory)])
        if trees != self._plan:
            self._plan = trees
            self.plan_generation += 1
        announce += self._commit(checkpoint, {r: (p.node, p.incarnation) for r, p in state.memory.items()})
        return Verdict.COMMITTED, ""

    def _complete(self, step: _Step) -> bool:
        """Whether every part is verified, and stands in memory that lives."""
        return len(step.memory) == self._world and self._all_live(
            (part.node, part.incarnation) for part in step.memory.values()
        )

    def _all_live(self, places: Iterable[tuple[str, str]]) -> bool:
        return all(self._nodes.get(node) == incarnation for node, incarnation in places)

    def _disagreeing(self, step: _Step, part: Part) -> Part | None:
        """Another rank's part that holds the same ranges with other bytes."""
        mine = dict(part.shard.replicas)
        if not mine:
            return None
        for other in step.memory.values():
            if other.shard.rank != part.shard.rank:
                for key, digest in other.shard.replicas:
                    if mine.get(key, digest) != digest:
                        return other
        return None

    def _commit(self, checkpoint: CheckpointId, places: dict[int, tuple[str, str]]) -> list[CoordinatorInstruction]:
        self._committed = checkpoint
        self._committed_parts = places
        self._intact = True
        if checkpoint.epoch == self.history.epoch:
            self._steps = {number: state for number, state in self._steps.items() if number > checkpoint.step}
        self._changed()
        return [Committed(checkpoint, "memory", tuple(sorted(set(places.values()))))]

    def _quarantine(
        self,
        checkpoint: CheckpointId,
        reason: str,
        parts: tuple[Part, ...],
        announce: list[CoordinatorInstruction],
    ) -> tuple[Record, ...]:
        records = self.history.quarantine(checkpoint, reason)
        self._steps.pop(checkpoint.step, None)
        announce.append(Quarantined(checkpoint, reason, tuple((p.shard.rank, p.node) for p in parts)))
        self._changed()
        return records

    def _news(self, announce: Sequence[CoordinatorInstruction]) -> tuple[CoordinatorInstruction, ...]:
        """Tell every node when something was decided; a report that only adds up is answered to its node alone."""
        return (Publish(self.view),) if announce else ()
