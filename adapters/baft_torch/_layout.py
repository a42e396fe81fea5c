"""Where the tensors of a live job belong: which part of a whole each one is, and which name it has job-wide.

Said by, in this order: `attach(layout=)`, written by hand; the placements of a DTensor; `attach(parallel=)` together
with the attributes that Megatron puts on parameters (`tensor_model_parallel`, `partition_dim`, `partition_stride`,
`allreduce`); DistributedDataParallel. What nobody speaks of belongs to its rank alone: two ranks never hold replicas
because names agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from baft_torch._placements import Box, Part

if TYPE_CHECKING:
    from baftd.checkpoint.mesh import ParallelDescription

__all__ = ["Declared", "Held", "JobLayout", "LayoutSource", "base_name", "whole"]

Declared: TypeAlias = "str | tuple[Sequence[int], Sequence[Any]] | None"
"""What a user may say of one tensor: "replicated" (every rank that has the name holds the same elements), "own"
(this rank's alone), (global shape, ranges) with one (start, stop) a dimension, or a list of such ranges where the
local tensor is several of them one behind the other along dimension 0; None: nothing."""

LayoutSource: TypeAlias = "Mapping[str, Declared] | Callable[[str, torch.Tensor], Declared]"
"""`attach(layout=)`: patterns of names (fnmatch, first match counts) with what they are, or a function."""

_PREFIX = re.compile(r"(model\.|optim\.\d+\.)?stage(\d+)\.")


def base_name(name: str, stages: Collection[int]) -> str:
    """`name` without the pipeline stage that the adapter put before it: "model.stage1.3.weight" -> "model.3.weight",
    "optim.0.stage1.3.weight.step" -> "optim.0.3.weight.step", "stage1.3.weight" -> "3.weight".

    `stages`: those of the rank that has the name, since a model's own module may be called "stage1", too. A rank's
    small state holds them under "stages" (no such key: none).
    """
    match = _PREFIX.match(name)
    if match is None or int(match[2]) not in stages:
        return name
    return (match[1] or "") + name[match.end() :]


@dataclass(frozen=True)
class Held:
    """What a rank holds of one tensor. Always known, since a rank must know what to ask for when it starts from
    another layout; `declared` says whether it is also told to the daemon."""

    shape: tuple[int, ...]
    """Of the whole."""
    parts: tuple[Part, ...]
    """In the order of the local tensor. One empty part where the rank holds nothing."""
    declared: bool
    """The parts go into the entries: whoever holds the same range of the same name holds the same elements. Not:
    the tensor is this rank's own, and `shape` and `parts` are only what it would need."""
    problem: str = ""
    """Why the elements cannot be taken to (or from) another layout, as the end of a sentence; "" where they can."""

    @property
    def box(self) -> Box | None:
        """The one rectangle, where it is one."""
        return self.parts[0].box if len(self.parts) == 1 else None


def whole(shape: Sequence[int], *, declared: bool) -> Held:
    """All of a tensor."""
    box = tuple((0, int(size)) for size in shape)
    return Held(tuple(int(size) for size in shape), (Part(box, box),), declared)


@dataclass(frozen=True)
class JobLayout:
    """What a job's ranks have said of themselves: `attach(parallel=, names=, layout=)`."""

    rank: int = 0
    world: int = 1
    parallel: ParallelDescription | None = None
    names: Callable[[str], str] | None = None
    source: LayoutSource | None = None
    coordinates: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
