"""Declarations by hand: what they say, and that every mistake is one sentence naming file, tensor and place."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.layout import Layout
from baftd.checkpoint.ranges import whole
from baftd.errors import LayoutError, UsageError
from baftd.formats.declaration import parse_declaration
from baftd.formats.declared_layout import layout_from_declaration

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = """
world = 8
order = ["pp", "dp", "tp"]
axes = { pp = 2, dp = 2, tp = 2 }
ranks_per_node = 4

[optimizers.adam]
states = { master = "F32", exp_avg = "F32" }
divided = ["dp"]

[optimizers.rows]
states = { momentum = "F32" }
divided = ["dp"]
by = "rows"

[[tensors]]
name = "layers.{layer}.weight"
each = { layer = 4 }
along = { layer = "pp" }
shape = [6, 4]
dtype = "BF16"
split = { 1 = "tp" }
optimizer = "adam"

[[tensors]]
name = "embedding"
shape = [7, 4]
dtype = "F32"
split = { 0 = { axes = "tp", uneven = true } }
only = { pp = [0, 1] }
optimizer = "rows"

[[tensors]]
name = "experts.{expert}"
each = { expert = 4 }
along = { expert = "dp" }
shape = [2]
dtype = "F32"

[[tensors]]
name = "odd"
shape = [10, 4]
dtype = "Q7"
itemsize = 3
kind = "volatile"
ranks = { 0 = "0:5, :", "1-3" = ["7:10, :", "[5:7, 0:4]"] }

