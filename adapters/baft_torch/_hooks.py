"""When an update begins and ends: hooks of torch's optimizers, filtered to the attached ones.

torch calls global hooks before any hook of an instance, in compiled steps too. An update that is given a closure
begins when the closure first returns: until then it only computes a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["UpdateHooks"]


class UpdateHooks:
    """Counts updates and calls `fence` before each one begins. `fence` must not raise."""

    def __init__(self, optimizers: Sequence[Any], fence: Callable[[], None]) -> None:
        self.updates = 0
        """Updates begun, of all attached optimizers together."""
        self.hooked = False
        """A hook has fired since `forget()`."""
        self._ids = {id(optimizer) for optimizer in optimizers}
        self._open: set[int] = set()
        self._fence = fence
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    @property
    def inside(self) -> bool:
        """An update has begun and not ended: its optimizer is at work, or it raised."""
        return bool(self._open)

    def forget(self) -> None:
        """A boundary: no hook has fired since."""
        self.hooked = False
        self._open.clear()

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(optimizer) not in self._ids:
            return None
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._first_return(id(optimizer), kwargs["closure"])}
        # args[0] is the optimizer itself
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._first_return(id(optimizer), args[1]), *args[2:]), kwargs
        self._begin(id(optimizer))
        return None

    def _first_return(self, optimizer: int, closure: Callable[[], Any]) -> Callable[[], Any]:
        begun = False

        def wrapped() -> Any:
            nonlocal begun
            loss = closure()
            if not begun:
                begun = True
                self._begin(optimizer)
            return loss

        return wrapped

    def _begin(self, optimizer: int) -> None:
        self._fence()
        self.updates += 1
        self.hooked = True
        self._open.add(optimizer)

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open.discard(id(optimizer))
