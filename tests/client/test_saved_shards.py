"""Reading parts out of the images of all ranks: exactly the bytes, verified, whatever their order in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baft_client.engine import CopyEngine
from baft_client.load_engine import load_engine
from baft_client.saved import SavedShards, split_small
from baftd.checkpoint import state_tree
from baftd.checkpoint.identity import Token
from baftd.checkpoint.image import ImageLayout, plan_image
from baftd.checkpoint.reshard import Fill, SavedTensor, Wanted, geometry, plan_reads
from baftd.checkpoint.shard import CHUNK, TensorEntry, digest_chunks, root_digest
from baftd.errors import FormatError, ModelMismatch, UsageError, VerificationFailed
from baftd.memory.slot_file import IMAGE_OFFSET
from baftd.wire.messages import RankImage, SlotImage
from tests.checkpoint.reshard_cases import Held, Tensor, entry_of, layouts, shapes, tensor_of, wanted_of

ENGINES = ("native", "python")


@dataclass
class SlotOf:
    """The image of a rank in a file, and what a daemon would say of it."""

    path: Path
    plan: ImageLayout
    said: RankImage

    def damage(self, name: str, at: int) -> None:
        """Flip a bit of a tensor's byte."""
        place = next(place for place in self.plan.placements if place.stored_name == name)
        with self.path.open("r+b") as file:
            file.seek(IMAGE_OFFSET + place.offset + at)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


def slot_of(
    directory: Path, rank: int, world: int, saved: list[tuple[TensorEntry, bytes]], small: Any = None, **options: Any
) -> SlotOf:
    """Write an image. options: step, job, plan, held, digests=False to name only the root digest."""
    encoded = state_tree.encode({"rank": rank} if small is None else small)
    plan = plan_image(
        [entry for entry, _ in saved], 1 << 16, job=options.get("job", "job"), rank=rank, world=world,
        plan=options.get("plan", b""), held=options.get("held", ()),
    )  # fmt: skip
    image = bytearray(plan.image_length(len(encoded)))
    header = plan.render_header(Token(1, "0" * 32), step=options.get("step", 7), updates=7, small_length=len(encoded))
    image[: len(header)] = header
    for place in plan.placements:
        image[place.offset : place.offset + place.nbytes] = saved[place.index][1]
    image[plan.small_offset :] = encoded
    digests = digest_chunks(image, plan.chunks(len(encoded)))
    path = directory / f"rank-{rank}.slot"
    path.write_bytes(bytes(IMAGE_OFFSET) + image + bytes(-len(image) % 4096))
    named = SlotImage(str(path), IMAGE_OFFSET, len(image), root_digest(digests, len(image)), digests)
    if not options.get("digests", True):
        named = SlotImage(named.path, named.offset, named.length, named.digest)
    return SlotOf(path, plan, RankImage(rank, named))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    made = load_engine(None, prefer=request.param)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def python_engine() -> Iterator[CopyEngine]:
    made = load_engine(None, prefer="python")
    yield made
    made.stop()


def opened(slots: list[SlotOf], engine: CopyEngine, **options: Any) -> SavedShards:
    options = {"job": "job", "world": len(slots), "step": 7, **options}
    return SavedShards([slot.said for slot in slots], engine, **options)


def whole(tensor: Tensor, *ranges: tuple[int, int], **more: Any) -> tuple[TensorEntry, bytes]:
    """A part of a tensor as it is saved."""
    return entry_of(tensor, Held(ranges, len(ranges) != len(tensor.shape), **more))


def want(tensor: Tensor, *box: tuple[int, int]) -> Wanted:
    return Wanted(tensor.name, tensor.dtype, tensor.shape, box, tensor.itemsize)


def contents(shards: SavedShards, fill: Fill) -> bytes:
    out = np.full(fill.wanted.nbytes, 0xEE, dtype=np.uint8)
    shards.read(fill, int(out.ctypes.data))
    return out.tobytes()


# ---------------------------------------------------------------------------------------------- reading


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, dict[int, list[Held]], list[Held]]:
    dtype = draw(st.sampled_from(["U8", "BF16", "X3", "F32", "F64", "C128"]))
    tensor = tensor_of("t", dtype, draw(shapes), draw(st.integers(0, 99)))
    world = draw(st.integers(1, 3))
    after: dict[int, list[Held]] = draw(layouts(tensor.shape, 2))
    return tensor, draw(layouts(tensor.shape, world)), [one for held in after.values() for one in held]


