"""Boundaries without a snapshot: each is counted and told to the daemon, each kind is warned of once."""

from __future__ import annotations

from collections.abc import Callable

from baft_client.shard_writer import Snapshot, Torn
from baft_client.source import Counters, Outcome, OutcomeKind
from baft_client.standing import Standing
from baftd.errors import BaftError, Degraded, TornSnapshot
from baftd.telemetry import get_logger
from baftd.wire.messages import Grant, Skip

__all__ = ["Skips"]


class Skips:
    """What a session does instead of raising into the training loop."""

    def __init__(self, standing: Standing, counters: Counters, *, strict: bool, post: Callable[[Skip], None]) -> None:
        """`strict`: keep the error for `raise_pending`; `post` sends to the daemon."""
        self._standing = standing
        self._counters = counters
        self._strict = strict
        self._post = post
        self._warned: set[str] = set()
        self._outages = 0
        self._pending: BaftError | None = None
        self._open: tuple[Skip, str] | None = None
        self._log = get_logger("client").bind(job=standing.identity.job, rank=standing.identity.rank)

    def skip(
        self,
        step: int,
        kind: str,
        reason: str,
        error: type[BaftError] | BaftError | None = None,
        *,
        torn: bool = False,
        begun: Snapshot | Grant | None = None,
        final: bool = True,
    ) -> Outcome:
        """There is no snapshot of `step`.

        Args:
            step: the boundary; the step is dead for the whole job.
            kind: one word, counted.
            reason: a sentence for people.
            error: what a strict session raises at its next call; a class is made into an error from the reason.
            torn: the state changed under the copy.
            begun: the snapshot that was in progress, or the grant that was used up for it.
            final: False where the step may still be taken before the state changes: the daemon is told by `close_open`.
        """
        counted = self._counters.skipped
        counted[kind] = counted.get(kind, 0) + 1
        if self._outages != self._standing.outages:
            self._outages = self._standing.outages
            self._warned.discard("no_daemon")  # every outage is told of, once
        if kind in self._warned:
            self._log.debug("skipped", step=step, kind=kind, why=reason)
        else:
            self._warned.add(kind)
            self._log.warning("skipped", step=step, kind=kind, why=reason, note="more of this kind are only counted")
        token = self._standing.token
        if token is not None and not self._standing.fenced:
            message = Skip(
                token=token, rank=self._standing.identity.rank, step=step, reason=f"{kind}: {reason}"[:4096], torn=torn
            )
            if begun is not None:
                message.slot, message.generation = begun.slot, begun.generation
            if final:
                self._post(message)
            else:
                self._open = (message, kind)
        if self._strict and error is not None and self._pending is None:
            me = self._standing.identity
            if isinstance(error, type):
                error = error(f"job {me.job}, rank {me.rank}, step {step}: no snapshot ({kind}): {reason}")
            self._pending = error
        return Outcome(OutcomeKind.SKIPPED, step, f"{kind}: {reason}")

    def torn(self, snapshot: Snapshot, torn: Torn) -> Outcome:
        """The witnesses disagree about a snapshot, or its copy did not finish."""
        step = snapshot.step
        if torn.witness == "late":
            self.skip(step, "late", torn.detail, Degraded, begun=snapshot)
            return Outcome(OutcomeKind.TORN, step, f"late: {torn.detail}")
        self._counters.torn += 1
        where = f" in tensor {torn.name!r}" if torn.name else ""
        reason = f"{torn.witness}: the state changed between boundary and fence{where}: {torn.detail}"
        self.skip(step, "torn", reason, TornSnapshot, torn=True, begun=snapshot)
        return Outcome(OutcomeKind.TORN, step, reason, torn.name)

    def close_open(self) -> None:
        """The state is about to change: a step that could still have been taken is dead now."""
        if self._open is not None:
            message, self._open = self._open[0], None
            self._post(message)

    def reopen(self, step: int) -> None:
        """`step` is tried once more: forget that it was skipped, if that is still open."""
        if self._open is not None and self._open[0].step == step:
            kind, self._open = self._open[1], None
            self._pending = None
            self._counters.skipped[kind] -= 1
            if not self._counters.skipped[kind]:
                del self._counters.skipped[kind]

    def failed(self, step: int, error: Exception, begun: Snapshot | Grant | None) -> Outcome:
        """A part of a boundary or a fence raised."""
        if isinstance(error, BaftError):
            return self.skip(step, error.code, str(error), error, begun=begun)
        reason = f"{type(error).__name__}: {error}"
        if "error" not in self._warned:
            self._log.exception("session_failed", step=step)
        wrapped = BaftError(f"job {self._standing.identity.job}, step {step}: no snapshot: {reason}")
        return self.skip(step, "error", reason, wrapped, begun=begun)

    def refused(self, error: BaftError) -> None:
        """Something failed that costs no snapshot yet: a strict session raises it at its next call."""
        if self._strict and self._pending is None:
            self._pending = error

    def raise_pending(self) -> None:
        """Raise what a strict session skipped over."""
        error, self._pending = self._pending, None
        if error is not None:
            raise error
