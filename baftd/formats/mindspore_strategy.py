"""MindSpore's strategy checkpoint files, read without MindSpore: how each parameter is cut over the devices of a stage.

A rank's file (`strategy_ckpt_config={"save_file": ..., "only_trainable_params": False}`, or
`AutoParallel.save_param_strategy_file`) comes in two forms, told apart by the first byte:

- protobuf `mindspore.straspb.ParallelStrategyMap` (any file name): no full shapes;
- JSON (file names ending in `.json`): the same, with full shapes.

`merge_pipeline_strategys` joins one file a stage to the *merged* form: every parameter's name begins with "<stage>-".

What the file says is kept as it stands, fields of newer versions too. Two things in it mislead: `current_stage` is not
the pipeline stage (operators carry that), and `opt_weight_shard_size` -1 means "all replicas".

Message and field numbers: node_strategy.proto of MindSpore 2.10; JSON: `StrategyCheckpointInfo::to_json` there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

from baftd.errors import FormatError
from baftd.formats.protobuf import Message, read_message, signed
from baftd.limits import LARGEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["OperatorStrategy", "StrategyFile", "TensorStrategy", "parse_strategy"]

MAX_FILE = 256 << 20
"""Bytes of one file, at most: ten thousand parameters need about a megabyte."""
MAX_NAME = 1024
MAX_DIMENSIONS = 64
MAX_DEVICES = 1 << 31
MAX_SIZE = LARGEST

_LAYOUT_KEYS = {
    "dev_matrix", "tensor_map", "tensor_shape", "field", "opt_weight_shard_step", "opt_weight_shard_size",
    "param_split_shape", "indices_offset",
}  # fmt: skip
_STAGE = re.compile(r"(0|[1-9][0-9]{0,5})-(.+)", re.DOTALL)


@dataclass(frozen=True)
class OperatorStrategy:
    """How one operator is cut: for each of its inputs the number of parts a dimension. `stage`: its pipeline stage."""

    name: str
    stage: int
    cuts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TensorStrategy:
    """How one parameter is cut, in MindSpore's words.

    stage: from the prefix of the merged form; None in a rank's own file.
    dev_matrix: the devices of the stage as a matrix, the last dimension counting fastest.
    tensor_map: for each dimension of the tensor the dimensions of `dev_matrix` that cut it, the outermost first,
        counted *from the right*; () where it is not cut.
    split_shape, indices_offset: rows of each part where an embedding is cut by hand ("manual_split"); else empty.
    field: number of fields of an embedding that is cut within each field; 0 for all others.
    shard_size: into how many parts the optimizer's sharding cuts dimension 0 once more; 0 not at all, -1 over all
        replicas. shard_step: distance of the ranks that hold neighbouring parts.
    shape: of the whole tensor, where the file has it (JSON).
    """

    name: str
    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    split_shape: tuple[int, ...] = ()
    indices_offset: tuple[int, ...] = ()
    field: int = 0
    shard_step: int = 0
    shard_size: int = 0
    shape: tuple[int, ...] | None = None
    stage: int | None = None


@dataclass(frozen=True)
class StrategyFile:
    """One file. `merged`: its parameters carry their stage. `current_stage` is kept, and means nothing.

    tensors: by the name in the file, "<stage>-" included.
    unknown: what this version does not know, by path ("ParallelStrategyMap.parallel_layout_item[3]"): fields of
        protobuf, or a JSON value.
    """

    source: str
    form: Literal["protobuf", "json"]
    current_stage: int
    operators: tuple[OperatorStrategy, ...]
    tensors: Mapping[str, TensorStrategy]
    unknown: Mapping[str, object]

    @property
    def merged(self) -> bool:
        return any(tensor.stage is not None for tensor in self.tensors.values())

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages of its operators, rising; empty where it has none."""
        return tuple(sorted({operator.stage for operator in self.operators}))


def parse_strategy(data: bytes, source: str) -> StrategyFile:
    """Parse the content of a strategy file. `source` names it in errors.

    Raises FormatError, naming file and place, for anything that is not a whole and consistent strategy file.
    """
    if not data:
        raise FormatError(f"{source}: an empty file is no strategy file.")
    if len(data) > MAX_FILE:
        raise FormatError(f"{source}: {len(data)} bytes are too many for a strategy file ({MAX_FILE} at most).")
    text = data[:64].lstrip()[:1] in (b"{", b"[")  # the binary form begins with the tag of a number
    reader = _Json(source) if text else _Protobuf(source)
    file = reader.file(data)
    if not file.tensors:
        why = "it has no parameters, so it is cut off, or of another kind (a group file is read as a group file)"
        raise FormatError(f"{source}: {why}.")
    if any(tensor.stage is None for tensor in file.tensors.values()) and file.merged:
        plain = next(tensor.name for tensor in file.tensors.values() if tensor.stage is None)
        raise FormatError(f"{source}: some parameters carry a stage before their name, and {plain!r} does not.")
    return file


