"""What is read off real ranks against torch's own collectives; tensors of several ranges through a real daemon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import baft_torch
from baft_torch import ParallelDescription
from baftd.errors import UsageError
from tests.support.daemon import Daemon
from tests.support.torch_fake import fake_ranks, holder
from tests.support.torch_launch import Launcher


def test_ranges_of_real_ranks_are_what_torch_gathers_and_redistributes(tmp_path: Path) -> None:
    with Launcher() as launcher:
        ended = launcher.run("all", 8, 0, tmp_path, env={}, program="torch_mesh_job").check()
    assert len(re.findall("compared 40 wholes and 16 redistributions", "\n".join(ended.outputs))) == 8


def test_attach_reads_the_degrees_from_settings_and_tells_where_the_rank_stands(daemon: Daemon) -> None:
    model = holder(w=torch.nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    many = daemon.dirs.settings(**daemon.more, parallel="tp=2,pp=2")
    with pytest.raises(UsageError, match=r"= 4 does not divide 1 rank\. It is the setting `parallel`"):
        baft_torch.attach(model, optimizer, job="degrees", settings=many)
    with pytest.raises(UsageError, match=r"= 2, but there is 1 rank\.$"):
        baft_torch.attach(model, optimizer, job="degrees", settings=many, parallel="dp=2")
    with pytest.raises(UsageError, match="describes 2 ranks, and the job has 1"):
        baft_torch.attach(model, optimizer, job="degrees", settings=many, parallel=ParallelDescription(dp=2))
    with pytest.raises(UsageError, match="parallel"):
        baft_torch.attach(model, optimizer, job="degrees", settings=many, parallel=2)  # type: ignore[arg-type]
    one = daemon.dirs.settings(**daemon.more, parallel="tp=1,dp=1")
    with baft_torch.attach(model, optimizer, job="degrees", settings=one, layout={"model.w": "own"}) as ckpt:
        assert ckpt._session.coordinates == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
        assert ckpt._session.stages == ()
        assert ckpt._state.items[0].entry.ranges is None


def test_attach_says_once_what_stays_with_its_rank(caplog: pytest.LogCaptureFixture, daemon: Daemon) -> None:
    settings = daemon.dirs.settings(**daemon.more)
    with fake_ranks() as be:
        be(1, 2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        sums = [DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False) for _ in range(3)]
        model = holder(a=sums[0], b=sums[1], c=sums[2])
        with caplog.at_level("WARNING"):
            ckpt = baft_torch.attach(model, [], job="sums", settings=settings)
        ckpt.close()
    said = [record.getMessage() for record in caplog.records if "own_tensors" in record.getMessage()]
    assert len(said) == 1
    assert "name=model.a tensors=3" in said[0]
    assert "partial sum" in said[0]


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
