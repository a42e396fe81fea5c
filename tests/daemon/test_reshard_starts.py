"""Starts of another world or layout than the one that saved, as the daemon sees them: message by message.

What ranks do with the images is the client's; here it counts which images are brought, how long they stay, what is
left of ranks that are no more, and what a death in the middle costs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from baftd.checkpoint.layout import Layout
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import BaftError, NoRoom, TryAgain, UsageError
from baftd.wire.messages import (
    LayoutReply,
    LayoutRequest,
    RestoreReply,
    RestoreRequest,
    ResumePlan,
    SlotImage,
)
from tests.support.daemon import Daemon, RunDirs, look_for, wait_until
from tests.support.faulty_daemon import FaultyDaemon
from tests.support.tmpfs import small_tmpfs
from tests.support.wire_rank import JOB, WireRank, content_of, image_bytes, start_of, tensors, together, train
from tests.support.zygote import Zygote

A, B, C, D = ("a" * 32, "b" * 32, "c" * 32, "d" * 32)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Forks the daemons of this file."""
    with Zygote() as running:
        yield running


Started = Callable[..., FaultyDaemon]


@pytest.fixture
def started(run_dirs: RunDirs, zygote: Zygote) -> Started:
    """Makes a daemon (one without a fault) with a durable tier; `run_dirs` ends it."""

    def start(**settings: str) -> FaultyDaemon:
        daemon = FaultyDaemon(run_dirs, "", zygote=zygote, durable_dir=str(run_dirs.durable), **settings)
        daemon.start()
        return daemon

    return start


@pytest.fixture
def daemon(started: Started) -> Daemon:
    """One that makes a step durable only when it is asked to."""
    return started(durable_every="1000000 steps")


def shm_names(dirs: RunDirs) -> set[str]:
    return {path.name for path in look_for(dirs.shm, "rank-*")}


def ranks_in_memory(dirs: RunDirs) -> set[int]:
    return {int(name.split("-")[1].split(".")[0]) for name in shm_names(dirs)}


def saved_by(dirs: RunDirs, world: int, incarnation: str = A, last: int = 3) -> None:
    """A job of `world` ranks that has committed steps 1 to `last` and has ended without finishing."""
    with start_of(dirs, world, incarnation) as ranks:
        train(ranks, 1, last)
        together(ranks, WireRank.leave)


def checked(plan: ResumePlan, world: int, step: int) -> list[SlotImage]:
    """The images of a plan, which must be those of `world` ranks at `step`, whole."""
    assert (plan.step, plan.world) == (step, world)
    assert [shard.rank for shard in plan.shards] == list(range(world))
    for shard in plan.shards:
        data = image_bytes(shard.image)
        body = data[4096:][: len(data) - 4096 - len(b"small state of rank 0")]
        assert body == content_of(step, shard.rank, len(data))[: len(body)], f"rank {shard.rank} at step {step}"
    return [shard.image for shard in plan.shards]


def plans(ranks: Sequence[WireRank]) -> list[ResumePlan]:
    return [rank.plan for rank in ranks if rank.plan is not None]


def test_four_ranks_saved_and_two_go_on(run_dirs: RunDirs, daemon: Daemon) -> None:
    saved_by(run_dirs, 4)
    with contextlib.suppress(UsageError), start_of(run_dirs, 2, B):
        pytest.fail("two ranks were given what four had saved, and had not asked for it")
    with start_of(run_dirs, 2, C, reshard=True) as ranks:
        for plan in plans(ranks):
            checked(plan, 4, 3)
            assert plan.source is None
            assert plan.tier == "memory"
            assert plan.epoch == 1
        # The slots of ranks 2 and 3 that hold nothing of it are gone at once, the others when step 4 is committed.
        assert len([name for name in shm_names(run_dirs) if name.startswith("rank-00003.slot")]) == 1
        train(ranks, 4, 4)
        wait_until(lambda: ranks_in_memory(run_dirs) == {0, 1}, lambda: f"still there: {shm_names(run_dirs)}")
        train(ranks, 5, 6)
        (job,) = daemon.status().jobs
        assert (job.world, job.committed) == (2, {"memory": 6})
        assert [client.rank for client in job.clients if client.slots] == [0, 1]
        together(ranks, lambda rank: rank.finish(6))
    assert look_for(run_dirs.shm, "*") == []
    manifest = run_dirs.durable / JOB / "step-6.e2"
    assert {path.name for path in manifest.iterdir()} >= {"MANIFEST", "rank-00001.safetensors"}
    assert not (manifest / "rank-00002.safetensors").exists()
    assert daemon.status().counters["internal_errors"] == 0


