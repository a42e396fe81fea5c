"""From one layout of a transformer to another and back: degrees of every kind of parallelism, both ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.layout import Layout, LayoutBuilder
from baftd.checkpoint.mesh import ParallelDescription
from baftd.checkpoint.ranges import volume, whole
from baftd.checkpoint.reshard import Fill, reshard, runs
from baftd.checkpoint.savers import Assignment, divide, everyone
from baftd.errors import LayoutError
from baftd.formats.megatron import megatron_layout
from baftd.formats.transformer import TransformerShape
from tests.checkpoint.reshard_cases import Tensor, tensor_of

DENSE = TransformerShape(layers=4, hidden=8, heads=4, vocab=32, sequence=6, ffn=12)
EXPERTS = TransformerShape(layers=2, hidden=8, heads=4, vocab=32, sequence=6, ffn=8, experts=4, gated=True, tied=False)
DEGREES = [
    "tp=1,pp=1,dp=1", "tp=4,dp=2", "tp=2,pp=2,dp=2,zero=1", "pp=4,dp=2", "pp=2,vpp=2,tp=2", "dp=3,zero=1",
    "dp=5,zero=3", "tp=2,dp=3,zero=2", "pp=2,dp=3,zero=1", "dp=4", "cp=2,dp=2,zero=1", "tp=2,pp=2,dp=1,order=pp-tp-dp",
]  # fmt: skip
EXPERT_DEGREES = ["dp=4,ep=2", "dp=2,ep=2,tp=2", "dp=4,ep=4,zero=1", "dp=1", "pp=2,dp=2,ep=2,zero=1"]


def layout_of(shape: TransformerShape, degrees: str) -> Layout:
    return megatron_layout(shape, ParallelDescription.parse(degrees), vocabulary_multiple=8)


class Job:
    """A layout, its whole tensors, and the shards that an assignment of savers makes of them."""

    def __init__(self, layout: Layout, tensors: dict[str, Tensor]) -> None:
        self.layout, self.tensors = layout, tensors

    def shards(self, savers: Assignment) -> dict[tuple[int, str, object], bytes]:
        """Bytes of each share, by rank, tensor and box."""
        found = {}
        for rank in range(self.layout.world):
            for number, box in savers.of(rank):
                name = self.layout.tensors[number].name
                found[rank, name, box] = self.tensors[name].cut(box).tobytes()
        return found


def moved(shards: dict[tuple[int, str, object], bytes], fill: Fill) -> bytes:
    """What a fill reads, run by run."""
    out = bytearray(fill.wanted.nbytes)
    done = 0
    for read in fill.reads:
        source = shards[read.source.rank, read.source.entry.name, read.source.entry.ranges]
        for run in runs(read, fill.wanted):
            out[run.target : run.target + run.nbytes] = source[run.source : run.source + run.nbytes]
            done += run.nbytes
    assert done == fill.wanted.nbytes, "not one byte more than is wanted"
    return bytes(out)


def check(old: Layout, savers: Assignment, new: Layout) -> dict[int, tuple[Fill, ...]]:
    """Every rank of the new layout gets the elements that it holds, and nothing else."""
    job = Job(old, {t.name: tensor_of(t.name, t.dtype, t.shape, n) for n, t in enumerate(old.tensors)})
    shards = job.shards(savers)
    fills = reshard(old, savers, new)
    assert sorted(fills) == list(range(new.world))
    for rank, mine in fills.items():
        assert sum(fill.wanted.nbytes for fill in mine) == new.bytes_of(rank)
        held = [(tensor.name, box) for tensor in new.tensors for box in tensor.held.get(rank, ())]
        assert [(fill.wanted.name, fill.wanted.box) for fill in mine] == held
        for fill in mine:
            assert moved(shards, fill) == job.tensors[fill.wanted.name].cut(fill.wanted.box).tobytes()
    return fills


@given(st.sampled_from(DEGREES), st.sampled_from(DEGREES), st.booleans())
@settings(max_examples=12, deadline=None)
def test_dense_models_move_between_all_degrees(before: str, after: str, divided: bool) -> None:
    old, new = layout_of(DENSE, before), layout_of(DENSE, after)
    fills = check(old, divide(old) if divided else everyone(old), new)
    if before == after and not divided:
        own = {read.source.rank == rank for rank, mine in fills.items() for fill in mine for read in fill.reads}
        assert own <= {True}, "where nothing changes each rank reads its own image"
    check(new, divide(new), old)


@given(st.sampled_from(EXPERT_DEGREES), st.sampled_from(EXPERT_DEGREES))
@settings(max_examples=5, deadline=None)
def test_experts_move_between_ranks(before: str, after: str) -> None:
    old, new = layout_of(EXPERTS, before), layout_of(EXPERTS, after)
    check(old, divide(old), new)


def test_moments_follow_their_parameters() -> None:
    old, new = layout_of(DENSE, "pp=4,dp=2"), layout_of(DENSE, "pp=2,dp=2")
    fills = reshard(old, everyone(old), new)
    for mine in fills.values():
        names = {fill.wanted.name for fill in mine}
        params = {name.removeprefix("model.") for name in names if name.startswith("model.")}
        for state in ("master", "exp_avg", "exp_avg_sq"):
            moments = {name.removeprefix("optim.0.") for name in names if name.endswith(f".{state}")}
            assert moments == {f"{param}.{state}" for param in params}


def test_images_share_the_load() -> None:
    old, new = layout_of(DENSE, "dp=4"), layout_of(DENSE, "dp=8")
    fills = reshard(old, everyone(old), new)
    load = dict.fromkeys(range(4), 0)
    for rank, mine in fills.items():
        for fill in mine:
            for read in fill.reads:
                if rank < 4:
                    assert read.source.rank == rank
                load[read.source.rank] += volume(read.box) * fill.wanted.itemsize
    assert max(load.values()) < 1.05 * sum(load.values()) / 4


def test_what_nobody_saved_is_named_with_rank_and_range() -> None:
    old = LayoutBuilder(2)
    old.add("w", "F32", (4, 4), {0: [((0, 2), (0, 4))], 1: [((2, 4), (0, 4))]})
    for rank in range(2):
        old.own("rng", "U8", (8,), rank)
    saved = old.build()
    new = LayoutBuilder(3)
    new.add("w", "F32", (4, 4), {0: [whole((4, 4))]})
    new.add("head", "F32", (5,), {1: [((0, 3),)], 2: [((3, 5),)]})
    new.own("rng", "U8", (8,), 2)
    with pytest.raises(LayoutError) as caught:
        reshard(saved, everyone(saved), new.build())
    for words in (
        "'head' [0:3] of rank 1: nobody saved it",
        "'head' [3:5] of rank 2: nobody saved it",
        "'rng' [0:8] of rank 2: each of ranks 0, 1 saved one of its own",
    ):
        assert words in str(caught.value)
    assert (caught.value.tensor, caught.value.rank, caught.value.ranges) == ("head", 1, "[0:3]")
    alike = reshard(saved, everyone(saved), new_without_head(), same_bytes=lambda a, b, box: True)
    assert [read.source.rank for fill in alike[2] for read in fill.reads] == [0]


def new_without_head() -> Layout:
    builder = LayoutBuilder(3)
    builder.add("w", "F32", (4, 4), {0: [whole((4, 4))]})
    builder.own("rng", "U8", (8,), 2)
    return builder.build()


def test_a_rank_reads_few_pieces_of_a_large_job() -> None:
    shape = TransformerShape(layers=8, hidden=512, heads=16, vocab=1024, sequence=128)
    old = megatron_layout(shape, ParallelDescription.parse("tp=4,pp=4,dp=16,zero=1"), vocabulary_multiple=8)
    new = megatron_layout(shape, ParallelDescription.parse("tp=8,pp=2,dp=4,zero=1"), vocabulary_multiple=8)
    fills = reshard(old, divide(old), new)
    assert all(sum(fill.wanted.nbytes for fill in mine) == new.bytes_of(rank) for rank, mine in fills.items())
    assert np.mean([len(fill.reads) for mine in fills.values() for fill in mine]) < 8
