"""`baftd start`, `stop` and the reading verbs with a real daemon, in the background as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baftd import __version__
from tests.support.daemon import Daemon, RunDirs, processes_with, wait_until


class Shell:
    """Runs `baftd` as a command."""

    def __init__(self, dirs: RunDirs) -> None:
        self.dirs = dirs
        self.cwd = dirs.base

    def __call__(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "baftd.cli.main", *arguments],
            env=self.dirs.environ(**settings),
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        """What `baftd status --json` prints."""
        done = self("status", "--json")
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document


@pytest.fixture
def shell(run_dirs: RunDirs) -> Iterator[Shell]:
    shell = Shell(run_dirs)
    yield shell
    if run_dirs.socket.exists():
        shell("stop", "--force")


def ended(pid: int) -> bool:
    """Whether a process is gone or only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_start_status_stop(shell: Shell) -> None:
    done = shell("start", "--durable-dir", str(shell.dirs.durable))
    assert done.returncode == 0, done.stderr
    assert "baftd runs on node-a (pid " in done.stdout
    assert str(shell.dirs.durable) in done.stdout
    status = shell.status()
    pid = status["pid"]
    assert status["node"] == "node-a"
    assert status["daemon_version"] == __version__
    assert status["durable_dir"] == str(shell.dirs.durable)
    assert status["jobs"] == []
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert Path(f"/proc/{pid}/comm").read_text() == "baftd\n"
    assert os.stat(shell.dirs.run / "baftd.log").st_mode & 0o777 == 0o600
    assert shell.dirs.run.stat().st_mode & 0o777 == 0o700
    for arguments in (("list",), ("gc", "--dry-run"), ("gc",), ("doctor",)):
        read = shell(*arguments, durable_dir=str(shell.dirs.durable))
        assert read.returncode == 0, read.stdout + read.stderr

    again = shell("start", durable_dir=str(shell.dirs.durable))
    assert (again.returncode, again.stdout) == (0, f"baftd runs already on node-a (pid {pid}).\n")
    other = shell("start")
    assert other.returncode == 5
    assert "durable_dir" in other.stderr

    stopped = shell("stop")
    assert (stopped.returncode, stopped.stdout) == (0, f"baftd (pid {pid}) has ended.\n")
    assert ended(pid)
    assert not shell.dirs.socket.exists()
    assert shell("status").returncode == 6
    assert list(shell.dirs.shm.iterdir()) == []
    log = (shell.dirs.run / "baftd.log").read_text()
    assert "Traceback" not in log


def test_the_terminals_signals_do_not_reach_it(shell: Shell) -> None:
    assert shell("start").returncode == 0
    pid = shell.status()["pid"]
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGHUP)
    assert shell.status()["pid"] == pid


def test_json_log(shell: Shell) -> None:
    assert shell("start", "--log-format", "json", "--log-level", "debug").returncode == 0
    assert shell("stop").returncode == 0
    lines = (shell.dirs.run / "baftd.log").read_text().splitlines()
    assert lines
    for line in lines:
        assert {"time", "level", "room", "event"} <= set(json.loads(line))


def test_a_daemon_killed_leaves_nothing_in_the_way(shell: Shell) -> None:
    assert shell("start").returncode == 0
    first = shell.status()["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: ended(first), "the daemon is dead")
    assert shell("status").returncode == 6
    done = shell("start")
    assert done.returncode == 0, done.stderr
    assert shell.status()["pid"] != first


def test_a_start_that_fails_says_why(shell: Shell) -> None:
    shell.dirs.shm.chmod(0o700)
    done = shell("start", shm_dir=str(shell.dirs.base / "missing" / "shm"))
    assert done.returncode not in (0, 75), done.stdout
    assert "missing/shm" in done.stderr
    assert "its log is" in done.stderr
    assert processes_with("BAFTD_RUN_DIR", str(shell.dirs.run)) == []


def test_a_start_with_a_wrong_setting_starts_nothing(shell: Shell) -> None:
    (shell.cwd / "baftd.toml").write_text('durable_every = "10 parsecs"\n')
    done = shell("start")
    assert done.returncode == 2
    assert "./baftd.toml:1" in done.stderr
    assert not (shell.dirs.run / "baftd.log").exists()


def test_settings_of_the_working_directory_reach_the_daemon(shell: Shell) -> None:
    (shell.cwd / "baftd.toml").write_text(f'[durable]\ndir = "{shell.dirs.durable}"\n')
    assert shell("start").returncode == 0
    assert shell.status()["durable_dir"] == str(shell.dirs.durable)


def test_a_run_directory_that_others_may_enter(shell: Shell) -> None:
    shell.dirs.run.mkdir()
    shell.dirs.run.chmod(0o755)
    done = shell("start")
    assert done.returncode == 2
    assert "chmod 700" in done.stderr


def test_the_log_may_not_be_a_link(shell: Shell) -> None:
    shell.dirs.run.mkdir(mode=0o700)
    victim = shell.dirs.base / "victim"
    victim.write_text("kept")
    (shell.dirs.run / "baftd.log").symlink_to(victim)
    done = shell("start")
    assert done.returncode == 2
    assert "baftd.log" in done.stderr
    assert victim.read_text() == "kept"


def test_two_starts_at_once(shell: Shell) -> None:
    command = [sys.executable, "-m", "baftd.cli.main", "start"]
    both = [
        subprocess.Popen(command, env=shell.dirs.environ(), cwd=shell.cwd, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    pid = shell.status()["pid"]
    assert all(f"pid {pid}" in text for text in told)
    wait_until(
        lambda: processes_with("BAFTD_RUN_DIR", str(shell.dirs.run)) == [pid], "only one daemon is left", timeout=10
    )


def test_a_hanging_daemon_is_named(daemon: Daemon) -> None:
    shell = Shell(daemon.dirs)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        done = shell("start", **daemon.more)
        assert done.returncode == 75
        assert f"{daemon.pid}" in done.stderr
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_foreground_ends_with_sigterm_and_with_stop(run_dirs: RunDirs) -> None:
    first = Daemon(run_dirs).start()
    assert first.terminate() == 0
    second = Daemon(run_dirs).start()
    assert Shell(run_dirs)("stop").returncode == 0
    assert second.process is not None
    assert second.process.wait(10) == 0
    assert "Traceback" not in first.log + second.log


def test_doctor_knows_the_daemon(daemon: Daemon) -> None:
    done = Shell(daemon.dirs)("doctor", "--json", **daemon.more)
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, done.stdout
    assert found["daemon"]["state"] == "ok"
    assert f"pid {daemon.pid}" in found["daemon"]["text"]
    done = Shell(daemon.dirs)("doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "durable_dir" in found["daemon settings"]["text"]
