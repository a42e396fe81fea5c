"""Threads for work that blocks: few, named, and niced where nobody waits for the result.

The event loop never touches bulk bytes. *Urgent* work (laying out slots, restoring) has somebody waiting for it and
runs at the daemon's own priority; *background* work (digesting, durable writes) competes with training for cores and
is niced, so that the scheduler takes it off first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["BACKGROUND_NICE", "Workers"]

T = TypeVar("T")

BACKGROUND_NICE = 10
"""Added to the nice value of background threads."""


class Workers:
    """Bounded pools of worker threads, made when first used.

    `cancel` is set when the daemon stops: long work looks at it between chunks.
    """

    def __init__(self, *, urgent: int = 4, background: int = 2, durable: int = 2) -> None:
        """How many threads of each kind at most."""
        self.cancel = threading.Event()
        self._urgent = ThreadPoolExecutor(urgent, thread_name_prefix="baftd-urgent")
        self._background = ThreadPoolExecutor(background, thread_name_prefix="baftd-digest", initializer=_be_nice)
        # Of its own: a durable write may take minutes, and a digest must not wait for it.
        self._durable = ThreadPoolExecutor(durable, thread_name_prefix="baftd-durable", initializer=_be_nice)

    async def urgent(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` in a thread at the daemon's priority."""
        return await asyncio.get_running_loop().run_in_executor(self._urgent, work, *args)

    async def background(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` in a niced thread."""
        return await asyncio.get_running_loop().run_in_executor(self._background, work, *args)

    async def durable(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)`, which writes to the durable tier, in a niced thread."""
        return await asyncio.get_running_loop().run_in_executor(self._durable, work, *args)

    def close(self) -> None:
        """Set `cancel`, drop what has not begun, wait for what has."""
        self.cancel.set()
        for pool in (self._urgent, self._background, self._durable):
            pool.shutdown(wait=True, cancel_futures=True)


def _be_nice() -> None:
    # On Linux the nice value belongs to the thread, whatever POSIX says; a lower priority is never refused.
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + BACKGROUND_NICE)
