"""`baftd show --bubbles`: predicted and measured gaps of a job's ranks, and what is copied in them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from baftd.cli.common import ask, connect, fields_of, only_job, print_json, settings_of
from baftd.cli.pacing_text import pacing_lines, percent, seconds
from baftd.cli.render import print_table, say, size
from baftd.errors import BaftError

if TYPE_CHECKING:
    from baftd.wire.messages import BubbleRow, BubblesReply, RankPacing

__all__ = ["show_bubbles"]


def show_bubbles(arguments: argparse.Namespace) -> int:
    """Ask the daemon of this node and print. Raises `BaftError` where no rank has told anything yet."""
    from baftd.wire.messages import BubblesReply, BubblesRequest

    settings = settings_of(arguments)
    with connect(settings) as connection:
        job = arguments.job or only_job(connection)
        reply = ask(connection, BubblesRequest(job=job), BubblesReply)
    if not reply.rows and reply.pacing is None:
        raise BaftError(
            f"no rank of job {reply.job} on this node has told what it did in a step.",
            hint="Timings come with every step of a process that is attached; `baftd status` shows which are.",
        )
    if arguments.json:
        print_json("bubbles", fields_of(reply))
    else:
        _print(reply)
    return 0


def _print(reply: BubblesReply) -> None:
    say(
        f"job {reply.job} epoch {reply.epoch}: {reply.schedule or 'no pipeline schedule is known'}, "
        f"measured over {reply.steps} step{'s' if reply.steps != 1 else ''}"
    )
    if reply.pacing is not None:
        for line in pacing_lines(reply.pacing):
            say(f"  {line}")
    if reply.rows:
        print()
        print_table(
            ["rank", "stages", "gap", "a step", "predicted", "measured", "error", "copied in it"],
            [_row(row) for row in reply.rows],
            right=["a step", "predicted", "measured", "error", "copied in it"],
        )
        if reply.error is not None:
            say(f"median error of the prediction: {percent(reply.error)} of the measured length")
    ranks = reply.pacing.ranks if reply.pacing is not None else []
    if ranks:
        print()
        print_table(
            ["rank", "rung", "snapshot", "in windows", "outside", "at fence", "windows a step", "copy rate",
             "fence wait", "held", "short windows"],
            [_rank(rank) for rank in ranks],
            right=["snapshot", "in windows", "outside", "at fence", "windows a step", "copy rate", "fence wait",
                   "held", "short windows"],
        )  # fmt: skip


def _row(row: BubbleRow) -> list[str]:
    foretold = row.predicted
    error = abs(foretold - row.measured) / row.measured if foretold is not None and row.measured > 0 else None
    return [
        str(row.rank),
        ", ".join(map(str, row.stages)) or "-",
        row.kind,
        f"{row.count:.3g}",
        seconds(foretold) if foretold is not None else "-",
        seconds(row.measured),
        percent(error) if error is not None else "-",
        size(row.bytes) if row.bytes else "-",
    ]


def _rank(rank: RankPacing) -> list[str]:
    return [
        str(rank.rank),
        rank.rung,
        size(rank.bytes),
        size(rank.in_windows),
        size(rank.outside),
        size(rank.at_fence),
        seconds(rank.window_seconds),
        f"{size(round(rank.copy_rate))}/s" if rank.copy_rate > 0 else "-",
        seconds(rank.fence_seconds),
        seconds(rank.held_seconds),
        str(rank.overruns),
    ]
