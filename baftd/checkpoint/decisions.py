"""Instructions of a job's coordinator (`commit.JobCoordinator`) to the shell around it, and what it is set to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baftd.checkpoint.facts import Answer, JobView, Record, ShardFacts, Tier
from baftd.checkpoint.identity import CheckpointId, Token

__all__ = [
    "Committed",
    "CoordinatorInstruction",
    "Dead",
    "Finished",
    "Joined",
    "NotJoined",
    "Part",
    "Policy",
    "Publish",
    "Quarantined",
    "Retain",
    "Withdrawn",
    "WriteManifest",
    "plan_digest",
]


@dataclass(frozen=True)
class Policy:
    """What a job's coordinator is set to. Steps and seconds of the durable tier: whichever is set; both: either."""

    interval: int = 1
    """Steps from one snapshot in memory to the next, until nodes propose something else."""
    interval_fixed: bool = True
    """Whether it stays so, whatever they propose."""
    durable: bool = False
    durable_steps: int | None = None
    durable_seconds: float | None = None


@dataclass(frozen=True)
class Part:
    """One rank's verified shard and where it stands."""

    shard: ShardFacts
    node: str
    incarnation: str
    place: Record | None = None


# ---------------------------------------------------------------- instructions


@dataclass(frozen=True)
class Publish:
    """Send the view to every node of the job."""

    view: JobView


@dataclass(frozen=True)
class Joined:
    """Answer to `join`. `accepted` False: a newer incarnation of this node has joined; this one must not go on."""

    node: str
    incarnation: str
    accepted: bool
    view: JobView


@dataclass(frozen=True)
class NotJoined:
    """Answer to `poll`: the node has not joined this coordinator, or was taken for lost."""

    node: str
    incarnation: str


@dataclass(frozen=True)
class Committed:
    """The checkpoint is committed at the tier. `nodes` are the incarnations that a memory commit stands on."""

    checkpoint: CheckpointId
    tier: Tier
    nodes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Withdrawn:
    """A memory commit has lost shards: the node that held them is gone."""

    checkpoint: CheckpointId
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Dead:
    """The step will never be committed in memory."""

    checkpoint: CheckpointId
    rank: int
    reason: str


@dataclass(frozen=True)
class Quarantined:
    """Ranks disagree about bytes that must be equal, or a checkpoint failed verification. Log it loudly."""

    checkpoint: CheckpointId
    reason: str
    ranks: tuple[tuple[int, str], ...] = ()
    """(rank, node)"""


@dataclass(frozen=True)
class WriteManifest:
    """Every part is durable: `node` writes the manifest of the checkpoint, last, then says `manifest_written`."""

    node: str
    checkpoint: CheckpointId
    token: Token
    parent: CheckpointId | None
    world: int
    updates: int
    plan_digest: bytes
    parts: tuple[Part, ...]
    """By rank."""


@dataclass(frozen=True)
class Retain:
    """A checkpoint has become durable: apply retention now. Never delete `pinned`."""

    pinned: tuple[CheckpointId, ...]


@dataclass(frozen=True)
class Finished:
    """All ranks have finished. `tier` is the best tier of the last step; memory: slots are kept, say so."""

    checkpoint: CheckpointId | None
    tier: Tier


CoordinatorInstruction: TypeAlias = (
    Answer
    | Publish
    | Joined
    | NotJoined
    | Committed
    | Withdrawn
    | Dead
    | Quarantined
    | WriteManifest
    | Retain
    | Finished
)


def plan_digest(trees: Sequence[bytes]) -> bytes:
    """16 bytes that identify a commit plan: the layouts of all ranks, in rank order."""
    return hashlib.blake2b(b"".join(trees), digest_size=16, person=b"baft plan").digest()
