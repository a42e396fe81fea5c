"""Windows: which budget each gets, who may open them, and that none of them is ever left open."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from baft_client.engine import CopyEngine, Segment
from baft_client.load_engine import load_engine
from baft_client.recorder import Recorder
from baft_client.windows import NO_LIMIT, Windows
from baftd.pipeline.events import Event, EventKind, unpack_events
from tests.support.engines import noise, soon

RECV, DATA, TAIL = EventKind.WAIT_RECV, EventKind.WAIT_DATA, EventKind.TAIL


class Told:
    """Stands for an engine: puts down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def open_window(self, budget: int = NO_LIMIT) -> None:
        """Put down."""
        self.calls.append(("open", budget))

    def close_window(self, outside: int = 0) -> None:
        """Put down."""
        self.calls.append(("close", outside))


class Anchored:
    """Stands for a device's copier."""

    def __init__(self) -> None:
        self.anchors: list[tuple[int, int]] = []
        self.ended: list[int] = []

    def anchor(self, ordinal: int, budget: int) -> None:
        """Put down."""
        self.anchors.append((ordinal, budget))

    def passed(self, ordinal: int) -> None:
        """Put down."""
        self.ended.append(ordinal)


class Clock:
    """Counts on at every look."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> int:
        self.at += 1
        return self.at


class Rig:
    """Windows of a period that has begun, with an engine that is told."""

    def __init__(self, budgets: tuple[int, ...] = (), further: int = NO_LIMIT, outside: int = 0) -> None:
        self.recorder, self.gate, self.clock = Recorder(), Told(), Clock()
        self.windows = Windows(self.recorder, now=self.clock)
        self.windows.begin(budgets, further, outside)
        self.windows.arm(self.gate, None)

    def events(self) -> list[Event]:
        return list(unpack_events(self.recorder.take()[0]))


def test_each_window_gets_the_budget_of_its_number() -> None:
    rig = Rig((10, 0, 30), further=7, outside=5)
    for kind in (RECV, DATA, RECV, TAIL, RECV):
        with rig.windows.waiting(kind):
            pass
    assert [call for call in rig.gate.calls if call[0] == "open"] == [("open", n) for n in (10, 0, 30, 7, 7)]
    assert [call for call in rig.gate.calls if call[0] == "close"] == [("close", 5)] * 5
    events = rig.events()
    assert [(event.kind, event.stage, event.micro, event.amount) for event in events] == [
        (EventKind.WINDOW, int(kind), number, budget)
        for number, (kind, budget) in enumerate(zip((RECV, DATA, RECV, TAIL, RECV), (10, 0, 30, 7, 7), strict=True))
    ]
    assert all(event.begin < event.end for event in events)
    assert rig.windows.end() == [10, 0, 30, 7, 7]


def test_the_next_period_counts_from_the_beginning() -> None:
    rig = Rig((1, 2))
    with rig.windows.waiting(RECV):
        pass
    rig.windows.end()
    rig.windows.begin((3, 4), 0, 0)
    rig.windows.arm(rig.gate, None)
    with rig.windows.waiting(RECV):
        pass
    assert rig.gate.calls == [("open", 1), ("close", 0), ("open", 3), ("close", 0)]
    assert [event.micro for event in rig.events()] == [0, 0]


def test_windows_within_a_window_are_the_same_window() -> None:
    rig = Rig()
    with rig.windows.waiting(RECV):
        with rig.windows.waiting(DATA), rig.windows.waiting(RECV):
            assert rig.gate.calls == [("open", NO_LIMIT)]
        assert rig.gate.calls == [("open", NO_LIMIT)], "the inner ones close nothing"
    assert rig.gate.calls == [("open", NO_LIMIT), ("close", 0)]
    assert len(rig.events()) == 1


def test_leaving_without_entering_does_nothing() -> None:
    rig = Rig()
    rig.windows.leave()
    rig.windows.leave()
    assert (rig.gate.calls, rig.events()) == ([], [])
    with rig.windows.waiting(RECV):
        pass
    assert len(rig.gate.calls) == 2, "what was left too often is not owed"


def test_an_exception_in_a_wait_closes_the_window() -> None:
    rig = Rig()
    with pytest.raises(KeyError), rig.windows.waiting(RECV):
        raise KeyError
    assert rig.gate.calls == [("open", NO_LIMIT), ("close", 0)]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_window_that_is_never_left_ends_at_the_fence(depth: int) -> None:
    rig = Rig()
    for _ in range(depth):
        rig.windows.enter(RECV)
    assert rig.windows.end() == [NO_LIMIT]
    assert rig.gate.calls == [("open", NO_LIMIT), ("close", 0)]
    assert [event.kind for event in rig.events()] == [EventKind.WINDOW]
    rig.windows.leave()
    with rig.windows.waiting(RECV):  # between fence and boundary: what could be copied is about to change
        pass
    assert len(rig.gate.calls) == 2
    assert rig.events() == []
    rig.windows.begin((), NO_LIMIT, 0)
    rig.windows.arm(rig.gate, None)
    rig.windows.leave()  # the late end of a wait of the former step
    assert len(rig.gate.calls) == 2
    with rig.windows.waiting(RECV):
        pass
    assert len(rig.gate.calls) == 4


def test_windows_are_counted_also_where_nothing_is_copied() -> None:
    rig = Rig((5,))
    rig.windows.disarm()
    with rig.windows.waiting(RECV):
        pass
    assert rig.gate.calls == []
    assert [(event.kind, event.amount) for event in rig.events()] == [(EventKind.WINDOW, 0)]
    assert rig.windows.end() == [0]


def test_before_the_first_boundary_there_are_no_windows() -> None:
    windows = Windows(recorder := Recorder())
    with windows.waiting(DATA):
        pass
    assert recorder.take() == (b"", 0)


def test_sources_come_and_go() -> None:
    windows = Windows(Recorder())
    for source in ("pipeline", "data", "pipeline"):
        windows.register(source)
    windows.unregister("never heard of")
    assert list(windows.sources) == ["pipeline", "data"]
    windows.unregister("pipeline")
    assert list(windows.sources) == ["data"]


def test_a_device_is_anchored_with_the_budget_of_the_window() -> None:
    rig, device = Rig((10, 0), further=3), Anchored()
    rig.windows.arm(None, device)
    for _ in range(3):
        with rig.windows.waiting(RECV), rig.windows.waiting(DATA):
            pass
    assert device.anchors == [(0, 10), (1, 0), (2, 3)], "gaps without a budget are timed too"
    rig.windows.enter(RECV)
    assert device.ended == [0, 1, 2]
    rig.windows.end()
    assert device.ended == [0, 1, 2, 3]
    with rig.windows.waiting(RECV):
        pass
    assert (len(device.anchors), len(device.ended)) == (4, 4)


# ---------------------------------------------------------------- threads


def in_thread(work: Callable[[], None]) -> None:
    """Run in a thread that Python started."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told to the test
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert not failed, failed


