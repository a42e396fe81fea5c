"""Who holds what: the strategies that a layout must be able to say, and what it refuses."""

from __future__ import annotations

import pytest

from baftd.checkpoint.layout import Box, Holding, Layout, LayoutBuilder, RankPlace
from baftd.checkpoint.mesh import ParallelDescription
from baftd.checkpoint.ranges import flat_boxes, whole
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import LayoutError, UsageError


def rows(start: int, stop: int, width: int = 4) -> tuple[Box, ...]:
    return (((start, stop), (0, width)),)


def build(world: int, shape: tuple[int, ...], held: dict[int, tuple[Box, ...]], **more: object) -> Layout:
    builder = LayoutBuilder(world)
    builder.add("w", "F32", shape, held, **more)  # type: ignore[arg-type]
    return builder.build()


# ---------------------------------------------------------------------------------------- strategies


def test_data_parallel_replicas_are_found_by_matching_ranges() -> None:
    layout = build(3, (8, 4), {r: rows(0, 8) for r in range(3)})
    assert layout.tensor("w").cells() == ((((0, 8), (0, 4)), (0, 1, 2)),)
    assert layout.unique_bytes == 128
    assert layout.held_bytes == 384
    assert [layout.bytes_of(rank) for rank in range(3)] == [128] * 3


def test_stages_with_different_replica_counts() -> None:
    """DAPPLE: stage 0 on three ranks, stage 1 on one."""
    builder = LayoutBuilder(4)
    builder.add("s0.w", "F32", (8, 4), {r: rows(0, 8) for r in range(3)})
    builder.add("s1.w", "F32", (8, 4), {3: rows(0, 8)})
    for rank in range(4):
        builder.place(RankPlace(rank, (int(rank == 3),)))
    layout = builder.build()
    assert [len(layout.tensor(name).cells()[0].holders) for name in ("s0.w", "s1.w")] == [3, 1]
    assert layout.place(3) == RankPlace(3, (1,))


def test_one_stage_on_two_devices() -> None:
    """Chimera and DualPipe: rank r holds stages r and p - 1 - r, so that each stage lies on two ranks."""
    builder = LayoutBuilder(4)
    for rank in range(4):
        builder.place(RankPlace(rank, (rank, 3 - rank)))
    for stage in range(4):
        builder.add(f"stage{stage}.w", "BF16", (8, 4), {stage: rows(0, 8), 3 - stage: rows(0, 8)})
    layout = builder.build()
    assert layout.tensor("stage0.w").cells()[0].holders == (0, 3)
    assert layout.tensor("stage2.w").cells()[0].holders == (1, 2)
    assert set(layout.bytes_by_rank.tolist()) == {128}


def test_one_stage_on_two_devices_with_other_tensor_parallel_degrees() -> None:
    held = {0: rows(0, 8), 1: rows(0, 4), 2: rows(4, 8)}
    assert build(3, (8, 4), held).tensor("w").cells() == (
        (((0, 4), (0, 4)), (0, 1)),
        (((4, 8), (0, 4)), (0, 2)),
    )
    thirds = {3: rows(0, 3), 4: rows(3, 6), 5: rows(6, 8)}
    layout = build(6, (8, 4), held | thirds, crossing=True)
    cells = layout.tensor("w").cells()
    assert [(cell.box[0], cell.holders) for cell in cells] == [
        ((0, 3), (0, 1, 3)),
        ((3, 4), (0, 1, 4)),
        ((4, 6), (0, 2, 4)),
        ((6, 8), (0, 2, 5)),
    ]
    assert Layout.decode(layout.encode()) == layout


