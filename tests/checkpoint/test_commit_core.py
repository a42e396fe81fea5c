"""History, recovery and the coordinator's core, asked directly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baftd.checkpoint.commit import Committed, JobCoordinator, Policy
from baftd.checkpoint.facts import (
    Answer,
    EpochFacts,
    Held,
    Inventory,
    Ready,
    Report,
    ShardFacts,
    Source,
    Verdict,
    newer_incarnation,
    next_incarnation,
)
from baftd.checkpoint.history import BadSource, EpochConflict, History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.recovery import plan_restore
from baftd.errors import NothingRestorable, UsageError

NODE = next_incarnation(None, 7)
STORE = next_incarnation(None, 1)


def token(epoch: int) -> Token:
    return Token(epoch, f"{epoch:032x}")


def shard(epoch: int, rank: int, step: int, **changes: object) -> ShardFacts:
    facts = {"updates": step, "tree_digest": b"tree", "root_digest": b"%d.%d.%d" % (epoch, rank, step)}
    return ShardFacts(token=token(epoch), rank=rank, world=2, step=step, image_length=1, **{**facts, **changes})  # type: ignore[arg-type]


def inventory(*shards: ShardFacts, tier: str = "memory", node: str = "n0") -> Inventory:
    return Inventory(node, NODE, tuple(Held(s, Source(tier, node, {})) for s in shards))  # type: ignore[arg-type]


def history(*parents: tuple[int, int] | None) -> History:
    found = History()
    for epoch, parent in enumerate(parents, 1):
        found.open_epoch(token(epoch), world=2, parent=CheckpointId(*parent) if parent else None, expected=epoch - 1)
    return found


def coordinator() -> JobCoordinator:
    core = JobCoordinator("job", store=STORE, policy=Policy())
    core.open_epoch(token(1).incarnation, plan_restore(core.history, []), world=2, expected=0, now=0.0)
    core.join("n0", NODE, None, 0.0)
    return core


def verdict(ready: Ready[object]) -> Verdict:
    return next(order.verdict for order in ready.announce if isinstance(order, Answer))


def report(rank: int, step: int, store: str = STORE, **changes: object) -> Report:
    return Report(store, "n0", NODE, shard(1, rank, step, **changes), "memory", step, (step,))


def test_what_is_beyond_the_branching_point_is_abandoned() -> None:
    found = history(None, (1, 5), (1, 3))
    assert [facts.token.epoch for facts in found.line] == [3, 1]
    assert not found.is_abandoned(CheckpointId(1, 3))
    assert found.is_abandoned(CheckpointId(1, 4))
    assert found.is_abandoned(CheckpointId(2, 6))
    assert not found.on_line(Token(1, "f" * 32), 2)


def test_an_epoch_is_opened_by_compare_and_set() -> None:
    found = history(None)
    with pytest.raises(EpochConflict):
        found.open_epoch(token(2), world=2, parent=None, expected=0)
    assert found.open_epoch(token(1), world=2, parent=None, expected=0) == ()
    with pytest.raises(UsageError):
        found.open_epoch(Token(2, token(1).incarnation), world=2, parent=None, expected=1)


def test_a_guessed_parent_overrides_nobody() -> None:
    found = history(None, (1, 5))
    assert found.merge([EpochFacts(token(2), 2, CheckpointId(1, 4), revision=-1)]) == ()
    assert not found.is_abandoned(CheckpointId(1, 5))
    assert found.merge([EpochFacts(token(2), 2, CheckpointId(1, 4), revision=1)])
    assert found.is_abandoned(CheckpointId(1, 5))


@given(st.lists(st.integers(0, 6), max_size=8), st.lists(st.integers(1, 9), max_size=4))
def test_a_history_is_what_its_records_say(choices: list[int], bad: list[int]) -> None:
    found, records, step = History(), [], 0
    for epoch, back in enumerate(choices, 1):
        parents = [facts.token.epoch for facts in found.line]
        parent = CheckpointId(parents[0], step + 3) if parents and back else None
        records += found.open_epoch(token(epoch), world=2, parent=parent, expected=epoch - 1)
        step = parent.step if parent else 0
    for number in bad:
        records += found.quarantine(CheckpointId(1, number), "why")
        records += found.quarantine_source(BadSource(CheckpointId(1, number), 0, "memory", "n0", "bits"))
        records += found.see_step(number)
    for again in (History.replay(records), History.replay(found.to_records())):
        assert again.line == found.line
        assert again.epochs() == found.epochs()
        assert again.quarantined == found.quarantined
        assert again.bad_sources == found.bad_sources
        assert again.highest_step == found.highest_step


def test_the_newest_whole_step_mixes_tiers_and_says_what_it_passed_over() -> None:
    plan = plan_restore(
        history(None),
        [inventory(shard(1, 0, 4), shard(1, 0, 5)), inventory(shard(1, 0, 4), shard(1, 1, 4), tier="durable", node="")],
    )
    assert plan.checkpoint == CheckpointId(1, 4)
    assert {rank: held.source.tier for rank, held in plan.sources.items()} == {0: "memory", 1: "durable"}
    assert plan.passed_over == ("step 5 (epoch 1): no verified shard of rank 1",)
    assert plan.lost_steps == 1


def test_copies_that_differ_and_bad_sources_are_passed_over() -> None:
    found = history(None)
    other = inventory(shard(1, 0, 4, root_digest=b"other"), tier="durable", node="")
    with pytest.raises(NothingRestorable, match="copies differ"):
        plan_restore(found, [inventory(shard(1, 0, 4), shard(1, 1, 4)), other])
    found.quarantine_source(BadSource(CheckpointId(1, 4), 0, "durable", "", "bits"))
    assert plan_restore(found, [inventory(shard(1, 0, 4), shard(1, 1, 4)), other]).step == 4


def test_nothing_restorable_names_the_highest_step() -> None:
    found = history(None)
    found.see_step(9)
    with pytest.raises(NothingRestorable, match="has been at step 9"):
        plan_restore(found, [])
    assert plan_restore(found, [], fresh=True).checkpoint is None
    assert plan_restore(History(), []).checkpoint is None


def test_a_report_to_an_earlier_coordinator_counts_for_nothing() -> None:
    core = coordinator()
    assert verdict(core.report(report(0, 1, store=next_incarnation(None, 0)), 0.0)) is Verdict.UNKNOWN
    assert verdict(core.report(report(0, 1), 0.0)) is Verdict.PENDING
    assert verdict(core.report(report(0, 1), 0.0)) is Verdict.PENDING
    ready = core.report(report(1, 1), 0.0)
    assert verdict(ready) is Verdict.COMMITTED
    assert any(isinstance(order, Committed) for order in ready.announce)


def test_replicas_that_differ_are_quarantined_and_named() -> None:
    core = coordinator()
    core.report(report(0, 1, replicas=((b"key", b"one"),)), 0.0)
    ready = core.report(report(1, 1, replicas=((b"key", b"two"),)), 0.0)
    assert verdict(ready) is Verdict.QUARANTINED
    assert core.committed is None
    assert "rank 0 on node n0 and rank 1" in core.history.quarantined[CheckpointId(1, 1)]
    assert JobCoordinator.replay("job", core.to_records(), store=STORE, policy=Policy()).history.quarantined


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=2, max_size=5))
def test_incarnations_sort(bits: list[int]) -> None:
    before: str | None = None
    for value in bits:
        after = next_incarnation(before, value)
        assert before is None or newer_incarnation(after, before)
        before = after
