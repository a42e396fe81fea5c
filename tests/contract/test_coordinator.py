"""What every coordinator promises, whatever keeps its state. An implementation is added by one factory in `FACTORIES`.

Each test drives the interface as a daemon does: join, plan, open an epoch, report, skip, finish; closes it and opens it
again where it matters that something was stored before it was announced.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from baftd.checkpoint.commit import Committed, Dead, Finished, Policy, Publish, Quarantined, Retain, WriteManifest
from baftd.checkpoint.facts import (
    Answer,
    CadenceProposal,
    EpochFacts,
    Held,
    Inventory,
    JobView,
    Report,
    RestoredRank,
    ShardFacts,
    Skipped,
    Source,
    Verdict,
)
from baftd.checkpoint.history import BadSource, EpochConflict
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.coordination.inprocess import InProcessCoordinator
from baftd.coordination.interface import Coordinator
from baftd.daemon.state_files import JournalFiles
from baftd.errors import Fenced, NothingRestorable, TryAgain, UsageError
from baftd.memory.journal import FileOps

NODE, LIFE = "node-a", "1" * 32
T = TypeVar("T")


@dataclass
class Stage:
    """A coordinator in the making: may be closed and opened again over the same storage, as a daemon is restarted."""

    make: Callable[[Stage], Coordinator]
    directory: Path
    policy: Policy = field(default_factory=Policy)
    heard: list[tuple[str, Any]] = field(default_factory=list)
    now: float = 0.0
    ops: FileOps = field(default_factory=FileOps)
    bits: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def open(self, life: str = LIFE) -> Coordinator:
        coordinator = self.make(self)
        await coordinator.start(NODE, life, lambda job, news: self.heard.append((job, news)))
        return coordinator

    def news(self, kind: type[T]) -> list[T]:
        return [news for _, news in self.heard if isinstance(news, kind)]

    @property
    def view(self) -> JobView:
        return self.news(Publish)[-1].view


def in_process(stage: Stage) -> Coordinator:
    return InProcessCoordinator(
        stage.directory,
        policy=stage.policy,
        files=JournalFiles(stage.ops),
        random_bits=lambda: next(stage.bits),
        clock=lambda: stage.now,
    )


FACTORIES = {"in-process": in_process}


@pytest.fixture(params=sorted(FACTORIES))
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    return Stage(FACTORIES[request.param], tmp_path)


def run(work: Awaitable[T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(bounded())


def shard(token: Token, rank: int, step: int, world: int, content: bytes = b"") -> ShardFacts:
    root = (content or b"%d/%d" % (rank, step)).ljust(16, b".")
    return ShardFacts(token, rank, world, step, step, b"tree".ljust(16, b"."), root, 4096)


def report(
    stage: Stage, token: Token, rank: int, step: int, world: int, tier: Any = "memory", content: bytes = b""
) -> Report:
    return Report(
        stage.view.store,
        NODE,
        LIFE,
        shard(token, rank, step, world, content),
        tier,
        step,
        (step,),
        {"path": f"r{rank}"},
    )


def holding(*shards: ShardFacts, epochs: tuple[EpochFacts, ...] = (), highest: int = 0) -> Inventory:
    held = tuple(Held(one, Source("memory", NODE, {"slot": 0})) for one in shards)
    return Inventory(NODE, LIFE, held, epochs, highest)


async def begin(
    coordinator: Coordinator, incarnation: str, world: int, inventory: Inventory | None = None, **how: Any
) -> Token:
    """What a daemon does when all ranks have come."""
    found = inventory or holding()
    await coordinator.join("gpt", found)
    expected = (await coordinator.history("gpt")).epoch
    plan = await coordinator.plan("gpt", [found], world=world, **how)
    view = await coordinator.open_epoch("gpt", incarnation, plan, world=world, expected=expected)
    assert view.token is not None
    return view.token


def test_a_step_is_committed_when_every_rank_has_reported(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 2)
        assert token == Token(1, "a" * 32)
        first = await coordinator.report("gpt", report(stage, token, 0, 1, 2))
        assert first.verdict is Verdict.PENDING
        assert stage.news(Committed) == []
        second = await coordinator.report("gpt", report(stage, token, 1, 1, 2))
        assert second.verdict is Verdict.COMMITTED
        assert [c.checkpoint for c in stage.news(Committed)] == [CheckpointId(1, 1)]
        assert stage.view.committed == CheckpointId(1, 1)
        again = await coordinator.report("gpt", report(stage, token, 1, 1, 2))
        assert again.verdict is Verdict.COMMITTED
        assert len(stage.news(Committed)) == 1
        await coordinator.close()

    run(story())


def test_a_skip_kills_the_step_for_all(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 2)
        await coordinator.report("gpt", report(stage, token, 0, 3, 2))
        skipped = Skipped(stage.view.store, NODE, LIFE, token, 1, 3, "torn", 3, ())
        answer = await coordinator.skip("gpt", skipped)
        assert answer.verdict is Verdict.DEAD
        assert [dead.checkpoint for dead in stage.news(Dead)] == [CheckpointId(1, 3)]
        late = await coordinator.report("gpt", report(stage, token, 1, 3, 2))
        assert late.verdict is not Verdict.COMMITTED
        assert stage.news(Committed) == []
        await coordinator.close()

    run(story())


def test_an_epoch_is_stored_before_it_is_announced_and_opened_once(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 1)
        same = await begin(coordinator, "a" * 32, 1)
        assert same == token
        plan = await coordinator.plan("gpt", [holding()], world=1, fresh=True)
        with pytest.raises(EpochConflict):
            await coordinator.open_epoch("gpt", "b" * 32, plan, world=1, expected=0)
        # No close: the daemon is killed.
        other = await stage.open()
        assert (await other.history("gpt")).token == token
        assert list(await other.jobs()) == ["gpt"]
        newer = await begin(other, "b" * 32, 1, fresh=True)
        assert newer.epoch == 2
        stale = await other.report("gpt", report(stage, token, 0, 5, 1))
        assert stale.verdict is Verdict.FENCED
        with pytest.raises(Fenced):
            await other.finish("gpt", token, 0, 5)
        await other.close()
        await coordinator.close()

    run(story())


def test_a_failing_disk_opens_no_epoch(stage: Stage) -> None:
    class Full(FileOps):
        full = True

        def write(self, fd: int, data: bytes) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(fd, data)

    async def story() -> None:
        stage.ops = Full()
        coordinator = await stage.open()
        with pytest.raises(Exception, match="No space left"):
            await begin(coordinator, "a" * 32, 1)
        assert not [news for news in stage.news(Publish) if news.view.token is not None]
        Full.full = False
        token = await begin(coordinator, "a" * 32, 1)
        assert token.epoch == 1
        restarted = await stage.open()
        assert (await restarted.history("gpt")).token == token
        await restarted.close()
        await coordinator.close()

    run(story())


def test_the_next_start_goes_on_from_the_newest_whole_step(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 2)
        whole = [shard(token, rank, 4, 2) for rank in range(2)]
        half = shard(token, 0, 5, 2)
        found = holding(*whole, half, highest=5)
        plan = await coordinator.plan("gpt", [found], world=2)
        assert plan.checkpoint == CheckpointId(1, 4)
        assert plan.lost_steps == 1
        assert "step 5" in plan.passed_over[0]
        newer = await begin(coordinator, "b" * 32, 2, found)
        assert stage.view.line[0].parent == CheckpointId(1, 4)
        # A bad source is remembered, and the head gets an older parent or none at all.
        await coordinator.source_failed("gpt", newer, BadSource(CheckpointId(1, 4), 1, "memory", NODE, "a bit flipped"))
        with pytest.raises(NothingRestorable, match="at step 5"):
            await coordinator.plan("gpt", [found], world=2)
        older = holding(*whole, *(shard(token, rank, 2, 2) for rank in range(2)))
        plan = await coordinator.plan("gpt", [older], world=2)
        assert plan.checkpoint == CheckpointId(1, 2)
        view = await coordinator.reparent("gpt", newer, plan)
        assert view.line[0].parent == CheckpointId(1, 2)
        await coordinator.close()
        restarted = await stage.open()
        history = await restarted.history("gpt")
        assert history.head is not None
        assert history.head.parent == CheckpointId(1, 2)
        assert history.bad_sources
        assert history.is_abandoned(CheckpointId(1, 4))
        await restarted.close()

    run(story())


def test_a_start_of_another_world_needs_leave_and_is_counted_by_what_was_saved(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 3)
        whole = [shard(token, rank, 4, 3) for rank in range(3)]
        older = [shard(token, rank, 2, 3) for rank in range(3)]
        found = holding(*whole, *older, highest=4)
        with pytest.raises(UsageError, match=r"step 4 \(epoch 1\) was saved by 3 ranks, and 2 are starting"):
            await coordinator.plan("gpt", [found], world=2)
        plan = await coordinator.plan("gpt", [found], world=2, reshard=True)
        assert (plan.checkpoint, plan.world, len(plan.sources)) == (CheckpointId(1, 4), 3, 3)
        newer = await begin(coordinator, "b" * 32, 2, found, reshard=True)
        head = stage.view.line[0]
        assert (head.world, head.parent, stage.view.restored) == (2, CheckpointId(1, 4), CheckpointId(1, 4))

        async def loaded(rank: int, held: tuple[int, ...], step: int = 4) -> Verdict:
            said = RestoredRank(stage.view.store, NODE, LIFE, newer, rank, CheckpointId(1, step), held)
            return (await coordinator.restored("gpt", said)).verdict

        assert await loaded(0, (0, 1)) is Verdict.PENDING
        assert await loaded(1, (0, 1), step=2) is Verdict.REFUSED
        assert await loaded(2, (2,)) is Verdict.REFUSED
        # Both ranks have loaded it, but of the three shards it is made of one lies nowhere in memory.
        assert await loaded(1, (0, 1)) is Verdict.PENDING
        assert stage.view.committed is None
        assert await loaded(1, (2,)) is Verdict.COMMITTED
        assert (stage.view.committed, stage.view.restored) == (CheckpointId(1, 4), CheckpointId(1, 4))
        for rank in range(2):
            await coordinator.report("gpt", report(stage, newer, rank, 5, 2))
        assert (stage.view.committed, stage.view.restored) == (CheckpointId(2, 5), None)
        # The daemon was killed: what began of what is still known.
        restarted = await stage.open()
        history = await restarted.history("gpt")
        assert history.head is not None
        assert (history.head.world, history.head.parent) == (2, CheckpointId(1, 4))
        await restarted.close()
        await coordinator.close()

    run(story())


def test_a_job_that_has_been_further_does_not_begin_again_by_itself(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 1)
        await coordinator.report("gpt", report(stage, token, 0, 7, 1))
        with pytest.raises(NothingRestorable, match="at step 7"):
            await coordinator.plan("gpt", [holding()], world=1)
        plan = await coordinator.plan("gpt", [holding()], world=1, fresh=True)
        assert plan.step == 0
        await coordinator.close()

    run(story())


def test_a_wiped_store_learns_from_what_a_node_holds(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = Token(6, "c" * 32)
        epoch = EpochFacts(token, 1, CheckpointId(4, 90))
        found = holding(shard(token, 0, 99, 1), epochs=(epoch,), highest=100)
        joined = await coordinator.join("gpt", found)
        assert joined.accepted
        assert joined.view.token == token
        newer = await begin(coordinator, "d" * 32, 1, found)
        assert newer.epoch == 7
        assert stage.view.line[0].parent == CheckpointId(6, 99)
        await coordinator.close()

    run(story())


def test_quarantine_survives_a_restart(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        await begin(coordinator, "a" * 32, 1)
        await coordinator.quarantine("gpt", CheckpointId(1, 3), "its digest is wrong")
        assert stage.news(Quarantined)
        restarted = await stage.open()
        assert (await restarted.history("gpt")).quarantined == {CheckpointId(1, 3): "its digest is wrong"}
        await restarted.close()
        await coordinator.close()

    run(story())


def test_replicas_that_differ_are_not_committed(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 2)
        for rank in range(2):
            same = report(stage, token, rank, 1, 2)
            facts = ShardFacts(**{**same.shard.__dict__, "replicas": ((b"key", b"%d" % rank),)})
            answer = await coordinator.report("gpt", Report(stage.view.store, NODE, LIFE, facts, "memory", 1, (1,)))
        assert answer.verdict is Verdict.QUARANTINED
        (bad,) = stage.news(Quarantined)
        assert {rank for rank, _ in bad.ranks} == {0, 1}
        assert stage.news(Committed) == []
        await coordinator.close()

    run(story())


def test_durable_by_steps_then_retention_and_finish(stage: Stage) -> None:
    stage.policy = Policy(durable=True, durable_steps=3)

    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 1)
        for step in (1, 2, 3):
            await coordinator.report("gpt", report(stage, token, 0, step, 1))
        assert stage.view.persist == (3,)
        await coordinator.report("gpt", report(stage, token, 0, 3, 1, "durable"))
        (order,) = stage.news(WriteManifest)
        assert (order.checkpoint, order.node, len(order.parts)) == (CheckpointId(1, 3), NODE, 1)
        assert stage.view.durable is None
        await coordinator.manifest_written("gpt", order.checkpoint)
        assert stage.view.durable == CheckpointId(1, 3)
        assert stage.news(Retain)
        await coordinator.report("gpt", report(stage, token, 0, 4, 1))
        assert stage.view.persist == ()
        await coordinator.want_durable("gpt", token, 4)
        assert stage.view.persist == (4,)
        await coordinator.durable_failed("gpt", token, 4, 0, "disk full")
        assert stage.view.persist == ()
        await coordinator.finish("gpt", token, 0, 4)
        assert stage.view.persist == (4,)
        await coordinator.report("gpt", report(stage, token, 0, 4, 1, "durable"))
        await coordinator.manifest_written("gpt", CheckpointId(1, 4))
        (finished,) = stage.news(Finished)
        assert (finished.checkpoint, finished.tier) == (CheckpointId(1, 4), "durable")
        assert stage.view.finished
        restarted = await stage.open()
        assert (await restarted.view("gpt")).durable == CheckpointId(1, 4)
        await restarted.close()
        await coordinator.close()

    run(story())


def test_durable_by_time(stage: Stage) -> None:
    stage.policy = Policy(durable=True, durable_seconds=60.0)

    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 1)
        await coordinator.report("gpt", report(stage, token, 0, 1, 1))
        wait = await coordinator.tick()
        assert wait is not None
        assert 0 < wait <= 60
        stage.now = 61.0
        await coordinator.tick()
        assert stage.view.persist == (1,)
        await coordinator.close()

    run(story())


def test_want_durable_without_a_tier_is_refused(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 1)
        with pytest.raises(UsageError, match="durable"):
            await coordinator.want_durable("gpt", token, 1)
        await coordinator.close()

    run(story())


def test_a_lease_has_one_holder_and_ends(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        await coordinator.lease("gpt", "one", 60)
        await coordinator.lease("gpt", "one", 60)
        with pytest.raises(TryAgain, match="one"):
            await coordinator.lease("gpt", "two", 60)
        await coordinator.release("gpt", "two")
        with pytest.raises(TryAgain):
            await coordinator.lease("gpt", "two", 60)
        stage.now = 100.0
        await coordinator.lease("gpt", "two", 60)
        await coordinator.release("gpt", "two")
        await coordinator.lease("gpt", "one", 60)
        await coordinator.close()

    run(story())


def test_forget_leaves_nothing(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        await begin(coordinator, "a" * 32, 1)
        await coordinator.forget("gpt")
        assert list(await coordinator.jobs()) == []
        assert (await coordinator.history("gpt")).epoch == 0
        await coordinator.close()

    run(story())


def test_answers_are_the_node_s_own(stage: Stage) -> None:
    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 1)
        answer = await coordinator.report("gpt", report(stage, token, 0, 1, 1))
        assert isinstance(answer, Answer)
        assert (answer.node, answer.incarnation, answer.rank, answer.step) == (NODE, LIFE, 0, 1)
        stranger = Report(stage.view.store, "node-z", LIFE, shard(token, 0, 2, 1), "memory", 2, (2,))
        assert (await coordinator.report("gpt", stranger)).verdict is Verdict.UNKNOWN
        await coordinator.close()

    run(story())


def test_a_proposed_cadence_is_stored_before_it_is_published_and_gives_way_to_the_next(stage: Stage) -> None:
    stage.policy = Policy(interval=1, interval_fixed=False)

    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 1)
        assert (await coordinator.view("gpt")).cadence.every == 1
        await coordinator.report("gpt", report(stage, token, 0, 20, 1))
        asked = CadenceProposal(NODE, 3, 64, rank=0, why="rank 0 has windows for a third of it")
        view = await coordinator.propose("gpt", token, asked)
        assert (view.cadence.every, view.cadence.probe) == (3, 64)
        assert view.cadence.from_step > 20
        assert view.cadence_by == asked
        assert stage.view.cadence == view.cadence, "it is published, too"
        heard = len(stage.heard)
        assert await coordinator.propose("gpt", token, asked) == view
        assert len(stage.heard) == heard, "the same again is no news"
        with pytest.raises(Fenced):
            await coordinator.propose("gpt", Token(1, "b" * 32), asked)
        with pytest.raises(UsageError):
            await coordinator.propose("gpt", token, CadenceProposal(NODE, 0))
        # No close: the daemon is killed.
        other = await stage.open()
        kept = await other.view("gpt")
        assert kept.cadence == view.cadence
        assert kept.cadence_by is not None
        assert kept.cadence_by.why == asked.why
        with pytest.raises(TryAgain):
            await other.propose("gpt", token, asked)
        await other.join("gpt", holding())
        again = await other.propose("gpt", token, CadenceProposal(NODE, 2))
        assert (again.cadence.every, again.cadence.probe) == (2, 0)
        assert again.cadence.from_step >= view.cadence.from_step
        await other.close()
        await coordinator.close()

    run(story())


def test_a_fixed_interval_is_the_one_of_the_settings_whatever_was_agreed_before(stage: Stage) -> None:
    stage.policy = Policy(interval=1, interval_fixed=False)

    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 1)
        await coordinator.propose("gpt", token, CadenceProposal(NODE, 3, 64))
        await coordinator.close()
        stage.policy = Policy(interval=5, interval_fixed=True)
        fixed = await stage.open()
        assert ((await fixed.view("gpt")).cadence.every, (await fixed.view("gpt")).cadence.probe) == (5, 0)
        await fixed.join("gpt", holding())
        assert (await fixed.propose("gpt", token, CadenceProposal(NODE, 9))).cadence.every == 5
        await fixed.close()
        stage.policy = Policy(interval=1, interval_fixed=False)
        free = await stage.open()
        assert (await free.view("gpt")).cadence.every == 5, "it stays until a node proposes another"
        await free.close()

    run(story())


def test_durable_steps_are_taken_from_the_steps_that_the_cadence_leaves(stage: Stage) -> None:
    """Every 4th step is to be durable and the job takes every 3rd: the next one that is committed is written."""
    stage.policy = Policy(interval=3, durable=True, durable_steps=4)

    async def story() -> None:
        coordinator = await stage.open()
        token = await begin(coordinator, "a" * 32, 1)
        written = []
        for step in range(3, 31, 3):
            await coordinator.report("gpt", report(stage, token, 0, step, 1))
            for due in stage.view.persist:
                written.append(due)
                await coordinator.report("gpt", report(stage, token, 0, due, 1, "durable"))
                await coordinator.manifest_written("gpt", CheckpointId(token.epoch, due))
        assert written == [6, 9, 12, 18, 21, 24, 30]
        await coordinator.close()

    run(story())
