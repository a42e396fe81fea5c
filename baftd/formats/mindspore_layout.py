"""From MindSpore's descriptions of a job to the neutral layout: who holds which block of which parameter.

Three sources, none of which needs MindSpore:

- the strategy file of every rank (`layout_from_strategy_files`): what `baftd plan --mindspore DIR` reads;
- one merged strategy file (`layout_from_merged_strategy`);
- `net.parameter_layout_dict` of every rank (`layout_from_parameter_layouts`): what an adapter has at hand.

The pipeline stage of a rank is rank // (world / stages), as MindSpore counts; a file whose operators say another stage
is refused. A parameter that several stages have (a tied embedding) is one tensor, held by the ranks of all of them.
Strategy files name it on the first of these stages alone, `parameter_layout_dict` on each.

Gradient accumulators (`accu_grads.*`) are left out: they are empty at a step boundary, no checkpoint needs them, and at
ZeRO level 1 the strategy file says that they are sharded when they are not.

Descriptions that do not fit together (files of different jobs, a rank without a file, a group file that says another
thing than the cuts) are one LayoutError that names file, tensor, rank and range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from baftd.checkpoint.layout import Layout, LayoutBuilder
from baftd.checkpoint.ranges import said_all
from baftd.checkpoint.tensor_layout import Holding, RankPlace
from baftd.errors import LayoutError
from baftd.formats.mindspore_cuts import Cut, coordinates, cuts_of_tensors
from baftd.formats.mindspore_groups import parse_groups
from baftd.formats.mindspore_parameters import cuts_of_parameter_layouts
from baftd.formats.mindspore_strategy import StrategyFile, TensorStrategy, parse_strategy

if TYPE_CHECKING:
    from baftd.checkpoint.ranges import Box

__all__ = [
    "TRANSIENT",
    "layout_from_merged_strategy",
    "layout_from_parameter_layouts",
    "layout_from_strategy_files",
    "tag_of",
]

TRANSIENT = ("accu_grads.",)
"""Beginnings of names of parameters that no checkpoint needs."""

_TAGS = {
    "Bool": "BOOL", "Int8": "I8", "UInt8": "U8", "Int16": "I16", "UInt16": "U16", "Int32": "I32", "UInt32": "U32",
    "Int64": "I64", "UInt64": "U64", "Float16": "F16", "BFloat16": "BF16", "Float32": "F32", "Float64": "F64",
    "Float8E4M3FN": "F8_E4M3", "Float8E5M2": "F8_E5M2",
}  # fmt: skip


def tag_of(dtype: str) -> str:
    """The safetensors tag of a type by MindSpore's name ("Float32" -> "F32"); a tag, or an unknown name, as it is."""
    return _TAGS.get(dtype, dtype)


def layout_from_strategy_files(
    files: Mapping[int, bytes],
    groups: Mapping[int, bytes] | None,
    world: int,
    stages: int,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Mapping[str, str] | None = None,
    *,
    part_shapes: Mapping[int, Mapping[str, Sequence[int]]] | None = None,
    dtype: str = "F32",
    sources: Mapping[int, str] | None = None,
    group_sources: Mapping[int, str] | None = None,
    leave_out: Sequence[str] = TRANSIENT,
) -> Layout:
    """The layout of a job from the strategy file of each of its ranks.

    files: content by rank, all of 0 to world - 1; binary and JSON. groups: content of group files, of any ranks: what
        they say of replicas must be what the cuts say.
    stages: pipeline stages; `world` must be a multiple.
    shapes: of whole tensors. Needed for binary files, which have none, unless part_shapes gives by rank the shapes
        of what is saved there (enough: one rank of each stage). Where a file has them too they must agree.
    dtypes: MindSpore's names or safetensors' tags by tensor; `dtype` for all others (files say nothing of types).
    sources, group_sources: names of the files by rank, for errors.
    leave_out: beginnings of names of parameters that are not wanted.

    Raises FormatError for a file that is none, LayoutError for files that do not fit together or to the shapes.
    """
    job = _Job(world, stages, leave_out)
    parsed: dict[bytes, StrategyFile] = {}
    for rank in range(world):
        name = (sources or {}).get(rank, f"strategy file of rank {rank}")
        if rank not in files:
            hint = "Every rank of the job writes one; give them all, or the merged file."
            raise LayoutError(f"rank {rank} of {world} has no strategy file.", rank=rank, hint=hint)
        # The ranks of a stage usually write equal files, and parsing is what takes the time.
        file = parsed.get(files[rank])
        if file is None:
            file = parsed[files[rank]] = parse_strategy(files[rank], name)
        job.take_file(rank, file, name)
    extra = min((rank for rank in files if not 0 <= rank < world), default=None)
    if extra is not None:
        name = (sources or {}).get(extra, f"strategy file of rank {extra}")
        why = f"it is of rank {extra}, but the job has {world} ranks: it is of another job, or the world is wrong"
        raise LayoutError(f"{name}: {why}.", rank=extra)
    job.check_stages()
    job.shape(shapes, part_shapes)
    return job.layout(dtypes, dtype, groups, group_sources)


