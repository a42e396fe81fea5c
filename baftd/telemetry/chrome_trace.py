"""What ranks and daemons did, in Chrome's Trace Event Format, which Perfetto (https://ui.perfetto.dev) opens. Pure.

A process stands for a node. Each rank has tracks for its steps, for what its training thread did, for the time between
its operations, for the windows that were granted and for what the copy engine did in them; the daemon has one for each
kind of its work. Slices of one track always lie inside or beside one another, as viewers want them: what overlaps
otherwise gets a further track. Times are microseconds after the first thing shown, in thousandths.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from baftd.pipeline.events import OPERATIONS, WAITS, Event, EventKind
from baftd.pipeline.operations import Operation, gap_kinds
from baftd.telemetry.spans import Span

__all__ = ["NodeTrace", "Period", "TraceDocument", "TraceEvent", "chrome_trace"]

NO_LIMIT = (1 << 52) - 1
"""From so many bytes on a window may copy as much as it can: plans say 2^53 - 1, engines 2^64 - 1, or what is left."""

Number = int | float | str | bool
_NAMES = {
    EventKind.FORWARD: "F",
    EventKind.BACKWARD: "B",
    EventKind.INPUT_GRAD: "I",
    EventKind.WEIGHT_GRAD: "W",
    EventKind.REDUCE: "reduce",
    EventKind.WAIT_RECV: "wait: receive",
    EventKind.WAIT_SEND: "wait: send",
    EventKind.WAIT_MIXED: "wait: send and receive",
    EventKind.WAIT_COLLECTIVE: "wait: collective",
    EventKind.WAIT_DATA: "wait: data",
    EventKind.TAIL: "tail",
    EventKind.SCHEDULE: "schedule",
    EventKind.BOUNDARY: "boundary",
    EventKind.FENCE: "fence",
    EventKind.COPY_INSIDE: "copy in window",
    EventKind.COPY_OUTSIDE: "copy outside windows",
    EventKind.COPY_FENCE: "copy at the fence",
}
_CATEGORIES = {EventKind.BOUNDARY: "checkpoint", EventKind.FENCE: "checkpoint"}
_COPYING = frozenset({EventKind.COPY_INSIDE, EventKind.COPY_OUTSIDE, EventKind.COPY_FENCE})
_DOING = frozenset(_NAMES) - _COPYING
_OF_A_STAGE = OPERATIONS - {EventKind.REDUCE}


class Period(NamedTuple):
    """What one rank did between two boundaries. Times are ns of CLOCK_MONOTONIC."""

    rank: int
    step: int
    begun: int
    period: int
    events: Sequence[Event]
    copied: bool = False
    """A snapshot of the step was being copied."""
    plan: int = 0
    """Generation of the copy plan in force."""


class NodeTrace(NamedTuple):
    """What happened on one node."""

    node: str
    periods: Sequence[Period]
    spans: Sequence[Span]
    """The daemon's own work."""


class TraceEvent(TypedDict, total=False):
    """One entry of `traceEvents`. `ph`: M (name), X (slice), C (counter)."""

    name: str
    cat: str
    ph: str
    ts: float
    dur: float
    pid: int
    tid: int
    args: dict[str, Number]


class TraceDocument(TypedDict):
    """The whole file."""

    traceEvents: list[TraceEvent]
    displayTimeUnit: str
    otherData: dict[str, Number]


@dataclass
class _Slice:
    begin: int
    end: int
    name: str
    category: str
    args: dict[str, Number] = field(default_factory=dict)


def chrome_trace(job: str, nodes: Sequence[NodeTrace]) -> TraceDocument:
    """The document for these nodes, to be written as JSON. Events are in the order of their time, names first.

    Whatever the records say, no slice is of negative length and none begins before 0."""
    moments = [period.begun for node in nodes for period in node.periods]
    moments += [event.begin for node in nodes for period in node.periods for event in period.events]
    moments += [span.begun for node in nodes for span in node.spans]
    writer = _Writer(min(moments, default=0))
    for number, node in enumerate(nodes, 1):
        writer.name_process(number, f"node {node.node}")
        for rank in sorted({period.rank for period in node.periods}):
            _write_rank(writer, number, rank, [period for period in node.periods if period.rank == rank])
        for what in sorted({span.what for span in node.spans}):
            writer.track(number, f"daemon: {what}", [_of_span(span) for span in node.spans if span.what == what])
    steps = [period.step for node in nodes for period in node.periods]
    return {
        "traceEvents": writer.events(),
        "displayTimeUnit": "ms",
        "otherData": {"job": job, "first_step": min(steps, default=0), "last_step": max(steps, default=0)},
    }


