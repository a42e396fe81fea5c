"""What a plan costs: who holds which of 10,000 tensors on thousands of ranks, who saves what, proved and encoded.

The job is a transformer in Megatron's manner: tensor, pipeline and data parallel (tp 8, pp 16, dp as large as the
ranks allow), parameters in 16 bits, and three optimizer tensors for each, divided over the data parallel ranks like
Megatron's distributed optimizer does it: all parameters of a rank in one flat buffer, cut into equal parts wherever
that falls. So hardly two optimizer tensors are held alike, which is the hard case; a division of each tensor by itself
(FSDP, DeepSpeed) is given beside it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from _report import Report, arguments, median, timed

from baftd.checkpoint.commit_plan import CommitPlan
from baftd.checkpoint.layout import Box, Holding, Layout, LayoutBuilder, RankPlace
from baftd.checkpoint.mesh import ParallelDescription
from baftd.checkpoint.ranges import flat_boxes
from baftd.checkpoint.savers import divide

WIDTH = 12288
STATES = ("exp_avg", "exp_avg_sq", "master")
LAYER: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("input_norm.weight", (WIDTH,), None),
    ("input_norm.bias", (WIDTH,), None),
    ("qkv.weight", (3 * WIDTH, WIDTH), 0),
    ("qkv.bias", (3 * WIDTH,), 0),
    ("proj.weight", (WIDTH, WIDTH), 1),
    ("proj.bias", (WIDTH,), None),
    ("mlp_norm.weight", (WIDTH,), None),
    ("mlp_norm.bias", (WIDTH,), None),
    ("fc1.weight", (4 * WIDTH, WIDTH), 0),
    ("fc1.bias", (4 * WIDTH,), 0),
    ("fc2.weight", (WIDTH, 4 * WIDTH), 1),
    ("fc2.bias", (WIDTH,), None),
)
"""Name, shape, and the dimension that tensor parallel ranks divide (None: each has all of it)."""

Part: TypeAlias = "tuple[tuple[Box, ...], tuple[int, ...]]"
"""Boxes, and the ranks that hold them."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of one stage, and where it begins in the flat buffer of each of the stage's ranks."""

    name: str
    stage: int
    shape: tuple[int, ...]
    axis: int | None
    begins: int


def main() -> None:
    """Measure, print, exit 0: a goal not met is printed as not met."""
    options = arguments(__doc__ or "").parse_args()
    quick: bool = options.quick
    report = Report("layout")
    tensors, rounds = (600, 1) if quick else (10_000, 5)
    measure(report, ParallelDescription(tp=8, pp=16, dp=8, zero=1), tensors, rounds)
    measure(report, ParallelDescription(tp=8, pp=16, dp=32, zero=1), tensors, rounds, goal_s=10, goal_mb=8)
    apart(report, ParallelDescription(tp=8, pp=16, dp=32, zero=1), tensors, rounds)
    if quick:
        report.note("--quick: sizes and rounds are too small for the figures to mean anything")
    report.print(as_json=options.json)


def measure(
    report: Report,
    description: ParallelDescription,
    tensors: int,
    rounds: int,
    *,
    goal_s: float | None = None,
    goal_mb: float | None = None,
) -> None:
    """Plan for the flat buffers, and the size and reading of the layout."""
    world = description.world
    seconds, layout = plans(lambda: build(description, tensors, apart=False), rounds)
    encoded = layout.encode()
    reading = [timed(lambda: Layout.decode(encoded)) for _ in range(rounds)]
    what = f"{len(layout.tensors)} tensors, tp 8, pp 16, dp {description.dp}, optimizer cut anywhere"
    report.add(
        f"plan_s_{world}",
        median(seconds),
        unit="s",
        goal=goal_s,
        better="lower",
        how=f"build, divide among savers, prove, encode, digest: {what}",
    )
    report.add(
        f"layout_mb_{world}",
        (len(encoded) / 1e6, 0.0),
        unit="MB",
        goal=goal_mb,
        better="lower",
        how="the encoded layout",
    )
    report.add(
        f"decode_s_{world}", median(reading), unit="s", goal=None, better="lower", how="read it and check it again"
    )
    ranges = sum(len(holding.cells) * len(numbers) for holding, numbers in layout.by_holding)
    report.note(
        f"{world} ranks: {layout.held_bytes / 1e12:.1f} TB held, {layout.unique_bytes / 1e12:.1f} TB of it different, "
        f"{ranges} ranges held in {len(layout.by_holding)} ways"
    )


def apart(report: Report, description: ParallelDescription, tensors: int, rounds: int) -> None:
    """Plan with each optimizer tensor divided by itself."""
    seconds, layout = plans(lambda: build(description, tensors, apart=True), rounds)
    world = description.world
    report.add(
        f"plan_apart_s_{world}",
        median(seconds),
        unit="s",
        goal=None,
        better="lower",
        how=f"as plan_s_{world}, each optimizer tensor divided by itself over {description.dp} ranks",
    )
    report.add(
        f"layout_apart_mb_{world}",
        (len(layout.encode()) / 1e6, 0.0),
        unit="MB",
        goal=None,
        better="lower",
        how="the encoded layout of that",
    )