def layout_from_merged_strategy(
    data: bytes,
    source: str,
    groups: Mapping[int, bytes] | None,
    world: int,
    stages: int,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Mapping[str, str] | None = None,
    *,
    part_shapes: Mapping[int, Mapping[str, Sequence[int]]] | None = None,
    dtype: str = "F32",
    group_sources: Mapping[int, str] | None = None,
    leave_out: Sequence[str] = TRANSIENT,
) -> Layout:
    """The layout of a job from one merged strategy file (`merge_pipeline_strategys`); else as for files of ranks.

    A file of one rank will do for a job of one stage.
    """
    job = _Job(world, stages, leave_out)
    file = parse_strategy(data, source)
    job.take_merged(file)
    job.shape(shapes, part_shapes)
    return job.layout(dtypes, dtype, groups, group_sources)


def layout_from_parameter_layouts(
    layouts: Mapping[int, Mapping[str, Sequence[object]]],
    groups: Mapping[int, bytes] | None,
    world: int,
    stages: int,
    dtypes: Mapping[str, str] | None = None,
    *,
    dtype: str = "F32",
    group_sources: Mapping[int, str] | None = None,
    leave_out: Sequence[str] = (*TRANSIENT, "inputs"),
) -> Layout:
    """The layout of a job from `net.parameter_layout_dict` of each rank.

    Inputs of the network ("inputs0") are in there too, and left out.
    Raises LayoutError for an entry that cannot be read, and as for strategy files.
    """
    job = _Job(world, stages, leave_out)
    for rank, cuts in enumerate(cuts_of_parameter_layouts(layouts, world, job.devices)):
        job.take(rank, cuts, f"parameter_layout_dict of rank {rank}")
    job.shape(None, None)
    return job.layout(dtypes, dtype, groups, group_sources)


@dataclass
class _Stage:
    """What is known of one pipeline stage. `source`: the file it was taken from, of rank `first`."""

    first: int
    source: str = ""
    cuts: dict[str, Cut] | None = None


