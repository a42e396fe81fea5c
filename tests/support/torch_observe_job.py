"""Ranks that train stages under every schedule of torch.distributed.pipelining, observed, and compare what was seen
with torch's own table of operations, with every `Work.wait` of the step, and gradients with the unpipelined model.

    python -m tests.support.torch_observe_job --kind Schedule1F1B --out DIR

Other kinds are the functions below named `check_...`. Every comparison that fails ends the rank with an AssertionError.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules

from baft_client.recorder import Recorder
from baft_client.windows import NO_LIMIT, Windows
from baft_torch._observe import PipelineObserver
from baft_torch._pipeline import schedule_said
from baftd.pipeline.events import OPERATIONS, WAITS, Event, EventKind, unpack_events, unpack_order

DIM, MICRO, BATCH = 8, 8, 16
CHUNKS = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
"""The seven schedules, and the stages that each rank has in these tests."""
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
WORDS = {"F": EventKind.FORWARD, "B": EventKind.BACKWARD, "I": EventKind.INPUT_GRAD, "W": EventKind.WEIGHT_GRAD,
         "REDUCE_GRAD": EventKind.REDUCE}  # fmt: skip
Works = list[tuple[int, int]]


class Gate:
    """In the place of the copy engine: remembers when windows were open."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []
        self._since = 0

    def open_window(self, budget: int = NO_LIMIT) -> None:
        """A window opens."""
        assert not self._since, "a window within a window"
        self._since = time.monotonic_ns()

    def close_window(self, outside: int = 0) -> None:
        """It closes."""
        assert self._since, "nothing to close"
        self.opened.append((self._since, time.monotonic_ns()))
        self._since = 0

    @property
    def closed(self) -> bool:
        """No window is open."""
        return not self._since


class Seen:
    """What one observer says: real recorder, real windows, and the gate above."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.windows = Windows(self.recorder)
        self.gate = Gate()
        self.said: list[str] = []
        self.begin()

    def begin(self) -> None:
        """A period begins."""
        self.recorder.take()
        self.gate = Gate()
        self.windows.begin((), NO_LIMIT, 0)
        self.windows.arm(self.gate, None)

    def observe(self, schedule: Any) -> PipelineObserver:
        """An observer of it."""
        return PipelineObserver(schedule, self.recorder, self.windows, say=self.said.append)

    def events(self) -> list[Event]:
        """Those of the period so far; nothing was lost, and no window is open."""
        batch, lost = self.recorder.take()
        assert lost == 0
        assert self.gate.closed
        return list(unpack_events(batch))


def layers(count: int) -> list[nn.Module]:
    """The same on every rank."""
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(count)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, DIM, generator=generator), torch.randn(BATCH, DIM, generator=generator)


loss_of = nn.functional.mse_loss


class Job:
    """The stages of this rank, and the whole model beside them."""

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        *,
        module: Any = schedules,
        group: Any = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda stage: stage,
        kind: type[Any] | None = None,
    ) -> None:
        chunks = CHUNKS.get(name, 1)
        count = chunks * world
        self.rank, self.world = rank, world
        self.mine = [rank, count - 1 - rank] if name in V_SHAPED else list(range(rank, count, world))
        own, self.whole = layers(count), layers(count)
        self.modules = {at: own[at] for at in self.mine}
        device = torch.device("cpu")
        self.stages = [PipelineStage(wrap(own[at]), at, count, device, group=group) for at in self.mine]
        made = kind or getattr(module, name)
        self.schedule = made(self.stages if chunks > 1 else self.stages[0], MICRO, loss_fn=loss_of)

    def step(self, number: int) -> list[torch.Tensor]:
        """A training step; the losses, where this rank has them."""
        x, y = batch(number)
        for module in self.modules.values():
            module.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (x,) if 0 in self.mine else ()
        last = len(self.whole) - 1 in self.mine
        self.schedule.step(*inputs, **({"target": y, "losses": losses} if last else {}))
        return losses

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of this rank's stages, copied."""
        return {f"{at}.{name}": p.grad.clone() for at, module in self.modules.items()
                for name, p in module.named_parameters() if p.grad is not None}  # fmt: skip

    def check_gradients(self, number: int) -> None:
        """Those of the unpipelined model."""
        x, y = batch(number)
        whole = nn.Sequential(*self.whole)
        whole.zero_grad()
        loss_of(whole(x), y).backward()  # type: ignore[no-untyped-call]
        found = self.gradients()
        expected = {f"{at}.{name}": p.grad for at in self.mine for name, p in self.whole[at].named_parameters()}
        assert found.keys() == expected.keys(), "a parameter without a gradient"
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)

    def expected(self) -> list[tuple[EventKind, int, int]]:
        """Torch's table of this rank, flattened."""
        table = getattr(self.schedule, "pipeline_order_with_comms", None) or self.schedule._get_pipeline_order()
        found = []
        for action in table[self.rank]:
            for each in action.sub_actions or (action,):
                kind = WORDS.get(each.computation_type.value)
                if kind is not None:
                    found.append((kind, each.stage_index, -1 if kind is EventKind.REDUCE else each.microbatch_index))
        if type(self.schedule).__name__ == "Schedule1F1B" and self.rank == self.world - 1:
            # Torch's table counts the forwards of the last stage from 1; what it does, it counts from 0.
            found = [(kind, at, micro - 1 if kind is EventKind.FORWARD else micro) for kind, at, micro in found]
        return found


