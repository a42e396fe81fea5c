"""A daemon and training processes, all real: from the first step to `finish`, through deaths of either."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from baftd.wire.messages import (
    GcReply,
    GcRequest,
    ListReply,
    ListRequest,
    RestoreReply,
    RestoreRequest,
    VerifyReply,
    VerifyRequest,
)
from tests.support.daemon import Daemon, RunDirs, look_for, wait_until
from tests.support.numpy_trainer import TrainerProcess, state_digest

INCARNATIONS = ["1" * 32, "2" * 32, "3" * 32]


def shm_names(dirs: RunDirs) -> list[str]:
    return sorted(str(path.relative_to(dirs.shm)) for path in look_for(dirs.shm, "*"))


def run_to_end(dirs: RunDirs, **options: object) -> TrainerProcess:
    with TrainerProcess(dirs, **options) as trainer:  # type: ignore[arg-type]
        assert trainer.wait() == 0, trainer.events
    return trainer


def test_train_die_resume_finish(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=10, kill={"step": 6}) as trainer:
        assert trainer.wait() == -9
        assert trainer.committed >= 4
        assert trainer.committed == 5
    trainer = run_to_end(run_dirs, steps=10)
    resumed = trainer.last("resumed")
    assert resumed is not None
    # Step 6 was copied when the process died, but not sealed.
    assert resumed["step"] == resumed["extra"] == 5
    assert resumed["digest"] == state_digest(5)
    assert resumed["epoch"] == 2
    finished = trainer.last("finished")
    assert finished is not None
    assert finished["digest"] == state_digest(10)
    assert shm_names(run_dirs) == []
    assert Path(run_dirs.durable, "fault", "step-10.e2", "MANIFEST").exists()


def test_two_ranks_commit_together_and_a_rank_that_is_missing_is_named(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, rendezvous_timeout="1 s") as daemon:
        with TrainerProcess(run_dirs, steps=4, rank=1, world=2, incarnation=INCARNATIONS[0]) as alone:
            assert alone.wait() == 2
            failed = alone.last("failed")
            assert failed is not None
            assert failed["error"] == "RankError"
            assert "rank 0 never said hello" in failed["text"]
            assert "redis" in failed["text"]
        pair = [TrainerProcess(run_dirs, steps=6, rank=rank, world=2, incarnation=INCARNATIONS[1]) for rank in range(2)]
        try:
            assert [trainer.wait() for trainer in pair] == [0, 0]
            for rank, trainer in enumerate(pair):
                finished = trainer.last("finished")
                assert finished is not None
                assert finished["digest"] == state_digest(6, rank)
            (job,) = daemon.status().jobs
            assert job.committed == {"memory": 6}
        finally:
            for trainer in pair:
                trainer.close()


@pytest.mark.parametrize("how", ["killed", "upgraded"])
def test_daemon_replaced_in_mid_training_and_nothing_is_lost(run_dirs: RunDirs, daemon: Daemon, how: str) -> None:
    with TrainerProcess(run_dirs, steps=8, wait_at=4) as trainer:
        trainer.wait_for("waiting")
        if how == "upgraded":
            assert daemon.terminate() == 0
        daemon.restart()
        trainer.go_on()
        assert trainer.wait() == 0, trainer.events
        finished = trainer.last("finished")
        assert finished is not None
        assert finished["counters"]["torn"] == 0
    assert Path(run_dirs.durable, "fault", "step-8.e1", "MANIFEST").exists()
    assert shm_names(run_dirs) == []


def test_a_snapshot_in_progress_is_sealed_with_the_new_daemon(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=5, wait_at=4) as trainer:
        trainer.wait_for("waiting")  # step 4 is being copied: its fence comes with the next update
        daemon.restart()
        trainer.go_on()
        assert trainer.wait() == 0, trainer.events
        finished = trainer.last("finished")
        assert finished is not None
        assert finished["counters"]["sealed"] >= 4


def test_both_killed_the_sealed_step_is_offered_again(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=8, wait_at=5) as trainer:
        trainer.wait_for("waiting")
        daemon.kill()
        trainer.kill()
    daemon.start()
    trainer = run_to_end(run_dirs, steps=8)
    resumed = trainer.last("resumed")
    assert resumed is not None
    assert resumed["step"] == 4
    assert resumed["digest"] == state_digest(4)


def test_state_directory_lost(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=9, kill={"step": 5}) as trainer:
        trainer.wait()
    with TrainerProcess(run_dirs, steps=9, kill={"step": 7}) as trainer:
        trainer.wait()
    daemon.terminate()
    for path in sorted(look_for(run_dirs.state, "*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    daemon.start()
    trainer = run_to_end(run_dirs, steps=9)
    resumed = trainer.last("resumed")
    assert resumed is not None
    assert (resumed["step"], resumed["epoch"]) == (6, 3)
    assert resumed["digest"] == state_digest(6)


def test_memory_lost_the_durable_step_is_fetched(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, durable_dir=str(run_dirs.durable), durable_every="2 steps") as daemon:
        with TrainerProcess(run_dirs, steps=9, wait_at=6, pause=0.2) as trainer:
            trainer.wait_for("waiting")
            trainer.kill()
        daemon.terminate()
        for path in sorted(look_for(run_dirs.shm, "*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        daemon.start()
        trainer = run_to_end(run_dirs, steps=9)
        resumed = trainer.last("resumed")
        assert resumed is not None
        assert resumed["step"] == 4
        assert resumed["digest"] == state_digest(4)
        assert shm_names(run_dirs) == []


def test_operator_restores_an_older_step_and_training_takes_it(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, durable_dir=str(run_dirs.durable), durable_every="2 steps") as daemon:
        with TrainerProcess(run_dirs, steps=9, kill={"step": 8}, pause=0.2) as trainer:
            trainer.wait()
        listed = daemon.request(ListRequest(job="fault"))
        assert isinstance(listed, ListReply)
        steps = {row.step for row in listed.rows if "durable" in row.tiers}
        assert 7 in {row.step for row in listed.rows}
        older = max(step for step in steps if step < 7)
        verified = daemon.request(VerifyRequest(job="fault"))
        assert isinstance(verified, VerifyReply)
        assert verified.ok, verified.lines
        dry = daemon.request(RestoreRequest(job="fault", dry_run=True))
        assert isinstance(dry, RestoreReply)
        assert (dry.step, dry.sources[0].tier, dry.dry_run) == (7, "memory", True)
        assert Path(dry.sources[0].where).exists()
        plan = daemon.request(RestoreRequest(job="fault", step=older))
        assert isinstance(plan, RestoreReply)
        assert (plan.step, plan.sources[0].tier, plan.lost_steps >= 7 - older) == (older, "durable", True)
        with TrainerProcess(run_dirs, steps=9, kill={"step": older + 2}) as trainer:
            trainer.wait()
            resumed = trainer.last("resumed")
            assert resumed is not None
            assert (resumed["step"], resumed["epoch"]) == (older, 3)
            assert resumed["digest"] == state_digest(older)
        # Step 7 of the first start lies beyond the branch now, and is never offered again.
        trainer = run_to_end(run_dirs, steps=9)
        resumed = trainer.last("resumed")
        assert resumed is not None
        assert resumed["step"] == older + 1


def test_wrong_model_is_named_and_loses_nothing(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=9, kill={"step": 6}) as trainer:
        trainer.wait()
    with TrainerProcess(run_dirs, steps=9, arrays=3) as other:
        assert other.wait() == 4
        failed = other.last("failed")
        assert failed is not None
        assert failed["error"] == "ModelMismatch"
        assert "layer3.weight" in failed["text"]
    trainer = run_to_end(run_dirs, steps=9)
    resumed = trainer.last("resumed")
    assert resumed is not None
    assert resumed["step"] == 5


def test_second_start_of_a_running_job_waits_then_is_told_to_try_again(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, restore_wait="1 s") as daemon, TrainerProcess(run_dirs, steps=9, wait_at=3) as first:
        first.wait_for("waiting")
        with TrainerProcess(run_dirs, steps=9) as second:
            assert second.wait() == 75
            failed = second.last("failed")
            assert failed is not None
            assert failed["error"] == "TryAgain"
            assert f"pid {first.process.pid}" in failed["text"]
            assert "node-a" in failed["text"]
        with TrainerProcess(run_dirs, steps=9, takeover=True, kill={"step": 6}) as third:
            assert third.wait() == -9
            resumed = third.last("resumed")
            assert resumed is not None
            assert resumed["step"] == 2
        first.go_on()
        assert first.wait() == 0  # a fenced process may live, nothing it does is kept
        assert "event=fenced" in daemon.log


def test_dead_predecessor_does_not_delay(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, restore_wait="20 s"):
        with TrainerProcess(run_dirs, steps=9, wait_at=3) as first:
            first.wait_for("waiting")
            first.process.kill()
            trainer = run_to_end(run_dirs, steps=9)
        resumed = trainer.last("resumed")
        assert resumed is not None
        assert resumed["step"] == 2


def test_fresh_abandons_and_gc_frees(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs) as daemon:
        with TrainerProcess(run_dirs, steps=9, kill={"step": 6}) as trainer:
            trainer.wait()
        with TrainerProcess(run_dirs, steps=9, fresh=True, kill={"step": 3}) as trainer:
            trainer.wait()
            resumed = trainer.last("resumed")
            assert resumed is not None
            assert resumed["step"] == 0
        listed = daemon.request(ListRequest(job="fault"))
        assert isinstance(listed, ListReply)
        assert all(row.epoch == 2 or row.state == "abandoned" for row in listed.rows)
        dry = daemon.request(GcRequest(job="fault", dry_run=True))
        assert isinstance(dry, GcReply)
        assert dry.bytes > 0
        done = daemon.request(GcRequest(job="fault"))
        assert isinstance(done, GcReply)
        assert done.bytes == dry.bytes
        assert shm_names(run_dirs) == []


def test_nothing_restorable_says_how_far_it_was(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs) as daemon:
        with TrainerProcess(run_dirs, steps=9, kill={"step": 6}) as trainer:
            trainer.wait()
        daemon.request(GcRequest(job="fault"))
        with TrainerProcess(run_dirs, steps=9) as trainer:
            assert trainer.wait() == 3
            failed = trainer.last("failed")
            assert failed is not None
            assert failed["error"] == "NothingRestorable"
            assert re.search("at step [56]", failed["text"])
        run_to_end(run_dirs, steps=3, fresh=True)


def test_full_durable_directory_costs_a_warning_and_a_counter(run_dirs: RunDirs) -> None:
    run_dirs.durable.rmdir()
    run_dirs.durable.write_text("a file is in the way")
    with Daemon(run_dirs, durable_dir=str(run_dirs.durable), durable_every="1 steps") as daemon:
        with TrainerProcess(run_dirs, steps=6, wait_at="end") as trainer:
            trainer.wait_for("waiting")
            (job,) = daemon.status().jobs
            assert job.counters["durable_failed"] > 0
            assert job.committed["memory"] >= 4
            trainer.go_on()
            assert trainer.wait() == 0, trainer.events
        assert daemon.log.count("durable_write_failed") <= 3
    run_dirs.durable.unlink()
    run_dirs.durable.mkdir()


def test_daemon_beside_its_slots_is_small_and_idle(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=9, wait_at=8) as trainer:
        trainer.wait_for("waiting")
        status = daemon.status()
        assert status.rss_bytes < 80e6
        trainer.go_on()
        trainer.wait()
    assert json.loads((run_dirs.state / "node.json").read_text())["node"] == "node-a"
    assert os.path.exists(run_dirs.socket)


def test_one_rank_killed_the_next_start_does_not_wait_for_the_others(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, restore_wait="30 s") as daemon:
        first = [
            TrainerProcess(run_dirs, steps=9, rank=rank, world=2, incarnation=INCARNATIONS[0], wait_at=4)
            for rank in range(2)
        ]
        second: list[TrainerProcess] = []
        try:
            for trainer in first:
                trainer.wait_for("waiting")
            first[1].kill()
            second = [
                TrainerProcess(run_dirs, steps=6, rank=rank, world=2, incarnation=INCARNATIONS[1]) for rank in range(2)
            ]
            assert [trainer.wait(20) for trainer in second] == [0, 0], [trainer.events for trainer in second]
            for rank, trainer in enumerate(second):
                resumed = trainer.last("resumed")
                assert resumed is not None
                assert (resumed["step"], resumed["epoch"]) == (3, 2)
                assert resumed["digest"] == state_digest(3, rank)
            assert "event=fenced" in daemon.log
        finally:
            for trainer in first + second:
                trainer.close()


def test_two_processes_with_one_rank_are_both_named(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs):
        first = TrainerProcess(run_dirs, steps=4, rank=0, world=2, incarnation=INCARNATIONS[0])
        twin = None
        try:
            wait_until(lambda: first.greeted(run_dirs), "the first process has said hello")
            twin = TrainerProcess(run_dirs, steps=4, rank=0, world=2, incarnation=INCARNATIONS[0])
            assert twin.wait() == 2, twin.events
            failed = twin.last("failed")
            assert failed is not None
            assert failed["error"] == "RankError"
            assert f"pid {first.process.pid}" in failed["text"]
            assert f"pid {twin.process.pid}" in failed["text"]
        finally:
            first.close()
            if twin is not None:
                twin.close()


def test_world_sizes_that_disagree_are_both_named(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs):
        first = TrainerProcess(run_dirs, steps=4, rank=0, world=2, incarnation=INCARNATIONS[0])
        other = None
        try:
            wait_until(lambda: first.greeted(run_dirs), "the first process has said hello")
            other = TrainerProcess(run_dirs, steps=4, rank=1, world=3, incarnation=INCARNATIONS[0])
            assert other.wait() == 2, other.events
            failed = other.last("failed")
            assert failed is not None
            assert "has 3 ranks" in failed["text"]
            assert "says 2" in failed["text"]
        finally:
            first.close()
            if other is not None:
                other.close()


def test_an_incarnation_that_has_trained_cannot_start_again(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs):
        fixed = {"BAFTD_INCARNATION": INCARNATIONS[0]}
        with TrainerProcess(run_dirs, steps=9, kill={"step": 4}, environ=fixed) as trainer:
            trainer.wait()
        with TrainerProcess(run_dirs, steps=9, environ=fixed) as trainer:
            assert trainer.wait() == 2
            failed = trainer.last("failed")
            assert failed is not None
            assert "new at each start" in failed["text"]


def test_a_job_that_never_fits_costs_no_other_job_its_slots(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs), TrainerProcess(run_dirs, job="other", steps=9, kill={"step": 6}) as trainer:
        trainer.wait()
    slots = look_for(run_dirs.shm, "other/*.slot-*")
    assert slots
    with Daemon(run_dirs, memory_reserve="100000 GB"):
        with TrainerProcess(run_dirs, steps=3, settle=False) as trainer:
            assert trainer.wait() == 0, trainer.events
            finished = trainer.last("finished")
            assert finished is not None
            assert "no_room" in finished["counters"]["skipped"]
        assert look_for(run_dirs.shm, "other/*.slot-*") == slots


def test_slots_that_do_not_fit_are_skipped_with_the_sum(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, memory_reserve="100000 GB") as daemon:
        with TrainerProcess(run_dirs, steps=3, settle=False) as trainer:
            assert trainer.wait() == 0, trainer.events
            finished = trainer.last("finished")
            assert finished is not None
            assert finished["digest"] == state_digest(3)
            assert "no_room" in finished["counters"]["skipped"]
        assert daemon.running
