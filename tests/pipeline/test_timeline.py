"""Steps made of events: what is measured, and that nothing a client sends is believed."""

from __future__ import annotations

import gc
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.errors import FormatError
from baftd.pipeline.events import Event, EventKind, pack_event, unpack_events
from baftd.pipeline.operations import GapKind, Operation
from baftd.pipeline.timeline import MOST, Step, covered, merged

MS = 10**6
BEGUN = 10**15
K = EventKind


def event(kind: EventKind, begin: float, end: float, stage: int = -1, micro: int = -1, amount: int = 0) -> Event:
    """Times in ms after the boundary."""
    return Event(kind, stage, micro, BEGUN + int(begin * MS), BEGUN + int(end * MS), amount)


def one_f_one_b() -> list[Event]:
    """The first of two stages, two micro-batches: fill none, a wait before each backward, a tail with a collective."""
    return [
        event(K.FORWARD, 1, 11, 0, 0),
        event(K.FORWARD, 11, 21, 0, 1),
        event(K.WAIT_RECV, 22, 42),
        event(K.WINDOW, 22, 42, K.WAIT_RECV, 0, 1 << 30),
        event(K.COPY_INSIDE, 22.5, 32.5, -1, 0, 100 << 20),
        event(K.BACKWARD, 43, 63, 0, 0),
        event(K.WAIT_MIXED, 63, 73),
        event(K.WINDOW, 63, 73, K.WAIT_MIXED, 1, 1 << 30),
        event(K.BACKWARD, 73, 93, 0, 1),
        event(K.TAIL, 93, 99),
        event(K.WAIT_COLLECTIVE, 94, 98),
        event(K.WINDOW, 93, 99, K.TAIL, 2, 1 << 30),
        event(K.FENCE, 99, 99.5, amount=5),
        event(K.COPY_OUTSIDE, 50, 55, -1, -1, 7),
        event(K.WAIT_DATA, 0.1, 0.9),
    ]


def test_a_step_has_its_operations_windows_and_gaps_by_kind() -> None:
    events = one_f_one_b()
    random.Random(1).shuffle(events)
    step = Step.of(3, 7, BEGUN, 100 * MS, events)
    assert step.bad == 0
    assert [timed.operation.kind for timed in step.operations] == [K.FORWARD, K.FORWARD, K.BACKWARD, K.BACKWARD]
    assert [(w.ordinal, w.gap, w.before) for w in step.windows] == [
        (0, "steady", Operation(K.BACKWARD, 0, 0)),
        (1, "cooldown", Operation(K.BACKWARD, 0, 1)),
        (2, "collective", None),
    ]
    gaps = {gap.kind: gap.seconds for gap in step.gaps}
    assert gaps == pytest.approx({"data": 0.0008, "steady": 0.020, "cooldown": 0.010, "collective": 0.004})
    assert step.copied_seconds(K.COPY_INSIDE) == pytest.approx(0.010)
    assert step.copied_seconds(K.COPY_OUTSIDE) == pytest.approx(0.005)


def test_without_a_pipeline_waits_are_named_by_what_is_waited_for() -> None:
    step = Step.of(0, 1, BEGUN, 50 * MS, [
        event(K.WAIT_DATA, 0, 5),
        event(K.WAIT_COLLECTIVE, 30, 40),
        event(K.WINDOW, 30, 40, K.WAIT_COLLECTIVE, 0),
        event(K.TAIL, 40, 45),
        event(K.WINDOW, 40, 45, K.TAIL, 1),
    ])  # fmt: skip
    assert [window.gap for window in step.windows] == [GapKind.COLLECTIVE, "tail"]
    assert {gap.kind for gap in step.gaps} == {"data", "collective"}


def test_several_threads_that_copy_at_once_copy_for_as_long_as_one() -> None:
    step = Step.of(0, 1, BEGUN, 50 * MS, [event(K.COPY_FENCE, 40, 45, amount=1), event(K.COPY_FENCE, 41, 46, amount=1)])
    assert step.copied_seconds(K.COPY_FENCE) == pytest.approx(0.006)


def test_what_lies_beyond_the_period_is_cut_and_what_cannot_be_is_counted() -> None:
    step = Step.of(0, 1, BEGUN, 50 * MS, [
        event(K.FORWARD, -10, 5, 0, 0),
        event(K.FORWARD, 45, 80, 0, 1),
        event(K.FORWARD, 20, 10, 0, 2),
        event(K.FORWARD, 60, 70, 0, 3),
        event(K.FORWARD, -20, -10, 0, 4),
        event(K.WINDOW, 10, 20, 99, 0),
    ])  # fmt: skip
    assert step.bad == 4
    assert [timed.begin for timed in step.operations] == pytest.approx([0.0, 0.045])
    assert [timed.end for timed in step.operations] == pytest.approx([0.005, 0.05])
    assert step.windows == ()


