"""The lock file beside a daemon's socket, taken before the socket is bound: a second bind takes a live path over."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from baftd.errors import TryAgain, UsageError

__all__ = ["DaemonLock"]


class DaemonLock:
    """An exclusive `flock` on a file that names its holder's PID.

    The kernel drops the lock when the daemon dies, however it dies, so a file left behind is no obstacle. The file
    itself stays: removing it would let two daemons hold locks on two files of one name.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            TryAgain: a live process holds it; the message names its PID.
            UsageError: the file cannot be opened.
        """
        self.path = path
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(
                f"the lock file {path} cannot be opened: {error.strerror}.",
                hint="Remove it, or set --run-dir or BAFTD_RUN_DIR to a directory of yours.",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(fd)
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise UsageError(
                    f"the lock file {path} cannot be locked: {error.strerror}.",
                    hint="Set --run-dir or BAFTD_RUN_DIR to a local file system.",
                ) from error
            raise TryAgain(
                f"a daemon already runs here: {holder} holds {path}.",
                hint="Use it, end it with `baftd stop`, or give this one another directory with --run-dir.",
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Give the lock up; the file stays, empty."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def _holder(fd: int) -> str:
    text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    return f"process {text}" if text.isdigit() else "another process"
