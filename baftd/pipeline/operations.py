"""What a pipeline does in a step, as values: operations, schedules, their durations, and the timeline they make.

A *schedule* is the order in which each rank carries out its operations. With the *times* of the operations it makes a
*timeline* (`simulate.py`): begin and end of every operation, hence every gap between them. All times are seconds; any
number type that adds and compares will do, and integers give exact results.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from baftd.errors import UsageError
from baftd.pipeline.events import OPERATIONS, EventKind

if TYPE_CHECKING:
    from baftd.pipeline.links import Links

__all__ = ["Gap", "GapKind", "Operation", "Schedule", "Sends", "StageTimes", "Timed", "Timeline", "Times", "gap_kinds"]


class GapKind(str, enum.Enum):
    """Where in a step a rank is idle."""

    FILL = "fill"
    """Before its first operation."""
    STEADY = "steady"
    """Between its first operation and its last forward, and whatever lies before its first backward."""
    COOLDOWN = "cooldown"
    """After its last forward and its first backward, before its last operation."""
    DRAIN = "drain"
    """After its last operation, but not in a collective: its last sends are not over."""
    COLLECTIVE = "collective"
    """After its last operation, waiting for the others in the collective that ends the step."""
    DATA = "data"
    """Waiting for the next batch. Only measured: no model knows of it."""

    def __str__(self) -> str:
        return self.value


class Operation(NamedTuple):
    """One operation: forward, backward ... of one micro-batch on one stage. `micro` is -1 for REDUCE."""

    kind: EventKind
    stage: int
    micro: int

    def __str__(self) -> str:
        what = self.kind.name.lower().replace("_", " ")
        return f"{what} of stage {self.stage}" + (f", micro-batch {self.micro}" if self.micro >= 0 else "")


class Sends(str, enum.Enum):
    """When a rank waits for what it has sent. A send is over when its receiver has asked for it (gloo buffers nothing,
    NCCL little), so a rank that waits for a send waits for the receiver."""

    FREE = "free"
    """Never: models, and torch's schedules with several stages a rank, which post receives early and wait for sends
    when all operations are done."""
    PHASES = "phases"
    """All forward sends before the first backward, all backward sends at the end: torch's GPipe."""
    PAIRED = "paired"
    """Each with the next receive, in warm-up and cool-down after the next operation: torch's 1F1B."""


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order."""

    name: str
    ranks: int
    """p"""
    micro: int
    """m, micro-batches of a step."""
    stages: int
    stage_rank: tuple[int, ...]
    """Rank of each stage; a stage that lives on several ranks (Chimera) is numbered once for each."""
    order: tuple[tuple[Operation, ...], ...]
    """Operations of each rank."""
    sends: Sends = Sends.FREE
    routes: tuple[tuple[int, ...], ...] = ()
    """Chains of stages, first to last, each stage in one of them; empty: one chain 0, 1, 2 ... (Chimera has two)."""

    @staticmethod
    def of_orders(
        name: str,
        orders: Sequence[Iterable[tuple[int, int, int]]],
        stage_rank: Sequence[int],
        sends: Sends = Sends.FREE,
    ) -> Schedule:
        """A schedule from (kind, stage, micro-batch) of every rank, as `events.unpack_order` gives them.

        Raises UsageError for a stage that is unknown or another rank's, and for kinds that are no operations."""
        found = []
        for rank, operations in enumerate(orders):
            order = []
            for kind, stage, micro in operations:
                operation = Operation(EventKind(kind), stage, micro)
                if operation.kind not in OPERATIONS:
                    raise UsageError(f"rank {rank} of schedule {name} has a {operation.kind.name}: no operation.")
                if not 0 <= stage < len(stage_rank) or stage_rank[stage] != rank:
                    raise UsageError(f"rank {rank} of schedule {name} does not hold the stage of its {operation}.")
                order.append(operation)
            found.append(tuple(order))
        micro = 1 + max((operation.micro for order in found for operation in order), default=-1)
        return Schedule(name, len(found), micro, len(stage_rank), tuple(stage_rank), tuple(found), sends)

    def own(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank."""
        return tuple(stage for stage, holder in enumerate(self.stage_rank) if holder == rank)

    @cached_property
    def links(self) -> Links:
        """What each operation waits for, worked out once. Raises UsageError, naming rank and operation, for an order in
        which ranks would wait for each other for ever."""
        from baftd.pipeline.links import link

        return link(self)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one operation of a stage, by kind."""

    forward: float = 0
    backward: float = 0
    """Gradients of input and weights together."""
    input_grad: float = 0
    weight_grad: float = 0
    reduce: float = 0

    def of(self, kind: EventKind) -> float:
        """Seconds of one operation of that kind. Raises KeyError for what is no operation."""
        return {
            EventKind.FORWARD: self.forward,
            EventKind.BACKWARD: self.backward,
            EventKind.INPUT_GRAD: self.input_grad,
            EventKind.WEIGHT_GRAD: self.weight_grad,
            EventKind.REDUCE: self.reduce,
        }[kind]


@dataclass(frozen=True)
class Times:
    """What a simulation needs to know beside the schedule. Seconds."""

    stages: tuple[StageTimes, ...]
    send: float = 0
    """From the moment at which sender and receiver are both there to the arrival."""
    receive: float = 0
    """From the arrival until the receiver's operation can begin."""
    tail: float = 0
    """From the end of the step's last operation (with a barrier: from the barrier) to the next step: the update."""
    barrier: bool = True
    """All ranks wait for each other at the end of a step (a gradient-norm or data-parallel reduction)."""

    @staticmethod
    def uniform(stages: int, times: StageTimes, *, send: float = 0, tail: float = 0, barrier: bool = True) -> Times:
        """The same times for each of so many stages."""
        return Times((times,) * stages, send=send, tail=tail, barrier=barrier)


class Timed(NamedTuple):
    """An operation and when it ran, seconds after the step's begin."""

    operation: Operation
    begin: float
    end: float


class Gap(NamedTuple):
    """A span in which a rank is idle, seconds after the step's begin."""

    kind: GapKind
    begin: float
    end: float
    before: Operation | None
    """The operation that ends it; None: the end of the step."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """One step of a schedule. On each rank the spans of operations, gaps and tail add up to `periods[rank]`."""

    schedule: Schedule
    times: Times
    operations: tuple[tuple[Timed, ...], ...]
    """Of each rank, in order."""
    begins: tuple[float, ...]
    """Where the step begins on each rank: behind its last operation (or the barrier) and the tail of the step before.
    The earliest is 0."""
    ends: tuple[float, ...]
    """Where it ends there: behind its tail."""

    @property
    def period(self) -> float:
        """Seconds from one step to the next, of the slowest rank; in a steady state all have the same."""
        return max((end - begin for begin, end in zip(self.begins, self.ends, strict=True)), default=0)

    def gaps(self, rank: int) -> tuple[Gap, ...]:
        """Every gap of a rank that is longer than rounding may make it, in order."""
        found = []
        at = self.begins[rank]
        least = _ROUNDING * self.ends[rank]
        timed = self.operations[rank]
        for kind, (operation, begin, end) in zip(gap_kinds([one.operation for one in timed]), timed, strict=True):
            if begin - at > least:
                found.append(Gap(kind, at, begin, operation))
            at = end
        over = self.ends[rank] - self.times.tail
        if over - at > least:
            found.append(Gap(GapKind.COLLECTIVE if self.times.barrier else GapKind.DRAIN, at, over, None))
        return tuple(found)

    def idle(self, rank: int) -> float:
        """Seconds of a step in which a rank is idle."""
        return sum(gap.seconds for gap in self.gaps(rank))

    def idle_by_kind(self, rank: int) -> dict[GapKind, float]:
        """The same by kind of gap, in the order of a step; kinds without a gap are left out."""
        found: dict[GapKind, float] = {}
        for gap in self.gaps(rank):
            found[gap.kind] = found.get(gap.kind, 0.0) + gap.seconds
        return found

    def busy(self, rank: int) -> float:
        """Seconds of a step in which a rank computes."""
        return sum(end - begin for _, begin, end in self.operations[rank])


def gap_kinds(order: Sequence[Operation]) -> tuple[GapKind, ...]:
    """The kind of a gap before each operation of a rank; the same rule for what is predicted and what is measured."""
    last_forward = max((at for at, one in enumerate(order) if one.kind is EventKind.FORWARD), default=-1)
    first_backward = next((at for at, one in enumerate(order) if one.kind in _BACKWARDS), len(order))
    steady = max(last_forward, first_backward)
    return tuple(
        GapKind.FILL if at == 0 else GapKind.STEADY if at <= steady else GapKind.COOLDOWN for at in range(len(order))
    )


_ROUNDING = 1e-12
"""Part of a step: additions in another order differ by less."""
_BACKWARDS = frozenset({EventKind.BACKWARD, EventKind.INPUT_GRAD})
