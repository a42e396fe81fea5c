"""The names of a model's tensors, and where each one hangs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from baft_torch._layout import JobLayout, Origin
from baft_torch._pipeline import Pipeline
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
    origin: Origin


@dataclass
class _Root:
    prefix: str
    module: nn.Module
    origin: Origin
    """Of its parameters."""
    ignored: frozenset[str]
    """Parameters that DistributedDataParallel leaves alone."""
    broadcast: bool
    """DistributedDataParallel copies the buffers of its first rank to all, before each forward."""

    replicas: int | None
    """Ranks that see different data, by DistributedDataParallel or `fully_shard`; None: nobody says."""

    @property
    def alone(self) -> Origin:
        """Of its buffers, and of parameters that are ignored: nobody keeps them equal."""
        return replace(self.origin, replicated=False)


class ModelTree:
    """All parameters, persistent buffers and extra states of the attached modules.

    Parameters are kept as the objects they were outside of forward: in it, FSDP2 puts unsharded ones in their place.
    """

    def __init__(
        self, models: ModelLike, schedule: Any = None, *, world: int = 1, layout: JobLayout | None = None
    ) -> None:
        """`layout`: what the job has said of its ranks (None: nothing). Raises UsageError for what is not a module, a
        module given twice, a layout that does not fit it, or two tensors of one name."""
        self.layout = layout if layout is not None else JobLayout(world=world)
        modules = _modules(models)
        self.pipeline = Pipeline.of([module for _, module in modules], schedule, self.layout)
        self.given = [module for _, module in modules]
        """The modules as they were given to attach(), wrappers included."""
        self._roots = [self._root(prefix, module) for prefix, module in modules]
        self._parameters: dict[str, Named] = {}
        self._holders: list[tuple[dict[str, Any], int]] = []
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._extra: list[tuple[str, nn.Module]] = []
        self._buffers: list[tuple[str, dict[str, Any], str, Origin]] = []
        self.broadcast_buffers: list[str] = []
        """Buffers that DistributedDataParallel copies from its first rank to all, before each forward."""
        self.shard()
        self.walk()

    def shard(self) -> None:
        """Have `fully_shard` give up whole parameters that a forward pass (a first evaluation) has left in the modules:
        they are no state, and what is loaded into the shards would not be seen in them. Call it outside of forward."""
        for root in self._roots:
            for module in root.module.modules():
                if callable(getattr(module, "_get_fsdp_state", None)):
                    module.reshard()  # type: ignore[operator]

    def walk(self) -> None:
        """Read the modules anew: call it outside of forward, when `changed()`."""
        before, self._parameters = self._parameters, {}
        self._holders, self._slots, self._extra, self._buffers = [], [], [], []
        self.broadcast_buffers = []
        self._paths: dict[str, str] = {}
        for root in self._roots:
            for path, module in root.module.named_modules(remove_duplicate=False):
                self._visit(root, path, module, before)

    def _visit(self, root: _Root, path: str, module: nn.Module, before: dict[str, Named]) -> None:
        inner = ".".join(part for part in path.split(".") if part and part not in _WRAPPERS)
        inner = f"{inner}." if inner else ""
        for holder in (module._parameters, module._buffers, module._modules):
            self._holders.append((holder, len(holder)))
        for key, held in module._parameters.items():
            if held is None:
                continue
            parameter: torch.Tensor = held
            name = self._name(root, inner + key, parameter)
            known = before.get(name)
            if known is not None and is_dtensor(known.tensor) and not is_dtensor(parameter):
                parameter = known.tensor  # unsharded for a while; the sharded one comes back
            else:
                self._slots.append((module._parameters, key, parameter))
            ignored = f"{path}.{key}".lstrip(".") in root.ignored
            self._parameters[name] = Named(name, parameter, root.alone if ignored else root.origin)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                name = self._name(root, inner + key, buffer)
                self._buffers.append((name, module._buffers, key, root.alone))
                if root.broadcast and f"{path}.{key}".lstrip(".") not in root.ignored:
                    self.broadcast_buffers.append(name)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._extra.append(((root.prefix + inner).rstrip("."), module))

    def _name(self, root: _Root, path: str, tensor: torch.Tensor) -> str:
        name = self.layout.name(root.prefix, path, tensor, root.origin)
        local = root.prefix + path
        if self._paths.setdefault(name, local) != local:
            raise UsageError(
                f"attach(names=) gives {local!r} and {self._paths[name]!r} of this rank one name, {name!r}.",
                hint="A job-wide name means one tensor: put the number of the layer, the expert or the stage into it.",
            )
        return name

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
        for name, holder, key, origin in self._buffers:
            tensor = holder.get(key)
            if tensor is not None:
                yield Named(name, tensor, origin)

    def extra_states(self) -> dict[str, Any]:
        """What modules with `get_extra_state` return, by module."""
        return {name: module.get_extra_state() for name, module in self._extra}

    def set_extra_states(self, states: Mapping[str, Any]) -> list[str]:
        """Give the states back; returns the names in `states` that no module has."""
        for name, module in self._extra:
            if name in states:
                module.set_extra_state(states[name])
        return sorted(set(states) - {name for name, _ in self._extra})

    @property
    def stages(self) -> tuple[int, ...]:
        """Pipeline stages of this rank, ascending."""
        return tuple(sorted(self.pipeline.stages.values()))

    @property
    def prefixed(self) -> tuple[int, ...]:
        """Stages that stand as "stage<k>." in names: none where `names` makes names that mean the same everywhere."""
        return self.stages if self.layout.names is None else ()

    @property
    def data_parallel(self) -> int | None:
        """Replicas of the job that see different data; None where nobody says."""
        if self.layout.parallel is not None:
            return self.layout.parallel.dp
        if self.layout.world == 1:
            return 1
        for root in self._roots:
            if root.replicas is not None:
                return root.replicas
        return self.pipeline.stage_ranks if self.pipeline.stage_ranks == 1 else None

    def coordinates(self) -> dict[str, int]:
        """Place of this rank on each named axis of the job: as `parallel` says, else on the first device mesh that
        spans all ranks. Smaller meshes do not count: all ranks of a job need the same axes."""
        if self.layout.parallel is not None:
            return self.layout.coordinates
        for named in (*self._parameters.values(), *self.buffers()):
            if is_dtensor(named.tensor):
                mesh = _root_of(named.tensor.device_mesh)
                names, mine = mesh.mesh_dim_names, mesh.get_coordinate()
                if names and mine is not None and mesh.size() == self.layout.world:
                    return {name: int(place) for name, place in zip(names, mine, strict=True)}
        return {}

    def _root(self, prefix: str, module: nn.Module) -> _Root:
        stage = self.pipeline.stage_of(module)
        ranks = self.layout.world if stage is None else self.pipeline.stage_ranks
        prefix = f"model.{prefix}" if stage is None else f"model.stage{stage}."
        ignored: frozenset[str] = frozenset()
        replicated = broadcast = False
        replicas = None
        while True:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                size = replicas = module.process_group.size()
                replicated = size == ranks or ranks is None
                told = self.layout.parallel is not None or self.layout.names is not None
                broadcast = module.broadcast_buffers and size > 1 and (replicated or told)
                ignored = frozenset(module.parameters_to_ignore)
                module = module.module
            elif isinstance(module, nn.parallel.DataParallel):
                module = module.module
            elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
                module = module._orig_mod  # type: ignore[assignment]
            else:
                origin = Origin(stage, replicated, ranks)
                return _Root(prefix, module, origin, ignored, broadcast, replicas or _fsdp_replicas(module))


def _root_of(mesh: Any) -> Any:
    """The mesh of which `mesh` is a part; itself where it is none, or torch does not say."""
    root = getattr(mesh, "_get_root_mesh", None)
    return root() if callable(root) else mesh


def _fsdp_replicas(module: nn.Module) -> int | None:
    """Ranks over which `fully_shard` spreads the data of a module; None for one that it has not touched."""
    readers: list[Any] = [getattr(each, "_get_fsdp_state", None) for each in module.modules()]
    states = [read() for read in readers if callable(read)]
    sizes = [group.mesh_info.mesh.size() for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    return int(max(sizes)) if sizes else None  # experts may be spread over fewer


def _modules(models: ModelLike) -> list[tuple[str, nn.Module]]:
    """The modules given to attach(), each with the prefix of its names (behind "model.")."""
    if isinstance(models, nn.Module):
        items: list[tuple[str, nn.Module]] = [("", models)]
    elif isinstance(models, Mapping):
        items = [(f"{key}.", module) for key, module in models.items()]
    elif isinstance(models, Sequence):
        items = [("" if len(models) == 1 else f"{i}.", module) for i, module in enumerate(models)]
    else:
        raise UsageError(f"model is a {type(models).__name__}, not a torch.nn.Module, a list or a dict of them.")
    for prefix, module in items:
        if not isinstance(module, nn.Module):
            raise UsageError(f"model {prefix.rstrip('.')!r} is a {type(module).__name__}, not a torch.nn.Module.")
    if len({id(module) for _, module in items}) != len(items):
        raise UsageError("one module was given to attach() twice.")
    return items
