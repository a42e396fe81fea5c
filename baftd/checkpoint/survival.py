"""Which lost nodes break a step, and from which tier it is whole without them. Pure.

A range is gone when every node that holds its bytes is. So the sets of lost nodes that break a step are exactly those
that contain all homes of some range, and it is enough to know the smallest such sets: each is the home of one range
with what protects it. Nothing is enumerated but these.

Protection of a node's shards:

    peer     copies on other nodes: gone when those are lost too
    parity   the exclusive or of a group's shards, spread over the group: gone when a second node of the group is lost
    none     (and replicas, where other ranks' own slots are the copies)

The small state of a rank (RNG, data position) is that rank's alone, whatever is replicated. It goes with the shard to
where that is copied, and besides to `small_copies` other nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise, product
from typing import Literal, TypeAlias

from baftd.checkpoint.facts import Tier
from baftd.checkpoint.savers import Assignment
from baftd.errors import UsageError

__all__ = ["FixedRedundancy", "Nodes", "Protection", "Survival", "parity_groups", "ring", "survivability"]

FixedRedundancy: TypeAlias = Literal["replicas", "peer", "parity", "none"]
Nodes: TypeAlias = frozenset[str]


def ring(nodes: Sequence[str], copies: int = 1) -> dict[str, tuple[str, ...]]:
    """For each node the `copies` nodes that follow it, in a ring: as many as there are, never itself."""
    count = len(nodes)
    return {
        node: tuple(nodes[(at + step) % count] for step in range(1, min(copies, count - 1) + 1))
        for at, node in enumerate(nodes)
    }


def parity_groups(nodes: Sequence[str], group: int) -> tuple[tuple[str, ...], ...]:
    """The nodes in groups of at most `group`, in order, whose sizes differ by at most one. A node alone would be
    protected by nobody: three nodes in groups of two are one group.

    Raises UsageError for groups of fewer than two nodes.
    """
    if group < 2:
        raise UsageError(f"a parity group of {group} protects nothing; 2 nodes or more are needed.")
    number = max(1, min(-(-len(nodes) // group), len(nodes) // 2))
    cuts = [len(nodes) * at // number for at in range(number + 1)]
    return tuple(tuple(nodes[start:stop]) for start, stop in pairwise(cuts))


@dataclass(frozen=True)
class Protection:
    """What protects the shards in a node's memory.

    peers: nodes that hold copies of a node's shards. groups: parity groups. small_copies: nodes that hold the small
    states of a node's ranks. Only what the mode asks for is set.
    """

    mode: FixedRedundancy
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()
    small_copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of(
        mode: FixedRedundancy, nodes: Iterable[str], *, copies: int = 1, group: int = 4, small_copies: int = 1
    ) -> Protection:
        """The usual placement on these nodes: copies go to the next nodes in a ring, neighbours make parity groups."""
        ordered = sorted(set(nodes))
        return Protection(
            mode,
            peers=ring(ordered, copies) if mode == "peer" else {},
            groups=parity_groups(ordered, group) if mode == "parity" else (),
            small_copies=ring(ordered, small_copies) if mode != "none" and small_copies else {},
        )

    def group_of(self, node: str) -> tuple[str, ...]:
        """The parity group of a node; itself alone where it has none."""
        return self._group_of.get(node, (node,))

    @cached_property
    def _group_of(self) -> Mapping[str, tuple[str, ...]]:
        return {node: group for group in self.groups for node in group}


@dataclass(frozen=True)
class Survival:
    """What a step survives. Each tuple holds the *smallest* sets of nodes, of at most `most`, by size then name.

    breaking: their loss leaves some range in no memory at all. memory: in nobody's own slot. small: some rank's small
    state is in no memory.
    """

    nodes: tuple[str, ...]
    protection: Protection
    most: int
    durable: bool
    breaking: tuple[Nodes, ...]
    memory: tuple[Nodes, ...]
    small: tuple[Nodes, ...]
    _homes: frozenset[Nodes]
    _homes_protected: Mapping[Nodes, Nodes]
    _small_homes: Mapping[str, Nodes]

    def tier(self, lost: Collection[str]) -> Tier | None:
        """From where a step is whole when `lost` are gone, the worst of its parts: own slots, copies and parity on
        other nodes, or the durable tier (a step that is older by that tier's cadence). None: from nowhere."""
        gone = frozenset(lost)
        groups = _hit_twice(self.protection, gone)
        rebuilt_small = any(node in gone for node in self._small_homes)
        for home, protected in self._homes_protected.items():
            if protected <= gone and self._unprotected(home, groups):
                return "durable" if self.durable else None
        for node, protected in self._small_homes.items():
            if protected <= gone and self._unprotected(frozenset((node,)), groups):
                return "durable" if self.durable else None
        return "peer" if rebuilt_small or any(home <= gone for home in self._homes) else "memory"

    def survives_any(self, count: int) -> bool:
        """Whether a step stays whole in memory whichever `count` nodes are lost. Raises UsageError beyond `most`."""
        if count > self.most:
            raise UsageError(f"what the loss of {count} nodes means was not asked: only up to {self.most}.")
        return all(len(one) > count for one in (*self.breaking, *self.small))

    def _unprotected(self, home: Nodes, hit_twice: Nodes) -> bool:
        """Whether parity does not help either: each group that a node of `home` belongs to has lost two."""
        return not self.protection.groups or home <= hit_twice


def survivability(
    assignment: Assignment,
    node_of_rank: Mapping[int, str],
    protection: Protection,
    *,
    most: int = 2,
    durable: bool = False,
) -> Survival:
    """What a step that is saved by `assignment` survives.

    node_of_rank: of every rank. most: sets of lost nodes are looked at up to this size. Raises UsageError when the
    node of a rank is missing.
    """
    world = assignment.layout.world
    missing = next((rank for rank in range(world) if rank not in node_of_rank), None)
    if missing is not None:
        raise UsageError(f"the node of rank {missing} is not known.")
    homes: set[Nodes] = set()
    for one in assignment.classes:
        if not one.nbytes:
            continue
        if assignment.mode == "all":
            homes.add(frozenset(node_of_rank[rank] for rank in one.holders))
        else:
            homes |= {frozenset((node_of_rank[rank],)) for rank in one.taken}
    nodes = tuple(sorted({node_of_rank[rank] for rank in range(world)}))
    copied = {home: home.union(*(protection.peers.get(node, ()) for node in home)) for home in homes}
    small = {
        node: frozenset((node, *protection.peers.get(node, ()), *protection.small_copies.get(node, ())))
        for node in nodes
    }
    return Survival(
        nodes=nodes,
        protection=protection,
        most=most,
        durable=durable,
        breaking=_smallest((one for home in homes for one in _broken(home, copied[home], protection, most)), most),
        memory=_smallest(homes, most),
        small=_smallest(
            (one for node in nodes for one in _broken(frozenset((node,)), small[node], protection, most)), most
        ),
        _homes=frozenset(homes),
        _homes_protected=copied,
        _small_homes=small,
    )


def _broken(home: Nodes, copied: Nodes, protection: Protection, most: int) -> Iterator[Nodes]:
    """The smallest sets whose loss takes bytes that lie on all of `home`, with copies on `copied` (`home` among them).

    Parity brings a node back unless another one of its group is lost: each group that loses only one node of
    `copied`, and that one from `home`, must lose one more.
    """
    if len(copied) > most:
        return
    choices = []
    for node in sorted(home):
        group = protection.group_of(node)
        others = [other for other in group if other != node]
        if others and not any(other in copied for other in others):
            choices.append(others)
    if len(copied) + len(choices) <= most:
        for extra in product(*choices):
            yield copied.union(extra)


def _smallest(sets: Iterable[Nodes], most: int) -> tuple[Nodes, ...]:
    """Those of at most `most` nodes that contain no other, by size, then by name."""
    kept: set[Nodes] = set()
    for one in sorted({some for some in sets if len(some) <= most}, key=lambda some: (len(some), sorted(some))):
        smaller: Iterable[Nodes]
        if 1 << len(one) < len(kept):
            smaller = (frozenset(some) for size in range(1, len(one)) for some in combinations(one, size))
            contained = any(some in kept for some in smaller)
        else:
            contained = any(some < one for some in kept)
        if not contained:
            kept.add(one)
    return tuple(sorted(kept, key=lambda some: (len(some), sorted(some))))


def _hit_twice(protection: Protection, lost: Nodes) -> Nodes:
    """Lost nodes whose parity group cannot bring them back: it has lost two, or has no other member."""
    return frozenset(
        node
        for node in lost
        if len(group := protection.group_of(node)) == 1 or sum(other in lost for other in group) > 1
    )
