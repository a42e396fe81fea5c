"""Which part of what it holds each rank saves, where replicated ranges are divided among their holders. Pure.

The plan is made from what all ranks have declared (`savers.py` divides, `commit_plan.py` proves that nothing is left
out), so the same declarations give the same division whoever computes it. Of the entries that a rank has declared it
saves

    some as they are    its own, volatile ones, and those whose range it holds alone or was given whole
    parts of some       a range of rows, contiguous in the memory of the entry
    none of the rest    another holder does

Cut are only entries that are one row-major range of the whole tensor, held so by all its holders. Where holders hold a
tensor in different ranges that overlap, as a range of its flattened form, or where its name means more than one tensor,
every holder saves what it has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from baftd.checkpoint.commit_plan import CommitPlan
from baftd.checkpoint.cutting import Cut
from baftd.checkpoint.layout import Layout
from baftd.checkpoint.ranges import Box, contains
from baftd.checkpoint.savers import divide
from baftd.checkpoint.shard import TensorEntry

__all__ = ["Division", "divide_declared"]


@dataclass(frozen=True)
class Division:
    """plan: 16 bytes that identify it. cuts: by rank. nbytes: that each rank saves, small state not counted."""

    plan: bytes
    cuts: tuple[tuple[Cut, ...], ...]
    nbytes: tuple[int, ...]


def divide_declared(
    declared: Mapping[int, Sequence[TensorEntry]],
    uncut: Mapping[int, Collection[int]],
    capacity: Mapping[int, int] | None = None,
) -> Division:
    """Divide what the ranks of a job have declared.

    declared: by rank, of all ranks. uncut: places of entries that cannot be cut (they lie on a device). capacity: bytes
    that each rank can copy in its windows in a step; None: all are equal.
    Raises LayoutError where ranks disagree about a tensor, or hold ranges of it that do not fit together.
    """
    layout = Layout.of_entries(declared, world=len(declared))
    numbers = {tensor.name: number for number, tensor in enumerate(layout.tensors) if tensor.owner is None}
    places: dict[tuple[int, int, Box], int] = {}
    whole: set[int] = set()
    kept: set[int] = {
        number
        for tensor in layout.tensors
        if tensor.owner is not None and (number := numbers.get(tensor.name)) is not None
    }
    alone: dict[int, list[int]] = defaultdict(list)
    for rank, entries in declared.items():
        for place, entry in enumerate(entries):
            number = None if entry.ranges is None else numbers.get(entry.name)
            if number is None or entry.ranges is None or not layout.tensors[number].replicated:
                alone[rank].append(place)
                continue
            if len(entry.ranges) != len(entry.global_shape or ()) or entry.nbytes % max(1, prod(entry.shape)):
                kept.add(number)
            if entry.aliases or entry.strides is not None or place in uncut.get(rank, ()):
                whole.add(number)
            places[rank, number, entry.ranges] = place
    for number in numbers.values():
        tensor = layout.tensors[number]
        if any((rank, number, cell.box) not in places for cell in tensor.cells() for rank in cell.holders):
            kept.add(number)
    for (rank, number, _), place in places.items():
        if number in kept:
            alone[rank].append(place)
    plan = CommitPlan.of(divide(layout, capacity, whole=whole, kept=kept))
    cuts: list[tuple[Cut, ...]] = []
    for rank in sorted(declared):
        found = [Cut(place, None) for place in alone[rank]]
        for number, box in plan.assignment.of(rank):
            tensor = layout.tensors[number]
            if tensor.owner is not None or not tensor.replicated or number in kept:
                continue  # there already, as it was declared
            cell = next(cell.box for cell in tensor.cells() if contains(cell.box, box))
            found.append(Cut(places[rank, number, cell], None if cell == box else box))
        cuts.append(tuple(sorted(found, key=lambda cut: (cut.entry, cut.ranges or ()))))
    return Division(plan.digest, tuple(cuts), plan.assignment.loads)
