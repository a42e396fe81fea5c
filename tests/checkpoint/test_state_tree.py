"""The typed tree gives back what it took, type by type and bit by bit; what it cannot hold it names; garbage is an
error and runs nothing."""

from __future__ import annotations

import enum
import math
import random
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict
from datetime import datetime
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from baftd.checkpoint import state_tree
from baftd.checkpoint.state_tree import MAGIC, MAX_DEPTH, TreeTensor, decode, encode, validate
from baftd.errors import FormatError, StateTreeError


class Color(enum.Enum):
    RED = 1
    PAIR = (1, "two")


class Level(enum.IntEnum):
    LOW = 3


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Point(NamedTuple):
    x: int


def bits(value: Any) -> Any:
    """Something that is equal exactly when type, value and bits are, containers taken apart."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        order = value.flags.f_contiguous and not value.flags.c_contiguous
        return kind, str(value.dtype), value.shape, order, value.tobytes()
    if isinstance(value, np.generic):
        raw = str(value) if isinstance(value, np.str_) else bytes(value) if isinstance(value, np.bytes_) else None
        return kind, str(value.dtype) if raw is None else "", value.tobytes() if raw is None else raw
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, complex):
        return kind, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, defaultdict):
        return kind, value.default_factory, [(bits(k), bits(v)) for k, v in value.items()]
    if isinstance(value, dict):
        return kind, [(bits(k), bits(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [bits(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(bits(item)) for item in value)
    return kind, value


def same(value: Any) -> Any:
    again = decode(encode(value))
    assert bits(again) == bits(value)
    return again


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**300), 2**300)
    | st.floats(width=64)
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary(max_size=40)
)
plain_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.unicode_string_dtypes(),
)
dtypes = plain_dtypes | hnp.array_dtypes(plain_dtypes) | hnp.nested_dtypes(plain_dtypes, max_leaves=4)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)).map(
    lambda array: np.asfortranarray(array) if array.size % 2 else array
)
numpy_scalars = hnp.arrays(plain_dtypes, (1,)).map(lambda array: array[0])
keys = st.recursive(
    # Comparing two timedelta64 of years and of days raises: such keys cannot be held together even by Python.
    scalars | numpy_scalars.filter(lambda scalar: scalar.dtype.kind != "m"),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=3,
)
tensors = st.builds(
    TreeTensor, st.sampled_from(["BF16", "C64"]), st.lists(st.integers(0, 9)).map(tuple), st.binary(max_size=30)
)
trees = st.recursive(
    scalars | st.binary(max_size=20).map(bytearray) | arrays | numpy_scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda items: defaultdict(list, items))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees)
def test_every_tree_comes_back_as_it_was(tree: Any) -> None:
    same(tree)


@settings(max_examples=100, deadline=None)
@given(st.sets(keys, max_size=6))
def test_a_set_is_written_in_an_order_that_does_not_depend_on_hashes(members: set[Any]) -> None:
    again: set[Any] = set()
    for member in sorted(members, key=repr, reverse=True):
        again.add(member)
    assert encode(members) == encode(again)


@pytest.mark.parametrize(
    "value",
    [
        -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 2**63, 10**400, -1, 0,
        True, 1, 1.0, -0.0, math.inf, -math.inf, complex(-0.0, math.nan),
        "", "\0", "\ud800", b"", bytearray(b""), (), [], {}, set(), frozenset(), [[]], ((),),
        {1: "a", "1": "b", None: "c", 2.5: "d", (1, (2, "x")): "e", frozenset({3}): "f", b"1": "g"},
        [1, 2**70, 3], [True, 1, 2], (1.5, None, "x"), [None] * 3, [1, 2.0],
        defaultdict(None, {1: 2}), defaultdict(int), defaultdict(dict, {"a": defaultdict(set)}),
        OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2},
        np.float32(1.5), np.float64(-0.0), np.bool_(True), np.int8(-3), np.str_("a\0"), np.bytes_(b"a\0\0"),
        np.str_(""), np.bytes_(b""), np.datetime64("NaT"), np.datetime64("2020-01-01", "ns"),
        np.zeros((), np.int64), np.zeros((0, 3)), np.zeros((2, 3), order="F"), np.zeros(3, "S0"), np.zeros(2, "V5"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8", (2,))]), np.array(["ab", ""]), np.arange(6)[::2],
        np.array([(1,)], dtype=[("a", "i4")])[0], np.longdouble(1) / 3, np.arange(3, dtype=">i4"),
        np.zeros(2, dtype={"names": ["a", "b"], "formats": ["i1", "i8"], "offsets": [0, 8], "itemsize": 24}),
        np.zeros(2, dtype=[(("title", "name"), "f4")]),
        TreeTensor("BF16", (2, 0), b""), TreeTensor("BF16", (1,) * 64, b"12"), TreeTensor("F8_E4M3", (), b"\x80"),
        random.Random(3).getstate(), np.random.RandomState(3).get_state(), np.random.default_rng(3).bit_generator.state,
    ],
    ids=lambda value: repr(value)[:30].encode("ascii", "replace").decode(),
)  # fmt: skip
def test_particular_values(value: Any) -> None:
    same(value)


def test_bits_of_nan_survive() -> None:
    for pattern in (0x7FF8000000000001, 0xFFF8000000000000, 0x7FFC0000DEADBEEF):
        value = struct.unpack("<d", struct.pack("<Q", pattern))[0]
        assert struct.pack("<d", decode(encode(value))) == struct.pack("<Q", pattern)
        assert struct.pack("<d", decode(encode(complex(0, value))).imag) == struct.pack("<Q", pattern)


def test_generators_go_on_where_they_were() -> None:
    python, numpy = random.Random(5), np.random.default_rng(5)
    saved = encode({"python": python.getstate(), "numpy": numpy.bit_generator.state})
    expected = [python.random(), numpy.random()]
    state = decode(saved)
    other, other_numpy = random.Random(), np.random.default_rng()
    other.setstate(state["python"])
    other_numpy.bit_generator.state = state["numpy"]
    assert [other.random(), other_numpy.random()] == expected


def test_nothing_decoded_shares_memory_with_the_bytes() -> None:
    data = bytearray(encode({"a": np.arange(4), "t": TreeTensor("F32", (1,), memoryview(b"abcd"))}))
    tree = decode(data)
    data[:] = bytes(len(data))
    assert (tree["a"] == np.arange(4)).all()
    assert tree["a"].flags.writeable
    assert tree["a"].flags.owndata
    assert tree["t"].data == b"abcd"


def test_a_buffer_of_any_shape_is_a_tensors_data() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    tensor = decode(encode(TreeTensor("F32", (3, 2), memoryview(array))))
    assert tensor.data == array.tobytes()
    assert decode(encode(TreeTensor("F32", (), memoryview(np.float32(2).reshape(()))))).data == b"\0\0\0\x40"
    assert decode(encode(TreeTensor("F32", (0, 2), memoryview(np.zeros((0, 2)))))).data == b""


# ---------------------------------------------------------------------------------------------- enums


def test_enum_members_come_back_as_values_unless_their_class_is_named() -> None:
    tree = {"c": Color.RED, "p": [Color.PAIR], "l": Level.LOW, "f": Access.READ | Access.WRITE, Color.RED: 1}
    data = encode(tree)
    values = decode(data)
    assert bits(values) == bits({"c": 1, "p": [(1, "two")], "l": 3, "f": 3, 1: 1})
    assert type(values["l"]) is int
    assert decode(data, enums=[Color, Level, Access]) == tree
    assert decode(data, enums=[Color])["c"] is Color.RED
    assert decode(data, enums=[Color])["l"] == 3


def test_enum_value_that_does_not_exist_any_more_is_a_format_error() -> None:
    data = encode(Color.RED).replace(b"\x01", b"\x02")
    renamed = encode([Color.RED]).replace(b"Color", b"Cilor")
    assert decode(renamed) == [1]
    with pytest.raises(FormatError, match="not a valid Color"):
        decode(data, enums=[Color])


# ---------------------------------------------------------------------------------------------- refusals


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"lr_lambdas": [lambda epoch: epoch]}, "extra.lr.lr_lambdas[0]", "function"),
        ({"a": {"b": (1, [2, object()])}}, "extra.lr.a.b[1][1]", "object"),
        ({"n": {3: {("x", 1): print}}}, "extra.lr.n[3][('x', 1)]", "builtin_function_or_method"),
        ({"t": type}, "extra.lr.t", "type"),
        ({"p": Point(1)}, "extra.lr.p", "subclass of tuple"),
        ({"c": Counter("aab")}, "extra.lr.c", "collections.Counter (a subclass of dict"),
        ({"d": datetime(2020, 1, 1)}, "extra.lr.d", "datetime.datetime"),
        ({"m": memoryview(b"x")}, "extra.lr.m", "memoryview"),
        ({"e": msgpack.ExtType(1, b"")}, "extra.lr.e", "msgpack.ext.ExtType"),
        ({"e": [msgpack.Timestamp(1)]}, "extra.lr.e[0]", "msgpack.ext.Timestamp"),
        ({"r": random.Random()}, "extra.lr.r", "random.Random"),
        ({"g": (i for i in range(3))}, "extra.lr.g", "generator"),
        ({"a": np.array([object()])}, "extra.lr.a", "dtype object"),
        ({"a": np.zeros(1, dtype=[("x", "O")])}, "extra.lr.a", "dtype [('x', 'O')]"),
        ({"a": np.zeros(2, dtype=np.dtype("f4", metadata={"a": 1}))}, "extra.lr.a", "float32"),
        ({"a": np.ma.array([1])}, "extra.lr.a", "MaskedArray"),
        ({"a": np.zeros(2, dtype=[("x", np.dtype("f4", metadata={"a": 1}))])}, "extra.lr.a", "restored"),
        ({"a": np.zeros(2, dtype=(np.record, [("x", "f4")]))}, "extra.lr.a", "record"),
        ({"a": np.rec.array([(1,)])}, "extra.lr.a", "recarray"),
        ({"a": np.dtype("f4")}, "extra.lr.a", "dtype"),
        ({"f": defaultdict(lambda: 0)}, "extra.lr.f", "defaultdict whose factory is function"),
        ({"f": defaultdict(Point)}, "extra.lr.f", "defaultdict whose factory is type"),
        ({Point(1): 1}, "extra.lr[Point(x=1)]", "key of type"),
        ({print: 1}, "extra.lr[<built-in function print>]", "key of type"),
        ({"s": {1, Point(2)}}, "extra.lr.s", "key of type"),
        ({Color.RED: 1, 1: 2}, "extra.lr", "two keys that are equal"),
        ({"s": {Color.RED, 1}}, "extra.lr.s", "two members that are equal"),
        ({"t": TreeTensor("F32", (-1,), b"")}, "extra.lr.t", "TreeTensor"),
        ({"t": TreeTensor("F32", (1,) * 65, b"1234")}, "extra.lr.t", "TreeTensor"),
        ({"t": TreeTensor(np.dtype("f4"), (1,), b"")}, "extra.lr.t", "TreeTensor"),  # type: ignore[arg-type]
        ({"d": deep(MAX_DEPTH)}, "extra.lr.d[0]", "nested deeper"),
        (cyclic(), "extra.lr[0][0]", "nested deeper"),
        ({"e": enum.Enum("E", {"X": object()})["X"]}, "extra.lr.e.value", "object"),  # type: ignore[index]
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_what_is_not_data_is_refused_with_its_path(value: Any, where: str, what: str) -> None:
    for refuse in (encode, validate):
        with pytest.raises(StateTreeError) as caught:
            refuse(value, "extra.lr")
        assert caught.value.message.startswith(where)
        assert what in caught.value.message
        assert len(caught.value.message) < 500


def test_without_a_path_the_message_begins_with_the_key() -> None:
    with pytest.raises(StateTreeError, match=r"^a\[0\]: function"):
        encode({"a": [lambda: 1]})
    with pytest.raises(StateTreeError, match=r"^small state: function"):
        encode(lambda: 1)


def test_the_deepest_tree_that_is_taken_can_be_read() -> None:
    same(deep(MAX_DEPTH))
    value: Any = 1
    for _ in range(MAX_DEPTH // 2):
        value = ({"x": value},)
    same(value)


def test_a_tree_that_is_too_large_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_tree, "MAX_TREE_BYTES", 1000)
    with pytest.raises(StateTreeError, match=r"loader: 1\d\d\d bytes are more than 1000"):
        encode(bytes(1200), "loader")
    with pytest.raises(FormatError, match="larger than 1000"):
        decode(bytes(1001))


# ---------------------------------------------------------------------------------------------- bad bytes


def packed(value: Any) -> bytes:
    return MAGIC + msgpack.packb(value, use_bin_type=True)


def ext(code: int, value: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, value if isinstance(value, bytes) else msgpack.packb(value))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"BST", b"BST2\xc0", MAGIC, MAGIC + b"\xc1", MAGIC + b"\xc0\xc0", MAGIC + b"\x91",
        MAGIC + b"\xdd\xff\xff\xff\xff", MAGIC + b"\xdf\xff\xff\xff\xff", MAGIC + b"\xc6\xff\xff\xff\xff",
        MAGIC + b"\x91" * 3000 + b"\xc0", MAGIC + b"\x82\x01\xc0\x01\xc0", MAGIC + b"\x81\x90\xc0",
        packed(ext(0, b"")), packed(ext(99, b"")), packed(msgpack.Timestamp(1)), packed([msgpack.Timestamp(1)]),
        packed({"a": msgpack.Timestamp(1)}), packed(ext(1, [msgpack.Timestamp(1)])),
        packed(ext(1, b"")), packed(ext(1, {})), packed(ext(1, 3)), packed(ext(2, [1, 1])), packed(ext(2, [[]])),
        packed(ext(5, b"123")), packed(ext(8, ["<f4", b"123"])), packed(ext(8, ["O", b"12345678"])),
        packed(ext(7, ["O", [1], "C", b"12345678"])), packed(ext(7, [[["a", "O"]], [1], "C", b"12345678"])),
        packed(ext(7, ["<f4", [2], "C", b"1234"])), packed(ext(7, ["<f4", [-1], "C", b""])),
        packed(ext(7, ["<f4", [2**62, 4], "C", b""])), packed(ext(7, ["<f4", [1], "X", b"1234"])),
        packed(ext(7, ["nonsense", [1], "C", b"1234"])), packed(ext(7, ["f4,(", [1], "C", b"1234"])),
        packed(ext(7, [[["a"]], [1], "C", b"1234"])), packed(ext(7, ["<f4", [1] * 70, "C", b"1234"])),
        packed(ext(7, [["a", "b"], [1], "C", b"1234"])), packed(ext(7, ["<f4", [1], "C"])),
        packed(ext(9, ["F32", [-1], b""])), packed(ext(9, [1, [], b""])), packed(ext(9, ["F32", [1.5], b""])),
        packed(ext(10, ["a"])), packed(ext(11, [])), packed(ext(12, ["eval", {}])), packed(ext(12, ["Point", {}])),
        packed(ext(12, [1, {}])), packed(ext(8, ["str", b"x"])), packed(ext(8, ["<f4", "x"])),
    ],
    ids=range(49),
)  # fmt: skip
def test_bytes_that_no_encoder_made_are_format_errors(data: bytes) -> None:
    with pytest.raises(FormatError, match="small state"):
        decode(data)


def test_nested_payloads_do_not_exhaust_the_stack() -> None:
    value: Any = b"\xc0"
    for _ in range(5000):
        value = msgpack.packb([msgpack.ExtType(1, value)])
    with pytest.raises(FormatError, match="nested deeper"):
        decode(MAGIC + value)


@settings(max_examples=250, deadline=None)
@given(st.binary(max_size=120), trees, st.integers(0, 10**6), st.integers(0, 255))
def test_garbage_is_an_error_or_a_tree_that_can_be_encoded(data: bytes, tree: Any, where: int, byte: int) -> None:
    damaged = bytearray(encode(tree))
    damaged[where % len(damaged)] = byte
    for candidate in (data, MAGIC + data, bytes(damaged)):
        try:
            value = decode(candidate)
        except FormatError:
            continue
        encode(value)


def test_numpy_is_imported_only_for_arrays() -> None:
    script = (
        "import sys; from baftd.checkpoint.state_tree import encode, decode; "
        "decode(encode({'a': (1, {2.0, 'x'}, 2**99, 1j)})); assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
