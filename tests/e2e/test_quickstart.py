"""The quickstart: its story, told with trainers that are forked; with --full as scripts/quickstart.sh tells it."""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon import ROOT
from tests.support.zygote import Zygote, as_subprocess


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


def run_here(zygote: Zygote, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The same in this process, so that its trainers can be forked: six of them would import torch."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "examples"))
    quickstart = importlib.import_module("quickstart")
    monkeypatch.setattr(quickstart, "subprocess", as_subprocess(zygote))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    try:
        status: int = quickstart.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    return status


@pytest.mark.timeout(300)
def test_the_quickstart_shows_what_it_promises_and_leaves_nothing(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_here(zygote, monkeypatch, "--steps", "40")
    told(code, capsys.readouterr().out)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_it_does_so_as_a_user_starts_it() -> None:
    done = run("--steps", "48")
    told(done.returncode, done.stdout + done.stderr)


def told(code: int, output: str) -> None:
    """The story went well, in all its parts."""
    assert code == 0, output
    for promised in (
        r"kill -9 \d+ \(rank 1\) in step \d+",
        r"restore plan of job gpt: step \d+",
        r"steps lost to the crash +[012] ",
        r"restore time +\d+\.\d\d s",
        r"overhead of snapshots +[+-]\d+\.\d % \+- \d+\.\d of a step",
        r"losses +bit-identical",
    ):
        assert re.search(promised, output), (promised, output)
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
