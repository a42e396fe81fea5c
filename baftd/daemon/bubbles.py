"""What the planning loop knows of a job, told: `baftd status` (rung, interval, why) and `baftd show --bubbles`.

Predicted gaps come from the schedule and the measured times of its operations alone; where a stage is another node's,
its times are not known here and nothing is predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from baftd.checkpoint.facts import Cadence
from baftd.daemon.pacing import Told
from baftd.errors import BaftError
from baftd.pipeline.foretell import times_of
from baftd.pipeline.operations import GapKind, Schedule, StageTimes, Times
from baftd.pipeline.simulate import simulate
from baftd.wire.messages import BubbleRow, BubblesReply, BubblesRequest, PacingStatus, RankPacing

if TYPE_CHECKING:
    from baftd.daemon.job import JobOnNode

__all__ = ["bubbles", "pacing_status"]

COLLECTIVE = GapKind.COLLECTIVE.value
PIPELINE = frozenset(kind.value for kind in GapKind if kind is not GapKind.DATA)
"""Kinds that a model of the schedule foretells."""
WITHOUT_PLAN = "unplanned"
"""The rung of a rank that has no copy plan yet: it copies as its adapter does without one."""
SMALL = 0.005
"""Part of the step: gaps of one kind that are shorter, predicted and measured, say nothing about the model."""


def pacing_status(job: JobOnNode, told: Told | None = None) -> PacingStatus | None:
    """What has been decided for a job, and why; None before a rank has told how long its steps take.

    told: of the start that is meant; None: the running one."""
    failures = job.pacing.failures
    if told is None and job.pacing.ranks:
        told = job.pacing.told
    decision = told.governor.decision if told is not None else None
    if told is None or decision is None or told.newest < 0:
        return None
    view = told.view
    published = view.cadence if view is not None else Cadence(0, decision.interval, decision.probe)
    cadence = published.at(told.newest + 1)
    by = view.cadence_by if view is not None else None
    measured = told.governor.estimate
    here = by is None or by.node == job.context.node
    coming, from_step = published.every, published.from_step
    if decision.interval > published.every:
        coming, from_step = decision.interval, 0
    changes = coming != cadence.every
    return PacingStatus(
        interval=cadence.every,
        fixed=job.context.settings.interval is not None,
        next_interval=coming if changes else 0,
        next_step=from_step if changes else 0,
        next_expected=decision.snapshot / coming if changes else 0.0,
        rung=decision.rung,
        why=(decision.why if here or by is None else by.why)[:4000],
        slowest=decision.slowest if by is None else by.rank,
        slowest_node=job.context.node if by is None else by.node,
        step_seconds=decision.step_seconds,
        budget=job.context.settings.overhead_budget,
        expected=decision.snapshot / cadence.every,
        overhead=measured.value / cadence.every if measured is not None else None,
        overhead_error=measured.error / cadence.every if measured is not None else None,
        pairs=measured.pairs if measured is not None else 0,
        probe=cadence.probe,
        failures=failures.count,
        young_daly=failures.young_daly(),
        ranks=[_rank(told, rank) for rank in told.setups],
    )


def _rank(told: Told, rank: int) -> RankPacing:
    found = told.governor.summary(rank)
    return RankPacing(
        rank=rank,
        rung=found.rung or WITHOUT_PLAN,
        bytes=found.bytes,
        window_seconds=found.window_seconds,
        in_windows=found.in_windows,
        outside=found.outside,
        at_fence=found.at_fence,
        fence_seconds=found.fence_seconds,
        held_seconds=found.held_seconds,
        overruns=found.overruns,
        copy_rate=found.copy_rate,
    )


async def bubbles(job: JobOnNode, told: Told, message: BubblesRequest) -> BubblesReply:
    """Predicted and measured gaps of every rank of this node, in the start that `told` is of."""
    reply = BubblesReply(
        id=message.id, job=job.name, epoch=told.epoch, steps=0, schedule="", rows=[], pacing=pacing_status(job, told)
    )
    setups = told.setups
    profiles = {rank: told.governor.profile(rank) for rank in setups}
    reply.steps = min((profile.steps for profile in profiles.values()), default=0)
    schedules = {rank: setup.schedule for rank, setup in setups.items() if setup.schedule is not None}
    reply.schedule = ", ".join(dict.fromkeys(_said(schedule) for schedule in schedules.values()))
    measured = {rank: profile.gaps() for rank, profile in profiles.items()}
    stages: dict[int, StageTimes] = {}
    for profile in profiles.values():
        stages.update(profile.stage_times())
    barrier = any(gaps[COLLECTIVE].seconds > 0 for gaps in measured.values() if COLLECTIVE in gaps)
    step = told.governor.decision.step_seconds if told.governor.decision is not None else 0.0
    predicted: dict[int, Mapping[str, float]] = {}
    for schedule in dict.fromkeys(schedules.values()):
        places = {rank: setups[rank].place for rank in schedules if schedules[rank] == schedule}
        try:
            foretold = await job.context.workers.urgent(_foretell, schedule, stages, barrier, step)
        except BaftError as error:
            job.log.info("not_foretold", why=str(error))
            continue
        predicted.update({rank: foretold[place] for rank, place in places.items() if foretold})
    errors: list[float] = []
    for rank, gaps in measured.items():
        own = schedules[rank].own(setups[rank].place) if rank in schedules else ()
        model = predicted.get(rank)
        for kind in _kinds(gaps, model or {}):
            found = gaps.get(kind)
            seconds, foretold_seconds = found.seconds if found is not None else 0.0, None
            if model is not None and kind in PIPELINE:
                foretold_seconds = model.get(kind, 0.0)
                if seconds > 0 and max(seconds, foretold_seconds) > SMALL * step:
                    errors.append(abs(foretold_seconds - seconds) / seconds)
            reply.rows.append(
                BubbleRow(
                    rank=rank,
                    stages=list(own),
                    kind=kind,
                    count=found.count if found is not None else 0.0,
                    predicted=foretold_seconds,
                    measured=seconds,
                    bytes=found.bytes if found is not None else 0,
                )
            )
    reply.error = statistics.median(errors) if errors else None
    return reply


def _kinds(measured: Mapping[str, object], predicted: Mapping[str, float]) -> list[str]:
    """Kinds of gaps in the order of a step, others behind."""
    order = [kind.value for kind in GapKind]
    found = {*measured, *predicted}
    return [kind for kind in order if kind in found] + sorted(found - set(order))


def _said(schedule: Schedule) -> str:
    text = f"{schedule.name}: {schedule.ranks} ranks, {schedule.micro} micro-batches"
    return text if schedule.stages == schedule.ranks else f"{text}, {schedule.stages} stages"


def _foretell(
    schedule: Schedule, stages: Mapping[int, StageTimes], barrier: bool, step: float
) -> Sequence[Mapping[str, float]]:
    """Seconds of idle time by kind, of each place; none where a stage's times are not known."""
    times = times_of(schedule, stages)
    if times is None:
        return ()
    line = simulate(schedule, Times(times, barrier=barrier))
    if not barrier and step > line.period:
        # What is left of a step is the update, which moves the next step's begin on every rank.
        line = simulate(schedule, Times(times, tail=step - line.period, barrier=False))
    return [
        {kind.value: seconds for kind, seconds in line.idle_by_kind(place).items()} for place in range(schedule.ranks)
    ]
