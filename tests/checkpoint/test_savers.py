"""Who saves what: exact cover, the fractional optimum by maximum flow and binary search, determinism, odd layouts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.layout import Holding, Layout, LayoutBuilder
from baftd.checkpoint.ranges import Box, contains, tiling_problem, volume
from baftd.checkpoint.savers import Assignment, Piece, Share, coverage_problem, divide, everyone, written
from baftd.errors import UsageError

from . import random_layouts
from .random_layouts import put_together

ITEMSIZE = {"BF16": 2, "F32": 4}


@st.composite
def layouts(draw: st.DrawFn, rows: tuple[int, int] = (1, 40), columns: tuple[int, int] = (1, 9)) -> Layout:
    """Tensors cut along their first dimension into uneven parts, each held by any ranks; some are held whole by
    others as well, some are volatile, some belong to one rank alone."""
    world = draw(st.integers(1, 6))
    ranks = st.sets(st.integers(0, world - 1), min_size=1)
    builder = LayoutBuilder(world)
    for number in range(draw(st.integers(1, 7))):
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        shape = (draw(st.integers(*rows)), draw(st.integers(*columns)))[: draw(st.integers(1, 2))]
        if draw(st.integers(0, 9)) == 0:
            builder.own(f"own{number}", dtype, shape, draw(st.integers(0, world - 1)))
            continue
        cuts = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0]), max_size=3))})
        held: dict[int, list[Box]] = {}
        for start, stop in pairwise(cuts):
            for rank in draw(ranks):
                held.setdefault(rank, []).append(((start, stop), *((0, size) for size in shape[1:])))
        for rank in draw(st.sets(st.integers(0, world - 1), max_size=2)):
            held[rank] = [tuple((0, size) for size in shape)]
        kind = "volatile" if draw(st.integers(0, 9)) == 0 else "stable"
        builder.add(f"t{number}", dtype, shape, held, kind=kind)  # type: ignore[arg-type]
    return builder.build()


def capacities(world: int) -> st.SearchStrategy[dict[int, int]]:
    one = st.sampled_from([0, 1000, 1000, 1000, 3000, 7919])
    return st.lists(one, min_size=world, max_size=world).map(lambda some: dict(enumerate(some)))


def check_cover(layout: Layout, made: Assignment) -> None:
    """From the shares alone: each is held by its saver; replicated tensors are tiled, all others saved by all."""
    assert coverage_problem(layout, made) == ""
    saved: dict[int, dict[int, list[Box]]] = {}
    for rank in range(layout.world):
        shares = made.of(rank)
        assert list(shares) == sorted(shares)
        for tensor, box in shares:
            saved.setdefault(tensor, {}).setdefault(rank, []).append(box)
            assert any(contains(held, box) for held in layout.tensors[tensor].held[rank])
        total = sum(volume(box) * layout.tensors[tensor].itemsize for tensor, box in shares)
        assert total == made.bytes_of(rank)
        # The JSON header of the rank's slot is as long as these two say.
        assert made.entries[rank] == len(shares)
        assert made.name_bytes[rank] == sum(written(layout.tensors[tensor].name) for tensor, _ in shares)
        held = [tensor for tensor in layout.tensors for _ in tensor.held.get(rank, ())]
        assert made.held[rank] == (len(held), sum(written(tensor.name) for tensor in held))
    for number, tensor in enumerate(layout.tensors):
        by_rank = saved.get(number, {})
        if made.mode == "divided" and tensor.replicated:
            assert tiling_problem([box for boxes in by_rank.values() for box in boxes], tensor.shape) == ""
        else:
            assert {rank: tuple(boxes) for rank, boxes in by_rank.items()} == {
                rank: tuple(sorted(boxes)) for rank, boxes in tensor.held.items() if boxes
            }


# ---------------------------------------------------------------- the reference: maximum flow and binary search


def goes_in(jobs: Sequence[tuple[Sequence[int], int]], room: Mapping[int, float]) -> bool:
    """Whether all jobs fit into the ranks' room, by breadth-first augmenting paths on an adjacency matrix."""
    ranks = sorted(room)
    if min(room.values()) < 0:
        return False
    size = len(jobs) + len(ranks) + 2
    source, sink = size - 2, size - 1
    capacity = [[0.0] * size for _ in range(size)]
    for number, (holders, nbytes) in enumerate(jobs):
        capacity[source][number] = nbytes
        for rank in holders:
            capacity[number][len(jobs) + ranks.index(rank)] = float("inf")
    for at, rank in enumerate(ranks):
        capacity[len(jobs) + at][sink] = room[rank]
    sent = 0.0
    while True:
        came: dict[int, int] = {source: source}
        queue = deque([source])
        while queue and sink not in came:
            here = queue.popleft()
            for there in range(size):
                if there not in came and capacity[here][there] > 1e-9:
                    came[there] = here
                    queue.append(there)
        if sink not in came:
            return sent >= sum(nbytes for _, nbytes in jobs) - 1e-3
        path = [sink]
        while path[-1] != source:
            path.append(came[path[-1]])
        part = min(capacity[after][before] for before, after in pairwise(path))
        for before, after in pairwise(path):
            capacity[after][before] -= part
            capacity[before][after] += part
        sent += part


