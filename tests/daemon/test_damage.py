"""Bad input loses nothing: damaged slots, shards, journals and manifests; ranks that fail or skip; old slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from baftd.wire.messages import ListReply, ListRequest, RestoreReply, RestoreRequest
from tests.support.daemon import Daemon, RunDirs, look_for, wait_until
from tests.support.numpy_trainer import TrainerProcess, state_digest

INCARNATIONS = ["1" * 32, "2" * 32]


def damage(path: Path, how: str) -> None:
    """Flip a bit in the middle, or cut the file in half."""
    path.chmod(0o600)
    if how == "truncated":
        with path.open("r+b") as file:
            file.truncate(8192 if ".slot-" in path.name else path.stat().st_size // 2)
        return
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 if path.stat().st_size < 60_000 else 60_000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))


def resume_and_finish(dirs: RunDirs, steps: int = 9) -> int:
    """The step that the next start goes on from; its bytes are compared."""
    with TrainerProcess(dirs, steps=steps) as trainer:
        assert trainer.wait() == 0, trainer.events
        resumed = trainer.last("resumed")
        assert resumed is not None
        assert resumed["digest"] == state_digest(resumed["step"])
        return int(resumed["step"])


def forget_memory(dirs: RunDirs) -> None:
    for path in sorted(look_for(dirs.shm, "*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_a_damaged_slot_is_found_and_an_older_step_restored(run_dirs: RunDirs, how: str) -> None:
    with Daemon(run_dirs, durable_dir=str(run_dirs.durable), durable_every="3 steps") as daemon:
        with TrainerProcess(run_dirs, steps=9, kill={"step": 6}, pause=0.15) as trainer:
            trainer.wait()
        plan = daemon.request(RestoreRequest(job="fault", dry_run=True))
        assert isinstance(plan, RestoreReply)
        assert (plan.step, plan.sources[0].tier) == (5, "memory")
        damage(Path(plan.sources[0].where), how)
        assert resume_and_finish(run_dirs) in (3, 4)
        assert "event=bad_source" in daemon.log
        assert "internal_error" not in daemon.log
        assert daemon.status().counters["internal_errors"] == 0


@pytest.mark.parametrize("how", ["flipped", "truncated"])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.manifest", "MANIFEST"])
def test_a_damaged_durable_file_is_passed_over(run_dirs: RunDirs, name: str, how: str) -> None:
    settings = {"durable_dir": str(run_dirs.durable), "durable_every": "2 steps"}
    with Daemon(run_dirs, **settings) as daemon:
        with TrainerProcess(run_dirs, steps=9, wait_at=7, pause=0.15) as trainer:
            trainer.wait_for("waiting")
            wait_until(lambda: len(look_for(run_dirs.durable, "MANIFEST")) >= 2, "two durable checkpoints")
            trainer.kill()
        daemon.terminate()
        forget_memory(run_dirs)
        newest, older = sorted(run_dirs.durable.glob("fault/step-*"), key=lambda p: p.name, reverse=True)[:2]
        damage(newest / name, how)
        daemon.start()
        assert resume_and_finish(run_dirs) == int(older.name.split("-")[1].split(".")[0])
        if (name, how) == ("rank-00000.safetensors", "flipped"):
            assert "rank 0, durable" in next(line for line in daemon.log.splitlines() if "event=quarantined" in line)
        assert daemon.status().counters["internal_errors"] == 0


@pytest.mark.parametrize("what", ["journal", "history", "manifest"])
@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_damaged_records_are_said_and_lose_nothing(run_dirs: RunDirs, daemon: Daemon, what: str, how: str) -> None:
    with TrainerProcess(run_dirs, steps=9, kill={"step": 6}) as trainer:
        trainer.wait()
    daemon.terminate()
    (path,) = [p for base in (run_dirs.shm, run_dirs.state) for p in look_for(base, what)]
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        damage(path, how)
    daemon.start()
    assert resume_and_finish(run_dirs) == 5
    assert "damaged" in daemon.log
    assert daemon.status().counters["internal_errors"] == 0


def test_one_rank_that_cannot_load_stops_all_and_loses_nothing(run_dirs: RunDirs, daemon: Daemon) -> None:
    def start(incarnation: str, **options: object) -> list[TrainerProcess]:
        return [
            TrainerProcess(
                run_dirs, steps=7, rank=rank, world=2, incarnation=incarnation,
                **{**options, **({"arrays": 3} if options.get("odd") and rank == 1 else {})},  # type: ignore[arg-type]
            )
            for rank in range(2)
        ]  # fmt: skip

    first = start(INCARNATIONS[0], kill={"step": 5})
    second: list[TrainerProcess] = []
    third: list[TrainerProcess] = []
    try:
        assert [trainer.wait() for trainer in first] == [-9, -9]
        second = start(INCARNATIONS[1], odd=True)
        assert second[1].wait() == 4
        assert second[0].wait() != 0
        failed = second[0].last("failed")
        assert failed is not None
        assert "rank 1" in failed["text"]
        assert "could not load" in failed["text"]
        third = start("3" * 32)
        assert [trainer.wait() for trainer in third] == [0, 0], [trainer.events for trainer in third]
        for rank, trainer in enumerate(third):
            resumed = trainer.last("resumed")
            assert resumed is not None
            assert (resumed["step"], resumed["digest"]) == (4, state_digest(4, rank))
    finally:
        for trainer in first + second + third:
            trainer.close()


def test_a_step_that_one_rank_skips_is_dead_for_all(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs) as daemon:
        pair = [
            TrainerProcess(
                run_dirs, steps=6, rank=rank, world=2, incarnation=INCARNATIONS[0], wait_at=5,
                **({"skip_at": 3} if rank == 1 else {}),  # type: ignore[arg-type]
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            for trainer in pair:
                trainer.wait_for("waiting")
            listed = daemon.request(ListRequest(job="fault"))
            assert isinstance(listed, ListReply)
            assert 3 not in [row.step for row in listed.rows if row.state == "committed"]
            (job,) = daemon.status().jobs
            assert job.committed["memory"] == 4
            assert "the test says so" in job.last_skip
            for trainer in pair:
                trainer.go_on()
            assert [trainer.wait() for trainer in pair] == [0, 0]
        finally:
            for trainer in pair:
                trainer.close()


def test_slots_past_their_retention_are_swept_at_the_start(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=9, kill={"step": 4}) as trainer:
        trainer.wait()
    daemon.terminate()
    assert look_for(run_dirs.shm, "*.slot-*")
    daemon.more["memory_retention"] = "10 ms"
    daemon.start()
    assert look_for(run_dirs.shm, "*.slot-*") == []
    assert "event=swept job=fault" in daemon.log


def test_garbage_in_the_arena_is_left_alone_and_named(run_dirs: RunDirs, daemon: Daemon) -> None:
    with TrainerProcess(run_dirs, steps=9, kill={"step": 4}) as trainer:
        trainer.wait()
    (directory,) = run_dirs.shm.glob("baftd-*/fault")
    (directory / "notes.txt").write_text("not ours")
    (directory / "rank-00007.slot-0").write_bytes(b"x" * 8192)
    daemon.restart()
    assert "event=slot_damaged" in daemon.log
    assert resume_and_finish(run_dirs) == 3
    assert (directory / "notes.txt").read_text() == "not ours"
    assert sorted(path.name for path in directory.iterdir()) == ["notes.txt"]


@pytest.mark.parametrize("running", [False, True], ids=["before a start", "under a running daemon"])
@pytest.mark.parametrize("where", [0, 8, 16, 200], ids=["magic", "state", "checksum", "fields"])
def test_a_slot_with_a_damaged_header_is_used_again(run_dirs: RunDirs, where: int, running: bool) -> None:
    """All slots: a header that stayed damaged would refuse every snapshot from then on, and training would not know."""
    with Daemon(run_dirs) as daemon:
        with TrainerProcess(run_dirs, steps=12, wait_at=6, settle=False, pause=0.1) as trainer:
            trainer.wait_for("waiting")
            if not running:
                trainer.kill()
                daemon.terminate()
            slots = look_for(run_dirs.shm, "*.slot-*")
            assert len(slots) == 3
            for slot in slots:
                with slot.open("r+b") as file:
                    file.seek(where)
                    file.write(b"\xa7" * 40)
            if running:
                trainer.go_on()
                assert trainer.wait() == 0, trainer.events
        if not running:
            daemon.start()
            with TrainerProcess(run_dirs, steps=12, fresh=True, settle=False, pause=0.1) as trainer:
                assert trainer.wait() == 0, trainer.events
        finished = trainer.last("finished")
        assert finished is not None
        assert finished["counters"]["committed_memory"] >= 11
        assert daemon.status().counters["internal_errors"] == 0
