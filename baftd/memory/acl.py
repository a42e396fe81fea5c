"""POSIX access control lists, written as the kernel stores them: so that a trainer of another user may open its slots
and nothing else. Works for the owner of a file without privileges, and needs no library."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Mapping

from baftd.errors import FormatError, UsageError

__all__ = ["EXECUTE", "READ", "WRITE", "acl_bytes", "grant", "users_of"]

READ, WRITE, EXECUTE = 4, 2, 1

_ATTRIBUTE = "system.posix_acl_access"
_VERSION = 2
_ENTRY = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 1, 2, 4, 0x10, 0x20
_NOBODY = 0xFFFFFFFF


def acl_bytes(owner: int, users: Mapping[int, int]) -> bytes:
    """The attribute for a file whose owner has permissions `owner`, the uids in `users` theirs, and nobody else any."""
    entries = [(_USER_OBJ, owner, _NOBODY)]
    entries += [(_USER, permissions, uid) for uid, permissions in sorted(users.items())]
    entries.append((_GROUP_OBJ, 0, _NOBODY))
    if users:
        mask = 0
        for permissions in users.values():
            mask |= permissions
        entries.append((_MASK, mask, _NOBODY))
    entries.append((_OTHER, 0, _NOBODY))
    return struct.pack("<I", _VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries)


def grant(path: str | os.PathLike[str], uids: Iterable[int], permissions: int, *, owner: int) -> None:
    """Give `uids`, beside the owner, `permissions` on `path`, and nobody else any. No uids: nothing is changed.

    Raises UsageError where the file system knows no access control lists.
    """
    users = dict.fromkeys(uids, permissions)
    if not users:
        return
    try:
        os.setxattr(path, _ATTRIBUTE, acl_bytes(owner, users), follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            raise UsageError(
                f"{os.fspath(path)}: the file system has no access control lists, so the trainers of uids "
                f"{sorted(users)} cannot be let in.",
                hint="Run the daemon as the trainers' user, or put shm_dir on a tmpfs with POSIX ACL.",
            ) from error
        raise


def users_of(path: str | os.PathLike[str]) -> dict[int, int]:
    """The uids that an access control list lets in, with their permissions. Raises FormatError, OSError."""
    try:
        data = os.getxattr(path, _ATTRIBUTE, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return {}
        raise
    if len(data) < 4 or (len(data) - 4) % _ENTRY.size or struct.unpack_from("<I", data)[0] != _VERSION:
        raise FormatError(f"{os.fspath(path)}: its access control list cannot be read.")
    return {uid: bits for tag, bits, uid in _ENTRY.iter_unpack(data[4:]) if tag == _USER}
