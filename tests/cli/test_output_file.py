"""What stands where a file is to be written stays what it is: pipes, links, modes, open files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baftd.cli import output_file
from baftd.cli.output_file import check_output, is_standard_output, write_output
from baftd.errors import UsageError


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    data = bytes(range(256)) * 4096  # more than a pipe holds: several writes
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(fifo.read_bytes)
        write_output(fifo, data, "-o")
        assert read.result(10) == data
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert os.listdir(tmp_path) == ["fifo"]


def test_a_link_to_a_pipe_is_followed(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to("fifo")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(fifo.read_bytes)
        write_output(link, b"data", "-o")
        assert read.result(10) == b"data"
    assert link.is_symlink()
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_links_are_followed_and_the_file_behind_them_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link, second = tmp_path / "there" / "t.json", tmp_path / "link", tmp_path / "second"
    target.write_text("old")
    link.symlink_to("there/t.json")
    second.symlink_to("link")
    with target.open() as old:
        write_output(second, b"new", "-o")
        assert old.read() == "old", "a reader of the old file has it whole"
    assert (link.is_symlink(), second.is_symlink(), target.is_symlink()) == (True, True, False)
    assert target.read_text() == "new"
    assert os.listdir(tmp_path / "there") == ["t.json"]


def test_a_link_to_nothing_makes_the_file_that_it_names(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("new.json")
    write_output(link, b"new", "-o")
    assert link.is_symlink()
    assert (tmp_path / "new.json").read_text() == "new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755])
def test_the_mode_of_a_file_is_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    path.chmod(mode)
    write_output(path, b"new", "-o")
    assert (path.read_text(), _mode(path)) == ("new", mode)


def test_a_new_file_has_the_mode_of_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_output(tmp_path / "t.json", b"new", "-o")
    finally:
        os.umask(before)
    assert _mode(tmp_path / "t.json") == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_users_file_stays_the_users(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")
    os.chown(path, 12345, 54321)
    path.chmod(0o640)
    write_output(path, b"new", "-o")
    found = path.stat()
    assert (found.st_uid, found.st_gid, _mode(path)) == (12345, 54321, 0o640)


def test_an_open_file_is_written_through(tmp_path: Path) -> None:
    """`/proc/self/fd/N`, and what links to it like `/dev/stdout`: of a pipe, a file, a file whose name is another's."""
    reading, writing = os.pipe()
    try:
        write_output(f"/proc/self/fd/{writing}", b"data", "-o")
        assert os.read(reading, 100) == b"data"
    finally:
        os.close(reading)
        os.close(writing)
    path, link = tmp_path / "t.json", tmp_path / "stdout"
    with path.open("w+b") as stream:
        stream.write(b"something longer")
        stream.flush()
        link.symlink_to(f"/proc/self/fd/{stream.fileno()}")
        write_output(link, b"first", "-o")
        assert path.read_bytes() == b"first"
        path.unlink()
        path.write_bytes(b"another's")
        write_output(link, b"second", "-o")
        assert path.read_bytes() == b"another's"
        stream.seek(0)
        assert stream.read() == b"second"
    assert link.is_symlink()


def test_after_an_error_the_old_file_is_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")

    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_file, "_write_all", full)
    with pytest.raises(OSError, match="No space"):
        write_output(path, b"new", "-o")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["t.json"]


def test_links_in_a_circle_stay(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(OSError, match="symbolic links"):
        write_output(one, b"new", "-o")
    assert (one.is_symlink(), other.is_symlink()) == (True, True)


def test_what_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, said in (("", "empty"), (".", "directory"), ("/", "directory"), (str(tmp_path), "directory"),
                       (f"{tmp_path}/none/", "not there")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            check_output(path, "-o")
        with pytest.raises(UsageError, match=said):
            write_output(path, b"", "-o")
    seen = os.stat(tmp_path)
    disk = os.stat_result((stat.S_IFBLK | 0o660, *tuple(seen)[1:]))
    monkeypatch.setattr(output_file, "_stat", lambda name: disk)
    with pytest.raises(UsageError, match="is a disk"):
        write_output("/dev/of-the-test", b"", "-o")


def test_standard_output_is_recognized(tmp_path: Path) -> None:
    code = "import sys; from baftd.cli.output_file import is_standard_output as f; print([f(x) for x in sys.argv[1:]])"
    path, other = tmp_path / "t.json", tmp_path / "other"
    other.write_text("")
    command = [sys.executable, "-c", code, "/proc/self/fd/1", str(path), str(other), str(tmp_path / "none")]
    with path.open("w") as stream:
        subprocess.run(command, stdout=stream, check=True)
    assert path.read_text() == "[True, True, False, False]\n"
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "[True, False, False, False]\n"


def test_a_standard_output_without_a_descriptor_is_nobodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Replaced:
        def fileno(self) -> int:
            raise ValueError("there is none")

    (tmp_path / "t.json").write_text("")
    monkeypatch.setattr(sys, "stdout", Replaced())
    assert not is_standard_output(tmp_path / "t.json")
