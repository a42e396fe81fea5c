"""The journal under kill -9, full disks, failed fsyncs, torn tails and flipped bits: nothing acknowledged is lost,
nothing is believed that was not written."""

from __future__ import annotations

import errno
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baftd.checkpoint.framing import encode_record
from baftd.errors import BaftError, FormatError, NoRoom
from baftd.memory.journal import FileOps, Journal, read_journal
from tests.support.tmpfs import small_tmpfs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"n": number, "pad": "x" * (number % 7)} for number in range(start, start + count)]


def written(path: Path, records: list[dict[str, Any]]) -> None:
    journal, _ = Journal.open(path)
    journal.append(*records)
    journal.close()


class FaultyOps(FileOps):
    """Fails, or dies, at one operation; remembers all."""

    def __init__(self, at: int | None = None, fault: Callable[[str], None] | None = None) -> None:
        self.at = at
        self.fault = fault
        self.log: list[str] = []

    def _step(self, name: str) -> None:
        self.log.append(name)
        if self.fault is not None and (self.at is None or len(self.log) - 1 == self.at):
            self.fault(name)

    def write(self, fd: int, data: bytes) -> int:
        self._step("write")
        return super().write(fd, data)

    def truncate(self, fd: int, length: int) -> None:
        self._step("truncate")
        super().truncate(fd, length)

    def fsync(self, fd: int) -> None:
        self._step("fsync")
        super().fsync(fd)

    def rename(self, source: str, destination: str) -> None:
        self._step("rename")
        super().rename(source, destination)

    def sync_directory(self, path: str) -> None:
        self._step("sync_directory")
        super().sync_directory(path)


# ---------------------------------------------------------------------------------------------- plain


def test_records_come_back(path: Path) -> None:
    journal, found = Journal.open(path)
    assert found.records == ()
    assert found.problem is None
    with journal:
        journal.append({"a": 1})
        journal.append({"b": b"\0\xff", "c": [1, None, 2.5, "x", {"d": True}]}, {"e": -(2**60)})
        assert journal.size == path.stat().st_size
    expected = ({"a": 1}, {"b": b"\0\xff", "c": [1, None, 2.5, "x", {"d": True}]}, {"e": -(2**60)})
    assert read_journal(path).records == expected
    journal, found = Journal.open(path)
    with journal:
        assert found.all_records == expected
        journal.append({"f": 0})
    assert read_journal(path).records == (*expected, {"f": 0})
    assert path.stat().st_mode & 0o777 == 0o600


def test_no_file_holds_nothing(path: Path) -> None:
    assert read_journal(path).records == ()
    assert not path.exists()


def test_a_record_that_is_no_data_changes_nothing(path: Path) -> None:
    journal, _ = Journal.open(path)
    with journal:
        journal.append({"a": 1})
        with pytest.raises(FormatError):
            journal.append({"b": 2}, {"c": object()})
        journal.append({"d": 3})
    assert read_journal(path).records == ({"a": 1}, {"d": 3})


def test_a_symbolic_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    for opening in (Journal.open, read_journal):
        with pytest.raises(OSError) as caught:
            opening(path)
        assert caught.value.errno == errno.ELOOP
    assert not (tmp_path / "elsewhere").exists()


def test_durable_before_append_returns(path: Path) -> None:
    ops = FaultyOps()
    journal, _ = Journal.open(path, fsync=True, ops=ops)
    with journal:
        assert ops.log == ["sync_directory"]  # the new name
        journal.append({"a": 1}, {"b": 2})
        assert ops.log[1:] == ["write", "fsync"]
        journal.rewrite([{"c": 3}])
        assert ops.log[3:] == ["write", "fsync", "rename", "sync_directory"]
        journal.append({"d": 4})
        assert ops.log[7:] == ["write", "fsync"]
    assert read_journal(path).records == ({"c": 3}, {"d": 4})


def test_on_tmpfs_nothing_is_synced_but_a_rewrite(path: Path) -> None:
    ops = FaultyOps()
    journal, _ = Journal.open(path, ops=ops)
    with journal:
        journal.append({"a": 1})
        assert ops.log == ["write"]


# ---------------------------------------------------------------------------------------------- rewriting


