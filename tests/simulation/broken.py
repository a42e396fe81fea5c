"""The design's rules, each switched off in a subclass: the simulation must notice every one.

These are tests of the test. Production code has no switch for any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baftd.checkpoint.commit import JobCoordinator, Part
from baftd.checkpoint.facts import Held, Inventory, JobView, Record, Report, ShardFacts, Skipped
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.node import NodeJob
from baftd.checkpoint.recovery import RestorePlan, plan_restore
from baftd.checkpoint.slots import Line, Reason, Slot, SlotState, SlotTable
from tests.simulation.cluster import Rules

__all__ = ["BROKEN"]


def _node(table: type[SlotTable]) -> type[NodeJob]:
    return type("Node", (NodeJob,), {"table_class": table})


class FreeByCount(SlotTable):
    """Keeps the two newest steps, committed or not."""

    def reason(self, slot: Slot, line: Line, view: JobView | None) -> Reason:
        if slot.state is not SlotState.VERIFIED or slot.shard is None or slot.persisting:
            return super().reason(slot, line, view)
        newest = sorted((s.shard.checkpoint for s in self.contents() if s.shard is not None), reverse=True)[:2]
        return Reason.WAITING if slot.shard.checkpoint in newest else Reason.UNREPORTED


class RotateReported(SlotTable):
    """Takes a reported step of unknown fate for free."""

    def judge(self, shard: ShardFacts, slot: Slot, line: Line, view: JobView) -> Reason:
        found = super().judge(shard, slot, line, view)
        return Reason.UNREPORTED if found is Reason.WAITING else found


class NoRestorePin(SlotTable):
    """What the head epoch began from is not pinned."""

    def judge(self, shard: ShardFacts, slot: Slot, line: Line, view: JobView) -> Reason:
        found = super().judge(shard, slot, line, view)
        return Reason.LEFT if found is Reason.RESTORE else found


class NoPersistPin(SlotTable):
    """A slot that a durable write reads is not pinned."""

    def reason(self, slot: Slot, line: Line, view: JobView | None) -> Reason:
        found = super().reason(slot, line, view)
        if found is Reason.PERSIST and slot.shard is not None and view is not None:
            return self.judge(slot.shard, slot, line, view)
        return found


class NewestCommittedIsFree(SlotTable):
    """The newest committed step may be overwritten."""

    def judge(self, shard: ShardFacts, slot: Slot, line: Line, view: JobView) -> Reason:
        found = super().judge(shard, slot, line, view)
        return Reason.UNREPORTED if found is Reason.COMMITTED else found


class ReclaimFromStale(NodeJob):
    """Takes slots away from fenced processes that still live."""

    def _change_token(self, out: Any) -> None:
        super()._change_token(out)
        for rank, table in self.tables.items():
            for slot in table:
                if slot.state is SlotState.FILLING:
                    self._clear(rank, slot, out)


class AnyLifeOfTheStep(NodeJob):
    """Looks for a step's shard by the step number alone."""

    def holding(self, rank: int, checkpoint: CheckpointId) -> Slot | None:
        table = self.tables.get(rank)
        return next((s for s in table.contents() if s.step == checkpoint.step), None) if table is not None else None


class NoFence(JobCoordinator):
    """Takes reports of any token."""

    def report(self, report: Report, now: float) -> Any:
        head = self.history.token
        if head is not None and report.shard.token.epoch <= head.epoch:
            report = replace(report, shard=replace(report.shard, token=head))
        return super().report(report, now)


class NoIncarnation(JobCoordinator):
    """A memory commit does not ask whether its nodes still live in that incarnation."""

    def _all_live(self, places: Any) -> bool:
        return True

    def _withdraw(self, node: str, incarnation: str, reason: str) -> list[Any]:
        return []


class NoStore(JobCoordinator):
    """Believes what was said to a coordinator that is no more."""

    def _admit(self, message: Any, token: Token, rank: int, world: int | None) -> Any:
        return super()._admit(replace(message, store=self.store), token, rank, world)


class SkipsUnheard(JobCoordinator):
    """Nothing is ever declared dead."""

    def _hear(self, rank: int, passed: int, held: tuple[int, ...], reason: str) -> list[Any]:
        super()._hear(rank, passed, held, reason)
        for state in self._steps.values():
            state.dead = None
        return []

    def _missed(self, step: int) -> int | None:
        return None


class HeldUnheard(JobCoordinator):
    """A skip counts for its own step only; a lost one leaves the step open for ever."""

    def report(self, report: Report, now: float) -> Any:
        return super().report(replace(report, passed=-1, held=()), now)

    def skip(self, skipped: Skipped, now: float) -> Any:
        held = tuple(range(skipped.step))
        return super().skip(replace(skipped, passed=skipped.step, held=held), now)

    def _take_memory(self, report: Report, records: Any, announce: Any) -> Any:
        rank = self._ranks[report.shard.rank]
        rank.held |= {report.shard.step}
        return super()._take_memory(report, records, announce)


class AlmostAll(JobCoordinator):
    """Commits when one rank is missing."""

    def _complete(self, step: Any) -> bool:
        return len(step.memory) >= max(1, self._world - 1)


