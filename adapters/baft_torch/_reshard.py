"""Loading what other ranks saved, in another layout, into live models and optimizers.

The new layout is the live one: each tensor knows which part of which whole it is. Every saved rank's image is open;
`baftd.checkpoint.reshard` says which of its bytes belong into which tensor, and only those are copied, straight into
the tensor's memory where that is in order. Tensors are found by their base names (`_saved_state`), optimizer state by
the base name of its parameter. Of the small state goes on what all saved ranks agree on (`_common`).

First everything is planned and all differences are named at once; only then is the first byte written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baft_torch._agreement import Agreement
from baft_torch._common import Common, common_state
from baft_torch._layout import base_name
from baft_torch._layout import whole as whole_of
from baft_torch._reshard_optimizers import TreePlan, plan_tree
from baft_torch._restore import model_items
from baft_torch._saved_state import SavedState, Shards, by_ranks
from baft_torch._small import from_tree
from baft_torch._state import Item, TrainingState
from baft_torch._targets import Target
from baft_torch._tensors import is_dtensor
from baftd.checkpoint.ranges import whole
from baftd.checkpoint.reshard import find_reads
from baftd.errors import ModelMismatch

__all__ = ["ReshardPlan", "Shards", "plan_reshard"]

MAX_NAMED = 20
"""Differences spelled out in one error; of the rest only the number is said."""


@dataclass
class ReshardPlan:
    """Everything that a rank of the new layout is given, fixed before the first byte is written."""

    shards: Shards
    saved: SavedState
    tensors: list[Target] = field(default_factory=list)
    """Of the models: parameters and buffers."""
    trees: list[TreePlan] = field(default_factory=list)
    common: Common = field(default_factory=Common)
    tied: set[str] = field(default_factory=set)
    """Base names of saved tensors that are the same as others that are taken."""
    said: list[str] = field(default_factory=list)
    """Choices that were made, a sentence each."""
    hint: str = ""
    """What can be done about differences, beside what can always be."""

    def apply(self, state: TrainingState) -> None:
        """Write it all into `state`. Raises VerificationFailed for bytes that are not what their digest says."""
        for target in self.tensors:
            target.fill(self.shards)
        for tree in self.trees:
            tree.apply(self.shards)
        state.models.set_extra_states(from_tree(self.common.modules))
        state.rebuild()


def plan_reshard(
    shards: Shards,
    smalls: Mapping[int, Mapping[str, Any]],
    state: TrainingState,
    *,
    rank: int,
    extra: Collection[str] = (),
    loader: bool = False,
    agreement: Agreement | None = None,
) -> ReshardPlan:
    """Compare everything saved with everything alive, and plan the reads.

    Args:
        shards: images of all ranks that saved.
        smalls: their small states, decoded, by rank.
        state: the live models and optimizers.
        rank: of this process, in the new layout.
        extra: names of `attach(extra=)`, generators left out.
        loader: a data loader is attached.
        agreement: asks the other ranks whether what this one does not take goes to one of them; None: nobody is asked.

    Raises:
        ModelMismatch: naming every difference (20 spelled out), with tensor, rank and range.
        FormatError: small state that makes no sense.
        TryAgain: another rank failed before it could be asked.
    """
    state.rebuild()
    saved = SavedState(shards, smalls, exact=_same_stages(smalls, state))
    plan = ReshardPlan(shards, saved)
    problems = [f"{what} was saved as one piece, which cannot be cut" for what in saved.whole[:4]]
    problems += _plan_model(plan, state)
    if not saved.whole:
        for tree in state.optimizers:
            planned, wrong = plan_tree(saved, state, tree)
            plan.trees.append(planned)
            problems += wrong
    problems += _plan_reads(plan, rank)
    problems += _plan_small(plan, smalls, state, extra, loader)
    problems += _unclaimed(plan, agreement, failed=bool(problems))
    if problems:
        raise _mismatch(problems, shards, rank, plan.hint)
    return plan


def _mismatch(problems: Sequence[str], shards: Shards, rank: int, hint: str) -> ModelMismatch:
    problems = list(dict.fromkeys(problems))
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    ranks = "1 rank" if shards.world == 1 else f"{shards.world} ranks"
    return ModelMismatch(
        f"step {shards.step}, saved by {ranks}, does not give what rank {rank} of this layout needs: "
        f"{'; '.join(problems[:MAX_NAMED])}{more}.",
        hint="Only the layout of model and optimizers may differ from what was saved. Layers that each pipeline stage "
        "counts anew need names that do not repeat: attach(names=...). Plain tensors that are equal on some ranks, or "
        "parts of one whole, must have been said to be so when they were saved: attach(parallel=...) or "
        f"attach(layout=...); to say it now, go on in the old layout for a step with it.{hint}",
    )


def _same_stages(smalls: Mapping[int, Mapping[str, Any]], state: TrainingState) -> bool:
    """Whether both layouts have the same number of pipeline stages."""
    stages = {stage for small in smalls.values() for stage in small.get("stages", ())}
    return bool(stages) and len(stages) == state.stage_count


# ---------------------------------------------------------------- tensors of models


def _plan_model(plan: ReshardPlan, state: TrainingState) -> list[str]:
    problems: list[str] = []
    buffers = {named.name for named in state.models.buffers()}
    broadcast = plan.saved.broadcast()
    done: set[int] = set()
    chosen: dict[str, list[str]] = {}
    for name, item in model_items(state).items():
        if id(item) in done:
            continue
        done.add(id(item))
        reason = plan.saved.kept_by(item.base)
        if item.held.problem or reason:
            problems.append(reason or f"tensor {name!r} cannot be taken over: {item.held.problem}")
            continue
        source: int | None = None
        if name in buffers:
            source, why = _source_of_buffer(plan, item, broadcast.get(item.base, set()))
            if source is None and why:
                problems.append(why)
                continue
            if source is not None:
                chosen.setdefault(f"those of the first one (rank {source}) are taken, {why}", []).append(name)
        plan.tensors.append(_live_target(plan.saved, item, source))
        problems += _plan_tied(plan, item, state)
    for what, names in chosen.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        plan.said.append(f"buffers differ between replicas ({names[0]}{more}): {what}")
    return problems


def _plan_tied(plan: ReshardPlan, item: Item, state: TrainingState) -> list[str]:
    """A live tensor with several names may have been saved as several: they must be the same."""
    problems = []
    for alias in item.entry.aliases:
        base = base_name(alias, state.stages)
        plan.tied.add(base)
        if plan.saved.tensors.holders(base) and not plan.saved.same(item.base, base):
            problems.append(f"{item.base} and {base} are one tensor here, and differ where they were saved")
    return problems


def _live_target(saved: SavedState, item: Item, from_rank: int | None) -> Target:
    live, held = item.live, item.held
    if tuple(item.local.shape) != item.extent.shape:  # expanded dimensions are saved as one element
        held = whole_of(item.extent.shape, declared=False)
    return Target.of(
        item.entry.name,
        lambda: live,
        held.parts,
        asked=saved.wanted_name(item.entry.name, item.base),
        dtype=item.entry.dtype,
        shape=held.shape,
        itemsize=item.local.element_size(),
        from_rank=from_rank,
    )


def _source_of_buffer(plan: ReshardPlan, item: Item, broadcast: Collection[int]) -> tuple[int | None, str]:
    """Whose buffer is taken where those of several ranks differ (None: any) and why, or why nobody's can be."""
    asked = plan.saved.wanted_name(item.entry.name, item.base)
    holders = [
        holder
        for holder in plan.saved.tensors.holders(item.base)
        if (holder.entry.shape, holder.entry.dtype) == (item.held.shape, item.entry.dtype)
        and (asked == item.base or asked in (holder.entry.name, *holder.entry.aliases))
    ]
    ranks = [holder.rank for holder in holders]
    box = whole(item.held.shape)
    if all(plan.shards.same_bytes(holders[0], other, box) for other in holders[1:]):
        return None, ""
    one_name = len({holder.entry.name for holder in holders}) == 1  # not those of several stages, in one word
    if one_name and set(ranks) <= set(broadcast):
        return min(ranks), "which DistributedDataParallel would have given to all at the next forward pass"
    if one_name and item.held.declared and not item.held.cut and not is_dtensor(item.live):
        return min(ranks), "since attach(layout=) calls them replicated"
    plan.hint = plan.hint or (
        f" Of buffers that each rank keeps for itself (running statistics), attach(layout={{{item.entry.name!r}: "
        f"'replicated'}}) takes those of rank {min(ranks)}."
    )
    return None, (
        f"tensor {item.base!r}, a buffer, differs among {by_ranks(ranks)} that saved it, and nothing says whose counts"
    )


