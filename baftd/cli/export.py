"""`baftd restore --to DIR`: a checkpoint as ordinary files, with a daemon or, from the durable tier, without one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from baftd.checkpoint.identity import CheckpointId
from baftd.cli.common import ProgressLine, ask, connect, print_json
from baftd.cli.render import age, say, size
from baftd.errors import NothingRestorable, Unreachable, UsageError, VerificationFailed

if TYPE_CHECKING:
    from baftd.settings import Settings
    from baftd.storage.export import ExportResult, ImageSource
    from baftd.storage.interface import DurableCheckpoint, Tier
    from baftd.wire.messages import RestoreReply, RestoreSource

__all__ = ["run_export"]


def run_export(arguments: argparse.Namespace, settings: Settings) -> int:
    """Choose the checkpoint, write it, say what was written."""
    if not arguments.to:  # or it would be the working directory
        raise UsageError("--to: the name of the directory is empty.", hint="Name a new directory: --to DIR.")
    if arguments.dry_run or arguments.force:
        raise UsageError("--dry-run and --force make no sense with --to: an export changes nothing of the job.")
    begin = time.monotonic()
    line = ProgressLine(silent=arguments.json)
    plan = None if arguments.epoch is not None else _plan(arguments, settings)
    try:
        if plan is not None:
            checkpoint = CheckpointId(plan.epoch, plan.step)
            result = _from_plan(plan, arguments, settings, line)
        else:
            checkpoint, result = _from_durable(arguments, settings, line)
    finally:
        line.close()
    seconds = time.monotonic() - begin
    if arguments.json:
        print_json(
            "export",
            {
                "job": arguments.job,
                "epoch": checkpoint.epoch,
                "step": checkpoint.step,
                "format": arguments.format or "safetensors",
                "files": [str(path) for path in result.files],
                "tensors": result.tensors,
                "bytes": result.nbytes,
                "notes": list(result.notes),
                "seconds": round(seconds, 3),
            },
        )
        return 0
    say(
        f"job {arguments.job}, step {checkpoint.step} (epoch {checkpoint.epoch}): {result.tensors} tensors, "
        f"{size(result.nbytes)}, verified and written in {age(max(0.1, seconds))}"
    )
    for path in result.files:
        say(f"  {path}")
    for note in result.notes:
        say(f"note: {note}")
    return 0


def _shown_on(line: ProgressLine) -> Callable[[int, int], None]:
    return lambda done, total: line.show("verifying and writing", done, total)


# ---------------------------------------------------------------- with a daemon


def _plan(arguments: argparse.Namespace, settings: Settings) -> RestoreReply | None:
    """What the daemon would restore; None where none runs, if there is a durable directory to look into."""
    from baftd.wire.messages import RestoreReply, RestoreRequest

    request = RestoreRequest(job=arguments.job, step=arguments.step, at_most=arguments.at_most, dry_run=True)
    try:
        with connect(settings) as connection:
            return ask(connection, request, RestoreReply, timeout=120)
    except Unreachable:
        if settings.durable_dir is None:
            raise
        return None


def _from_plan(
    plan: RestoreReply, arguments: argparse.Namespace, settings: Settings, line: ProgressLine
) -> ExportResult:
    from baftd.storage.export import export_images

    images = [
        _slot_image(source, plan) if source.tier == "memory" else _shard_image(source, plan, arguments.job)
        for source in plan.sources
    ]
    return export_images(images, arguments.to, progress=_shown_on(line))


def _slot_image(source: RestoreSource, plan: RestoreReply) -> ImageSource:
    """A slot of this node. It may be filled anew while it is read: the export verifies before and after."""
    from baftd.memory.slot_file import IMAGE_OFFSET, SlotFile
    from baftd.storage.export import ImageSource

    try:
        slot = SlotFile.open_ro(source.where)
    except OSError as error:
        raise UsageError(
            f"the slot of rank {source.rank}, {source.where}, cannot be opened: {error.strerror}.",
            hint="Run the command as the user of the daemon.",
        ) from error
    with slot:
        header = slot.read_header()
    if header is None or (header.token.epoch, header.step, header.rank) != (plan.epoch, plan.step, source.rank):
        raise VerificationFailed(
            f"the slot of rank {source.rank} does not hold step {plan.step} any more: training has gone on.",
            hint="Run it again, or name an older, durable step with --step.",
        )
    return ImageSource(source.rank, source.where, IMAGE_OFFSET, header.image_length, header.root_digest)


def _shard_image(source: RestoreSource, plan: RestoreReply, job: str) -> ImageSource:
    """A shard of the durable tier, at <durable_dir>/<job>/<checkpoint>/<file>."""
    from baftd.storage.export import ImageSource

    root = Path(source.where).parents[2]
    found = _tier(root).describe(job, CheckpointId(plan.epoch, plan.step))
    for part in found.parts if found is not None else ():
        if part.rank == source.rank:
            return ImageSource(part.rank, part.path, 0, part.nbytes, part.root_digest, changing=False)
    raise VerificationFailed(
        f"{source.where} has no whole shard of rank {source.rank} any more.", hint=f"`baftd verify --job {job}`."
    )


# ---------------------------------------------------------------- without one


def _tier(root: Path) -> Tier:
    from baftd.storage.directory import DirectoryTier

    return DirectoryTier(root, node="export")


def _from_durable(
    arguments: argparse.Namespace, settings: Settings, line: ProgressLine
) -> tuple[CheckpointId, ExportResult]:
    from baftd.storage.export import export_safetensors

    if settings.durable_dir is None:
        raise UsageError(
            "the durable tier is off: there are no files to export.", hint="Name its directory with --durable-dir."
        )
    tier = _tier(settings.durable_dir)
    chosen = _choose(tier, arguments, settings.durable_dir)
    return chosen, export_safetensors(tier, arguments.job, chosen, arguments.to, progress=_shown_on(line))


def _choose(tier: Tier, arguments: argparse.Namespace, root: Path) -> CheckpointId:
    """The newest complete one of the newest epoch that is asked for."""
    rows = tier.list(arguments.job)
    wanted = [row for row in rows if _is_wanted(row, arguments)]
    for row in wanted:
        if row.state == "complete":
            return row.checkpoint
    if not rows:
        raise NothingRestorable(f"{root} holds nothing of job {arguments.job}.", hint=f"It holds: {_jobs(tier)}.")
    if not wanted:
        there = ", ".join(str(row.checkpoint) for row in rows[:5])
        raise NothingRestorable(f"{root} has no such step of job {arguments.job}.", hint=f"The newest are: {there}.")
    row = wanted[0]
    raise NothingRestorable(f"{row.path} is {row.state}: {row.reason}.", hint="Name another step with --step.")


def _is_wanted(row: DurableCheckpoint, arguments: argparse.Namespace) -> bool:
    step, epoch = row.checkpoint.step, row.checkpoint.epoch
    return (
        arguments.step in (None, step)
        and arguments.epoch in (None, epoch)
        and (arguments.at_most is None or step <= arguments.at_most)
    )


def _jobs(tier: Tier) -> str:
    jobs = tier.jobs()
    return ", ".join(jobs[:5]) + (" ..." if len(jobs) > 5 else "") if jobs else "nothing at all"
