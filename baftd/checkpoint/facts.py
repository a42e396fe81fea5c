"""What nodes and the coordinator tell each other about shards: plain values, and their form in a journal.

`Ready` is what every core of this room returns: first the records, which the shell must persist in order, then
the instructions, which it may carry out and announce only after that. A core never acts by itself.

Records are dicts of MessagePack types with a `k` (kind) key, so any journal can hold them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from baftd.checkpoint.cadence import Cadence, CadenceProposal, is_probe
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.errors import FormatError

__all__ = [
    "Answer",
    "Cadence",
    "CadenceProposal",
    "EpochFacts",
    "Held",
    "Inventory",
    "JobView",
    "Ready",
    "Record",
    "Report",
    "RestoredRank",
    "ShardFacts",
    "Skipped",
    "Source",
    "Tier",
    "Verdict",
    "Writer",
    "checkpoint_from",
    "checkpoint_record",
    "is_lasting",
    "is_probe",
    "needs_fsync",
    "newer_incarnation",
    "next_incarnation",
    "token_from",
    "token_record",
]

Tier: TypeAlias = Literal["memory", "peer", "durable"]
Record: TypeAlias = dict[str, Any]
"""A journal record: MessagePack types only."""

Instruction = TypeVar("Instruction", covariant=True)


@dataclass(frozen=True)
class Ready(Generic[Instruction]):
    """`records` must be persisted, in order, before any of `announce` is carried out."""

    records: tuple[Record, ...] = ()
    announce: tuple[Instruction, ...] = ()


_LASTING = frozenset({"epoch", "quarantine", "bad_source", "highest"})
_LOSABLE = frozenset({"highest"})


def needs_fsync(record: Record) -> bool:
    """Whether a record of a job's history must survive a power loss. The highest step seen is worth no fsync."""
    return record["k"] not in _LOSABLE


def is_lasting(record: Record) -> bool:
    """Whether a record belongs into the node's manifest, which outlives its memory, not into the slots' journal."""
    return record["k"] in _LASTING


# ---------------------------------------------------------------- identities of processes and nodes


@dataclass(frozen=True, order=True)
class Writer:
    """A process: its pid and its start time in clock ticks since boot, which tells a reused pid."""

    pid: int
    start: int

    def __str__(self) -> str:
        return f"pid {self.pid}"


def next_incarnation(previous: str | None, random_bits: int) -> str:
    """The incarnation of a node whose memory is new: 32 hexadecimal digits, sorting after `previous`.

    The first 16 digits count, the last 16 are `random_bits`, so that a node which lost its state directory
    is still not taken for its former self. A daemon that restarts beside its slots keeps its incarnation.
    """
    count = int(previous[:16], 16) + 1 if previous else 1
    return f"{count:016x}{random_bits & (1 << 64) - 1:016x}"


def newer_incarnation(one: str, other: str) -> bool:
    """Whether incarnation `one` of a node began after incarnation `other`."""
    return one[:16] > other[:16] or (one[:16] == other[:16] and one > other)


# ---------------------------------------------------------------- shards


