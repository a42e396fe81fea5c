"""What snapshots cost, measured by pairing steps with and without copying. Pure.

Of four steps in a row, where only the second is the other way (with copying among steps without, or without among steps
with), a pair is the logarithm of the seconds of the inner two over those of the outer two: the second step shows what
copying costs, the third what the daemon does with a snapshot afterwards, and a drift of the step time that is even over
the four cancels. Where snapshots lie closer, three steps make a pair, the outer two by their geometric mean; what comes
afterwards is then on both sides and does not show. Pairs come from probes (a snapshot left out at random) where every
step is snapshot, and from every snapshot where the interval is longer. No step is part of two pairs, so that they are
independent and the error is not taken for too small.

The estimate is the median of the pairs, its standard error 1.2533 * s / sqrt(n) (the median of normal samples), with s
from the median absolute deviation. Dropped is a pair whose outer steps differ from one another by more than five times
what outer steps usually do (and by more than 5 %): something else happened there. The rule does not look at the inner
steps, so it favours neither answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, hypot, isfinite, log, sqrt
from statistics import median

__all__ = ["FEWEST", "Estimate", "OverheadEstimator", "median_and_error"]

FEWEST = 5
"""Pairs from which there is an estimate."""
_USUAL = 5.0
"""Times the usual difference of outer steps from which a pair is dropped."""
_NEWEST, _ANOTHER = 9, 3.5
"""Newest pairs that overrule older ones, and by how many standard errors of the difference."""
_ALWAYS_USUAL = 0.05
"""A relative difference that never drops a pair."""


@dataclass(frozen=True)
class Estimate:
    """Slow-down by a snapshot: seconds with / seconds without - 1, and its standard error."""

    value: float
    error: float
    pairs: int
    dropped: int


def median_and_error(samples: Sequence[float]) -> tuple[float, float]:
    """The median, and its standard error: 1.2533 * s / sqrt(n), s = 1.4826 * n / (n - 0.8) * median |x - median|.

    The factor for few samples is that of Croux and Rousseeuw (1992). ValueError for less than two samples."""
    count = len(samples)
    if count < 2:
        raise ValueError(f"{count} samples have no standard error")
    middle = median(samples)
    spread = 1.4826 * count / (count - 0.8) * median(abs(one - middle) for one in samples)
    return middle, 1.2533 * spread / sqrt(count)


class OverheadEstimator:
    """Takes steps in their order; remembers the newest `pairs` pairs."""

    def __init__(self, pairs: int = 512) -> None:
        self._pairs: deque[float] = deque(maxlen=pairs)
        self._differences: deque[float] = deque(maxlen=64)
        self._recent: list[tuple[int, float, bool]] = []
        self._dropped = 0
        self._estimate: Estimate | None = None

    def add(self, step: int, seconds: float, copied: bool) -> None:
        """One step of the job. A step that does not follow the last one begins anew; seconds <= 0 are no step."""
        recent = self._recent
        if recent and step != recent[-1][0] + 1:
            recent.clear()
        if not (seconds > 0 and isfinite(seconds)):
            recent.clear()
            return
        recent.append((step, log(seconds), copied))
        if len(recent) < 4:
            return
        (_, first, outer), (_, second, inner), (_, third, like), (_, fourth, last) = recent
        if outer != like or inner == outer:
            del recent[0]
            return
        if last == like:
            recent.clear()
            difference, excess = abs(first - fourth), second + third - first - fourth
        else:
            del recent[:3]
            difference, excess = abs(first - third), second - (first + third) / 2
        usual = max(_ALWAYS_USUAL, _USUAL * median(self._differences)) if self._differences else _ALWAYS_USUAL * 4
        self._differences.append(difference)
        if difference > usual:
            self._dropped += 1
            return
        self._pairs.append(excess if inner else -excess)
        self._estimate = None
        self._drop_what_was()

    def _drop_what_was(self) -> None:
        """Where the newest pairs clearly say something else than those before, what was before counts no more: at an
        interval of many steps it would take hours to be outnumbered."""
        if len(self._pairs) < 3 * _NEWEST:
            return
        pairs = list(self._pairs)
        before, newest = pairs[:-_NEWEST], pairs[-_NEWEST:]
        middle, error = median_and_error(before)
        if abs(median(newest) - middle) > _ANOTHER * error * hypot(1, sqrt(len(before) / _NEWEST)):
            self._pairs.clear()
            self._pairs.extend(newest)

    def estimate(self) -> Estimate | None:
        """None with fewer than `FEWEST` pairs."""
        count = len(self._pairs)
        if count < FEWEST:
            return None
        if self._estimate is None or self._estimate.dropped != self._dropped:
            middle, error = median_and_error(self._pairs)
            self._estimate = Estimate(expm1(middle), error * (1 + expm1(middle)), count, self._dropped)
        return self._estimate

    @property
    def pairs(self) -> int:
        """Pairs that the estimate stands on."""
        return len(self._pairs)

    def forget(self) -> None:
        """Begin anew: what is copied, and when, has changed."""
        self._pairs.clear()
        self._recent.clear()
        self._estimate = None
