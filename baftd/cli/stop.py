"""End the daemon of this node and wait until it has gone.

Running durable writes are finished first (--force: they are abandoned). Slots stay in shared memory, training goes on
without snapshots until a daemon runs again.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import TYPE_CHECKING

from baftd.cli.common import add_settings, ask, connect, positive, settings_of
from baftd.cli.render import say
from baftd.errors import TryAgain, Unreachable

if TYPE_CHECKING:
    from baftd.memory.processes import ProcessHandle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd stop`."""
    parser.add_argument("--force", action="store_true", help="do not wait for running durable writes")
    parser.add_argument(
        "--timeout", type=positive, default="2 min", metavar="DURATION", help="how long to wait for the end [2 min]"
    )
    add_settings(parser, ["run_dir"])


def run(arguments: argparse.Namespace) -> int:
    """Ask, then wait."""
    from baftd.wire.messages import Ack, StatusReply, StatusRequest, StopRequest

    settings = settings_of(arguments)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(connect(settings))
        try:
            status = ask(connection, StatusRequest(), StatusReply, timeout=10)
        except Unreachable:
            if settings.socket.exists():
                raise
            say(f"baftd does not run in {settings.run_dir}.")
            return 0
        process = _held(status.pid)
        if process is not None:
            stack.callback(process.close)
        deadline = time.monotonic() + arguments.timeout
        asked = False
        while settings.socket.exists() or (process is not None and process.alive()):
            if time.monotonic() > deadline:
                raise TryAgain(
                    f"the daemon (pid {status.pid}) was told to end but still runs after {arguments.timeout:g} s.",
                    hint="It finishes a durable write; wait, or `baftd stop --force`.",
                )
            if asked:
                time.sleep(0.02)
                continue
            # A daemon that ends at once may do so before its answer is on the way: its end is answer enough.
            with contextlib.suppress(Unreachable):
                ask(connection, StopRequest(force=arguments.force), Ack, timeout=1.0)
                asked = True
    say(f"baftd (pid {status.pid}) has ended.")
    return 0


def _held(pid: int) -> ProcessHandle | None:
    """A handle on the daemon's process; None where it is gone already or cannot be held (then its socket tells)."""
    from baftd.memory.processes import ProcessHandle, start_time

    start = start_time(pid)
    try:
        return ProcessHandle.open(pid, start) if start is not None else None
    except OSError:
        return None
