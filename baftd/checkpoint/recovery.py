"""What a start of the job goes on from: the newest checkpoint on the line whose every part can be had.

Input is what nodes and durable directories say they hold (inventories) and the job's history. A checkpoint counts
when each rank's shard lies somewhere verified, under one token, one world and one plan of who saves what; the places
may be of different tiers. For every newer step that is passed over the plan says why, in a sentence.

A checkpoint that only has another world than the start is not passed over: an older one would be taken in silence, and
the newer one lost. The start is refused, or with `reshard` takes it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baftd.checkpoint.facts import Held, Inventory, ShardFacts
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.errors import NothingRestorable, UsageError

__all__ = ["RestorePlan", "name_ranks", "plan_restore"]

_TIERS = ("memory", "peer", "durable")
_MOST_REASONS = 20


@dataclass(frozen=True)
class RestorePlan:
    """Where each rank's shard comes from. `checkpoint` None: begin afresh at step 0.

    `world`: ranks that saved the checkpoint, and `sources` has one of each; with `reshard` not those that start.
    `passed_over` has one sentence for each newer step that could not be used, newest first.
    """

    checkpoint: CheckpointId | None
    token: Token | None
    updates: int
    world: int
    sources: Mapping[int, Held]
    passed_over: tuple[str, ...]
    highest_step: int

    @property
    def step(self) -> int:
        """The step to go on from."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def divided(self) -> bool:
        """Whether replicated ranges were saved by one holder only: a rank's state is in all shards together."""
        return any(held.shard.plan for held in self.sources.values())

    @property
    def lost_steps(self) -> int:
        """Steps that were trained and must be trained again."""
        return self.highest_step - self.step