class _Reader:
    """What both forms share: checks of values."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.unknown: dict[str, object] = {}

    def tensor_map(self, name: str, entries: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """For each dimension the dimensions of dev_matrix that cut it; -1, "not cut", is left out."""
        found = tuple(tuple(axis for axis in entry if axis != -1) for entry in entries)
        if len(found) > MAX_DIMENSIONS:
            raise FormatError(f"{self.source}: parameter {name!r}: tensor_map has {len(found)} dimensions.")
        return found

    def tensor(self, name: str, strategy: TensorStrategy) -> TensorStrategy:
        """One parameter, its values checked."""

        def refuse(why: str) -> NoReturn:
            raise FormatError(f"{self.source}: parameter {name!r}: {why}.")

        devices = 1
        for size in strategy.dev_matrix:
            if size < 1:
                refuse(f"dev_matrix {strategy.dev_matrix} has a dimension below 1")
            devices *= size
            if devices > MAX_DEVICES:
                refuse(f"dev_matrix {strategy.dev_matrix} has more than {MAX_DEVICES} devices")
        used: set[int] = set()
        for cuts in strategy.tensor_map:
            for axis in cuts:
                if not 0 <= axis < len(strategy.dev_matrix):
                    why = f"no dimension {axis} in dev_matrix {strategy.dev_matrix}"
                    refuse(f"tensor_map {strategy.tensor_map}: {why}")
                if axis in used:
                    refuse(f"tensor_map {strategy.tensor_map} uses dimension {axis} of dev_matrix twice")
                used.add(axis)
        for said, values in (("split_shape", strategy.split_shape), ("indices_offset", strategy.indices_offset)):
            if any(not -MAX_SIZE <= value <= MAX_SIZE for value in values):
                refuse(f"{said} {values} is out of range")
        if any(rows < 0 for rows in strategy.split_shape):
            refuse(f"split_shape {strategy.split_shape} has a negative size")
        if strategy.indices_offset and len(strategy.indices_offset) != len(strategy.split_shape):
            refuse(f"{len(strategy.split_shape)} split shapes, {len(strategy.indices_offset)} offsets")
        if not 0 <= strategy.field <= MAX_SIZE:
            refuse(f"field {strategy.field} is out of range")
        if not -1 <= strategy.shard_size <= MAX_DEVICES or not 0 <= strategy.shard_step <= MAX_DEVICES:
            refuse(f"opt_weight_shard_size {strategy.shard_size}, step {strategy.shard_step} are out of range")
        if strategy.shape is not None:
            if len(strategy.shape) != len(strategy.tensor_map):
                refuse(f"tensor_map {strategy.tensor_map} does not fit tensor_shape {strategy.shape}")
            if any(not 0 <= size <= MAX_SIZE for size in strategy.shape):
                refuse(f"tensor_shape {strategy.shape} is out of range")
        return strategy


class _Protobuf(_Reader):
    """Reads the binary form."""

    def file(self, data: bytes) -> StrategyFile:
        message = read_message(data, self.source, "ParallelStrategyMap")
        self.keep(message, {1, 2, 3}, "ParallelStrategyMap")
        current = message.number(1, "current_stage")
        operators = []
        for index, item in enumerate(message.many(2, "parallel_strategy_item")):
            operators.append(self.operator(item, f"parallel_strategy_item[{index}]"))
        tensors: dict[str, TensorStrategy] = {}
        for index, item in enumerate(message.many(3, "parallel_layout_item")):
            name = item.text(1, "param_name", MAX_NAME)
            if name in tensors:
                item.refuse(f"parameter {name!r} is there twice")
            tensors[name] = self.layout(name, item, f"parallel_layout_item[{index}]")
        return StrategyFile(self.source, "protobuf", current, tuple(operators), tensors, self.unknown)

    def operator(self, item: Message, path: str) -> OperatorStrategy:
        self.keep(item, {1, 2}, path)
        strategies = item.one(2, "parallel_strategys")
        self.keep(strategies, {1, 2}, f"{path}.parallel_strategys")
        cuts = tuple(one.numbers(1, "dim", MAX_DIMENSIONS) for one in strategies.many(2, "parallel_strategy"))
        return OperatorStrategy(item.text(1, "node_name", 64 * MAX_NAME), strategies.number(1, "stage"), cuts)

    def layout(self, name: str, item: Message, path: str) -> TensorStrategy:
        self.keep(item, {1, 2}, path)
        layout = item.one(2, "parallel_layouts")
        self.keep(layout, {1, 2, 3, 4, 5, 6, 7}, f"{path}.parallel_layouts")
        maps = [
            tuple(signed(value) for value in one.numbers(1, "dim", MAX_DIMENSIONS))
            for one in layout.many(2, "tensor_map")
        ]
        stage, plain = _stage_of(name)
        return self.tensor(
            name,
            TensorStrategy(
                name=plain,
                stage=stage,
                dev_matrix=self.only(layout, 1, "dev_matrix", MAX_DIMENSIONS),
                tensor_map=self.tensor_map(name, [(one,) for one in maps[0]] if len(maps) == 1 else filter(None, maps)),
                split_shape=self.only(layout, 3, "param_split_shape", MAX_DEVICES),
                indices_offset=self.only(layout, 4, "indices_offset", MAX_DEVICES),
                field=signed(layout.number(5, "field")),
                shard_step=signed(layout.number(6, "opt_weight_shard_step")),
                shard_size=signed(layout.number(7, "opt_weight_shard_size")),
            ),
        )

    def only(self, layout: Message, number: int, name: str, limit: int) -> tuple[int, ...]:
        found = layout.many(number, name)
        if len(found) > 1:
            layout.refuse(f"{name} is there {len(found)} times")
        return tuple(signed(value) for value in found[0].numbers(1, "dim", limit)) if found else ()

    def keep(self, message: Message, known: set[int], path: str) -> None:
        extra = message.unknown(frozenset(known))
        if extra:
            self.unknown[path] = extra


class _Json(_Reader):
    """Reads the JSON form."""

    def file(self, data: bytes) -> StrategyFile:
        try:
            tree = json.loads(data.decode("utf-8"), object_pairs_hook=_mapping)
        except (ValueError, RecursionError) as problem:
            why = "too deeply nested" if isinstance(problem, RecursionError) else str(problem)
            raise FormatError(f"{self.source}: it is no JSON text, or cut off: {why}.") from problem
        items = self.members(tree, "the file")
        self.keep(items, {"current_stage", "parallel_strategy_item", "parallel_layout_item"}, "")
        operators = tuple(
            self.operator(name, item)
            for name, item in self.members(items.get("parallel_strategy_item", {}), "parallel_strategy_item").items()
        )
        tensors = {
            name: self.layout(name, item)
            for name, item in self.members(items.get("parallel_layout_item", {}), "parallel_layout_item").items()
        }
        current = self.whole(items, "current_stage", "the file")
        return StrategyFile(self.source, "json", current, operators, tensors, self.unknown)

    def operator(self, name: str, item: object) -> OperatorStrategy:
        where = f"parallel_strategy_item {name!r}"
        items = self.members(item, where)
        self.keep(items, {"stage", "parallel_strategy"}, f"parallel_strategy_item.{name}")
        cuts = self.need(items, "parallel_strategy", where)
        if not isinstance(cuts, list):
            self.refuse(where, "parallel_strategy is not a list")
        inputs = tuple(self.whole_numbers(cut, where, "parallel_strategy") for cut in cuts)
        return OperatorStrategy(name, self.whole(items, "stage", where), inputs)

    def layout(self, name: str, item: object) -> TensorStrategy:
        where = f"parameter {name!r}"
        if not 0 < len(name) <= MAX_NAME:
            self.refuse(where, f"a name has {len(name)} characters, not 1 to {MAX_NAME}")
        items = self.members(item, where)
        self.keep(items, _LAYOUT_KEYS, f"parallel_layout_item.{name}")
        maps = self.need(items, "tensor_map", where)
        if not isinstance(maps, list):
            self.refuse(where, "tensor_map is not a list")
        entries = [self.whole_numbers(one if isinstance(one, list) else [one], where, "tensor_map") for one in maps]
        stage, plain = _stage_of(name)
        shape = items.get("tensor_shape")
        return self.tensor(
            name,
            TensorStrategy(
                name=plain,
                stage=stage,
                dev_matrix=self.whole_numbers(self.need(items, "dev_matrix", where), where, "dev_matrix"),
                tensor_map=self.tensor_map(name, entries),
                split_shape=self.whole_numbers(items.get("param_split_shape", []), where, "param_split_shape"),
                indices_offset=self.whole_numbers(items.get("indices_offset", []), where, "indices_offset"),
                field=self.whole(items, "field", where),
                shard_step=self.whole(items, "opt_weight_shard_step", where),
                shard_size=self.whole(items, "opt_weight_shard_size", where),
                shape=None if shape is None else self.whole_numbers(shape, where, "tensor_shape"),
            ),
        )

    def keep(self, items: Mapping[str, object], known: set[str], path: str) -> None:
        for key, value in items.items():
            if key not in known:
                self.unknown[f"{path}.{key}".lstrip(".")] = value

    def members(self, value: object, where: str) -> dict[str, object]:
        if not isinstance(value, dict):
            self.refuse(where, "it is not a JSON object")
        return value

    def need(self, items: Mapping[str, object], key: str, where: str) -> object:
        if key not in items:
            self.refuse(where, f"{key} is missing")
        return items[key]

    def whole(self, items: Mapping[str, object], key: str, where: str) -> int:
        return self.whole_numbers([self.need(items, key, where)], where, key)[0]

    def whole_numbers(self, value: object, where: str, name: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.refuse(where, f"{name} is not a list")
        for number in value:
            if type(number) is not int or not -MAX_SIZE <= number <= MAX_SIZE:
                self.refuse(where, f"{name} {str(value)[:80]} holds what is not a whole number, or too large a one")
        return tuple(value)

    def refuse(self, where: str, why: str) -> NoReturn:
        raise FormatError(f"{self.source}: {where}: {why}.")


def _mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object whose keys are all different."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} is there twice")
        found[key] = value
    return found


def _stage_of(name: str) -> tuple[int | None, str]:
    """The stage before a name of the merged form, and the name without it."""
    match = _STAGE.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)
