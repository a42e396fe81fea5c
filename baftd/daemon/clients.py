"""Training processes of this node: which connection speaks for which rank, and which of them still live.

A process is known by (job, incarnation, rank). It may come over several connections (reconnects); the newest one
counts. Its death is seen through a pidfd in the event loop; where the kernel shows no PID (another PID namespace), the
record lock that the client holds, or else its heartbeats, are looked at on a timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baftd.checkpoint.cadence import Cadence
from baftd.checkpoint.identity import Token
from baftd.errors import RankError
from baftd.memory.processes import Liveness, watch
from baftd.wire.server import Peer

__all__ = ["LOST_AFTER", "Client", "ClientTable"]

POLL = 1.0
"""Seconds between two looks at processes that have no pidfd."""

LOST_AFTER = 60.0
"""Seconds of silence after which a process that can be watched in no other way is taken for dead."""


@dataclass(eq=False)
class Client:
    """One training process."""

    job: str
    incarnation: str
    rank: int
    world: int
    pid: int
    """As this node sees it; 0 when it lives in a PID namespace we cannot see."""
    pid_start: int
    peer: Peer
    framework: str = ""
    token: Token | None = None
    state: str = "joining"
    """joining, restoring, training, finished, left, dead"""
    step: int = 0
    visible: bool = True
    """Whether this node sees the PID: else the process is known by its lock, or by being heard."""
    lock_path: str = ""
    process: Liveness | None = field(default=None, repr=False)
    asked: dict[str, int] = field(default_factory=dict)
    """Message type -> id of a request whose answer comes later."""
    told: float = float("-inf")
    """When it was last told how such a request goes on."""
    jumped: int = -1
    """Step that it spoke of last, if that was too far ahead to be believed; else -1. Not of its timings."""
    lied: bool = False
    """Whether there was such a step."""
    outdated: tuple[Cadence, float] | None = None
    """The job's cadence, where the process goes by another, and when that was seen or it was last told. None: it
    knows."""

    @property
    def key(self) -> tuple[str, str, int]:
        """(job, incarnation, rank)."""
        return (self.job, self.incarnation, self.rank)

    @property
    def alive(self) -> bool:
        """Whether the process was alive when last looked at."""
        return self.process is not None

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid or 'unknown'})"


class ClientTable:
    """All training processes that have said hello.

    `on_death` is called once for each process found dead. `last_heard` gives the time of a peer's last message.
    """

    def __init__(
        self,
        on_death: Callable[[Client], None],
        *,
        clock: Callable[[], float],
        last_heard: Callable[[Peer], float],
    ) -> None:
        self._on_death = on_death
        self._clock = clock
        self._last_heard = last_heard
        self._by_key: dict[tuple[str, str, int], Client] = {}
        self._by_peer: dict[Peer, Client] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_key.values()))

    def of_peer(self, peer: Peer) -> Client | None:
        """Who speaks over this connection."""
        return self._by_peer.get(peer)

    def of_job(self, job: str) -> list[Client]:
        """Processes of a job, by rank."""
        return sorted((c for c in self._by_key.values() if c.job == job), key=lambda c: c.rank)

    def find(self, job: str, incarnation: str, rank: int) -> Client | None:
        """The process of a rank."""
        return self._by_key.get((job, incarnation, rank))

    def add(self, client: Client) -> Client:
        """Take in a process that has said hello; the one already known if it is the same.

        Raises `RankError` where another live process has the rank.
        """
        known = self._by_key.get(client.key)
        if known is not None and (known.pid, known.pid_start) == (client.pid, client.pid_start) and known.alive:
            self._by_peer.pop(known.peer, None)
            known.peer = client.peer
            self._by_peer[client.peer] = known
            return known
        if known is not None and known.alive and self.still_alive(known):
            raise RankError(
                f"job {client.job}: rank {client.rank} is claimed twice, by pid {known.pid} and by pid {client.pid}.",
                hint="Each process needs its own RANK; is the launcher's environment passed to all of them?",
            )
        if known is not None:
            self.dead(known)
            self.remove(known)
        client.process = watch(
            client.pid if client.visible else 0,
            client.pid_start,
            lock_path=client.lock_path or None,
            clock=self._clock,
            timeout=LOST_AFTER,
        )
        if client.process is None:
            raise RankError(f"job {client.job}: {client} is gone already.")
        self._by_key[client.key] = client
        self._by_peer[client.peer] = client
        self._watch(client)
        return client

    def remove(self, client: Client) -> None:
        """Forget a process."""
        if self._by_key.get(client.key) is client:
            del self._by_key[client.key]
        if self._by_peer.get(client.peer) is client:
            del self._by_peer[client.peer]
        self._unwatch(client)

    def dead(self, client: Client) -> None:
        """Note that a process is gone; tells `on_death` unless it had finished or left. It stays in the table, for
        `baftd status`, until another start of the job takes its place."""
        if not client.alive:
            return
        self._unwatch(client)
        if client.state not in ("finished", "left"):
            client.state = "dead"
            self._on_death(client)

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for client in list(self._by_key.values()):
            self._unwatch(client)

    # ------------------------------------------------------------------ watching

    def _watch(self, client: Client) -> None:
        assert client.process is not None
        descriptor = client.process.fileno()
        if descriptor >= 0:
            asyncio.get_running_loop().add_reader(descriptor, self._readable, client)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL, self._poll)

    def _unwatch(self, client: Client) -> None:
        if client.process is None:
            return
        descriptor = client.process.fileno()
        if descriptor >= 0:
            asyncio.get_running_loop().remove_reader(descriptor)
        client.process.close()
        client.process = None

    def _readable(self, client: Client) -> None:
        if not self.still_alive(client):
            self.dead(client)

    def _poll(self) -> None:
        self._timer = None
        polled = [c for c in self._by_key.values() if c.process is not None and c.process.fileno() < 0]
        for client in polled:
            if not self.still_alive(client):
                self.dead(client)
        if any(client.alive for client in polled):
            self._timer = asyncio.get_running_loop().call_later(POLL, self._poll)

    def still_alive(self, client: Client) -> bool:
        """Look at the process now."""
        if client.process is None:
            return False
        if self._clock() - self._last_heard(client.peer) < LOST_AFTER:
            client.process.beat()
        return client.process.alive()
