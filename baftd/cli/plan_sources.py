"""Where `baftd plan` gets its layout from: a running job, a file, MindSpore's strategy files, or numbers of a model."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baftd.cli.common import ask, connect, job_name, settings_of
from baftd.errors import BaftError, LayoutError, UsageError
from baftd.limits import LARGEST

if TYPE_CHECKING:
    from baftd.checkpoint.layout import Layout
    from baftd.checkpoint.mesh import ParallelDescription
    from baftd.formats.transformer import TransformerShape
    from baftd.settings import Every
    from baftd.wire.messages import LayoutReply

__all__ = ["JobPacing", "Source", "add_source_arguments", "count", "layout_file", "read_source", "whole_numbers"]

_MODEL = {
    "layers": "layers",
    "hidden": "width of the model",
    "heads": "attention heads",
    "kv_heads": "key-value heads [as many as heads]",
    "ffn": "width of the feed-forward layer [4 x hidden]",
    "vocab": "size of the vocabulary",
    "seq": "positions, where they are learned",
    "experts": "experts of each layer [none]",
}
_FIELDS = {"seq": "sequence"}
"""Flags whose field of `TransformerShape` has another name."""
_PARALLEL = {
    "tp": "tensor parallel",
    "pp": "pipeline stages [--mindspore: as the files say]",
    "dp": "data parallel",
    "cp": "context parallel",
    "ep": "expert parallel, within dp x cp",
    "etp": "tensor parallel of expert layers [tp]",
    "vpp": "model chunks of each pipeline rank (interleaved schedule)",
    "zero": "0: optimizer states whole on every data-parallel rank, 1: divided, 3: parameters too [0]",
}
_OTHERS = ("order", "stage_layers", "dtype", "optimizer", "style")
_STYLES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"gated": True, "bias": False, "norm_bias": False, "learned_positions": False, "tied": False},
}
_OPTIMIZERS = {"adam": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum",), "none": ()}
_MOST_BYTES = 256 << 20
_MOST_COUNT = 10**9 - 1
_RANK = re.compile(r"rank[_-]?([0-9]{1,6})(?![0-9])")


@dataclass(frozen=True)
class JobPacing:
    """How often a job is to have snapshots: by the settings of a running job's daemon, or by this command's."""

    budget: float
    """Part of the step time that they may cost."""
    interval: Every | None = None
    """None: as few steps as that allows."""
    held: Mapping[int, float] = field(default_factory=dict)
    """Seconds for which a snapshot holds each rank, where they were measured."""


@dataclass(frozen=True)
class Source:
    """A layout, and what is known beside it.

    words: what it is, for people. node_of_rank: None where nodes are not known. durable: of a running job. slots: of
    each rank, where the settings of a running job name a number; None: as many as tiers need. small_bytes: room for
    small state, by rank; empty: the least there is. slot_bytes: slots of this job, on this node now. pacing: of a
    running job.
    """

    layout: Layout
    words: str
    node_of_rank: tuple[str, ...] | None = None
    slots: int | None = None
    durable: bool | None = None
    small_bytes: Mapping[int, int] = field(default_factory=dict)
    slot_bytes: int = 0
    pacing: JobPacing | None = None


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is planned for."""
    group = parser.add_argument_group("what is planned for (one of these)")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--job", type=job_name, help="a job that runs on this node")
    one.add_argument("--layout", type=Path, metavar="FILE", help="a declaration (.toml, .json), or a saved layout")
    one.add_argument("--mindspore", type=Path, metavar="DIR", help="directory of MindSpore's strategy and group files")
    one.add_argument("--preset", metavar="NAME", help="a published model, such as gpt-175b; `--preset list` names them")
    group.add_argument(
        "--shapes", type=Path, metavar="FILE", help="with --mindspore: JSON of whole shapes by parameter"
    )
    model = parser.add_argument_group("a model by its numbers (or changes of the preset)")
    for name, text in _MODEL.items():
        model.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N", help=text)
    model.add_argument("--style", choices=list(_STYLES), help="gpt: biases, learned positions, tied embedding [gpt]")
    model.add_argument("--dtype", metavar="TYPE", help="of parameters: BF16, F16, F32 ... [BF16]")
    model.add_argument("--optimizer", choices=list(_OPTIMIZERS), help="its states are F32, with a master weight [adam]")
    parallel = parser.add_argument_group("how it is cut (Megatron's words)")
    for name, text in _PARALLEL.items():
        parallel.add_argument(f"--{name}", type=count, metavar="N", help=text)
    parallel.add_argument("--order", metavar="WORDS", help="axes, the fastest first [tp-cp-ep-dp-pp]")
    parallel.add_argument(
        "--world", type=count, metavar="N", help="ranks (of --mindspore too); dp follows where it is not given"
    )
    parallel.add_argument("--stage-layers", metavar="LIST", help="layers of each stage, such as 7,8x14,7 [equal]")


