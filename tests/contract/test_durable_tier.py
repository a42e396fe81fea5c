"""What every durable tier promises, whatever it is made of. A new implementation adds itself to `TIERS`."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baftd.checkpoint.identity import CheckpointId
from baftd.errors import Degraded, Fenced, JobNameError, NoRoom, UsageError, VerificationFailed
from baftd.storage.directory import DirectoryTier
from baftd.storage.interface import BufferSink, FileSink, ShardRecord, Tier
from tests.support.images import PLAN, Slot, make_slot, save, token

TIERS: dict[str, Callable[[Path], DirectoryTier]] = {
    "directory": lambda base: DirectoryTier(base / "durable", node="n0"),
    "directory, read back": lambda base: DirectoryTier(base / "durable", node="n0", readback=True),
    "directory, small blocks": lambda base: DirectoryTier(base / "durable", node="n0", block=4096, threads=3),
    "directory on tmpfs": lambda base: DirectoryTier(base / "shm" / "durable", node="n0"),
}


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"baftd-test-{os.getpid()}-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(params=list(TIERS))
def tier(request: pytest.FixtureRequest, tmp_path: Path, shm: Path) -> DirectoryTier:
    (tmp_path / "shm").symlink_to(shm)
    return TIERS[request.param](tmp_path)


def ranks(shm: Path, world: int = 2, **more: object) -> list[Slot]:
    return [make_slot(shm, rank=rank, world=world, **more) for rank in range(world)]  # type: ignore[arg-type]


def test_is_a_tier(tier: DirectoryTier) -> None:
    checked: Tier = tier  # mypy
    assert checked.jobs() == []


def test_a_saved_checkpoint_comes_back(tier: DirectoryTier, shm: Path) -> None:
    slots = ranks(shm)
    saved = save(tier, slots)
    assert (saved.state, saved.world, saved.updates, saved.plan_digest) == ("complete", 2, 8, PLAN)
    assert saved.nbytes == sum(slot.length for slot in slots)
    assert tier.list("gpt") == [saved]
    assert tier.describe("gpt", saved.checkpoint) == saved
    assert tier.jobs() == ["gpt"]
    assert [line.ok for line in tier.verify("gpt", saved.checkpoint)] == [True, True]
    for slot in slots:
        memory = bytearray(b"\xaa" * (slot.length + 10))
        fetched = tier.fetch("gpt", saved.checkpoint, slot.rank, BufferSink(memoryview(memory)))
        assert memory[: slot.length] == slot.image
        assert memory[slot.length :] == b"\xaa" * 10
        assert (fetched.digests, list(fetched.chunks)) == (slot.digests, slot.chunks)
        assert fetched.record == saved.parts[slot.rank]
        assert (fetched.updates, fetched.world) == (8, 2)


def test_a_fetch_into_a_file_starts_where_it_is_told(tier: DirectoryTier, shm: Path) -> None:
    (slot,) = ranks(shm, 1)
    saved = save(tier, [slot])
    with open(shm / "target", "w+b") as file:
        file.truncate(4096 + slot.length)
        tier.fetch("gpt", saved.checkpoint, 0, FileSink(file.fileno(), 4096, slot.length))
        file.seek(0)
        assert file.read() == bytes(4096) + slot.image
        with pytest.raises(NoRoom, match=f"{slot.length} bytes, there is room for {slot.length - 1}"):
            tier.fetch("gpt", saved.checkpoint, 0, FileSink(file.fileno(), 4096, slot.length - 1))


def test_it_is_all_safe_to_repeat(tier: DirectoryTier, shm: Path) -> None:
    slots = ranks(shm)
    first = save(tier, slots)
    assert save(tier, slots) == first
    tier.open_epoch("gpt", slots[0].token)
    tier.open_epoch("gpt", slots[0].token)
    assert tier.newest_token("gpt") == slots[0].token
    assert tier.delete("gpt", first.checkpoint) >= first.nbytes
    assert tier.delete("gpt", first.checkpoint) == 0
    assert tier.list("gpt") == []
    assert tier.describe("gpt", first.checkpoint) is None
    assert replace(save(tier, slots)) == first


def test_incomplete_is_never_complete(tier: DirectoryTier, shm: Path) -> None:
    slots = ranks(shm, 3)
    records = [slot.write(tier, "gpt") for slot in slots[:2]]
    (found,) = tier.list("gpt")
    assert found.state == "incomplete"
    assert "2 of 3 shards" in found.reason
    assert found.parts == tuple(records)
    assert not found.being_written
    with pytest.raises(VerificationFailed, match="one shard of each of 3 ranks"):
        commit(tier, slots[0], records)
    with pytest.raises(VerificationFailed, match="not complete"):
        tier.fetch("gpt", found.checkpoint, 0, BufferSink(memoryview(bytearray(1 << 20))))
    ghost = replace(records[1], rank=2)
    with pytest.raises(VerificationFailed, match=r"rank 2: .*missing.*share"):
        commit(tier, slots[0], [*records, ghost])
    assert tier.list("gpt") == [found]
    assert not tier.verify("gpt", found.checkpoint)[0].ok
    assert not tier.verify("gpt", CheckpointId(1, 999))[0].ok


def commit(tier: DirectoryTier, slot: Slot, records: list[ShardRecord], **more: object) -> None:
    arguments: dict[str, object] = {
        "plan_digest": PLAN,
        "token": slot.token,
        "updates": slot.updates,
        "world": slot.world,
        **more,
    }
    tier.commit("gpt", slot.checkpoint, records, **arguments)  # type: ignore[arg-type]


def test_a_commit_takes_only_the_shards_it_names(tier: DirectoryTier, shm: Path) -> None:
    slots = ranks(shm)
    records = [slot.write(tier, "gpt") for slot in slots]
    for wrong in (
        replace(records[0], manifest_digest=bytes(16)),
        replace(records[0], root_digest=bytes(16)),
        replace(records[0], nbytes=1),
        replace(records[0], node="other"),
    ):
        with pytest.raises(VerificationFailed):
            commit(tier, slots[0], [wrong, records[1]])
    with pytest.raises(VerificationFailed, match="with 2 ranks"):
        commit(tier, slots[0], records[:1], world=1)
    commit(tier, slots[0], records)
    with pytest.raises(UsageError, match="committed already"):
        commit(tier, slots[0], records, plan_digest=b"another plan 012")


def test_changed_bytes_are_not_written(tier: DirectoryTier, shm: Path) -> None:
    slot = make_slot(shm)
    with open(slot.path, "r+b") as file:
        file.seek(4096 + slot.chunks[2][0] + 1)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(VerificationFailed, match=r"rank 0: .*rank-00000.*chunk 2 of"):
        slot.write(tier, "gpt")
    (found,) = tier.list("gpt")
    assert (found.parts, found.nbytes) == ((), 0)


def test_a_committed_checkpoint_takes_no_other_bytes(tier: DirectoryTier, shm: Path) -> None:
    saved = save(tier, ranks(shm))
    with pytest.raises(UsageError, match="is committed and cannot take another shard of rank 1"):
        make_slot(shm, rank=1, world=2, seed=7).write(tier, "gpt")
    assert tier.list("gpt") == [saved]
    assert all(line.ok for line in tier.verify("gpt", saved.checkpoint))


def test_an_older_token_writes_nothing(tier: DirectoryTier, shm: Path) -> None:
    old, new = ranks(shm), ranks(shm, by=token(2))
    first = save(tier, old)
    half = make_slot(shm, step=9, rank=0, world=1)
    record = half.write(tier, "gpt")
    tier.open_epoch("gpt", token(2))
    for attempt in (
        lambda: save(tier, old),
        lambda: commit(tier, half, [record]),
        lambda: commit(tier, old[0], list(first.parts)),
        lambda: make_slot(shm, step=10).write(tier, "gpt"),
        lambda: tier.open_epoch("gpt", token(1)),
        lambda: tier.delete("gpt", first.checkpoint, token=token(1)),
    ):
        with pytest.raises(Fenced, match="epoch 1 was overtaken by epoch 2"):
            attempt()
    assert [one.state for one in tier.list("gpt")] == ["incomplete", "complete"]
    assert tier.newest_token("gpt") == token(2)
    second = save(tier, new)
    assert [one.checkpoint for one in tier.list("gpt")] == [CheckpointId(2, 8), CheckpointId(1, 9), CheckpointId(1, 8)]
    assert tier.delete("gpt", first.checkpoint, token=token(2)) > 0
    assert second in tier.list("gpt")


def test_one_epoch_has_one_incarnation(tier: DirectoryTier, shm: Path) -> None:
    tier.open_epoch("gpt", token(3, start=1))
    with pytest.raises(Fenced, match=r"belongs to 0*1, not to 0*2"):
        tier.open_epoch("gpt", token(3, start=2))
    with pytest.raises(Fenced):
        make_slot(shm, by=token(3, start=2)).write(tier, "gpt")
    assert tier.newest_token("gpt") == token(3, start=1)


def test_jobs_do_not_see_each_other(tier: DirectoryTier, shm: Path) -> None:
    save(tier, [make_slot(shm, job="a")], job="a")
    save(tier, [make_slot(shm, job="b", by=token(5))], job="b")
    assert tier.jobs() == ["a", "b"]
    assert [one.checkpoint.epoch for one in tier.list("a")] == [1]
    for name in ("../a", "a/b", "", "."):
        with pytest.raises(JobNameError):
            tier.list(name)


def test_it_stops_when_told_to(tier: DirectoryTier, shm: Path) -> None:
    slot = make_slot(shm)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Degraded, match="cancelled"):
        slot.write(tier, "gpt", cancel=cancel)
    with pytest.raises(Degraded, match="deadline"):
        slot.write(tier, "gpt", deadline=-1.0)
    assert tier.list("gpt")[0].nbytes == 0
    saved = save(tier, [slot])
    with pytest.raises(Degraded, match="cancelled"):
        tier.verify("gpt", saved.checkpoint, cancel=cancel)
    with pytest.raises(Degraded, match="cancelled"):
        tier.fetch("gpt", saved.checkpoint, 0, BufferSink(memoryview(bytearray(slot.length))), cancel=cancel)


def test_it_says_how_far_it_is(tier: DirectoryTier, shm: Path) -> None:
    slots = ranks(shm)
    told: list[int] = []
    for slot in slots:
        slot.write(tier, "gpt", progress=told.append)
        assert max(told) == slot.length
        told.clear()
    saved = save(tier, slots)
    tier.verify("gpt", saved.checkpoint, progress=told.append)
    assert max(told) == saved.nbytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 1}, "chunks cover"),
        ({"digests": b""}, "digests"),
        ({"chunks": []}, "chunks have"),
        ({"rank": 5}, "rank 5 is not one of a world of 1"),
        ({"token": token(9)}, "token of epoch 9 cannot write"),
    ],
)
def test_nonsense_is_refused(tier: DirectoryTier, shm: Path, change: dict[str, object], words: str) -> None:
    slot = replace(make_slot(shm), **change)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        slot.write(tier, "gpt")
    assert tier.jobs() == []
