"""How an observer puts its wrappers in place and takes them away, on objects of the shape of torch's; no ranks."""

from __future__ import annotations

import copy
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baft_client.recorder import Recorder
from baft_client.windows import NO_LIMIT, Windows
from baft_torch._observe import PipelineObserver
from baft_torch._pipeline import schedule_said
from baftd.pipeline.events import Event, EventKind, unpack_events, unpack_order

F, B, W, REDUCE = EventKind.FORWARD, EventKind.BACKWARD, EventKind.WEIGHT_GRAD, EventKind.REDUCE
INPUT = EventKind.INPUT_GRAD
OPERATIONS = (F, B, INPUT, W, REDUCE)


class Stage:
    """The last of two."""

    stage_index, group_size, group_rank, num_stages, is_last = 1, 2, 1, 2, True

    def forward_one_chunk(self, fwd_chunk_id: int) -> str:
        return "out"

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True) -> None: ...

    def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None: ...

    def perform_reduce_grad(self, grad_scale_factor: int) -> None: ...


class Direction:
    """Of a point-to-point operation."""

    def __init__(self, name: str) -> None:
        self.op = types.SimpleNamespace(__name__=name)


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """Where the schedule finds its two functions."""
    made = types.ModuleType("observed_schedules")
    made.__dict__.update(_batch_p2p=lambda ops, desc=None: list(ops), _wait_batch_p2p=lambda work: None)
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.fixture
def schedule(module: types.ModuleType) -> Any:
    """Receives, goes forward and back, sends; `fail` raises where it is told to."""

    def step(self: Any, fail: str = "") -> str:
        stage = self._stage
        for micro in range(2):
            module.__dict__["_wait_batch_p2p"](module.__dict__["_batch_p2p"]([Direction("irecv")], desc="fwd_recv"))
            output = stage.forward_one_chunk(micro)
            self._maybe_compute_loss(stage, output, None, micro)
            if fail:
                raise ValueError(fail)
            stage.backward_one_chunk(bwd_chunk_id=micro, full_backward=micro == 0)
            sends = module.__dict__["_batch_p2p"]([Direction("isend"), Direction("irecv")])
            module.__dict__["_wait_batch_p2p"](sends)
        module.__dict__["_wait_batch_p2p"]([])
        stage.backward_weight_one_chunk(1)
        stage.perform_reduce_grad(2)
        return "done"

    def maybe_compute_loss(self: Any, *_: Any) -> None: ...

    kind = type("Schedule", (), {"__module__": module.__name__, "step": step, "_has_backward": True,
                                 "_maybe_compute_loss": maybe_compute_loss})  # fmt: skip
    made = kind()
    made._stage = Stage()
    return made


