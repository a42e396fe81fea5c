"""Published models: the parameters that we make of their few numbers add up to what was published."""

from __future__ import annotations

import pytest

from baftd.errors import UsageError
from baftd.formats.presets import PRESETS, PUBLISHED, preset
from baftd.formats.transformer import Parameter, TransformerShape


@pytest.mark.parametrize("name", PRESETS)
def test_counts_are_the_published_ones(name: str) -> None:
    published, exactness = PUBLISHED[name]
    assert abs(PRESETS[name].elements - published) <= exactness * published


def test_every_preset_has_a_published_count() -> None:
    assert set(PRESETS) == set(PUBLISHED)


def test_a_name_nearly_right_is_offered() -> None:
    with pytest.raises(UsageError, match="Did you mean gpt-175b"):
        preset("gpt3-175b")
    with pytest.raises(UsageError, match=r"There are gpt-1\.3b, "):
        preset("zzz")
    assert preset("GPT-175B") is PRESETS["gpt-175b"]


def test_parameters_of_a_small_model() -> None:
    shape = TransformerShape(layers=1, hidden=8, heads=4, kv_heads=2, vocab=10, sequence=6)
    found = {parameter.name: parameter.shape for parameter in shape.parameters()}
    layer = "decoder.layers.0"
    assert found == {
        "embedding.word_embeddings.weight": (10, 8),
        "embedding.position_embeddings.weight": (6, 8),
        f"{layer}.input_layernorm.weight": (8,),
        f"{layer}.input_layernorm.bias": (8,),
        f"{layer}.self_attention.linear_qkv.weight": (16, 8),
        f"{layer}.self_attention.linear_qkv.bias": (16,),
        f"{layer}.self_attention.linear_proj.weight": (8, 8),
        f"{layer}.self_attention.linear_proj.bias": (8,),
        f"{layer}.pre_mlp_layernorm.weight": (8,),
        f"{layer}.pre_mlp_layernorm.bias": (8,),
        f"{layer}.mlp.linear_fc1.weight": (32, 8),
        f"{layer}.mlp.linear_fc1.bias": (32,),
        f"{layer}.mlp.linear_fc2.weight": (8, 32),
        f"{layer}.mlp.linear_fc2.bias": (8,),
        "decoder.final_layernorm.weight": (8,),
        "decoder.final_layernorm.bias": (8,),
    }


@pytest.mark.parametrize(
    ("parameter", "dimension"),
    [
        (Parameter("w", (8, 4), 0), -1),
        (Parameter("w", (8, 4), 0, "column"), 0),
        (Parameter("w", (8, 4), 0, "row"), 1),
        (Parameter("b", (8,), 0, "column"), 0),
        (Parameter("w", (3, 8, 4), 0, "gated", expert=True), 1),
        (Parameter("w", (3, 8, 4), 0, "row", expert=True), 2),
    ],
)
def test_which_dimension_is_cut(parameter: Parameter, dimension: int) -> None:
    assert parameter.cut_dimension == dimension


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden": 10, "heads": 3}, "hidden 10 does not divide into 3 heads"),
        ({"heads": 4, "kv_heads": 3}, "4 heads do not divide among 3 key-value heads"),
        ({"experts": -1}, "experts is -1"),
    ],
)
def test_numbers_that_make_no_transformer(numbers: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TransformerShape(**{"layers": 1, "hidden": 8, "heads": 2, "vocab": 10, "sequence": 4, **numbers})
