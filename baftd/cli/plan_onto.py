"""`baftd plan --onto FILE`: what each rank of another layout would read out of the shards that are saved."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from baftd.cli.plan_rows import Spread
from baftd.cli.render import say, size

if TYPE_CHECKING:
    from baftd.checkpoint.layout import Layout
    from baftd.checkpoint.savers import Assignment
    from baftd.cli.plan_sources import Source

__all__ = ["Restore", "restore_document", "restore_onto", "said_restore"]

_STAGE = re.compile(r"(model\.|optim\.\d+\.)?stage(\d+)\.")
"""What the PyTorch adapter puts before names of a pipeline stage's tensors."""


@dataclass(frozen=True)
class Restore:
    """A restore onto another layout. read: bytes that a new rank reads. sources: ranks whose shards it reads.
    given: bytes that are read of a shard. whole: bytes of the shards that a new rank opens, all together: what it would
    read if shards could only be read whole."""

    words: str
    ranks: int
    read: Spread
    sources: Spread
    given: Spread
    whole: Spread


def restore_onto(saved: Assignment, target: Source) -> Restore:
    """Plan all reads. Raises LayoutError naming tensor, rank and range for each thing that nobody saved."""
    from baftd.checkpoint.ranges import volume
    from baftd.checkpoint.reshard import reshard

    old, new = saved.layout, target.layout
    exact = _all_stages(old) == _all_stages(new)
    read, sources, whole = [], [], []
    given = Counter[int](dict.fromkeys(range(saved.layout.world), 0))
    for fills in reshard(old, saved, new, base=_base_names(old, new), exact=exact).values():
        mine = Counter[int]()
        for fill in fills:
            for one in fill.reads:
                mine[one.source.rank] += volume(one.box) * fill.wanted.itemsize
        given.update(mine)
        read.append(mine.total())
        sources.append(len(mine))
        whole.append(sum(saved.bytes_of(rank) for rank in mine))
    spreads = (Spread.of(values) for values in (read, sources, list(given.values()), whole))
    return Restore(target.words, target.layout.world, *spreads)


def _all_stages(layout: Layout) -> set[int]:
    places = (layout.place(rank) for rank in range(layout.world))
    return {stage for place in places if place is not None for stage in place.stages}


def _base_names(*layouts: Layout) -> Callable[[str], str]:
    """Names without the stage that the adapter put before them, so that a tensor is found in whichever stage it lies.
    A name that begins so by itself, on ranks of other stages, stays."""
    bases: dict[str, str] = {}
    for layout in layouts:
        for tensor in layout.tensors:
            for name in (tensor.name, *tensor.aliases):
                match = _STAGE.match(name)
                if match is None:
                    continue
                place = layout.place(next(iter(tensor.held)))
                if place is not None and int(match[2]) in place.stages:
                    bases[name] = (match[1] or "") + name[match.end() :]
    return lambda name: bases.get(name, name)


def said_restore(restore: Restore) -> None:
    """Print it for people."""
    many = f"{restore.sources.least}-{restore.sources.most}"
    if restore.sources.least == restore.sources.most:
        many = str(restore.sources.most)
    shards = f"{many} shard{'s' * (restore.sources.most != 1)} of up to {size(restore.whole.most)} together"
    say(f"a restore onto {restore.words}:")
    say(f"  each of {restore.ranks} ranks reads {restore.read}, out of {shards}")
    say(f"  of each shard {restore.given} are read, by all ranks together")


def restore_document(restore: Restore) -> dict[str, Any]:
    """The same as a document."""
    return {"onto": restore.words, **{key: value for key, value in asdict(restore).items() if key != "words"}}