[[tensors]]
name = "scratch"
shape = [3]
dtype = "I64"
private = true
"""


def layout_of(text: str) -> Layout:
    return layout_from_declaration(text, "plan.toml", "toml")


def test_the_example() -> None:
    layout = layout_of(EXAMPLE)
    weight = layout.tensor("layers.2.weight")
    assert weight.held == {
        4: (((0, 6), (0, 2)),),
        5: (((0, 6), (2, 4)),),
        6: (((0, 6), (0, 2)),),
        7: (((0, 6), (2, 4)),),
    }
    # 12 elements of a rank's part, 6 for each of two ranks: three rows of two.
    master = layout.tensor("layers.2.weight.master")
    assert master.dtype == "F32"
    assert master.held[4] == (((0, 3), (0, 2)),)
    assert master.held[6] == (((3, 6), (0, 2)),)
    embedding = layout.tensor("embedding")
    assert embedding.held[0] == embedding.held[6] == (((0, 4), (0, 4)),)
    assert embedding.held[1] == (((4, 7), (0, 4)),)
    momentum = layout.tensor("embedding.momentum")
    assert momentum.held[1] == (((4, 6), (0, 4)),)
    assert momentum.held[3] == (((6, 7), (0, 4)),)
    assert set(layout.tensor("experts.0").held) == {0, 1, 4, 5}
    assert set(layout.tensor("experts.3").held) == {2, 3, 6, 7}
    odd = layout.tensor("odd")
    assert (odd.kind, odd.itemsize) == ("volatile", 3)
    assert odd.held[2] == (((7, 10), (0, 4)), ((5, 7), (0, 4)))
    assert layout.tensor("scratch", owner=5).held == {5: (whole((3,)),)}
    place = layout.place(6)
    assert place is not None
    assert (place.stages, place.coordinates, place.node) == ((1,), {"pp": 1, "dp": 1, "tp": 0}, "node-1")


def test_json_says_the_same() -> None:
    as_json = json.dumps(tomllib.loads(EXAMPLE))
    assert layout_from_declaration(as_json, "plan.json", "json") == layout_of(EXAMPLE)


def test_stages_by_rank_and_no_axes() -> None:
    text = """
    world = 2
    stages = { 0 = [0, 3], 1 = [1, 2] }
    [[tensors]]
    name = "w"
    shape = []
    dtype = "F32"
    ranks = { "0-1" = "[]" }
    """
    layout = layout_of(text)
    assert [place.stages for place in layout.places] == [(0, 3), (1, 2)]
    assert layout.tensor("w").held == {0: ((),), 1: ((),)}


def test_several_axes_over_one_dimension() -> None:
    text = """
    world = 4
    order = ["dp", "tp"]
    axes = { dp = 2, tp = 2 }
    [[tensors]]
    name = "w"
    shape = [8]
    dtype = "F32"
    split = { 0 = ["tp", "dp"] }
    [[tensors]]
    name = "sizes"
    shape = [8]
    dtype = "F32"
    split = { 0 = { axes = "tp", sizes = [8, 0] } }
    """
    layout = layout_of(text)
    assert [layout.tensor("w").held[rank][0][0][0] for rank in range(4)] == [0, 4, 2, 6]
    assert layout.tensor("sizes").held == {0: (((0, 8),),), 1: (), 2: (((0, 8),),), 3: ()}


def test_scalars_and_more_ranks_than_elements() -> None:
    text = """
    world = 3
    axes = { dp = 3 }
    [optimizers.o]
    states = { m = "F32" }
    divided = "dp"
    [[tensors]]
    name = "step"
    shape = []
    dtype = "F32"
    optimizer = "o"
    """
    held = layout_of(text).tensor("step.m").held
    assert {rank for rank, boxes in held.items() if boxes} == {0}


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 5),
    tp=st.sampled_from([1, 2, 3]),
    dp=st.sampled_from([1, 2, 4]),
    by=st.sampled_from(["flat", "rows"]),
    dimension=st.integers(0, 1),
)
@settings(max_examples=40, deadline=None)
def test_divided_states_are_covered_once(rows: int, columns: int, tp: int, dp: int, by: str, dimension: int) -> None:
    declaration = {
        "world": tp * dp,
        "axes": {"tp": tp, "dp": dp},
        "order": ["dp", "tp"],
        "optimizers": {"o": {"states": {"m": "F32"}, "divided": ["dp"], "by": by}},
        "tensors": [
            {
                "name": "w",
                "shape": [rows, columns],
                "dtype": "F32",
                "split": {str(dimension): {"axes": ["tp"], "uneven": True}},
                "optimizer": "o",
            }
        ],
    }
    layout = layout_from_declaration(json.dumps(declaration), "d.json", "json")
    counts = {"w": dp, "w.m": 1}
    for name, copies in counts.items():
        seen = np.zeros((rows, columns), dtype=int)
        for boxes in layout.tensor(name).held.values():
            for (a, b), (c, d) in boxes:
                seen[a:b, c:d] += 1
        assert (seen == copies).all()


TENSOR = {"name": "w", "shape": [4, 4], "dtype": "F32"}
MESH = {"world": 4, "axes": {"dp": 2, "tp": 2}, "order": ["dp", "tp"]}


@pytest.mark.parametrize(
    ("tensor", "top", "words"),
    [
        ({}, {"wrld": 4}, "there is no key 'wrld'; did you mean 'world'?"),
        ({"spilt": {}}, {}, "tensors[0] 'w': there is no key 'spilt'; did you mean 'split'?"),
        ({}, {"world": 5}, "the axes dp 2 x tp 2 make 4 ranks, but `world` is 5"),
        ({}, {"order": ["dp"]}, "`order` names dp, but `axes` has dp, tp"),
        ({}, {"order": None}, "`order` is missing"),
        ({}, {"stages": "p"}, "`stages` is 'p', which is no axis of `axes`"),
        ({}, {"stages": {"7": [0]}}, "'7' is outside of ranks 0 to 3"),
        ({}, {"tensors": []}, "there is no tensor in `tensors`"),
        ({}, {"tensors": [3]}, "`tensors` has 3, which is no table"),
        ({}, {"world": True}, "`world` is True, not a whole number"),
        ({}, {"world": 0}, "`world` is 0, not between 1 and"),
        ({}, {"ranks_per_node": 9}, "`ranks_per_node` is 9, not between 1 and 4"),
        ({"shape": None, "shpe": [4]}, {}, "`shape` is missing; is it what 'shpe' means?"),
        ({"shape": [-1]}, {}, "`shape` has -1, which is no whole number"),
        ({"dtype": ""}, {}, "`dtype` is empty"),
        ({"split": {"2": "tp"}}, {}, "'2' is no dimension of shape [4, 4]"),
        ({"split": {"0": "tq"}}, {}, "`0` names 'tq', which is no axis of `axes` (there is dp, tp)"),
        ({"split": {"0": ["tp", "tp"]}}, {}, "`0` names an axis twice"),
        (
            {"split": {"0": "tp", "1": "tp"}},
            {},
            "axis tp stands in `split` of dimension 0 and in `split` of dimension 1",
        ),
        ({"split": {"0": "tp"}, "only": {"tp": 0}}, {}, "axis tp stands in `split` of dimension 0 and in `only`"),
        ({"split": {"0": "tp"}, "shape": [5]}, {}, "5 elements do not divide into 2 equal parts (tp 2)"),
        (
            {"split": {"0": {"axes": "tp", "sizes": [1, 2]}}},
            {},
            "the 2 sizes sum to 3, but 4 elements go to 2 parts (tp 2)",
        ),
        ({"split": {"0": {"axes": "tp", "sizes": [2, 2], "uneven": True}}}, {}, "has both `sizes` and `uneven`"),
        ({"only": {"tp": 2}}, {}, "tp = 2 is outside of 0 to 1"),
        ({"name": "w{i}"}, {}, "the name has {i}, but `each` does not say how many"),
        ({"each": {"i": 2}}, {}, "`each` counts 'i', but the name has no {i}"),
        (
            {"name": "w{i}", "each": {"i": 3}, "along": {"i": "tp"}},
            {},
            "3 of 'i' do not divide into equal runs over tp",
        ),
        ({"along": {"i": "tp"}}, {}, "'i' is not counted in `each`"),
        ({"optimizer": "adm"}, {"optimizers": {"adam": {"states": {}}}}, "no optimizer 'adm' in `optimizers`; did you"),
        ({}, {"optimizers": {"adam": {"states": {}, "divided": "dd"}}}, "`divided` names 'dd'"),
        ({}, {"optimizers": {"adam": {"states": {}, "by": "row"}}}, "`by` is 'row', not flat or rows"),
        ({}, {"optimizers": {"adam": {}}}, "`states` is missing"),
        ({"ranks": {"0": "0:4, :"}, "split": {"0": "tp"}}, {}, "`ranks` says everything: `split` beside it is unclear"),
        ({"ranks": {"0": "0:4, :", "0-1": ":,:"}}, {}, "rank 0 stands there twice"),
        ({"ranks": {"x": "0:4, :"}}, {}, "'x' names no ranks"),
        ({"private": True, "split": {"0": "tp"}}, {}, "a private tensor is whole on its rank"),
        ({"kind": "solid"}, {}, "`kind` is 'solid', not stable or volatile"),
    ],
)
def test_mistakes_in_the_form(tensor: dict[str, Any], top: dict[str, Any], words: str) -> None:
    merged = {key: value for key, value in {**TENSOR, **tensor}.items() if value is not None}
    declaration = {key: value for key, value in {**MESH, "tensors": [merged], **top}.items() if value is not None}
    with pytest.raises(UsageError) as caught:
        parse_declaration(json.dumps(declaration), "some/file.json", "json")
    assert words in str(caught.value)
    assert str(caught.value).startswith("some/file.json")


@pytest.mark.parametrize(
    ("tensor", "rank", "words"),
    [
        ({"ranks": {"0": "0:4, :", "1": "0:5, :"}}, 1, "'0:5, :', which is no range of shape [4, 4]"),
        ({"ranks": {"0": "0:4"}}, 0, "'0:4', which is no range of shape [4, 4]"),
        ({"ranks": {"0": "0-4, :"}}, 0, "which is no range"),
        ({"ranks": {"0": "0:2, :", "2": "3:4, :"}}, 0, "no rank holds [2:3, 0:4]"),
        ({"ranks": {"0": "0:3, :", "2": "2:4, :"}}, 2, "rank 0 holds [0:3, 0:4] and rank 2 holds [2:4, 0:4]"),
        ({"ranks": {"0": ["0:4, :", "1:2, :"]}}, 0, "rank 0 holds [0:4, 0:4] and [1:2, 0:4], which share"),
        ({"only": {"dp": []}}, None, "is held by no rank"),
        ({"dtype": "Q7"}, None, "a type of another name needs its itemsize"),
        ({"ranks": {"0": [":2, :", "2:, :"]}, "optimizer": "rows"}, 0, "2 ranges, which cannot be divided by rows"),
    ],
)
def test_ranges_that_make_no_layout(tensor: dict[str, Any], rank: int | None, words: str) -> None:
    optimizers = {"rows": {"states": {"m": "F32"}, "divided": "dp", "by": "rows"}}
    declaration = {**MESH, "optimizers": optimizers, "tensors": [{**TENSOR, **tensor}]}
    with pytest.raises(LayoutError) as caught:
        layout_from_declaration(json.dumps(declaration), "some/file.json", "json")
    assert words in str(caught.value)
    assert str(caught.value).startswith("some/file.json")
    assert (caught.value.tensor, caught.value.rank) == ("w", rank)


@pytest.mark.parametrize(
    ("text", "form", "words"),
    [
        ("world = ", "toml", "f is not TOML: Invalid value (at"),
        ("{", "json", "f is not JSON: Expecting"),
        ('{"world": 1, "world": 2}', "json", "f: key 'world' stands there twice"),
        ("[" * 100_000, "json", "f is nested too deep"),
        ("[]", "json", "f is not a declaration: its top is no table"),
    ],
)
def test_text_that_is_no_declaration(text: str, form: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_declaration(text, "f", form)
    assert words in str(caught.value)


def test_a_declaration_of_too_many_tensors() -> None:
    tensor = {**TENSOR, "name": "{a}.{b}", "each": {"a": 10_000, "b": 10_000}}
    with pytest.raises(UsageError, match="100000000 tensors are more than"):
        layout_from_declaration(json.dumps({**MESH, "tensors": [tensor]}), "f", "json")


def test_the_declaration_in_the_documentation_is_one() -> None:
    import baftd.formats.declaration as module

    text = "\n".join(line[4:] for line in (module.__doc__ or "").splitlines() if line.startswith("    "))
    layout = layout_of(text)
    assert layout.world == 16
    assert len(layout.tensors) == 24 * 8 * 4 + 1 + 1 + 16


_ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "tp", "0:2, :", "w{i}"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "tp", "axes", "i"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a document."""
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in pairs for inner in places_in(item, (*path, key)))]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_anything_else_is_a_usage_error_that_names_the_file(data: st.DataObject) -> None:
    document: Any = tomllib.loads(EXAMPLE)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places_in(document)[1:]))
        inside = document
        for key in path[:-1]:
            inside = inside[key]
        if data.draw(st.booleans()):
            inside[path[-1]] = data.draw(_ODD)
        else:
            del inside[path[-1]]
    problem, layout = "", None
    try:
        layout = layout_from_declaration(json.dumps(document), "some/file.json", "json")
    except UsageError as error:
        problem = str(error)
    if layout is None:
        assert problem.startswith("some/file.json")
    else:
        assert Layout.decode(layout.encode()) == layout


