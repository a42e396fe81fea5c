"""Layouts of Megatron: coverage is exact for any degrees, flat ranges are those of Megatron's distributed optimizer.

The reference for flat ranges fills a list element by element and deals it out; only the cut into boxes is ours.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.layout import Layout
from baftd.checkpoint.mesh import ParallelDescription
from baftd.checkpoint.ranges import Box, whole
from baftd.checkpoint.savers import coverage_problem, divide, everyone
from baftd.cli.plan_sources import whole_numbers
from baftd.errors import UsageError
from baftd.formats.megatron import flat_parts, megatron_layout, stage_runs
from baftd.formats.presets import PRESETS, preset
from baftd.formats.transformer import TransformerShape

SMALL: dict[str, Any] = {"layers": 4, "hidden": 8, "heads": 4, "vocab": 100, "sequence": 6, "ffn": 16}
SMALL_PAD = 4


def small(**changes: Any) -> TransformerShape:
    return TransformerShape(**{**SMALL, **changes})


def made(shape: TransformerShape, words: str, **options: Any) -> Layout:
    return megatron_layout(shape, ParallelDescription.parse(words), vocabulary_multiple=SMALL_PAD, **options)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def holders(layout: Layout, name: str) -> np.ndarray:
    """How many ranks hold each element."""
    tensor = layout.tensor(name)
    counts = np.zeros(tensor.shape, dtype=np.int64)
    for boxes in tensor.held.values():
        for box in boxes:
            counts[slices(box)] += 1
    return counts


@st.composite
def descriptions(draw: st.DrawFn) -> tuple[TransformerShape, ParallelDescription]:
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2]))
    dp = draw(st.sampled_from([1, 2, 3]))
    cp = draw(st.sampled_from([1, 2]))
    ep = draw(st.sampled_from([e for e in (1, 2) if (dp * cp) % e == 0]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    order = draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-ep-dp-cp-pp"])) if ep == 1 else "tp-cp-ep-dp-pp"
    shape = small(
        experts=draw(st.sampled_from([2, 4])) if ep > 1 else draw(st.sampled_from([0, 2])),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
        norm_bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        query_layer=draw(st.booleans()),
    )
    zero = draw(st.sampled_from([0, 1, 3]))
    return shape, ParallelDescription(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vpp=vpp, zero=zero, order=order)


@given(descriptions(), st.sampled_from([0, 50, 1000]))
@settings(max_examples=40, deadline=None)
def test_every_element_has_as_many_holders_as_it_should(
    described: tuple[TransformerShape, ParallelDescription], bucket: int
) -> None:
    shape, parallel = described
    layout = megatron_layout(shape, parallel, vocabulary_multiple=SMALL_PAD, bucket=bucket)
    replicas = parallel.dp * parallel.cp
    for parameter in shape.parameters():
        ends = 2 if parameter.place == "ends" and parallel.pp > 1 else 1
        if parameter.expert:
            copies, tensor = parallel.edp, parallel.expert_tp
        else:
            copies, tensor = replicas, parallel.tp
        alike = ends * (1 if parameter.cut != "none" else tensor)
        for name, divided in ((f"model.{parameter.name}", 3), (f"optim.0.{parameter.name}.exp_avg", 1)):
            wanted = alike if parallel.zero >= divided else alike * copies
            counts = holders(layout, name)
            assert counts.min() == counts.max() == wanted, name


@given(descriptions())
@settings(max_examples=15, deadline=None)
def test_a_layout_is_the_same_each_time_and_after_the_wire(
    described: tuple[TransformerShape, ParallelDescription],
) -> None:
    shape, parallel = described
    layout = megatron_layout(shape, parallel, vocabulary_multiple=SMALL_PAD)
    assert layout.digest() == megatron_layout(shape, parallel, vocabulary_multiple=SMALL_PAD).digest()
    assert Layout.decode(layout.encode()) == layout


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("words", ["tp=4,pp=2,dp=2,zero=1", "tp=2,pp=4,vpp=2,dp=4,cp=2,zero=3", "tp=8,pp=2,dp=4"])
def test_presets_hold_every_byte(name: str, words: str) -> None:
    shape, parallel = preset(name), ParallelDescription.parse(words)
    # Fewer layers are as good: the stages between the ends are alike.
    shape = replace(shape, layers=parallel.virtual_stages * 2)
    layout = megatron_layout(shape, parallel, vocabulary_multiple=1)  # `build` checks coverage
    padded = -(-shape.vocab // parallel.tp) * parallel.tp - shape.vocab
    padding = padded * shape.hidden * (1 if shape.tied else 2)
    assert layout.unique_bytes == (shape.elements + padding) * 14
    assert sum(volume_of(layout, tensor.name) for tensor in layout.tensors) == 4 * (shape.elements + padding)
    for assignment, saved in ((divide(layout), layout.unique_bytes), (everyone(layout), layout.held_bytes)):
        assert coverage_problem(layout, assignment) == ""
        assert sum(assignment.loads) == saved


def volume_of(layout: Layout, name: str) -> int:
    """Elements of all cells: disjoint, so that it is the tensor's size where coverage is exact."""
    return sum(prod(stop - start for start, stop in cell.box) for cell in layout.tensor(name).cells())


