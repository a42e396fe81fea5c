"""Background work: low priority that can be seen, bytes spread over the time there is, all speed near the deadline."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baftd.daemon.background import MOST_SPREAD, PART, SPREAD, Spread, Work
from baftd.daemon.priority import Priorities, io_class
from baftd.daemon.workers import Workers
from baftd.storage.limiter import TokenBucket
from tests.support.daemon import ROOT

MiB = 1 << 20


# ---------------------------------------------------------------- when a part is due (no clock, no threads)


def carry_out(
    total: int, within: float | None, part: int, speed: Callable[[float], float]
) -> tuple[float, float, bool]:
    """Seconds that it took, seconds held back, and whether it was raised; at `speed(now)` bytes a second."""
    spread = Spread(total, within, 0.0)
    now = held = 0.0
    raised = False
    left = total
    while left:
        raised = raised or spread.late(now)
        if not raised:
            wait = spread.book(min(part, left), now)
            now, held = now + wait, held + wait
        now += min(part, left) / speed(now)
        left -= min(part, left)
    return now, held, raised


@given(st.integers(1, 1 << 34), st.floats(0.001, 10_000.0), st.integers(1, 400))
def test_work_that_is_fast_enough_is_spread_evenly_and_never_raised(total: int, within: float, parts: int) -> None:
    part = -(-total // parts)
    fast = 20 * total / min(SPREAD * within, MOST_SPREAD)
    took, _, raised = carry_out(total, within, part, lambda now: fast)
    assert not raised
    last_due = min(SPREAD * within, MOST_SPREAD) * (1 - part / total)
    assert took >= last_due * 0.99 - 1e-9, "it is spread: no faster than the bucket fills"
    assert took <= min(SPREAD * within, MOST_SPREAD) * 1.06 + 1e-9, "and done when the bucket is full"


@given(st.integers(1, 1 << 34), st.floats(0.001, 10_000.0), st.integers(2, 200), st.floats(1.8, 50.0))
def test_what_can_be_done_in_time_is_done_in_time(total: int, within: float, parts: int, margin: float) -> None:
    """`margin`: how much faster it could be done than there is time. Held back, it still keeps the deadline."""
    part = -(-total // parts)
    took, _, _ = carry_out(total, within, part, lambda now: margin * total / within)
    assert took <= within * (1 + 1e-6)


@given(st.integers(20, 200), st.floats(0.1, 0.3))
def test_work_that_becomes_too_slow_is_raised_long_before_its_deadline(parts: int, when: float) -> None:
    total, within = parts * MiB, 10.0
    spread = Spread(total, within, 0.0)
    now = 0.0
    for _ in range(parts):
        if spread.late(now):
            break
        now += spread.book(MiB, now)
        now += MiB / (100 * total / within if now < when * within else 0.5 * total / within)
    assert when * within - 0.1 <= now <= 0.8 * within


def test_work_that_does_not_even_begin_is_raised_at_half_time() -> None:
    spread = Spread(MiB, 10.0, now=100.0)
    assert not spread.late(104.9)
    assert spread.late(105.1)


def test_without_a_deadline_nothing_is_held_back_or_raised() -> None:
    assert carry_out(1 << 30, None, MiB, lambda now: 1e3)[1:] == (0.0, False)


# ---------------------------------------------------------------- in threads


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


def run(workers: Workers, pool: str, work: Callable[[], object]) -> object:
    async def go() -> object:
        return await asyncio.wait_for(getattr(workers, pool)(work), 30)

    return asyncio.run(go())


def in_a_thread(work: Callable[[], object]) -> object:
    """Whoever does background work is lowered: not this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(30)


@pytest.fixture(autouse=True)
def nobody_lowers_the_tests() -> Iterator[None]:
    before = my_priority()
    yield
    assert my_priority() == before


def my_priority() -> tuple[int, int | None]:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), io_class()


@pytest.mark.parametrize("pool", ["background", "durable", "touching"])
def test_background_threads_have_the_lowest_priority_that_can_be_taken_back(workers: Workers, pool: str) -> None:
    nice, io = run(workers, pool, my_priority)  # type: ignore[misc]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == workers.priorities.nice
    assert nice == (19 if "raise" not in workers.priorities.refused else min(19, own + 10))
    if "io" not in workers.priorities.refused:
        assert io == 3, "idle"
    assert run(workers, "urgent", my_priority)[0] == own  # type: ignore[index]
    assert my_priority()[0] == own, "nice values are of threads: this one keeps its own"


