"""The state of an optimizer: its tensors by the names of their parameters, and everything beside them.

torch makes an optimizer's state lazily, at the first update of each parameter, as a dict for every parameter. Values
of that dict that are tensors are declared one by one and copied in the windows; numbers, None and containers are
small state, where a tensor inside a container leaves a reference to its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from baft_torch._small import KIND, to_tree
from baft_torch._tensors import is_dtensor, plain
from baftd.errors import UsageError

__all__ = ["MOVING", "OptimizerTree", "StateTensor", "placement_of"]

MOVING = 5
"""Boundaries in a row at which the tree had changed, after which an optimizer is saved as a whole."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state."""

    name: str
    tensor: torch.Tensor
    param: torch.Tensor
    param_name: str


class OptimizerTree:
    """State of one optimizer. `name_of` gives the name of a parameter (group and place in it for unknown ones)."""

    def __init__(self, index: int, optimizer: Any, name_of: Callable[[torch.Tensor, int, int], str]) -> None:
        self.index = index
        self.optimizer = optimizer
        self.whole = isinstance(optimizer, torch.optim.LBFGS)
        """Everything is small state: the tree of its tensors differs from step to step."""
        self.params: list[tuple[str, torch.Tensor]] = []
        self.tensors: list[StateTensor] = []
        self._name_of = name_of
        self._groups: list[list[str]] = []
        self._dicts: list[tuple[dict[Any, Any], int]] = []
        self._slots: list[tuple[dict[Any, Any], Any, Any]] = []
        self._others: list[tuple[str, dict[Any, Any], Any]] = []
        self._nested: list[torch.Tensor] = []
        self._odd: dict[str, Any] = {}
        self._ids: list[int] = []
        self._moved = 0
        self._zero = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
        if self._zero and getattr(optimizer, "_overlap_with_ddp", False):
            raise UsageError(
                f"optimizer {index} is a ZeroRedundancyOptimizer with overlap_with_ddp=True: it updates parameters "
                "within the backward pass, and no hook tells of it.",
                hint="Leave overlap_with_ddp out.",
            )
        self.walk()

    @property
    def state(self) -> dict[Any, Any]:
        """State of the parameters that this rank updates. ZeroRedundancyOptimizer keeps it in an optimizer within."""
        found: dict[Any, Any] = self.optimizer.optim.state if self._zero else self.optimizer.state
        return found

    @property
    def kind(self) -> str:
        """Name of the class that updates parameters: of the one within a ZeroRedundancyOptimizer."""
        return type(self.optimizer.optim if self._zero else self.optimizer).__name__

    def owns(self, param: torch.Tensor) -> bool:
        """Whether this rank updates a parameter: under ZeroRedundancyOptimizer one rank does, and has the state."""
        return not self._zero or bool(self.optimizer._param_to_rank[param] == self.optimizer.rank)

    @property
    def names_of_groups(self) -> list[list[str]]:
        """Names of the parameters of each group."""
        return self._groups

    @property
    def prefix(self) -> str:
        """Of the names of this optimizer's tensors."""
        return f"optim.{self.index}."

    def walk(self) -> None:
        """Read state and groups anew."""
        before = [each.name for each in self.tensors]
        state = self.state
        self.params, self.tensors, self._groups = [], [], []
        self._dicts, self._slots, self._others, self._nested, self._odd = [], [], [], [], {}
        for g, group in enumerate(self.optimizer.param_groups):
            names = [self._name_of(param, g, i) for i, param in enumerate(group["params"])]
            self._groups.append(names)
            self.params += zip(names, group["params"], strict=True)
        self._ids = self._param_ids()
        if self.whole:
            return
        for name, param in self.params:
            if param in state:  # a defaultdict: asking for an absent one would make it
                self._walk_param(name, param, state[param])
        self._judge(before, [each.name for each in self.tensors])

    def _walk_param(self, name: str, param: torch.Tensor, state: dict[Any, Any]) -> None:
        self._dicts.append((state, len(state)))
        for key, value in state.items():
            path = f"{self.prefix}{name}.{key}"
            if isinstance(value, torch.Tensor) and isinstance(key, str):
                self._add(path, value, param, name)
                self._slots.append((state, key, value))
                continue
            self._others.append((name, state, key))
            if isinstance(key, str):
                for inner, tensor in _inside(value, path):
                    self._add(inner, tensor, param, name)
                    self._nested.append(tensor)

    def _add(self, path: str, tensor: torch.Tensor, param: torch.Tensor, param_name: str) -> None:
        self.tensors.append(StateTensor(path, tensor, param, param_name))
        odd = placement_of(tensor, param)
        if odd:
            self._odd[path] = odd

    def _judge(self, before: list[str], after: list[str]) -> None:
        self._moved = self._moved + 1 if before and before != after else 0
        if self._moved >= MOVING:
            self.whole = True
            self.tensors, self._slots, self._others, self._dicts, self._nested, self._odd = [], [], [], [], [], {}

    def changed(self) -> bool:
        """Whether a tensor or a parameter was added, removed or replaced since `walk()`."""
        if self._ids != self._param_ids():
            return True
        if self.whole:
            return False
        if any(len(state) != count for state, count in self._dicts) or any(
            state.get(key) is not tensor for state, key, tensor in self._slots
        ):
            return True
        if len(self.state) > len(self._dicts) and self._unseen():
            return True
        if not self._others:
            self._moved = 0
            return False
        nested = [t for name, state, key in self._others for _, t in _inside(state.get(key), "")]
        same = len(nested) == len(self._nested) and all(a is b for a, b in zip(nested, self._nested, strict=True))
        if same:
            self._moved = 0
        return not same

    def _unseen(self) -> bool:
        seen = {id(state) for state, _ in self._dicts}
        state = self.state
        return any(id(state.get(param)) not in seen for _, param in self.params if param in state)

    def _param_ids(self) -> list[int]:
        return [id(param) for group in self.optimizer.param_groups for param in group["params"]]

    def small(self) -> dict[str, Any]:
        """Groups' options and what of the state is no tensor, as plain data."""
        where = f"optimizer[{self.index}]"
        found: dict[str, Any] = {
            "class": type(self.optimizer).__name__,
            **({"inner": self.kind} if self._zero else {}),
            "params": self._groups,
            "groups": [
                {key: to_tree(v, f"{where}.param_groups[{g}].{key}") for key, v in group.items() if key != "params"}
                for g, group in enumerate(self.optimizer.param_groups)
            ],
        }
        if self.whole:
            names = dict(enumerate(name for name, _ in self.params))
            packed = self.optimizer.state_dict()["state"]
            found["whole"] = {names.get(key, key): to_tree(v, f"{where}.state.{key}") for key, v in packed.items()}
            return found
        other: dict[str, dict[Any, Any]] = {}
        for name, state, key in self._others:
            value = state[key]
            if value is not None and type(value) not in (int, float, bool, str):
                if isinstance(key, str):
                    value = _with_references(value, f"{self.prefix}{name}.{key}")
                value = to_tree(value, f"{where}.state.{name}.{key}")
            other.setdefault(name, {})[key] = value
        free = {
            key: to_tree(value, f"{where}.state.{key}")
            for key, value in self.state.items()
            if not isinstance(key, torch.Tensor)
        } if len(self.state) != len(self._dicts) else {}  # fmt: skip
        for field, value in (("other", other), ("free", free), ("odd", self._odd)):
            if value:
                found[field] = value
        return found