@dataclass(frozen=True)
class ShardFacts:
    """One rank's shard of one step, as its header and its digests describe it.

    `tree_digest` identifies the layout of the image, `root_digest` its bytes; `digests` are the chunk digests
    in image order (opaque here). `replicas` pairs the key of a set of stable ranges with the digest of their
    bytes: two ranks of one step with the same key must have the same digest (invariant 3).

    `plan` identifies the division of replicated ranges under which the shard was saved: all shards of a step must have
    been saved under one. Empty: not divided, the rank has saved all it holds.
    """

    token: Token
    rank: int
    world: int
    step: int
    updates: int
    tree_digest: bytes
    root_digest: bytes
    image_length: int
    small_length: int = 0
    digests: bytes = b""
    replicas: tuple[tuple[bytes, bytes], ...] = ()
    plan: bytes = b""

    @cached_property
    def checkpoint(self) -> CheckpointId:
        """(epoch, step) of the shard."""
        return CheckpointId(self.token.epoch, self.step)

    def verified(self, root_digest: bytes, digests: bytes, replicas: tuple[tuple[bytes, bytes], ...]) -> ShardFacts:
        """The same shard with digests that were just computed."""
        return replace(self, root_digest=root_digest, digests=digests, replicas=replicas)

    def to_record(self) -> Record:
        """A dict of MessagePack types."""
        record: Record = {
            "token": token_record(self.token),
            "rank": self.rank,
            "world": self.world,
            "step": self.step,
            "updates": self.updates,
            "tree": self.tree_digest,
            "root": self.root_digest,
            "image": self.image_length,
            "small": self.small_length,
            "digests": self.digests,
            "replicas": [[key, digest] for key, digest in self.replicas],
        }
        if self.plan:
            record["plan"] = self.plan
        return record

    @staticmethod
    def from_record(record: Record) -> ShardFacts:
        """The inverse of `to_record`; raises `FormatError` for anything else."""
        try:
            return ShardFacts(
                token=token_from(record["token"]),
                rank=int(record["rank"]),
                world=int(record["world"]),
                step=int(record["step"]),
                updates=int(record["updates"]),
                tree_digest=bytes(record["tree"]),
                root_digest=bytes(record["root"]),
                image_length=int(record["image"]),
                small_length=int(record["small"]),
                digests=bytes(record["digests"]),
                replicas=tuple((bytes(key), bytes(digest)) for key, digest in record["replicas"]),
                plan=bytes(record.get("plan", b"")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"a shard record does not have the fields of one: {error!r}") from error


def token_record(token: Token) -> list[Any]:
    """`[epoch, incarnation]`."""
    return [token.epoch, token.incarnation]


def token_from(value: Any) -> Token:
    """The inverse of `token_record`; raises `FormatError`."""
    if not (isinstance(value, list | tuple) and len(value) == 2):
        raise FormatError(f"{value!r} is not a token")
    epoch, incarnation = value
    if not (isinstance(epoch, int) and isinstance(incarnation, str)):
        raise FormatError(f"{value!r} is not a token")
    return Token(epoch, incarnation)


def checkpoint_record(checkpoint: CheckpointId | None) -> list[int] | None:
    """`[epoch, step]`, or None."""
    return None if checkpoint is None else [checkpoint.epoch, checkpoint.step]


def checkpoint_from(value: Any) -> CheckpointId | None:
    """The inverse of `checkpoint_record`; raises `FormatError`."""
    if value is None:
        return None
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(x, int) for x in value)):
        raise FormatError(f"{value!r} is not a checkpoint")
    return CheckpointId(value[0], value[1])


# ---------------------------------------------------------------- node -> coordinator


@dataclass(frozen=True)
class Report:
    """A shard is verified at a tier. Sent again until answered; saying it twice changes nothing.

    `passed` is the newest step that the rank has sealed or skipped as the message is sent, `held` every step of this
    token that it then holds sealed in memory. They make a lost skip harmless: a step at or before `passed` that is
    not in `held` can never come back, so the coordinator may take it for dead, however late the message arrives.
    `place` says where a durable shard lies (the storage room's record, opaque here).

    `store` is the coordinator's memory that the node has joined: what was said to an earlier one, and is late, may
    speak of shards that are gone since, so another store takes no notice of it.
    """

    store: str
    node: str
    incarnation: str
    shard: ShardFacts
    tier: Tier
    passed: int
    held: tuple[int, ...]
    place: Record | None = None


@dataclass(frozen=True)
class Skipped:
    """The rank has no snapshot of `step` and never will. Other fields as in `Report`."""

    store: str
    node: str
    incarnation: str
    token: Token
    rank: int
    step: int
    reason: str
    passed: int
    held: tuple[int, ...]


@dataclass(frozen=True)
class RestoredRank:
    """A rank has loaded `checkpoint`; of the ranks that saved it this node holds the verified shards of `held`.

    Those need not be ranks that load: another world may have saved it. Sent again until answered."""

    store: str
    node: str
    incarnation: str
    token: Token
    rank: int
    checkpoint: CheckpointId
    held: tuple[int, ...]


class Verdict(Enum):
    """What the coordinator made of a report or a skip."""

    PENDING = "pending"
    """Taken down; other ranks are missing."""
    COMMITTED = "committed"
    DEAD = "dead"
    """Some rank has no shard of this step: free it."""
    QUARANTINED = "quarantined"
    FENCED = "fenced"
    """The token is not the job's: its processes may write nothing more."""
    STALE_NODE = "stale_node"
    """A newer incarnation of this node has joined."""
    REFUSED = "refused"
    """The report contradicts what is known (world size, another digest for the same shard)."""
    UNKNOWN = "unknown"
    """The coordinator does not know this node, or not yet this token: join (again) with an inventory."""