def count(text: str) -> int:
    """Argument type: a whole number, 0 or greater."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or greater")
    if len(text.lstrip("0")) > len(str(_MOST_COUNT)):
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_MOST_COUNT:,}, the most that is taken")
    return int(text)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers from "7,8x14,7": a number, or NUMBERxTIMES. Raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:x([0-9]{1,4}))?\s*", part)
        if match is None:
            raise UsageError(f"--stage-layers {text}: {part!r} is no number and no NUMBERxTIMES, such as 8x14.")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def read_source(arguments: argparse.Namespace) -> Source:
    """The layout that the arguments ask for. Raises UsageError for flags that contradict each other."""
    model = [name for name in _MODEL if getattr(arguments, name) is not None]
    cut = [name for name in (*_PARALLEL, *_OTHERS, "world") if getattr(arguments, name) is not None]
    given = [f"--{name}" for name in ("job", "layout", "mindspore") if getattr(arguments, name) is not None]
    if arguments.shapes is not None and given != ["--mindspore"]:
        raise UsageError("--shapes is only read with --mindspore.")
    if given:
        allowed = {"pp", "world", "dtype"} if given == ["--mindspore"] else set()
        wrong = [name for name in (*model, *cut) if name not in allowed]
        if wrong:
            flag = f"--{wrong[0].replace('_', '-')}"
            raise UsageError(f"{flag} describes a model by numbers, but {given[0]} says all of that itself.")
        if arguments.job is not None:
            return _from_job(arguments)
        return layout_file(arguments.layout) if arguments.layout is not None else _from_mindspore(arguments)
    if arguments.preset is None and not model:
        raise UsageError(
            "nothing to plan for.", hint="Give --job, --layout, --mindspore, --preset, or --layers and its like."
        )
    return _from_numbers(arguments)


# ---------------------------------------------------------------- a running job


def _from_job(arguments: argparse.Namespace) -> Source:
    from baftd.checkpoint.layout import Layout
    from baftd.wire.messages import LayoutReply, LayoutRequest

    with connect(settings_of(arguments)) as connection:
        reply = ask(connection, LayoutRequest(job=arguments.job), LayoutReply)
    if reply.problem or not reply.layout:
        raise BaftError(
            f"job {arguments.job} has no whole layout: {reply.problem or 'nothing is declared yet'}",
            hint=_who_is_missing(reply),
        )
    nodes = {rank.rank: rank.node for rank in reply.ranks}
    layout = Layout.decode(reply.layout)
    as_needed = 4 if reply.durable else 3  # what "auto" makes of it; with a peer tier it is one more
    return Source(
        layout=layout,
        words=f"job {reply.job}, epoch {reply.epoch}, {layout.world} rank{'s' * (layout.world != 1)}",
        node_of_rank=tuple(nodes[rank] for rank in range(layout.world)) if len(nodes) == layout.world else None,
        slots=None if reply.slots in (0, as_needed) else reply.slots,
        durable=reply.durable,
        small_bytes={rank.rank: rank.small_room for rank in reply.ranks},
        slot_bytes=sum(rank.image_bytes * rank.slots for rank in reply.ranks),
        pacing=_pacing(reply),
    )


def _pacing(reply: LayoutReply) -> JobPacing | None:
    from baftd.settings import Every

    if reply.overhead_budget is None:
        return None  # an older daemon says nothing of it
    fixed = reply.interval_steps or reply.interval_seconds
    return JobPacing(
        reply.overhead_budget,
        Every(reply.interval_steps, reply.interval_seconds) if fixed else None,
        {rank.rank: rank.held_seconds for rank in reply.ranks},
    )


def _who_is_missing(reply: LayoutReply) -> str:
    if not reply.missing:
        return ""
    ranks = ", ".join(str(rank) for rank in reply.missing[:8])
    return f"Ranks that have declared nothing here: {ranks}{' ...' if len(reply.missing) > 8 else ''}."


# ---------------------------------------------------------------- files


def layout_file(path: Path) -> Source:
    """A declaration, or a layout that was saved. Raises UsageError, LayoutError and FormatError naming the file."""
    from baftd.checkpoint.layout import Layout
    from baftd.errors import FormatError
    from baftd.formats.declared_layout import layout_from_declaration

    data = _read(path)
    form = path.suffix.lower().removeprefix(".")
    if form in ("toml", "json"):
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not UTF-8 text (byte {error.start}).") from None
        layout = layout_from_declaration(text, str(path), "toml" if form == "toml" else "json")
        kind = "declaration"
    else:
        try:
            layout = Layout.decode(data)
        except FormatError as error:
            raise FormatError(f"{path}: {error.message}", hint="Declarations end with .toml or .json.") from None
        kind = "layout"
    return Source(layout, f"{kind} {path.name}, {layout.world} ranks", nodes_of(layout))


def nodes_of(layout: Layout) -> tuple[str, ...] | None:
    """The node of each rank, where the layout says it of all."""
    places = [layout.place(rank) for rank in range(layout.world)]
    names = tuple(place.node for place in places if place is not None and place.node)
    return names if len(names) == layout.world else None


def _from_mindspore(arguments: argparse.Namespace) -> Source:
    from baftd.formats.mindspore_layout import layout_from_merged_strategy, layout_from_strategy_files

    folder: Path = arguments.mindspore
    shapes_at = arguments.shapes and arguments.shapes.resolve()
    try:
        found = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise UsageError(f"--mindspore {folder} cannot be read: {error.strerror}.") from error
    groups = _by_rank([path for path in found if path.suffix == ".pb"], folder)
    strategies = [path for path in found if path.suffix in (".ckpt", ".json") and path.resolve() != shapes_at]
    files = _by_rank(strategies, folder)
    merged = strategies[0] if not files and len(strategies) == 1 else None
    nameless = [path.name for path in strategies if path not in files.values()]
    left_out = f" Left out, without rank<N> in the name: {', '.join(nameless[:4])}." if nameless else ""
    if not files and merged is None:
        raise UsageError(
            f"{folder} has no strategy file.",
            hint=f"They are called *rank<N>*.ckpt (or .json), one for each rank; or give a merged one alone.{left_out}",
        )
    for flag in ("world", "pp"):
        if getattr(arguments, flag) == 0:
            raise UsageError(f"--{flag} 0: a job has at least one rank and one stage.")
    ranks = max((*files, *groups), default=-1) + 1
    if not (arguments.world or ranks):
        raise UsageError(f"{merged} is merged: without group files (*rank<N>*.pb) give --world.")
    read = {path: _read(path) for path in ([merged] if merged is not None else files.values())}
    stages, devices = _stages(read)
    stages = arguments.pp or (stages if arguments.world else max(stages, -(-ranks // devices)))
    world = arguments.world or max(ranks, stages * devices)
    missing = next((rank for rank in range(world) if rank not in files), None)
    if merged is None and missing is not None and world == stages * devices:
        raise LayoutError(
            f"{folder}: rank {missing} of {world} has no strategy file ({stages} stage{'s' * (stages != 1)} of "
            f"{devices} ranks by dev_matrix).",
            hint=f"Every rank writes one, *rank<N>*.ckpt (or .json); or give the merged one alone.{left_out}",
            rank=missing,
        )
    shapes, dtypes = _shapes(arguments.shapes)
    options: dict[str, Any] = {
        "groups": {rank: _read(path) for rank, path in groups.items()} or None,
        "group_sources": {rank: str(path) for rank, path in groups.items()},
        "stages": stages,
        "shapes": shapes,
        "dtypes": dtypes,
        "dtype": arguments.dtype or "F32",
    }
    if merged is not None:
        layout = layout_from_merged_strategy(read[merged], str(merged), world=world, **options)
    else:
        layout = layout_from_strategy_files(
            {rank: read[path] for rank, path in files.items()},
            world=world,
            sources={rank: str(path) for rank, path in files.items()},
            **options,
        )
    words = f"MindSpore strategy in {folder.name}, {layout.world} ranks, {stages} stage{'s' * (stages != 1)}"
    return Source(layout, words)


def _stages(files: Mapping[Path, bytes]) -> tuple[int, int]:
    """Pipeline stages of a job, as its strategy files tell them (1 where they say nothing), and the ranks of each."""
    from baftd.formats.mindspore_strategy import parse_strategy

    # The ranks of a stage usually write equal files.
    different = {data: path for path, data in files.items()}
    parsed = [parse_strategy(data, str(path)) for data, path in different.items()]
    devices = {file.source: prod(next(iter(file.tensors.values())).dev_matrix) for file in parsed}
    # As most files say: one of another job is told by comparing it with the others.
    usual, _ = Counter(devices[str(different[data])] for data in files.values()).most_common(1)[0]
    return max((stage for file in parsed for stage in file.stages), default=0) + 1, usual


def _by_rank(paths: Sequence[Path], folder: Path) -> dict[int, Path]:
    """Files by the rank in their names; others are left out."""
    found: dict[int, Path] = {}
    for path in paths:
        match = _RANK.search(path.name)
        if match is None:
            continue
        rank = int(match[1])
        if rank in found:
            raise UsageError(
                f"{folder} has two files of rank {rank}: {found[rank].name} and {path.name}.",
                hint="Put the strategy and group files of one job, and nothing else, into a folder.",
            )
        found[rank] = path
    return found


def _shapes(path: Path | None) -> tuple[dict[str, list[int]] | None, dict[str, str] | None]:
    """Whole shapes, and types, from `{"name": [4, 8], "other": {"shape": [8], "dtype": "F32"}}`."""
    if path is None:
        return None, None
    from baftd.formats.strict_table import StrictTable

    try:
        given = json.loads(_read(path).decode())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}.") from None
    if not isinstance(given, dict):
        raise UsageError(f'{path} is not a table of shapes: {{"name": [4, 8]}}.')
    table = StrictTable(given, str(path))
    shapes, dtypes = {}, {}
    for name in table:
        if isinstance(given[name], dict):
            inner = table.table(name)
            shapes[name] = list(inner.numbers("shape", most=LARGEST))
            dtype = inner.text("dtype", "")
            if dtype:
                dtypes[name] = dtype
            inner.done()
        else:
            shapes[name] = list(table.numbers(name, most=LARGEST))
    return shapes, dtypes


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: no layout is.")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


# ---------------------------------------------------------------- numbers


def _from_numbers(arguments: argparse.Namespace) -> Source:
    from baftd.formats.megatron import megatron_layout

    shape, name = _shape_of(arguments)
    parallel = _parallel_of(arguments)
    dtype = _dtype(arguments.dtype or "BF16")
    states = [(state, "F32") for state in _OPTIMIZERS[arguments.optimizer or "adam"]]
    if states and dtype != "F32":
        states.insert(0, ("master", "F32"))
    layers = () if arguments.stage_layers is None else whole_numbers(arguments.stage_layers)
    layout = megatron_layout(shape, parallel, dtype=dtype, states=states, stage_layers=layers)
    return Source(layout, f"{name} ({_parameters(shape.elements)} parameters), {said_parallel(parallel)}")


def _dtype(text: str) -> str:
    """The type of safetensors that this names. Raises UsageError."""
    from baftd.checkpoint.shard import NATIVE_DTYPES
    from baftd.formats.strict_table import nearest

    name = text.upper().replace("BFLOAT", "BF").replace("FLOAT", "F").replace("FP", "F")
    if name not in NATIVE_DTYPES:
        raise UsageError(f"--dtype {text}: there is no such type{nearest(name, NATIVE_DTYPES)}.")
    return name


def _shape_of(arguments: argparse.Namespace) -> tuple[TransformerShape, str]:
    from baftd.formats.presets import preset
    from baftd.formats.transformer import TransformerShape

    numbers = {
        _FIELDS.get(name, name): getattr(arguments, name) for name in _MODEL if getattr(arguments, name) is not None
    }
    style = _STYLES[arguments.style] if arguments.style else {}
    if arguments.preset is not None:
        if arguments.style:
            raise UsageError(
                f"--style says how a model by numbers is built, but preset {arguments.preset} says so itself."
            )
        changed = " with other " + ", ".join(numbers) if numbers else ""
        found = preset(arguments.preset)
        if "sequence" in numbers and not found.learned_positions:
            raise UsageError(f"--seq counts positions that are learned, but {arguments.preset} learns none.")
        return replace(found, **numbers), arguments.preset + changed
    missing = [name for name in ("layers", "hidden", "heads", "vocab") if name not in numbers]
    if missing:
        raise UsageError(f"a model by numbers needs --{', --'.join(missing)} too.", hint="Or take a --preset.")
    if not style.get("learned_positions", True):
        if "sequence" in numbers:
            raise UsageError(f"--seq counts positions that are learned, but --style {arguments.style} learns none.")
        numbers["sequence"] = 1
    if "sequence" not in numbers:
        raise UsageError("a model by numbers needs --seq too.", hint="Or --style llama, which learns no positions.")
    return TransformerShape(**numbers, **style), f"{arguments.style or 'gpt'} model"


def _parallel_of(arguments: argparse.Namespace) -> ParallelDescription:
    from baftd.checkpoint.mesh import ParallelDescription

    words = [
        f"{name}={getattr(arguments, name)}" for name in (*_PARALLEL, "order") if getattr(arguments, name) is not None
    ]
    return ParallelDescription.parse(",".join(words), arguments.world)


def said_parallel(parallel: ParallelDescription) -> str:
    """Degrees that are not 1, and the number of ranks."""
    words = [f"{name} {getattr(parallel, name)}" for name in ("tp", "cp", "dp", "pp") if getattr(parallel, name) > 1]
    words = [" x ".join(words)] if words else []
    words += [f"{name} {getattr(parallel, name)}" for name in ("ep", "vpp") if getattr(parallel, name) > 1]
    words += [f"etp {parallel.expert_tp}"] if parallel.expert_tp != parallel.tp else []
    words += [f"zero {parallel.zero}"] if parallel.zero else []
    words.append(f"{parallel.world} rank{'s' * (parallel.world != 1)}")
    return ", ".join(words)


def _parameters(elements: int) -> str:
    for unit, scale in (("billion", 1e9), ("million", 1e6)):
        if elements >= scale:
            return f"{elements / scale:.1f} {unit}"
    return str(elements)
