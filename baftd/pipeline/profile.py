"""What is known of a rank's steps: medians of the newest ones. Pure.

The first step of a rank counts only until three more are known: compilers, caches and allocators begin there, and it is
often slower than all that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import median
from typing import NamedTuple

from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import StageTimes
from baftd.pipeline.overhead import median_and_error
from baftd.pipeline.recent import Recent
from baftd.pipeline.timeline import Step, covered

__all__ = ["KEPT", "WAKE", "Basis", "GapSum", "Known", "Profile", "low"]

KEPT = 17
"""Steps that medians stand on: a lasting change shows after nine."""
WAKE = 100e-6
"""Seconds of a window that are lost until the copying thread is awake (measured: 50 to 90 us)."""
MOST_WINDOWS = 4096
"""That are told apart; what a step has beyond them counts together."""
MOST_BYTES = 1 << 44
"""Of a span of copying: 16 TiB, more than a node has memory."""
_MOST_KINDS = 4096
"""Pairs of stage and kind of operation."""
_SETTLED = 3


@dataclass(frozen=True)
class GapSum:
    """Gaps of one kind, per step: how many, their seconds, and the bytes copied in them per snapshot."""

    count: float
    seconds: float
    bytes: int


class Known(NamedTuple):
    """A median and its standard error (0 for a single value)."""

    value: float
    error: float


@dataclass(frozen=True)
class Basis:
    """What a plan was made from."""

    step: Known
    windows: Known
    rate: Known
    count: int
    """Windows of a step."""

    def drifted(self, now: Basis, by: float = 0.1) -> bool:
        """Whether steps, windows or rate have changed by more than that part, and by more than chance would have it
        (three standard errors)."""
        return abs(now.count - self.count) > by * max(now.count, self.count) or any(
            abs(new.value - old.value) > max(by * old.value, 3 * hypot(old.error, new.error), 1e-12)
            for old, new in ((self.step, now.step), (self.windows, now.windows), (self.rate, now.rate))
        )


class Profile:
    """Medians over the newest steps of a rank. Times are seconds, rates bytes a second; 0: nothing known."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.taken = 0
        """Steps taken in so far."""
        self.bad = 0
        """Events that could not be."""
        self.overruns = 0
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._windows: deque[tuple[float, ...]] = deque(maxlen=KEPT)
        self._beyond: deque[float] = deque(maxlen=KEPT)
        self._times: dict[tuple[int, EventKind], deque[float]] = {}
        self._gaps: deque[dict[str, tuple[int, float]]] = deque(maxlen=KEPT)
        self._copied_in: deque[dict[str, int]] = deque(maxlen=KEPT)
        self._rates: dict[EventKind, Recent[float]] = {kind: Recent(KEPT) for kind in _COPYING}
        self._copying: dict[EventKind, Recent[float]] = {kind: Recent(KEPT) for kind in _COPYING}
        self._held: dict[bool, Recent[float]] = {True: Recent(KEPT), False: Recent(KEPT)}
        self._fence: Recent[float] = Recent(KEPT)
        self._bytes: Recent[tuple[int, int, int]] = Recent(KEPT)
        self._detailed = 0
        self._cache: dict[str, object] = {}

    # ------------------------------------------------------------ taking in

    def add(
        self,
        seconds: float,
        *,
        copied: bool,
        in_windows: int = 0,
        outside: int = 0,
        at_fence: int = 0,
        fence: float = 0.0,
        held: float = 0.0,
        overruns: int = 0,
    ) -> None:
        """A period's sums. `held` is without the wait for bytes at the fence."""
        self._cache.clear()
        self.taken += 1
        if self.taken == _SETTLED + 1 and len(self._seconds) > _SETTLED - 1:
            self._seconds.popleft()
        self._seconds.append(seconds)
        self._held[copied].add(self.taken, held)
        self.overruns += overruns
        if copied:
            self._fence.add(self.taken, fence)
            self._bytes.add(self.taken, (in_windows, outside, at_fence))

    def look(self, step: Step, copied: bool) -> None:
        """A period's events."""
        self._cache.clear()
        self.bad += step.bad
        self._detailed += 1
        if self._detailed == _SETTLED + 1:
            if len(self._windows) == _SETTLED:
                self._windows.popleft()
                self._beyond.popleft()
            self._gaps.popleft()
            for known in self._times.values():
                if len(known) == _SETTLED:
                    known.popleft()
        if step.windows or copied:
            most = 1 + max((window.ordinal for window in step.windows if window.ordinal < MOST_WINDOWS), default=-1)
            lengths = [0.0] * most
            beyond = 0.0
            for window in step.windows:
                if window.ordinal < MOST_WINDOWS:
                    lengths[window.ordinal] += window.seconds
                else:
                    beyond += window.seconds
            self._windows.append(tuple(lengths))
            self._beyond.append(beyond)
        self._operations(step)
        sums: dict[str, tuple[int, float]] = {}
        for gap in step.gaps:
            count, seconds = sums.get(gap.kind, (0, 0.0))
            sums[gap.kind] = (count + 1, seconds + gap.seconds)
        self._gaps.append(sums)
        if copied:
            self._copies(step)

    def _operations(self, step: Step) -> None:
        lengths: dict[tuple[int, EventKind], list[float]] = {}
        for operation, begin, end in step.operations:
            lengths.setdefault((operation.stage, operation.kind), []).append(end - begin)
        for which, found in lengths.items():
            if which not in self._times and len(self._times) >= _MOST_KINDS:
                continue
            self._times.setdefault(which, deque(maxlen=KEPT)).append(median(found))

    def _copies(self, step: Step) -> None:
        gap_of = {window.ordinal: window.gap for window in step.windows}
        copied_in: dict[str, int] = {}
        for kind in _COPYING:
            # A span of more than a snapshot can have is no measurement.
            spans = [one for one in step.copying if one.kind is kind and 0 <= one.bytes <= MOST_BYTES]
            nbytes = sum(one.bytes for one in spans)
            seconds = covered((one.begin, one.end) for one in spans)
            self._copying[kind].add(self.taken, seconds)
            if seconds > WAKE / 2 and nbytes > 0:
                self._rates[kind].add(self.taken, nbytes / seconds)
            if kind is EventKind.COPY_INSIDE:
                for one in spans:
                    gap = gap_of.get(one.ordinal if one.ordinal >= 0 else -2 - one.ordinal, "tail")
                    copied_in[gap] = copied_in.get(gap, 0) + one.bytes
        self._copied_in.append(copied_in)

    # ------------------------------------------------------------ asking

    @property
    def steps(self) -> int:
        """Steps that the medians stand on."""
        return len(self._seconds)

    @property
    def looked_at(self) -> int:
        """Steps whose events have been taken in."""
        return self._detailed

    @property
    def has_operations(self) -> bool:
        """Whether operations of a pipeline were seen."""
        return bool(self._times)

    @property
    def snapshots(self) -> int:
        """Steps with a snapshot among the newest."""
        return len(self._bytes)

    @property
    def step_seconds(self) -> float:
        """Of a step."""
        return _median(self._seconds)

    def windows(self) -> tuple[float, ...]:
        """Seconds of each window of a step, in their order. Windows are told apart up to the number that most steps
        have."""
        known = self._cache.get("windows")
        if not isinstance(known, tuple):
            rows = self._windows
            count = int(_median([len(row) for row in rows]))
            known = tuple(median([row[at] if at < len(row) else 0.0 for row in rows]) for at in range(count))
            self._cache["windows"] = known
        return known

    def usable(self) -> tuple[float, ...]:
        """Seconds of all windows of a step in which the engine is awake, for each of the newest steps."""
        known = self._cache.get("usable")
        if not isinstance(known, tuple):
            known = tuple(
                sum(one - WAKE for one in row if one > WAKE) + beyond
                for row, beyond in zip(self._windows, self._beyond, strict=True)
            )
            self._cache["usable"] = known
        return known

    @property
    def window_seconds(self) -> float:
        """Of all windows of a step together."""
        return _median([sum(row) + beyond for row, beyond in zip(self._windows, self._beyond, strict=True)])

    def rate(self, kind: EventKind) -> float:
        """At which the engine copies: COPY_INSIDE, COPY_OUTSIDE or COPY_FENCE. What has not been seen for long is not
        known any more: or a rung that was bad once would never be tried again."""
        known = self._rates[kind]
        return _median(known) if known.known(self.taken) else 0.0

    def copying(self, kind: EventKind) -> float:
        """Seconds for which it is at work in a step with a snapshot."""
        return _median(self._copying[kind])

    @property
    def held(self) -> float:
        """Seconds for which a snapshot holds the training thread, beyond what a step without one does."""
        copied = self._held[True]
        if len(copied) < 3:
            return 0.0
        without = self._held[False]
        return max(0.0, median(copied) - (median(without) if without else 0.0))

    @property
    def held_seconds(self) -> float:
        """Seconds for which the training thread is held in a step with a snapshot."""
        return _median(self._held[True]) + _median(self._fence)

    @property
    def fence_seconds(self) -> float:
        """Of them those in which it waits for bytes."""
        return _median(self._fence)

    def bytes(self) -> tuple[int, int, int]:
        """Of a snapshot: inside windows, outside, at the fence."""
        inside, outside, fence = (int(_median([one[at] for one in self._bytes])) for at in range(3))
        return inside, outside, fence

    def gaps(self) -> Mapping[str, GapSum]:
        """Measured idle time by the kind of gap (`GapKind` values; "tail" for the wait before the fence)."""
        names = dict.fromkeys(name for row in self._gaps for name in row)
        copied = self._copied_in
        return {
            name: GapSum(
                median([row.get(name, _NONE)[0] for row in self._gaps]),
                median([row.get(name, _NONE)[1] for row in self._gaps]),
                int(_median([row.get(name, 0) for row in copied])),
            )
            for name in names
        }

    def stage_times(self) -> Mapping[int, StageTimes]:
        """Median seconds of the operations of each stage that the rank holds."""
        found: dict[int, dict[EventKind, float]] = {}
        for (stage, kind), lengths in self._times.items():
            found.setdefault(stage, {})[kind] = median(lengths)
        return {
            stage: StageTimes(
                forward=times.get(EventKind.FORWARD, 0.0),
                backward=times.get(EventKind.BACKWARD, 0.0),
                input_grad=times.get(EventKind.INPUT_GRAD, 0.0),
                weight_grad=times.get(EventKind.WEIGHT_GRAD, 0.0),
                reduce=times.get(EventKind.REDUCE, 0.0),
            )
            for stage, times in found.items()
        }

    def basis(self) -> Basis:
        """What a plan of now stands on."""
        windows = [sum(row) + beyond for row, beyond in zip(self._windows, self._beyond, strict=True)]
        return Basis(
            _known(self._seconds), _known(windows), _known(self._rates[EventKind.COPY_INSIDE]), len(self.windows())
        )


def low(values: Iterable[float]) -> float:
    """A value that nine in ten exceed; the least one of fewer than ten, 0 of none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 10] if ordered else 0.0


_COPYING = (EventKind.COPY_INSIDE, EventKind.COPY_OUTSIDE, EventKind.COPY_FENCE)
_NONE = (0, 0.0)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _known(values: Sequence[float]) -> Known:
    return Known(*median_and_error(values)) if len(values) > 1 else Known(_median(values), 0.0)
