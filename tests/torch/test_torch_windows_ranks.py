"""Windows of two ranks of which one is late: the other's wait is a window, wherever the framework waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.daemon import RunDirs
from tests.support.torch_launch import Launcher
from tests.support.torch_windows_job import LATE

STEPS = 4
WAITED = 0.6 * LATE * 1e3
"""Milliseconds that the early rank waits in a step at least, where the other is late by `LATE`."""


class Span(NamedTuple):
    """An event of the job's record, in ms since the step began."""

    kind: str
    what: str
    begin: float
    end: float

    @property
    def ms(self) -> float:
        """Length."""
        return self.end - self.begin


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Torch, imported once for all starts."""
    with Launcher() as made:
        yield made


def steps_of(launcher: Launcher, kind: str, run_dirs: RunDirs, out: Path, rank: int = 0) -> list[list[Span]]:
    """Run the job; what `rank` recorded, the first step left out: in it everything is new."""
    env = run_dirs.environ()
    launcher.run(kind, 2, STEPS, out, env=env, program="torch_windows_job").check()
    data = json.loads((out / f"events-{rank}.json").read_text())
    return [[Span(*each) for each in step] for step in data["steps"][1:]]


def windows(step: list[Span], what: str = "") -> list[Span]:
    """Windows of a step, all or for one reason."""
    return [each for each in step if each.kind == "WINDOW" and (not what or each.what == what)]


@pytest.mark.timeout(120)
def test_ddp_waits_for_its_last_bucket_in_the_tail(launcher: Launcher, run_dirs: RunDirs, tmp_path: Path) -> None:
    for step in steps_of(launcher, "ddp", run_dirs, tmp_path):
        (tail,) = windows(step, "TAIL")
        assert tail.ms > WAITED, step


@pytest.mark.timeout(120)
def test_a_pass_without_reduction_has_a_tail_that_the_next_forward_ends(
    launcher: Launcher, run_dirs: RunDirs, tmp_path: Path
) -> None:
    for step in steps_of(launcher, "no_sync", run_dirs, tmp_path):
        first, last = windows(step, "TAIL")
        assert first.end <= last.begin
        assert last.ms > WAITED, step
        assert first.ms < last.ms


@pytest.mark.timeout(120)
def test_fsdp2_waits_in_windows_and_so_does_the_norm_of_its_gradients(
    launcher: Launcher, run_dirs: RunDirs, tmp_path: Path
) -> None:
    for step in steps_of(launcher, "fsdp2", run_dirs, tmp_path):
        assert len(windows(step, "WAIT_COLLECTIVE")) >= 2, step  # gathering before, reducing after computing
        assert len(windows(step, "TAIL")) == 1, step
        assert sum(each.ms for each in windows(step)) > WAITED, step
        (tail,) = windows(step, "TAIL")
        within = [each for each in step if each.kind == "WAIT_COLLECTIVE" and tail.begin <= each.begin <= tail.end]
        assert within, "the norm of sharded gradients waits for the other rank"


@pytest.mark.timeout(120)
def test_a_pipeline_of_another_maker_has_its_receives(launcher: Launcher, run_dirs: RunDirs, tmp_path: Path) -> None:
    for step in steps_of(launcher, "receive", run_dirs, tmp_path):
        found = windows(step, "WAIT_RECV")
        assert len(found) == 2
        assert sum(each.ms for each in found) > WAITED
    for step in steps_of(launcher, "receive", run_dirs, tmp_path, rank=1):
        assert len(windows(step, "WAIT_SEND")) == 2
