"""A forward pass before attach(), or before resume(): FSDP2 leaves whole parameters of its root in the module then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import baft_torch
from baft_torch._models import ModelTree
from tests.support.daemon import Daemon
from tests.support.torch_layouts import as_rank


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, in which nothing has to be moved."""
    with as_rank(0, 1):
        yield


def sharded(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def evaluate(model: Any) -> float:
    with torch.no_grad():
        return float(model(torch.ones(1, 4)))


def update(model: Any, optimizer: Any) -> float:
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def attach(daemon: Daemon, model: Any, optimizer: Any) -> baft_torch.Checkpointer:
    return baft_torch.attach(model, optimizer, job="unsharded", settings=daemon.dirs.settings(), audit=1)


@pytest.mark.parametrize("when", ["before attach", "before resume", "before both"])
def test_an_evaluation_before_training_changes_nothing(daemon: Daemon, alone: None, when: str) -> None:
    model, optimizer = sharded(0)
    if when != "before resume":
        evaluate(model)
        assert not hasattr(model[0].weight, "to_local"), "the whole parameter is what this is about"
    ckpt = attach(daemon, model, optimizer)
    if when != "before attach":
        evaluate(model)
    assert ckpt.resume() == 0
    for _ in range(2):
        update(model, optimizer)
        ckpt.step()
        evaluate(model)  # and between two updates
        ckpt.fence()
        assert ckpt._session.settle(10.0)
    assert (ckpt.counters.sealed, ckpt.counters.torn) == (2, 0)
    ckpt.close()
    expected = [evaluate(model), update(model, optimizer), update(model, optimizer)]
    again, other = sharded(9)
    if when != "before resume":
        evaluate(again)
    ckpt = attach(daemon, again, other)
    if when != "before attach":
        evaluate(again)
    assert ckpt.resume(reshard=True) == 2
    assert ckpt.not_carried == ()
    assert [evaluate(again), update(again, other), update(again, other)] == expected
    ckpt.close()


def test_names_are_those_of_shards(alone: None) -> None:
    model, _ = sharded(0)
    evaluate(model)
    assert all(hasattr(named.tensor, "to_local") for named in ModelTree(model).parameters())
