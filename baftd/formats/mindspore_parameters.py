"""MindSpore's `net.parameter_layout_dict`: how each parameter of one rank is cut, as the compiled network says it.

An entry is (dev_matrix, tensor_map, slice_shape, field_size, uniform_split, opt_shard_group, full_shape, slice_shape as
it is cut, ...). Unlike in a strategy file, a tensor two of whose cuts meet in one dimension has that dimension split in
two; the optimizer's sharding is there as a group only, whose name begins with its size; and of a tensor that is cut by
hand each rank knows its own part alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from baftd.errors import LayoutError
from baftd.formats.mindspore_cuts import Cut

__all__ = ["cuts_of_parameter_layouts"]

_WORLD_GROUP = "_world_group"  # "hccl_world_group": all ranks of the job
_GROUP_SIZE = re.compile(r"([1-9][0-9]{0,6})-.+")


def cuts_of_parameter_layouts(
    layouts: Mapping[int, Mapping[str, Sequence[object]]], world: int, devices: int
) -> list[dict[str, Cut]]:
    """The cuts of every rank. devices: ranks of a pipeline stage. Raises LayoutError naming tensor and rank."""
    own: list[dict[str, Cut]] = []
    for rank in range(world):
        if rank not in layouts:
            raise LayoutError(f"rank {rank} of {world} has no parameter_layout_dict.", rank=rank)
        own.append({name: _cut_of(name, entry, rank) for name, entry in layouts[rank].items()})
    whole: list[dict[str, Cut]] = []
    for rank, cuts in enumerate(own):
        first = rank - rank % devices
        stage = own[first : first + devices]
        whole.append({name: _by_hand(name, stage, first) if cut.split_shape else cut for name, cut in cuts.items()})
    return whole


def _by_hand(name: str, stage: Sequence[Mapping[str, Cut]], first: int) -> Cut:
    """The cut of a tensor of unequal parts, whose `split_shape` on each rank is the rank's own part alone."""
    rows: dict[int, int] = {}
    for device, cuts in enumerate(stage):
        cut = cuts.get(name)
        part = cut.split_shape if cut is not None else ()
        index = cut.index(0, device) if cut is not None else 0
        if not part or rows.setdefault(index, part[0]) != part[0]:
            raise LayoutError(
                f"parameter_layout_dict of rank {first + device}: tensor {name!r} is cut by hand, and its part "
                f"{index} {f'has {part[0]} rows' if part else 'is not there'} where other ranks of the stage say "
                f"{rows.get(index, 'otherwise')}.",
                tensor=name,
                rank=first + device,
            )
    return stage[0][name].with_rows(tuple(rows[index] for index in sorted(rows)))


def _cut_of(name: str, entry: Sequence[object], rank: int) -> Cut:
    """An entry of `parameter_layout_dict` as a cut."""

    def refuse(why: str) -> NoReturn:
        message = f"parameter_layout_dict of rank {rank}: tensor {name!r}: {why}"
        raise LayoutError(f"{message}: {str(entry)[:200]}.", tensor=name, rank=rank)

    def numbers(at: int) -> tuple[int, ...]:
        value = entry[at]
        if not isinstance(value, (list, tuple)) or any(type(one) is not int for one in value):
            refuse(f"its element {at} is not a list of whole numbers")
        return tuple(value)

    if isinstance(entry, (str, bytes)) or len(entry) < 7:
        refuse("it has fewer than 7 elements")
    dev_matrix, tensor_map, shape, group = numbers(0), numbers(1), numbers(6), entry[5]
    if any(not -1 <= axis < len(dev_matrix) for axis in tensor_map) or any(size < 1 for size in dev_matrix):
        refuse("its tensor_map does not fit its dev_matrix")
    if not isinstance(group, str):
        refuse("its optimizer-shard group is not a name")
    match = _GROUP_SIZE.fullmatch(group)
    if group and not match and not group.endswith(_WORLD_GROUP):
        refuse("the name of its optimizer-shard group does not begin with the number of its ranks")
    shard_size = int(match[1]) if match else -1 if group else 0
    axes: tuple[tuple[int, ...], ...] = tuple((axis,) if axis != -1 else () for axis in tensor_map)
    field = entry[3]
    if type(field) is not int:
        refuse("its field size is not a whole number")
    rows = () if entry[4] else numbers(2)[:1]
    if not entry[4] and (not rows or not axes or rows[0] < 0):
        refuse("it is not cut evenly, and its slice has no rows")
    cut = Cut(dev_matrix, axes, split_shape=rows, field=field, shard_size=shard_size)
    if len(axes) != len(shape):
        part = numbers(7) if len(entry) > 7 else ()
        if len(part) != len(axes):
            refuse("its tensor_map does not fit its shape")
        split = tuple(size * parts for size, parts in zip(part, cut.parts, strict=True))
        cut = replace(cut, shape=split)
    whole = cut.in_shape(shape)
    if whole is None:
        refuse("its tensor_map does not fit its shape")
    return whole
