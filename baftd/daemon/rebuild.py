"""Taking a job up again: from its slots, the journal beside them and the manifest in the state directory.

Whatever is lost of these, the rest still counts. Without the journal every slot is judged by its header and digested
again; without the state directory the lineage is read from the journal beside the slots; without both, the tokens in
the slots' headers still say which epochs there were.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from baftd.checkpoint.facts import EpochFacts, Record, Writer
from baftd.checkpoint.history import History
from baftd.checkpoint.node import NodeJob
from baftd.checkpoint.slots import HeaderFacts, SlotState, rebuild_table
from baftd.daemon.clients import ClientTable
from baftd.daemon.context import Context
from baftd.daemon.job import JobOnNode
from baftd.daemon.restore import read_durable
from baftd.daemon.slot_files import SlotFiles
from baftd.errors import BaftError, FormatError
from baftd.memory.journal import Journal
from baftd.memory.manifest import NodeManifest
from baftd.memory.processes import ProcessHandle, lock_holder

__all__ = ["open_job"]


async def open_job(context: Context, clients: ClientTable, name: str) -> JobOnNode:
    """A job on this node: a new one, or what is left of it. Raises `UsageError`, `OSError`."""
    arena = context.root.job(name)
    arena.create(context.settings.clients)
    if not context.root.incarnation():
        context.root.set_incarnation(context.incarnation)
    changed = arena.last_change()
    journal, found = Journal.open(arena.journal_path, fsync=False, ops=context.journal_ops)
    log = context.log.bind(job=name)
    if found.problem:
        context.counters.add("journal_repairs")
        log.warning("journal_damaged", why=found.problem)
    records = [record for record in found.all_records if _is_sane(record)]
    if len(records) < len(found.all_records):
        context.counters.add("journal_repairs")
        log.warning("journal_records_dropped", count=len(found.all_records) - len(records))
    manifest = _open_manifest(context, name)
    files = SlotFiles(arena)
    headers = files.headers()
    files.close()
    history = _history(records, manifest)
    history.merge((await context.coordinator.history(name)).epochs())
    await _learn_from_headers(context, name, history, headers.values())
    core, ready = NodeJob.rebuild(
        name, context.node, context.incarnation, history=history, records=records, headers=headers
    )
    job = JobOnNode(
        name,
        context,
        clients,
        core=core,
        arena=arena,
        journal=journal,
        manifest=manifest,
        layouts=[record for record in records if record["k"] == "layout"],
    )
    for (rank, slot), facts in headers.items():
        if facts is None:
            log.warning(
                "slot_damaged", rank=rank, slot=slot, why="its header cannot be read; its content counts for nothing"
            )
            _mend(job, rank, slot)
    job.apply(ready)
    joined = await context.coordinator.join(name, core.inventory())
    job.apply(core.joined(joined.view))
    for writer in core.writers():
        _watch_orphan(job, writer)
    job.tidy()
    if headers or records:
        os.utime(arena.journal_path, (changed, changed))  # to be taken up is no use of the job: its retention runs on
        held = sum(1 for table in core.tables.values() for _ in table.contents())
        log.info("taken_up", slots=len(headers), verified=held, epoch=history.epoch, highest=history.highest_step)
    return job


def _mend(job: JobOnNode, rank: int, slot: int) -> None:
    """Give a slot with a damaged header one that can be filled again. One that somebody may be filling is mended when
    that has ended."""
    held = job.core.tables[rank].slots[slot]
    if held.state is SlotState.FREE:
        with contextlib.suppress(FormatError, OSError):  # it is no slot at all: declaring makes another
            job.files.free(rank, slot, held.generation)


def _open_manifest(context: Context, name: str) -> NodeManifest | None:
    path = Path(context.settings.state_dir) / name / "manifest"
    if not path.exists():
        return None
    manifest, problem = NodeManifest.open(path, ops=context.journal_ops)
    if problem:
        context.counters.add("journal_repairs")
        context.log.warning("manifest_damaged", job=name, why=problem)
    return manifest


def _is_sane(record: Record) -> bool:
    """Whether the cores can read a journal record; one that they cannot is as good as lost."""
    kind = record.get("k")
    try:
        if kind == "layout":
            int(record["rank"]), int(record["world"]), bytes(record["tree"]), [int(slot) for slot in record["slots"]]
            [int(stage) for stage in record.get("stages", ())]
            {str(axis): int(place) for axis, place in record.get("axes", {}).items()}
            int(record["capacity"]), int(record.get("stable", 0)), int(record.get("held", 0))
            return isinstance(record["token"], list)
        if kind in ("grant", "verified", "free"):
            rebuild_table(NodeJob.table_class(int(record["rank"])), [record], {})
        elif kind == "epoch":
            EpochFacts.from_record(record)
    except (BaftError, KeyError, TypeError, ValueError, AttributeError):
        return False
    return isinstance(kind, str)


def _history(records: Iterable[Record], manifest: NodeManifest | None) -> History:
    """The lineage, from whoever knows it; the manifest counts most."""
    history = History()
    if manifest is not None:
        history.merge(manifest.epochs.values())
        history.see_step(manifest.highest_step)
        for checkpoint, reason in manifest.quarantined.items():
            history.quarantine(checkpoint, reason)
    history.merge(EpochFacts.from_record(record) for record in records if record["k"] == "epoch")
    return history


async def _learn_from_headers(
    context: Context, name: str, history: History, headers: Iterable[HeaderFacts | None]
) -> None:
    """Steps and epochs that slots prove to have been."""
    shards = sorted(
        (facts.shard for facts in headers if facts is not None and facts.shard is not None),
        key=lambda shard: shard.token,
    )
    for shard in shards:
        history.see_step(shard.step)
    unknown = {shard.token.epoch: shard for shard in shards if history.find(shard.token.epoch) is None}
    if not unknown:
        return
    durable = await read_durable(context, name)
    if durable is not None:
        history.merge(durable.epochs)
    for shard in unknown.values():
        # What an epoch began from is not in a header. Where nobody remembers it, nothing older can be told to be its
        # ancestor, so nothing older is offered.
        history.merge([EpochFacts(shard.token, shard.world, None, revision=-1)])


def _watch_orphan(job: JobOnNode, writer: Writer) -> None:
    """A process that was filling a slot when the last daemon ended: it comes back by itself, or is dead, or dies."""
    loop = asyncio.get_running_loop()
    handle = _handle(writer)

    def gone() -> None:
        stop = job.orphans.pop(writer, None)
        if stop is not None:
            stop()
        if not job.closed:
            headers = job.files.headers(job.core.granted_to(writer))
            job.log.info("writer_dead", pid=writer.pid)
            job.apply(job.core.writer_dead(writer, headers))

    if handle is None:
        ranks = {rank for rank, _ in job.core.granted_to(writer)}
        if any(lock_holder(job.arena.lock_path(rank)) is not None for rank in ranks):
            return  # in a PID namespace that we do not see: it holds its lock, and will say hello
        gone()
        return

    def stop() -> None:
        loop.remove_reader(handle.fileno())
        handle.close()

    job.orphans[writer] = stop
    loop.add_reader(handle.fileno(), gone)


def _handle(writer: Writer) -> ProcessHandle | None:
    try:
        return ProcessHandle.open(writer.pid, writer.start)
    except OSError:
        return None
