"""What this node knows of a job and has of it, on disk: the truth that survives a reboot.

    <state_dir>/node.json            {"node": name, "incarnation": 32 hexadecimal digits}
    <state_dir>/<job>/manifest       journal, one record a change, fsync after each:
        {"k": "epoch", "epoch": ...}                        an epoch of the job began
        {"k": "hold", "tier", "node", "incarnation", "shard", "place"}       a verified shard is held
        {"k": "release", "tier", "checkpoint", "rank"}      it is not any more
        {"k": "quarantine", "checkpoint", "reason"}
        {"k": "step", "step"}                               highest step seen (not synced: a hint)
        {"k": "failed", "epoch"}                            processes of the epoch ended without finishing the job
        {"k": "trained", "seconds"}                         time trained in all epochs (a hint, as the step is)

Shards of the memory tier live as long as the node's memory: they are believed only under the incarnation of the node
that held them. Coordinators keep an index of manifests and are rebuilt from them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from baftd.checkpoint.facts import (
    EpochFacts,
    Held,
    Inventory,
    ShardFacts,
    Source,
    Tier,
    checkpoint_from,
    checkpoint_record,
    newer_incarnation,
    next_incarnation,
)
from baftd.checkpoint.identity import CheckpointId, check_incarnation
from baftd.errors import BaftError, FormatError, UsageError
from baftd.memory.arena import ArenaRoot
from baftd.memory.journal import FileOps, Journal

__all__ = ["NodeManifest", "node_identity"]

_TIERS = ("memory", "peer", "durable")
_REMOVE = "Remove it if no shared memory of this node holds checkpoints: the node then begins a new life."


def node_identity(
    state_dir: str | os.PathLike[str],
    node: str,
    root: ArenaRoot,
    random_bits: Callable[[], int],
    *,
    ops: FileOps | None = None,
) -> tuple[str, bool]:
    """(incarnation of the node, whether it is new).

    A node's incarnation is that of its memory: it is written into the arena's directory and lost with it, after a
    reboot as after the restart of a container. The state directory remembers the last one, so that the next sorts
    after it. `root` must have been created; `random_bits` gives 64 of them. Raises UsageError if the state directory
    is another node's, OSError.
    """
    ops = ops or FileOps()
    path = os.path.join(state_dir, "node.json")
    known = _read_identity(path)
    if known is not None and known["node"] != node:
        raise UsageError(
            f"{path} is that of node {known['node']!r}, but this daemon is node {node!r}.",
            hint="Give each node a state_dir of its own, or set node to its former name.",
        )
    previous = known["incarnation"] if known else None
    living = root.incarnation()
    with contextlib.suppress(UsageError):
        check_incarnation(living)
        if previous is None or living == previous or newer_incarnation(living, previous):
            if living != previous:
                _write_identity(path, node, living, ops)
            return living, False
    fresh = next_incarnation(previous, random_bits())
    # On disk first: if we die between the two, this number is used by nobody, which is better than twice.
    _write_identity(path, node, fresh, ops)
    root.set_incarnation(fresh)
    return fresh, True


def _read_identity(path: str) -> dict[str, str] | None:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FormatError(f"{path} is damaged: {error}.", hint=_REMOVE) from error
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in ("node", "incarnation")):
        raise FormatError(f"{path} is damaged: it has no node and incarnation.", hint=_REMOVE)
    try:
        check_incarnation(value["incarnation"])
    except UsageError as error:
        raise FormatError(f"{path} is damaged: {error.message}", hint=_REMOVE) from error
    return value


def _write_identity(path: str, node: str, incarnation: str, ops: FileOps) -> None:
    temporary = f"{path}.new"
    fd = ops.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        data = json.dumps({"node": node, "incarnation": incarnation}).encode() + b"\n"
        while data:
            data = data[ops.write(fd, data) :]
        ops.fsync(fd)
    finally:
        ops.close(fd)
    ops.rename(temporary, path)
    ops.sync_directory(os.path.dirname(path) or ".")


class NodeManifest:
    """The manifest of one job on this node. Make one with `open`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.epochs: dict[int, EpochFacts] = {}
        """Epochs of the job that this node has seen, by number."""
        self.highest_step = 0
        """Highest step that any rank was seen at here."""
        self.quarantined: dict[CheckpointId, str] = {}
        """Checkpoints that must not be tried again, with the reason."""
        self.failures = 0
        """Epochs whose processes ended without finishing the job."""
        self.failed_epoch = 0
        """The newest of them; 0: none."""
        self.trained = 0.0
        """Seconds that ranks of this node have trained, in all epochs."""
        self._held: dict[tuple[Tier, CheckpointId, int], tuple[str, Held]] = {}
        self._written_step = 0
        self._written_trained = 0.0

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, ops: FileOps | None = None) -> tuple[NodeManifest, str | None]:
        """Read a manifest, or begin one, and what was wrong with it (one sentence for the log, or None).

        A record that makes no sense is passed over and named: what can be read of the rest counts. Raises OSError.
        """
        journal, found = Journal.open(path, fsync=True, ops=ops)
        manifest = cls(journal)
        problems = [found.problem] if found.problem else []
        for number, record in enumerate(found.all_records):
            try:
                manifest._apply(record)
            except BaftError as error:
                problems.append(f"manifest {os.fspath(path)}, record {number}: {error}")
        return manifest, " ".join(problems) or None

    # ------------------------------------------------------------------------------------ changes

    def begin_epoch(self, epoch: EpochFacts) -> None:
        """An epoch of the job is known. Raises FormatError if another incarnation has that number here."""
        known = self.epochs.get(epoch.token.epoch)
        if known == epoch:
            return
        if known is not None and known.token != epoch.token:
            raise FormatError(
                f"manifest {self._journal.path}: epoch {epoch.token.epoch} is known of incarnation "
                f"{known.token.incarnation}, and {epoch.token.incarnation} claims it too."
            )
        self._change({"k": "epoch", "epoch": epoch.to_record()})

    def hold(self, held: Held, incarnation: str) -> None:
        """A verified shard is held here by this node, which lives its `incarnation`."""
        if self._held.get(self._key(held.source.tier, held.shard.checkpoint, held.shard.rank)) == (incarnation, held):
            return
        self._change(self._hold_record(held, incarnation))

    def release(self, tier: Tier, checkpoint: CheckpointId, rank: int) -> None:
        """A shard is not held any more. Call it before the bytes are removed."""
        if self._key(tier, checkpoint, rank) in self._held:
            self._change(
                {"k": "release", "tier": tier, "checkpoint": checkpoint_record(checkpoint), "rank": rank},
            )

    def quarantine(self, checkpoint: CheckpointId, reason: str) -> None:
        """A checkpoint failed verification."""
        if checkpoint not in self.quarantined:
            self._change({"k": "quarantine", "checkpoint": checkpoint_record(checkpoint), "reason": reason})

    def note_step(self, step: int) -> None:
        """A rank was seen at `step`. Kept in memory; written with the next change, or by `close`."""
        self.highest_step = max(self.highest_step, step)

    def note_trained(self, seconds: float) -> None:
        """Ranks have trained for so long. Kept in memory; written with the next change, or by `close`."""
        self.trained += seconds

    def fail(self, epoch: int) -> bool:
        """Processes of the epoch have ended without finishing the job. False: that is known, or older."""
        if epoch <= self.failed_epoch:
            return False
        self._change({"k": "failed", "epoch": epoch, "failures": self.failures + 1})
        return True

    def close(self) -> None:
        """Write the highest step and the time trained, and close the file."""
        try:
            hints = self._hints()
            if hints:
                self._journal.append(*hints)
        finally:
            self._journal.close()

    # ------------------------------------------------------------------------------------ questions

    def held(self, incarnation: str, tier: Tier | None = None) -> tuple[Held, ...]:
        """Shards held, newest first; of the memory and peer tiers only those of this life of the node."""
        chosen = [
            held
            for (of_tier, _, _), (of_life, held) in self._held.items()
            if tier in (None, of_tier) and (of_tier == "durable" or of_life == incarnation)
        ]
        return tuple(sorted(chosen, key=lambda held: (held.shard.checkpoint, -held.shard.rank), reverse=True))

    def inventory(self, node: str, incarnation: str) -> Inventory:
        """Everything a coordinator asks for."""
        return Inventory(
            node=node,
            incarnation=incarnation,
            shards=self.held(incarnation),
            epochs=tuple(self.epochs[number] for number in sorted(self.epochs)),
            highest_step=self.highest_step,
            quarantined=tuple(sorted(self.quarantined.items())),
        )

    # ------------------------------------------------------------------------------------ records

    def _change(self, record: dict[str, Any]) -> None:
        records = [record, *self._hints()]
        self._journal.append(*records)
        for one in records:
            self._apply(one)
        if self._journal.wants_rewrite:
            self._journal.rewrite(self._records())

    def _hints(self) -> list[dict[str, Any]]:
        """What has grown since it was written last."""
        hints: list[dict[str, Any]] = []
        if self.highest_step > self._written_step:
            hints.append({"k": "step", "step": self.highest_step})
        if self.trained > self._written_trained:
            hints.append({"k": "trained", "seconds": self.trained})
        return hints

    def _records(self) -> Iterator[dict[str, Any]]:
        """The shortest journal that says the same."""
        for number in sorted(self.epochs):
            yield {"k": "epoch", "epoch": self.epochs[number].to_record()}
        for checkpoint, reason in self.quarantined.items():
            yield {"k": "quarantine", "checkpoint": checkpoint_record(checkpoint), "reason": reason}
        for incarnation, held in self._held.values():
            yield self._hold_record(held, incarnation)
        if self.failed_epoch:
            yield {"k": "failed", "epoch": self.failed_epoch, "failures": self.failures}
        yield {"k": "step", "step": self.highest_step}
        yield {"k": "trained", "seconds": self.trained}

    def _hold_record(self, held: Held, incarnation: str) -> dict[str, Any]:
        return {
            "k": "hold",
            "tier": held.source.tier,
            "node": held.source.node,
            "incarnation": incarnation,
            "shard": held.shard.to_record(),
            "place": held.source.place,
        }

    def _apply(self, record: dict[str, Any]) -> None:
        """Take one record in. Raises BaftError if it makes no sense."""
        try:
            self._apply_kind(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"it does not have the fields of one ({error!r})") from error

    def _apply_kind(self, record: dict[str, Any]) -> None:
        kind = record["k"]
        if kind == "epoch":
            epoch = EpochFacts.from_record(record["epoch"])
            known = self.epochs.get(epoch.token.epoch)
            if known is not None and known.token != epoch.token:
                raise FormatError(f"epoch {epoch.token.epoch} is claimed by two incarnations")
            self.epochs[epoch.token.epoch] = epoch
        elif kind == "hold":
            if not isinstance(record["place"], dict):
                raise FormatError("place is not a map")
            shard = ShardFacts.from_record(record["shard"])
            source = Source(self._tier(record["tier"]), str(record["node"]), record["place"])
            key = self._key(source.tier, shard.checkpoint, shard.rank)
            self._held[key] = (check_incarnation(str(record["incarnation"])), Held(shard, source))
            self.highest_step = max(self.highest_step, shard.step)
            self._written_step = max(self._written_step, shard.step)
        elif kind == "release":
            checkpoint = checkpoint_from(record["checkpoint"])
            if checkpoint is not None:
                self._held.pop(self._key(self._tier(record["tier"]), checkpoint, int(record["rank"])), None)
        elif kind == "quarantine":
            checkpoint = checkpoint_from(record["checkpoint"])
            if checkpoint is not None:
                self.quarantined[checkpoint] = str(record["reason"])
        elif kind == "step":
            self.highest_step = max(self.highest_step, int(record["step"]))
            self._written_step = max(self._written_step, int(record["step"]))
        elif kind == "failed":
            self.failures, self.failed_epoch = int(record["failures"]), int(record["epoch"])
        elif kind == "trained":
            seconds = float(record["seconds"])
            if not 0 <= seconds < math.inf:
                raise FormatError(f"{seconds} are no seconds of training")
            self.trained = max(self.trained, seconds)
            self._written_trained = seconds
        else:
            raise FormatError(f"its kind {kind!r} is not known")

    @staticmethod
    def _key(tier: Tier, checkpoint: CheckpointId, rank: int) -> tuple[Tier, CheckpointId, int]:
        return tier, checkpoint, rank

    @staticmethod
    def _tier(value: object) -> Tier:
        for tier in _TIERS:
            if value == tier:
                return tier  # type: ignore[return-value]
        raise FormatError(f"tier {value!r} is not known")
