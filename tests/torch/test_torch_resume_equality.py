"""Killed and started again, a run has the losses of the run that was not: plain, DDP, FSDP2 and pipelines.

Real processes, a real daemon, SIGKILL. Data order, dropout, batch norm, augmentation drawn from three generators and
the learning rate schedule are part of it. Losses are compared as hexadecimal floats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, RunDirs
from tests.support.torch_launch import Launcher, losses

STEPS = 14
CASES = [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("pipeline", 2), ("pipeline", 4)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Torch, imported once for all starts."""
    with Launcher() as made:
        yield made


def compare(out: Path, world: int, first: int, *, reference: str = "ref", again: str = "2") -> None:
    """Every loss of every rank after the restart against the uninterrupted run."""
    for rank in range(world):
        expected = {k: v for k, v in losses(out, reference, rank).items() if k >= first}
        assert len(expected) == STEPS - first
        assert losses(out, again, rank) == expected, f"rank {rank}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "world"), CASES, ids=[f"{kind}-{world}" for kind, world in CASES])
def test_losses_after_a_kill_are_those_of_the_uninterrupted_run(
    kind: str, world: int, daemon: Daemon, launcher: Launcher, tmp_path: Path
) -> None:
    launcher.run(kind, world, STEPS, tmp_path, env=daemon.environ(), start="ref", no_baft="").check()
    died = launcher.run(kind, world, STEPS, tmp_path, env=daemon.environ(), start="1", kill=f"9:backward:{world - 1}")
    assert died.codes[world - 1] == -9
    first = resume_from(launcher, kind, world, daemon, tmp_path)
    assert first in (8, 9)
    compare(tmp_path, world, first)


def resume_from(
    launcher: Launcher, kind: str, world: int, daemon: Daemon, out: Path, start: str = "2", **more: str
) -> int:
    """Start again and run to the end; the step at which all ranks began."""
    again = launcher.run(kind, world, STEPS, out, env=daemon.environ(), start=start, **more).check()
    assert all(" torn 0 " in text for text in again.outputs), again.outputs
    firsts = set(again.first_steps)
    assert len(firsts) == 1, firsts
    return firsts.pop()


@pytest.mark.timeout(240)
def test_ranks_that_each_save_a_part_have_the_same_losses(
    run_dirs: RunDirs, launcher: Launcher, tmp_path: Path
) -> None:
    with Daemon(run_dirs, redundancy="none") as daemon:
        env = daemon.environ()
        launcher.run("ddp", 2, STEPS, tmp_path, env=env, start="ref", no_baft="").check()
        died = launcher.run("ddp", 2, STEPS, tmp_path, env=env, start="1", kill="9:backward:1")
        assert -9 in died.codes
        first = resume_from(launcher, "ddp", 2, daemon, tmp_path)
        assert first in (8, 9)
        compare(tmp_path, 2, first)
        found = re.findall(r"event=divided .* bytes=(\d+) most=(\d+)", daemon.log)
        assert len(found) == 2
        assert all(int(most) < 0.55 * int(total) for total, most in found), "half of what a rank holds"


POINTS = ["data", "forward", "backward", "fence", "update", "boundary"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_at_a_named_point_loses_at_most_one_step(
    point: str, daemon: Daemon, launcher: Launcher, tmp_path: Path
) -> None:
    launcher.run("plain", 1, STEPS, tmp_path, env=daemon.environ(), start="ref", no_baft="").check()
    died = launcher.run("plain", 1, STEPS, tmp_path, env=daemon.environ(), start="1", kill=f"8:{point}:0")
    assert died.codes == [-9]
    first = resume_from(launcher, "plain", 1, daemon, tmp_path)
    # Boundary 8 is complete when step index 8 begins; its copy is over at the fence of step 8, or not.
    assert first in ((8, 9) if point in ("update", "boundary") else (7, 8))
    compare(tmp_path, 1, first)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "kill"), [("ddp", "8:update:0"), ("ddp", "8:boundary:1"), ("pipeline", "8:fence:1")])
def test_a_rank_killed_between_seal_and_update_of_the_others(
    kind: str, kill: str, daemon: Daemon, launcher: Launcher, tmp_path: Path
) -> None:
    launcher.run(kind, 2, STEPS, tmp_path, env=daemon.environ(), start="ref", no_baft="").check()
    died = launcher.run(kind, 2, STEPS, tmp_path, env=daemon.environ(), start="1", kill=kill)
    assert -9 in died.codes
    first = resume_from(launcher, kind, 2, daemon, tmp_path)
    assert first in (7, 8, 9)
    compare(tmp_path, 2, first)


@pytest.mark.timeout(240)
def test_a_trainer_killed_while_its_forked_loader_workers_live_on(
    daemon: Daemon, launcher: Launcher, tmp_path: Path
) -> None:
    launcher.run("plain", 1, STEPS, tmp_path, env=daemon.environ(), start="ref", no_baft="", workers="2").check()
    died = launcher.run("plain", 1, STEPS, tmp_path, env=daemon.environ(), start="1", workers="2", kill="8:backward:0")
    assert died.codes == [-9]
    first = resume_from(launcher, "plain", 1, daemon, tmp_path, workers="2")
    assert first in (7, 8)
    compare(tmp_path, 1, first)


@pytest.mark.timeout(240)
def test_a_run_killed_again_and_again_comes_to_the_same_end(daemon: Daemon, launcher: Launcher, tmp_path: Path) -> None:
    launcher.run("plain", 1, STEPS, tmp_path, env=daemon.environ(), start="ref", no_baft="").check()
    firsts = []
    for number, kill in enumerate(["4:fence:0", "6:backward:0", "9:data:0"]):
        died = launcher.run("plain", 1, STEPS, tmp_path, env=daemon.environ(), start=str(number), kill=kill)
        assert died.codes == [-9]
        firsts += died.first_steps
    first = resume_from(launcher, "plain", 1, daemon, tmp_path, start="9")
    assert firsts == sorted(firsts)
    assert firsts[0] == 0
    compare(tmp_path, 1, first, again="9")


@pytest.mark.timeout(240)
def test_daemon_and_rank_killed_together(run_dirs: RunDirs, launcher: Launcher, tmp_path: Path) -> None:
    with Daemon(run_dirs, durable_dir=str(run_dirs.durable), durable_every="1000000 steps") as daemon:
        launcher.run("plain", 1, STEPS, tmp_path, env=daemon.environ(), start="ref", no_baft="").check()
        died = launcher.run("plain", 1, STEPS, tmp_path, env=daemon.environ(), start="1", kill="8:forward:0")
        assert died.codes == [-9]
        daemon.kill()
        daemon.start()
        first = resume_from(launcher, "plain", 1, daemon, tmp_path)
        assert first in (7, 8)
        compare(tmp_path, 1, first)
