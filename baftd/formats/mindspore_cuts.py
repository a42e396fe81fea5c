"""MindSpore's slice rule: which block of a tensor each device of a stage holds.

The devices of a stage, numbered from 0, are laid out over `dev_matrix`, its last dimension counting fastest. An entry
of `tensor_map` names the dimensions of that matrix, *counted from the right*, that cut one dimension of the tensor, the
outermost first. What no entry names are the *replicas* of a part; the optimizer's sharding (`opt_weight_shard_size`)
cuts dimension 0 of the part once more over them, in the order of their ranks: neighbouring ranks hold neighbouring
pieces, and with fewer pieces than replicas they begin again.

An embedding cut by hand has unequal parts of its rows (`split_shape`).

Sources: `OperatorInfo::CreateGroupForOptShard`, `TensorLayout::GenerateOptShardSliceShape` and `_load_tensor_by_layout`
of MindSpore 2.10; `tests/data/mindspore` holds what MindSpore itself cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NoReturn

from baftd.checkpoint.ranges import said
from baftd.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baftd.checkpoint.ranges import Box
    from baftd.formats.mindspore_strategy import TensorStrategy

__all__ = ["Cut", "coordinates", "cuts_of_tensors"]


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut over the devices of a stage; the words are those of `TensorStrategy`.

    shape: of the whole tensor; None where it is not known.
    """

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...] | None = None
    split_shape: tuple[int, ...] = ()
    field: int = 0
    shard_size: int = 0
    shard_step: int | None = None

    @property
    def devices(self) -> int:
        """Devices of the stage."""
        return prod(self.dev_matrix)

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts each dimension is cut, before the optimizer's sharding."""
        return tuple(prod(self.dev_matrix[-1 - axis] for axis in axes) for axes in self.tensor_map)

    @property
    def replica_axes(self) -> tuple[int, ...]:
        """Dimensions of `dev_matrix`, counted from the left, over which parts are repeated."""
        used = {len(self.dev_matrix) - 1 - axis for axes in self.tensor_map for axis in axes}
        return tuple(axis for axis in range(len(self.dev_matrix)) if axis not in used)

    @property
    def replicas(self) -> int:
        """Devices that hold one part, before the optimizer's sharding."""
        return prod(self.dev_matrix[axis] for axis in self.replica_axes)

    @property
    def shards(self) -> int:
        """Pieces into which the optimizer's sharding cuts dimension 0 of a part."""
        return self.replicas if self.shard_size == -1 else max(1, self.shard_size)

    def whole_of(self, part: Sequence[int]) -> tuple[int, ...] | None:
        """Shape of the whole tensor from the shape that one device holds; None where that does not tell it."""
        if self.split_shape or self.field:
            return None
        parts = list(self.parts)
        if parts:
            parts[0] *= self.shards
        if len(part) == len(parts):
            return tuple(size * cuts for size, cuts in zip(part, parts, strict=True))
        if self.shape is None or len(self.shape) != len(parts):
            return None
        # A tensor with split dimensions (see `in_shape`): those whose parts have `size` rows together are one.
        pieces = [size // cuts for size, cuts in zip(self.shape, parts, strict=True)]
        whole: list[int] = []
        at = 0
        for size in part:
            first = at
            while at < len(pieces) and (at == first or prod(pieces[first:at]) != size):
                at += 1
            whole.append(prod(self.shape[first:at]))
        return tuple(whole) if at == len(pieces) else None

    def in_shape(self, shape: tuple[int, ...]) -> Cut | None:
        """The same cut of a tensor that has this shape; None where it cannot have.

        Where two dimensions of dev_matrix cut one dimension of a tensor, MindSpore splits that dimension in two
        (rows 0 to 15 become 2 by 8) and describes the tensor in the split shape: here they are joined again. All but
        the last of them must be cut to single rows, or a part would not be one block.
        """
        if self.shape is None or self.shape == shape:
            return replace(self, shape=shape) if len(shape) == len(self.tensor_map) else None
        if len(self.shape) != len(self.tensor_map) or self.split_shape or self.shard_size:
            return None
        parts = self.parts
        joined: list[tuple[int, ...]] = []
        at = 0
        for size in shape:
            axes: tuple[int, ...] = ()
            left = size
            while at < len(parts):
                if not self.shape[at] or left % self.shape[at]:
                    return None
                last = left == self.shape[at]
                if not last and self.shape[at] != parts[at]:
                    return None
                axes += self.tensor_map[at]
                left //= self.shape[at]
                at += 1
                if last:
                    break
            if left != 1:
                return None
            joined.append(axes)
        if any(size != 1 for size in self.shape[at:]):
            return None
        return replace(self, shape=shape, tensor_map=tuple(joined))

    def with_rows(self, rows: tuple[int, ...]) -> Cut:
        """The same cut into these parts of dimension 0.

        MindSpore gives such a tensor the size that it would have if all parts were as large as the rank's own, so that
        every rank has another: the sum is right.
        """
        return replace(self, split_shape=rows, shape=self.shape and (sum(rows), *self.shape[1:]))

    def box(self, device: int, *, tensor: str, rank: int, source: str = "") -> Box:
        """The block that a device holds. `tensor`, `rank` and the file it is from, `source`, are named in errors.

        Raises LayoutError where `problem` says something.
        """
        problem = self.problem()
        if problem:
            self._refuse(problem, tensor, rank, source)
        shape = self._known()
        at = coordinates(self.dev_matrix, device)
        box = []
        for dimension, (size, parts) in enumerate(zip(shape, self.parts, strict=True)):
            index = self._index(dimension, at)
            if dimension == 0 and self.split_shape:
                start = sum(self.split_shape[:index])
                box.append((start, start + self.split_shape[index]))
                continue
            box.append((index * (size // parts), (index + 1) * (size // parts)))
        if self.shards == 1:
            return tuple(box)
        replica = 0
        for axis in self.replica_axes:
            replica = replica * self.dev_matrix[axis] + at[axis]
        start, stop = box[0]
        rows = (stop - start) // self.shards
        start += replica % self.shards * rows
        box[0] = (start, start + rows)
        return tuple(box)

    def index(self, dimension: int, device: int) -> int:
        """Which of the parts of a dimension a device holds, before the optimizer's sharding."""
        return self._index(dimension, coordinates(self.dev_matrix, device))

    def boxes(self, *, tensor: str, rank: int, source: str = "") -> tuple[Box, ...]:
        """The block of each device of the stage whose first rank is `rank`. Raises LayoutError as `box` does."""
        devices = range(self.devices)
        return tuple(self.box(device, tensor=tensor, rank=rank + device, source=source) for device in devices)

    def problem(self) -> str:
        """Why the tensor cannot be cut so; empty if it can."""
        if self.shape is None:
            return "its whole shape is not known"
        if len(self.shape) != len(self.tensor_map):
            return f"tensor_map {_said(self.tensor_map)} does not fit its shape {self.shape}"
        if self.field:
            return f"it is cut within each of {self.field} fields, which is not supported"
        for dimension, (size, parts) in enumerate(zip(self.shape, self.parts, strict=True)):
            if dimension == 0 and self.split_shape:
                if len(self.split_shape) != parts:
                    return f"{len(self.split_shape)} parts of its rows are given for {parts} devices"
                if sum(self.split_shape) != size:
                    return f"the parts of its rows have {sum(self.split_shape)} rows together, its shape {size}"
            elif size % parts:
                return f"dimension {dimension} of its shape {self.shape} cannot be cut into {parts} equal parts"
        return self._shard_problem()

    def _index(self, dimension: int, at: tuple[int, ...]) -> int:
        index = 0
        for axis in self.tensor_map[dimension]:
            index = index * self.dev_matrix[-1 - axis] + at[-1 - axis]
        return index

    def _shard_problem(self) -> str:
        """Why the optimizer's sharding cannot be as it is said to be."""
        shape = self._known()
        if self.shards == 1:
            return ""
        if self.replicas % self.shards:
            return f"{self.replicas} replicas cannot be sharded by {self.shards} (opt_weight_shard_size)"
        if not shape:
            return "it has no dimension that the optimizer's sharding could cut"
        if self.split_shape:
            return "its rows are cut by hand and by the optimizer's sharding, which is not supported"
        rows = shape[0] // self.parts[0]
        if rows % self.shards:
            return f"{rows} rows of a part cannot be sharded by {self.shards} (opt_weight_shard_size)"
        if self.shard_step is not None:
            step = self._step()
            if step != self.shard_step:
                return f"its replicas are {step} ranks apart, opt_weight_shard_step says {self.shard_step}"
        return ""

    def _step(self) -> int:
        """Distance of the ranks that hold neighbouring pieces, as MindSpore works it out: the average, rounded down."""
        strides = [prod(self.dev_matrix[axis + 1 :]) for axis in range(len(self.dev_matrix))]
        span = sum((self.dev_matrix[axis] - 1) * strides[axis] for axis in self.replica_axes)
        return span // (self.replicas - 1)

    def _known(self) -> tuple[int, ...]:
        assert self.shape is not None
        return self.shape

    def _refuse(self, problem: str, tensor: str, rank: int, source: str) -> NoReturn:
        ranges = "" if self.shape is None else said(tuple((0, size) for size in self.shape))
        whole = f" {ranges}" if ranges else ""
        where = f"{source}: " if source else ""
        message = (
            f"{where}tensor {tensor!r}{whole} cannot be cut for rank {rank} over dev_matrix {list(self.dev_matrix)}"
        )
        raise LayoutError(f"{message}: {problem}.", tensor=tensor, rank=rank, ranges=ranges)


def cuts_of_tensors(tensors: Iterable[TensorStrategy]) -> dict[str, Cut]:
    """The cuts of one stage by name.

    The parts of an embedding that is cut by hand stand at the parameter alone, though its moments ("adam_m." and the
    like before its name) are cut as it is.
    """
    cuts = {
        tensor.name: Cut(
            dev_matrix=tensor.dev_matrix,
            tensor_map=tensor.tensor_map,
            shape=tensor.shape,
            split_shape=tensor.split_shape,
            field=tensor.field,
            shard_size=tensor.shard_size,
            shard_step=tensor.shard_step,
        )
        for tensor in tensors
    }
    for name in [name for name, cut in cuts.items() if cut.split_shape]:
        by_hand = cuts[name]
        for other, cut in cuts.items():
            alike = (cut.dev_matrix, cut.tensor_map) == (by_hand.dev_matrix, by_hand.tensor_map)
            if other == name or (other.endswith(f".{name}") and alike and not cut.split_shape):
                cuts[other] = cut.with_rows(by_hand.split_shape)
    return cuts


def coordinates(dev_matrix: Sequence[int], device: int) -> tuple[int, ...]:
    """Where a device stands in the matrix, from the left."""
    found = []
    for size in reversed(dev_matrix):
        device, at = divmod(device, size)
        found.append(at)
    return tuple(reversed(found))


def _said(tensor_map: tuple[tuple[int, ...], ...]) -> str:
    """A tensor map as MindSpore writes it."""
    return str([list(axes) if len(axes) > 1 else axes[0] if axes else -1 for axes in tensor_map])
