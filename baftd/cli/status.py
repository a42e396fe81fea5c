"""Print the state of the daemon and of every job on this node."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from baftd.cli.common import (
    add_json,
    add_settings,
    ask,
    connect,
    fields_of,
    job_name,
    positive,
    print_json,
    settings_of,
)
from baftd.cli.pacing_text import pacing_lines
from baftd.cli.render import age, print_table, say, size
from baftd.errors import BaftError

if TYPE_CHECKING:
    from baftd.wire.messages import JobStatus, StatusReply

_TIERS = ("memory", "peer", "durable")
_SHOWN = {"overruns": "short_windows"}
"""Counters under another name than their own: an overrun is what a trace calls so, a copy beyond its window's end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd status`."""
    parser.add_argument("--job", type=job_name, help="only this job")
    parser.add_argument("--watch", nargs="?", const=2.0, type=positive, metavar="DURATION", help="repeat [every 2 s]")
    add_json(parser)
    add_settings(parser, ["run_dir"])


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon and print; with --watch until interrupted."""
    from baftd.wire.messages import StatusReply, StatusRequest

    settings = settings_of(arguments)
    with connect(settings) as connection:
        while True:
            reply = ask(connection, StatusRequest(job=arguments.job), StatusReply)
            if arguments.job and not reply.jobs and not arguments.watch:  # with --watch it is waited for
                raise _no_job(arguments.job, ask(connection, StatusRequest(job=None), StatusReply))
            if arguments.json:
                print_json("status", fields_of(reply))
            else:
                if arguments.watch and sys.stdout.isatty():
                    print("\x1b[H\x1b[2J", end="")
                _print(reply, arguments.job)
            if not arguments.watch:
                return 0
            sys.stdout.flush()
            time.sleep(arguments.watch)


def _no_job(job: str, reply: StatusReply) -> BaftError:
    names = ", ".join(one.job for one in reply.jobs)
    there = f"There {'is' if len(reply.jobs) == 1 else 'are'} {names}." if names else "None does."
    return BaftError(
        f"no job {job} runs on {reply.node}.", hint=f"{there} `baftd list --job {job}` shows what it has left."
    )


def _print(reply: StatusReply, job: str | None) -> None:
    say(
        f"baftd {reply.version} on {reply.node}, pid {reply.pid}, up {age(reply.uptime)}, "
        f"coordinator {reply.coordinator}, {size(reply.rss_bytes)} resident"
    )
    say(f"slots in {reply.shm_dir}, durable tier {'in ' + reply.durable_dir if reply.durable_dir else 'off'}")
    troubles = {name: count for name, count in reply.counters.items() if count and name != "messages"}
    if troubles:
        say("daemon: " + ", ".join(f"{name} {count}" for name, count in troubles.items()))
    if not reply.jobs:
        print()
        say(f"No job {job} on this node." if job else "No job on this node.")
    for status in reply.jobs:
        print()
        _print_job(status)


def _print_job(job: JobStatus) -> None:
    say(
        f"job {job.job}: epoch {job.epoch}, {job.world} rank{'s' if job.world != 1 else ''}, "
        f"highest step {job.highest_step}, slots {size(job.slot_bytes)}"
    )
    for tier in _TIERS:
        if tier in job.committed:
            step = job.committed[tier]
            behind = job.highest_step - step
            say(f"  committed({tier}): step {step}" + (f", {behind} behind" if behind > 0 else ""))
    if job.restored is not None:
        say(f"  goes on from step {job.restored}, which is kept until epoch {job.epoch} has committed one")
    elif not job.committed:
        say("  committed: nothing yet")
    counters = {_SHOWN.get(name, name): count for name, count in job.counters.items() if count}
    if counters:
        say("  " + ", ".join(f"{name} {count}" for name, count in counters.items()))
    if job.held_ms_median:
        say(f"  training threads held {job.held_ms_median:.2f} ms a snapshot (median)")
    if job.pacing is not None:
        for line in pacing_lines(job.pacing):
            say(f"  {line}")
    if job.last_skip:
        say(f"  last skip: {job.last_skip}")
    if job.durable_failure:
        say(f"  not durable: {job.durable_failure}")
    if job.clients:
        print_table(
            ["  rank", "pid", "state", "step", "slots"],
            [
                [f"  {client.rank}", str(client.pid), client.state, str(client.step), "; ".join(client.slots)]
                for client in job.clients
            ],
            right=["pid", "step"],
        )
