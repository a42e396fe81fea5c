"""Who speaks on a local socket: uid, gid and pid as the kernel reports them, never as the message claims."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from baftd.errors import UsageError

__all__ = ["MAX_SOCKET_PATH", "Credentials", "check_socket_path", "parse_peer_address", "prepare_run_dir"]

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path: `sun_path` has 108 with its final NUL."""

_PEER = re.compile(r"^[^:]*:([0-9]+):([0-9]+):([0-9]+)$")


@dataclass(frozen=True)
class Credentials:
    """SO_PEERCRED of a connection. `pid` is 0 for a process in a PID namespace that this one cannot see."""

    uid: int
    gid: int
    pid: int


def parse_peer_address(text: str | None) -> Credentials | None:
    """ZeroMQ's `Peer-Address` of a frame that came over ipc: `localhost:uid:gid:pid`. None where it is not that."""
    match = _PEER.match(text or "")
    return Credentials(uid=int(match[1]), gid=int(match[2]), pid=int(match[3])) if match else None


def check_socket_path(path: Path) -> Path:
    """Return `path` if a Unix socket can have it, else raise `UsageError`."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise UsageError(
            f"the socket path {path} has {length} bytes; a Unix socket's path can have {MAX_SOCKET_PATH}.",
            hint="Choose a shorter directory with --run-dir or BAFTD_RUN_DIR.",
        )
    return path


def prepare_run_dir(directory: Path) -> None:
    """Make the run directory, or check that an existing one is ours and closed to others.

    Raises:
        UsageError: it is a symbolic link, belongs to somebody else, or others may enter it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise UsageError(
            f"the run directory {directory} cannot be made: {error.strerror}.",
            hint="Set --run-dir or BAFTD_RUN_DIR to a directory of yours.",
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"the run directory {directory} is not a directory (a symbolic link is refused).")
    if found.st_uid != os.geteuid():
        raise UsageError(
            f"the run directory {directory} belongs to uid {found.st_uid}, this process is uid {os.geteuid()}.",
            hint="Set --run-dir or BAFTD_RUN_DIR to a directory of yours.",
        )
    if found.st_mode & 0o077:
        raise UsageError(
            f"the run directory {directory} has mode {stat.S_IMODE(found.st_mode):04o}: others may enter it.",
            hint=f"Run `chmod 700 {directory}`.",
        )