@contextmanager
def waited() -> Iterator[Works]:
    """Begin and end of every `Work.wait`, whoever calls it."""
    spans: Works = []
    inner = dist.Work.wait

    def wait(work: Any, *args: Any) -> Any:
        begin = time.monotonic_ns()
        result = inner(work, *args)
        spans.append((begin, time.monotonic_ns()))
        return result

    dist.Work.wait = wait  # type: ignore[assignment, method-assign]
    try:
        yield spans
    finally:
        dist.Work.wait = inner  # type: ignore[method-assign]


def operations(events: list[Event]) -> list[tuple[EventKind, int, int]]:
    """In the order in which they were carried out, one after the other."""
    found = [event for event in events if event.kind in OPERATIONS]
    assert all(a.end <= b.begin for a, b in itertools.pairwise(found)), "operations overlap"
    return [(event.kind, event.stage, event.micro) for event in found]


def untouched(job: Job, module: Any = schedules) -> bool:
    """Nothing of an observer is left."""
    names = {"step", "_maybe_compute_loss"} & vars(job.schedule).keys()
    for stage in job.stages:
        names |= {name for name in vars(stage) if name.endswith("_one_chunk") or name == "perform_reduce_grad"}
    return not names and not any(hasattr(getattr(module, name, None), "__wrapped__") for name in
                                 ("_batch_p2p", "_wait_batch_p2p"))  # fmt: skip


def check_schedule(name: str, rank: int, world: int) -> None:
    """Operation for operation, wait for wait, gradient for gradient."""
    job = Job(name, rank, world)
    bare = [(job.step(number), job.gradients()) for number in range(2)]
    seen = Seen()
    observer = seen.observe(job.schedule)
    assert seen.windows.sources == ("pipeline",)
    expected = job.expected()
    said = schedule_said(job.schedule)
    assert said is not None
    assert list(unpack_order(said.order)) == expected
    assert (said.name, said.ranks, said.place, said.micro) == (name, world, rank, MICRO)
    assert (said.own, said.stages) == (job.mine, len(job.whole))
    waits: Counter[EventKind] = Counter()
    for number in range(3):
        seen.begin()
        with waited() as works:
            losses = job.step(number)
        events = seen.events()
        assert operations(events) == expected
        check_waits(events, works, seen.gate)
        if number < 2:
            assert [float(x) for x in losses] == [float(x) for x in bare[number][0]]
            for key, gradient in job.gradients().items():
                assert torch.equal(gradient, bare[number][1][key]), key
        job.check_gradients(number)
        waits = Counter(event.kind for event in events if event.kind in WAITS)
    observer.detach()
    assert untouched(job)
    seen.begin()
    job.step(0)
    assert seen.events() == []
    job.check_gradients(0)
    assert not observer.plain
    assert seen.said == []
    assert seen.windows.sources == ()
    print(f"rank {rank} of {name} saw {len(expected)} operations and {sum(waits.values())} waits: {dict(waits)}")


def check_waits(events: list[Event], works: Works, gate: Gate) -> None:
    """Every `Work.wait` lies in one wait and in one window; every wait is of something; nothing overlaps operations."""
    found = [event for event in events if event.kind in WAITS]
    computing = [event for event in events if event.kind in OPERATIONS]
    windows = [event for event in events if event.kind is EventKind.WINDOW]
    (step,) = [event for event in events if event.kind is EventKind.SCHEDULE]
    assert step.amount == 0
    assert works, "nobody waited"
    assert len(gate.opened) == len(found) == len(windows)
    assert [window.stage for window in windows] == [event.kind for event in found]
    assert [window.micro for window in windows] == list(range(len(windows)))
    used = set()
    for begin, end in works:
        (at,) = [i for i, event in enumerate(found) if event.begin <= begin and end <= event.end]
        used.add(at)
        assert any(opened <= begin and end <= closed for opened, closed in gate.opened)
    assert len(used) == len(found), "a wait for nothing"
    for event in found:
        assert all(event.end <= other.begin or other.end <= event.begin for other in computing)
    assert all(step.begin <= event.begin and event.end <= step.end for event in (*found, *computing))


