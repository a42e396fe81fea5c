"""Show what checkpoints of a job cost and survive: bytes of each rank, who saves what, redundancy, memory of each node.

Of a running job, a layout file, MindSpore's strategy files, or a model given by numbers:

    baftd plan --job gpt
    baftd plan --layout job.toml --ranks-per-node 8
    baftd plan --preset gpt-175b --tp 8 --pp 16 --dp 16 --window-bytes 2GiB --node-memory 512GiB
    baftd plan --preset gpt-175b --tp 8 --pp 16 --dp 16 --micro 64 --forward-ms 40      how long bubbles are
    baftd plan --job gpt --step-ms 400                                            without a pipeline: how often

Exit code 5 when the slots do not fit into a node's memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baftd.cli.common import add_json, add_settings, print_json, settings_of
from baftd.cli.output_file import write_output
from baftd.cli.plan_bubbles import add_bubble_arguments, bubbles_document, print_bubbles, read_bubbles
from baftd.cli.plan_sources import JobPacing, Source, add_source_arguments, count, layout_file, read_source
from baftd.cli.render import complain, print_table, say
from baftd.errors import NoRoom, UsageError

if TYPE_CHECKING:
    from baftd.checkpoint.layout import Layout

_MODES = ("auto", "replicas", "peer", "parity", "none")
_NODE_RANKS = 8
"""Ranks of a node where nothing else is known."""
_MOST_LOST = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd plan`."""
    add_source_arguments(parser)
    room = parser.add_argument_group("what there is")
    room.add_argument("--ranks-per-node", type=count, metavar="N", help=f"[what is known, else {_NODE_RANKS}]")
    room.add_argument("--window-bytes", type=size, metavar="SIZE", help="a rank can copy in its windows in a step")
    room.add_argument(
        "--network-bytes", type=size, metavar="SIZE", help="a node can send in a step; 0: nothing but small states"
    )
    room.add_argument(
        "--node-memory", type=size, metavar="SIZE", help="shared memory of a node [--job: of this node; else any]"
    )
    room.add_argument(
        "--durable", action=argparse.BooleanOptionalAction, help="a durable tier is on [--job: as it is; else off]"
    )
    add_bubble_arguments(parser)
    wanted = parser.add_argument_group("what is wanted")
    wanted.add_argument("--redundancy", choices=_MODES, default="auto", help="[auto: cheapest that survives a node]")
    wanted.add_argument("--copies", type=count, metavar="K", help="of peer: copies on other nodes [1]")
    wanted.add_argument("--group", type=count, metavar="G", help="of parity: nodes of a group [4]")
    wanted.add_argument("--lose", type=count, default=2, metavar="K", help="report losses of up to so many nodes [2]")
    show = parser.add_argument_group("output")
    show.add_argument("--onto", type=Path, metavar="FILE", help="what a restore onto that layout or declaration reads")
    show.add_argument("--show-ranks", type=span, metavar="A:B", help="a line for each rank from A up to, without, B")
    show.add_argument("--rank", type=count, metavar="R", help="list what this rank saves")
    show.add_argument("--save-layout", metavar="FILE", help="write the layout, to be read by --layout")
    add_json(show)
    add_settings(parser, ["run_dir", "shm_dir", "interval", "overhead_budget"])


