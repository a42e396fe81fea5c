"""All shards of a step are saved under one plan of who saves what, and each says under which."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.commit import Dead, JobCoordinator, Policy
from baftd.checkpoint.facts import Held, Inventory, Report, ShardFacts, Source, Verdict, next_incarnation
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.image import ImageLayout, parse_image_header, plan_image
from baftd.checkpoint.recovery import plan_restore
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import FormatError, UsageError
from baftd.storage.interface import ShardRecord
from tests.checkpoint.test_commit_core import NODE, STORE, verdict
from tests.support.entries import entry_lists

TOKEN = Token(1, f"{1:032x}")
PLAN, OTHER = b"p" * 16, b"q" * 16


def shard(rank: int, step: int, plan: bytes) -> ShardFacts:
    return ShardFacts(TOKEN, rank, 2, step, step, b"tree", b"%d.%d" % (rank, step), 1, plan=plan)


def coordinator() -> JobCoordinator:
    core = JobCoordinator("job", store=STORE, policy=Policy())
    core.open_epoch(TOKEN.incarnation, plan_restore(core.history, []), world=2, expected=0, now=0.0)
    core.join("n0", NODE, None, 0.0)
    return core


def report(rank: int, step: int, plan: bytes, *held: int) -> Report:
    return Report(STORE, "n0", NODE, shard(rank, step, plan), "memory", step, held or (step,))


def test_a_step_of_two_plans_is_dead_at_once() -> None:
    core = coordinator()
    assert verdict(core.report(report(0, 1, PLAN), 0.0)) is Verdict.PENDING
    ready = core.report(report(1, 1, OTHER), 0.0)
    assert verdict(ready) is Verdict.DEAD
    (dead,) = [order for order in ready.announce if isinstance(order, Dead)]
    assert dead.reason == "ranks 0 and 1 saved it under different plans"
    assert core.view.dead == (1,)
    assert verdict(core.report(report(0, 1, PLAN), 0.0)) is Verdict.DEAD
    # The next step under one of them is whole.
    core.report(report(0, 2, OTHER, 2), 0.0)
    assert verdict(core.report(report(1, 2, OTHER, 2), 0.0)) is Verdict.COMMITTED
    assert core.committed == CheckpointId(1, 2)


@given(plans=st.lists(st.tuples(*[st.sampled_from([b"", PLAN, OTHER])] * 2), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_what_is_committed_and_restored_has_one_plan(plans: list[tuple[bytes, bytes]]) -> None:
    core = coordinator()
    for step, pair in enumerate(plans, 1):
        for rank, plan in enumerate(pair):
            core.report(report(rank, step, plan), 0.0)
        newest = max((s for s, (a, b) in enumerate(plans[:step], 1) if a == b), default=None)
        assert core.committed == (None if newest is None else CheckpointId(1, newest))
    held = [Held(shard(r, s, p), Source("memory", "n0", {})) for s, ps in enumerate(plans, 1) for r, p in enumerate(ps)]
    wanted = core.committed
    if wanted is None:
        return
    found = plan_restore(core.history, [Inventory("n0", NODE, tuple(held))], world=2)
    assert found.checkpoint == wanted
    assert found.divided == bool(plans[wanted.step - 1][0])
    for said in found.passed_over:
        assert "ranks 0 and 1 saved it under different plans" in said


def test_facts_of_former_versions_are_not_divided() -> None:
    old = shard(0, 1, b"").to_record()
    assert "plan" not in old
    assert ShardFacts.from_record(old).plan == b""
    assert ShardFacts.from_record(shard(0, 1, PLAN).to_record()).plan == PLAN
    fields = ShardRecord(0, "n", "/p", 5, bytes(16), bytes(16), bytes(16), PLAN).to_fields()
    assert ShardRecord.from_fields(fields).plan == PLAN
    del fields["plan"]
    assert ShardRecord.from_fields(fields).plan == b""
    with pytest.raises(FormatError, match="plan"):
        ShardRecord.from_fields({**fields, "plan": b"short"})


# ---------------------------------------------------------------------------------------------- images

W = TensorEntry("w", "F32", (4, 2), 32, global_shape=(4, 2), ranges=((0, 4), (0, 2)))
PART = TensorEntry("w", "F32", (1, 2), 8, global_shape=(4, 2), ranges=((1, 2), (0, 2)))


def header(layout: ImageLayout) -> bytes:
    return layout.render_header(TOKEN, step=3, updates=3, small_length=0)


@settings(max_examples=40, deadline=None)
@given(held=entry_lists())
def test_an_image_says_what_its_rank_held(held: list[TensorEntry]) -> None:
    saved = [one for i, one in enumerate(held) if i % 2]
    try:
        layout = plan_image(saved, 64, job="j", rank=0, world=2, plan=PLAN, held=held)
    except UsageError:  # a name of several ranges, one of which is left
        return
    found = parse_image_header(header(layout) + bytes(64))
    assert (found.plan, found.held, found.tree_digest) == (PLAN, tuple(held), layout.tree_digest)
    assert found.declared == layout.declared == tuple(held)


def test_the_tree_tells_plans_and_holdings_apart() -> None:
    def tree(**more: object) -> bytes:
        return plan_image([PART], 64, job="j", rank=0, world=2, **more).tree_digest  # type: ignore[arg-type]

    trees = {tree(), tree(plan=PLAN, held=[W]), tree(plan=OTHER, held=[W]), tree(plan=PLAN, held=[W, PART])}
    assert len(trees) == 4
    plain = plan_image([PART], 64, job="j", rank=0, world=2)
    assert b"baft.plan" not in header(plain)
    assert plain.declared == (PART,)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"70" * 16, b"7x" * 16, "baft.plan"),
        (b'\\"nbytes\\":32', b'\\"nbytes\\":-1', "nbytes"),
        (b'\\"nbytes\\":32', b'\\"nbytes\\":33', "33"),
        (b'[{\\"name', b'[7,{\\"na', "baft.held"),
        (b"baft.held", b"baft.hold", "baft.held"),
    ],
)
def test_what_contradicts_itself_is_refused(old: bytes, new: bytes, says: str) -> None:
    data = header(plan_image([PART], 64, job="j", rank=0, world=2, plan=PLAN, held=[W]))
    assert data.count(old) == 1, json.dumps(data.decode())
    with pytest.raises(FormatError, match=says):
        parse_image_header(data.replace(old, new) + bytes(64))


def test_history_alone_decides_nothing() -> None:
    """The shards of a step that was never committed may be of one plan all the same: it is restored."""
    history = History()
    history.open_epoch(TOKEN, world=2, parent=None, expected=0)
    place = Source("memory", "n0", {})
    held = tuple(Held(shard(rank, 4, PLAN), place) for rank in range(2))
    assert plan_restore(history, [Inventory("n0", next_incarnation(None, 7), held)]).step == 4