def compiled(stage: nn.Module) -> nn.Module:
    """The same, compiled."""
    made = torch.compile(stage, backend="aot_eager")
    assert isinstance(made, nn.Module)
    return made


def check_compiled(rank: int, world: int) -> None:
    """Stages that torch.compile made."""
    job = Job("ScheduleInterleaved1F1B", rank, world, wrap=compiled)
    job.step(0)  # makes connections, too
    seen = Seen()
    observer = seen.observe(job.schedule)
    for number in range(2):
        seen.begin()
        with waited() as works:
            job.step(number)
        events = seen.events()
        assert operations(events) == job.expected()
        check_waits(events, works, seen.gate)
        job.check_gradients(number)
    observer.detach()
    assert untouched(job)


def check_hidden(rank: int, world: int) -> None:
    """A torch whose private functions have other names: operations as ever, gaps between them are windows."""
    module = renamed()
    for name in CHUNKS:
        job = Job(name, rank, world, module=module)
        seen = Seen()
        observer = seen.observe(job.schedule)
        assert observer.plain
        assert "has no _batch_p2p and _wait_batch_p2p" in seen.said[0]
        for number in range(2):
            seen.begin()
            with waited() as works:
                job.step(number)
            events = seen.events()
            assert operations(events) == job.expected()
            if number:  # the first one also makes connections
                for begin, end in works:
                    assert any(opened <= begin and end <= closed for opened, closed in seen.gate.opened)
            computing = [(event.begin, event.end) for event in events if event.kind in OPERATIONS]
            assert all(closed <= a or b <= opened for opened, closed in seen.gate.opened for a, b in computing)
            assert {event.kind for event in events if event.kind in WAITS} == {EventKind.WAIT_MIXED}
            job.check_gradients(number)
        observer.detach()
        assert len(seen.said) == 1
        assert untouched(job, module)


def renamed() -> Any:
    """torch.distributed.pipelining.schedules as another version might have it."""
    source = Path(str(schedules.__file__)).read_text()
    source = source.replace("_wait_batch_p2p", "_await_works").replace("_sorted_batch_p2p", "_sorted_works")
    source = source.replace("_batch_p2p", "_start_works")
    name = "torch.distributed.pipelining.other_schedules"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__package__ = "torch.distributed.pipelining"
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