class Seen:
    """Real recorder and windows; a copy is armed at a gate that counts."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.windows = Windows(self.recorder)
        self.open = 0
        self.begin()

    def begin(self) -> None:
        self.recorder.take()
        self.windows.begin((), NO_LIMIT, 0)
        self.windows.arm(self, None)

    def open_window(self, budget: int = NO_LIMIT) -> None:
        self.open += 1

    def close_window(self, outside: int = 0) -> None:
        self.open -= 1

    def observe(self, schedule: Any, **more: Any) -> PipelineObserver:
        return PipelineObserver(schedule, self.recorder, self.windows, **more)

    def events(self) -> list[Event]:
        assert self.open == 0, "a window is open"
        return [event for event in unpack_events(self.recorder.take()[0]) if event.kind is not EventKind.WINDOW]

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.events()]


STEP = [
    EventKind.WAIT_RECV, F, B, EventKind.WAIT_MIXED,
    EventKind.WAIT_RECV, F, INPUT, EventKind.WAIT_MIXED,
    W, REDUCE, EventKind.SCHEDULE,
]  # fmt: skip


def clean(schedule: Any, module: types.ModuleType) -> bool:
    return not [
        name
        for owner in (schedule, schedule._stage, module)
        for name, value in vars(owner).items()
        if hasattr(value, "__wrapped__")
    ] and set(vars(schedule)) == {"_stage"}


def test_a_step_is_seen_and_nothing_remains(schedule: Any, module: types.ModuleType) -> None:
    seen = Seen()
    observer = seen.observe(schedule)
    assert schedule.step() == "done"
    events = seen.events()
    assert [event.kind for event in events] == STEP
    assert [(event.stage, event.micro) for event in events if event.kind in OPERATIONS] == [
        (1, 0), (1, 0), (1, 1), (1, 1), (1, 1), (1, -1),
    ]  # fmt: skip
    observer.detach()
    observer.detach()
    assert clean(schedule, module)
    assert schedule.step() == "done"
    assert seen.events() == []


def test_the_loss_belongs_to_the_forward_of_the_last_stage(schedule: Any, module: types.ModuleType) -> None:
    seen = Seen()
    ends: list[int] = []
    schedule._maybe_compute_loss = lambda *_: ends.append(time.monotonic_ns())
    observer = seen.observe(schedule)
    schedule.step()
    forwards = [event for event in seen.events() if event.kind is F]
    assert all(event.end >= end for event, end in zip(forwards, ends, strict=True))
    observer.detach()
    assert set(vars(schedule)) == {"_stage", "_maybe_compute_loss"}, "what was there is there again"
    assert not hasattr(schedule._maybe_compute_loss, "__wrapped__")


@pytest.mark.parametrize("hidden", [False, True], ids=["waits", "plain"])
def test_an_exception_leaves_no_window_open(schedule: Any, module: types.ModuleType, hidden: bool) -> None:
    if hidden:
        del module.__dict__["_batch_p2p"]
        module.__dict__["_batch_p2p"] = None
    seen = Seen()
    observer = seen.observe(schedule)
    assert observer.plain is hidden
    if hidden:
        module.__dict__["_batch_p2p"] = lambda ops, desc=None: list(ops)
    with pytest.raises(ValueError, match="here"):
        schedule.step(fail="here")
    assert seen.kinds()[-1] is EventKind.SCHEDULE
    schedule.step()
    found = seen.kinds()
    assert [kind for kind in found if kind in OPERATIONS] == [F, B, F, INPUT, W, REDUCE]
    if hidden:  # before the first operation, between any two, and behind the last
        assert found == [kind for op in (F, B, F, INPUT, W, REDUCE) for kind in (EventKind.WAIT_MIXED, op)] + [
            EventKind.WAIT_MIXED, EventKind.SCHEDULE,
        ]  # fmt: skip
    observer.detach()
    assert clean(schedule, module)


def test_whoever_wraps_an_observed_function_in_turn_is_left_alone(schedule: Any, module: types.ModuleType) -> None:
    seen = Seen()
    observer = seen.observe(schedule)
    calls: list[str] = []

    def counting(inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*args, **kwargs)

        return counted

    schedule._stage.forward_one_chunk = counting(schedule._stage.forward_one_chunk, "forward")
    module.__dict__["_wait_batch_p2p"] = counting(module.__dict__["_wait_batch_p2p"], "wait")
    observer.detach()
    schedule.step()
    assert seen.events() == []
    assert (calls.count("forward"), calls.count("wait")) == (2, 5)
    again = seen.observe(schedule)
    schedule.step()
    assert seen.kinds() == STEP, "each once, through the wrapper that stayed"
    assert (calls.count("forward"), calls.count("wait")) == (4, 10)
    again.detach()
    schedule.step()
    assert seen.events() == []


def test_observers_of_one_schedule_share_wrappers_and_end_in_any_order(schedule: Any, module: types.ModuleType) -> None:
    first, second = Seen(), Seen()
    one, two = first.observe(schedule), second.observe(schedule)
    schedule.step()
    assert first.kinds() == second.kinds() == STEP
    one.detach()
    first.begin()
    schedule.step()
    assert (first.events(), second.kinds()) == ([], STEP)
    two.detach()
    assert clean(schedule, module)


def test_two_schedules_see_their_own_steps_one_within_the_other(schedule: Any, module: types.ModuleType) -> None:
    other = copy.copy(schedule)
    other._stage = Stage()
    other._stage.forward_one_chunk = lambda fwd_chunk_id: schedule.step()
    outer, inner = Seen(), Seen()
    observers = [outer.observe(other), inner.observe(schedule)]
    other.step()
    assert outer.kinds() == STEP
    assert inner.kinds() == STEP * 2
    for observer in observers:
        observer.detach()
    assert clean(schedule, module)


@pytest.mark.parametrize("late", [False, True], ids=["imported before", "imported while wrapped"])
def test_a_schedule_of_another_module_is_seen_through_the_names_it_imported(
    schedule: Any, module: types.ModuleType, late: bool
) -> None:
    other = types.ModuleType("derived_schedules")
    names = ("_batch_p2p", "_wait_batch_p2p")
    former = Seen().observe(schedule) if late else None
    other.__dict__.update({name: module.__dict__[name] for name in names})
    if former is not None:
        former.detach()

    def step(self: Any) -> None:
        other.__dict__["_wait_batch_p2p"](other.__dict__["_batch_p2p"]([Direction("isend")]))

    made = type("Derived", (type(schedule),), {"__module__": other.__name__, "step": step})()
    made._stage = Stage()
    sys.modules[other.__name__] = other
    try:
        seen = Seen()
        before = dict(other.__dict__)
        observer = seen.observe(made)
        made.step()
        assert seen.kinds() == [EventKind.WAIT_SEND, EventKind.SCHEDULE]
        observer.detach()
        assert other.__dict__ == before
    finally:
        del sys.modules[other.__name__]
    assert clean(schedule, module)


def test_detach_within_a_step(schedule: Any, module: types.ModuleType) -> None:
    seen = Seen()
    observer = seen.observe(schedule)
    inner = schedule._stage.backward_one_chunk
    schedule._stage.backward_one_chunk = lambda *args, **kwargs: (observer.detach(), inner(*args, **kwargs))[1]
    assert schedule.step() == "done"
    del schedule._stage.backward_one_chunk
    assert seen.open == 0
    assert not hasattr(module.__dict__["_wait_batch_p2p"], "__wrapped__")


def test_a_forward_only_step_says_so(schedule: Any, module: types.ModuleType) -> None:
    seen = Seen()
    observer = seen.observe(schedule)
    schedule._has_backward = False
    schedule.step()
    events = seen.events()
    assert [event.kind for event in events if event.kind in OPERATIONS] == [F, F]
    assert events[-1].amount == 1
    observer.detach()


def test_waits_are_told_of_steps_and_stood_for_in_waits(schedule: Any, module: types.ModuleType) -> None:
    calls: list[str] = []

    class Around:
        covered = False

        def schedule_entered(self) -> None:
            calls.append("entered")

        def schedule_returned(self) -> None:
            calls.append("returned")

    around = Around()
    covered: list[bool] = []
    module.__dict__["_wait_batch_p2p"] = lambda work: covered.append(around.covered)
    seen = Seen()
    observer = seen.observe(schedule, waits=around)
    schedule.step()
    with pytest.raises(ValueError, match="x"):
        schedule.step(fail="x")
    schedule._has_backward = False
    schedule.step()
    assert calls == ["entered", "returned", "entered", "entered"]
    assert covered == [True, True, True, True, False, True, True, True, True, True, False]
    assert around.covered is False
    observer.detach()


class Word:
    """An action of torch's table."""

    def __init__(self, text: str, stage: int, micro: int | None = None, sub: tuple[Word, ...] | None = None) -> None:
        self.computation_type = types.SimpleNamespace(value=text)
        self.stage_index, self.microbatch_index, self.sub_actions = stage, micro, sub


