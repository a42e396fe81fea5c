"""Layouts of jobs from what MindSpore wrote of them: every slice of every rank against MindSpore's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from baftd.checkpoint.layout import Layout
from baftd.formats.mindspore_groups import parse_groups
from baftd.formats.mindspore_layout import (
    layout_from_merged_strategy,
    layout_from_parameter_layouts,
    layout_from_strategy_files,
    tag_of,
)
from baftd.formats.mindspore_strategy import parse_strategy
from tests.support.mindspore_samples import DATA, FIRST, NAMES, Sample, Slices, first_sample, sample

ALL = [*(first_sample(name) for name in FIRST), *(sample(name) for name in NAMES)]
MADE = [sample(name) for name in NAMES]
JOBS = pytest.mark.parametrize("job", ALL, ids=lambda job: job.name)
MADE_JOBS = pytest.mark.parametrize("job", MADE, ids=lambda job: job.name)


def from_files(job: Sample, **more: Any) -> Layout:
    return layout_from_strategy_files(
        job.files, job.groups, job.world, job.stages, **({"shapes": job.shapes, "sources": job.sources} | more)
    )


def held(layout: Layout) -> Slices:
    """The block of each rank; every rank holds one at most."""
    found: Slices = {}
    for tensor in layout.tensors:
        found[tensor.name] = {rank: box for rank, (box,) in tensor.held.items()}
    return found


def same(ours: Slices, theirs: Mapping[str, Mapping[int, Any]]) -> int:
    """Compare all that both have; the number of slices."""
    compared = 0
    for name in ours.keys() & theirs.keys():
        assert {rank: ours[name][rank] for rank in theirs[name].keys() & ours[name].keys()} == {
            rank: box for rank, box in theirs[name].items() if rank in ours[name]
        }, name
        compared += len(theirs[name])
    return compared


@MADE_JOBS
def test_every_slice_of_every_rank_is_what_mindspore_cuts(job: Sample) -> None:
    """Both ways in which MindSpore cuts, from the strategy files and from the layouts that it printed."""
    printed = layout_from_parameter_layouts(job.layouts, job.groups, job.world, job.stages, leave_out=("inputs",))
    for ours in (held(from_files(job)), held(printed)):
        names = {name for name in ours if "manual" not in job.name or not name.endswith("net.embedding")}
        assert names <= job.load.keys()
        assert same(ours, job.load) >= len(names) * job.world // job.stages
        # `transform_checkpoints` goes by the strategy file, which is wrong about accumulated gradients (level 1).
        transform = {name: boxes for name, boxes in job.transform.items() if not name.startswith("accu_grads.")}
        assert job.name == "dp2mp2_nested_json" or same(ours, transform) > 0


@JOBS
def test_every_slice_has_the_shape_that_mindspore_printed(job: Sample) -> None:
    """`slice_shape` in parameter_layout_dict is that before the optimizer's sharding."""
    ours = held(from_files(job))
    compared = 0
    for rank, layouts in job.layouts.items():
        for name, layout in layouts.items():
            if name not in ours or rank not in ours[name]:
                continue
            shape = [stop - start for start, stop in ours[name][rank]]
            if not layout[5]:
                assert shape == layout[2], (name, rank)
            else:
                assert layout[2][0] % shape[0] == 0
                assert layout[2][1:] == shape[1:]
                assert shape[0] < layout[2][0]
            compared += 1
    assert compared >= 30 * job.world // job.stages or job.name.startswith(("dp1mp1pp4", "dp1mp4_manual"))


@JOBS
def test_replicas_are_those_that_mindspore_printed(job: Sample) -> None:
    for layout in (
        from_files(job),
        layout_from_parameter_layouts(job.layouts, None, job.world, job.stages, leave_out=("inputs",)),
    ):
        ours = held(layout)
        for rank, groups_of in job.redundancy.items():
            for name, groups in groups_of.items():
                if rank not in ours.get(name, {}):
                    continue
                stage = {member for group in groups for member in group}
                holders: dict[Any, list[int]] = {}
                for member, box in ours[name].items():
                    if member in stage:
                        holders.setdefault(box, []).append(member)
                assert rank in stage
                assert sorted(map(tuple, holders.values())) == sorted(groups), (name, rank)


@JOBS
def test_files_and_parameter_layouts_give_one_layout(job: Sample) -> None:
    """`dp2mp2pp2_tied`: the file of the second stage does not name what it shares with the first."""
    files = from_files(job)
    printed = layout_from_parameter_layouts(job.layouts, job.groups, job.world, job.stages)
    if job.name in NAMES and job.name != "dp2mp2pp2_tied":
        assert files == printed
        return
    for tensor in printed.tensors:
        ours = files.tensor(tensor.name)
        shared = {rank: boxes for rank, boxes in tensor.held.items() if rank in ours.held}
        assert dict(ours.held) == shared
        tied = job.name == "dp2mp2pp2_tied" and tensor.name.endswith("net.embedding")
        assert sorted(tensor.held) == (list(range(8)) if tied else sorted(ours.held))
        if tied:
            assert sorted(ours.held) == [0, 1, 2, 3]


