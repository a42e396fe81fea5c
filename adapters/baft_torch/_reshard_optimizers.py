"""Optimizers in another layout: state follows its parameter, whichever optimizer of whichever rank held it.

A state tensor whose whole has the shape of the whole parameter is cut as the live parameter is, and is a DTensor where
that is one. Any other (a step count, the factors of Adafactor) is taken whole, as all ranks that saved it agree.
Options come from the groups that held the parameters, and must agree too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from baft_torch._common import agreed
from baft_torch._dtypes import dtype_of
from baft_torch._layout import whole
from baft_torch._optimizers import OptimizerTree
from baft_torch._placements import Part
from baft_torch._restore import install, placement, with_tensors
from baft_torch._saved_state import Place, SavedParam, SavedState, by_ranks, param_base
from baft_torch._small import from_tree
from baft_torch._state import TrainingState
from baft_torch._targets import Reader, Target
from baft_torch._tensors import is_dtensor, plain
from baftd.checkpoint.reshard import Problem, WholeTensor
from baftd.checkpoint.state_tree import encode

__all__ = ["TreePlan", "plan_tree"]


@dataclass
class TreePlan:
    """What one live optimizer is given."""

    tree: OptimizerTree
    tensors: dict[str, dict[Any, Target]] = field(default_factory=dict)
    """By parameter and key."""
    others: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """The same, as saved; references hold keys of `tensors`."""
    options: list[Mapping[str, Any]] = field(default_factory=list)
    """Of each group, as saved."""
    free: Mapping[Any, Any] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    """Base names of saved tensors that are the same as others that are taken."""

    def targets(self) -> Iterable[Target]:
        """All of them."""
        return (target for keys in self.tensors.values() for target in keys.values())

    def apply(self, reader: Reader) -> None:
        """Read the state and give it to the optimizer."""
        values: dict[str, dict[Any, Any]] = {}
        for name in {**self.tensors, **self.others}:
            tensors = {key: target.fill(reader) for key, target in self.tensors.get(name, {}).items()}
            others = self.others.get(name, {})
            nested = {key for value in others.values() for key in _keys_in(value)}
            values[name] = {key: tensor for key, tensor in tensors.items() if key not in nested}
            values[name].update({key: with_tensors(value, tensors.__getitem__) for key, value in others.items()})
        install(self.tree, values, self.options, self.free)
        self.tree.walk()


def plan_tree(saved: SavedState, state: TrainingState, tree: OptimizerTree) -> tuple[TreePlan, list[str]]:
    """What a live optimizer is given, and one sentence for each thing that keeps it from it."""
    plan = TreePlan(tree)
    what = f"optimizer {tree.index}"
    if tree.whole:
        return plan, [f"{what} ({type(tree.optimizer).__name__}) is saved as one piece, which cannot be cut"]
    problems: list[str] = []
    found: dict[str, list[SavedParam]] = {}
    stages = tuple(state.stages)
    names = state.by_name()
    for name, param in tree.params:
        base = param_base(name, tree.index, stages)
        item = names.get(f"model.{name}") or names.get(f"{tree.prefix}{name}")
        names_of = () if item is None else (item.entry.name, *item.entry.aliases)
        bases = [param_base(n.removeprefix("model."), tree.index, stages) for n in names_of]
        params = saved.params(name, base)
        for other in saved.tied(base, bases):
            if params:
                problems += _plan_tied(plan, saved, params, saved.params(other, other))
            else:
                params = saved.params(other, other)
        places = [place for each in params for place in each.places]
        if not places:
            problems.append(f"{what} has the parameter {name}, which no saved optimizer had")
            continue
        kinds = {place.kind for place in places} - {tree.kind}
        if kinds:
            problems.append(f"{name} was held by {' and '.join(sorted(kinds))} and is held by {tree.kind}")
            continue
        found[name] = params
        if tree.owns(param):
            problems += _plan_param(plan, saved, state, name, param, params)
    problems += _plan_options(plan, found, what)
    problems += _plan_free(plan, saved, found, what)
    return plan, problems


# ---------------------------------------------------------------- state


def _plan_param(
    plan: TreePlan, saved: SavedState, state: TrainingState, name: str, param: torch.Tensor, params: list[SavedParam]
) -> list[str]:
    problems: list[str] = []
    tree = plan.tree
    for key in dict.fromkeys(key for each in params for key in each.keys):
        first = next(each for each in params if key in each.keys)
        base = first.keys[key]
        asked = first.exact[key] if saved.exact and first.name == name else base
        there = saved.tensors.look_up(asked)
        if isinstance(there, Problem):
            problems.append(saved.kept_by(base) or str(there))
            continue
        path = f"{tree.prefix}{name}.{key}"
        odd = next((each.odd[key] for each in params if key in each.odd), {})
        # A plain tensor of its sharded parameter's local shape is cut as that is; one element has no parts.
        local = all(each.local.get(key, True) for each in params)
        if not local and prod(there.shape) != 1 and saved.kept_by(base):
            problems.append(saved.kept_by(base))
            continue
        target = _target(saved, state, path, asked, param, there, {**odd, "plain": local and bool(odd.get("plain"))})
        if isinstance(target, str):
            problems.append(target)
        else:
            plan.tensors.setdefault(name, {})[key] = target
    for key in dict.fromkeys(key for each in params for key in each.others):
        values: dict[int, Any] = {}
        for each in params:
            values.update(each.others.get(key, {}))
        if not agreed(values):
            problems.append(f"{name} has another {key!r} on each of {by_ranks(values)}")
            continue
        plan.others.setdefault(name, {})[key] = value = next(iter(values.values()))
        known = {known for each in params for known in each.keys}
        problems += [
            f"small state refers to {inner!r} of the state of {name}, a tensor that nobody saved"
            for inner in sorted(_keys_in(value) - known)
        ]
    return problems


def _plan_tied(plan: TreePlan, saved: SavedState, taken: list[SavedParam], other: list[SavedParam]) -> list[str]:
    """A live parameter was saved as two: their state must be the same, since only one can be taken."""
    problems = []
    keys = {key: base for each in taken for key, base in each.keys.items()}
    for each in other:
        for key, base in each.keys.items():
            plan.tied.add(base)
            if key not in keys or not saved.same(keys[key], base):
                problems.append(f"{taken[0].base} and {each.base} are one parameter here, and their {key} differ")
    return problems


def _target(
    saved: SavedState,
    state: TrainingState,
    path: str,
    asked: str,
    param: torch.Tensor,
    there: WholeTensor,
    odd: Mapping[str, Any],
) -> Target | str:
    """The tensor to be made for a state tensor, or why there can be none."""
    dtype = dtype_of(there.dtype)
    if dtype is None:
        return f"{path} is of type {there.dtype}, which torch {torch.__version__} lacks"
    shape = there.shape
    device = torch.device("cpu") if odd.get("device") == "cpu" else plain(param, path).device

    def target(make: Any, parts: Iterable[Part]) -> Target:
        return Target.of(
            path, make, parts, asked=asked, dtype=there.dtype, shape=shape, itemsize=dtype.itemsize,
        )  # fmt: skip

    held = state.held_of_state(param, shape)
    if shape and not held.problem and shape == state.held_of(param).shape:
        like = plain(param, path) if odd.get("plain") else param.detach()
        if is_dtensor(like) and like.device_mesh.device_type != device.type:
            return f"{path} lay on the {device.type}, its parameter is a DTensor on {like.device_mesh.device_type}"
        return target(lambda: torch.empty_like(like, dtype=dtype, device=device), held.parts)
    if is_dtensor(param) and _is_distributed(saved, asked, param, shape, odd):
        shell = _shell(param, shape, dtype, odd)
        cut = state.models.layout.held_of_state(path, shell, state.held_of(param), tuple(param.shape))
        return target(lambda: shell, cut.parts)
    if held.problem and not is_dtensor(param) and prod(shape) != 1:
        return f"tensor {path!r} cannot be taken over: {held.problem}"
    return target(lambda: torch.empty(shape, dtype=dtype, device=device), whole(shape, declared=False).parts)


def _is_distributed(
    saved: SavedState, asked: str, param: torch.Tensor, shape: tuple[int, ...], odd: Mapping[str, Any]
) -> bool:
    """Whether state of another shape than its DTensor parameter must be a DTensor, too.

    It must where it was one, and where its parameter was a plain tensor: an optimizer derives such state from the
    gradient, and a DTensor and a plain tensor with more than one element do not mix. Where the parameter was a DTensor
    and this was not, the optimizer wanted it so.
    """
    return "placements" in odd or (prod(shape) > 1 and not saved.was_cut(asked))


def _shell(param: Any, shape: tuple[int, ...], dtype: torch.dtype, odd: Mapping[str, Any]) -> torch.Tensor:
    """An empty DTensor that is cut where the live parameter is cut and the saved state was, else replicated."""
    from torch.distributed.tensor import Replicate, empty

    spelled = [placement(each) for each in odd.get("placements", ())]
    # `is_shard()` is false of the strided ones, which are replicated then: correct, and these tensors are small.
    cut = {each.dim for each in spelled if each.is_shard()}
    sizes = tuple(param.shape)
    placements = [
        each if each.is_shard() and each.dim in cut and shape[each.dim] == sizes[each.dim] else Replicate()
        for each in param.placements
    ]
    return empty(*shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)


# ---------------------------------------------------------------- options, and what hangs on no parameter


def _plan_options(plan: TreePlan, found: Mapping[str, list[SavedParam]], what: str) -> list[str]:
    """Options of each live group: those of the saved groups that held its parameters."""
    problems: list[str] = []
    named = iter(plan.tree.params)
    for g, group in enumerate(plan.tree.optimizer.param_groups):
        names = [next(named)[0] for _ in group["params"]]
        places = [place for name in names for each in found.get(name, ()) for place in each.places]
        if not places:
            plan.options.append({})  # an empty group keeps its own
            continue
        own = {key: group[key] for key in _OF_LAYOUT if key in group}
        plan.options.append({**from_tree(_told(places[0])), **own})
        first = encode(_told(places[0]))
        other = next((place for place in places if encode(_told(place)) != first), None)
        if other is not None:
            problems.append(f"{what}, group {g}: {_said_apart(places[0], other)}")
    return problems


_OF_LAYOUT = ("param_names",)
"""Options of a group that say which parameters it has: the live ones stay."""


def _told(place: Place) -> dict[str, Any]:
    """What a saved group's options say of any group."""
    return {key: value for key, value in place.options.items() if key not in _OF_LAYOUT}


