"""Meshes and Megatron's words for them, against groups counted out by stride as megatron.core does it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.mesh import DEFAULT_ORDER, Mesh, ParallelDescription
from baftd.errors import UsageError

sizes = st.integers(1, 3)


def strided_groups(order: str, size_of: dict[str, int], wanted: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Groups along some axes: a rank is the sum of index times stride, the first axis of the order has stride 1."""
    axes = [axis for axis in order.split("-") if axis in size_of]
    stride, strides = 1, {}
    for axis in axes:
        strides[axis] = stride
        stride *= size_of[axis]

    def offsets(names: list[str]) -> list[int]:
        return [
            sum(index * strides[name] for index, name in zip(indices, names, strict=True))
            for indices in itertools.product(*(range(size_of[name]) for name in names))
        ]

    inside = [axis for axis in axes if axis in wanted]
    outside = [axis for axis in axes if axis not in wanted]
    return {tuple(sorted(base + offset for offset in offsets(inside))) for base in offsets(outside)}


@settings(max_examples=60, deadline=None)
@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes, order=st.permutations(["tp", "cp", "ep", "dp", "pp"]))
def test_dense_groups(tp: int, cp: int, dp: int, pp: int, order: list[str]) -> None:
    words = "-".join(order)
    description = ParallelDescription(tp=tp, cp=cp, dp=dp, pp=pp, order=words)
    size_of = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    for wanted in (("tp",), ("pp",), ("dp", "cp"), ("tp", "dp"), ("tp", "pp")):
        groups = description.dense.groups(*wanted)
        assert {tuple(sorted(group)) for group in groups} == strided_groups(words, size_of, wanted)
        assert sorted(rank for group in groups for rank in group) == list(range(description.world))
    assert description.data_parallel_groups() == description.dense.groups("cp", "dp")
    for rank in range(description.world):
        where = description.coordinates(rank)
        assert sorted(where) == ["cp", "dp", "pp", "tp"]
        assert description.dense.rank_of(where) == rank


@settings(max_examples=60, deadline=None)
@given(etp=st.sampled_from([1, 2]), ep=st.sampled_from([1, 2, 4]), cp=sizes, pp=sizes)
def test_expert_groups(etp: int, ep: int, cp: int, pp: int) -> None:
    description = ParallelDescription(tp=2, cp=cp, dp=4, pp=pp, ep=ep, etp=etp)
    edp = 8 * cp // (etp * ep)
    assert description.edp == edp
    size_of = {"tp": etp, "ep": ep, "dp": edp, "pp": pp}
    found = {tuple(sorted(group)) for group in description.expert_data_parallel_groups()}
    assert found == strided_groups(DEFAULT_ORDER, size_of, ("dp",))
    for rank in range(description.world):
        where = description.coordinates(rank)
        assert ("ep" in where) == (ep > 1 or etp != 2)
        assert where["pp"] == rank // (description.world // pp), "pp is the slowest, whoever asks"


def test_stages_of_an_interleaved_pipeline() -> None:
    description = ParallelDescription(tp=2, pp=4, vpp=3)
    assert description.virtual_stages == 12
    assert description.stages(0) == description.stages(1) == (0, 4, 8)
    assert description.stages(7) == (3, 7, 11)
    assert description.ranks_of_stage(6) == (4, 5)
    for stage in range(12):
        assert all(stage in description.stages(rank) for rank in description.ranks_of_stage(stage))
    with pytest.raises(UsageError, match="stage 12 is not one of the 12"):
        description.ranks_of_stage(12)


def test_parse() -> None:
    given = ParallelDescription.parse("tp=8, pp=16,dp=16,vpp=3,zero=1,order=tp-cp-ep-dp-pp")
    assert given == ParallelDescription(tp=8, pp=16, dp=16, vpp=3, zero=1)
    assert given.world == 2048
    assert ParallelDescription.parse("tp=2,pp=2", world=16).dp == 4
    assert ParallelDescription.parse("", world=3) == ParallelDescription(dp=3)
    assert ParallelDescription.parse("dp=2,ep=2,etp=1,tp=4").edp == 4


@pytest.mark.parametrize(
    ("text", "world", "said"),
    [
        ("tp=0", None, "tp = 0 is not 1 or more"),
        ("tp=two", None, "tp = 'two' is not a number"),
        ("tp=²", None, "is not a number"),
        ("tq=2", None, "'tq=2' is not understood"),
        ("tp=2,tp=2", None, "'tp=2' is not understood"),
        ("tp", None, "'tp' is not understood"),
        ("tp=3", 8, "tp x pp x cp = 3 does not divide 8 ranks"),
        ("tp=2,dp=2", 8, "= 4, but there are 8 ranks"),
        ("dp=2", 1, "= 2, but there is 1 rank."),
        ("zero=4", None, "zero = 4 is none of"),
        ("vpp=2", None, "vpp = 2 needs pp"),
        ("ep=3,dp=4", None, "ep 3 x etp 1 does not divide the 4 ranks"),
        ("order=tp-xp", None, "order 'tp-xp' is not made of"),
        ("order=tp-tp", None, "each at most once"),
        ("cp=2,order=tp-dp-pp", None, "cp = 2, but order 'tp-dp-pp' lacks it"),
        ("pp=2,dp=4,cp=2,ep=4,order=tp-cp-ep-pp-dp", None, "would lie in different pipelines"),
        ("tp=1024,dp=1024,pp=1024", None, "more than"),
        ("etp=0", None, "etp = 0 is not 1 or more"),
    ],
)
def test_what_does_not_fit_together_is_said(text: str, world: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=r"^parallel description") as caught:
        ParallelDescription.parse(text, world)
    assert said in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.lists(sizes, max_size=3))
def test_a_mesh_of_any_ranks(data: st.DataObject, shape: list[int]) -> None:
    ranks = tuple(data.draw(st.permutations(range(math.prod(shape)))))
    mesh = Mesh(tuple((f"a{number}", size) for number, size in enumerate(shape)), ranks)
    assert mesh.size == len(ranks)
    for place, rank in enumerate(ranks):
        where = mesh.coordinates(rank)
        assert list(where) == [name for name, _ in mesh.axes]
        assert mesh.rank_of(where) == rank
        assert mesh.grid.ravel()[place] == rank
    for name, size in mesh.axes:
        for group in mesh.groups(name):
            assert [mesh.coordinates(rank)[name] for rank in group] == list(range(size))
    assert mesh.groups() == tuple((rank,) for rank in ranks)


def test_what_makes_no_mesh() -> None:
    mesh = Mesh((("pp", 2), ("dp", 2)), (3, 1, 2, 0))
    assert mesh.groups("dp") == ((3, 1), (2, 0))
    for bad, said in [
        (lambda: Mesh((("a", 2), ("a", 2))), "cannot be told apart"),
        (lambda: Mesh((("a", 0),)), "has size 0"),
        (lambda: Mesh((("a", 2),), (0, 0)), "not different numbers"),
        (lambda: Mesh((("a", 2),), (0, 1, 2)), "do not fill a mesh"),
        (lambda: Mesh((("a", 1 << 21),)), "larger than"),
        (lambda: mesh.coordinates(4), "rank 4 is not in the mesh"),
        (lambda: mesh.rank_of({"pp": 0}), "not one for each axis"),
        (lambda: mesh.rank_of({"pp": 0, "dp": 2}), "dp = 2 is outside"),
        (lambda: mesh.groups("tp"), "has no axis 'tp'"),
    ]:
        with pytest.raises(UsageError, match=said):
            bad()