def name_ranks(ranks: Iterable[int], limit: int = 8) -> str:
    """`rank 3`, `ranks 0-3, 7`: for messages."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:limit]]
    more = f" and {len(spans) - limit} more" if len(spans) > limit else ""
    single = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"{'rank' if single else 'ranks'} {', '.join(texts)}{more}"


def plan_restore(
    history: History,
    inventories: Sequence[Inventory],
    *,
    world: int | None = None,
    step: int | None = None,
    at_most: int | None = None,
    fresh: bool = False,
    reshard: bool = False,
    prefer: Mapping[int, str] | None = None,
) -> RestorePlan:
    """Choose the checkpoint to go on from.

    `world`: ranks of the new start; None takes each checkpoint's own. `reshard`: the start may have another world than
    the checkpoint. `step`: exactly this one; `at_most`: none newer. `prefer`: the node on which each rank's shard is
    wanted, whose memory is taken first. `fresh`: begin at step 0.

    Raises `NothingRestorable` when the job has been further but nothing can be had, naming the highest step and what
    is missing; `UsageError` when the newest that can be had was saved by another world and `reshard` is not set, for a
    `step` that is not on the line, or for arguments that contradict each other.
    """
    if fresh and (step is not None or at_most is not None):
        raise UsageError("fresh=True begins at step 0; it cannot be combined with a step.")
    if step is not None and at_most is not None:
        raise UsageError("give a step or an upper bound for it, not both.")
    found = _collect(history, inventories)
    highest = max(
        [history.highest_step, *(i.highest_step for i in inventories), *(c.step for c in found)],
        default=0,
    )
    if fresh or (not highest and step is None and at_most is None):
        return RestorePlan(None, None, 0, world or 0, {}, (), highest)
    reasons: list[str] = []
    for checkpoint in sorted(found, key=history.order, reverse=True):
        if step is not None and checkpoint.step != step:
            continue
        if at_most is not None and checkpoint.step > at_most:
            continue
        chosen = _judge(history, checkpoint, found[checkpoint], prefer or {})
        if isinstance(chosen, str):
            reasons.append(f"step {checkpoint.step} (epoch {checkpoint.epoch}): {chosen}")
            continue
        first = chosen[0].shard
        if world is not None and first.world != world and not reshard:
            raise _other_world(checkpoint, first.world, world)
        return RestorePlan(
            checkpoint, first.token, first.updates, first.world, chosen, tuple(reasons[:_MOST_REASONS]), highest
        )
    raise NothingRestorable(_nothing(highest, step, at_most, reasons), hint=_hint(step, at_most))


@dataclass
class _Candidate:
    """Everything known about one checkpoint: shards by rank, and what is bad about it."""

    shards: dict[int, list[Held]]
    bad: list[tuple[int, str]]


def _collect(history: History, inventories: Sequence[Inventory]) -> dict[CheckpointId, _Candidate]:
    found: dict[CheckpointId, _Candidate] = {}
    for inventory in inventories:
        for held in inventory.shards:
            candidate = found.setdefault(held.shard.checkpoint, _Candidate({}, []))
            candidate.shards.setdefault(held.shard.rank, []).append(held)
        for checkpoint, rank, reason in inventory.bad:
            found.setdefault(checkpoint, _Candidate({}, [])).bad.append((rank, reason))
    return found


def _judge(
    history: History,
    checkpoint: CheckpointId,
    candidate: _Candidate,
    prefer: Mapping[int, str],
) -> dict[int, Held] | str:
    """A source for every rank, or the reason why there is none."""
    reason = history.quarantined.get(checkpoint)
    if reason is not None:
        return f"quarantined: {reason}"
    if history.is_abandoned(checkpoint):
        return "abandoned: training went on from an earlier step"
    epoch = history.find(checkpoint.epoch)
    if epoch is None:
        return f"nobody remembers epoch {checkpoint.epoch}, so it cannot be told whose shards these are"
    chosen: dict[int, Held] = {}
    missing: list[int] = []
    bad = list(candidate.bad)
    for rank in range(epoch.world):
        usable: list[Held] = []
        for held in candidate.shards.get(rank, ()):
            if held.shard.token != epoch.token or held.shard.world != epoch.world:
                bad.append((rank, f"a shard of another start ({held.shard.token.incarnation[:8]}) is no part of it"))
                continue
            known = history.is_bad(checkpoint, rank, held.source.tier, held.source.node)
            if known is not None:
                bad.append((rank, known.reason))
            else:
                usable.append(held)
        if len({(h.shard.root_digest, h.shard.tree_digest) for h in usable}) > 1:
            places = ", ".join(f"{h.source.tier}{f' of {h.source.node}' if h.source.node else ''}" for h in usable)
            return f"rank {rank}'s copies differ ({places})"
        if usable:
            chosen[rank] = min(usable, key=lambda h: _preference(h, prefer.get(h.shard.rank)))
        else:
            missing.append(rank)
    if missing:
        why = [f"rank {rank}: {text}" for rank, text in bad if rank in missing]
        return f"no verified shard of {name_ranks(missing)}" + (f" ({'; '.join(why[:4])})" if why else "")
    odd = next((rank for rank, held in chosen.items() if held.shard.plan != chosen[0].shard.plan), None)
    if odd is not None:
        return f"ranks 0 and {odd} saved it under different plans: there may be ranges that nobody has saved"
    differing = _replicas_differ([held.shard for held in chosen.values()])
    if differing is not None:
        return f"replicas differ: ranks {differing[0]} and {differing[1]} hold the same ranges with different bytes"
    return chosen


def _preference(held: Held, node: str | None) -> tuple[int, int, str]:
    """Own node's memory, other memory, durable."""
    return (
        int(held.source.node != node or held.source.tier != "memory"),
        _TIERS.index(held.source.tier),
        held.source.node,
    )


def _replicas_differ(shards: Sequence[ShardFacts]) -> tuple[int, int] | None:
    seen: dict[bytes, tuple[bytes, int]] = {}
    for shard in shards:
        for key, digest in shard.replicas:
            before = seen.setdefault(key, (digest, shard.rank))
            if before[0] != digest:
                return before[1], shard.rank
    return None


def _other_world(checkpoint: CheckpointId, saved: int, starting: int) -> UsageError:
    """No `NothingRestorable`: it is there and whole, and who answers that error with fresh=True would lose it."""
    who = "1 rank" if saved == 1 else f"{saved} ranks"
    starts = "1 is starting" if starting == 1 else f"{starting} are starting"
    return UsageError(
        f"step {checkpoint.step} (epoch {checkpoint.epoch}) was saved by {who}, and {starts}.",
        hint=f"resume(reshard=True) cuts it anew; else start {who}.",
    )


def _nothing(highest: int, step: int | None, at_most: int | None, reasons: Sequence[str]) -> str:
    wanted = (
        f"step {step} cannot be restored"
        if step is not None
        else f"no step up to {at_most} can be restored"
        if at_most is not None
        else "no step can be restored"
    )
    why = "; ".join(reasons[:_MOST_REASONS]) if reasons else "no verified shard of it is known anywhere"
    return f"{wanted}: the job has been at step {highest}. {why[0].upper()}{why[1:]}."


def _hint(step: int | None, at_most: int | None) -> str:
    if step is not None or at_most is not None:
        return "`baftd list` shows what there is."
    return "Start the daemons of the missing nodes, or begin again with resume(fresh=True)."
