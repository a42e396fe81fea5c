"""A job's history: its epochs and their lineage, which checkpoints are still on the line, what is quarantined.

An epoch records the checkpoint it began from. Following these parents from the newest epoch (the head) gives the
*line*: the head itself, then each ancestor up to the step at which it was left. A checkpoint that is not on the
line is abandoned for good: it is never offered, though its step number may come again in a later epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baftd.checkpoint.facts import (
    EpochFacts,
    Record,
    checkpoint_from,
    checkpoint_record,
)
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.errors import FormatError, TryAgain, UsageError

__all__ = ["BadSource", "EpochConflict", "History"]


class EpochConflict(TryAgain):
    """Somebody else opened an epoch in between: look again, then ask with the newer number."""

    code = "epoch_conflict"


@dataclass(frozen=True)
class BadSource:
    """One rank's shard at one place that failed verification. It is not tried again by itself."""

    checkpoint: CheckpointId
    rank: int
    tier: str
    node: str
    reason: str


class History:
    """Epochs, lineage, quarantine and the highest step seen of one job.

    Methods that change something return the records to persist (with fsync) before the change is announced; an
    empty tuple says that nothing changed. `History.replay(records)` gives the same history back.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, EpochFacts] = {}
        self._quarantined: dict[CheckpointId, str] = {}
        self._bad: dict[tuple[CheckpointId, int, str, str], BadSource] = {}
        self._highest = 0
        self._line: tuple[EpochFacts, ...] = ()
        self._limits: dict[int, int | None] = {}

    # ------------------------------------------------------------ asking

    @property
    def epoch(self) -> int:
        """The newest epoch's number; 0 for a job that is new."""
        return self._line[0].token.epoch if self._line else 0

    @property
    def head(self) -> EpochFacts | None:
        """The newest epoch."""
        return self._line[0] if self._line else None

    @property
    def token(self) -> Token | None:
        """The newest epoch's token: the only one that may write."""
        return self._line[0].token if self._line else None

    @property
    def highest_step(self) -> int:
        """The highest step ever seen in any epoch."""
        return self._highest

    @property
    def line(self) -> tuple[EpochFacts, ...]:
        """The head and its ancestors, newest first."""
        return self._line

    @property
    def quarantined(self) -> dict[CheckpointId, str]:
        """Quarantined checkpoints and why."""
        return dict(self._quarantined)

    @property
    def bad_sources(self) -> tuple[BadSource, ...]:
        """Shards that failed verification somewhere."""
        return tuple(self._bad.values())

    def epochs(self) -> tuple[EpochFacts, ...]:
        """All epochs known, oldest first."""
        return tuple(self._epochs[number] for number in sorted(self._epochs))

    def find(self, epoch: int) -> EpochFacts | None:
        """The epoch of that number, if it is known."""
        return self._epochs.get(epoch)

    def on_line(self, token: Token, step: int) -> bool:
        """Whether state(step) taken under `token` is an ancestor of what the head epoch trains (or its own)."""
        known = self._epochs.get(token.epoch)
        return known is not None and known.token == token and self._reaches(token.epoch, step)

    def is_abandoned(self, checkpoint: CheckpointId) -> bool:
        """Whether the checkpoint lies beyond a branching point, or in an epoch the line does not pass."""
        return not self._reaches(checkpoint.epoch, checkpoint.step)

    def order(self, checkpoint: CheckpointId) -> tuple[int, int]:
        """Sort key of candidates on the line: the higher step is the newer one."""
        return (checkpoint.step, checkpoint.epoch)

    def _reaches(self, epoch: int, step: int) -> bool:
        if epoch not in self._limits:
            return False
        limit = self._limits[epoch]
        return limit is None or step <= limit

    # ------------------------------------------------------------ changing

    def open_epoch(self, token: Token, *, world: int, parent: CheckpointId | None, expected: int) -> tuple[Record, ...]:
        """Open an epoch by compare-and-set: `expected` must be the newest epoch, and `token` one above it.

        Opening the head again with the same token and parent changes nothing. Raises `EpochConflict` when the
        newest epoch is another than expected, `UsageError` for a token or a parent that cannot be.
        """
        head = self.head
        if head is not None and head.token == token and head.world == world:
            if head.parent == parent:
                return ()
            raise EpochConflict(f"epoch {token.epoch} is already open with parent {head.parent}, not {parent}.")
        if self.epoch != expected:
            raise EpochConflict(f"epoch {self.epoch} was opened while epoch {expected} was expected.")
        if token.epoch != expected + 1:
            raise UsageError(f"epoch {token.epoch} cannot follow epoch {expected}.")
        if any(known.token.incarnation == token.incarnation for known in self._epochs.values()):
            raise UsageError(
                f"incarnation {token.incarnation} has opened an epoch of this job before.",
                hint="Every start of a job needs a new BAFTD_INCARNATION.",
            )
        if parent is not None and self.is_abandoned(parent):
            raise UsageError(f"{parent} is not on the line of epoch {self.epoch}: it was abandoned.")
        return self._add(EpochFacts(token, world, parent))

    def reparent(self, token: Token, parent: CheckpointId | None) -> tuple[Record, ...]:
        """Give the head another, older parent: what it should have begun from could not be verified.

        Only before the epoch has made a step of its own (the caller knows). Raises `UsageError` otherwise.
        """
        head = self.head
        if head is None or head.token != token:
            raise UsageError(f"epoch {token.epoch} is not the newest epoch.")
        if head.parent == parent:
            return ()
        if head.parent is None or parent is None or parent.step >= head.parent.step or self.is_abandoned(parent):
            raise UsageError(f"epoch {token.epoch} cannot begin from {parent}: it is not older than {head.parent}.")
        return self._add(replace(head, parent=parent, revision=head.revision + 1))

    def see_step(self, step: int) -> tuple[Record, ...]:
        """Remember that training has reached `step`."""
        if step <= self._highest:
            return ()
        self._highest = step
        return ({"k": "highest", "step": step},)

    def quarantine(self, checkpoint: CheckpointId, reason: str) -> tuple[Record, ...]:
        """Never offer the checkpoint again. The first reason stays."""
        if checkpoint in self._quarantined:
            return ()
        self._quarantined[checkpoint] = reason
        return ({"k": "quarantine", "checkpoint": checkpoint_record(checkpoint), "reason": reason},)

    def quarantine_source(self, bad: BadSource) -> tuple[Record, ...]:
        """Never use this rank's shard at this place again; other places of the same shard stay usable."""
        key = (bad.checkpoint, bad.rank, bad.tier, bad.node)
        if key in self._bad:
            return ()
        self._bad[key] = bad
        return (
            {
                "k": "bad_source",
                "checkpoint": checkpoint_record(bad.checkpoint),
                "rank": bad.rank,
                "tier": bad.tier,
                "node": bad.node,
                "reason": bad.reason,
            },
        )

    def is_bad(self, checkpoint: CheckpointId, rank: int, tier: str, node: str) -> BadSource | None:
        """Why this shard at this place must not be used, if so."""
        return self._bad.get((checkpoint, rank, tier, node))

    def merge(self, epochs: Iterable[EpochFacts]) -> tuple[Record, ...]:
        """Learn epochs from a node's manifest or a durable one; what is known already wins.

        An unknown epoch is added even above the head (a coordinator that lost its memory learns its head so). An
        epoch known under another token stays as it is: the other one's shards are foreign and are never offered. Of
        two parents of the same token the later revision counts, else the older one, which offers less.
        """
        records: list[Record] = []
        for facts in sorted(epochs, key=lambda e: e.token.epoch):
            known = self._epochs.get(facts.token.epoch)
            if known is None or (known.token == facts.token and _later(facts, known)):
                records += self._add(facts)
        return tuple(records)

    def adopt(self, line: Iterable[EpochFacts]) -> tuple[Record, ...]:
        """Take over what a coordinator says of the line, also where it contradicts what was known."""
        records: list[Record] = []
        for facts in sorted(line, key=lambda e: e.token.epoch):
            if self._epochs.get(facts.token.epoch) != facts:
                records += self._add(facts)
        return tuple(records)

    # ------------------------------------------------------------ records

    def to_records(self) -> tuple[Record, ...]:
        """The whole history, as few records as possible (to rewrite a journal)."""
        records: list[Record] = [{"k": "epoch", **facts.to_record()} for facts in self.epochs()]
        records += [
            {"k": "quarantine", "checkpoint": checkpoint_record(checkpoint), "reason": reason}
            for checkpoint, reason in self._quarantined.items()
        ]
        records += [
            {
                "k": "bad_source",
                "checkpoint": checkpoint_record(bad.checkpoint),
                "rank": bad.rank,
                "tier": bad.tier,
                "node": bad.node,
                "reason": bad.reason,
            }
            for bad in self._bad.values()
        ]
        if self._highest:
            records.append({"k": "highest", "step": self._highest})
        return tuple(records)

    @classmethod
    def replay(cls, records: Iterable[Record]) -> History:
        """The history that wrote these records. Raises `FormatError` for a record that cannot be one of them.

        Records of other kinds are passed over: a journal may hold more than the history.
        """
        history = cls()
        for record in records:
            history.apply(record)
        return history

    def apply(self, record: Record) -> None:
        """Take one record in. Raises `FormatError`."""
        try:
            kind = record["k"]
            if kind == "epoch":
                self._add(EpochFacts.from_record(record))
            elif kind == "highest":
                self._highest = max(self._highest, int(record["step"]))
            elif kind in ("quarantine", "bad_source"):
                checkpoint = checkpoint_from(record["checkpoint"])
                if checkpoint is None:
                    raise FormatError("a quarantine record names no checkpoint")
                if kind == "quarantine":
                    self.quarantine(checkpoint, str(record["reason"]))
                else:
                    self.quarantine_source(
                        BadSource(
                            checkpoint,
                            int(record["rank"]),
                            str(record["tier"]),
                            str(record["node"]),
                            str(record["reason"]),
                        )
                    )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"a history record does not have the fields of one: {error!r}") from error

    def _add(self, facts: EpochFacts) -> tuple[Record, ...]:
        self._epochs[facts.token.epoch] = facts
        line: list[EpochFacts] = []
        limits: dict[int, int | None] = {}
        epoch, limit = max(self._epochs), None
        while True:
            limits[epoch] = limit
            known = self._epochs.get(epoch)
            if known is None:  # an ancestor nobody remembers: its limit is known, what came before it is not
                break
            line.append(known)
            if known.parent is None or known.parent.epoch in limits:
                break
            epoch, limit = known.parent.epoch, known.parent.step
        self._line, self._limits = tuple(line), limits
        if facts.parent is not None:
            self._highest = max(self._highest, facts.parent.step)
        return ({"k": "epoch", **facts.to_record()},)


def _later(one: EpochFacts, other: EpochFacts) -> bool:
    """Whether `one` says more of the same epoch than `other`."""
    if one.revision != other.revision or one.parent == other.parent:
        return one.revision > other.revision
    return one.parent is None or (other.parent is not None and one.parent.step < other.parent.step)
