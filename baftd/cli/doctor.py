"""Look at this machine, its settings and its daemon, and say for each thing whether it is fine and what to do.

Exit code 5 when something must be mended (`fail`); a `warn` is a thing to know.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from baftd import __version__
from baftd.cli.common import add_json, add_settings, ask, connect, print_json, settings_of
from baftd.cli.render import age, print_table
from baftd.errors import BaftError, Degraded, Unreachable

if TYPE_CHECKING:
    from baftd.cli.checks import Finding
    from baftd.settings import Settings

_TROUBLE = ("internal_errors", "journal_repairs")
"""Counters of the daemon that somebody should know of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd doctor`."""
    add_json(parser)
    add_settings(parser, ["run_dir", "state_dir", "shm_dir", "durable_dir"])


def run(arguments: argparse.Namespace) -> int:
    """Check and print."""
    from baftd.cli.checks import check_machine, check_settings

    settings = settings_of(arguments)
    findings = [check_settings(settings), *check_machine(settings), *_check_daemon(settings)]
    failed = [finding for finding in findings if finding.state == "fail"]
    if arguments.json:
        print_json("doctor", {"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [[finding.state, finding.name, finding.text] for finding in findings]
        print_table(["", "what", "found"], rows)
        advice = [finding for finding in findings if finding.advice]
        if advice:
            print()
        for finding in advice:
            print(f"{finding.name}: {finding.advice}")
    return Degraded.exit_code if failed else 0


def _check_daemon(settings: Settings) -> list[Finding]:
    """Whether it runs, is of this version, and has these settings."""
    from baftd.cli.checks import Finding
    from baftd.wire.messages import StatusReply, StatusRequest

    if not settings.socket.exists():
        return [Finding("daemon", "warn", "does not run", "`baftd start`.")]
    try:
        with connect(settings) as connection:
            status = ask(connection, StatusRequest(), StatusReply, timeout=10)
    except Unreachable as error:
        advice = f"`baftd start`; see {settings.run_dir / 'baftd.log'}."
        return [Finding("daemon", "fail", error.message, advice)]
    except BaftError as error:
        return [Finding("daemon", "fail", str(error), "Stop the daemon and start the one of this version.")]
    found = [Finding("daemon", "ok", f"runs on {status.node}, pid {status.pid}, up {age(status.uptime)}")]
    restart = "`baftd stop`, then `baftd start`."
    if status.version != __version__:
        text = f"has version {status.version}, this command {__version__}"
        found.append(Finding("daemon version", "warn", text, restart))
    other = [
        f"{name} is {there or 'off'} there, {here or 'off'} here"
        for name, here, there in (
            ("shm_dir", str(settings.shm_dir), status.shm_dir),
            ("durable_dir", str(settings.durable_dir or ""), status.durable_dir),
        )
        if here != there
    ]
    if other:
        found.append(Finding("daemon settings", "warn", ", ".join(other), restart))
    trouble = [f"{name} {status.counters[name]}" for name in _TROUBLE if status.counters.get(name)]
    if trouble:
        log = settings.run_dir / "baftd.log"
        found.append(Finding("daemon counters", "warn", ", ".join(trouble), f"See {log}."))
    return found
