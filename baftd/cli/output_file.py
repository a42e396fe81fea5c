"""Writing a file that the user has named: whole or not at all, and never in the place of something that is no file."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

from baftd.errors import UsageError

__all__ = ["check_output", "is_standard_output", "write_output"]

_MOST_LINKS = 40
"""The kernel follows no more."""


def check_output(path: str | Path, flag: str) -> None:
    """Refuse what cannot name a file to write; nothing is opened. Raises UsageError."""
    name = os.fspath(path)
    if not name:
        raise UsageError(f"{flag}: the name of the file is empty.", hint=f"Name a file: {flag} FILE.")
    found = _stat(name)
    if found is None:
        if name.endswith("/"):
            raise UsageError(f"{flag} {name} names a directory, which is not there.", hint="Name a file.")
    elif stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{flag} {name} is a directory.", hint="Name a file in it.")
    elif stat.S_ISBLK(found.st_mode):
        raise UsageError(f"{flag} {name} is a disk: its contents would be lost.", hint="Name a file.")


def is_standard_output(path: str | Path) -> bool:
    """Whether this is where standard output goes: `/dev/stdout`, or the file that the shell has sent it to."""
    found = _stat(os.fspath(path))
    with suppress(OSError, ValueError):  # replaced by something without a descriptor
        return found is not None and os.path.samestat(found, os.fstat(sys.stdout.fileno()))
    return False


def write_output(path: str | Path, data: bytes, flag: str) -> None:
    """Write `data` to what `path` names. Raises UsageError for such a name, OSError.

    A regular file, behind links too, is replaced at once and keeps its mode; a new one is whole or not there. Anything
    else (a pipe, a terminal, `/dev/null`) is written to as it is: renaming a file onto it would remove it."""
    check_output(path, flag)
    name = os.fspath(path)
    try:
        found = os.stat(name)
    except FileNotFoundError:  # anything else, such as links in a circle, is no place for a new file
        found = None
    if found is not None and (not stat.S_ISREG(found.st_mode) or _of_a_process(name)):
        _write_through(name, data)
        return
    _replace(os.path.realpath(name), data, found)


def _stat(name: str) -> os.stat_result | None:
    """Of what is behind the links; None: nothing that can be seen, opening it will tell why."""
    try:
        return os.stat(name)
    except OSError:
        return None


def _of_a_process(name: str) -> bool:
    """Whether links lead through `/proc/PID/fd`: what is meant is an open file, whose name may be another's by now."""
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(os.path.dirname(name) or ".")
        if folder.startswith("/proc/"):
            return True
        if not os.path.islink(name):
            return False
        name = os.path.join(folder, os.readlink(name))
    return False


def _write_through(name: str, data: bytes) -> None:
    # Not to become this process's terminal, should it be one.
    descriptor = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "wb", buffering=0) as stream:
        _write_all(stream.fileno(), data)


def _replace(name: str, data: bytes, before: os.stat_result | None) -> None:
    new = os.path.join(os.path.dirname(name), f".baftd-{os.getpid()}-{secrets.token_hex(4)}")
    mode = 0o666 if before is None else 0o600
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            _write_all(descriptor, data)
            if before is not None:
                # Root writes into a user's file: it stays the user's. The owner first, since that clears mode bits.
                with suppress(PermissionError):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
        finally:
            os.close(descriptor)
        os.replace(new, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