# ---------------------------------------------------------------- coordinator -> node


@dataclass(frozen=True)
class EpochFacts:
    """One epoch of a job. `parent` is the checkpoint it began from; None: it began at step 0.

    `revision` counts how often the parent was changed before the epoch began to train (what it was to begin from
    could not be verified). -1: a guess, from a fence whose history is lost; whoever knows better is believed.
    """

    token: Token
    world: int
    parent: CheckpointId | None
    revision: int = 0

    def to_record(self) -> Record:
        """A dict of MessagePack types."""
        return {
            "token": token_record(self.token),
            "world": self.world,
            "parent": checkpoint_record(self.parent),
            "revision": self.revision,
        }

    @staticmethod
    def from_record(record: Record) -> EpochFacts:
        """The inverse of `to_record`; raises `FormatError`."""
        try:
            return EpochFacts(
                token_from(record["token"]),
                int(record["world"]),
                checkpoint_from(record["parent"]),
                int(record.get("revision", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"an epoch record does not have the fields of one: {error!r}") from error


@dataclass(frozen=True)
class JobView:
    """Everything a node must know of a job, in full. Losing, repeating or reordering views is harmless: a node
    ignores one whose (store, version) is not newer, and the next one says it all again.

    `line` is the head epoch and its ancestors, newest first. `committed` is the newest memory-committed
    checkpoint on that line (of the head epoch, or the one it was restored from). `dead` and `persist` are steps
    of the head epoch: declared dead and still held by somebody; to be made durable. `restored` is the checkpoint
    the head epoch began from, pinned until the epoch's first commit; None when it began afresh.
    """

    store: str
    version: int
    line: tuple[EpochFacts, ...]
    committed: CheckpointId | None
    durable: CheckpointId | None
    dead: tuple[int, ...]
    persist: tuple[int, ...]
    quarantined: tuple[CheckpointId, ...]
    cadence: Cadence
    finished: bool = False
    cadence_by: CadenceProposal | None = None
    """Whose proposal the cadence is: the node and the rank that need so long. None: nobody has proposed anything."""

    @property
    def token(self) -> Token | None:
        """The job's token; None before its first epoch."""
        return self.line[0].token if self.line else None

    @cached_property
    def restored(self) -> CheckpointId | None:
        """What the head epoch began from, for as long as it has committed nothing itself."""
        return None if not self.line or self.begun else self.line[0].parent

    @cached_property
    def begun(self) -> bool:
        """Whether the head epoch has committed a step of its own (at any tier)."""
        head = self.line[0].token.epoch if self.line else 0
        return any(c is not None and c.epoch == head for c in (self.committed, self.durable))


@dataclass(frozen=True)
class Answer:
    """The coordinator's answer to one report or skip, with the view that holds after it."""

    node: str
    incarnation: str
    rank: int
    token: Token
    step: int
    tier: Tier | None
    """None: the answer to a skip."""
    verdict: Verdict
    view: JobView
    detail: str = ""


# ---------------------------------------------------------------- inventories


@dataclass(frozen=True)
class Source:
    """A place from which one rank's shard can be had. `node` is empty for shared durable storage; `place` is
    opaque here (slot number and generation, or the storage room's record)."""

    tier: Tier
    node: str
    place: Record


@dataclass(frozen=True)
class Held:
    """A verified shard and where it lies."""

    shard: ShardFacts
    source: Source


@dataclass(frozen=True)
class Inventory:
    """What one place (a node's memory, or a durable directory) knows and has.

    `epochs` and `highest_step` rebuild a wiped coordinator. `bad` names what is there but cannot be used, with
    the reason (damaged, unreadable), so that a restore can say why it passed a step over.
    """

    node: str
    incarnation: str
    shards: tuple[Held, ...]
    epochs: tuple[EpochFacts, ...] = ()
    highest_step: int = 0
    bad: tuple[tuple[CheckpointId, int, str], ...] = ()
    """(checkpoint, rank, reason)"""
    quarantined: tuple[tuple[CheckpointId, str], ...] = ()