@pytest.mark.parametrize("words", ["tp=2,pp=2,dp=3,zero=1", "dp=4,zero=1", "tp=2,pp=2,vpp=2,dp=2,cp=2,zero=1"])
@pytest.mark.parametrize("bucket", [0, 300])
def test_flat_ranges_are_those_of_a_buffer_dealt_out(words: str, bucket: int) -> None:
    shape, parallel = small(), ParallelDescription.parse(words)
    layout = made(shape, words, bucket=bucket)
    runs = stage_runs(shape.layers, parallel.virtual_stages)
    copies = parallel.dp * parallel.cp
    for stage in range(parallel.virtual_stages):
        first, last = stage == 0, stage == parallel.virtual_stages - 1
        mine = [
            parameter
            for parameter in shape.parameters()
            if (parameter.place in runs[stage])
            or (parameter.place == "first" and first)
            or (parameter.place == "last" and last)
            or (parameter.place == "ends" and (first or last))
        ]
        if last and not first:
            mine.sort(key=lambda parameter: parameter.place == "ends")
        for group in parallel.data_parallel_groups():
            if group[0] not in parallel.ranks_of_stage(stage):
                continue
            for parameter, owner in dealt(layout, mine, group, copies, bucket, parallel.virtual_stages > 1).items():
                held = layout.tensor(f"optim.0.{parameter}.master").held
                whole_part = layout.tensor(f"model.{parameter}").held[group[0]]
                for place, rank in enumerate(group):
                    expected = np.flatnonzero(owner == place)
                    if rank not in held:
                        assert not len(expected)
                        continue
                    span = (int(expected[0]), int(expected[-1]) + 1)
                    assert held[rank] == flat_parts(whole_part, *span)
                    assert len(expected) == span[1] - span[0]


