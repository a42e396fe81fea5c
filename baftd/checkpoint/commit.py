"""The coordinator of one job: who may write, what is committed at which tier, what is dead, what becomes durable.

A state machine for many nodes. Nodes send `Report`, `Skipped` and `RestoredRank`, again and again until answered, in
any order; the coordinator answers with a `JobView`, which says everything at once. So lost, repeated and delayed
messages need no care of their own, and one that was wiped is rebuilt by the nodes joining and reporting again.

A memory commit of step s needs, under the head token, a verified shard of every rank, each in the memory of a node
whose incarnation is the one known to live now. It supersedes every older step. A step that some rank has passed
without holding it is dead at once. Durable work is decided at a memory commit, when every rank still holds the step,
and published in the same view that lets ranks free what is older: the step cannot slip away in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from baftd.checkpoint.facts import (
    Answer,
    Cadence,
    Inventory,
    JobView,
    Ready,
    Record,
    Report,
    RestoredRank,
    ShardFacts,
    Skipped,
    Tier,
    Verdict,
    checkpoint_from,
    checkpoint_record,
    newer_incarnation,
)
from baftd.checkpoint.history import BadSource, History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.recovery import RestorePlan, plan_restore
from baftd.errors import Fenced, UsageError

__all__ = [
    "Committed",
    "CoordinatorInstruction",
    "Dead",
    "Finished",
    "JobCoordinator",
    "Joined",
    "NotJoined",
    "Part",
    "Policy",
    "Publish",
    "Quarantined",
    "Retain",
    "Withdrawn",
    "WriteManifest",
    "plan_digest",
]

CADENCE_MARGIN = 8
"""Steps between the newest step seen and the first one of a new cadence, so that every rank hears of it in time."""


@dataclass(frozen=True)
class Policy:
    """What a job's coordinator is set to. Steps and seconds of the durable tier: whichever is set; both: either."""

    memory_every: int = 1
    durable: bool = False
    durable_steps: int | None = None
    durable_seconds: float | None = None


@dataclass(frozen=True)
class Part:
    """One rank's verified shard and where it stands."""

    shard: ShardFacts
    node: str
    incarnation: str
    place: Record | None = None


# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class Publish:
    """Send the view to every node of the job."""

    view: JobView


@dataclass(frozen=True)
class Joined:
    """Answer to `join`. `accepted` False: a newer incarnation of this node has joined; this one must not go on."""

    node: str
    incarnation: str
    accepted: bool
    view: JobView


@dataclass(frozen=True)
class NotJoined:
    """Answer to `poll`: the node has not joined this coordinator, or was taken for lost."""

    node: str
    incarnation: str


@dataclass(frozen=True)
class Committed:
    """The checkpoint is committed at the tier. `nodes` are the incarnations that a memory commit stands on."""

    checkpoint: CheckpointId
    tier: Tier
    nodes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Withdrawn:
    """A memory commit has lost shards: the node that held them is gone."""

    checkpoint: CheckpointId
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Dead:
    """The step will never be committed in memory."""

    checkpoint: CheckpointId
    rank: int
    reason: str


@dataclass(frozen=True)
class Quarantined:
    """Ranks disagree about bytes that must be equal, or a checkpoint failed verification. Log it loudly."""

    checkpoint: CheckpointId
    reason: str
    ranks: tuple[tuple[int, str], ...] = ()
    """(rank, node)"""


@dataclass(frozen=True)
class WriteManifest:
    """Every part is durable: `node` writes the manifest of the checkpoint, last, then says `manifest_written`."""

    node: str
    checkpoint: CheckpointId
    token: Token
    parent: CheckpointId | None
    world: int
    updates: int
    plan_digest: bytes
    parts: tuple[Part, ...]
    """By rank."""


@dataclass(frozen=True)
class Retain:
    """A checkpoint has become durable: apply retention now. Never delete `pinned`."""

    pinned: tuple[CheckpointId, ...]


@dataclass(frozen=True)
class Finished:
    """All ranks have finished. `tier` is the best tier of the last step; memory: slots are kept, say so."""

    checkpoint: CheckpointId | None
    tier: Tier


CoordinatorInstruction: TypeAlias = (
    Answer
    | Publish
    | Joined
    | NotJoined
    | Committed
    | Withdrawn
    | Dead
    | Quarantined
    | WriteManifest
    | Retain
    | Finished
)