def said(row: list[Word | None], micro: int = 2) -> list[tuple[EventKind, int, int]]:
    """The order that a schedule with this row of the table says."""
    schedule = types.SimpleNamespace(_stage=Stage(), _n_microbatches=micro, pipeline_order={1: row})
    found = schedule_said(schedule)
    assert found is not None
    assert (found.ranks, found.place, found.stages, found.own, found.micro) == (2, 1, 2, [1], micro)
    return list(unpack_order(found.order))


def test_an_order_is_said_only_where_it_holds_together() -> None:
    forwards = [Word("F", 1, 0), Word("F", 1, 1)]
    backwards = [Word("B", 1, 0), Word("B", 1, 1)]
    whole = [(F, 1, 0), (F, 1, 1), (B, 1, 0), (B, 1, 1)]
    assert said([None, *forwards, Word("SEND_F", 1, 0), *backwards, Word("REDUCE_GRAD", 1)]) == [
        *whole, (REDUCE, 1, -1),
    ]  # fmt: skip
    assert said([Word("F", 1, 1), Word("F", 1, 2), *backwards]) == whole, "torch's 1F1B counts the last stage from 1"
    assert said([forwards[0], Word("OVERLAP_F_B", -1, None, (forwards[1], backwards[0])), backwards[1]]) == [
        whole[0], whole[1], whole[2], whole[3],
    ]  # fmt: skip
    halves = [Word(text, 1, micro) for micro in range(2) for text in "IW"]
    assert said([*forwards, *halves]) == [*whole[:2], (INPUT, 1, 0), (W, 1, 0), (INPUT, 1, 1), (W, 1, 1)]
    assert said([*forwards, backwards[0]]) == [], "a micro-batch that never goes back"
    assert said([*forwards, backwards[0], backwards[0]]) == []
    assert said([*forwards, *backwards, Word("NEW", 1, 0)]) == [], "a word that nobody knows"
    assert said([*forwards, *backwards, Word("F", 0, 0)]) == [], "another rank's stage"
    assert said([*forwards, *backwards], micro=3) == []
    assert said([]) == []


def test_a_schedule_without_stages_says_nothing() -> None:
    assert schedule_said(object()) is None
