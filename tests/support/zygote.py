"""A process that has imported everything and forks the daemons and trainers of a test: a start costs milliseconds.

What it starts are real processes with an environment, standard streams and a PID of their own, that die by SIGKILL like
any other. Their `/proc/PID/environ` is the zygote's: `Zygote.close` names those that still live.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any

from tests.support.daemon import ROOT

PRELOAD = (
    "baftd.cli.main", "baftd.cli.start", "baftd.daemon.service", "baft_client.arrays", "baft_client.engine",
    "tests.support.faulty_daemon", "tests.support.numpy_trainer",
)  # fmt: skip
MESSAGE = 1 << 20

# ---------------------------------------------------------------------------------------------- the zygote


def serve() -> None:
    """Fork what the socket on descriptor 0 asks for, until it is closed. One request at a time: JSON and the
    descriptors of stdin, stdout, stderr and a pipe for the exit status; the answer is the PID."""
    for name in sys.argv[1:] or PRELOAD:
        importlib.import_module(name)
    wake, woken = os.pipe()
    for fd in (wake, woken):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}
    with socket.socket(fileno=0) as commands:
        commands.send(b"ready")
        while True:
            ready, _, _ = select.select([commands, wake], [], [])
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                reap(statuses)
            if commands in ready:
                data, fds, _, _ = socket.recv_fds(commands, MESSAGE, 4)
                if not data:
                    return
                pid = os.fork()
                if pid == 0:
                    become(json.loads(data), fds, [commands.detach(), wake, woken, *statuses.values()])
                statuses[pid] = fds[3]
                for fd in fds[:3]:
                    os.close(fd)
                commands.send(str(pid).encode())


def reap(statuses: dict[int, int]) -> None:
    """Tell how those ended that have ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(statuses[pid], str(os.waitstatus_to_exitcode(status)).encode())
        os.close(statuses.pop(pid))


def become(command: dict[str, Any], fds: list[int], inherited: list[int]) -> None:
    """Be the process that was asked for; does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        for fd in (*fds, *(fd for fd in inherited if fd > 2)):
            os.close(fd)
        os.environ.clear()
        os.environ.update(command["env"])
        os.chdir(command["cwd"])
        sys.argv = [command["module"], *command["arguments"]]
        code = int(importlib.import_module(command["module"]).main() or 0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it is, it belongs into the log
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# ---------------------------------------------------------------------------------------------- the handles


def as_subprocess(zygote: Zygote) -> SimpleNamespace:
    """What the module `subprocess` is for a script that starts `[python, SCRIPT, arguments]`: SCRIPT's `main` runs in a
    process that the zygote forks. Everything else is as ever."""

    def popen(command: Sequence[str], *, env: Mapping[str, str], **streams: Any) -> Forked:
        return zygote.start(Path(command[1]).stem, command[2:], env=env, cwd=ROOT, **streams)

    return SimpleNamespace(**{**vars(subprocess), "Popen": popen})



class Forked:
    """What `subprocess.Popen` is for a process that the zygote has forked, as far as tests use it."""

    def __init__(self, pid: int, status: int, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout = stdin, stdout
        self._status = status
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 0.05 if deadline is None else min(0.05, max(0.0, deadline - time.monotonic()))
            code = self._look(left)
            if code is not None:
                return code
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)

    def send_signal(self, number: int) -> None:
        """A signal, unless the process is over."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
                text = os.read(self._status, 64)
                os.close(self._status)
                self.returncode = int(text) if text else -signal.SIGKILL  # the zygote itself was killed
            return self.returncode


class Zygote:
    """The process that forks, and the place where it is asked to. May be used by several threads."""

    def __init__(self, *preload: str, path: Sequence[str | Path] = ()) -> None:
        """`preload`: modules to import instead of `PRELOAD`. `path`: more directories to find modules in."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BAFTD_")}
        paths = [*map(str, (ROOT, ROOT / "clients", ROOT / "adapters", *path)), environ.get("PYTHONPATH", "")]
        environ.update(
            PYTHONPATH=os.pathsep.join(path for path in paths if path), PYTHONFAULTHANDLER="1",
            OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1",
        )  # fmt: skip
        self._lock = threading.Lock()
        self._started: list[Forked] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from tests.support.zygote import serve; serve()", *preload],
                cwd=ROOT,
                env=environ,
                stdin=theirs.fileno(),
            )
        self._socket.settimeout(60.0)
        if self._socket.recv(64) != b"ready":
            raise AssertionError("the process that forks did not start")

    def start(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str],
        cwd: str | Path,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
        stderr: int | IO[bytes] = subprocess.DEVNULL,
    ) -> Forked:
        """Run `module.main()` in a process of its own. Streams are as for `subprocess.Popen`."""
        command = {"module": module, "arguments": list(arguments), "env": dict(env), "cwd": str(cwd)}
        theirs: list[int] = []
        ours: list[IO[bytes] | None] = []
        for stream, mode in ((stdin, os.O_RDONLY), (stdout, os.O_WRONLY), (stderr, os.O_WRONLY)):
            mine = None
            if stream == subprocess.PIPE:
                reading, writing = os.pipe()
                theirs.append(reading if mode == os.O_RDONLY else writing)
                mine = os.fdopen(writing, "wb") if mode == os.O_RDONLY else os.fdopen(reading, "rb")
            elif stream == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, mode))
            else:
                theirs.append(os.dup(stream if isinstance(stream, int) else stream.fileno()))
            ours.append(mine)
        status, telling = os.pipe()
        theirs.append(telling)
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(command).encode()], array.array("i", theirs).tolist())
            pid = int(self._socket.recv(64))
            for fd in theirs:
                os.close(fd)
            started = Forked(pid, status, ours[0], ours[1])
            self._started = [process for process in self._started if process.poll() is None] + [started]
        return started

    def close(self) -> list[str]:
        """End the zygote, and kill what it has started and still lives; names that."""
        left = [f"pid {process.pid}" for process in self._started if process.poll() is None]
        for process in self._started:
            process.kill()
            process.wait(10)
        self._socket.close()
        self._process.wait(10)
        return left

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.close()
        assert kind is not None or not left, f"still running: {left}"
