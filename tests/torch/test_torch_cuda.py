"""Training on a GPU: device tensors are copied beside the next step, and come back bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import baft_torch
from baftd.pipeline.events import EventKind
from tests.support.daemon import Daemon

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device at hand")


class Loop:
    """A training on the device with dropout and batch norm."""

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.Dropout(0.2), nn.Linear(1024, 1)
        ).cuda()
        self.model[3].weight.data = self.model[3].weight.data.t().contiguous().t()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)

    def update(self) -> float:
        x = torch.randn(64, 256, device="cuda")
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": True, "foreach": True}])
def test_losses_after_a_restart_are_those_of_the_uninterrupted_run(options: dict[str, bool], daemon: Daemon) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings = daemon.dirs.settings(**daemon.more)
    loop = Loop(0, **options)
    ckpt = baft_torch.attach(loop.model, loop.optimizer, job="cuda", settings=settings)
    assert ckpt.resume() == 0
    for _ in range(4):
        loop.update()
        ckpt.step()
        ckpt._fence_quietly()
        assert ckpt._session.settle(20.0)
    assert (ckpt.counters.sealed, ckpt.counters.torn) == (4, 0)
    ckpt.close()
    expected = [loop.update() for _ in range(4)]
    again = Loop(9, **options)
    ckpt = baft_torch.attach(again.model, again.optimizer, job="cuda", settings=settings)
    assert ckpt.resume() == 4
    found = [again.update() for _ in range(4)]
    ckpt.close()
    assert found == expected


def test_windows_carry_the_copy_and_their_gaps_share_it(daemon: Daemon) -> None:
    loop = Loop(0, foreach=True)
    ckpt = baft_torch.attach(loop.model, loop.optimizer, job="cuda", settings=daemon.dirs.settings(**daemon.more))
    windows, device = ckpt._session.windows, ckpt._session.device
    assert device is not None
    windows.register("test")
    ckpt.resume()
    for step in range(6):
        for _ in range(3):
            loss = loop.model(torch.randn(64, 256, device="cuda")).pow(2).mean()
            loss.backward()
            with windows.waiting(EventKind.WAIT_COLLECTIVE):
                torch.cuda._sleep(2_000_000)  # what a wait for others is to the compute stream
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if step:
            inside, outside, late = device.copied()
            assert inside > late
            assert outside == 0
        ckpt.step()
        assert ckpt._session.settle(20.0)
    assert ckpt.counters.torn == 0
    ckpt.close()


def test_a_write_on_the_device_past_the_hooks_drops_the_snapshot(daemon: Daemon) -> None:
    loop = Loop(0, foreach=True)
    ckpt = baft_torch.attach(loop.model, loop.optimizer, job="cuda", settings=daemon.dirs.settings(**daemon.more))
    ckpt.resume()
    loop.update()
    ckpt.step()
    loop.model[0].weight.data.mul_(0.5)
    ckpt.step()
    assert ckpt.counters.torn == 1
    ckpt.close()