class ReplicasUnchecked(JobCoordinator):
    """Does not compare replicas."""

    def _disagreeing(self, step: Any, part: Part) -> Part | None:
        return None


class ByStepNumber(JobCoordinator):
    """Takes the step number for the identity of a checkpoint."""

    def plan(self, inventories: Sequence[Inventory], **kwargs: Any) -> RestorePlan:
        newest: dict[int, Token] = {}
        for inventory in inventories:
            for held in inventory.shards:
                token = newest.get(held.shard.step)
                if token is None or held.shard.token.epoch > token.epoch:
                    newest[held.shard.step] = held.shard.token
        renamed = [
            replace(
                inventory,
                shards=tuple(
                    Held(replace(held.shard, token=newest[held.shard.step], root_digest=b"", replicas=()), held.source)
                    for held in inventory.shards
                ),
            )
            for inventory in inventories
        ]
        plan = plan_restore(self.history, renamed, **kwargs)
        real = {
            (held.shard.step, held.shard.rank, held.source.node, str(held.source.place)): held
            for inventory in inventories
            for held in inventory.shards
        }
        sources = {
            rank: real[(held.shard.step, rank, held.source.node, str(held.source.place))]
            for rank, held in plan.sources.items()
        }
        return replace(plan, sources=sources)


class QuarantineForgotten(JobCoordinator):
    """Offers quarantined checkpoints again."""

    def plan(self, inventories: Sequence[Inventory], **kwargs: Any) -> RestorePlan:
        history = self.history.replay(self.history.to_records())
        history._quarantined.clear()
        bare = [
            replace(
                inventory,
                shards=tuple(Held(replace(h.shard, replicas=()), h.source) for h in inventory.shards),
            )
            for inventory in inventories
        ]
        return plan_restore(history, bare, **kwargs)


class SilentZero(JobCoordinator):
    """Begins at step 0 when nothing can be restored."""

    def plan(self, inventories: Sequence[Inventory], **kwargs: Any) -> RestorePlan:
        try:
            return super().plan(inventories, **kwargs)
        except Exception:  # noqa: BLE001 - the rule under test is that this error is not swallowed
            return RestorePlan(None, None, 0, 0, {}, (), 0)


class ManifestEarly(JobCoordinator):
    """Calls a checkpoint durable when the manifest has been asked for, not when it is there."""

    def _take_durable(self, report: Report, announce: list[Any]) -> Any:
        found = super()._take_durable(report, announce)
        if self._pending is not None and self._pending.parts:
            self._pending.complete = True
            checkpoint = self._pending.checkpoint
            announce += self.manifest_written(checkpoint, 0.0).announce
        return found


class NoLineage(History):
    """Nothing is ever abandoned."""

    def _reaches(self, epoch: int, step: int) -> bool:
        return epoch in self._epochs


class ForgetfulNode(NodeJob):
    """Does not say again what was not answered."""

    def _send_owed(self, out: Any) -> None:
        return


class NoRejoin(NodeJob):
    """Does not teach a wiped coordinator."""

    def inventory(self) -> Inventory:
        return replace(super().inventory(), epochs=(), highest_step=0)


def _no_grants(record: Record) -> bool:
    return bool(record["k"] != "grant")


def _no_epochs(record: Record) -> bool:
    return str(record["k"]) not in ("epoch", "highest")


BROKEN: Mapping[str, Rules] = {
    "free by count instead of by commit": Rules(node=_node(FreeByCount)),
    "reported steps of unknown fate rotate": Rules(node=_node(RotateReported)),
    "the newest committed step may be overwritten": Rules(node=_node(NewestCommittedIsFree)),
    "no restore pin": Rules(node=_node(NoRestorePin)),
    "no persist pin": Rules(node=_node(NoPersistPin)),
    "slots of stale processes are given to others": Rules(node=ReclaimFromStale),
    "grants are not in the journal": Rules(keep_records=_no_grants),
    "epochs are not in the node's manifest": Rules(keep_records=_no_epochs),
    "identity by step number alone": Rules(node=AnyLifeOfTheStep, coordinator=ByStepNumber),
    "nothing is abandoned": Rules(history=NoLineage),
    "no incarnation in memory commits": Rules(coordinator=NoIncarnation),
    "no fence at the coordinator": Rules(coordinator=NoFence),
    "reports to an earlier coordinator count": Rules(coordinator=NoStore),
    "no step is declared dead": Rules(coordinator=SkipsUnheard),
    "a lost skip stays lost": Rules(coordinator=HeldUnheard),
    "commit with a rank missing": Rules(coordinator=AlmostAll),
    "replicas are not compared": Rules(coordinator=ReplicasUnchecked),
    "quarantine is forgotten": Rules(coordinator=QuarantineForgotten),
    "a silent start at step 0": Rules(coordinator=SilentZero),
    "durable before the manifest is written": Rules(coordinator=ManifestEarly),
    "reports are not repeated": Rules(node=ForgetfulNode),
    "a wiped coordinator learns nothing": Rules(node=NoRejoin),
}
"""Name of the rule that is off -> the classes without it."""
