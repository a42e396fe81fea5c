"""The layout of a transformer that Megatron-LM trains: from degrees of parallelism to who holds which ranges.

What is modelled, and where it comes from (Megatron-Core; file names are those of its tree):

- column-, row- and vocabulary-parallel weights, norms and biases of row-parallel layers whole on every tensor-parallel
  rank (`tensor_parallel/layers.py`); the vocabulary is padded to a multiple of 128 x tp. Context-parallel ranks hold
  equal parameters. A gated layer keeps its part of the gate, then its part of the value: two ranges.
- experts divided in equal runs over ep, and cut over etp; routers are dense.
- layers in equal runs over virtual stages (or as `stage_layers` says); chunk c of pipeline rank p is virtual stage
  c * pp + p. A tied embedding lies on the first and on the last stage.
- mixed precision: parameters in `dtype`, and for each one the states in `states`, F32: master weight and two moments.
- zero 1 and 2, the distributed optimizer (`distributed/param_and_grad_buffer.py`): each model chunk has a flat buffer
  of its dense parameters and one of its expert parameters, in reverse order of the model; a parameter begins at a
  multiple of 64 elements; a bucket ends where it has `bucket` elements (0: one bucket), before and after a tied
  embedding, and is padded to a multiple of lcm(128, ranks); each of the data-parallel (x context-parallel) ranks owns
  an equal part of every bucket, which in general begins and ends within a parameter. zero 3 divides the parameters in
  the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import TypeAlias

from baftd.checkpoint.layout import Holding, Layout, LayoutBuilder, RankPlace
from baftd.checkpoint.mesh import ParallelDescription
from baftd.checkpoint.ranges import Box, flat_boxes, volume
from baftd.errors import UsageError
from baftd.formats.transformer import Parameter, TransformerShape

__all__ = ["ADAM", "VOCABULARY_MULTIPLE", "flat_parts", "megatron_layout", "stage_runs"]

ADAM = (("master", "F32"), ("exp_avg", "F32"), ("exp_avg_sq", "F32"))
"""States of mixed-precision Adam: master weight, first and second moment."""
VOCABULARY_MULTIPLE = 128
"""`--make-vocab-size-divisible-by`: the vocabulary is padded to a multiple of this times tp."""

_PARAMETER_MULTIPLE = 64
_BUCKET_MULTIPLE = 128

_Groups: TypeAlias = "tuple[tuple[tuple[Box, ...], tuple[int, ...]], ...]"
"""Boxes, and all ranks that hold them."""
_Flat: TypeAlias = "tuple[tuple[int, int], ...]"
"""For each data-parallel rank the (start, stop) of a parameter's local part that it owns; equal for nothing."""


