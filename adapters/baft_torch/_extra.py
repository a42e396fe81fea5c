"""The user's own objects in a checkpoint: LR schedulers, a GradScaler, counters, generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from baft_torch._small import from_tree, to_tree
from baftd.checkpoint.state_tree import validate
from baftd.errors import ModelMismatch, UsageError

__all__ = ["ExtraState"]


class ExtraState:
    """Values of `attach(extra={name: value})`.

    A value is an object with state_dict() and load_state_dict(), a torch.Generator, or a dict of plain data, which is
    read at each boundary and updated in place on resume.
    """

    def __init__(self, values: Mapping[str, Any] | None) -> None:
        """Reads every value once: UsageError or StateTreeError, with the path, for what cannot be saved."""
        self._values = dict(values or {})
        for name, value in self._values.items():
            if not isinstance(name, str):
                raise UsageError(f"extra has the key {name!r}, which is not text.")
            if isinstance(value, torch.nn.Module):
                raise UsageError(
                    f"extra[{name!r}] is a module: its tensors would be copied while training waits.",
                    hint="Give it to attach() in the list of models.",
                )
            if isinstance(value, torch.optim.Optimizer):
                hint = "Give it to attach() in the list of optimizers."
                raise UsageError(f"extra[{name!r}] is an optimizer.", hint=hint)
            if not isinstance(value, dict | torch.Generator) and not _has_state(value):
                raise UsageError(
                    f"extra[{name!r}] is a {type(value).__name__}, which has no state_dict() and load_state_dict().",
                    hint="A number would not be read again at the next step: keep it in a dict.",
                )
        validate(self.state())

    def generators(self) -> dict[str, torch.Generator]:
        """Generators among the values: they are saved with the other random numbers."""
        return {f"extra.{k}": v for k, v in self._values.items() if isinstance(v, torch.Generator)}

    def state(self) -> dict[str, Any]:
        """All values as plain data."""
        return {
            name: to_tree(value if isinstance(value, dict) else value.state_dict(), f"extra.{name}")
            for name, value in self._values.items()
            if not isinstance(value, torch.Generator)
        }

    @property
    def names(self) -> set[str]:
        """Of all values but the generators."""
        return {name for name, value in self._values.items() if not isinstance(value, torch.Generator)}

    def load(self, saved: Mapping[str, Any], *, partly: bool = False) -> None:
        """Give every object its state back. ModelMismatch if the names are not those that were saved; `partly`: some
        may be missing, and keep the state that they have."""
        now = self.names
        if set(saved) - now or (now - set(saved) and not partly):
            missing = [f"{name} was saved and is not attached" for name in sorted(set(saved) - now)]
            added = [f"{name} is attached and was not saved" for name in sorted(now - set(saved))]
            raise ModelMismatch(f"extra differs from the checkpoint's: {'; '.join(missing + added)}.")
        for name, state in saved.items():
            value, loaded = self._values[name], from_tree(state)
            if isinstance(value, dict):
                value.clear()
                value.update(loaded)
            else:
                value.load_state_dict(loaded)


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
