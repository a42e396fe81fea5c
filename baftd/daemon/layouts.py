"""Which rank of a job holds which ranges, put together from what its processes have declared here: for `baftd plan`.

What a process declared is in memory, or, when the daemon was restarted since, in the headers of its slots' images.
"""

from __future__ import annotations

from collections.abc import Mapping

from baftd.checkpoint.facts import Record, token_from
from baftd.checkpoint.recovery import name_ranks
from baftd.checkpoint.shard import TensorEntry
from baftd.daemon.context import Context
from baftd.daemon.job import JobOnNode
from baftd.errors import BaftError, UsageError
from baftd.wire.messages import LayoutReply, LayoutRequest, RankLayout

__all__ = ["describe_layout"]


async def describe_layout(context: Context, jobs: Mapping[str, JobOnNode], message: LayoutRequest) -> LayoutReply:
    """Answer a `LayoutRequest`. Raises `UsageError` for a job of which no rank has declared anything here.

    Of the newest start whose ranks have declared: after a crash, and until a next start is that far, the last one."""
    job = jobs.get(message.job)
    records = _declared(job) if job is not None else {}
    if job is None or not records:
        raise UsageError(
            f"no rank of job {message.job} has declared its tensors on node {context.node}.",
            hint="They do at their first boundary; `baftd status` shows what runs.",
        )
    first = next(iter(records.values()))
    epoch, world = token_from(first["token"]).epoch, int(first["world"])
    interval, held = context.settings.interval, _held(job, epoch)
    reply = LayoutReply(
        id=message.id,
        job=job.name,
        epoch=epoch,
        world=world,
        layout=b"",
        ranks=[_rank(context, record, held.get(rank, 0.0)) for rank, record in sorted(records.items())],
        missing=[rank for rank in range(world) if rank not in records],
        slots=context.slots,
        durable=context.tier is not None,
        interval_steps=interval.steps if interval is not None else 0,
        interval_seconds=interval.seconds if interval is not None else 0.0,
        overhead_budget=context.settings.overhead_budget,
    )
    if reply.missing:
        where = "" if not context.coordinator.several_nodes else f" on node {context.node}"
        reply.problem = f"{name_ranks(reply.missing)} of {world} have declared nothing{where} yet."
        return reply
    tensors, unknown = await context.workers.urgent(_tensors, job, records)
    if unknown:
        reply.problem = (
            f"the daemon was restarted since {name_ranks(unknown)} declared their tensors: they are known again with "
            "the next snapshot."
        )
        return reply
    try:
        reply.layout = await context.workers.urgent(_encode, tensors, reply)
    except BaftError as error:
        reply.problem = str(error)[:4000]
    return reply


def _encode(tensors: Mapping[int, list[TensorEntry]], reply: LayoutReply) -> bytes:
    from baftd.checkpoint.layout import Layout, RankPlace  # numpy: not for a daemon that nobody asks

    # An axis that some ranks do not have (experts on one stage only) says nothing of where the others stand.
    axes = set.intersection(*(set(r.coordinates) for r in reply.ranks))
    places = [
        RankPlace(r.rank, tuple(r.stages), {axis: at for axis, at in r.coordinates.items() if axis in axes}, r.node)
        for r in reply.ranks
    ]
    return Layout.of_entries(tensors, places, world=reply.world).encode()


def _declared(job: JobOnNode) -> dict[int, Record]:
    """What the processes of the newest start have declared, of those of which any has."""
    tokens = {rank: token_from(record["token"]) for rank, record in job.layouts.items()}
    newest = max(tokens.values(), key=lambda token: token.epoch, default=None)
    return {rank: job.layouts[rank] for rank, token in tokens.items() if token == newest}


def _held(job: JobOnNode, epoch: int) -> dict[int, float]:
    """Seconds for which a snapshot holds each rank, as measured in that start."""
    told = job.pacing.told
    if told is None or told.epoch != epoch:
        return {}
    return {rank: told.governor.profile(rank).held for rank in told.setups}


def _rank(context: Context, record: Record, held: float) -> RankLayout:
    return RankLayout(
        rank=int(record["rank"]),
        node=context.node,
        small_room=int(record.get("room", 0)),
        image_bytes=int(record.get("capacity", 0)),
        slots=len(record["slots"]),
        stages=[int(stage) for stage in record.get("stages", ())],
        coordinates={str(axis): int(place) for axis, place in record.get("axes", {}).items()},
        held_seconds=held,
    )


def _tensors(job: JobOnNode, records: Mapping[int, Record]) -> tuple[dict[int, list[TensorEntry]], list[int]]:
    """(what each rank has declared, ranks of which that is not known). Reads headers: blocks."""
    tensors: dict[int, list[TensorEntry]] = {}
    unknown: list[int] = []
    for rank, record in records.items():
        found = job.files.known_layout(rank, bytes(record["tree"]))
        if found is None:
            unknown.append(rank)
        else:
            tensors[rank] = list(found.declared)
    return tensors, unknown
