"""Loading a verified image into live models and optimizers, in place.

First everything saved is compared with everything alive, and all differences are named at once; only then is the first
byte written. Optimizer state that does not exist yet is made by the optimizer's own `load_state_dict`, from fresh
tensors that already hold the saved bytes: no dummy update, and nothing points into the image.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from baft_torch._dtypes import dtype_of
from baft_torch._layout import parts_of_small
from baft_torch._optimizers import OptimizerTree
from baft_torch._small import KIND, from_tree
from baft_torch._state import Item, TrainingState
from baft_torch._tensors import is_dtensor, plain, reduced
from baftd.checkpoint.ranges import row_major
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import FormatError, ModelMismatch

__all__ = ["Image", "differences", "install", "load", "model_items", "owner_of", "placement", "with_tensors"]


class Image(Protocol):
    """What is needed of `baft_client.restore.RestoredImage`."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Saved tensors by name."""

    @property
    def small(self) -> Any:
        """Decoded small state."""

    def copy_into(self, name: str, address: int, nbytes: int) -> None:
        """Copy a tensor's bytes to `address`, verified while copying."""

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """A fresh, verified copy of a tensor's bytes."""


@dataclass(frozen=True)
class _Rows:
    """What was saved of one tensor: usually one entry, several where the rank held separate ranges of the whole. They
    lie in the local tensor one behind the other along dimension 0."""

    entries: tuple[tuple[str, TensorEntry], ...]
    """With their stored names, by range."""

    @property
    def first(self) -> TensorEntry:
        """All have its dtype and its shape but for dimension 0."""
        return self.entries[0][1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor."""
        if len(self.entries) == 1:
            return self.first.shape
        return (sum(entry.shape[0] for _, entry in self.entries), *self.first.shape[1:])

    def of(self, row: Item) -> tuple[str, TensorEntry]:
        """Stored name and entry of what belongs into a row of the live tensor, whose rows are the same."""
        if len(self.entries) == 1:
            return self.entries[0]
        return next(each for each in self.entries if each[1].ranges == row.entry.ranges)

    def like(self, param: Item | None) -> _Rows:
        """In the order in which a parameter's local tensor holds the same ranges, where there are several."""
        order = [] if param is None else [row.entry.ranges for row in param.rows]
        if len(self.entries) == 1 or {entry.ranges for _, entry in self.entries} != set(order):
            return self
        return _Rows(tuple(sorted(self.entries, key=lambda each: order.index(each[1].ranges))))


@dataclass(frozen=True)
class _Saved:
    """Saved tensors by every name they have, those of optimizers among them."""

    image: Image
    tensors: dict[str, _Rows]

    @classmethod
    def of(cls, image: Image) -> _Saved:
        found: dict[str, list[tuple[str, TensorEntry]]] = {}
        for stored, entry in image.entries.items():
            for name in (entry.name, *entry.aliases):
                found.setdefault(name, []).append((stored, entry))
        return cls(image, {n: _Rows(tuple(sorted(e, key=lambda each: each[1].ranges or ()))) for n, e in found.items()})


def load(image: Image, state: TrainingState, small: Mapping[str, Any]) -> None:
    """Put the image's tensors and the optimizers' small state into place.

    Raises ModelMismatch naming every difference (nothing is changed then), VerificationFailed for bytes that are not
    what their digest says, FormatError for small state that makes no sense.
    """
    state.rebuild()
    found = differences(image, state, small)
    if found:
        raise ModelMismatch(
            f"the checkpoint is not of this model and optimizer: {'; '.join(found)}.",
            hint="Start with the model that was saved; if it is the same one laid out in another way, "
            "resume(reshard=True) cuts it anew; or start with resume(fresh=True) under another job name.",
        )
    saved = _Saved.of(image)
    trees = small.get("optimizers", [])
    live = model_items(state)
    done: set[int] = set()
    for name, item in live.items():
        if id(item) not in done and name in saved.tensors:
            done.add(id(item))
            for row in item.rows:
                _write(saved, *saved.tensors[name].of(row), row.target(), name)
            _raise_versions(item.live, item.local)
    for tree, described in zip(state.optimizers, trees, strict=True):
        _load_optimizer(saved, tree, described, live)
    unknown = state.models.set_extra_states(from_tree(small.get("modules", {})))
    if unknown:
        raise ModelMismatch(f"extra state was saved of modules that are not in this model: {', '.join(unknown)}.")
    for tree in state.optimizers:
        tree.walk()
    state.rebuild()


def differences(image: Image, state: TrainingState, small: Mapping[str, Any]) -> list[str]:
    """One sentence for each thing that keeps the image from being loaded as it is; call `state.rebuild()` before."""
    saved = _Saved.of(image)
    live = model_items(state)
    return (
        _model_differences(saved, live, state)
        + _moved_parts(saved, live, parts_of_small(small))
        + _optimizer_differences(small.get("optimizers", []), state)
    )


def model_items(state: TrainingState) -> dict[str, Item]:
    """Every live tensor but those of optimizers' states, by its name and its aliases."""
    states = {each.name for tree in state.optimizers for each in tree.tensors}
    return {name: item for name, item in state.by_name().items() if name not in states}


def _model_differences(saved: _Saved, live: Mapping[str, Item], state: TrainingState) -> list[str]:
    found: list[str] = []
    prefixes = tuple(tree.prefix for tree in state.optimizers) or ("optim.",)
    for name in sorted(set(saved.tensors) - set(live)):
        if name.startswith("optim.") and not name.startswith(prefixes):
            continue  # of an optimizer that is not attached: said once, by its number
        if not name.startswith(prefixes):
            found.append(f"{name} was saved but is not in the model")
    for name in sorted(set(live) - set(saved.tensors)):
        found.append(f"{name} is in the model but was not saved")
    for name in sorted(set(live) & set(saved.tensors)):
        found += _tensor_differences(name, saved.tensors[name], live[name])
    return found


def _tensor_differences(name: str, rows: _Rows, item: Item) -> list[str]:
    saved, live = rows.first, item.entry
    if saved.dtype != live.dtype:
        return [f"{name} was saved as {saved.dtype} and is {live.dtype}"]
    whole, now = saved.global_shape, live.global_shape
    if whole is not None and now is not None and whole != now:
        return [f"{name} was saved with shape {list(whole)} and has {list(now)}"]
    if len(rows.entries) > 1 or len(item.rows) > 1:
        was, now_held = ([each.ranges for each in some] for some in ([e for _, e in rows.entries], _entries(item)))
        if was != now_held:
            return [f"{name} was saved as the parts {was} of the whole and is {now_held}"]
        return []
    if saved.shape != live.shape:
        part = " on this rank" if whole is not None else ""
        return [f"{name} was saved with shape {list(saved.shape)}{part} and has {list(live.shape)}"]
    if saved.ranges is not None and live.ranges is not None and saved.ranges != live.ranges:
        return [f"{name} was saved as the part {list(saved.ranges)} of the whole and is {list(live.ranges)}"]
    return []


def _moved_parts(saved: _Saved, live: Mapping[str, Item], parts: Mapping[str, Any]) -> list[str]:
    """Parts of wholes that are not declared, then or now, say nothing by their entries: of another mesh of the same
    size a rank may hold another part of the same shape."""
    found: list[str] = []
    for name in sorted(set(live) & set(saved.tensors)):
        rows, held = saved.tensors[name], live[name].held
        was = parts.get(rows.first.name)
        if was is None and not held.declared and held.cut and rows.first.global_shape is not None:
            boxes = [[list(span) for span in entry.ranges or ()] for _, entry in rows.entries]
            was = [list(rows.first.global_shape), boxes]
        if was is not None and not held.problem and held.flat is None and was != held.told:
            found.append(f"{name} was saved as the part {was[1]} of {was[0]} and is {held.told[1]} of {held.told[0]}")
    return found


def _entries(item: Item) -> list[TensorEntry]:
    return sorted((row.entry for row in item.rows), key=lambda entry: entry.ranges or ())


def _optimizer_differences(trees: Any, state: TrainingState) -> list[str]:
    if not isinstance(trees, list) or not all(isinstance(each, dict) for each in trees):
        raise FormatError("small state holds no list of optimizers.")
    if len(trees) != len(state.optimizers):
        return [f"{len(trees)} optimizers were saved and {len(state.optimizers)} are attached"]
    found: list[str] = []
    for tree, described in zip(state.optimizers, trees, strict=True):
        what = f"optimizer {tree.index}"
        kind = type(tree.optimizer).__name__
        if described["class"] != kind:
            found.append(f"{what} was {described['class']} and is {kind}")
        groups = len(tree.optimizer.param_groups)
        if len(described["groups"]) != groups:
            found.append(f"{what} had {len(described['groups'])} parameter groups and has {groups}")
        was = {name for group in described["params"] for name in group}
        now = {name for name, _ in tree.params}
        found += [f"{what} had the parameter {name}, which it has no more" for name in sorted(was - now)]
        found += [f"{what} has the parameter {name}, which it had not" for name in sorted(now - was)]
        if was == now and len(described["groups"]) == groups:
            found += _moved_between_groups(what, tree.names_of_groups, described["params"])
    return found


def _moved_between_groups(what: str, now: Sequence[Sequence[str]], was: Sequence[Sequence[str]]) -> list[str]:
    """Parameters whose options would be another group's."""
    group_of = {name: g for g, names in enumerate(was) for name in names}
    return [
        f"{what} has the parameter {name} in group {g}, and had it in group {group_of[name]}"
        for g, names in enumerate(now)
        for name in names
        if group_of[name] != g
    ]


# ---------------------------------------------------------------- bytes


def _write(saved: _Saved, stored: str, entry: TensorEntry, target: torch.Tensor, name: str) -> None:
    """Copy saved bytes into the memory of `target`, whatever its order and device."""
    target = reduced(target, name)
    if entry.nbytes == 0:
        return
    direct = target.device.type == "cpu" and not target.is_conj() and not target.is_neg()
    if direct and tuple(target.stride()) == _strides(entry):
        saved.image.copy_into(stored, target.data_ptr(), entry.nbytes)
    else:
        with torch.no_grad():
            target.copy_(_fresh(saved, _Rows(((stored, entry),)), torch.device("cpu")))


def _raise_versions(live: torch.Tensor, local: torch.Tensor) -> None:
    """Memory was written past the framework: autograd and the witnesses of a snapshot shall see it."""
    for tensor in (live, local):  # of a DTensor the local tensor counts for itself
        if not tensor.is_inference():
            increment_version(tensor)


def _strides(entry: TensorEntry) -> tuple[int, ...]:
    return entry.strides if entry.strides is not None else row_major(entry.shape)


def _fresh(saved: _Saved, rows: _Rows, device: torch.device) -> torch.Tensor:
    """A new tensor with the saved elements, in the saved order."""
    first = rows.first
    dtype = dtype_of(first.dtype)
    if dtype is None:
        raise FormatError(f"tensor {first.name!r} is of type {first.dtype}, which torch {torch.__version__} lacks.")
    strides = _strides(first) if len(rows.entries) == 1 else row_major(rows.shape)
    made = torch.empty_strided(rows.shape, strides, dtype=dtype)
    address = made.data_ptr()
    for stored, entry in rows.entries:
        if entry.nbytes:
            saved.image.copy_into(stored, address, entry.nbytes)
            address += entry.nbytes
    return made.to(device)


# ---------------------------------------------------------------- optimizers


def _load_optimizer(
    saved: _Saved, tree: OptimizerTree, described: Mapping[str, Any], live: Mapping[str, Item]
) -> None:
    """Give an optimizer its options and its state, made where it is missing, in place where it exists."""
    state = tree.state
    odd = described.get("odd", {})
    params = dict(tree.params)
    values: dict[str, dict[Any, Any]] = {}
    if "whole" in described:
        tree.whole = True
        values = {name: from_tree(value) for name, value in described["whole"].items()}
    else:
        nested = _referenced(described.get("other", {}))
        for name, rows in saved.tensors.items():
            owner = owner_of(name, tree.prefix, params)
            if owner is not None and name not in nested:
                key = name[len(tree.prefix) + len(owner) + 1 :]
                existing = state[params[owner]].get(key) if params[owner] in state else None
                ordered = rows.like(live.get(f"model.{owner}"))
                values.setdefault(owner, {})[key] = _tensor(
                    saved, ordered, params[owner], odd.get(name), existing, name
                )
        for owner, others in described.get("other", {}).items():
            for key, value in others.items():
                values.setdefault(owner, {})[key] = _resolve(value, saved, params[owner], odd)
    install(tree, values, [from_tree(options) for options in described["groups"]], described.get("free", {}))


def install(
    tree: OptimizerTree,
    values: Mapping[str, Mapping[Any, Any]],
    options: Sequence[Mapping[str, Any]],
    free: Mapping[Any, Any],
) -> None:
    """Give an optimizer its state (`values`: of each parameter by name), the options of each of its groups and what
    hangs on no parameter (`free`, as saved), through its own `load_state_dict`."""
    optimizer = tree.optimizer
    params = dict(tree.params)
    lent = [{k: v for k, v in group.items() if isinstance(v, torch.Tensor)} for group in optimizer.param_groups]
    numbers = {name: number for number, (name, _) in enumerate(tree.params)}
    groups = _groups(optimizer, options)
    state: dict[Any, Any] = {numbers[owner]: dict(value) for owner, value in values.items() if owner in numbers}
    state.update({key: from_tree(value) for key, value in free.items()})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _keep_exact(tree.state, {params[owner]: value for owner, value in values.items() if owner in params})
    _keep_lent(optimizer, lent)


def owner_of(name: str, prefix: str, params: Container[str]) -> str | None:
    """The parameter to whose state a saved tensor belongs: the longest name that fits."""
    if not name.startswith(prefix):
        return None
    rest = name[len(prefix) :]
    end = rest.rfind(".")
    while end > 0:
        if rest[:end] in params:
            return rest[:end]
        end = rest.rfind(".", 0, end)
    return None


def _referenced(value: object) -> set[str]:
    """Names of tensors that lie inside containers: they are reached from there."""
    if isinstance(value, dict):
        if value.get(KIND) == "reference":
            return {value["value"]}
        return {name for item in value.values() for name in _referenced(item)}
    if isinstance(value, list | tuple):
        return {name for item in value for name in _referenced(item)}
    return set()


def _resolve(value: object, saved: _Saved, param: torch.Tensor, odd: Mapping[str, Any]) -> object:
    """A value of small state with references replaced by tensors."""

    def tensor(name: str) -> torch.Tensor:
        if name not in saved.tensors:
            raise FormatError(f"small state refers to a tensor {name!r} that the image does not hold.")
        return _tensor(saved, saved.tensors[name], param, odd.get(name), None, name)

    return with_tensors(value, tensor)


def with_tensors(value: object, tensor: Callable[[str], torch.Tensor]) -> object:
    """A value of small state with each reference to a tensor replaced by what `tensor` gives for its name."""
    if isinstance(value, dict) and value.get(KIND) == "reference":
        return tensor(value["value"])
    if isinstance(value, dict) and KIND not in value:
        return {key: with_tensors(item, tensor) for key, item in value.items()}
    if isinstance(value, list):
        return [with_tensors(item, tensor) for item in value]
    if isinstance(value, tuple):
        return tuple(with_tensors(item, tensor) for item in value)
    return from_tree(value)


def _tensor(
    saved: _Saved, rows: _Rows, param: torch.Tensor, odd: Mapping[str, Any] | None, existing: object, name: str
) -> torch.Tensor:
    """A state tensor with the saved elements: the existing one where it fits, else a fresh one laid out as it was."""
    odd = odd or {}
    if isinstance(existing, torch.Tensor) and is_dtensor(existing) == _was_dtensor(rows, param, odd):
        local = reduced(plain(existing, name), name)
        if tuple(local.shape) == rows.shape and local.dtype == dtype_of(rows.first.dtype) and len(rows.entries) == 1:
            _write(saved, *rows.entries[0], local, name)
            _raise_versions(existing, existing._local_tensor if is_dtensor(existing) else existing)
            return existing
    device = torch.device("cpu") if odd.get("device") == "cpu" else plain(param, name).device
    fresh = _fresh(saved, rows, device)
    if not _was_dtensor(rows, param, odd):
        return fresh
    from torch.distributed.tensor import DTensor

    mesh = param.device_mesh  # type: ignore[attr-defined]
    placements = [placement(each) for each in odd["placements"]] if "placements" in odd else param.placements  # type: ignore[attr-defined]
    shape = torch.Size(odd.get("shape", param.shape))
    stride = row_major(shape) if "shape" in odd else param.stride()
    return DTensor.from_local(fresh, mesh, placements, run_check=False, shape=shape, stride=stride)


def _was_dtensor(rows: _Rows, param: torch.Tensor, odd: Mapping[str, Any]) -> bool:
    """Whether a state tensor was a DTensor when it was saved (see `_optimizers.placement_of`)."""
    if not is_dtensor(param) or odd.get("plain"):
        return False
    return "placements" in odd or (len(rows.shape) > 0 and rows.shape == tuple(plain(param, "").shape))


def placement(spelled: Any) -> Any:
    """A DTensor placement from plain data (see `_optimizers.placement_of`)."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kind = spelled[0]
    if kind == "replicate":
        return Replicate()
    if kind == "partial":
        return Partial(spelled[1])
    return Shard(spelled[1]) if spelled[2] == 1 else _StridedShard(spelled[1], split_factor=spelled[2])


def _groups(optimizer: Any, options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Saved options of each group, with parameters numbered as the live optimizer numbers them."""
    groups = []
    number = 0
    for live, saved in zip(optimizer.param_groups, options, strict=True):
        count = len(live["params"])
        groups.append({**saved, "params": list(range(number, number + count))})
        number += count
    return groups


def _keep_exact(state: Mapping[Any, Any], values: Mapping[torch.Tensor, Mapping[Any, Any]]) -> None:
    """Undo casts: `load_state_dict` turns floating state to its parameter's type, which loses bits of fp32 state of a
    bf16 parameter, and text to the name of a generator."""
    for param, given in values.items():
        loaded = state.get(param)
        if loaded is None:
            continue
        for key, value in given.items():
            now = loaded.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now is not value:
                if now.dtype != value.dtype or now.device != value.device:
                    loaded[key] = value
            elif isinstance(value, dict | list | tuple | str) and _inexact(value, now):
                loaded[key] = value


def _inexact(given: object, now: object) -> bool:
    if isinstance(given, torch.Tensor) and isinstance(now, torch.Tensor):
        return given.dtype != now.dtype or given.device != now.device
    if isinstance(given, str):
        return given != now
    if isinstance(given, dict) and isinstance(now, dict):
        return any(_inexact(value, now.get(key)) for key, value in given.items())
    if isinstance(given, list | tuple) and isinstance(now, list | tuple):
        return any(_inexact(a, b) for a, b in zip(given, now, strict=False))
    return False


def _keep_lent(optimizer: Any, lent: list[dict[str, torch.Tensor]]) -> None:
    """Options that are tensors (a learning rate under compile or capture) stay the objects they were."""
    with torch.no_grad():
        for group, tensors in zip(optimizer.param_groups, lent, strict=True):
            for key, tensor in tensors.items():
                value = group.get(key)
                if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                    tensor.copy_(value)
                elif isinstance(value, int | float) and tensor.dim() == 0:
                    tensor.fill_(value)
                else:
                    continue
                group[key] = tensor
