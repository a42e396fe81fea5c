"""Descriptions of MindSpore jobs that do not fit together: one error that names file, tensor, rank and range."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from baftd.checkpoint.layout import Layout
from baftd.errors import FormatError, LayoutError
from baftd.formats.mindspore_layout import (
    layout_from_merged_strategy,
    layout_from_parameter_layouts,
    layout_from_strategy_files,
)
from baftd.formats.mindspore_strategy import parse_strategy
from tests.formats.test_protobuf import encoded
from tests.support.mindspore_samples import DATA, Sample, first_sample, sample


def lay_out(job: Sample, **changed: Any) -> Layout:
    given = {
        "files": job.files, "groups": job.groups, "world": job.world, "stages": job.stages, "shapes": job.shapes,
        "sources": {rank: f"dir/{name} of {rank}" for rank, name in job.sources.items()},
        "group_sources": {rank: f"dir/group of {rank}" for rank in job.groups},
    } | changed  # fmt: skip
    return layout_from_strategy_files(**given)


def refused(job: Sample, **changed: Any) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        lay_out(job, **changed)
    return caught.value


def test_a_rank_without_a_file() -> None:
    job = first_sample("dp2mp2pp2")
    error = refused(job, files={rank: data for rank, data in job.files.items() if rank != 5})
    assert error.rank == 5
    assert "rank 5 of 8 has no strategy file" in str(error)
    error = refused(job, files=job.files | {8: job.files[0]}, sources={8: "dir/f8"})
    assert error.rank == 8
    assert "dir/f8: it is of rank 8, but the job has 8 ranks" in str(error)
    with pytest.raises(LayoutError, match="rank 2 of 4 has no parameter_layout_dict"):
        layout_from_parameter_layouts({0: {}, 1: {}}, None, 4, 1)


def test_one_file_of_another_job_with_as_many_devices() -> None:
    job, other = sample("dp2mp2"), sample("dp2mp2_opt_shard2")
    error = refused(job, files=job.files | {2: other.files[2]}, groups=None)
    assert error.rank == 2
    assert error.tensor in job.shapes
    for part in (f"dir/{job.sources[2]} of 2", "rank 2", "rank 0", repr(error.tensor), "different jobs are mixed"):
        assert part in str(error)


def test_all_files_of_another_job_are_told_by_the_group_files() -> None:
    job, other = sample("dp2mp2"), sample("dp2mp2_opt_shard2")
    error = refused(job, files=other.files)
    assert (error.rank, error.tensor != "", error.ranges.startswith("[")) == (0, True, True)
    assert "dir/group of 0: it says that rank 2 holds what rank 0 holds" in str(error)
    error = refused(other, files=job.files)
    assert "it says that rank 2 does not hold what rank 0 holds" in str(error)
    assert "dir/group of 0" in str(error)


def test_a_file_of_another_stage_or_another_world() -> None:
    job = first_sample("dp2mp2pp2")
    error = refused(job, files=job.files | {1: job.files[4]})
    assert error.rank == 1
    assert "it is of pipeline stage 1, but rank 1 of 8 ranks in 2 stages is in stage 0" in str(error)
    error = refused(job, files={rank: first_sample("dp2mp2pp1").files[0] for rank in range(8)}, stages=1)
    assert (error.rank, error.tensor != "") == (0, True)
    assert "cut over 4 devices (dev_matrix [2, 2]), but a stage of rank 0's job has 8" in str(error)
    assert "With 4 ranks in each, 8 ranks are in 2 stages." in error.hint
    with pytest.raises(LayoutError, match="8 ranks cannot be divided into 3 equal pipeline stages"):
        lay_out(job, stages=3)


def test_a_merged_file_where_one_of_a_rank_belongs_and_the_other_way_round() -> None:
    job = first_sample("dp2mp2pp1_opt_shard2")
    merged = (DATA / "first" / "merged_dp2mp2pp1_opt_shard2.ckpt").read_bytes()
    assert "it is a merged strategy file, not that of rank 3" in str(refused(job, files=job.files | {3: merged}))
    with pytest.raises(LayoutError, match="no parameters of pipeline stage 1 of 2"):
        layout_from_merged_strategy(merged, "m", None, 8, 2, job.shapes)
    two = [encoded(3, 2, encoded(1, 2, b"%d-w" % stage) + encoded(2, 2, _layout())) for stage in (0, 1)]
    data = encoded(1, 0, 1) + b"".join(two)
    assert layout_from_merged_strategy(data, "m", None, 8, 2, {"w": (4, 4)}).tensor("w").held[5] == (((0, 4), (0, 4)),)
    with pytest.raises(LayoutError, match=r"^m: it has parameters of stage 1, but the job has 1 stages"):
        layout_from_merged_strategy(data, "m", None, 4, 1, {"w": (4, 4)})


def _layout() -> bytes:
    """Four devices that all hold a whole matrix."""
    minus_one = (1 << 64) - 1
    body = encoded(1, 2, encoded(1, 0, 4)) + encoded(2, 2, encoded(1, 0, minus_one) * 2)
    return body + b"".join(encoded(number, 0, 0) for number in (5, 6, 7))


def test_shapes_that_are_missing_or_do_not_fit() -> None:
    job = first_sample("dp2mp2pp2")
    error = refused(job, shapes=None)
    assert error.tensor != ""
    assert "binary strategy files have no shapes" in str(error)
    assert "Give shapes" in error.hint
    assert "--shapes FILE" in error.hint
    fewer = {name: shape for name, shape in job.shapes.items() if name != "net.head.bias"}
    error = refused(job, shapes=fewer)
    assert (error.tensor, error.rank) == ("net.head.bias", 4)
    assert "tensor 'net.head.bias' (rank 4) is not known" in str(error)
    error = refused(job, shapes=job.shapes | {"net.layers.2.fc1.weight": (63, 16)})
    assert (error.tensor, error.rank, error.ranges) == ("net.layers.2.fc1.weight", 4, "[0:63, 0:16]")
    assert "cannot be cut into 2 equal parts" in str(error)
    assert str(error).startswith(f"dir/{job.sources[4]} of 4: tensor ")
    error = refused(job, shapes=job.shapes | {"net.layers.2.fc1.weight": (64,)})
    assert "tensor_map [0, -1] does not fit its shape (64,)" in str(error)
    error = refused(sample("dp2mp2pp2_json"), shapes={"net.embedding": (64, 16)})
    assert error.tensor == "net.embedding"
    assert "has shape (64, 16) by the shapes that were given, and (32, 16) by" in str(error)
    saved = {0: {"net.emb": (32, 16)}, 4: {"net.head.bias": (8,)}, 1: {"net.emb": (16, 16)}}
    error = refused(job, part_shapes=saved, shapes=None)
    assert (error.tensor, error.rank) == ("net.emb", 1)
    assert "by what rank 1 has saved" in str(error)
    assert refused(job, part_shapes={9: {}}).rank == 9


@pytest.mark.parametrize(
    ("size", "step", "shape", "why"),
    [
        (3, 1, (6, 4), "4 replicas cannot be sharded by 3"),
        (8, 1, (8, 4), "4 replicas cannot be sharded by 8"),
        (-1, 1, (6, 4), "6 rows of a part cannot be sharded by 4"),
        (2, 1, (5, 4), "5 rows of a part cannot be sharded by 2"),
        (-1, 2, (8, 4), "its replicas are 1 ranks apart, opt_weight_shard_step says 2"),
    ],
)
def test_optimizer_sharding_that_cannot_be(size: int, step: int, shape: tuple[int, ...], why: str) -> None:
    layout = {
        "dev_matrix": [4], "tensor_map": [-1, -1], "tensor_shape": list(shape), "field": 0,
        "opt_weight_shard_size": size, "opt_weight_shard_step": step,
    }  # fmt: skip
    data = json.dumps({"current_stage": 0, "parallel_layout_item": {"w": layout}}).encode()
    with pytest.raises(LayoutError, match=why) as caught:
        layout_from_strategy_files(dict.fromkeys(range(4), data), None, 4, 1)
    assert (caught.value.tensor, caught.value.rank) == ("w", 0)
    assert caught.value.ranges == f"[0:{shape[0]}, 0:4]"


def test_an_embedding_cut_by_hand_or_within_fields() -> None:
    def given(**more: Any) -> dict[int, bytes]:
        layout = {
            "dev_matrix": [2], "tensor_map": [0, -1], "field": 0, "opt_weight_shard_size": 0,
            "opt_weight_shard_step": 0, "param_split_shape": [3, 5], "indices_offset": [0, 3],
        } | more  # fmt: skip
        data = json.dumps({"current_stage": 0, "parallel_layout_item": {"w": layout}}).encode()
        return {0: data, 1: data}

    fine = layout_from_strategy_files(given(tensor_shape=[6, 4]), None, 2, 1)  # MindSpore's 2 x 3 rows are not believed
    assert dict(fine.tensor("w").held) == {0: (((0, 3), (0, 4)),), 1: (((3, 8), (0, 4)),)}
    for more, shape, why in (
        ({}, (9, 4), "have 8 rows together, its shape 9"),
        ({"param_split_shape": [8], "indices_offset": [0]}, (8, 4), "1 parts of its rows are given for 2 devices"),
        ({"param_split_shape": [], "indices_offset": [], "field": 4}, (8, 4), "cut within each of 4 fields"),
    ):
        with pytest.raises(LayoutError, match=why) as caught:
            layout_from_strategy_files(given(**more), None, 2, 1, {"w": shape})
        assert caught.value.tensor == "w"


def test_group_files_of_other_ranks_jobs_and_worlds() -> None:
    job = first_sample("dp2mp2pp2")
    error = refused(job, groups={0: job.groups[1]})
    assert error.rank == 0
    assert "dir/group of 0: rank 0 is not among the ranks [1, 3]" in str(error)
    small = encoded(2, 2, encoded(1, 0, 0) + encoded(1, 0, 9))
    assert "names rank 9, but the job has 8 ranks" in str(refused(job, groups={0: small}))
    far = encoded(2, 2, b"".join(encoded(1, 0, rank) for rank in (0, 2, 4)))
    assert "rank 4 is in another pipeline stage than rank 0" in str(refused(job, groups={0: far}))
    error = refused(job, groups={8: job.groups[0]}, group_sources={8: "dir/g8"})
    assert error.rank == 8
    assert "dir/g8: it is of rank 8, but the job has 8 ranks" in str(error)
    with pytest.raises(FormatError, match=r"^dir/group of 3: "):
        lay_out(job, groups={3: job.groups[3][:20]})


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("text", "fewer than 7 elements"),
        (([2], [0], [4]), "fewer than 7 elements"),
        (([2], [0, -1], [4, 4], 0, True, "", [8]), "tensor_map does not fit its shape"),
        (([2], [1], [4], 0, True, "", [8]), "tensor_map does not fit its dev_matrix"),
        (([2], [0], [4], 0, True, "odd", [8]), "does not begin with the number"),
        (([2], [0], [4], 0, True, None, [8]), "group is not a name"),
        (([2], ["x"], [4], 0, True, "", [8]), "element 1 is not a list of whole numbers"),
        (([2], [0], [4], None, True, "", [8]), "field size is not a whole number"),
        (([2, 2], [1, 0], [3], 0, True, "", [8], [1, 3]), "tensor_map does not fit its shape"),
        (([2, 2], [1, 0], [4], 0, True, "", [8], [2, 1]), "tensor_map does not fit its shape"),
        (([2], [0], [], 0, False, "", [8]), "its slice has no rows"),
        (([2], [0], [5], 0, True, "", [9]), "cannot be cut into 2 equal parts"),
        (([2], [-1], [8], 0, True, "4-77", [8]), "2 replicas cannot be sharded by 4"),
    ],
)
def test_entries_of_parameter_layout_dict_that_make_no_sense(entry: Any, why: str) -> None:
    devices = 4 if entry[0] == [2, 2] else 2
    with pytest.raises(LayoutError, match=why) as caught:
        layout_from_parameter_layouts({rank: {"w": entry} for rank in range(devices)}, None, devices, 1)
    assert caught.value.tensor == "w"


def test_unequal_parts_that_ranks_describe_differently() -> None:
    def entry(rows: int) -> tuple[Any, ...]:
        return ([2], [0, -1], [rows, 4], 0, False, "", [2 * rows, 4], [rows, 4])

    fine = layout_from_parameter_layouts({0: {"w": entry(3)}, 1: {"w": entry(5)}}, None, 2, 1)
    assert dict(fine.tensor("w").held) == {0: (((0, 3), (0, 4)),), 1: (((3, 8), (0, 4)),)}
    with pytest.raises(LayoutError, match="part 0 is not there") as caught:
        layout_from_parameter_layouts({0: {"w": entry(3)}, 1: {}}, None, 2, 1)
    assert (caught.value.tensor, caught.value.rank) == ("w", 1)


@pytest.mark.parametrize("name", ["dp2mp2pp2", "dp2mp2pp1_opt_shard2"])
def test_a_file_that_is_cut_off_between_parameters_differs_from_its_neighbours(name: str) -> None:
    """Protobuf cannot tell that such a file is cut off; the other ranks of the stage can."""
    job = first_sample(name)
    data = job.files[1]
    seen = 0
    for length in range(len(data) * 4 // 5, len(data)):
        try:
            parse_strategy(data[:length], "f")
        except FormatError:
            continue
        error = refused(job, files=job.files | {1: data[:length]})
        assert error.rank == 1
        assert error.tensor in job.shapes or error.tensor.startswith("accu_grads.")
        assert "is not there on rank 1" in str(error)
        seen += 1
    assert seen > 6


def test_binary_and_json_files_of_one_job_side_by_side() -> None:
    first, other = sample("dp1mp4_manual"), sample("dp1mp4_manual_json")
    rank = {0: other.files[0]}
    assert lay_out(first, files=first.files | rank) == lay_out(first)
    layout = first_json()
    for files in (layout, dict(reversed(layout.items()))):
        binary = first_sample("dp2mp2pp2")
        assert lay_out(binary, files=binary.files | files) == lay_out(binary)
    shapes = {name: shape for name, shape in binary.shapes.items() if name != "net.emb"}
    assert lay_out(binary, files=binary.files | layout, shapes=shapes) == lay_out(binary)
    tree = json.loads(layout[0])
    tree["parallel_layout_item"]["net.emb"]["tensor_map"] = [0, -1]
    error = refused(binary, files=binary.files | {0: json.dumps(tree).encode()})
    assert (error.tensor, error.rank) == ("net.emb", 1)


def test_a_stage_whose_parameters_are_all_on_another_stage() -> None:
    """Ranks 0 to 3 are those of a job of one stage, and would have the second stage's parameters once more."""
    job, other = first_sample("dp2mp2pp2"), first_sample("dp2mp2pp1")
    error = refused(job, files=job.files | other.files, groups=job.groups | other.groups)
    assert error.rank == 4
    assert error.tensor in job.shapes or error.tensor.startswith("accu_grads.")
    for part in (f"dir/{job.sources[4]} of 4: all its parameters", f"({'dir/' + job.sources[0]} of 0)", "mixed"):
        assert part in str(error)


