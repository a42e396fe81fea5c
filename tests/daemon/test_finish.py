"""The end of a job when the daemon is not there."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.daemon import Daemon, RunDirs, look_for
from tests.support.numpy_trainer import TrainerProcess


def test_a_daemon_that_was_away_at_the_end_gets_the_last_step(run_dirs: RunDirs) -> None:
    """`finish` waits for it; what it then makes durable is the last step, not the last one before it went away."""
    with Daemon(run_dirs, durable_dir=str(run_dirs.durable)) as daemon:
        with TrainerProcess(run_dirs, steps=8, wait_at=4, settle=False) as trainer:
            trainer.wait_for("waiting")
            daemon.kill()
            trainer.go_on()
            time.sleep(2.0)  # steps 5 to 8 without a daemon, then it waits
            assert trainer.last("finished") is None
            daemon.start()
            assert trainer.wait() == 0, trainer.events
        assert Path(run_dirs.durable, "fault", "step-8.e1", "MANIFEST").exists()
        assert not look_for(run_dirs.shm, "*.slot-*")