def _targets(plan: ReshardPlan) -> list[Target]:
    return [*plan.tensors, *(target for tree in plan.trees for target in tree.targets())]


def _plan_reads(plan: ReshardPlan, rank: int) -> list[str]:
    """Find the saved bytes for every target."""
    targets = _targets(plan)
    fills, problems = find_reads(plan.saved.tensors, [want for target in targets for want in target.wanted], rank=rank)
    if problems:
        return [str(problem) for problem in problems]
    rest = iter(fills)
    for target in targets:
        target.fills = [next(rest) for _ in target.wanted]
    return []


def _unclaimed(plan: ReshardPlan, agreement: Agreement | None, *, failed: bool) -> list[str]:
    """What was saved and no rank takes: it would be lost in silence. All ranks ask at the same time."""
    if agreement is None or not agreement.complete:
        return []
    names = plan.saved.tensors.names()
    taken = {plan.saved.base(target.asked) for target in _targets(plan)}
    taken |= plan.tied.union(*(tree.tied for tree in plan.trees))
    *claims, other_failed = agreement.any([*(name in taken for name in names), failed])
    if other_failed and not failed:
        raise ModelMismatch(
            f"step {plan.shards.step} is not loaded: another rank of this start cannot be given what it needs. On this "
            "rank nothing was changed.",
            hint="The message of that rank says what is missing.",
        )
    if other_failed:
        return []  # somebody's claims are incomplete
    claimed = {name for name, claim in zip(names, claims, strict=True) if claim}
    return [
        f"{name} was saved by {by_ranks(holder.rank for holder in plan.saved.tensors.holders(name))} "
        "and no rank of this layout has it"
        for name in names
        if name not in claimed and not claimed & plan.saved.other_names(name)
    ]


