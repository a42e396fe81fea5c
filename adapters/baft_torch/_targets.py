"""Tensors to be filled from saved ranges: live ones in place, fresh ones for optimizer state that is not there yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
from torch.autograd.graph import increment_version

from baft_torch._placements import Part
from baft_torch._tensors import plain, reduced
from baftd.checkpoint.ranges import volume
from baftd.checkpoint.reshard import Fill, Wanted

__all__ = ["Reader", "Target"]


class Reader(Protocol):
    """What is needed of `baft_client.saved.SavedShards`."""

    def read(self, fill: Fill, address: int) -> None:
        """Copy what `fill` names into the row-major buffer of its box at `address`."""


@dataclass(eq=False)
class Target:
    """One tensor to fill. `make` gives it, live or fresh, when its time has come; `parts` lie in its local tensor."""

    name: str
    asked: str
    """Name under which the bytes were saved."""
    make: Callable[[], torch.Tensor]
    wanted: list[Wanted] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    """One for each of `wanted`."""
    fills: list[Fill] = field(default_factory=list)
    """The same, once planned."""

    @classmethod
    def of(
        cls,
        name: str,
        make: Callable[[], torch.Tensor],
        parts: Iterable[Part],
        *,
        asked: str,
        dtype: str,
        shape: tuple[int, ...],
        itemsize: int,
        from_rank: int | None = None,
    ) -> Target:
        """`shape`: of the whole. `from_rank`: see `Wanted`."""
        target = cls(name, asked, make)
        for part in parts:
            if volume(part.box):
                target.wanted.append(Wanted(asked, dtype, shape, part.box, itemsize, from_rank))
                target.parts.append(part)
        return target

    def fill(self, reader: Reader) -> torch.Tensor:
        """Copy the saved bytes; returns the tensor."""
        tensor = self.make()
        local = reduced(plain(tensor, self.name), self.name)
        for fill, part in zip(self.fills, self.parts, strict=True):
            _fill(reader, fill, local[part.where] if part.where else local)
        if self.fills and not tensor.is_inference():
            increment_version(tensor)
            increment_version(local)  # of a DTensor the local tensor counts for itself
        return tensor


def _fill(reader: Reader, fill: Fill, view: torch.Tensor) -> None:
    if view.device.type == "cpu" and view.is_contiguous() and not view.is_conj() and not view.is_neg():
        reader.read(fill, view.data_ptr())
        return
    fresh = torch.empty(tuple(view.shape), dtype=view.dtype)
    assert fresh.numel() == prod(stop - start for start, stop in fill.wanted.box), fill.wanted.name
    reader.read(fill, fresh.data_ptr())
    with torch.no_grad():
        view.copy_(fresh)
