"""Where the tensors of a live job belong: which part of a whole each one is, and who else may hold the same part.

Said by, in this order: `attach(layout=)`, written by hand; the placements of a DTensor; `attach(parallel=)` together
with the attributes that Megatron puts on parameters (`tensor_model_parallel`, `partition_dim`, `partition_stride`,
`allreduce`); DistributedDataParallel. What nobody speaks of belongs to its rank alone: names that agree make no
replicas. A name is *job-wide* when it means one tensor on all ranks; only then may parts be told to others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeAlias

import torch

from baft_torch._placements import Part, Runs, parts_of, runs_of, strided_runs
from baft_torch._tensors import is_dtensor, plain
from baftd.checkpoint.mesh import ParallelDescription
from baftd.checkpoint.ranges import Box, flat_boxes, outside, said, said_all, volume
from baftd.errors import FormatError, LayoutError, UsageError

__all__ = [
    "Declared",
    "Held",
    "JobLayout",
    "LayoutSource",
    "Origin",
    "base_name",
    "held_of_dtensor",
    "parts_of_small",
    "whole",
]

Declared: TypeAlias = "str | tuple[Sequence[int], Sequence[Any]] | None"
"""What a user may say of one tensor: "replicated" (every rank that has the name holds the same elements), "own"
(this rank's alone), (global shape, ranges) with one (start, stop) a dimension, with a list of such ranges where the
local tensor is several of them one behind the other along dimension 0, or with one (start, stop) of the flattened whole
where the local tensor has one dimension; None: nothing."""

LayoutSource: TypeAlias = "Mapping[str, Declared] | Callable[[str, torch.Tensor], Declared]"
"""`attach(layout=)`: patterns of names (fnmatch, the first match counts) with what they are, or a function."""

_PREFIX = re.compile(r"(model\.|optim\.\d+\.)?stage(\d+)\.")


def base_name(name: str, stages: Collection[int]) -> str:
    """`name` without the pipeline stage that the adapter put before it: "model.stage1.3.weight" -> "model.3.weight",
    "optim.0.stage1.3.weight.step" -> "optim.0.3.weight.step", "stage1.3.weight" -> "3.weight".

    `stages`: those of the rank that has the name, since a model's own module may be called "stage1", too. A rank's
    small state holds them under "stages" (no such key: none).
    """
    match = _PREFIX.match(name)
    if match is None or int(match[2]) not in stages:
        return name
    return (match[1] or "") + name[match.end() :]


@dataclass(frozen=True)
class Held:
    """What a rank holds of one tensor. Always known, since a rank must know what to ask for when it starts from
    another layout; `declared` says whether it is also told to the daemon."""

    shape: tuple[int, ...]
    """Of the whole."""
    parts: tuple[Part, ...]
    """In the order of the local tensor. One empty part where the rank holds nothing."""
    declared: bool
    """The parts go into the entries: whoever holds the same range of the same name holds the same elements. Not:
    the tensor is this rank's own, and `shape` and `parts` are only what it would need."""
    problem: str = ""
    """Why the elements cannot be taken to (or from) another layout, as the end of a sentence; "" where they can."""
    remark: str = ""
    """Why a tensor that looks like part of a whole is not declared as one, as the end of a sentence."""
    flat: tuple[int, int] | None = None
    """The parts are this one range of the flattened whole, and the local tensor has one dimension."""
    cut: bool = False
    """Not every rank that has the name holds all of it (one may, where sizes do not divide)."""

    @property
    def box(self) -> Box | None:
        """The one rectangle, where it is one."""
        return self.parts[0].box if len(self.parts) == 1 else None

    @property
    def bound(self) -> str:
        """Why what this rank saves cannot be taken to another layout: beside a problem, that a part is not declared."""
        return self.problem or (self.remark if self.cut and not self.declared else "")

    @property
    def told(self) -> list[Any]:
        """Shape of the whole and boxes of the parts as plain data: what is known of parts that are not declared. See
        `parts_of_small`."""
        return [list(self.shape), [[list(span) for span in part.box] for part in self.parts]]

    def own(self, *, problem: str = "", remark: str = "") -> Held:
        """The same, told to nobody."""
        return replace(self, declared=False, problem=problem or self.problem, remark=remark or self.remark)


def whole(shape: Sequence[int], *, declared: bool) -> Held:
    """All of a tensor."""
    box = tuple((0, int(size)) for size in shape)
    return Held(tuple(int(size) for size in shape), (Part(box, box),), declared)


@dataclass(frozen=True)
class Origin:
    """Where a tensor was found, and what that says of it."""

    stage: int | None = None
    """Pipeline stage of the module that holds it."""
    replicated: bool = False
    """DistributedDataParallel keeps it equal on all ranks that have its name."""
    stage_ranks: int | None = None
    """Ranks that hold the tensors of this stage (without stages: the world); None: unknown."""


@dataclass(frozen=True)
class JobLayout:
    """What a job has said of its ranks: `attach(parallel=, names=, layout=)`.

    names: from a name as the adapter makes it ("model.stage1.layers.0.weight") to one that means the same tensor on
    every rank ("model.layers.8.weight"). source: see `LayoutSource`.
    """

    rank: int = 0
    world: int = 1
    parallel: ParallelDescription | None = None
    names: Callable[[str], str] | None = None
    source: LayoutSource | None = None
    used: set[str] = field(default_factory=set, compare=False)
    """Patterns of `source` that have matched."""

    def __post_init__(self) -> None:
        if self.parallel is not None and self.parallel.world != self.world:
            raise UsageError(
                f"attach(parallel=) describes {self.parallel.world} ranks, and the job has {self.world}.",
                hint="tp x cp x dp x pp must be the number of ranks.",
            )
        if self.names is not None and not callable(self.names):
            raise UsageError(f"attach(names=) is a {type(self.names).__name__}, not a function from name to name.")
        if self.source is not None and not callable(self.source) and not isinstance(self.source, Mapping):
            raise UsageError(f"attach(layout=) is a {type(self.source).__name__}, neither a dict nor a function.")

    @property
    def coordinates(self) -> dict[str, int]:
        """Of this rank, by `parallel`; empty without it."""
        return self.parallel.coordinates(self.rank) if self.parallel is not None else {}

    # ------------------------------------------------------------ names

    def name(self, prefix: str, path: str, tensor: torch.Tensor, origin: Origin) -> str:
        """The name under which a tensor is saved. `prefix`: "model." and the stage or the model's key.

        Experts of expert parallelism (`allreduce=False` on a parameter) are numbered on each rank from 0: without
        `names` their rank in the expert group becomes part of the name, so that they are no replicas of each other, and
        the size of the group, so that another number of experts a rank is never taken for the same experts.
        """
        if self.names is None:
            return f"{prefix}{self._expert_prefix(tensor, origin)}{path}"
        local = prefix + path
        name = self.names(local)
        if not isinstance(name, str) or not name.startswith("model.") or name == "model.":
            raise UsageError(
                f"attach(names=) made {name!r} of {local!r}.",
                hint="It must return a name that begins with 'model.', such as 'model.layers.8.weight'.",
            )
        return name

    def _expert_prefix(self, tensor: torch.Tensor, origin: Origin) -> str:
        if self.parallel is None or self.parallel.ep == 1 or not _is_expert(tensor):
            return ""
        if is_dtensor(tensor) and tensor.device_mesh.size() == origin.stage_ranks:
            return ""  # a mesh over all ranks of the stage has the expert axis in it
        return f"ep{self.coordinates['ep']}of{self.parallel.ep}."

    # ------------------------------------------------------------ parts

    def held(self, name: str, tensor: torch.Tensor, origin: Origin) -> Held:
        """What this rank holds of a parameter or buffer. Raises LayoutError where what was said does not fit it,
        UnsupportedTensor for what cannot be saved."""
        plain(tensor, name)
        said_by_hand = self._by_hand(name, tensor)
        if said_by_hand is not None:
            return said_by_hand
        if is_dtensor(tensor):
            return self._of_dtensor(name, tensor, origin)
        if self.parallel is not None:
            found = self._of_attributes(name, tensor, origin)
            if found is not None:
                return found
        replicated = origin.replicated and not _is_expert(tensor)
        return whole(tensor.shape, declared=replicated)

    def held_of_state(self, name: str, tensor: torch.Tensor, param: Held, param_shape: Sequence[int]) -> Held:
        """What this rank holds of a tensor of an optimizer's state, whose parameter it holds as `param` says."""
        plain(tensor, name)
        said_by_hand = self._by_hand(name, tensor)
        if said_by_hand is not None:
            return said_by_hand
        if is_dtensor(tensor):
            found = held_of_dtensor(name, tensor)
            return found if param.declared else found.own(remark=param.remark)
        if tensor.dim() and tuple(tensor.shape) == tuple(param_shape):
            return param
        return self.derived(tensor.shape, param)

    def held_of_stray(self, name: str, tensor: torch.Tensor) -> Held:
        """What this rank holds of a parameter that an optimizer has and no attached module: its name means nothing to
        other ranks."""
        plain(tensor, name)
        said_by_hand = self._by_hand(name, tensor)
        if said_by_hand is not None:
            return said_by_hand
        if not is_dtensor(tensor):
            return whole(tensor.shape, declared=False)
        found = held_of_dtensor(name, tensor)
        return found.own(remark="no attached module has it, so that its name means nothing to other ranks" if found.cut
                         else "")  # fmt: skip

    @staticmethod
    def derived(shape: Sequence[int], param: Held) -> Held:
        """What a rank holds of plain optimizer state whose shape is not its parameter's. `shape`: of the state."""
        if not param.cut or not len(shape):
            return whole(shape, declared=param.declared and not param.cut)
        return replace(
            whole(shape, declared=False),
            problem=f"it has the shape {list(shape)} beside a parameter of which each rank holds a part, "
            "and how it is cut is not known",
        )

    def _of_dtensor(self, name: str, tensor: Any, origin: Origin) -> Held:
        found = held_of_dtensor(name, tensor)
        ranks = int(tensor.device_mesh.size())
        if not found.declared or self.parallel is not None or self.names is not None:
            return found
        if origin.stage_ranks is None or ranks == origin.stage_ranks:
            return found
        where = "" if origin.stage is None else " of its stage"
        return found.own(
            remark=f"its device mesh has {ranks} of the {origin.stage_ranks} ranks{where}, and on the others the name "
            "may stand for another tensor (attach(parallel=) or attach(names=) would say)"
        )

    def _of_attributes(self, name: str, tensor: torch.Tensor, origin: Origin) -> Held | None:
        """By the degrees of parallelism and what Megatron writes on a parameter; None: they do not say."""
        parallel = self.parallel
        assert parallel is not None
        if not isinstance(tensor, torch.nn.Parameter) or parallel.zero == 3:
            return None  # a buffer is nobody's replica; with zero=3 a plain tensor is an unknown part of something
        expert = _is_expert(tensor)
        degree = parallel.expert_tp if expert else parallel.tp
        cut = getattr(tensor, "tensor_model_parallel", None)
        if degree > 1 and cut is None:
            return None
        if not cut or degree == 1:
            return whole(tensor.shape, declared=True)
        dim, stride = int(getattr(tensor, "partition_dim", -1)), int(getattr(tensor, "partition_stride", 1))
        if not 0 <= dim < tensor.dim() or stride < 1 or tensor.shape[dim] % stride:
            raise LayoutError(
                f"tensor {name!r} says tensor_model_parallel, but partition_dim {dim} and partition_stride {stride} "
                f"do not fit its shape {list(tensor.shape)}.",
                tensor=name,
                rank=self.rank,
            )
        shape = [int(size) for size in tensor.shape]
        shape[dim] *= degree
        coordinates = self.coordinates
        mine = coordinates["etp"] if expert and "etp" in coordinates else coordinates["tp"]
        runs: list[Runs] = [((0, size),) if size else () for size in shape]
        runs[dim] = strided_runs(runs[dim], stride, degree, mine)
        held = Held(tuple(shape), parts_of(runs), declared=True, cut=True)
        return _split(held, frozenset({dim} if stride > 1 else ()))

    # ------------------------------------------------------------ by hand

    def _by_hand(self, name: str, tensor: torch.Tensor) -> Held | None:
        source = self.source
        given: Any = None
        if isinstance(source, Mapping):
            for pattern, value in source.items():
                if fnmatchcase(name, pattern):
                    self.used.add(pattern)
                    given = value(name, tensor) if callable(value) else value
                    break
        elif source is not None:
            given = source(name, tensor)
        return None if given is None else self._declared(name, tensor, given)

    def _declared(self, name: str, tensor: torch.Tensor, given: Any) -> Held:
        local = tensor._local_tensor if is_dtensor(tensor) else tensor
        size = [int(each) for each in local.shape]
        if given in ("replicated", "own"):
            return whole(size, declared=given == "replicated")
        try:
            shape, ranges = given
            shape = tuple(int(each) for each in shape)
            ranges = list(ranges)
            nested = bool(ranges) and all(len(each) == len(shape) and _is_box(each) for each in ranges)
            boxes = [_box(each) for each in ranges] if nested else [_box(ranges)]
            if not nested and len(ranges) == 1 and len(shape) != 1:
                return self._flat(name, shape, boxes[0][0], size)
        except (TypeError, ValueError) as error:
            raise LayoutError(
                f"attach(layout=) says {given!r} of tensor {name!r}, which is not understood.",
                hint="It must be 'replicated', 'own', or (global shape, ranges) with one (start, stop) a dimension, "
                "or a list of such ranges.",
                tensor=name,
                rank=self.rank,
            ) from error
        for box in boxes:
            if outside(box, shape):
                raise self._unfit(name, boxes, f"the range {said(box)} is outside of the shape {list(shape)}")
        runs = [tuple(box[0] for box in boxes), *((each,) for each in boxes[0][1:])] if shape else []
        fits = [sum(stop - start for start, stop in each) for each in runs]
        if fits != size or any(box[1:] != boxes[0][1:] for box in boxes):
            raise self._unfit(name, boxes, f"they are not what a tensor of shape {size} holds")
        parts = parts_of(runs if all(map(volume, boxes)) else [(each,) for each in boxes[0]])
        return Held(shape, parts, declared=True, cut=sum(map(volume, boxes)) < prod(shape))

    def _flat(self, name: str, shape: tuple[int, ...], span: tuple[int, int], size: list[int]) -> Held:
        start, stop = span
        if not 0 <= start <= stop <= prod(shape) or size != [stop - start]:
            raise self._unfit(name, [(span,)], f"as elements of {list(shape)}, flattened, they are not its {size}")
        parts, at = [], 0
        for box in flat_boxes(shape, start, stop):
            parts.append(Part(box, ((at, at + volume(box)),)))
            at += volume(box)
        nothing = (Part(tuple((0, 0) for _ in shape), ((0, 0),)),)
        return Held(shape, tuple(parts) or nothing, declared=True, flat=span, cut=stop - start < prod(shape))

    def _unfit(self, name: str, boxes: Sequence[Box], why: str) -> LayoutError:
        return LayoutError(
            f"attach(layout=) gives rank {self.rank} the ranges {said_all(boxes)} of tensor {name!r}: {why}.",
            hint="Several ranges of one tensor lie one behind the other along dimension 0 and agree in all others.",
            tensor=name,
            rank=self.rank,
            ranges=said_all(boxes),
        )

    def check_used(self, names: Sequence[str]) -> None:
        """Raise UsageError for a pattern of `attach(layout=)` that has matched no tensor."""
        if isinstance(self.source, Mapping):
            for pattern in self.source:
                if pattern not in self.used and not pattern.startswith("optim."):
                    raise UsageError(
                        f"layout={{{pattern!r}: ...}} matches no tensor.",
                        hint=f"The tensors are: {', '.join(names[:20]) or 'none'}. The first pattern that fits counts.",
                    )


def parts_of_small(small: Mapping[str, Any]) -> dict[str, Any]:
    """By name, what a rank knew of the parts that it did not declare (`Held.told`), from its small state."""
    try:
        found = json.loads(small.get("parts", "{}"))
    except (TypeError, ValueError) as problem:
        raise FormatError(f"small state does not say which parts of tensors it is of: {problem}.") from problem
    if not isinstance(found, dict):
        raise FormatError(f"small state says of parts of tensors {type(found).__name__}, not a dict.")
    return found


def held_of_dtensor(name: str, tensor: Any) -> Held:
    """The part of a DTensor that this rank holds. Raises LayoutError where its local tensor has another shape."""
    found = runs_of(tensor)
    local = tuple(int(size) for size in tensor._local_tensor.shape)
    if isinstance(found, str):
        return replace(whole(local, declared=False), problem=found, remark=found)
    expected = tuple(sum(stop - start for start, stop in each) for each in found.runs)
    if expected != local:
        raise LayoutError(
            f"tensor {name!r} is a DTensor of shape {list(tensor.shape)} whose placements {tuple(tensor.placements)} "
            f"leave {list(expected)} on this rank, but its local tensor has the shape {list(local)}.",
            hint=f"If that is meant, say attach(layout={{{name!r}: 'own'}}) or give its ranges.",
            tensor=name,
        )
    shape = tuple(int(size) for size in tensor.shape)
    return _split(Held(shape, parts_of(found.runs), declared=True, cut=found.cut), found.irregular)


def _split(held: Held, irregular: frozenset[int]) -> Held:
    """`held`, if ranks hold several ranges along dimension 0 at most: those are consecutive bytes of a local tensor.

    Ranges along an inner dimension interleave in memory, and one entry for each row would be too many.
    """
    if irregular <= {0}:
        return held
    why = f"ranks hold several separate ranges of it along dimension {max(irregular)}, not 0"
    return held.own(problem=why, remark=why)


def _is_expert(tensor: torch.Tensor) -> bool:
    """Megatron's and DeepSpeed's mark of a parameter that is not summed over all data-parallel ranks."""
    return getattr(tensor, "allreduce", True) is False


def _is_box(value: Any) -> bool:
    return all(isinstance(each, Sequence) and len(each) == 2 for each in value)


def _box(value: Any) -> Box:
    return tuple((int(start), int(stop)) for start, stop in value)
