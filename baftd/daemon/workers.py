"""Threads for work that blocks: few, named, and of low priority where nobody waits for the result.

The event loop never touches bulk bytes. *Urgent* work (laying out slots, restoring) has somebody waiting for it and
runs at the daemon's own priority; *background* work (digests, durable writes, touching the pages of further slots)
competes with training for cores, memory and disk: it yields to it (`priority.py`) and is spread over the time that
there is for it (`background.py`). This is the one place that gives threads their priority.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from baftd.daemon.background import Work
from baftd.daemon.priority import Priorities

__all__ = ["Workers"]

T = TypeVar("T")


class Workers:
    """Bounded pools of worker threads, made when first used.

    `cancel` is set when the daemon stops: long work looks at it between chunks.
    """

    def __init__(
        self,
        *,
        urgent: int = 4,
        background: int = 2,
        durable: int = 2,
        clock: Callable[[], float] = time.monotonic,
        limit: Callable[[int], float] | None = None,
    ) -> None:
        """How many threads of each kind at most. `limit`: of durable writes, see `Limiter`; never exceeded."""
        self.cancel = threading.Event()
        self.priorities = Priorities()
        self._clock = clock
        self._limit = limit
        self._works: set[Work] = set()
        self._lock = threading.Lock()
        lower = self.priorities.lower
        self._urgent = ThreadPoolExecutor(urgent, thread_name_prefix="baftd-urgent")
        self._background = ThreadPoolExecutor(background, thread_name_prefix="baftd-digest", initializer=lower)
        # Each of its own: a durable write may take minutes, and a digest must not wait for it.
        self._durable = ThreadPoolExecutor(durable, thread_name_prefix="baftd-durable", initializer=lower)
        self._touching = ThreadPoolExecutor(urgent, thread_name_prefix="baftd-touch", initializer=lower)

    async def urgent(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` in a thread at the daemon's priority."""
        return await asyncio.get_running_loop().run_in_executor(self._urgent, work, *args)

    async def background(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` in a thread that yields."""
        return await self._lowered(self._background, work, *args)

    async def durable(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)`, which writes to the durable tier, in a thread that yields."""
        return await self._lowered(self._durable, work, *args)

    async def touching(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)`, which touches pages for the first time, in a thread that yields."""
        return await self._lowered(self._touching, work, *args)

    async def _lowered(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> T:
        def begin() -> T:
            self.priorities.lower()  # what the thread did before may have been raised
            return work(*args)

        return await asyncio.get_running_loop().run_in_executor(pool, begin)

    # ------------------------------------------------------------------ what is under way

    def work(self, what: str, total: int, *, within: float | None = None) -> Work:
        """A piece of background work to be paced; use it in a `with`. `within`: seconds until it is needed."""
        limit = self._limit if what == "durable" else None
        made = Work(
            what, total, within=within, priorities=self.priorities, clock=self._clock, limit=limit, over=self._over
        )
        with self._lock:
            self._works.add(made)
        if self.cancel.is_set():
            made.hurry()
        return made

    def _over(self, work: Work) -> None:
        with self._lock:
            self._works.discard(work)

    @property
    def works(self) -> list[Work]:
        """What is under way."""
        with self._lock:
            return list(self._works)

    def stop(self) -> None:
        """Set `cancel`, and let those go on that are held back: they end."""
        self.cancel.set()
        for work in self.works:
            work.hurry()

    def close(self) -> None:
        """Stop, drop what has not begun, wait for what has."""
        self.stop()
        for pool in (self._urgent, self._background, self._durable, self._touching):
            pool.shutdown(wait=True, cancel_futures=True)
