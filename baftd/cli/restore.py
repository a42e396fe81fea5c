"""Fix from where a job goes on, or write a checkpoint as ordinary files.

    baftd restore --job J                                  plan, fence, fetch, verify, pin: the next resume() takes it
    baftd restore --job J --dry-run                        only print the plan
    baftd restore --job J --to DIR --format safetensors    write one merged file set, whole tensors

Restarts need no `baftd restore`: resume() finds the newest step by itself. It serves to look first, to choose an older
step, and to have everything fetched and verified before the trainers start.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

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
from baftd.cli.render import age, print_table, say, size
from baftd.errors import UsageError

if TYPE_CHECKING:
    from baftd.wire.messages import RestoreReply

_ASSUMED_RATE = {"memory": 2e9, "peer": 1e9, "durable": 1e9}
"""Bytes a second that the estimate reckons with; the machine's own rates show only when it is done."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd restore`."""
    parser.add_argument("--job", type=job_name, required=True)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=step_number, help="this step [the newest restorable]")
    which.add_argument("--at-most", type=step_number, metavar="STEP", help="the newest restorable up to this step")
    parser.add_argument("--epoch", type=step_number, help="with --to: the epoch of the step")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and change nothing")
    parser.add_argument("--force", action="store_true", help="also fence processes of the job that are still alive")
    parser.add_argument("--to", metavar="DIR", help="write the checkpoint's tensors into this new directory instead")
    parser.add_argument("--format", choices=["safetensors"], help="of the files in DIR [safetensors]")
    add_json(parser)
    add_settings(parser, ["run_dir", "durable_dir"])


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon, print the plan and the next command."""
    from baftd.wire.messages import RestoreReply, RestoreRequest

    settings = settings_of(arguments)
    if arguments.to is not None:
        from baftd.cli.export import run_export

        return run_export(arguments, settings)
    if arguments.format is not None:
        raise UsageError("--format belongs to --to.", hint="Name the new directory for the files with --to DIR.")
    if arguments.epoch is not None:
        raise UsageError("--epoch belongs to --to: a restore plan follows the job's own line of epochs.")
    progress = ProgressLine(silent=arguments.json)
    request = RestoreRequest(
        job=arguments.job,
        step=arguments.step,
        at_most=arguments.at_most,
        dry_run=arguments.dry_run,
        force=arguments.force,
    )
    with connect(settings) as connection:
        try:
            reply = ask(connection, request, RestoreReply, timeout=120, progress=progress)
        finally:
            progress.close()
    if arguments.json:
        print_json("restore_plan", {**fields_of(reply), "estimate_seconds": _estimate(reply)})
    else:
        _print(reply)
    return 0


def _estimate(reply: RestoreReply) -> float:
    """Seconds to bring the shards into the trainers, one after the other."""
    return round(sum(source.bytes / _ASSUMED_RATE[source.tier] for source in reply.sources), 3)


def _print(reply: RestoreReply) -> None:
    total = sum(source.bytes for source in reply.sources)
    ranks = f"{reply.world} rank{'s' if reply.world != 1 else ''}"
    what = f"step {reply.step} (epoch {reply.epoch}, {reply.updates} updates), {ranks}, {size(total)}"
    say(f"{'would restore' if reply.dry_run else 'restore plan of'} job {reply.job}: {what}")
    print_table(
        ["  rank", "tier", "size", "from"],
        [[f"  {source.rank}", source.tier, size(source.bytes), source.where] for source in reply.sources],
        right=["size"],
    )
    for line in reply.passed_over:
        say(f"passed over: {line}")
    for line in reply.fenced:
        say(f"fenced: {line}")
    reached = f" (the job had reached {reply.step + reply.lost_steps})" if reply.lost_steps else ""
    say(f"steps lost: {reply.lost_steps}{reached}")
    if reply.dry_run:
        say(f"estimate: {age(max(0.1, _estimate(reply)))} until the ranks have their state; nothing was changed.")
        return
    say(f"fetched, verified and pinned in {reply.seconds:.1f} s; the next resume() of the job takes this plan.")
    say(f"next: start the job again with {ranks}, as you started it before, for example")
    say(f"    torchrun --nproc-per-node {reply.world} train.py" if reply.world > 1 else "    python train.py")
    say("With another number of ranks, or in another layout, the script must call resume(reshard=True).")