def test_windows_that_overlap_are_cut_one_after_the_other() -> None:
    step = Step.of(0, 1, BEGUN, 50 * MS, [
        event(K.WINDOW, 0, 20, K.WAIT_RECV, 0),
        event(K.WINDOW, 10, 30, K.WAIT_RECV, 1),
        event(K.WINDOW, 12, 14, K.WAIT_RECV, 2),
    ])  # fmt: skip
    assert step.bad == 2
    assert [round(window.seconds * 1e3, 6) for window in step.windows] == [20, 10, 0]


@pytest.mark.parametrize("numbers", [(5, 5, 6), (3, 2, 1), (-1, 0, 1), (0, 1, 1 << 20)])
def test_windows_whose_numbers_make_no_sense_are_numbered_by_their_order(numbers: tuple[int, ...]) -> None:
    step = Step.of(0, 1, BEGUN, 50 * MS, [
        event(K.WINDOW, 10 * at, 10 * at + 5, K.WAIT_RECV, number) for at, number in enumerate(numbers)
    ])  # fmt: skip
    assert [window.ordinal for window in step.windows] == [0, 1, 2]


@pytest.mark.parametrize("period", [0, -1, 1 << 62])
def test_a_period_that_cannot_be_is_refused(period: int) -> None:
    with pytest.raises(FormatError, match="rank 4"):
        Step.of(4, 1, BEGUN, period, [])


def test_too_many_events_are_refused_without_being_kept() -> None:
    def endless() -> object:
        while True:
            yield event(K.FORWARD, 1, 2, 0, 0)

    with pytest.raises(FormatError, match="more than"):
        Step.of(4, 1, BEGUN, 50 * MS, endless())  # type: ignore[arg-type]


_number = st.one_of(st.integers(0, 2**64 - 1), st.integers(BEGUN - 100 * MS, BEGUN + 200 * MS))
_garbage = st.builds(
    Event, st.sampled_from(list(EventKind)), st.integers(-(2**15), 2**15 - 1), st.integers(-(2**31), 2**31 - 1),
    _number, _number, st.integers(0, 2**64 - 1),
)  # fmt: skip


@settings(deadline=None)
@given(events=st.lists(_garbage, max_size=60), period=st.integers(1, 10**12))
def test_garbage_makes_a_step_that_is_consistent(events: list[Event], period: int) -> None:
    packed = b"".join(pack_event(one) for one in events)
    step = Step.of(1, 2, BEGUN, period, unpack_events(packed))
    seconds = period * 1e-9 * (1 + 1e-9)
    spans = [(begin, end) for _, begin, end in step.operations] + [(b, e) for _, b, e in step.waits]
    spans += [(one.begin, one.end) for one in step.windows] + [(one.begin, one.end) for one in step.copying]
    assert all(0 <= begin <= end <= seconds for begin, end in spans)
    ends = 0.0
    for window in step.windows:
        assert window.begin >= ends
        ends = window.end
    assert sum(window.seconds for window in step.windows) <= seconds
    assert all(0 <= gap.seconds <= seconds for gap in step.gaps)
    assert [window.ordinal for window in step.windows] == sorted({window.ordinal for window in step.windows})


def test_as_many_events_as_are_allowed_take_no_more_than_linear_time() -> None:
    """A client may send them at every step; the daemon's loop waits."""
    chance = random.Random(0)

    def events(count: int) -> list[Event]:
        kinds = (K.FORWARD, K.WAIT_RECV, K.WINDOW, K.COPY_INSIDE)
        found = []
        for at in range(count):
            begin = chance.random() * 40
            kind = kinds[at % 4]
            found.append(event(kind, begin, begin + 20, K.WAIT_RECV if kind is K.WINDOW else 0, at))
        return found

    def seconds(batch: list[Event]) -> float:
        """Least of some runs, without the collector, which walks all that other tests have left."""
        found = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(4):
                began = time.thread_time()
                Step.of(0, 1, BEGUN, 50 * MS, batch)
                found.append(time.thread_time() - began)
        finally:
            gc.enable()
        return min(found)

    few, many = events(MOST // 16), events(MOST)
    # Usually 18 times as long for 16 times as many; if it went by their square it would be 256.
    assert seconds(many) < 16 * 6 * max(seconds(few), 1e-3)


def test_covered_and_merged() -> None:
    assert merged([(3, 4), (0, 1), (1, 2), (5, 5), (3.5, 6)]) == [(0, 2), (3, 6)]
    assert covered([(0, 2), (1, 3), (10, 11)]) == 4