def test_json_after_a_blank_line_and_json_that_is_a_list() -> None:
    job = sample("dp2mp2pp2_json")
    assert lay_out(job, files={rank: b"\n " + data for rank, data in job.files.items()}) == lay_out(job)
    with pytest.raises(FormatError, match=r"^f: the file: it is not a JSON object"):
        parse_strategy(b"[1]", "f")


def first_json() -> dict[int, bytes]:
    """Ranks 0 and 2 of the first dp2mp2pp2 in the JSON form: one stage writes equal files."""
    (path,) = (DATA / "first" / "json_dp2mp2pp2").glob("*.json")
    return dict.fromkeys((0, 2), path.read_bytes())


@pytest.mark.parametrize("which", ["files", "groups"])
def test_damage_ends_in_nothing_but_a_clear_error(which: str) -> None:
    chance = random.Random(5)
    jobs = [first_sample("dp2mp2pp1_opt_shard2"), sample("dp2mp2pp2_json")]
    refusals = 0
    for turn in range(60):
        job = jobs[turn % 2]
        content = dict(getattr(job, which))
        rank = chance.randrange(job.world)
        damaged = bytearray(content[rank])
        for _ in range(chance.randrange(1, 3)):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        content[rank] = bytes(damaged)
        try:
            lay_out(job, **{which: content})
        except (FormatError, LayoutError):
            refusals += 1
    assert refusals > 30
