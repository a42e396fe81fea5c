"""What every part of the daemon is given: settings, sockets, threads, tiers, clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from baftd.coordination.interface import Coordinator
from baftd.daemon.workers import Workers
from baftd.errors import BaftError
from baftd.memory.arena import ArenaRoot
from baftd.memory.journal import FileOps
from baftd.settings import Settings
from baftd.storage.interface import Tier
from baftd.telemetry import get_logger
from baftd.telemetry.counters import DAEMON_COUNTERS, Counters
from baftd.telemetry.log import Logger
from baftd.wire.server import Server

__all__ = ["Context", "Tasks"]


class Tasks:
    """Background tasks of the daemon: kept alive, named, their failures logged, cancelled at the end."""

    def __init__(self, counters: Counters, log: Logger) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._counters = counters
        self._log = log

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine; an exception that escapes it is logged and ends nothing else."""
        task = asyncio.get_running_loop().create_task(self._guard(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaftError as error:
            self._log.error("task_failed", task=name, why=str(error))
        except Exception:  # noqa: BLE001 - logged with its traceback and counted; other jobs must go on
            self._counters.add("internal_errors")
            self._log.exception("task_failed", task=name)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel all and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Context:
    """The daemon as its parts see it."""

    settings: Settings
    incarnation: str
    """Which life of this node's memory."""
    root: ArenaRoot
    server: Server
    coordinator: Coordinator
    workers: Workers
    clock: Callable[[], float]
    tier: Tier | None = None
    journal_ops: FileOps = field(default_factory=FileOps)
    log: Logger = field(default_factory=lambda: get_logger("daemon"))
    counters: Counters = field(default_factory=lambda: Counters(DAEMON_COUNTERS))
    tasks: Tasks = field(init=False)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    provisioning: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while slots are made: two ranks must not count the same free memory."""

    make_room: Callable[[int], Awaitable[int]] | None = None
    """Frees memory for a job that starts; returns the bytes freed. Set by housekeeping."""

    def __post_init__(self) -> None:
        self.tasks = Tasks(self.counters, self.log)

    def loop_call(self, function: Callable[..., object], *args: Any) -> None:
        """Have the event loop call a function: for worker threads and for the loop itself."""
        self.loop.call_soon_threadsafe(function, *args)

    @property
    def slots(self) -> int:
        """Slots of each rank."""
        slots = self.settings.slots
        return slots if isinstance(slots, int) else (4 if self.tier is not None else 3)

    @property
    def node(self) -> str:
        """Name of this node."""
        return self.settings.node
