"""`baftd plan --onto FILE`: what each rank of another layout would read out of the shards that are saved."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from baftd.cli.plan_rows import Spread
from baftd.cli.render import say, size

if TYPE_CHECKING:
    from baftd.checkpoint.savers import Assignment
    from baftd.cli.plan_sources import Source

__all__ = ["Restore", "restore_document", "restore_onto", "said_restore"]


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

    read, sources, whole = [], [], []
    given = Counter[int](dict.fromkeys(range(saved.layout.world), 0))
    for fills in reshard(saved.layout, saved, target.layout).values():
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
