"""What to do when windows are too small: the rungs, what each costs, and which one it is. Pure.

    windows    the windows of a step hold the snapshot
    divided    they do because each rank saves only its part of what replicas hold in common
    overlap    what is left over is copied beside the computation, no faster than needed
    fence      what is left over is copied at the fence, and the training thread waits
    device     what is left over is copied at the fence into device memory that is free
    interval   not every step is snapshot: as few steps apart as the budget allows

A snapshot costs each rank, in seconds that its step takes longer:

    held + fixed + inside * t_inside + outside * t_outside + t_fence

`t_inside` and `t_outside` are the seconds for which it copies inside windows and beside its own computation; `inside`
and `outside` what a second of that costs the step, `fixed` what a snapshot costs besides (`costs.py`: learnt).
`t_fence` is what the fence waits: what is planned for it, and what it was seen to wait without a plan. The job waits
for its slowest rank, and spends that once an interval: overhead = cost / (interval * step). The interval is the fewest
steps that keep it within the budget for the cheapest rung of each rank; then each rank takes the first rung that the
interval can afford.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from baftd.pipeline.interval import Interval, steps_for
from baftd.pipeline.pacing import RankFacts, RankPlan, copy_plan, expected_left, pace_for, spend_needed, sure_bytes
from baftd.pipeline.profile import low

__all__ = ["HEADROOM", "RUNGS", "Budget", "Choice", "Option", "SecondCosts", "choose", "job_step", "options"]

RUNGS = ("windows", "divided", "overlap", "fence", "device", "interval")
HEADROOM = 0.8
"""Part of the budget that is planned with: the rest is for what no model knows."""
NEGLIGIBLE = 0.01
"""Part of a snapshot that may be left over without being called so."""
TOLERANT = 4
"""Times that for a rank that is on its windows already."""
DEVICE_LATENCY = 50e-6
"""Seconds of a stage in device memory, beside its bytes: launch and event."""


@dataclass(frozen=True)
class SecondCosts:
    """Seconds that a step loses by a second of copying inside windows, and outside of them."""

    inside: float
    outside: float
    fixed: float = 0.0
    """Seconds that it loses by a snapshot, however little is copied."""


@dataclass(frozen=True)
class Budget:
    """Part of the step time that snapshots may cost."""

    part: float

    @property
    def planned(self) -> float:
        """What is planned with."""
        return self.part * HEADROOM


@dataclass(frozen=True)
class Option:
    """One rung for one rank. Seconds of one snapshot."""

    rung: str
    plan: RankPlan
    cost: float
    inside: float
    outside: float
    fence: float
    planned: float
    """Of `fence`: for bytes that the plan leaves over."""
    spend: float
    """Part of each window that is granted."""

    def elsewhere(self, other: Option) -> float:
        """The part of a snapshot that one of the two copies beside computation or at the fence, and the other not."""
        seconds = max(one.inside + one.outside + one.planned for one in (self, other))
        moved = max(abs(self.outside - other.outside), abs(self.planned - other.planned))
        return moved / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Choice:
    """The interval that is needed, and an option for each rank."""

    interval: int
    ranks: dict[int, Option] = field(default_factory=dict)
    slowest: int = -1
    """The rank whose snapshot costs most; -1: no rank."""
    cost: float = 0.0
    """Of a snapshot of it, seconds."""
    least: float = 0.0
    """What the slowest rank's would cost with the cheapest rung."""
    present: float = 0.0
    """What the slowest rank's costs with the rungs that ranks are on, where these are offered."""
    step: float = 0.0

    @property
    def rung(self) -> str:
        """The last rung that a rank is on; interval, if not every step is snapshot."""
        if self.interval > 1:
            return "interval"
        return max((one.rung for one in self.ranks.values()), key=RUNGS.index, default="windows")

    def overhead(self, interval: int) -> float:
        """Part of the running time, with a snapshot every so many steps."""
        return self.cost / (interval * self.step) if self.step > 0 else 0.0


def job_step(steps: Sequence[float]) -> float:
    """Seconds of the job's step, of those of its ranks: they step together, so that one which says otherwise, by
    mistake or on purpose, must neither hide what snapshots cost the others nor make them dear. 0: nothing measured."""
    return median_low([one for one in steps if one > 0] or [0.0])


