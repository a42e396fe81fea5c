"""Bulk writing and reading on file systems that refuse, stutter and lie, and slots that change under the write."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.shard import digest, root_digest
from baftd.errors import BaftError, Degraded, UsageError, VerificationFailed
from baftd.storage.directory import DirectoryTier
from baftd.storage.files import OsFiles
from baftd.storage.interface import BufferSink
from baftd.storage.limiter import TokenBucket
from baftd.storage.reader import BulkReader
from baftd.storage.writer import PAGE, Bounds, BulkWriter
from tests.support.images import Slot, default_entries, make_slot, save


class Odd(OsFiles):
    """A file system with the given oddities, and what it was asked."""

    def __init__(self, *oddities: str) -> None:
        super().__init__()
        self.oddities = oddities
        self.direct: set[int] = set()
        self.direct_writes = self.buffered_writes = self.written_back = 0
        self.on_write: Callable[[int, int], None] = lambda fd, offset: None
        self.before_write: Callable[[int], None] = lambda offset: None

    def set_direct(self, fd: int, on: bool) -> None:
        if on and "no direct" in self.oddities:
            raise OSError(errno.EINVAL, "Invalid argument")
        (self.direct.add if on else self.direct.discard)(fd)
        super().set_direct(fd, on)

    def close(self, fd: int) -> None:
        self.direct.discard(fd)
        super().close(fd)

    def preallocate(self, fd: int, length: int) -> bool:
        return False if "no fallocate" in self.oddities else super().preallocate(fd, length)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if fd in self.direct:
            self.before_write(offset)
            if "refuses direct writes" in self.oddities:
                raise OSError(errno.EINVAL, "Invalid argument")
            assert offset % PAGE == 0
            assert len(data) % PAGE == 0
            self.direct_writes += 1
        else:
            self.buffered_writes += 1
        if "short" in self.oddities:
            less = max(1, len(data) * 2 // 3)
            data = data[: max(PAGE, less // PAGE * PAGE) if fd in self.direct else less]
        if "takes nothing" in self.oddities and len(data) > 8192:
            return 0
        done = super().pwrite(fd, data, offset)
        if "misreports" in self.oddities and done > PAGE:
            done -= 100  # an unaligned short write
        if fd in self.direct or "no direct" in self.oddities:
            self.on_write(fd, offset)
        return done

    def pread_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if fd in self.direct and "refuses direct reads" in self.oddities:
            raise OSError(errno.EINVAL, "Invalid argument")
        if "short" in self.oddities and len(buffer) > PAGE:
            buffer = buffer[: len(buffer) // 2 // PAGE * PAGE or PAGE]
        got = super().pread_into(fd, buffer, offset)
        return got - 100 if "misreports" in self.oddities and fd in self.direct and got > PAGE else got

    def finish_writeback(self, fd: int, offset: int, length: int) -> None:
        self.written_back += length
        super().finish_writeback(fd, offset, length)


@pytest.mark.parametrize(
    "oddities",
    [
        (),
        ("short",),
        ("misreports",),
        ("no direct",),
        ("no direct", "short"),
        ("refuses direct writes",),
        ("refuses direct reads", "short"),
        ("refuses direct writes", "refuses direct reads", "no fallocate"),
    ],
    ids=lambda value: ", ".join(value) or "none",
)
@pytest.mark.parametrize("readback", [False, True])
def test_odd_file_systems_hold_the_same_bytes(shm: Path, disk: Path, oddities: tuple[str, ...], readback: bool) -> None:
    ops = Odd(*oddities)
    slot = make_slot(shm, entries=default_entries(0, large=300_000))
    tier = DirectoryTier(disk, node="n0", file_ops=ops, block=65536, readback=readback)
    saved = save(tier, [slot])
    if "no direct" in oddities and not readback:
        assert ops.written_back >= slot.length - 2 * 65536  # the page cache holds no more than two blocks
    assert Path(saved.parts[0].path).read_bytes() == slot.image
    assert all(line.ok for line in tier.verify("gpt", saved.checkpoint))
    memory = bytearray(slot.length)
    tier.fetch("gpt", saved.checkpoint, 0, BufferSink(memoryview(memory)))
    assert memory == slot.image
    if not {"no direct", "refuses direct writes"} & set(oddities):
        assert ops.direct_writes >= 6
    elif "no direct" in oddities:
        assert ops.direct_writes == 0


def test_a_file_system_that_takes_nothing_is_an_error(shm: Path, disk: Path) -> None:
    with pytest.raises(Degraded, match="took no bytes"):
        make_slot(shm, entries=default_entries(0, 100_000)).write(
            DirectoryTier(disk, node="n0", file_ops=Odd("takes nothing")), "gpt"
        )


def poke(slot: Slot, offset: int) -> None:
    """Flip a bit of the image."""
    with open(slot.path, "r+b") as file:
        file.seek(PAGE + offset)
        byte = file.read(1)
        file.seek(PAGE + offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_slot_that_changes_before_its_write_is_caught_wherever(shm: Path, disk: Path, threads: int) -> None:
    """Every chunk, at its first, last and middle byte; blocks are smaller than chunks, so that chunks straddle them."""
    slot = make_slot(shm, entries=default_entries(0, 50_000))
    tier = DirectoryTier(disk, node="n0", block=8192, threads=threads)
    for number, (offset, size) in enumerate(slot.chunks):
        for at in (offset, offset + size // 2, offset + size - 1):
            poke(slot, at)
            with pytest.raises(VerificationFailed, match=f"chunk {number} of {len(slot.chunks)}"):
                slot.write(tier, "gpt")
            poke(slot, at)
    slot.write(tier, "gpt")


def test_a_slot_that_changes_during_the_write_is_caught(shm: Path, disk: Path) -> None:
    """The digest is taken after the write: a change between the two is an error, never a wrong file."""
    slot = make_slot(shm, entries=default_entries(0, 50_000))
    ops = Odd()
    spots = {0: 5000, 8192: 8192, 16384: 20_000}
    for block, spot in spots.items():
        ops.on_write = lambda fd, offset, block=block, spot=spot: poke(slot, spot) if offset == block else None  # type: ignore[misc]
        with pytest.raises(VerificationFailed, match="has changed since it was sealed"):
            slot.write(DirectoryTier(disk, node="n0", file_ops=ops, block=8192, threads=1), "gpt")
        poke(slot, spot)


def test_a_chunk_is_judged_only_when_its_last_block_was_written(shm: Path, disk: Path) -> None:
    """Chunk 1 reaches over three blocks: a change right before the write of the third is in the file, and is seen."""
    slot = make_slot(shm, entries=default_entries(0, 50_000))
    assert slot.chunks[1][0] < 8192
    assert sum(slot.chunks[1]) > 16384
    ops = Odd()
    ops.before_write = lambda offset: poke(slot, 17_000) if offset == 16384 else None
    with pytest.raises(VerificationFailed, match="chunk 1 of"):
        slot.write(DirectoryTier(disk, node="n0", file_ops=ops, block=8192, threads=1), "gpt")


@pytest.mark.parametrize("oddities", [(), ("no direct",)], ids=["direct", "page cache"])
@pytest.mark.parametrize("left", [0, PAGE + 100, 20_000])
@pytest.mark.parametrize("block", [8192, 1 << 20])
@pytest.mark.parametrize("before", [True, False], ids=["before the write", "before the digest"])
def test_a_slot_that_is_cut_is_an_error_not_a_signal(
    shm: Path, disk: Path, oddities: tuple[str, ...], left: int, block: int, before: bool
) -> None:
    """Under the map: what the kernel is to write is gone, or what is digested behind it. The process must live."""

    class Cutting(Odd):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if before:
                os.truncate(slot.path, left)
            done = super().pwrite(fd, data, offset)
            os.truncate(slot.path, left)
            return done

    slot = make_slot(shm, entries=default_entries(0, 50_000))
    tier = DirectoryTier(disk, node="n0", file_ops=Cutting(*oddities), block=block, threads=1)
    for _ in range(2):
        with pytest.raises(VerificationFailed, match="the slot was cut"):
            slot.write(tier, "gpt")


def test_a_slot_that_is_cut_and_made_whole_again_is_caught(shm: Path, disk: Path) -> None:
    class Cutting(Odd):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            whole = os.stat(slot.path).st_size
            os.truncate(slot.path, 0)
            os.truncate(slot.path, whole)
            return super().pwrite(fd, data, offset)

    slot = make_slot(shm, entries=default_entries(0, 50_000))
    with pytest.raises(BaftError):
        slot.write(DirectoryTier(disk, node="n0", file_ops=Cutting(), block=1 << 20, threads=1), "gpt")


def test_reading_back_sees_what_the_device_lost(shm: Path, disk: Path) -> None:
    """A device that drops a block: only `readback` notices, and nothing is named."""

    class Lossy(Odd):
        def fsync(self, fd: int) -> None:
            super().fsync(fd)
            if os.fstat(fd).st_size > 60_000:
                super().set_direct(fd, False)
                os.pwrite(fd, bytes(4096), 8192)
                super().set_direct(fd, True)

    slot = make_slot(shm, entries=default_entries(0, 70_000))
    tier = DirectoryTier(disk, node="n0", file_ops=Lossy(), readback=True)
    with pytest.raises(VerificationFailed, match=r"rank 0: .*read back: chunk"):
        slot.write(tier, "gpt")
    blind = DirectoryTier(disk, node="n0", file_ops=Lossy())
    saved = save(blind, [slot])
    (line,) = blind.verify("gpt", saved.checkpoint)
    assert not line.ok
    assert line.chunk is not None
    assert "hit: model.weight" in line.text


def test_verify_names_every_tensor_hit(shm: Path, disk: Path) -> None:
    tier = DirectoryTier(disk, node="n0")
    slot = make_slot(shm, entries=default_entries(0, 50_000))
    saved = save(tier, [slot])
    path = Path(saved.parts[0].path)
    whole = path.read_bytes()
    for number, (offset, size) in enumerate(slot.chunks):
        for at in (offset, offset + size - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            (line,) = tier.verify("gpt", saved.checkpoint)
            assert (line.ok, line.rank, line.chunk) == (False, 0, number)
            assert "hit: " in line.text or "header" in line.text
            with pytest.raises(VerificationFailed, match=f"chunk {number} of"):
                tier.fetch("gpt", saved.checkpoint, 0, BufferSink(memoryview(bytearray(slot.length))))
    path.write_bytes(bytes(len(whole)))
    (line,) = tier.verify("gpt", saved.checkpoint)
    assert "more chunks" in line.text
    assert "its header cannot be read either" in line.text
    path.write_bytes(whole)
    assert tier.verify("gpt", saved.checkpoint)[0].ok


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    block=st.sampled_from([4096, 8192, 32768]),
    threads=st.integers(1, 3),
)
def test_any_chunk_table(lengths: list[int], block: int, threads: int) -> None:
    """Chunks in any place and number against blocks of any size: what was written is what was there."""
    import tempfile

    image = os.urandom(sum(lengths))
    table = [(sum(lengths[:number]), size) for number, size in enumerate(lengths)]
    digests = b"".join(digest(image[offset : offset + size]) for offset, size in table)
    ops = OsFiles()
    with tempfile.TemporaryDirectory(prefix="baftd-test-") as base, open(f"{base}/source", "w+b") as source:
        source.write(bytes(PAGE) + image)
        source.flush()
        bounds = Bounds(lambda: 0.0)
        writer = BulkWriter(ops, source.fileno(), PAGE, len(image), table, digests, bounds, "it", block, threads)
        os.close(writer.write(f"{base}/target"))
        with open(f"{base}/target", "rb") as file:
            assert file.read() == image
        memory = bytearray(len(image))
        reader = BulkReader(ops, table, digests, bounds, "it", BufferSink(memoryview(memory)), threads=threads)
        assert reader.read(f"{base}/target") == []
        assert memory == image


def test_a_source_must_begin_on_a_page(shm: Path, disk: Path) -> None:
    slot = make_slot(shm)
    with open(slot.path, "rb") as file, pytest.raises(UsageError, match="not at a multiple of 4096"):
        DirectoryTier(disk, node="n0").write_shard(
            "gpt", slot.checkpoint, 0, file.fileno(), 512, slot.length, slot.chunks, slot.digests,
            token=slot.token, tree_digest=slot.tree_digest, updates=1, world=1,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- rate and priority


def test_the_bucket_lets_through_the_rate_and_not_more() -> None:
    now = 0.0
    bucket = TokenBucket(rate=100.0, burst=50.0, clock=lambda: now)
    assert bucket(50) == 0.0
    assert bucket(100) == pytest.approx(1.0)
    assert bucket(100) == pytest.approx(2.0)  # a second writer waits behind the first
    now = 2.5
    assert bucket(0) == 0.0
    assert bucket(50) == 0.0
    assert bucket(1) == pytest.approx(0.01)
    now = 1000.0
    assert bucket(51) == pytest.approx(0.01)  # an idle bucket holds no more than the burst
    with pytest.raises(UsageError):
        TokenBucket(0, 1, lambda: 0.0)


class Waits:
    """A cancel that never comes, and how long was waited for it."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.now = 0.0

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.now += timeout
        return False


