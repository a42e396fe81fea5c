"""Manifests: what is written is read, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.framing import encode_record
from baftd.checkpoint.identity import CheckpointId
from baftd.checkpoint.shard import CHUNK, root_digest
from baftd.errors import FormatError, UsageError
from baftd.storage.directory import DirectoryTier
from baftd.storage.formats import (
    CheckpointManifest,
    FencePost,
    PartOfCheckpoint,
    ShardManifest,
    check_chunks,
    manifest_digest,
    pack_lengths,
)
from baftd.storage.interface import BufferSink, ShardRecord
from tests.support.images import make_slot, save, token

digests_of_16 = st.binary(min_size=16, max_size=16)
epochs = st.integers(1, (1 << 53) - 1)
counts = st.integers(0, (1 << 63) - 1)
incarnations = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def shard_manifests(draw: st.DrawFn) -> ShardManifest:
    lengths = draw(st.lists(st.integers(1, CHUNK), min_size=1, max_size=20))
    table = [(sum(lengths[:n]), size) for n, size in enumerate(lengths)]
    digests = draw(st.binary(min_size=16 * len(lengths), max_size=16 * len(lengths)))
    world = draw(st.integers(1, 1 << 20))
    return ShardManifest(
        job=draw(st.text(max_size=20)),
        epoch=draw(epochs),
        incarnation=draw(incarnations),
        step=draw(counts),
        updates=draw(counts),
        parent=draw(st.none() | st.tuples(epochs, counts)),
        rank=draw(st.integers(0, world - 1)),
        world=world,
        node=draw(st.text(max_size=20)),
        nbytes=sum(lengths),
        root_digest=root_digest(digests, sum(lengths)),
        tree_digest=draw(digests_of_16),
        lengths=pack_lengths(table),
        digests=digests,
    )


@settings(max_examples=50, deadline=None)
@given(manifest=shard_manifests())
def test_a_shard_manifest_comes_back(manifest: ShardManifest) -> None:
    data = manifest.encode()
    assert ShardManifest.decode(data, "x") == manifest
    record = manifest.record("/p", manifest_digest(data))
    assert ShardRecord.from_fields(record.to_fields()) == record


def checkpoint_manifest(world: int) -> CheckpointManifest:
    parts = [
        PartOfCheckpoint(
            rank=rank,
            node=f"n{rank % 3}",
            nbytes=rank,
            root_digest=rank.to_bytes(16, "big"),
            tree_digest=bytes(16),
            manifest_digest=bytes(16),
        )
        for rank in range(world)
    ]
    return CheckpointManifest(
        job="gpt",
        epoch=2,
        incarnation="a" * 32,
        step=8,
        updates=7,
        parent=(1, 4),
        world=world,
        plan_digest=bytes(16),
        nbytes=sum(range(world)),
        committed_by="n0",
        parts=parts,
    )


@pytest.mark.parametrize("world", [1, 2, 4096, 4097, 10_000])
def test_a_checkpoint_manifest_comes_back(world: int) -> None:
    manifest = checkpoint_manifest(world)
    assert CheckpointManifest.decode(manifest.encode(), "x") == manifest


def test_every_flipped_bit_and_every_cut_is_seen() -> None:
    samples = [
        (checkpoint_manifest(2).encode(), CheckpointManifest.decode),
        (FencePost(job="gpt", epoch=3, incarnation="b" * 32).encode(), FencePost.decode),
    ]
    for data, decode in samples:
        for position in range(len(data)):
            for bit in (0x01, 0x80):
                with pytest.raises(FormatError, match="/where"):
                    decode(data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :], "/where")
            with pytest.raises(FormatError, match="/where"):
                decode(data[:position], "/where")
        for more in (b"\0", data):
            with pytest.raises(FormatError):
                decode(data + more, "/where")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_garbage_is_an_error_of_ours(data: bytes) -> None:
    for decode in (CheckpointManifest.decode, ShardManifest.decode, FencePost.decode):
        with pytest.raises(FormatError):
            decode(data, "x")
        with pytest.raises(FormatError):
            decode(encode_record(data), "x")


def test_contradictions_are_errors() -> None:
    """Intact frames with contents that cannot be."""
    good = checkpoint_manifest(3)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"world": 4}, "ranks 0 to 3"),
        ({"nbytes": 4}, "add up"),
        ({"parts": [good.parts[0], good.parts[0], good.parts[2]]}, "ranks 0 to 2"),
        ({"plan_digest": b"short"}, "plan_digest"),
        ({"incarnation": "X" * 32}, "incarnation"),
        ({"epoch": 0}, "epoch"),
        ({"step": -1}, "step"),
        ({"parent": (0, 1)}, "parent"),
    ]
    for change, words in changes:
        with pytest.raises(FormatError, match=words):
            CheckpointManifest.decode(msgspec.structs.replace(good, **change).encode(), "x")
    table = [(0, 10), (10, 5)]
    shard = ShardManifest(
        job="gpt",
        epoch=1,
        incarnation="a" * 32,
        step=1,
        updates=1,
        parent=None,
        rank=0,
        world=1,
        node="n0",
        nbytes=15,
        root_digest=root_digest(bytes(32), 15),
        tree_digest=bytes(16),
        lengths=pack_lengths(table),
        digests=bytes(32),
    )
    assert shard.chunks() == table
    changes = [
        ({"nbytes": 16}, "cover 15 bytes"),
        ({"digests": bytes(16)}, "digests"),
        ({"digests": bytes(31) + b"x"}, "root digest"),
        ({"rank": 1}, "rank 1 of a world of 1"),
        ({"lengths": bytes(7)}, "chunk table has 7 bytes"),
        ({"lengths": pack_lengths([(0, 15), (15, 0)])}, "chunk 1"),
    ]
    for change, words in changes:
        with pytest.raises(FormatError, match=words):
            ShardManifest.decode(msgspec.structs.replace(shard, **change).encode(), "x")


def test_other_versions_are_named() -> None:
    fields = {"format": "baftd.epoch", "version": 2, "job": "gpt", "epoch": 3, "incarnation": "b" * 32}
    with pytest.raises(FormatError, match=r"version 2 of the format baftd\.epoch; this baftd reads 1"):
        FencePost.decode(encode_record(fields), "x")
    assert FencePost.decode(encode_record({**fields, "version": 1, "later": 1}), "x").epoch == 3
    with pytest.raises(FormatError, match=r"not a baftd\.shard"):
        ShardManifest.decode(encode_record({**fields, "version": 1}), "x")


@pytest.mark.parametrize(
    ("table", "length", "count"),
    [
        ([], 0, 0),
        ([(0, 5)], 6, 1),
        ([(0, 5), (6, 1)], 7, 2),
        ([(0, 5), (4, 1)], 5, 2),
        ([(1, 5)], 6, 1),
        ([(0, CHUNK + 1)], CHUNK + 1, 1),
        ([(0, 5), (5, 0)], 5, 2),
        ([(0, 5)], 5, 2),
    ],
)
def test_chunks_must_cover_the_image(table: list[tuple[int, int]], length: int, count: int) -> None:
    with pytest.raises(UsageError):
        check_chunks(table, length, bytes(16 * count))


def test_a_record_from_a_message_is_checked() -> None:
    fields = ShardRecord(0, "n", "/p", 5, bytes(16), bytes(16), bytes(16)).to_fields()
    for change in ({"rank": "0"}, {"nbytes": -1}, {"rank": True}, {"root_digest": b"x"}, {"node": b"n"}):
        with pytest.raises(FormatError, match="shard record: field"):
            ShardRecord.from_fields({**fields, **change})
    del fields["path"]
    with pytest.raises(FormatError, match="'path'"):
        ShardRecord.from_fields(fields)


# ------------------------------------------------------------------------ what lies in the directory is not trusted


@pytest.fixture
def saved(shm: Path, disk: Path) -> tuple[DirectoryTier, Path]:
    tier = DirectoryTier(disk, node="n0")
    found = save(tier, [make_slot(shm, rank=rank, world=2) for rank in range(2)])
    return tier, Path(found.path)


def state_of(tier: DirectoryTier) -> tuple[str, str]:
    (one,) = tier.list("gpt")
    assert one.state == "complete" or not all(line.ok for line in tier.verify("gpt", one.checkpoint))
    return one.state, one.reason


def test_every_file_missing_cut_or_changed_is_named(saved: tuple[DirectoryTier, Path]) -> None:
    tier, path = saved
    for name, missing in [
        ("MANIFEST", "incomplete"),
        ("rank-00000.manifest", "damaged"),
        ("rank-00001.safetensors", "damaged"),
    ]:
        whole = (path / name).read_bytes()
        (path / name).unlink()
        state, reason = state_of(tier)
        assert state == missing
        assert name in reason
        for damage in (whole[:-1], b"", whole + b"\0"):
            (path / name).write_bytes(damage)
            state, reason = state_of(tier)
            assert (state, name in reason) == ("damaged", True)
        (path / name).unlink()
        (path / name).mkdir()
        assert state_of(tier)[0] == "damaged"
        (path / name).rmdir()
        os.symlink("/etc/passwd", path / name)
        assert state_of(tier)[0] == "damaged"
        (path / name).unlink()
        (path / name).write_bytes(whole)
        assert state_of(tier) == ("complete", "")


def test_files_of_another_checkpoint_are_not_taken(saved: tuple[DirectoryTier, Path], shm: Path) -> None:
    tier, path = saved
    other = Path(save(tier, [make_slot(shm, step=9, rank=rank, world=2) for rank in range(2)]).path)
    for name in ("MANIFEST", "rank-00001.manifest"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes((other / name).read_bytes())
        found = tier.describe("gpt", CheckpointId(1, 8))
        assert found is not None
        assert found.state == "damaged"
        assert "step-9" in found.reason
        (path / name).write_bytes(whole)
    other.rename(path.parent / "step-10.e1")
    found = tier.describe("gpt", CheckpointId(1, 10))
    assert found is not None
    assert found.state == "damaged"
    with pytest.raises(FormatError, match="is about step-9"):
        tier.fetch("gpt", CheckpointId(1, 10), 0, BufferSink(memoryview(bytearray(1 << 20))))


def test_strange_names_are_left_alone(saved: tuple[DirectoryTier, Path]) -> None:
    tier, path = saved
    job = path.parent
    strange = ("step-08.e1", "step-8.e0", "step-x.e1", "notes.txt", "EPOCH-01", "EPOCH-x", ".hidden", "step-1.e1.old")
    for name in strange:
        (job / name).mkdir()
    (job / "step-77.e1").touch()
    (job.parent / "some file").touch()
    (job.parent / "lost+found").mkdir()
    assert [(one.checkpoint.step, one.state) for one in tier.list("gpt")] == [(77, "damaged"), (8, "complete")]
    assert tier.sweep("gpt").lines == ()
    assert tier.jobs() == ["gpt"]
    assert tier.newest_token("gpt") == token(1)
    (path / "someone's notes").touch()
    assert tier.describe("gpt", CheckpointId(1, 8)) == tier.list("gpt")[1]
    assert tier.delete("gpt", CheckpointId(1, 77)) == 0
    assert len(tier.list("gpt")) == 1


def test_a_damaged_fence_is_an_error_until_the_next_epoch(saved: tuple[DirectoryTier, Path], shm: Path) -> None:
    from baftd.errors import Fenced

    tier, path = saved
    fence = path.parent / "EPOCH-1"
    fence.write_bytes(fence.read_bytes()[:-2])
    with pytest.raises(FormatError, match="EPOCH-1 is damaged"):
        tier.newest_token("gpt")
    with pytest.raises(Fenced, match="somebody unknown"):
        make_slot(shm, step=9).write(tier, "gpt")
    tier.open_epoch("gpt", token(2))
    assert tier.newest_token("gpt") == token(2)
    assert not fence.exists()
