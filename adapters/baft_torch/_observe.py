"""What a schedule of torch.distributed.pipelining does and when: its operations, its waits, and the windows in them.

Nothing of the user's code changes. While it observes, the methods of the schedule's stages and its `step` are replaced
on those objects, and the two functions through which every point-to-point wait of every schedule passes,
`_batch_p2p` and `_wait_batch_p2p`, in the modules whose schedules call them. These two are private names: they are
looked for, and where they are missing, or a schedule waits by other means, only the operations are seen; then every
gap between two operations of a step counts as a wait (`PipelineObserver.plain`).

A wait for a send is a window like one for a receive: a send is over when its receiver has asked for it, so whoever
waits for one waits for another rank. `register_custom_function` of torch is of no use here: it replaces an operation,
and knows no waits.

Times are those of the calling thread. On a device whose operations are launched and not awaited they are the times of
the launches; a window that is opened there is anchored to the operation launched last (`Windows.enter`).
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, ClassVar

from baft_torch._pipeline import schedule_said, stages_of
from baftd.pipeline.events import EventKind
from baftd.telemetry import get_logger

if TYPE_CHECKING:
    from baft_client.recorder import Recorder
    from baft_client.session import Session
    from baft_client.windows import Windows
    from baft_torch._waits import Waits

__all__ = ["PipelineObserver"]

FORWARD, BACKWARD, INPUT_GRAD = EventKind.FORWARD, EventKind.BACKWARD, EventKind.INPUT_GRAD
WEIGHT_GRAD, REDUCE, SCHEDULE = EventKind.WEIGHT_GRAD, EventKind.REDUCE, EventKind.SCHEDULE
WAIT_RECV, WAIT_SEND, WAIT_MIXED = EventKind.WAIT_RECV, EventKind.WAIT_SEND, EventKind.WAIT_MIXED

BATCH, WAIT = "_batch_p2p", "_wait_batch_p2p"
"""Private functions of torch.distributed.pipelining.schedules: one starts sends and receives and returns a list of
works, the other waits for such a list."""
OPERATIONS = {
    "forward_one_chunk": FORWARD,
    "backward_one_chunk": BACKWARD,
    "backward_weight_one_chunk": WEIGHT_GRAD,
    "perform_reduce_grad": REDUCE,
}
"""Methods of a stage, and what they do."""
LOSS = "_maybe_compute_loss"
"""Method of a schedule, called on the last stage after each forward: part of that operation."""


class _Covers:
    """In the place of `Waits` where there is none."""

    covered = False


class PipelineObserver:
    """Observes one schedule from its making until `detach()`. Observers of one schedule, and of several, know nothing
    of each other, and may end in any order."""

    def __init__(
        self,
        schedule: Any,
        recorder: Recorder,
        windows: Windows,
        *,
        waits: Waits | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Observe from now on.

        schedule: of torch.distributed.pipelining, or of its shape (`step`, `_stage` or `_stages`).
        waits: is told when a step of the schedule begins and ends, and leaves the pipeline's own waits alone.
        say: told once, in a sentence, where waits cannot be seen.
        """
        self.add, self.enter, self.leave = recorder.add, windows.enter, windows.leave
        self.covers = _Covers() if waits is None else waits
        """Told that this observer stands for the waits of the thread, while it does."""
        self.plain = False
        """Waits cannot be seen: gaps between operations stand for them."""
        self.trained = True
        """The step under way has backward passes."""
        self._waits, self._windows, self._say = waits, windows, say
        self.pending = False
        """There is a forward or a gap to end before the next operation: one of the two below."""
        self.awaits = False
        """Has other ranks to wait for, and no wait has been seen yet."""
        self._forward: tuple[int, int, int, int] | None = None
        """A forward of the last stage whose loss is still to come: stage, micro-batch, begin and end."""
        self._gap = 0
        """When the last operation ended, in a step that is observed plainly; 0: not between operations."""
        self._patches: list[_Patch] = []
        stages = stages_of(schedule)
        try:
            with _patching:
                self._install(schedule, stages)
        except BaseException:
            self.detach()
            raise
        if any(getattr(stage, "group_size", 1) > 1 for stage in stages):
            self.awaits = True
            windows.register("pipeline")

    @classmethod
    def attach(cls, schedule: Any, session: Session, waits: Waits | None = None) -> PipelineObserver:
        """Observe for a session, and give it the schedule's order. Before the first boundary."""
        log = get_logger("torch").bind(job=session.job, rank=session.rank)
        session.schedule = schedule_said(schedule)
        return cls(
            schedule,
            session.recorder,
            session.windows,
            waits=waits,
            say=lambda sentence: log.warning("plain_observation", note=sentence),
        )

    def detach(self) -> None:
        """Put everything back as it was. Safe to call again, and within a step."""
        with _patching:
            while self._patches:
                self._patches.pop().give_back(self)
        self._windows.unregister("pipeline")

    def _install(self, schedule: Any, stages: list[Any]) -> None:
        with_loss = callable(getattr(schedule, LOSS, None))
        for stage in stages:
            last = with_loss and bool(getattr(stage, "is_last", False))
            for name, kind in OPERATIONS.items():
                if callable(getattr(stage, name, None)):
                    loss = last and kind is FORWARD
                    self._patch(stage, name, functools.partial(_operation, kind, int(stage.stage_index), loss))
            if last:
                self._patch(schedule, LOSS, _loss)
        modules = list(_modules_with_waits(type(schedule)))
        for module in modules:
            self._patch(module, BATCH, _batch)
            self._patch(module, WAIT, _wait)
        if not modules:
            self._observe_plainly(f"{type(schedule).__module__} has no {BATCH} and {WAIT}")
        # Last: what is under way in other threads is noticed from here on, by wrappers that are all there.
        self._patch(schedule, "step", functools.partial(_step, schedule))

    def _patch(self, owner: Any, name: str, make: Make) -> None:
        self._patches.append(_Patch.take(self, owner, name, make))

    def _observe_plainly(self, why: str) -> None:
        self.plain = True
        if self._say is not None:
            self._say(f"{why}: waits of the pipeline cannot be seen, gaps between its operations are taken for them.")

    # ------------------------------------------------------------ called by the wrappers, in the training thread

    def entered(self, now: int, trained: bool) -> None:
        """A step of the schedule begins. `trained`: with backward passes."""
        self.trained, self._forward, self._gap, self.pending = trained, None, 0, False
        if self._waits is not None:
            self._waits.schedule_entered()
        if self.plain:
            self._gap_begins(now)

    def left(self, begin: int, end: int, returned: bool) -> None:
        """It is over. `returned`: without an exception."""
        if self.pending:
            self.end_pending(end)
        self.add(SCHEDULE, -1, -1, begin, end, 0 if self.trained else 1)
        if not (returned and self.trained):
            return
        if self.awaits:
            self.awaits = False
            if not self.plain:
                self._observe_plainly(f"the schedule does not wait by {WAIT}")
        if self._waits is not None:
            self._waits.schedule_returned()

    def end_pending(self, now: int) -> None:
        """An operation or a wait begins: a gap ends, and a forward after which no loss was computed ended before."""
        self.pending = False
        if self._gap:
            self._gap_ends(now)
        if self._forward is not None:
            stage, micro, begin, end = self._forward
            self._forward = None
            self.add(FORWARD, stage, micro, begin, end)

    def forward_ended(self, stage: int, micro: int, begin: int, end: int) -> None:
        """A forward of the last stage: its loss comes next."""
        self._forward, self.pending = (stage, micro, begin, end), True

    def loss_ended(self, now: int) -> None:
        """The loss of that forward is there."""
        if self._forward is not None:
            stage, micro, begin, _ = self._forward
            self._forward, self.pending = None, False
            self.add(FORWARD, stage, micro, begin, now)
            if self.plain:
                self._gap_begins(now)

    def _gap_begins(self, now: int) -> None:
        self._gap, self.pending = now, True
        self.covers.covered = True
        self.enter(WAIT_MIXED)

    def _gap_ends(self, now: int) -> None:
        begin, self._gap = self._gap, 0
        self.leave()
        self.covers.covered = False
        self.add(WAIT_MIXED, -1, -1, begin, now)

    def operation_ended(self, kind: EventKind, stage: int, micro: int, begin: int, end: int) -> None:
        """One of them, in a step that is observed plainly."""
        self.add(kind, stage, micro, begin, end)
        self._gap_begins(end)


