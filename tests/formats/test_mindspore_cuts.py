"""The slice rule on random matrices of devices, against numpy and a plain reading of MindSpore's rule."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.layout import LayoutBuilder
from baftd.errors import LayoutError
from baftd.formats.mindspore_cuts import Cut, coordinates


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    dev_matrix = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4)))
    axes = draw(st.permutations(range(len(dev_matrix))))
    dimensions = draw(st.integers(1, 3))
    tensor_map: list[list[int]] = [[] for _ in range(dimensions)]
    for axis in axes:
        at = draw(st.integers(-1, dimensions - 1))
        if at >= 0:
            tensor_map[at].append(axis)
    bare = Cut(dev_matrix, tuple(map(tuple, tensor_map)))
    shards = draw(st.sampled_from([0, -1, *(k for k in range(1, bare.replicas + 1) if bare.replicas % k == 0)]))
    bare = Cut(dev_matrix, bare.tensor_map, shard_size=shards)
    sizes = [parts * draw(st.integers(1, 3)) for parts in bare.parts]
    sizes[0] *= bare.shards
    return Cut(dev_matrix, bare.tensor_map, tuple(sizes), shard_size=shards)


def by_numpy(cut: Cut) -> dict[int, np.ndarray]:
    """What each device holds of the tensor 0, 1, 2, ...: cut one axis of devices after the other, then shard."""
    assert cut.shape is not None
    whole = np.arange(prod(cut.shape)).reshape(cut.shape)
    width = len(cut.dev_matrix)
    places = list(product(*(range(size) for size in cut.dev_matrix)))
    parts: dict[int, np.ndarray] = {}
    for device, at in enumerate(places):
        part = whole
        for dimension, axes in enumerate(cut.tensor_map):
            for axis in axes:  # the outermost first
                part = np.split(part, cut.dev_matrix[width - 1 - axis], axis=dimension)[at[width - 1 - axis]]
        parts[device] = part
    shards = cut.shards
    held = {}
    for device, at in enumerate(places):
        used = [width - 1 - axis for axes in cut.tensor_map for axis in axes]
        replicas = [one for one, there in enumerate(places) if all(there[axis] == at[axis] for axis in used)]
        group = replicas.index(device) // shards * shards
        held[device] = np.split(parts[device], shards)[replicas.index(device) - group]
    return held


@settings(max_examples=80, deadline=None)
@given(cuts())
def test_every_device_holds_what_numpy_cuts(cut: Cut) -> None:
    assert cut.shape is not None
    whole = np.arange(prod(cut.shape)).reshape(cut.shape)
    boxes = cut.boxes(tensor="w", rank=0)
    expected = by_numpy(cut)
    assert len(boxes) == cut.devices == len(expected)
    for device, box in enumerate(boxes):
        part = whole[tuple(slice(*side) for side in box)]
        assert np.array_equal(part, expected[device])
        assert cut.whole_of(part.shape) == cut.shape
    builder = LayoutBuilder(cut.devices)
    builder.add("w", "F32", cut.shape, {device: (box,) for device, box in enumerate(boxes)})
    cells = builder.build().tensor("w").cells()
    assert {len(cell.holders) for cell in cells} == {cut.replicas // cut.shards}


@settings(max_examples=60, deadline=None)
@given(cuts(), st.data())
def test_a_split_shape_is_joined_again(cut: Cut, data: st.DataObject) -> None:
    """MindSpore splits a dimension that several axes cut; the joined form must hold the same elements."""
    assert cut.shape is not None
    whole = Cut(cut.dev_matrix, cut.tensor_map, cut.shape)
    split_map: list[tuple[int, ...]] = []
    split_shape: list[int] = []
    for size, axes in zip(cut.shape, cut.tensor_map, strict=True):
        for axis in axes[:-1]:
            split_map.append((axis,))
            split_shape.append(cut.dev_matrix[-1 - axis])
            size //= split_shape[-1]
        split_map.append(axes[-1:])
        split_shape.append(size)
    split = Cut(cut.dev_matrix, tuple(split_map), tuple(split_shape))
    joined = split.in_shape(cut.shape)
    assert joined is not None
    elements = np.arange(prod(cut.shape))
    for device in range(cut.devices):
        ours = elements.reshape(cut.shape)[tuple(slice(*side) for side in joined.box(device, tensor="w", rank=0))]
        theirs = elements.reshape(split_shape)[tuple(slice(*side) for side in split.box(device, tensor="w", rank=0))]
        assert np.array_equal(ours.reshape(-1), theirs.reshape(-1))
    assert joined.boxes(tensor="w", rank=0) == whole.boxes(tensor="w", rank=0)


def test_shapes_into_which_a_cut_does_not_go() -> None:
    split = Cut((2, 2), ((1,), (0,), ()), (4, 8, 16))  # parts of (2, 4, 16): two runs of rows, not one block
    assert split.in_shape((32, 16)) is None
    assert Cut((2, 2), ((1,), (0,), ()), (2, 8, 16)).in_shape((16, 16)) is not None
    assert Cut((2, 2), ((1,), (0,), ()), (2, 8, 16)).in_shape((16, 17)) is None
    assert Cut((2, 2), ((1,), (0,))).in_shape((4,)) is None
    assert Cut((2, 2), ((1,), (0,))).whole_of((4,)) is None


def test_a_tensor_without_dimensions_is_on_every_device() -> None:
    cut = Cut((2, 2), (), ())
    assert cut.boxes(tensor="w", rank=0) == ((), (), (), ())
    with pytest.raises(LayoutError, match="no dimension that the optimizer's sharding could cut"):
        Cut((2, 2), (), (), shard_size=-1).boxes(tensor="w", rank=4)


def test_coordinates_count_the_last_dimension_fastest() -> None:
    assert [coordinates((2, 3), device) for device in range(6)] == list(product(range(2), range(3)))
    assert coordinates((), 0) == ()
