"""A session's life: declare, begin, seal, resume, finish; and what the slot then holds."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import load_file

from baft_client.restore import RestoredImage
from baft_client.source import OutcomeKind
from baftd.errors import (
    Degraded,
    FormatError,
    ModelMismatch,
    NoRoom,
    NothingRestorable,
    RankError,
    TryAgain,
    Unreachable,
    UsageError,
    VerificationFailed,
)
from baftd.memory.header import SlotState
from baftd.memory.slot_file import SlotFile
from baftd.wire.messages import (
    Begin,
    Cadence,
    Declare,
    Finish,
    Hello,
    Leave,
    Restored,
    Resume,
    ResumePlan,
    Save,
    Seal,
    Skip,
    SlotImage,
    WireToken,
)
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.trainer import INCARNATION, Places, Trainer


@pytest.fixture
def daemon(scripted: ScriptedDaemon) -> ScriptedDaemon:
    return scripted


def plan_of(image: SlotImage, step: int) -> ResumePlan:
    return ResumePlan(token=WireToken(2, INCARNATION), step=step, updates=step, epoch=1, source=image, tier="memory")


# ---------------------------------------------------------------- every step


@pytest.mark.parametrize("engine", ["native", "python"])
def test_every_step_is_copied_as_it_was_at_its_boundary(where: Places, daemon: ScriptedDaemon, engine: str) -> None:
    with Trainer(where, tensors=5, size=20_000, engine=engine, audit=1) as trainer:
        trainer.join()
        for step in range(1, 6):
            trainer.update()
            assert trainer.boundary().kind is OutcomeKind.BEGAN
            expected = trainer.bytes()
            trainer.arrays["buffer"] += 1  # volatile: changes at once after the boundary
            trainer.small["seed"] = step
            assert trainer.fence().kind is OutcomeKind.SEALED
            assert trainer.session.settle(5)
            assert daemon.image().digest == RestoredImageOf(daemon).digest
            saved = RestoredImageOf(daemon)
            assert {name: saved.arrays[name] for name in expected} == expected
            assert saved.small == {"seed": step - 1 if step > 1 else 1}
        counters = trainer.session.counters
        assert (counters.began, counters.sealed, counters.torn, counters.audits) == (5, 5, 0, 5)
        assert counters.declares == 1
        assert counters.skipped == {}
    assert [message.step for message in daemon.wait_for(Begin, count=5)] == [1, 2, 3, 4, 5]
    assert [message.step for message in daemon.wait_for(Seal, count=5)] == [1, 2, 3, 4, 5]


class RestoredImageOf:
    """The newest committed image, read through the client's own reader and through the safetensors library."""

    def __init__(self, daemon: ScriptedDaemon) -> None:
        from baft_client.load_engine import load_engine

        source = daemon.image()
        self.digest = source.digest
        engine = load_engine(None, prefer="python")
        try:
            with RestoredImage(source, engine, job="job", rank=0) as image:
                self.arrays = {name: image.array(name).tobytes() for name in image.stored_names}
                image.verify_rest()
                self.small = image.small
        finally:
            engine.stop()
        copy = Path(source.path + ".safetensors")
        copy.write_bytes(Path(source.path).read_bytes()[source.offset : source.offset + source.length])
        try:
            opened = load_file(copy)
        finally:
            copy.unlink()
        for name, data in self.arrays.items():
            assert opened[name].tobytes() == data