def options(facts: RankFacts, costs: SecondCosts) -> tuple[Option, ...]:
    """What a rank may do, in the order of the rungs. The rung it is on is offered somewhat longer than it would be
    taken, so that a rank need not move for little."""
    spend = spend_needed(facts)
    sure = min(facts.bytes, sure_bytes(facts, spend))
    short = dict(facts.short)
    found = []

    def offer(rung: str, plan: RankPlan, inside_bytes: float, outside_bytes: float, fence: float) -> None:
        inside, outside = inside_bytes / facts.inside, outside_bytes / facts.beside
        waited = fence + short.get(rung, 0.0)
        cost = facts.held + costs.fixed + costs.inside * inside + costs.outside * outside + waited
        found.append(Option(rung, plan, cost, inside, outside, waited, fence, spend))

    left = expected_left(facts, spend)
    if left <= NEGLIGIBLE * facts.bytes * (TOLERANT if facts.rung in ("windows", "divided") else 1):
        rung = "divided" if facts.held_bytes > max(facts.bytes, sure_bytes(facts, facts.spend)) else "windows"
        offer(rung, copy_plan(facts, spend, rung), facts.bytes - left, 0.0, left / facts.alone)
    beyond = max(facts.bytes - sure, int(NEGLIGIBLE * facts.bytes) if facts.rung == "overlap" else 0)
    if beyond > 0:
        pace = pace_for(beyond, facts)
        computing = max(0.0, facts.step - low(facts.usable))
        # Until the snapshot is over it is carried by both: what is copied beside computation spares the windows.
        carried = min(float(beyond), pace * computing)
        late = expected_left(facts, spend, carried)
        plan = copy_plan(facts, spend, "overlap", outside=pace, left=int(late))
        offer("overlap", plan, facts.bytes - carried - late, carried, late / facts.alone)
    if left > (NEGLIGIBLE * facts.bytes if facts.rung not in ("fence", "device") else 0):
        plan = copy_plan(facts, spend, "fence", left=int(left))
        offer("fence", plan, facts.bytes - left, 0.0, left / facts.alone)
        if facts.device_rate > 0 and facts.device_free >= beyond:
            plan = copy_plan(facts, spend, "device", left=int(left))
            offer("device", plan, facts.bytes - left, 0.0, DEVICE_LATENCY + left / facts.device_rate)
    return tuple(found)


def choose(
    ranks: Sequence[RankFacts],
    budget: Budget,
    costs: SecondCosts,
    fixed: Interval,
    now: int = 1,
    keep: Mapping[int, str] | None = None,
) -> Choice:
    """The fewest steps, and the first rung for each rank that they can afford.

    Args:
        now: the interval in force: a fixed time keeps it where it is a tenth off at most.
        keep: a rung that a rank stays on where it is offered and within the budget, though an earlier one is too.
    """
    step = job_step([one.step for one in ranks])
    offered = {one.rank: options(one, costs) for one in ranks}
    least = max((min(one.cost for one in found) for found in offered.values()), default=0.0)
    present = max((one.cost for rank in ranks for one in offered[rank.rank] if one.rung == rank.rung), default=0.0)
    if fixed.auto:
        interval = steps_for(least, budget.planned, step)
    elif fixed.seconds and abs(now * step - fixed.seconds) <= 0.1 * fixed.seconds:
        interval = now
    else:
        interval = fixed.fixed_steps(step)
    affordable = budget.planned * step * interval * (1 + 1e-9)
    chosen = {}
    for rank, found in offered.items():
        within = [one for one in found if one.cost <= affordable]
        kept = [one for one in within if keep is not None and one.rung == keep.get(rank)]
        chosen[rank] = kept[0] if kept else within[0] if within else min(found, key=_cost)
    slowest = max(chosen, key=lambda rank: (chosen[rank].cost, -rank), default=-1)
    cost = chosen[slowest].cost if chosen else 0.0
    return Choice(interval, chosen, slowest, cost, least, present, step)


def _cost(option: Option) -> float:
    return option.cost
