"""When does each operation run? Schedule and times in, timeline out; pure and exact."""

from __future__ import annotations

from itertools import islice
from math import isfinite

from baftd.errors import UsageError
from baftd.pipeline.links import KINDS, Links
from baftd.pipeline.operations import Schedule, Timed, Timeline, Times

__all__ = ["simulate"]

_MOST_STEPS = 64
"""Steps after which a period that still changes is taken as it is."""
_SAME = 1e-9
"""Periods that differ by less than this part are the same: additions in another order round differently."""


def simulate(schedule: Schedule, times: Times, steps: int | None = None) -> Timeline:
    """The timeline of one step in the steady state. steps: how many are simulated, the last is reported [1 with a
    barrier, since then all steps are alike; else until the period repeats].

    An operation begins as soon as the one before it on its rank has ended and its input has arrived. Raises UsageError,
    naming rank and operation, where ranks would wait for each other for ever, and where times do not fit."""
    _check(schedule, times, steps)
    links = schedule.links
    costs = [stage.of(kind) for stage in times.stages for kind in KINDS]
    begins: list[float] = [0] * schedule.ranks
    most = (1 if times.barrier else _MOST_STEPS) if steps is None else steps
    former: list[float] = []
    for number in range(1, most + 1):
        start, end = _walk(links, costs, times, begins)
        ends = [end[last] for last in links.last]
        if times.barrier:
            ends = [max(ends, default=0)] * schedule.ranks
        ends = [one + times.tail for one in ends]
        periods = [after - before for after, before in zip(ends, begins, strict=True)]
        if number == most or (steps is None and _alike(periods, former)):
            break
        begins, former = ends, periods
    zero = min(begins, default=0)
    return Timeline(
        schedule,
        times,
        tuple(
            tuple(
                Timed(operation, start[node] - zero, end[node] - zero)
                for operation, node in zip(order, nodes, strict=True)
            )
            for order, nodes in zip(schedule.order, links.operations, strict=True)
        ),
        tuple(one - zero for one in begins),
        tuple(one - zero for one in ends),
    )


def _walk(links: Links, costs: list[float], times: Times, begins: list[float]) -> tuple[list[float], list[float]]:
    """Begin and end of every node of one step that begins as said on each rank."""
    start, end = list(begins), list(begins)
    took_off = times.send
    arrival = times.send + times.receive
    ranks = len(begins)
    nodes = zip(links.before, links.sender, links.asker, links.cost, strict=True)
    for before, sender, asker, cost in islice(nodes, ranks, None):
        at = end[before]
        if sender >= 0:
            there = end[sender]
            if asker >= 0 and end[asker] > there:
                there = end[asker]
            there = there + (arrival if cost >= 0 else took_off)
            if there > at:
                at = there
        start.append(at)
        end.append(at + costs[cost] if cost >= 0 else at)
    return start, end


def _alike(periods: list[float], former: list[float]) -> bool:
    """All ranks have the period they had in the step before, and the same."""
    if not former:
        return False
    most = max(*periods, *former)
    return most - min(*periods, *former) <= _SAME * most


def _check(schedule: Schedule, times: Times, steps: int | None) -> None:
    if len(times.stages) != schedule.stages:
        raise UsageError(
            f"schedule {schedule.name} has {schedule.stages} stages, but times of {len(times.stages)} were given."
        )
    if steps is not None and steps < 1:
        raise UsageError(f"schedule {schedule.name}: {steps} steps cannot be simulated.")
    durations = [times.send, times.receive, times.tail]
    durations += [stage.of(kind) for stage in times.stages for kind in KINDS]
    for seconds in durations:
        if not (isfinite(seconds) and seconds >= 0):
            raise UsageError(f"schedule {schedule.name}: {seconds} seconds are no duration.")
