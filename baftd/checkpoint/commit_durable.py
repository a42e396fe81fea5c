"""The upper half of a job's coordinator: what becomes durable, and how a job ends.

A durable write is decided on the newest step committed in memory, when every rank still holds it, and published in
the same view that lets ranks free what is older: the step cannot slip away in between. One is under way at a time;
it is never superseded, only given up where a part of it cannot be written.
"""

from __future__ import annotations

from baftd.checkpoint.commit_memory import DurableWrite, MemoryCommits
from baftd.checkpoint.decisions import (
    Committed,
    CoordinatorInstruction,
    Finished,
    Part,
    Publish,
    Retain,
    WriteManifest,
    plan_digest,
)
from baftd.checkpoint.facts import Answer, Ready, Record, Report, Skipped, Verdict, checkpoint_record
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.errors import Fenced, UsageError

__all__ = ["DurableCommits"]


class DurableCommits(MemoryCommits):
    """Reports of both tiers, and decisions about the durable one."""

    def _begin(self, now: float) -> None:
        super()._begin(now)
        head = self.history.head
        self._wanted: int | None = None
        self._decided_step = head.parent.step if head and head.parent else 0
        self._decided_at = now
        self._finishing: dict[int, int] = {}
        self._gave_up = False

    def report(self, report: Report, now: float) -> Ready[CoordinatorInstruction]:
        """A shard is verified at a tier. Answered with an `Answer`; whatever follows comes with it."""
        shard = report.shard
        refusal = self._admit(report, shard.token, shard.rank, shard.world)
        if refusal is not None:
            return self._answer(report, refusal[0], refusal[1])
        records = list(self.history.see_step(shard.step))
        announce: list[CoordinatorInstruction] = self._hear(shard.rank, report.passed, report.held, "it was not kept")
        records += self._go_on(announce)
        if report.tier == "memory":
            verdict, detail = self._take_memory(report, records, announce)
            self._decide(now)
        else:
            verdict, detail = self._take_durable(report, announce)
        end = self._conclude(now) if announce else Ready[CoordinatorInstruction]()
        answer = self._answer(report, verdict, detail)
        return Ready((*records, *end.records), (*announce, *answer.announce, *end.announce, *self._news(announce)))

    def skip(self, skipped: Skipped, now: float) -> Ready[CoordinatorInstruction]:
        """The rank has no snapshot of the step: it is dead for the whole job, at once."""
        done = super().skip(skipped, now)
        end = self._conclude(now)
        return Ready((*done.records, *end.records), (*done.announce, *end.announce))

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
        self._pending = DurableWrite(committed)
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

    def _manifest(self, pending: DurableWrite) -> WriteManifest:
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
        more = self._conclude(now)
        return Ready((*records, *more.records), (*announce, *more.announce, Publish(self.view)))

    def durable_failed(
        self, token: Token, step: int, rank: int, reason: str, now: float
    ) -> Ready[CoordinatorInstruction]:
        """A part cannot be written: give the step up, everywhere. The next one that is due is taken."""
        if token != self.history.token or self._pending is None or self._pending.checkpoint.step != step:
            return Ready()
        self._pending = None
        self._gave_up = bool(self._finishing)
        self._changed()
        more = self._conclude(now)
        return Ready(more.records, (*more.announce, Publish(self.view)))

    def durable_pins(self) -> tuple[CheckpointId, ...]:
        """Checkpoints that retention must not delete: the one the head began from, until it has its own."""
        pins = {self.view.restored, self._durable, self._pending.checkpoint if self._pending else None}
        return tuple(sorted(pin for pin in pins if pin is not None))

    # ------------------------------------------------------------ the end of a job

    def finish(self, token: Token, rank: int, step: int, now: float) -> Ready[CoordinatorInstruction]:
        """The rank is done. When all are, the newest committed step becomes durable, then slots are free to go.

        Steps that may still be committed are waited for. `Finished` follows, at once or later; saying it again is
        answered again. Raises `Fenced` for an old token.
        """
        self._check(token)
        self._finishing[rank] = step
        return self._conclude(now)

    def _conclude(self, now: float) -> Ready[CoordinatorInstruction]:
        """End the job if all ranks have finished and nothing is under way any more."""
        if not self._finishing or len(self._finishing) < self._world or self._pending is not None:
            return Ready()
        if any(state.dead is None for state in self._steps.values()):
            return Ready()  # some rank holds a step that the others may yet complete
        committed = self._committed
        if committed is not None and committed == self._durable:
            return self._finished()
        if committed is None or committed.epoch != self.history.epoch or not self.policy.durable or self._gave_up:
            return Ready((), (Finished(committed or self.view.restored, "memory"),))
        self._wanted = committed.step
        return Ready((), (Publish(self.view),)) if self._decide(now) else Ready()

    def _finished(self) -> Ready[CoordinatorInstruction]:
        if self._finished_epoch == self.history.epoch:
            return Ready((), (Finished(self._durable, "durable"),))
        self._finished_epoch = self.history.epoch
        self._changed()
        record: Record = {"k": "finished", "epoch": self._finished_epoch}
        return Ready((record,), (Finished(self._durable, "durable"), Publish(self.view)))

    def _check(self, token: Token) -> None:
        if token != self.history.token:
            raise Fenced(
                f"epoch {token.epoch} of job {self.job} may write nothing: epoch {self.history.epoch} is open."
            )
