"""Processes that wait for a step to become durable (`save`) or for the end of the job (`finish`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baftd.checkpoint.identity import CheckpointId
from baftd.errors import BaftError, Degraded
from baftd.wire.codec import error_reply
from baftd.wire.messages import Saved
from baftd.wire.server import Peer, Server

if TYPE_CHECKING:
    from baftd.daemon.job import JobOnNode

__all__ = ["Waiters"]


@dataclass(frozen=True)
class _Waiter:
    peer: Peer
    id: int
    step: int
    finish: bool


class Waiters:
    """Who waits, by job. A request that is repeated replaces the one before."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: dict[str, list[_Waiter]] = {}
        self.wanted: Callable[[JobOnNode], None] = lambda job: None
        """Called when somebody begins to wait."""

    def anybody(self, job: JobOnNode) -> bool:
        """Whether a process waits for a step of the job to be durable, or for its end."""
        return bool(self._waiting.get(job.name))

    def want(self, job: JobOnNode, peer: Peer, id: int, step: int, *, finish: bool) -> None:
        """Remember a request."""
        self.drop(job, peer, id)
        self._waiting.setdefault(job.name, []).append(_Waiter(peer, id, step, finish))
        self.wanted(job)

    def drop(self, job: JobOnNode, peer: Peer, id: int) -> None:
        """Forget a request."""
        kept = [w for w in self._waiting.get(job.name, []) if (w.peer, w.id) != (peer, id)]
        self._waiting[job.name] = kept

    def settle(self, job: JobOnNode, path: str = "") -> None:
        """Answer those whose step is durable now."""
        view = job.view
        if view is None or view.durable is None or view.token is None or view.durable.epoch != view.token.epoch:
            return
        step = view.durable.step
        kept: list[_Waiter] = []
        for waiter in self._waiting.get(job.name, []):
            if waiter.finish or waiter.step > step:
                kept.append(waiter)
            else:
                self._server.send(waiter.peer, Saved(id=waiter.id, step=step, tier="durable", path=path))
        self._waiting[job.name] = kept

    def failed(self, job: JobOnNode, checkpoint: CheckpointId, error: BaftError) -> None:
        """The durable write of a step failed: those who asked for it, or an earlier one, are told."""
        kept: list[_Waiter] = []
        for waiter in self._waiting.get(job.name, []):
            if waiter.finish or waiter.step > checkpoint.step:
                kept.append(waiter)
            else:
                self._server.send(waiter.peer, error_reply(error, id=waiter.id))
        self._waiting[job.name] = kept

    def dead(self, job: JobOnNode, checkpoint: CheckpointId, reason: str) -> None:
        """A step will never be committed: those who wait for it to be durable would wait in vain."""
        kept: list[_Waiter] = []
        for waiter in self._waiting.get(job.name, []):
            if waiter.finish or waiter.step != checkpoint.step:
                kept.append(waiter)
            else:
                error = Degraded(f"step {checkpoint.step} cannot be made durable: {reason}.")
                self._server.send(waiter.peer, error_reply(error, id=waiter.id))
        self._waiting[job.name] = kept

    def finished(self, job: JobOnNode, saved: Saved) -> None:
        """All ranks have finished: answer them, and whoever still waits for a save."""
        for waiter in self._waiting.pop(job.name, []):
            reply = Saved(id=waiter.id, step=saved.step, tier=saved.tier, path=saved.path, note=saved.note)
            self._server.send(waiter.peer, reply)
