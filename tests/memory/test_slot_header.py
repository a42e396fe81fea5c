"""The slot header: every field comes back, and no torn or damaged block is believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.identity import CheckpointId, Token
from baftd.errors import FormatError, UsageError
from baftd.memory.header import (
    CHECKSUM_OFFSET,
    HEADER_BYTES,
    HEADER_USED,
    STATE_OFFSET,
    SlotHeader,
    SlotState,
    pack_state,
    unpack_state,
)

u64 = st.integers(0, 2**63 - 1)
digests = st.binary(min_size=16, max_size=16)
headers = st.builds(
    SlotHeader,
    state=st.sampled_from([SlotState.FILLING, SlotState.SEALED, SlotState.VERIFIED]),
    generation=st.integers(0, 2**56 - 1),
    token=st.builds(Token, st.integers(1, 2**63), st.binary(min_size=16, max_size=16).map(bytes.hex)),
    job=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True),
    rank=st.integers(0, 9),
    world=st.integers(10, 2**20),
    step=u64,
    updates=u64,
    image_length=st.integers(1000, 2**60),
    small_length=st.integers(0, 1000),
    tree_digest=digests,
    root_digest=digests,
    writer_pid=st.integers(0, 2**22),
    writer_start=u64,
)

HEADER = SlotHeader(
    SlotState.SEALED, 7, Token(3, "ab" * 16), "gpt", 1, 4, 100, 99, 12345, 100, b"t" * 16, b"r" * 16, 321, 55
)


@given(headers)
def test_every_field_comes_back(header: SlotHeader) -> None:
    block = header.encode()
    assert len(block) == HEADER_BYTES
    assert not block[HEADER_USED:].strip(b"\0")
    assert SlotHeader.decode(block) == header
    assert SlotHeader.decode(block[:HEADER_USED]) == header
    assert unpack_state(block[STATE_OFFSET:CHECKSUM_OFFSET]) == (header.state, header.generation)


def test_the_checkpoint_is_epoch_and_step() -> None:
    assert HEADER.checkpoint == CheckpointId(3, 100)
    assert HEADER.with_state(SlotState.VERIFIED, root_digest=b"x" * 16).root_digest == b"x" * 16


def test_free_holds_nothing() -> None:
    block = bytearray(HEADER.encode())
    block[STATE_OFFSET:CHECKSUM_OFFSET] = pack_state(SlotState.FREE, 9)
    assert SlotHeader.decode(block) is None


@given(st.integers(0, HEADER_USED * 8 - 1))
def test_a_flipped_bit_is_never_believed(bit: int) -> None:
    block = bytearray(HEADER.encode())
    block[bit // 8] ^= 1 << bit % 8
    if bit // 8 == STATE_OFFSET:  # the state byte itself: another state of the same content, or none that exists
        try:
            found = SlotHeader.decode(block)
        except FormatError:
            return
        assert found is None or replace(found, state=HEADER.state) == HEADER
        return
    with pytest.raises(FormatError):
        SlotHeader.decode(block)


@settings(max_examples=200)
@given(headers, headers, st.integers(0, HEADER_USED))
def test_a_block_between_two_versions_is_torn(old: SlotHeader, new: SlotHeader, cut: int) -> None:
    mixed = new.encode()[:cut] + old.encode()[cut:]
    try:
        found = SlotHeader.decode(mixed)
    except FormatError:
        return
    assert found in (old, new) or found == replace(old, state=new.state) or found == replace(new, state=old.state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 4}, "rank 4 of 4"),
        ({"small_length": 12346}, "12346 of 12345"),
        ({"job": "a..b"}, "job name"),
    ],
)
def test_contents_that_make_no_sense(changes: dict[str, object], message: str) -> None:
    block = replace(HEADER, **changes).encode()  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=message):
        SlotHeader.decode(block)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -1}, "rank -1"),
        ({"step": 2**64}, "job 'gpt'"),
        ({"root_digest": b"short"}, "wrong length"),
        ({"job": "x" * 65}, "wrong length"),
        ({"job": "\u00e9"}, "ascii"),
        ({"generation": 2**56}, "generation"),
    ],
)
def test_fields_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(HEADER, **changes).encode()  # type: ignore[arg-type]


def test_other_versions_and_foreign_files_are_named() -> None:
    block = bytearray(HEADER.encode())
    with pytest.raises(FormatError, match="too few"):
        SlotHeader.decode(block[:100])
    with pytest.raises(FormatError, match="not a slot of baftd"):
        SlotHeader.decode(b"\x7fELF" + bytes(HEADER_BYTES))
    block[STATE_OFFSET] = 9
    with pytest.raises(FormatError, match="state 9 does not exist"):
        SlotHeader.decode(block)
