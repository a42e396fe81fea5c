"""The life of a job as its user sees it: trained, killed, looked at, restored, exported, finished, cleaned up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import Cli
from tests.support.daemon import ROOT, Daemon, RunDirs, look_for, wait_until

JOB = "numpy-job"


class Run:
    """One start of the example in scripts/examples."""

    def __init__(self, daemon: Daemon, steps: int, number: int) -> None:
        self._out = daemon.dirs.base / f"job-{number}.log"
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "scripts/examples/numpy_job.py"), str(steps)],
                env=daemon.environ(),
                cwd=daemon.dirs.base,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    @property
    def losses(self) -> dict[int, str]:
        """Loss by step, as printed."""
        return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", self.text, re.MULTILINE)}

    @property
    def text(self) -> str:
        """All output so far."""
        return self._out.read_text()

    def reach(self, step: int) -> None:
        """Wait until the job has printed `step`."""
        wait_until(lambda: max(self.losses, default=0) >= step, lambda: f"step {step}; so far:\n{self.text[-2000:]}")

    def end(self, timeout: float = 60.0) -> int:
        """Wait for the end of the process."""
        return self.process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture
def job_daemon(run_dirs: RunDirs) -> Iterator[Daemon]:
    run_dirs.more.update(durable_dir=str(run_dirs.durable), durable_every="20 steps", durable_keep="2")
    with Daemon(run_dirs) as daemon:
        yield daemon


def test_the_life_of_a_job(job_daemon: Daemon, cli: Cli) -> None:
    runs: list[Run] = []
    try:
        first = Run(job_daemon, 100_000, 1)
        runs.append(first)
        first.reach(100)
        wait_until(lambda: "durable" in cli.json("status")[1]["jobs"][0]["committed"], "a durable checkpoint")

        code, out, err = cli("restore", "--job", JOB)
        assert code == 75, out
        assert f"pid {first.process.pid}" in err
        code, out, _ = cli("status")
        assert "committed(memory): step " in out
        assert re.search(rf"0 +{first.process.pid} +training", out)
        os.kill(first.process.pid, signal.SIGKILL)
        first.end()

        wait_until(lambda: "dead" in cli("status")[1], lambda: f"the death is seen: {cli('status')[1]}")
        document = cli.json("restore", "--job", JOB, "--dry-run")[1]
        newest = document["step"]
        assert document["dry_run"] is True
        assert [source["tier"] for source in document["sources"]] == ["memory"]
        assert newest in [row["step"] for row in cli.json("list")[1]["rows"]]

        durable = next(row for row in cli.json("list", "--job", JOB)[1]["rows"] if "durable" in row["tiers"])
        code, out, err = cli("show", str(durable["step"]), "--tensors")
        assert code == 0, err
        assert re.search(r"w +F64 +512 ", out)
        code, out, _ = cli("verify", "--job", JOB)
        assert code == 0, out

        exported = cli.dirs.base / "exported"
        assert cli("restore", "--job", JOB, "--to", str(exported))[0] == 0
        assert (exported / "model.safetensors").exists()

        code, out, err = cli("restore", "--job", JOB)
        assert code == 0, err
        assert f"step {newest} " in out
        assert "next resume()" in out
        assert f"goes on from step {newest}, which is kept" in cli("status")[1]
        assert cli.json("status")[1]["jobs"][0]["restored"] == newest
        second = Run(job_daemon, newest + 50, 2)
        runs.append(second)
        assert second.end() == 0, second.text
        assert min(second.losses) == newest + 1
        again = set(first.losses) & set(second.losses)
        assert {step: first.losses[step] for step in again} == {step: second.losses[step] for step in again}

        assert cli("gc")[0] == 0
        rows = cli.json("list", "--job", JOB)[1]["rows"]
        assert next(row["step"] for row in rows if "durable" in row["tiers"]) == newest + 50
        left = [str(path) for path in look_for(cli.dirs.shm, "*.slot-*")]
        assert left == [], "finish() with a durable tier frees the slots"
    finally:
        for run in runs:
            run.kill()


def test_a_mistyped_job_stays_unknown_whatever_is_asked_about_it(job_daemon: Daemon, cli: Cli) -> None:
    for _ in range(2):
        assert cli("list", "--job", "nope")[1] == "No checkpoint of job nope.\n"
        assert cli("show", "3", "--job", "nope")[0] == 1
        assert cli("verify", "--job", "nope")[0] == 2
        assert cli("gc", "--job", "nope")[0] == 0
        for more in ([], ["--dry-run"], ["--step", "3"], ["--to", str(cli.dirs.base / "exported")]):
            code, out, err = cli("restore", "--job", "nope", *more)
            assert (code, out) == (3, ""), more
            assert "job nope is not known" in err
    assert not look_for(cli.dirs.shm, "nope"), "asking makes nothing"
    assert not look_for(cli.dirs.state, "nope")


def test_a_durable_directory_that_fails_is_told_by_status(job_daemon: Daemon, cli: Cli) -> None:
    cli.dirs.durable.rmdir()
    cli.dirs.durable.write_text("in the way")
    run = Run(job_daemon, 50, 1)
    try:
        assert run.end() == 0, run.text
    finally:
        run.kill()
    assert re.search(f"not durable: .*{cli.dirs.durable}", cli("status")[1])
    assert str(cli.dirs.durable) in cli.json("status")[1]["jobs"][0]["durable_failure"]
    assert cli.json("restore", "--job", JOB, "--dry-run")[1]["step"] == 50


def test_a_damaged_shard_is_found_and_passed_over(job_daemon: Daemon, cli: Cli) -> None:
    run = Run(job_daemon, 60, 1)
    try:
        assert run.end() == 0, run.text
    finally:
        run.kill()
    rows = cli.json("list", "--job", JOB)[1]["rows"]
    newest = next(row for row in rows if "durable" in row["tiers"])
    assert newest["step"] == 60
    shard = Path(newest["path"]) / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0x10
    shard.chmod(0o600)
    shard.write_bytes(data)

    code, out, _ = cli("verify", "60", "--job", JOB)
    assert code == 4
    assert "rank 0" in out
    code, document = cli.json("restore", "--job", JOB, "--dry-run")
    if code == 0:
        assert document["step"] < 60
        assert any("60" in line for line in document["passed_over"])
    else:
        assert code == 3
    assert [row["state"] for row in cli.json("show", "60")[1]["rows"]] == ["quarantined"]
