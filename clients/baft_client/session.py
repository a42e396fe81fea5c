"""A rank's session with the daemon of its node: what every adapter is built on. Knows no framework.

    session = Session.attach("gpt")
    resumed = session.resume()              # rendezvous of all ranks; load resumed.image; then
    session.restored()
    for step in range(resumed.step, n):
        ...forward and backward...
        session.fence()                     # before the update: the copy of the last boundary must be over
        ...update...
        session.boundary(step + 1, updates, sources, small)
    session.finish()

Weak by default: `boundary` and `fence` never raise because of the daemon, a full disk or a torn snapshot. They skip,
count, and warn once for each kind of reason. With `strict=True` the next call raises what was skipped over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

from baft_client import lifeline
from baft_client.clock_windows import ClockWindows
from baft_client.declared import Layout
from baft_client.ending import reach_again, say_finished, token_of
from baft_client.engine import EngineHooks
from baft_client.identity import find_incarnation, find_rank
from baft_client.io_thread import IoThread, LinkState
from baft_client.joining import Joining, ask
from baft_client.periods import Periods
from baft_client.recorder import Recorder
from baft_client.shard_writer import ALL_WITNESSES
from baft_client.skips import Skips
from baft_client.snapshotting import Described, Snapshotting
from baft_client.source import Counters, Outcome, OutcomeKind, Resumed, Source
from baft_client.standing import Identity, Standing
from baft_client.windows import Windows
from baftd.checkpoint.identity import check_job_name
from baftd.errors import BaftError, Degraded, Fenced, UsageError
from baftd.memory.processes import start_time
from baftd.settings import Settings, load_settings
from baftd.telemetry import get_logger
from baftd.wire.messages import Finish, Leave, Save, Saved

__all__ = ["Session"]

SAVE_TIMEOUT = 600.0
"""Seconds without a word from the daemon after which `save` and `finish` give up."""
LEAVE_TIMEOUT = 2.0


class Session(Described):
    """One rank's session. All methods belong to one thread, the training thread.

    An adapter that knows more says it in the attributes of `Described`, grants windows with `windows` (or
    `clock_windows`) and puts down what happens in a step with `recorder`.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        *,
        strict: bool,
        audit: int,
        engine: str,
        witnesses: frozenset[str] = ALL_WITNESSES,
        engine_hooks: EngineHooks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use `attach`. `witnesses` and `engine_hooks` are for tests: no setting can name them."""
        super().__init__()
        self.job, self.rank, self.world = identity.job, identity.rank, identity.world
        self.incarnation = identity.incarnation
        self.settings = settings
        self.strict = strict
        self._counters = Counters()
        self._prefer = cast(Literal["auto", "native", "python"], engine)
        self._clock = clock
        self._identity = identity
        self._log = get_logger("client").bind(job=self.job, rank=self.rank)
        self._layout = Layout(identity, prefer=self._prefer, witnesses=witnesses, hooks=engine_hooks)
        # A fenced start may write nothing: the engine is stopped at once, by the I/O thread.
        self._standing = Standing(identity, on_fenced=self._layout.cancel)
        self._link = IoThread(settings.socket, self._standing, clock=clock)
        self._standing.link = self._link
        self._joining = Joining(settings, self._standing, self._link, prefer=self._prefer, clock=clock)
        self._skips = Skips(self._standing, self._counters, strict=strict, post=self._link.post)
        self._phase: Literal["attached", "restoring", "training", "over", "forked"] = "attached"
        self.recorder = Recorder()
        """What happens between two boundaries."""
        self.windows = Windows(self.recorder)
        """Spans in which the training thread waits anyway."""
        self._periods = Periods(self.rank, self.recorder, self.windows, tell=self._link.tell)
        self._snapshots = Snapshotting(
            identity, settings, self, layout=self._layout, standing=self._standing, link=self._link, skips=self._skips,
            counters=self._counters, windows=self.windows, periods=self._periods, audit=audit, clock=clock,
        )  # fmt: skip
        self.clock_windows = ClockWindows(
            self._snapshots, self._layout, self.windows, self._periods, log=self._log
        )
        """The same by the clock, where a step is one opaque launch."""
        self._step = 0
        self._pausing = 0

    # ------------------------------------------------------------------------------------ joining

    @classmethod
    def attach(
        cls,
        job: str,
        *,
        rank: int | None = None,
        world: int | None = None,
        incarnation: str | None = None,
        settings: Settings | None = None,
        strict: bool | None = None,
        framework: str = "",
        audit: int | None = None,
        engine: str | None = None,
        witnesses: frozenset[str] = ALL_WITNESSES,
        engine_hooks: EngineHooks | None = None,
    ) -> Session:
        """Say who this process is and start looking for the daemon, without waiting for it.

        Args:
            job: name of the training run.
            rank: overrides the launcher's variables, together with `world`.
            world: number of ranks.
            incarnation: 32 hex digits that all ranks of this start share; an adapter broadcasts them over its group.
            settings: None: read as the command line reads them.
            strict: raise at the next call what is otherwise skipped; None: as in the settings.
            framework: for `baftd status`.
            audit: compare every byte of every N-th snapshot at the fence; None: as in the settings.
            engine: "auto", "native" or "python"; None: as in the settings.
            witnesses: for tests.
            engine_hooks: for tests.

        Raises:
            RankError: rank or world size missing, disagreeing, out of range; several ranks that share no incarnation.
            JobNameError: the job cannot be a directory.
            SettingsError: a setting makes no sense.
        """
        check_job_name(job)
        settings = settings if settings is not None else load_settings()
        who = find_rank(os.environ, rank=rank, world=world)
        shared = find_incarnation(os.environ, who.world, given=incarnation, random_bytes=secrets.token_bytes)
        strict = settings.strict if strict is None else strict
        identity = Identity(
            job=job,
            rank=who.rank,
            world=who.world,
            incarnation=shared,
            pid=os.getpid(),
            pid_start=start_time(os.getpid()) or 0,
            framework=framework,
            strict=strict,
        )
        session = cls(
            identity,
            settings,
            strict=strict,
            audit=settings.audit if audit is None else audit,
            engine=settings.engine if engine is None else engine,
            witnesses=witnesses,
            engine_hooks=engine_hooks,
        )
        level = "info" if who.launched else "warning"
        session._log.event("attached", level=level, world=who.world, source=who.source, socket=str(settings.socket))
        session._link.start()
        lifeline.register(session)
        return session

    def resume(
        self, *, fresh: bool = False, takeover: bool = False, reshard: bool = False, timeout: float | None = None
    ) -> Resumed:
        """Meet all ranks of this start, and learn where training goes on.

        Args:
            fresh: begin at step 0 whatever is known; also begins without a daemon, and joins it when there is one.
            takeover: fence a live predecessor instead of waiting for it.
            reshard: this start may have other ranks, or another layout, than the one that saved: `Resumed.shards` then
                has what all of them saved, to be cut anew. One rank that says so speaks for all.
            timeout: seconds to wait for a daemon; None: `connect_timeout` of the settings.

        Raises:
            Unreachable: no daemon in time (and not `fresh`), or it fell silent.
            TryAgain: a live predecessor still trains.
            NothingRestorable: the job has been further, and nothing of it can be restored.
            VerificationFailed: the image that the plan names is damaged.
            RankError: the daemon knows another world size, or another process with this rank.
        """
        self._check_usable()
        if self._phase != "attached":
            raise UsageError("resume() was called twice; a session resumes once.")
        resumed = self._joining.resume(fresh=fresh, takeover=takeover, reshard=reshard, timeout=timeout)
        self._step = resumed.step
        self._phase = "training" if self._joining.plan is None else "restoring"
        return resumed

    def restored(self, ok: bool = True, reason: str = "") -> None:
        """Say that the state was loaded, and wait until every rank has said so; or say why it was not.

        `Resumed.image` and `Resumed.shards` are closed by it.

        Raises:
            BaftError: another rank could not load; the daemon says which.
            Unreachable: no answer in time.
        """
        if self._phase == "training" and self._standing.alone:
            return
        if self._phase != "restoring":
            raise UsageError("restored() belongs after resume().")
        self._joining.restored(ok, reason)
        if ok:
            self._phase = "training"

    # ------------------------------------------------------------------------------------ every step

    def due(self, step: int) -> bool:
        """Whether `boundary(step)` would want a snapshot; an adapter need not collect its sources where not."""
        return self._phase == "training" and not self._pausing and not self.fenced and self._standing.due(step)

    @property
    def undeclared(self) -> bool:
        """Whether `boundary` wants the sources though no snapshot is `due`: the daemon knows nothing of the job yet."""
        return self._phase == "training" and not self._pausing and not self.fenced and self._snapshots.undeclared

    def taken(self, step: int) -> bool:
        """Whether a snapshot of `step` was begun and has not been dropped since. Where not, `boundary(force=True)` may
        still take it, as long as the state has not changed."""
        return self._snapshots.taken == step

    @property
    def fenced(self) -> bool:
        """A newer start of the job has taken over: no snapshot of this process is kept any more."""
        return bool(self._standing.fenced)

    @property
    def counters(self) -> Counters:
        """What the session has done so far."""
        counters, standing = self._counters, self._standing
        counters.reconnects = max(0, standing.went_up - 1)
        counters.refused = standing.refused
        counters.committed_memory = standing.committed.get("memory", 0)
        counters.committed_durable = standing.committed.get("durable", 0)
        return counters

    def boundary(
        self,
        step: int,
        updates: int,
        sources: Sequence[Source],
        small: object,
        *,
        recheck: Callable[[], Iterable[tuple[int, ...]]] | None = None,
        force: bool = False,
    ) -> Outcome:
        """A step is complete: begin its snapshot, where the cadence takes it. The first one after `resume` declares the
        layout even where it does not.

        Volatile sources and `small` are copied before this returns; stable ones by the engine until the fence.

        Args:
            step: boundaries passed since the job began, this one included.
            updates: optimizer updates since the job began.
            sources: all tensors of this rank, in a fixed order. A changed tree is declared anew, which blocks.
            small: everything else, as a typed tree.
            recheck: reads the identities of all stable sources again, in order; None: each source's `witness`.
            force: whatever the cadence says, and waiting some seconds for a slot; also for a step that found no slot or
                no daemon and whose state has not changed since (`save`, `finish`: all ranks at the same step).

        Raises:
            BaftError: with `strict`, what a former call skipped over.
        """
        if self._phase == "forked":
            return Outcome(OutcomeKind.SKIPPED, step, "forked: this is a child of the training process")
        self._check_usable()
        if self._phase != "training":
            raise UsageError("a boundary came before resume() and restored(), or after finish().")
        if force:
            self._skips.reopen(step)
        self._skips.close_open()
        self._skips.raise_pending()

        def begin(began: float) -> Outcome:
            if self.fenced:
                return self._skips.skip(step, "fenced", self._standing.fenced, Fenced)
            if self._pausing:
                return self._skips.skip(step, "paused", "training is paused")
            return self._snapshots.begin(step, updates, sources, small, recheck, began=began, force=force)

        return self._pass(step, begin, lambda: self._snapshots.declare_early(step, sources, small), force=force)

    def pass_by(self, step: int) -> None:
        """A boundary that is not `due`, for an adapter that has collected nothing for it.

        Raises:
            BaftError: with `strict`, what a former call skipped over.
        """
        if self._phase == "training":
            self._skips.close_open()
            self._skips.raise_pending()
            why = "word of a cadence that takes it came at the last moment"
            self._pass(step, lambda began: self._skips.skip(step, "cadence", why))

    def _pass(
        self,
        step: int,
        begin: Callable[[float], Outcome],
        declare: Callable[[], None] | None = None,
        *,
        force: bool = False,
    ) -> Outcome:
        """A boundary: one period ends, another begins. `begin` is called where the cadence takes the step, `declare`
        where it does not and nothing is declared yet."""
        began, began_ns = self._clock(), time.monotonic_ns()
        snapshots = self._snapshots
        self._check_gate()
        if snapshots.snapshot is not None:
            snapshots.guard(self._step, lambda: snapshots.seal(None))  # no fence came: the copy must be over by now
        granted = snapshots.close_period(step)
        self._step = step
        self._counters.boundaries += 1
        snapshots.open_period()
        outcome = Outcome(OutcomeKind.NOT_DUE, step)
        if self._standing.takes(step, force=force):
            outcome = snapshots.guard(step, lambda: begin(began))
            self._counters.held_seconds += self._clock() - began
        elif declare is not None and self.undeclared:
            declare()
            self._counters.held_seconds += self._clock() - began
        if self._pausing:
            self._periods.apart = True
        heard = self._link.state is LinkState.UP and not self.fenced
        token = self._standing.token if heard else None
        self._periods.turn(step, began_ns, granted, snapshots.plan, token, self._standing.cadence)
        snapshots.post_begun()
        return outcome

    def reach(self, timeout: float | None = None) -> None:
        """Before a forced boundary: wait for a daemon that is away, at most `timeout` seconds and `connect_timeout`.

        `save` and `finish` wait for it anyway, and could then keep only what was taken before.
        """
        if self._phase == "training" and not self.fenced and self._standing.token is not None:
            wait = self.settings.connect_timeout
            reach_again(self._link, self._log, self._step, wait if timeout is None else min(wait, timeout))

    def fence(self, updates: int | None = None) -> Outcome:
        """The state is about to change: finish the copy of the last boundary, compare the witnesses, seal.

        Cheap and idempotent where nothing is in progress.

        Args:
            updates: the optimizer's update counter now; a snapshot of another count is torn.

        Raises:
            BaftError: with `strict`, what a former call skipped over.
        """
        self._skips.close_open()
        self._standing.close_open()
        self._skips.raise_pending()
        self._check_gate()
        return self._snapshots.guard(self._step, lambda: self._snapshots.fence(updates))

    def _check_gate(self) -> None:
        """Whatever was copied beside a launch whose gate did not fire may have been changed by its update."""
        if self.clock_windows.missed():
            self.cancel("the gate in front of the update did not fire")

    def skip(self, step: int, reason: str) -> None:
        """No snapshot of `step`, for a reason of the caller's; drops one in progress of the same step.

        The step is dead for the whole job. Does nothing for a step that the cadence does not take.
        """
        if self._phase != "training":
            return
        if self._snapshots.snapshot is not None and self._snapshots.snapshot.step == step:
            self.cancel(reason)
        else:
            self._pass(max(self._step, step), lambda began: self._skips.skip(step, "asked", reason))

    def cancel(self, reason: str) -> None:
        """Drop the snapshot in progress, if there is one."""
        if self._snapshots.snapshot is not None and (snapshot := self._snapshots.drop()) is not None:
            self._skips.skip(snapshot.step, "cancelled", reason, begun=snapshot)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For code that changes weights for a while (EMA evaluation): what is being copied is finished first, and
        boundaries within are skipped."""
        self.fence()
        self._periods.apart = True
        self._pausing += 1
        try:
            yield
        finally:
            self._pausing -= 1
            self._periods.apart = True

    def _check_usable(self) -> None:
        if self._phase in ("over", "forked"):
            why = "is over" if self._phase == "over" else "belongs to the parent of this forked process"
            raise UsageError(f"the session of job {self.job}, rank {self.rank}, {why}.")

    # ------------------------------------------------------------------------------------ ending

    def settle(self, timeout: float) -> bool:
        """Wait until the newest sealed snapshot is committed(memory) and a slot is granted for the next one.

        For tests and short programs: a training loop never needs to. False: not within `timeout` seconds.
        """
        deadline = self._clock() + timeout
        standing = self._standing
        with standing.changed:
            return standing.changed.wait_for(
                lambda: (
                    standing.committed.get("memory", 0) >= self._snapshots.last_sealed
                    and (standing.granted > 0 or self._layout.writer is None)
                ),
                max(0.0, deadline - self._clock()),
            )

    def save(self, *, durable: bool = True, timeout: float | None = None) -> Saved:
        """Make the newest boundary durable now (`durable=False`: wait for its commit in memory).

        All ranks call it at the same step. The answer says where it lies.

        Raises:
            Unreachable: no daemon, or no answer for `timeout` seconds (600).
            Degraded: there is no durable tier, or the step was not committed.
        """
        self._check_usable()
        self.fence()
        self._periods.apart = True
        limit = SAVE_TIMEOUT if timeout is None else timeout
        if not durable:
            if not self.settle(limit):
                raise Degraded(f"step {self._snapshots.last_sealed} was not committed within {limit:g} s.")
            return Saved(step=self._standing.committed.get("memory", 0), tier="memory")
        message = Save(token=token_of(self._standing, self._link, self.settings), rank=self.rank, step=self._step)
        return ask(self._link, message, limit, Saved, log=self._log)

    def finish(self, timeout: float | None = None) -> Saved | None:
        """Training is complete: the last step is made durable, where a durable tier is on, and the slots are freed.

        Waits for all ranks. Weak by default: where it fails, that is logged as an error and None is returned.

        Raises:
            BaftError: with `strict`.
        """
        if self._phase in ("over", "forked"):
            return None
        try:
            self._skips.close_open()
            self._standing.close_open()
            if self._phase == "training":
                self._check_gate()
                self._snapshots.guard(self._step, lambda: self._snapshots.fence(None))
            message = Finish(token=token_of(self._standing, self._link, self.settings), rank=self.rank, step=self._step)
            limit = SAVE_TIMEOUT if timeout is None else timeout
            saved = ask(self._link, message, limit, Saved, log=self._log)
        except BaftError as error:
            self._log.error("finish_failed", step=self._step, why=str(error))
            self._end()
            if self.strict:
                raise
            return None
        say_finished(self._log, saved, self._step)
        self._end()
        self._skips.raise_pending()
        return saved

    def leave(self, reason: str = "") -> None:
        """End without finishing: every slot stays. Waits two seconds for the daemon at most; never raises."""
        if self._phase in ("over", "forked"):
            return
        with contextlib.suppress(BaftError):
            self._skips.close_open()
            self.cancel(f"the process leaves: {reason}" if reason else "the process leaves")
            if self._link.state is LinkState.UP:
                message = Leave(token=self._standing.token, rank=self.rank, reason=reason[:4096])
                self._link.request(message, LEAVE_TIMEOUT)
        self._end()

    def close(self) -> None:
        """`leave` where the session is not over yet. Safe to call twice."""
        self.leave("closed")

    def _end(self) -> None:
        self._phase = "over"
        self._snapshots.snapshot = None
        self.windows.end()
        lifeline.forget(self)
        self._joining.close()
        self._layout.close()
        self._link.close()
        self._standing.release()

    def abandon_in_child(self) -> None:
        """In a forked child: drop everything inherited, speak to nobody, let the child live. Takes no lock."""
        self._phase = "forked"
        self._snapshots.abandon_in_child()
        self._link.abandon_in_child()
        self._standing.abandon_in_child()
        self._joining.abandon_in_child()
        self._layout.abandon_in_child()
