"""The control page: one table of offsets, whole words, and no file mistaken for one."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baftd.errors import FormatError, NoRoom
from baftd.memory.control import FIELDS, MAGIC, PAGE_BYTES, VERSION, ControlPage, Gate


def test_create_and_open_share_every_word(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.control"
    with ControlPage.create(path, rank=3) as one, ControlPage.open(path) as other:
        facts = os.stat(path)
        assert facts.st_size == PAGE_BYTES
        assert facts.st_blocks * 512 >= PAGE_BYTES, "reserved, so that no write meets a full file system"
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert one.read() == {**dict.fromkeys(FIELDS, 0), "magic": MAGIC, "version": VERSION, "rank": 3}
        for number, (name, field) in enumerate(FIELDS.items()):
            if name not in ("magic", "version"):
                value = (1 << (8 * field.size)) - 1 - number
                one.set(name, value)
                assert other.get(name) == value
        assert other.get("rank") == (1 << 32) - 1 - list(FIELDS).index("rank")


def test_fields_do_not_overlap() -> None:
    taken: dict[int, str] = {}
    for name, field in FIELDS.items():
        assert field.size in (4, 8)
        assert field.offset % field.size == 0, f"{name} would be written in two pieces"
        assert field.offset + field.size <= PAGE_BYTES
        assert field.meaning
        for byte in range(field.offset, field.offset + field.size):
            assert byte not in taken, f"{name} and {taken[byte]}"
            taken[byte] = name


def test_lines_of_different_writers_are_apart() -> None:
    """The training thread and the engine would otherwise take cache lines from one another."""
    writers = {"pid": "client", "step": "training", "gate": "gate", "window_opened": "windows",
               "bytes_copied": "engine", "hold_at": "test"}
    lines = {FIELDS[name].offset // 64 for name in writers}
    assert len(lines) == len(writers)


@given(st.integers(0, (1 << 32) - 1))
def test_gate_reads_the_low_bits(word: int) -> None:
    path = Path(f"/dev/shm/baftd-test-control-{os.getpid()}-{threading.get_ident()}")
    with ControlPage.create(path, rank=0) as page:
        path.unlink()
        page.set("gate", word)
        assert page.gate == (Gate(word & 15) if word & 15 < len(Gate) else Gate.CLOSED)


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with ControlPage.create(tmp_path / "c", rank=0) as page:
        for name, value in (("gate", 1 << 32), ("step", 1 << 64), ("step", -1)):
            with pytest.raises(ValueError):
                page.set(name, value)
        with pytest.raises(KeyError):
            page.get("speed")


def test_closed_twice_and_not_used_after(tmp_path: Path) -> None:
    page = ControlPage.create(tmp_path / "c", rank=0)
    page.close()
    page.close()
    assert page.closed
    with pytest.raises(ValueError):
        page.get("step")


def test_create_takes_no_existing_name(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    ControlPage.create(path, rank=0).close()
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        ControlPage.create(path, rank=1)
    assert path.read_bytes() == before
    link = tmp_path / "link"
    link.symlink_to(elsewhere)
    with pytest.raises(FileExistsError):
        ControlPage.create(link, rank=1)
    assert not elsewhere.exists()
    ControlPage.create(elsewhere, rank=0).close()
    with pytest.raises(OSError, match="symbolic links"):
        ControlPage.open(link)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes instead of 4096"),
        (bytes(4095), "4095 bytes"),
        (bytes(4096), "begins with 0x0"),
        (b"PK\x03\x04" + bytes(4092), "no control page"),
        (MAGIC.to_bytes(8, "little") + (VERSION + 1).to_bytes(4, "little") + bytes(4084), f"version {VERSION + 1}"),
    ],
    ids=["empty", "short", "zeros", "foreign", "newer"],
)
def test_other_files_are_no_control_pages(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "c"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        ControlPage.open(path)


def test_a_fifo_or_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ControlPage.open(tmp_path / "none")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FormatError, match="no control page"):
        ControlPage.open(tmp_path / "fifo")


def test_a_full_file_system_is_named_and_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoom, match="No space left on device"):
        ControlPage.create(tmp_path / "c", rank=0)
    assert not (tmp_path / "c").exists()


def test_words_are_never_seen_half_written(tmp_path: Path) -> None:
    """Two values whose halves differ, written in turn: a reader sees one of them, whole."""
    one, other = 0x1111111111111111, 0xEEEEEEEEEEEEEEEE
    with ControlPage.create(tmp_path / "c", rank=0) as writer, ControlPage.open(tmp_path / "c") as reader:
        writer.set("step", one)
        over = threading.Event()

        def write() -> None:
            while not over.is_set():
                writer.set("step", other)
                writer.set("step", one)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            assert {reader.get("step") for _ in range(50_000)} <= {one, other}
        finally:
            over.set()
            thread.join()
