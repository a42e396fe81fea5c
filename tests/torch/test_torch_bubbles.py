"""From torch's schedule to the daemon: bytes are copied while stages wait for each other, and a run that was killed has
the losses of the run that was not. Real processes, a real daemon, stages that sleep."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules

import baft_torch
from baftd.pipeline.events import OPERATIONS, Event, EventKind, unpack_events
from baftd.pipeline.schedules import build
from baftd.wire.messages import RankStep, TraceReply, TraceRequest
from tests.support.daemon import Daemon
from tests.support.torch_launch import Launcher, losses

STEPS, MICRO = 12, 4
SECONDS, NBYTES = 0.008, 4 << 20
"""Of a forward of each stage (a backward takes twice as long), and of its weight (a third of its state)."""
PIPELINE = {EventKind.WAIT_RECV, EventKind.WAIT_MIXED, EventKind.WAIT_SEND}
COPIES = {EventKind.COPY_INSIDE, EventKind.COPY_OUTSIDE, EventKind.COPY_FENCE}
LATE = 50_000_000
"""ns by which the copying thread may be late on a busy machine: it stops after the block of 256 KiB it is at."""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Torch, imported once for all starts."""
    with Launcher() as made:
        yield made


def traced(daemon: Daemon, job: str = "job") -> dict[int, list[RankStep]]:
    """What the daemon keeps of each rank."""
    reply = daemon.request(TraceRequest(job=job))
    assert isinstance(reply, TraceReply)
    found: dict[int, list[RankStep]] = {}
    for step in reply.steps:
        found.setdefault(step.rank, []).append(step)
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_copied_while_stages_wait(world: int, daemon: Daemon, launcher: Launcher, tmp_path: Path) -> None:
    env, slow = daemon.environ(), f"{SECONDS}:{NBYTES}"
    launcher.run("pipeline", world, STEPS, tmp_path, env=env, start="ref", no_baft="", slow=slow).check()
    kill = f"9:backward:{world - 1}"
    died = launcher.run("pipeline", world, STEPS, tmp_path, env=env, start="1", slow=slow, kill=kill)
    assert died.codes[world - 1] == -9
    found = traced(daemon)
    assert sorted(found) == list(range(world))
    waiting = all_bytes = 0
    for rank, steps in found.items():
        copied = [step for step in steps if step.copied]
        assert len(copied) >= 6
        inside = [check_step(rank, world, list(unpack_events(step.events))) for step in copied]
        assert sum(within for within, _ in inside) > 0, f"rank {rank} copied nothing while it waited"
        assert len({whole for _, whole in inside}) == 1, "of each snapshot all bytes are accounted for"
        waiting += sum(within for within, _ in inside)
        all_bytes += sum(whole for _, whole in inside)
    assert waiting > all_bytes / 2, f"{waiting / all_bytes:.0%} of the bytes were copied while stages waited"
    again = launcher.run("pipeline", world, STEPS, tmp_path, env=env, start="2", slow=slow).check()
    assert all(" torn 0 " in text for text in again.outputs), again.outputs
    (first,) = set(again.first_steps)
    assert first in (8, 9)
    for rank in range(world):
        expected = {k: v for k, v in losses(tmp_path, "ref", rank).items() if k >= first}
        assert len(expected) == STEPS - first
        assert losses(tmp_path, "2", rank) == expected, f"rank {rank}"


def check_step(rank: int, world: int, events: list[Event]) -> tuple[int, int]:
    """One period: operations in their order, each copying of the engine in the window that it names. Returns the bytes
    that were copied while this rank waited for others, and all."""
    computed = [event for event in events if event.kind in OPERATIONS]
    seen = [(event.kind, event.micro) for event in computed]
    assert seen == [(op.kind, op.micro) for op in build("1F1B", world, MICRO).order[rank]]
    assert all(a.end <= b.begin for a, b in pairwise(computed))
    windows = {event.micro: event for event in events if event.kind is EventKind.WINDOW}
    assert sorted(windows) == list(range(len(windows)))
    for window in windows.values():
        assert all(window.end <= each.begin or each.end <= window.begin for each in computed)
    spans = [event for event in events if event.kind in COPIES]
    waited = 0
    for span in spans:
        if span.kind is EventKind.COPY_INSIDE:
            window = windows[span.micro]
            assert window.begin <= span.begin
            assert span.end <= window.end + LATE
            waited += span.amount if window.stage in PIPELINE else 0
    return waited, sum(span.amount for span in spans)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Whole:
    """A pipeline of one stage, and the training of it."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4)
        stage = PipelineStage(self.model, 0, 1, torch.device("cpu"))
        self.schedule = ScheduleGPipe(stage, MICRO, loss_fn=torch.nn.functional.mse_loss)
        self.stage = stage
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def attach(self, daemon: Daemon, job: str) -> baft_torch.Checkpointer:
        told = daemon.dirs.settings(**daemon.more)
        return baft_torch.attach(self.model, self.optimizer, job=job, schedule=self.schedule, settings=told, audit=1)

    def step(self) -> None:
        x = torch.ones(MICRO, 4)
        self.schedule.step(x, target=x)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, ckpt: baft_torch.Checkpointer, begin: int) -> None:
        """Three steps from `begin` on."""
        assert ckpt.resume() == begin
        assert self.observed
        for _ in range(3):
            self.step()
            ckpt._session.settle(30.0)
            ckpt.step()
        assert ckpt.counters.torn == 0

    def interrupted(self, daemon: Daemon, begin: int) -> None:
        """Train, and be interrupted when the last step is committed."""
        with self.attach(daemon, "first") as ckpt:
            self.train(ckpt, begin)
            ckpt.save(durable=False)
            raise KeyboardInterrupt

    @property
    def observed(self) -> bool:
        """Something of it is wrapped."""
        values = [*vars(self.schedule).values(), *vars(self.stage).values()]
        return any(hasattr(value, "__wrapped__") for value in values)


def test_checkpointers_come_and_go_one_after_another_and_two_at_once(daemon: Daemon, group: None) -> None:
    first, second = Whole(), Whole()
    for begin in (0, 3):
        with pytest.raises(KeyboardInterrupt):
            first.interrupted(daemon, begin)
        assert not first.observed
    with first.attach(daemon, "one") as one:
        with second.attach(daemon, "two") as two:
            second.train(two, 0)
            first.train(one, 0)
        assert not second.observed
        assert first.observed
        first.step()
        one.step()
    assert not first.observed
    assert not hasattr(schedules._wait_batch_p2p, "__wrapped__")
    first.step()
