"""Real daemons for tests: directories of their own, started as a user would, ended by their own PID."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baftd.settings import Settings
    from baftd.wire.client import Connection
    from baftd.wire.messages import Reply, Request, StatusReply
    from tests.support.zygote import Forked

ROOT = Path(__file__).resolve().parents[2]
"""Of the repository."""

_serial = itertools.count(1)


def wait_until(ready: Callable[[], bool], what: str | Callable[[], str], *, timeout: float = 20.0) -> None:
    """Poll `ready` until it is true; fail naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pause = 0.002
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)


def look_for(base: Path, pattern: str) -> list[Path]:
    """What `Path.rglob` finds below `base`, sorted, where a daemon is at work: what vanishes meanwhile counts as gone.
    That one raises FileNotFoundError for a directory that goes while it looks."""
    return sorted(
        path
        for folder, folders, files in os.walk(base)
        for path in (Path(folder, name) for name in (*folders, *files))
        if path.match(pattern)
    )


def processes_with(variable: str, value: str) -> list[int]:
    """Live processes of this user whose environment holds `variable=value`, this one left out."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = Path(entry.path, "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or gone
            continue
        if wanted in environ:
            found.append(int(entry.name))
    return found


class RunDirs:
    """Directories of one test: run and state (short paths: the socket's must stay under 107 bytes), durable on the disk
    that holds the temporary directory, shm on tmpfs. `close` removes them all."""

    def __init__(self, **settings: str) -> None:
        """`settings`: more settings by name, as text, for every process started with `environ`."""
        self.base = Path(tempfile.mkdtemp(prefix="baftd-t", dir="/tmp"))
        self.run = self.base / "run"
        self.state = self.base / "state"
        self.durable = self.base / "durable"
        self.shm = Path(f"/dev/shm/baftd-test-{os.getpid()}-{next(_serial)}")
        self.shm.mkdir(mode=0o700)
        self.durable.mkdir()
        self.more = dict(settings)
        self.daemons: list[Daemon] = []

    @property
    def socket(self) -> Path:
        """The control socket of a daemon that runs here."""
        return self.run / "baftd.sock"

    def environ(self, **settings: str) -> dict[str, str]:
        """This process's environment, without BAFTD_* variables of the caller's, with those of these directories."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BAFTD_")}
        paths = [str(ROOT), str(ROOT / "clients"), str(ROOT / "adapters"), os.environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environ["PYTHONFAULTHANDLER"] = "1"
        values = {
            "run_dir": str(self.run),
            "state_dir": str(self.state),
            "shm_dir": str(self.shm),
            "node": "node-a",
            "memory_reserve": "1 MiB",
            "interval": "1 step",  # what a test counts must not depend on how fast the machine is
            **self.more,
            **settings,
        }
        environ.update({f"BAFTD_{name.upper()}": value for name, value in values.items()})
        return environ

    def settings(self, **settings: str) -> Settings:
        """The same as a `Settings` value, for code that runs inside the test."""
        from baftd.settings import load_settings

        variables = {k: v for k, v in self.environ(**settings).items() if k.startswith("BAFTD_")}
        return load_settings(environ=variables, files=())

    def logs(self) -> Iterator[tuple[str, str]]:
        """(title, end of the text) of every log below `base`."""
        for path in look_for(self.base, "*.log"):
            with contextlib.suppress(OSError):
                yield str(path.relative_to(self.base)), path.read_text(errors="replace")[-20_000:]

    def close(self) -> list[str]:
        """End what still runs here, by PID, remove the directories; names what was still running."""
        known = {daemon.pid for daemon in self.daemons if daemon.process is not None}
        for daemon in self.daemons:
            daemon.close()
        left = []
        for pid in processes_with("BAFTD_RUN_DIR", str(self.run)):
            if pid in known:
                continue
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if not command:  # a zombie of somebody else
                    continue
                left.append(f"pid {pid}: {command.strip()}")
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.shm, ignore_errors=True)
        shutil.rmtree(self.base, ignore_errors=True)
        return left


class Daemon:
    """One `baftd start --foreground` in the directories of `dirs`; may be killed and started again."""

    def __init__(self, dirs: RunDirs, **settings: str) -> None:
        """`settings`: settings of this daemon by name, as text, for example `durable_dir=str(dirs.durable)`."""
        self.dirs = dirs
        self.more = dict(settings)
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.starts = 0
        dirs.daemons.append(self)

    def __enter__(self) -> Daemon:
        if self.process is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the daemon's process."""
        assert self.process is not None, "the daemon was not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self.process is not None and self.process.poll() is None

    @property
    def log(self) -> str:
        """All that was written by this and earlier starts."""
        return "".join(text for title, text in self.dirs.logs() if title.startswith("daemon-"))

    def environ(self, **settings: str) -> dict[str, str]:
        """Environment for processes that talk to this daemon."""
        return self.dirs.environ(**{**self.more, **settings})

    def spawn(self, *, env: Mapping[str, str] | None = None) -> Daemon:
        """Start the process and do not wait for it to answer."""
        assert not self.running, "the daemon runs already"
        self.starts += 1
        with (self.dirs.base / f"daemon-{id(self):x}-{self.starts}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "baftd.cli.main", "start", "--foreground"],
                env={**self.environ(), **(env or {})},
                cwd=self.dirs.base,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def start(self, *, timeout: float = 30.0, env: Mapping[str, str] | None = None) -> Daemon:
        """Start the process and wait until it answers."""
        self.spawn(env=env)
        self.wait_ready(timeout=timeout)
        return self

    def wait_ready(self, *, timeout: float = 30.0) -> None:
        """Wait until the daemon answers; fail with its log when it ends or does not."""
        deadline = time.monotonic() + timeout
        while True:
            if not self.running:
                assert self.process is not None
                raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.log[-4000:]}")
            if self.dirs.socket.exists() and self._answers():
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"the daemon does not answer within {timeout:g} s:\n{self.log[-4000:]}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        from baftd.errors import Unreachable
        from baftd.wire.messages import StatusRequest

        try:
            self.request(StatusRequest(), timeout=2.0)
        except Unreachable:
            return False
        return True

    def connection(self, timeout: float = 10.0) -> Connection:
        """A blocking connection; close it, or use it in a with statement."""
        from baftd.wire.client import Connection

        return Connection(self.dirs.socket, connect_timeout=timeout)

    def request(self, message: Request, timeout: float = 20.0) -> Reply:
        """One request, one reply, one connection."""
        with self.connection(timeout) as connection:
            return connection.request(message, timeout)

    def status(self) -> StatusReply:
        """What `baftd status` reads."""
        from baftd.wire.messages import StatusReply, StatusRequest

        reply = self.request(StatusRequest())
        assert isinstance(reply, StatusReply)
        return reply

    def terminate(self, *, timeout: float = 30.0) -> int:
        """SIGTERM, wait, return the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self._wait(timeout)

    def kill(self, *, timeout: float = 10.0) -> None:
        """SIGKILL and wait."""
        assert self.process is not None
        self.process.kill()
        self._wait(timeout)

    def restart(self, *, timeout: float = 30.0, env: Mapping[str, str] | None = None) -> Daemon:
        """SIGKILL and start again."""
        if self.running:
            self.kill()
        return self.start(timeout=timeout, env=env)

    def _wait(self, timeout: float) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError(f"the daemon did not end within {timeout:g} s:\n{self.log[-4000:]}") from None

    def close(self) -> None:
        """End the process if it still runs. It may have been stopped on purpose (SIGSTOP)."""
        if self.running:
            assert self.process is not None
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