def plans(make: Callable[[], Layout], rounds: int) -> tuple[list[float], Layout]:
    """Seconds of each round, all caches cold, and the last layout."""
    seconds: list[float] = []
    digests: set[bytes] = set()
    for _ in range(rounds):
        gc.collect()
        began = time.perf_counter()
        layout = make()
        plan = CommitPlan.of(divide(layout))  # proves that it covers the layout
        layout.encode()
        digests.add(plan.digest)
        seconds.append(time.perf_counter() - began)
    if len(digests) > 1:
        raise RuntimeError("equal jobs had different plans")
    return seconds, layout


def build(description: ParallelDescription, tensors: int, *, apart: bool) -> Layout:
    """The layout of a job with about so many tensors. apart: each optimizer tensor is divided by itself."""
    builder = LayoutBuilder(description.world)
    for rank in range(description.world):
        place = RankPlace(rank, description.stages(rank), description.coordinates(rank), f"node{rank // 8:04}")
        builder.place(place)
    layers = max(1, tensors // (len(LAYER) * (1 + len(STATES)) * description.pp))
    for stage in range(description.pp):
        ranks = places(description, stage)
        parts: dict[object, Holding] = {}
        divided: dict[object, Holding] = {}
        parameters, length = stage_parameters(description, stage, layers)
        for one in parameters:
            key = (one.shape, one.axis)
            if key not in parts:
                parts[key] = Holding.of_groups(one.shape, whole_parts(description, one, ranks))
            if not apart:
                state = Holding.of_groups(one.shape, flat_shards(description, one, length, ranks))
            elif key not in divided:
                state = divided[key] = Holding.of_groups(one.shape, own_shards(description, one, ranks))
            else:
                state = divided[key]
            builder.add(one.name, "BF16", one.shape, parts[key])
            for name in STATES:
                builder.add(f"optim.{name}.{one.name}", "F32", one.shape, state)
    return builder.build()


def stage_parameters(description: ParallelDescription, stage: int, layers: int) -> tuple[list[Parameter], int]:
    """Parameters of a stage, in the order in which they lie in the flat buffer of a rank, and its length."""
    found: list[Parameter] = []
    at = 0
    for layer in range(stage * layers, (stage + 1) * layers):
        for name, shape, axis in LAYER:
            found.append(Parameter(f"decoder.layers.{layer}.{name}", stage, shape, axis, at))
            at += elements(description, found[-1])
    return found, at


def elements(description: ParallelDescription, one: Parameter) -> int:
    """Elements of a parameter on a rank that has it."""
    return prod(one.shape) // (1 if one.axis is None else description.tp)


def places(description: ParallelDescription, stage: int) -> list[list[int]]:
    """Ranks of a stage by data parallel, then tensor parallel coordinate."""
    mesh = description.dense
    axes = [mesh.axis(name) for name in ("pp", "cp", "dp", "tp")]
    ranks: list[list[int]] = mesh.grid.transpose(axes)[stage, 0].tolist()
    return ranks


def local(description: ParallelDescription, one: Parameter, tp: int, start: int, stop: int) -> tuple[Box, ...]:
    """Elements `start` to `stop` of what a tensor parallel rank has of a parameter, as boxes of the whole."""
    if one.axis is None:
        return flat_boxes(one.shape, start, stop)
    width = one.shape[one.axis] // description.tp
    own = (*one.shape[: one.axis], width, *one.shape[one.axis + 1 :])
    return tuple(
        tuple(
            (low + tp * width, high + tp * width) if axis == one.axis else (low, high)
            for axis, (low, high) in enumerate(box)
        )
        for box in flat_boxes(own, start, stop)
    )


def whole_parts(description: ParallelDescription, one: Parameter, ranks: list[list[int]]) -> Iterator[Part]:
    """A parameter: divided among tensor parallel ranks, replicated over data parallel ones."""
    for tp in range(description.tp):
        yield local(description, one, tp, 0, elements(description, one)), tuple(row[tp] for row in ranks)


def flat_shards(
    description: ParallelDescription, one: Parameter, length: int, ranks: list[list[int]]
) -> Iterator[Part]:
    """An optimizer tensor in the flat buffer: its ranks are those whose part of the buffer it touches."""
    each = -(-length // description.dp)
    count = elements(description, one)
    for dp in range(one.begins // each, (one.begins + count - 1) // each + 1):
        start, stop = max(0, dp * each - one.begins), min(count, (dp + 1) * each - one.begins)
        for tp in range(description.tp):
            yield local(description, one, tp, start, stop), (ranks[dp][tp],)


def own_shards(description: ParallelDescription, one: Parameter, ranks: list[list[int]]) -> Iterator[Part]:
    """An optimizer tensor divided by itself: equal ranges of the flattened part of each tensor parallel rank."""
    count = elements(description, one)
    for dp in range(description.dp):
        start, stop = count * dp // description.dp, count * (dp + 1) // description.dp
        for tp in range(description.tp):
            yield local(description, one, tp, start, stop), (ranks[dp][tp],)


if __name__ == "__main__":
    main()