def test_slot_headers_tell_writer_token_and_step(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.update()
        trainer.boundary()
        begin = daemon.wait_for(Begin)[0]
        file = daemon.ranks[0].files[begin.slot]
        header = file.read_header()
        assert header is not None
        assert header.state is SlotState.FILLING
        assert (header.step, header.updates, header.generation) == (1, 1, begin.generation)
        assert (header.token.epoch, header.token.incarnation) == (1, INCARNATION)
        hello = daemon.wait_for(Hello)[0]
        assert (header.writer_pid, header.writer_start) == (hello.pid, hello.pid_start)
        trainer.fence()
        header = file.read_header()
        assert header is not None
        assert header.state is SlotState.SEALED
        assert header.root_digest == daemon_root(daemon)


def daemon_root(daemon: ScriptedDaemon) -> bytes:
    daemon.wait_for(Seal)
    return daemon.image().digest


def test_fence_without_a_snapshot_does_nothing(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        assert trainer.fence().kind is OutcomeKind.NOTHING
        trainer.join()
        assert trainer.fence().kind is OutcomeKind.NOTHING
        trainer.one_step()
        assert trainer.fence().kind is OutcomeKind.NOTHING, "sealing twice says nothing new"
    assert len(daemon.wait_for(Seal)) == 1


def test_a_boundary_seals_what_no_fence_did(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        for _ in range(3):
            assert trainer.boundary().kind is OutcomeKind.BEGAN
            trainer.wait_for_grant()
        assert trainer.session.counters.sealed == 2


def test_cadence_is_the_jobs_and_may_change_for_a_future_step(where: Places) -> None:
    with where.daemon(every=3) as daemon, Trainer(where) as trainer:
        trainer.join()
        kinds = []
        for _ in range(7):
            kinds.append(trainer.boundary().kind.value)
            trainer.fence()
            trainer.session.settle(5)
        assert kinds == ["began", "not_due", "began", "not_due", "not_due", "began", "not_due"], "first: none known yet"
        assert daemon.token is not None
        daemon.push(Cadence(token=daemon.token, from_step=10, every=2, earlier=[(0, 3, 0)]))
        daemon.push(Cadence(token=WireToken(9, INCARNATION), from_step=0, every=1))  # another start's
        wait_for(lambda: trainer.session.due(10))
        assert [trainer.session.due(step) for step in range(8, 15)] == [False, True, True, False, True, False, True]
        assert trainer.boundary(force=False).kind is OutcomeKind.NOT_DUE
        assert trainer.session.boundary(8, 0, trainer.sources, {}, force=True).kind is OutcomeKind.BEGAN
    assert daemon.wait_for(Leave)


def wait_for(ready: object, timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_changed_tree_is_declared_anew(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        assert trainer.one_step().kind is OutcomeKind.SEALED
        trainer.wait_for_grant()
        trainer.arrays["more"] = np.ones(7, dtype=np.float32)
        trainer.versions["more"] = 0
        trainer.build()
        assert trainer.one_step().kind is OutcomeKind.SEALED
        trainer.wait_for_grant()
        trainer.build()  # new objects, the same tree
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert trainer.session.counters.declares == 2
        assert trainer.session.settle(5)
        assert set(RestoredImageOf(daemon).arrays) == set(trainer.arrays)
    assert [len(message.entries) for message in daemon.wait_for(Declare, count=2)] == [4, 5]


def test_small_state_that_outgrew_its_room_is_laid_out_anew(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        trainer.small["log"] = "x" * (3 << 20)
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert trainer.session.settle(5)
        assert trainer.session.counters.declares == 2
        assert RestoredImageOf(daemon).small == trainer.small


def test_empty_scalar_and_large_tensors(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where, tensors=0) as trainer:
        trainer.arrays |= {
            "empty": np.zeros((0, 3), dtype=np.float32),
            "scalar": np.array(2.5, dtype=np.float32),
            "odd": np.ones(3, dtype=np.float32),
            "large": np.arange(1_500_000, dtype=np.float32),  # two digest chunks, and a pad before it
        }
        trainer.versions = dict.fromkeys(trainer.arrays, 0)
        trainer.build()
        trainer.join()
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert trainer.session.settle(5)
        assert RestoredImageOf(daemon).arrays == trainer.bytes()


def test_nothing_but_small_state(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where, tensors=0) as trainer:
        trainer.arrays.clear()
        trainer.build()
        trainer.join()
        assert trainer.one_step().kind is OutcomeKind.SEALED
        assert trainer.session.settle(5)
        assert RestoredImageOf(daemon).small == {"seed": 1}


# ---------------------------------------------------------------- resume


def test_resume_copies_out_verified_and_aliases_nothing(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where, size=2_000_000) as trainer:
        trainer.join()
        trainer.one_step()
        assert trainer.session.settle(5)
        expected = trainer.bytes()
        source = daemon.image()
    daemon.plan = lambda request: plan_of(source, 1)
    with Trainer(where, size=2_000_000) as again:
        resumed = again.session.resume()
        assert (resumed.step, resumed.updates, resumed.epoch, resumed.tier) == (1, 1, 2, "memory")
        image = resumed.image
        assert image is not None
        for name, array in again.arrays.items():
            array[...] = 0
            image.copy_into(name, array.ctypes.data, array.nbytes)
        image.verify_rest()
        assert image.small == {"seed": 1}
        assert image.small is not image.small
        assert (image.step, image.updates, image.world) == (1, 1, 1)
        again.session.restored()
        with SlotFile.open_rw(source.path) as slot:
            slot.image()[:] = 0xFF  # nothing restored may notice
        assert again.bytes() == expected
        with pytest.raises(UsageError, match="closed"):
            image.array("w0")
    assert daemon.wait_for(Restored, count=2)[1].ok


def damage(source: SlotImage, offset: int) -> None:
    with SlotFile.open_rw(source.path) as slot:
        slot.image()[offset] ^= 1


@pytest.mark.parametrize("chunks", [True, False], ids=["chunk digests", "root digest alone"])
def test_a_flipped_bit_is_found_whatever_it_hit(where: Places, daemon: ScriptedDaemon, chunks: bool) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        assert trainer.session.settle(5)
        source = daemon.image()
    if not chunks:
        assert source.chunk_digests
        source = structs.replace(source, chunk_digests=b"")
    from baft_client.load_engine import load_engine

    engine = load_engine(None, prefer="python")
    try:
        with RestoredImage(source, engine, job="job", rank=0) as image:
            places_of = {name: image.placement(name).offset for name in image.stored_names}
            small, end = image.parsed.small_offset, source.length
        for what, offset in [*places_of.items(), ("small state", small), ("small state", end - 1)]:
            damage(source, offset)
            with pytest.raises(VerificationFailed) as caught, RestoredImage(source, engine, job="job", rank=0) as image:
                image.verify_rest()
            if chunks:
                assert what in str(caught.value)
            damage(source, offset)
        with RestoredImage(source, engine, job="job", rank=0) as image:
            image.verify_rest()
        for job, rank in (("other", 0), ("job", 1)):
            with pytest.raises(FormatError, match="holds rank 0 of job job"):
                RestoredImage(source, engine, job=job, rank=rank)
        with pytest.raises(VerificationFailed):
            RestoredImage(structs.replace(source, length=source.length - 1), engine, job="job", rank=0)
    finally:
        engine.stop()


def test_a_damaged_image_is_reported_to_the_daemon(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        assert trainer.session.settle(5)
        source = daemon.image()
    damage(source, 100)  # in the header: found at once
    daemon.plan = lambda request: plan_of(source, 1)
    with Trainer(where) as again, pytest.raises(VerificationFailed):
        again.session.resume()
    told = daemon.wait_for(Restored, count=2)[1]
    assert not told.ok
    assert "VerificationFailed" in told.reason or "FormatError" in told.reason


def test_a_tensor_of_another_size_is_a_mismatch(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.one_step()
        assert trainer.session.settle(5)
        source = daemon.image()
    daemon.plan = lambda request: plan_of(source, 1)
    with Trainer(where) as again:
        image = again.session.resume().image
        assert image is not None
        with pytest.raises(ModelMismatch, match="'w0' has 4 bytes here and 4000"):
            image.copy_into("w0", 0, 4)
        with pytest.raises(ModelMismatch, match="no tensor 'nope'"):
            image.array("nope")
        again.session.restored(ok=False, reason="another model")
        with pytest.raises(UsageError):
            again.boundary()
    assert daemon.wait_for(Restored, count=2)[1].reason == "another model"


@pytest.mark.parametrize("error", [NothingRestorable("gone"), TryAgain("busy"), RankError("wrong world")])
def test_what_the_daemon_refuses_resume_raises(where: Places, daemon: ScriptedDaemon, error: Exception) -> None:
    daemon.refuse[Resume] = error  # type: ignore[assignment]
    with Trainer(where) as trainer, pytest.raises(type(error), match=str(error)):
        trainer.session.resume()


def test_a_refused_hello_ends_resume_at_once(where: Places, daemon: ScriptedDaemon) -> None:
    daemon.refuse[Hello] = RankError("rank 0 is claimed by process 7 already")
    began = time.monotonic()
    with Trainer(where, options={"connect_timeout": "30 s"}) as trainer, pytest.raises(RankError, match="claimed"):
        trainer.session.resume()
    assert time.monotonic() - began < 10


def test_passed_over_steps_are_handed_on(where: Places, daemon: ScriptedDaemon) -> None:
    daemon.plan = lambda request: ResumePlan(
        token=WireToken(4, INCARNATION), step=0, passed_over=["step 7: rank 1 has no shard"], durable=True
    )
    with Trainer(where) as trainer:
        resumed = trainer.session.resume(fresh=True, takeover=True)
        assert resumed.passed_over == ("step 7: rank 1 has no shard",)
        assert resumed.durable
        assert resumed.image is None
        trainer.session.restored()
        assert trainer.one_step().kind is OutcomeKind.SEALED
    request = daemon.wait_for(Resume)[0]
    assert (request.fresh, request.takeover) == (True, True)
    assert daemon.wait_for(Seal)[0].token.epoch == 4


def test_no_daemon_is_waited_for_and_then_named(where: Places) -> None:
    with Trainer(where) as trainer:
        began = time.monotonic()
        with pytest.raises(Unreachable) as caught:
            trainer.session.resume(timeout=0.3)
        assert 0.25 < time.monotonic() - began < 5
        assert str(where.socket) in str(caught.value)
        assert "baftd start" in str(caught.value)
        assert caught.value.exit_code == 6
        with where.daemon():
            assert trainer.session.resume().step == 0, "a failed resume may be tried again"


def test_a_daemon_that_comes_within_the_wait_is_found(where: Places) -> None:
    daemon = where.daemon()
    timer = threading.Timer(0.4, daemon.start)
    with Trainer(where) as trainer:
        timer.start()
        try:
            assert trainer.session.resume().step == 0
        finally:
            timer.join()
    daemon.close()


def test_fresh_begins_without_a_daemon_and_joins_later(where: Places) -> None:
    with Trainer(where) as trainer:
        assert trainer.session.resume(fresh=True).epoch == 0
        trainer.session.restored()
        for _ in range(3):
            assert trainer.one_step().kind is OutcomeKind.SKIPPED
        assert trainer.session.counters.skipped == {"no_daemon": 3}
        with where.daemon() as daemon:
            daemon.wait_for(Restored)
            deadline = time.monotonic() + 5
            while trainer.one_step().kind is not OutcomeKind.SEALED:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert daemon.wait_for(Resume)[0].fresh
            assert daemon.wait_for(Seal)[0].step == trainer.step
            trainer.session.close()


# ---------------------------------------------------------------- ending


def test_finish_seals_and_waits_for_the_daemon(where: Places, daemon: ScriptedDaemon) -> None:
    trainer = Trainer(where).join()
    trainer.boundary()
    saved = trainer.session.finish()
    assert saved is not None
    assert saved.note == "no durable tier"
    assert daemon.wait_for(Seal)[0].step == 1
    assert daemon.wait_for(Finish)[0].step == 1
    assert trainer.session.finish() is None
    trainer.session.close()
    for call in (trainer.boundary, trainer.session.resume, trainer.session.save):
        with pytest.raises(UsageError, match="over"):
            call()
    assert trainer.fence().kind is OutcomeKind.NOTHING


def test_save_names_where_it_lies_and_always_raises(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.boundary()
        assert trainer.session.save().step == 1
        assert daemon.wait_for(Seal)[0].step == daemon.wait_for(Save)[0].step == 1
        assert trainer.session.save(durable=False).tier == "memory"
        daemon.refuse[Save] = Degraded("there is no durable tier")
        with pytest.raises(Degraded, match="no durable tier"):
            trainer.session.save()


def test_finish_that_fails_is_told_not_raised_unless_strict(
    where: Places, daemon: ScriptedDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.refuse[Finish] = NoRoom("the disk is full")
    trainer = Trainer(where).join()
    assert trainer.session.finish() is None
    assert "finish_failed" in caplog.text
    assert "the disk is full" in caplog.text
    strict = Trainer(where, strict=True).join()
    with pytest.raises(NoRoom, match="the disk is full"):
        strict.session.finish()


def test_leaving_drops_the_snapshot_and_keeps_the_slots(where: Places, daemon: ScriptedDaemon) -> None:
    trainer = Trainer(where).join()
    trainer.one_step()
    trainer.session.settle(5)
    trainer.boundary()
    trainer.session.leave("an exception")
    skip = daemon.wait_for(Skip)[0]
    assert (skip.step, skip.slot is not None) == (2, True)
    assert daemon.wait_for(Leave)[0].reason == "an exception"
    assert RestoredImageOf(daemon).small == {"seed": 1}


def test_pausing_finishes_the_copy_and_skips_what_comes(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        trainer.join()
        trainer.boundary()
        with trainer.session.paused():
            assert daemon.wait_for(Seal)[0].step == 1
            for array in trainer.arrays.values():
                array += 100
            assert not trainer.session.due(2)
            assert trainer.boundary().reason.startswith("paused")
            for array in trainer.arrays.values():
                array -= 100
        trainer.wait_for_grant()
        assert trainer.one_step().kind is OutcomeKind.SEALED


def test_misuse_is_an_error_of_its_own(where: Places, daemon: ScriptedDaemon) -> None:
    with Trainer(where) as trainer:
        with pytest.raises(UsageError, match=r"before resume\(\)"):
            trainer.boundary()
        with pytest.raises(UsageError, match=r"after resume\(\)"):
            trainer.session.restored()
        trainer.session.resume()
        with pytest.raises(UsageError, match="twice"):
            trainer.session.resume()
