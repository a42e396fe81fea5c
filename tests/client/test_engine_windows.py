"""Windows of the copy engine: budgets, the pace between windows, windows by the clock, spans. Both engines."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from baft_client.engine import NO_LIMIT, SPANS, EngineHooks, EngineState
from baftd.errors import UsageError
from baftd.memory.control import Gate
from baftd.pipeline.events import Event, EventKind, unpack_events
from tests.support.engines import MIB, Rig, noise, soon

Name = Literal["native", "python"]
BLOCK = 256 << 10
INSIDE, OUTSIDE, FENCE = EventKind.COPY_INSIDE, EventKind.COPY_OUTSIDE, EventKind.COPY_FENCE


@pytest.fixture(params=["native", "python"])
def name(request: pytest.FixtureRequest) -> Name:
    chosen: Name = request.param
    return chosen


@pytest.fixture
def rig(tmp_path: Path, name: Name) -> Iterator[Rig]:
    made = Rig(tmp_path, name)
    yield made
    made.close()


def spans(rig: Rig) -> list[Event]:
    """What the engine has told since the last call."""
    return list(unpack_events(rig.engine.spans()))


def quiet(rig: Rig) -> int:
    """Wait until the engine copies nothing more (gate closed, or budget used up); what it has copied."""
    seen = -1

    def same() -> bool:
        nonlocal seen
        before, seen = seen, rig.engine.progress()
        return before == seen and rig.engine.state != EngineState.COPYING

    soon(same, "the engine to rest")
    return seen


# ---------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("budget", [4096, BLOCK, MIB + 8192, 5 * MIB])
def test_a_window_copies_its_budget_and_no_more(rig: Rig, budget: int) -> None:
    table = rig.table([noise(3 * MIB, 1), noise(7 * MIB, 2)])
    rig.start(table)
    rig.engine.open_window(budget)
    soon(lambda: rig.engine.progress() >= budget, "the budget")
    soon(lambda: rig.engine.state == EngineState.WAITING, "rest")
    time.sleep(0.02)
    assert rig.engine.progress() == budget
    assert rig.engine.copied() == (budget, 0, 0)
    rig.engine.close_window()
    rig.engine.open_window()
    soon(lambda: rig.engine.state == EngineState.DONE, "the rest, in a window without limit")
    assert rig.engine.copied() == (table.total, 0, 0)
    rig.check()


def test_a_budget_that_is_no_whole_number_of_pages_is_never_exceeded(rig: Rig) -> None:
    rig.start(rig.table([noise(100, 1), noise(5000, 2), noise(3 * MIB, 3)]))
    copied = 0
    for budget in (1, 99, 100, 5000, 4095, 70_001, MIB + 1):
        rig.engine.open_window(budget)
        soon(lambda: quiet(rig) >= 0, "rest")
        soon(lambda copied=copied, budget=budget: rig.engine.progress() > copied + budget - 5000, "most of it")  # type: ignore[misc]
        rig.engine.close_window()
        now = quiet(rig)
        assert copied <= now <= copied + budget
        copied = now
    assert rig.engine.flush(20.0)
    rig.check()


def test_windows_are_numbered_from_start_on(rig: Rig) -> None:
    table = rig.table([noise(4 * MIB)])
    rig.engine.open_window(MIB)
    rig.engine.close_window()
    for _ in range(2):
        rig.start(table)
        for budget in (BLOCK, 0, 2 * BLOCK, 0):
            before = rig.engine.progress()
            rig.engine.open_window(budget)
            soon(lambda before=before, budget=budget: rig.engine.progress() == before + budget, "it")  # type: ignore[misc]
            rig.engine.close_window()
        assert rig.engine.flush(20.0)
        rig.check()
        told = spans(rig)
        assert [(s.kind, s.micro, s.amount) for s in told if s.kind == INSIDE] == [
            (INSIDE, 0, BLOCK), (INSIDE, 2, 2 * BLOCK)]  # fmt: skip
        assert all(s.stage == -1 and s.micro == -1 for s in told if s.kind != INSIDE)
        assert rig.engine.copied() == (3 * BLOCK, 0, table.total - 3 * BLOCK)
        assert sum(s.amount for s in told) == table.total


def test_a_window_opened_within_a_window_has_its_own_budget(rig: Rig) -> None:
    rig.start(rig.table([noise(4 * MIB)]))
    rig.engine.open_window(BLOCK)
    soon(lambda: rig.engine.progress() == BLOCK, "the first budget")
    rig.engine.open_window(2 * BLOCK)
    soon(lambda: rig.engine.progress() == 3 * BLOCK, "the second")
    assert quiet(rig) == 3 * BLOCK
    assert [(s.micro, s.amount) for s in spans(rig)] == [(0, BLOCK), (1, 2 * BLOCK)]


def test_a_window_open_before_the_copy_takes_it_and_has_no_number(rig: Rig) -> None:
    rig.engine.open_window()
    rig.start(rig.table([noise(MIB)]))
    soon(lambda: rig.engine.state == EngineState.DONE, "the copy")
    rig.check()
    assert [(s.kind, s.micro, s.amount) for s in spans(rig)] == [(INSIDE, -1, MIB)]


def test_closing_a_window_leaves_at_most_the_block_under_way(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=20 * MIB))
    try:
        rig.start(rig.table([noise(6 * MIB)]))
        for _ in range(4):
            before = rig.engine.progress()
            rig.engine.open_window()
            soon(lambda before=before: rig.engine.progress() > before, "some progress")  # type: ignore[misc]
            rig.engine.close_window()
            closed = rig.engine.progress()
            time.sleep(0.03)  # an open gate would let 600 KiB pass
            assert quiet(rig) - closed <= BLOCK
        assert rig.engine.flush(20.0)
        rig.check()
    finally:
        rig.close()


@pytest.mark.parametrize("budget", [-1, 1 << 64, 1.5, "1"])
def test_a_budget_that_is_none_is_refused(tmp_path: Path, budget: Any) -> None:
    rig = Rig(tmp_path, "native")
    try:
        rig.start(rig.table([noise(10)]))
        with pytest.raises((TypeError, OverflowError)):
            rig.engine.open_window(budget)
        assert rig.control.gate == Gate.CLOSED
    finally:
        rig.close()


# ---------------------------------------------------------------------------------------- between windows


def test_between_windows_it_goes_on_at_the_pace_given(rig: Rig) -> None:
    pace = 8 * MIB
    table = rig.table([noise(40 * MIB)])
    rig.start(table)
    began = time.monotonic()
    rig.engine.close_window(pace)
    soon(lambda: rig.engine.progress() >= MIB, "a megabyte outside")
    took, copied = time.monotonic() - began, rig.engine.copied()
    assert copied[0] == copied[2] == 0
    assert copied[1] <= pace * (took + 0.01) + BLOCK, "faster than its pace"
    rig.engine.open_window(16 * MIB)
    soon(lambda: rig.engine.copied()[0] == 16 * MIB, "the window's budget, unpaced", timeout=1.9)
    rig.engine.close_window(pace)
    outside = rig.engine.copied()[1]
    soon(lambda: rig.engine.copied()[1] > outside, "going on at the pace")
    rig.engine.close_window()
    stopped = quiet(rig)
    time.sleep(0.05)
    assert rig.engine.progress() == stopped
    told = spans(rig)
    assert {s.kind for s in told} == {INSIDE, OUTSIDE}
    for kind, n in zip((INSIDE, OUTSIDE), rig.engine.copied(), strict=False):
        assert sum(s.amount for s in told if s.kind == kind) == n
    for s in told:
        if s.kind == OUTSIDE:
            assert s.amount <= max(BLOCK, pace * (s.end - s.begin) / 1e9 + 2 * BLOCK + pace * 0.01)
    assert rig.engine.flush(20.0)
    rig.check()


def test_many_short_windows_give_the_pace_no_credit(rig: Rig) -> None:
    """A window every millisecond, each closed to a slow pace: 20 blocks at once would be 20 times too fast."""
    rig.start(rig.table([noise(12 * MIB)]))
    pace = MIB
    began = time.monotonic()
    for _ in range(20):
        rig.engine.open_window(4096)
        rig.engine.close_window(pace)
        time.sleep(0.001)
    rig.engine.close_window()
    took = time.monotonic() - began
    quiet(rig)
    assert rig.engine.copied()[1] <= pace * (took + 0.02) + BLOCK
    assert rig.engine.flush(20.0)
    rig.check()


# ---------------------------------------------------------------------------------------- by the clock


def test_windows_by_the_clock_need_nobody(rig: Rig) -> None:
    rig.start(rig.table([noise(30 * MIB)]))
    now = time.monotonic_ns()
    windows = [(now + ms * 1_000_000, now + (ms + 15) * 1_000_000, budget)
               for ms, budget in ((30, 2 * BLOCK), (60, 4096), (90, 0), (120, 3 * BLOCK))]  # fmt: skip
    rig.engine.timed(windows)
    assert rig.control.gate == Gate.CLOSED
    soon(lambda: time.monotonic_ns() > windows[-1][1], "the last window to pass")
    quiet(rig)
    told = spans(rig)
    assert told, "no window was carried out"
    assert {s.kind for s in told} == {INSIDE}
    for s in told:
        begin, end, budget = windows[-2 - s.micro]
        assert begin <= s.begin < end, "a block that began outside of its window"
        assert s.amount <= budget
    assert sum(s.amount for s in told) == rig.engine.copied()[0] == rig.engine.progress()
    assert rig.engine.flush(20.0)
    rig.check()


def test_a_window_by_the_clock_ends_by_the_clock(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=25 * MIB))
    try:
        rig.start(rig.table([noise(10 * MIB)]))
        now = time.monotonic_ns()
        rig.engine.timed([(now, now + 60_000_000, NO_LIMIT)])
        soon(lambda: time.monotonic_ns() > now + 60_000_000, "its end")
        copied = quiet(rig)
        assert 0 < copied < 10 * MIB
        time.sleep(0.03)
        assert rig.engine.progress() == copied
        assert rig.engine.state == EngineState.WAITING
        rig.engine.timed([(now, now + 60_000_000, NO_LIMIT)])  # past, so nothing
        time.sleep(0.02)
        assert rig.engine.progress() == copied
        assert rig.engine.flush(20.0)
        rig.check()
    finally:
        rig.close()


@pytest.mark.parametrize("end", ["flush", "cancel", "start", "again"])
def test_windows_by_the_clock_end_with_their_copy(rig: Rig, end: str) -> None:
    table = rig.table([noise(MIB)])
    rig.start(table)
    now = time.monotonic_ns()
    windows = [(now + 40_000_000, now + 200_000_000, NO_LIMIT)]
    rig.engine.timed(windows)
    if end == "again":
        rig.engine.timed([])
    elif end == "flush":
        assert rig.engine.flush(20.0)
        rig.start(table)
    else:
        rig.engine.cancel()
        if end == "start":
            rig.start(table)
    soon(lambda: time.monotonic_ns() > windows[0][0] + 20_000_000, "the window's time")
    assert rig.engine.progress() == 0
    assert end == "flush" or (rig.image == 0xAA).all()


def test_an_opened_window_goes_before_one_by_the_clock(rig: Rig) -> None:
    rig.start(rig.table([noise(8 * MIB)]))
    rig.engine.open_window(BLOCK)
    now = time.monotonic_ns()
    rig.engine.timed([(now, now + 10_000_000_000, 2 * BLOCK)])
    soon(lambda: rig.engine.progress() == 3 * BLOCK, "both budgets")
    assert quiet(rig) == 3 * BLOCK
    total: dict[int, int] = {}
    for s in spans(rig):
        total[s.micro] = total.get(s.micro, 0) + s.amount
    assert total == {0: BLOCK, -2: 2 * BLOCK}


@pytest.mark.parametrize(
    "windows",
    [[(5, 5, 1)], [(5, 4, 1)], [(1, 5, 1), (4, 9, 1)], [(5, 9, 1), (1, 2, 1)], [(-1, 5, 1)], [(1, 2)],
     [(1, 1 << 65, 1)], [(1.5, 2, 1)]],
)
def test_windows_out_of_order_are_refused(rig: Rig, windows: Any) -> None:
    rig.start(rig.table([noise(10)]))
    with pytest.raises(UsageError, match="by the clock"):
        rig.engine.timed(windows)


# ---------------------------------------------------------------------------------------- flush, spans


def test_windows_that_other_threads_open_do_not_end_a_flush(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=30 * MIB))
    over = threading.Event()
    turns = 0

    def windows() -> None:
        nonlocal turns
        while not over.is_set():
            rig.engine.open_window(0)
            rig.engine.close_window()
            rig.engine.open_window(4096)
            rig.engine.close_window(1)
            turns += 1
            time.sleep(0.0002)

    other = threading.Thread(target=windows)
    table = rig.table([noise(6 * MIB)])
    try:
        rig.start(table)
        other.start()
        began = time.monotonic()
        soon(lambda: turns > 3, "windows")
        before = sum(rig.engine.copied())
        assert rig.engine.flush(20.0)
        assert time.monotonic() - began < 2.0, "0.2 s alone"
        assert rig.engine.copied()[2] >= table.total - before - BLOCK
    finally:
        over.set()
        other.join()
        rig.check()
        rig.close()


def test_who_sees_the_end_finds_all_spans(rig: Rig) -> None:
    table = rig.table([noise(n, n) for n in (100, MIB, 3, 9 * MIB, 40_000)])
    for turn in range(30):
        rig.start(table)
        if turn % 3:
            rig.engine.open_window(turn % 5 * MIB)
            soon(lambda: rig.engine.progress() >= 0, "nothing: a moment")
        assert rig.engine.flush(20.0)
        told = spans(rig)
        by_kind = [sum(s.amount for s in told if s.kind == kind) for kind in (INSIDE, OUTSIDE, FENCE)]
        assert tuple(by_kind) == rig.engine.copied()
        assert sum(by_kind) == table.total
        assert [s.begin for s in told] == sorted(s.begin for s in told)
        assert all(s.begin <= s.end for s in told)
    assert rig.engine.spans() == b""
    assert rig.engine.spans_lost == 0


def test_one_span_for_a_window_that_copies_throughout(rig: Rig) -> None:
    table = rig.table([noise(20 * MIB)])
    rig.start(table)
    before = time.monotonic_ns()
    rig.engine.open_window()
    soon(lambda: rig.engine.state == EngineState.DONE, "the copy")
    after = time.monotonic_ns()
    told = spans(rig)
    assert len(told) < 5, "a span for each block"  # more than one only where the machine was busy for 5 ms
    assert before <= told[0].begin <= told[-1].end <= after


def test_spans_that_nobody_reads_are_counted(rig: Rig) -> None:
    windows = SPANS + 40
    table = rig.table([noise(windows * 4096)])
    rig.start(table)
    for window in range(windows):
        rig.engine.open_window(4096)
        until = time.monotonic() + 20
        while rig.engine.progress() < (window + 1) * 4096 and window + 1 < windows:
            assert time.monotonic() < until
            time.sleep(0)
    soon(lambda: rig.engine.state == EngineState.DONE, "the last")
    told = spans(rig)
    assert [s.micro for s in told] == list(range(SPANS)), "the oldest are kept"
    assert rig.engine.spans_lost == 40
    assert sum(s.amount for s in told) + 40 * 4096 == table.total
    rig.check()


def test_windows_are_harmless_with_nothing_armed_and_after_stop(rig: Rig) -> None:
    for _ in range(2):
        rig.engine.open_window(5)
        rig.engine.close_window(7)
        rig.engine.timed([(1, 2, 3)])
        rig.engine.open()
        rig.engine.close_window()
        assert rig.engine.spans() == b""
        assert rig.engine.copied() == (0, 0, 0)
        rig.engine.stop()


# ---------------------------------------------------------------------------------------- by chance


@pytest.mark.parametrize("seed", range(6))
def test_windows_by_chance_against_memory(rig: Rig, seed: int) -> None:
    """Windows of every kind while sources change whenever nothing is armed: what is in the slot is what was there when
    the copy ended, in order, within its budgets, and nothing beside it."""
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 63, 4096, 5000, 70_000, BLOCK, BLOCK + 1, 3 * MIB, 5 * MIB]) for _ in range(8)]
    arrays = [noise(n, seed * 100 + i) for i, n in enumerate(sizes)]
    table = rig.table(arrays, gap=chance.choice([0, 1, 64]))
    whole = np.full_like(rig.image, 0xAA)
    for round_ in range(6):
        for array, offset in zip(arrays, rig.offsets, strict=True):
            array[:] = noise(array.nbytes, seed * 1000 + round_)
            whole[offset : offset + array.nbytes] = array
        rig.start(table)
        for _ in range(chance.randrange(12)):
            inside, outside, fence = rig.engine.copied()
            budget, pace = chance.choice([0, 1, 4096, 100_000, MIB, NO_LIMIT]), chance.choice([0, 0, 20 * MIB])
            clock = []
            if chance.random() < 0.3:
                at = time.monotonic_ns()
                for _ in range(chance.randrange(4)):
                    at += chance.randrange(300_000)
                    clock.append((at, at + 150_000, chance.choice([4096, BLOCK, 3 * BLOCK])))
                    at += 150_000
                rig.engine.timed(clock)
            rig.engine.open_window(budget)
            until = time.monotonic() + chance.choice([0, 0.0001, 0.001])
            while time.monotonic() < until:
                time.sleep(0)
            rig.engine.close_window(pace)
            if clock:
                soon(lambda end=clock[-1][1]: time.monotonic_ns() > end, "the last window's end")  # type: ignore[misc]
            rig.engine.close_window()
            rig.engine.timed([])
            copied = quiet(rig)
            now = rig.engine.copied()
            assert now[0] - inside <= (budget + sum(w[2] for w in clock))
            assert now[2] == fence == 0
            assert pace or now[1] == outside
            assert sum(now) == copied or rig.engine.state == EngineState.DONE
            _check_prefix(rig, whole, copied)
        if chance.random() < 0.5:
            copied = quiet(rig)
            rig.engine.cancel()
        else:
            copied = table.total
            assert rig.engine.flush(20.0)
            rig.check()
        for array in arrays:
            array[:] = 0x55  # the next update
        rig.engine.open_window()
        rig.engine.close_window()
        _check_prefix(rig, whole, copied)
        told = spans(rig)
        assert sum(s.amount for s in told) == sum(rig.engine.copied())
    assert rig.engine.spans_lost == 0


def _check_prefix(rig: Rig, whole: np.ndarray[Any, np.dtype[np.uint8]], copied: int) -> None:
    """The first `copied` bytes of the sources are in the image, everything else is as it was before."""
    expected = np.full_like(whole, 0xAA)
    for array, offset in zip(rig.arrays, rig.offsets, strict=True):
        n = min(copied, array.nbytes)
        expected[offset : offset + n] = whole[offset : offset + n]
        copied -= n
    assert np.array_equal(rig.image, expected)
