"""A daemon that kills itself at a chosen file operation, and the handle by which a test starts it.

The script reads what to do from FAULT_* variables; the daemon itself knows nothing of them: it is given file operations
that count, and that end the process with SIGKILL when the count is reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from baftd.memory.journal import FileOps
from baftd.storage.files import OsFiles
from tests.support.daemon import ROOT, Daemon, RunDirs

if TYPE_CHECKING:
    from tests.support.zygote import Zygote

JOURNAL_OPS = ("write", "truncate", "fsync", "rename", "sync_directory")
STORAGE_OPS = (
    "open", "close", "preallocate", "pwrite", "truncate", "fsync", "fsync_directory",
    "rename", "link", "unlink", "mkdir", "rmdir",
)  # fmt: skip


class Trigger:
    """Counts operations of one kind of files and ends the process at number `at`: before it, after it, or (for a write)
    in the middle. Without `at` the operations are only written down."""

    def __init__(self, at: int, mode: str, log: str) -> None:
        self.at, self.mode, self.count = at, mode, -1
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if log else -1

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Carry out an operation, or die."""
        self.count += 1
        if self.log >= 0:
            os.write(self.log, f"{name} {args[0] if args else ''}\n".encode())
        if self.count != self.at:
            return call(*args)
        if self.mode == "torn" and name in ("write", "pwrite"):
            data = args[1]
            call(args[0], data[: max(1, len(data) // 2)], *args[2:])
        elif self.mode == "after":
            with contextlib.suppress(OSError):  # a file that is not there is an answer as well
                call(*args)
        return die()


def die() -> NoReturn:
    """SIGKILL, as the kernel's OOM killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process went on")


def wrap(ops: object, names: tuple[str, ...], trigger: Trigger) -> None:
    """Send the named methods of `ops` through the trigger."""
    for name in names:
        real = getattr(ops, name)

        def through(*args: Any, _name: str = name, _real: Callable[..., Any] = real) -> Any:
            return trigger.around(_name, _real, args)

        setattr(ops, name, through)


def slow_down(workers: Any, seconds: float) -> None:
    """Let digests that nobody waits for take that much longer."""
    real = workers.background

    async def background(self: object, work: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(seconds)
        return await real(self, work, *args)

    if seconds:
        workers.background = background


def main() -> None:
    """The script."""
    from baftd import telemetry
    from baftd.daemon.service import Seams, run_daemon
    from baftd.daemon.workers import Workers
    from baftd.settings import load_settings

    telemetry.configure(level="debug")
    os.umask(0o077)
    journal, storage = FileOps(), OsFiles()
    target, _, rest = os.environ["FAULT_AT"].partition(":")
    number, _, mode = rest.partition(":")
    trigger = Trigger(int(number), mode, os.environ.get("FAULT_LOG", ""))
    if target == "journal":
        wrap(journal, JOURNAL_OPS, trigger)
    else:
        wrap(storage, STORAGE_OPS, trigger)
    slow_down(Workers, float(os.environ.get("FAULT_SLOW_DIGESTS", "0")))
    run_daemon(load_settings(files=()), Seams(journal_ops=journal, storage_ops=storage))


class FaultyDaemon(Daemon):
    """A daemon whose first start ends at a file operation; later starts are ordinary ones."""

    def __init__(self, dirs: RunDirs, at: str, *, zygote: Zygote | None = None, **settings: str) -> None:
        """`at`: "journal:N:MODE" or "storage:N:MODE", MODE before, after or torn; N -1: never (only written down).
        With `zygote` both processes are forked there."""
        super().__init__(dirs, **settings)
        self.at = at
        self.zygote = zygote
        self.died = threading.Event()
        """Set once the faulty process is gone."""
        self.may_start = threading.Event()
        """Must be set for the ordinary daemon to be started; set from the beginning."""
        self.may_start.set()
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self.operations = Path(dirs.base, "operations")

    def spawn_faulty(self, *, slow_digests: float = 0.0) -> None:
        """Start the process that will end by itself; an ordinary daemon takes its place at once.

        `slow_digests`: seconds that each digest in the background takes longer.
        """
        self.starts += 1
        env = {**self.environ(), "FAULT_AT": self.at, "FAULT_LOG": str(self.operations)}
        env["FAULT_SLOW_DIGESTS"] = str(slow_digests)
        with self._log_file() as log:
            if self.zygote is not None:
                self.process = self.zygote.start(
                    "tests.support.faulty_daemon", env=env, cwd=ROOT, stdout=log, stderr=log
                )
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", "from tests.support.faulty_daemon import main; main()"],
                    env=env,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        self._watcher = threading.Thread(target=self._replace, name="faulty-daemon")
        self._watcher.start()

    def spawn(self, *, env: Mapping[str, str] | None = None) -> Daemon:
        """Start the ordinary daemon and do not wait for it to answer."""
        if self.zygote is None:
            return super().spawn(env=env)
        assert not self.running, "the daemon runs already"
        self.starts += 1
        with self._log_file() as log:
            self.process = self.zygote.start(
                "baftd.cli.main",
                ["start", "--foreground"],
                env={**self.environ(), **(env or {})},
                cwd=self.dirs.base,
                stdout=log,
                stderr=log,
            )
        return self

    def _log_file(self) -> IO[bytes]:
        return (self.dirs.base / f"daemon-{id(self):x}-{self.starts}.log").open("ab")

    def _replace(self) -> None:
        while not self._over.is_set():
            if not self.running:
                self.died.set()
                if not self.may_start.wait(60) or self._over.is_set():
                    return
                self.spawn()
                return
            self._over.wait(0.01)

    def stop_watching(self) -> None:
        """From now on no ordinary daemon takes the place of a dead one."""
        self._over.set()
        self.may_start.set()
        if self._watcher is not None:
            self._watcher.join(60)

    def close(self) -> None:
        """Stop watching, then end the process."""
        self.stop_watching()
        super().close()
