"""A layout declared by hand, in TOML or JSON: who holds which part of which tensor, for a framework that says nothing.

    world = 16
    order = ["pp", "dp", "tp"]              # mesh axes, the slowest first: rank = (pp * 4 + dp) * 2 + tp
    axes = { pp = 2, dp = 4, tp = 2 }
    stages = "pp"                           # axis that is the stage [one called pp]; or { "0-7" = [0], "8-15" = [1] }
    ranks_per_node = 8                      # [not known]

    [optimizers.adam]                       # states of each tensor that names it: <tensor>.exp_avg ...
    states = { master = "F32", exp_avg = "F32", exp_avg_sq = "F32" }
    divided = ["dp"]                        # ZeRO: over these axes [none]
    by = "flat"                             # equal flat ranges of a rank's part; "rows": of dimension 0 [flat]

    [[tensors]]
    name = "layers.{layer}.experts.{expert}.weight"
    each = { layer = 24, expert = 8 }       # one tensor for each layer 0..23 and expert 0..7
    along = { layer = "pp", expert = "dp" } # in equal runs over the coordinates of an axis
    shape = [4096, 1024]
    dtype = "BF16"
    split = { 0 = "tp" }                    # dimension 0 over tp, whole on every other axis
    optimizer = "adam"

    [[tensors]]
    name = "embedding"
    shape = [50257, 1024]
    dtype = "BF16"
    split = { 0 = { axes = "tp", uneven = true } }   # ceil(size / ranks) each, the rest less; or sizes = [30000, 20257]
    only = { pp = [0, 1] }                  # only at these coordinates (tied: first and last stage)

    [[tensors]]
    name = "odd"
    shape = [10, 4]
    dtype = "F32"
    ranks = { 0 = "0:5, :", "1-3" = ["5:7, :", "7:10, :"] }   # ranges by rank, in the order they are stored
    kind = "volatile"                       # [stable]

    [[tensors]]
    name = "scratch"
    shape = [128]
    dtype = "I64"
    private = true                          # every rank has its own, no replica of another's [false]
    itemsize = 8                            # of types that are not safetensors' own

This module reads and checks the form; `declared_layout.py` makes the layout. Unknown keys are errors.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from baftd.checkpoint.identity import MAX_WORLD
from baftd.errors import UsageError
from baftd.formats.strict_table import StrictTable, named, nearest
from baftd.limits import LARGEST

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Declaration", "OptimizerRule", "Split", "TensorRule", "parse_declaration"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_SIZE = LARGEST
_MAX_EACH = 1_000_000


@dataclass(frozen=True)
class Split:
    """How one dimension is cut. axes: the first one the slowest. sizes: of each part; empty: equal parts, or with
    `uneven` ceil(size / parts) each and less at the end."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    uneven: bool = False


@dataclass(frozen=True)
class OptimizerRule:
    """States (suffix, dtype) beside each tensor, and over which axes they are divided."""

    states: tuple[tuple[str, str], ...]
    divided: tuple[str, ...] = ()
    by: Literal["flat", "rows"] = "flat"


@dataclass(frozen=True)
class TensorRule:
    """One entry of `tensors`. where: how errors name it. ranks: None, or for each rank its ranges as text. itemsize:
    bytes an element; None for a type of safetensors."""

    where: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["stable", "volatile"] = "stable"
    each: Mapping[str, int] = field(default_factory=dict)
    along: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[int, Split] = field(default_factory=dict)
    only: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranks: Mapping[int, tuple[str, ...]] | None = None
    private: bool = False
    optimizer: str = ""
    itemsize: int | None = None


@dataclass(frozen=True)
class Declaration:
    """A whole declaration. axes: (name, size), the slowest first."""

    source: str
    world: int
    axes: tuple[tuple[str, int], ...]
    stages: str | Mapping[int, tuple[int, ...]]
    ranks_per_node: int
    optimizers: Mapping[str, OptimizerRule]
    tensors: tuple[TensorRule, ...]


