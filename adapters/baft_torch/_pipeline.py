"""Which pipeline stages this rank has, and how many ranks have them: from a schedule, or from `attach(parallel=)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from baft_torch._layout import JobLayout
from baftd.errors import UsageError

__all__ = ["Pipeline"]


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
        found = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
        stages = [stage for stage in found if isinstance(getattr(stage, "submod", None), nn.Module)]
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
