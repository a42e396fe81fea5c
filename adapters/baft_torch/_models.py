"""The names of a model's tensors, and where each one hangs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from baft_torch._tensors import is_dtensor
from baftd.errors import UsageError

__all__ = ["ModelLike", "ModelTree", "Named"]

ModelLike: TypeAlias = "nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]"

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attribute names that torch.compile and activation checkpointing put into a tensor's path."""


@dataclass
class Named:
    """One tensor of a model under the name by which it is saved."""

    name: str
    tensor: torch.Tensor
    replicated: bool = False
    """Every rank of the job (or of the pipeline stage) holds the same elements: DDP."""
    ranged: bool = True
    """Its name means the same tensor on every rank, so its place in the whole may be declared."""


@dataclass
class _Root:
    prefix: str
    module: nn.Module
    replicated: bool
    ignored: frozenset[str]
    ranged: bool
    staged: bool


class ModelTree:
    """All parameters, persistent buffers and extra states of the attached modules.

    Parameters are kept as the objects they were outside of forward: in it, FSDP2 puts unsharded ones in their place.
    """

    def __init__(self, models: ModelLike, schedule: Any = None, *, world: int = 1) -> None:
        """Raises UsageError for what is not a module, or a module given twice."""
        stages = _stage_indices(schedule)
        self._world = world
        self._roots = [self._root(prefix, module, stages) for prefix, module in _prefixes(models, stages)]
        self._parameters: dict[str, Named] = {}
        self._holders: list[tuple[dict[str, Any], int]] = []
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._extra: list[tuple[str, nn.Module]] = []
        self._buffers: list[tuple[str, dict[str, Any], str, bool]] = []
        self.walk()

    def walk(self) -> None:
        """Read the modules anew: call it outside of forward, when `changed()`."""
        before, self._parameters = self._parameters, {}
        self._holders, self._slots, self._extra, self._buffers = [], [], [], []
        for root in self._roots:
            for path, module in root.module.named_modules(remove_duplicate=False):
                self._visit(root, path, module, before)

    def _visit(self, root: _Root, path: str, module: nn.Module, before: dict[str, Named]) -> None:
        where = ".".join(part for part in path.split(".") if part and part not in _WRAPPERS)
        where = f"{root.prefix}{where}." if where else root.prefix
        for holder in (module._parameters, module._buffers, module._modules):
            self._holders.append((holder, len(holder)))
        for key, held in module._parameters.items():
            if held is None:
                continue
            parameter: torch.Tensor = held
            name = where + key
            known = before.get(name)
            if known is not None and is_dtensor(known.tensor) and not is_dtensor(parameter):
                parameter = known.tensor  # unsharded for a while; the sharded one comes back
            else:
                self._slots.append((module._parameters, key, parameter))
            replicated = root.replicated and f"{path}.{key}".lstrip(".") not in root.ignored
            self._parameters[name] = Named(name, parameter, replicated, root.ranged)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                self._buffers.append((where + key, module._buffers, key, root.ranged))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._extra.append((where.rstrip("."), module))

    def changed(self) -> bool:
        """Whether a parameter or a buffer was added, removed or replaced since `walk()`."""
        return any(len(holder) != count for holder, count in self._holders) or any(
            holder.get(key) is not tensor and not (is_dtensor(tensor) and not is_dtensor(holder.get(key)))
            for holder, key, tensor in self._slots
        )

    def parameters(self) -> list[Named]:
        """Every parameter under each of its names (tied ones have several)."""
        return list(self._parameters.values())

    def buffers(self) -> Iterator[Named]:
        """Persistent buffers as they are now: forward may replace them."""
        for name, holder, key, ranged in self._buffers:
            tensor = holder.get(key)
            if tensor is not None:
                yield Named(name, tensor, False, ranged and is_dtensor(tensor))

    def extra_states(self) -> dict[str, Any]:
        """What modules with `get_extra_state` return, by module."""
        return {name: module.get_extra_state() for name, module in self._extra}

    def set_extra_states(self, states: Mapping[str, Any]) -> list[str]:
        """Give the states back; returns the names in `states` that no module has."""
        for name, module in self._extra:
            if name in states:
                module.set_extra_state(states[name])
        return sorted(set(states) - {name for name, _ in self._extra})

    def _root(self, prefix: str, module: nn.Module, stages: dict[int, int]) -> _Root:
        if not isinstance(module, nn.Module):
            raise UsageError(f"model {prefix.rstrip('.')!r} is a {type(module).__name__}, not a torch.nn.Module.")
        staged = id(module) in stages
        ignored: frozenset[str] = frozenset()
        replicated = False
        while True:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                replicated = staged or module.process_group.size() == self._world
                ignored = frozenset(module.parameters_to_ignore)
                module = module.module
            elif isinstance(module, nn.parallel.DataParallel):
                module = module.module
            elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
                module = module._orig_mod  # type: ignore[assignment]
            else:
                return _Root(prefix, module, replicated, ignored, staged or _mesh_covers(module, self._world), staged)


def _mesh_covers(module: nn.Module, world: int) -> bool:
    """Whether the meshes of the module's DTensors span all ranks.

    Where they do not, tensors of one name on two ranks may be different tensors (two stages that both count their
    layers from 0), and saying which part of a whole they are would make them replicas of each other.
    """
    return all(p.device_mesh.size() == world for p in module.parameters() if is_dtensor(p))


def _prefixes(models: ModelLike, stages: dict[int, int]) -> list[tuple[str, nn.Module]]:
    if isinstance(models, nn.Module):
        items: list[tuple[str, nn.Module]] = [("", models)]
    elif isinstance(models, Mapping):
        items = [(f"{key}.", module) for key, module in models.items()]
    elif isinstance(models, Sequence):
        items = [("" if len(models) == 1 else f"{i}.", module) for i, module in enumerate(models)]
    else:
        raise UsageError(f"model is a {type(models).__name__}, not a torch.nn.Module, a list or a dict of them.")
    if len({id(module) for _, module in items}) != len(items):
        raise UsageError("one module was given to attach() twice.")
    return [
        (f"model.stage{stages[id(module)]}." if id(module) in stages else f"model.{prefix}", module)
        for prefix, module in items
    ]


def _stage_indices(schedule: Any) -> dict[int, int]:
    """Index of the pipeline stage by the id of its module, from a schedule of torch.distributed.pipelining."""
    if schedule is None:
        return {}
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    found = {
        id(stage.submod): stage.stage_index for stage in stages if isinstance(getattr(stage, "submod", None), nn.Module)
    }
    if not found:
        raise UsageError(
            f"schedule is a {type(schedule).__name__}, in which no pipeline stage can be found.",
            hint="Give attach() a schedule of torch.distributed.pipelining, or leave schedule= out.",
        )
    return found
