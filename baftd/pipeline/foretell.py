"""What the model of a schedule says of a rank's windows, before enough steps have been measured. Pure.

The first step is often much slower than those that follow, but not in all its operations: of each stage and kind the
median over the micro-batches is taken, and the schedule is simulated with them. A window that lasted longer than the
gap that the model gives it is taken for as long as the gap.
"""

from __future__ import annotations

from collections.abc import Mapping

from baftd.errors import UsageError
from baftd.pipeline.operations import Operation, Schedule, StageTimes, Timeline, Times
from baftd.pipeline.simulate import simulate
from baftd.pipeline.timeline import Step

__all__ = ["capped", "clock_gaps", "foretold", "times_of"]

MOST = 20_000
"""Operations of a schedule: more are not simulated while others wait."""


def times_of(schedule: Schedule, stages: Mapping[int, StageTimes]) -> tuple[StageTimes, ...] | None:
    """Times of all stages of a schedule, in their order; None where one is not known."""
    if any(stage not in stages for stage in range(schedule.stages)):
        return None
    return tuple(stages[stage] for stage in range(schedule.stages))


def foretold(schedule: Schedule, stages: Mapping[int, StageTimes], barrier: bool) -> Timeline | None:
    """The timeline; None where a stage's times are not known, or the schedule is too long or makes none."""
    if sum(len(order) for order in schedule.order) > MOST:
        return None
    times = times_of(schedule, stages)
    if times is None:
        return None
    try:
        return simulate(schedule, Times(times, barrier=barrier))
    except UsageError:
        return None  # what the adapter says of its schedule is not what it does: what is measured counts


def capped(step: Step, line: Timeline, place: int) -> tuple[float, ...]:
    """Seconds of each window of a step, none longer than the gap of the model in which it lies."""
    gaps: dict[Operation | None, float] = {}
    for gap in line.gaps(place):
        gaps[gap.before] = gaps.get(gap.before, 0.0) + gap.seconds
    measured: dict[Operation | None, float] = {}
    for window in step.windows:
        measured[window.before] = measured.get(window.before, 0.0) + window.seconds
    return tuple(
        window.seconds * min(1.0, gaps.get(window.before, 0.0) / measured[window.before])
        if measured[window.before] > 0
        else 0.0
        for window in step.windows
    )


def clock_gaps(schedule: Schedule, place: int, step_seconds: float) -> tuple[tuple[float, float], ...]:
    """Begin and end of a rank's gaps, seconds after the boundary, where nothing but the length of the step is known:
    of a schedule in which a backward takes twice a forward, stretched to that length."""
    unit = StageTimes(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0)
    line = foretold(schedule, dict.fromkeys(range(schedule.stages), unit), barrier=True)
    if line is None or line.period <= 0:
        return ()
    scale, begin = step_seconds / line.period, line.begins[place]
    return tuple(((gap.begin - begin) * scale, (gap.end - begin) * scale) for gap in line.gaps(place))
