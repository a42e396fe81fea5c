"""Remove what no job wants any more: slots of finished or expired jobs, abandoned and superseded checkpoints."""

from __future__ import annotations

import argparse

from baftd.cli.common import (
    ProgressLine,
    add_json,
    add_settings,
    ask,
    connect,
    fields_of,
    job_name,
    print_json,
    settings_of,
)
from baftd.cli.render import say, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd gc`."""
    parser.add_argument("--dry-run", action="store_true", help="only print what would go")
    parser.add_argument("--job", type=job_name, help="only this job")
    add_json(parser)
    add_settings(parser, ["run_dir"])


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print a line for each thing."""
    from baftd.wire.messages import GcReply, GcRequest

    settings = settings_of(arguments)
    progress = ProgressLine(silent=arguments.json)
    with connect(settings) as connection:
        try:
            request = GcRequest(dry_run=arguments.dry_run, job=arguments.job)
            reply = ask(connection, request, GcReply, timeout=120, progress=progress)
        finally:
            progress.close()
    if arguments.json:
        print_json("gc", {**fields_of(reply), "dry_run": arguments.dry_run})
        return 0
    for line in reply.lines:
        say(line)
    if not reply.lines:
        say("Nothing to remove.")
    elif arguments.dry_run:
        say(f"{size(reply.bytes)} would be freed.")
    else:
        say(f"{size(reply.bytes)} freed.")
    return 0
