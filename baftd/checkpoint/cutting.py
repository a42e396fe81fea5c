"""A part of a declared entry that is saved alone: one run of the entry's memory. Pure.

Client and daemon cut alike, so that both come to the same image.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from baftd.checkpoint.ranges import Box, contains, said, volume
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import UsageError

__all__ = ["Cut", "cut_entry"]


class Cut(NamedTuple):
    """What a rank saves of one entry. entry: its place among those that were declared; ranges: None: all of it."""

    entry: int
    ranges: Box | None


def cut_entry(entry: TensorEntry, ranges: Box | None) -> tuple[TensorEntry, int]:
    """(the entry for these ranges of it, their first byte in it). Raises UsageError unless they are one run of it."""
    if ranges is None:
        return entry, 0
    held = entry.ranges
    if held is None or len(ranges) != len(held) or entry.strides is not None or not contains(held, ranges):
        raise UsageError(f"{said(ranges)} of tensor {entry.name!r} cannot be cut out of what this rank has declared.")
    itemsize, first, inner, split = entry.nbytes // prod(entry.shape), 0, 1, False
    for (start, stop), (low, high) in zip(reversed(ranges), reversed(held), strict=True):
        if split and stop - start != 1:
            raise UsageError(f"{said(ranges)} of tensor {entry.name!r} is no run of {said(held)} in its memory.")
        split = split or (start, stop) != (low, high)
        first += (start - low) * inner
        inner *= high - low
    part = TensorEntry(
        name=entry.name,
        dtype=entry.dtype,
        shape=tuple(stop - start for start, stop in ranges),
        nbytes=volume(ranges) * itemsize,
        kind=entry.kind,
        global_shape=entry.global_shape,
        ranges=ranges,
    )
    return part, first * itemsize