def placement_of(tensor: torch.Tensor, param: torch.Tensor) -> dict[str, Any] | None:
    """Where a state tensor lies, if not as its parameter does; None for the usual: same device, and sharded as the
    parameter is when it has the parameter's shape."""
    odd: dict[str, Any] = {}
    if tensor.device.type != param.device.type:
        odd["device"] = tensor.device.type
    like = is_dtensor(param) and tensor.dim() > 0 and tensor.shape == param.shape
    if is_dtensor(tensor):
        placements = [_spell(each) for each in tensor.placements]
        usual = like and placements == [_spell(each) for each in param.placements]  # type: ignore[attr-defined]
        if not usual:
            odd["placements"] = placements
            odd["shape"] = list(tensor.shape)
    elif is_dtensor(param) and tensor.dim() > 0 and tensor.shape == plain(param, "").shape:
        odd["plain"] = True
    return odd or None


def _spell(placement: Any) -> list[Any]:
    """A DTensor placement as plain data: kind, dimension, split factor."""
    if placement.is_replicate():
        return ["replicate"]
    if placement.is_partial():
        return ["partial", placement.reduce_op]
    return ["shard", placement.dim, getattr(placement, "split_factor", 1)]


def _inside(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors within a container, with their names."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _inside(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _inside(item, f"{path}.{i}")


def _with_references(value: object, path: str) -> object:
    """`value` with each tensor within replaced by a reference to its name."""
    if isinstance(value, torch.Tensor):
        return {KIND: "reference", "value": path}
    if type(value) is dict:
        return {key: _with_references(item, f"{path}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        items = [_with_references(item, f"{path}.{i}") for i, item in enumerate(value)]  # type: ignore[arg-type,var-annotated]
        return items if type(value) is list else tuple(items)
    return value
