"""How much shared memory each node needs for slots: before anything is reserved, from the layout alone. Pure.

A slot holds the 4 KiB header block, the image's JSON header, the tensors the rank saves and room for its small state.
A rank has 3 slots with the memory tier alone (committed, sealed, filling) and 4 with a durable or peer tier. For
shards that a node receives from others it keeps 2 places each (the newest whole one, and the one that comes in), and
so for parity and for small states that come alone. While a job is laid out anew the old generation stays until the
first commit of the new one: room for both is needed. All sizes are bytes; the JSON header is estimated from above.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from baftd.checkpoint.savers import Assignment
from baftd.checkpoint.shard import PAGE
from baftd.checkpoint.survival import Protection

__all__ = [
    "PLACES",
    "NodeMemory",
    "memory_per_node",
    "room_problem",
    "said_bytes",
    "slot_bytes",
    "slots_per_rank",
]

PLACES = 2
"""Places for each shard, or parity of shards, that comes from other nodes."""
_HEADER_BASE = 2048
_HEADER_ENTRY = 256
"""Of a range in the JSON header, at most, its name left out; the pad before it included."""


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of shared memory on one node.

    slots: of its own ranks. received: places for copies of other nodes' shards. parity: places for parity of its
    group. small: places for small states of other nodes' ranks. before: all of the generation that this one replaces.
    """

    slots: int = 0
    received: int = 0
    parity: int = 0
    small: int = 0
    before: int = 0

    @property
    def generation(self) -> int:
        """What this generation needs, when the one before it is gone."""
        return self.slots + self.received + self.parity + self.small

    @property
    def total(self) -> int:
        """What must fit at once."""
        return self.generation + self.before

    def parts(self) -> tuple[tuple[str, int], ...]:
        """(what, bytes) of all that is not zero, for people."""
        named = (
            ("own slots", self.slots),
            ("copies of other nodes", self.received),
            ("parity", self.parity),
            ("small states of other nodes", self.small),
            ("the generation before", self.before),
        )
        return tuple((what, nbytes) for what, nbytes in named if nbytes)


def slots_per_rank(protection: Protection, *, durable: bool, given: int | None = None) -> int:
    """3 with the memory tier alone, 4 where slots are also read by a durable or peer tier. given: the number that the
    settings name; it is taken as it is."""
    if given is not None:
        return given
    return 4 if durable or protection.mode in ("peer", "parity") else 3


def slot_bytes(assignment: Assignment, rank: int, small_room: int) -> int:
    """A rank's slot file. `small_room`: kept for the small state (`shard.small_room_for`)."""
    header = _HEADER_BASE + _HEADER_ENTRY * assignment.entries[rank] + assignment.name_bytes[rank]
    if assignment.mode == "divided":  # then the header says too what the rank holds
        entries, names = assignment.held[rank]
        header += _HEADER_ENTRY * entries + names
    return PAGE + _pages(_pages(header) + assignment.loads[rank] + small_room)


def memory_per_node(
    assignment: Assignment,
    node_of_rank: Mapping[int, str],
    protection: Protection,
    *,
    durable: bool = False,
    small_room: int = 1 << 20,
    slots: int | None = None,
    before: Mapping[str, NodeMemory] | None = None,
) -> dict[str, NodeMemory]:
    """What each node needs. `slots`: of each rank, where the settings name a number (`slots_per_rank`). `before`: the
    generation that runs now, when the job is to be laid out anew."""
    shard: dict[str, int] = defaultdict(int)
    ranks: dict[str, int] = defaultdict(int)
    for rank in range(assignment.layout.world):
        shard[node_of_rank[rank]] += slot_bytes(assignment, rank, small_room)
        ranks[node_of_rank[rank]] += 1
    received: dict[str, int] = defaultdict(int)
    small: dict[str, int] = defaultdict(int)
    for node in shard:
        for peer in protection.peers.get(node, ()):
            received[peer] += PLACES * shard[node]
        for peer in protection.small_copies.get(node, ()):
            if peer not in protection.peers.get(node, ()):  # there it comes with the shard
                small[peer] += PLACES * ranks[node] * (PAGE + _pages(small_room))
    parity: dict[str, int] = {}
    for group in protection.groups:
        for node in group:
            others = [shard[other] for other in group if other != node and other in shard]
            if others:
                parity[node] = PLACES * _pages(-(-max(others) // (len(group) - 1)))
    each = slots_per_rank(protection, durable=durable, given=slots)
    old = before or {}
    return {
        node: NodeMemory(
            slots=each * shard.get(node, 0),
            received=received.get(node, 0),
            parity=parity.get(node, 0),
            small=small.get(node, 0),
            before=old[node].generation if node in old else 0,
        )
        for node in sorted({*shard, *received, *parity, *small, *old})
    }


def room_problem(memory: Mapping[str, NodeMemory], limit: int) -> str:
    """Why slots do not fit into `limit` bytes a node: the one that needs most, with the sum. Empty if they do."""
    if not memory:
        return ""
    node = max(memory, key=lambda one: (memory[one].total, one))
    need = memory[node]
    if need.total <= limit:
        return ""
    too_small = sum(one.total > limit for one in memory.values())
    parts = " + ".join(f"{what} {said_bytes(nbytes)}" for what, nbytes in need.parts())
    others = f" ({too_small} of {len(memory)} nodes do not have enough)" if too_small > 1 else ""
    total = f" = {said_bytes(need.total)}" if len(need.parts()) > 1 else ""
    return f"node {node} needs {parts}{total} of shared memory, and {said_bytes(limit, up=False)} are there{others}"


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def said_bytes(nbytes: int, *, up: bool = True) -> str:
    """A size in words. What is needed is rounded up, what is there down (`up` False), so that nobody is told they are
    equal when they are not."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= factor:
            tenths = -(-nbytes * 10 // factor) if up else nbytes * 10 // factor
            return f"{tenths / 10:.1f} {unit}"
    return f"{-(-nbytes // 1024) if up else nbytes // 1024} KiB"
