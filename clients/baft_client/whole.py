"""What a rank held when a step was saved of which each replicated byte was saved by one rank only.

It is loaded like the image of one rank (`restore.RestoredImage`). The small state, and what nobody else held, come from
the rank's own image; everything else is read out of the images of those that saved it.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baft_client.restore import RestoredImage
from baftd.checkpoint.reshard import SavedSet, Wanted, plan_reads
from baftd.checkpoint.shard import TensorEntry, check_entries
from baftd.errors import ModelMismatch

if TYPE_CHECKING:
    from baft_client.saved import SavedShards

__all__ = ["WholeImage"]


class WholeImage:
    """The state to load. Tensors are asked for under the names that they would be stored under if nothing was divided.
    Closed with the shards that it reads from."""

    def __init__(self, shards: SavedShards, own: RestoredImage, rank: int) -> None:
        """`own`: the image of `rank`, one of `shards`."""
        self._shards = shards
        self._own = own
        self._rank = rank
        self._stored = {entry: name for name, entry in own.entries.items()}
        self.entries: dict[str, TensorEntry] = dict(zip(check_entries(own.held), own.held, strict=True))
        """Stored name -> entry, of all that the rank held."""

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self.entries)

    @property
    def step(self) -> int:
        """Boundary at which the state was taken."""
        return self._own.step

    @property
    def updates(self) -> int:
        """Optimizer updates by then."""
        return self._own.updates

    @property
    def world(self) -> int:
        """Number of ranks that saved."""
        return self._own.world

    @property
    def small(self) -> object:
        """The small state, decoded anew at each call. FormatError: it is no typed tree."""
        return self._own.small

    @property
    def small_bytes(self) -> bytes:
        """The small state as it was saved."""
        return self._own.small_bytes

    @cached_property
    def _saved(self) -> SavedSet:
        # By the names that tensors were declared under: those that one rank only gave them mean nothing to another.
        return SavedSet.of(
            {
                rank: [(name, replace(entry, aliases=())) for name, entry in self._shards.entries(rank).items()]
                for rank in range(self._shards.world)
            },
            self._shards.same_bytes,
        )

    def copy_into(self, name: str, address: int, nbytes: int) -> None:
        """Copy a tensor to memory of the caller's and verify it on the way.

        Args:
            name: as stored.
            address: of at least `nbytes` writable bytes, C-contiguous (or with the strides of the entry).
            nbytes: must be the tensor's.

        Raises:
            ModelMismatch: there is no such tensor, or it has another size.
            LayoutError: the shards do not hold all of it; the missing range is named.
            VerificationFailed: bytes are not what their digest says; the destination may hold them nevertheless.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise ModelMismatch(f"step {self.step} of rank {self._rank} holds no tensor {name!r}.")
        if entry.nbytes != nbytes:
            raise ModelMismatch(f"tensor {name!r} has {nbytes} bytes here and {entry.nbytes} in step {self.step}.")
        stored = self._stored.get(entry)
        if stored is not None:
            self._own.copy_into(stored, address, nbytes)
        elif nbytes:
            itemsize = nbytes // prod(entry.shape)
            wanted = Wanted.of(entry.name, entry.dtype, entry.global_shape or entry.shape, entry.ranges, itemsize)
            (fill,) = plan_reads(self._saved, wanted, rank=self._rank)
            memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            strides = None if entry.strides is None else [stride * itemsize for stride in entry.strides]
            item = np.dtype((np.void, itemsize))
            self._shards.read_array(fill, np.ndarray(entry.shape, item, memory, strides=strides))

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as a fresh array (uint8, shape (nbytes,)), verified. Errors as `copy_into`."""
        entry = self.entries.get(name)
        out = np.empty(0 if entry is None else entry.nbytes, dtype=np.uint8)
        self.copy_into(name, int(out.ctypes.data), out.nbytes)
        return out

    def verify_rest(self) -> None:
        """Verify the rest of the rank's own image. What was read of others has been. VerificationFailed."""
        self._own.verify_rest()
