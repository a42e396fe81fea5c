"""Windows of plain training: around collectives, in the tail of a step, around the wait for data."""

from __future__ import annotations

import functools
import gc
import threading
import time
import timeit
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_reduce as imported_before
from torchdata.stateful_dataloader import StatefulDataLoader

from baft_torch._loader import LoaderState
from baftd.pipeline.events import EventKind
from tests.support.torch_watch import Net, Watch, backward, group_of_one, net, watches

COLLECTIVE, TAIL, DATA = EventKind.WAIT_COLLECTIVE, EventKind.TAIL, EventKind.WAIT_DATA


@pytest.fixture
def watching() -> Iterator[Callable[..., Watch]]:
    """Makes watches."""
    with watches() as make:
        yield make


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Made once: torch keeps what a functional collective was called with."""
    with group_of_one():
        yield


# ---------------------------------------------------------------- collectives


def in_another_group(t: torch.Tensor) -> None:
    """A collective of a group that is made now."""
    other = dist.new_group([0])
    dist.all_reduce(t, group=other)
    dist.destroy_process_group(other)


def collectives() -> dict[str, Callable[[], Any]]:
    """Ways to wait for others, each once."""
    t, gathered = torch.ones(3), [torch.ones(3)]
    return {
        "all_reduce": lambda: dist.all_reduce(t),
        "imported by name before": lambda: imported_before(t),
        "asynchronous": lambda: dist.all_reduce(t, async_op=True).wait(),
        "barrier": lambda: dist.barrier(),
        "all_gather": lambda: dist.all_gather(gathered, t),
        "reduce_scatter": lambda: dist.reduce_scatter(t.clone(), [t]),
        "broadcast": lambda: dist.broadcast(t, 0),
        "another group": lambda: in_another_group(t),
        "functional": lambda: functional.all_reduce(t, "sum", dist.group.WORLD) + 1,
        "functional, waited for": lambda: functional.wait_tensor(functional.all_reduce(t, "sum", dist.group.WORLD)),
    }


@pytest.mark.parametrize("name", list(collectives()))
def test_every_wait_for_a_collective_is_a_window(name: str, group: None, watching: Callable[..., Watch]) -> None:
    watch, call = watching(), collectives()[name]
    call()
    found = watch.events()
    windows = [event for event in found if event.kind is EventKind.WINDOW]
    waits = [event for event in found if event.kind is COLLECTIVE]
    assert len(windows) == len(waits) >= 1
    assert {event.stage for event in windows} == {COLLECTIVE}
    assert [event.micro for event in windows] == list(range(len(windows)))
    assert watch.gate.said == ["open", "close"] * len(windows)


def test_a_collective_that_is_never_waited_for_opens_nothing(group: None, watching: Callable[..., Watch]) -> None:
    watch = watching()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert watch.events() == []
    while not work.is_completed():
        time.sleep(0.001)
    del work
    assert watch.events() == []


def test_a_wait_that_raises_closes_its_window(group: None, watching: Callable[..., Watch]) -> None:
    watch = watching()
    with pytest.raises(TypeError):
        Work.wait("no work")
    assert watch.gate.said == ["open", "close"]
    dist.barrier()
    assert watch.windows_of() == [COLLECTIVE, COLLECTIVE]


def test_waits_of_other_threads_open_nothing(group: None, watching: Callable[..., Watch]) -> None:
    watch = watching()
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
    thread.start()
    thread.join()
    assert watch.events() == []
    thread = threading.Thread(target=lambda: (watch.step(), dist.all_reduce(torch.ones(1))))
    thread.start()  # training goes on in another thread: whoever passes the boundary trains
    thread.join()
    assert watch.windows_of() == [COLLECTIVE]
    dist.barrier()
    assert watch.events() == []


def test_what_an_observer_stands_for_is_not_seen_twice(group: None, watching: Callable[..., Watch]) -> None:
    watch = watching()
    watch.waits.covered = True
    dist.barrier()
    watch.waits.covered = False
    assert watch.events() == []


def test_two_trainings_in_a_process_and_each_may_end_first(group: None, watching: Callable[..., Watch]) -> None:
    one, two = watching(), watching()
    dist.barrier()
    assert one.windows_of() == two.windows_of() == [COLLECTIVE]
    one.waits.close()
    dist.barrier()
    assert (one.events(), two.windows_of()) == ([], [COLLECTIVE])


def test_who_wraps_after_us_keeps_his_wrapper(group: None, watching: Callable[..., Watch]) -> None:
    plain, watch = Work.wait, watching()
    ours, calls = Work.wait, []

    @functools.wraps(ours)
    def theirs(work: Work, *args: Any) -> Any:
        calls.append(1)
        return ours(work, *args)

    Work.wait = theirs
    try:
        watch.waits.close()
        assert Work.wait is theirs
        dist.barrier()
        assert calls == [1]
        assert watch.events() == []
    finally:
        Work.wait = plain


def test_names_that_a_version_lacks_are_left_out(
    group: None, watching: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(functional, "wait_tensor")
    watch = Watch()
    dist.barrier()
    assert watch.windows_of() == [COLLECTIVE]
    watch.waits.close()
    assert not hasattr(functional, "wait_tensor")


# ---------------------------------------------------------------- the tail


def test_the_tail_is_a_window_from_the_end_of_backward_to_the_update(watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)
    ended: list[int] = []
    model.first.weight.register_post_accumulate_grad_hook(lambda _: ended.append(time.monotonic_ns()))
    for _ in range(3):
        backward(model)
        assert watch.gate.open
        now = time.monotonic_ns()
        watch.fence()
        assert not watch.gate.open
        (tail,) = [event for event in watch.events() if event.kind is TAIL]
        assert ended[-1] <= tail.begin <= now <= tail.end
        watch.step()


def test_after_one_step_one_parameter_has_a_hook(watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)

    def hooked() -> int:
        return sum(bool(param._post_accumulate_grad_hooks) for param in model.parameters())

    assert hooked() == 4
    backward(model)
    watch.fence()
    assert hooked() == 1
    watch.waits.close()
    assert hooked() == 0


def test_a_forward_ends_the_tail_so_accumulation_copies_beside_no_computing(watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)
    inside: list[bool] = []
    model.second.register_forward_pre_hook(lambda *_: inside.append(watch.gate.open))
    for _ in range(3):
        for _ in range(3):
            backward(model)
        watch.fence()
        assert watch.windows_of() == [TAIL] * 3
        watch.step()
    assert inside == [False] * 9


def test_an_evaluation_opens_no_tail(watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert watch.events() == []
    backward(model)
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert not watch.gate.open


def test_after_the_fence_nothing_opens_until_the_boundary(group: None, watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)
    backward(model)
    watch.fence()
    watch.events()
    backward(model)  # a second model's, or the next evaluation of a closure
    dist.barrier()
    assert watch.windows_of() == []
    watch.step()
    dist.barrier()
    assert watch.windows_of() == [COLLECTIVE]


def test_a_wait_in_the_tail_is_the_tails_window(group: None, watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)
    backward(model)
    dist.all_reduce(torch.ones(1))
    watch.fence()
    events = watch.events()
    assert [EventKind(event.stage) for event in events if event.kind is EventKind.WINDOW] == [TAIL]
    assert sorted(event.kind for event in events) == [COLLECTIVE, TAIL, EventKind.WINDOW]
    assert watch.gate.said == ["open", "close"]


def test_a_backward_pass_that_raises_does_not_hide_the_next(watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)
    backward(model)
    watch.fence()
    watch.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.first.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        backward(model)
    handle.remove()
    watch.events()
    backward(model)
    assert watch.gate.open


def test_other_parameters_may_come_first_later(watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)
    backward(model)
    watch.fence()
    watch.step()
    model.second.requires_grad_(False)  # the one whose gradient came first
    for _ in range(3):
        backward(model)
        watch.fence()
        watch.step()
    watch.events()
    backward(model)
    assert watch.gate.open


def test_gradients_that_never_come_are_looked_for_less_and_less_often() -> None:
    model = Net()
    watch = Watch(modules=[model], params=list(model.parameters()))
    hooked = []
    for _ in range(300):
        hooked.append(bool(model.first.weight._post_accumulate_grad_hooks))
        watch.fence()
        watch.step()
    watch.waits.close()
    assert 4 <= sum(hooked[:100]) <= 10
    assert sum(hooked[200:]) <= 3


def test_two_models_with_a_pass_each(watching: Callable[..., Watch]) -> None:
    one, two = Net(), Net()
    watch = watching(modules=[one, two], params=[*one.parameters(), *two.parameters()])
    for _ in range(3):
        backward(one)
        backward(two)
        watch.fence()
        assert watch.windows_of() == [TAIL, TAIL]
        watch.step()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(watching: Callable[..., Watch], reentrant: bool) -> None:
    watch, model = net(watching)
    x = torch.ones(3, 4, requires_grad=True)
    for _ in range(2):
        hidden = torch.utils.checkpoint.checkpoint(lambda v: model.first(v).relu(), x, use_reentrant=reentrant)
        model.second(hidden).sum().backward()
        assert watch.gate.open
        watch.fence()
        watch.step()

# ---------------------------------------------------------------- data


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Each item takes a moment."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.full((4,), float(index))


def loader(workers: int) -> StatefulDataLoader[torch.Tensor]:
    """One with batches of two."""
    context = "fork" if workers else None
    return StatefulDataLoader(Slow(), batch_size=2, num_workers=workers, multiprocessing_context=context)


@pytest.mark.parametrize("exists", [False, True], ids=["before it is iterated", "while it is"])
def test_the_wait_for_workers_is_a_window(watching: Callable[..., Watch], exists: bool) -> None:
    watch, data = watching(), loader(1)
    before = iter(data) if exists else None
    state = LoaderState(data)
    state.watch(watch.waits)
    batches = list(before if before is not None else data)
    assert len(batches) == 3
    events = watch.events()
    waits = [event for event in events if event.kind is DATA]
    assert len(waits) == 4  # the last finds the end
    assert [event.stage for event in events if event.kind is EventKind.WINDOW] == [DATA] * 4
    assert sum(event.end - event.begin for event in waits) > 20e6
    state.unwatch()
    watch.waits.close()
    assert "_get_iterator" not in data.__dict__
    assert len(list(data)) == 3
    assert watch.events() == []


def test_without_workers_the_thread_works_and_does_not_wait(watching: Callable[..., Watch]) -> None:
    watch, data = watching(), loader(0)
    state = LoaderState(data)
    state.watch(watch.waits)
    assert len(list(data)) == 3
    state.unwatch()
    assert watch.events() == []


def test_an_iterator_given_up_still_stops_its_workers(watching: Callable[..., Watch]) -> None:
    watch, data = watching(), loader(1)
    state = LoaderState(data)
    state.watch(watch.waits)
    batches = iter(data)
    next(batches)
    data._iterator = None  # the loader's own reference, which a new epoch would replace
    workers, gone = batches._workers, weakref.ref(batches)
    gc.collect()
    gc.disable()
    try:
        del batches
        assert gone() is None
    finally:
        gc.enable()
    assert not any(worker.is_alive() for worker in workers)
    state.unwatch()


# ---------------------------------------------------------------- cost


def test_what_a_step_costs(group: None, watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)
    backward(model)
    watch.fence()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()

    def microseconds(call: Callable[[], Any], number: int = 2000) -> float:
        def run() -> float:
            watch.step()
            watch.recorder.take()
            return timeit.timeit(call, number=number, timer=time.thread_time) / number * 1e6

        return min(run() for _ in range(9))

    def tail() -> None:
        watch.waits.schedule_returned()
        watch.waits.forward_begins()

    waited, of_tail = microseconds(work.wait), microseconds(tail)
    watch.waits.close()
    plain = microseconds(work.wait)
    print(f"\na window around a wait: {waited - plain:.2f} us; a tail: {of_tail:.2f} us")
    # A step with a tail and eight collectives of its own, against 0.1 % of 100 ms.
    assert of_tail + 8 * (waited - plain) < 100.0
