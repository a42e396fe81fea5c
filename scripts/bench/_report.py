"""What the benchmarks share: interleaved timing, ratios with their error, a table for people and JSON for programs.

A figure that compares is the ratio of medians of two things measured in turn in this run; its standard error comes
from resampling the rounds. `met` only if the value and twice its error clear the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Figure", "Report", "arguments", "interleave", "machine", "median", "ratio", "timed"]

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Figure:
    """One number and what it means."""

    name: str
    value: float
    se: float
    """Standard error, in `unit`."""
    unit: str
    goal: float | None
    """None: given for comparison only."""
    better: Better
    met: bool | None
    how: str
    """How it was measured, in one line."""


def figure(
    name: str, measured: tuple[float, float], *, unit: str, goal: float | None, better: Better, how: str
) -> Figure:
    """A figure from (value, standard error); `met` is decided here."""
    value, se = measured
    met = None if goal is None else value - 2 * se >= goal if better == "higher" else value + 2 * se <= goal
    return Figure(name, value, se, unit, goal, better, met, how)


def _resampled(rounds: int, statistic: Callable[[Sequence[int]], float]) -> float:
    """Standard error of a statistic of `rounds` rounds, by 400 resamples; the same for the same data."""
    if rounds < 2:
        return 0.0
    dice = random.Random(rounds)
    return statistics.stdev(statistic([dice.randrange(rounds) for _ in range(rounds)]) for _ in range(400))


def median(samples: Sequence[float]) -> tuple[float, float]:
    """Median and its standard error."""
    return statistics.median(samples), _resampled(
        len(samples), lambda picked: statistics.median(samples[i] for i in picked)
    )


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Ratio of the medians of two series measured in turn, and its standard error. Same lengths, at least 1."""

    def of(picked: Sequence[int]) -> float:
        return statistics.median(above[i] for i in picked) / statistics.median(below[i] for i in picked)

    if len(above) != len(below):
        raise ValueError(f"{len(above)} and {len(below)} samples are no pairs")
    return of(range(len(above))), _resampled(len(above), of)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def interleave(
    contestants: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Let each contestant measure itself once a round, in an order drawn anew; `warm_up` rounds do not count.

    Returns one series a contestant; element i of all of them belongs to round i.
    """
    dice = random.Random(1)
    series: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(warm_up + rounds):
        for name in dice.sample(sorted(contestants), len(contestants)):
            seconds = contestants[name]()
            if number >= warm_up:
                series[name].append(seconds)
    return series


def machine() -> dict[str, object]:
    """Facts a reader needs to compare two runs."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = next((int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # not every kernel shows it; then the report goes without
        return []


class Report:
    """Figures and notes of one run."""

    def __init__(self, bench: str) -> None:
        self.bench = bench
        self.machine = machine()
        self.figures: list[Figure] = []
        self.notes: list[str] = []

    def add(
        self, name: str, measured: tuple[float, float], *, unit: str, goal: float | None, better: Better, how: str
    ) -> Figure:
        """Add (value, standard error) under a name."""
        made = figure(name, measured, unit=unit, goal=goal, better=better, how=how)
        self.figures.append(made)
        return made

    def note(self, text: str) -> None:
        """Add a line that qualifies the figures: what was absent, what was not discriminating."""
        self.notes.append(text)

    def steady(self, name: str, baseline: Sequence[float], *, most: float = 0.25) -> None:
        """Note that figure `name` cannot tell good from bad where its baseline alone varies by more than `most`."""
        if len(baseline) < 4:
            return
        low, middle, high = statistics.quantiles(baseline, n=4)
        if (high - low) / middle > most:
            share = (high - low) / middle
            self.note(f"{name} is not discriminating here: its baseline alone varies by {share:.0%} (quartiles).")

    def as_dict(self) -> dict[str, object]:
        """What --json prints."""
        return {
            "bench": self.bench,
            "machine": self.machine,
            "figures": [asdict(one) for one in self.figures],
            "notes": self.notes,
        }

    def print(self, *, as_json: bool) -> None:
        """Write to stdout."""
        if as_json:
            json.dump(self.as_dict(), sys.stdout, indent=1)
            sys.stdout.write("\n")
            return
        from rich.console import Console
        from rich.table import Table

        facts = self.machine
        console = Console()
        table = Table(title=f"{self.bench}: {facts['cpu']}, {facts['cores']} cores, load {facts['load']:.1f}")
        for heading in ("figure", "value", "± se", "unit", "goal", "met", "how"):
            right = heading in ("value", "± se", "goal")
            table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "how")
        for one in self.figures:
            sign = "≥" if one.better == "higher" else "≤"
            table.add_row(
                one.name,
                f"{one.value:.4g}",
                f"{one.se:.2g}",
                one.unit,
                "" if one.goal is None else f"{sign} {one.goal:g}",
                {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[one.met],
                one.how,
            )
        console.print(table)
        for text in self.notes:
            console.print(f"- {text}", markup=False, highlight=False)


def arguments(description: str) -> argparse.ArgumentParser:
    """The flags every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="seconds: checks the machinery, proves nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser
