"""Ranks of a layout, played one after the other in one process (torch's fake process group moves no bytes), and the
images that they save, open together as a start in another layout has them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from baftd.checkpoint.ranges import Box, volume
from baftd.checkpoint.reshard import Fill, Read, SavedTensor, Wanted, runs
from baftd.checkpoint.shard import TensorEntry
from tests.support.torch_image import MemoryImage


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a process group that is not there: collectives return at once, and change nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    debug._clear_sharding_prop_cache()  # it holds meshes of the rank before, which are equal to this one's
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class MemoryShards:
    """What `baft_torch._reshard` needs of `baft_client.saved.SavedShards`, over images in private memory."""

    def __init__(self, images: Mapping[int, MemoryImage], step: int = 3) -> None:
        self.images = images
        self.step = step
        self.world = len(images)
        self.bytes_read = 0

    @property
    def smalls(self) -> dict[int, Any]:
        """Small states of all ranks."""
        return {rank: image.small for rank, image in self.images.items()}

    def entries(self, rank: int) -> Mapping[str, TensorEntry]:
        """Tensors of a rank's image by stored name."""
        return self.images[rank].entries

    def small(self, rank: int) -> Any:
        """Small state of a rank."""
        return self.images[rank].small

    def same_bytes(self, a: SavedTensor, b: SavedTensor, box: Box) -> bool:
        """Whether two saved tensors hold the same bytes of a box."""
        return self._bytes(a, box) == self._bytes(b, box)

    def _bytes(self, tensor: SavedTensor, box: Box) -> bytes:
        entry = tensor.entry
        shape = entry.global_shape or entry.shape
        size = entry.nbytes // max(1, torch.Size(entry.shape).numel())
        out = ctypes.create_string_buffer(volume(box) * size)
        wanted = Wanted(entry.name, entry.dtype, shape, box, size)
        self._copy(Read(tensor, box), wanted, ctypes.addressof(out))
        return out.raw

    def read(self, fill: Fill, address: int) -> None:
        """Copy the runs of all reads."""
        for read in fill.reads:
            self._copy(read, fill.wanted, address)

    def _copy(self, read: Read, wanted: Wanted, address: int) -> None:
        data = self.images[read.source.rank].data[read.source.stored_name]
        for run in runs(read, wanted):
            ctypes.memmove(address + run.target, data[run.source : run.source + run.nbytes], run.nbytes)
            self.bytes_read += run.nbytes
