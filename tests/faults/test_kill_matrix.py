"""SIGKILL at every point where it could hurt: the trainer at every chunk boundary of a snapshot, the daemon at every
journal record and at every step of a durable write, both together, a trainer whose forked workers live on.

After each: what is restored is bit for bit what an uninterrupted run had at that step, no older than the last step that
the trainer saw committed; nothing is left over; after `finish` /dev/shm is what it was before. Without `--full` every
kind is sampled evenly; the failing point is named and can be run alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, RunDirs, wait_until
from tests.support.faulty_daemon import FaultyDaemon
from tests.support.numpy_trainer import ARRAYS, TrainerProcess, state_digest

STEPS = 5
"""Of the run that is interrupted; durable at steps 2 and 4."""
PAUSE = {"journal": 0.0, "storage": 0.15}
"""Seconds a step takes: durable writes of both steps shall fit into the run."""
SETTINGS = {"durable_every": "2 steps", "durable_keep": "2"}


def left_over(dirs: RunDirs) -> list[str]:
    """What a finished job must not leave: anything in shm, and temporary files in the durable directory."""
    in_memory = [str(path) for path in dirs.shm.rglob("*")]
    allowed = ("MANIFEST", "rank-00000.safetensors", "rank-00000.manifest")
    durable = [
        str(path)
        for path in dirs.durable.rglob("*")
        if path.is_file() and path.name not in allowed and not path.name.startswith("EPOCH-")
    ]
    return in_memory + durable


def restore_and_finish(
    dirs: RunDirs, committed: int, point: str, *, job: str = "fault", steps: int = STEPS + 2
) -> None:
    """Start the job again, compare what it restores, and let it finish."""
    with TrainerProcess(dirs, steps=steps, job=job) as trainer:
        assert trainer.wait() == 0, f"{point}: {trainer.events}"
        resumed, finished = trainer.last("resumed"), trainer.last("finished")
        assert resumed is not None, point
        assert finished is not None, point
        assert resumed["step"] >= committed, f"{point}: step {committed} was committed, {resumed['step']} restored"
        assert resumed["digest"] == state_digest(resumed["step"]), f"{point}: step {resumed['step']} is not what it was"
        assert finished["digest"] == state_digest(steps), point


def sample(count: int, wanted: int, full: bool) -> list[int]:
    """Every number below `count`, or `wanted` of them, evenly."""
    if full or count <= wanted:
        return list(range(count))
    return sorted({round(number * (count - 1) / (wanted - 1)) for number in range(wanted)})


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the whole matrix is asked for."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def fresh_dirs() -> Iterator[list[RunDirs]]:
    """Makes sure that directories made by a loop go, with everything that runs in them."""
    made: list[RunDirs] = []
    yield made
    for dirs in made:
        dirs.close()


def clean_up(dirs: RunDirs, made: list[RunDirs]) -> None:
    """The directories of one point of the matrix are done with."""
    assert dirs.close() == []
    made.remove(dirs)


# ---------------------------------------------------------------------------------------------- the trainer


@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ["native", "python"])
def test_trainer_dies_at_every_chunk(run_dirs: RunDirs, daemon: Daemon, engine: str) -> None:
    for chunk in range(ARRAYS + 1):
        job = f"chunk-{chunk}"
        with TrainerProcess(run_dirs, job=job, steps=STEPS, kill={"step": 3, "chunk": chunk}, engine=engine) as trainer:
            assert trainer.wait() == -9, trainer.events
            dying = trainer.last("dying")
            assert dying is not None
            assert dying["chunks"] == chunk
            assert trainer.committed == 2
        with TrainerProcess(run_dirs, job=job, steps=STEPS) as again:
            assert again.wait() == 0, again.events
            resumed = again.last("resumed")
            assert resumed is not None
            assert (resumed["step"], resumed["digest"]) == (2, state_digest(2)), f"killed before chunk {chunk}"
    assert left_over(run_dirs) == []


@pytest.mark.timeout(120)
def test_trainer_dies_and_its_workers_live_on(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=STEPS, fork_worker=True, wait_at=4) as trainer:
        trainer.wait_for("waiting")
        trainer.process.kill()
        trainer.process.wait(10)
        worker = trainer.last("worker")
        assert worker is not None
        assert Path(f"/proc/{worker['pid']}").exists()
        began = time.monotonic()
        restore_and_finish(run_dirs, trainer.committed, "the trainer died, its worker lives")
        assert time.monotonic() - began < 20, "the new start waited for a worker of the old one"
        assert Path(f"/proc/{worker['pid']}").exists()
        assert left_over(run_dirs) == []


# ---------------------------------------------------------------------------------------------- the daemon


def operations(made: list[RunDirs], kind: str) -> list[str]:
    """What a run without a fault does to its files of that kind."""
    dirs = RunDirs(**SETTINGS, durable_dir="")
    made.append(dirs)
    dirs.more["durable_dir"] = str(dirs.durable)
    daemon = FaultyDaemon(dirs, f"{kind}:-1:before")
    daemon.spawn_faulty()
    with TrainerProcess(dirs, steps=STEPS, wait_at="end", pause=PAUSE[kind]) as trainer:
        trainer.wait_for("waiting")
        wait_until(lambda: len(list(dirs.durable.rglob("MANIFEST"))) >= 2, "two durable checkpoints")
        trainer.kill()
    daemon.kill()
    found = daemon.operations.read_text().splitlines()
    clean_up(dirs, made)
    return found


def kill_daemon_at(made: list[RunDirs], at: str, *, trainer_too: bool) -> bool:
    """One point: False when it was not reached."""
    dirs = RunDirs(**SETTINGS, durable_dir="")
    made.append(dirs)
    dirs.more["durable_dir"] = str(dirs.durable)
    daemon = FaultyDaemon(dirs, at)
    if trainer_too:
        daemon.may_start.clear()
    daemon.spawn_faulty()
    with TrainerProcess(dirs, steps=STEPS, wait_at="end", pause=PAUSE[at.split(":")[0]]) as trainer:
        # The last step is sealed by the trainer's end only; the daemon may also die while it starts.
        over = (
            (lambda: daemon.died.is_set() or trainer.finished_waiting)
            if trainer_too
            else (lambda: trainer.finished_waiting)
        )
        wait_until(over, lambda: f"{at}: neither died nor done: {trainer.events}", timeout=60)
        trainer.kill()
        committed = trainer.committed
    daemon.may_start.set()
    restore_and_finish(dirs, committed, at)
    assert left_over(dirs) == [], at
    reached = daemon.died.is_set()
    clean_up(dirs, made)
    return reached


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("both", [False, True], ids=["daemon", "both"])
@pytest.mark.parametrize("kind", ["journal", "storage"])
def test_daemon_dies_at_every_file_operation(fresh_dirs: list[RunDirs], kind: str, both: bool, full: bool) -> None:
    found = operations(fresh_dirs, kind)
    assert len(found) > 20, found
    points = sample(len(found), 8, full)
    reached = 0
    for number, point in enumerate(points):
        modes = ("before", "torn", "after") if full else (("before", "torn", "after")[number % 3],)
        for mode in modes:
            reached += kill_daemon_at(fresh_dirs, f"{kind}:{point}:{mode}", trainer_too=both)
    # Runs differ a little in timing, so the last points may lie beyond the end of one; most must have been met.
    assert reached >= 0.7 * len(points), f"{reached} of {len(points)} points were reached"
