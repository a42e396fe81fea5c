"""Is the process still there that holds a slot? Three ways to know, best first.

pidfd: the kernel tells at once, in poll. A PID alone says nothing (it may be another's by now), so it always comes with
the start time of the process. Peer credentials give pid 0 for a process of another PID namespace; then the POSIX
record lock tells that the client holds on its lock file (flock and OFD locks would outlive a killed trainer in a
data-loader worker that it forked; a record lock ends with the process that took it). Where locks do not reach either,
heartbeats remain.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
from collections.abc import Callable
from typing import Protocol

from baftd.errors import UsageError

__all__ = [
    "Heartbeat",
    "Liveness",
    "LockWatch",
    "ProcessHandle",
    "RecordLock",
    "boot_id",
    "lock_holder",
    "start_time",
    "watch",
]

# struct flock of 64-bit Linux: short type, short whence, off_t start, off_t len, pid_t pid
_FLOCK = struct.Struct("@hhqqi4x")


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of /proc/<pid>/stat); None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name of the program stands in parentheses and may hold spaces and parentheses itself.
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[19])


def boot_id() -> str:
    """The kernel's name for this boot; PIDs, start times and tmpfs mean something only within one."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


class Liveness(Protocol):
    """Whether a process is still there, and how that is known."""

    how: str
    """"pidfd", "lock" or "heartbeat"."""

    def alive(self) -> bool:
        """False once the process is known to be gone; a zombie is gone."""
        ...

    def fileno(self) -> int:
        """A descriptor that becomes readable at the death; -1 where there is none and `alive` must be asked."""
        ...

    def beat(self) -> None:
        """The process was heard just now."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class ProcessHandle:
    """A process held by pidfd. Make one with `open`."""

    how = "pidfd"

    def __init__(self, pid: int, start: int, fd: int) -> None:
        self.pid = pid
        self.start = start
        self._fd = fd

    @classmethod
    def open(cls, pid: int, start: int) -> ProcessHandle | None:
        """A handle on the process `pid` that began at `start`; None if that process is gone (the PID may be another's).

        Raises OSError where the kernel has no pidfd (before 5.3, or forbidden) or hides the process from us in /proc.
        """
        if pid <= 0:
            return None
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:  # the id of a thread: no process of ours
                return None
            raise
        # Only now, while the handle keeps the PID from being given away, does the start time prove who it is.
        handle = cls(pid, start, fd)
        found = start_time(pid)
        if found == start:
            return handle
        hidden = found is None and handle.alive()
        handle.close()
        if hidden:
            raise PermissionError(errno.EACCES, f"/proc does not show process {pid} (mounted with hidepid?)")
        return None

    def alive(self) -> bool:
        """Whether the process still runs."""
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)

    def fileno(self) -> int:
        """Readable when the process ends."""
        return self._fd

    def beat(self) -> None:
        """Of no use here: the kernel knows better."""

    def close(self) -> None:
        """Close the pidfd."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RecordLock:
    """The POSIX record lock by which a client shows that it lives. The file must be there (the daemon makes it).

    The kernel drops the lock when the process closes *any* descriptor of the file: nothing else may open it there.
    A forked child does not hold it; it should call `forget`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fd = -1

    def acquire(self) -> bool:
        """Take the lock without waiting; False if another process has it. Raises OSError if there is no file."""
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self.release()
                return False
            raise
        return True

    def release(self) -> None:
        """Give the lock back."""
        self.forget()

    def forget(self) -> None:
        """Close the descriptor. In the process that took the lock this gives it back, in a forked child it does not."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_holder(path: str | os.PathLike[str]) -> int | None:
    """PID of the process that holds the record lock on `path`; 0 for one we cannot see; None if nobody does.

    A file that is not there is held by nobody. A lock of the calling process itself is not seen, and if the caller
    holds one, this call loses it: ask only about other processes' files.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


class Heartbeat:
    """A process that is believed alive as long as it is heard. `timeout` and `clock` in seconds, monotonic."""

    how = "heartbeat"

    def __init__(self, clock: Callable[[], float], timeout: float) -> None:
        if timeout <= 0:
            raise UsageError(f"a heartbeat timeout of {timeout} s makes no sense.")
        self._clock = clock
        self._timeout = timeout
        self._heard = clock()

    def beat(self) -> None:
        """The process was heard just now."""
        self._heard = self._clock()

    def alive(self) -> bool:
        """Whether it was heard within the timeout."""
        return self._clock() - self._heard <= self._timeout

    def fileno(self) -> int:
        """None: a silence wakes nobody."""
        return -1

    def close(self) -> None:
        """Nothing to let go of."""


class LockWatch:
    """A process known by its record lock. Until the lock has been seen held, heartbeats count: the client takes the
    lock only after the daemon has made the file."""

    how = "lock"

    def __init__(self, path: str | os.PathLike[str], heartbeat: Heartbeat) -> None:
        self._path = os.fspath(path)
        self._heartbeat = heartbeat
        self._seen = False

    def alive(self) -> bool:
        """Whether somebody holds the lock."""
        if lock_holder(self._path) is not None:
            self._seen = True
            return True
        return False if self._seen else self._heartbeat.alive()

    def beat(self) -> None:
        """The process was heard just now."""
        self._heartbeat.beat()

    def fileno(self) -> int:
        """None: a lock wakes nobody."""
        return -1

    def close(self) -> None:
        """Nothing to let go of."""


def watch(
    pid: int,
    start: int,
    *,
    lock_path: str | os.PathLike[str] | None,
    clock: Callable[[], float],
    timeout: float,
    pidfd_open: Callable[[int, int], ProcessHandle | None] = ProcessHandle.open,
) -> Liveness | None:
    """The best watch on a client: pidfd, else its lock, else heartbeats. None: the process is gone already.

    `pid` is what the kernel says of the peer (0: another PID namespace), `start` what the client says of itself.
    """
    if pid > 0:
        try:
            return pidfd_open(pid, start)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EMFILE, errno.ENFILE):
                raise
    heartbeat = Heartbeat(clock, timeout)
    return heartbeat if lock_path is None else LockWatch(lock_path, heartbeat)