def test_it_asks_to_be_rewritten_past_its_limit_and_not_again_at_once(path: Path) -> None:
    journal, _ = Journal.open(path)
    with journal:
        big = {"x": "y" * (1 << 20)}
        for _ in range(4):
            assert not journal.wants_rewrite
            journal.append(big)
        assert journal.wants_rewrite
        journal.rewrite([big] * 5)  # what matters is itself larger than the limit
        assert not journal.wants_rewrite
        for _ in range(6):
            journal.append(big)
        assert journal.wants_rewrite
        journal.rewrite([{"a": 1}])
        assert journal.size < 100
        journal.append({"b": 2})
    assert read_journal(path).records == ({"a": 1}, {"b": 2})


def test_what_a_killed_rewrite_left_is_no_obstacle(path: Path) -> None:
    written(path, numbered(3))
    path.with_name("journal.new").write_bytes(b"half a journal")
    journal, _ = Journal.open(path)
    with journal:
        journal.rewrite(numbered(1))
    assert read_journal(path).records == tuple(numbered(1))
    assert sorted(os.listdir(path.parent)) == ["journal"]


# ---------------------------------------------------------------------------------------------- damage


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10**6), garbage=st.sampled_from([b"", b"\0" * 30, b"\0"]))
def test_a_torn_tail_is_dropped_and_the_rest_is_whole(path: Path, cut: int, garbage: bytes) -> None:
    path.unlink(missing_ok=True)
    records = numbered(20)
    frames = [encode_record(record) for record in records]
    data = b"".join(frames)
    cut %= len(data) + 1
    path.write_bytes(data[:cut] + garbage)
    whole = 0
    while whole < len(frames) and sum(map(len, frames[: whole + 1])) <= cut:
        whole += 1
    journal, found = Journal.open(path)
    with journal:
        assert found.records[:whole] == tuple(records[:whole])
        # Zeros after a cut may complete nothing but by chance a record that ended in zeros; ours do not.
        assert len(found.records) == whole
        assert found.torn == (found.problem is not None)
        assert (found.problem is not None) == (sum(map(len, frames[:whole])) < cut + len(garbage))
        assert found.problem is None or str(path) in found.problem
        journal.append({"after": 1})
    assert read_journal(path).records == (*records[:whole], {"after": 1})
    assert read_journal(path).problem is None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bit=st.integers(0, 10**6))
def test_a_flipped_bit_loses_one_record_at_most_and_is_told(path: Path, bit: int) -> None:
    for name in os.listdir(path.parent):
        (path.parent / name).unlink()
    records = numbered(20)
    frames = [encode_record(record) for record in records]
    data = bytearray(b"".join(frames))
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    hit = 0
    while sum(map(len, frames[: hit + 1])) <= bit // 8:
        hit += 1
    survivors = tuple(records[:hit] + records[hit + 1 :])
    journal, found = Journal.open(path)
    with journal:
        assert found.records == tuple(records[:hit])
        assert found.all_records == survivors
        assert found.problem is not None
        # In the last record a flipped bit cannot be told from bytes that never arrived, unless it hit the frame.
        assert not found.torn or hit == len(records) - 1
        assert path.with_name("journal.damaged").exists() == (not found.torn)
        if not found.torn:
            assert path.with_name("journal.damaged").read_bytes() == bytes(data)
            assert "is damaged" in found.problem
        journal.append({"after": 1})
    assert read_journal(path).problem is None
    assert read_journal(path).records == (*survivors, {"after": 1})


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_garbage_is_told_and_kept(path: Path, data: bytes) -> None:
    for name in os.listdir(path.parent):
        (path.parent / name).unlink()
    path.write_bytes(data)
    journal, found = Journal.open(path)
    with journal:
        assert found.all_records == ()
        assert (found.problem is None) == (data == b"")
        journal.append({"after": 1})
    assert read_journal(path).records == ({"after": 1},)


def test_records_of_another_kind_are_passed_over(path: Path) -> None:
    path.write_bytes(encode_record({"a": 1}) + encode_record([1, 2]) + encode_record({"b": 2}))
    journal, found = Journal.open(path)
    with journal:
        assert found.records == ({"a": 1}, {"b": 2})
        assert found.problem is not None
        assert "1 records are not of baftd" in found.problem
    assert path.with_name("journal.damaged").exists()
    assert read_journal(path).problem is None


# ---------------------------------------------------------------------------------------------- faults


