"""How many steps from one snapshot to the next, and how many seconds from one durable checkpoint to the next.

    steps_for    enough steps that what a snapshot costs stays within the budget
    young, daly  the optimum between the cost of checkpoints and the work that a failure loses
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from baftd.errors import UsageError

__all__ = ["LONGEST", "Interval", "daly", "steps_for", "young"]

LONGEST = 1 << 20
"""Steps; no interval is longer. A snapshot that costs more than this many steps may spend is not worth a plan."""


@dataclass(frozen=True)
class Interval:
    """From one snapshot to the next: as few steps as the budget allows (auto), or as the user has said."""

    steps: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 0 or not 0 <= self.seconds < float("inf") or (self.steps and self.seconds):
            raise UsageError(f"an interval is auto, or steps, or seconds, not {self.steps} steps, {self.seconds} s.")

    @property
    def auto(self) -> bool:
        """Whether the ladder decides."""
        return not self.steps and not self.seconds

    def fixed_steps(self, step_seconds: float) -> int:
        """Steps of a fixed interval; 0: auto. Seconds are rounded down: never less often than asked for."""
        if self.seconds:
            return max(1, min(LONGEST, int(self.seconds / step_seconds))) if step_seconds > 0 else 1
        return min(LONGEST, self.steps)


def steps_for(cost: float, budget: float, step_seconds: float) -> int:
    """The fewest steps for which a snapshot of `cost` seconds stays within `budget` (a part of the step time).

    ceil(cost / (budget * step)); at least 1, at most `LONGEST`, also where nothing is known of the step."""
    if cost <= 0:
        return 1
    room = budget * step_seconds
    if room <= 0 or cost / room >= LONGEST:
        return LONGEST
    # A quotient that is whole but for rounding (0.03 / 0.01 is 3.0000000000000004 somewhere) is whole.
    return max(1, ceil(cost / room - 1e-9))


def young(write_seconds: float, mtbf_seconds: float) -> float:
    """Seconds between checkpoints that lose least, to first order: sqrt(2 * write * mtbf).

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974."""
    _check(write_seconds, mtbf_seconds)
    return sqrt(2 * write_seconds * mtbf_seconds)


def daly(write_seconds: float, mtbf_seconds: float) -> float:
    """The same to higher order; where a write takes twice the mean time between failures or longer, that time itself.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, (37):
    sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2 M. The time that a restart takes does not move
    the optimum of that model."""
    _check(write_seconds, mtbf_seconds)
    if write_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    part = write_seconds / (2 * mtbf_seconds)
    return sqrt(2 * write_seconds * mtbf_seconds) * (1 + sqrt(part) / 3 + part / 9) - write_seconds


def _check(write_seconds: float, mtbf_seconds: float) -> None:
    if not (0 < write_seconds < float("inf") and 0 < mtbf_seconds < float("inf")):
        raise UsageError(f"a write of {write_seconds} s and {mtbf_seconds} s between failures give no interval.")
