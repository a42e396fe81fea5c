"""The samples of tests/data/mindspore: files that MindSpore wrote, and what MindSpore itself says of them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "mindspore"

Box = tuple[tuple[int, int], ...]
Slices = dict[str, dict[int, Box]]
"""The block of each rank by tensor."""

SHAPES = {"net.emb": (32, 16), "net.head.weight": (8, 16), "net.head.bias": (8,)} | {
    f"net.layers.{layer}.{name}": shape
    for layer in range(4)
    for name, shape in {
        "fc1.weight": (64, 16), "fc1.bias": (64,), "fc2.weight": (16, 64), "fc2.bias": (16,),
    }.items()
}  # fmt: skip
"""Whole shapes of the network of the first samples, whose lists of parameters end after forty."""


@dataclass
class Sample:
    """One job. `layouts`, `redundancy`: by rank and tensor, what MindSpore printed. `load`, `transform`: what its own
    functions cut, for tensors for which they can."""

    name: str
    world: int = 0
    stages: int = 1
    files: dict[int, bytes] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    merged: bytes | None = None
    groups: dict[int, bytes] = field(default_factory=dict)
    layouts: dict[int, dict[str, tuple[Any, ...]]] = field(default_factory=dict)
    redundancy: dict[int, dict[str, tuple[tuple[int, ...], ...]]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    load: Slices = field(default_factory=dict)
    transform: Slices = field(default_factory=dict)

    @property
    def json(self) -> bool:
        return self.sources[0].endswith(".json")


def ranks_in(text: str) -> list[int]:
    """Ranks written in short: "0-3", "0,2,4-5"."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


NAMES = tuple(sorted(path.parent.name for path in DATA.glob("*/slices.json")))
FIRST = ("dp1mp1pp4", "dp2mp2pp1", "dp2mp2pp1_opt_shard2", "dp2mp2pp2")


@cache
def sample(name: str) -> Sample:
    """A job of `make_samples.py`."""
    folder = DATA / name
    made = Sample(name)
    for path in sorted(folder.glob("strategy_*")):
        for rank in ranks_in(path.stem.removeprefix("strategy_")):
            made.files[rank] = path.read_bytes()
            made.sources[rank] = path.name
    made.merged = next((path.read_bytes() for path in folder.glob("merged.*")), None)
    made.world = len(made.files)
    pipeline = re.search(r"pp(\d+)", name)
    made.stages = int(pipeline[1]) if pipeline else 1
    made.groups = {int(path.stem.removeprefix("group_")): path.read_bytes() for path in folder.glob("group_*.pb")}
    for line in (folder / "layout.txt").read_text().splitlines():
        ranks, kind, tensor, value = line.split(" ", 3)
        for rank in ranks_in(ranks):
            target: dict[int, dict[str, Any]] = made.layouts if kind == "L" else made.redundancy
            target.setdefault(rank, {})[tensor] = ast.literal_eval(value)
    for tensor, one in json.loads((folder / "slices.json").read_text()).items():
        made.shapes[tensor] = tuple(one["shape"])
        made.load[tensor] = _boxes(one["load"])
        made.transform[tensor] = made.load[tensor] if one["transform"] == "same" else _boxes(one["transform"])
    if "manual" in name:  # what MindSpore says of its shape is wrong (README)
        made.shapes |= {f"{prefix}net.embedding": (32, 16) for prefix in ("", "adam_m.", "adam_v.")}
    return made


@cache
def first_sample(name: str) -> Sample:
    """One of the four jobs of the first samples. `redundancy` of the one with optimizer sharding is left out: there it
    was printed with a wrong size of the group."""
    folder = DATA / "first" / name
    made = Sample(name)
    for path in sorted(folder.glob("strategy_*")):
        rank = int(path.stem.rpartition("rank")[2])
        made.files[rank] = path.read_bytes()
        made.sources[rank] = path.name
        made.groups[rank] = next(folder.glob(f"group_info_*rank{rank}.pb")).read_bytes()
        for line in (folder / f"layout_rank{rank}.txt").read_text().splitlines():
            kind, _, rest = line.strip().partition(" ")
            if kind in ("L", "R"):
                tensor, _, value = rest.partition(" ")
                target: dict[int, dict[str, Any]] = made.layouts if kind == "L" else made.redundancy
                target.setdefault(rank, {})[tensor] = ast.literal_eval(value)
    if "opt_shard" in name:
        made.redundancy = {}
    made.world = len(made.files)
    made.stages = int(name.partition("pp")[2][0])
    prefixes = ("", "adam_m.", "adam_v.")
    made.shapes = {f"{prefix}{tensor}": shape for tensor, shape in SHAPES.items() for prefix in prefixes}
    return made


def _boxes(said: dict[str, str]) -> dict[int, Box]:
    found: dict[int, Box] = {}
    for text, ranks in said.items():
        box = tuple((int(a), int(b)) for a, _, b in (part.partition(":") for part in text.split(",")))
        found |= dict.fromkeys(ranks_in(ranks), box)
    return found