def plan_digest(trees: Sequence[bytes]) -> bytes:
    """16 bytes that identify a commit plan: the layouts of all ranks, in rank order."""
    return hashlib.blake2b(b"".join(trees), digest_size=16, person=b"baft plan").digest()


# ---------------------------------------------------------------- state


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
class _Durable:
    """The durable write under way."""

    checkpoint: CheckpointId
    parts: dict[int, Part] = field(default_factory=dict)
    complete: bool = False


class JobCoordinator:
    """One job's coordinator. Times (`now`) are seconds of one monotonic clock and only compared with each other."""

    def __init__(self, job: str, *, store: str, policy: Policy, history: History | None = None, now: float = 0.0):
        """`store` names this coordinator's memory: a new one, sorting after the last (`next_incarnation`), whenever
        what it knew beyond its records is gone. Nodes that see a new store report everything again."""
        self.job = job
        self.store = store
        self.policy = policy
        self.history = history or History()
        self.plan_generation = 0
        self._cadence = Cadence(0, policy.memory_every)
        self._finished_epoch = 0
        self._durable: CheckpointId | None = None
        self._version = 0
        self._view: JobView | None = None
        self._nodes: dict[str, str] = {}
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Forget what belonged to the epoch before."""
        head = self.history.head
        self._world = head.world if head else 0
        self._ranks: dict[int, _Rank] = {}
        self._steps: dict[int, _Step] = {}
        self._restored: dict[int, tuple[str, str]] = {}
        self._committed: CheckpointId | None = None
        self._committed_parts: dict[int, tuple[str, str]] = {}
        self._intact = False
        self._plan: bytes = b""
        self._pending: _Durable | None = None
        self._wanted: int | None = None
        self._decided_step = head.parent.step if head and head.parent else 0
        self._decided_at = now
        self._finishing: dict[int, int] = {}
        if self._durable is not None and self.history.is_abandoned(self._durable):
            self._durable = None
        self._changed()

    @classmethod
    def replay(
        cls, job: str, records: Iterable[Record], *, store: str, policy: Policy, now: float = 0.0
    ) -> JobCoordinator:
        """The coordinator that wrote these records, as far as they reach: nodes must join and report again."""
        kept = list(records)
        self = cls(job, store=store, policy=policy, history=History.replay(kept), now=now)
        for record in kept:
            if record["k"] == "durable":
                checkpoint = checkpoint_from(record["checkpoint"])
                if checkpoint is not None and not self.history.is_abandoned(checkpoint):
                    self._durable = checkpoint
            elif record["k"] == "cadence":
                self._cadence = Cadence(int(record["from"]), int(record["every"]))
            elif record["k"] == "finished":
                self._finished_epoch = int(record["epoch"])
        if self._durable is not None and self._durable.epoch == self.history.epoch:
            self._decided_step = self._durable.step
        return self

    def to_records(self) -> tuple[Record, ...]:
        """Everything that must survive, as few records as possible."""
        records = list(self.history.to_records())
        records.append({"k": "cadence", "from": self._cadence.from_step, "every": self._cadence.every})
        if self._durable is not None:
            records.append({"k": "durable", "checkpoint": checkpoint_record(self._durable)})
        if self._finished_epoch:
            records.append({"k": "finished", "epoch": self._finished_epoch})
        return tuple(records)

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
                cadence=self._cadence,
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
        if known is not None and known != incarnation:
            announce += self._withdraw(node, known, f"node {node} has lost its memory")
        self._nodes[node] = incarnation
        records = self._learn(inventory, now) if inventory is not None else ()
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
        return Ready((), tuple(self._withdraw(node, incarnation, f"node {node} is lost: {reason}")))

    def _withdraw(self, node: str, incarnation: str, reason: str) -> list[CoordinatorInstruction]:
        gone = (node, incarnation)
        for step in self._steps.values():
            for rank in [r for r, part in step.memory.items() if (part.node, part.incarnation) == gone]:
                del step.memory[rank]
        for rank in [r for r, place in self._restored.items() if place == gone]:
            del self._restored[rank]
        ranks = tuple(rank for rank, place in self._committed_parts.items() if place == gone)
        if self._committed is None or not ranks or not self._intact:
            return []
        self._intact = False
        return [Withdrawn(self._committed, ranks, reason)]

    # ------------------------------------------------------------ reports

    def report(self, report: Report, now: float) -> Ready[CoordinatorInstruction]:
        """A shard is verified at a tier. Answered with an `Answer`; whatever follows comes with it."""
        shard = report.shard
        refusal = self._admit(report, shard.token, shard.rank, shard.world)
        if refusal is not None:
            return self._answer(report, refusal[0], refusal[1])
        records = list(self.history.see_step(shard.step))
        announce: list[CoordinatorInstruction] = self._hear(shard.rank, report.passed, report.held, "it was not kept")
        if report.tier == "memory":
            verdict, detail = self._take_memory(report, now, records, announce)
        else:
            verdict, detail = self._take_durable(report, announce)
        done = self._answer(report, verdict, detail)
        return Ready((*records, *done.records), (*announce, *done.announce, *self._news(announce)))

    def skip(self, skipped: Skipped, now: float) -> Ready[CoordinatorInstruction]:
        """The rank has no snapshot of the step: it is dead for the whole job, at once."""
        refusal = self._admit(skipped, skipped.token, skipped.rank, None)
        records: tuple[Record, ...] = ()
        announce: list[CoordinatorInstruction] = []
        verdict, detail = refusal or (Verdict.DEAD, "")
        if refusal is None:
            records = self.history.see_step(skipped.step)
            announce = self._hear(skipped.rank, skipped.passed, skipped.held, skipped.reason)
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
        """A rank has loaded what the head epoch began from. When all have, that checkpoint is whole in memory again."""
        head = self.history.head
        refusal = self._admit(restored, restored.token, restored.rank, None)
        announce: list[CoordinatorInstruction] = []
        if refusal is None and (head is None or head.parent != restored.checkpoint):
            refusal = (Verdict.REFUSED, f"epoch {restored.token.epoch} does not begin from {restored.checkpoint}")
        verdict, detail = refusal or (Verdict.PENDING, "")
        if refusal is None and self._committed is not None:
            verdict = Verdict.COMMITTED
        elif refusal is None:
            self._restored[restored.rank] = (restored.node, restored.incarnation)
            if len(self._restored) == self._world:
                verdict = Verdict.COMMITTED
                announce += self._commit(restored.checkpoint, dict(self._restored))
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

    def _take_memory(
        self, report: Report, now: float, records: list[Record], announce: list[CoordinatorInstruction]
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
        trees = plan_digest([state.memory[rank].shard.tree_digest for rank in range(self._world)])
        if trees != self._plan:
            self._plan = trees
            self.plan_generation += 1
        announce += self._commit(checkpoint, {r: (p.node, p.incarnation) for r, p in state.memory.items()})
        self._decide(now)
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

    def _answer(self, report: Report, verdict: Verdict, detail: str) -> Ready[CoordinatorInstruction]:
        shard = report.shard
        return Ready(
            (),
            (
                Answer(
                    report.node,
                    report.incarnation,
                    shard.rank,
                    shard.token,
                    shard.step,
                    report.tier,
                    verdict,
                    self.view,
                    detail,
                ),
            ),
        )

    def _news(self, announce: Sequence[CoordinatorInstruction]) -> tuple[CoordinatorInstruction, ...]:
        """Tell every node when something was decided; a report that only adds up is answered to its node alone."""
        return (Publish(self.view),) if announce else ()

    # ------------------------------------------------------------ durable tier

    def _decide(self, now: float) -> bool:
        """Whether the newest committed step is to become durable; if so it is published with the next view."""
        committed = self._committed
        if (
            not self.policy.durable
            or self._pending is not None
            or committed is None
            or committed.epoch != self.history.epoch
            or (self._durable is not None and committed == self._durable)
        ):
            return False
        wanted = self._wanted is not None and committed.step >= self._wanted
        if not (wanted or self._due(committed.step, now)):
            return False
        self._pending = _Durable(committed)
        self._decided_step, self._decided_at = committed.step, now
        if wanted:
            self._wanted = None
        self._changed()
        return True

    def _due(self, step: int, now: float) -> bool:
        steps, seconds = self.policy.durable_steps, self.policy.durable_seconds
        if steps is not None and step // steps > self._decided_step // steps:
            return True
        return seconds is not None and now - self._decided_at >= seconds

    def tick(self, now: float) -> Ready[CoordinatorInstruction]:
        """Decide what has become due by time; repeat what has not been answered."""
        announce: list[CoordinatorInstruction] = []
        if self._decide(now):
            announce.append(Publish(self.view))
        if self._pending is not None and self._pending.complete:
            announce.append(self._manifest(self._pending))
        return Ready((), tuple(announce))

    def next_tick(self, now: float) -> float | None:
        """Seconds until `tick` may have something to do; None: not before the next report."""
        if self.policy.durable and self.policy.durable_seconds is not None and self._pending is None:
            return max(0.0, self._decided_at + self.policy.durable_seconds - now)
        return None

    def want_durable(self, token: Token, step: int, now: float) -> Ready[CoordinatorInstruction]:
        """Make the newest step committed in memory, at least `step`, durable as soon as possible.

        Raises `Fenced` for an old token, `UsageError` when no durable tier is on.
        """
        self._check(token)
        if not self.policy.durable:
            raise UsageError("no durable tier is on.", hint="Set durable_dir in baftd.toml.")
        if self._durable is not None and self._durable.epoch == token.epoch and self._durable.step >= step:
            return Ready()
        if self._pending is None or self._pending.checkpoint.step < step:
            self._wanted = step if self._wanted is None else max(step, self._wanted)
        return Ready((), (Publish(self.view),)) if self._decide(now) else Ready()

    def _take_durable(self, report: Report, announce: list[CoordinatorInstruction]) -> tuple[Verdict, str]:
        checkpoint = report.shard.checkpoint
        if checkpoint == self._durable:
            return Verdict.COMMITTED, ""
        pending = self._pending
        if pending is None or pending.checkpoint != checkpoint:
            return Verdict.DEAD, "this step is not being made durable any more"
        pending.parts[report.shard.rank] = Part(report.shard, report.node, report.incarnation, report.place)
        if len(pending.parts) == self._world and not pending.complete:
            pending.complete = True
            announce.append(self._manifest(pending))
        return Verdict.PENDING, ""

    def _manifest(self, pending: _Durable) -> WriteManifest:
        head = self.history.head
        assert head is not None
        parts = tuple(pending.parts[rank] for rank in sorted(pending.parts))
        return WriteManifest(
            node=parts[0].node,
            checkpoint=pending.checkpoint,
            token=head.token,
            parent=head.parent,
            world=head.world,
            updates=parts[0].shard.updates,
            plan_digest=plan_digest([part.shard.tree_digest for part in parts]),
            parts=parts,
        )

    def manifest_written(self, checkpoint: CheckpointId, now: float) -> Ready[CoordinatorInstruction]:
        """The manifest is on disk: the checkpoint is durable. Saying it twice is harmless."""
        pending = self._pending
        if pending is None or pending.checkpoint != checkpoint or not pending.complete:
            return Ready()
        self._durable, self._pending = checkpoint, None
        self._changed()
        records: list[Record] = [{"k": "durable", "checkpoint": checkpoint_record(checkpoint)}]
        announce: list[CoordinatorInstruction] = [Committed(checkpoint, "durable", ())]
        self._decide(now)
        announce.append(Retain(self.durable_pins()))
        more = self._end_if_finished()
        return Ready((*records, *more.records), (*announce, *more.announce, Publish(self.view)))

    def durable_failed(self, token: Token, step: int, rank: int, reason: str) -> Ready[CoordinatorInstruction]:
        """A part cannot be written: give the step up, everywhere. The next one that is due is taken."""
        if token != self.history.token or self._pending is None or self._pending.checkpoint.step != step:
            return Ready()
        self._pending = None
        self._changed()
        more = self._end_if_finished(given_up=True)
        return Ready(more.records, (*more.announce, Publish(self.view)))

    def durable_pins(self) -> tuple[CheckpointId, ...]:
        """Checkpoints that retention must not delete: the one the head began from, until it has its own."""
        pins = {self.view.restored, self._durable, self._pending.checkpoint if self._pending else None}
        return tuple(sorted(pin for pin in pins if pin is not None))

    # ------------------------------------------------------------ cadence, finish

    def set_cadence(self, every: int) -> Ready[CoordinatorInstruction]:
        """Snapshot every `every` steps from a step on that no rank has reached yet."""
        if every < 1:
            raise UsageError(f"a cadence of {every} steps makes no sense; it must be at least 1.")
        if every == self._cadence.every:
            return Ready()
        newest = max((r.passed for r in self._ranks.values()), default=self._decided_step)
        self._cadence = Cadence(newest + CADENCE_MARGIN, every)
        self._changed()
        record: Record = {"k": "cadence", "from": self._cadence.from_step, "every": every}
        return Ready((record,), (Publish(self.view),))

    def finish(self, token: Token, rank: int, step: int, now: float) -> Ready[CoordinatorInstruction]:
        """The rank is done. When all are, the newest committed step becomes durable, then slots are free to go.

        Raises `Fenced` for an old token.
        """
        self._check(token)
        self._finishing[rank] = step
        if len(self._finishing) < self._world or self.view.finished:
            return Ready()
        if self._may_still_become_durable():
            assert self._committed is not None
            self._wanted = self._committed.step
            return Ready((), (Publish(self.view),)) if self._decide(now) else Ready()
        return self._end_if_finished(given_up=True)

    def _may_still_become_durable(self) -> bool:
        committed = self._committed
        return (
            self.policy.durable
            and committed is not None
            and committed.epoch == self.history.epoch
            and committed != self._durable
        )

    def _end_if_finished(self, given_up: bool = False) -> Ready[CoordinatorInstruction]:
        if not self._finishing or len(self._finishing) < self._world or self._pending is not None:
            return Ready()
        durable = self._committed is not None and self._committed == self._durable
        if not durable and not given_up:
            return Ready()
        if durable or (self._committed is None and self.policy.durable):
            self._finished_epoch = self.history.epoch
            self._changed()
            record: Record = {"k": "finished", "epoch": self._finished_epoch}
            return Ready((record,), (Finished(self._durable, "durable"), Publish(self.view)))
        return Ready((), (Finished(self._committed, "memory"),))

    def _check(self, token: Token) -> None:
        if token != self.history.token:
            raise Fenced(
                f"epoch {token.epoch} of job {self.job} may write nothing: epoch {self.history.epoch} is open."
            )

    # ------------------------------------------------------------ restore

    def plan(
        self,
        inventories: Sequence[Inventory],
        *,
        world: int | None = None,
        step: int | None = None,
        at_most: int | None = None,
        fresh: bool = False,
        prefer: Mapping[int, str] | None = None,
    ) -> RestorePlan:
        """What a start of the job would go on from. Changes nothing. See `plan_restore` for arguments and errors."""
        return plan_restore(
            self.history, inventories, world=world, step=step, at_most=at_most, fresh=fresh, prefer=prefer
        )

    def open_epoch(
        self, incarnation: str, plan: RestorePlan, *, world: int, expected: int, now: float
    ) -> Ready[CoordinatorInstruction]:
        """Fix `plan` as what incarnation `incarnation` begins from, by compare-and-set on the epoch.

        Every older token is fenced by it. `baftd restore` opens an epoch of its own, under an incarnation that no
        process has: the next start then goes on from there. The same incarnation again changes nothing (its plan
        stands: `self.history.head.parent`). Raises `EpochConflict` when another was quicker.
        """
        head = self.history.head
        if head is not None and head.token.incarnation == incarnation and head.world == world:
            return Ready((), (Publish(self.view),))
        token = Token(expected + 1, incarnation)
        records = list(self.history.see_step(plan.highest_step))
        records += self.history.open_epoch(token, world=world, parent=plan.checkpoint, expected=expected)
        self._begin(now)
        return Ready(tuple(records), (Publish(self.view),))

    def source_failed(self, token: Token, bad: BadSource) -> Ready[CoordinatorInstruction]:
        """A shard of the head's plan turned out to be bad at one place: plan again, then `reparent` if need be."""
        self._check(token)
        records = self.history.quarantine_source(bad)
        return Ready(records, (Quarantined(bad.checkpoint, bad.reason, ((bad.rank, bad.node),)),))

    def reparent(self, token: Token, plan: RestorePlan) -> Ready[CoordinatorInstruction]:
        """Let the head begin from an older checkpoint than planned; only before it has made a step.

        Raises `Fenced` for an old token, `UsageError` when it has begun.
        """
        self._check(token)
        if self._ranks or self._committed is not None:
            raise UsageError(f"epoch {token.epoch} of job {self.job} has begun to train: its plan is fixed.")
        records = self.history.reparent(token, plan.checkpoint)
        if records:
            self._restored.clear()
            self._decided_step = plan.checkpoint.step if plan.checkpoint else 0
            self._changed()
        return Ready(records, (Publish(self.view),))

    def quarantine(self, checkpoint: CheckpointId, reason: str) -> Ready[CoordinatorInstruction]:
        """The checkpoint failed verification: it is never offered again."""
        records = self.history.quarantine(checkpoint, reason)
        if not records:
            return Ready()
        self._changed()
        return Ready(records, (Quarantined(checkpoint, reason), Publish(self.view)))