def dealt(
    layout: Layout, parameters: list[Any], group: tuple[int, ...], copies: int, bucket: int, many: bool
) -> dict[str, np.ndarray]:
    """For each parameter the data-parallel place that owns each element of the local part, by way of a real buffer."""
    buckets: list[list[tuple[str, int]]] = [[]]
    filled = 0
    for parameter in reversed(parameters):
        boxes = layout.tensor(f"model.{parameter.name}").held[group[0]]
        size = sum(prod(stop - start for start, stop in box) for box in boxes)
        alone = parameter.place == "ends" and many
        filled += -filled % 64
        if alone and buckets[-1]:
            buckets.append([])
            filled = 0
        buckets[-1].append((parameter.name, size))
        filled += size
        if alone or (bucket and filled >= bucket):
            buckets.append([])
            filled = 0
    found = {}
    for contents in buckets:
        cells: list[str] = []
        for name, size in contents:
            cells += [""] * (-len(cells) % 64) + [name] * size
        cells += [""] * (-len(cells) % lcm(copies, 128))
        owner = np.repeat(np.arange(copies), len(cells) // copies)
        names = np.array(cells)
        found.update({name: owner[names == name] for name, _ in contents})
    return found


def test_gated_layers_keep_two_ranges() -> None:
    layout = made(small(gated=True, bias=False), "tp=2,dp=1")
    held = layout.tensor("model.decoder.layers.0.mlp.linear_fc1.weight").held
    assert held[0] == (((0, 8), (0, 8)), ((16, 24), (0, 8)))
    assert held[1] == (((8, 16), (0, 8)), ((24, 32), (0, 8)))


def test_flat_parts_go_over_several_boxes() -> None:
    boxes = (((0, 2), (0, 3)), ((4, 6), (0, 3)))
    assert flat_parts(boxes, 0, 12) == boxes
    assert flat_parts(boxes, 4, 8) == (((1, 2), (1, 3)), ((4, 5), (0, 2)))
    assert flat_parts(boxes, 3, 3) == ()


def test_tied_embedding_lies_on_both_ends() -> None:
    layout = made(small(), "pp=4,dp=2,zero=1")
    assert set(layout.tensor("model.embedding.word_embeddings.weight").held) == {0, 1, 6, 7}
    master = layout.tensor("optim.0.embedding.word_embeddings.weight.master").held
    assert master[0] == master[6]
    assert master[1] == master[7] != master[0]
    untied = made(small(tied=False), "pp=4,dp=2")
    assert set(untied.tensor("model.embedding.word_embeddings.weight").held) == {0, 1}
    assert set(untied.tensor("model.output_layer.weight").held) == {6, 7}


def test_virtual_stages_alternate() -> None:
    layout = made(small(), "pp=2,vpp=2")
    name = "model.decoder.layers.{}.mlp.linear_fc1.weight"
    assert [sorted(layout.tensor(name.format(layer)).held) for layer in range(4)] == [[0], [1], [0], [1]]
    assert [place.stages for place in layout.places] == [(0, 2), (1, 3)]


def test_experts_lie_on_different_ranks_and_routers_on_all() -> None:
    layout = made(small(experts=4), "tp=2,dp=2,ep=2")
    weight = layout.tensor("model.decoder.layers.0.mlp.experts.linear_fc1.weight")
    assert weight.shape == (4, 16, 8)
    assert weight.held[0] == (((0, 2), (0, 8), (0, 8)),)
    assert weight.held[3] == (((2, 4), (8, 16), (0, 8)),)
    router = layout.tensor("model.decoder.layers.0.mlp.router.weight")
    assert all(router.held[rank] == (whole((4, 8)),) for rank in range(4))


def test_stages_may_differ() -> None:
    assert stage_runs(7, 3, (2, 3, 2)) == (range(2), range(2, 5), range(5, 7))
    layout = made(small(layers=7), "pp=3", stage_layers=(2, 3, 2))
    assert set(layout.tensor("model.decoder.layers.4.mlp.linear_fc1.weight").held) == {1}


@pytest.mark.parametrize(
    ("changes", "words", "options", "said"),
    [
        ({"layers": 5}, "pp=2", {}, "5 layers do not divide into 2 stages (pp x vpp). Say how many each stage has: "),
        ({"heads": 2}, "tp=4", {}, "2 heads do not divide among tp = 4 ranks"),
        ({"kv_heads": 2}, "tp=4", {}, "2 key-value heads do not divide among tp = 4 ranks"),
        ({"ffn": 18}, "tp=4", {}, "a feed-forward width of 18 does not divide among 4"),
        ({}, "dp=2,ep=2", {}, "ep = 2, but the model has no experts"),
        ({"experts": 3}, "dp=2,ep=2", {}, "3 experts do not divide among ep = 2 ranks"),
        ({}, "pp=2", {"stage_layers": (1, 2)}, "the stages have 3 layers together, but the model has 4"),
        ({}, "pp=2", {"stage_layers": (4,)}, "layers are given for 1 stages, but there are 2"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(
    changes: dict[str, int], words: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        made(small(**changes), words, **options)
    assert said in str(caught.value)


def test_the_suggested_stages_are_taken() -> None:
    with pytest.raises(UsageError, match=r"--stage-layers 7,8x14,7\."):
        stage_runs(126, 16)
    assert sum(map(len, stage_runs(126, 16, (7, *[8] * 14, 7)))) == 126
    for layers in range(1, 40):
        for stages in range(1, 12):
            if layers % stages:
                with pytest.raises(UsageError) as caught:
                    stage_runs(layers, stages)
                suggested = whole_numbers(str(caught.value).split("--stage-layers ")[1].removesuffix("."))
                assert sum(map(len, stage_runs(layers, stages, suggested))) == layers
                assert max(suggested) - min(suggested) == 1


def test_one_bucket_is_what_is_usual() -> None:
    usual, one, many = (made(small(), "dp=3,zero=1", **given).digest() for given in ({}, {"bucket": 0}, {"bucket": 1}))
    assert usual == one != many


def test_each_rank_of_a_large_model_holds_what_can_be_worked_out_by_hand() -> None:
    """gpt-175b over tp 8, pp 16, dp 16: 6 layers a stage; h = 12288; 2 bytes a parameter, 12 for its states."""
    h, width = 12288, 12288 // 8
    layer = 12 * h * width + 7 * width + 6 * h  # qkv, proj, fc1, fc2; biases that are cut; whole biases and two norms
    table = 51200 * width  # 50257 padded to a multiple of 128 x 8
    ends = {0: table + 2048 * h, 15: table + 2 * h}  # with positions; with the final norm
    for zero, divided in ((0, (1, 1)), (1, (1, 16)), (3, (16, 16))):
        layout = megatron_layout(preset("gpt-175b"), ParallelDescription.parse(f"tp=8,pp=16,dp=16,zero={zero}"))
        for rank in (0, 7, 127, 128, 1000, 1919, 1920, 2047):
            size = 6 * layer + ends.get(rank // 128, 0)
            expected = 2 * size / divided[0] + 12 * size / divided[1]
            assert abs(layout.bytes_of(rank) - expected) <= 14 * 128 * 128, (zero, rank)
