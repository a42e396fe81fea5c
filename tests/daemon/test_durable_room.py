"""A durable directory with room for little more than what retention keeps."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.daemon import Daemon, RunDirs, wait_until
from tests.support.numpy_trainer import TrainerProcess
from tests.support.tmpfs import small_tmpfs


def kept(disk: Path) -> list[str]:
    """Names of the checkpoints that are there."""
    return sorted(name for name in os.listdir(disk / "fault") if name.startswith("step-"))


def test_a_write_waits_for_what_retention_is_deleting(run_dirs: RunDirs, tmp_path: Path) -> None:
    """Two checkpoints fit, three do not: each write needs the room of the one that is being deleted."""
    with (
        small_tmpfs(tmp_path / "disk", "5m") as disk,
        Daemon(run_dirs, durable_dir=str(disk), durable_every="2 steps", durable_keep="1") as daemon,
        TrainerProcess(run_dirs, steps=40, elements=60_000) as trainer,
    ):
        assert trainer.wait() == 0, trainer.events
        assert (disk / "fault" / "step-40.e1" / "MANIFEST").exists()
        assert daemon.status().counters["internal_errors"] == 0
        # `finish` waits for the last step, not for retention, which removes the one before it only then.
        wait_until(lambda: kept(disk) == ["step-40.e1"], lambda: f"only the last step: {kept(disk)}")
