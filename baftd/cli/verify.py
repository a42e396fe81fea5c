"""Read the bytes of checkpoints again and compare them with their digests.

Exit code 4 when a shard is not what its digest says; that checkpoint is quarantined and not offered any more.
"""

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
    step_number,
)
from baftd.cli.render import say
from baftd.errors import VerificationFailed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd verify`."""
    parser.add_argument("step", nargs="?", type=step_number, metavar="STEP", help="only this step [all]")
    parser.add_argument("--job", type=job_name, required=True)
    parser.add_argument("--epoch", type=step_number, help="only this epoch")
    add_json(parser)
    add_settings(parser, ["run_dir"])


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print a line a shard."""
    from baftd.wire.messages import VerifyReply, VerifyRequest

    settings = settings_of(arguments)
    progress = ProgressLine(silent=arguments.json)
    request = VerifyRequest(job=arguments.job, step=arguments.step, epoch=arguments.epoch)
    with connect(settings) as connection:
        try:
            reply = ask(connection, request, VerifyReply, timeout=120, progress=progress)
        finally:
            progress.close()
    if arguments.json:
        print_json("verification", fields_of(reply))
        return 0 if reply.ok else VerificationFailed.exit_code
    for line in reply.lines:
        say(line)
    say("All verified." if reply.ok else "Damaged: see the lines above; `baftd list` shows what is left.")
    return 0 if reply.ok else VerificationFailed.exit_code