# ---------------------------------------------------------------- small state


def _plan_small(
    plan: ReshardPlan,
    smalls: Mapping[int, Mapping[str, Any]],
    state: TrainingState,
    extra: Collection[str],
    loader: bool,
) -> list[str]:
    problems: list[str] = []
    saved = {name for small in smalls.values() for name in small.get("extra", {})}
    problems += [f"extra {name} was saved and is not attached" for name in sorted(saved - set(extra))]
    problems += [f"extra {name} is attached and was not saved" for name in sorted(set(extra) - saved)]
    had = any("loader" in small for small in smalls.values())
    if had != loader:
        problems.append(f"it was saved with {'a' if had else 'no'} data loader attached, and this run differs")
    bases = {
        rank: {plan.saved.base_of(name, rank): value for name, value in small.get("modules", {}).items()}
        for rank, small in smalls.items()
    }
    plan.common = common_state(
        smalls,
        modules={base_name(name, state.stages): name for name in state.models.extra_states()},
        saved_modules=bases,
        same_data=_same_data(smalls, state),
    )
    return problems


def _same_data(smalls: Mapping[int, Mapping[str, Any]], state: TrainingState) -> str:
    """Why a position in the data means something else now; empty where it means the same."""
    counts = {small.get("data_parallel") for small in smalls.values()}
    if counts == {state.data_parallel} and state.data_parallel is not None:
        return ""
    known = [count for count in counts if count is not None]
    if len(known) == 1 and len(counts) == 1 and state.data_parallel is not None:
        return f"counts the batches of one of {known[0]} data-parallel ranks, and there are {state.data_parallel} now"
    return "how many ranks share the data is not known for both layouts"
