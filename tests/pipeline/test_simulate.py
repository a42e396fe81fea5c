"""Timelines: closed forms exactly, and what holds for any schedule and any times."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.errors import UsageError
from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import GapKind, Operation, Schedule, StageTimes, Timed, Timeline, Times
from baftd.pipeline.schedules import build
from baftd.pipeline.simulate import simulate
from tests.pipeline.test_schedules import schedules

TF, TB = 30, 70
"""Integers: additions are exact."""


def _uniform(schedule: Schedule, times: StageTimes, *, barrier: bool = True) -> Timeline:
    return simulate(schedule, Times.uniform(schedule.stages, times, barrier=barrier))


def _gaps(line: Timeline, rank: int, kind: GapKind) -> list[float]:
    return [gap.seconds for gap in line.gaps(rank) if gap.kind is kind]


# ---------------------------------------------------------------- closed forms (uniform times, a barrier at the end)


@pytest.mark.parametrize("name", ["1F1B", "Schedule1F1B"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 2), (2, 8), (4, 4), (4, 5), (4, 8), (8, 8), (8, 32)])
@pytest.mark.parametrize(("tf", "tb"), [(30, 70), (50, 50), (70, 30)])
def test_1f1b(name: str, ranks: int, micro: int, tf: int, tb: int) -> None:
    line = _uniform(build(name, ranks, micro), StageTimes(tf, tb))
    assert line.period == (micro + ranks - 1) * (tf + tb)
    for rank in range(ranks):
        behind = ranks - 1 - rank
        assert _gaps(line, rank, GapKind.FILL) == [rank * tf] * (rank > 0)
        steady = [gap for gap in line.gaps(rank) if gap.kind is GapKind.STEADY]
        assert [(gap.before, gap.seconds) for gap in steady] == (
            [(Operation(EventKind.BACKWARD, rank, 0), behind * tb)] if behind else []
        )
        assert _gaps(line, rank, GapKind.COOLDOWN) == [tf] * behind
        assert _gaps(line, rank, GapKind.COLLECTIVE) == [rank * tb] * (rank > 0)


@pytest.mark.parametrize("name", ["GPipe", "ScheduleGPipe"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (2, 1), (4, 8), (8, 16)])
def test_gpipe(name: str, ranks: int, micro: int) -> None:
    line = _uniform(build(name, ranks, micro), StageTimes(TF, TB))
    assert line.period == (micro + ranks - 1) * (TF + TB)
    for rank in range(ranks):
        behind = ranks - 1 - rank
        assert _gaps(line, rank, GapKind.FILL) == [rank * TF] * (rank > 0)
        assert _gaps(line, rank, GapKind.STEADY) == [behind * (TF + TB)] * (behind > 0)
        assert _gaps(line, rank, GapKind.COOLDOWN) == []
        assert _gaps(line, rank, GapKind.COLLECTIVE) == [rank * TB] * (rank > 0)


@pytest.mark.parametrize(("ranks", "micro", "chunks"), [(2, 2, 2), (2, 8, 2), (4, 8, 2), (4, 4, 3), (4, 16, 4)])
def test_interleaving_divides_the_bubble(ranks: int, micro: int, chunks: int) -> None:
    """tf and tb are a rank's; each of its stages takes one part of `chunks`."""
    stage = StageTimes(Fraction(TF, chunks), Fraction(TB, chunks))  # type: ignore[arg-type]  # exact
    line = _uniform(build("interleaved", ranks, micro, chunks), stage)
    for rank in range(ranks):
        assert line.idle(rank) == Fraction((ranks - 1) * (TF + TB), chunks)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_chimera_with_equal_operations(ranks: int, units: int) -> None:
    """Share (D-2)/(2N+D-2); units of D micro-batches follow each other without a gap."""
    micro = units * ranks
    line = _uniform(build("Chimera", ranks, micro), StageTimes(1, 1))
    for rank in range(ranks):
        assert Fraction(line.idle(rank)) / Fraction(line.period) == Fraction(ranks - 2, 2 * micro + ranks - 2)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_chimera_with_backwards_twice_as_long(ranks: int) -> None:
    """Share (D-2)/(1.5N+D-2) for N = D."""
    line = _uniform(build("Chimera", ranks, ranks), StageTimes(1, 2))
    for rank in range(ranks):
        share = Fraction(ranks - 2) / (Fraction(3, 2) * ranks + ranks - 2)
        assert Fraction(line.idle(rank)) / Fraction(line.period) == share


@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (2, 8), (4, 4), (4, 8), (8, 8), (8, 24)])
@pytest.mark.parametrize("seconds", [1, 20])
def test_zero_bubble_h1(ranks: int, micro: int, seconds: int) -> None:
    """(p-1)(TF+TB-TW), with a barrier."""
    for name in ("ZB-H1", "InterleavedZeroBubble"):
        line = _uniform(build(name, ranks, micro), StageTimes(seconds, 2 * seconds, seconds, seconds))
        for rank in range(ranks):
            assert line.idle(rank) == (ranks - 1) * seconds


