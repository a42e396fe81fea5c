"""What a rank did in a step, made of its events: operations, waits, windows, copying, and the gaps they leave. Pure.

Events come from a training process, so nothing in them is believed: a span that ends before it begins, or lies outside
its period, is left out and counted; one that reaches beyond is cut; windows that overlap are cut one after the other;
what is longer than `MOST` is refused whole. All times are seconds after the boundary that began the period.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from baftd.errors import FormatError
from baftd.pipeline.events import OPERATIONS, WAITS, Event, EventKind
from baftd.pipeline.operations import GapKind, Operation, Timed, gap_kinds

__all__ = ["MOST", "Copying", "ObservedGap", "Span", "Step", "Window", "covered", "merged"]

MOST = 1 << 15
"""Events of a step. A rank with 8 of 512 stages and 256 micro-batches has some 16,000."""

Span = tuple[float, float]
"""Begin and end."""


class Window(NamedTuple):
    """A span in which copying was granted."""

    ordinal: int
    waited: EventKind
    """For what the rank waited."""
    begin: float
    end: float
    gap: str
    """Kind of the gap it lies in: a `GapKind`, or "tail"."""
    before: Operation | None
    """The operation that follows; None: none does in this step."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


class Copying(NamedTuple):
    """A span in which the copy engine was at work."""

    kind: EventKind
    """COPY_INSIDE, COPY_OUTSIDE or COPY_FENCE."""
    ordinal: int
    """Of the window; -1: none; -2 - i: the i-th clock-anchored one."""
    begin: float
    end: float
    bytes: int


class ObservedGap(NamedTuple):
    """The time for which a rank waited before an operation, or at the end of the step."""

    kind: str
    seconds: float
    before: Operation | None


@dataclass(frozen=True)
class Step:
    """One period of one rank."""

    rank: int
    step: int
    begun: int
    """ns of CLOCK_MONOTONIC: the same on all ranks of a node."""
    seconds: float
    operations: tuple[Timed, ...]
    waits: tuple[tuple[EventKind, float, float], ...]
    windows: tuple[Window, ...]
    copying: tuple[Copying, ...]
    gaps: tuple[ObservedGap, ...]
    bad: int
    """Events that could not be."""

    @staticmethod
    def of(rank: int, step: int, begun: int, period: int, events: Iterable[Event]) -> Step:
        """The step that these events describe. `begun` and `period` are ns.

        Raises FormatError for a period that is not positive, or longer than a year, and for more than `MOST` events.
        """
        if not 0 < period < 32_000_000 * 10**9 or begun < 0:
            raise FormatError(f"rank {rank} reports a step {step} of {period} ns that began at {begun} ns.")
        operations: list[Timed] = []
        waits: list[tuple[EventKind, float, float]] = []
        granted: list[tuple[float, float, EventKind, int]] = []
        copying: list[Copying] = []
        bad = 0
        over = begun + period
        for count, event in enumerate(events):
            if count >= MOST:
                raise FormatError(f"rank {rank} reports more than {MOST} events for step {step}.")
            kind, stage, micro, first, last, amount = event
            if last < first or last < begun or first > over:
                bad += 1
                continue
            begin, end = (max(first, begun) - begun) * 1e-9, (min(last, over) - begun) * 1e-9
            if kind in OPERATIONS:
                operations.append(Timed(Operation(kind, stage, micro), begin, end))
            elif kind in WAITS or kind is EventKind.TAIL:
                waits.append((kind, begin, end))
            elif kind is EventKind.WINDOW:
                waited = _KINDS.get(stage)
                if waited is None:
                    bad += 1
                else:
                    granted.append((begin, end, waited, micro))
            elif kind in _COPYING:
                copying.append(Copying(kind, micro, begin, end, amount))
        operations.sort(key=_begin_of_timed)
        waits.sort(key=_begin_of_wait)
        granted.sort()
        copying.sort(key=_begin_of_copying)
        windows, cut = _windows(granted, operations)
        gaps = _gaps(operations, waits)
        return Step(rank, step, begun, period * 1e-9, tuple(operations), tuple(waits), windows, tuple(copying), gaps,
                    bad + cut)  # fmt: skip

    def copied_seconds(self, kind: EventKind) -> float:
        """Seconds for which the engine was at work, alone or with several threads."""
        return covered((one.begin, one.end) for one in self.copying if one.kind is kind)


def _windows(
    granted: list[tuple[float, float, EventKind, int]], operations: list[Timed]
) -> tuple[tuple[Window, ...], int]:
    """Windows in order, none over another. Their numbers are those that were reported if these rise, else their order.
    """
    begins = [one.begin for one in operations]
    kinds = gap_kinds([one.operation for one in operations])
    numbers = [number for _, _, _, number in granted]
    rising = all(0 <= one < MOST for one in numbers) and all(a < b for a, b in pairwise(numbers))
    found = []
    bad = 0
    at = 0.0
    for place, (begin, end, waited, number) in enumerate(granted):
        if begin < at:
            bad += 1
            begin, end = at, max(at, end)
        at = end
        following = bisect_left(begins, begin)
        before = operations[following].operation if following < len(operations) else None
        gap = _gap(waited, kinds[following] if before is not None else None, bool(operations))
        found.append(Window(number if rising else place, waited, begin, end, gap, before))
    return tuple(found), bad


def _gap(waited: EventKind, kind: GapKind | None, pipeline: bool) -> str:
    """The name of the gap in which a wait lies: before an operation of that kind, or (None) behind the last one."""
    if waited is EventKind.WAIT_DATA:
        return GapKind.DATA.value
    if kind is not None:
        return kind.value
    if waited is EventKind.WAIT_COLLECTIVE or pipeline:
        return GapKind.COLLECTIVE.value
    return "tail" if waited is EventKind.TAIL else GapKind.STEADY.value


def _gaps(operations: list[Timed], waits: list[tuple[EventKind, float, float]]) -> tuple[ObservedGap, ...]:
    """The time waited before each operation, and behind the last one. Time between operations in which nothing was
    waited for is Python's and the update's, and no bubble."""
    begins = [one.begin for one in operations]
    kinds = gap_kinds([one.operation for one in operations])
    collective_after = any(
        kind is EventKind.WAIT_COLLECTIVE and bisect_left(begins, begin) == len(begins) for kind, begin, _ in waits
    )
    spans: dict[tuple[str, int], list[Span]] = {}
    for kind, begin, end in waits:
        following = bisect_left(begins, begin)
        behind = following == len(begins)
        if behind and kind is EventKind.TAIL and collective_after:
            continue  # what was waited for in it stands there by itself
        name = _gap(kind, None if behind else kinds[following], bool(operations))
        spans.setdefault((name, following), []).append((begin, end))
    return tuple(
        ObservedGap(name, covered(found), operations[at].operation if at < len(operations) else None)
        for (name, at), found in sorted(spans.items(), key=lambda item: item[0][1])
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def covered(spans: Iterable[Span]) -> float:
    """Seconds that lie in at least one of the spans."""
    return sum(end - begin for begin, end in merged(spans))


_KINDS = {int(kind): kind for kind in EventKind}
_COPYING = frozenset({EventKind.COPY_INSIDE, EventKind.COPY_OUTSIDE, EventKind.COPY_FENCE})


def _begin_of_timed(timed: Timed) -> float:
    return timed.begin


def _begin_of_wait(wait: tuple[EventKind, float, float]) -> float:
    return wait[1]


def _begin_of_copying(one: Copying) -> float:
    return one.begin
