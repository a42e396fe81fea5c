"""DistributedDataParallel with each byte saved by one rank: the same losses, half the bytes, any layout afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, RunDirs
from tests.support.torch_launch import Launcher, losses
from tests.torch.test_torch_reshard_jobs import Chain

STEPS = 10


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Torch, imported once for all starts."""
    with Launcher() as made:
        yield made


@pytest.fixture
def daemon(run_dirs: RunDirs) -> Iterator[Daemon]:
    """One that divides."""
    with Daemon(run_dirs, redundancy="none") as running:
        yield running


def divided(daemon: Daemon) -> float:
    """Bytes of the fullest rank, of all that the ranks save together."""
    found = re.findall(r"event=divided .* bytes=(\d+) most=(\d+)", daemon.log)
    assert found
    assert "event=not_divided" not in daemon.log
    return max(int(most) / int(total) for total, most in found)


@pytest.mark.timeout(120)
def test_losses_after_a_kill_are_those_of_the_uninterrupted_run(
    daemon: Daemon, launcher: Launcher, tmp_path: Path
) -> None:
    env = daemon.environ()
    launcher.run("ddp", 2, STEPS, tmp_path, env=env, start="ref", no_baft="").check()
    died = launcher.run("ddp", 2, STEPS, tmp_path, env=env, start="1", kill="6:backward:1")
    assert -9 in died.codes
    again = launcher.run("ddp", 2, STEPS, tmp_path, env=env, start="2").check()
    assert all(" torn 0 " in text for text in again.outputs), again.outputs
    (first,) = set(again.first_steps)
    assert first in (5, 6)
    for rank in range(2):
        expected = {step: loss for step, loss in losses(tmp_path, "ref", rank).items() if step >= first}
        assert len(expected) == STEPS - first
        assert losses(tmp_path, "2", rank) == expected, f"rank {rank}"
    assert divided(daemon) < 0.55


@pytest.mark.timeout(120)
def test_any_layout_goes_on_from_it(daemon: Daemon, launcher: Launcher, tmp_path: Path) -> None:
    """Each start compares what it restored with torch's own checkpoint, bit for bit."""
    chain = Chain(launcher, daemon, tmp_path)
    chain.go("ddp", 2, tied="")
    assert divided(daemon) < 0.6  # tied weights are not cut
    chain.go("ddp", 2, tied="", no_reshard="")
    chain.go("plain", 1, tied="")
