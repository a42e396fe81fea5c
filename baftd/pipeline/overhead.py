"""What snapshots cost, measured by pairing steps with and without copying. Pure.

Of three steps in a row, the outer ones alike (both with copying, or both without) and the middle one the other way, the
pair is the logarithm of seconds with over seconds without, the outer two by their geometric mean: a drift of the step
time that is even over three steps cancels. Pairs come from probes (a snapshot left out at random) where every step is
snapshot, and from every snapshot where the interval is longer.

The estimate is the median of the pairs, its standard error 1.2533 * s / sqrt(n) (the median of normal samples), with s
from the median absolute deviation. Dropped is a pair whose outer steps differ from one another by more than five times
what outer steps usually do (and by more than 5 %): something else happened there. The rule does not look at the middle
step, so it favours neither answer.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Estimate", "OverheadEstimator"]


@dataclass(frozen=True)
class Estimate:
    """Slow-down of a step by a snapshot: seconds with / seconds without - 1, and its standard error."""

    value: float
    error: float
    pairs: int
    dropped: int


class OverheadEstimator:
    """Takes steps in their order; remembers the newest `pairs` pairs."""

    def __init__(self, pairs: int = 512) -> None:
        raise NotImplementedError

    def add(self, step: int, seconds: float, copied: bool) -> None:
        """One step of the job. A step that does not follow the last one begins anew; seconds <= 0 are no step."""
        raise NotImplementedError

    def estimate(self) -> Estimate | None:
        """None with fewer than 5 pairs."""
        raise NotImplementedError
