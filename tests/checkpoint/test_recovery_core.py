"""What a start goes on from, over random lineages and inventories, against a plain reading of the rules."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.facts import Held, Inventory, ShardFacts, Source, next_incarnation
from baftd.checkpoint.history import BadSource, History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.recovery import name_ranks, plan_restore
from baftd.errors import NothingRestorable, UsageError

PROFILE = settings(max_examples=120, deadline=None, derandomize=True)
WORLD, STEPS = 2, 5
PLACES = (("memory", "n0"), ("memory", "n1"), ("durable", ""))


def token(epoch: int, life: int = 0) -> Token:
    return Token(epoch, f"{life * 256 + epoch:032x}")


def shard(epoch: int, rank: int, step: int, life: int = 0) -> ShardFacts:
    root = b"%d.%d.%d.%d" % (epoch, rank, step, life)
    return ShardFacts(token(epoch, life), rank, WORLD, step, step, b"tree", root, 1)


@dataclass
class Case:
    history: History
    inventories: list[Inventory]
    whole: set[CheckpointId]
    """Checkpoints that may be chosen, found without the code under test."""
    seen: set[CheckpointId]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    history, parents = History(), {}
    for epoch in range(1, draw(st.integers(1, 4)) + 1):
        parent = None
        if epoch > 1 and draw(st.integers(0, 3)):
            old = draw(st.sampled_from([facts.token.epoch for facts in history.line]))
            limit = STEPS
            for facts in history.line:
                if facts.token.epoch != old and facts.parent is not None and facts.parent.epoch == old:
                    limit = facts.parent.step
            parent = CheckpointId(old, draw(st.integers(1, limit)))
        history.open_epoch(token(epoch), world=WORLD, parent=parent, expected=epoch - 1)
        parents[epoch] = parent
    line: set[CheckpointId] = set()
    at: tuple[int, int] | None = (max(parents), STEPS)
    while at is not None:
        line |= {CheckpointId(at[0], step) for step in range(1, at[1] + 1)}
        parent = parents[at[0]]
        at = (parent.epoch, parent.step) if parent is not None else None
    names = st.tuples(st.integers(1, max(parents)), st.integers(0, WORLD - 1), st.integers(1, STEPS))
    held = draw(st.sets(st.tuples(names, st.sampled_from(PLACES)), max_size=24))
    # Whole checkpoints are rare among single shards: some are put in at once.
    for epoch, _, step in draw(st.lists(names, max_size=4)):
        place = draw(st.sampled_from(PLACES))
        held |= {((epoch, rank, step), place) for rank in range(WORLD)}
    foreign = draw(st.sets(names, max_size=2))
    inventories = []
    for tier, node in PLACES:
        found = [shard(*name) for name, place in sorted(held) if place == (tier, node)]
        if tier == "durable":
            found += [shard(*name, life=1) for name in sorted(foreign)]
        shards = tuple(Held(facts, Source(tier, node, {})) for facts in found)  # type: ignore[arg-type]
        inventories.append(Inventory(node, next_incarnation(None, 1), shards))
    for epoch, rank, step in draw(st.sets(names, max_size=2)):
        tier, node = draw(st.sampled_from(PLACES))
        history.quarantine_source(BadSource(CheckpointId(epoch, step), rank, tier, node, "bits"))
        held.discard(((epoch, rank, step), (tier, node)))
    quarantined = {CheckpointId(epoch, step) for epoch, _, step in draw(st.sets(names, max_size=1))}
    for checkpoint in quarantined:
        history.quarantine(checkpoint, "bits")
    ranks: dict[CheckpointId, set[int]] = {}
    for (epoch, rank, step), _ in held:
        ranks.setdefault(CheckpointId(epoch, step), set()).add(rank)
    whole = {c for c, have in ranks.items() if len(have) == WORLD and c in line and c not in quarantined}
    seen = {held.shard.checkpoint for inventory in inventories for held in inventory.shards}
    return Case(history, inventories, whole, seen)


bounds = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"at_most": st.integers(1, STEPS + 1)}),
    st.fixed_dictionaries({"step": st.integers(1, STEPS)}),
)


def newness(checkpoint: CheckpointId) -> tuple[int, int]:
    return (checkpoint.step, checkpoint.epoch)


@PROFILE
@given(cases(), bounds, st.sampled_from(["n0", "n1"]))
def test_the_newest_whole_checkpoint_of_the_line_is_chosen(case: Case, bound: dict[str, int], node: str) -> None:
    def within(checkpoint: CheckpointId) -> bool:
        return checkpoint.step <= bound.get("at_most", STEPS) and checkpoint.step == bound.get("step", checkpoint.step)

    prefer = dict.fromkeys(range(WORLD), node)
    expected = max(filter(within, case.whole), key=newness, default=None)
    asked = sorted(filter(within, case.seen), key=newness, reverse=True)
    highest = max([case.history.highest_step, *(c.step for c in case.seen)])
    if expected is None:
        if not highest and not bound:
            assert plan_restore(case.history, case.inventories).checkpoint is None
            return
        with pytest.raises(NothingRestorable, match=f"has been at step {highest}") as caught:
            plan_restore(case.history, case.inventories, prefer=prefer, **bound)  # type: ignore[arg-type]
        said = str(caught.value).lower()
        assert all(f"step {c.step} (epoch {c.epoch}): " in said for c in asked)
        return
    plan = plan_restore(case.history, case.inventories, prefer=prefer, **bound)  # type: ignore[arg-type]
    assert plan.checkpoint == expected
    assert plan.token == token(expected.epoch)
    assert (plan.step, plan.world, plan.highest_step) == (expected.step, WORLD, highest)
    # Each newer candidate has its sentence, newest first.
    newer = [f"step {c.step} (epoch {c.epoch})" for c in asked if newness(c) > newness(expected)]
    assert [text.partition(":")[0] for text in plan.passed_over] == newer
    assert all(re.fullmatch(r"step \d+ \(epoch \d+\): \S.*\S", text) for text in plan.passed_over)
    # Each source is there, is of this start, is not known to be bad, and is the rank's own memory where that has it.
    assert sorted(plan.sources) == list(range(WORLD))
    for rank, chosen in plan.sources.items():
        offered = [
            h for i in case.inventories for h in i.shards if h.shard == shard(expected.epoch, rank, expected.step)
        ]
        source = chosen.source
        assert chosen in offered
        assert case.history.is_bad(expected, rank, source.tier, source.node) is None
        good = [h.source for h in offered if case.history.is_bad(expected, rank, h.source.tier, h.source.node) is None]
        best = min((s.tier != "memory", s.tier == "memory" and s.node != node) for s in good)
        assert (source.tier != "memory", source.tier == "memory" and source.node != node) == best


@PROFILE
@given(cases())
def test_a_plan_does_not_depend_on_the_order_of_inventories(case: Case) -> None:
    answers = []
    for inventories in (case.inventories, case.inventories[::-1]):
        try:
            plan = plan_restore(case.history, inventories)
            answers.append((plan.checkpoint, {rank: held.source for rank, held in plan.sources.items()}))
        except NothingRestorable:
            answers.append(None)
    assert answers[0] == answers[1]


def memory(*shards: ShardFacts, **more: object) -> Inventory:
    held = tuple(Held(facts, Source("memory", "n0", {})) for facts in shards)
    return Inventory("n0", next_incarnation(None, 1), held, **more)  # type: ignore[arg-type]


def begun() -> History:
    history = History()
    history.open_epoch(token(1), world=WORLD, parent=None, expected=0)
    return history


def test_what_is_missing_is_named_with_its_rank_and_reason() -> None:
    bad = (CheckpointId(1, 4), 1, "its header is torn")
    with pytest.raises(NothingRestorable) as caught:
        plan_restore(begun(), [memory(shard(1, 0, 4), bad=(bad,), highest_step=7)])
    assert str(caught.value).startswith(
        "no step can be restored: the job has been at step 7. "
        "Step 4 (epoch 1): no verified shard of rank 1 (rank 1: its header is torn)."
    )


def test_another_world_is_refused_and_resharded_only_when_asked() -> None:
    history = begun()
    history.open_epoch(token(2), world=4, parent=CheckpointId(1, 2), expected=1)
    grown = [ShardFacts(token(2), rank, 4, 3, 3, b"tree", b"%d" % rank, 1) for rank in range(4)]
    found = [memory(shard(1, 0, 2), shard(1, 1, 2), *grown)]
    assert plan_restore(history, found, world=4).step == 3
    # No silent way back to step 2, which has the right world.
    with pytest.raises(UsageError, match=r"step 3 \(epoch 2\) was saved by 4 ranks, and 2 are starting") as caught:
        plan_restore(history, found, world=2)
    assert "resume(reshard=True)" in caught.value.hint
    assert not isinstance(caught.value, NothingRestorable)
    plan = plan_restore(history, found, world=2, reshard=True)
    assert (plan.step, plan.world, sorted(plan.sources)) == (3, 4, [0, 1, 2, 3])
    # Equal worlds need no leave, and what is damaged is passed over as ever, whoever saved it.
    assert plan_restore(history, found, world=4, reshard=True) == plan_restore(history, found, world=4)
    history.quarantine(CheckpointId(2, 3), "bits")
    back = plan_restore(history, found, world=2)
    assert (back.step, back.world) == (2, 2)
    assert back.passed_over == ("step 3 (epoch 2): quarantined: bits",)
    with pytest.raises(UsageError, match="was saved by 2 ranks, and 1 is starting"):
        plan_restore(history, found, world=1)


def test_a_checkpoint_of_an_unknown_epoch_is_no_candidate() -> None:
    whole = memory(shard(1, 0, 4), shard(1, 1, 4))
    with pytest.raises(NothingRestorable, match="epoch 1"):
        plan_restore(History(), [whole])


@pytest.mark.parametrize(
    "wrong",
    [{"fresh": True, "step": 1}, {"fresh": True, "at_most": 1}, {"step": 1, "at_most": 1}],
)
def test_arguments_that_contradict_each_other(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        plan_restore(begun(), [], **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([3], "rank 3"), ([7, 0, 1, 2, 3], "ranks 0-3, 7"), ([0, 1], "ranks 0-1"), (range(0, 20, 2), " and 2 more")],
)
def test_ranks_are_named_in_spans(ranks: list[int], name: str) -> None:
    assert name_ranks(ranks).endswith(name)