@JOBS
def test_stages_and_coordinates(job: Sample) -> None:
    layout = from_files(job)
    devices = job.world // job.stages
    for rank in range(job.world):
        place = layout.place(rank)
        assert place is not None
        assert place.stages == (rank // devices,)
        assert place.coordinates["pp"] == rank // devices
        assert place.coordinates["device"] == rank % devices
    if job.name == "dp2mp4_opt_all":
        assert layout.place(6).coordinates == {"pp": 0, "device": 6, "dev0": 1, "dev1": 2}  # type: ignore[union-attr]


@JOBS
def test_the_list_of_the_group_file_is_who_holds_the_same(job: Sample) -> None:
    """As the layout checks it, worked out in another way."""
    layout = from_files(job)
    holdings = [[tensor.held.get(rank) for tensor in layout.tensors] for rank in range(job.world)]
    for rank, content in job.groups.items():
        alike = [other for other in range(job.world) if holdings[other] == holdings[rank]]
        assert tuple(alike) == parse_groups(content, "f").restore_ranks


def test_what_the_samples_show() -> None:
    """The cases that matter are really there, so that the comparisons above are not of trivial cuts."""
    assert held(from_files(sample("dp4mp2_opt_shard3")))["net.layers.0.first.weight"][1] == ((32, 64), (0, 16))
    everyone = held(from_files(sample("dp4pp2_opt_all")))
    assert everyone["net.layers.0.first.weight"] == {rank: ((16 * rank, 16 * rank + 16), (0, 16)) for rank in range(4)}
    assert everyone["net.head.weight"][5] == ((0, 6), (0, 16))  # 6 rows cannot be sharded by 4
    assert everyone["net.small"][5] == ((0, 1),)
    partly = held(from_files(sample("dp4mp2_opt_shard2")))
    assert [partly["net.layers.0.first.bias"][rank][0] for rank in range(8)] == [
        (0, 16), (32, 48), (16, 32), (48, 64), (0, 16), (32, 48), (16, 32), (48, 64),
    ]  # fmt: skip
    by_hand = held(from_files(sample("dp1mp4_manual")))
    for name in ("net.embedding", "adam_m.net.embedding", "adam_v.net.embedding"):
        assert [by_hand[name][rank][0] for rank in range(4)] == [(0, 4), (4, 14), (14, 26), (26, 32)]
    nested = held(from_files(sample("dp2mp2_nested")))
    assert [nested["net.layers.0.turned"][rank][1] for rank in range(4)] == [(0, 4), (8, 12), (4, 8), (12, 16)]


def test_json_files_need_no_shapes() -> None:
    for name in ("dp2mp2pp2_json", "dp1mp4_manual_json"):
        assert from_files(sample(name), shapes=None) == from_files(sample(name))


def test_json_without_shapes_describes_a_dimension_that_is_cut_twice_as_two() -> None:
    split = from_files(sample("dp2mp2_nested_json"), shapes=None)
    assert split.tensor("net.layers.0.left").shape == (2, 8, 16)
    assert split.tensor("net.layers.0.left").held[1] == (((0, 1), (4, 8), (0, 16)),)
    parts = {0: {"net.layers.0.left": (4, 16), "net.layers.0.turned": (16, 4), "net.layers.0.vector": (4,)}}
    joined = from_files(sample("dp2mp2_nested_json"), shapes=None, part_shapes=parts)
    whole = from_files(sample("dp2mp2_nested"))
    for name in parts[0]:
        assert joined.tensor(name) == whole.tensor(name)


@MADE_JOBS
def test_shapes_of_saved_parts_are_as_good_as_whole_shapes(job: Sample) -> None:
    layout = from_files(job)
    parts = {
        rank: {
            tensor.name: tuple(stop - start for start, stop in tensor.held[rank][0])
            for tensor in layout.tensors
            if rank in tensor.held
        }
        for rank in range(0, job.world, job.world // job.stages)
    }
    if "manual" in job.name and not job.json:
        with_rows = {name: job.shapes[name] for name in job.shapes if name.endswith("net.embedding")}
        assert from_files(job, shapes=with_rows, part_shapes=parts) == layout
        return
    assert from_files(job, shapes=None, part_shapes=parts) == layout


@pytest.mark.parametrize("job", [job for job in MADE if job.merged is not None], ids=lambda job: job.name)
def test_a_merged_file_of_stages_is_as_good_as_the_files_of_ranks(job: Sample) -> None:
    assert job.merged is not None
    assert job.stages > 1
    file = parse_strategy(job.merged, "merged")
    assert file.merged
    assert file.current_stage == 1  # whatever the stages are
    assert {tensor.stage for tensor in file.tensors.values()} == set(range(job.stages)) == set(file.stages)
    shapes = None if job.json else job.shapes
    assert layout_from_merged_strategy(job.merged, "m", job.groups, job.world, job.stages, shapes) == from_files(job)


def test_a_merged_file_of_one_stage_too() -> None:
    job = first_sample("dp2mp2pp1_opt_shard2")
    merged = (DATA / "first" / "merged_dp2mp2pp1_opt_shard2.ckpt").read_bytes()
    assert layout_from_merged_strategy(merged, "m", job.groups, 4, 1, job.shapes) == from_files(job)
    one_file = layout_from_merged_strategy(job.files[2], "m", job.groups, 4, 1, job.shapes)
    assert one_file == from_files(job)


def test_types_and_what_is_left_out() -> None:
    job = sample("dp2mp2")
    layout = from_files(job, dtypes={"net.scale": "BFloat16", "net.small": "I8"}, dtype="Float16")
    assert [layout.tensor(name).dtype for name in ("net.scale", "net.small", "net.embedding")] == ["BF16", "I8", "F16"]
    assert tag_of("Float32") == "F32"
    assert tag_of("odd") == "odd"
    assert not [tensor.name for tensor in from_files(sample("dp4pp2_zero1")).tensors if "accu_grads" in tensor.name]
    fewer = from_files(job, leave_out=("adam_",))
    assert {tensor.name for tensor in fewer.tensors} == {name for name in job.shapes if not name.startswith("adam_")}