@given(cases())
@settings(max_examples=25, deadline=None)
def test_all_ranges_of_any_layout_are_read(
    tmp_path_factory: pytest.TempPathFactory, python_engine: CopyEngine, case: tuple[Tensor, dict[int, list[Held]], Any]
) -> None:
    tensor, before, after = case
    directory = tmp_path_factory.mktemp("images")
    slots = [slot_of(directory, r, len(before), [entry_of(tensor, h) for h in held]) for r, held in before.items()]
    with opened(slots, python_engine) as shards:
        wanted = wanted_of(tensor, after)
        for fill in plan_reads(shards.saved(), wanted, rank=0):
            assert contents(shards, fill) == tensor.cut(fill.wanted.box).tobytes()
            # Into memory in another order: the transposed view of a buffer.
            shape = tuple(stop - start for start, stop in fill.wanted.box)
            turned = np.zeros(shape[::-1], dtype=np.dtype((np.void, tensor.itemsize))).T
            shards.read_array(fill, turned)
            assert turned.tobytes() == tensor.cut(fill.wanted.box).tobytes()
        assert shards.bytes_read == 2 * sum(one.nbytes for one in wanted)
    for slot in slots:
        slot.path.unlink()


ROWS, COLUMNS = 3000, 1500
"""Of F32: 18 MB, 4.3 chunks."""


@pytest.fixture(scope="module")
def large() -> Tensor:
    return tensor_of("big", "F32", (ROWS, COLUMNS), 5)


@pytest.fixture
def halves(large: Tensor, tmp_path: Path) -> list[SlotOf]:
    """Two ranks, each with half of the columns."""
    cuts = ((0, 750), (750, COLUMNS))
    return [slot_of(tmp_path, rank, 2, [whole(large, (0, ROWS), cut)]) for rank, cut in enumerate(cuts)]


def test_large_parts_are_read_whole_and_in_pieces(large: Tensor, halves: list[SlotOf], engine: CopyEngine) -> None:
    with opened(halves, engine) as shards:
        boxes = [((0, ROWS), (0, COLUMNS)), ((100, 2900), (0, 750)), ((17, 2999), (3, 751)), ((5, 6), (750, COLUMNS))]
        for box in boxes:
            (fill,) = plan_reads(shards.saved(), [want(large, *box)])
            assert contents(shards, fill) == large.cut(box).tobytes()
        assert shards.bytes_read == sum(want(large, *box).nbytes for box in boxes)


def test_only_what_is_read_is_verified(large: Tensor, halves: list[SlotOf], engine: CopyEngine) -> None:
    row = 750 * 4
    halves[0].damage("big", CHUNK + 5)
    bad = (CHUNK + 5) // row  # it begins in the chunk before
    free = [((0, bad), (0, 100)), ((2800, ROWS), (3, 750)), ((0, ROWS), (750, 900))]
    few = [((bad + 1, bad + 2), (0, 750)), ((0, ROWS), (100, 180))]  # less than an eighth of what they touch
    hurt = [((bad + 1, bad + 201), (0, 750)), ((0, ROWS), (0, 750)), ((bad, ROWS), (0, 750)), ((0, ROWS), (3, 110))]
    with opened(halves, engine) as shards:
        for fill in plan_reads(shards.saved(), [want(large, *box) for box in free + few]):
            assert contents(shards, fill) == large.cut(fill.wanted.box).tobytes()
        for fill in plan_reads(shards.saved(), [want(large, *box) for box in hurt]):
            with pytest.raises(VerificationFailed, match=r"tensor 'big', saved by rank 0: .* is not what its digest"):
                contents(shards, fill)
    with opened(halves, engine) as shards:
        # Two rows, and the damage in a chunk between them.
        (fill,) = plan_reads(shards.saved(), [want(large, (0, 2), (0, 5))])
        far = geometry(fill.reads[0], fill.wanted)._replace(source_strides=(2900 * row, 4))
        target = np.zeros((2, 5), dtype=np.uint32)
        shards.image(0).copy_region("big", far, target)
        assert target.tobytes() == large.data[[0, 2900], :5].tobytes()


def test_a_daemon_that_names_no_chunks_is_believed(large: Tensor, tmp_path: Path, engine: CopyEngine) -> None:
    slot = slot_of(tmp_path, 0, 1, [whole(large, (0, ROWS), (0, COLUMNS))], digests=False)
    box = ((1, 2000), (0, COLUMNS))
    with opened([slot], engine) as shards:
        (fill,) = plan_reads(shards.saved(), [want(large, *box)])
        assert contents(shards, fill) == large.cut(box).tobytes()
        one = SavedTensor(0, "big", shards.entries(0)["big"])
        assert shards.same_bytes(one, one)
        shards.image(0).verify_rest()