def lowest_fill(layout: Layout, capacity: Mapping[int, int]) -> float:
    """The smallest possible max(load / capacity) over ranks that have a window, bytes cut at will. What nobody with
    a window holds does not count."""
    load = dict.fromkeys((rank for rank in capacity if capacity[rank]), 0)
    jobs = []
    for tensor in layout.tensors:
        if not tensor.replicated:
            for rank, boxes in tensor.held.items():
                if rank in load:
                    load[rank] += sum(map(volume, boxes)) * tensor.itemsize
            continue
        for box, holders in tensor.cells():
            usable = [rank for rank in holders if rank in load]
            if usable:
                jobs.append((usable, volume(box) * tensor.itemsize))
    if not load:
        return 0.0
    low, high = 0.0, (sum(load.values()) + sum(nbytes for _, nbytes in jobs)) / min(capacity[rank] for rank in load)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if goes_in(jobs, {rank: middle * capacity[rank] - load[rank] for rank in load}):
            high = middle
        else:
            low = middle
    return high


# ---------------------------------------------------------------- properties


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_byte_has_one_saver_who_holds_it(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    made = divide(layout, data.draw(st.one_of(st.none(), capacities(layout.world))))
    check_cover(layout, made)
    assert made.total == layout.unique_bytes
    assert sum(sum(one.taken.values()) for one in made.classes) == made.total


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_layout_is_covered(data: st.DataObject) -> None:
    """Flattened, nested, crossing, empty and scalar ranges, too."""
    layout = put_together(data.draw(random_layouts.layouts()))
    capacity = data.draw(st.one_of(st.none(), capacities(layout.world)))
    check_cover(layout, divide(layout, capacity))
    check_cover(layout, everyone(layout, capacity))


@given(layouts())
@settings(max_examples=20, deadline=None)
def test_in_the_other_mode_every_holder_saves_all(layout: Layout) -> None:
    made = everyone(layout)
    check_cover(layout, made)
    assert made.loads == tuple(layout.bytes_of(rank) for rank in range(layout.world))
    divided = {one.holders: one.nbytes for one in divide(layout).classes}
    assert {one.holders: one.nbytes for one in made.classes} == divided


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_near_the_optimum(data: st.DataObject) -> None:
    """Within 5 % of the fractional optimum wherever 5 % of a load is more than the elements that cannot be cut."""
    layout = data.draw(layouts())
    capacity = data.draw(capacities(layout.world))
    made = divide(layout, capacity)
    best = lowest_fill(layout, capacity)
    assert made.optimum == pytest.approx(best, rel=1e-3, abs=0.01)
    for rank in range(layout.world):
        if capacity[rank]:
            uncut = sum(4 for one in made.classes if rank in one.taken)
            assert made.bytes_of(rank) <= max(1.05 * best * capacity[rank], best * capacity[rank] + uncut)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_within_five_percent_for_tensors_of_real_sizes(data: st.DataObject) -> None:
    layout = data.draw(layouts(rows=(100, 5000), columns=(30, 4096)))
    capacity = data.draw(capacities(layout.world))
    assert divide(layout, capacity).peak <= 1.05 * lowest_fill(layout, capacity)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_deterministic(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    capacity = data.draw(capacities(layout.world))
    one, other = divide(layout, capacity), divide(Layout.decode(layout.encode()), dict(reversed(capacity.items())))
    assert [one.of(rank) for rank in range(layout.world)] == [other.of(rank) for rank in range(layout.world)]
    assert one.digest == other.digest
    assert one.digest != everyone(layout).digest


# ---------------------------------------------------------------- cases


def replicated(shape: tuple[int, ...], ranks: Sequence[int], world: int | None = None, count: int = 1) -> Layout:
    builder = LayoutBuilder(max(ranks) + 1 if world is None else world)
    holding = Holding.of_groups(shape, [((tuple((0, size) for size in shape),), tuple(ranks))])
    for number in range(count):
        builder.add(f"w{number}", "F32", shape, holding)
    return builder.build()


def test_whole_tensors_stay_whole_where_they_can() -> None:
    layout = replicated((64, 64), range(4), count=8)
    made = divide(layout)
    assert made.loads == (2 * 64 * 64 * 4,) * 4
    assert all(box == ((0, 64), (0, 64)) for rank in range(4) for _, box in made.of(rank))


def test_a_tensor_is_cut_between_rows() -> None:
    made = divide(replicated((4096, 1000), range(3)))
    shares = [share for rank in range(3) for share in made.of(rank)]
    assert len(shares) == 3
    assert all(box[1] == (0, 1000) for _, box in shares)
    assert made.peak <= 1.02 * made.optimum


def test_a_row_that_is_too_large_is_cut_in_itself() -> None:
    layout = replicated((2, 1_000_000), range(8))
    made = divide(layout)
    check_cover(layout, made)
    assert made.peak <= 1.02 * made.optimum
    layout = replicated((1, 3, 700), range(2))
    check_cover(layout, divide(layout))


def test_more_ranks_than_elements() -> None:
    layout = replicated((3,), range(5))
    made = divide(layout)
    check_cover(layout, made)
    assert sorted(made.loads) == [0, 0, 4, 4, 4]
    scalar = replicated((), range(5))
    check_cover(scalar, divide(scalar))
    assert divide(scalar).of(0) == (Share(0, ()),)


def test_by_capacity_and_none_for_those_without_a_window() -> None:
    layout = replicated((4000,), range(4), world=6)
    made = divide(layout, {0: 0, 1: 100, 2: 100, 3: 200, 4: 0, 5: 5})
    assert made.loads[0] == made.loads[4] == made.loads[5] == 0
    assert made.loads[3] == pytest.approx(2 * made.loads[1], rel=0.05)
    assert made.windowless == ()
    assert made.fill(0) == 0.0
    assert made.fill(3) == made.loads[3] / 200


def test_holders_without_any_window_divide_evenly_and_are_named() -> None:
    builder = LayoutBuilder(3)
    builder.add("w", "F32", (1000,), {0: [((0, 1000),)], 1: [((0, 1000),)]})
    builder.own("mine", "F32", (10,), 2)
    made = divide(builder.build(), {0: 0, 1: 0, 2: 100})
    assert made.loads == (2000, 2000, 40)
    assert made.windowless == (0, 1)
    assert made.fill(0) is None
    assert made.fullest == 0
    assert made.peak == made.optimum == 0.4


def test_what_a_rank_saves_anyway_counts() -> None:
    """Rank 0 has a shard of its own and volatile buffers: the others take more of what is shared."""
    builder = LayoutBuilder(3)
    everybody = {rank: [((0, 3000),)] for rank in range(3)}
    builder.add("w", "F32", (3000,), everybody)
    builder.own("moments", "F32", (1000,), 0)
    builder.add("running_mean", "F32", (500,), {0: [((0, 500),)], 1: [((0, 500),)]}, kind="volatile")
    made = divide(builder.build())
    assert made.total == 4 * (3000 + 1000 + 1000)
    assert max(made.loads) <= 1.02 * made.total / 3
    assert sum(1 for share in made.of(1) if made.layout.tensors[share.tensor].name == "running_mean") == 1


def test_stages_with_different_replica_counts_and_a_tied_embedding() -> None:
    """Stage 0 on one rank, stage 1 on three; the embedding on both ends; a stage on two devices."""
    builder = LayoutBuilder(6)
    builder.add("embed", "F32", (900, 4), {rank: [((0, 900), (0, 4))] for rank in (0, 3)})
    builder.add("stage0", "F32", (1000, 4), {0: [((0, 1000), (0, 4))]})
    builder.add("stage1", "F32", (1500, 4), {rank: [((0, 1500), (0, 4))] for rank in (1, 2, 3)})
    builder.add("both", "F32", (1000, 4), {rank: [((0, 1000), (0, 4))] for rank in (4, 5)})
    layout = builder.build()
    made = divide(layout)
    check_cover(layout, made)
    assert made.loads[0] == 16_000  # the embedding goes to the other end: rank 0 is full
    assert made.peak <= 1.02 * made.optimum
    assert made.loads[4] == pytest.approx(made.loads[5], rel=0.02)


def test_experts_stay_with_their_ranks() -> None:
    builder = LayoutBuilder(4)
    for expert in range(4):
        ranks = (expert % 2, expert % 2 + 2)
        builder.add(f"expert{expert}", "F32", (64, 8), {rank: [((0, 64), (0, 8))] for rank in ranks})
    builder.add("router", "F32", (16, 8), {rank: [((0, 16), (0, 8))] for rank in range(4)})
    layout = builder.build()
    check_cover(layout, divide(layout))
    assert divide(layout).loads == (2176, 2176, 2176, 2176)


def test_empty_shards_and_tensors_cost_nothing() -> None:
    builder = LayoutBuilder(3)
    builder.add("w", "F32", (2, 8), {0: [((0, 1), (0, 8))], 1: [((1, 2), (0, 8))], 2: []})
    builder.add("empty", "F32", (0, 8), {0: [], 1: [], 2: []})
    layout = builder.build()
    made = divide(layout)
    check_cover(layout, made)
    assert made.of(2) == ()
    assert made.loads == (32, 32, 0)


def test_capacities_must_make_sense() -> None:
    layout = replicated((8,), range(3))
    with pytest.raises(UsageError, match="capacity of rank 1 is missing"):
        divide(layout, {0: 1, 2: 1})
    with pytest.raises(UsageError, match="rank 2 cannot take -5 bytes"):
        divide(layout, {0: 1, 1: 1, 2: -5})


def test_what_is_wrong_with_an_assignment_is_named() -> None:
    layout = replicated((40, 100), range(2), world=3)
    made = divide(layout)
    first, second = made._pieces[0][0], made._pieces[1][0]
    assert first == Piece(0, 0, 0, 2000)

    def problem(pieces: Mapping[int, tuple[Piece, ...]]) -> str:
        return coverage_problem(layout, replace(made, _pieces=pieces))

    assert problem({0: (first,)}) == "tensor 'w0': [20:40, 0:100] has no saver"
    assert problem({1: (second,)}) == "tensor 'w0': [0:20, 0:100] has no saver"
    assert problem({0: (first,), 1: (Piece(0, 0, 1000, 4000),)}) == "tensor 'w0': [10:20, 0:100] has two savers"
    assert "rank 2 is to save of [0:40, 0:100], which it does not hold" in problem({0: (first,), 2: (second,)})
    assert "rank 1 is to save elements 2000:4001" in problem({0: (first,), 1: (Piece(0, 0, 2000, 4001),)})
    assert "a range that is not divided" in problem({0: (first, Piece(0, 1, 0, 1)), 1: (second,)})
    with pytest.raises(UsageError, match="divides another layout"):
        coverage_problem(replicated((41, 100), range(2)), made)


def test_ten_thousand_tensors_on_a_thousand_ranks() -> None:
    """Data-parallel groups of 16, optimizers cut among them: pieces are made for what is shared alone."""
    world, shape = 1024, (4096, 64)
    builder = LayoutBuilder(world)
    for stage in range(8):
        groups = [range(stage * 128 + part * 16, stage * 128 + part * 16 + 16) for part in range(8)]
        cut = [((512 * part, 512 * part + 512), (0, 64)) for part in range(8)]
        model = Holding.of_groups(shape, [((cut[part],), groups[part]) for part in range(8)])
        rows = [((512 * part + 32 * n, 512 * part + 32 * n + 32), (0, 64)) for part in range(8) for n in range(16)]
        moments = Holding.of_groups(
            shape, [((rows[part * 16 + n],), (groups[part][n],)) for part in range(8) for n in range(16)]
        )
        for number in range(250):
            builder.add(f"stage{stage}.{number}", "BF16", shape, model)
            for moment in range(4):
                builder.add(f"optim.{moment}.stage{stage}.{number}", "F32", shape, moments)
    layout = builder.build()
    assert len(layout.tensors) == 10_000
    made = divide(layout)
    assert coverage_problem(layout, made) == ""
    assert made.total == layout.unique_bytes
    assert made.peak <= 1.02 * made.optimum
    assert sum(volume(box) * layout.tensors[tensor].itemsize for tensor, box in made.of(77)) == made.loads[77]
    assert prod(shape) * 2000 * (2 + 16) == made.total