def size(text: str) -> int:
    """Argument type: a size with its unit, as bytes."""
    from baftd.settings import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def span(text: str) -> tuple[int, int]:
    """Argument type: "A:B", either may be left out; B of -1 stands for the end."""
    first, colon, last = text.partition(":")
    if not colon or not all(part.isdecimal() or not part for part in (first, last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, such as 0:16")
    return int(first or 0), int(last) if last else -1


def run(arguments: argparse.Namespace) -> int:
    """Read the layout, plan, print."""
    if arguments.preset == "list":
        return _list_presets(arguments.json)
    from baftd.cli.plan_onto import restore_document, restore_onto, said_restore
    from baftd.cli.plan_report import Plan, document, print_plan

    source = read_source(arguments)
    layout = source.layout
    _check(arguments, layout)
    if arguments.save_layout is not None:
        _save(layout, arguments.save_layout)
    nodes = _nodes(arguments, source)
    known = arguments.ranks_per_node is not None or source.node_of_rank is not None or layout.world == 1
    others = len(set(nodes)) - 1
    copies = arguments.copies or 1
    if copies > max(1, others):
        raise UsageError(
            f"--copies {copies}: each copy needs a node of its own, and besides a rank's own there "
            f"{'is' if others == 1 else 'are'} {others or 'none'} (--ranks-per-node)."
        )
    plan = Plan.of(
        source,
        nodes,
        wanted=arguments.redundancy,
        window_bytes=arguments.window_bytes,
        network_bytes=arguments.network_bytes,
        node_memory=_node_memory(arguments, source),
        durable=bool(source.durable if arguments.durable is None else arguments.durable),
        copies=copies,
        group=arguments.group or 4,
        lose=arguments.lose,
        slots=source.slots,
        nodes_are="" if known else f" of up to {_NODE_RANKS} ranks (supposed: --ranks-per-node)",
    )
    refusal = plan.refusal()
    first, last = arguments.show_ranks or (0, 0)
    ranks = range(first, layout.world if last == -1 else last)
    restore = None if arguments.onto is None else restore_onto(plan.offer.assignment, layout_file(arguments.onto))
    bubbles = read_bubbles(arguments, layout, plan.offer.assignment, _pacing(arguments, source))
    if arguments.json:
        found = document(plan, ranks, arguments.rank, refusal)
        if bubbles is not None:
            found["bubbles"] = bubbles_document(bubbles)
        print_json("plan", found if restore is None else {**found, "restore": restore_document(restore)})
    else:
        print_plan(plan, ranks, arguments.rank, bubbles=bubbles is not None)
        if bubbles is not None:
            print()
            print_bubbles(bubbles)
        if restore is not None:
            print()
            said_restore(restore)
    if refusal is not None:
        complain(str(refusal))
        return NoRoom.exit_code
    return 0


def _check(arguments: argparse.Namespace, layout: Layout) -> None:
    """Refuse what makes no sense for this layout."""
    world = layout.world
    if arguments.rank is not None and arguments.rank >= world:
        raise UsageError(f"--rank {arguments.rank} is outside of ranks 0 to {world - 1}.")
    if arguments.show_ranks is not None:
        first, last = arguments.show_ranks
        if first >= world or last > world or -1 < last <= first:
            shown = f"{first}:{last if last != -1 else ''}"
            raise UsageError(f"--show-ranks {shown} names no ranks between 0 and {world}.")
    for name in ("window_bytes", "ranks_per_node", "copies", "node_memory", "lose"):
        if getattr(arguments, name) == 0:
            raise UsageError(f"--{name.replace('_', '-')} is 0: it must be more than 0.")
    if arguments.lose > _MOST_LOST:
        raise UsageError(f"--lose {arguments.lose}: losses of up to {_MOST_LOST} nodes are looked at.")
    for name, mode in (("copies", "peer"), ("group", "parity")):
        if getattr(arguments, name) is not None and arguments.redundancy not in ("auto", mode):
            raise UsageError(f"--{name} is of {mode}, but --redundancy is {arguments.redundancy}.")
    if arguments.group is not None and arguments.group < 2:
        raise UsageError(f"--group {arguments.group}: a parity group needs 2 nodes or more.")


def _nodes(arguments: argparse.Namespace, source: Source) -> tuple[str, ...]:
    """The node of each rank."""
    if arguments.ranks_per_node is None and source.node_of_rank is not None:
        return source.node_of_rank
    world = source.layout.world
    each = arguments.ranks_per_node or _NODE_RANKS
    width = len(str((world - 1) // each))
    return tuple(f"node-{rank // each:0{width}d}" for rank in range(world))


def _node_memory(arguments: argparse.Namespace, source: Source) -> int | None:
    """Shared memory that slots of this job may take on a node; None: whatever they need."""
    if arguments.node_memory is not None:
        given: int = arguments.node_memory
        return given
    if arguments.job is None:
        return None
    from baftd.memory import preflight

    settings = settings_of(arguments)
    try:
        found = preflight.read(settings.shm_dir)
    except OSError:
        return None  # the daemon has another directory: nothing is known of it here
    free = min(found.fs_free, found.memory_available, *(group.available for group in found.cgroups))
    return max(0, free + source.slot_bytes - settings.memory_reserve)


def _pacing(arguments: argparse.Namespace, source: Source) -> JobPacing:
    """How often there are to be snapshots. Of a running job as its daemon was told: only flags ask for other things
    than those that are."""
    settings, running = settings_of(arguments), source.pacing
    if running is None:
        return JobPacing(settings.overhead_budget, settings.interval)
    given = vars(arguments)
    return JobPacing(
        running.budget if given["setting_overhead_budget"] is None else settings.overhead_budget,
        running.interval if given["setting_interval"] is None else settings.interval,
        running.held,
    )


def _save(layout: Layout, path: str) -> None:
    """Write the layout so that the file is whole or not there."""
    suffix = Path(path).suffix
    if suffix.lower() in (".toml", ".json"):
        raise UsageError(f"--save-layout {path}: {suffix} is for declarations by hand; take another ending.")
    try:
        write_output(path, layout.encode(), "--save-layout")
    except OSError as error:
        raise UsageError(f"--save-layout {path} cannot be written: {error.strerror}.") from error


def _list_presets(as_json: bool) -> int:
    from baftd.formats.presets import PRESETS

    if as_json:
        found: dict[str, Any] = {
            name: {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads, "parameters": shape.elements}
            for name, shape in PRESETS.items()
        }
        print_json("presets", {"presets": found})
        return 0
    say("Numbers are those that were published; any of them can be changed by its flag.")
    rows = [
        [name, str(shape.layers), str(shape.hidden), str(shape.heads), str(shape.experts or "-"), f"{shape.elements:,}"]
        for name, shape in PRESETS.items()
    ]
    columns = ["preset", "layers", "hidden", "heads", "experts", "parameters"]
    print_table(columns, rows, right=columns[1:])
    return 0
