"""The reader of protobuf's wire format: what it reads, and what it refuses."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.errors import FormatError
from baftd.formats.protobuf import BYTES, FIXED32, FIXED64, VARINT, read_message, signed


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def encoded(number: int, wire: int, value: int | bytes) -> bytes:
    key = varint(number << 3 | wire)
    if isinstance(value, int):
        return key + varint(value)
    return key + (varint(len(value)) if wire == BYTES else b"") + value


fields = st.one_of(
    st.tuples(st.integers(1, (1 << 29) - 1), st.just(VARINT), st.integers(0, (1 << 64) - 1)),
    st.tuples(st.integers(1, 40), st.just(BYTES), st.binary(max_size=200)),
    st.tuples(st.integers(1, 40), st.just(FIXED32), st.binary(min_size=4, max_size=4)),
    st.tuples(st.integers(1, 40), st.just(FIXED64), st.binary(min_size=8, max_size=8)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(fields, max_size=12))
def test_what_is_written_is_read(written: list[tuple[int, int, int | bytes]]) -> None:
    data = b"".join(encoded(*one) for one in written)
    read = read_message(data, "f", "M")
    assert [(one.number, one.wire, one.value) for one in read.fields] == written
    for one in read.fields:
        if isinstance(one.value, bytes):
            assert data[one.offset : one.offset + len(one.value)] == one.value


@settings(max_examples=100, deadline=None)
@given(st.lists(fields, min_size=1, max_size=6), st.data())
def test_cut_off_anywhere_but_between_fields_is_refused(
    written: list[tuple[int, int, int | bytes]], data: st.DataObject
) -> None:
    parts = [encoded(*one) for one in written]
    whole = b"".join(parts)
    ends = {sum(len(part) for part in parts[:count]) for count in range(len(parts) + 1)}
    cut = data.draw(st.integers(0, len(whole) - 1))
    if cut in ends:
        assert len(read_message(whole[:cut], "f", "M").fields) < len(written)
        return
    with pytest.raises(FormatError, match=r"^file f: M, byte \d+: .*(cut off)"):
        read_message(whole[:cut], "file f", "M")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        message = read_message(data, "f", "M")
    except FormatError:
        return
    for number in range(1, 5):
        for read in (message.numbers, message.text):
            with suppress(FormatError):
                read(number, "x", 10)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x00\x01", "field number 0"),
        (b"\x0b", "wire type 3"),
        (b"\x0f", "wire type 7"),
        (b"\x08" + b"\x80" * 10 + b"\x01", "more than 64 bits"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "more than 64 bits"),
        (b"\x08\x80", "cut off"),
        (b"\x0a\x05ab", "has 5 bytes, and 2 are left"),
        (b"\x0d\x00", "4 bytes, and 1 are left"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "are left"),
    ],
)
def test_refused(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        read_message(data, "name", "Message")
    assert str(caught.value).startswith("name: Message, byte 0") or "byte 1" in str(caught.value)


def test_numbers_come_packed_or_one_by_one_and_negative() -> None:
    minus_one = (1 << 64) - 1
    data = encoded(1, VARINT, 3) + encoded(1, BYTES, varint(4) + varint(minus_one)) + encoded(1, VARINT, 5)
    numbers = read_message(data, "f", "M").numbers(1, "dim", 10)
    assert [signed(value) for value in numbers] == [3, 4, -1, 5]
    with pytest.raises(FormatError, match="more than 3 numbers"):
        read_message(data, "f", "M").numbers(1, "dim", 3)


def test_a_field_of_the_wrong_kind_is_named() -> None:
    message = read_message(encoded(1, VARINT, 3) + encoded(2, BYTES, b"\xff") + encoded(3, FIXED32, b"1234"), "f", "M")
    with pytest.raises(FormatError, match="child is stored as a varint, not as bytes"):
        message.one(1, "child")
    with pytest.raises(FormatError, match="name is not UTF-8"):
        message.text(2, "name", 10)
    with pytest.raises(FormatError, match="dim is stored as 4 bytes, not as a varint"):
        message.numbers(3, "dim", 10)
    with pytest.raises(FormatError, match="x is missing"):
        message.number(9, "x")
    assert message.number(9, "x", 7) == 7
    with pytest.raises(FormatError, match="child is missing"):
        message.one(9, "child")


def test_of_a_number_that_is_there_twice_the_last_counts_and_a_message_must_be_there_once() -> None:
    twice = encoded(1, VARINT, 3) + encoded(1, VARINT, 4) + encoded(2, BYTES, b"") * 2
    message = read_message(twice, "f", "M")
    assert message.number(1, "x") == 4
    with pytest.raises(FormatError, match="2 times, not once"):
        message.one(2, "child")
    assert [field.number for field in message.unknown(frozenset({2}))] == [1, 1]
