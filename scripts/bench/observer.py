"""What observing a pipeline costs: its events in a step, times the cost of each, as a share of a step of 100 ms.

Four ranks train small stages over gloo under the observers of `baft_torch` and count, by kind, what passes through
them in one step. Then one process measures what each kind costs: the same call observed and bare, in turn, many in a
row, with the real recorder, windows and copy engine, and a copy armed. The same is given for calls half a millisecond
apart, when caches are cold and the copying thread sleeps: it is woken in a wait, when the rank has nothing to do.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import socket
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _report import Report, arguments, median
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from baft_client.engine import Segment
from baft_client.load_engine import load_engine
from baft_client.recorder import Recorder
from baft_client.windows import NO_LIMIT, Windows
from baft_torch._observe import PipelineObserver
from baft_torch._waits import Waits
from baftd.pipeline.events import OPERATIONS, WAITS, EventKind, unpack_events

STEP_US = 100_000.0
"""The step that the goal speaks of."""
CALLS = 200
"""In a row."""
RANKS, MICRO, DIM = 4, 8, 8
SCHEDULES = {"Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleDualPipeV": 2}
"""Schedules, and the stages of each rank."""
PAUSE = 0.0005
"""Seconds before a call and within it, where caches shall be cold."""


def main() -> None:
    """Measure, print, exit 0: a goal not met is printed as not met."""
    options = arguments(__doc__ or "").parse_args()
    quick: bool = options.quick
    report = Report("observer")
    names = ["Schedule1F1B"] if quick else list(SCHEDULES)
    counted = count(names)
    with Costs() as costs:
        warm = costs.measure(5 if quick else 60, CALLS)
        cold = costs.measure(20 if quick else 300, 1)
    for kind, cost in warm.items():
        report.add(f"{kind}_us", cost, unit="us", goal=None, better="lower", how=HOW[kind])
    for name in names:
        share(report, name, counted[name], warm, cold)
    if quick:
        report.note("--quick: too few samples for the figures to mean anything")
    report.print(as_json=options.json)


Measured = dict[str, tuple[float, float]]
"""Microseconds of each kind, and their standard error."""


def share(report: Report, name: str, counted: list[Counter[str]], warm: Measured, cold: Measured) -> None:
    """Add what the rank with the most to see pays in a step."""
    worst = max(range(RANKS), key=lambda rank: total(counted[rank], warm)[0])
    seen = ", ".join(f"{number} x {kind}" for kind, number in counted[worst].items())
    first = name == "Schedule1F1B"
    short = "observer" if first else f"observer_{name.removeprefix('Schedule').lower()}"
    for figure, costs, goal, how in (
        (f"{short}_percent_of_100ms", warm, 0.1 if first else None, f"{name}, 4 ranks, 8 micro-batches: {seen}"),
        (f"{short}_cold_percent_of_100ms", cold, None, "the same with cold caches and the copying thread asleep"),
    ):
        value, error = total(counted[worst], costs)
        percent = value / STEP_US * 100, error / STEP_US * 100
        report.add(figure, percent, unit="%", goal=goal, better="lower", how=how)


def total(counted: Counter[str], costs: Measured) -> tuple[float, float]:
    """Microseconds of a step, and their standard error."""
    value = sum(number * costs[kind][0] for kind, number in counted.items())
    return value, math.sqrt(sum((number * costs[kind][1]) ** 2 for kind, number in counted.items()))


# ------------------------------------------------------------------------------------ how many


def count(names: list[str]) -> dict[str, list[Counter[str]]]:
    """What each rank meets in a step of each schedule."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    found: Any = context.Queue()
    ranks = [context.Process(target=train, args=(rank, port, names, found)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    try:
        got = dict(found.get(timeout=120) for _ in ranks)
    finally:
        for each in ranks:
            each.join(10)
            if each.is_alive():
                each.kill()
                each.join()
    return {name: [Counter(got[rank][name]) for rank in range(RANKS)] for name in names}


def train(rank: int, port: int, names: list[str], found: Any) -> None:
    """One rank: two steps of each schedule, the second counted."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    seen = {}
    for name in names:
        chunks = SCHEDULES[name]
        stages = chunks * RANKS
        own = [rank, stages - 1 - rank] if name == "ScheduleDualPipeV" else list(range(rank, stages, RANKS))
        cpu = torch.device("cpu")
        made = [PipelineStage(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), at, stages, cpu) for at in own]
        schedule = getattr(schedules, name)(made if chunks > 1 else made[0], MICRO, loss_fn=nn.functional.mse_loss)
        recorder = Recorder()
        windows = Windows(recorder)
        calls: Counter[str] = Counter()
        with counting(schedules, "_batch_p2p", calls, "start"), counting(dist.Work, "wait", calls, "work"):
            observer = PipelineObserver(schedule, recorder, windows)
            for _ in range(2):
                calls.clear()
                recorder.take()
                windows.begin((), NO_LIMIT, 0)
                batch = torch.randn(MICRO, DIM)
                last = stages - 1 in own
                schedule.step(*((batch,) if 0 in own else ()), **({"target": batch} if last else {}))
            observer.detach()
        kinds = Counter(event.kind for event in unpack_events(recorder.take()[0]))
        seen[name] = {
            "operation": sum(kinds[kind] for kind in OPERATIONS),
            "wait": sum(kinds[kind] for kind in WAITS),
            "start": calls["start"],
            "work": calls["work"],
            "loss": MICRO * chunks if stages - 1 in own else 0,
            "step": kinds[EventKind.SCHEDULE],
        }
    found.put((rank, seen))
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def counting(owner: Any, name: str, calls: Counter[str], what: str) -> Iterator[None]:
    """Count the calls of `owner.name`."""
    inner = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[what] += 1
        return inner(*args, **kwargs)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, inner)


# ------------------------------------------------------------------------------------ how much

HOW = {
    "operation": "a forward, backward ... of a stage: one record",
    "wait": "a wait for a list of works: a record, and a window opened and closed while a copy is armed",
    "start": "the start of sends or receives: says what they are",
    "work": "a Work.wait within such a wait: passes through",
    "loss": "a schedule's look for a loss, on the rank with the last stage",
    "step": "schedule.step(): a record, and the window of the step's tail",
}


class Bench:
    """A schedule of the shape of torch's, with the functions that it finds in its module. Does nothing, or pauses."""

    def __init__(self, name: str) -> None:
        self.pause = 0.0
        self.inside = 0
        """Nanoseconds of the pause within the last call."""
        works, started = [object()], [types.SimpleNamespace(op=dist.irecv)]
        self.module = types.ModuleType(name)
        self.module.__dict__["_batch_p2p"] = lambda operations, desc=None: self._work() or list(works)
        self.module.__dict__["_wait_batch_p2p"] = lambda work: self._work()
        sys.modules[name] = self.module
        methods = {"__module__": name, "step": lambda schedule: self.body(), "_has_backward": True,
                   "_maybe_compute_loss": lambda schedule, stage, out, target, micro, loss: self._work()}  # fmt: skip
        stages = {"stage_index": 0, "group_size": 2, "is_last": True,
                  "forward_one_chunk": lambda stage, micro, args, kwargs, save_forward_output=True: self._work(),
                  "backward_one_chunk": lambda stage, micro, loss=None, full_backward=True: self._work()}  # fmt: skip
        self.schedule: Any = type("Schedule", (), methods)()
        self.schedule._stage = stage = type("Stage", (), stages)()
        self.body: Callable[[], None] = self.wait_once
        self.works: Any = works
        self.started = started
        self.calls: dict[str, Callable[[], object]] = {
            "operation": lambda: stage.backward_one_chunk(0, loss=None, full_backward=True),
            "wait": lambda: self.module._wait_batch_p2p(self.works),
            "start": lambda: self.module._batch_p2p(started, desc="fwd_recv"),
            "loss": lambda: self.schedule._maybe_compute_loss(stage, None, None, 0, None),
        }

    def _work(self) -> None:
        if self.pause:
            began = time.perf_counter_ns()
            time.sleep(self.pause)
            self.inside = time.perf_counter_ns() - began

    def wait_once(self) -> None:
        """A schedule that never waits would be observed plainly."""
        self.works = self.module._batch_p2p(self.started)
        self.module._wait_batch_p2p(self.works)

    def sample(self, call: Callable[[], object] | None, calls: int) -> float:
        """Microseconds that a call spends outside of its pause. None: schedule.step() itself."""
        took: list[int] = []
        self.pause = PAUSE if calls == 1 else 0.0

        def all_of_them(which: Callable[[], object]) -> None:
            self.inside = 0
            time.sleep(self.pause)
            began = time.perf_counter_ns()
            for _ in range(calls):
                which()
            took.append(time.perf_counter_ns() - began - self.inside)

        if call is None:
            self.body = self._work
            all_of_them(self.schedule.step)
        else:
            self.body = lambda: all_of_them(call)
            self.schedule.step()
        return took[0] / calls / 1e3


class Costs:
    """An observed schedule and a bare one, a copy engine, and a group of one rank."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._reduced = dist.all_reduce(torch.ones(1), async_op=True)
        self._reduced.wait()
        bare_wait = dist.Work.wait
        self._source, self._slot = (np.ones(256 << 20, dtype=np.uint8) for _ in range(2))
        self._engine = load_engine(None)
        self._table = self._engine.prepare([Segment(self._source.ctypes.data, 0, self._source.nbytes)])
        self._recorder = Recorder()
        self._windows = Windows(self._recorder)
        self._bare, self._seen = Bench("bench_bare"), Bench("bench_seen")
        self._waits = Waits(self._windows, self._recorder, pipeline=True)
        self._observer = PipelineObserver(self._seen.schedule, self._recorder, self._windows, waits=self._waits)
        self._bare.calls["work"] = lambda: bare_wait(self._reduced)
        self._seen.calls["work"] = self._reduced.wait

    def __enter__(self) -> Costs:
        self._bare.schedule.step()
        self._seen.schedule.step()
        if self._observer.plain:
            raise RuntimeError("the schedule of this benchmark is not seen to wait")
        return self

    def __exit__(self, *exception: object) -> None:
        self._observer.detach()
        self._waits.close()
        self._engine.stop()
        dist.destroy_process_group()

    def measure(self, samples: int, calls: int) -> Measured:
        """What each kind costs more than a bare call: so many calls a sample."""
        series: dict[str, list[float]] = {kind: [] for kind in HOW}
        for _ in range(samples):
            for kind in HOW:
                bare = self._bare.sample(self._bare.calls.get(kind), calls)
                series[kind].append(self._observed(kind, calls) - bare)
        return {kind: median(values) for kind, values in series.items()}

    def _observed(self, kind: str, calls: int) -> float:
        """With a snapshot under way, of which each window may take 64 KiB."""
        self._engine.start(self._slot.ctypes.data, self._slot.nbytes, self._table)
        self._recorder.take()
        self._windows.begin((), 64 << 10, 0)
        self._windows.arm(self._engine, None)
        self._waits.boundary()
        self._waits.covered = kind == "work"
        try:
            return self._seen.sample(self._seen.calls.get(kind), calls)
        finally:
            self._waits.covered = False
            self._waits.fence()
            self._windows.end()
            self._engine.cancel()


if __name__ == "__main__":
    main()
