"""What happens to sessions when the process forks or ends.

A forked child (a data loader's worker) inherits descriptors and mappings but no thread: its sessions are made inert at
once, so that neither lock nor connection outlives the trainer in it. At the end of the process sessions leave, and
their threads are joined before the interpreter goes.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

__all__ = ["forget", "register"]


class Living(Protocol):
    """What can be registered."""

    def abandon_in_child(self) -> None:
        """Called in a forked child."""

    def leave(self, reason: str = "") -> None:
        """Called when the process ends."""


_living: weakref.WeakSet[Living] = weakref.WeakSet()
_hooked = False


def register(session: Living) -> None:
    """Look after `session` until `forget`."""
    global _hooked
    _living.add(session)
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_in_child)
        atexit.register(_at_exit)


def forget(session: Living) -> None:
    """The session is over."""
    _living.discard(session)


def _in_child() -> None:
    for session in list(_living):
        session.abandon_in_child()
    _living.clear()


def _at_exit() -> None:
    for session in list(_living):
        session.leave("the process ends")