def test_a_raised_thread_gets_the_daemon_s_priority_and_is_lowered_for_what_comes_next() -> None:
    def hurried() -> tuple[int, int | None]:
        with lone.work("digest", 10 * PART, within=100.0) as work:
            work.hurry()
            work(PART)
            return my_priority()

    own = os.getpriority(os.PRIO_PROCESS, 0)
    lone = Workers(background=1)  # the same thread every time
    try:
        nice, io = run(lone, "background", hurried)  # type: ignore[misc]
        assert nice == (own if "raise" not in lone.priorities.refused else lone.priorities.nice)
        if "io" not in lone.priorities.refused:
            assert io == 0, "none: as the nice value says"
        assert run(lone, "background", my_priority)[0] == lone.priorities.nice  # type: ignore[index]
    finally:
        lone.close()


def test_where_priority_cannot_come_back_threads_are_lowered_less(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    real = os.setpriority

    def no_way_up(which: int, who: int, value: int) -> None:
        if value < os.getpriority(which, who):
            raise PermissionError(13, "Permission denied")
        real(which, who, value)

    monkeypatch.setattr(os, "setpriority", no_way_up)
    workers = Workers(background=1)
    try:
        assert workers.priorities.refused >= {"raise"}
        assert workers.priorities.nice == min(19, own + 10)
        assert run(workers, "background", my_priority)[0] == min(19, own + 10)  # type: ignore[index]
    finally:
        workers.close()


def test_hurry_lets_a_thread_go_that_is_held_back(workers: Workers) -> None:
    held = threading.Event()
    done: list[float] = []

    def paced() -> None:
        with workers.work("durable", 2 * PART, within=100.0) as work:
            work(PART)
            held.set()
            work(PART)  # due after 25 s
            done.append(work.held_back)

    thread = threading.Thread(target=paced)
    thread.start()
    try:
        assert held.wait(10)
        (work,) = workers.works
        assert (work.what, work.raised) == ("durable", False)
        work.hurry()
        thread.join(10)
        assert not thread.is_alive()
        assert done[0] < 20
        assert workers.works == []
    finally:
        workers.stop()
        thread.join(30)


def test_the_end_of_the_daemon_lets_all_go(workers: Workers) -> None:
    begun = threading.Event()

    def paced() -> bool:
        with workers.work("durable", 100 * PART, within=10_000.0) as work:
            for _ in range(100):
                if workers.cancel.is_set():
                    return True
                begun.set()
                work(PART)
        return False

    async def story() -> bool:
        task = asyncio.ensure_future(workers.durable(paced))
        assert await asyncio.to_thread(begun.wait, 10)
        workers.stop()
        return await asyncio.wait_for(task, 20)

    assert asyncio.run(story())
    assert workers.work("digest", 1, within=100.0).raised, "what begins then is not held back either"


def test_the_hard_limit_holds_for_raised_work_too() -> None:
    now = 0.0
    limit = TokenBucket(rate=1000.0, burst=0.0, clock=lambda: now)
    work = Work("durable", 5000, within=None, priorities=Priorities(), clock=lambda: now, limit=limit)
    work.hurry()
    assert in_a_thread(lambda: [work(1000), work(1000)]) == [1.0, 2.0]


def test_small_pieces_are_held_back_together() -> None:
    now = 0.0
    asked = []
    work = Work("digest", 8 * PART, within=8.0, priorities=Priorities(), clock=lambda: asked.append(now) or now)
    asked.clear()
    in_a_thread(lambda: [work(PART // 16) for _ in range(15)])
    assert asked == [], "no look at the clock for every 256 KiB"
    in_a_thread(lambda: work(PART // 16))
    assert asked


_BACKGROUND = """
import os, sys
from baftd.daemon.priority import Priorities
os.sched_setaffinity(0, {int(sys.argv[1])})
Priorities().lower()
print("ready", flush=True)
while True:
    sum(range(10_000))
"""
_TRAINING = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
other = ~int(sys.argv[2]) << 3 | 2  # clock of a process's CPU time: MAKE_PROCESS_CPUCLOCK of the kernel
began, used = time.process_time(), time.clock_gettime(other)
while time.process_time() - began < 0.5:
    sum(range(10_000))
print(time.clock_gettime(other) - used, flush=True)
"""


def test_a_lowered_thread_leaves_the_core_to_one_that_is_not() -> None:
    """Both want the same core, and whoever trains gets nearly all of it. CPU time is counted: load changes nothing."""
    core = str(min(os.sched_getaffinity(0)))
    command = [sys.executable, "-c"]
    background = subprocess.Popen([*command, _BACKGROUND, core], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert background.stdout is not None
        assert background.stdout.readline() == "ready\n"
        training = [*command, _TRAINING, core, str(background.pid)]
        used = float(subprocess.run(training, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout)
    finally:
        background.kill()
        background.communicate(timeout=10)
    least = 0.1 if Priorities().nice == 19 else 0.3
    assert used / (used + 0.5) < least, f"beside 0.5 s of training the background thread took {used:.3f} s of the core"
