"""How a session joins its job: wait for a daemon, meet the other ranks, load what the plan names, say so."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from baft_client.engine import CopyEngine
from baft_client.io_thread import IoThread
from baft_client.load_engine import load_engine
from baft_client.restore import RestoredImage
from baft_client.saved import SavedShards
from baft_client.source import Resumed
from baft_client.standing import Standing
from baft_client.whole import WholeImage
from baftd.errors import BaftError, Fenced, ProtocolError, Unreachable, UsageError
from baftd.settings import Settings
from baftd.telemetry import Logger, get_logger
from baftd.wire.messages import Message, Progress, Restored, Resume, ResumePlan, ResumeProgress

__all__ = ["Joining", "Teller", "ask"]

ALONE_AFTER = 0.5
"""Seconds that `resume(fresh=True)` looks for a daemon before it begins without one."""
TELL_AFTER = 5.0
"""Seconds after which a process that waits says for what."""
FAILED_TIMEOUT = 5.0
"""Seconds that a rank which could not load waits for the daemon to hear of it."""

_AnswerT = TypeVar("_AnswerT", bound=Message)
_OpenT = TypeVar("_OpenT", RestoredImage, SavedShards)


class Joining:
    """The part of a session's life before its first step."""

    def __init__(
        self,
        settings: Settings,
        standing: Standing,
        link: IoThread,
        *,
        prefer: Literal["auto", "native", "python"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefer`: which engine copies out of the slot."""
        self.plan: ResumePlan | None = None
        self._settings = settings
        self._standing = standing
        self._link = link
        self._prefer = prefer
        self._clock = clock
        self._open: RestoredImage | SavedShards | None = None
        self._engine: CopyEngine | None = None
        self._log = get_logger("client").bind(job=standing.identity.job, rank=standing.identity.rank)

    def resume(self, *, fresh: bool, takeover: bool, reshard: bool, timeout: float | None) -> Resumed:
        """See `Session.resume`."""
        wait = self._settings.connect_timeout if timeout is None else timeout
        me = self._standing.identity
        if not self._reach(ALONE_AFTER if fresh and timeout is None else wait):
            error = self._standing.refusal or self._link.unreachable(f"no answer within {wait:g} s")
            if not fresh or not isinstance(error, Unreachable):
                raise error
            self._begin_alone()
            return Resumed(step=0, updates=0, epoch=0, image=None)
        message = Resume(job=me.job, rank=me.rank, fresh=fresh, takeover=takeover, reshard=reshard)
        plan = ask(self._link, message, self._patience(wait), ResumePlan, log=self._log)
        self._standing.adopt(plan.token)
        self.plan = plan
        for line in plan.passed_over:
            self._log.warning("passed_over", why=line)
        image: RestoredImage | WholeImage | None = None
        shards: SavedShards | None = None
        if plan.shards:
            self._open = opened = self._load(lambda engine: self._shards(plan, engine))
            if plan.divided:
                image = opened.image(me.rank)
            else:
                shards = opened
        elif plan.source is not None:
            source = plan.source
            self._open = image = self._load(lambda engine: RestoredImage(source, engine, job=me.job, rank=me.rank))
        self._log.info("resuming", step=plan.step, epoch=plan.token.epoch, tier=plan.tier, seconds=plan.seconds)
        return Resumed(
            step=plan.step,
            updates=plan.updates,
            epoch=plan.token.epoch,
            image=image,
            shards=shards,
            tier=plan.tier or "",
            passed_over=tuple(plan.passed_over),
            seconds=plan.seconds,
            durable=plan.durable,
        )

    def _patience(self, wait: float) -> float:
        """Seconds without a word that a rendezvous may take."""
        return max(wait, self._settings.restore_wait, self._settings.rendezvous_timeout)

    def _reach(self, wait: float) -> bool:
        """Wait for a daemon. An answer that no waiting will change ends it early."""
        began = self._clock()
        deadline = began + wait
        told = False
        while not self._link.wait_up(min(0.1, max(0.0, deadline - self._clock()))):
            if isinstance(self._standing.refusal, UsageError | ProtocolError | Fenced):
                raise self._standing.refusal
            if self._clock() >= deadline:
                return False
            if not told and self._clock() - began >= TELL_AFTER:
                told = True
                phase = f"no daemon answers at {self._link.path} yet"
                self._log.warning("waiting", phase=phase, waited=TELL_AFTER, deadline=wait)
        return True

    def _begin_alone(self) -> None:
        note = "training begins without it, and joins when it is there"
        self._log.warning("no_daemon", socket=str(self._link.path), note=note)
        self._standing.alone = True

    def _load(self, opened: Callable[[CopyEngine], _OpenT]) -> _OpenT:
        """Open what the plan names; the others hear of it when that fails."""
        self._engine = load_engine(None, prefer=self._prefer)
        try:
            return opened(self._engine)
        except BaseException as error:
            self.restored(ok=False, reason=f"{type(error).__name__}: {error}")
            raise

    def _shards(self, plan: ResumePlan, engine: CopyEngine) -> SavedShards:
        me = self._standing.identity
        if plan.world != me.world:
            self._log.info("another_world", saved_by=plan.world, starting=me.world, step=plan.step)
        return SavedShards(plan.shards, engine, job=me.job, world=plan.world, step=plan.step)

    def restored(self, ok: bool, reason: str) -> None:
        """See `Session.restored`."""
        if self.plan is None:
            raise UsageError("restored() belongs after resume().")
        self.close()
        plan, rank = self.plan, self._standing.identity.rank
        message = Restored(token=plan.token, rank=rank, step=plan.step, ok=ok, reason=reason[:4096])
        if ok:
            patience = self._patience(self._settings.connect_timeout)
            self._link.request(message, patience, on_progress=Teller(self._log))
            return
        with contextlib.suppress(BaftError):  # the caller has a better error than "a rank could not load"
            self._link.request(message, FAILED_TIMEOUT)

    def close(self) -> None:
        """Unmap the images, join the engine's thread. Safe to call twice."""
        if self._open is not None:
            self._open.close()
            self._open = None
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def abandon_in_child(self) -> None:
        """In a forked child: unmap; there is no engine here to stop."""
        if self._open is not None:
            self._open.close()
            self._open = None
        self._engine = None


def ask(link: IoThread, message: Message, timeout: float, kind: type[_AnswerT], *, log: Logger) -> _AnswerT:
    """Request an answer of one type; progress is logged.

    Raises:
        ProtocolError: the daemon answered with something else.
        BaftError: as `IoThread.request`.
    """
    reply = link.request(message, timeout, on_progress=Teller(log))
    if not isinstance(reply, kind):
        raise ProtocolError(f"the daemon answered {type(message).__name__} with {type(reply).__name__}.", field="type")
    return reply


class Teller:
    """Logs what the daemon is doing meanwhile. What a start waits for longer than a moment is a warning, once: nobody
    should have to guess why a job does not begin."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._warned = ""

    def __call__(self, progress: Progress | ResumeProgress) -> None:
        """Log one report."""
        if not isinstance(progress, ResumeProgress):
            self._log.info("waiting", phase=progress.what, done=progress.done, total=progress.total)
            return
        # What is only being fetched goes on by itself, and has no deadline.
        news = progress.deadline > 0 and progress.waited >= TELL_AFTER and progress.phase != self._warned
        if news:
            self._warned = progress.phase
        say = self._log.warning if news else self._log.info
        say(
            "waiting",
            phase=progress.phase,
            missing=",".join(map(str, progress.missing[:16])) or None,
            waited=round(progress.waited, 1),
            deadline=round(progress.deadline, 1),
        )
