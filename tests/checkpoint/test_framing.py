"""The framing of journals and manifests: what was appended is read, and every damage is seen."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.framing import HEADER_BYTES, encode_record, read_manifest, replay, salvage
from baftd.errors import FormatError

scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
plain = scalars | st.text(max_size=8) | st.binary(max_size=8)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(records=st.lists(values, max_size=6))
def test_records_come_back(records: list[object]) -> None:
    data = b"".join(encode_record(record) for record in records)
    found = replay(data)
    assert (list(found.records), found.good_bytes, found.problem, found.torn) == (records, len(data), None, False)


@settings(max_examples=60)
@given(records=st.lists(values, min_size=1, max_size=4), data=st.data())
def test_a_cut_anywhere_is_a_torn_tail(records: list[object], data: st.DataObject) -> None:
    frames = [encode_record(record) for record in records]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole) - 1))
    zeros = data.draw(st.integers(0, 30))
    left = whole[:cut] + bytes(zeros)
    complete = [n for n in range(len(frames) + 1) if left.startswith(b"".join(frames[:n]))][-1]
    good = len(b"".join(frames[:complete]))
    found = replay(left)
    assert (list(found.records), found.good_bytes) == (records[:complete], good)
    if len(left) > good:
        assert found.problem is not None
        assert found.torn, f"{cut} of {len(whole)} and {zeros} zeros: {found.problem}"


def test_every_flipped_bit_is_seen() -> None:
    frames = [encode_record({"k": "slot", "step": n, "digest": bytes(range(16))}) for n in range(3)]
    whole = b"".join(frames)
    for position in range(len(frames[0]), len(frames[0]) + len(frames[1])):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            found = replay(bytes(damaged))
            assert len(found.records) == 1
            assert found.good_bytes == len(frames[0])
            assert found.problem is not None
            assert f"at byte {len(frames[0])}" in found.problem
            assert salvage(bytes(damaged), found.good_bytes)[-1] == {"k": "slot", "step": 2, "digest": bytes(range(16))}


@settings(max_examples=300)
@given(data=st.binary(max_size=64))
def test_garbage_never_raises(data: bytes) -> None:
    for rest in (data, b"BR\x01\x00" + data, encode_record(1) + data):
        found = replay(rest)
        assert found.good_bytes <= len(rest)
        assert found.problem is not None or found.good_bytes == len(rest)
        salvage(rest, 0)


def test_what_cannot_be_data_is_refused() -> None:
    for value in (object(), {1, 2}, 1 << 64, "\ud800", [object()]):
        with pytest.raises(FormatError, match="cannot be written"):
            encode_record(value)
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(FormatError):
        encode_record(deep)
    import struct
    import zlib

    def framed(payload: bytes, version: int = 1) -> bytes:
        start = struct.pack("<2sBBI", b"BR", version, 0, len(payload))
        return start + struct.pack("<I", zlib.crc32(payload, zlib.crc32(start))) + payload

    for payload in (b"\xc1", b"\xd4\x01x", b"\x92\x01", b"\x01\x02", b"\xa1\xff", b"\x81\x90\x01", b"", b"\x91" * 5000):
        found = replay(framed(payload))
        assert found.problem is not None
        assert "not MessagePack" in found.problem, payload
    other = replay(framed(b"\x01", version=2))
    assert other.problem == "a record has framing version 2, this is 1 at byte 0"
    assert not replay(encode_record(os.urandom(100))[: HEADER_BYTES + 5] + b"\xff" * 200).torn


def test_a_manifest_holds_what_it_should_and_nothing_else() -> None:
    one = encode_record("x")
    assert read_manifest(one, "/m") == ["x"]
    assert read_manifest(one + one, "/m", records=None) == ["x", "x"]
    for data in (b"", one + one, one + b"\0", one[:-1]):
        with pytest.raises(FormatError, match="/m is damaged"):
            read_manifest(data, "/m")
