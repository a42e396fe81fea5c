"""Slots on a real tmpfs: full, small, truncated, mapped, killed in the middle of a header."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from baftd.checkpoint.identity import Token
from baftd.checkpoint.shard import Chunk
from baftd.errors import FormatError, NoRoom, UsageError
from baftd.memory import slot_file
from baftd.memory.header import NO_DIGEST, SlotHeader, SlotState
from baftd.memory.slot_file import IMAGE_OFFSET, SlotFile, file_size
from tests.support.tmpfs import shm_directory, small_tmpfs

MIB = 1 << 20


@pytest.fixture
def shm() -> Iterator[Path]:
    with shm_directory() as path:
        yield path


@pytest.fixture
def slot(shm: Path) -> Iterator[SlotFile]:
    with SlotFile.create(shm / "slot", 2 * MIB) as made:
        yield made


def header(generation: int, state: SlotState = SlotState.SEALED, **changes: object) -> SlotHeader:
    made = SlotHeader(
        state, generation, Token(1, "ab" * 16), "gpt", 0, 2, 10 * generation, generation, 5000, 10, b"t" * 16, NO_DIGEST
    )
    return replace(made, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- making


def test_a_new_slot_is_free_reserved_and_private(shm: Path) -> None:
    with SlotFile.create(shm / "slot", 2 * MIB + 1) as slot:
        found = os.stat(shm / "slot")
        assert found.st_size == slot.size == file_size(2 * MIB + 1) == 2 * MIB + 4096 + IMAGE_OFFSET
        assert found.st_blocks * 512 == slot.size
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert slot.capacity == 2 * MIB + 4096
        assert slot.read_header() is None
        assert slot.read_state() == (SlotState.FREE, 0)
        assert not os.get_inheritable(slot.fileno())
        assert slot.pread(0, slot.capacity) == bytes(slot.capacity)


def test_a_slot_is_made_once(shm: Path, slot: SlotFile) -> None:
    with pytest.raises(FileExistsError):
        SlotFile.create(shm / "slot", MIB)
    (shm / "dangling").symlink_to(shm / "elsewhere")
    with pytest.raises(FileExistsError):
        SlotFile.create(shm / "dangling", MIB)
    assert not (shm / "elsewhere").exists()
    with pytest.raises(UsageError, match="makes no sense"):
        SlotFile.create(shm / "nothing", 0)


def test_a_full_tmpfs_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "tiny", "4m") as tiny:
        before = os.statvfs(tiny).f_bavail
        with pytest.raises(NoRoom, match=r"needs 8\.4 MB, but 4\.2 MB of 4\.2 MB are free") as caught:
            SlotFile.create(tiny / "slot", 8 * MIB)
        assert "remount" in caught.value.hint
        assert os.listdir(tiny) == []
        assert os.statvfs(tiny).f_bavail == before
        with SlotFile.create(tiny / "slot", 2 * MIB) as slot:
            slot.prefault()
            with pytest.raises(NoRoom):
                SlotFile.create(tiny / "other", 2 * MIB)
            np.copyto(slot.image(), 7)  # every page is there: writing it is no SIGBUS
            assert slot.pread(0, 4) == b"\7\7\7\7"


def test_without_inodes_the_reason_is_named(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "tiny", "4m", options="nr_inodes=2") as tiny, SlotFile.create(tiny / "a", MIB):
        with pytest.raises(NoRoom, match=r"/b cannot be made: .* takes no more files") as caught:
            SlotFile.create(tiny / "b", MIB)
        assert "nr_inodes" in caught.value.hint


@pytest.fixture(params=["unnamed files", "named files"])
def making(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to make a file: with O_TMPFILE, and where the file system has no such thing."""
    if request.param == "named files":
        real = os.open

        def without(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no")
            return real(path, flags, mode, **more)

        monkeypatch.setattr(os, "open", without)


@pytest.mark.usefixtures("making")
def test_slots_are_made_with_and_without_unnamed_files(shm: Path) -> None:
    with SlotFile.create(shm / "slot", MIB) as slot:
        assert stat.S_IMODE(os.stat(shm / "slot").st_mode) == 0o600
        assert os.stat(shm / "slot").st_nlink == 1
        assert slot.read_header() is None
        with pytest.raises(FileExistsError):
            SlotFile.create(shm / "slot", MIB)
    assert os.listdir(shm) == ["slot"]


def test_a_name_taken_meanwhile_is_not_replaced(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def slow(*arguments: int) -> None:
        (shm / "slot").write_text("somebody was faster")
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    with pytest.raises(FileExistsError):
        SlotFile.create(shm / "slot", MIB)
    assert (shm / "slot").read_text() == "somebody was faster"


def test_killed_while_making_a_slot_leaves_nothing(shm: Path) -> None:
    for function in ("posix_fallocate", "pwrite", "link"):
        pid = os.fork()
        if pid == 0:
            setattr(os, function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            SlotFile.create(shm / "slot", MIB)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert os.listdir(shm) == []


@pytest.mark.usefixtures("making")
def test_an_unexpected_error_leaves_nothing(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="broken"):
        SlotFile.create(shm / "slot", MIB)
    assert os.listdir(shm) == []


# ---------------------------------------------------------------------------------------------- opening


def test_only_slots_are_opened(shm: Path) -> None:
    (shm / "link").symlink_to(shm / "target")
    (shm / "short").write_bytes(bytes(4096))
    (shm / "odd").write_bytes(bytes(9000))
    os.mkfifo(shm / "fifo")
    (shm / "directory").mkdir()
    for name, message in (
        ("link", "not a regular file"),
        ("short", "4096 bytes: it was truncated"),
        ("odd", "9000 bytes"),
        ("fifo", "not a regular file"),
    ):
        for opening in (SlotFile.open_rw, SlotFile.open_ro):
            with pytest.raises(FormatError, match=message):
                opening(shm / name)
    with pytest.raises(FormatError, match="not a regular file"):
        SlotFile.open_ro(shm / "directory")
    with pytest.raises(FileNotFoundError):
        SlotFile.open_rw(shm / "nobody")


def test_writer_and_reader_share_the_bytes(shm: Path, slot: SlotFile) -> None:
    with SlotFile.open_rw(shm / "slot") as writer, SlotFile.open_ro(shm / "slot") as reader:
        writer.image()[:5] = np.frombuffer(b"hello", np.uint8)
        assert reader.image()[:5].tobytes() == b"hello" == slot.pread(0, 5)
        assert not reader.image().flags.writeable
        for one in (writer, reader):
            assert one.address == one.image().ctypes.data
            assert one.address % 4096 == 0
        assert writer.image().size == writer.capacity
        slot.pwrite(b"there", slot.capacity - 5)
        assert writer.image()[-5:].tobytes() == b"there"
        with pytest.raises(UsageError, match="do not fit"):
            slot.pwrite(b"there", slot.capacity - 4)
        with pytest.raises(UsageError, match="do not fit"):
            slot.pwrite(b"there", -1)


def test_a_view_outlives_close(slot: SlotFile) -> None:
    view = slot.image()
    slot.close()
    slot.close()
    view[:] = 3
    assert int(view.sum()) == 3 * view.size


# ---------------------------------------------------------------------------------------------- header


def test_header_round_trip(slot: SlotFile) -> None:
    slot.write_header(header(4, SlotState.FILLING))
    assert slot.read_header() == header(4, SlotState.FILLING)
    slot.write_header(header(4, root_digest=b"r" * 16))
    slot.set_state(SlotState.VERIFIED, 4)
    assert slot.read_header() == header(4, SlotState.VERIFIED, root_digest=b"r" * 16)
    assert slot.read_state() == (SlotState.VERIFIED, 4)
    slot.set_state(SlotState.FREE, 4)
    assert slot.read_header() is None


def test_a_header_of_an_image_that_cannot_be_there_is_refused(shm: Path, slot: SlotFile) -> None:
    slot.write_header(header(1, image_length=slot.capacity + 1))
    with pytest.raises(FormatError, match="in 2097152 of room") as caught:
        slot.read_header()
    assert str(shm / "slot") in str(caught.value)
    os.pwrite(slot.fd, b"garbage!", 0)
    with pytest.raises(FormatError, match="not a slot"):
        slot.read_header()
    with pytest.raises(FormatError, match="not a slot"):
        slot.read_state()


@pytest.mark.parametrize("dies_at", [0, 1, 2, 3])
@pytest.mark.parametrize("old", [SlotState.FREE, SlotState.SEALED, SlotState.VERIFIED])
def test_killed_while_writing_a_header(slot: SlotFile, dies_at: int, old: SlotState) -> None:
    """A writer killed between any two writes never leaves the old state with the new fields, or the other way round."""
    before = header(3, old) if old is not SlotState.FREE else None
    if before is not None:
        slot.write_header(before)
    after = header(4, SlotState.SEALED, step=777)
    pid = os.fork()
    if pid == 0:
        calls = 0
        real = os.pwrite

        def dying(*arguments: object) -> int:
            nonlocal calls
            if calls == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return real(*arguments)  # type: ignore[arg-type]

        os.pwrite = dying  # type: ignore[assignment]
        slot.write_header(after)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) == (dies_at < 3)
    try:
        found = slot.read_header()
    except FormatError:
        assert slot.read_state() == (SlotState.FILLING, 4)  # known to be taken by generation 4, and worth nothing
        return
    expected = {0: before, 1: None, 2: replace(after, state=SlotState.FILLING), 3: after}[dies_at]
    assert found == expected


# ---------------------------------------------------------------------------------------------- reading


def test_a_truncated_slot_is_an_error_not_a_signal(shm: Path) -> None:
    with SlotFile.create(shm / "slot", 2 * MIB) as slot:
        os.truncate(shm / "slot", MIB)  # what only a broken client does
        with pytest.raises(FormatError, match="somebody truncated it"):
            slot.pread(0, 2 * MIB)
        with pytest.raises(FormatError, match="somebody truncated it"):
            slot.digest_chunks([Chunk(0, MIB // 2), Chunk(MIB, MIB // 2)])
        with pytest.raises(FormatError, match="SIGBUS"):
            slot.image()
        os.truncate(shm / "slot", 0)
        with pytest.raises(FormatError, match="too few"):
            slot.read_header()
        with pytest.raises(FormatError, match="truncated"):
            slot.read_state()
        with pytest.raises(FormatError, match="SIGBUS"):
            slot.prefault()


def test_truncated_under_the_daemons_prefault(shm: Path) -> None:
    with SlotFile.create(shm / "slot", 2 * MIB) as slot:
        address = slot.address  # mapped at full length
        os.truncate(shm / "slot", MIB)
        with pytest.raises(OSError, match="cannot be prefaulted") as caught:
            slot.prefault()
        assert caught.value.errno in (errno.EFAULT, errno.ENOMEM)
        assert slot.address == address


def test_digests_are_those_of_the_chunks(slot: SlotFile) -> None:
    content = np.random.default_rng(1).integers(0, 256, slot.capacity, dtype=np.uint8)
    slot.pwrite(content.tobytes(), 0)
    chunks = [Chunk(0, 4096), Chunk(4096, MIB), Chunk(4096 + MIB, 17), Chunk(slot.capacity - 1, 1)]
    expected = b"".join(xxhash.xxh3_128_digest(content[o : o + n].tobytes()) for o, n in chunks)
    assert slot.digest_chunks(chunks) == expected
    answers = iter([False, False, True])
    assert slot.digest_chunks(chunks, cancel=lambda: next(answers)) == expected[:32]
    assert slot.digest_chunks([]) == b""


# ---------------------------------------------------------------------------------------------- prefault


@pytest.fixture(params=["kernel", "older kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to touch pages."""
    if request.param == "older kernel":

        class Old:
            @staticmethod
            def madvise(*_: object) -> int:
                ctypes.set_errno(errno.EINVAL)
                return -1

        monkeypatch.setattr(slot_file, "_libc", Old)
    return str(request.param)


def test_prefault_touches_everything_and_changes_nothing(
    slot: SlotFile, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_file, "PREFAULT_STEP", MIB)
    content = os.urandom(slot.capacity)
    slot.pwrite(content, 0)
    seen: list[tuple[int, int]] = []
    assert slot.prefault(lambda done, total: seen.append((done, total))) == slot.size
    assert seen == [(MIB, slot.size), (2 * MIB, slot.size), (slot.size, slot.size)]
    assert slot.pread(0, slot.capacity) == content
    assert slot._map is None  # the daemon's resident set must not hold the slots


def test_prefault_can_be_stopped(slot: SlotFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_file, "PREFAULT_STEP", MIB)
    answers = iter([False, True])
    assert slot.prefault(cancel=lambda: next(answers)) == MIB


def test_prefault_keeps_the_mapping_of_a_client(slot: SlotFile) -> None:
    address = slot.address
    assert slot.prefault() == slot.size
    assert slot.address == address


def test_prefault_beside_a_writer_loses_no_byte(slot: SlotFile, kernel: str) -> None:
    with SlotFile.open_rw(slot.path) as writer:
        view = writer.image()
        stop = threading.Event()

        def touch() -> None:
            while not stop.is_set():
                slot.prefault()

        thread = threading.Thread(target=touch)
        thread.start()
        try:
            for value in range(40):
                view[:] = value
                assert (view == value).all()
        finally:
            stop.set()
            thread.join(30)


def test_no_memory_while_prefaulting_is_no_room(slot: SlotFile, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        calls = 0

        @classmethod
        def madvise(cls, *_: object) -> int:
            cls.calls += 1
            ctypes.set_errno(errno.EINTR if cls.calls < 3 else errno.ENOSPC)
            return -1

    monkeypatch.setattr(slot_file, "_libc", Full)
    with pytest.raises(NoRoom, match="no memory for its pages"):
        slot.prefault()
    assert Full.calls == 3


def test_a_numa_node_is_a_hint(shm: Path) -> None:
    for node in (0, 63, 64, 10**6):
        with SlotFile.create(shm / f"slot-{node}", MIB, numa_node=node) as slot:
            assert slot.prefault(numa_node=node) == slot.size
    # The policy of this thread is back to the default: anonymous memory can be had from any node.
    bytearray(MIB)


def test_the_daemons_side_needs_no_numpy(shm: Path) -> None:
    script = (
        "import sys; from baftd.memory.slot_file import SlotFile, IMAGE_OFFSET; "
        f"s = SlotFile.create({str(shm / 'plain')!r}, 1 << 20); s.prefault(); s.digest_chunks([(0, 100)]); s.close(); "
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
