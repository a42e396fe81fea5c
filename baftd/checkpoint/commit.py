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

from collections.abc import Iterable, Mapping, Sequence

from baftd.checkpoint.cadence import CadenceProposal
from baftd.checkpoint.commit_durable import DurableCommits
from baftd.checkpoint.decisions import (
    Committed,
    CoordinatorInstruction,
    Dead,
    Finished,
    Joined,
    NotJoined,
    Part,
    Policy,
    Publish,
    Quarantined,
    Retain,
    Withdrawn,
    WriteManifest,
    plan_digest,
)
from baftd.checkpoint.facts import Inventory, Ready, Record, checkpoint_from, checkpoint_record
from baftd.checkpoint.history import BadSource, History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.recovery import RestorePlan, plan_restore
from baftd.errors import UsageError

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


class JobCoordinator(DurableCommits):
    """One job's coordinator. Times (`now`) are seconds of one monotonic clock and only compared with each other.

    `store` names this coordinator's memory: a new one, sorting after the last (`next_incarnation`), whenever what it
    knew beyond its records is gone. Nodes that see a new store report everything again.
    """

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
                self._cadences.apply(record)
            elif record["k"] == "finished":
                self._finished_epoch = int(record["epoch"])
        if self._durable is not None and self._durable.epoch == self.history.epoch:
            self._decided_step = self._durable.step
        return self

    def to_records(self) -> tuple[Record, ...]:
        """Everything that must survive, as few records as possible."""
        records = list(self.history.to_records())
        records.append(self._cadences.record())
        if self._durable is not None:
            records.append({"k": "durable", "checkpoint": checkpoint_record(self._durable)})
        if self._finished_epoch:
            records.append({"k": "finished", "epoch": self._finished_epoch})
        return tuple(records)

    # ------------------------------------------------------------ cadence

    def set_cadence(self, every: int) -> Ready[CoordinatorInstruction]:
        """Snapshot every `every` steps, without probes, from a step on that no rank has reached yet."""
        records = self._cadences.change(every, 0, self._newest_passed(), self.history.highest_step)
        if not records:
            return Ready()
        self._changed()
        return Ready(records, (Publish(self.view),))

    def propose(
        self, token: Token, incarnation: str, proposal: CadenceProposal
    ) -> Ready[CoordinatorInstruction]:
        """A node says which cadence its ranks need; the longest of all live nodes becomes the job's.

        Saying it again changes nothing. Where the interval is fixed by the settings it is ignored. `NotJoined` for a
        node that is not known in this incarnation. Raises `Fenced` for an old token, `UsageError` for a cadence that
        makes no sense.
        """
        self._check(token)
        if self._nodes.get(proposal.node) != incarnation:
            return Ready((), (NotJoined(proposal.node, incarnation),))
        return self._settle_cadence() if self._cadences.propose(incarnation, proposal) else Ready()

    # ------------------------------------------------------------ restore

    def plan(
        self,
        inventories: Sequence[Inventory],
        *,
        world: int | None = None,
        step: int | None = None,
        at_most: int | None = None,
        fresh: bool = False,
        reshard: bool = False,
        prefer: Mapping[int, str] | None = None,
    ) -> RestorePlan:
        """What a start of the job would go on from. Changes nothing. See `plan_restore` for arguments and errors."""
        return plan_restore(
            self.history,
            inventories,
            world=world,
            step=step,
            at_most=at_most,
            fresh=fresh,
            reshard=reshard,
            prefer=prefer,
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
            self._loaded.clear()
            self._brought.clear()
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