@pytest.mark.parametrize(("ranks", "micro"), [(2, 3), (2, 8), (4, 7), (4, 8), (8, 15), (8, 24)])
def test_zero_bubble_h2(ranks: int, micro: int) -> None:
    """(p-1)(TF+TB-2TW) = 0: from step to step, without a barrier; one shows the parallelogram's edges."""
    schedule = build("ZB-H2", ranks, micro)
    times = StageTimes(20, 40, 20, 20)
    free = _uniform(schedule, times, barrier=False)
    held = _uniform(schedule, times)
    for rank in range(ranks):
        assert free.idle(rank) == (ranks - 1) * (20 + 20 - 2 * 20) == 0
        assert held.idle(rank) == (ranks - 1) * 20
        assert [gap.seconds for gap in held.gaps(rank)] == [one for one in (rank * 20, (ranks - 1 - rank) * 20) if one]


@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8), (8, 16)])
def test_zero_bubble_v(ranks: int, micro: int) -> None:
    """No bubble but the edges: (p-1) TF of a stage, all of it in fill and at the end (Qi 2024, section 6)."""
    line = _uniform(build("ZBV", ranks, micro), StageTimes(20, 40, 20, 20))
    for rank in range(ranks):
        assert line.idle(rank) == (ranks - 1) * 20


def test_without_a_barrier_the_drain_joins_the_fill() -> None:
    line = _uniform(build("1F1B", 4, 8), StageTimes(TF, TB), barrier=False)
    with_barrier = _uniform(build("1F1B", 4, 8), StageTimes(TF, TB))
    assert line.period == with_barrier.period
    for rank in range(4):
        assert _gaps(line, rank, GapKind.FILL) == [rank * (TF + TB)] * (rank > 0)
        assert {gap.kind for gap in line.gaps(rank)} <= {GapKind.FILL, GapKind.STEADY, GapKind.COOLDOWN}
        assert line.idle(rank) == with_barrier.idle(rank)


def test_the_first_step_is_not_the_steady_one() -> None:
    first = simulate(build("1F1B", 4, 8), Times.uniform(4, StageTimes(TF, TB), barrier=False), steps=1)
    assert [_gaps(first, rank, GapKind.FILL) for rank in range(4)] == [[], [TF], [2 * TF], [3 * TF]]


def test_tail_and_transfer_count() -> None:
    times = Times.uniform(2, StageTimes(TF, TB), send=3, tail=11)
    line = simulate(build("1F1B", 2, 1), times)
    assert line.period == 2 * (TF + TB) + 2 * 3 + 11
    assert line.idle(0) + line.busy(0) + 11 == line.period
    late = simulate(build("1F1B", 2, 1), Times(times.stages, send=3, receive=2, tail=11))
    assert late.period == line.period + 2 * 2


def test_a_sender_waits_for_its_receiver_where_torch_has_it_wait() -> None:
    """Measured with gloo, four ranks, forwards of 20 ms, but 100 ms on stage 1: the fourth forward of rank 0 began at
    125 ms, not at 60: it waits until its second one is asked for."""
    times = Times((StageTimes(20, 20), StageTimes(100, 20), StageTimes(20, 20), StageTimes(20, 20)))
    held = simulate(build("Schedule1F1B", 4, 6), times)
    free = simulate(build("1F1B", 4, 6), times)
    fourth = Operation(EventKind.FORWARD, 0, 3)
    assert next(one.begin for one in held.operations[0] if one.operation == fourth) == 120
    assert next(one.begin for one in free.operations[0] if one.operation == fourth) == 60
    assert held.operations[1:] == free.operations[1:]


def test_uneven_stages_by_hand() -> None:
    """F 2, B 1 on stage 0; F 1, B 3 on stage 1."""
    line = simulate(build("1F1B", 2, 2), Times((StageTimes(2, 1), StageTimes(1, 3))))
    ran = [[(one.operation.kind.name[0], one.begin, one.end) for one in rank] for rank in line.operations]
    assert ran[0][:-1] == [("F", 0, 2), ("F", 2, 4), ("B", 6, 7), ("B", 10, 11)]
    assert ran[1][:-1] == [("F", 2, 3), ("B", 3, 6), ("F", 6, 7), ("B", 7, 10)]
    assert [(gap.kind, gap.begin, gap.end) for gap in line.gaps(0)] == [
        (GapKind.STEADY, 4, 6),
        (GapKind.COOLDOWN, 7, 10),
    ]
    assert [(gap.kind, gap.begin, gap.end) for gap in line.gaps(1)] == [
        (GapKind.FILL, 0, 2),
        (GapKind.COLLECTIVE, 10, 11),
    ]


# ---------------------------------------------------------------- any schedule, any times

