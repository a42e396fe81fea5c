"""Who is still alive: by pidfd, by record lock, by heartbeat; PIDs that were given away, zombies, forked workers."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baftd.errors import UsageError
from baftd.memory import processes
from baftd.memory.processes import (
    Heartbeat,
    LockWatch,
    ProcessHandle,
    RecordLock,
    boot_id,
    lock_holder,
    start_time,
    watch,
)

DEADLINE = 20_000  # milliseconds


@contextlib.contextmanager
def child(work: Callable[[], None] | None = None) -> Iterator[int]:
    """A forked process that does `work`, says so, and waits to be killed."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            if work is not None:
                work()
            os.write(send, b".")
            signal.pause()
        os._exit(0)
    os.close(send)
    try:
        assert os.read(receive, 1) == b"."
        yield pid
    finally:
        os.close(receive)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def started(pid: int) -> int:
    start = start_time(pid)
    assert start is not None
    return start


def wait_readable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(DEADLINE), "the death of the process did not show in time"


# ---------------------------------------------------------------------------------------------- pidfd


def test_start_time_survives_strange_names(tmp_path: Path) -> None:
    assert started(os.getpid()) == started(os.getpid())
    assert start_time(2**22 + 5) is None
    strange = tmp_path / "a) R 1 (b"
    strange.symlink_to(sys.executable)
    with subprocess.Popen([str(strange), "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert started(process.pid) >= started(os.getpid())
        process.kill()


def test_a_handle_sees_the_death_and_no_other_process() -> None:
    with child() as pid:
        handle = ProcessHandle.open(pid, started(pid))
        assert handle is not None
        assert handle.alive()
        os.kill(pid, signal.SIGKILL)
        wait_readable(handle.fileno())
        assert not handle.alive()  # a zombie is dead already
        os.waitpid(pid, 0)
        assert not handle.alive()
        handle.close()
        handle.close()
        assert not handle.alive()


def test_a_pid_that_was_given_away_is_gone() -> None:
    with child() as pid:
        assert ProcessHandle.open(pid, started(pid) - 1) is None
        assert watch(pid, started(pid) + 1, lock_path=None, clock=lambda: 0.0, timeout=1) is None
    assert ProcessHandle.open(pid, 1) is None
    assert ProcessHandle.open(0, 1) is None
    assert ProcessHandle.open(-5, 1) is None


def test_a_process_that_proc_hides_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "start_time", lambda pid: None)
    with child() as pid:
        with pytest.raises(PermissionError, match="hidepid"):
            ProcessHandle.open(pid, 5)
        watched = watch(pid, 5, lock_path=None, clock=lambda: 0.0, timeout=1)
        assert watched is not None
        assert watched.how == "heartbeat"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert ProcessHandle.open(pid, 5) is None


def test_boot_id_is_that_of_the_kernel() -> None:
    assert len(boot_id()) == 36
    assert boot_id() == boot_id()


# ---------------------------------------------------------------------------------------------- record lock


@pytest.fixture
def lock_path(tmp_path: Path) -> Path:
    path = tmp_path / "rank-00000.lock"
    path.write_bytes(b"")
    return path


def test_a_lock_is_held_until_its_process_dies(lock_path: Path) -> None:
    assert lock_holder(lock_path) is None
    assert lock_holder(lock_path.with_name("nobody")) is None
    with child(lambda: RecordLock(lock_path).acquire() or os._exit(1)) as pid:
        assert lock_holder(lock_path) == pid
        assert RecordLock(lock_path).acquire() is False
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert lock_holder(lock_path) is None
    mine = RecordLock(lock_path)
    assert mine.acquire() is True
    assert mine.acquire() is True
    with child(lambda: mine.forget()):  # a forked data-loader worker closes its copy and takes nothing away
        assert holder_seen_by_another(lock_path) == os.getpid()
    assert holder_seen_by_another(lock_path) == os.getpid()
    mine.release()
    assert holder_seen_by_another(lock_path) is None


def holder_seen_by_another(path: Path) -> int | None:
    """The holder, asked in another process: one's own lock cannot be seen, and asking would lose it."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(send, repr(lock_holder(path)).encode())
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return None if answer == "None" else int(answer)


def test_a_forked_worker_that_outlives_the_trainer_holds_nothing(lock_path: Path) -> None:
    receive, send = os.pipe()

    def train() -> None:
        lock = RecordLock(lock_path)
        assert lock.acquire()
        worker = os.fork()
        if worker == 0:
            signal.pause()
            os._exit(0)
        os.write(send, worker.to_bytes(4, "little"))

    with child(train) as pid:
        worker = int.from_bytes(os.read(receive, 4), "little")
        try:
            assert lock_holder(lock_path) == pid
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert start_time(worker) is not None
            assert lock_holder(lock_path) is None
        finally:
            os.kill(worker, signal.SIGKILL)
    os.close(receive)
    os.close(send)


def test_a_lock_that_cannot_be_opened_is_an_error(lock_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RecordLock(lock_path.with_name("nobody")).acquire()
    link = lock_path.with_name("link")
    link.symlink_to(lock_path)
    with pytest.raises(OSError) as caught:
        RecordLock(link).acquire()
    assert caught.value.errno == errno.ELOOP


def test_a_holder_in_another_pid_namespace_is_seen_without_its_pid(lock_path: Path) -> None:
    script = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDWR); fcntl.lockf(fd, fcntl.LOCK_EX); "
        "print('held', os.getpid(), flush=True); sys.stdin.read()"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", script, str(lock_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = process.stdout.readline()
        if not said.startswith("held"):
            pytest.skip(f"no PID namespace can be made here: {process.stderr.read().strip()}")
        assert said == "held 1\n"
        assert lock_holder(lock_path) is not None  # from the outer namespace even the PID can be seen
        # Asked from a namespace beside it, where the holder has no PID:
        ask = (
            "import sys; from baftd.memory.processes import lock_holder; print(lock_holder(sys.argv[1]))"
        )
        asked = subprocess.run(
            ["unshare", "--pid", "--fork", sys.executable, "-c", ask, str(lock_path)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert asked.stdout.strip() == "0"
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)
    assert lock_holder(lock_path) is None


# ---------------------------------------------------------------------------------------------- heartbeats, choice


def test_heartbeats() -> None:
    now = 100.0
    heart = Heartbeat(lambda: now, 5.0)
    now = 105.0
    assert heart.alive()
    now = 105.1
    assert not heart.alive()
    heart.beat()
    assert heart.alive()
    assert heart.fileno() == -1
    heart.close()
    with pytest.raises(UsageError, match="makes no sense"):
        Heartbeat(lambda: now, 0.0)


def test_a_lock_counts_from_the_moment_it_was_seen(lock_path: Path) -> None:
    now = 0.0
    seen = LockWatch(lock_path, Heartbeat(lambda: now, 5.0))
    assert seen.alive()  # not locked yet, heard just now
    now = 4.0
    seen.beat()
    now = 8.0
    assert seen.alive()
    with child(lambda: RecordLock(lock_path).acquire() or os._exit(1)):
        now = 1000.0
        assert seen.alive()  # silent, but there
    seen.beat()
    assert not seen.alive()  # was held once, is not any more
    seen.close()
    never = LockWatch(lock_path, Heartbeat(lambda: now, 5.0))
    now += 6.0
    assert not never.alive()


def test_the_best_watch_is_taken(lock_path: Path) -> None:
    def refused(pid: int, start: int) -> None:
        raise OSError(errno.ENOSYS, "no pidfd")

    def broken(pid: int, start: int) -> None:
        raise OSError(errno.EIO, "broken")

    clock = lambda: 0.0  # noqa: E731
    me = (os.getpid(), started(os.getpid()))
    for made, how in (
        (watch(*me, lock_path=lock_path, clock=clock, timeout=1), "pidfd"),
        (watch(0, 7, lock_path=lock_path, clock=clock, timeout=1), "lock"),
        (watch(*me, lock_path=lock_path, clock=clock, timeout=1, pidfd_open=refused), "lock"),
        (watch(*me, lock_path=None, clock=clock, timeout=1, pidfd_open=refused), "heartbeat"),
        (watch(0, 7, lock_path=None, clock=clock, timeout=1), "heartbeat"),
    ):
        assert made is not None
        assert made.how == how
        assert made.alive()
        assert (made.fileno() >= 0) == (how == "pidfd")
        made.beat()
        made.close()
    with pytest.raises(OSError, match="broken"):
        watch(*me, lock_path=None, clock=clock, timeout=1, pidfd_open=broken)
