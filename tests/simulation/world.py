"""What is physically there: slot bytes in a node's memory, its disk, the shared durable directory.

Bytes are modelled by values that tell where they come from: state(k) of a rank is (line, rank), where `line` hashes
every (epoch, incarnation, step) that led to it. So bytes of two lives of one step number are never equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baftd.checkpoint.facts import EpochFacts, Held, Inventory, Record, ShardFacts, Source
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.slots import HeaderFacts, SlotState
from baftd.storage.interface import DurableCheckpoint
from baftd.storage.retention import to_delete

__all__ = ["FREE_HEADER", "Bytes", "Content", "DurableDirectory", "Machine", "digest", "grow", "shorten"]

Content = tuple[int, int]
"""(line, rank) of a whole state; (-1, n) is garbage."""

FREE_HEADER = HeaderFacts(SlotState.FREE, 0)


def digest(content: Content) -> bytes:
    """Stands for xxh3-128 of the bytes."""
    return b"%d.%d" % content


def grow(line: int, token: Token, step: int) -> int:
    """The line after one more step under `token`."""
    return hash((line, token.epoch, int(token.incarnation, 16), step)) & (1 << 62) - 1


def shorten(token: Token | None) -> str:
    """`e3` for the trace."""
    return "none" if token is None else f"e{token.epoch}"


@dataclass
class Bytes:
    """A slot file: header and image."""

    header: HeaderFacts = FREE_HEADER
    content: Content = (-1, 0)


@dataclass
class Machine:
    """A node's hardware: memory goes with a crash, the disk stays."""

    name: str
    up: bool = True
    incarnation: str = ""
    slots: dict[tuple[int, int], Bytes] = field(default_factory=dict)
    journal: list[Record] = field(default_factory=list)
    manifest: list[Record] = field(default_factory=list)


@dataclass
class _Durable:
    token: Token
    parent: CheckpointId | None
    world: int
    shards: dict[int, tuple[ShardFacts, Content]] = field(default_factory=dict)
    complete: bool = False
    line: tuple[EpochFacts, ...] = ()


class DurableDirectory:
    """Shared storage with a fence: shards by (checkpoint, rank), the manifest last."""

    def __init__(self) -> None:
        self.checkpoints: dict[CheckpointId, _Durable] = {}
        self.fence = 0
        self.changed = False

    def write(self, shard: ShardFacts, content: Content, parent: CheckpointId | None, token: Token) -> bool:
        """Store a shard; False for a token that is fenced."""
        if token.epoch < self.fence:
            return False
        self.fence = token.epoch
        entry = self.checkpoints.setdefault(shard.checkpoint, _Durable(shard.token, parent, shard.world))
        if entry.token != shard.token:
            return False
        entry.shards[shard.rank] = (shard, content)
        self.changed = True
        return True

    def commit(self, checkpoint: CheckpointId, token: Token, world: int, line: tuple[EpochFacts, ...]) -> bool:
        """Write the manifest; False when it is fenced or a shard is missing."""
        entry = self.checkpoints.get(checkpoint)
        if entry is None or token.epoch < self.fence or len(entry.shards) != world:
            return False
        entry.complete, entry.line = True, line
        return True

    def inventory(self) -> Inventory:
        """As the storage room would list it: complete checkpoints only, with the lineage of their manifests."""
        shards, epochs = [], {}
        for entry in self.checkpoints.values():
            if entry.complete:
                epochs.update({facts.token.epoch: facts for facts in entry.line})
                shards += [Held(shard, Source("durable", "", {})) for shard, _ in entry.shards.values()]
        highest = max((checkpoint.step for checkpoint in self.checkpoints), default=0)
        return Inventory("", "", tuple(shards), tuple(epochs.values()), highest)

    def retain(
        self, keep: int, pinned: tuple[CheckpointId, ...], epoch: int, abandoned: object, busy: CheckpointId | None
    ) -> list[CheckpointId]:
        """Apply the storage room's own retention."""
        listed = [
            DurableCheckpoint("job", checkpoint, "complete" if entry.complete else "incomplete", "")
            for checkpoint, entry in self.checkpoints.items()
        ]
        gone = to_delete(
            listed,
            keep_last=keep,
            pinned=pinned,
            abandoned=abandoned,  # type: ignore[arg-type]
            busy=[busy] if busy else [],
            current_epoch=epoch,
        )
        for checkpoint in gone:
            del self.checkpoints[checkpoint]
            self.changed = True
        return gone
