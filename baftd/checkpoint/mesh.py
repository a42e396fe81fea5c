"""Named axes over ranks: meshes, and the ranks of tensor, pipeline, data, context and expert parallelism. Pure.

Words and orders of `ParallelDescription` are Megatron's (megatron.core.parallel_state.RankGenerator): an order names
the axes from the one along which neighbouring ranks lie to the slowest. Dense layers see tp, cp, dp and pp; expert
layers see etp, ep, their own data parallelism (edp) and pp, over the same ranks and in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from baftd.checkpoint.identity import MAX_WORLD
from baftd.errors import UsageError

__all__ = ["DEFAULT_ORDER", "Mesh", "ParallelDescription"]

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
_WORDS = ("tp", "cp", "ep", "dp", "pp")
_NUMBERS = ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "zero")


@dataclass(frozen=True)
class Mesh:
    """Ranks on a grid with named axes, the slowest first: `Mesh((("pp", 2), ("dp", 4)))`.

    ranks: those of the grid in row-major order, where they are not 0, 1, 2 ... (torch's DeviceMesh allows any).
    Raises UsageError for sizes, names or ranks that make no mesh.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if not name or names.count(name) > 1:
                raise UsageError(f"mesh axes {names} cannot be told apart: {name!r} is no name of one axis.")
            if size < 1:
                raise UsageError(f"mesh axis {name!r} has size {size}, not 1 or more.")
        if self.size > MAX_WORLD:
            raise UsageError(f"a mesh of {self.size} ranks is larger than {MAX_WORLD}.")
        if self.ranks is not None:
            if len(self.ranks) != self.size:
                raise UsageError(f"{len(self.ranks)} ranks do not fill a mesh of {self._words()} = {self.size}.")
            if len(set(self.ranks)) != self.size or min(self.ranks) < 0:
                raise UsageError(f"the ranks of a mesh of {self._words()} are not different numbers from 0 on.")

    def _words(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes) or "no axes"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis, the slowest first."""
        return tuple(size for _, size in self.axes)

    def axis(self, name: str) -> int:
        """Place of an axis; raises UsageError for one that the mesh does not have."""
        for number, (known, _) in enumerate(self.axes):
            if known == name:
                return number
        raise UsageError(f"the mesh {self._words()} has no axis {name!r}.")

    @cached_property
    def grid(self) -> npt.NDArray[np.int64]:
        """The ranks as an array of `shape`."""
        flat = np.arange(self.size) if self.ranks is None else np.array(self.ranks, dtype=np.int64)
        return flat.astype(np.int64).reshape(self.shape)

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return {rank: place for place, rank in enumerate(self.grid.ravel().tolist())}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank on each axis, in the order of the axes. Raises UsageError for a rank outside."""
        place = self._places.get(rank)
        if place is None:
            raise UsageError(f"rank {rank} is not in the mesh {self._words()}.")
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            place, found[name] = divmod(place, size)
        return dict(reversed(found.items()))

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates, one for each axis. Raises UsageError for any that are not of the mesh."""
        if set(coordinates) != {name for name, _ in self.axes}:
            raise UsageError(f"coordinates {dict(coordinates)} are not one for each axis of {self._words()}.")
        place = 0
        for name, size in self.axes:
            if not 0 <= coordinates[name] < size:
                raise UsageError(f"coordinate {name} = {coordinates[name]} is outside of {self._words()}.")
            place = place * size + coordinates[name]
        return int(self.grid.ravel()[place])

    def groups(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ in these axes alone, a group for each place on the others, both in mesh order."""
        kept = [self.axis(name) for name in dict.fromkeys(names)]
        others = [number for number in range(len(self.axes)) if number not in kept]
        length = prod(self.shape[number] for number in kept)
        rows = self.grid.transpose([*others, *sorted(kept)]).reshape(-1, length)
        return tuple(tuple(row) for row in rows.tolist())


@dataclass(frozen=True)
class ParallelDescription:
    """Degrees of parallelism of a job, in Megatron's words.

    tp, cp, dp, pp: tensor, context, data and pipeline parallel. They multiply to the number of ranks.
    ep: expert parallel; expert layers spread their experts over it, and it lies within tp * cp * dp.
    etp: tensor parallel of expert layers; None: tp.
    vpp: model chunks a pipeline rank holds (interleaved schedule).
    zero: what is divided over data parallel ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
    order: axes joined by "-", the fastest first. An axis of size 1 may be left out.

    Raises UsageError for anything that does not fit together.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    zero: int = 0
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "cp", "ep", "vpp"):
            if getattr(self, name) < 1:
                raise UsageError(f"parallel description: {name} = {getattr(self, name)} is not 1 or more.")
        if self.etp is not None and self.etp < 1:
            raise UsageError(f"parallel description: etp = {self.etp} is not 1 or more.")
        if not 0 <= self.zero <= 3:
            raise UsageError(f"parallel description: zero = {self.zero} is none of 0, 1, 2 and 3.")
        if self.world > MAX_WORLD:
            raise UsageError(f"parallel description: {self._words()} are {self.world} ranks, more than {MAX_WORLD}.")
        words = self.order.split("-")
        if sorted(set(words)) != sorted(words) or not set(words) <= set(_WORDS):
            raise UsageError(
                f"parallel description: order {self.order!r} is not made of {', '.join(_WORDS)}, each at most once.",
                hint=f"Megatron's own is {DEFAULT_ORDER!r}.",
            )
        for name in _WORDS:
            if getattr(self, name) > 1 and name not in words:
                raise UsageError(
                    f"parallel description: {name} = {getattr(self, name)}, but order {self.order!r} lacks it."
                )
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"parallel description: vpp = {self.vpp} needs pp of 2 or more.")
        inner = self.tp * self.cp * self.dp
        if inner % (self.expert_tp * self.ep):
            raise UsageError(
                f"parallel description: ep {self.ep} x etp {self.expert_tp} does not divide the {inner} ranks of a "
                f"pipeline stage ({self._words()}).",
                hint="ep must divide dp * cp (times tp, where etp is smaller).",
            )
        if self.has_experts and self.dense.groups("pp") != self.expert.groups("pp"):
            raise UsageError(
                f"parallel description: with order {self.order!r} expert and dense layers would lie in different "
                f"pipelines ({self._words()}, ep {self.ep}, etp {self.expert_tp}).",
                hint="Let the order end with pp.",
            )

    def _words(self) -> str:
        return " x ".join(f"{name} {getattr(self, name)}" for name in ("tp", "cp", "dp", "pp"))

    @classmethod
    def parse(cls, text: str, world: int | None = None) -> ParallelDescription:
        """From `"tp=8,pp=16,dp=16,order=tp-cp-ep-dp-pp"`; what is left out is 1, dp follows from `world`.

        Raises UsageError for unknown words, what is no number, and degrees that do not multiply to `world`.
        """
        given: dict[str, str] = {}
        for part in text.replace(";", ",").split(","):
            if not part.strip():
                continue
            name, sign, value = (piece.strip() for piece in part.partition("="))
            if not sign or name not in (*_NUMBERS, "order") or name in given:
                raise UsageError(
                    f"parallel description {text!r}: {part.strip()!r} is not understood.",
                    hint=f"Write NAME=NUMBER once for each of {', '.join(_NUMBERS)}, and order={DEFAULT_ORDER}.",
                )
            given[name] = value
        order = given.pop("order", DEFAULT_ORDER)
        numbers: dict[str, int] = {}
        for name, value in given.items():
            if not (value.isascii() and value.isdigit() and len(value) < 10):
                raise UsageError(f"parallel description {text!r}: {name} = {value!r} is not a number.")
            numbers[name] = int(value)
        if world is not None and "dp" not in numbers:
            others = max(1, prod(numbers.get(name, 1) for name in ("tp", "pp", "cp")))
            if world % others:
                ranks = f"{world} rank{'s' * (world != 1)}"
                raise UsageError(f"parallel description {text!r}: tp x pp x cp = {others} does not divide {ranks}.")
            numbers["dp"] = world // others
        made = cls(order=order, **numbers)
        if world is not None and made.world != world:
            there = "is 1 rank" if world == 1 else f"are {world} ranks"
            raise UsageError(f"parallel description {text!r}: {made._words()} = {made.world}, but there {there}.")
        return made

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel degree of expert layers."""
        return self.tp if self.etp is None else self.etp

    @property
    def has_experts(self) -> bool:
        """Whether expert layers lie otherwise than dense ones."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def edp(self) -> int:
        """Data parallel degree of expert layers."""
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    @property
    def virtual_stages(self) -> int:
        """Model chunks of the whole pipeline."""
        return self.pp * self.vpp

    @cached_property
    def dense(self) -> Mesh:
        """Axes of everything but experts: tp, cp, dp, pp, all present, the slowest first."""
        return self._mesh({"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}, {})

    @cached_property
    def expert(self) -> Mesh:
        """Axes of expert layers: etp, ep, edp, pp, all present, the slowest first."""
        sizes = {"tp": self.expert_tp, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return self._mesh(sizes, {"tp": "etp", "dp": "edp"})

    def _mesh(self, sizes: Mapping[str, int], called: Mapping[str, str]) -> Mesh:
        words = [word for word in self.order.split("-") if word in sizes]
        words += [word for word in sizes if word not in words]  # left out: of size 1 (or the last of what remains)
        return Mesh(tuple((called.get(word, word), sizes[word]) for word in reversed(words)))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank: tp, cp, dp, pp, and ep, etp, edp where there is expert parallelism."""
        found = self.dense.coordinates(rank)
        if self.has_experts:
            found |= self.expert.coordinates(rank)
        return found

    def stages(self, rank: int) -> tuple[int, ...]:
        """Virtual stages of a rank: chunk c of pipeline rank p is stage c * pp + p."""
        place = self.dense.coordinates(rank)["pp"]
        return tuple(chunk * self.pp + place for chunk in range(self.vpp))

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Ranks that hold a virtual stage, ascending. Raises UsageError for a stage that is not there."""
        if not 0 <= stage < self.virtual_stages:
            raise UsageError(f"stage {stage} is not one of the {self.virtual_stages} stages.")
        along = self.dense.axis("pp")
        return tuple(np.sort(self.dense.grid.take(stage % self.pp, axis=along).ravel()).tolist())

    def data_parallel_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same dense parameters: those that differ in dp and cp alone."""
        return self.dense.groups("dp", "cp")

    def expert_data_parallel_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same expert parameters: those that differ in edp alone."""
        return self.expert.groups("edp")

