"""What the daemon has told this rank: token, granted slots, cadence, fates of its snapshots.

Messages arrive in the I/O thread; the training thread reads under one lock that is held for microseconds.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from baft_client.io_thread import Handler, IoThread
from baftd import __version__
from baftd.checkpoint import cadence as facts
from baftd.errors import BaftError, Fenced
from baftd.memory.processes import RecordLock
from baftd.telemetry import get_logger
from baftd.wire.codec import reply_error
from baftd.wire.messages import (
    Ack,
    Begin,
    Cadence,
    Committed,
    CopyPlan,
    Declared,
    ErrorReply,
    Fence,
    Grant,
    Hello,
    Message,
    NoGrant,
    Reply,
    Restored,
    Resume,
    ResumePlan,
    Seal,
    Skip,
    Welcome,
    WireToken,
)

__all__ = ["Identity", "Standing"]


@dataclass(frozen=True)
class Identity:
    """Who this process says it is."""

    job: str
    rank: int
    world: int
    incarnation: str
    pid: int
    pid_start: int
    framework: str = ""
    strict: bool = False


class Standing(Handler):
    """The session's handler of messages. Attributes are read by the training thread; `changed` tells of each change."""

    def __init__(self, identity: Identity, *, on_fenced: Callable[[], None]) -> None:
        self.identity = identity
        self.changed = threading.Condition()
        self.token: WireToken | None = None
        self.fenced: str = ""
        """Why this process may write nothing any more; empty: it may."""
        self.refusal: BaftError | None = None
        """The daemon's answer to the last hello, where it was an error."""
        self.must_declare = False
        """The daemon does not know the layout (any more)."""
        self.no_grant = ""
        """Why no slot is granted, in the daemon's words."""
        self.plan: CopyPlan | None = None
        """The newest copy plan for the declared layout; in force from the next boundary on. It outlives an outage."""
        self.committed: dict[str, int] = {}
        self.refused = 0
        """Messages without an answer that the daemon refused."""
        self.outages = 0
        self.went_up = 0
        self.alone = False
        """Training began without a daemon (`fresh=True`): join as soon as there is one."""
        self.link: IoThread | None = None
        self.failures = 0
        self._on_fenced = on_fenced
        self._grants: OrderedDict[int, Grant] = OrderedDict()
        self._used: dict[int, int] = {}
        self._cadence: facts.Cadence | None = None
        self._outdated: CopyPlan | None = None
        """The plan that was there when a layout was about to be declared."""
        self._planned = 0
        """Generation of the newest plan of this connection and layout: a daemon that was restarted counts anew."""
        self._reached = self._forced = self._open = 0
        self.late_cadences = 0
        """Times that a cadence was heard of after steps that it takes and that this rank had left out."""
        self._lock: RecordLock | None = None
        self._locked = (0, 0)
        self._log = get_logger("client").bind(job=identity.job, rank=identity.rank)

    # ------------------------------------------------------------ for the training thread

    def due(self, step: int) -> bool:
        """Whether the job's cadence takes `step`, which may lie ahead. Before any cadence is known: yes."""
        with self.changed:
            return self._cadence is None or self._cadence.due(step)

    @property
    def cadence(self) -> tuple[int, int, int]:
        """(from_step, every, probe) that this rank goes by; every 0: it has heard of none."""
        known = self._cadence
        return (0, 0, 0) if known is None else (known.from_step, known.every, known.probe)

    def takes(self, step: int, *, force: bool = False) -> bool:
        """The same at the boundary of `step`, or `force`: what is left out here is left out for good."""
        if not (force and self._open == step):
            self.close_open()
        with self.changed:
            self._reached, self._open = step, 0
            if force:
                self._forced = step
            return force or self._cadence is None or self._cadence.due(step)

    def take_grant(self, timeout: float = 0.0) -> Grant | None:
        """The oldest granted slot, waited for `timeout` seconds; it is used up whatever becomes of the snapshot."""
        with self.changed:
            if timeout:
                self.changed.wait_for(lambda: bool(self._grants) or bool(self.fenced), timeout)
            if not self._grants:
                return None
            slot, grant = self._grants.popitem(last=False)
            self._used[slot] = grant.generation
            return grant

    def pause(self, seconds: float) -> None:
        """Wait for news from the daemon, of whatever kind."""
        with self.changed:
            self.changed.wait(seconds)

    @property
    def granted(self) -> int:
        """Number of slots that may be filled."""
        return len(self._grants)

    def declaring(self) -> None:
        """A layout is about to be declared: the plan that is there now is for the former one. What comes from here on
        may be for the new one, and before the training thread has mapped its slots."""
        with self.changed:
            self._outdated, self._planned = self.plan, 0

    def declared(self, reply: Declared) -> None:
        """A layout was agreed: older grants are for slots that are going away."""
        with self.changed:
            self._grants.clear()
            self._used.clear()
            self.no_grant = ""
            self.must_declare = False
            if self.plan is self._outdated:
                self.plan, self._planned = None, 0
            self._outdated = None
            for grant in reply.grants:
                self._grants[grant.slot] = grant
            missed = self._take_cadence(reply.cadence)
            self.changed.notify_all()
        self._say_missed(missed)

    def adopt(self, token: WireToken) -> None:
        """The rendezvous gave a token."""
        with self.changed:
            self.token = token
            self._reached = self._forced = self._open = 0
            self.changed.notify_all()

    def release(self) -> None:
        """Give the record lock up."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def abandon_in_child(self) -> None:
        """In a forked child: forget everything; the parent's lock is not the child's. Takes no lock."""
        self.changed = threading.Condition()
        self._grants = OrderedDict()
        self.fenced = "this is a forked child of the training process"
        if self._lock is not None:
            self._lock.forget()
            self._lock = None

    # ------------------------------------------------------------ in the I/O thread

    def make_hello(self) -> Hello:
        me = self.identity
        return Hello(
            job=me.job,
            rank=me.rank,
            world=me.world,
            incarnation=me.incarnation,
            pid=me.pid,
            pid_start=me.pid_start,
            framework=me.framework,
            client_version=__version__,
            token=self.token,
            strict=me.strict,
        )

    def welcomed(self, welcome: Welcome) -> None:
        self._hold_lock(welcome.lock_path)
        with self.changed:
            again = self.went_up > 0
            self.went_up += 1
            self.refusal = None
            self._planned = 0
            # The daemon grants anew after a hello; what it granted before it may not remember.
            self._grants.clear()
            self.changed.notify_all()
        if again:
            self._log.info("daemon_back", node=welcome.node, daemon=welcome.daemon_version)
        if welcome.fenced:
            self._fence("a newer start of the job has taken over")
        elif self.alone and self.token is None:
            self._join_late()

    def _hold_lock(self, path: str) -> None:
        """Hold the record lock that tells of this process's death. The file is opened once: closing any descriptor
        of it would drop the lock."""
        if not path:
            return
        try:
            found = os.stat(path)
            if self._lock is not None and (found.st_dev, found.st_ino) == self._locked:
                return
            self.release()
            lock = RecordLock(path)
            if not lock.acquire():
                why = "another process holds it, such as an earlier start that still runs"
                self._log.warning("no_record_lock", path=path, why=why)
                return
            self._lock = lock
            self._locked = (found.st_dev, found.st_ino)
        except (OSError, BaftError) as error:
            # The daemon still has the pidfd and heartbeats to know our death by.
            self._log.warning("no_record_lock", path=path, why=str(error))

    def turned_away(self, error: BaftError) -> None:
        with self.changed:
            first = self.refusal is None or self.refusal.message != error.message
            self.refusal = error
            self.changed.notify_all()
        if isinstance(error, Fenced):
            self._fence(error.message)
        elif first:
            self._log.warning("turned_away", why=str(error))

    def went_away(self, why: str) -> None:
        with self.changed:
            self.outages += 1
            self._grants.clear()
            self.changed.notify_all()
        self._log.warning("daemon_away", why=why, note="training goes on without snapshots until it is back")

    def failed(self, error: BaseException) -> None:
        self.failures += 1
        self._log.error("io_thread_failed", why=f"{type(error).__name__}: {error}")

    def received(self, reply: Reply) -> None:
        if isinstance(reply, ErrorReply):
            self._refused(reply)
            return
        token = getattr(reply, "token", None)
        if token is not None and token != self.token:
            # A fence carries the newer token; everything else of another start is not for us.
            if isinstance(reply, Fence) and self.token is not None and token.epoch > self.token.epoch:
                self._fence(reply.reason)
            return
        missed = None
        with self.changed:
            if isinstance(reply, Grant):
                if reply.generation > self._used.get(reply.slot, -1):
                    self._grants[reply.slot] = reply
                    self.no_grant = ""
            elif isinstance(reply, NoGrant):
                self.no_grant = reply.reason
            elif isinstance(reply, Cadence):
                missed = self._take_cadence(reply)
            elif isinstance(reply, CopyPlan):
                if reply.rank == self.identity.rank and reply.generation > self._planned:
                    self.plan, self._planned = reply, reply.generation
            elif isinstance(reply, Committed):
                self.committed[reply.tier] = max(reply.step, self.committed.get(reply.tier, 0))
            self.changed.notify_all()
        self._say_missed(missed)
        if isinstance(reply, Fence):
            self._fence(reply.reason)
        elif isinstance(reply, Committed) and reply.tier == "memory" and self.link is not None:
            step = reply.step
            self.link.acknowledge(lambda message: _step_of(message) <= step)

    def _take_cadence(self, said: Cadence) -> int | None:
        """The newest step that other ranks take by it and that this one has passed without a snapshot, if any."""
        cadence = facts.Cadence(
            said.from_step, said.every, said.probe, tuple(facts.Cadence(*earlier) for earlier in said.earlier)
        )
        known, self._cadence = self._cadence, cadence
        missed = None if known is None else cadence.missed(known, self._reached)
        if missed is not None and missed == self._reached != self._forced:
            self._open = missed  # its state is still there: `save` and `finish` may take it
            assert known is not None
            missed = cadence.missed(known, self._reached - 1)
        return missed if missed != self._forced else None

    def close_open(self) -> None:
        """The state is about to change: a step that word of the cadence came too late for is dead now."""
        if self._open:
            with self.changed:
                missed, self._open = self._open, 0
            self._say_missed(missed or None)

    def _say_missed(self, step: int | None) -> None:
        """A step that only some ranks hold must not stay open: this one says that it has none."""
        if step is None or self.token is None or self.link is None or self.fenced:
            return
        self.late_cadences += 1
        why = f"cadence: word of it came after step {step}, which it takes"
        self._log.warning("cadence_heard_late", step=step, note="this step and those before it cannot be complete")
        self.link.post(Skip(token=self.token, rank=self.identity.rank, step=step, reason=why))

    def _refused(self, reply: ErrorReply) -> None:
        error = reply_error(reply)
        if isinstance(error, Fenced):
            self._fence(error.message)
            return
        with self.changed:
            if reply.field == "declare":
                self.must_declare = True
                self._grants.clear()
            else:
                self.refused += 1
            self.changed.notify_all()
        if reply.field != "declare":
            self._log.warning("refused", field=reply.field, why=str(error))

    def _fence(self, reason: str) -> None:
        with self.changed:
            if self.fenced:
                return
            self.fenced = reason
            self._grants.clear()
            self.changed.notify_all()
        self._log.warning(
            "fenced", why=reason, note="this process writes no snapshot any more; it may go on, its work is not kept"
        )
        self._on_fenced()

    # ------------------------------------------------------------ joining after training began

    def _join_late(self) -> None:
        assert self.link is not None
        link, me = self.link, self.identity

        def planned(reply: Reply | BaftError) -> None:
            if isinstance(reply, ResumePlan):
                token = reply.token
                link.ask(
                    Restored(token=token, rank=me.rank, step=0, ok=True, reason=""),
                    lambda answer: joined(answer, token),
                )
            else:
                self._log.warning("cannot_join", why=str(reply), note="training goes on without snapshots")

        def joined(reply: Reply | BaftError, token: WireToken) -> None:
            if isinstance(reply, Ack):
                self.adopt(token)
                self._log.info("joined", epoch=token.epoch)
            else:
                self._log.warning("cannot_join", why=str(reply), note="training goes on without snapshots")

        link.ask(Resume(job=me.job, rank=me.rank, fresh=True), planned)


def _step_of(message: Message) -> int:
    return message.step if isinstance(message, Begin | Seal | Skip) else -1
