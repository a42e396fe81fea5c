"""Snapshots: begun at a boundary, copied in windows, sealed at the fence. The middle of a session."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baft_client.allowance import Allowance
from baft_client.declared import Layout
from baft_client.io_thread import IoThread, LinkState
from baft_client.joining import ask
from baft_client.periods import Periods
from baft_client.shard_writer import DeviceCopier, Snapshot, Torn
from baft_client.skips import Skips
from baft_client.source import Counters, Outcome, OutcomeKind, Source
from baft_client.standing import Identity, Standing
from baft_client.windows import NO_LIMIT, Windows
from baftd.checkpoint import state_tree
from baftd.checkpoint.identity import Token
from baftd.errors import BaftError, Degraded, Fenced, NoRoom, ProtocolError, TryAgain, Unreachable
from baftd.settings import Settings
from baftd.telemetry import get_logger
from baftd.wire.messages import Begin, CopyPlan, Declared, Grant, ScheduleSaid, Seal, WireToken

__all__ = ["Described", "ScheduleSaid", "Snapshotting"]

FLUSH_TIMEOUT = 60.0
"""Seconds a fence waits for the rest of a copy, beside a second for each 200 MB."""
DECLARE_AGAIN = 30.0
"""Seconds between attempts to declare a layout that the daemon could not make room for."""
FORCE_WAIT = 5.0
"""Seconds that a forced boundary waits for a slot, and before that for what other ranks declare."""


@dataclass(eq=False)
class Described:
    """What an adapter says of its rank, before the first boundary."""

    device: DeviceCopier | None = None
    """Where sources live on a device."""
    stages: tuple[int, ...] = ()
    """Pipeline stages that this rank holds."""
    coordinates: dict[str, int] = field(default_factory=dict)
    """Place of the rank on each named axis."""
    schedule: ScheduleSaid | None = None
    """The pipeline schedule that the rank runs."""


class Snapshotting:
    """The snapshot in progress and what leads to the next one. Belongs to the thread that trains."""

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        described: Described,
        *,
        layout: Layout,
        standing: Standing,
        link: IoThread,
        skips: Skips,
        counters: Counters,
        windows: Windows,
        periods: Periods,
        audit: int,
        clock: Callable[[], float],
    ) -> None:
        """`audit`: compare every byte of every N-th snapshot; `clock` gives monotonic seconds."""
        self.snapshot: Snapshot | None = None
        """In progress."""
        self.taken = -1
        """Step of the newest snapshot that was begun and not dropped."""
        self.last_sealed = 0
        self.plan: CopyPlan | None = None
        """The copy plan in force in this period; None: none yet."""
        self.declare_again = 0.0
        """When a layout may be declared again that was refused."""
        self._identity = identity
        self._settings = settings
        self._described = described
        self._layout = layout
        self._standing = standing
        self._link = link
        self._skips = skips
        self._counters = counters
        self._windows = windows
        self._periods = periods
        self._audit = audit
        self._clock = clock
        self._grant: Grant | None = None
        """Taken for a snapshot that has not begun yet."""
        self._begun: Begin | None = None
        """The message of a snapshot that has begun, until it is posted."""
        self._armed = False
        """A snapshot was begun in this period."""
        self._declare_error: BaftError | None = None
        self._early = True
        """The layout may be declared before the first snapshot is due."""
        self._sources: tuple[str, ...] = ()
        """Those whose windows were to come in this period."""
        self._came = True
        """They came in the former period, or it is not known yet whether they do."""
        self._allowance = Allowance()
        self._forced = False
        """Somebody waits for the snapshot in progress: its fence takes the time that it needs."""
        self._log = get_logger("client").bind(job=identity.job, rank=identity.rank)

    # ------------------------------------------------------------ a period

    def close_period(self, step: int) -> Sequence[int]:
        """The boundary of `step`: no window is open from here on, and what the former period copied is put down.
        Returns the budgets of its windows."""
        granted, sources = self._windows.end(), self._windows.sources
        self._came, self._sources = bool(granted) or sources != self._sources, sources
        if 0 <= self._periods.step != step:  # forced at the same step: the period goes on
            plan = self._standing.plan  # of the period that begins
            budget = 0.0 if plan is None else plan.budget
            length = time.monotonic_ns() - self._periods.begun
            self._allowance.passed(length, budget, apart=self._periods.apart)
        if self._armed:
            copied = self._layout.copied()
            self._periods.copied = None if copied is None else copied.numbered(self._windows.timed_from)
            self._armed = False
        return granted

    def open_period(self) -> None:
        """The next period begins, under the newest copy plan."""
        plan = self.plan = self._standing.plan
        if plan is None:
            self._windows.begin((), NO_LIMIT, 0)
        else:
            self._windows.begin(plan.windows, plan.further, plan.outside)

    # ------------------------------------------------------------ begin

    def begin(
        self,
        step: int,
        updates: int,
        sources: Sequence[Source],
        small: object,
        recheck: Callable[[], Iterable[tuple[int, ...]]] | None,
        *,
        began: float,
        force: bool,
    ) -> Outcome:
        """Begin a snapshot. Arguments as of `Session.boundary`, and:

        Args:
            began: when the boundary began, by the session's clock.
            force: wait some seconds for a slot.
        """
        token, skip = self._standing.token, self._skips.skip
        if token is None or (self._link.state is not LinkState.UP and self._standing.granted == 0):
            return skip(step, "no_daemon", self._link.last_error, Unreachable, final=False)
        encoded = state_tree.encode(small)
        if self._standing.must_declare or not self._layout.fits(sources, len(encoded)):
            until = self._clock() + (FORCE_WAIT if force else 0.0)
            while isinstance(problem := self._declare(token, sources, len(encoded)), TryAgain):
                if self._clock() >= until:
                    return skip(step, "not_divided", problem.message, final=False)
                self._standing.pause(0.05)
            if problem is not None:
                kind = "no_daemon" if isinstance(problem, Unreachable) else problem.code
                return skip(step, kind, str(problem), problem)
        writer = self._layout.writer
        assert writer is not None
        sources, recheck = self._layout.saved(sources, recheck)
        grant = self._grant = self._standing.take_grant(FORCE_WAIT if force else 0.0)
        if grant is None:
            why = self._standing.no_grant or "the daemon has granted no slot yet"
            return skip(step, "no_slot", why, Degraded, final=False)
        if not writer.owns(grant.slot):
            return skip(step, "no_slot", f"slot {grant.slot} was granted but never declared", ProtocolError)
        pace = self._pace()
        self._armed = True
        self.snapshot = writer.begin(
            grant.slot,
            grant.generation,
            Token(token.epoch, token.incarnation),
            step=step,
            updates=updates,
            sources=sources,
            small=encoded,
            recheck=recheck,
            writer=(self._identity.pid, self._identity.pid_start),
            now=began,
            pace=pace,
            windows=bool(self._windows.sources),
            audit=self._audit > 0 and self._counters.began % self._audit == 0,
        )
        self._grant = None
        if self._standing.fenced:  # meanwhile: the I/O thread may have looked before the engine was armed
            self.drop()
            return skip(step, "fenced", self._standing.fenced, Fenced)
        if pace is not None:
            self._windows.arm(*writer.gates())
        self.taken = step
        self._forced = force
        self._allowance.begun()
        self._layout.page(step=step, updates=updates)
        self._counters.began += 1
        self.snapshot.held = self._clock() - began
        self._begun = Begin(
            token=token, rank=self._identity.rank, step=step, slot=grant.slot, generation=grant.generation
        )
        return Outcome(OutcomeKind.BEGAN, step)

    @property
    def undeclared(self) -> bool:
        """Whether `declare_early` is wanted now."""
        if not self._early or self._layout.writer is not None:
            return False
        return self._standing.token is not None and self._link.state is LinkState.UP

    def declare_early(self, step: int, sources: Sequence[Source], small: object) -> None:
        """Agree on a layout at a boundary that takes no snapshot, so that slots which do not fit are told of now, not
        hours later, and the daemon knows of the job. Tried once: a refusal is repeated where a snapshot is due, and
        raised by a strict session at its next call."""
        token, self._early = self._standing.token, False
        assert token is not None
        problem: Exception | None
        try:
            problem = self._declare(token, sources, len(state_tree.encode(small)))
        except Exception as error:  # noqa: BLE001 - nothing of ours reaches the training loop, and no snapshot is lost
            problem = error
        if isinstance(problem, TryAgain):
            self._early = True  # other ranks have not declared yet
        elif problem is not None:
            note = "no snapshot can be taken as it is; tried again when the first one is due"
            why = f"{type(problem).__name__}: {problem}"
            self._log.warning("not_declared", step=step, why=why, note=note)
            if not isinstance(problem, BaftError):
                job, rank = self._identity.job, self._identity.rank
                problem = BaftError(f"job {job}, rank {rank}, step {step}: the layout is not declared: {why}")
            self._skips.refused(problem)

    def _pace(self) -> int | None:
        """Bytes a second outside of windows, 0 for none; None: the engine copies all the time at full speed.

        Without a plan windows carry the copy where some come: a source whose windows stay away must not put every copy
        off to the fence."""
        if self.plan is not None:
            return self.plan.outside
        return 0 if self._windows.sources and self._came else None

    def post_begun(self) -> None:
        """Tell the daemon of the snapshot that has begun. Apart from `begin`: the I/O thread that is woken for it takes
        what else the boundary has to say along."""
        message, self._begun = self._begun, None
        if message is not None:
            self._link.post(message)

    def _declare(self, token: WireToken, sources: Sequence[Source], small_bytes: int) -> BaftError | None:
        """Agree on a layout, which blocks. None: it stands. TryAgain: other ranks have not declared yet."""
        if self._link.state is not LinkState.UP:
            return self._link.unreachable("no answer")
        if self._declare_error is not None and self._clock() < self.declare_again:
            return self._declare_error
        if self._layout.writer is not None and small_bytes > self._layout.small_room:
            note = "slots are laid out anew"
            self._log.warning("small_state_grew", bytes=small_bytes, had=self._layout.small_room, note=note)
        timeout, described = self._settings.declare_timeout, self._described
        self._standing.declaring()
        try:
            reply = self._layout.declare(
                token,
                sources,
                small_bytes,
                ask=lambda message: ask(self._link, message, timeout, Declared, log=self._log),
                device=described.device,
                stages=described.stages,
                coordinates=described.coordinates,
                schedule=described.schedule,
            )
        except BaftError as error:
            if not isinstance(error, TryAgain):
                self._declare_error, self.declare_again = error, self._clock() + DECLARE_AGAIN
            self._standing.must_declare |= isinstance(error, NoRoom)  # slots of the former layout may have made room
            return error
        self._declare_error = None
        self._counters.declares += 1
        self._standing.declared(reply)
        self._periods.apart = True
        self.open_period()  # the former plan was for other bytes
        return None

    # ------------------------------------------------------------ seal

    def seal(self, updates: int | None) -> Outcome:
        """Finish the copy in progress, compare the witnesses, mark the slot and tell the daemon."""
        snapshot, writer, token = self.snapshot, self._layout.writer, self._standing.token
        assert snapshot is not None
        assert writer is not None
        began, began_ns = self._clock(), time.monotonic_ns()
        self._windows.end()
        if self._standing.fenced or token is None:
            self.drop()
            return self._skips.skip(snapshot.step, "fenced", self._standing.fenced, Fenced)
        deadline = FLUSH_TIMEOUT + writer.nbytes / 200e6
        limited = self.plan is not None and self.plan.budget > 0.0 and not self._forced
        if limited:
            deadline = min(deadline, self._allowance.seconds)
        result = writer.seal(snapshot, updates=updates, deadline=deadline)
        self.snapshot = None
        self._periods.fenced(began_ns, left=snapshot.left, waited=snapshot.waited)
        if limited:
            self._allowance.waited(snapshot.waited)
        self._counters.audits += snapshot.audited is not None
        now = self._clock()
        self._counters.held_seconds += now - began
        if isinstance(result, Torn):
            self._layout.page(fence=snapshot.step)
            self.taken = -1
            return self._skips.torn(snapshot, result)
        held = snapshot.held + now - began
        self.last_sealed = snapshot.step
        self._counters.sealed += 1
        self._counters.bytes_copied += writer.nbytes
        self._counters.last_held_ms = held * 1e3
        self._layout.page(
            fence=snapshot.step, held_ns=int(held * 1e9), held_total_ns=int(self._counters.held_seconds * 1e9)
        )
        self._link.post(
            Seal(
                token=token,
                rank=self._identity.rank,
                step=snapshot.step,
                updates=snapshot.updates,
                slot=snapshot.slot,
                generation=snapshot.generation,
                image_length=snapshot.header.image_length,
                small_length=snapshot.header.small_length,
                digests=result.digests,
                held_ms=held * 1e3,
                copy_ms=(now - snapshot.began) * 1e3,
            )
        )
        return Outcome(OutcomeKind.SEALED, snapshot.step)

    def fence(self, updates: int | None) -> Outcome:
        """The state is about to change: `seal`, where something is in progress."""
        if self.snapshot is not None:
            return self.seal(updates)
        began = time.monotonic_ns()
        self._windows.end()
        self._periods.fenced(began, left=0, waited=0)
        return Outcome(OutcomeKind.NOTHING, max(0, self._periods.step))

    # ------------------------------------------------------------ give up

    def drop(self) -> Snapshot | None:
        """Give the copy in progress up, whatever its state. Returns the snapshot that it was of."""
        snapshot, self.snapshot, self._begun, self.taken = self.snapshot, None, None, -1
        self._windows.disarm()
        self._layout.cancel()
        return snapshot

    def guard(self, step: int, work: Callable[[], Outcome]) -> Outcome:
        """Run a part of a boundary or fence so that no failure of ours reaches the training loop."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - weak by default: counted, logged, raised at the next call if strict
            begun = self.snapshot or self._grant
            self._grant = None
            with contextlib.suppress(BaftError):
                self.drop()
            return self._skips.failed(step, error, begun)

    def abandon_in_child(self) -> None:
        """In a forked child: there is nothing to copy, and no engine. Takes no lock."""
        self.snapshot = self._grant = self._begun = None
        self._windows.forget()