def in_foreign_thread(work: Callable[[], None]) -> None:
    """Run in a thread that Python did not start, as autograd's threads are."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed: list[BaseException] = []

    def run(_: object) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told to the test
            failed.append(error)

    thread, entry = ctypes.c_ulong(), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(run)
    assert libc.pthread_create(ctypes.byref(thread), None, entry, None) == 0
    assert libc.pthread_join(thread, None) == 0
    assert not failed, failed


def wait(rig: Rig) -> None:
    with rig.windows.waiting(RECV):
        pass


def test_a_thread_of_the_framework_opens_windows() -> None:
    rig = Rig()
    in_foreign_thread(lambda: wait(rig))
    assert rig.gate.calls == [("open", NO_LIMIT), ("close", 0)]
    assert rig.windows.passed_over == 0
    in_foreign_thread(lambda: wait(rig))
    assert len(rig.gate.calls) == 4


def test_another_python_thread_opens_none() -> None:
    rig = Rig()
    in_thread(lambda: wait(rig))
    assert (rig.gate.calls, rig.windows.passed_over) == ([], 1)
    with rig.windows.waiting(RECV):
        in_thread(lambda: wait(rig))
        in_thread(rig.windows.leave)
        assert rig.gate.calls == [("open", NO_LIMIT)], "nor does it close that of the training thread"
    assert len(rig.gate.calls) == 2


def test_windows_are_those_of_the_thread_that_passes_boundaries() -> None:
    rig = Rig()
    rig.windows.end()

    def train() -> None:
        rig.windows.begin((), NO_LIMIT, 0)
        rig.windows.arm(rig.gate, None)
        wait(rig)

    in_thread(train)
    assert len(rig.gate.calls) == 2
    wait(rig)
    assert (len(rig.gate.calls), rig.windows.passed_over) == (2, 1), "this thread trains no more"


def test_a_window_opened_in_one_thread_is_not_left_in_another() -> None:
    rig = Rig()
    in_foreign_thread(lambda: rig.windows.enter(RECV))
    rig.windows.leave()
    assert rig.gate.calls == [("open", NO_LIMIT)]
    with rig.windows.waiting(RECV):
        assert rig.gate.calls == [("open", NO_LIMIT)], "one window at a time"
    rig.windows.end()
    assert rig.gate.calls == [("open", NO_LIMIT), ("close", 0)], "the fence ends it"


def test_in_a_forked_child_the_engines_words_are_left_alone() -> None:
    rig = Rig()
    rig.windows.enter(RECV)
    rig.windows.forget()
    rig.windows.leave()
    wait(rig)
    rig.windows.end()
    assert rig.gate.calls == [("open", NO_LIMIT)]


# ---------------------------------------------------------------- with an engine


@pytest.fixture(params=["native", "python"])
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    made = load_engine(None, prefer=request.param)
    yield made
    made.stop()


def test_an_engine_copies_the_budgets_and_no_more(engine: CopyEngine) -> None:
    source = noise(8 << 20)
    target = np.zeros_like(source)
    table = engine.prepare([Segment(source.ctypes.data, 0, source.nbytes)])
    recorder = Recorder()
    windows = Windows(recorder)
    engine.close_window()
    engine.start(target.ctypes.data, target.nbytes, table)
    windows.begin((1 << 20, 0, 2 << 20), 0, 0)
    windows.arm(engine, None)
    done = 0
    for budget in (1 << 20, 0, 2 << 20, 0):
        windows.enter(RECV)
        done += budget
        soon(lambda: engine.progress() >= done, "the window's budget is copied")  # noqa: B023
        windows.leave()
        assert engine.progress() == done
    assert engine.flush(20)
    inside, outside, at_fence = engine.copied()
    assert (inside, outside, at_fence) == (3 << 20, 0, 5 << 20)
    assert [event.micro for event in unpack_events(engine.spans()) if event.kind is EventKind.COPY_INSIDE] == [0, 2]
    assert (source == target).all()