def _said_apart(a: Place, b: Place) -> str:
    """Which options of two saved groups differ."""
    one, other = _told(a), _told(b)
    keys = [
        key
        for key in {**one, **other}
        if key not in one or key not in other or encode(one[key]) != encode(other[key])
    ]
    said = ", ".join(f"{key} ({one.get(key)!r} and {other.get(key)!r})" for key in keys[:4])
    return f"its parameters came from groups whose options differ: {said} ({a}; {b})"


def _plan_free(plan: TreePlan, saved: SavedState, found: Mapping[str, list[SavedParam]], what: str) -> list[str]:
    """State under keys that are no parameters: the same in all optimizers that held the parameters."""
    held = dict.fromkeys((p.rank, p.optimizer) for params in found.values() for each in params for p in each.places)
    values = {n: saved.smalls[rank]["optimizers"][i].get("free", {}) for n, (rank, i) in enumerate(held)}
    if not values:
        return []
    if not agreed(values):
        return [f"{what}: state that belongs to no parameter differs among the optimizers that held its parameters"]
    plan.free = values[0]
    return []


def _keys_in(value: object) -> set[str]:
    """Keys of the tensors that a value of small state refers to."""
    found: set[str] = set()

    def note(key: str) -> torch.Tensor:
        found.add(key)
        return torch.empty(0)

    with_tensors(value, note)
    return found
