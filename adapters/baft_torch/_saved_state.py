"""All that the ranks of another layout saved, put together by base names.

Names differ between layouts in two ways that mean nothing: the number of the pipeline stage that the adapter puts
before a name, and the number of the optimizer that held a parameter. Both are taken out. What is saved of one
parameter by whichever ranks and optimizers is one `SavedParam`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from baft_torch._layout import base_name, parts_of_small
from baft_torch._restore import owner_of
from baft_torch._small import KIND
from baft_torch._targets import Reader
from baftd.checkpoint.ranges import Box, intersection
from baftd.checkpoint.reshard import Problem, SavedSet, SavedTensor
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import FormatError

__all__ = ["Place", "SavedParam", "SavedState", "Shards", "by_ranks"]

_UNNAMED = re.compile(r"group\d+\.\d+")
"""A parameter of no attached module: known by its place in one optimizer."""


class Shards(Reader, Protocol):
    """What is needed of `baft_client.saved.SavedShards`: every saved rank's image."""

    @property
    def world(self) -> int:
        """Ranks that saved."""

    @property
    def step(self) -> int:
        """Boundary at which they did."""

    def entries(self, rank: int) -> Mapping[str, TensorEntry]:
        """Tensors of a rank's image by stored name."""

    def small(self, rank: int) -> Any:
        """Decoded small state of a rank."""

    def same_bytes(self, a: SavedTensor, b: SavedTensor, box: Box) -> bool:
        """Whether two saved tensors hold the same bytes of a box (of the whole tensor) that both have."""


@dataclass(frozen=True)
class Place:
    """Where a saved rank had a parameter: in which group of which optimizer."""

    rank: int
    optimizer: int
    group: int
    kind: str
    """Class of the optimizer; of the one within a ZeroRedundancyOptimizer."""
    options: Mapping[str, Any]
    """Of the group, as saved."""

    def __str__(self) -> str:
        return f"rank {self.rank}, optimizer {self.optimizer}, group {self.group}"


