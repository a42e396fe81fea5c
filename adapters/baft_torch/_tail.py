"""When a backward pass ends, and when a forward pass begins: told by torch's own hooks.

The end of a backward pass: a hook of the parameter whose gradient comes first asks the autograd engine to call back
when the whole graph has run. DDP asks the same when its last bucket is ready, which is later, and waits for the
reductions in that callback: so the moment told here is the end of computing, and DDP's wait comes after it. Which
parameters come first is learned: in a step that learns, every parameter has the hook; afterwards only those do that
came first in a pass of theirs. A step in which none of them fired is followed by one that learns.

Recomputation by a checkpoint with `use_reentrant=True` is a pass of its own within the pass: the end of each is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["BackwardEnd", "ForwardBegin"]

PATIENCE = 64
"""Steps at most between two attempts to learn, where passes never end: parameters that get gradients by other means."""

_Hook = Any


class BackwardEnd:
    """Calls `begins` at the first gradient of a backward pass and `ended` when the pass is over, in the thread that
    runs it. Both must not raise."""

    def __init__(self, params: Iterable[torch.Tensor], begins: Callable[[], None], ended: Callable[[], None]) -> None:
        self._params = [each for each in params if each.is_leaf]
        self._begins, self._ended = begins, ended
        self._hooks: dict[int, _Hook] = {}
        self._first: dict[int, torch.Tensor] = {}
        self._running = False
        self._learning = False
        self._passes = 0
        self._idle, self._patience = 0, 1
        if self._params:
            self._learn()

    def abandon(self) -> None:
        """A forward pass begins: a pass that raised will not come to its end."""
        self._running = False

    def step_ended(self) -> None:
        """An update begins: what was learned is kept; without a pass since the last one, learn anew."""
        passes, self._passes, self._running = self._passes, 0, False
        if not self._params:
            return
        if passes:
            self._idle, self._patience = 0, 1
            if self._learning:
                self._keep_first()
            return
        self._idle += 1
        if self._learning:  # nothing fires at all: look again, less and less often
            self.remove()
            self._patience = min(PATIENCE, 2 * self._patience)
        elif self._idle >= self._patience:
            self._learn()

    def remove(self) -> None:
        """Take every hook away."""
        self._learning = False
        hooks, self._hooks = self._hooks, {}
        for hook in hooks.values():
            hook.remove()

    def _learn(self) -> None:
        self.remove()
        self._learning, self._idle = True, 0
        self._first.clear()
        register: Any = torch.Tensor.register_post_accumulate_grad_hook
        self._hooks = {id(each): register(each, self._gradient) for each in self._params if each.requires_grad}

    def _keep_first(self) -> None:
        self._learning = False
        for key in [key for key in self._hooks if key not in self._first]:
            self._hooks.pop(key).remove()

    def _gradient(self, param: torch.Tensor) -> None:
        if self._running or torch.compiler.is_compiling():
            return
        self._running = True
        self._begins()
        if self._learning:
            self._first[id(param)] = param
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._over)
        except RuntimeError:  # called by a framework's own code after the pass
            self._over()

    def _over(self) -> None:
        self._running = False
        self._passes += 1
        self._ended()


class ForwardBegin:
    """Calls `begins` before the forward of each of these modules, where it is not compiled as a whole."""

    def __init__(self, modules: Iterable[nn.Module], begins: Callable[[], None]) -> None:
        self._handles = [each.register_forward_pre_hook(_ForwardHook(begins)) for each in modules]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _ForwardHook:
    """The hook itself. A module that is pickled or copied (an averaged copy of the weights) takes its hooks along: what
    the copy has instead of this one is `{}.get`, which called as a hook returns the arguments as they are."""

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self._begins()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, ({}, "get")
