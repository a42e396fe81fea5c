"""Entries and their places in the image: what may be declared, and that chunks cover every byte."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baftd.checkpoint.image import plan_image
from baftd.checkpoint.shard import (
    CHUNK,
    DIGEST_BYTES,
    LARGE,
    LINE,
    NATIVE_DTYPES,
    TensorEntry,
    check_entries,
    digest,
    digest_chunks,
    map_image,
    root_digest,
    small_room_for,
)
from baftd.errors import UsageError
from tests.support.entries import entry_lists


def entry(name: str = "w", shape: tuple[int, ...] = (4, 2), **changes: object) -> TensorEntry:
    made = TensorEntry(name, "F32", shape, 4 * prod(shape))
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (entry(""), "0 characters"),
        (entry("n" * 1025), "1025 characters"),
        (entry("baft.small_state"), "ours"),
        (entry(".pad.0"), "ours"),
        (entry("__metadata__"), "ours"),
        (entry("a\udc80"), "Unicode"),
        (entry(dtype="F 32"), "dtype"),
        (entry(dtype=""), "dtype"),
        (entry(kind="solid"), "kind"),
        (entry(shape=(-1, 2)), "out of range"),
        (entry(nbytes=-1), "out of range"),
        (entry(nbytes=1 << 60), "out of range"),
        (entry(nbytes=31), "has 32 bytes, not 31"),
        (entry(aliases=("baft.x",)), "ours"),
        (entry(ranges=((0, 4), (0, 2))), "go together"),
        (entry(global_shape=(4, 2)), "go together"),
        (entry(global_shape=(8, 2, 1), ranges=((0, 4), (0, 2))), "do not fit"),
        (entry(global_shape=(8, 2), ranges=((5, 9), (0, 2))), "does not lie in 0:8"),
        (entry(global_shape=(8, 2), ranges=((4, 3), (0, 2))), "does not lie"),
        (entry(global_shape=(8, 2), ranges=((0, 3), (0, 2))), "cut a part of shape"),
        (entry(global_shape=(8, 2), ranges=((0, 8),)), "cut a part of shape"),
        (entry(global_shape=(-8, 2), ranges=((0, 4), (0, 2))), "out of range"),
        (entry(strides=(1,)), "do not fit shape"),
        (entry(strides=(1, 5)), "holes"),
        (entry(strides=(2, 2)), "holes"),
        (entry(strides=(0, 1)), "holes"),
    ],
)
def test_an_entry_that_makes_no_sense_is_named(bad: TensorEntry, message: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be declared") as caught:
        check_entries([entry("fine"), bad])
    assert message in str(caught.value)
    assert repr(bad.name) in str(caught.value)


def test_strides_of_any_dense_order_are_taken() -> None:
    check_entries([
        entry("transposed", strides=(1, 4)),
        entry("channels_last", (2, 3, 4, 5), strides=(60, 1, 15, 3)),
        entry("one", (1, 4), strides=(77, 1)),
        entry("empty", (0, 4), strides=(9, 9)),
        entry("flat range", (6,), global_shape=(8, 2), ranges=((3, 9),)),
    ])  # fmt: skip


def test_names_must_be_unique_aliases_included() -> None:
    for entries in (
        [entry("a"), entry("a")],
        [entry("a", aliases=("b",)), entry("b")],
        [entry("a"), entry("b", aliases=("a",))],
        [entry("a", aliases=("c",)), entry("b", aliases=("c",))],
        [entry("a", aliases=("a",))],
    ):
        with pytest.raises(UsageError, match="declared"):
            check_entries(entries)


def test_several_ranges_of_one_tensor_have_names_of_their_own() -> None:
    whole = (16, 2)
    parts = [
        entry("w", global_shape=whole, ranges=((0, 4), (0, 2))),
        entry("w", global_shape=whole, ranges=((8, 12), (0, 2))),
        entry("v", global_shape=whole, ranges=((8, 12), (0, 2))),
    ]
    assert check_entries(parts) == ["w@0:4,0:2", "w@8:12,0:2", "v"]
    with pytest.raises(UsageError, match="declared twice"):
        check_entries([parts[0], parts[0]])
    with pytest.raises(UsageError, match="declared twice"):
        check_entries([*parts, entry("w@0:4,0:2")])


def test_large_tensors_begin_on_a_cache_line() -> None:
    entries = [entry("a", (3,)), entry("b", (LARGE // 4,)), entry("c", (1,)), entry("d", (LARGE // 4 + 1,))]
    image = map_image(entries, check_entries(entries), 4096)
    for placement in image.placements:
        assert placement.nbytes < LARGE or placement.offset % LINE == 0
    assert [pad.nbytes for pad in image.pads] == [LINE - 12, LINE - 4]
    assert [image.by_index[i].entry for i in range(4)] == entries


@given(entries=entry_lists(), small=st.integers(0, 3 * CHUNK))
def test_chunks_cover_every_byte_once(entries: list[TensorEntry], small: int) -> None:
    layout = plan_image(entries, 3 * CHUNK, job="j", rank=0, world=1)
    chunks = layout.chunks(small)
    reached = 0
    for chunk in chunks:
        assert chunk.offset == reached
        assert 1 <= chunk.length <= CHUNK
        reached += chunk.length
    assert reached == layout.image_length(small) <= layout.capacity
    for placement in layout.placements:
        mine = chunks[placement.first_chunk : placement.first_chunk + placement.chunk_count]
        assert sum(chunk.length for chunk in mine) == placement.nbytes
        assert not mine or mine[0].offset == placement.offset
        assert placement.offset % placement.entry.alignment == 0
    assert sum(chunk.length for chunk in chunks[: layout.header_chunks]) == layout.data_offset
    assert sum(chunk.length for chunk in chunks[layout.small_first_chunk :]) == small
    assert len(layout.digest_table(small)) == DIGEST_BYTES * len(chunks)


@given(entries=entry_lists(), seed=st.randoms(use_true_random=False))
def test_the_order_of_declaration_changes_nothing(entries: list[TensorEntry], seed: object) -> None:
    other = list(entries)
    seed.shuffle(other)  # type: ignore[attr-defined]
    first = plan_image(entries, 4096, job="a", rank=0, world=1)
    second = plan_image(other, 8192, job="b", rank=3, world=5)
    assert first.tree_digest == second.tree_digest
    assert [(p.entry, p.stored_name) for p in first.placements] == [(p.entry, p.stored_name) for p in second.placements]


def test_the_tree_digest_sees_every_field() -> None:
    base = entry("w", (4, 2), global_shape=(8, 2), ranges=((0, 4), (0, 2)))
    changed = [
        replace(base, name="v"),
        replace(base, dtype="I32"),
        replace(base, kind="volatile"),
        replace(base, global_shape=(9, 2)),
        replace(base, ranges=((4, 8), (0, 2))),
        replace(base, aliases=("x",)),
        replace(base, strides=(1, 4)),
        replace(base, global_shape=None, ranges=None),
        replace(base, shape=(2, 2), nbytes=16, ranges=((0, 2), (0, 2))),
    ]
    digests = {plan_image([one], 0, job="j", rank=0, world=1).tree_digest for one in (base, *changed)}
    assert len(digests) == len(changed) + 1


def test_pads_have_their_digest_in_the_table() -> None:
    entries = [entry("a", (3,)), entry("b", (LARGE // 4,))]
    layout = plan_image(entries, 16, job="j", rank=0, world=1)
    image = bytes(layout.image_length(16))
    digests = digest_chunks(image, layout.chunks(16))
    table = layout.digest_table(16)
    (pad,) = layout.pads
    at = slice(DIGEST_BYTES * pad.first_chunk, DIGEST_BYTES * (pad.first_chunk + 1))
    assert table[at] == digests[at] != bytes(DIGEST_BYTES)
    assert digests[-DIGEST_BYTES:] == digest(bytes(16)) == xxhash.xxh3_128(bytes(16)).digest()


def test_the_root_digest_covers_digests_and_length() -> None:
    assert len({root_digest(b"a" * 16, 5), root_digest(b"b" * 16, 5), root_digest(b"a" * 16, 6)}) == 3


def test_room_for_small_state() -> None:
    assert small_room_for(0) == small_room_for(1 << 19) == 1 << 20
    assert small_room_for(1 << 20) == 2 << 20


def test_foreign_types_are_stored_flat_and_aligned() -> None:
    foreign = TensorEntry("z", "C128", (3, 2), 96)
    assert (foreign.stored_dtype, foreign.stored_shape, foreign.alignment, foreign.native) == ("U8", (96,), 16, False)
    assert TensorEntry("z", "ODD", (2,), 6).alignment == 1
    assert TensorEntry("z", "F4X2", (), 0).alignment == 1
    strided = entry(strides=(1, 4))
    assert (strided.stored_dtype, strided.stored_shape) == ("F32", (8,))
    assert all(TensorEntry("n", tag, (3,), 3 * size).native for tag, size in NATIVE_DTYPES.items())
