"""The examples, as a user starts them: they run, and a second start goes on after the last step of the first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import ROOT, Daemon, look_for

EXAMPLES = ROOT / "scripts" / "examples"


def run(daemon: Daemon, *command: str) -> str:
    """Run a command to its end; what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**daemon.environ(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "command",
    [
        (str(EXAMPLES / "plain_torch.py"),),
        ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
         str(EXAMPLES / "distributed_torch.py"), "--kind=fsdp2"),
    ],
    ids=["plain", "torchrun-fsdp2"],
)  # fmt: skip
def test_a_second_start_goes_on_after_the_first(command: tuple[str, ...], daemon: Daemon) -> None:
    first = run(daemon, *command, "--steps", "40")
    assert [line.split()[1] for line in first.splitlines() if line.startswith("step")] == ["20", "40"]
    again = run(daemon, *command, "--steps", "80")
    assert [line.split()[1] for line in again.splitlines() if line.startswith("step")] == ["60", "80"]
    assert not look_for(Path(daemon.dirs.shm), "*.slot-*")
