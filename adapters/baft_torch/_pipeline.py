"""Which pipeline stages this rank has, and how many ranks have them: from a schedule, or from `attach(parallel=)`; and
in which order the schedule works on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from baft_client.snapshotting import ScheduleSaid
from baft_torch._layout import JobLayout
from baftd.errors import UsageError
from baftd.pipeline.events import EventKind, pack_order

__all__ = ["Pipeline", "schedule_said", "stages_of"]

KINDS = {
    "F": EventKind.FORWARD,
    "B": EventKind.BACKWARD,
    "I": EventKind.INPUT_GRAD,
    "W": EventKind.WEIGHT_GRAD,
    "REDUCE_GRAD": EventKind.REDUCE,
}
"""Computations by torch's word for them (`_ComputationType`)."""
TRANSFERS = frozenset({"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD"})
"""Its words for what is no computation."""
LONGEST_ORDER = 1 << 20
"""Bytes of an order that a message may hold."""


@dataclass(frozen=True)
class Pipeline:
    """Stages of this rank by the id of their module; empty without a pipeline."""

    stages: Mapping[int, int] = field(default_factory=dict)
    count: int = 0
    """Stages of the whole pipeline; 0: there is none, or it does not say."""
    stage_ranks: int | None = 1
    """Ranks that hold what this one holds parts of: those of its stage, or all; None: unknown."""

    def stage_of(self, module: nn.Module) -> int | None:
        """Stage of a module given to attach()."""
        return self.stages.get(id(module))

    @classmethod
    def of(cls, modules: Sequence[nn.Module], schedule: Any, layout: JobLayout) -> Pipeline:
        """Raises UsageError for a schedule without stages, or stages that `parallel` does not have."""
        if schedule is not None:
            return cls._of_schedule(schedule, layout)
        parallel = layout.parallel
        if parallel is None or parallel.pp == 1:
            return cls(stage_ranks=layout.world)
        numbers = parallel.stages(layout.rank)
        if len(modules) != len(numbers):
            raise UsageError(
                f"attach(parallel=) says that this rank holds {len(numbers)} stages of the pipeline (pp {parallel.pp}, "
                f"vpp {parallel.vpp}), and {len(modules)} modules were given.",
                hint="Give attach() the list of model chunks in the order of their stages, or schedule=.",
            )
        stages = {id(module): number for module, number in zip(modules, numbers, strict=True)}
        return cls(stages, parallel.virtual_stages, layout.world // parallel.pp)

    @classmethod
    def _of_schedule(cls, schedule: Any, layout: JobLayout) -> Pipeline:
        stages = [stage for stage in stages_of(schedule) if isinstance(getattr(stage, "submod", None), nn.Module)]
        if not stages:
            raise UsageError(
                f"schedule is a {type(schedule).__name__}, in which no pipeline stage can be found.",
                hint="Give attach() a schedule of torch.distributed.pipelining, or leave schedule= out.",
            )
        numbers = {id(stage.submod): int(stage.stage_index) for stage in stages}
        size = getattr(stages[0], "group_size", None)
        place = getattr(stages[0], "group_rank", None)
        parallel = layout.parallel
        if parallel is not None and size is not None:
            expected = layout.coordinates["pp"]
            if size != parallel.pp or (place is not None and place != expected):
                raise UsageError(
                    f"the schedule's group has {size} ranks and this one is number {place} of them; attach(parallel=) "
                    f"says pp {parallel.pp} and number {expected}.",
                    hint="Correct pp=, or order= (the fastest axis first).",
                )
        ranks = layout.world // size if size and layout.world % size == 0 else None
        return cls(numbers, int(getattr(stages[0], "num_stages", 0) or 0), ranks)


def stages_of(schedule: Any) -> list[Any]:
    """Stages that this rank has in a schedule of torch.distributed.pipelining; empty where none can be found."""
    found = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    return [stage for stage in found if hasattr(stage, "stage_index")]


def schedule_said(schedule: Any) -> ScheduleSaid | None:
    """What a schedule says of itself; None for one that has no stages. Its `order` is empty where torch has no table of
    operations, or one that does not hold together: the order is then what the name says."""
    stages = stages_of(schedule)
    if not stages:
        return None
    own = [int(stage.stage_index) for stage in stages]
    micro = int(getattr(schedule, "_n_microbatches", 0) or 0)
    place = int(getattr(stages[0], "group_rank", 0) or 0)
    return ScheduleSaid(
        name=type(schedule).__name__,
        ranks=int(getattr(stages[0], "group_size", 0) or 0),
        place=place,
        stages=int(getattr(stages[0], "num_stages", 0) or 0),
        own=own,
        micro=micro,
        order=_order(schedule, place, own, micro),
    )


def _order(schedule: Any, place: int, own: Sequence[int], micro: int) -> bytes:
    table = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None)
    row = table.get(place) if isinstance(table, Mapping) else None
    found = None if row is None else _operations(row)
    if not found or {stage for _, stage, _ in found} != set(own):
        return b""
    found = _numbered_from_zero(found, micro)
    if not _is_whole(found, own, micro):
        return b""
    packed = pack_order(found)
    return packed if len(packed) <= LONGEST_ORDER else b""


def _operations(row: Sequence[Any]) -> list[tuple[EventKind, int, int]] | None:
    """Of a row of torch's table: (kind, stage, micro-batch), pairs that it overlaps one by one, as they are carried
    out; None for a row with words that are not known."""
    found: list[tuple[EventKind, int, int]] = []
    for action in row:
        if action is None:
            continue
        inner = getattr(action, "sub_actions", None)
        if inner:
            within = _operations(inner)
            if within is None:
                return None
            found.extend(within)
            continue
        word = str(getattr(action.computation_type, "value", action.computation_type))
        if word in KINDS:
            micro = action.microbatch_index
            found.append((KINDS[word], int(action.stage_index), -1 if micro is None else int(micro)))
        elif word not in TRANSFERS:
            return None
    return found


def _numbered_from_zero(found: list[tuple[EventKind, int, int]], micro: int) -> list[tuple[EventKind, int, int]]:
    """Schedule1F1B's table (torch 2.13) numbers the forwards of the last stage from 1; they are carried out from 0."""
    numbers = [number for kind, _, number in found if kind is EventKind.FORWARD]
    if numbers != list(range(1, micro + 1)):
        return found
    return [(kind, stage, number - (kind is EventKind.FORWARD)) for kind, stage, number in found]


def _is_whole(found: list[tuple[EventKind, int, int]], own: Sequence[int], micro: int) -> bool:
    """Whether every micro-batch goes forward once on every stage, and back once: in one piece, or input and weights."""
    everything = list(range(micro))

    def done(kind: EventKind, at: int) -> list[int]:
        return sorted(number for each, stage, number in found if each is kind and stage == at)

    for at in own:
        weights = done(EventKind.WEIGHT_GRAD, at)
        if done(EventKind.FORWARD, at) != everything or done(EventKind.INPUT_GRAD, at) != weights:
            return False
        if sorted(done(EventKind.BACKWARD, at) + weights) != everything:
            return False
    return True
