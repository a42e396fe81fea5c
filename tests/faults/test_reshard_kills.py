"""SIGKILL in the middle of a start that has another number of ranks than the one that saved: of the daemon at a journal
record, a durable file or a state file, of both, of one rank while the ranks load or after it has declared.

After each the job goes on in yet another number of ranks: from a step no older than the last that was committed, every
element right, and nothing is left of ranks that are no more.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import pytest

from tests.faults.test_kill_matrix import PATIENCE, SEED, every_point, sample
from tests.support.daemon import ROOT, Daemon, RunDirs, look_for, wait_until
from tests.support.faulty_daemon import FaultyDaemon
from tests.support.zygote import Forked, Zygote

SETTINGS = {"durable_every": "2 steps", "durable_keep": "2", "rendezvous_timeout": "3 s"}
SAMPLED = {"journal": 5, "storage": 2}
SAVED, OTHER, NEXT = 3, 2, 4
"""Ranks of the three starts."""


class Ranks:
    """All ranks of one start, each a process. At the end of the block those that still run are killed."""

    def __init__(self, dirs: RunDirs, zygote: Zygote, world: int, incarnation: int, **options: Any) -> None:
        self._stack = ExitStack()
        arguments = [json.dumps({"steps": 2} | options)]
        self.processes: list[Forked] = []
        for rank in range(world):
            env = dirs.environ(connect_timeout="20 s", rendezvous_timeout="5 s")
            env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "BAFTD_INCARNATION": f"{incarnation:032x}"}
            env["OPENBLAS_NUM_THREADS"] = "1"
            log = self._stack.enter_context((dirs.base / f"rank-{incarnation}-{rank}.log").open("ab"))
            self.processes.append(
                zygote.start(
                    "tests.support.array_job",
                    arguments,
                    env=env,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            )

    def said(self) -> list[dict[str, Any]]:
        """What each rank said at its end; {} of one that was killed."""
        found = []
        for process in self.processes:
            assert process.stdout is not None
            lines = process.stdout.read().splitlines()
            process.wait(PATIENCE)
            found.append(json.loads(lines[-1]) if lines else {})
        return found

    def kill(self) -> None:
        """SIGKILL to all."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for process in self.processes:
            process.wait(PATIENCE)
            if process.stdout is not None:
                process.stdout.close()
        self._stack.close()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Forks the processes of this file."""
    with Zygote() as running:
        yield running


@pytest.fixture(scope="module")
def saved(zygote: Zygote) -> Iterator[RunDirs]:
    """Directories in which a job of three ranks has committed step 2, in memory and durably; nothing runs there."""
    dirs = RunDirs(**SETTINGS)
    dirs.more["durable_dir"] = str(dirs.durable)
    daemon = FaultyDaemon(dirs, "journal:-1:before", zygote=zygote)
    daemon.start()
    with Ranks(dirs, zygote, SAVED, 1) as ranks:
        assert [(one.get("step"), one.get("committed")) for one in ranks.said()] == [(0, 2)] * SAVED
    wait_until(lambda: len(look_for(dirs.durable, "MANIFEST")) == 1, "step 2 durable", timeout=PATIENCE)
    daemon.terminate()
    yield dirs
    dirs.close()


def copy_of(saved: RunDirs) -> RunDirs:
    """The same, to be spoiled."""
    dirs = RunDirs(**SETTINGS)
    dirs.more["durable_dir"] = str(dirs.durable)
    for source, target in ((saved.shm, dirs.shm), (saved.state, dirs.state), (saved.durable, dirs.durable)):
        shutil.copytree(source, target, dirs_exist_ok=True)
    return dirs


def goes_on(dirs: RunDirs, daemon: Daemon, zygote: Zygote, committed: int, point: str) -> None:
    """The next start, of yet another world."""
    daemon.wait_ready(timeout=PATIENCE)
    with Ranks(dirs, zygote, NEXT, 3, resume={"reshard": True, "takeover": True}) as ranks:
        said = ranks.said()
    assert [one.get("wrong") for one in said] == [[]] * NEXT, f"{point}: {said}"
    assert min(one["step"] for one in said) >= committed, f"{point}: {said}"
    assert [one["committed"] for one in said] == [said[0]["step"] + 2] * NEXT, f"{point}: {said}"
    assert daemon.status().counters["internal_errors"] == 0, point


def shrinks(dirs: RunDirs, daemon: Daemon, zygote: Zygote, point: str) -> None:
    """One rank at last: what is left of all others goes when it has committed."""
    with Ranks(dirs, zygote, 1, 4, resume={"reshard": True, "takeover": True}) as ranks:
        assert [one.get("wrong") for one in ranks.said()] == [[]], point

    def left() -> list[str]:
        return [path.name for path in look_for(dirs.shm, "rank-*") if not path.name.startswith("rank-00000.")]

    wait_until(lambda: not left(), lambda: f"{point}: still there: {left()}", timeout=PATIENCE)


def dies_at(saved: RunDirs, zygote: Zygote, at: str, both: bool) -> tuple[bool, list[str]]:
    """Whether the daemon died there, in a start of two ranks, and what it had done to its files."""
    dirs = copy_of(saved)
    try:
        daemon = FaultyDaemon(dirs, at, zygote=zygote)
        if both:
            daemon.may_start.clear()
        daemon.spawn_faulty()
        with Ranks(dirs, zygote, OTHER, 2, resume={"reshard": True}) as ranks:
            if both:
                wait_until(
                    lambda: daemon.died.is_set() or all(p.poll() is not None for p in ranks.processes),
                    f"{at}: neither died nor done",
                    timeout=PATIENCE,
                )
                ranks.kill()
            said = ranks.said()
        assert all(one.get("wrong", []) == [] for one in said), f"{at}: {said}"
        committed = max(one.get("committed") or one.get("step", 0) for one in said)
        reached = daemon.starts == 2 or not daemon.running
        if not reached:
            daemon.kill()
        daemon.may_start.set()
        wait_until(lambda: daemon.starts == 2 and daemon.running, f"{at}: no daemon took its place", timeout=PATIENCE)
        if at.split(":")[1] != "-1":
            goes_on(dirs, daemon, zygote, max(2, committed), at)
            shrinks(dirs, daemon, zygote, at)
        return reached, daemon.operations.read_text().splitlines()
    finally:
        dirs.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["journal", "storage"])
def test_the_daemon_dies_in_a_start_of_another_world(
    saved: RunDirs, zygote: Zygote, kind: str, request: pytest.FixtureRequest
) -> None:
    _, found = dies_at(saved, zygote, f"{kind}:-1:before", both=False)
    every = every_point(kind, found)
    full = request.config.getoption("--full")
    points = every if full else sample(every, SAMPLED[kind], f"{SEED} reshard {kind}")
    reached = [dies_at(saved, zygote, point, both=number % 2 == 1)[0] for number, point in enumerate(points)]
    assert sum(reached) >= 0.5 * len(points), f"{sum(reached)} of {len(points)} points were reached"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["event=restore_plan", "event=declared job=arrays rank=1"])
def test_a_rank_dies_in_a_start_of_another_world(saved: RunDirs, zygote: Zygote, moment: str) -> None:
    dirs = copy_of(saved)
    try:
        daemon = FaultyDaemon(dirs, "journal:-1:before", zygote=zygote)
        daemon.start()
        with Ranks(dirs, zygote, OTHER, 2, steps=1000, resume={"reshard": True}) as ranks:
            wait_until(lambda: moment in daemon.log, moment, timeout=PATIENCE)
            ranks.processes[1].kill()
            wait_until(lambda: "event=rank_died" in daemon.log, "the death is seen", timeout=PATIENCE)
            ranks.kill()
        goes_on(dirs, daemon, zygote, 2, moment)
        shrinks(dirs, daemon, zygote, moment)
    finally:
        dirs.close()