@pytest.mark.parametrize("count", [1, 3, 4, 5, 40])
def test_flat_optimizer_shards_uneven_empty_and_padded(count: int) -> None:
    """Shards of equal size over the flattened tensor; what lies beyond its end is padding and no part of it."""
    shape, elements = (5, 7), 35
    each = -(-elements // count)
    held = {r: flat_boxes(shape, min(r * each, elements), min((r + 1) * each, elements)) for r in range(count)}
    layout = build(count, shape, held)
    tensor = layout.tensor("w")
    assert set(tensor.held) == set(range(count)), "a rank with an empty shard knows the tensor"
    assert all(len(cell.holders) == 1 for cell in tensor.cells())
    assert layout.held_bytes == layout.unique_bytes == 140
    assert Layout.decode(layout.encode()).tensor("w").held == tensor.held


def test_moments_divided_parameters_replicated() -> None:
    """ZeRO 1: the same ranks, other ranges for each tensor."""
    builder = LayoutBuilder(2)
    builder.add("w", "BF16", (8, 4), {0: rows(0, 8), 1: rows(0, 8)})
    builder.add("w.exp_avg", "F32", (8, 4), {0: rows(0, 5), 1: rows(5, 8)})
    layout = builder.build()
    assert layout.bytes_by_rank.tolist() == [64 + 80, 64 + 48]
    assert layout.unique_bytes == 64 + 128


def test_experts_apart_and_shared_parts_replicated() -> None:
    description = ParallelDescription(tp=1, dp=4, ep=2)
    builder = LayoutBuilder(4)
    everyone = Holding.of_groups((4, 4), [((whole((4, 4)),), range(4))])
    builder.add("router", "F32", (4, 4), everyone)
    for group in description.expert.groups("edp"):
        coordinate = description.coordinates(group[0])["ep"]
        builder.add(f"expert{coordinate}", "F32", (8, 4), {rank: rows(0, 8) for rank in group})
    layout = builder.build()
    assert layout.tensor("expert0").cells()[0].holders == (0, 2)
    assert layout.tensor("expert1").cells()[0].holders == (1, 3)
    assert layout.tensor("router").cells()[0].holders == (0, 1, 2, 3)


def test_stacked_experts_in_any_combination() -> None:
    """Experts of one stacked tensor, some of them on two ranks: several boxes a rank."""
    expert = [((e, e + 1), (0, 4)) for e in range(3)]
    layout = build(2, (3, 4), {0: (expert[0], expert[1]), 1: (expert[2], expert[1])})
    assert [cell.holders for cell in layout.tensor("w").cells()] == [(0,), (0, 1), (1,)]
    assert layout.tensor("w").held[1] == (expert[2], expert[1]), "storage order is kept"


def test_tied_embeddings_on_the_first_and_the_last_stage() -> None:
    description = ParallelDescription(tp=2, pp=3)
    builder = LayoutBuilder(6)
    holders = [(rows(4 * t, 4 * t + 4), [t, 4 + t]) for t in range(2)]
    builder.add("embedding", "BF16", (8, 4), Holding.of_groups((8, 4), holders), aliases=["head", "output"])
    for rank in range(6):
        builder.place(RankPlace(rank, description.stages(rank), description.coordinates(rank)))
    layout = builder.build()
    assert [cell.holders for cell in layout.tensor("embedding").cells()] == [(0, 4), (1, 5)]
    back = Layout.decode(layout.encode())
    assert back.tensor("embedding").aliases == ("head", "output")
    assert back.place(4) == RankPlace(4, (2,), {"dp": 0, "pp": 2, "tp": 0, "cp": 0})


def test_without_information_a_tensor_is_its_ranks_own() -> None:
    builder = LayoutBuilder(2)
    for rank in range(2):
        builder.own("w", "F32", (8, 4), rank)
    builder.add("w", "F32", (8, 4), {0: rows(0, 8)})
    layout = builder.build()
    assert len(layout.tensors) == 3
    assert layout.tensor("w").held == layout.tensor("w", 0).held == {0: rows(0, 8)}
    assert layout.tensor("w", 1).held == {1: rows(0, 8)}
    assert not layout.tensor("w", 0).replicated
    assert layout.unique_bytes == 3 * 128
    assert Layout.decode(layout.encode()) == layout
    with pytest.raises(LayoutError, match="no tensor 'v' of rank 1 alone"):
        layout.tensor("v", 1)


def test_volatile_tensors_are_no_replicas() -> None:
    layout = build(2, (8, 4), {0: rows(0, 8), 1: rows(0, 8)}, kind="volatile")
    assert not layout.tensor("w").replicated
    assert layout.unique_bytes == layout.held_bytes == 256


def test_scalars_and_tensors_without_elements() -> None:
    builder = LayoutBuilder(2)
    builder.add("step", "F32", (), {0: ((),), 1: ((),)})
    builder.add("none", "F32", (0, 4), {0: rows(0, 0), 1: ()})
    builder.own("nil", "F32", (0,), 1)
    layout = builder.build()
    assert layout.tensor("step").cells() == (((), (0, 1)),)
    assert layout.tensor("none").cells() == ()
    assert set(layout.tensor("none").held) == {0, 1}
    assert layout.bytes_by_rank.tolist() == [4, 4]
    assert Layout.decode(layout.encode()) == layout


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("held", "rank", "ranges", "words"),
    [
        ({0: rows(0, 5), 1: rows(4, 8)}, 1, "[0:5, 0:4] and [4:8, 0:4]", "neither lies within the other"),
        ({0: rows(0, 3), 1: rows(4, 8)}, 0, "[3:4, 0:4]", "no rank holds [3:4, 0:4]; the nearest range is [0:3, 0:4]"),
        ({0: rows(0, 8), 1: rows(4, 9)}, 1, "[4:9, 0:4]", "which is no range of shape (8, 4)"),
        ({0: rows(0, 8), 1: rows(4, 2)}, 1, "[4:2, 0:4]", "which is no range of shape (8, 4)"),
        ({0: rows(0, 8), 1: (((0, 8),),)}, 1, "[0:8]", "which is no range of shape (8, 4)"),
        ({0: rows(0, 8), 7: rows(0, 8)}, 7, "[0:8, 0:4]", "there are 4 ranks"),
        ({0: rows(0, 8), -1: rows(0, 8)}, -1, "[0:8, 0:4]", "there are 4 ranks"),
        ({2: rows(0, 8) + rows(2, 3)}, 2, "[0:8, 0:4] and [2:3, 0:4]", "which share elements"),
        ({2: rows(0, 8) + rows(0, 8)}, 2, "[0:8, 0:4] and [0:8, 0:4]", "which share elements"),
        ({1: (), 3: ()}, 1, "[0:8, 0:4]", "rank 1 holds nothing of it either"),
        ({}, None, "", "is held by no rank"),
    ],
)
def test_bad_ranges_name_tensor_rank_and_range(
    held: dict[int, tuple[Box, ...]], rank: int | None, ranges: str, words: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        build(4, (8, 4), held)
    assert (caught.value.tensor, caught.value.rank, caught.value.ranges) == ("w", rank, ranges)
    assert words in caught.value.message
    assert "'w'" in caught.value.message
    assert isinstance(caught.value, UsageError)


def test_two_ranks_that_overlap_are_both_named() -> None:
    with pytest.raises(LayoutError, match=r"rank 0 holds \[0:5, 0:4\] and rank 1 holds \[4:8, 0:4\]"):
        build(2, (8, 4), {0: rows(0, 5), 1: rows(4, 8)})


@pytest.mark.parametrize("place", [None, RankPlace(1), RankPlace(1, (0,), {"dp": 1})])
def test_a_rank_without_a_mesh_coordinate(place: RankPlace | None) -> None:
    builder = LayoutBuilder(2)
    builder.add("w", "F32", (8, 4), {0: rows(0, 4), 1: rows(4, 8)})
    builder.place(RankPlace(0, (0,), {"dp": 0, "tp": 0}))
    if place is not None:
        builder.place(place)
    with pytest.raises(LayoutError, match=r"rank 1 has no coordinate .*'tp'.* \[4:8, 0:4\] of tensor 'w'") as caught:
        builder.build()
    assert (caught.value.tensor, caught.value.rank, caught.value.ranges) == ("w", 1, "[4:8, 0:4]")


def test_what_is_wrong_by_itself() -> None:
    builder = LayoutBuilder(2)
    builder.place(RankPlace(0))
    builder.add("w", "F32", (8, 4), {0: rows(0, 8)})
    builder.own("o", "F32", (2,), 1)
    for bad, words in [
        (lambda: LayoutBuilder(0), "a layout of 0 ranks"),
        (lambda: builder.place(RankPlace(0)), "rank 0 is placed twice"),
        (lambda: builder.place(RankPlace(2)), "rank 2 is placed, but"),
        (lambda: builder.place(RankPlace(1, (-1,))), "not different numbers from 0 on"),
        (lambda: builder.place(RankPlace(1, (), {"tp": -1})), "not numbers from 0 on"),
        (lambda: builder.place(RankPlace(1, node="\ud800")), "not Unicode text"),
        (lambda: builder.add("w", "F32", (8, 4), {0: rows(0, 8)}), "declared twice"),
        (lambda: builder.own("o", "F32", (3,), 1), "declared twice by rank 1"),
        (lambda: builder.add("", "F32", (), {0: ((),)}), "not Unicode text of 1 to"),
        (lambda: builder.add("a", "C64", (), {0: ((),)}), "'C64': BOOL, .* a type of another name needs its itemsize"),
        (lambda: builder.add("a", "F32", (), {0: ((),)}, itemsize=8), "an element has 4 bytes"),
        (lambda: builder.add("a", "C 4", (), {0: ((),)}, itemsize=8), "is not a name"),
        (lambda: builder.add("a", "C64", (), {0: ((),)}, itemsize=0), "an element of 0 bytes is out of range"),
        (lambda: builder.add("a", "F32", (), {0: ((),)}, kind="odd"), "neither 'stable' nor 'volatile'"),  # type: ignore[arg-type]
        (lambda: builder.add("a", "F32", (1 << 60,), {}), "out of range"),
        (lambda: builder.add("a", "F32", (-1,), {}), "out of range"),
        (lambda: builder.add("a", "F32", (0, 1 << 70), {}), "out of range"),
        (lambda: builder.place(RankPlace(1, (1 << 70,))), "not different numbers"),
        (lambda: builder.place(RankPlace(1, (), {"tp": 1 << 70})), "not numbers from 0 on"),
        (lambda: builder.add("a", "F32", (2,), Holding.own((3,), 0)), r"shape \(2,\), its holding \(3,\)"),
    ]:
        with pytest.raises(LayoutError, match=words):
            bad()
    with pytest.raises(ValueError, match="rank 1 is named twice"):
        Holding.of_groups((8, 4), [(rows(0, 4), [0, 1]), (rows(4, 8), [1])])


# ---------------------------------------------------------------------------------------- from declared entries


def entry(name: str, shape: tuple[int, ...], ranges: Box, size: tuple[int, ...], **more: object) -> TensorEntry:
    count = 1
    for side in shape:
        count *= side
    fields: dict[str, object] = {"dtype": "F32", "nbytes": 4 * count, "global_shape": size, "ranges": ranges} | more
    return TensorEntry(name, shape=shape, **fields)  # type: ignore[arg-type]


def test_from_what_ranks_declared() -> None:
    layout = Layout.of_entries(
        {
            0: [
                entry("w", (4, 4), ((0, 4), (0, 4)), (8, 4), aliases=("tied",)),
                entry("m", (5,), ((0, 5),), (3, 3)),
                entry("two", (1, 4), ((7, 8), (0, 4)), (8, 4)),
                entry("two", (3, 4), ((0, 3), (0, 4)), (8, 4)),
                entry("stat", (2,), ((0, 2),), (2,), kind="volatile"),
                TensorEntry("rng", "U8", (16,), 16, "volatile"),
            ],
            1: [
                entry("w", (4, 4), ((4, 8), (0, 4)), (8, 4)),
                entry("m", (4,), ((5, 9),), (3, 3)),
                entry("two", (4, 4), ((3, 7), (0, 4)), (8, 4)),
                entry("stat", (2,), ((0, 2),), (2,)),
                TensorEntry("rng", "U8", (16,), 16, "volatile"),
            ],
        },
        [RankPlace(0, (0,)), RankPlace(1, (0,))],
        world=2,
    )
    assert layout.tensor("w").held == {0: rows(0, 4), 1: rows(4, 8)}
    assert layout.tensor("w").aliases == ("tied",)
    assert layout.tensor("m").held == {0: flat_boxes((3, 3), 0, 5), 1: flat_boxes((3, 3), 5, 9)}
    assert layout.tensor("two").held[0] == rows(7, 8) + rows(0, 3)
    assert layout.tensor("stat").kind == "volatile", "one rank's word is enough"
    assert layout.tensor("rng", 1).owner == 1
    assert len(layout.places) == 2


def test_foreign_types() -> None:
    layout = Layout.of_entries(
        {
            0: [entry("c", (2,), ((0, 2),), (4,), dtype="C64", nbytes=16), TensorEntry("q", "INT4", (3,), 2)],
            1: [entry("c", (2,), ((2, 4),), (4,), dtype="C64", nbytes=16)],
            2: [entry("c", (0,), ((4, 4),), (4,), dtype="C64", nbytes=0)],
        }
    )
    assert layout.tensor("c").itemsize == 8
    assert layout.tensor("c").held[2] == ()
    assert (layout.tensor("q", 0).shape, layout.tensor("q", 0).itemsize) == ((2,), 1), "as bytes"
    parts = [entry("q", (3,), ((3 * k, 3 * k + 3),), (6,), dtype="INT4", nbytes=2) for k in range(2)]
    apart = Layout.of_entries({0: parts})
    assert [tensor.name for tensor in apart.tensors] == ["q@0:3", "q@3:6"], "half bytes cannot be cut"


@pytest.mark.parametrize(
    "other",
    [
        entry("w", (4, 4), ((4, 8), (0, 4)), (9, 4)),
        entry("w", (4, 4), ((4, 8), (0, 4)), (8, 4), dtype="I32"),
        entry("w", (40,), ((4, 44),), (8, 4)),
        entry("w", (2, 4), ((4, 6), (0, 4)), (8, 4)),
        entry("w", (5, 4), ((3, 8), (0, 4)), (8, 4)),
    ],
)
def test_ranks_that_disagree(other: TensorEntry) -> None:
    with pytest.raises(LayoutError, match="tensor 'w'") as caught:
        Layout.of_entries({0: [entry("w", (4, 4), ((0, 4), (0, 4)), (8, 4))], 1: [other]})
    assert caught.value.tensor == "w"
    assert caught.value.rank in (0, 1)
    assert caught.value.ranges


def test_foreign_types_of_different_size() -> None:
    with pytest.raises(LayoutError, match=r"elements of .* on rank 1 have 4 bytes, elsewhere 8"):
        Layout.of_entries(
            {k: [entry("c", (2,), ((2 * k, 2 * k + 2),), (4,), dtype="C64", nbytes=16 >> k)] for k in range(2)}
        )
