"""From a live tensor to what is saved of it: one entry, or one for each separate range of the whole that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from baft_client.source import Source
from baft_torch._layout import Held
from baft_torch._placements import Part
from baft_torch._tensors import Extent, is_dtensor, plain
from baftd.checkpoint.shard import TensorEntry, check_entries

__all__ = ["Item", "rows_of"]


@dataclass(eq=False)
class Item:
    """One saved entry: where its bytes live now and how they are declared."""

    source: Source
    live: torch.Tensor
    """What the framework holds: a Parameter, a state tensor, a buffer, a DTensor."""
    local: torch.Tensor
    """The strided tensor whose pointer and version are read: `live` itself, or a DTensor's local tensor."""
    extent: Extent
    """Of the whole local tensor."""
    held: Held
    """What this rank holds of the tensor; known for a tensor that is its own, too."""
    base: str
    """Name without the pipeline stage that the adapter put before it."""
    part: Part | None
    """What the entry holds, where there are several of one tensor; None: all of the local tensor."""
    stored_name: str
    """Of the entry in the image."""
    staging: torch.Tensor | None = None
    rows: tuple[Item, ...] = field(default=(), repr=False)
    """All items of the tensor, this one among them."""

    @property
    def entry(self) -> TensorEntry:
        """As declared."""
        return self.source.entry

    @property
    def holder(self) -> torch.Tensor:
        """The tensor that the bytes are read from."""
        return self.local if self.staging is None else self.staging

    def address(self) -> int:
        """Of the first byte, where it is in the memory of the host."""
        start = 0 if self.part is None else self.part.local[0][0] * self.holder.stride(0)
        return self.holder.data_ptr() + start * self.holder.element_size()

    def target(self) -> torch.Tensor:
        """The elements that the entry stands for: a view of the live tensor's memory."""
        found = plain(self.live, self.entry.name)
        return found if self.part is None else found[self.part.where]


def rows_of(name: str, base: str, live: torch.Tensor, held: Held, kind: str) -> Sequence[Item]:
    """The items of a tensor, at least one; not located yet. Raises UnsupportedTensor for what cannot be saved."""
    view = plain(live, name)
    local = live._local_tensor if is_dtensor(live) else live
    extent = Extent.of(view, name)
    if held.declared and extent.shape != tuple(view.shape):
        held = held.own(remark="some of its dimensions are expanded: its elements are fewer than its shape says")
    parts: Sequence[Part | None] = (None,)
    if held.declared and held.flat is None and len(held.parts) > 1:
        parts = held.parts
        if extent.strides is not None:  # its rows are not consecutive bytes: a row-major copy's are
            extent = replace(extent, strides=None, staged=True)
    staging = None
    if extent.staged:
        kind = "volatile"
        staging = torch.empty(extent.shape, dtype=view.dtype, device=view.device)
    items = []
    for part in parts:
        entry = _entry(name, extent, held, part, view.element_size(), kind)
        source = Source(entry, 0, None, view.element_size())
        items.append(Item(source, live, local, extent, held, base, part, name, staging))
    rows = tuple(items)
    names = check_entries([item.entry for item in rows]) if len(rows) > 1 else [name]
    for item, stored_name in zip(rows, names, strict=True):
        item.rows, item.stored_name = rows, stored_name
    return rows


def _entry(name: str, extent: Extent, held: Held, part: Part | None, itemsize: int, kind: str) -> TensorEntry:
    shape, nbytes = extent.shape, extent.nbytes
    ranges = held.box if part is None else part.box
    if part is not None:
        shape = part.shape
        nbytes = itemsize
        for size in shape:
            nbytes *= size
    if held.flat is not None:
        ranges = (held.flat,)
    return TensorEntry(
        name=name,
        dtype=extent.dtype,
        shape=shape,
        nbytes=nbytes,
        kind="stable" if kind == "stable" else "volatile",
        global_shape=held.shape if held.declared else None,
        ranges=ranges if held.declared else None,
        strides=extent.strides,
    )
