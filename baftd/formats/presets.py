"""Models whose numbers are published, for `baftd plan --preset`.

Sources, and what the counts of parameters are compared with:

- gpt-*: Brown et al. 2020 (arXiv 2005.14165), tables 2.1 and D.1 (175B: 174,600 million parameters). Table 2.1 gives
  the 1.3B model 24 heads of 128, which is not its width of 2048: 16 heads are taken, as its reimplementations do.
- llama-2-*: Touvron et al. 2023 (arXiv 2307.09288); llama-3-*: Grattafiori et al. 2024 (arXiv 2407.21783), table 3.
  Counts are those of the released weights.
- mixtral-8x7b: Jiang et al. 2024 (arXiv 2401.04088), table 1; the count is that of the released weights.
- pangu-alpha-*: Zeng et al. 2021 (arXiv 2104.12369) for the totals, 13.1 and 207.0 billion parameters. Widths and
  numbers of layers (40, and 64) are those of MindSpore's model zoo; the paper's own table was not at hand. Whether the
  query layer behind the others is one of these layers is told by the totals alone: 13.1 billion are 40 layers and a
  query layer, 207.0 billion are 63 layers and a query layer (206.9). MindSpore's `PanguAlpha_Model` makes
  `num_layers - 1` layers and a query layer.
"""

from __future__ import annotations

import difflib
from typing import Any

from baftd.errors import UsageError
from baftd.formats.transformer import TransformerShape

__all__ = ["PRESETS", "PUBLISHED", "preset"]

_GPT: dict[str, Any] = {"vocab": 50257, "sequence": 2048}
_LLAMA: dict[str, Any] = {
    "gated": True,
    "bias": False,
    "norm_bias": False,
    "learned_positions": False,
    "tied": False,
}
_LLAMA_2: dict[str, Any] = {**_LLAMA, "vocab": 32000, "sequence": 4096}
_LLAMA_3: dict[str, Any] = {**_LLAMA, "vocab": 128256, "sequence": 8192, "kv_heads": 8}
_PANGU: dict[str, Any] = {"vocab": 40000, "sequence": 1024, "query_layer": True}

PRESETS = {
    "gpt-1.3b": TransformerShape(layers=24, hidden=2048, heads=16, **_GPT),
    "gpt-6.7b": TransformerShape(layers=32, hidden=4096, heads=32, **_GPT),
    "gpt-175b": TransformerShape(layers=96, hidden=12288, heads=96, **_GPT),
    "llama-2-7b": TransformerShape(layers=32, hidden=4096, heads=32, ffn=11008, **_LLAMA_2),
    "llama-2-13b": TransformerShape(layers=40, hidden=5120, heads=40, ffn=13824, **_LLAMA_2),
    "llama-2-70b": TransformerShape(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, **_LLAMA_2),
    "llama-3-8b": TransformerShape(layers=32, hidden=4096, heads=32, ffn=14336, **_LLAMA_3),
    "llama-3-70b": TransformerShape(layers=80, hidden=8192, heads=64, ffn=28672, **_LLAMA_3),
    "llama-3-405b": TransformerShape(layers=126, hidden=16384, heads=128, ffn=53248, **_LLAMA_3),
    "mixtral-8x7b": TransformerShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, experts=8, vocab=32000, sequence=32768, **_LLAMA
    ),
    "pangu-alpha-13b": TransformerShape(layers=40, hidden=5120, heads=40, **_PANGU),
    "pangu-alpha-200b": TransformerShape(layers=63, hidden=16384, heads=128, **_PANGU),
}
"""By the name that `--preset` takes."""

PUBLISHED = {
    "gpt-1.3b": (1_320_000_000, 0.01),
    "gpt-6.7b": (6_660_000_000, 0.01),
    "gpt-175b": (174_600_000_000, 0.001),
    "llama-2-7b": (6_738_415_616, 0.0),
    "llama-2-13b": (13_015_864_320, 0.0),
    "llama-2-70b": (68_976_648_192, 0.0),
    "llama-3-8b": (8_030_261_248, 0.0),
    "llama-3-70b": (70_553_706_496, 0.0),
    "llama-3-405b": (405_853_388_800, 0.0),
    "mixtral-8x7b": (46_702_792_704, 0.0),
    "pangu-alpha-13b": (13_100_000_000, 0.005),
    "pangu-alpha-200b": (207_000_000_000, 0.001),
}
"""Published number of parameters, and how exact it is: 0 for a count of released weights, else the largest relative
difference from ours."""


def preset(name: str) -> TransformerShape:
    """The model of this name. Raises UsageError, with the nearest name."""
    found = PRESETS.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(PRESETS)}."
        raise UsageError(f"there is no preset {name!r}.", hint=hint)
    return found
