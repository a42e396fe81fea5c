"""The pipeline schedule of a job's ranks, from what each of them has said when it declared.

A rank knows its own operations only. Where all places of its pipeline are known here, the schedule is what they said;
else it is the one of that name. Ranks that train copies of one pipeline (data parallel) stand at the same places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from baftd.checkpoint.facts import Record
from baftd.errors import BaftError, FormatError, UsageError
from baftd.pipeline.events import unpack_order
from baftd.pipeline.operations import Schedule
from baftd.pipeline.schedules import build
from baftd.wire.messages import ScheduleSaid

__all__ = ["schedule_record", "schedule_said", "schedules_of"]

MOST = 1 << 20
"""Operations of all ranks of a schedule that is looked at. (64 stages and 1,024 micro-batches have 131,072.)"""


def schedules_of(said: Mapping[int, ScheduleSaid]) -> dict[int, tuple[Schedule | None, str]]:
    """By rank: (the schedule of the pipeline that it belongs to, why there is none). `said`: of this node's ranks.

    Never raises: what ranks say may be anything. May take a second for the largest; meant for a worker thread."""
    made: dict[_Family, tuple[Schedule | None, str]] = {}
    found = {}
    for rank, own in said.items():
        family = _family(own)
        if family not in made:
            try:
                made[family] = _schedule(family, said), ""
            except BaftError as error:
                made[family] = None, str(error)
        schedule, problem = made[family]
        if schedule is not None and own.place >= own.ranks:
            schedule, problem = None, f"place {own.place} of a pipeline of {own.ranks} ranks is none."
        found[rank] = schedule, problem
    return found


class _Family(NamedTuple):
    """What ranks of one pipeline, and of its copies, say alike."""

    name: str
    ranks: int
    stages: int
    micro: int


def _family(said: ScheduleSaid) -> _Family:
    return _Family(said.name, said.ranks, said.stages, said.micro)


def _schedule(family: _Family, said: Mapping[int, ScheduleSaid]) -> Schedule:
    if not 0 < family.ranks <= family.stages:
        raise UsageError(f"a pipeline of {family.ranks} ranks and {family.stages} stages is none.")
    if family.stages * max(1, family.micro) * 3 > MOST:
        raise UsageError(f"{family.stages} stages and {family.micro} micro-batches are too many to be looked at.")
    places = {
        one.place: one for _, one in sorted(said.items(), reverse=True) if _family(one) == family and one.order
    }
    if any(place not in places for place in range(family.ranks)):
        return _named(family)
    stage_rank = [-1] * family.stages
    for place in range(family.ranks):
        for stage in places[place].own:
            if stage >= family.stages or stage_rank[stage] != -1:
                raise UsageError(f"stage {stage} is claimed by place {place}, and does not exist or is another's.")
            stage_rank[stage] = place
    if -1 in stage_rank:
        raise UsageError(f"stage {stage_rank.index(-1)} of {family.stages} is no rank's.")
    orders = [unpack_order(places[place].order) for place in range(family.ranks)]
    if sum(map(len, orders)) > MOST:
        raise UsageError(f"{sum(map(len, orders))} operations are too many to be looked at.")
    try:
        sends = _named(family).sends
    except UsageError:
        return Schedule.of_orders(family.name, orders, stage_rank)
    return Schedule.of_orders(family.name, orders, stage_rank, sends)


def _named(family: _Family) -> Schedule:
    """By its name alone. Raises UsageError for one that is not known."""
    if family.stages % family.ranks:
        raise UsageError(
            f"{family.stages} stages do not lie evenly on {family.ranks} ranks, and not all ranks are here."
        )
    return build(family.name, family.ranks, family.micro, family.stages // family.ranks)


KEPT_ORDER = 1 << 18
"""Bytes of an order that are kept in the journal; of a longer one only the name counts after a restart."""


def schedule_record(said: ScheduleSaid | None) -> Record | None:
    """What the journal keeps of it."""
    if said is None:
        return None
    return {
        "name": said.name,
        "ranks": said.ranks,
        "place": said.place,
        "stages": said.stages,
        "own": list(said.own),
        "micro": said.micro,
        "order": said.order if len(said.order) <= KEPT_ORDER else b"",
    }


def schedule_said(record: object) -> ScheduleSaid | None:
    """The reverse of `schedule_record`. Raises FormatError."""
    if record is None:
        return None
    if not isinstance(record, dict):
        raise FormatError(f"{type(record).__name__} is no record of a schedule")
    try:
        return ScheduleSaid(
            name=str(record["name"]),
            ranks=int(record["ranks"]),
            place=int(record["place"]),
            stages=int(record["stages"]),
            own=[int(stage) for stage in record["own"]],
            micro=int(record["micro"]),
            order=bytes(record["order"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"a record of a schedule does not have the fields of one: {error!r}") from error