@pytest.mark.timeout(15)
def test_ranges_of_very_many_ranks_are_read_quickly() -> None:
    """A program writes such a declaration: each of 30,000 ranks by name. Comparing all keys with each other takes
    longer than the test may."""
    world = 30_000
    ranks = {str(rank): f"{rank}:{rank + 1}" for rank in range(world)}
    declared = {"world": world, "tensors": [{"name": "w", "shape": [world], "dtype": "F32", "ranks": ranks}]}
    layout = layout_from_declaration(json.dumps(declared), "job.json", "json")
    assert layout.bytes_of(world - 1) == 4
    twice = '{"world": 1, "tensors": [{"name": "w", "name": "v"}]}'
    with pytest.raises(UsageError, match=r"job\.json: key 'name' stands there twice"):
        layout_from_declaration(twice, "job.json", "json")


def test_nodes_sort_as_their_numbers_do() -> None:
    tensor = {"name": "w", "shape": [4], "dtype": "F32"}
    layout = layout_from_declaration(
        json.dumps({"world": 24, "ranks_per_node": 2, "tensors": [tensor]}), "job.json", "json"
    )
    nodes = [place.node for place in layout.places]
    assert nodes == sorted(nodes)
    assert (nodes[0], nodes[23]) == ("node-00", "node-11")