class _Writer:
    def __init__(self, origin: int) -> None:
        self._origin = origin
        self._names: list[TraceEvent] = []
        self._events: list[TraceEvent] = []
        self._tracks = 0

    def events(self) -> list[TraceEvent]:
        return [*self._names, *sorted(self._events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))]

    def name_process(self, pid: int, name: str) -> None:
        self._name("process_name", pid, 0, {"name": name})
        self._name("process_sort_index", pid, 0, {"sort_index": pid})

    def _name(self, what: str, pid: int, tid: int, args: dict[str, Number]) -> None:
        self._names.append({"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args})

    def track(self, pid: int, name: str, slices: Iterable[_Slice]) -> None:
        """A track, and further ones for what cannot lie in it."""
        for lane in _lanes(slices):
            self._tracks += 1
            self._name("thread_name", pid, self._tracks, {"name": name})
            self._name("thread_sort_index", pid, self._tracks, {"sort_index": self._tracks})
            for one in lane:
                self._events.append(
                    {
                        "name": one.name,
                        "cat": one.category,
                        "ph": "X",
                        "ts": self._micros(one.begin - self._origin),
                        "dur": self._micros(one.end - one.begin),
                        "pid": pid,
                        "tid": self._tracks,
                        "args": one.args,
                    }
                )

    def counter(self, pid: int, name: str, unit: str, values: Iterable[tuple[int, float]]) -> None:
        for at, value in values:
            ts = self._micros(at - self._origin)
            self._events.append({"name": name, "ph": "C", "ts": ts, "pid": pid, "tid": 0, "args": {unit: value}})

    @staticmethod
    def _micros(nanoseconds: int) -> float:
        return nanoseconds / 1000


def _lanes(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """The slices, each in the first lane in which it lies inside or beside all others."""
    lanes: list[tuple[list[_Slice], list[int]]] = []
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        for found in lanes:
            ends = found[1]  # of what is open
            while ends and ends[-1] <= one.begin:
                ends.pop()
            if not ends or one.end <= ends[-1]:
                break
        else:
            found = ([], [])
            lanes.append(found)
        found[0].append(one)
        found[1].append(one.end)
    return [lane for lane, _ in lanes]


# ---------------------------------------------------------------- one rank


def _write_rank(writer: _Writer, pid: int, rank: int, periods: list[Period]) -> None:
    name = f"rank {rank}"
    doing: list[_Slice] = []
    gaps: list[_Slice] = []
    windows: list[_Slice] = []
    copying: list[_Slice] = []
    steps: list[_Slice] = []
    for period in periods:
        end = period.begun + max(0, period.period)
        args: dict[str, Number] = {"copied": period.copied, "copy_plan": period.plan}
        steps.append(_Slice(period.begun, end, f"step {period.step}", "step", args))
        events = [event._replace(end=max(event.begin, event.end)) for event in period.events]
        copies = [event for event in events if event.kind in _COPYING]
        copying += [_of_copy(event, period.step) for event in copies]
        windows += _windows([event for event in events if event.kind is EventKind.WINDOW], copies, period.step)
        doing += [_of_event(event, period.step) for event in events if event.kind in _DOING]
        gaps += _gaps(period, events, end)
    writer.track(pid, f"{name}: steps", steps)
    writer.track(pid, name, doing)
    writer.track(pid, f"{name}: between operations", gaps)
    writer.track(pid, f"{name}: windows", windows)
    writer.track(pid, f"{name}: copy engine", copying)
    writer.counter(pid, f"{name} copies", "MB/s", _rates(copying))


def _of_event(event: Event, step: int) -> _Slice:
    kind = event.kind
    name = _NAMES[kind]
    args: dict[str, Number] = {"step": step}
    if event.stage >= 0:
        args["stage"] = event.stage
    if event.micro >= 0:
        args["micro_batch"] = event.micro
    if kind in _OF_A_STAGE:
        name = f"{name}{event.micro} s{event.stage}"
    if kind is EventKind.FENCE:
        args["bytes_left"] = event.amount
    elif event.amount:
        args["bytes"] = event.amount
    category = "operation" if kind in OPERATIONS else "wait" if kind in WAITS else _CATEGORIES.get(kind, "schedule")
    return _Slice(event.begin, event.end, name, category, args)


def _of_copy(event: Event, step: int) -> _Slice:
    args: dict[str, Number] = {"step": step, "bytes": event.amount}
    if event.micro >= 0:
        args["window"] = event.micro
    if event.end > event.begin:
        args["MB/s"] = round(event.amount * 1e3 / (event.end - event.begin), 1)
    return _Slice(event.begin, event.end, _NAMES[event.kind], "copy", args)


def _windows(windows: list[Event], copies: list[Event], step: int) -> list[_Slice]:
    """Windows with what was granted, what was used of it, and by how long the engine overran the end."""
    found = []
    for window in windows:
        inside = [one for one in copies if one.kind is EventKind.COPY_INSIDE and one.micro == window.micro >= 0]
        used = sum(one.amount for one in inside)
        overrun = max((one.end - window.end for one in inside), default=0)
        args: dict[str, Number] = {"step": step, "window": window.micro, "used": used}
        if window.amount < NO_LIMIT:
            args["granted"] = window.amount
            args["left"] = max(0, window.amount - used)
        else:
            args["granted"] = "no limit"
        if overrun > 0:
            args["overrun_us"] = overrun / 1000
        waited = _NAMES.get(_KINDS.get(window.stage, EventKind.WINDOW), "window").removeprefix("wait: ")
        name = f"window {window.micro}: {waited}" + (" (overrun)" if overrun > 0 else "")
        found.append(_Slice(window.begin, window.end, name, "window", args))
    return found


_KINDS = {int(kind): kind for kind in EventKind}


def _gaps(period: Period, events: list[Event], end: int) -> list[_Slice]:
    """The time in which no operation ran, from the boundary to the first one, between them, and to the next boundary.

    Named by the kind of gap before the operation that follows; `waited_us` of it was spent in waits."""
    operations = sorted((event for event in events if event.kind in OPERATIONS), key=lambda event: event.begin)
    if not operations:
        return []
    kinds = gap_kinds([Operation(one.kind, one.stage, one.micro) for one in operations])
    waits = _merged([(event.begin, event.end) for event in events if event.kind in WAITS])
    found = []
    at = period.begun
    for following in range(len(operations) + 1):
        last = following == len(operations)
        until = end if last else operations[following].begin
        if until > at:
            name = "after the last operation" if last else str(kinds[following])
            args: dict[str, Number] = {"step": period.step, "waited_us": _overlap(waits, at, until) / 1000}
            if not last:
                args["before"] = _of_event(operations[following], period.step).name
            found.append(_Slice(at, until, name, "gap", args))
        if not last:
            at = max(at, operations[following].end)
    return found


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _overlap(spans: list[tuple[int, int]], begin: int, end: int) -> int:
    """Length of what merged spans have in [begin, end)."""
    at = max(0, bisect_left(spans, (begin, begin)) - 1)
    total = 0
    for first, last in spans[at:]:
        if first >= end:
            break
        total += max(0, min(last, end) - max(first, begin))
    return total


def _rates(copying: list[_Slice]) -> list[tuple[int, float]]:
    """(moment, MB/s) at every change."""
    found: list[tuple[int, float]] = []
    for one in sorted(copying, key=lambda one: (one.begin, one.end)):
        rate = one.args.get("MB/s")
        if isinstance(rate, int | float):
            found += [(one.begin, float(rate)), (one.end, 0.0)]
    return found


# ---------------------------------------------------------------- the daemon


def _of_span(span: Span) -> _Slice:
    args: dict[str, Number] = {}
    if span.rank >= 0:
        args["rank"] = span.rank
    if span.step:
        args["step"] = span.step
    if span.bytes:
        args["bytes"] = span.bytes
        if span.duration > 0:
            args["MB/s"] = round(span.bytes * 1e3 / span.duration, 1)
    name = span.what + (f" step {span.step}" if span.step else "") + (f" rank {span.rank}" if span.rank >= 0 else "")
    return _Slice(span.begun, span.begun + max(0, span.duration), name, "daemon", args)
