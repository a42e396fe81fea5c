"""Write what the ranks of a job and the daemon did in a span of steps to a file that https://ui.perfetto.dev opens."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from baftd.cli.common import (
    MOST_STEP,
    add_json,
    add_settings,
    ask,
    connect,
    job_name,
    only_job,
    print_json,
    settings_of,
    step_number,
)
from baftd.cli.output_file import check_output, is_standard_output, write_output
from baftd.cli.render import say, size
from baftd.errors import BaftError, UsageError

if TYPE_CHECKING:
    from baftd.telemetry.chrome_trace import NodeTrace
    from baftd.wire.client import Connection
    from baftd.wire.messages import TraceReply

def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd trace`."""
    parser.add_argument("--job", type=job_name, help="[the only one]")
    parser.add_argument(
        "--steps", type=steps_range, metavar="A:B", default=(0, MOST_STEP),
        help="from step A to step B, both included; either may be left out; one number: that step [all that are kept]",
    )  # fmt: skip
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write; -: standard output")
    add_json(parser)
    add_settings(parser, ["run_dir"])


def steps_range(text: str) -> tuple[int, int]:
    """Argument type: "A:B", "A:", ":B" or "A"."""
    first, colon, last = text.partition(":")
    if not all(part.isdecimal() or (colon and not part) for part in (first, last if colon else first)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a span of steps: 120:160, 120:, :160 or 120")
    begin = step_number(first) if first else 0
    end = begin if not colon else step_number(last) if last else MOST_STEP
    if end < begin:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return begin, end


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon of this node and write the file."""
    plain = arguments.output == "-" or is_standard_output(arguments.output)  # then nothing else may stand there
    if not plain:
        check_output(arguments.output, "-o")
    if arguments.json and plain:
        raise UsageError("with --json the trace itself cannot go to standard output.", hint="Name a file: -o t.json.")
    settings = settings_of(arguments)
    first, last = arguments.steps
    with connect(settings) as connection:
        reply = _ask(connection, arguments.job or only_job(connection), first, last)
    if not reply.steps:
        raise _nothing(reply, first, last)
    from baftd.telemetry.chrome_trace import chrome_trace

    document = chrome_trace(reply.job, [_node(reply)])
    text = json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"
    if plain:
        sys.stdout.write(text)
        return 0
    written = arguments.output
    _write(written, text.encode())
    steps = sorted({step.step for step in reply.steps})
    ranks = sorted({step.rank for step in reply.steps})
    slices = sum(event["ph"] == "X" for event in document["traceEvents"])
    if arguments.json:
        facts = {"job": reply.job, "node": reply.node, "epoch": reply.epoch, "path": written, "bytes": len(text)}
        print_json("trace", {**facts, "steps": [steps[0], steps[-1]], "ranks": ranks, "slices": slices})
        return 0
    few = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    say(f"{written}: {few} of {of} of job {reply.job} on {reply.node}, {slices} slices, {size(len(text))}")
    if steps[0] > first > 0 or steps[-1] < last < MOST_STEP:
        say(f"asked for were {_asked(first, last)}; kept are {reply.kept[0]} to {reply.kept[1]}")
    say("Open it at https://ui.perfetto.dev (or chrome://tracing).")
    return 0


def _ask(connection: Connection, job: str, first: int, last: int) -> TraceReply:
    from baftd.wire.messages import TraceReply, TraceRequest

    return ask(connection, TraceRequest(job=job, first=first, last=last), TraceReply)


def _nothing(reply: TraceReply, first: int, last: int) -> BaftError:
    """What is wrong, and what to do, where no step was found."""
    if reply.kept == (0, 0):
        return BaftError(
            f"no rank of job {reply.job} on {reply.node} has told what it did in a step.",
            hint="Timings come with every step of a process that is attached; `baftd status` shows which are.",
        )
    asked, oldest, newest = _asked(first, last), *reply.kept
    if first > newest:
        return BaftError(
            f"job {reply.job}: no rank on {reply.node} has told of {asked} yet; the newest step is {newest}.",
            hint=f"Kept are steps {oldest} to {newest}; every rank tells of a step soon after it has ended.",
        )
    return BaftError(
        f"job {reply.job}: {asked} {'is' if first == last else 'are'} not kept on {reply.node}; steps {oldest} to "
        f"{newest} are.",
        hint="Only the newest steps are kept." if last < oldest else "",
    )


def _asked(first: int, last: int) -> str:
    if last == MOST_STEP:
        return f"steps from {first} on"
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _node(reply: TraceReply) -> NodeTrace:
    from baftd.pipeline.events import unpack_events
    from baftd.telemetry.chrome_trace import NodeTrace, Period
    from baftd.telemetry.spans import Span

    periods = [
        Period(step.rank, step.step, step.begun, step.period, list(unpack_events(step.events)), step.copied, step.plan)
        for step in reply.steps
    ]
    spans = [Span(span.what, span.begun, span.duration, span.rank, span.step, span.bytes) for span in reply.spans]
    return NodeTrace(reply.node, periods, spans)


def _write(path: str, data: bytes) -> None:
    """Raises `BaftError`."""
    try:
        write_output(path, data, "-o")
    except OSError as error:
        raise BaftError(f"{path} cannot be written: {error.strerror}.") from error
