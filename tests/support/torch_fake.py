"""One process that pretends to be every rank of a job in turn: process groups whose collectives do nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from baft_torch._layout import JobLayout
from baft_torch._models import ModelTree
from baft_torch._state import TrainingState
from baftd.checkpoint.mesh import ParallelDescription
from baftd.checkpoint.shard import TensorEntry


def become(rank: int, world: int) -> None:
    """Be that rank from now on. Make meshes anew: they remember their rank."""
    leave()
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    debug._clear_sharding_prop_cache()  # it holds meshes of the rank before, which are equal to this one's


def leave() -> None:
    """Be no rank."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def fake_ranks() -> Iterator[Callable[[int, int], None]]:
    """`become`, undone at the end."""
    try:
        yield become
    finally:
        leave()


def holder(**tensors: torch.Tensor) -> nn.Module:
    """A module with these tensors: parameters as they are, all others as buffers."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


def state_of(
    models: Any,
    optimizers: Sequence[Any] = (),
    *,
    rank: int = 0,
    world: int = 1,
    schedule: Any = None,
    parallel: str = "",
    names: Callable[[str], str] | None = None,
    layout: Any = None,
) -> TrainingState:
    """A training state as attach() makes it, all buffers stable."""
    degrees = ParallelDescription.parse(parallel, world) if parallel else None
    told = JobLayout(rank, world, degrees, names, layout)
    tree = ModelTree(models, schedule, world=world, layout=told)
    return TrainingState(tree, list(optimizers), ["*"] if list(tree.buffers()) else [])


def entries_of(state: TrainingState) -> list[TensorEntry]:
    """What is declared now."""
    return [source.entry for source in state.refresh()]


def saved_of(state: TrainingState) -> list[tuple[TensorEntry, bytes]]:
    """What is declared now, and its bytes."""
    return [
        (each.entry, ctypes.string_at(each.address, each.entry.nbytes) if each.entry.nbytes else b"")
        for each in state.refresh()
    ]


def fill(whole: np.ndarray[Any, Any], entry: TensorEntry, data: bytes) -> None:
    """Put a saved range into the whole; where one is there already it must hold the same elements. NaN: nothing yet."""
    assert entry.ranges is not None
    part = np.frombuffer(data, whole.dtype)
    if entry.strides is not None:
        part = np.lib.stride_tricks.as_strided(part, entry.shape, [each * 4 for each in entry.strides])
    if len(entry.ranges) == len(whole.shape):
        target, part = whole[(*(slice(*each) for each in entry.ranges), ...)], part.reshape(entry.shape)
    else:
        target = whole.reshape(-1)[slice(*entry.ranges[0])]
    assert target.shape == part.shape
    assert bool((np.isnan(target) | (target == part)).all()), f"{entry.name} {entry.ranges}: replicas differ"
    target[...] = part


def numbered(*shape: int) -> torch.Tensor:
    """A tensor in which every element is another number."""
    return torch.arange(float(prod(shape))).reshape(shape)