def test_plain_restores_go_on_after_a_partial_read(large: Tensor, halves: list[SlotOf], engine: CopyEngine) -> None:
    with opened(halves, engine) as shards:
        (fill,) = plan_reads(shards.saved(), [want(large, (1500, 1501), (0, 10))])
        contents(shards, fill)
        image = shards.image(0)
        assert image.array("big").tobytes() == large.cut(((0, ROWS), (0, 750))).tobytes()
        image.verify_rest()


# ---------------------------------------------------------------------------------------------- what is equal


def test_equal_bytes_are_known_by_digests_or_compared(tmp_path: Path, engine: CopyEngine) -> None:
    a, b = tensor_of("a", "F32", (4, 6), 1), tensor_of("b", "F32", (4, 6), 2)
    slots = [
        slot_of(tmp_path, 0, 3, [whole(a, (0, 4), (0, 6)), whole(b, (0, 4), (0, 6))]),
        slot_of(tmp_path, 1, 3, [whole(a, (0, 4), (0, 6), order=(1, 0))]),
        slot_of(tmp_path, 2, 3, [whole(a, (2, 20))]),
    ]
    with opened(slots, engine) as shards:
        row, column, part = (SavedTensor(r, "a", shards.entries(r)["a"]) for r in range(3))
        other = SavedTensor(0, "b", shards.entries(0)["b"])
        everything = ((0, 4), (0, 6))
        assert shards.same_bytes(row, row)
        assert shards.same_bytes(row, column, everything)
        assert shards.same_bytes(row, part, ((1, 3), (0, 6)))
        assert not shards.same_bytes(row, other)
        assert not shards.same_bytes(row, other, everything)
        assert not shards.same_bytes(column, other, ((3, 4), (0, 6)))


def test_small_state_that_all_ranks_share() -> None:
    generator = np.arange(3)
    trees: dict[int, dict[str, object]] = {
        0: {"lr": 0.1, "names": ["a", "b"], "rng": generator, "only0": 1, "typed": 1},
        1: {"lr": 0.1, "names": ["a", "b"], "rng": generator + 1, "typed": 1.0},
    }
    assert split_small(trees) == ({"lr": 0.1, "names": ["a", "b"]}, ("only0", "rng", "typed"))
    assert split_small({3: {"x": 1}}) == ({"x": 1}, ())


# ---------------------------------------------------------------------------------------------- refusals


def test_images_that_are_not_those_of_the_plan_are_refused(tmp_path: Path, python_engine: CopyEngine) -> None:
    tensor = tensor_of("t", "F32", (4,), 1)
    slots = [slot_of(tmp_path, rank, 3, [whole(tensor, (0, 4))]) for rank in range(3)]
    with opened(slots, python_engine) as shards:
        assert (shards.world, shards.step, shards.updates) == (3, 7, 7)
        assert shards.small(2) == {"rank": 2} == state_tree.decode(shards.small_bytes(2))
        with pytest.raises(KeyError):
            shards.image(3)
        (fill,) = plan_reads(shards.saved(), [want(tensor, (0, 4))])
        with pytest.raises(UsageError, match=r"\[0:4\] of tensor 't' has shape \(4,\) of 4-byte elements, the array"):
            shards.read_array(fill, np.zeros(4, dtype=np.float64))
        region = geometry(fill.reads[0], fill.wanted)
        with pytest.raises(UsageError, match="lies outside of its 16 bytes"):
            shards.image(0).region("t", region._replace(source_offset=4), 4)
        with pytest.raises(UsageError, match="does not fit shape"):
            shards.image(0).copy_region("t", region, np.zeros(5, dtype=np.float32))
        with pytest.raises(ModelMismatch, match="of rank 0 holds no tensor 'u'"):
            shards.image(0).copy_region("u", region, np.zeros(4, dtype=np.float32))
    with pytest.raises(UsageError, match="restored"):
        shards.read_array(fill, np.zeros(4, dtype=np.float32))
    with pytest.raises(FormatError, match=r"2 images came for step 7 of 3 ranks; missing: \[1\]"):
        SavedShards([slots[0].said, slots[2].said], python_engine, job="job", world=3, step=7)
    with pytest.raises(FormatError, match="holds step 7 of 3 ranks, not step 8 of 3"):
        opened(slots, python_engine, step=8)
    with pytest.raises(FormatError, match="not rank 0 of other"):
        opened(slots, python_engine, job="other")
    slots[1] = slot_of(tmp_path, 1, 3, [whole(tensor, (0, 4))])
    with slots[1].path.open("r+b") as file:
        file.seek(IMAGE_OFFSET + slots[1].plan.small_offset + 8)
        file.write(b"\xff")
    with pytest.raises(VerificationFailed, match="the small state"):
        opened(slots, python_engine)


