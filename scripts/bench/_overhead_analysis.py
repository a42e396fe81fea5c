"""From the records of a job's ranks to figures: overhead of each contestant, bytes inside windows, gaps. Pure.

A step's time is the mean over the ranks, from its boundary to the next. A step counts only if all ranks had the same
contestant, and if other processes used at most FOREIGN cores meanwhile. It is compared with its surroundings: the
median of the plain steps (no contestant, none in the step before) at most AROUND steps away. What baftd costs is the
excess of a step with a snapshot after a step with one, or, where steps between them are left out, the excess of the
step with a snapshot and of the one after it, in which the daemon verifies and commits; divided by the interval.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baftd.pipeline.events import Event, EventKind

__all__ = ["Overhead", "Series", "gap_errors", "inside_share", "measured_gaps"]

FOREIGN = 0.2
AROUND = 8
_OTHERS = frozenset({"dcp_process", "dlrover"})
"""Contestants that work in processes of their own, which count as foreign."""
_COPIES = frozenset({EventKind.COPY_INSIDE, EventKind.COPY_OUTSIDE, EventKind.COPY_FENCE})


@dataclass(frozen=True)
class Overhead:
    """In percent of a step, with its standard error. `pairs`: steps it stands on."""

    value: float
    error: float
    pairs: int


@dataclass
class Series:
    """Steps of a job, each with its contestant and its excess over its surroundings."""

    seconds: list[float]
    modes: list[str]
    clean: list[bool]
    excess: list[float | None]
    dropped: int
    held_ms: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, ranks: Sequence[dict[str, Any]], skip: int) -> Series:
        """Of the records of all ranks, without the first `skip` steps."""
        rows = list(zip(*(rank["steps"] for rank in ranks), strict=True))
        seconds = [statistics.fmean(one["end"] - one["begin"] for one in row) for row in rows]
        modes = [row[0]["mode"] if len({one["mode"] for one in row}) == 1 else "mixed" for row in rows]
        clean = []
        for number, (row, time, mode) in enumerate(zip(rows, seconds, modes, strict=True)):
            own = sum(one["cpu"] for one in row) + row[0].get("daemon", 0.0)
            foreign = (statistics.fmean(one["busy"] for one in row) - own) / time
            clean.append(number >= skip and mode != "mixed" and (foreign <= FOREIGN or mode in _OTHERS))
        plain = [n for n in range(1, len(rows)) if clean[n] and modes[n] == "none" and modes[n - 1] != "ours"]
        excess: list[float | None] = []
        for number, time in enumerate(seconds):
            near = plain[bisect_left(plain, number - AROUND) : bisect_right(plain, number + AROUND)]
            around = [seconds[n] for n in near if n != number]
            good = clean[number] and len(around) >= 2
            excess.append(time / statistics.median(around) - 1 if good else None)
        held = [one["held_ms"] for row in rows[skip:] for one in row if "held_ms" in one]
        return cls(seconds, modes, clean, excess, sum(not one for one in clean[skip:]), held)

    def baseline(self) -> tuple[float, float]:
        """Median of the steps without contestant in seconds, and the scatter (standard deviation) of their excess."""
        plain = [s for s, m, c in zip(self.seconds, self.modes, self.clean, strict=True) if m == "none" and c]
        scatter = [e for e, m in zip(self.excess, self.modes, strict=True) if m == "none" and e is not None]
        return (statistics.median(plain) if plain else 0.0, statistics.pstdev(scatter) if scatter else 0.0)

    def peer(self, mode: str) -> Overhead | None:
        """What a contestant costs that leaves nothing running; None: too few steps."""
        found = [e for e, m in zip(self.excess, self.modes, strict=True) if m == mode and e is not None]
        return _overhead([found], lambda parts: statistics.median(parts[0]), 1)

    def ours(self, interval: int) -> Overhead | None:
        """What baftd costs per step at a snapshot every `interval` steps; None: too few steps."""
        classes: dict[tuple[bool, bool], list[float]] = {(a, b): [] for a in (True, False) for b in (True, False)}
        for number in range(1, len(self.modes)):
            excess, mode, before = self.excess[number], self.modes[number], self.modes[number - 1]
            if excess is not None and mode in ("ours", "none"):
                classes[mode == "ours", before == "ours"].append(excess)
        both, first, after = classes[True, True], classes[True, False], classes[False, True]
        if interval == 1 and len(both) >= 4:
            return _overhead([both], lambda parts: statistics.median(parts[0]), 1)
        return _overhead([first, after], lambda parts: sum(statistics.median(part) for part in parts), interval)


def _overhead(
    parts: Sequence[list[float]], statistic: Callable[[Sequence[list[float]]], float], interval: int
) -> Overhead | None:
    if any(len(part) < 3 for part in parts):
        return None
    dice = random.Random(len(parts[0]))
    again = [statistic([dice.choices(part, k=len(part)) for part in parts]) for _ in range(400)]
    scale = 100.0 / interval
    return Overhead(statistic(parts) * scale, statistics.stdev(again) * scale, min(len(part) for part in parts))


# ------------------------------------------------------------------------------------ windows


def inside_share(ranks: Sequence[dict[str, Any]], events: dict[tuple[int, int], list[Event]], skip: int) -> list[float]:
    """For every snapshot of every rank: the part of its bytes that was copied while the rank computed nothing, judged
    by the benchmark's own record of its operations, from boundary to fence."""
    shares = []
    for rank in ranks:
        operations = sorted((begin, end) for _, _, _, begin, end in rank["operations"])
        ends = [end for _, end in operations]
        for step in rank["steps"][skip:]:
            seen = events.get((rank["rank"], step["boundary"]))
            if step["mode"] != "ours" or seen is None:
                continue
            total = inside = 0.0
            for event in seen:
                if event.kind not in _COPIES or event.end <= event.begin:
                    continue
                begin, end = event.begin / 1e9, event.end / 1e9
                busy = 0.0
                for at in range(bisect_left(ends, begin), len(operations)):
                    if operations[at][0] >= end:
                        break
                    busy += min(end, operations[at][1]) - max(begin, operations[at][0])
                idle = 1 - busy / (end - begin) if end <= step["fence"] + 1e-3 else 0.0
                total += event.amount
                inside += event.amount * idle
            if total:
                shares.append(inside / total)
    return shares


# ------------------------------------------------------------------------------------ gaps


def measured_gaps(ranks: Sequence[dict[str, Any]], skip: int) -> list[list[float]]:
    """For every rank the median length in seconds of the gap before each of its operations, in the order in which a
    step has them, and of the one behind the last."""
    found = []
    for rank in ranks:
        steps = [step for step in rank["steps"][skip:] if step["mode"] == "none"]
        rows = []
        for step in steps:
            inside = sorted((b, e) for *_, b, e in rank["operations"] if b >= step["begin"] and e <= step["end"])
            edges = [step["begin"], *(t for pair in inside for t in pair), step["fence"]]
            rows.append([edges[i + 1] - edges[i] for i in range(0, len(edges), 2)])
        width = statistics.mode(len(row) for row in rows)
        found.append([statistics.median(column) for column in zip(*(r for r in rows if len(r) == width), strict=True)])
    return found


def gap_errors(predicted: Sequence[Sequence[float]], measured: Sequence[Sequence[float]], least: float) -> list[float]:
    """|predicted - measured| / measured in percent, of every gap that is at least `least` seconds long in both."""
    return [
        100 * abs(p - m) / m
        for rank_p, rank_m in zip(predicted, measured, strict=True)
        for p, m in zip(rank_p, rank_m, strict=True)
        if p >= least or m >= least
    ]
