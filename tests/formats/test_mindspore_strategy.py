"""Strategy files of MindSpore: every field of real ones, both forms, the merged form, and what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from baftd.errors import FormatError
from baftd.formats.mindspore_strategy import TensorStrategy, parse_strategy
from tests.formats.test_protobuf import encoded
from tests.support.mindspore_samples import DATA, FIRST, NAMES, Sample, first_sample, sample

ALL = [*(first_sample(name) for name in FIRST), *(sample(name) for name in NAMES)]
JSON = DATA / "first" / "json_dp2mp2pp2" / "strategy_dp2mp2pp2_rank0.json"
MERGED = DATA / "first" / "merged_dp2mp2pp1_opt_shard2.ckpt"


@pytest.mark.parametrize("job", ALL, ids=lambda job: job.name)
def test_a_real_file_says_what_mindspore_printed(job: Sample) -> None:
    for rank, content in job.files.items():
        file = parse_strategy(content, job.sources[rank])
        assert file.form == ("json" if job.json else "protobuf")
        assert file.stages == (rank // (job.world // job.stages),)
        assert file.current_stage == 2  # whatever the stage is
        assert not file.unknown
        assert not file.merged
        for name, layout in job.layouts[rank].items():
            if name.startswith("inputs"):
                assert name not in file.tensors
                continue
            if name not in file.tensors:
                assert (job.name, rank > 3, "net.embedding" in name) == ("dp2mp2pp2_tied", True, True)
                continue
            tensor = file.tensors[name]
            assert list(tensor.dev_matrix) == layout[0]
            assert [axis for axes in tensor.tensor_map for axis in axes or (-1,)] == layout[1]
            if tensor.shape is not None and len(tensor.shape) == len(layout[6]):
                assert list(tensor.shape) == layout[6]
            if not name.startswith("accu_grads."):
                assert (tensor.shard_size != 0) == bool(layout[5])


def test_json_and_binary_say_the_same() -> None:
    binary = parse_strategy(first_sample("dp2mp2pp2").files[0], "binary")
    text = parse_strategy(JSON.read_bytes(), "json")
    without_shapes = {name: _without_shape(tensor) for name, tensor in text.tensors.items()}
    assert without_shapes == dict(binary.tensors)
    assert text.tensors["net.layers.0.fc1.weight"].shape == (64, 16)
    assert sorted(text.operators, key=lambda one: one.name) == sorted(binary.operators, key=lambda one: one.name)
    assert (text.current_stage, text.stages) == (binary.current_stage, binary.stages)


def test_the_merged_form_carries_the_stage() -> None:
    merged = parse_strategy(MERGED.read_bytes(), "merged")
    own = parse_strategy(first_sample("dp2mp2pp1_opt_shard2").files[0], "own")
    assert merged.merged
    assert not own.merged
    assert {f"0-{name}" for name in own.tensors} == set(merged.tensors)
    for name, tensor in own.tensors.items():
        assert merged.tensors[f"0-{name}"] == TensorStrategy(**{**tensor.__dict__, "stage": 0})


def test_what_is_not_known_is_kept() -> None:
    data = first_sample("dp1mp1pp4").files[0] + encoded(9, 0, 5) + encoded(10, 2, b"new")
    file = parse_strategy(data, "f")
    assert [(one.number, one.value) for one in file.unknown["ParallelStrategyMap"]] == [(9, 5), (10, b"new")]  # type: ignore[attr-defined]
    tree = json.loads(JSON.read_bytes())
    tree["version"] = {"a": [1]}
    tree["parallel_layout_item"]["net.emb"]["colour"] = "blue"
    text = parse_strategy(json.dumps(tree).encode(), "f")
    assert text.unknown == {"version": {"a": [1]}, "parallel_layout_item.net.emb.colour": "blue"}


@pytest.mark.parametrize(
    "path", [DATA / "first/dp1mp1pp4/strategy_dp1mp1pp4_rank1.ckpt", JSON, MERGED], ids=lambda path: path.name
)
def test_cut_off_at_every_byte(path: Any) -> None:
    """A file that ends between two parameters is a whole message of protobuf: only that can be read, with fewer."""
    data = path.read_bytes()
    whole = parse_strategy(data, path.name)
    step = 1 if len(data) < 2000 else 3
    refused: Counter[str] = Counter()
    for length in range(0, len(data), step):
        try:
            part = parse_strategy(data[:length], path.name)
        except FormatError as error:
            refused[str(error).partition(": ")[0]] += 1
            continue
        assert part.form == "protobuf"
        assert 0 < len(part.tensors) < len(whole.tensors)
        assert set(part.tensors) < set(whole.tensors)
    assert set(refused) == {path.name}
    assert refused[path.name] > len(data) / step * 0.9


def test_flipped_bits_are_read_or_refused() -> None:
    chance = random.Random(3)
    for data in (first_sample("dp1mp1pp4").files[1], JSON.read_bytes()):
        for at in range(0, len(data), 3 if len(data) < 2000 else 29):
            damaged = bytearray(data)
            damaged[at] ^= 1 << chance.randrange(8)
            try:
                parse_strategy(bytes(damaged), "damaged")
            except FormatError as error:
                assert str(error).startswith("damaged: ")  # noqa: PT017


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "an empty file is no strategy file"),
        (b"{}", "current_stage is missing"),
        (b"[1]", "not a JSON object"),
        (b'{"current_stage": 1}', "no parameters"),
        (b"\x08\x02", "no parameters"),
        (b"\xff" * 30, "more than 64 bits"),
        (b'{"current_stage": 1, "current_stage": 2}', "'current_stage' is there twice"),
        (b"{" + b'"a":[' * 100_000, "too deeply nested|not JSON|cut off"),
        (b'{"current_stage": true, "parallel_layout_item": {}}', "not a whole number|no whole number|whole number"),
        (b'{"current_stage": 1, "parallel_layout_item": []}', "not a JSON object"),
        ("{é".encode("latin-1"), "no JSON text"),
    ],
)
def test_what_is_no_strategy_file_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        parse_strategy(data, "some name")
    assert str(caught.value).startswith("some name: ")


def test_a_group_file_is_no_strategy_file() -> None:
    with pytest.raises(FormatError, match=r"^group.pb: "):
        parse_strategy(first_sample("dp2mp2pp2").groups[0], "group.pb")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dev_matrix": [2, 0]}, "dimension below 1"),
        ({"dev_matrix": [1 << 40]}, "more than"),
        ({"tensor_map": [2, -1]}, "no dimension 2"),
        ({"tensor_map": [0, 0]}, "uses dimension 0 of dev_matrix twice"),
        ({"tensor_map": [-2, -1]}, "no dimension -2"),
        ({"tensor_shape": [64]}, "does not fit tensor_shape"),
        ({"tensor_shape": [64, -1]}, "out of range"),
        ({"tensor_shape": [64, 1.5]}, "whole number"),
        ({"tensor_map": 3}, "tensor_map is not a list"),
        ({"dev_matrix": None}, "dev_matrix is not a list"),
        ({"field": -1}, "field -1 is out of range"),
        ({"opt_weight_shard_size": -2}, "out of range"),
        ({"param_split_shape": [-1]}, "negative"),
        ({"param_split_shape": [1], "indices_offset": [0, 1]}, "1 split shapes, 2 offsets"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_named(change: dict[str, Any], why: str) -> None:
    tree = json.loads(JSON.read_bytes())
    tree["parallel_layout_item"]["net.layers.0.fc1.weight"] |= change
    with pytest.raises(FormatError, match=why) as caught:
        parse_strategy(json.dumps(tree).encode(), "f.json")
    assert "'net.layers.0.fc1.weight'" in str(caught.value)


def test_a_part_that_is_missing_is_named() -> None:
    tree = json.loads(JSON.read_bytes())
    del tree["parallel_layout_item"]["net.emb"]["tensor_map"]
    with pytest.raises(FormatError, match=r"parameter 'net\.emb': tensor_map is missing"):
        parse_strategy(json.dumps(tree).encode(), "f.json")


def test_names_with_and_without_a_stage_do_not_mix() -> None:
    tree = json.loads(JSON.read_bytes())
    tree["parallel_layout_item"]["1-net.emb"] = tree["parallel_layout_item"]["net.emb"]
    with pytest.raises(FormatError, match="some parameters carry a stage"):
        parse_strategy(json.dumps(tree).encode(), "f.json")


def _without_shape(tensor: TensorStrategy) -> TensorStrategy:
    return TensorStrategy(**{**tensor.__dict__, "shape": None})
