"""Windows that go wrong, with a real daemon and real ranks: they vanish, shrink, overlap, are never left, raise.

No snapshot is torn, every one that is not taken is counted, what is restored is bit for bit what a rank had, and where
the daemon chooses how often to take one, no fence waits for longer than the budget allows.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, RunDirs
from tests.support.torch_fault_job import KINDS
from tests.support.torch_launch import Launcher

STEPS = 15
WRONG = range(STEPS // 3, 2 * STEPS // 3)
"""Periods in which windows are wrong, by the boundaries that begin them."""
NBYTES = 16 << 20
COUNTERS = {
    "bytes_in_windows": "in_windows", "bytes_outside": "outside", "bytes_at_fence": "at_fence", "overruns": "overruns",
}  # fmt: skip
"""Of the daemon, and the field of what ranks tell that they sum up."""
Result = dict[str, Any]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Torch, imported once for all starts."""
    with Launcher() as made:
        yield made


def run(launcher: Launcher, daemon: Daemon, kind: str, out: Path, steps: int = STEPS, **more: str) -> list[Result]:
    """Run both ranks to their end; what each has written."""
    launcher.run(kind, 2, steps, out, env=daemon.environ(), program="torch_fault_job", **more).check()
    return [json.loads((out / f"steps-{rank}.json").read_text()) for rank in range(2)]


def spans(period: Result, *kinds: str) -> list[tuple[int, int, int]]:
    """(begin, end, amount) of some of its events, in their order."""
    return sorted((begin, end, amount) for kind, begin, end, amount in period["events"] if kind in kinds)


def check(result: Result) -> None:
    """What holds whatever windows do."""
    assert result["torn"] == 0
    assert result["sealed"] >= 1
    assert result["audits"] >= result["sealed"], "every byte of every snapshot was compared"
    assert result["same"], f"step {result['resumed']} was restored differently"
    for period in result["told"]:
        windows = spans(period, "WINDOW")
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(windows)), period
        fences = spans(period, "FENCE")
        assert len(fences) <= 1
        if fences:
            assert all(begin <= fences[0][0] for begin, _, _ in windows), "a window after the fence"
            assert all(end <= fences[0][1] for _, end, _ in windows), "a window beyond the fence"
            assert all(begin <= fences[0][1] for begin, _, _ in spans(period, "COPY_INSIDE", "COPY_OUTSIDE"))
        assert period["lost"] == 0
        told = period["in_windows"] + period["outside"] + period["at_fence"]
        assert told <= NBYTES
        assert told == 0 or period["copied"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_no_snapshot_is_torn_and_every_one_is_counted(
    kind: str, launcher: Launcher, run_dirs: RunDirs, tmp_path: Path
) -> None:
    with Daemon(run_dirs, interval="1 step") as daemon:
        results = run(launcher, daemon, kind, tmp_path)
        for result in results:
            check(result)
            assert result["sealed"] + sum(result["skipped"].values()) == result["boundaries"] == STEPS
            assert set(result["skipped"]) <= {"no_slot"}, "somebody who asks for every step waits at the fence"
            told = {period["step"]: period for period in result["told"]}
            wrong = [told[step] for step in WRONG]
            copied = [period for period in wrong if period["copied"]]
            assert all(p["in_windows"] + p["outside"] + p["at_fence"] == NBYTES for p in copied)
            if kind == "vanish":
                assert all(len(spans(period, "WINDOW")) <= 1 for period in wrong), "but for the tail"
            if kind == "unclosed":
                assert all(spans(period, "WINDOW") for period in wrong)
        (job,) = daemon.status().jobs
        counted, told = job.counters, [period for result in results for period in result["told"]]
        assert counted["torn"] == 0
        assert counted["sealed"] == sum(result["sealed"] for result in results)
        assert counted["skipped"] == sum(sum(result["skipped"].values()) for result in results)
        assert counted["timings"] == len(told)
        for counter, field in COUNTERS.items():
            assert counted[counter] == sum(period[field] for period in told)
        if kind == "vanish":
            assert counted["overruns"], "a window that does not come is an overrun"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["vanish", "unclosed"])
def test_no_fence_waits_for_longer_than_the_budget(
    kind: str, launcher: Launcher, run_dirs: RunDirs, tmp_path: Path
) -> None:
    budget, rate = 0.002, 32 << 20  # half a second for a snapshot
    with Daemon(run_dirs, interval="auto", overhead_budget="0.2 %", overhead_probe="off") as daemon:
        for result in run(launcher, daemon, kind, tmp_path, throttle=str(rate)):
            check(result)
            planned = [period for period in result["told"] if period["plan"]]
            longest = max(period["period"] for period in planned)
            allowed = 2 * STEPS * budget * longest + 100e6  # and what a busy machine adds
            waits = [period["fence_ns"] for period in planned]
            assert max(waits) <= allowed < 0.8e9 * NBYTES / rate, waits
            assert set(result["skipped"]) <= {"no_slot", "late", "cadence"}
            begun = sum(period["copied"] for period in result["told"])
            assert begun <= result["sealed"] + result["skipped"].get("late", 0) <= begun + 1
