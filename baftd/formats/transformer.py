"""A transformer's parameters from its few numbers: names, shapes, and how Megatron-LM cuts each one.

Names and shapes are those of Megatron-Core (`decoder.layers.3.mlp.linear_fc1.weight`); shapes are of whole tensors, in
elements. `Parameter.cut` says which dimension tensor parallelism cuts; where a layer lies is for the one who knows the
stages (`megatron.py`).

Parameters of one layer, with h = hidden, d = head_dim, q = heads, k = kv_heads, f = ffn (2f where gated):
attention (q + 2k)d x h and h x qd, feed-forward f x h and h x f, two norms; biases where `bias`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod
from typing import Literal, TypeAlias

from baftd.errors import UsageError

__all__ = ["MAX_LAYERS", "Cut", "Parameter", "Place", "TransformerShape"]

MAX_LAYERS = 10_000
"""Each layer makes dozens of tensors: a number that was mistyped must not take all memory."""

Cut: TypeAlias = Literal["none", "column", "row", "gated"]
"""How tensor parallelism cuts a parameter: "column" the outputs (the last dimension but one of a weight, the only one
of a bias), "row" the inputs (the last dimension), "gated" the outputs of gate and value, each by itself: a rank holds
two ranges. "none": every tensor-parallel rank holds it whole."""
Place: TypeAlias = "Literal['first', 'last', 'ends'] | int"
"""Stage: the first, the last, both of these (a tied embedding), or that of a layer."""


@dataclass(frozen=True)
class Parameter:
    """One parameter. expert: dimension 0 counts experts. vocabulary: the cut dimension is padded before it is cut."""

    name: str
    shape: tuple[int, ...]
    place: Place
    cut: Cut = "none"
    expert: bool = False
    vocabulary: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def cut_dimension(self) -> int:
        """The dimension that tensor parallelism cuts; -1 for none."""
        matrix = len(self.shape) - self.expert
        if self.cut == "none":
            return -1
        if self.cut == "row":
            return len(self.shape) - 1
        return len(self.shape) - 2 if matrix == 2 else len(self.shape) - 1


@dataclass(frozen=True)
class TransformerShape:
    """The numbers that make a decoder-only transformer.

    kv_heads, ffn, head_dim: 0 for the usual (heads, 4 x hidden, hidden / heads). sequence: rows of learned positions.
    gated: SwiGLU, two matrices in front. norm_bias: layer norm; without it RMS norm. experts: 0 for a dense model, else
    every layer's feed-forward is that many experts and a router. query_layer: one more layer with an embedding of its
    own behind the last (PanGu-alpha).
    Raises UsageError for numbers that make no transformer.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    kv_heads: int = 0
    ffn: int = 0
    head_dim: int = 0
    experts: int = 0
    gated: bool = False
    bias: bool = True
    norm_bias: bool = True
    learned_positions: bool = True
    tied: bool = True
    query_layer: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.default == 0 else 1
            if not isinstance(value, bool) and not least <= value < 1 << 32:
                raise UsageError(f"{item.name} is {value}: a transformer needs a whole number from {least} up.")
        if self.layers > MAX_LAYERS:
            raise UsageError(f"layers is {self.layers}: no transformer has more than {MAX_LAYERS}.")
        if not self.head_dim and self.hidden % self.heads:
            raise UsageError(
                f"hidden {self.hidden} does not divide into {self.heads} heads.", hint="Or give the size of a head."
            )
        if self.heads % self.key_heads:
            raise UsageError(f"{self.heads} heads do not divide among {self.key_heads} key-value heads.")

    @property
    def key_heads(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn or 4 * self.hidden

    @property
    def elements(self) -> int:
        """Number of parameters, without padding."""
        return sum(parameter.elements for parameter in self.parameters())

    def parameters(self) -> Iterator[Parameter]:
        """All parameters in the order of the model: embedding, layers, head. A tied head is not a second one."""
        tied: Place = "ends" if self.tied else "first"
        yield Parameter("embedding.word_embeddings.weight", (self.vocab, self.hidden), tied, "column", vocabulary=True)
        if self.learned_positions:
            yield Parameter("embedding.position_embeddings.weight", (self.sequence, self.hidden), "first")
        for layer in range(self.layers):
            yield from self._layer(f"decoder.layers.{layer}", layer)
        if self.query_layer:
            yield Parameter("decoder.query_embedding.weight", (self.sequence, self.hidden), "last")
            yield from self._layer("decoder.query_layer", "last")
        yield from self._norm("decoder.final_layernorm", "last")
        if not self.tied:
            yield Parameter("output_layer.weight", (self.vocab, self.hidden), "last", "column", vocabulary=True)

    def _layer(self, prefix: str, place: Place) -> Iterator[Parameter]:
        width = self.heads * self.head_size
        qkv = width + 2 * self.key_heads * self.head_size
        yield from self._norm(f"{prefix}.input_layernorm", place)
        yield from self._linear(f"{prefix}.self_attention.linear_qkv", (qkv, self.hidden), place, "column")
        yield from self._linear(f"{prefix}.self_attention.linear_proj", (self.hidden, width), place, "row")
        yield from self._norm(f"{prefix}.pre_mlp_layernorm", place)
        first = self.inner * (2 if self.gated else 1)
        cut: Cut = "gated" if self.gated else "column"
        if self.experts:
            yield Parameter(f"{prefix}.mlp.router.weight", (self.experts, self.hidden), place)
            shapes = ((self.experts, first, self.hidden), (self.experts, self.hidden, self.inner))
            yield Parameter(f"{prefix}.mlp.experts.linear_fc1.weight", shapes[0], place, cut, expert=True)
            yield Parameter(f"{prefix}.mlp.experts.linear_fc2.weight", shapes[1], place, "row", expert=True)
            return
        yield from self._linear(f"{prefix}.mlp.linear_fc1", (first, self.hidden), place, cut)
        yield from self._linear(f"{prefix}.mlp.linear_fc2", (self.hidden, self.inner), place, "row")

    def _linear(self, prefix: str, shape: tuple[int, int], place: Place, cut: Cut) -> Iterator[Parameter]:
        yield Parameter(f"{prefix}.weight", shape, place, cut)
        if self.bias:
            # The bias of a row-parallel layer is added after the sum: every rank has all of it.
            yield Parameter(f"{prefix}.bias", shape[:1], place, "none" if cut == "row" else cut)

    def _norm(self, prefix: str, place: Place) -> Iterator[Parameter]:
        yield Parameter(f"{prefix}.weight", (self.hidden,), place)
        if self.norm_bias:
            yield Parameter(f"{prefix}.bias", (self.hidden,), place)
