"""Jobs whose ranks each save a part of what all hold: real daemon, one process a rank."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Any

import pytest

from tests.support.daemon import ROOT, Daemon, RunDirs
from tests.support.divided_job import REPLICATED
from tests.support.zygote import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as found:
        yield found


class Start:
    """All ranks of one start."""

    def __init__(self, dirs: RunDirs, zygote: Zygote, number: int, world: int, **options: Any) -> None:
        self._stack = ExitStack()
        self._processes = []
        self._outputs: list[IO[bytes]] = []
        self._inputs: list[IO[bytes]] = []
        for rank in range(world):
            env = dirs.environ(connect_timeout="20 s") | {"OPENBLAS_NUM_THREADS": "1"}
            env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "BAFTD_INCARNATION": f"{number:032x}"}
            log = self._stack.enter_context((dirs.base / f"rank-{number}-{rank}.log").open("ab"))
            process = zygote.start(
                "tests.support.divided_job", [json.dumps(options)], env=env, cwd=ROOT, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
            assert process.stdout is not None
            assert process.stdin is not None
            self._processes.append(process)
            self._outputs.append(self._stack.enter_context(process.stdout))
            self._inputs.append(self._stack.enter_context(process.stdin))

    def hear(self) -> list[dict[str, Any]]:
        """The next line of every rank."""
        lines = [output.readline() for output in self._outputs]
        assert all(lines), "a rank ended without a word: see its log"
        return [json.loads(line) for line in lines]

    def go_on(self) -> None:
        """They have waited."""
        for stream in self._inputs:
            stream.write(b"\n")
            stream.flush()

    def close(self) -> None:
        """Wait for all."""
        for process in self._processes:
            process.wait(60)
        self._stack.close()


class Job:
    """Starts of a job, one after the other."""

    def __init__(self, dirs: RunDirs, zygote: Zygote) -> None:
        self.dirs, self.zygote = dirs, zygote
        self.number = 0

    def start(self, world: int, **options: Any) -> Start:
        self.number += 1
        return Start(self.dirs, self.zygote, self.number, world, **options)

    def run(self, world: int, begins: int, *, steps: int = 3, **options: Any) -> list[dict[str, Any]]:
        """A start that must find step `begins`, every element of it right, and commit `steps` more; how it ended."""
        start = self.start(world, steps=steps, **options)
        first = start.hear()
        assert [one.get("step") for one in first] == [begins] * world, first
        assert [one["wrong"] for one in first] == [[]] * world
        self.extras = [one["extra"] for one in first]
        last = start.hear()
        start.close()
        assert [one["committed"] for one in last] == [begins + steps] * world, last
        return last


def divided(run: list[dict[str, Any]]) -> bool:
    """Whether the ranks saved what all hold once, evenly: each a part of that, and what it has for itself."""
    shared = sum(8 * math.prod(shape) for shape in REPLICATED.values())
    saved = [one["saved_bytes"] - one["held_bytes"] + shared for one in run]
    return sum(saved) < shared * 1.02 and max(saved) < shared / len(run) * 1.05


def test_kill_resume_and_reshard(run_dirs: RunDirs, zygote: Zygote) -> None:
    """4 ranks, killed; the same 4, as if each had saved all; then 2 and 1."""
    with Daemon(run_dirs, redundancy="none") as daemon:
        job = Job(run_dirs, zygote)
        first = job.run(4, 0, kill=True)
        assert divided(first), first
        assert all(one["counters"]["torn"] == 0 for one in first)
        second = job.run(4, 3, kill=True)
        assert divided(second)
        assert job.extras == [{"lr": 0.5, "seed": rank} for rank in range(4)]
        third = job.run(4, 6, resume={"reshard": True})
        assert divided(third)
        assert job.extras == [{"lr": 0.5, "seed": rank} for rank in range(4)], "the same layout: nothing is lost"
        refused = job.start(2, steps=1, own=False)
        assert all("resume(reshard=True)" in one["text"] for one in refused.hear())
        refused.close()
        assert divided(job.run(2, 9, own=False, resume={"reshard": True}))
        assert job.extras == [{"lr": 0.5}] * 2
        alone = job.run(1, 12, own=False, resume={"reshard": True})
        assert alone[0]["saved_bytes"] == alone[0]["held_bytes"], "a single rank divides with nobody"
        assert "event=not_divided" not in daemon.log
