"""Where a training thread waits, beside the receives of a pipeline: windows around collectives and around the end of
a step.

Every blocking collective of torch.distributed ends in `Work.wait`, and so does every asynchronous one, every receive
outside of torch's own pipelines, and FSDP2's gathering and scattering: that one method is wrapped while a training is
attached. Functions that were imported by name before, `async_op=True`, and groups made later are seen all the same;
compiled code, which knows the functions of torch.distributed by their identity, finds them as they were. Functional
collectives (DTensor, and `clip_grad_norm_` on it) wait in `wait_tensor`, which is wrapped too; compiled code goes
through to the original there.

The *tail* is the window from the end of the last backward pass, or of `schedule.step()`, to the update: gradient norms,
DDP's reductions and a search for infinities lie in it, whatever they wait with. `_tail.py` finds where it begins.

A window opens for every wait, also where the data is there already: the plan knows windows by their number in the step,
and numbers must not depend on who came first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from baft_client.windows import from_outside
from baft_torch._tail import BackwardEnd, ForwardBegin
from baftd.pipeline.events import EventKind
from baftd.telemetry import get_logger

if TYPE_CHECKING:
    from baft_client.recorder import Recorder
    from baft_client.windows import Windows

__all__ = ["Waits"]

_COLLECTIVE = EventKind.WAIT_COLLECTIVE
_KINDS = {12: EventKind.WAIT_SEND, 13: EventKind.WAIT_RECV, 14: EventKind.WAIT_RECV}
"""By OpType of c10d, which Python sees as a number: SEND; RECV and RECVANYSOURCE."""

_attached: tuple[Waits, ...] = ()
"""Every attached training of this process."""
_undo: list[Callable[[], None]] = []


class Waits:
    """Windows of one attached training. All of its methods are for the training thread, and none raises."""

    def __init__(
        self,
        windows: Windows,
        recorder: Recorder,
        *,
        modules: Iterable[nn.Module] = (),
        params: Iterable[torch.Tensor] = (),
        pipeline: bool = False,
        device: bool = False,
    ) -> None:
        """Begin to watch the thread that calls this, and, from each boundary on, the one that passes it.

        modules: whose forward ends a tail. params: whose gradients tell of a backward pass. Neither is looked at where
        `pipeline`: `schedule_returned` tells of the end there. device: the state lies on a device, whose backward pass
        runs in threads of torch's own: they count as the training thread.
        """
        self.covered = False
        """Set while somebody else stands for what the thread waits for (the observer of a pipeline around its
        receives): waits within open no window of their own and are not recorded."""
        self.thread = get_ident()
        """The training thread."""
        self._windows = windows
        self._recorder = recorder
        self._device = device
        self._fenced = self._closed = False
        self._tail = 0
        """When the tail that is open began, in ns; 0: none is."""
        self._forward = ForwardBegin(() if pipeline else modules, self._model_called)
        self._backward = BackwardEnd(() if pipeline else params, self.forward_begins, self._backward_ended)
        _attach(self)

    # ------------------------------------------------------------ waits

    def trains(self) -> bool:
        """Whether the calling thread is the one that trains."""
        return get_ident() == self.thread or (self._device and from_outside())

    def begin(self, kind: EventKind) -> int:
        """The thread is about to wait. Returns the time, for `end`."""
        if not self._fenced:
            self._windows.enter(kind)
        return time.monotonic_ns()

    def begin_here(self, kind: EventKind) -> int:
        """`begin` if this is the training thread of a training that is still attached, else 0: nothing to end."""
        return self.begin(kind) if self.trains() and not self._closed else 0

    def end(self, kind: EventKind, began: int) -> None:
        """The wait is over."""
        ended = time.monotonic_ns()
        if not self._fenced:
            self._windows.leave()
        self._recorder.add(kind, -1, -1, began, ended)

    # ------------------------------------------------------------ the tail

    def schedule_entered(self) -> None:
        """`schedule.step()` was called: the tail of a former call ends."""
        self.forward_begins()

    def schedule_returned(self) -> None:
        """`schedule.step()` has returned, and gradients are there: the tail begins."""
        self._open_tail()

    def forward_begins(self) -> None:
        """A forward pass begins: a tail that is open ends."""
        if self._tail:
            self._close_tail()

    def _model_called(self) -> None:
        if self.trains():
            self.forward_begins()
            self._backward.abandon()

    def _backward_ended(self) -> None:
        if self.trains():
            self._open_tail()

    def _open_tail(self) -> None:
        if not self._tail and not self._fenced:
            self._tail = self.begin(EventKind.TAIL)

    def _close_tail(self) -> None:
        began, self._tail = self._tail, 0
        self.end(EventKind.TAIL, began)

    # ------------------------------------------------------------ steps

    def fence(self) -> None:
        """An update is about to begin: the tail ends, and until the next boundary no window opens."""
        if self._tail:
            self._close_tail()
        if not self._fenced:
            self._fenced = True
            self._backward.step_ended()

    def boundary(self) -> None:
        """A step is complete: waits of the calling thread are windows of the next."""
        if self._tail:
            self._close_tail()
        self._fenced = False
        self.thread = get_ident()

    def close(self) -> None:
        """Undo every wrapping and take hooks away. Safe to call again."""
        self._closed = True
        _detach(self)
        self._forward.remove()
        self._backward.remove()
        if self._tail:
            self._close_tail()


# ------------------------------------------------------------ what is wrapped


def _attach(waits: Waits) -> None:
    global _attached
    if not _attached and torch.distributed.is_available():
        _undo.extend(wrap() for wrap in (_wrap_work, _wrap_functional))
    _attached = (*_attached, waits)


def _detach(waits: Waits) -> None:
    global _attached
    _attached = tuple(each for each in _attached if each is not waits)
    if not _attached:
        while _undo:
            _undo.pop()()


def _mine() -> tuple[Waits, ...]:
    """Whose training thread this is, and who does not stand in a wait already."""
    if len(_attached) == 1:
        only = _attached[0]
        return () if only.covered or not only.trains() else _attached
    return tuple(each for each in _attached if not each.covered and each.trains())


def _wrap_work() -> Callable[[], None]:
    """Wrap `Work.wait`; returns what undoes it."""
    from torch._C import _distributed_c10d

    kind_of = getattr(_distributed_c10d.Work, "_get_op_type", None)

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        mine = _mine()
        if not mine:
            return original(work, *args, **kwargs)
        kind = _kind(work, kind_of)
        began = _begin(mine, kind)
        try:
            # Called here and not in a helper: a work written in Python without a wait() of its own comes through this
            # function once more, and is told from an endless recursion by the name and first argument of the caller.
            return original(work, *args, **kwargs)
        finally:
            _end(mine, kind, began)

    original = _distributed_c10d.Work.wait
    return _replace(_distributed_c10d.Work, "wait", wait)


def _wrap_functional() -> Callable[[], None]:
    """Wrap `wait_tensor` of the functional collectives; returns what undoes it."""
    from torch.distributed import _functional_collectives as functional

    original = getattr(functional, "wait_tensor", None)
    if original is None:
        get_logger("torch").info("not_observed", what="wait_tensor", note="the tail covers functional collectives")
        return lambda: None

    def wait_tensor(tensor: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(tensor)
        mine = _mine()
        if not mine:
            return original(tensor)
        began = _begin(mine, _COLLECTIVE)
        try:
            return original(tensor)
        finally:
            _end(mine, _COLLECTIVE, began)

    wait_tensor.__wrapped__ = original  # type: ignore[attr-defined]
    return _replace(functional, "wait_tensor", wait_tensor)


def _replace(owner: Any, name: str, wrapped: Callable[..., Any]) -> Callable[[], None]:
    """Put `wrapped` in the place of an attribute; returns what puts the original back. Where somebody has wrapped it
    once more since, it stays, and passes through: no training is attached any more."""
    original = getattr(owner, name)
    setattr(owner, name, wrapped)

    def undo() -> None:
        if getattr(owner, name) is wrapped:
            setattr(owner, name, original)

    return undo


def _kind(work: Any, kind_of: Callable[[Any], int] | None) -> EventKind:
    """What a work waits for. A work that was written in Python may not know."""
    if kind_of is None:
        return _COLLECTIVE
    try:
        return _KINDS.get(kind_of(work), _COLLECTIVE)
    except Exception:  # noqa: BLE001  a subclass whose base was never initialised; only the event's name depends on it
        return _COLLECTIVE


def _begin(mine: tuple[Waits, ...], kind: EventKind) -> int:
    """The thread of these trainings is about to wait. A wait within (of a tensor that wraps another) is the same."""
    began = 0
    for each in mine:
        each.covered = True
        began = each.begin(kind)
    return began


def _end(mine: tuple[Waits, ...], kind: EventKind, began: int) -> None:
    for each in mine:
        each.end(kind, began)
        each.covered = False