def megatron_layout(
    shape: TransformerShape,
    parallel: ParallelDescription,
    *,
    dtype: str = "BF16",
    states: Sequence[tuple[str, str]] = ADAM,
    stage_layers: Sequence[int] = (),
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    bucket: int = 0,
) -> Layout:
    """Who holds which ranges of `model.<name>` and `optim.0.<name>.<state>`.

    states: (name, dtype) of each optimizer state. stage_layers: layers of each virtual stage; empty: equal runs.
    bucket: elements after which the distributed optimizer closes a bucket; 0: one bucket a buffer.
    Raises UsageError, one sentence, where shape and degrees do not fit together.
    """
    _check(shape, parallel)
    padded = -(-shape.vocab // (vocabulary_multiple * parallel.tp)) * vocabulary_multiple * parallel.tp
    chunks = [_Chunk(parallel, stage, bucket) for stage in range(parallel.virtual_stages)]
    order: dict[str, tuple[Parameter, list[_Chunk]]] = {}
    for parameter, stages in _placed(shape, stage_runs(shape.layers, parallel.virtual_stages, stage_layers)):
        if parameter.vocabulary:
            parameter = replace(parameter, shape=(padded, *parameter.shape[1:]))
        order[parameter.name] = parameter, [chunks[stage] for stage in stages]
        for stage in stages:
            chunks[stage].parameters.append(parameter)
    # On the last stage a tied embedding stands where the head would: behind all others.
    last = chunks[-1].parameters
    last.sort(key=lambda parameter: parameter.place == "ends" and len(chunks) > 1)

    builder = LayoutBuilder(parallel.world)
    for rank in range(parallel.world):
        builder.place(RankPlace(rank, stages=parallel.stages(rank), coordinates=parallel.coordinates(rank)))
    for parameter, owners in order.values():
        if parallel.zero:
            divided = _holding(parameter, [chunk.divided(parameter) for chunk in owners])
        whole = divided if parallel.zero == 3 else _holding(parameter, [chunk.held(parameter) for chunk in owners])
        builder.add(f"model.{parameter.name}", dtype, parameter.shape, whole)
        for state, state_dtype in states:
            held = divided if parallel.zero else whole
            builder.add(f"optim.0.{parameter.name}.{state}", state_dtype, parameter.shape, held)
    return builder.build()


def stage_runs(layers: int, stages: int, stage_layers: Sequence[int] = ()) -> tuple[range, ...]:
    """The layers of each virtual stage. Raises UsageError where they do not divide."""
    if not stage_layers:
        if layers % stages:
            raise UsageError(
                f"{layers} layers do not divide into {stages} stages (pp x vpp).",
                hint=f"Say how many each stage has: --stage-layers {_suggestion(layers, stages)}.",
            )
        stage_layers = (layers // stages,) * stages
    if len(stage_layers) != stages:
        raise UsageError(f"layers are given for {len(stage_layers)} stages, but there are {stages} (pp x vpp).")
    if sum(stage_layers) != layers or min(stage_layers) < 0:
        raise UsageError(f"the stages have {sum(stage_layers)} layers together, but the model has {layers}.")
    ends = [sum(stage_layers[: number + 1]) for number in range(stages)]
    return tuple(range(end - count, end) for end, count in zip(ends, stage_layers, strict=True))


def _suggestion(layers: int, stages: int) -> str:
    """As even as it can be: the stages that are one short are the last and the first ones, which also have the head."""
    most = -(-layers // stages)
    short = most * stages - layers
    head, tail = short // 2, short - short // 2
    parts = [(most - 1, head), (most, stages - short), (most - 1, tail)]
    return ",".join(f"{count}x{times}" if times > 1 else str(count) for count, times in parts if times)


def _check(shape: TransformerShape, parallel: ParallelDescription) -> None:
    """Raise for what Megatron would refuse."""
    for value, what in ((shape.heads, "heads"), (shape.key_heads, "key-value heads")):
        if value % parallel.tp:
            raise UsageError(f"{value} {what} do not divide among tp = {parallel.tp} ranks.")
    width = parallel.expert_tp if shape.experts else parallel.tp
    if shape.inner % width:
        raise UsageError(f"a feed-forward width of {shape.inner} does not divide among {width} tensor-parallel ranks.")
    if parallel.ep > 1 and not shape.experts:
        raise UsageError(f"ep = {parallel.ep}, but the model has no experts.", hint="Give --experts, or leave ep out.")
    if parallel.expert_tp != parallel.tp and not shape.experts:
        raise UsageError(
            f"etp = {parallel.etp}, but the model has no experts.", hint="Give --experts, or leave etp out."
        )
    if shape.experts % parallel.ep:
        raise UsageError(f"{shape.experts} experts do not divide among ep = {parallel.ep} ranks.")


def _placed(shape: TransformerShape, runs: Sequence[range]) -> Iterator[tuple[Parameter, tuple[int, ...]]]:
    """Each parameter with the virtual stages that hold it."""
    stage_of = {layer: stage for stage, run in enumerate(runs) for layer in run}
    last = len(runs) - 1
    ends = {"first": (0,), "last": (last,), "ends": tuple(sorted({0, last}))}
    for parameter in shape.parameters():
        place = parameter.place
        yield parameter, (stage_of[place],) if isinstance(place, int) else ends[place]


def _holding(parameter: Parameter, groups: Sequence[_Groups]) -> Holding:
    """One holding of what the ranks of one stage or several hold."""
    return Holding.of_groups(parameter.shape, [group for stage in groups for group in stage])


def flat_parts(boxes: Sequence[Box], start: int, stop: int) -> tuple[Box, ...]:
    """Elements `start` to `stop` of what a rank holds, its boxes one after the other, each row-major, as boxes."""
    found: list[Box] = []
    begin = 0
    for box in boxes:
        size = volume(box)
        low, high = max(start - begin, 0), min(stop - begin, size)
        if low < high:
            for part in flat_boxes([end - first for first, end in box], low, high):
                found.append(tuple((p + first, q + first) for (p, q), (first, _) in zip(part, box, strict=True)))
        begin += size
    return tuple(found)


@dataclass(frozen=True)
class _Grid:
    """Ranks of one stage: `blocks[i]` hold equal parameters, by their place among their data-parallel ranks."""

    blocks: tuple[tuple[int, ...], ...]
    tensor: tuple[int, ...]
    """Tensor-parallel coordinate of each block."""
    expert: tuple[int, ...]
    """Expert-parallel coordinate of each block."""
    tensor_size: int
    expert_size: int

    @property
    def copies(self) -> int:
        """Data-parallel ranks of a block."""
        return len(self.blocks[0])


class _Chunk:
    """One model chunk: the parameters of a virtual stage, the ranks that hold it, and its flat buffers."""

    def __init__(self, parallel: ParallelDescription, stage: int, bucket: int) -> None:
        self.parameters: list[Parameter] = []
        self._bucket = bucket
        self._many = parallel.virtual_stages > 1
        ranks = frozenset(parallel.ranks_of_stage(stage))
        dense = [group for group in parallel.data_parallel_groups() if group[0] in ranks]
        at = [parallel.dense.coordinates(group[0]) for group in dense]
        self._dense = _Grid(tuple(dense), tuple(c["tp"] for c in at), (0,) * len(at), parallel.tp, 1)
        groups = [group for group in parallel.expert_data_parallel_groups() if group[0] in ranks]
        at = [parallel.expert.coordinates(group[0]) for group in groups]
        places = tuple(c["etp"] for c in at), tuple(c["ep"] for c in at)
        self._expert = _Grid(tuple(groups), *places, parallel.expert_tp, parallel.ep)
        self._owned: dict[str, _Flat] | None = None

    def held(self, parameter: Parameter) -> _Groups:
        """Who holds what when all data-parallel ranks hold the same."""
        return tuple(zip(self._boxes(parameter), self._grid(parameter).blocks, strict=True))

    def divided(self, parameter: Parameter) -> _Groups:
        """Who holds what when data-parallel ranks divide the flat buffers."""
        if self._owned is None:
            self._owned = {}
            for expert in (False, True):
                self._owned.update(self._buffer([p for p in self.parameters if p.expert == expert]))
        owned = [(place, part) for place, part in enumerate(self._owned[parameter.name]) if part[0] < part[1]]
        return tuple(
            (flat_parts(boxes, *part), (block[place],))
            for boxes, block in zip(self._boxes(parameter), self._grid(parameter).blocks, strict=True)
            for place, part in owned
        )

    def _grid(self, parameter: Parameter) -> _Grid:
        return self._expert if parameter.expert else self._dense

    def _boxes(self, parameter: Parameter) -> list[tuple[Box, ...]]:
        """What each block of ranks holds."""
        grid = self._grid(parameter)
        places = zip(grid.tensor, grid.expert, strict=True)
        return [_local(parameter, tensor, grid.tensor_size, expert, grid.expert_size) for tensor, expert in places]

    def _buffer(self, parameters: Sequence[Parameter]) -> Mapping[str, _Flat]:
        """For each parameter of one flat buffer what each data-parallel rank owns of a block's local part."""
        if not parameters:
            return {}
        grid = self._grid(parameters[0])
        multiple = lcm(grid.copies, _BUCKET_MULTIPLE)
        buckets: list[tuple[int, int]] = []
        placed: list[tuple[str, int, int, int]] = []
        begin = position = 0
        for parameter in reversed(parameters):
            alone = parameter.place == "ends" and self._many
            position = _up(position, _PARAMETER_MULTIPLE)
            if alone and position > begin:
                buckets.append((begin, _up(position, multiple)))
                begin = position = buckets[-1][1]
            size = parameter.elements // (grid.expert_size if parameter.expert else 1)
            size //= grid.tensor_size if parameter.cut != "none" else 1
            placed.append((parameter.name, position, position + size, len(buckets)))
            position += size
            if alone or (self._bucket and position - begin >= self._bucket):
                buckets.append((begin, _up(position, multiple)))
                begin = position = buckets[-1][1]
        if position > begin:
            buckets.append((begin, _up(position, multiple)))
        owned = {}
        for name, start, stop, number in placed:
            first, end = buckets[number]
            part = (end - first) // grid.copies
            parts = [(max(low, start) - start, min(low + part, stop) - start) for low in range(first, end, part)]
            owned[name] = tuple((low, high) if low < high else (0, 0) for low, high in parts)
        return owned


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _local(parameter: Parameter, tensor: int, tensor_size: int, expert: int, expert_size: int) -> tuple[Box, ...]:
    """The ranges of a parameter that a rank at these coordinates holds, in the order it stores them."""
    spans = [[(0, size)] for size in parameter.shape]
    if parameter.expert:
        run = parameter.shape[0] // expert_size
        spans[0] = [(expert * run, (expert + 1) * run)]
    if parameter.cut != "none":
        axis = parameter.cut_dimension
        halves = 2 if parameter.cut == "gated" else 1
        half = parameter.shape[axis] // halves
        run = half // tensor_size
        spans[axis] = [(half * part + tensor * run, half * part + (tensor + 1) * run) for part in range(halves)]
    count = prod(len(choices) for choices in spans)
    return tuple(tuple(choices[part if len(choices) > 1 else 0] for choices in spans) for part in range(count))
