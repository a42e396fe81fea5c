"""Instructions of a node's core (`node.NodeJob`) to the daemon around it.

The daemon persists the records of a `Ready` first, then carries these out in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from baftd.checkpoint.facts import Cadence, Inventory, Report, RestoredRank, ShardFacts, Skipped, Tier, Writer
from baftd.checkpoint.identity import CheckpointId, Token

__all__ = [
    "CancelPersist",
    "Digest",
    "DropShard",
    "FenceWriter",
    "FreeSlot",
    "GrantSlot",
    "NodeInstruction",
    "ReceiveSlot",
    "Refuse",
    "RefuseGrant",
    "RemoveRank",
    "RemoveSlot",
    "SendJoin",
    "SendPersistFailed",
    "SendReport",
    "SendRestored",
    "SendSkip",
    "StartPersist",
    "Superseded",
    "TellCadence",
    "TellCommitted",
]

# ---------------------------------------------------------------- to the coordinator


@dataclass(frozen=True)
class SendJoin:
    """Join (again): the coordinator does not know this node, or has lost its memory."""

    inventory: Inventory


@dataclass(frozen=True)
class SendReport:
    """A shard is verified at a tier; repeated by `resend` until it is answered."""

    report: Report


@dataclass(frozen=True)
class SendSkip:
    """The rank has no snapshot of this step; repeated by `resend` until it, or a later step, is answered."""

    skipped: Skipped


@dataclass(frozen=True)
class SendRestored:
    """The rank has loaded what its epoch begins from; repeated by `resend` until it is answered."""

    restored: RestoredRank


@dataclass(frozen=True)
class SendPersistFailed:
    """This rank cannot make the step durable; repeated by `resend` until the coordinator gives the step up."""

    token: Token
    step: int
    rank: int
    reason: str


# ---------------------------------------------------------------- to training processes


@dataclass(frozen=True)
class GrantSlot:
    """The slot may be filled next, once, under this generation. The same grant may be repeated."""

    rank: int
    writer: Writer
    token: Token
    slot: int
    generation: int


@dataclass(frozen=True)
class RefuseGrant:
    """No slot for the next step, and why (pin, step and epoch are named). Replaced by the next grant."""

    rank: int
    writer: Writer
    token: Token
    reason: str


@dataclass(frozen=True)
class TellCommitted:
    """Every part of the step is verified at that tier."""

    rank: int
    writer: Writer
    token: Token
    step: int
    tier: Tier


@dataclass(frozen=True)
class TellCadence:
    """Which steps are snapshot from now on."""

    rank: int
    writer: Writer
    token: Token
    cadence: Cadence


@dataclass(frozen=True)
class FenceWriter:
    """A newer token exists: the process must close its gate for good. Set the fence word in its control page too."""

    rank: int
    writer: Writer
    reason: str


@dataclass(frozen=True)
class Refuse:
    """A message of a training process makes no sense here; `message` is its type, `reason` what is wrong."""

    rank: int
    writer: Writer
    message: str
    reason: str


# ---------------------------------------------------------------- to slots and the durable tier


@dataclass(frozen=True)
class FreeSlot:
    """Write state FREE into the slot's header; its content counts for nothing any more."""

    rank: int
    slot: int
    generation: int


@dataclass(frozen=True)
class RemoveSlot:
    """The slot is of an older layout, and empty: unlink its file."""

    rank: int
    slot: int


@dataclass(frozen=True)
class RemoveRank:
    """The running start has no such rank, and its last slot is gone: unlink what is left of it."""

    rank: int


@dataclass(frozen=True)
class Digest:
    """Compute the digests of the sealed content, then say `digested` or `digest_failed`."""

    rank: int
    slot: int
    generation: int
    shard: ShardFacts


@dataclass(frozen=True)
class ReceiveSlot:
    """The daemon may fill this slot with a shard it fetches (answer to `receive`)."""

    rank: int
    slot: int
    generation: int


@dataclass(frozen=True)
class DropShard:
    """A shard was lost on the way (a digest that does not fit, a step announced as gone). For the log and counters."""

    rank: int
    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True)
class StartPersist:
    """Write the slot's image to the durable tier, then say `persisted` or `persist_failed`. It stays pinned so long."""

    rank: int
    slot: int
    generation: int
    shard: ShardFacts


@dataclass(frozen=True)
class CancelPersist:
    """Nobody wants the durable write of this step any more: stop it, then say `persist_failed` (or `persisted`)."""

    rank: int
    checkpoint: CheckpointId


@dataclass(frozen=True)
class Superseded:
    """A newer incarnation of this very node has joined the coordinator: two daemons run under one name. Stop."""

    incarnation: str


NodeInstruction: TypeAlias = (
    SendJoin
    | SendReport
    | SendSkip
    | SendRestored
    | SendPersistFailed
    | GrantSlot
    | RefuseGrant
    | TellCommitted
    | TellCadence
    | FenceWriter
    | Refuse
    | FreeSlot
    | RemoveSlot
    | RemoveRank
    | Digest
    | ReceiveSlot
    | DropShard
    | StartPersist
    | CancelPersist
    | Superseded
)