def test_writes_keep_to_the_rate_and_to_the_deadline(shm: Path, disk: Path) -> None:
    cancel = Waits()
    slot = make_slot(shm, entries=default_entries(0, 300_000))
    tier = DirectoryTier(disk, node="n0", block=65536, threads=1, clock=lambda: cancel.now)
    slot.write(tier, "gpt", limiter=TokenBucket(65536.0, 65536.0, lambda: cancel.now), cancel=cancel)
    assert cancel.now == pytest.approx((slot.length - 65536) / 65536)
    other = make_slot(shm, step=9, entries=default_entries(0, 300_000))
    start = cancel.now
    with pytest.raises(Degraded, match="did not finish before its deadline"):
        other.write(
            tier, "gpt", limiter=TokenBucket(65536.0, 0.0, lambda: cancel.now), cancel=cancel, deadline=start + 2.5
        )
    assert cancel.now == pytest.approx(start + 2.5)


def test_bulk_threads_are_niced_and_the_caller_is_not(shm: Path, disk: Path) -> None:
    seen: list[tuple[str, int]] = []

    def look(fd: int, offset: int) -> None:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen.append((threading.current_thread().name, nice))

    ops = Odd()
    ops.on_write = look
    before = os.getpriority(os.PRIO_PROCESS, 0)
    make_slot(shm).write(DirectoryTier(disk, node="n0", file_ops=ops), "gpt")
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert {nice for name, nice in seen if name.startswith("baftd-bulk")} == {max(10, before)}


def test_an_error_of_ours_is_raised_rather_than_what_followed_it(shm: Path, disk: Path) -> None:
    class Breaking(Odd):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if offset >= 16384 and len(data) >= 8192:
                raise OSError(errno.EIO, "Input/output error")
            return super().pwrite(fd, data, offset)

    slot = make_slot(shm, entries=default_entries(0, 200_000))
    with pytest.raises(BaftError, match=r"Input/output error|is not what"):
        slot.write(DirectoryTier(disk, node="n0", file_ops=Breaking(), block=8192, threads=4), "gpt")
    assert root_digest(slot.digests, slot.length)
