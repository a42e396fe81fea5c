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
    from baftd.checkpoint.ranges import Box
    from baftd.checkpoint.saved_set import SavedTensor
    from baftd.checkpoint.savers import Assignment
    from baftd.cli.plan_sources import Source

__all__ = ["Restore", "restore_document", "restore_onto", "said_restore"]

_OWN_SHOWN = 3
_STAGE = re.compile(r"(model\.|optim\.\d+\.)?stage(\d+)\.")
"""What the PyTorch adapter puts before names of a pipeline stage's tensors."""


@dataclass(frozen=True)
class Restore:
    """A restore onto another layout. read: bytes that a new rank reads. sources: ranks whose shards it reads.
    given: bytes that are read of a shard. whole: bytes of the shards that a new rank opens, all together: what it would
    read if shards could only be read whole. own: tensors of which several ranks have saved one of their own: a restore
    takes them over only where all have the same bytes, which a plan cannot know."""

    words: str
    ranks: int
    read: Spread
    sources: Spread
    given: Spread
    whole: Spread
    own: tuple[str, ...] = ()


def restore_onto(saved: Assignment, target: Source) -> Restore:
    """Plan all reads. Raises LayoutError naming tensor, rank and range for each thing that nobody saved."""
    from baftd.checkpoint.ranges import volume
    from baftd.checkpoint.reshard import reshard

    old, new = saved.layout, target.layout
    exact = _all_stages(old) == _all_stages(new)
    owners = Counter(tensor.name for tensor in old.tensors if tensor.owner is not None)
    base = _base_names(old, new)
    taken = {base(tensor.name) for tensor in new.tensors}
    own = tuple(sorted(name for name, number in owners.items() if number > 1 and base(name) in taken))
    read, sources, whole = [], [], []
    given = Counter[int](dict.fromkeys(range(saved.layout.world), 0))
    plan = reshard(old, saved, new, same_bytes=_supposed_equal, base=base, exact=exact)
    for fills in plan.values():
        mine = Counter[int]()
        for fill in fills:
            for one in fill.reads:
                mine[one.source.rank] += volume(one.box) * fill.wanted.itemsize
        given.update(mine)
        read.append(mine.total())
        sources.append(len(mine))
        whole.append(sum(saved.bytes_of(rank) for rank in mine))
    return Restore(
        target.words,
        new.world,
        read=Spread.of(read),
        sources=Spread.of(sources),
        given=Spread.of(list(given.values())),
        whole=Spread.of(whole),
        own=own,
    )


def _supposed_equal(a: SavedTensor, b: SavedTensor, _: Box) -> bool:
    """Tensors that ranks have for themselves are supposed to be equal where they have one name; two names are two."""
    return a.entry.name == b.entry.name


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
    if restore.own:
        more = f" and {len(restore.own) - _OWN_SHOWN} more" if len(restore.own) > _OWN_SHOWN else ""
        named = ", ".join(restore.own[:_OWN_SHOWN]) + more
        say(f"  only where all ranks that have one of their own have the same bytes: {named}")


def restore_document(restore: Restore) -> dict[str, Any]:
    """The same as a document."""
    return {"onto": restore.words, **{key: value for key, value in asdict(restore).items() if key != "words"}}
