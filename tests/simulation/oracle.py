"""What must hold, judged from what is physically there and not from what the cores believe.

Checked: invariants 1 (a slot that is committed, pinned or not granted is never written), 3 (a commit stands on shards
that are there), 5 (the newest committed step stays restorable through every crash), 9 (an older token commits nothing),
13 (what is quarantined is not offered), 15 (no silent start at step 0), the lineage (no abandoned step is offered), and
that every restored byte is exactly that of the checkpoint it was restored from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baftd.checkpoint.facts import EpochFacts, ShardFacts, Writer
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.recovery import RestorePlan
from baftd.checkpoint.slots import SlotState
from tests.simulation.scheduler import Violation
from tests.simulation.world import Content, DurableDirectory, Machine

__all__ = ["Oracle"]


@dataclass
class _Obligation:
    """A checkpoint that must stay restorable, and where its shards lie: rank -> (node, incarnation)."""

    token: Token
    checkpoint: CheckpointId
    places: Mapping[int, tuple[str, str]]
    line: int = -1
    found: dict[int, tuple[int, int]] = field(default_factory=dict)


class Oracle:
    """Sees everything, remembers what was promised, and raises `Violation`."""

    def __init__(self, machines: dict[str, Machine], durable: DurableDirectory) -> None:
        self.machines = machines
        self.durable = durable
        self.worlds: dict[Token, int] = {}
        self.truth: dict[tuple[Token, int], int] = {}
        self.parents: dict[Token, tuple[Token | None, CheckpointId | None]] = {}
        self.by_checkpoint: dict[CheckpointId, Token] = {}
        self.plans: dict[tuple[Token, int], set[bytes]] = {}
        self.damaged: set[tuple[Token, int]] = set()
        self.corrupt: set[tuple[Token, int]] = set()
        self.trained_epoch = 0
        self.verified_any = False
        self.obligation: _Obligation | None = None
        self.durable_obligation: tuple[Token, CheckpointId] | None = None
        self.grants: dict[tuple[str, int, int], tuple[int, Writer]] = {}
        self.reading: dict[tuple[str, int, int], int] = {}
        self.calm_from = float("inf")
        """Since when every word arrives, and every node has heard what was said before."""
        self.decided: dict[tuple[Token, int], tuple[int, bool]] = {}
        self.commits = 0
        self.durable_commits = 0

    # ------------------------------------------------------------ what happens

    def trained(self, token: Token, step: int, line: int) -> None:
        """All ranks have made state(step) under this token."""
        self.truth[(token, step)] = line
        self.trained_epoch = max(self.trained_epoch, token.epoch)

    def saved(self, shard: ShardFacts) -> None:
        """A rank has sealed its shard."""
        self.plans.setdefault((shard.token, shard.step), set()).add(shard.plan)

    def decides(self, token: Token, step: int, rank: int, due: bool, now: float) -> None:
        """A rank comes to a boundary and takes a snapshot, or leaves the step out: in peace all do the same."""
        if now < self.calm_from:
            return
        first, said = self.decided.setdefault((token, step), (rank, due))
        if said != due:
            took, left = (first, rank) if said else (rank, first)
            raise Violation(f"ranks disagree: rank {took} takes step {step} and rank {left} leaves it out")

    def opened(self, facts: EpochFacts, origin: Token | None) -> None:
        """An epoch (or another parent for it) has become durable at the coordinator."""
        self.parents[facts.token] = (origin, facts.parent)
        self.worlds[facts.token] = facts.world

    def on_line(self, head: Token | None, token: Token, step: int) -> bool:
        """Whether state(step) of `token` is an ancestor of `head`, computed from what the launcher did."""
        limit: int | None = None
        seen = 0
        while head is not None and seen < 100:
            if head == token:
                return limit is None or step <= limit
            head, parent = self.parents.get(head, (None, None))
            limit = parent.step if parent is not None else None
            seen += 1
        return False

    def granted(self, node: str, rank: int, slot: int, generation: int, writer: Writer) -> None:
        """A grant is in the node's journal."""
        self.grants[(node, rank, slot)] = (generation, writer)

    def freed(self, node: str, rank: int, slot: int) -> None:
        """A slot's grant or content is given up in the node's journal."""
        self.grants.pop((node, rank, slot), None)

    def writes(self, node: str, rank: int, slot: int, generation: int, writer: Writer) -> None:
        """A process is about to write into a slot."""
        where = f"{node} rank {rank} slot {slot}"
        if self.reading.get((node, rank, slot)):
            raise Violation(f"invariant 1: {writer} writes {where} while it is pinned and being read")
        granted = self.grants.get((node, rank, slot))
        if granted != (generation, writer):
            raise Violation(f"invariant 1: {writer} writes {where} under generation {generation}; granted: {granted}")
        owed = self.obligation
        if owed is not None and not self._void(owed.token, owed.checkpoint):
            place = owed.places.get(rank)
            if place is not None and place[0] == node and owed.found.get(rank) == (rank, slot):
                machine = self.machines[node]
                if machine.slots[(rank, slot)].content == self._want(owed, rank):
                    raise Violation(f"invariant 1: {writer} writes {where}, which holds the newest committed step")

    # ------------------------------------------------------------ commits

    def committed(
        self,
        token: Token | None,
        checkpoint: CheckpointId,
        places: Mapping[int, tuple[str, str]],
        nodes: Mapping[str, str],
        quarantined: Mapping[CheckpointId, str],
    ) -> None:
        """The coordinator has committed a checkpoint in memory. `nodes`: the incarnations it takes to live."""
        self.commits += 1
        origin = self._origin(token, checkpoint)
        if checkpoint in quarantined:
            raise Violation(f"invariant 13: {checkpoint} is quarantined and was committed")
        world = self.worlds.get(origin)
        if len(places) != world:
            raise Violation(f"invariant 3: {checkpoint} was committed with {len(places)} of {world} shards")
        if (origin, checkpoint.step) in self.corrupt:
            raise Violation(f"invariant 3: {checkpoint} was committed although its replicas differ")
        if len(self.plans.get((origin, checkpoint.step), ())) > 1:
            raise Violation(f"invariant 3: {checkpoint} was committed although its ranks saved under different plans")
        line = self.truth.get((origin, checkpoint.step))
        for rank, (node, incarnation) in places.items():
            machine = self.machines[node]
            if not machine.up or machine.incarnation != incarnation:
                if nodes.get(node) != incarnation:
                    raise Violation(f"invariant 3: {checkpoint} stands on {node}, whose memory is known to be gone")
                continue  # it died a moment ago, and nobody could have told
            if (origin, checkpoint.step) in self.damaged:
                continue
            if line is None or self._find(machine, rank, (line, rank)) is None:
                raise Violation(
                    f"invariant 3: {checkpoint} was committed, but {node} does not hold rank {rank}'s shard"
                )
        self.obligation = _Obligation(origin, checkpoint, dict(places), -1 if line is None else line)

    def became_durable(self, token: Token | None, checkpoint: CheckpointId) -> None:
        """The coordinator calls a checkpoint durable."""
        self.durable_commits += 1
        origin = self._origin(token, checkpoint)
        self._check_durable(origin, checkpoint)
        self.durable_obligation = (origin, checkpoint)

    def _origin(self, head: Token | None, checkpoint: CheckpointId) -> Token:
        seen = 0
        while head is not None and head.epoch != checkpoint.epoch and seen < 100:
            head, seen = self.parents.get(head, (None, None))[0], seen + 1
        if head is None or head.epoch != checkpoint.epoch:
            raise Violation(f"invariant 9: {checkpoint} is not of the line that holds the token")
        return head

    # ------------------------------------------------------------ restore

    def refused(self, world: int, plan: RestorePlan | None, resharded: RestorePlan) -> None:
        """What a start of `world` ranks is given without leave to reshard (None: it is refused), and with it."""
        other = resharded.checkpoint is not None and resharded.world != world
        if (plan is None) != other:
            raise Violation(
                f"{world} ranks are {'refused' if plan is None else 'let in'} for a step of {resharded.world}"
            )
        if plan is not None and plan.checkpoint != resharded.checkpoint:
            raise Violation(f"{plan.checkpoint} is chosen although {resharded.checkpoint} is there")

    def remains(self, world: int) -> None:
        """All is well and the newest start has committed: nothing is left of ranks that it does not have."""
        for name, machine in self.machines.items():
            left = sorted(key for key in machine.slots if key[0] >= world)
            if left:
                raise Violation(f"leak: {name} keeps slots {left} of ranks that a start of {world} does not have")

    def planned(
        self,
        head: Token | None,
        plan: RestorePlan,
        *,
        free_choice: bool,
        fresh: bool,
        quarantined: Mapping[CheckpointId, str],
    ) -> None:
        """A restore plan was made from the inventories of all nodes. `free_choice`: no step was asked for."""
        checkpoint = plan.checkpoint
        if head is not None and head.epoch < self.trained_epoch:
            raise Violation(f"the history ends at epoch {head.epoch}; epoch {self.trained_epoch} has trained")
        if checkpoint is None:
            if self.verified_any and not fresh:
                raise Violation("invariant 15: a start at step 0, though the job has been further")
            return
        assert plan.token is not None
        if len(self.plans.get((plan.token, checkpoint.step), ())) > 1:
            raise Violation(f"{checkpoint} is offered although its ranks saved under different plans")
        if checkpoint in quarantined:
            raise Violation(f"invariant 13: {checkpoint} is quarantined and was offered")
        if not self.on_line(head, plan.token, checkpoint.step):
            raise Violation(f"{checkpoint} was abandoned and is offered again")
        for promised in self._promised(head, quarantined) if free_choice else ():
            if checkpoint.step < promised.step:
                raise Violation(f"invariant 5: {promised} is committed and there, but {checkpoint} was chosen")

    def nothing(self, head: Token | None, quarantined: Mapping[CheckpointId, str]) -> None:
        """Nothing was found restorable."""
        for promised in self._promised(head, quarantined):
            raise Violation(f"invariant 5: {promised} is committed and there, but nothing was offered")

    def _promised(self, head: Token | None, quarantined: Mapping[CheckpointId, str]) -> list[CheckpointId]:
        """What must be restorable for `head`: committed in memory that still lives, or durable; and undamaged."""
        found = []
        owed, kept = self.obligation, self.durable_obligation
        if owed is not None and self._whole(owed) and self.on_line(head, owed.token, owed.checkpoint.step):
            found.append(owed.checkpoint)
        if kept is not None and not self._void(*kept) and self.on_line(head, kept[0], kept[1].step):
            found.append(kept[1])
        return [checkpoint for checkpoint in found if checkpoint not in quarantined]

    def begins(self, head: Token, checkpoint: CheckpointId | None) -> None:
        """The head epoch begins from `checkpoint`: what is not on its line need not be kept any more."""
        owed = self.obligation
        if owed is not None and not self.on_line(head, owed.token, owed.checkpoint.step):
            self.obligation = None
        kept = self.durable_obligation
        if kept is not None and not self.on_line(head, kept[0], kept[1].step):
            self.durable_obligation = None

    def loaded(self, origin: Token, step: int, rank: int, content: Content) -> None:
        """A rank has loaded these bytes as state(step)."""
        line = self.truth.get((origin, step))
        if line is None or content != (line, rank):
            raise Violation(f"rank {rank} loaded bytes that are not state({step}) of epoch {origin.epoch}")

    # ------------------------------------------------------------ after every event

    def check(self) -> None:
        """The newest committed step is where its commit said, as far as that memory lives."""
        owed = self.obligation
        if owed is None or (self.damaged and self._void(owed.token, owed.checkpoint)):
            return
        line = owed.line
        for rank, (node, incarnation) in owed.places.items():
            machine = self.machines[node]
            if not machine.up or machine.incarnation != incarnation:
                continue
            at = owed.found.get(rank)
            if at is not None:
                held = machine.slots.get(at)
                if held is not None and held.content == (line, rank) and held.header.state >= SlotState.SEALED:
                    continue
            at = self._find(machine, rank, (line, rank))
            if at is None:
                raise Violation(f"invariant 5: {owed.checkpoint} is committed, and {node} has lost rank {rank}'s shard")
            owed.found[rank] = at
        kept = self.durable_obligation
        if kept is not None and self.durable.changed:
            self.durable.changed = False
            self._check_durable(*kept)

    def _check_durable(self, token: Token, checkpoint: CheckpointId) -> None:
        entry = self.durable.checkpoints.get(checkpoint)
        if (
            entry is None
            or not entry.complete
            or entry.token != token
            or sorted(entry.shards) != list(range(self.worlds[token]))
        ):
            raise Violation(f"invariant 4: {checkpoint} is durable, but is not all there")
        if (token, checkpoint.step) in self.damaged:
            return
        line = self.truth.get((token, checkpoint.step))
        for rank, (_, content) in entry.shards.items():
            if content != (line, rank):
                raise Violation(f"invariant 4: {checkpoint} is durable, but rank {rank}'s bytes are others")

    def finished(self) -> None:
        """All ranks have finished and the last step is said to be durable: slots may go."""
        owed, kept = self.obligation, self.durable_obligation
        lost = owed is not None and (kept is None or kept[1].step < owed.checkpoint.step)
        if owed is not None and lost and not self._void(owed.token, owed.checkpoint):
            raise Violation(f"invariant 5: the job is finished, and {owed.checkpoint} is not durable")
        self.obligation = None

    def _void(self, token: Token, checkpoint: CheckpointId) -> bool:
        """Whether a bit was flipped in it on purpose: then nothing is promised."""
        return (token, checkpoint.step) in self.damaged

    def _want(self, owed: _Obligation, rank: int) -> Content:
        return (owed.line, rank)

    def _whole(self, owed: _Obligation) -> bool:
        if self._void(owed.token, owed.checkpoint):
            return False
        for rank, (node, incarnation) in owed.places.items():
            machine = self.machines[node]
            if not machine.up or machine.incarnation != incarnation:
                return False
            if self._find(machine, rank, self._want(owed, rank)) is None:
                return False
        return True

    @staticmethod
    def _find(machine: Machine, rank: int, content: Content) -> tuple[int, int] | None:
        for key, held in machine.slots.items():
            if key[0] == rank and held.content == content and held.header.state >= SlotState.SEALED:
                return key
        return None
