"""End the daemon of this node and wait until it has gone.

Running durable writes are finished first (--force: they are abandoned). Slots stay in shared memory, training goes on
without snapshots until a daemon runs again.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from baftd.cli.common import add_settings, ask, connect, positive, settings_of
from baftd.cli.render import say
from baftd.errors import TryAgain, Unreachable


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
    with connect(settings) as connection:
        try:
            status = ask(connection, StatusRequest(), StatusReply, timeout=10)
        except Unreachable:
            if settings.socket.exists():
                raise
            say(f"baftd does not run in {settings.run_dir}.")
            return 0
        start = _start_time(status.pid)
        ask(connection, StopRequest(force=arguments.force), Ack, timeout=arguments.timeout)
    deadline = time.monotonic() + arguments.timeout
    while settings.socket.exists() or (start is not None and _start_time(status.pid) == start):
        if time.monotonic() > deadline:
            raise TryAgain(
                f"the daemon (pid {status.pid}) took the order but still runs after {arguments.timeout:g} s.",
                hint="It finishes a durable write; wait, or `baftd stop --force`.",
            )
        time.sleep(0.05)
    say(f"baftd (pid {status.pid}) has ended.")
    return 0


def _start_time(pid: int) -> int | None:
    """Start of a live process in clock ticks; None when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if os.getpid() == pid or fields[0] in "ZX":
        return None
    return int(fields[19])
