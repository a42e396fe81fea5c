"""Schedules put together from what ranks have said: whatever that is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baftd.daemon.said_schedules import schedule_record, schedule_said, schedules_of
from baftd.errors import FormatError
from baftd.pipeline.events import pack_order
from baftd.pipeline.schedules import build
from baftd.wire.messages import ScheduleSaid


def said(name: str, ranks: int, micro: int, chunks: int = 1) -> dict[int, ScheduleSaid]:
    """What each rank of a pipeline says."""
    schedule = build(name, ranks, micro, chunks)
    return {
        rank: ScheduleSaid(
            name=name, ranks=ranks, place=rank, stages=schedule.stages, own=list(schedule.own(rank)), micro=micro,
            order=pack_order((op.kind, op.stage, op.micro) for op in schedule.order[rank]),
        )
        for rank in range(ranks)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "chunks"), [("Schedule1F1B", 1), ("ScheduleGPipe", 1), ("ScheduleInterleaved1F1B", 2)]
)
def test_all_ranks_orders_make_the_schedule_of_that_name(name: str, chunks: int) -> None:
    told = said(name, 3, 6, chunks)
    found = schedules_of(told)
    expected = build(name, 3, 6, chunks)
    for rank in range(3):
        schedule, problem = found[rank]
        assert problem == ""
        assert schedule is not None
        assert (schedule.order, schedule.stage_rank, schedule.sends) == (
            expected.order, expected.stage_rank, expected.sends,
        )  # fmt: skip
    assert schedules_of({1: told[1]})[1][0] == expected  # of one rank's word: by its name


def test_copies_of_a_pipeline_share_a_schedule_and_an_unknown_name_will_do_with_all_orders() -> None:
    told = said("Schedule1F1B", 2, 4)
    copies = {**told, **{rank + 2: one for rank, one in told.items()}}
    found = schedules_of(copies)
    assert found[0][0] == found[3][0]
    strange = {rank: msgspec.structs.replace(one, name="MySchedule") for rank, one in told.items()}
    schedule, _ = schedules_of(strange)[0]
    assert schedule is not None
    assert schedule.order == build("Schedule1F1B", 2, 4).order
    schedule, problem = schedules_of({0: strange[0]})[0]
    assert schedule is None
    assert "MySchedule" in problem


@given(
    st.lists(
        st.builds(
            ScheduleSaid,
            name=st.sampled_from(["Schedule1F1B", "GPipe", "", "x"]),
            ranks=st.integers(0, 4) | st.just(1 << 40),
            place=st.integers(0, 5),
            stages=st.integers(0, 8) | st.just(1 << 40),
            own=st.lists(st.integers(0, 9), max_size=4),
            micro=st.integers(0, 8) | st.just(1 << 40),
            order=st.binary(max_size=64) | st.just(pack_order([(1, 0, 0), (2, 0, 0)])),
        ),
        max_size=4,
    )
)
def test_nothing_that_ranks_say_raises(told: list[ScheduleSaid]) -> None:
    found = schedules_of(dict(enumerate(told)))
    for schedule, problem in found.values():
        assert (schedule is None) == bool(problem)


def test_what_the_journal_keeps_comes_back() -> None:
    one = said("Schedule1F1B", 2, 4)[1]
    assert schedule_said(schedule_record(one)) == one
    assert schedule_said(schedule_record(None)) is None
    assert schedule_said({**(schedule_record(one) or {}), "more": 1}) == one
    for damaged in ({"name": "x"}, [], "x", {**(schedule_record(one) or {}), "own": 3}):
        with pytest.raises(FormatError):
            schedule_said(damaged)
    long = msgspec.structs.replace(one, order=bytes(1 << 19))
    assert schedule_said(schedule_record(long)) == msgspec.structs.replace(one, order=b"")
