"""What copying costs those who compute meanwhile, seen at their operations. Pure.

Whole steps scatter by some percent, single operations of the same kind less, and in one step some run beside a copy and
some do not: so the slow-down of operations shows within a few steps what pairs of steps (`overhead.py`) show in
hundreds. It sees nothing but operations: what copying does to messages or to Python between them only the pairs see.

An operation's usual length is the median of those of the same rank, stage, kind and micro-batch with no copying on the
node meanwhile. Beside a copy it loses time; the loss per second of copying it met, averaged over the operations, times
the seconds in which somebody computed beside a copy, is what the step lost: ranks that are slowed at the same time
delay it once. Divided by the seconds that a rank copied, it is the cost of a second of copying.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import sqrt
from statistics import median
from typing import NamedTuple

from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import Operation
from baftd.pipeline.overhead import median_and_error
from baftd.pipeline.recent import FORGOTTEN
from baftd.pipeline.timeline import Span, Step, merged

__all__ = ["Interference", "SecondCost"]

_KEPT = 65
"""Steps, and lengths of each operation."""
_LEAST_KNOWN = 3
"""Undisturbed runs of an operation from which its usual length is known."""
_FEWEST = 4
"""Steps from which there is an answer."""
_TOUCHED = 0.01
"""Part of an operation's length for which copying may go on without counting."""
_MOST_OPERATIONS = 1 << 17


class SecondCost(NamedTuple):
    """Seconds that a step loses by a second of copying on each rank, its standard error, and the steps behind it."""

    value: float
    error: float
    steps: int


class Interference:
    """Takes whole steps: all ranks of the node."""

    def __init__(self) -> None:
        self._usual: dict[tuple[int, Operation], deque[float]] = {}
        self._samples: dict[EventKind, deque[float]] = {
            EventKind.COPY_INSIDE: deque(maxlen=_KEPT),
            EventKind.COPY_OUTSIDE: deque(maxlen=_KEPT),
        }
        self._seen = dict.fromkeys(self._samples, 0)
        """Step of the newest sample."""
        self._known = dict.fromkeys(self._samples, 0)
        """Undisturbed runs behind the usual length of the operation that has fewest, of those beside the last copy."""

    def add(self, steps: Sequence[Step]) -> None:
        """One step as all ranks of the node saw it."""
        if not steps:
            return
        base = min(one.begun for one in steps)
        number = steps[0].step
        for kind, samples in self._samples.items():
            if number - self._seen[kind] > FORGOTTEN:
                samples.clear()
        shifts = [(one.begun - base) * 1e-9 for one in steps]
        copies = {
            kind: _Cover(
                (shift + span.begin, shift + span.end)
                for one, shift in zip(steps, shifts, strict=True)
                for span in one.copying
                if span.kind is kind
            )
            for kind in self._samples
        }
        runs: dict[EventKind, int] = {}
        lost = dict.fromkeys(copies, 0.0)
        known = dict.fromkeys(copies, 0.0)
        met = dict.fromkeys(copies, 0.0)
        computing: list[Span] = []
        for one, shift in zip(steps, shifts, strict=True):
            for operation, begin, end in one.operations:
                begin, end = begin + shift, end + shift
                computing.append((begin, end))
                beside = {kind: cover.of(begin, end) for kind, cover in copies.items()}
                self._operation((one.rank, operation), end - begin, beside, lost, known, met, runs)
        busy = merged(computing)
        for kind, samples in self._samples.items():
            copied = sum(one.copied_seconds(kind) for one in steps) / len(steps)
            if copied <= 0 or not busy:
                continue
            if met[kind] < _TOUCHED * copied:
                self._seen[kind] = number
                samples.append(0.0)  # nobody computed beside it
                self._known[kind] = _KEPT
            elif known[kind] >= met[kind] / 2:
                together = sum(copies[kind].of(begin, end) for begin, end in busy)
                self._seen[kind] = number
                samples.append(lost[kind] / known[kind] * together / copied)
                self._known[kind] = runs.get(kind, 0)

    def _operation(
        self,
        which: tuple[int, Operation],
        seconds: float,
        beside: dict[EventKind, float],
        lost: dict[EventKind, float],
        known: dict[EventKind, float],
        met: dict[EventKind, float],
        runs: dict[EventKind, int],
    ) -> None:
        """One operation: undisturbed it shows its usual length, beside a copy what it lost."""
        usual = self._usual.get(which)
        touched = sum(beside.values())
        if touched <= _TOUCHED * seconds:
            if usual is None:
                if len(self._usual) >= _MOST_OPERATIONS:
                    return
                usual = self._usual[which] = deque(maxlen=_KEPT)
            usual.append(seconds)
            return
        for kind, share in beside.items():
            met[kind] += share
        if usual is None or len(usual) < _LEAST_KNOWN:
            return
        loss = seconds - median(usual)
        for kind, share in beside.items():
            if share > 0:
                runs[kind] = min(runs.get(kind, _KEPT), len(usual))
            known[kind] += share
            lost[kind] += loss * share / touched

    def cost(self, kind: EventKind) -> SecondCost | None:
        """Of COPY_INSIDE or COPY_OUTSIDE; None: too few steps with and without copying, or no operations."""
        samples = self._samples[kind]
        if len(samples) < _FEWEST:
            return None
        value, error = median_and_error(samples)
        # Usual lengths scatter like what is compared with them, and there are `known` of each.
        return SecondCost(value, error * sqrt(1 + len(samples) / max(1, self._known[kind])), len(samples))

    def forget(self, rank: int) -> None:
        """A rank has left, or is another one now."""
        for which in [one for one in self._usual if one[0] == rank]:
            del self._usual[which]


class _Cover:
    """How much of any span is covered by others; each question costs the logarithm of their number."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = merged(spans)
        self._begins = [begin for begin, _ in self.spans]
        self._before = list(accumulate((end - begin for begin, end in self.spans), initial=0.0))

    def _until(self, moment: float) -> float:
        at = bisect_right(self._begins, moment)
        if at == 0:
            return 0.0
        begin, end = self.spans[at - 1]
        return self._before[at - 1] + min(moment, end) - begin

    def of(self, begin: float, end: float) -> float:
        """Seconds of begin..end that are covered."""
        return self._until(end) - self._until(begin)