def test_a_full_file_system_is_no_room_and_costs_nothing(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "tiny", "64k") as tiny:
        journal, _ = Journal.open(tiny / "journal")
        kept: list[dict[str, Any]] = []

        def fill() -> None:
            for record in numbered(10_000):
                journal.append(record, {"fill": "z" * 500})
                kept.extend([record, {"fill": "z" * 500}])

        (tiny / "other").write_bytes(bytes(8192))
        with journal:
            with pytest.raises(NoRoom, match="cannot grow"):
                fill()
            assert read_journal(tiny / "journal").records == tuple(kept)
            assert read_journal(tiny / "journal").problem is None
            with pytest.raises(NoRoom):
                journal.rewrite([{"x": "y" * 70_000}])
            assert sorted(os.listdir(tiny)) == ["journal", "other"]
            assert read_journal(tiny / "journal").records == tuple(kept)
            (tiny / "other").unlink()
            journal.rewrite(kept[:4])
            journal.append({"after": 1})
        assert read_journal(tiny / "journal").records == (*kept[:4], {"after": 1})


def eio(_: str) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_short_write_is_continued(path: Path) -> None:
    class Stutter(FileOps):
        def write(self, fd: int, data: bytes) -> int:
            return super().write(fd, data[:3])

    journal, _ = Journal.open(path, ops=Stutter())
    with journal:
        journal.append(*numbered(3))
    assert read_journal(path).records == tuple(numbered(3))


def test_a_failed_fsync_is_never_taken_for_success(path: Path) -> None:
    ops = FaultyOps()
    journal, _ = Journal.open(path, fsync=True, ops=ops)
    with journal:
        journal.append({"a": 1})
        ops.fault, ops.at = eio, len(ops.log) + 1  # the fsync of the next append; the one that takes back succeeds
        with pytest.raises(OSError, match="Input/output"):
            journal.append({"b": 2})
        ops.fault = None
        assert read_journal(path).records == ({"a": 1},)
        journal.append({"c": 3})
        ops.fault, ops.at = eio, None  # now everything fails, and what was appended cannot be taken back
        with pytest.raises(OSError, match="Input/output"):
            journal.append({"d": 4})
        ops.fault = None
        with pytest.raises(BaftError, match="takes no records") as caught:
            journal.append({"e": 5})
        assert "could not be taken back" in caught.value.message
        journal.rewrite([{"f": 6}])
        journal.append({"g": 7})
    assert read_journal(path).records == ({"f": 6}, {"g": 7})


def work(journal: Journal, say: Callable[[int], None]) -> None:
    """Ten appends, with a rewrite after the fifth; `say` what has been acknowledged."""
    for number in range(1, 11):
        journal.append({"n": number})
        say(number)
        if number == 5:
            journal.rewrite([{"n": one} for one in range(1, 6)])


OPERATIONS = 1 + 10 * 2 + 4


@pytest.mark.parametrize("fault", ["die before", "die after", "fail"])
@pytest.mark.parametrize("at", range(OPERATIONS))
def test_killed_or_failing_at_every_operation(path: Path, at: int, fault: str) -> None:
    """Whatever was acknowledged is there; at most the one record in flight comes on top."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)

        class Ops(FaultyOps):
            def fsync(self, fd: int) -> None:
                super().fsync(fd)
                self._after()

            def rename(self, source: str, destination: str) -> None:
                super().rename(source, destination)
                self._after()

            def write(self, fd: int, data: bytes) -> int:
                done = super().write(fd, data)
                self._after()
                return done

            def sync_directory(self, path: str) -> None:
                super().sync_directory(path)
                self._after()

            def _after(self) -> None:
                if fault == "die after" and len(self.log) - 1 == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        def fall(_: str) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        ops = Ops(at, {"die before": fall, "die after": None, "fail": eio}[fault])
        try:
            journal, _ = Journal.open(path, fsync=True, ops=ops)
            work(journal, lambda number: os.write(send, struct.pack("B", number)) and None)
        except OSError:
            os._exit(3)
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    if fault == "fail":
        assert os.waitstatus_to_exitcode(status) == 3
    else:
        assert os.WTERMSIG(status) == signal.SIGKILL
    acknowledged = told[-1] if told else 0
    journal, found = Journal.open(path, fsync=True)
    with journal:
        numbers = [record["n"] for record in found.all_records]
        assert numbers == list(range(1, len(numbers) + 1))
        assert acknowledged <= len(numbers) <= acknowledged + 1
        if fault == "fail":
            assert len(numbers) == acknowledged
        assert found.problem is None or found.torn
        journal.append({"n": -1})
    assert read_journal(path).problem is None

