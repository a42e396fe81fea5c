"""Copies of device tensors beside computing, on a device that runs its streams in any order that their events allow."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from baft_client.source import Source
from baft_client.windows import NO_LIMIT, Windows
from baft_torch import _cuda
from baft_torch._cuda import CudaCopier
from baftd.checkpoint.shard import TensorEntry
from baftd.pipeline.events import EventKind
from tests.support.streams import Device

SIZES = (4, 4096, 40_000, 4, 12_288)
"""Bytes of the stable tensors: smaller and larger than a piece of a window."""
PIECE = 4096
TOTAL = sum(SIZES)
SEEDS = range(12)


@dataclass
class Run:
    """A model on the device, slots for it, and what copies it."""

    device: Device
    params: list[torch.Tensor] = field(default_factory=list)
    buffer: torch.Tensor = field(default_factory=lambda: torch.zeros(8))

    def __post_init__(self) -> None:
        self.params = [torch.rand(size // 4) for size in SIZES]
        everything = [*self.params, self.buffer]
        self.slots = [(ctypes.c_uint8 * (4 * each.numel()))() for each in everything]
        self.jobs = [
            (
                Source(
                    TensorEntry(f"t{i}", "F32", tuple(each.shape), 4 * each.numel(), "stable" if i < 5 else "volatile"),
                    0, each, 4, device=True,
                ),
                ctypes.addressof(slot),
            )
            for i, (each, slot) in enumerate(zip(everything, self.slots, strict=True))
        ]  # fmt: skip
        self.copier = CudaCopier(lambda source: everything[int(source.entry.name[1:])])
        self.copier.slots([(ctypes.addressof(slot), len(slot)) for slot in self.slots])

    def boundary(self, *, gated: bool) -> list[bytes]:
        """Begin a copy; what it must find."""
        self.device.drain()
        expected = [each.numpy().tobytes() for each in (*self.params, self.buffer)]
        self.copier.start(self.jobs, gated=gated)
        return expected

    def forward(self) -> None:
        """Computing that reads parameters and changes a buffer."""
        self.device.launch(lambda: self.buffer.add_(self.params[0].sum()))

    def window(self, ordinal: int, budget: int) -> None:
        """A gap after what was launched last."""
        self.device.watched = True
        self.copier.anchor(ordinal, budget)
        self.device.watched = False
        self.device.launch(lambda: None)  # what the other ranks were waited for with
        self.copier.passed(ordinal)

    def update(self) -> None:
        """What comes after the fence."""
        for each in self.params:
            self.device.launch(lambda each=each: each.mul_(0.5))  # type: ignore[misc]

    def found(self) -> list[bytes]:
        """What the slots hold."""
        return [bytes(slot) for slot in self.slots]


@pytest.fixture(params=SEEDS)
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """On a device of its own, with each of several orders."""
    device = Device(request.param)
    monkeypatch.setattr(_cuda, "_CUDA", device)
    monkeypatch.setattr(_cuda, "PIECE", PIECE)
    monkeypatch.setattr(_cuda, "POLL", 0.0)
    torch.manual_seed(request.param)
    with device.installed():
        yield Run(device)


@pytest.mark.parametrize("gated", [False, True])
def test_the_slots_hold_the_state_of_the_boundary(run: Run, gated: bool) -> None:
    for _ in range(3):
        expected = run.boundary(gated=gated)
        for ordinal in range(3):
            run.forward()
            run.window(ordinal, 8192)
        run.copier.rest()
        run.update()
        assert run.copier.flush(10.0)
        assert run.found() == expected
        assert run.copier.check() is None
        run.device.drain()
        assert run.found() == expected


def test_windows_take_their_budget_after_the_operation_and_the_fence_the_rest(run: Run) -> None:
    run.boundary(gated=True)
    for ordinal, budget in enumerate((8192, 0, 100, NO_LIMIT - 1 if run.device.random.random() < 0.5 else 16384)):
        before = run.copier.copied()[0]
        run.forward()
        run.window(ordinal, budget)
        assert 0 <= run.copier.copied()[0] - before <= budget
    run.copier.rest()
    inside, outside, late = run.copier.copied()
    assert (inside + late, outside) == (TOTAL, 0)
    assert inside >= 8192 - PIECE + 16384 - PIECE
    run.device.drain()
    assert run.device.early == []


def test_without_windows_everything_is_outside_of_them(run: Run) -> None:
    run.boundary(gated=False)
    run.window(0, NO_LIMIT)
    run.copier.rest()
    assert run.copier.copied() == (0, TOTAL, 0)
    run.device.drain()


def test_the_host_waits_for_nothing_before_flush(run: Run) -> None:
    run.boundary(gated=True)
    done = run.device.done
    run.forward()
    run.window(0, NO_LIMIT)
    run.copier.rest()
    run.update()
    assert run.device.done == done
    while not run.copier.arrived():
        pass
    assert run.copier.check() is None


def test_a_write_before_the_fence_is_named(run: Run) -> None:
    run.boundary(gated=True)
    run.device.launch(lambda: run.params[4].mul_(0.5))
    run.window(0, NO_LIMIT)
    assert run.copier.flush(10.0)
    assert run.copier.check() == "t4"


def test_nothing_is_put_into_a_graph_that_is_captured(run: Run) -> None:
    expected = run.boundary(gated=True)
    run.device.capturing = True
    waiting = sum(len(stream.queue) for stream in run.device.streams)
    run.copier.anchor(0, NO_LIMIT)
    run.copier.passed(0)
    assert sum(len(stream.queue) for stream in run.device.streams) == waiting
    run.device.capturing = False
    assert run.copier.flush(10.0)
    assert run.copier.copied() == (0, 0, TOTAL)
    assert run.found() == expected


def test_a_device_that_refuses_does_not_raise_into_training(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run.boundary(gated=True)

    def refuse(enable_timing: bool = False) -> None:
        raise RuntimeError("operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(run.device, "Event", refuse)
        run.copier.anchor(0, NO_LIMIT)
        run.copier.passed(0)
    run.copier.anchor(1, NO_LIMIT)
    assert run.copier.flush(10.0)
    assert run.copier.copied() == (0, 0, TOTAL)
    assert run.found() == expected


def test_once_gaps_are_known_each_takes_its_share(run: Run) -> None:
    for _ in range(3):
        expected = run.boundary(gated=True)
        shares = []
        for ordinal, operations in enumerate((30, 10, 0, 20)):
            run.forward()
            before = run.copier.copied()[0]
            run.copier.anchor(ordinal, NO_LIMIT)
            shares.append(run.copier.copied()[0] - before)
            for _ in range(operations):
                run.device.launch(lambda: None)
            run.copier.passed(ordinal)
            run.device.drain()
        assert run.copier.flush(10.0)
        assert run.found() == expected
        run.device.drain()
    assert sum(shares) == TOTAL, "nothing is left for the fence"
    assert shares[0] == max(shares) > TOTAL / 3
    assert shares[0] > shares[2] + PIECE, "by their length"
    assert min(shares[0], shares[3]) > 0


def test_a_step_with_fewer_gaps_is_learned(run: Run) -> None:
    for gaps in (5, 5, 2, 2, 2):
        run.boundary(gated=True)
        for ordinal in range(gaps):
            run.forward()
            run.window(ordinal, NO_LIMIT)
            run.device.drain()
        assert run.copier.flush(10.0)
        run.device.drain()
    assert run.copier.copied() == (TOTAL, 0, 0)


def test_a_cancelled_copy_touches_no_slot_afterwards(run: Run) -> None:
    run.boundary(gated=True)
    run.forward()
    run.window(0, 8192)
    run.copier.cancel()
    before = run.found()
    run.update()
    run.device.drain()
    assert run.found() == before
    assert run.copier.check() is None


def test_windows_of_a_session_anchor_their_budgets(run: Run) -> None:
    from baft_client.recorder import Recorder

    class Shut:
        """No engine copies from the host."""

        def open_window(self, budget: int = 0, ordinal: int = -1) -> None:
            """Nothing."""

        def close_window(self, outside: int = 0) -> None:
            """Nothing."""

    recorder = Recorder()
    windows = Windows(recorder)
    expected = run.boundary(gated=True)
    windows.begin((8192, 0), 16384, 0)
    windows.arm(Shut(), run.copier)
    for _ in range(3):
        run.forward()
        with windows.waiting(EventKind.WAIT_COLLECTIVE):
            pass
    assert run.copier.copied()[0] in range(8192 + 16384 - 2 * PIECE, 8192 + 16384 + 1)
    assert run.copier.flush(10.0)
    assert run.found() == expected


def test_a_missing_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of these tests is no use if it forgives: each wait that is left out shows as wrong bytes or order."""

    def torn(seed: int, break_it: Callable[[Device], None]) -> bool:
        device = Device(seed)
        monkeypatch.setattr(_cuda, "_CUDA", device)
        monkeypatch.setattr(_cuda, "PIECE", PIECE)
        with device.installed():
            run = Run(device)
            expected = run.boundary(gated=True)
            run.forward()
            break_it(device)
            run.window(0, 8192)
            run.copier.rest()
            run.update()
            device.drain()
            return run.found() != expected or bool(device.early)

    def copies_do_not_wait(device: Device) -> None:
        monkeypatch.setattr(device.streams[1], "wait_event", lambda event: None)

    def updates_do_not_wait(device: Device) -> None:
        monkeypatch.setattr(device.streams[0], "wait_event", lambda event: None)

    seeds = range(40)
    assert not any(torn(seed, lambda device: None) for seed in seeds)
    assert sum(torn(seed, copies_do_not_wait) for seed in seeds) >= 5
    assert sum(torn(seed, updates_do_not_wait) for seed in seeds) >= 5