class OwnWaits(ScheduleGPipe):
    """A schedule that waits for its works itself."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        kept = schedules._wait_batch_p2p
        schedules._wait_batch_p2p = lambda works: [work.wait() for work in works]  # type: ignore[assignment]
        try:
            super()._step_microbatches(*args, **kwargs)
        finally:
            schedules._wait_batch_p2p = kept


def check_own_waits(rank: int, world: int) -> None:
    """A schedule that does not use the functions that are there: known after its first step."""
    job = Job("ScheduleGPipe", rank, world, kind=OwnWaits)
    seen = Seen()
    observer = seen.observe(job.schedule)
    assert not observer.plain
    for number in range(3):
        seen.begin()
        with waited() as works:
            job.step(number)
        events = seen.events()
        assert operations(events) == job.expected()
        assert bool(seen.gate.opened) is (number > 0)
        if number:
            for begin, end in works:
                assert any(opened <= begin and end <= closed for opened, closed in seen.gate.opened)
        job.check_gradients(number)
    assert observer.plain
    assert len(seen.said) == 1
    assert "does not wait by" in seen.said[0]
    observer.detach()
    assert untouched(job)


def check_one_after_another(rank: int, world: int) -> None:
    """Observers that come and go, in any order, several at once on one schedule."""
    job = Job("Schedule1F1B", rank, world)
    job.step(0)
    first, second, third = Seen(), Seen(), Seen()
    one = first.observe(job.schedule)
    job.step(1)
    assert operations(first.events()) == job.expected()
    two = second.observe(job.schedule)
    first.begin()
    job.step(2)
    assert operations(first.events()) == operations(second.events()) == job.expected()
    one.detach()
    one.detach()
    first.begin()
    second.begin()
    job.step(3)
    assert first.events() == []
    assert operations(second.events()) == job.expected()
    two.detach()
    assert untouched(job)
    again = third.observe(job.schedule)
    job.step(4)
    assert operations(third.events()) == job.expected()
    again.detach()
    assert untouched(job)
    job.check_gradients(4)


def check_two_schedules(rank: int, world: int) -> None:
    """Two schedules in one process, in turn and in two threads at the same time: each sees its own."""
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    names = ("Schedule1F1B", "ScheduleInterleavedZeroBubble")
    jobs = [Job(name, rank, world, group=group) for name, group in zip(names, groups, strict=True)]
    for job in jobs:
        job.step(0)
    seen = [Seen() for _ in jobs]
    observers = [one.observe(job.schedule) for one, job in zip(seen, jobs, strict=True)]
    for number in range(2):
        for one, job in zip(seen, jobs, strict=True):
            one.begin()
            job.step(number)
        for one, job in zip(seen, jobs, strict=True):
            events = one.events()
            assert operations(events) == job.expected()
    failures: list[BaseException] = []

    def run(one: Seen, job: Job) -> None:
        try:
            for number in range(10):
                one.begin()  # the thread that trains
                with torch.enable_grad():
                    job.step(number)
                events = one.events()
                assert operations(events) == job.expected()
                assert len([event for event in events if event.kind in WAITS]) == len(one.gate.opened) > 0
        except BaseException as problem:
            failures.append(problem)
            raise

    threads = [threading.Thread(target=run, args=each) for each in zip(seen, jobs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive()
    assert not failures, failures
    observers[0].detach()
    seen[1].begin()
    jobs[1].step(0)
    assert operations(seen[1].events()) == jobs[1].expected()
    observers[1].detach()
    assert all(untouched(job) for job in jobs)


def check_evaluation(rank: int, world: int) -> None:
    """schedule.eval() between steps: marked, without backward passes; training afterwards as ever."""
    for name in ("Schedule1F1B", "ScheduleInterleaved1F1B"):
        job = Job(name, rank, world)
        seen = Seen()
        observer = seen.observe(job.schedule)
        x, y = batch(0)
        for number in range(2):
            job.step(number)
            seen.begin()
            losses: list[torch.Tensor] = []
            inputs = (x,) if 0 in job.mine else ()
            last = len(job.whole) - 1 in job.mine
            with torch.no_grad():
                job.schedule.eval(*inputs, **({"target": y, "losses": losses} if last else {}))
            events = seen.events()
            assert set(operations(events)) == {op for op in job.expected() if op[0] is EventKind.FORWARD}
            assert [event.amount for event in events if event.kind is EventKind.SCHEDULE] == [1]
            assert any(event.kind in WAITS for event in events)
        seen.begin()
        job.step(2)
        assert operations(seen.events()) == job.expected()
        job.check_gradients(2)
        observer.detach()
        assert untouched(job)


class Failure(Exception):
    """Raised by a stage."""


def check_faults(rank: int, world: int) -> None:
    """A stage raises on the first rank, so a receive fails on the second: no window is open, nothing stays patched."""
    job = Job("Schedule1F1B", rank, world)
    seen = Seen()
    observer = seen.observe(job.schedule)
    job.step(0)
    seen.begin()
    if rank == 0:
        module, calls = job.modules[0], 0

        def fail(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise Failure

        module.register_forward_pre_hook(fail)
    try:
        job.step(1)
    except RuntimeError as problem:
        failed: BaseException | None = problem.__cause__ or problem
    else:
        failed = None
    print(f"rank {rank} failed as it should: {type(failed).__name__}")
    assert isinstance(failed, Failure if rank == 0 else RuntimeError)
    assert seen.gate.closed
    events = seen.events()
    assert events[-1].kind is EventKind.SCHEDULE
    forwards = [event for event in events if event.kind is EventKind.FORWARD]
    assert len(forwards) <= 1, "the operation that failed is none"
    if rank == 1:
        assert events[-2].kind in (EventKind.WAIT_RECV, EventKind.WAIT_MIXED), "the wait that failed was one"
    assert not observer.plain
    observer.detach()
    assert untouched(job)
    os._exit(0)  # the connections are broken: nothing to say goodbye with


CHECKS: dict[str, Callable[[int, int], None]] = {
    "compiled": check_compiled,
    "evaluation": check_evaluation,
    "faults": check_faults,
    "hidden": check_hidden,
    "one_after_another": check_one_after_another,
    "own_waits": check_own_waits,
    "two_schedules": check_two_schedules,
}


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--steps", default="0")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", default="0")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    if args.kind in CHUNKS:
        check_schedule(args.kind, rank, world)
    else:
        CHECKS[args.kind](rank, world)
    print(f"rank {rank} compared {args.kind}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