def parse_declaration(text: str, source: str, form: Literal["toml", "json"]) -> Declaration:
    """Read a declaration. source: the file's name, for errors. Raises UsageError naming file and place."""
    top = StrictTable(_parsed(text, source, form), source)
    world = top.number("world", least=1, most=MAX_WORLD)
    axes = _axes(top, world)
    stages = _stages(top, world, dict(axes))
    per_node = top.number("ranks_per_node", default=0, least=1, most=world)
    rules = top.table("optimizers")
    optimizers = {name: _optimizer(rules.table(name), dict(axes)) for name in rules}
    listed = top.tables("tensors", lambda item: item.get("name"))
    tensors = tuple(_tensor(table, world, dict(axes), optimizers) for table in listed)
    top.done()
    if not tensors:
        top.fail("there is no tensor in `tensors`")
    return Declaration(source, world, axes, stages, per_node, optimizers, tensors)


def _parsed(text: str, source: str, form: Literal["toml", "json"]) -> dict[str, Any]:
    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UsageError(f"{source}: key {key!r} stands there twice.")
            found[key] = value
        return found

    try:
        value = tomllib.loads(text) if form == "toml" else json.loads(text, object_pairs_hook=no_twins)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{source} is not {form.upper()}: {error}.") from None
    except RecursionError:
        raise UsageError(f"{source} is nested too deep.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{source} is not a declaration: its top is no table.")
    return value


# ---------------------------------------------------------------- parts


def _axes(top: StrictTable, world: int) -> tuple[tuple[str, int], ...]:
    table = top.table("axes")
    sizes = {name: table.number(name, least=1, most=MAX_WORLD) for name in table}
    order = top.names("order", default=tuple(sizes) if len(sizes) == 1 else () if not sizes else None)
    for name in sizes:
        if _NAME.fullmatch(name) is None:
            table.fail(f"{name!r} is no name of an axis: letters, digits and _")
    if sorted(order) != sorted(sizes):
        top.fail(f"`order` names {named(order)}, but `axes` has {named(sizes)}: each axis once, the slowest first")
    product = 1
    for size in sizes.values():
        product *= size
    if sizes and product != world:
        words = " x ".join(f"{name} {sizes[name]}" for name in order)
        top.fail(f"the axes {words} make {product} ranks, but `world` is {world}")
    return tuple((name, sizes[name]) for name in order)


def _stages(top: StrictTable, world: int, axes: Mapping[str, int]) -> str | Mapping[int, tuple[int, ...]]:
    value = top.value("stages", str, dict) if "stages" in top else "pp" if "pp" in axes else ""
    if isinstance(value, str):
        if value and value not in axes:
            top.fail(f"`stages` is {value!r}, which is no axis of `axes`{nearest(value, axes)}")
        return value
    table = StrictTable(value, f"{top.where}, stages")
    found: dict[int, tuple[int, ...]] = {}
    for key in table:
        stages = table.numbers(key, most=MAX_WORLD)
        for rank in table.ranks(key, world):
            if rank in found:
                table.fail(f"rank {rank} stands there twice")
            found[rank] = stages
    return found


def _optimizer(table: StrictTable, axes: Mapping[str, int]) -> OptimizerRule:
    states = table.table("states", required=True)
    listed = tuple((name, states.text(name)) for name in states)
    divided = table.names("divided", default=())
    table.known_axes("divided", divided, axes)
    by = table.choice("by", "flat", ("flat", "rows"))
    table.done()
    return OptimizerRule(listed, divided, "rows" if by == "rows" else "flat")


