"""Which durable checkpoints may go. Pure: the decision only; deleting is the tier's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from baftd.checkpoint.identity import CheckpointId
from baftd.errors import UsageError
from baftd.storage.interface import DurableCheckpoint

__all__ = ["to_delete"]


def to_delete(
    checkpoints: Sequence[DurableCheckpoint],
    *,
    keep_last: int,
    keep_every: int = 0,
    pinned: Collection[CheckpointId] = (),
    busy: Collection[CheckpointId] = (),
    abandoned: Callable[[CheckpointId], bool] = lambda _: False,
    quarantined: Collection[CheckpointId] = (),
    current_epoch: int,
) -> list[CheckpointId]:
    """Checkpoints of one job to delete now, oldest first.

    `keep_last`: complete checkpoints to keep, at least 1. `keep_every`: also keep complete ones whose step is a
    multiple of it (0: none). `pinned`: never deleted. `busy`: being written. `abandoned`: beyond the branching
    point of a later epoch. `quarantined`: failed verification. `current_epoch`: of the running token.

    Abandoned, quarantined, damaged and incomplete ones count for nothing. Abandoned ones go once the current epoch
    has a complete checkpoint of its own; quarantined and damaged ones once `keep_last` newer good ones are there;
    incomplete ones once a newer good one is. Without a good checkpoint nothing is deleted.
    """
    if keep_last < 1:
        raise UsageError(f"durable retention must keep at least 1 checkpoint, not {keep_last}")
    if keep_every < 0:
        raise UsageError(f"durable retention by step multiple is {keep_every}; 0 turns it off")
    untouchable = set(pinned) | set(busy) | {c.checkpoint for c in checkpoints if c.being_written}
    bad = set(quarantined)
    good = sorted(
        c.checkpoint
        for c in checkpoints
        if c.state == "complete" and c.checkpoint not in bad and not abandoned(c.checkpoint)
    )
    if not good:
        return []
    newest = good[-1]
    kept = set(good[-keep_last:])
    if keep_every:
        kept.update(c for c in good if c.step % keep_every == 0)
    branched = newest.epoch >= current_epoch  # the running epoch has something of its own to go back to
    gone: list[CheckpointId] = []
    for found in checkpoints:
        checkpoint = found.checkpoint
        if checkpoint in kept or checkpoint in untouchable:
            continue
        if abandoned(checkpoint):
            remove = branched
        elif found.state == "incomplete":
            remove = checkpoint < newest
        elif found.state == "damaged" or checkpoint in bad:
            remove = sum(1 for c in good if c > checkpoint) >= keep_last
        else:
            remove = True
        if remove:
            gone.append(checkpoint)
    return sorted(gone)