@dataclass
class SavedParam:
    """A parameter and its state, of all ranks that saved it under one name."""

    name: str
    """As saved, without "model."."""
    base: str
    places: list[Place] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    """Of the tensors of its state ("exp_avg", "buf.0") -> the base name of each."""
    exact: dict[str, str] = field(default_factory=dict)
    """The same -> the name under which the first rank saved it."""
    odd: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By key: how a tensor lies that does not lie as its parameter does (see `_optimizers.placement_of`)."""
    local: dict[str, bool] = field(default_factory=dict)
    """By key: on every rank it is a plain tensor of the local shape of a DTensor parameter, and cut as that is."""
    others: dict[Any, dict[int, Any]] = field(default_factory=dict)
    """By key and rank: state that is no tensor. References hold the key of the tensor that is meant."""


class SavedState:
    """Tensors, optimizers and small state of all saved ranks."""

    def __init__(self, shards: Shards, smalls: Mapping[int, Mapping[str, Any]], *, exact: bool = False) -> None:
        """`smalls`: decoded small state by rank. `exact`: both layouts have the same pipeline stages, so that of
        several names that differ in the stage alone the equal one is meant. FormatError for optimizers that make no
        sense."""
        self.shards = shards
        self.smalls = smalls
        self.exact = exact
        self.whole: list[str] = []
        """Optimizers that were saved as one piece, in words."""
        self._bases: dict[str, str] = {}
        self._params: dict[str, dict[str, SavedParam]] = {}
        self._local: list[tuple[int, int, SavedParam, str, str]] = []
        """Entries by rank and place that may be cut as their parameter is: with it, their key, its name."""
        self._owners: dict[str, str] = {}
        """Base name of a state tensor -> of its parameter."""
        self._kept: dict[str, str] | None = None
        self._tied: dict[str, set[str]] = {}
        """Base name of a parameter -> other names of the same tensor."""
        self._equal: set[str] = set()
        """Names of parts that nobody declared, and that ranks with the same part saved equal."""
        entries = {rank: self._read_rank(rank, small) for rank, small in smalls.items()}
        self._declare_equal(entries)
        for rank, at, param, key, like in self._local:
            if param.local[key] and like not in self._equal:
                self._cut(entries[rank], at, like)
        self.tensors = SavedSet.of(
            entries, shards.same_bytes, base=self.base, exact=exact
        )

    def base(self, name: str) -> str:
        """Base name of a saved name, or of a base name."""
        return self._bases.get(name, name)

    def other_names(self, name: str) -> set[str]:
        """Base names under which the saved tensors of that base name are known, too."""
        holders = self.tensors.holders(name)
        return {self.base(n) for holder in holders for n in (holder.entry.name, *holder.entry.aliases)}

    def wanted_name(self, name: str, base: str) -> str:
        """Under which name a live tensor is asked for."""
        return name if self.exact and name in self._bases else base

    def params(self, name: str, base: str) -> list[SavedParam]:
        """What was saved of a parameter: `name` as it is live, without "model."."""
        found = self._params.get(base, {})
        return [found[name]] if self.exact and name in found else list(found.values())

    def tied(self, base: str, others: Iterable[str]) -> list[str]:
        """Other base names of a parameter that saved optimizers held: of those that the live one has (`others`) and
        those that saved ranks knew."""
        names = dict.fromkeys((*others, *sorted(self._tied.get(base, ()))))
        return [name for name in names if name != base and name in self._params]

    def same(self, a: str, b: str) -> bool:
        """Whether the tensors of two base names are equal in every byte, or one and the same. False where the saved
        ranks do not agree about one of them."""
        one, other = self.tensors.look_up(a), self.tensors.look_up(b)
        if isinstance(one, Problem) or isinstance(other, Problem):
            return False
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        for part in one.parts:
            for peer in other.near(part.box):
                box = intersection(part.box, peer.box)
                if box is None or peer.holders[0] in part.holders:
                    continue
                if not self.shards.same_bytes(part.holders[0], peer.holders[0], box):
                    return False
        return True

    def was_cut(self, name: str) -> bool:
        """Whether the parameter of a tensor of optimizer state was sharded where it was saved."""
        return any(
            holder.entry.ranges is not None and holder.entry.shape != holder.entry.global_shape
            for holder in self.tensors.holders(f"model.{self._owners.get(self._bases.get(name, name), '')}")
        )

    def base_of(self, name: str, rank: int) -> str:
        """Base name of a name that a rank saved, of a tensor of a model or of a module."""
        return base_name(name, self.smalls[rank].get("stages", ()))

    def kept_by(self, base: str) -> str:
        """Why what was saved of a tensor cannot be taken to another layout, whatever its bytes; empty if it can."""
        if self._kept is None:
            self._kept = {}
            for rank, small in self.smalls.items():
                for name, reason in small.get("not_transferable", {}).items():
                    if name in self._equal:
                        continue
                    said = f"tensor {name!r} of rank {rank} cannot be taken over: {reason}"
                    self._kept.setdefault(self.base(name), said)
        return self._kept.get(base, "")

    def broadcast(self) -> dict[str, set[int]]:
        """Base names of buffers that DistributedDataParallel gives to all replicas before each forward pass, and the
        ranks that said so."""
        found: dict[str, set[int]] = {}
        for rank, small in self.smalls.items():
            for name in small.get("broadcast_buffers", ()):
                found.setdefault(self.base_of(name, rank), set()).add(rank)
        return found

    # ------------------------------------------------------------ reading

    def _read_rank(self, rank: int, small: Mapping[str, Any]) -> list[tuple[str, TensorEntry]]:
        """Learn what a rank saved; its entries with their stored names."""
        optimizers = optimizers_of(small, rank)
        stages = small.get("stages", ())
        names = [{name for group in each["params"] for name in group} for each in optimizers]
        for i, described in enumerate(optimizers):
            self._read_optimizer(rank, i, described, stages)
        found = list(self.shards.entries(rank).items())
        for at, (_, entry) in enumerate(found):
            for name in (entry.name, *entry.aliases):
                number = _optimizer_of(name)
                if number is None or number >= len(optimizers):
                    self._bases[name] = base_name(name, stages)
                    continue
                prefix = f"optim.{number}."
                owner = owner_of(name, prefix, names[number])
                if owner is None:  # a parameter of no attached module
                    self._bases[name] = name
                    continue
                key = name[len(prefix) + len(owner) + 1 :]
                param = self._param(owner, number, stages)
                self._bases[name] = param.keys[key] = f"optim.{param.base}.{key}"
                param.exact.setdefault(key, name)
                self._owners[param.keys[key]] = param.base
                odd = optimizers[number].get("odd", {}).get(name, {})
                if odd:
                    param.odd[key] = odd
                param.local[key] = param.local.get(key, True) and bool(odd.get("plain"))
                if odd.get("plain"):
                    self._local.append((rank, at, param, key, f"model.{owner}"))
            if entry.aliases and _optimizer_of(entry.name) is None:
                names_of = [base_name(n, stages).removeprefix("model.") for n in (entry.name, *entry.aliases)]
                for name in names_of:
                    self._tied.setdefault(name, set()).update(names_of)
        return found

    def _declare_equal(self, entries: Mapping[int, list[tuple[str, TensorEntry]]]) -> None:
        """Give entries their ranges where the ranks knew them, and did not know who else has the same tensor: every
        element that several ranks have must be the same on all of them, which only now can be seen."""
        parts = {rank: parts_of_small(small) for rank, small in self.smalls.items()}
        found: dict[str, list[tuple[int, int]]] = {name: [] for each in parts.values() for name in each}
        for rank, saved in entries.items():
            for at, (_, entry) in enumerate(saved):
                if entry.name in found:
                    found[entry.name].append((rank, at))
        for name, places in found.items():
            made = [_with_part(entries[rank][at], parts[rank], rank) for rank, at in places]
            whole = [each for each in made if each is not None]
            if len(whole) == len(made) and self._same_whole(whole):
                self._equal.add(name)
                for (rank, at), each in zip(places, whole, strict=True):
                    entries[rank][at] = (each.stored_name, each.entry)

    def _same_whole(self, parts: Iterable[SavedTensor]) -> bool:
        """Whether parts of one name can be parts of one tensor: what they have in common is equal in every byte."""
        seen: list[SavedTensor] = []
        for part in parts:
            for other in seen:
                if (part.entry.dtype, part.entry.global_shape) != (other.entry.dtype, other.entry.global_shape):
                    return False
                box = intersection(part.entry.ranges or (), other.entry.ranges or ())
                if box is not None and not self.shards.same_bytes(other, part, box):
                    return False
            if all(part.entry.ranges != other.entry.ranges for other in seen):
                seen.append(part)
        return True

    @staticmethod
    def _cut(entries: list[tuple[str, TensorEntry]], at: int, like: str) -> None:
        """Give an entry the ranges of the parameter `like` of the same rank, whose local shape it has."""
        stored, entry = entries[at]
        param = next((e for _, e in entries if like in (e.name, *e.aliases)), None)
        if entry.ranges is None and param is not None and param.ranges is not None and param.shape == entry.shape:
            entries[at] = (stored, replace(entry, global_shape=param.global_shape, ranges=param.ranges))

    def _read_optimizer(self, rank: int, number: int, described: Mapping[str, Any], stages: Iterable[int]) -> None:
        if "whole" in described:
            self.whole.append(f"optimizer {number} of rank {rank} ({described['class']})")
            return
        for g, (names, options) in enumerate(zip(described["params"], described["groups"], strict=True)):
            for name in names:
                place = Place(rank, number, g, described.get("inner", described["class"]), options)
                self._param(name, number, stages).places.append(place)
        prefix = f"optim.{number}."
        for name, others in described.get("other", {}).items():
            param = self._param(name, number, stages)
            for key, value in others.items():
                param.others.setdefault(key, {})[rank] = _keyed(value, f"{prefix}{name}.")

    def _param(self, name: str, number: int, stages: Iterable[int]) -> SavedParam:
        base = param_base(name, number, tuple(stages))
        return self._params.setdefault(base, {}).setdefault(name, SavedParam(name, base))


def _with_part(saved: tuple[str, TensorEntry], parts: Mapping[str, Any], rank: int) -> SavedTensor | None:
    """A rank's own tensor as the part that the rank knew it to be; None where it is several parts, or not known."""
    stored, entry = saved
    shape, boxes = parts.get(entry.name, ((), ()))
    ranges = tuple((int(start), int(stop)) for start, stop in boxes[0]) if len(boxes) == 1 else ()
    if entry.ranges is not None or len(ranges) != len(shape) or not shape:
        return None
    if tuple(stop - start for start, stop in ranges) != entry.shape:
        return None  # of an expanded tensor less is saved than its shape says
    return SavedTensor(rank, stored, replace(entry, global_shape=tuple(map(int, shape)), ranges=ranges))