def _tensor(
    table: StrictTable, world: int, axes: Mapping[str, int], optimizers: Mapping[str, OptimizerRule]
) -> TensorRule:
    name = table.text("name")
    shape = table.numbers("shape", most=_MAX_SIZE)
    dtype = table.text("dtype")
    kind = table.choice("kind", "stable", ("stable", "volatile"))
    each = table.table("each")
    counts = {key: each.number(key, least=1, most=_MAX_EACH) for key in each}
    wanted = set(re.findall(r"\{([^{}]*)\}", name))
    for key in sorted(wanted ^ set(counts)):
        table.fail(
            f"the name has {{{key}}}, but `each` does not say how many there are{nearest(key, counts)}"
            if key in wanted
            else f"`each` counts {key!r}, but the name has no {{{key}}}"
        )
    along = table.table("along")
    runs = {key: along.text(key) for key in along}
    for key, axis in runs.items():
        if key not in counts:
            along.fail(f"{key!r} is not counted in `each`{nearest(key, counts)}")
        along.known_axes(key, (axis,), axes)
        if counts[key] % axes[axis]:
            along.fail(f"{counts[key]} of {key!r} do not divide into equal runs over {axis} = {axes[axis]}")
    split = dict(_splits(table, shape, axes))
    only = table.table("only")
    at = {axis: only.numbers(axis, most=MAX_WORLD) for axis in only}
    for axis, places in at.items():
        only.known_axes(axis, (axis,), axes)
        for place in places:
            if place >= axes[axis]:
                only.fail(f"{axis} = {place} is outside of 0 to {axes[axis] - 1}")
    explicit = _explicit(table, world)
    private = table.flag("private")
    optimizer = table.text("optimizer", default="")
    if optimizer and optimizer not in optimizers:
        table.fail(f"there is no optimizer {optimizer!r} in `optimizers`{nearest(optimizer, optimizers)}")
    itemsize = table.number("itemsize", default=0, least=1, most=1 << 20) or None
    table.done()
    beside = [key for key, there in (("split", split), ("along", runs), ("only", at)) if there]
    if explicit is not None and beside:
        table.fail(f"`ranks` says everything: `{beside[0]}` beside it is unclear")
    if private and (explicit is not None or split):
        table.fail("a private tensor is whole on its rank: `ranks` and `split` beside it are unclear")
    for axis in sorted(axes):
        cutting = [f"`split` of dimension {d}" for d, cut in split.items() for a in cut.axes if a == axis]
        cutting += [f"`along` of {key!r}" for key, a in runs.items() if a == axis]
        cutting += ["`only`"] if axis in at else []
        if len(cutting) > 1:
            table.fail(f"axis {axis} stands in {cutting[0]} and in {cutting[1]}")
    return TensorRule(
        where=table.where,
        name=name,
        shape=shape,
        dtype=dtype,
        kind="stable" if kind == "stable" else "volatile",
        each=counts,
        along=runs,
        split=split,
        only=at,
        ranks=explicit,
        private=private,
        optimizer=optimizer,
        itemsize=itemsize,
    )


def _splits(table: StrictTable, shape: tuple[int, ...], axes: Mapping[str, int]) -> Iterator[tuple[int, Split]]:
    splits = table.table("split")
    for key in splits:
        if not re.fullmatch(r"[0-9]{1,3}", key) or int(key) >= len(shape):
            splits.fail(f"{key!r} is no dimension of shape {list(shape)}")
        value = splits.value(key, str, list, dict)
        if isinstance(value, dict):
            inner = StrictTable(value, f"{splits.where}, dimension {key}")
            cut = Split(
                inner.names("axes"),
                inner.numbers("sizes", default=(), most=_MAX_SIZE),
                inner.flag("uneven"),
            )
            inner.done()
        else:
            cut = Split(splits.names(key))
        splits.known_axes(key, cut.axes, axes)
        _check_split(splits, int(key), shape[int(key)], cut, axes)
        yield int(key), cut


def _check_split(table: StrictTable, dimension: int, size: int, cut: Split, axes: Mapping[str, int]) -> None:
    parts = 1
    for axis in cut.axes:
        parts *= axes[axis]
    words = " x ".join(f"{axis} {axes[axis]}" for axis in cut.axes)
    if cut.sizes and cut.uneven:
        table.fail(f"dimension {dimension} has both `sizes` and `uneven`")
    if cut.sizes and (len(cut.sizes) != parts or sum(cut.sizes) != size):
        table.fail(
            f"dimension {dimension}: the {len(cut.sizes)} sizes sum to {sum(cut.sizes)}, but {size} elements go to "
            f"{parts} parts ({words})"
        )
    if not cut.sizes and not cut.uneven and size % parts:
        table.fail(
            f"dimension {dimension}: {size} elements do not divide into {parts} equal parts ({words}); say "
            "`uneven = true` or the `sizes`"
        )


def _explicit(table: StrictTable, world: int) -> Mapping[int, tuple[str, ...]] | None:
    if "ranks" not in table:
        return None
    given = table.table("ranks", required=True)
    found: dict[int, tuple[str, ...]] = {}
    for key in given:
        ranges = given.names(key)
        for rank in given.ranks(key, world):
            if rank in found:
                given.fail(f"rank {rank} stands there twice")
            found[rank] = ranges
    return found
