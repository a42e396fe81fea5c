"""Directories of the arena: only ours are believed, only what nobody wants is removed, other users get their slots."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baftd.errors import FormatError, JobNameError, NoRoom, UsageError
from baftd.memory import acl
from baftd.memory.arena import ArenaRoot, Claim, JobArena, SlotRef, sweep
from tests.support.tmpfs import as_user, shm_directory, small_tmpfs

MIB = 1 << 20
HOUR = 3600.0


@pytest.fixture
def root() -> Iterator[ArenaRoot]:
    with shm_directory() as path:
        made = ArenaRoot(path)
        made.create()
        yield made


def filled(root: ArenaRoot, name: str, *, slots: int = 1, age: float = 0.0, now: float = 1e9) -> JobArena:
    """A job with slots of 1 MiB, a control page, a lock file and a journal, last changed `age` seconds before `now`."""
    arena = root.job(name)
    arena.create()
    for index in range(slots):
        arena.create_slot(0, index, MIB).close()
    arena.create_lock(0)
    Path(arena.control_path(0)).write_bytes(bytes(4096))
    Path(arena.journal_path).write_bytes(b"records")
    for entry in os.scandir(arena.path):
        os.utime(entry.path, (now - age, now - age))
    return arena


@contextlib.contextmanager
def lock_held(path: str) -> Iterator[int]:
    """Another process holds the record lock on `path`; its PID."""
    script = (
        "import sys, fcntl, os; fd = os.open(sys.argv[1], os.O_RDWR); fcntl.lockf(fd, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process.pid
        finally:
            process.kill()


# ---------------------------------------------------------------------------------------------- directories


def test_names_and_modes(root: ArenaRoot) -> None:
    arena = root.job("gpt")
    arena.create()
    arena.create()  # again is fine
    assert arena.path == f"{root.shm_dir}/baftd-{os.geteuid()}/gpt"
    for directory in (root.path, arena.path):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert arena.slot_path(3, 1).endswith("/rank-00003.slot-1")
    assert arena.control_path(123456).endswith("/rank-123456.control")
    arena.create_slot(3, 1, MIB).close()
    arena.create_slot(12, 0, 10).close()
    lock = arena.create_lock(3)
    assert arena.create_lock(3) == lock
    assert arena.slots() == [
        SlotRef(3, 1, arena.slot_path(3, 1), MIB + 4096),
        SlotRef(12, 0, arena.slot_path(12, 0), 8192),
    ]
    assert arena.ranks() == [3, 12]
    assert arena.usage() == root.usage() == MIB + 4096 + 8192
    assert root.jobs() == ["gpt"]
    with pytest.raises(JobNameError):
        root.job("../gpt")


def test_a_directory_that_is_not_ours_alone_is_refused() -> None:
    with shm_directory() as shm:
        root = ArenaRoot(shm)
        assert root.check() is False
        assert root.jobs() == []
        os.symlink("/tmp", root.path)
        for refuse in (root.create, root.check):
            with pytest.raises(UsageError, match="not a directory"):
                refuse()
        with pytest.raises(UsageError, match="not a directory"):
            sweep(root, claim=lambda _: Claim.FINISHED, retention=0, now=0)
        os.unlink(root.path)
        Path(root.path).write_bytes(b"")
        with pytest.raises(UsageError, match="not a directory"):
            root.create()
        os.unlink(root.path)
        for mode in (0o770, 0o702, 0o777):
            os.mkdir(root.path)
            os.chmod(root.path, mode)
            with pytest.raises(UsageError, match=f"writable by others \\(mode {mode:04o}\\)"):
                root.create()
            os.rmdir(root.path)
        other = ArenaRoot(shm, uid=os.geteuid() + 1)
        with pytest.raises(UsageError, match="somebody else made it"):
            other.create()
        root.create()
        os.symlink("/tmp", f"{root.path}/gpt")
        assert root.jobs() == []
        with pytest.raises(UsageError, match="symbolic link"):
            root.job("gpt").create()


def test_no_room_for_a_slot_leaves_nothing(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "tiny", "2m") as tiny:
        arena = ArenaRoot(tiny).job("gpt")
        arena.create()
        with pytest.raises(NoRoom):
            arena.create_slot(0, 0, 4 * MIB)
        assert arena.slots() == []


def test_the_incarnation_lives_and_dies_with_the_memory(root: ArenaRoot) -> None:
    assert root.incarnation() == ""
    root.set_incarnation("ab" * 16)
    root.set_incarnation("cd" * 16)
    assert ArenaRoot(root.shm_dir).incarnation() == "cd" * 16
    filled(root, "gpt")
    assert root.remove_if_empty() is False
    assert root.incarnation() == "cd" * 16
    assert root.job("gpt").remove() == []
    assert root.remove_if_empty() is True
    assert not os.path.exists(root.path)
    assert root.remove_if_empty() is True
    assert root.incarnation() == ""


def test_removing_keeps_what_is_not_ours(root: ArenaRoot) -> None:
    arena = filled(root, "gpt", slots=2)
    arena.create_slot(1, 0, MIB).close()
    arena.remove_slot(0, 1)
    arena.remove_slot(0, 1)
    arena.remove_rank(1)
    assert [(ref.rank, ref.index) for ref in arena.slots()] == [(0, 0)]
    strange = Path(arena.path, "notes.txt")
    strange.write_text("mine")
    directory = Path(arena.path, "rank-00000.slot-9")
    directory.mkdir()
    assert [ref.index for ref in arena.slots()] == [0]
    assert arena.remove() == sorted([str(strange), str(directory)])
    assert strange.read_text() == "mine"
    assert arena.remove() == sorted([str(strange), str(directory)])


def test_a_removed_slot_stays_under_those_who_map_it(root: ArenaRoot) -> None:
    arena = root.job("gpt")
    arena.create()
    with arena.create_slot(0, 0, MIB) as slot:
        view = slot.image()
        arena.remove()
        view[:] = 5
        assert int(view.max()) == 5


# ---------------------------------------------------------------------------------------------- sweep


def test_sweep_removes_what_no_job_wants(root: ArenaRoot) -> None:
    now = 1e9
    claims = {
        "live": Claim.LIVE, "done": Claim.FINISHED, "old": Claim.UNFINISHED, "young": Claim.UNFINISHED,
        "lost": Claim.UNKNOWN,
    }  # fmt: skip
    for name, age in (("live", 1e6), ("done", 0), ("old", 25 * HOUR), ("young", 23 * HOUR), ("lost", 1)):
        filled(root, name, age=age)
    planned = sweep(root, claim=claims.__getitem__, retention=24 * HOUR, now=now, dry_run=True)
    assert root.jobs() == sorted(claims)
    done = sweep(root, claim=claims.__getitem__, retention=24 * HOUR, now=now)
    assert done == planned
    assert [(swept.job, swept.reason) for swept in done] == [
        ("done", "the job has finished"),
        ("old", "unfinished, untouched for 25.0 h"),
    ]
    assert all(swept.bytes >= MIB for swept in done)
    assert root.jobs() == ["live", "lost", "young"]


def test_sweep_makes_room_oldest_first_and_no_more_than_needed(root: ArenaRoot) -> None:
    for name, age in (("a", 1 * HOUR), ("b", 3 * HOUR), ("c", 2 * HOUR)):
        filled(root, name, age=age)
    swept = sweep(root, claim=lambda _: Claim.UNFINISHED, retention=24 * HOUR, now=1e9, need=MIB + MIB // 2)
    assert [one.job for one in swept] == ["b", "c"]
    assert "room is needed" in swept[0].reason
    assert root.jobs() == ["a"]
    assert sweep(root, claim=lambda _: Claim.UNFINISHED, retention=24 * HOUR, now=1e9) == []


def test_sweep_takes_no_unfinished_job_where_all_of_them_are_not_enough(root: ArenaRoot) -> None:
    for name in ("a", "b", "done"):
        filled(root, name, age=HOUR)
    claims = {"a": Claim.UNFINISHED, "b": Claim.UNKNOWN, "done": Claim.FINISHED}
    swept = sweep(root, claim=claims.__getitem__, retention=24 * HOUR, now=1e9, need=100 * MIB)
    assert [one.job for one in swept] == ["done"]
    assert root.jobs() == ["a", "b"]


def test_sweep_leaves_what_a_living_process_holds(root: ArenaRoot) -> None:
    arena = filled(root, "gpt", age=1e6)
    with lock_held(arena.lock_path(0)) as pid:
        assert arena.holders() == {0: pid}
        assert sweep(root, claim=lambda _: Claim.FINISHED, retention=0, now=1e9) == []
    assert arena.holders() == {}
    assert [one.job for one in sweep(root, claim=lambda _: Claim.FINISHED, retention=0, now=1e9)] == ["gpt"]


def test_sweep_says_what_stays(root: ArenaRoot) -> None:
    arena = filled(root, "gpt")
    Path(arena.path, "notes.txt").write_text("mine")
    (swept,) = sweep(root, claim=lambda _: Claim.FINISHED, retention=0, now=1e9)
    assert "1 files that are not of baftd stay" in swept.reason
    assert os.listdir(arena.path) == ["notes.txt"]


# ---------------------------------------------------------------------------------------------- other users


OPEN = "try:\n    fd = os.open(sys.argv[1], os.O_RDWR); print('opened')\nexcept OSError as e: print(e.strerror)"


def test_trainers_of_other_users_get_their_files_and_nothing_else() -> None:
    with shm_directory() as shm:
        os.chmod(shm, 0o755)
        root = ArenaRoot(shm)
        arena = root.job("gpt")
        arena.create(clients=[2001, 2002])
        arena.create_slot(0, 0, MIB).close()
        lock = arena.create_lock(0)
        Path(arena.journal_path).write_bytes(b"")
        os.chmod(arena.journal_path, 0o600)
        slot = arena.slot_path(0, 0)
        assert acl.users_of(slot) == {2001: 6, 2002: 6}
        assert acl.users_of(arena.path) == acl.users_of(root.path) == {2001: 1, 2002: 1}
        for path in (slot, lock):
            assert as_user(2001, OPEN, path) == "opened"
            assert as_user(2003, OPEN, path) == "Permission denied"
        assert as_user(2001, OPEN, arena.journal_path) == "Permission denied"
        listing = "try: print(os.listdir(sys.argv[1]))\nexcept OSError as e: print(e.strerror)"
        assert as_user(2001, listing, arena.path) == "Permission denied"
        making = "try: print(os.open(sys.argv[1], os.O_CREAT | os.O_RDWR))\nexcept OSError as e: print(e.strerror)"
        assert as_user(2001, making, f"{arena.path}/rank-00000.slot-7") == "Permission denied"
        arena.create(clients=[2001])  # x for others is no reason to mistrust the directory
        assert root.check()


def test_access_lists_are_written_as_the_kernel_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    os.chmod(path, 0o600)
    assert acl.users_of(path) == {}
    acl.grant(path, [], acl.READ, owner=6)
    assert acl.users_of(path) == {}
    try:
        acl.grant(path, [7, 5, 7], acl.READ, owner=acl.READ | acl.WRITE)
    except UsageError as refused:
        pytest.skip(f"no access lists here: {refused}")
    assert acl.users_of(path) == {5: 4, 7: 4}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640  # the group's bits show the mask


def test_a_file_system_without_access_lists_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refuse)
    with pytest.raises(UsageError, match=r"no access control lists, so the trainers of uids \[3\]"):
        acl.grant(tmp_path, [3], acl.READ, owner=7)


def test_an_access_list_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (b"", b"\1\0\0\0", b"\2\0\0\0x"):
        monkeypatch.setattr(os, "getxattr", lambda *_, data=data, **__: data)
        with pytest.raises(FormatError, match="cannot be read"):
            acl.users_of(tmp_path)
