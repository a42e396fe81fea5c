"""Which part each rank saves: all is saved, by ranks that hold it, in runs of their memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.cutting import Cut, cut_entry
from baftd.checkpoint.division import divide_declared
from baftd.checkpoint.ranges import Box, volume, whole
from baftd.checkpoint.shard import NATIVE_DTYPES, TensorEntry
from baftd.errors import LayoutError, UsageError


def entry(name: str, shape: tuple[int, ...], box: Box | None = None, dtype: str = "F32", **more: object) -> TensorEntry:
    """An entry for a range of a tensor (None: all of it)."""
    ranges = whole(shape) if box is None else box
    part = tuple(stop - start for start, stop in ranges)
    nbytes = NATIVE_DTYPES[dtype] * prod(part)
    return TensorEntry(name, dtype, part, nbytes, global_shape=shape, ranges=ranges, **more)  # type: ignore[arg-type]


def own(name: str, shape: tuple[int, ...]) -> TensorEntry:
    """An entry of a tensor that belongs to its rank alone."""
    return TensorEntry(name, "F32", shape, 4 * prod(shape))


def savers(declared: dict[int, list[TensorEntry]], uncut: dict[int, list[int]] | None = None) -> dict[str, np.ndarray]:
    """How many ranks save each element, by name; checks each cut on the way."""
    division = divide_declared(declared, uncut or {})
    count: dict[str, np.ndarray] = {}
    for rank, cuts in enumerate(division.cuts):
        saved = 0
        for cut in cuts:
            held = declared[rank][cut.entry]
            part, offset = cut_entry(held, cut.ranges)
            saved += part.nbytes
            if held.ranges is None or held.global_shape is None or part.ranges is None:
                assert part is held
                continue
            # The bytes from `offset` on are those of the part: numbered elements say so.
            numbered = np.arange(prod(held.global_shape)).reshape(held.global_shape)
            mine = numbered[tuple(slice(*pair) for pair in held.ranges)].reshape(-1)
            size = held.nbytes // prod(held.shape)
            run = mine[offset // size : (offset + part.nbytes) // size]
            assert run.tolist() == numbered[tuple(slice(*pair) for pair in part.ranges)].reshape(-1).tolist()
            whole_count = count.setdefault(held.name, np.zeros(held.global_shape, dtype=int))
            whole_count[tuple(slice(*pair) for pair in part.ranges)] += 1
        assert saved == division.nbytes[rank]
    return count


@given(
    world=st.integers(1, 5),
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    grid=st.integers(1, 3),
    marks=st.lists(st.sampled_from(["", "alias", "device", "volatile", "sharded"]), min_size=5, max_size=5),
)
@settings(max_examples=80, deadline=None)
def test_every_element_has_one_saver(world: int, shapes: list[tuple[int, ...]], grid: int, marks: list[str]) -> None:
    declared: dict[int, list[TensorEntry]] = {rank: [own("step", (3,))] for rank in range(world)}
    uncut: dict[int, list[int]] = {rank: [] for rank in range(world)}
    for i, shape in enumerate(shapes):
        for rank in range(world):
            box = whole(shape)
            if marks[i] == "sharded" and shape:
                part, parts = rank % grid, min(grid, world)
                bounds = [shape[0] * k // parts for k in range(parts + 1)]
                box = ((bounds[part % parts], bounds[part % parts + 1]), *box[1:])
            more = {"alias": {"aliases": (f"other{i}",)}, "volatile": {"kind": "volatile"}}.get(marks[i], {})
            if marks[i] == "device":
                uncut[rank].append(len(declared[rank]))
            declared[rank].append(entry(f"t{i}", shape, box, **more))
    count = savers(declared, uncut)
    for i, shape in enumerate(shapes):
        assert count[f"t{i}"].shape == shape
        assert (count[f"t{i}"] == (world if marks[i] == "volatile" else 1)).all()


def test_replicas_are_divided_evenly() -> None:
    declared = {rank: [entry("w", (1000, 64)), entry("b", (64,)), own("n", ())] for rank in range(4)}
    division = divide_declared(declared, {})
    assert max(division.nbytes) <= 1.05 * 64_064
    assert all(Cut(2, None) in cuts for cuts in division.cuts)
    assert division.plan == divide_declared(declared, {}).plan
    assert division.plan != divide_declared(declared, {0: [0]}).plan


@pytest.mark.parametrize(
    "held",
    [
        {0: [((0, 8), (0, 4))], 1: [((0, 4), (0, 4))]},  # nested
        {0: [((0, 4), (0, 4)), ((4, 8), (0, 4))], 1: [((0, 8), (0, 4))]},
        {0: [((0, 32),)], 1: [((0, 8), (0, 4))]},  # flattened
    ],
)
def test_what_is_not_held_alike_is_saved_by_all(held: dict[int, list[Box]]) -> None:
    declared = {
        rank: [
            TensorEntry("w", "F32", tuple(b - a for a, b in box), 4 * volume(box), global_shape=(8, 4), ranges=box)
            for box in boxes
        ]
        for rank, boxes in held.items()
    }
    division = divide_declared(declared, {})
    assert [[cut.entry for cut in cuts] for cuts in division.cuts] == [list(range(len(held[rank]))) for rank in held]
    assert all(cut.ranges is None for cuts in division.cuts for cut in cuts)


def test_a_name_of_two_meanings_is_saved_by_all() -> None:
    declared = {0: [entry("w", (8, 4))], 1: [entry("w", (8, 4))], 2: [own("w", (5,))]}
    assert divide_declared(declared, {}).cuts == ((Cut(0, None),),) * 3


def test_memory_orders_are_kept_whole() -> None:
    turned = replace(entry("w", (8, 4)), strides=(1, 8))
    division = divide_declared({0: [turned], 1: [turned]}, {})
    assert sorted(division.cuts) == [(), (Cut(0, None),)]


def test_ranks_that_disagree_are_named() -> None:
    with pytest.raises(LayoutError, match="'w'"):
        divide_declared({0: [entry("w", (8,))], 1: [entry("w", (9,))]}, {})


def test_only_runs_can_be_cut() -> None:
    held = entry("w", (4, 6))
    part, offset = cut_entry(held, ((1, 2), (2, 5)))
    assert (part.shape, offset) == ((1, 3), (6 + 2) * 4)
    for ranges, what in (((0, 2), (0, 3)), "no run"), (((0, 5), (0, 6)), "cannot be cut"), (((0, 2),), "cannot be cut"):
        with pytest.raises(UsageError, match=what):
            cut_entry(held, ranges)
    with pytest.raises(UsageError, match="cannot be cut"):
        cut_entry(own("x", (4,)), ((0, 2),))


def test_a_rank_that_can_copy_more_saves_more() -> None:
    declared = {rank: [entry(f"w{n}", (300, 100)) for n in range(4)] for rank in range(3)}
    even = divide_declared(declared, {})
    assert max(even.nbytes) - min(even.nbytes) <= max(even.nbytes) // 32
    uneven = divide_declared(declared, {}, {0: 3_000, 1: 1_000, 2: 0})
    assert uneven.nbytes[2] == 0
    assert uneven.nbytes[0] == pytest.approx(3 * uneven.nbytes[1], rel=0.05)
    assert sum(uneven.nbytes) == sum(even.nbytes)
    assert uneven.plan != even.plan