class _Job:
    """Collects the cuts of each stage, checks them against one another, and makes the layout."""

    def __init__(self, world: int, stages: int, leave_out: Sequence[str]) -> None:
        if world < 1 or stages < 1 or world % stages:
            raise LayoutError(
                f"{world} ranks cannot be divided into {stages} equal pipeline stages.",
                hint="Give the ranks or the stages of the whole job (baftd plan: --world, --pp).",
            )
        self.world = world
        self.devices = world // stages
        self.stages = [_Stage(stage * self.devices) for stage in range(stages)]
        self.leave_out = tuple(leave_out)
        self._taken: dict[int, dict[str, Cut]] = {}

    def take_file(self, rank: int, file: StrategyFile, source: str) -> None:
        """Take the file of one rank."""
        if file.merged:
            raise LayoutError(
                f"{source}: it is a merged strategy file, not that of rank {rank}.",
                hint="Give it as the merged file of the whole job.",
                rank=rank,
            )
        stage = rank // self.devices
        other = [found for found in file.stages if found != stage]
        if other:
            raise LayoutError(
                f"{source}: it is of pipeline stage {other[0]}, but rank {rank} of {self.world} ranks in "
                f"{len(self.stages)} stages is in stage {stage}: the file of another rank or another job.",
                rank=rank,
            )
        if id(file) not in self._taken:
            self._taken[id(file)] = cuts_of_tensors(file.tensors.values())
        self.take(rank, self._taken[id(file)], source)

    def take_merged(self, file: StrategyFile) -> None:
        """Take the merged file of all ranks."""
        tensors: dict[int, list[TensorStrategy]] = {}
        for tensor in file.tensors.values():
            tensors.setdefault(tensor.stage or 0, []).append(tensor)
        by_stage = {number: cuts_of_tensors(found) for number, found in tensors.items()}
        for number, stage in enumerate(self.stages):
            if number not in by_stage:
                why = f"it has no parameters of pipeline stage {number} of {len(self.stages)}"
                raise LayoutError(f"{file.source}: {why}.", rank=stage.first)
            self.take(stage.first, by_stage[number], file.source)
        if len(by_stage) > len(self.stages):
            why = f"it has parameters of stage {max(by_stage)}, but the job has {len(self.stages)} stages"
            raise LayoutError(f"{file.source}: {why}: it is of another job.", rank=None)

    def take(self, rank: int, cuts: dict[str, Cut], source: str) -> None:
        """Take what one rank says of all parameters of its stage, and compare it with what the others say."""
        stage = self.stages[rank // self.devices]
        if stage.cuts is None:
            for name, cut in cuts.items():
                if cut.devices != self.devices:
                    fit, rest = divmod(self.world, cut.devices)
                    stages = f"{fit} stage{'s' * (fit != 1)}"
                    raise LayoutError(
                        f"{source}: tensor {name!r} is cut over {cut.devices} devices (dev_matrix "
                        f"{list(cut.dev_matrix)}), but a stage of rank {rank}'s job has {self.devices}: the file is "
                        f"of another job, or world {self.world} or {len(self.stages)} stages is wrong.",
                        hint="" if rest else f"With {cut.devices} ranks in each, {self.world} ranks are in {stages}.",
                        tensor=name,
                        rank=rank,
                    )
            stage.first, stage.source, stage.cuts = rank, source, cuts
            return
        if cuts is stage.cuts or cuts == stage.cuts:
            return
        # Binary and JSON files of one job differ in this alone, that binary ones have no shapes.
        ours, theirs = _with_shapes(cuts, stage.cuts), _with_shapes(stage.cuts, cuts)
        if ours == theirs:
            stage.cuts = theirs
            return
        name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        here, there = (_said(found.get(name)) for found in (ours, theirs))
        raise LayoutError(
            f"{source}: tensor {name!r} {here} on rank {rank}; on rank {stage.first} of the same stage it {there} "
            f"({stage.source}): files of different jobs are mixed.",
            tensor=name,
            rank=rank,
        )

    def check_stages(self) -> None:
        """Whether each stage has parameters of its own, as strategy files name a shared one on the first stage alone.

        Files of a job of fewer stages are found by this, where they stand beside those of a job of more.
        """
        seen: dict[str, _Stage] = {}
        for stage in self.stages:
            own = {name for name in self._cuts(stage) if not name.startswith(self.leave_out)}
            if len(own) > 1 and own <= seen.keys():
                name = min(own)
                raise LayoutError(
                    f"{stage.source}: all its parameters, such as tensor {name!r} (rank {stage.first}), are on other "
                    f"stages too, this one on rank {seen[name].first} ({seen[name].source}): files of different jobs "
                    f"are mixed, or {len(self.stages)} stages is wrong.",
                    tensor=name,
                    rank=stage.first,
                )
            seen |= dict.fromkeys(own - seen.keys(), stage)

    def shape(
        self,
        shapes: Mapping[str, Sequence[int]] | None,
        part_shapes: Mapping[int, Mapping[str, Sequence[int]]] | None,
    ) -> None:
        """Bring in the shapes of whole tensors where files do not have them, and compare them where they do."""
        for stage in self.stages:
            stage.cuts = {name: cut for name, cut in (stage.cuts or {}).items() if not name.startswith(self.leave_out)}
        known: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, shape in (shapes or {}).items():
            known[name] = tuple(shape), "the shapes that were given"
        for rank, parts in sorted((part_shapes or {}).items()):
            cuts = self.cuts_of(rank)
            for name, part in parts.items():
                whole = cuts[name].whole_of(part) if name in cuts else None
                if whole is not None:
                    before = known.setdefault(name, (whole, f"what rank {rank} has saved"))
                    if before[0] != whole:
                        self._differ(name, before, whole, f"what rank {rank} has saved", rank)
        for stage in self.stages:
            for name, cut in self._cuts(stage).items():
                if cut.shape is None and cut.split_shape and len(cut.tensor_map) == 1:
                    cut = replace(cut, shape=(sum(cut.split_shape),))
                if cut.shape is not None:
                    before = known.setdefault(name, (cut.shape, stage.source))
                    whole_cut = cut.in_shape(before[0])
                    if whole_cut is None:
                        self._differ(name, before, cut.shape, stage.source, stage.first)
                    self._cuts(stage)[name] = whole_cut
        self._fill(known)

    def cuts_of(self, rank: int) -> dict[str, Cut]:
        """The cuts of a rank's stage. Raises LayoutError for a rank that the job has not."""
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is named, but the job has {self.world} ranks.", rank=rank)
        return self._cuts(self.stages[rank // self.devices])

    def _cuts(self, stage: _Stage) -> dict[str, Cut]:
        return stage.cuts or {}

    def _differ(
        self, name: str, before: tuple[tuple[int, ...], str], shape: tuple[int, ...], source: str, rank: int
    ) -> NoReturn:
        raise LayoutError(
            f"tensor {name!r} has shape {before[0]} by {before[1]}, and {shape} by {source} (rank {rank}): "
            "descriptions of different jobs are mixed.",
            tensor=name,
            rank=rank,
        )

    def _fill(self, known: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        missing: list[tuple[str, int, str]] = []
        for stage in self.stages:
            for name, cut in self._cuts(stage).items():
                if name not in known:
                    missing.append((name, stage.first, stage.source))
                elif cut.shape is None:
                    self._cuts(stage)[name] = replace(cut, shape=known[name][0])
        if missing:
            name, rank, source = min(missing)
            more = len({name for name, _, _ in missing}) - 1
            others = f" and of {more} other{'s' * (more != 1)}" if more else ""
            raise LayoutError(
                f"{source}: the shape of tensor {name!r} (rank {rank}){others} is not known: "
                "binary strategy files have no shapes.",
                hint='Give shapes of whole tensors (baftd plan: --shapes FILE, JSON such as {"name": [4, 8]}), or '
                "strategy files that end in .json.",
                tensor=name,
                rank=rank,
            )

    def layout(
        self,
        dtypes: Mapping[str, str] | None,
        dtype: str,
        groups: Mapping[int, bytes] | None,
        group_sources: Mapping[int, str] | None,
    ) -> Layout:
        """Cut every tensor, compare with the group files, and put the layout together."""
        boxes: dict[tuple[int, Cut], tuple[Box, ...]] = {}
        by_tensor: dict[str, list[tuple[int, Cut]]] = {}
        for number, stage in enumerate(self.stages):
            for name, cut in self._cuts(stage).items():
                key = (number, cut)
                if key not in boxes:
                    boxes[key] = cut.boxes(tensor=name, rank=number * self.devices, source=stage.source)
                by_tensor.setdefault(name, []).append(key)
        for rank, data in sorted((groups or {}).items()):
            self._check_groups(rank, data, (group_sources or {}).get(rank, f"group file of rank {rank}"), boxes)
        builder = LayoutBuilder(self.world)
        for place in self._places():
            builder.place(place)
        holdings: dict[tuple[tuple[int, Cut], ...], Holding] = {}
        for name in sorted(by_tensor):
            keys = tuple(by_tensor[name])
            shape = keys[0][1].shape or ()
            if keys not in holdings:
                held = {
                    number * self.devices + device: (box,)
                    for number, cut in keys
                    for device, box in enumerate(boxes[number, cut])
                }
                holdings[keys] = Holding.of(shape, held)
            builder.add(name, tag_of((dtypes or {}).get(name, dtype)), shape, holdings[keys])
        return builder.build()

    def _places(self) -> Iterable[RankPlace]:
        """Stage, number in the stage, and the place in dev_matrix where all tensors of the job share one."""
        matrices = {
            tuple(size for size in cut.dev_matrix if size > 1)
            for stage in self.stages
            for cut in self._cuts(stage).values()
        }
        matrix = matrices.pop() if len(matrices) == 1 else ()
        for rank in range(self.world):
            stage, device = divmod(rank, self.devices)
            at = {f"dev{axis}": value for axis, value in enumerate(coordinates(matrix, device))}
            yield RankPlace(rank, (stage,), {"pp": stage, "device": device, **at})

    def _check_groups(
        self, rank: int, data: bytes, source: str, boxes: Mapping[tuple[int, Cut], tuple[Box, ...]]
    ) -> None:
        """Whether a group file's list of replicas is what the cuts say."""
        file = parse_groups(data, source)
        if not 0 <= rank < self.world:
            why = f"it is of rank {rank}, but the job has {self.world} ranks"
            raise LayoutError(f"{source}: {why}: it is of another job, or the world is wrong.", rank=rank)
        cuts = self.cuts_of(rank)
        named = {member for ranks in (*file.groups.values(), file.restore_ranks) for member in ranks}
        if max(named, default=0) >= self.world:
            why = f"it names rank {max(named)}, but the job has {self.world} ranks: it is of another job"
            raise LayoutError(f"{source}: {why}.", rank=rank)
        number, device = divmod(rank, self.devices)
        if rank not in file.restore_ranks:
            why = f"rank {rank} is not among the ranks {list(file.restore_ranks)} that hold what it holds"
            raise LayoutError(f"{source}: {why}: it is the file of another rank.", rank=rank)
        for other in range(self.devices):
            member = number * self.devices + other
            differs = next(
                (name for name, cut in cuts.items() if boxes[number, cut][device] != boxes[number, cut][other]), None
            )
            if (differs is None) == (member in file.restore_ranks):
                continue
            name = differs or min(cuts, default="")
            mine, theirs = (said_all([boxes[number, cuts[name]][at]]) if name else "nothing" for at in (device, other))
            says = "holds" if differs else "does not hold"
            raise LayoutError(
                f"{source}: it says that rank {member} {says} what rank {rank} holds, but by the strategy file rank "
                f"{rank} holds {mine} of tensor {name!r} and rank {member} {theirs}: they are of different jobs.",
                tensor=name,
                rank=rank,
                ranges=mine,
            )
        stranger = next((member for member in file.restore_ranks if member // self.devices != number), None)
        if stranger is not None:
            why = f"rank {stranger} is in another pipeline stage than rank {rank}, and cannot hold the same"
            raise LayoutError(f"{source}: {why}: it is of another job.", rank=rank)


def _with_shapes(cuts: Mapping[str, Cut], others: Mapping[str, Cut]) -> dict[str, Cut]:
    """The cuts, with the shapes of others where they have none."""
    return {
        name: replace(cut, shape=others[name].shape) if cut.shape is None and name in others else cut
        for name, cut in cuts.items()
    }


def _said(cut: Cut | None) -> str:
    """A cut in words, after the name of the tensor."""
    if cut is None:
        return "is not there"
    axes = [list(axes) for axes in cut.tensor_map]
    shape = "" if cut.shape is None else f" of shape {cut.shape}"
    return f"is cut by {axes} of {list(cut.dev_matrix)}, sharded by {cut.shard_size}{shape and f',{shape}'}"
