"""Which parts make a checkpoint complete, and whose shards can supply each: the commit plan. Pure.

A plan is made from an assignment (`savers.py`) and proved when it is made: every element of every tensor is saved, by
ranks that hold it. A checkpoint is complete when each part has a verified shard of one of its ranks:

    ranges   divided: what a rank saves; only its own shard has it
             all: all ranges with the same holders; any holder's shard has them
    small    the small state of a rank; only its own shard has it

When the tree changes (new experts, `add_param_group`) or the windows do, the plan is made anew under the next
generation. The old slots stay until the new generation has committed, so both must fit (`slot_memory.py`: `before`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from baftd.checkpoint.layout import Layout
from baftd.checkpoint.savers import Assignment, Mode, Share, divide, everyone, first_gap
from baftd.checkpoint.tensor_layout import TensorLayout
from baftd.errors import LayoutError

__all__ = ["CommitPlan", "PlanPart"]

_SHOWN = 3


@dataclass(frozen=True)
class PlanPart:
    """What must be there. shards: ranks whose shard supplies it, any one of them. nbytes: of its ranges; 0 for small
    state, whose size changes from step to step."""

    kind: Literal["ranges", "small"]
    shards: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, eq=False)
class CommitPlan:
    """The commit plan of a job; make one with `CommitPlan.of`.

    generation: 1 for the first; counts changes. parts: of ranges, in the order of their ranks, then of small states.
    """

    assignment: Assignment
    generation: int
    parts: tuple[PlanPart, ...]

    @staticmethod
    def of(assignment: Assignment, generation: int = 1) -> CommitPlan:
        """The plan that an assignment makes. Raises LayoutError, naming tensor, rank and range, where it does not
        save the whole layout."""
        world = assignment.layout.world
        if assignment.mode == "divided":
            ranges = [PlanPart("ranges", (rank,), nbytes) for rank, nbytes in enumerate(assignment.loads) if nbytes]
        else:
            ranges = [PlanPart("ranges", one.holders, one.nbytes) for one in assignment.classes if one.nbytes]
        small = [PlanPart("small", (rank,), 0) for rank in range(world)]
        plan = CommitPlan(assignment, generation, (*ranges, *small))
        plan.prove()
        return plan

    def prove(self) -> None:
        """Prove that the parts cover the layout; raises LayoutError naming tensor, rank and range where not."""
        gap = first_gap(self.layout, self.assignment)
        if gap is not None:
            raise LayoutError(
                f"the commit plan does not save the whole job: {gap}.",
                tensor=gap.tensor,
                rank=gap.rank,
                ranges=gap.ranges,
            )

    @property
    def layout(self) -> Layout:
        """What is saved."""
        return self.assignment.layout

    @property
    def mode(self) -> Mode:
        """Whether replicated ranges are divided among their holders, or saved by all."""
        return self.assignment.mode

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that identify the plan: layout, savers and parts. The generation is no part of it."""
        return hashlib.blake2b(self.assignment.digest, digest_size=16, person=b"baft commit plan").digest()

    def missing(self, ranks: Collection[int]) -> tuple[PlanPart, ...]:
        """Parts that are not there when verified shards of these ranks are: empty when the checkpoint is complete."""
        there = frozenset(ranks)
        return tuple(part for part in self.parts if there.isdisjoint(part.shards))

    def ranges(self, part: PlanPart) -> tuple[Share, ...]:
        """The ranges of a part. Worked out anew at each call."""
        if part.kind == "small":
            return ()
        return self.assignment.of(part.shards[0]) if self.mode == "divided" else self.assignment.held_by(part.shards)

    def next_generation(self, layout: Layout, capacity: Mapping[int, int] | None = None) -> CommitPlan:
        """The plan for a changed tree or changed windows, under the next generation; this one where nothing changes.

        Raises what `divide` raises, and LayoutError as `of` does.
        """
        made = divide(layout, capacity) if self.mode == "divided" else everyone(layout, capacity)
        return self if made.digest == self.assignment.digest else CommitPlan.of(made, self.generation + 1)

    def changes_from(self, older: CommitPlan) -> tuple[str, ...]:
        """What is different from an older plan, a sentence for each kind of change; empty when nothing is."""
        if older.digest == self.digest:
            return ()
        said = []
        new, old = ({(one.name, one.owner): one for one in plan.layout.tensors} for plan in (self, older))
        kept = sorted(new.keys() & old.keys(), key=str)
        same_form = [key for key in kept if _form(new[key]) == _form(old[key])]
        for what, keys in (
            ("new", [key for key in new if key not in old]),
            ("gone", [key for key in old if key not in new]),
            ("of another type or shape", [key for key in kept if _form(new[key]) != _form(old[key])]),
            ("held otherwise", [key for key in same_form if new[key].holding != old[key].holding]),
        ):
            if keys:
                names = ", ".join(name for name, _ in keys[:_SHOWN])
                more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
                said.append(f"{len(keys)} tensor{'s' * (len(keys) != 1)} {what}: {names}{more}.")
        if self.layout.world != older.layout.world:
            said.append(f"{older.layout.world} ranks became {self.layout.world}.")
        if self.mode != older.mode:
            said.append("Replicas are " + ("divided among" if self.mode == "divided" else "saved by all") + " holders.")
        return tuple(said) or ("The same tensors are divided otherwise.",)


def _form(tensor: TensorLayout) -> tuple[object, ...]:
    return tensor.dtype, tensor.itemsize, tensor.shape, tensor.kind