def _modules_with_waits(kind: type) -> Iterator[Any]:
    """Modules in whose namespace the schedule's code finds the two functions: that of torch, and those of classes
    derived elsewhere that have imported them."""
    seen = set()
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        if module is None or base.__module__ in seen:
            continue
        seen.add(base.__module__)
        if callable(getattr(module, BATCH, None)) and callable(getattr(module, WAIT, None)):
            yield module


# ------------------------------------------------------------------------------------ wrappers

_running: dict[int, tuple[PipelineObserver, ...]] = {}
"""Observers of the schedule whose step() is on the stack, by thread. What runs outside of one is nobody's."""
_patching = threading.RLock()


class _Works(list[Any]):
    """A list of works that knows what they are."""

    __slots__ = ("kind",)
    kind: EventKind


Make = Callable[[Callable[..., Any], list[PipelineObserver]], Callable[..., Any]]
"""Makes a wrapper of what it wraps and the observers that use it."""


_wrappers: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


class _Patch:
    """A wrapper in the place of `owner.name`, shared by all observers that want it there."""

    _all: ClassVar[dict[tuple[int, str], _Patch]] = {}

    def __init__(self, owner: Any, name: str, make: Make) -> None:
        self._owner, self._name = owner, name
        self._users: list[PipelineObserver] = []
        self._own = name in vars(owner)
        self._before = getattr(owner, name)
        # A module that was imported while another one was wrapped has our wrapper for the function.
        inner = self._before.__wrapped__ if self._before in _wrappers else self._before
        self._wrapper = functools.wraps(inner)(make(inner, self._users))
        _wrappers.add(self._wrapper)
        setattr(owner, name, self._wrapper)

    @classmethod
    def take(cls, user: PipelineObserver, owner: Any, name: str, make: Make) -> _Patch:
        """The wrapper that is there, or a new one."""
        patch = cls._all.get((id(owner), name))
        if patch is None:
            patch = cls._all[id(owner), name] = cls(owner, name, make)
        patch._users.append(user)
        return patch

    def give_back(self, user: PipelineObserver) -> None:
        """Take the wrapper away with its last user. One that somebody has wrapped in turn stays where it is, passes
        everything through, and serves the next observer."""
        self._users.remove(user)
        if self._users or vars(self._owner).get(self._name) is not self._wrapper:
            return
        del self._all[id(self._owner), self._name]
        if self._own:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)


