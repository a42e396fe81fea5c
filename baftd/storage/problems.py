"""The kernel's errors about a durable directory, or one for an export, in our words: what failed, where, why, and what
to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from baftd.errors import BaftError, Degraded, NoRoom

__all__ = ["explained", "translate"]

_HINTS = {
    errno.EROFS: "The file system is read-only: mount it writable or {another}.",
    errno.EACCES: "Give {user} the right to write there, or {another}.",
    errno.EPERM: "Give {user} the right to write there, or {another}.",
    errno.EIO: "The device or the file server reports an error: see the kernel's log (dmesg).",
    errno.ESTALE: "The file server has lost the directory: check the mount.",
    errno.ENOTCONN: "The file server does not answer: check the mount.",
    errno.ETIMEDOUT: "The file server does not answer: check the mount.",
    errno.ENOTDIR: "A file is in the way: remove it or {another}.",
    errno.ENAMETOOLONG: "{shorter}.",
    errno.EFBIG: "The file system does not hold files of that size: {another}.",
    errno.EMFILE: "Raise the daemon's limit of open files (ulimit -n).",
    errno.ELOOP: "A symbolic link is in the way of a checkpoint's file: remove it.",
}


_DURABLE = {
    "another": "set another durable_dir",
    "shorter": "Set a shorter durable_dir or node name",
    "user": "the daemon's user",
    "room": "Free space, lower durable_keep, or set another durable_dir.",
    "else": "Check the directory, then try again with `baftd doctor`.",
}
_EXPORT = {
    "another": "name another directory",
    "shorter": "Name a directory with a shorter path",
    "user": "this user",
    "room": "Free space, or name another directory.",
    "else": "Check the directory, or name another one.",
}


def translate(
    error: OSError, what: str, path: str, *, need: int = 0, free: int | None = None, export: bool = False
) -> BaftError:
    """Our error for the kernel's. `what` was being done, in words such as "writing the shard of rank 3".

    `need` and `free`: bytes, for a full file system. `export`: into a directory that was named for it, not durable_dir.
    """
    words = _EXPORT if export else _DURABLE
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        sums = f", {need} bytes are needed" if need else ""
        sums += f", {free} are free" if free is not None else ""
        whose = "the quota is used up" if error.errno == errno.EDQUOT else "the file system is full"
        return NoRoom(
            f"{what} failed: {path}: {whose}{sums}. Nothing that was there is lost.",
            hint=words["room"],
        )
    hint = _HINTS.get(error.errno or 0, words["else"]).format(**words)
    return Degraded(f"{what} failed: {path}: {reason}.", hint=hint)


@contextmanager
def explained(what: str, path: str, *, export: bool = False) -> Iterator[None]:
    """Turn an `OSError` of the block into ours. Arguments as of `translate`."""
    try:
        yield
    except OSError as error:
        raise translate(error, what, path, export=export) from error
