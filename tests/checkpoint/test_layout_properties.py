"""Random layouts: coverage is exact, bytes are the same whatever the order, and garbage is a FormatError."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from math import prod

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baftd.checkpoint.layout import Box, Layout, LayoutBuilder, RankPlace
from baftd.checkpoint.layout_wire import MAX_LAYOUT_BYTES
from baftd.checkpoint.mesh import Mesh
from baftd.checkpoint.ranges import contains, volume
from baftd.errors import FormatError, LayoutError

from .random_layouts import Declared, holdings, layouts, put_together, tilings

Drawn = tuple[int, list[RankPlace], list[Declared]]


def counted(shape: Sequence[int], boxes: Sequence[Box]) -> np.ndarray:
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[tuple(slice(start, stop) for start, stop in box)] += 1
    return count


@settings(max_examples=40, deadline=None)
@given(drawn=layouts())
def test_cells_cover_exactly_and_every_rank_holds_what_it_declared(drawn: Drawn) -> None:
    world, _, tensors = drawn
    layout = put_together(drawn)
    held_bytes = [0] * world
    unique = 0
    for one in tensors:
        tensor = layout.tensor(one.name, one.owner)
        held = one.held if one.owner is None else {one.owner: [tuple((0, size) for size in one.shape)]}
        assert (counted(one.shape, [cell.box for cell in tensor.cells()]) == 1).all()
        for rank, boxes in held.items():
            filled = tuple(box for box in boxes if volume(box))
            assert tensor.held[rank] == filled, "in storage order"
            mine = [cell.box for cell in tensor.cells() if rank in cell.holders]
            assert (counted(one.shape, mine) == counted(one.shape, filled)).all()
            assert all(any(contains(box, cell) for box in filled) for cell in mine)
            held_bytes[rank] += sum(map(volume, filled)) * tensor.itemsize
        copies = [sum(map(volume, boxes)) for boxes in tensor.held.values()]
        unique += tensor.nbytes if tensor.replicated else sum(copies) * tensor.itemsize
        assert set(tensor.held) == set(held)
    assert layout.bytes_by_rank.tolist() == held_bytes
    assert layout.unique_bytes == unique
    grouped = sorted(number for _, numbers in layout.by_holding for number in numbers)
    assert grouped == list(range(len(layout.tensors)))


@settings(max_examples=40, deadline=None)
@given(drawn=layouts(), data=st.data())
def test_bytes_are_the_layout_whatever_the_order(drawn: Drawn, data: st.DataObject) -> None:
    layout = put_together(drawn)
    encoded = layout.encode()
    other = put_together(drawn, lambda calls: data.draw(st.permutations(calls)))
    assert other.encode() == encoded
    assert other.digest() == layout.digest()
    back = Layout.decode(encoded)
    assert back == layout
    assert back.encode() == encoded
    assert back.places == layout.places
    for one, two in zip(back.tensors, layout.tensors, strict=True):
        assert one == two
        assert (one.held, one.cells()) == (two.held, two.cells())


@settings(max_examples=40, deadline=None)
@given(drawn=layouts(), other=layouts())
def test_different_layouts_have_different_digests(drawn: Drawn, other: Drawn) -> None:
    def plain(layout: Layout) -> list[object]:
        tensors = [(t.name, t.dtype, t.kind, t.shape, t.owner, sorted(t.held.items())) for t in layout.tensors]
        return [layout.world, layout.places, tensors, [t.holding.pattern.crossing for t in layout.tensors]]

    one, two = put_together(drawn), put_together(other)
    assert (one == two) == (plain(one) == plain(two))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple))
def test_random_meshes_and_placements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Each mesh axis cuts one dimension, in pieces of ceil(size / ranks) as torch does, or replicates."""
    axes = tuple((f"a{k}", size) for k, size in enumerate(data.draw(st.lists(st.integers(1, 3), max_size=3))))
    mesh = Mesh(axes, tuple(data.draw(st.permutations(range(prod(size for _, size in axes))))))
    cuts = {name: data.draw(st.none() | st.integers(0, len(shape) - 1)) for name, _ in axes}
    held: dict[int, list[Box]] = {}
    for rank in range(mesh.size):
        box = [(0, size) for size in shape]
        for name, count in axes:
            dimension = cuts[name]
            if dimension is not None:
                start, stop = box[dimension]
                each = -(-(stop - start) // count)
                low = min(stop, start + each * mesh.coordinates(rank)[name])
                box[dimension] = (low, min(stop, low + each))
        held[rank] = [tuple(box)]
    builder = LayoutBuilder(mesh.size)
    builder.add("w", "F32", shape, held)
    for rank in range(mesh.size):
        builder.place(RankPlace(rank, (), mesh.coordinates(rank)))
    layout = builder.build()
    cells = layout.tensor("w").cells()
    assert (counted(shape, [cell.box for cell in cells]) == 1).all()
    alike = mesh.groups(*(name for name, dimension in cuts.items() if dimension is None))
    assert {cell.holders for cell in cells} <= {tuple(sorted(group)) for group in alike}
    assert layout.held_bytes == layout.unique_bytes * len(alike[0])
    assert Layout.decode(layout.encode()) == layout


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_a_lost_box_is_a_hole_and_is_named(data: st.DataObject, shape: tuple[int, ...]) -> None:
    held, crossing = data.draw(holdings(shape, 6))
    boxes = [box for own in held.values() for box in own if volume(box)]
    lost = data.draw(st.sampled_from(boxes))
    left = {rank: [box for box in own if box != lost] for rank, own in held.items()}
    free = counted(shape, [box for own in left.values() for box in own]) == 0
    builder = LayoutBuilder(6)
    builder.add("w", "F32", shape, left, crossing=crossing)
    if not free.any():
        builder.build()
        return
    with pytest.raises(LayoutError, match="no rank holds") as caught:
        builder.build()
    assert caught.value.rank in left
    hole = tuple(tuple(map(int, part.split(":"))) for part in caught.value.ranges.strip("[]").split(", "))
    assert free[tuple(slice(start, stop) for start, stop in hole)].all()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple))
