"""Start the daemon of this node and wait until it answers.

Without --foreground it goes on in the background, its log is `baftd.log` in the run directory. Starting a daemon that
runs already is no error: the command says so and exits with 0 (5 if that daemon has other settings than asked for).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from baftd.cli.common import add_settings, ask, connect, positive, settings_of
from baftd.cli.render import complain, say
from baftd.errors import Degraded, TryAgain, Unreachable, UsageError

if TYPE_CHECKING:
    from baftd.settings import Settings
    from baftd.wire.messages import StatusReply


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd start`."""
    from baftd.settings import SETTINGS

    parser.add_argument("--foreground", action="store_true", help="stay attached, log to stderr")
    parser.add_argument("--detached", action="store_true", help=argparse.SUPPRESS)  # the background half of a start
    parser.add_argument(
        "--wait", type=positive, default="30 s", metavar="DURATION", help="how long to wait until it answers [30 s]"
    )
    add_settings(parser, [name for name, setting in SETTINGS.items() if setting.reader != "trainer"])


def run(arguments: argparse.Namespace) -> int:
    """Serve (--foreground), or start a process that does and wait for it."""
    settings = settings_of(arguments)
    if arguments.foreground:
        return _serve(settings, detached=arguments.detached)
    status = _running(settings)
    if status is not None:
        return _already(settings, status)
    return _spawn(settings, _flags(arguments), arguments.wait)


# ---------------------------------------------------------------- the daemon itself


def _serve(settings: Settings, *, detached: bool) -> int:
    from baftd import telemetry

    os.umask(0o077)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("baftd")  # what `pgrep` and `top` show
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # several descriptors for each rank
    telemetry.configure(
        level=settings.log_level, format=settings.log_format, path=_log_path(settings) if detached else None
    )
    if detached:
        os.chdir("/")  # keeps no file system busy
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of somebody's login is not the end of the daemon
    from baftd.daemon.service import run_daemon

    run_daemon(settings)
    return 0


def _log_path(settings: Settings) -> Path:
    return settings.run_dir / "baftd.log"


# ---------------------------------------------------------------- starting it


def _running(settings: Settings) -> StatusReply | None:
    """What a daemon that answers here says; None when none does."""
    from baftd.wire.messages import StatusReply, StatusRequest

    if not settings.socket.exists():
        return None
    with connect(settings, timeout=1.0) as connection:
        try:
            return ask(connection, StatusRequest(), StatusReply, timeout=5.0)
        except Unreachable:
            return None  # a stale socket, or a daemon that hangs: the new one finds out by the lock


def _already(settings: Settings, status: StatusReply) -> int:
    asked = {
        "node": (settings.node, status.node),
        "shm_dir": (str(settings.shm_dir), status.shm_dir),
        "durable_dir": (str(settings.durable_dir or ""), status.durable_dir),
    }
    other = [
        f"{name}={there or 'off'} (asked for: {here or 'off'})"
        for name, (here, there) in asked.items()
        if here != there
    ]
    if other:
        raise Degraded(
            f"baftd runs already on {status.node} (pid {status.pid}), but with {', '.join(other)}.",
            hint="`baftd stop`, then start it again, to take the new settings.",
        )
    say(f"baftd runs already on {status.node} (pid {status.pid}).")
    return 0


def _flags(arguments: argparse.Namespace) -> list[str]:
    """The settings flags of this command line, for the process in the background."""
    from baftd.settings import SETTINGS

    return [
        f"{setting.flag}={value}"
        for name, setting in SETTINGS.items()
        if (value := getattr(arguments, f"setting_{name}", None)) is not None
    ]


def _command() -> list[str]:
    """How to run this program again: by its script where there is one (no module of the working directory is in the
    way then, and it looks right in `ps`)."""
    script = Path(sys.argv[0])
    if script.name == "baftd" and script.is_file():
        return [sys.executable, str(script.resolve())]
    return [sys.executable, "-m", "baftd.cli.main"]


def _spawn(settings: Settings, flags: list[str], wait: float) -> int:
    log = _log_path(settings)
    descriptor = _open_log(settings, log)
    try:
        begin = os.fstat(descriptor).st_size
        process = subprocess.Popen(
            [*_command(), "start", "--foreground", "--detached", *flags],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    deadline = time.monotonic() + wait
    while True:
        status = _running(settings)
        if status is not None and status.pid == process.pid:
            say(f"baftd runs on {status.node} (pid {status.pid}); log {log}, socket {settings.socket}.")
            durable = f"in {status.durable_dir}" if status.durable_dir else "off"
            say(f"Slots in {status.shm_dir}, durable tier {durable}.")
            _warn_of_durable(settings)
            process.returncode = 0  # it lives on: nobody is to wait for it, and no warning is due
            return 0
        if process.poll() is not None:
            if status is not None:
                return _already(settings, status)  # another start was faster
            words = _last_words(log, begin)
            complain(f"the daemon ended at once (exit code {process.returncode}): {words}")
            complain(f"its log is {log}.")
            return process.returncode if process.returncode > 0 else 1
        if time.monotonic() > deadline:
            process.returncode = 0
            raise TryAgain(
                f"the daemon (pid {process.pid}) does not answer after {wait:g} s; it was left running. "
                f"The last line of its log: {_last_words(log, begin)}",
                hint=f"See {log}; `baftd status` tells when it is ready.",
            )
        time.sleep(0.03)


def _warn_of_durable(settings: Settings) -> None:
    """A durable directory that cannot be used now stops nothing, but nobody should find out at the first crash."""
    from baftd.cli.checks import check_durable

    found = check_durable(settings.durable_dir)
    if found.state == "fail":
        complain(f"{found.name}: {found.text}. {found.advice} Checkpoints stay in memory until then.")


def _open_log(settings: Settings, log: Path) -> int:
    """The log file, opened for appending: ours, private, no link."""
    from baftd.wire.credentials import prepare_run_dir

    prepare_run_dir(settings.run_dir)
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"the log {log} cannot be opened: {error.strerror}.", hint="Name another directory with --run-dir."
        ) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise UsageError(f"{log} is not a file of uid {os.geteuid()}.", hint="Name another directory with --run-dir.")
    return descriptor


def _last_words(log: Path, begin: int) -> str:
    """The most telling line that was written since `begin`: the error's sentence, else the last line."""
    try:
        with log.open("rb") as stream:
            stream.seek(begin)
            lines = stream.read(1 << 20).decode(errors="replace").strip().splitlines()
    except OSError as error:
        return f"(the log cannot be read: {error.strerror})"
    told = [line.removeprefix("baftd: ") for line in lines if line.startswith("baftd: ")]
    return (told or lines or ["(it wrote nothing)"])[-1]
