"""What a daemon asks of a coordinator: one interface, several implementations, one contract suite.

A coordinator decides for a whole job: who may write (tokens, lineage), which steps are snapshot (cadence), which
steps are complete at which tier, which are made durable, and from which step the next start goes on. The decisions
themselves are `baftd.checkpoint.commit.JobCoordinator`; an implementation gives them a place to live.

Everything here is idempotent: a daemon that did not see an answer asks again. Nothing is announced, neither as an
answer nor to the listener, before what it rests on is stored.

Every method may raise `Unreachable` (the store does not answer; nothing is lost, ask again).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from baftd.checkpoint.commit import CoordinatorInstruction, Joined
from baftd.checkpoint.facts import Answer, CadenceProposal, Inventory, JobView, Report, RestoredRank, Skipped
from baftd.checkpoint.history import BadSource, History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.recovery import RestorePlan

__all__ = ["Coordinator", "Listener"]

Listener: TypeAlias = Callable[[str, CoordinatorInstruction], None]
"""Called with (job, instruction) on the event loop's thread, in the order of the decisions. Must not block or raise.

A daemon hears every `Publish`, `Committed`, `Dead`, `Withdrawn`, `Quarantined`, `Retain`, `Finished` of its jobs,
and the `WriteManifest` that names its node. `Answer` and `Joined` are returned to whoever asked.
"""


class Coordinator(Protocol):
    """See the module's docstring."""

    @property
    def name(self) -> str:
        """For people: "in-process", "redis://..."."""
        ...

    @property
    def several_nodes(self) -> bool:
        """Whether ranks of other nodes take part: else a world larger than this node's ranks can never gather."""
        ...

    async def start(self, node: str, incarnation: str, listener: Listener) -> None:
        """Register this daemon: the node's name and which life of its memory this is."""
        ...

    async def close(self) -> None:
        """Release leases and connections. What is stored stays."""
        ...

    async def jobs(self) -> Sequence[str]:
        """Jobs that have a history, sorted."""
        ...

    async def history(self, job: str) -> History:
        """Epochs, lineage and quarantine of a job; empty for an unknown one. A copy, or read-only."""
        ...

    async def view(self, job: str) -> JobView:
        """All that nodes must know of a job."""
        ...

    async def join(self, job: str, inventory: Inventory | None) -> Joined:
        """This node takes part in the job. What its slots and manifests prove teaches a store that knows less."""
        ...

    # ------------------------------------------------------------------ every step

    async def report(self, job: str, report: Report) -> Answer:
        """A shard is verified at a tier."""
        ...

    async def skip(self, job: str, skipped: Skipped) -> Answer:
        """A rank has no snapshot of a step."""
        ...

    async def tick(self) -> float | None:
        """Do what has become due by time. Seconds until the next call; None: not before the next report."""
        ...

    # ------------------------------------------------------------------ cadence

    async def propose(self, job: str, token: Token, proposal: CadenceProposal) -> JobView:
        """This node says which steps its ranks can afford to snapshot. The view after it.

        The longest interval that a live node proposes becomes the job's, from a step on that no rank has reached; the
        view says whose it was (`cadence_by`). A node's newer proposal replaces its older one, and the same again
        changes nothing. A proposal goes with its node, with its start of the job, and with a coordinator's memory: say
        it again when the view's store is another. Without effect where the interval is fixed by the settings. Raises
        `Fenced` for an old token, `UsageError` for a cadence that makes no sense, `TryAgain` before the node has
        joined.
        """
        ...

    # ------------------------------------------------------------------ durable tier

    async def want_durable(self, job: str, token: Token, step: int) -> None:
        """Make the newest step committed in memory, at least `step`, durable as soon as possible.

        Raises `Fenced` for an old token, `UsageError` when no durable tier is on.
        """
        ...

    async def manifest_written(self, job: str, checkpoint: CheckpointId) -> None:
        """`WriteManifest` was carried out."""
        ...

    async def durable_failed(self, job: str, token: Token, step: int, rank: int, reason: str) -> None:
        """A part of the step cannot be written: the step is given up, the next one that is due is taken."""
        ...

    async def finish(self, job: str, token: Token, rank: int, step: int) -> None:
        """The rank is done. `Finished` follows when all are. Raises `Fenced` for an old token."""
        ...

    # ------------------------------------------------------------------ restore

    async def plan(
        self,
        job: str,
        inventories: Sequence[Inventory],
        *,
        world: int | None = None,
        step: int | None = None,
        at_most: int | None = None,
        fresh: bool = False,
        reshard: bool = False,
        prefer: Mapping[int, str] | None = None,
    ) -> RestorePlan:
        """What a start of the job would go on from; changes nothing. Raises `NothingRestorable`, `UsageError`.

        `reshard`: also from what another world has saved; without it such a checkpoint is an error."""
        ...

    async def open_epoch(self, job: str, incarnation: str, plan: RestorePlan, *, world: int, expected: int) -> JobView:
        """Fix the plan as what the incarnation begins from, by compare-and-set on the epoch `expected`.

        Fences every older token. The same incarnation again changes nothing: the plan that stands is the parent of
        the view's head. Raises `EpochConflict` when another start was quicker.
        """
        ...

    async def source_failed(self, job: str, token: Token, bad: BadSource) -> None:
        """A shard of the head's plan is bad at one place, and is not tried again there. Raises `Fenced`."""
        ...

    async def reparent(self, job: str, token: Token, plan: RestorePlan) -> JobView:
        """Let the head begin from an older checkpoint than planned. Raises `Fenced`, `UsageError` once it has begun."""
        ...

    async def restored(self, job: str, restored: RestoredRank) -> Answer:
        """A rank has loaded what the head began from."""
        ...

    async def quarantine(self, job: str, checkpoint: CheckpointId, reason: str) -> None:
        """The checkpoint failed verification and is never offered again."""
        ...

    async def lease(self, job: str, holder: str, seconds: float) -> None:
        """Take or renew the right to change the job's restore plan. Raises `TryAgain` naming another holder."""
        ...

    async def release(self, job: str, holder: str) -> None:
        """Give the lease back; harmless when it is not held."""
        ...

    async def forget(self, job: str) -> None:
        """Drop all that is known of a job: nothing of it is left in any tier."""
        ...