def test_two_ranks_saved_and_four_go_on_from_the_durable_tier(run_dirs: RunDirs, started: Started) -> None:
    daemon = started(durable_every="3 steps")
    with start_of(run_dirs, 2, A) as ranks:
        train(ranks, 1, 3)
        wait_until(lambda: daemon.status().jobs[0].committed.get("durable") == 3, "step 3 durable")
        together(ranks, WireRank.leave)
    daemon.terminate()
    for path in sorted(look_for(run_dirs.shm, "*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    daemon.start()
    with start_of(run_dirs, 4, B, reshard=True) as ranks:
        for plan in plans(ranks):
            checked(plan, 2, 3)
            assert (plan.source, plan.tier) == (None, "durable")
        train(ranks, 4, 5)
        together(ranks, lambda rank: rank.finish(5))
    assert look_for(run_dirs.shm, "*") == []
    assert daemon.status().counters["internal_errors"] == 0


def test_another_layout_in_an_equal_world_is_given_all_images(run_dirs: RunDirs, daemon: Daemon) -> None:
    saved_by(run_dirs, 2)
    with start_of(run_dirs, 2, B, reshard=True) as ranks:
        for rank, plan in zip(ranks, plans(ranks), strict=True):
            images = checked(plan, 2, 3)
            assert plan.source == images[rank.rank]
        together(ranks, WireRank.restored)
        together(ranks, lambda rank: rank.declare(tensors(rank.rank, elements=90_000)))
        checked(plans(ranks)[0], 2, 3)  # the layout is another, so other slots were made: these stay
        train(ranks, 4, 5)
        slots = {place.path for rank in ranks if rank.declared is not None for place in rank.declared.slots}
        wait_until(lambda: {str(p) for p in look_for(run_dirs.shm, "*.slot-*")} == slots, "the old layout's slots gone")
        together(ranks, WireRank.leave)
    with start_of(run_dirs, 2, C) as ranks:
        assert [plan.shards for plan in plans(ranks)] == [[], []]
        assert all(plan.source is not None and plan.step == 5 for plan in plans(ranks))


@pytest.mark.parametrize(
    ("moment", "world"), [("before loading", 2), ("after loading", 4), ("declared", 2), ("declared", 4)]
)
def test_the_daemon_dies_in_the_middle_of_a_start(run_dirs: RunDirs, daemon: Daemon, moment: str, world: int) -> None:
    saved_by(run_dirs, 6 - world)
    with start_of(run_dirs, world, B, reshard=True) as ranks:
        if moment != "before loading":
            together(ranks, WireRank.restored)
        if moment == "declared":
            together(ranks, lambda rank: rank.declare(tensors(rank.rank)))
        daemon.restart()
        images = checked(plans(ranks)[0], 6 - world, 3)
        for rank in ranks:  # else a process that lives may be filling a slot, which nobody takes from it
            rank.hello()
            rank.leave()
    # What was brought is where it was, and the next start is given it again, in whatever world.
    with start_of(run_dirs, 3, C, reshard=True) as ranks:
        assert {image.path for image in checked(plans(ranks)[0], 6 - world, 3)} == {image.path for image in images}
        train(ranks, 4, 5)
        wait_until(lambda: ranks_in_memory(run_dirs) == {0, 1, 2}, lambda: f"still there: {shm_names(run_dirs)}")
        together(ranks, lambda rank: rank.finish(5))
    assert look_for(run_dirs.shm, "*") == []
    assert daemon.status().counters["internal_errors"] == 0


def test_a_process_goes_on_with_the_daemon_that_came_back(run_dirs: RunDirs, daemon: Daemon) -> None:
    saved_by(run_dirs, 3)
    with start_of(run_dirs, 2, B, reshard=True) as ranks:
        daemon.restart()
        checked(plans(ranks)[0], 3, 3)
        for rank in ranks:
            rank.hello()
        train(ranks, 4, 5)
        wait_until(lambda: ranks_in_memory(run_dirs) == {0, 1}, lambda: f"still there: {shm_names(run_dirs)}")
        together(ranks, WireRank.leave)
    with start_of(run_dirs, 2, C) as ranks:
        assert [plan.step for plan in plans(ranks)] == [5, 5]


def test_a_start_that_made_no_step_can_be_followed_by_one_of_the_old_world(run_dirs: RunDirs, daemon: Daemon) -> None:
    saved_by(run_dirs, 4)
    with start_of(run_dirs, 2, B, reshard=True) as ranks:
        together(ranks, WireRank.restored)
        together(ranks, WireRank.leave)
    with start_of(run_dirs, 4, C) as ranks:
        assert [(plan.step, plan.shards, plan.source is not None) for plan in plans(ranks)] == [(3, [], True)] * 4
        train(ranks, 4, 4)
        together(ranks, WireRank.leave)
    assert daemon.status().counters["internal_errors"] == 0


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_rank_that_cannot_load_condemns_only_what_is_wrong(
    run_dirs: RunDirs, started: Started, spoiled: bool
) -> None:
    daemon = started(durable_every="2 steps")
    with start_of(run_dirs, 4, A) as ranks:
        train(ranks, 1, 2)
        wait_until(lambda: daemon.status().jobs[0].committed.get("durable") == 2, "step 2 durable")
        train(ranks, 3, 3)
        together(ranks, WireRank.leave)
    _cannot_load(run_dirs, spoiled)
    assert daemon.status().counters["internal_errors"] == 0


def _cannot_load(run_dirs: RunDirs, spoiled: bool) -> None:
    with start_of(run_dirs, 2, B, reshard=True) as ranks:
        images = checked(plans(ranks)[0], 4, 3)
        if spoiled:
            with Path(images[3].path).open("r+b") as file:
                file.seek(images[3].offset + 4096 + 11)
                file.write(b"!!")
        with pytest.raises(BaftError, match=r"rank 1 .* could not load what it was given: a shape") as failed:
            ranks[1].restored(ok=False, reason="a shape does not fit")
        assert ("The bytes of rank 3 were damaged" in str(failed.value)) == spoiled
        together(ranks, WireRank.leave)
    with start_of(run_dirs, 2, C, reshard=True) as ranks:
        checked(plans(ranks)[0], 4, 2 if spoiled else 3)
        said = " ".join(plans(ranks)[0].passed_over)
        assert ("step 3 (epoch 1): no verified shard of rank 3" in said) == spoiled


def test_an_operator_s_restore_and_then_another_world(run_dirs: RunDirs, started: Started) -> None:
    daemon = started(durable_every="2 steps")
    with start_of(run_dirs, 4, A) as ranks:
        train(ranks, 1, 2)
        wait_until(lambda: daemon.status().jobs[0].committed.get("durable") == 2, "step 2 durable")
        train(ranks, 3, 5)
        together(ranks, WireRank.leave)
    reply = daemon.request(RestoreRequest(job=JOB, step=2))
    assert isinstance(reply, RestoreReply)
    assert (reply.step, reply.world, len(reply.sources)) == (2, 4, 4)
    with start_of(run_dirs, 1, B, reshard=True) as ranks:
        (image,) = [one for one in checked(plans(ranks)[0], 4, 2) if "rank-00003" in one.path]
        # Step 5 was left, and this start has no rank 3: its memory is given back before the first commit.
        left = [name for name in shm_names(run_dirs) if name.startswith("rank-00003.slot")]
        assert left == [Path(image.path).name]
        train(ranks, 3, 3)
        wait_until(lambda: ranks_in_memory(run_dirs) == {0}, lambda: f"still there: {shm_names(run_dirs)}")
        together(ranks, WireRank.leave)
    # The operator's form takes each checkpoint's own world: one rank saved this one.
    reply = daemon.request(RestoreRequest(job=JOB, dry_run=True))
    assert isinstance(reply, RestoreReply)
    assert (reply.step, reply.world) == (3, 1)
    assert daemon.status().counters["internal_errors"] == 0


def test_a_rank_dies_while_the_others_load(run_dirs: RunDirs, daemon: Daemon) -> None:
    saved_by(run_dirs, 4)
    with start_of(run_dirs, 2, B, reshard=True) as ranks:
        ranks[0].leave()
        with pytest.raises((TryAgain, BaftError)):
            ranks[1].restored(ok=False, reason="rank 0 is gone")
        ranks[1].leave()
    with start_of(run_dirs, 2, C, reshard=True) as ranks:
        checked(plans(ranks)[0], 4, 3)


def test_one_rank_that_asks_to_reshard_asks_for_all(run_dirs: RunDirs, daemon: Daemon) -> None:
    saved_by(run_dirs, 1)
    ranks = [WireRank(run_dirs, rank, 2, B) for rank in range(2)]
    try:
        for rank in ranks:
            rank.hello()
        together(ranks, lambda rank: rank.resume(reshard=rank.rank == 1))
        for plan in plans(ranks):
            checked(plan, 1, 3)
    finally:
        for rank in ranks:
            rank.close()


def test_both_generations_are_counted_before_anything_is_made(run_dirs: RunDirs, started: Started) -> None:
    saved = tensors(0, elements=2 << 20)
    daemon = started(memory_reserve="1 MiB")
    with start_of(run_dirs, 1, A) as ranks:
        together(ranks, WireRank.restored)
        ranks[0].declare(saved)
        train(ranks, 1, 2)
        together(ranks, WireRank.leave)
    with start_of(run_dirs, 2, B, reshard=True) as ranks:
        together(ranks, WireRank.restored)
        with pytest.raises(NoRoom) as refused:
            ranks[1].declare(tensors(1, elements=1 << 38))
        said = r"own slots 1024\.0 GiB \+ slots of the restored step, until the first commit, 3\.0 MiB \+ reserve"
        assert re.search(said, str(refused.value))
        train(ranks, 3, 3)
        together(ranks, WireRank.leave)
    assert daemon.status().counters["internal_errors"] == 0


@pytest.mark.parametrize("first", [0, 1])
def test_slots_of_the_former_layout_make_room(run_dirs: RunDirs, started: Started, first: int) -> None:
    """Four slots for all, and then for the halves beside one of them: no more fits. Whoever declares first."""
    with small_tmpfs(run_dirs.shm, "31m"), started(durable_every="1000000 steps") as daemon:
        with start_of(run_dirs, 1, A) as ranks:
            together(ranks, WireRank.restored)
            ranks[0].declare(tensors(0, elements=4 << 20))
            train(ranks, 1, 2)
            together(ranks, WireRank.leave)
        halves = [tensors(rank, elements=2 << 20) for rank in range(2)]
        with start_of(run_dirs, 2, B, reshard=True) as ranks:
            together(ranks, WireRank.restored)
            for rank in (ranks[first], ranks[1 - first]):
                rank.declare(halves[rank.rank])
            assert len([name for name in shm_names(run_dirs) if name.startswith("rank-00000.slot")]) == 5
            checked(plans(ranks)[0], 1, 2)
            train(ranks, 3, 3)
            with pytest.raises(NoRoom):
                ranks[0].declare(tensors(0, elements=16 << 20))
            ranks[0].grants.clear()
            ranks[0].declare(halves[0])  # as before: three slots of four had made room, to no avail
            train(ranks, 4, 6)
            together(ranks, lambda rank: rank.finish(6))
        assert look_for(run_dirs.shm, "rank-*") == []
        assert daemon.status().counters["internal_errors"] == 0


def test_what_must_be_fetched_is_counted_before_the_first_byte(run_dirs: RunDirs, started: Started) -> None:
    daemon = started(durable_every="3 steps")
    saved_by(run_dirs, 3)
    wait_until(lambda: daemon.status().jobs[0].committed.get("durable") == 3, "step 3 durable")
    daemon.terminate()
    for path in sorted(look_for(run_dirs.shm, "*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    daemon = started(memory_reserve="1 TiB")
    said = r"slots of the restored step, until the first commit, 3\.0 MiB \+ reserve 1024\.0 GiB"
    with pytest.raises(NoRoom, match=said), start_of(run_dirs, 1, B, reshard=True):
        pytest.fail("it does not fit")
    assert look_for(run_dirs.shm, "*.slot-*") == []


def test_the_layout_of_a_running_job(run_dirs: RunDirs, daemon: Daemon) -> None:
    with pytest.raises(UsageError, match=f"no rank of job {JOB} has declared"):
        daemon.request(LayoutRequest(job=JOB))
    with start_of(run_dirs, 2, A) as ranks:
        together(ranks, WireRank.restored)

        def cut(rank: WireRank) -> None:
            found = [e for e in tensors(rank.rank) if e.name != "w"]
            half = [(rank.rank * 3, rank.rank * 3 + 3), (0, 8)]
            found.append(TensorEntry("v", "F32", (3, 8), 96, "stable", (6, 8), tuple(half)))
            rank.declare(found, stages=[rank.rank], coordinates={"dp": 0, "pp": rank.rank})

        cut(ranks[1])
        reply = daemon.request(LayoutRequest(job=JOB))
        assert isinstance(reply, LayoutReply)
        assert (reply.missing, reply.layout, reply.world) == ([0], b"", 2)
        assert reply.problem == "rank 0 of 2 have declared nothing yet."
        cut(ranks[0])

        def layout() -> Layout:
            answer = daemon.request(LayoutRequest(job=JOB))
            assert isinstance(answer, LayoutReply)
            assert answer.problem == ""
            assert (answer.slots, answer.durable, answer.epoch) == (4, True, 1)
            assert [(r.rank, r.node, r.stages, r.coordinates) for r in answer.ranks] == [
                (0, "node-a", [0], {"dp": 0, "pp": 0}),
                (1, "node-a", [1], {"dp": 0, "pp": 1}),
            ]
            assert all(r.slots == 4 and r.small_room == 1 << 20 and r.image_bytes > 1 << 20 for r in answer.ranks)
            return Layout.decode(answer.layout)

        found = layout()
        assert found.world == 2
        assert {tensor.name for tensor in found.tensors} == {"v", "own.0", "own.1"}
        assert found.places[1].coordinates == {"dp": 0, "pp": 1}
        train(ranks, 1, 1)
        daemon.restart()  # the tensors stand in the images, stages and coordinates in the journal
        for rank in ranks:
            rank.hello()
        assert layout() == found
