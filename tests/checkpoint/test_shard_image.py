"""The image is a safetensors file: the library opens it, our parser reads everything back, and damage is named."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from baftd.checkpoint import image as image_module
from baftd.checkpoint.identity import Token
from baftd.checkpoint.image import (
    MAX_HEADER,
    ImageLayout,
    ParsedImage,
    header_length,
    parse_image_header,
    plan_image,
)
from baftd.checkpoint.shard import SMALL_STATE, TensorEntry
from baftd.errors import FormatError, UsageError
from tests.support.entries import entry_lists

TOKEN = Token(7, "0123456789abcdef" * 2)


def fill(layout: ImageLayout, small: bytes, *, step: int = 5, updates: int = 4, seed: int = 1) -> bytes:
    """An image with random tensors."""
    header = layout.render_header(TOKEN, step=step, updates=updates, small_length=len(small))
    image = bytearray(layout.image_length(len(small)))
    image[: len(header)] = header
    rng = random.Random(seed)
    for placement in layout.placements:
        image[placement.offset : placement.offset + placement.nbytes] = rng.randbytes(placement.nbytes)
    image[layout.small_offset :] = small
    return bytes(image)


def planned(*entries: TensorEntry, room: int = 1 << 20) -> ImageLayout:
    return plan_image(entries, room, job="gpt", rank=1, world=4)


WEIGHT = TensorEntry("w", "F32", (4, 2), 32)
SHARD = TensorEntry("s", "BF16", (2, 3), 12, "volatile", (4, 3), ((2, 4), (0, 3)), ("tied", "tied.too"))
ODD = TensorEntry("c", "C64", (2,), 16, strides=(1,))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=entry_lists(),
    small=st.binary(max_size=3000),
    room=st.integers(3000, 1 << 40),
    numbers=st.tuples(st.integers(0, 2**60), st.integers(0, 2**60)),
)
def test_library_and_parser_read_what_was_written(
    tmp_path: Path, entries: list[TensorEntry], small: bytes, room: int, numbers: tuple[int, int]
) -> None:
    layout = plan_image(entries, room, job="gpt", rank=3, world=9)
    step, updates = numbers
    image = fill(layout, small, step=step, updates=updates)
    path = tmp_path / "shard.safetensors"
    path.write_bytes(image)
    with safe_open(str(path), framework="np") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {p.stored_name for p in layout.placements} | {p.name for p in layout.pads} | {
            SMALL_STATE
        }
        assert file.get_tensor(SMALL_STATE).tobytes() == small
        for placement in layout.placements:
            tensor = file.get_slice(placement.stored_name)
            assert tuple(tensor.get_shape()) == placement.entry.stored_shape
            assert tensor.get_dtype() == placement.entry.stored_dtype
            if placement.entry.stored_dtype in ("U8", "I64", "F32", "BOOL"):
                read = file.get_tensor(placement.stored_name).tobytes()
                assert read == image[placement.offset : placement.offset + placement.nbytes]
    assert (metadata["baft.step"], metadata["baft.updates"]) == (str(step), str(updates))

    parsed = parse_image_header(image)
    same_index = [replace(p, index=q.index) for p, q in zip(layout.placements, parsed.placements, strict=True)]
    assert parsed.placements == tuple(same_index)
    assert parsed.pads == layout.pads
    assert parsed.tree_digest == layout.tree_digest
    assert (parsed.token, parsed.step, parsed.updates) == (TOKEN, step, updates)
    assert (parsed.job, parsed.rank, parsed.world) == ("gpt", 3, 9)
    assert (parsed.small_offset, parsed.small_length, parsed.length) == (layout.small_offset, len(small), len(image))
    assert parsed.all_chunks() == layout.chunks(len(small))
    assert sorted(parsed.entries, key=repr) == sorted(entries, key=repr)


def test_torch_reads_the_file(tmp_path: Path) -> None:
    torch_file = pytest.importorskip("safetensors.torch", reason="PyTorch is not installed")
    layout = planned(WEIGHT, SHARD, TensorEntry("h", "F8_E4M3", (3,), 3), TensorEntry("scalar", "I64", (), 8))
    path = tmp_path / "x.safetensors"
    path.write_bytes(fill(layout, b"tree"))
    tensors = torch_file.load_file(path)
    assert tensors["w"].shape == (4, 2)
    assert str(tensors["s"].dtype) == "torch.bfloat16"
    assert str(tensors["h"].dtype) == "torch.float8_e4m3fn"
    assert tensors["scalar"].shape == ()
    assert bytes(tensors[SMALL_STATE].tolist()) == b"tree"


def test_only_numbers_change_from_step_to_step() -> None:
    layout = planned(WEIGHT, SHARD)
    first = layout.render_header(TOKEN, step=1, updates=1, small_length=0)
    last = layout.render_header(Token(2**40, "f" * 32), step=10**15, updates=10**15, small_length=layout.small_room)
    assert len(first) == len(last) == layout.data_offset
    assert layout.data_offset % 4096 == 0
    changed = [at for at, (a, b) in enumerate(zip(first, last, strict=True)) if a != b]
    assert max(changed) < 512
    assert parse_image_header(last).small_length == layout.small_room


def test_ranks_with_the_same_entries_have_headers_of_one_length() -> None:
    # Names of so many lengths that some header would cross a page if rank, world or the room counted in it.
    for length in range(220):
        entries = [TensorEntry(f"{i}.{'x' * length}", "F32", (2, 3), 24) for i in range(10, 30)]
        images = [
            plan_image(entries, room, job="job", rank=rank, world=world)
            for rank, world, room in ((0, 1, 0), (10, 100_000, 1 << 30), (99_999, 1 << 20, 3 << 40))
        ]
        assert len({image.tree_digest for image in images}) == 1
        assert len({(image.data_offset, image.small_offset) for image in images}) == 1, length
        header = images[-1].render_header(TOKEN, step=1, updates=1, small_length=0)
        parsed = parse_image_header(header)
        assert (parsed.rank, parsed.world, len(header)) == (99_999, 1 << 20, images[-1].data_offset)


def test_rendering_is_fast() -> None:
    entries = [TensorEntry(f"optim.0.layers.{i}.attention.weight.exp_avg", "F32", (4, 4), 64) for i in range(1000)]
    layout = plan_image(entries, 1 << 20, job="gpt", rank=0, world=1)
    times = []
    for step in range(300):
        begin = time.perf_counter()
        layout.render_header(TOKEN, step=step, updates=step, small_length=step)
        times.append(time.perf_counter() - begin)
    assert median(times) < 100e-6  # 8 us on an idle machine


def test_numbers_out_of_range_are_refused() -> None:
    layout = planned(WEIGHT, room=100)
    with pytest.raises(UsageError, match="101 bytes, its room is 100"):
        layout.render_header(TOKEN, step=0, updates=0, small_length=101)
    with pytest.raises(UsageError, match="out of range"):
        layout.render_header(TOKEN, step=10**30, updates=0, small_length=0)
    with pytest.raises(UsageError, match="rank 4 of 4"):
        plan_image([WEIGHT], 0, job="gpt", rank=4, world=4)
    with pytest.raises(UsageError, match="job name"):
        plan_image([WEIGHT], 0, job="../x", rank=0, world=1)
    with pytest.raises(UsageError, match="small state is out of range"):
        plan_image([WEIGHT], -1, job="gpt", rank=0, world=1)


def test_a_header_that_safetensors_would_refuse_is_refused_with_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_HEADER == 100_000_000
    monkeypatch.setattr(image_module, "MAX_HEADER", 1_000_000)
    entries = [TensorEntry(f"{'n' * 1000}{i}", "F32", (1,), 4) for i in range(1000)]
    with pytest.raises(UsageError, match=r"1000 tensors of rank 0 need a header of 1 MB; .* at most 1 MB"):
        plan_image(entries, 0, job="gpt", rank=0, world=1)
    plan_image(entries[:900], 0, job="gpt", rank=0, world=1)


def test_length_bytes_that_look_like_a_template() -> None:
    # 0x25 is '%': a header of that length must not be taken for a placeholder.
    entries = [TensorEntry(f"%s%d{'x' * 900}{i:04}", "F32", (1,), 4) for i in range(2530)]
    layout = plan_image(entries, 0, job="j", rank=0, world=1)
    header = layout.render_header(TOKEN, step=1, updates=1, small_length=0)
    assert b"%" in header[:8]
    assert header_length(header[:8]) == layout.data_offset == len(header)
    assert len(parse_image_header(header).entries) == len(entries)


# ------------------------------------------------------------------------------------------------ damage


def rebuilt(image: bytes, change: object) -> bytes:
    """The image with its JSON changed by `change(json)`, padded again."""
    parsed = parse_image_header(image)
    root = json.loads(image[8 : parsed.data_offset])
    change(root)  # type: ignore[operator]
    text = json.dumps(root, separators=(",", ":")).encode()
    size = -(-(len(text) + 8) // 4096) * 4096
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8) + image[parsed.data_offset :]


def at(*path: str, value: object = None, delete: bool = False) -> object:
    def change(root: dict[str, object]) -> None:
        for key in path[:-1]:
            root = root[key]  # type: ignore[assignment]
        if delete:
            del root[path[-1]]
        else:
            root[path[-1]] = value

    return change


def in_table(change: object) -> object:
    def outer(root: dict[str, dict[str, str]]) -> None:
        table = json.loads(root["__metadata__"]["baft.entries"])
        change(table)  # type: ignore[operator]
        root["__metadata__"]["baft.entries"] = json.dumps(table)

    return outer


META = "__metadata__"
DAMAGE = [
    (at(META, delete=True), "__metadata__"),
    (at(META, value={"a": 1}), "__metadata__"),
    (at(META, "baft.format", value="2"), "baft.format: '2'"),
    (at(META, "baft.format", delete=True), "baft.format: None"),
    (at(META, "baft.job", value="a/b"), "job name"),
    (at(META, "baft.job", delete=True), "baft.job: is missing"),
    (at(META, "baft.rank", value="4"), "baft.rank"),
    (at(META, "baft.rank", value="-1"), "baft.rank"),
    (at(META, "baft.world", value="x"), "baft.world"),
    (at(META, "baft.world", value="9" * 30), "baft.world"),
    (at(META, "baft.epoch", value="0"), "epoch 0"),
    (at(META, "baft.incarnation", value="xyz"), "incarnation"),
    (at(META, "baft.step", value="1e3"), "baft.step"),
    (at(META, "baft.step", value="\u0661"), "baft.step"),
    (at(META, "baft.updates", delete=True), "baft.updates"),
    (at(META, "baft.entries", value="["), "baft.entries is not JSON"),
    (at(META, "baft.entries", value="[]"), "baft.entries: is not a JSON object"),
    (at(META, "baft.entries", value='{"a":{},"a":{}}'), "'a' stands there twice"),
    (at("w", value=5), "w: is not an object"),
    (at("w", "dtype", value="F33"), "w: dtype"),
    (at("w", "dtype", value="F64"), "w: F64"),
    (at("w", "shape", value=[3, 2]), "w: F32"),
    (at("w", "shape", value=[-4, -2]), "shape: is not a list of sizes"),
    (at("w", "shape", value=[4.0, 2]), "shape: is not a list of sizes"),
    (at("w", "shape", value=[True, 8]), "shape: is not a list of sizes"),
    (at("w", "shape", value=8), "shape: is not a list of sizes"),
    (at("w", "data_offsets", value=[16, 47]), "w: "),
    (at("w", "data_offsets", value=[16, 48, 50]), "w: data_offsets"),
    (at("w", "data_offsets", value=[48, 16]), "w: data_offsets"),
    (at("w", "data_offsets", value=[0, 32]), "begins at 0"),
    (at("w", "data_offsets", value=[17, 49]), "begins at 17"),
    (at("w", delete=True), "begins at 48"),
    (at("x", value={"dtype": "U8", "shape": [0], "data_offsets": [0, 0], "more": 1}), "x: is not an object"),
    (at(SMALL_STATE, delete=True), SMALL_STATE),
    (at(SMALL_STATE, "shape", value=[2, 2]), SMALL_STATE),
    (at(SMALL_STATE, "dtype", value="I8"), SMALL_STATE),
    (at("tail", value={"dtype": "U8", "shape": [4], "data_offsets": [64, 68]}), "not the last tensor"),
    (at(".pad.9", value={"dtype": "U8", "shape": [0], "data_offsets": [60, 60]}), ".pad."),
    (in_table(at("nobody", value={})), "'nobody' is not in the file"),
    (in_table(at("s", value=[])), "s: is not an object"),
    (in_table(at("s", "color", value=1)), "keys among"),
    (in_table(at("s", "kind", value="solid")), "kind"),
    (in_table(at("s", "kind", value=3)), "kind is not a text"),
    (in_table(at("s", "name", value="other")), "names"),
    (in_table(at("s", "aliases", value="tied")), "aliases"),
    (in_table(at("s", "aliases", value=["w"])), "declared twice"),
    (in_table(at("s", "ranges", value=[[2, 4, 5], [0, 3]])), "ranges"),
    (in_table(at("s", "ranges", value=3)), "ranges"),
    (in_table(at("s", "ranges", value=[[2, 4], [1, 3]])), "cut a part"),
    (in_table(at("s", "global_shape", delete=True)), "go together"),
    (in_table(at("s", "global_shape", value=[3, 3])), "does not lie"),
    (in_table(at("c", "dtype", value="C128 ")), "dtype"),
    (in_table(at("c", "dtype", delete=True)), "is stored as"),
    (in_table(at("c", "shape", value=[3])), "where this format puts it"),
    (in_table(at("c", "strides", value=[2])), "strides"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE, ids=[str(i) for i in range(len(DAMAGE))])
def test_every_damaged_field_is_named(change: object, message: str) -> None:
    image = fill(planned(WEIGHT, SHARD, ODD), b"tree")
    assert parse_image_header(image).job == "gpt"
    with pytest.raises(FormatError, match=r"^image header: ") as caught:
        parse_image_header(rebuilt(image, change))
    assert message in str(caught.value)


def test_places_that_this_format_does_not_use_are_refused() -> None:
    def swap(root: dict[str, dict[str, object]]) -> None:
        root["a"]["data_offsets"], root["b"]["data_offsets"] = root["b"]["data_offsets"], root["a"]["data_offsets"]

    image = fill(planned(TensorEntry("a", "F32", (2,), 8), TensorEntry("b", "F32", (2,), 8)), b"")
    with pytest.raises(FormatError, match="where this format puts it"):
        parse_image_header(rebuilt(image, swap))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends after 0 bytes"),
        (b"1234567", "ends after 7 bytes"),
        (bytes(8), "length: 0 is not between"),
        ((2**63).to_bytes(8, "little"), "is not between"),
        ((MAX_HEADER + 1).to_bytes(8, "little"), "is not between"),
        ((4000).to_bytes(8, "little"), "not a multiple of 4096"),
        ((4088).to_bytes(8, "little") + b"{}", "only 10 are there"),
        ((4088).to_bytes(8, "little") + b"{".ljust(4088), "not JSON"),
        ((4088).to_bytes(8, "little") + b"[" * 4088, "not JSON"),
        ((4088).to_bytes(8, "little") + b"\xff" * 4088, "not JSON"),
        ((4088).to_bytes(8, "little") + b"{}".ljust(4088, b"\0"), "not JSON"),
        ((4088).to_bytes(8, "little") + b"7".ljust(4088), "not a JSON object"),
        ((4088).to_bytes(8, "little") + b'{"a":1,"a":2}'.ljust(4088), "'a' stands there twice"),
    ],
)
def test_bytes_that_are_no_header(data: bytes, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_image_header(data)
    assert message in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(where=st.integers(0, 2**20), bit=st.integers(0, 7))
def test_a_flipped_bit_is_an_error_or_reads_as_what_it_says(where: int, bit: int) -> None:
    image = bytearray(fill(planned(WEIGHT, SHARD, ODD), b"tree"))
    image[where % parse_image_header(image).data_offset] ^= 1 << bit
    try:
        parsed = parse_image_header(bytes(image))
    except FormatError:
        return
    assert isinstance(parsed, ParsedImage)  # a letter of a name, a digit: digests tell, not the parser


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(data: bytes) -> None:
    padded = (4088).to_bytes(8, "little") + data.ljust(4088)
    for candidate in (data, padded):
        with pytest.raises(FormatError):
            parse_image_header(candidate)


def test_arrays_come_back_from_the_file_alone(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3).T  # strides (1, 3)
    source = TensorEntry("t", "F32", (3, 2), 24, strides=(1, 3))
    layout = planned(source)
    image = bytearray(fill(layout, b""))
    (place,) = layout.placements
    image[place.offset : place.offset + 24] = values.T.tobytes()
    parsed = parse_image_header(bytes(image))
    (found,) = parsed.placements
    assert found.entry == source
    raw = np.frombuffer(image, np.float32, count=6, offset=found.offset)
    assert found.entry.strides is not None
    again = np.lib.stride_tricks.as_strided(raw, found.entry.shape, [4 * stride for stride in found.entry.strides])
    assert (again == values).all()
