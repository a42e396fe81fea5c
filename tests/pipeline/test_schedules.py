"""Orders of operations: what is complete and possible, and what is refused with rank and operation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.errors import UsageError
from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import GapKind, Operation, Schedule, Sends, gap_kinds
from baftd.pipeline.schedules import NAMES, build

F, B, I, W = EventKind.FORWARD, EventKind.BACKWARD, EventKind.INPUT_GRAD, EventKind.WEIGHT_GRAD  # noqa: E741


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule of up to 6 ranks."""
    name = draw(st.sampled_from([*NAMES, "ScheduleGPipe", "Schedule1F1B"]))
    ranks = draw(st.integers(1, 6))
    micro = draw(st.integers(1, 14))
    chunks = None
    if name == "Chimera":
        ranks, micro = 2 * draw(st.integers(1, 3)), 1
        micro = ranks * draw(st.integers(1, 3))
    elif name == "DualPipeV":
        micro += 2 * ranks
    elif name == "Schedule1F1B":
        micro += ranks
    elif name in ("interleaved", "InterleavedZeroBubble", "LoopedBFS"):
        chunks = draw(st.integers(1, 3))
        if micro > ranks and name != "LoopedBFS":
            micro = ranks * (micro // ranks)
    return build(name, ranks, micro, chunks)


@given(schedules())
@settings(deadline=None, max_examples=150)
def test_every_micro_batch_passes_every_stage_of_its_chain_once_each_way(schedule: Schedule) -> None:
    held = {stage: rank for rank in range(schedule.ranks) for stage in schedule.own(rank)}
    assert held == dict(enumerate(schedule.stage_rank))
    seen = {operation: rank for rank, order in enumerate(schedule.order) for operation in order}
    assert len(seen) == sum(len(order) for order in schedule.order), "an operation is carried out twice"
    assert all(held[operation.stage] == rank for operation, rank in seen.items())
    chains = schedule.routes or (tuple(range(schedule.stages)),)
    for micro in range(schedule.micro):
        passed = [{stage for kind, stage, one in seen if one == micro and kind is F}]
        passed.append({stage for kind, stage, one in seen if one == micro and kind in (B, I)})
        assert passed[0] == passed[1]
        assert passed[0] in [set(chain) for chain in chains]
    whole = {(stage, micro) for kind, stage, micro in seen if kind is B}
    split = {(stage, micro) for kind, stage, micro in seen if kind is I}
    assert split == {(stage, micro) for kind, stage, micro in seen if kind is W}
    assert not whole & split
    for stage in range(schedule.stages):
        order = schedule.order[held[stage]]
        reduced = [place for place, one in enumerate(order) if one == (EventKind.REDUCE, stage, -1)]
        assert reduced == [1 + max(place for place, one in enumerate(order) if one.stage == stage and one.micro >= 0)]


@given(schedules())
@settings(deadline=None, max_examples=50)
def test_a_schedule_is_the_same_when_made_from_its_records(schedule: Schedule) -> None:
    orders = [[(int(kind), stage, micro) for kind, stage, micro in order] for order in schedule.order]
    again = Schedule.of_orders(schedule.name, orders, schedule.stage_rank, schedule.sends)
    assert (again.order, again.micro, again.stages) == (schedule.order, schedule.micro, schedule.stages)


def test_orders_by_hand() -> None:
    assert _said(build("1F1B", 3, 4), 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert _said(build("1F1B", 3, 4), 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert _said(build("1F1B", 4, 2), 0) == "0F0 0F1 0B0 0B1"
    assert _said(build("GPipe", 2, 2), 1) == "1F0 1F1 1B0 1B1"
    assert _said(build("interleaved", 2, 2, 2), 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert _said(build("interleaved", 2, 2, 2), 1) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert _said(build("ZB-H1", 3, 4), 0) == "0F0 0F1 0F2 0I0 0F3 0W0 0I1 0W1 0I2 0W2 0I3 0W3"
    assert _said(build("ZB-H1", 3, 4), 2) == "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2W0 2I3 2W1 2W2 2W3"
    assert _said(build("Chimera", 4, 4), 0) == "0F0 0F1 7F2 7B2 7F3 7B3 0B0 0B1"
    assert _said(build("Chimera", 4, 4), 1) == "1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1"


def _said(schedule: Schedule, rank: int) -> str:
    order = schedule.order[rank]
    return " ".join(f"{one.stage}{one.kind.name[0]}{one.micro}" for one in order if one.micro >= 0)


@pytest.mark.parametrize(
    ("name", "ranks", "micro", "chunks", "said"),
    [
        ("1f1b", 2, 2, None, "'1f1b' is not known"),
        ("GPipe", 0, 2, None, "0 ranks"),
        ("GPipe", 2, 0, None, "0 micro-batches"),
        ("GPipe", 2, 2, 2, "has one stage a rank, not 2"),
        ("ZBV", 2, 4, 1, "has 2 stages a rank, not 1"),
        ("Chimera", 3, 6, None, "an even number of ranks"),
        ("Chimera", 4, 6, None, "a multiple of it of micro-batches"),
        ("Schedule1F1B", 4, 3, None, "a micro-batch for each of 4 ranks"),
        ("DualPipeV", 2, 3, None, "a micro-batch for each of 4 stages"),
        ("interleaved", 4, 9, 2, "divides into 2 rounds"),
        ("GPipe", 1 << 20, 1, None, "more than can be looked at"),
        ("interleaved", 4096, 4096, 4, "more than can be looked at"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(
    name: str, ranks: int, micro: int, chunks: int | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        build(name, ranks, micro, chunks)


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        (["0F0 0B0", "1B0 1F0"], "rank 1 carries out its backward of stage 1, micro-batch 0 before its forward"),
        (["0F0 0F0 0B0", "1F0 1B0"], "rank 0 carries out its forward of stage 0, micro-batch 0 twice"),
        (["0F0 0W0 0I0", "1F0 1B0"], "rank 0 carries out its weight grad of stage 0, micro-batch 0 before its input"),
        (
            ["0F0 0B0", "1F1 1F0 1B0"],
            "rank 1 waits for ever before its forward of stage 1, micro-batch 1: it needs the forward of stage 0, "
            "micro-batch 1 of rank 0, which",
        ),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            "rank 0 waits for ever before its backward of stage 0, micro-batch 0: it needs the backward of stage 1, "
            "micro-batch 0 of rank 1, which waits itself before its forward of stage 1, micro-batch 1",
        ),
        (["0F0 0B0", "0F0"], "rank 1 of schedule x does not hold the stage of its forward of stage 0"),
        (["0F0 5F0", "1F0"], "rank 0 of schedule x does not hold the stage of its forward of stage 5"),
    ],
)
def test_an_order_that_cannot_be_is_refused_with_rank_and_operation(orders: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _ = Schedule.of_orders("x", [_read(order) for order in orders], [0, 1]).links


def _read(order: str) -> list[tuple[int, int, int]]:
    kinds = {"F": F, "B": B, "I": I, "W": W}
    return [(int(kinds[one[1]]), int(one[0]), int(one[2])) for one in order.split()]


def test_a_wait_is_no_operation() -> None:
    with pytest.raises(UsageError, match="rank 0 of schedule x has a WAIT_RECV: no operation"):
        Schedule.of_orders("x", [[(int(EventKind.WAIT_RECV), 0, 0)]], [0])


def test_who_waits_for_sends_can_block_where_models_do_not() -> None:
    """Rank 0 waits until its third forward is received; rank 1 waits before that until its first backward is."""
    orders = [_read("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"), _read("1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")]
    assert Schedule.of_orders("x", orders, [0, 1]).links.last
    held = Schedule.of_orders("x", orders, [0, 1], Sends.PAIRED)
    with pytest.raises(UsageError, match="rank 0 waits for ever until its forward of stage 0, micro-batch 2"):
        _ = held.links


def test_kinds_of_gaps() -> None:
    order = [Operation(kind, 0, 0) for kind in (F, F, B, F, B, B)]
    assert gap_kinds(order) == (GapKind.FILL, *[GapKind.STEADY] * 3, *[GapKind.COOLDOWN] * 2)
    order = [Operation(kind, 0, 0) for kind in (F, F, I, W)]
    assert gap_kinds(order) == (GapKind.FILL, GapKind.STEADY, GapKind.STEADY, GapKind.COOLDOWN)
    assert gap_kinds([]) == ()