_SECONDS = st.integers(0, 50)
_STAGE = st.builds(StageTimes, _SECONDS, _SECONDS, _SECONDS, _SECONDS, _SECONDS)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Times]:
    """A schedule, and times of each of its stages."""
    schedule = draw(schedules())
    stages = tuple(draw(st.lists(_STAGE, min_size=schedule.stages, max_size=schedule.stages)))
    return schedule, Times(stages, draw(_SECONDS), draw(_SECONDS), draw(_SECONDS), draw(st.booleans()))


@given(cases())
@settings(deadline=None, max_examples=150)
def test_operations_follow_each_other_and_what_they_depend_on(case: tuple[Schedule, Times]) -> None:
    schedule, times = case
    line = simulate(schedule, times)
    ran = {one.operation: one for rank in line.operations for one in rank}
    chains = schedule.routes or (tuple(range(schedule.stages)),)
    before = {stage: chain[place - 1] for chain in chains for place, stage in enumerate(chain) if place}
    after = {stage: chain[place + 1] for chain in chains for place, stage in enumerate(chain[:-1])}
    for rank, order in enumerate(line.operations):
        at = line.begins[rank]
        for operation, begin, end in order:
            assert begin >= at, "two operations at once"
            assert end == begin + times.stages[operation.stage].of(operation.kind)
            at = end
            for needed in _needed(operation, before, after, ran):
                far = schedule.stage_rank[needed.stage] != rank
                assert begin >= ran[needed].end + (times.send + times.receive if far else 0)
        assert line.ends[rank] >= at + times.tail


def _needed(
    operation: Operation, before: dict[int, int], after: dict[int, int], ran: Mapping[Operation, Timed]
) -> list[Operation]:
    kind, stage, micro = operation
    if kind is EventKind.FORWARD:
        return [Operation(kind, before[stage], micro)] if stage in before else []
    if kind is EventKind.WEIGHT_GRAD:
        return [Operation(EventKind.INPUT_GRAD, stage, micro)]
    if kind is EventKind.REDUCE:
        return [one for one in ran if one.stage == stage and one.kind in (EventKind.BACKWARD, EventKind.WEIGHT_GRAD)]
    found = [Operation(EventKind.FORWARD, stage, micro)]
    if stage in after:
        either = (Operation(one, after[stage], micro) for one in (EventKind.BACKWARD, EventKind.INPUT_GRAD))
        found.append(next(one for one in either if one in ran))
    return found


@given(cases())
@settings(deadline=None, max_examples=100)
def test_gaps_and_operations_and_the_tail_are_the_step(case: tuple[Schedule, Times]) -> None:
    schedule, times = case
    line = simulate(schedule, times)
    for rank in range(schedule.ranks):
        gaps = line.gaps(rank)
        assert line.idle(rank) + line.busy(rank) + times.tail == line.ends[rank] - line.begins[rank]
        spans = sorted([(begin, end) for _, begin, end in line.operations[rank]] + [(g.begin, g.end) for g in gaps])
        assert all(one[1] == other[0] for one, other in pairwise(spans)), "a hole or an overlap"
        assert all(gap.seconds > 0 for gap in gaps)
    if times.barrier:
        assert len(set(line.ends)) == 1
    assert line.period == max(end - begin for begin, end in zip(line.begins, line.ends, strict=True))


@given(cases(), st.data())
@settings(deadline=None, max_examples=60)
def test_nothing_gets_earlier_when_an_operation_takes_longer(case: tuple[Schedule, Times], data: st.DataObject) -> None:
    schedule, times = case
    stage = data.draw(st.integers(0, schedule.stages - 1))
    slow = list(times.stages)
    slow[stage] = StageTimes(*(getattr(slow[stage], name) + 7 for name in StageTimes.__dataclass_fields__))
    before = simulate(schedule, times, steps=1)
    after = simulate(schedule, Times(tuple(slow), times.send, times.receive, times.tail, times.barrier), steps=1)
    for one, other in zip(before.operations, after.operations, strict=True):
        assert all(late.begin >= early.begin for early, late in zip(one, other, strict=True))


def test_times_that_do_not_fit_are_refused() -> None:
    schedule = build("1F1B", 2, 2)
    with pytest.raises(UsageError, match="has 2 stages, but times of 3"):
        _uniform_of(schedule, 3, StageTimes(1, 1))
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="no duration"):
            _uniform_of(schedule, 2, StageTimes(1, bad))
    with pytest.raises(UsageError, match="0 steps"):
        simulate(schedule, Times.uniform(2, StageTimes(1, 1)), steps=0)


def _uniform_of(schedule: Schedule, stages: int, times: StageTimes) -> Timeline:
    return simulate(schedule, Times.uniform(stages, times))


def test_a_large_pipeline_is_walked_once_through_each_operation() -> None:
    """64 ranks and 512 micro-batches: 65,600 operations, a node for each and for each wait for a send."""
    schedule = build("Schedule1F1B", 64, 512)
    operations = sum(len(order) for order in schedule.order)
    assert len(schedule.links.before) <= 64 + 2 * operations
    line = _uniform(schedule, StageTimes(TF, TB))
    assert line.period == (512 + 63) * (TF + TB)
