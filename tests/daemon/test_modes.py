"""Training without a daemon at first, every second step only, and the user's own moments."""

from __future__ import annotations

from pathlib import Path

from tests.support.daemon import Daemon, RunDirs, wait_until
from tests.support.numpy_trainer import TrainerProcess, state_digest


def test_fresh_begins_without_a_daemon_and_joins_one_later(run_dirs: RunDirs) -> None:
    with TrainerProcess(run_dirs, steps=2000, fresh=True, pause=0.02, settle=False) as trainer:
        resumed = trainer.wait_for("resumed")
        assert (resumed["step"], resumed["epoch"]) == (0, 0)
        with Daemon(run_dirs) as daemon:
            wait_until(
                lambda: any(job.committed.get("memory", 0) > 0 for job in daemon.status().jobs),
                lambda: f"a snapshot: {daemon.status()}",
            )
            trainer.kill()
            with TrainerProcess(run_dirs, steps=1, kill={"step": 1}) as again:
                again.wait()
                resumed = again.last("resumed")
                assert resumed is not None
                assert resumed["step"] > 0
                assert resumed["epoch"] == 2
                assert resumed["digest"] == state_digest(resumed["step"])


def test_every_second_step_and_the_last_one(run_dirs: RunDirs) -> None:
    with Daemon(
        run_dirs, interval="2 steps", durable_dir=str(run_dirs.durable), durable_every="1000 steps"
    ) as daemon:
        with TrainerProcess(run_dirs, steps=7, wait_at="end") as trainer:
            trainer.wait_for("waiting")
            (job,) = daemon.status().jobs
            assert job.committed["memory"] in (4, 6)
            assert job.counters["sealed"] == job.committed["memory"] / 2
            assert job.counters["dead"] == 0
            trainer.go_on()
            assert trainer.wait() == 0, trainer.events
        assert Path(run_dirs.durable, "fault", "step-7.e1", "MANIFEST").exists()
        assert list(run_dirs.shm.iterdir()) == []


def test_save_makes_the_present_step_durable(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=6, save_at=3) as trainer:
        assert trainer.wait() == 0, trainer.events
        saved = trainer.last("saved")
        assert saved is not None
        assert (saved["step"], saved["tier"]) == (3, "durable")
        assert Path(saved["path"], "MANIFEST").exists()


def test_save_without_a_durable_tier_is_an_error_that_says_what_to_set(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs), TrainerProcess(run_dirs, steps=6, save_at=3) as trainer:
        assert trainer.wait() == 2, trainer.events
        failed = trainer.last("failed")
        assert failed is not None
        assert "durable_dir" in failed["text"]
