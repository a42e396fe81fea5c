"""The quickstart, as scripts/quickstart.sh runs it once everything is installed."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    paths = [str(ROOT), str(ROOT / "clients"), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "examples" / "quickstart.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.timeout(300)
def test_the_quickstart_shows_what_it_promises_and_leaves_nothing() -> None:
    done = run("--steps", "48")
    assert done.returncode == 0, done.stdout + done.stderr
    for promised in (
        r"kill -9 \d+ \(rank 1\) in step \d+",
        r"restore plan of job gpt: step \d+",
        r"steps lost to the crash +[012] ",
        r"restore time +\d+\.\d\d s",
        r"overhead of snapshots +[+-]\d+\.\d % \+- \d+\.\d of a step",
        r"losses +bit-identical",
    ):
        assert re.search(promised, done.stdout), (promised, done.stdout)
    for name in ("shm-dir", "run-dir"):
        assert not Path((ROOT / ".quickstart" / name).read_text().strip()).exists()


def test_a_second_one_in_the_same_checkout_is_refused() -> None:
    place = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        done = run()
    finally:
        os.close(place)
    assert done.returncode == 1
    assert "another quickstart runs" in done.stdout


def test_a_step_count_that_makes_no_sense_is_refused() -> None:
    assert run("--steps", "5").returncode == 2
