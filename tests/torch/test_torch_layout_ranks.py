"""What is read off real ranks against torch's own collectives; tensors of several ranges through a real daemon."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import baft_torch
from tests.support.daemon import Daemon
from tests.support.torch_fake import holder
from tests.support.torch_launch import Launcher


def test_ranges_of_real_ranks_are_what_torch_gathers_and_redistributes(tmp_path: Path) -> None:
    with Launcher() as launcher:
        ended = launcher.run("all", 8, 0, tmp_path, env={}, program="torch_mesh_job").check()
    assert len(re.findall("compared 40 wholes and 16 redistributions", "\n".join(ended.outputs))) == 8


def test_a_tensor_of_several_ranges_goes_through_a_daemon_and_comes_back(daemon: Daemon) -> None:
    settings = daemon.dirs.settings(**daemon.more)
    said = {"model.w": ((4, 3), [[(2, 4), (0, 3)], [(0, 2), (0, 3)]]), "model.b": ((2, 3), [(0, 6)])}

    def start(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer, baft_torch.Checkpointer]:
        model = holder(w=torch.nn.Parameter(torch.full((4, 3), value)), b=torch.nn.Parameter(torch.full((6,), value)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, baft_torch.attach(model, optimizer, job="cut", layout=said, settings=settings, audit=1)

    def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for k, param in enumerate(model.parameters()):
            param.grad = torch.arange(float(param.numel())).reshape(param.shape) + k
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, ckpt = start(1.0)
    try:
        assert ckpt.resume() == 0
        for _ in range(3):
            update(model, optimizer)
            ckpt.step()
            assert ckpt._session.settle(10.0)
        ckpt.save(durable=True)
        assert ckpt.counters.torn == 0
    finally:
        ckpt.close()
    again, optimizer_again, ckpt = start(5.0)
    try:
        assert ckpt.resume() == 3
        update(model, optimizer)
        update(again, optimizer_again)
        assert torch.equal(again.w, model.w)
        assert torch.equal(again.b, model.b)
    finally:
        ckpt.close()
