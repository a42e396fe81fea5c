"""List the checkpoints that are known, newest first, with the tiers that hold them."""

from __future__ import annotations

import argparse

from baftd.cli.common import add_json, add_settings, ask, connect, fields_of, job_name, print_json, settings_of
from baftd.cli.render import print_table, say, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd list`."""
    parser.add_argument("--job", type=job_name, help="only this job")
    add_json(parser)
    add_settings(parser, ["run_dir"])


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print."""
    from baftd.wire.messages import ListReply, ListRequest

    settings = settings_of(arguments)
    with connect(settings) as connection:
        reply = ask(connection, ListRequest(job=arguments.job), ListReply)
    if arguments.json:
        print_json("checkpoints", fields_of(reply))
        return 0
    if not reply.rows:
        say(f"No checkpoint of job {arguments.job}." if arguments.job else "No checkpoint.")
        return 0
    rows = [
        [
            row.job,
            str(row.step),
            str(row.epoch),
            row.state + (" (pinned)" if row.pinned else ""),
            "+".join(row.tiers) or "-",
            f"{row.parts}/{row.world}",
            size(row.bytes),
            row.reason or row.path,
        ]
        for row in reply.rows
    ]
    print_table(
        ["job", "step", "epoch", "state", "tiers", "parts", "size", "where / why"],
        rows,
        right=["step", "epoch", "parts", "size"],
    )
    return 0