def _step(schedule: Any, inner: Callable[..., Any], users: list[PipelineObserver]) -> Callable[..., Any]:
    """Around schedule.step(), which schedule.eval() calls, too."""

    def step(*args: Any, **kwargs: Any) -> Any:
        if not users:
            return inner(*args, **kwargs)
        thread, observers = get_ident(), tuple(users)
        outer = _running.get(thread)
        trained = bool(getattr(schedule, "_has_backward", True))
        returned = False
        begin = monotonic_ns()
        _running[thread] = observers
        try:
            for observer in observers:
                observer.entered(begin, trained)
            result = inner(*args, **kwargs)
            returned = True
            return result
        finally:
            end = monotonic_ns()
            if outer is None:
                del _running[thread]
            else:
                _running[thread] = outer
            for observer in observers:
                observer.left(begin, end, returned)

    return step


def _operation(
    kind: EventKind, stage: int, loss: bool, inner: Callable[..., Any], _: list[PipelineObserver]
) -> Callable[..., Any]:
    """Around a method of a stage. `loss`: the loss belongs to it, and comes later."""

    def operation(*args: Any, **kwargs: Any) -> Any:
        observers = _running.get(get_ident())
        if observers is None or (kind is not FORWARD and not observers[0].trained):
            return inner(*args, **kwargs)  # a step without backward passes calls those, too, and they do nothing
        begin = monotonic_ns()
        for observer in observers:
            if observer.pending:
                observer.end_pending(begin)
                begin = monotonic_ns()
        result = inner(*args, **kwargs)
        end = monotonic_ns()
        what, micro = kind, -1
        if kind is not REDUCE:
            micro = args[0] if args else next((kwargs[name] for name in kwargs if name.endswith("_chunk_id")), -1)
            if kind is BACKWARD and not (kwargs.get("full_backward", True) if len(args) < 3 else args[2]):
                what = INPUT_GRAD
        for observer in observers:
            if loss:
                observer.forward_ended(stage, micro, begin, end)
            elif observer.plain:
                observer.operation_ended(what, stage, micro, begin, end)
            else:
                observer.add(what, stage, micro, begin, end)
        return result

    return operation


def _loss(inner: Callable[..., Any], _: list[PipelineObserver]) -> Callable[..., Any]:
    """Around a schedule's call of the loss function."""

    def loss(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        for observer in _running.get(get_ident(), ()):
            if observer.pending:
                observer.loss_ended(monotonic_ns())
        return result

    return loss


def _batch(inner: Callable[..., Any], _: list[PipelineObserver]) -> Callable[..., Any]:
    """Around the start of sends and receives: says what the returned works are."""

    def batch(p2p_ops: Any, *args: Any, **kwargs: Any) -> Any:
        works = inner(p2p_ops, *args, **kwargs) if args or kwargs else inner(p2p_ops)
        if not works or type(works) is not list or get_ident() not in _running:
            return works
        said = _Works(works)
        first = p2p_ops[0].op.__name__
        said.kind = _DIRECTIONS.get(first, WAIT_MIXED)
        if len(p2p_ops) > 1 and any(other.op.__name__ != first for other in p2p_ops):
            said.kind = WAIT_MIXED
        return said

    return batch


_DIRECTIONS = {"irecv": WAIT_RECV, "isend": WAIT_SEND}


def _wait(inner: Callable[..., Any], _: list[PipelineObserver]) -> Callable[..., Any]:
    """Around the wait for a list of works: a window."""

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        observers = _running.get(get_ident())
        if observers is None or not work:
            return inner(work, *args, **kwargs)
        kind = work.kind if type(work) is _Works else WAIT_MIXED
        for observer in observers:
            if observer.pending:
                observer.end_pending(monotonic_ns())
            observer.awaits = False
            observer.covers.covered = True
            observer.enter(kind)
        begin = monotonic_ns()
        try:
            return inner(work, *args, **kwargs) if args or kwargs else inner(work)
        finally:
            end = monotonic_ns()
            for observer in observers:
                observer.leave()
                observer.covers.covered = False
                observer.add(kind, -1, -1, begin, end)

    return wait
