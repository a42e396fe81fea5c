"""Jobs whose ranks each save a part of what all hold: real daemon, one process a rank."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from baftd.checkpoint.layout import Layout
from baftd.wire.messages import LayoutReply, LayoutRequest
from tests.support.cli import Cli
from tests.support.daemon import ROOT, Daemon, RunDirs, wait_until
from tests.support.divided_job import REPLICATED, ROWS, state_of
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


def divided(run: list[dict[str, Any]], more: int = 0) -> bool:
    """Whether the ranks saved what all hold once, evenly: each a part of that, and what it has for itself."""
    shared = sum(8 * math.prod(shape) for shape in REPLICATED.values()) + more
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


def test_a_daemon_that_is_killed_and_trees_that_change(run_dirs: RunDirs, zygote: Zygote) -> None:
    """What was divided stays so without the daemon that did it. Another room, then another tree, are divided anew."""
    with Daemon(run_dirs, redundancy="none") as daemon:
        job = Job(run_dirs, zygote)
        # All wait for each other at each step, as in a job: no rank meets another tree of others than it has itself.
        all_but_the_last = list(range(1, 9))
        start = job.start(
            4, steps=9, wait_at=all_but_the_last, patience=0.3, room_at=[4], grow_at=6, kill=True
        )  # fmt: skip
        assert [one["step"] for one in start.hear()] == [0] * 4
        for step in all_but_the_last:
            assert [one["waits"] for one in start.hear()] == [step] * 4
            if step == 2:
                daemon.kill()
                daemon.start()
                wait_until(lambda: sorted(ranks_of(daemon)) == [0, 1, 2, 3], "all ranks are back")
                reply = daemon.request(LayoutRequest(job="divided"))
                assert isinstance(reply, LayoutReply)
                layout = Layout.decode(reply.layout)
                assert [sorted(layout.tensor(name).held) for name in REPLICATED] == [[0, 1, 2, 3]] * len(REPLICATED)
            start.go_on()
        last = start.hear()
        start.close()
        assert [one["committed"] for one in last] == [9] * 4
        assert divided(last, more=150 * 8)
        assert divided(job.run(4, 9, grown=True), more=150 * 8)
        assert job.extras == [{"lr": 0.5, "seed": rank} for rank in range(4)]
        plans = re.findall(r"event=divided job=divided plan=([0-9a-f]+)", daemon.log)
        assert plans[0] != plans[-1], "another tree, another plan"
        assert plans[-2] == plans[-1], "the next start has the tree that the last one ended with"


def test_ranges_that_do_not_fit_together(run_dirs: RunDirs, zygote: Zygote) -> None:
    """Who may save what cannot be told: all save what they hold, and it is said."""
    with Daemon(run_dirs, redundancy="none") as daemon:
        job = Job(run_dirs, zygote)
        for begins in (0, 3):
            last = job.run(2, begins, crossing=True, kill=True)
            assert [one["saved_bytes"] for one in last] == [one["held_bytes"] for one in last]
        assert re.search(r"event=not_divided job=divided why=.*'crossed'", daemon.log)
        assert "event=divided " not in daemon.log


def test_another_setting_for_a_job_that_runs(run_dirs: RunDirs, zygote: Zygote) -> None:
    """A daemon that divides no more, and then one that divides again: as soon as one rank lays out anew all do."""
    with Daemon(run_dirs) as daemon:
        start = Job(run_dirs, zygote).start(
            2, steps=12, wait_at=list(range(1, 12)), patience=0.3, room_at=[4, 9], room_of=[0]
        )
        start.hear()
        for step in range(1, 12):
            waits = start.hear()
            if step in (2, 7):
                assert divided(waits) == (step == 7), waits
                daemon.kill()
                daemon.more["redundancy"] = "none" if step == 2 else "replicas"
                daemon.start()
                wait_until(lambda: sorted(ranks_of(daemon)) == [0, 1], "both ranks are back")
            start.go_on()
        last = start.hear()
        start.close()
        assert [one["committed"] for one in last] == [12] * 2
        assert [one["saved_bytes"] for one in last] == [one["held_bytes"] for one in last]


def ranks_of(daemon: Daemon) -> list[int]:
    """Those that the daemon knows."""
    return [client.rank for job in daemon.status().jobs for client in job.clients]


def test_durable(
    run_dirs: RunDirs, zygote: Zygote, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A divided step is written, verified, merged, and restored when the memory is gone."""
    cli = Cli(run_dirs, capsys, monkeypatch)
    settings = {"redundancy": "none", "durable_dir": str(run_dirs.durable)}
    with Daemon(run_dirs, **settings):
        job = Job(run_dirs, zygote)
        start = job.start(3, steps=3, save_at=2, kill=True)
        assert [one["step"] for one in start.hear()] == [0] * 3
        assert [one["saved"] for one in start.hear()] == ["durable"] * 3
        start.hear()
        start.close()
        code, said, _ = cli("verify", "2", "--job", "divided")
        assert code == 0, said
    for path in run_dirs.shm.iterdir():
        shutil.rmtree(path)
    out = run_dirs.base / "merged"
    durable = str(run_dirs.durable)
    assert cli("restore", "--job", "divided", "--to", str(out), "--durable-dir", durable)[0] == 0
    (file,) = out.glob("*.safetensors")
    merged, (state, _) = load_file(file), state_of(2, 0, 3)
    for name in REPLICATED:
        assert np.array_equal(merged[name], state[name]), name
    assert merged["moment"].shape == ROWS
    with Daemon(run_dirs, **settings):
        assert divided(job.run(3, 2, kill=True))
        assert job.extras == [{"lr": 0.5, "seed": rank} for rank in range(3)]
        code, said, _ = cli("restore", "--job", "divided", "--at-most", "4", "--durable-dir", durable)
        assert code == 0, said
        assert "step 2 " in said or "step 4 " in said
        begins = 4 if "step 4 " in said else 2
        assert divided(job.run(2, begins, own=False, resume={"reshard": True}))