def param_base(name: str, number: int, stages: tuple[int, ...]) -> str:
    """Base name of a parameter of optimizer `number`."""
    return f"{number}.{name}" if _UNNAMED.fullmatch(name) else base_name(name, stages)


def optimizers_of(small: Mapping[str, Any], rank: int) -> list[Mapping[str, Any]]:
    """What the small state of a rank says of its optimizers."""
    found = small.get("optimizers", [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise FormatError(f"small state of rank {rank} holds no list of optimizers.")
    return found


def by_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words."""
    ordered = sorted(set(ranks))
    some = ", ".join(map(str, ordered[:8])) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")
    return f"rank {some}" if len(ordered) == 1 else f"ranks {some}"


def _optimizer_of(name: str) -> int | None:
    parts = name.split(".", 2)
    return int(parts[1]) if len(parts) == 3 and parts[0] == "optim" and parts[1].isdigit() else None


def _keyed(value: object, prefix: str) -> object:
    """`value` with each reference to a tensor turned to the tensor's key."""
    if isinstance(value, dict):
        if value.get(KIND) == "reference":
            return {KIND: "reference", "value": str(value["value"]).removeprefix(prefix)}
        return {key: _keyed(item, prefix) for key, item in value.items()}
    if isinstance(value, list):
        return [_keyed(item, prefix) for item in value]
    if isinstance(value, tuple):
        return tuple(_keyed(item, prefix) for item in value)
    return value
