"""Commit plans: parts and their alternatives, proof, generations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baftd.checkpoint.commit_plan import CommitPlan, PlanPart
from baftd.checkpoint.layout import Layout, LayoutBuilder
from baftd.checkpoint.ranges import volume
from baftd.checkpoint.savers import Piece, divide, everyone
from baftd.errors import LayoutError


def layout(experts: int = 2, world: int = 4, rows: int = 400, moved: bool = False) -> Layout:
    """A model on all ranks, moments cut among them, experts on two ranks each."""
    builder = LayoutBuilder(world)
    builder.add("model", "F32", (rows, 8), {rank: [((0, rows), (0, 8))] for rank in range(world)})
    cut = rows // world
    order = list(range(world))[:: -1 if moved else 1]
    builder.add("moments", "F32", (rows, 8), {r: [((n * cut, n * cut + cut), (0, 8))] for n, r in enumerate(order)})
    for expert in range(experts):
        ranks = (expert % 2, expert % 2 + 2)
        builder.add(f"expert{expert}", "F32", (100,), {rank: [((0, 100),)] for rank in ranks})
    builder.own("loose", "F32", (3,), 1)
    return builder.build()


def test_divided_every_rank_is_needed() -> None:
    plan = CommitPlan.of(divide(layout()))
    assert [part.shards for part in plan.parts if part.kind == "ranges"] == [(rank,) for rank in range(4)]
    assert plan.missing(range(4)) == ()
    assert plan.missing({0, 1, 3}) == (PlanPart("ranges", (2,), plan.assignment.loads[2]), PlanPart("small", (2,), 0))
    assert sum(part.nbytes for part in plan.parts) == plan.layout.unique_bytes
    for part in plan.parts:
        nbytes = sum(volume(box) * plan.layout.tensors[tensor].itemsize for tensor, box in plan.ranges(part))
        assert nbytes == part.nbytes


def test_saved_by_all_any_holder_will_do() -> None:
    plan = CommitPlan.of(everyone(layout()))
    shards = {part.shards: part for part in plan.parts if part.kind == "ranges"}
    assert set(shards) == {(0,), (1,), (2,), (3,), (0, 2), (1, 3), (0, 1, 2, 3)}
    assert [plan.layout.tensors[tensor].name for tensor, _ in plan.ranges(shards[0, 1, 2, 3])] == ["model"]
    assert [plan.layout.tensors[tensor].name for tensor, _ in plan.ranges(shards[1,])] == ["loose", "moments"]
    for part in shards.values():
        nbytes = sum(volume(box) * plan.layout.tensors[tensor].itemsize for tensor, box in plan.ranges(part))
        assert nbytes == part.nbytes
    # Of a replicated model one rank is enough; what one rank has alone, and its small state, need that rank.
    assert {part.shards for part in plan.missing({0, 1, 3})} == {(2,)}


def test_an_unchanged_tree_keeps_its_plan() -> None:
    plan = CommitPlan.of(divide(layout()), generation=3)
    assert plan.next_generation(layout()) is plan
    assert CommitPlan.of(divide(Layout.decode(layout().encode()))).digest == plan.digest
    assert len(plan.digest) == 16
    assert plan.changes_from(CommitPlan.of(divide(layout()))) == ()


def test_new_experts_make_a_new_generation() -> None:
    plan = CommitPlan.of(divide(layout()))
    newer = plan.next_generation(layout(experts=8))
    assert newer.generation == 2
    assert newer.digest != plan.digest
    assert newer.changes_from(plan) == ("6 tensors new: expert2, expert3, expert4 and 3 more.",)
    assert newer.next_generation(layout()).changes_from(newer) == (
        "6 tensors gone: expert2, expert3, expert4 and 3 more.",
    )


def test_what_changed_is_said() -> None:
    plan = CommitPlan.of(divide(layout()))
    assert plan.next_generation(layout(rows=800)).changes_from(plan) == (
        "2 tensors of another type or shape: model, moments.",
    )
    assert plan.next_generation(layout(moved=True)).changes_from(plan) == ("1 tensor held otherwise: moments.",)
    faster = plan.next_generation(layout(), {0: 1, 1: 1, 2: 1, 3: 100})
    assert faster.generation == 2
    assert faster.changes_from(plan) == ("The same tensors are divided otherwise.",)
    assert "4 ranks became 8." in plan.next_generation(layout(world=8)).changes_from(plan)
    assert "Replicas are saved by all holders." in CommitPlan.of(everyone(layout())).changes_from(plan)


def test_a_gap_is_refused_and_named() -> None:
    made = divide(layout(experts=0))
    number = made.layout.index("model")
    broken = {
        rank: tuple(p for p in pieces if p.tensor != number or rank != 2) for rank, pieces in made._pieces.items()
    }
    with pytest.raises(LayoutError, match=r"does not save the whole job: tensor 'model': .* has no saver") as caught:
        CommitPlan.of(replace(made, _pieces=broken))
    assert caught.value.tensor == "model"
    assert caught.value.ranges.startswith("[")
    stolen = {**made._pieces, 2: (*made._pieces[2], Piece(number, 0, 0, 8))}
    with pytest.raises(LayoutError, match=r"\[0:1, 0:8\] has two savers"):
        CommitPlan.of(replace(made, _pieces=stolen))