def test_partial_overlaps_are_refused_unless_meant(data: st.DataObject, shape: tuple[int, ...]) -> None:
    held = {rank: [box] for rank, box in enumerate([*data.draw(tilings(shape)), *data.draw(tilings(shape))])}
    boxes = sorted({box for own in held.values() for box in own if volume(box)})
    crosses = any(
        (counted(shape, [a, b]) > 1).any() and not contains(a, b) and not contains(b, a) for a in boxes for b in boxes
    )
    builder = LayoutBuilder(len(held))
    builder.add("w", "F32", shape, held)
    if crosses:
        with pytest.raises(LayoutError, match="they overlap, and neither lies within the other"):
            builder.build()
    else:
        builder.build()


# ---------------------------------------------------------------------------------------- damaged bytes


@settings(max_examples=40, deadline=None)
@given(drawn=layouts(), data=st.data())
def test_damaged_bytes(drawn: Drawn, data: st.DataObject) -> None:
    """Cut short, a bit turned, a byte replaced: a FormatError, or another layout that is right."""
    encoded = bytearray(put_together(drawn).encode())
    with pytest.raises(FormatError):
        Layout.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(FormatError):
        Layout.decode(bytes(encoded) + data.draw(st.binary(min_size=1, max_size=3)))
    for _ in range(4):
        damaged = bytearray(encoded)
        damaged[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(FormatError):
            Layout.decode(damaged).encode()


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), value=values)
def test_a_part_replaced_by_anything(data: st.DataObject, value: object) -> None:
    builder = LayoutBuilder(4)
    builder.add("w", "F32", (8, 4), {rank: [((2 * rank, 2 * rank + 2), (0, 4))] for rank in range(4)}, aliases=["x"])
    builder.own("o", "C64", (3,), 1, itemsize=8)
    for rank in range(4):
        builder.place(RankPlace(rank, (0,), {"dp": rank}))
    whole = msgpack.unpackb(builder.build().encode()[4:], strict_map_key=False)
    part, key = whole, data.draw(st.integers(0, 7))
    while isinstance(part[key], list) and part[key] and data.draw(st.booleans()):
        part = part[key]
        key = data.draw(st.integers(0, len(part) - 1))
    part[key] = value
    with contextlib.suppress(FormatError):
        Layout.decode(b"BLO1" + msgpack.packb(whole)).encode()


@settings(max_examples=40, deadline=None)
@given(junk=st.binary(max_size=64))
@example(junk=b"BLO1")
@example(junk=b"BLO1" + b"\x91" * 4000)
def test_junk(junk: bytes) -> None:
    for data in (junk, b"BLO1" + junk):
        with pytest.raises(FormatError):
            Layout.decode(data)


def test_few_bytes_cannot_say_a_list_without_end() -> None:
    long = [1, 0, 1 << 40, 0]
    for value in ([4, [long, [], [], [], [0], [], [0]], [], [], [], [], [[], [0], [0], {}], []],
                  [4, [[0], [], [], [], [0], [], [0]], [], [], [long], [], [[], [0], [0], {}], []],
                  [4, [[0], [], [], [], [0], [], [0]], [], [[[1 << 20], False, [0, 1 << 40], [None]]], [], [],
                   [[], [0], [0], {}], []]):  # fmt: skip
        with pytest.raises(FormatError, match="stands for more than"):
            Layout.decode(b"BLO1" + msgpack.packb(value))
    with pytest.raises(FormatError, match="longer than"):
        Layout.decode(bytes(MAX_LAYOUT_BYTES + 1))


def test_few_bytes_cannot_say_overlaps_without_end() -> None:
    count = 5_000
    nested = [[count], False, [1, 1, count, 0], [[[1, 0, count, 0], [1, 1, count, 1]]]]
    holding = [0, [1, 0, count, 0], [1, 0, count, 1]]
    value = [count, [[0], [], [], [], [0], [], [0]], [["U8", 1, "stable"]], [nested], [[0, 0]], [holding],
             [["w"], [0, 0], [0, 0], {}], []]  # fmt: skip
    with pytest.raises(FormatError, match=r"tensor 'w'.* overlap one another in more than"):
        Layout.decode(b"BLO1" + msgpack.packb(value))
