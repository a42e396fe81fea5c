"""Show everything that is known of one step: tiers, parts, where it lies, why it is not offered; and its tensors. With
--bubbles: the gaps of a running job's ranks, predicted and measured, and what is copied in them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baftd.cli.common import (
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
from baftd.cli.render import print_table, say, size
from baftd.errors import BaftError, FormatError, UsageError

if TYPE_CHECKING:
    from baftd.wire.messages import CheckpointRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd show`."""
    parser.add_argument("step", type=step_number, metavar="STEP", nargs="?", help="[with --bubbles none]")
    parser.add_argument("--job", type=job_name, help="[the only one]")
    parser.add_argument("--epoch", type=step_number, help="only this epoch (step numbers repeat after a rollback)")
    parser.add_argument("--tensors", action="store_true", help="list the tensors of its durable shards")
    parser.add_argument("--bubbles", action="store_true", help="predicted and measured gaps of a running job")
    add_json(parser)
    add_settings(parser, ["run_dir"])


def run(arguments: argparse.Namespace) -> int:
    """Ask the daemon for the list and print what it says of this step."""
    from baftd.wire.messages import ListReply, ListRequest

    if arguments.bubbles:
        from baftd.cli.bubbles import show_bubbles

        if arguments.step is not None or arguments.epoch is not None or arguments.tensors:
            raise UsageError(
                "the bubbles of a job are those of its newest steps: --bubbles goes with no step, epoch or tensors.",
                hint="`baftd trace --steps A:B -o t.json` shows single steps.",
            )
        return show_bubbles(arguments)
    if arguments.step is None:
        raise UsageError("STEP is missing.", hint="`baftd list` shows them; `baftd show --bubbles` needs none.")
    settings = settings_of(arguments)
    with connect(settings) as connection:
        reply = ask(connection, ListRequest(job=arguments.job), ListReply)
    rows = [
        row
        for row in reply.rows
        if row.step == arguments.step and (arguments.epoch is None or row.epoch == arguments.epoch)
    ]
    jobs = sorted({row.job for row in rows})
    if len(jobs) > 1:
        problem = f"step {arguments.step} exists in several jobs: {', '.join(jobs)}."
        raise UsageError(problem, hint="Name one with --job.")
    if not rows:
        raise _no_checkpoint(arguments, reply.rows)
    tensors = {row.epoch: _tensors(row) for row in rows} if arguments.tensors else {}
    if arguments.json:
        print_json(
            "checkpoint",
            {"rows": [{**fields_of(row), **({"tensors": tensors[row.epoch]} if tensors else {})} for row in rows]},
        )
        return 0
    for row in rows:
        _print(row)
        if tensors:
            _print_tensors(tensors[row.epoch])
    return 0


def _no_checkpoint(arguments: argparse.Namespace, rows: Sequence[CheckpointRow]) -> BaftError:
    """What is not there, and which command shows or makes what is."""
    epoch = f" in epoch {arguments.epoch}" if arguments.epoch is not None else ""
    job = f" of job {arguments.job}" if arguments.job else ""
    problem = f"no checkpoint of step {arguments.step}{job}{epoch}."
    if rows:
        known = ", ".join(f"{row.job} {row.step}" + (f" (epoch {row.epoch})" if epoch else "") for row in rows[:3])
        return BaftError(problem, hint=f"The newest are: {known}. `baftd list{_of(arguments)}` shows all of them.")
    if job:
        return BaftError(problem, hint="There is none of this job at all; `baftd list` shows those of other jobs.")
    return BaftError(problem, hint="There is none at all here; `baftd status` shows which jobs run and how far.")


def _of(arguments: argparse.Namespace) -> str:
    return f" --job {arguments.job}" if arguments.job else ""


def _print(row: CheckpointRow) -> None:
    say(f"job {row.job} step {row.step} epoch {row.epoch}: {row.state}{' (pinned)' if row.pinned else ''}")
    say(f"  updates  {row.updates}")
    say(f"  tiers    {', '.join(row.tiers) or 'none'}")
    say(f"  parts    {row.parts} of {row.world} ranks")
    say(f"  size     {size(row.bytes)}")
    if row.path:
        say(f"  path     {row.path}")
    if row.reason:
        say(f"  reason   {row.reason}")


def _tensors(row: CheckpointRow) -> list[dict[str, Any]]:
    """Entries of all durable shards of a checkpoint, read from the files' headers."""
    from baftd.checkpoint.image import header_length, parse_image_header

    if not row.path:
        raise UsageError(
            f"step {row.step} (epoch {row.epoch}) is not durable: its tensors can only be listed from files.",
            hint="Leave --tensors out.",
        )
    found: list[dict[str, Any]] = []
    for path in sorted(Path(row.path).glob("rank-*.safetensors")):
        try:
            with path.open("rb") as stream:
                first = stream.read(8)
                image = parse_image_header(first + stream.read(header_length(first) - 8))
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error.strerror}.") from error
        found.extend(
            {
                "rank": path.stem.removeprefix("rank-"),
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "kind": entry.kind,
                "global_shape": list(entry.global_shape) if entry.global_shape is not None else None,
                "ranges": [list(span) for span in entry.ranges] if entry.ranges is not None else None,
                "aliases": list(entry.aliases),
            }
            for entry in image.entries
        )
    return found


def _print_tensors(tensors: list[dict[str, Any]]) -> None:
    print_table(
        ["rank", "tensor", "dtype", "shape", "size", "kind", "ranges of the whole"],
        [
            [
                str(int(item["rank"])),
                item["name"] + (f" = {', '.join(item['aliases'])}" if item["aliases"] else ""),
                item["dtype"],
                "x".join(map(str, item["shape"])) or "scalar",
                size(item["bytes"]),
                item["kind"],
                ", ".join(f"{start}:{stop}" for start, stop in item["ranges"] or []),
            ]
            for item in tensors
        ],
        right=["rank", "size"],
    )
