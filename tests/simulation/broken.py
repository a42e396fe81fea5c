"""The design's rules, each switched off in a subclass: the simulation must notice every one.

These are tests of the test. Production code has no switch for any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baftd.checkpoint.commit import JobCoordinator, Part
from baftd.checkpoint.commit_cadence import CadenceAgreement
from baftd.checkpoint.facts import Held, Inventory, JobView, Ready, Record, Report, RestoredRank, ShardFacts, Skipped
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.node import NodeJob
from baftd.checkpoint.recovery import RestorePlan, plan_restore
from baftd.checkpoint.slots import Line, Reason, Slot, SlotState, SlotTable
from tests.simulation.cluster import Rules

__all__ = ["BROKEN", "Broken", "NoStore"]


def _node(table: type[SlotTable]) -> type[NodeJob]:
    return type("Node", (NodeJob,), {"table_class": table})


def _coordinator(agreement: type[CadenceAgreement]) -> type[JobCoordinator]:
    return type("Coordinator", (JobCoordinator,), {"agreement_class": agreement})


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


class OwnRanksOnly(NodeJob):
    """Keeps of what a start began from only the shards of the ranks that it has."""

    def _may_go(self, table: SlotTable, slot: Slot, view: JobView) -> bool:
        return super()._may_go(table, slot, view) or self._is_beyond(table.rank)


class NothingIsRemoved(NodeJob):
    """Slots of ranks that a start does not have stay."""

    def _is_beyond(self, rank: int) -> bool:
        return False


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


class CountedByLoaders(JobCoordinator):
    """A checkpoint is whole in memory when all have loaded it, whoever holds the shards it is made of."""

    def restored(self, restored: RestoredRank, now: float) -> Any:
        if self.history.head is not None and restored.rank == self._world - 1 and self._committed is None:
            places = dict.fromkeys(range(self._world), (restored.node, restored.incarnation))
            return Ready((), tuple(self._commit(restored.checkpoint, places)))
        return super().restored(restored, now)


class AnyWorld(JobCoordinator):
    """Lets a start go on from what another world saved, without leave."""

    def plan(self, inventories: Sequence[Inventory], **kwargs: Any) -> RestorePlan:
        return super().plan(inventories, **{**kwargs, "reshard": True})


class OlderOfTheWorld(JobCoordinator):
    """Passes over what another world saved, for an older step."""

    def plan(self, inventories: Sequence[Inventory], **kwargs: Any) -> RestorePlan:
        world = kwargs.get("world")
        if world is None or kwargs.get("reshard"):
            return super().plan(inventories, **kwargs)
        own = [
            replace(inventory, shards=tuple(held for held in inventory.shards if held.shard.world == world))
            for inventory in inventories
        ]
        return super().plan(own, **kwargs)


class ReplicasUnchecked(JobCoordinator):
    """Does not compare replicas."""

    def _disagreeing(self, step: Any, part: Part) -> Part | None:
        return None


class PlansUnchecked(JobCoordinator):
    """Does not ask under which plans the shards of a step were saved."""

    def report(self, report: Report, now: float) -> Any:
        return super().report(replace(report, shard=replace(report.shard, plan=b"")), now)


class OffersAnyPlan(JobCoordinator):
    """Does not ask so when a start is planned."""

    def plan(self, inventories: Sequence[Inventory], **kwargs: Any) -> RestorePlan:
        bare = [
            replace(
                inventory, shards=tuple(Held(replace(held.shard, plan=b""), held.source) for held in inventory.shards)
            )
            for inventory in inventories
        ]
        return super().plan(bare, **kwargs)


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

    def report(self, report: Report, now: float) -> Any:
        done = super().report(report, now)
        if self._pending is None or not self._pending.parts:
            return done
        self._pending.complete = True
        early = self.manifest_written(self._pending.checkpoint, now)
        return Ready((*done.records, *early.records), (*done.announce, *early.announce))


class AtOnce(CadenceAgreement):
    """A changed cadence holds from the newest step seen, not from one that nobody has reached."""

    def _margin(self) -> int:
        return 0


class NothingUntilThen(CadenceAgreement):
    """What holds until a changed cadence begins is not told with it."""

    def change(self, *args: Any) -> tuple[Record, ...]:
        records = super().change(*args)
        self.cadence = replace(self.cadence, earlier=())
        return records


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


@dataclass(frozen=True)
class Broken:
    """Classes without one rule, what the simulation must say of them, and the faults that are likely to show it."""

    rules: Rules
    says: str
    stress: tuple[str, ...] = ()


_STUCK = "does not (commit|make durable) anything"

BROKEN: Mapping[str, Broken] = {
    "free by count instead of by commit": Broken(Rules(node=_node(FreeByCount)), "invariant 5: .* has lost"),
    "reported steps of unknown fate rotate": Broken(Rules(node=_node(RotateReported)), "invariant [35]"),
    "the newest committed step may be overwritten": Broken(
        Rules(node=_node(NewestCommittedIsFree)), "invariant 5: .* has lost"
    ),
    "no restore pin": Broken(Rules(node=_node(NoRestorePin)), "invariant 5: .* has lost"),
    "only shards of a start's own ranks are pinned": Broken(
        Rules(node=OwnRanksOnly), "invariant 5: .* has lost", ("reshard", "_all")
    ),
    "slots of ranks that are no more stay": Broken(Rules(node=NothingIsRemoved), "leak: .*", ("reshard", "_all")),
    "a checkpoint counts by the ranks that loaded it": Broken(
        Rules(coordinator=CountedByLoaders), "invariant 3: .* shards", ("reshard", "_all")
    ),
    "another world needs no leave": Broken(Rules(coordinator=AnyWorld), "are let in for", ("reshard", "_all")),
    "another world is passed over": Broken(
        Rules(coordinator=OlderOfTheWorld), "are let in for|nothing was offered", ("reshard", "_all")
    ),
    "no persist pin": Broken(Rules(node=_node(NoPersistPin)), "invariant 1: .* pinned and being read"),
    "slots of stale processes are given to others": Broken(
        Rules(node=ReclaimFromStale), "invariant 1: .* granted", ("_all", "_rank")
    ),
    "grants are not in the journal": Broken(
        Rules(keep_records=_no_grants), "invariant 1|bytes that are not", ("_daemon", "_both")
    ),
    "epochs are not in the node's manifest": Broken(
        Rules(keep_records=_no_epochs), "invariant 15|the history ends at epoch", ("_wipe", "_daemon", "_machine")
    ),
    "identity by step number alone": Broken(
        Rules(node=AnyLifeOfTheStep, coordinator=ByStepNumber), "loaded bytes that are not state", ("_all",)
    ),
    "nothing is abandoned": Broken(Rules(history=NoLineage), "was abandoned and is offered again", ("_all",)),
    "no incarnation in memory commits": Broken(
        Rules(coordinator=NoIncarnation), "invariant 3: .* memory is known to be gone", ("_machine",)
    ),
    "no fence at the coordinator": Broken(Rules(coordinator=NoFence), "invariant [39]", ("_all", "_rank")),
    "no step is declared dead": Broken(Rules(coordinator=SkipsUnheard), _STUCK, ("loss",)),
    "a lost skip stays lost": Broken(Rules(coordinator=HeldUnheard), _STUCK, ("loss", "_daemon")),
    "commit with a rank missing": Broken(Rules(coordinator=AlmostAll), "invariant 3: .* shards"),
    "replicas are not compared": Broken(Rules(coordinator=ReplicasUnchecked), "invariant 3: .* replicas differ"),
    "plans are not compared": Broken(Rules(coordinator=PlansUnchecked), "invariant 3: .* different plans", ("plans",)),
    "shards of different plans are offered": Broken(
        Rules(coordinator=OffersAnyPlan), "is offered although .* different plans", ("plans", "_all")
    ),
    "quarantine is forgotten": Broken(
        Rules(coordinator=QuarantineForgotten), "replicas differ|invariant 13", ("_all", "_coordinator")
    ),
    "a silent start at step 0": Broken(Rules(coordinator=SilentZero), "invariant 15", ("_machine", "_all")),
    "durable before the manifest is written": Broken(Rules(coordinator=ManifestEarly), "invariant 4"),
    "reports are not repeated": Broken(Rules(node=ForgetfulNode), _STUCK, ("loss",)),
    "a changed cadence holds at once": Broken(
        Rules(coordinator=_coordinator(AtOnce)), "ranks disagree", ("_cadence",)
    ),
    "a changed cadence comes without what holds until then": Broken(
        Rules(coordinator=_coordinator(NothingUntilThen)), "ranks disagree", ("_cadence",)
    ),
    "a wiped coordinator learns nothing": Broken(
        Rules(node=NoRejoin), "invariant 15|the history ends|" + _STUCK, ("_wipe",)
    ),
}
"""Name of the rule that is off -> the classes without it. `NoStore` has a test of its own: chance needs too long."""
