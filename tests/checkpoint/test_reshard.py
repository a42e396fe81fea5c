"""Reading saved shards into another layout: random layouts against numpy, choice of replicas, refusals."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.ranges import whole
from baftd.checkpoint.reshard import Fill, SavedSet, SavedTensor, Wanted, find_reads, geometry, plan_reads, runs
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import LayoutError
from tests.checkpoint.reshard_cases import (
    ITEMSIZES,
    Held,
    Images,
    Tensor,
    dtypes,
    layouts,
    shapes,
    tensor_of,
    wanted_of,
)

Side = dict[int, list[tuple[Tensor, Held]]]
"""What each rank holds."""


@st.composite
def states(draw: st.DrawFn) -> tuple[list[Tensor], Side, Side]:
    """Tensors, and who holds what of them before and after, with other numbers of ranks."""
    before, after = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    tensors = [
        tensor_of(f"t{number}", draw(dtypes), draw(shapes), draw(st.integers(0, 1000)))
        for number in range(draw(st.integers(1, 2)))
    ]
    sides: list[Side] = []
    for world in (before, after):
        side: Side = {rank: [] for rank in range(world)}
        for tensor in tensors:
            for rank, held in draw(layouts(tensor.shape, world)).items():
                side[rank] += [(tensor, one) for one in held]
        sides.append(side)
    return tensors, sides[0], sides[1]


def cut_anew(images: Images, tensors: Sequence[Tensor], after: Side) -> dict[int, tuple[Fill, ...]]:
    """Read all that the ranks of `after` hold, and compare it with the whole tensors."""
    saved = SavedSet.of(images.entries)
    by_name = {tensor.name: tensor for tensor in tensors}
    found = {}
    for rank, holdings in after.items():
        wanted = [one for tensor, held in holdings for one in wanted_of(tensor, [held])]
        fills = found[rank] = plan_reads(saved, wanted, rank=rank)
        assert [fill.wanted for fill in fills] == wanted
        for fill in fills:
            assert images.read(fill) == by_name[fill.wanted.name].cut(fill.wanted.box).tobytes()
    return found


@given(states())
@settings(max_examples=100, deadline=None)
def test_every_element_arrives_once_and_is_the_right_one(state: tuple[list[Tensor], Side, Side]) -> None:
    tensors, before, after = state
    images = Images.of(before)
    fills = cut_anew(images, tensors, after)
    again = cut_anew(Images.of({rank: before[rank] for rank in sorted(before, reverse=True)}), tensors, after)
    assert again == fills, "the same reads, whatever the order of the images"
    for rank, planned in fills.items():
        for fill in planned:
            assert sum(run.nbytes for read in fill.reads for run in runs(read, fill.wanted)) == fill.wanted.nbytes
            held = [one for tensor, one in before.get(rank, []) if tensor.name == fill.wanted.name]
            if any(not one.flat and _within(fill.wanted.box, one.ranges) for one in held):
                assert {read.source.rank for read in fill.reads} == {rank}, "what a rank has it reads from itself"
    # Saved by the new ranks and read by the old ones, everything is as it was.
    cut_anew(Images.of(after), tensors, before)


def _within(inner: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> bool:
    return all(low <= start and stop <= high for (start, stop), (low, high) in zip(inner, outer, strict=True))


@given(states())
@settings(max_examples=30, deadline=None)
def test_strided_views_are_the_runs(state: tuple[list[Tensor], Side, Side]) -> None:
    _, before, after = state
    images = Images.of(before)
    saved = SavedSet.of(images.entries)
    for rank, holdings in after.items():
        wanted = [one for tensor, held in holdings for one in wanted_of(tensor, [held])]
        for fill in plan_reads(saved, wanted, rank=rank):
            out = bytearray(fill.wanted.nbytes)
            item = np.dtype((np.void, fill.wanted.itemsize))
            for read in fill.reads:
                g = geometry(read, fill.wanted)
                data = images.data[read.source.rank, read.source.stored_name]
                source = np.ndarray(g.shape, item, data, g.source_offset, g.source_strides)
                np.ndarray(g.shape, item, out, g.target_offset, g.target_strides)[...] = source
            assert bytes(out) == images.read(fill)


@given(states(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_exactly_what_nobody_saved_is_missing(state: tuple[list[Tensor], Side, Side], chance: random.Random) -> None:
    """Some parts are lost: the problems name the boxes that lack an element, and the ranges that are gone."""
    tensors, before, after = state
    left = {rank: [one for one in held if chance.random() < 0.7] for rank, held in before.items()}
    images = Images.of(left)
    there = {tensor.name: np.zeros(tensor.shape, dtype=bool) for tensor in tensors}
    for tensor, held in (one for holdings in left.values() for one in holdings):
        mask = there[tensor.name].reshape(-1) if held.flat else there[tensor.name]
        mask[tuple(slice(start, stop) for start, stop in held.ranges)] = True
    for rank, holdings in after.items():
        wanted = [one for tensor, held in holdings for one in wanted_of(tensor, [held])]
        fills, problems = find_reads(SavedSet.of(images.entries), wanted, rank=rank)
        lacking = [one for one in wanted if not there[one.name][_slices(one.box)].all()]
        assert [(problem.tensor, problem.rank) for problem in problems] == [(one.name, rank) for one in lacking]
        assert [fill.wanted for fill in fills] == [one for one in wanted if one not in lacking]
        for problem, one in zip(problems, lacking, strict=True):
            if " and " in problem.ranges:
                continue  # only some of the ranges are spelled out
            gone = np.zeros(one.shape, dtype=bool)
            for box in re.findall(r"\[[^]]*\]", problem.ranges):
                gone[tuple(slice(int(a), int(b)) for a, b in re.findall(r"(\d+):(\d+)", box))] = True
            asked = np.zeros(one.shape, dtype=bool)
            asked[_slices(one.box)] = True
            nothing = not any(held for held in left.values() if any(t.name == one.name for t, _ in held))
            assert (gone == (asked if nothing else asked & ~there[one.name])).all()


def _slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


# ---------------------------------------------------------------------------------------------- choice


def part(
    name: str, shape: tuple[int, ...], *ranges: tuple[int, int], dtype: str = "F32", kind: str = "stable"
) -> tuple[str, TensorEntry]:
    """A declared part of a tensor, and the name it is stored under."""
    lengths = tuple(stop - start for start, stop in ranges)
    nbytes = int(np.prod(lengths, dtype=np.int64)) * ITEMSIZES[dtype]
    entry = TensorEntry(name, dtype, lengths, nbytes, kind, shape, ranges)  # type: ignore[arg-type]
    return f"{name}@{','.join(f'{a}:{b}' for a, b in ranges)}", entry


def own(name: str, *shape: int, dtype: str = "F32") -> tuple[str, TensorEntry]:
    """A tensor without ranges."""
    return name, TensorEntry(name, dtype, shape, int(np.prod(shape, dtype=np.int64)) * ITEMSIZES[dtype])


def want(name: str, *shape: int, box: tuple[tuple[int, int], ...] | None = None, dtype: str = "F32") -> Wanted:
    return Wanted(name, dtype, shape, whole(shape) if box is None else box, ITEMSIZES[dtype])


def sources(fills: Sequence[Fill]) -> list[list[int]]:
    return [[read.source.rank for read in fill.reads] for fill in fills]


def test_neighbouring_parts_come_from_one_image() -> None:
    rows = [part("w", (8, 4), (start, start + 2), (0, 4)) for start in range(0, 8, 2)]
    saved = SavedSet.of({0: rows, 1: rows, 2: rows[:2]})
    (ranks,) = sources(plan_reads(saved, [want("w", 8, 4)], rank=7))
    assert ranks == [1] * 4
    (ranks,) = sources(plan_reads(saved, [want("w", 8, 4)], rank=2))
    assert ranks[:2] == [2, 2]
    assert ranks[2] == ranks[3], "what the own image lacks comes from one other"


def test_replicas_share_the_load() -> None:
    names = [f"t{n}" for n in range(12)]
    saved = SavedSet.of({rank: [part(name, (100,), (0, 100)) for name in names] for rank in range(4)})
    load: dict[int, int] = {}
    for reader in range(10, 18):
        plan_reads(saved, [want(name, 100) for name in names], rank=reader, load=load)
    assert set(load.values()) == {8 * 12 * 400 // 4}
    firsts = {sources(plan_reads(saved, [want("t0", 100)], rank=reader))[0][0] for reader in range(10, 18)}
    assert firsts == {0, 1, 2, 3}, "readers that know nothing of each other do not all begin at one image"
    assert sources(plan_reads(saved, [want("t3", 100)], rank=2)) == [[2]]


def test_a_part_beside_the_whole_is_not_read_twice() -> None:
    saved = SavedSet.of({0: [part("w", (6, 4), (0, 6), (0, 4))], 1: [part("w", (6, 4), (2, 4), (0, 4))]})
    (fill,) = plan_reads(saved, [want("w", 6, 4)], rank=0)
    assert sources([fill]) == [[0]]
    (fill,) = plan_reads(saved, [want("w", 6, 4)], rank=1)
    assert [(read.source.rank, read.box) for read in fill.reads] == [
        (0, ((0, 2), (0, 4))),
        (1, ((2, 4), (0, 4))),
        (0, ((4, 6), (0, 4))),
    ]


def test_runs_are_as_long_as_they_can_be() -> None:
    cases = [
        (part("w", (8, 4), (0, 8), (0, 4)), want("w", 8, 4, box=((2, 6), (0, 4))), [(32, 0, 64)]),
        (part("w", (8, 4), (0, 8), (0, 4)), want("w", 8, 4, box=((2, 4), (1, 3))), [(36, 0, 8), (52, 8, 8)]),
        (part("w", (2, 3, 4), (0, 2), (0, 3), (0, 4)), want("w", 2, 3, 4, box=((0, 2), (1, 3), (0, 4))),
         [(16, 0, 32), (64, 32, 32)]),
        (part("w", (4, 4), (3, 15)), want("w", 4, 4, box=((1, 3), (0, 4))), [(4, 0, 32)]),
        (part("w", (), (0, 1)), want("w"), [(0, 0, 4)]),
        (part("w", ()), want("w"), [(0, 0, 4)]),
    ]  # fmt: skip
    for saved, wanted, expected in cases:
        (fill,) = plan_reads(SavedSet.of({0: [saved]}), [wanted])
        assert [run for read in fill.reads for run in runs(read, wanted)] == expected


def test_many_parts_are_searched_quickly() -> None:
    rows = 4096
    saved = SavedSet.of({rank: [part("w", (rows, 64), (rank, rank + 1), (0, 64))] for rank in range(rows)})
    (fill,) = plan_reads(saved, [want("w", rows, 64, box=((1000, 1003), (5, 6)))])
    assert sources([fill]) == [[1000, 1001, 1002]]
    (fill,) = plan_reads(saved, [want("w", rows, 64)])
    assert sources([fill]) == [list(range(rows))]


# ---------------------------------------------------------------------------------------------- names


def test_other_names_of_a_tensor_count() -> None:
    name, entry = part("wte", (4, 2), (0, 4), (0, 2))
    tied = TensorEntry(entry.name, "F32", entry.shape, entry.nbytes, "stable", (4, 2), entry.ranges, ("head",))
    saved = SavedSet.of({0: [(name, tied)], 1: [part("norm", (2,), (0, 2))]})
    assert saved.names() == ("head", "norm", "wte")
    assert sources(plan_reads(saved, [want("head", 4, 2), want("wte", 4, 2)])) == [[0], [0]]


def without_stage(name: str) -> str:
    return ".".join(word for word in name.split(".") if not word.startswith("stage"))


def staged(equal: bool, *, exact: bool = False) -> SavedSet:
    """Two pipeline stages that both count their layers from 0."""
    return SavedSet.of(
        {k: [part(f"model.stage{k}.layer0", (4,), (0, 4)), part(f"model.stage{k}.only{k}", (2,), (0, 2))]
         for k in range(2)},
        lambda a, b, box: equal,
        base=without_stage,
        exact=exact,
    )  # fmt: skip


def test_stages_are_told_apart_by_name_only() -> None:
    moved = [want("model.stage0.only0", 2), want("model.stage0.only1", 2)]
    assert sources(plan_reads(staged(False), moved, rank=9)) == [[0], [1]]
    with pytest.raises(LayoutError, match=r"model\.stage0\.layer0, model\.stage1\.layer0 of ranks 0, 1") as caught:
        plan_reads(staged(False), [want("model.stage1.layer0", 4)], rank=1)
    assert "attach(names=...)" in caught.value.hint
    assert (caught.value.tensor, caught.value.rank) == ("model.stage1.layer0", 1)
    # Tied embeddings: both stages have the same bytes.
    assert sources(plan_reads(staged(True), [want("model.stage1.layer0", 4)], rank=0)) == [[0]]
    # As many stages as before: a name means what it meant.
    assert sources(plan_reads(staged(False, exact=True), [want("model.stage1.layer0", 4)], rank=0)) == [[1]]
    assert sources(plan_reads(staged(False, exact=True), [want("model.stage1.only0", 2)], rank=1)) == [[0]]


def test_own_tensors_need_one_holder_or_equal_bytes() -> None:
    def same(a: SavedTensor, b: SavedTensor, box: object) -> bool:
        return a.entry.name == "step"

    both = [own("step"), own("rng", 3)]
    saved = SavedSet.of({0: both, 1: [*both, own("last", 2)], 2: both}, same)
    assert sources(plan_reads(saved, [want("step"), want("last", 2)], rank=2)) == [[2], [1]]
    with pytest.raises(LayoutError, match=r"'rng' \[0:3\] of rank 5: each of ranks 0, 1, 2 saved one of its own"):
        plan_reads(saved, [want("rng", 3)], rank=5)
    as_saved = Wanted("rng", "F32", (3,), ((0, 3),), 4, from_rank=1)
    assert sources(plan_reads(saved, [as_saved], rank=5)) == [[1]]
    unknown = SavedSet.of({0: [own("a", 2)], 1: [own("a", 2)]})
    assert "saved one of its own, and nobody knows whether they are equal" in str(
        find_reads(unknown, [want("a", 2)])[1][0]
    )


def test_what_changes_on_each_rank_alone_is_no_replica() -> None:
    mean = part("bn.mean", (3,), (0, 3), kind="volatile")
    for equal in (True, False):
        saved = SavedSet.of({0: [mean], 1: [mean]}, lambda a, b, box, equal=equal: equal)  # type: ignore[misc]
        fills, problems = find_reads(saved, [want("bn.mean", 3)], rank=1)
        assert sources(fills) == ([[1]] if equal else [])
        assert [str(problem) for problem in problems] == (
            [] if equal else ["tensor 'bn.mean' [0:3] of rank 1: ranks 0 and 1 saved different bytes of it"]
        )


# ---------------------------------------------------------------------------------------------- refusals


def test_all_that_is_missing_is_named_at_once() -> None:
    saved = SavedSet.of(
        {
            0: [part("w", (8, 4), (0, 3), (0, 4)), part("flat", (4, 4), (0, 5)), part("mixed", (2,), (0, 2))],
            1: [part("w", (8, 4), (5, 8), (0, 4)), part("flat", (4, 4), (9, 16)), own("mixed", 2)],
            2: [part("u", (2,), (0, 1)), part("odd", (2,), (0, 2))],
            3: [part("u", (3,), (1, 3)), part("odd", (2,), (0, 2), dtype="F64")],
        }
    )
    wanted = [
        want("w", 8, 4, box=((0, 8), (1, 3))),
        want("flat", 4, 4),
        want("nowhere", 5, box=((2, 5),)),
        want("u", 2),
        want("odd", 2),
        want("mixed", 2),
        want("w", 8, 4, box=((0, 1), (0, 1)), dtype="F64"),
        want("w", 8, 5, box=((0, 1), (0, 5))),
        want("w", 8, 4, box=((4, 4), (0, 4))),
        want("nowhere", 5, box=((2, 2),)),
        want("w", 8, 4, box=((5, 7), (0, 4))),
    ]
    fills, problems = find_reads(saved, wanted, rank=6)
    assert [fill.wanted for fill in fills] == wanted[-3:], "nothing is needed for no element"
    assert [str(problem) for problem in problems] == [
        "tensor 'w' [3:5, 1:3] of rank 6: nobody saved this part of it",
        "tensor 'flat' [1:2, 1:4], [2:3, 0:1] of rank 6: nobody saved this part of it",
        "tensor 'nowhere' [2:5] of rank 6: nobody saved it",
        "tensor 'u' [0:2] of rank 6: rank 2 saved F32 [2], rank 3 F32 [3]",
        "tensor 'odd' [0:2] of rank 6: rank 2 saved F32 [2], rank 3 F64 [2]",
        "tensor 'mixed' [0:2] of rank 6: rank 0 saved declared parts of it, rank 1 one without ranges",
        "tensor 'w' [0:1, 0:1] of rank 6: it was saved as F32 [8, 4] and is wanted as F64 [8, 4]",
        "tensor 'w' [0:1, 0:5] of rank 6: it was saved as F32 [8, 4] and is wanted as F32 [8, 5]",
    ]
    with pytest.raises(LayoutError) as caught:
        plan_reads(saved, wanted, rank=6)
    assert all(str(problem) in str(caught.value) for problem in problems)
    assert (caught.value.tensor, caught.value.rank, caught.value.ranges) == ("w", 6, "[3:5, 1:3]")


def test_a_long_list_is_capped() -> None:
    with pytest.raises(LayoutError, match=r"'t19' .*; and 30 more\.$") as caught:
        plan_reads(SavedSet.of({0: []}), [want(f"t{n:02}", 4) for n in range(50)], rank=0)
    assert "t20" not in str(caught.value)
    with pytest.raises(LayoutError, match="nobody saved it"):
        SavedSet.of({}).find("w")


def test_elements_of_another_size_are_refused() -> None:
    odd = TensorEntry("q", "F4_X3", (3,), 4, "stable", (3,), ((0, 3),))
    saved = SavedSet.of({0: [("q", odd)]})
    assert saved.find("q").itemsize == 0
    with pytest.raises(LayoutError, match="no whole number of bytes, 1 are wanted"):
        plan_reads(saved, [Wanted("q", "F4_X3", (3,), ((0, 3),), 1)])


def test_wanted_ranges_of_a_flattened_tensor_follow_each_other() -> None:
    tensor = tensor_of("w", "F32", (3, 4), 1)
    cuts = [0, 3, 9, 12]
    for start, stop in pairwise(cuts):
        wanted = Wanted.of("w", "F32", (3, 4), ((start, stop),), 4)
        assert b"".join(tensor.cut(one.box).tobytes() for one in wanted) == tensor.data.tobytes()[4 * start : 4 * stop]
    assert Wanted.of("w", "F32", (3, 4), None, 4)[0].box == ((0, 3), (0, 4))
    assert Wanted.of("w", "F32", (3, 4), ((2, 2), (0, 4)), 4) == ()
