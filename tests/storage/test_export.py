"""A checkpoint as ordinary files: every tensor once, whole, bit for bit; opened by the safetensors library."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from baftd.checkpoint.shard import TensorEntry
from baftd.errors import NoRoom, UsageError, VerificationFailed
from baftd.storage import export
from baftd.storage.directory import DirectoryTier
from baftd.storage.export import ExportResult, ImageSource, export_images, export_safetensors
from baftd.storage.merge import Merged, Merger
from baftd.storage.names import Writer
from tests.support.faulty_files import FaultyFiles
from tests.support.images import Slot, make_slot, save
from tests.support.memory_files import Killed, Op

Array = npt.NDArray[Any]
Part = tuple[TensorEntry, bytes]

TAGS = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "float16": "F16"}


def plain(name: str, array: Array, **more: object) -> Part:
    entry = TensorEntry(name, TAGS[array.dtype.name], array.shape, array.nbytes, **more)  # type: ignore[arg-type]
    return entry, np.ascontiguousarray(array).tobytes()


def part(name: str, whole: Array, *ranges: tuple[int, int], dtype: str = "") -> Part:
    """[ranges] of `whole`; one range of a tensor with more dimensions counts in its flattened form."""
    if len(ranges) == 1 and whole.ndim != 1:
        piece = whole.reshape(-1)[slice(*ranges[0])]
    else:
        piece = whole[tuple(slice(*one) for one in ranges)]
    tag = dtype or TAGS[whole.dtype.name]
    entry = TensorEntry(name, tag, piece.shape, piece.nbytes, global_shape=whole.shape, ranges=tuple(ranges))
    return entry, np.ascontiguousarray(piece).tobytes()


def slots_of(shm: Path, ranks: Sequence[Sequence[Part]]) -> list[Slot]:
    found = []
    for rank, parts in enumerate(ranks):
        names = [entry.name for entry, _ in parts]
        assert len(set(names)) == len(names), "one part a name and rank is all that `contents` can say"
        found.append(
            make_slot(
                shm,
                rank=rank,
                world=len(ranks),
                entries=[entry for entry, _ in parts],
                contents={entry.name: data for entry, data in parts},
            )
        )
    return found


def exported(
    shm: Path, out: Path, ranks: Sequence[Sequence[Part]], **more: object
) -> tuple[ExportResult, dict[str, Array]]:
    """Save, commit, export, and read back with the library, through the index."""
    tier = DirectoryTier(out / "durable", node="n0")
    saved = save(tier, slots_of(shm, ranks))
    result = export_safetensors(tier, "gpt", saved.checkpoint, out / "export", **more)  # type: ignore[arg-type]
    return result, opened(out / "export")


def opened(directory: Path) -> dict[str, Array]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found: dict[str, Array] = {}
    for name in sorted(set(index["weight_map"].values())):
        for key, value in load_file(directory / name).items():
            assert index["weight_map"][key] == name
            assert key not in found
            found[key] = value
    assert set(found) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    return found


def random_array(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Array:
    return (np.random.default_rng(seed).random(shape) * 200).astype(dtype)


def test_shards_become_whole_tensors(shm: Path, disk: Path) -> None:
    rows, columns, grid = random_array((10, 6)), random_array((4, 9), "float64", 1), random_array((5, 4, 3), "int64", 2)
    flat, replica = random_array((7, 5), "float16", 3), random_array((33,), "uint8", 4)
    ranks = [
        [
            part("rows", rows, (0, 7), (0, 6)),
            part("columns", columns, (0, 4), (0, 2)),
            part("grid", grid, (0, 2), (0, 4), (0, 1)),
            part("flat", flat, (0, 11)),
            part("replica", replica, (0, 33)),
            plain("only.here", random_array((3, 3), seed=5)),
        ],
        [
            part("rows", rows, (7, 10), (0, 6)),
            part("columns", columns, (0, 4), (2, 9)),
            part("grid", grid, (2, 5), (0, 4), (0, 1)),
            part("flat", flat, (11, 35)),
            part("replica", replica, (0, 33)),
        ],
        [part("grid", grid, (0, 2), (0, 4), (1, 3)), part("rows", rows, (0, 7), (0, 6))],
        [part("grid", grid, (2, 5), (0, 4), (1, 3)), part("flat", flat, (35, 35))],
    ]
    result, found = exported(shm, disk, ranks)
    assert set(found) == {"rows", "columns", "grid", "flat", "replica", "only.here"}
    for name, whole in {"rows": rows, "columns": columns, "grid": grid, "flat": flat, "replica": replica}.items():
        assert found[name].dtype == whole.dtype
        np.testing.assert_array_equal(found[name], whole)
    assert result.tensors == 6
    assert result.nbytes == sum(value.nbytes for value in found.values())
    assert [path.name for path in result.files] == ["model.safetensors", "model.safetensors.index.json"]
    assert len(result.notes) == 1
    assert "Small state" in result.notes[0]


def test_what_only_looks_the_same_is_kept_apart(shm: Path, disk: Path) -> None:
    mine, other, whole = random_array((4,)), random_array((4,), seed=1), random_array((8,), seed=2)
    ranks = [
        [plain("layer.0.bias", bias), plain("equal", mine), part("holes", whole, hole), part("lies", lie, (0, 8))]
        for bias, hole, lie in [(mine, (0, 3), whole), (other, (4, 8), whole + 1)]
    ]
    result, found = exported(shm, disk, ranks)
    assert set(found) == {
        "rank0.layer.0.bias",
        "rank1.layer.0.bias",
        "rank0.equal",
        "rank1.equal",
        "rank0.holes@0:3",
        "rank1.holes@4:8",
        "rank0.lies@0:8",
        "rank1.lies@0:8",
    }
    np.testing.assert_array_equal(found["rank1.layer.0.bias"], other)
    np.testing.assert_array_equal(found["rank1.lies@0:8"], whole + 1)
    assert any("holes: the range [3:4] is missing" in note for note in result.notes)
    assert any("lies: the replicas of ranks 0 and 1 differ" in note for note in result.notes)


def test_foreign_types_tied_tensors_and_odd_strides(shm: Path, disk: Path) -> None:
    complex_whole = (random_array((6, 2)) + 1j * random_array((6, 2), seed=1)).astype(np.complex64)
    turned = np.asfortranarray(random_array((5, 7), seed=2))
    halves = np.asfortranarray(random_array((3, 4), seed=3)), np.asfortranarray(random_array((3, 4), seed=4))
    strided = [
        TensorEntry("turned", "F32", (5, 7), turned.nbytes, strides=(1, 5)),
        *(
            TensorEntry("halves", "F32", (3, 4), 48, "stable", (6, 4), ((row, row + 3), (0, 4)), strides=(1, 3))
            for row in (0, 3)
        ),
    ]
    tied = random_array((2, 3), seed=5)
    scalar = np.array(7.5, dtype=np.float64)
    ranks = [
        [
            part("complex", complex_whole, (0, 2), (0, 2), dtype="C64"),
            (strided[0], turned.tobytes("F")),
            (strided[1], halves[0].tobytes("F")),
            plain("embedding", tied, aliases=("head", "tail")),
            plain("scalar", scalar),
            plain("empty", random_array((0, 4))),
            (TensorEntry("packed", "QINT4", (3,), 2), b"\x12\x03"),
        ],
        [part("complex", complex_whole, (2, 6), (0, 2), dtype="C64"), (strided[2], halves[1].tobytes("F"))],
    ]
    result, found = exported(shm, disk, ranks)
    assert found["complex"].tobytes() == complex_whole.tobytes()
    np.testing.assert_array_equal(found["turned"], turned)
    np.testing.assert_array_equal(found["halves"], np.concatenate(halves))
    np.testing.assert_array_equal(found["scalar"], scalar)
    assert found["scalar"].shape == ()
    assert found["empty"].shape == (0, 4)
    assert found["packed"].tobytes() == b"\x12\x03"
    with safe_open(result.files[0], "np") as file:
        metadata = file.metadata()
    assert (metadata["head"], metadata["tail"]) == ("embedding", "embedding")
    assert json.loads(metadata["baft.foreign"])["complex"] == {"dtype": "C64", "shape": [6, 2]}
    assert any("complex, packed" in note for note in result.notes)


def test_files_are_split_and_blocks_are_small(shm: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_BLOCK", 1000)
    tensors = {f"t{number}": random_array((40 + number, 13), seed=number) for number in range(9)}
    ranks = [
        [part(name, whole, (0, len(whole)), (6 * rank, 6 + 7 * rank)) for name, whole in tensors.items()]
        for rank in range(2)
    ]
    told: list[tuple[int, int]] = []
    result, found = exported(shm, disk, ranks, file_limit=6000, progress=lambda done, total: told.append((done, total)))
    assert len(result.files) == 6
    assert result.files[0].name == "model-00001-of-00005.safetensors"
    for name, whole in tensors.items():
        np.testing.assert_array_equal(found[name], whole)
    assert told[-1][0] == told[-1][1]
    assert told == sorted(told)


def test_nothing_is_named_when_a_slot_rotates(shm: Path, disk: Path) -> None:
    """From memory: an image that changes after it was verified is noticed before anything gets its name."""
    slot = make_slot(shm)
    from baftd.checkpoint.shard import root_digest

    source = ImageSource(0, str(slot.path), 4096, slot.length, root_digest(slot.digests, slot.length))
    assert export_images([source], disk / "good").tensors == 4

    def change(op: Op, count: int) -> None:
        if op.kind == "fsync" and op.path.endswith("index.json"):
            with open(slot.path, "r+b") as file:
                file.seek(4096 + slot.length - 1)
                file.write(b"\xff")

    with pytest.raises(VerificationFailed, match=r"rank 0: .*slot is not what its digest says"):
        export_images([source], disk / "bad", file_ops=FaultyFiles(change))
    assert os.listdir(disk) == ["good"]
    with pytest.raises(VerificationFailed):
        export_images([source], disk / "bad")


def test_bad_requests(shm: Path, disk: Path) -> None:
    tier = DirectoryTier(disk / "durable", node="n0")
    slots = slots_of(shm, [[plain("a", random_array((3,)))], [plain("b", random_array((3,)))]])
    saved = save(tier, slots)
    (disk / "used").mkdir()
    (disk / "used" / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        export_safetensors(tier, "gpt", saved.checkpoint, disk / "used")
    with pytest.raises(UsageError, match="is a file"):
        export_safetensors(tier, "gpt", saved.checkpoint, disk / "used" / "file")
    (disk / "empty").mkdir()
    assert export_safetensors(tier, "gpt", saved.checkpoint, disk / "empty").tensors == 2
    sources = [ImageSource(p.rank, p.path, 0, p.nbytes, p.root_digest) for p in saved.parts]
    with pytest.raises(UsageError, match="images of 1 of 2 ranks"):
        export_images(sources[:1], disk / "x")
    with pytest.raises(UsageError, match="image of rank 1"):
        export_images([ImageSource(0, **{k: v for k, v in vars(sources[1]).items() if k != "rank"})], disk / "x")
    Path(saved.parts[1].path).write_bytes(Path(saved.parts[1].path).read_bytes()[:-1])
    with pytest.raises(VerificationFailed, match=r"damaged.*rank-00001\.safetensors has"):
        export_safetensors(tier, "gpt", saved.checkpoint, disk / "x")
    assert not (disk / "x").exists()


def once(number: int, error: Callable[[], BaseException]) -> Callable[[Op, int], None]:
    left = [error]

    def before(op: Op, count: int) -> None:
        if count == number and left:
            raise left.pop()()

    return before


def test_a_full_disk_and_a_kill_leave_nothing_named(shm: Path, disk: Path) -> None:
    tier = DirectoryTier(disk / "durable", node="n0")
    saved = save(tier, slots_of(shm, [[plain("a", random_array((3,)))]]))
    sources = [ImageSource(p.rank, p.path, 0, p.nbytes, p.root_digest) for p in saved.parts]
    counted = FaultyFiles()
    export_images(sources, disk / "out" / "counted", file_ops=counted)
    for number in range(len(counted.log)):
        last = number == len(counted.log) - 1  # of the directory above: the name is there, only not for certain
        ops = FaultyFiles(once(number, lambda: OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(NoRoom):
            export_images(sources, disk / "out" / "full", file_ops=ops)
        ops.bury()
        assert sorted(os.listdir(disk / "out")) == (["counted", "full"] if last else ["counted"])
        ops = FaultyFiles(once(number, Killed))
        with pytest.raises(Killed):
            export_images(sources, disk / "killed" / str(number) / "x", file_ops=ops)
        ops.bury()
        assert os.path.exists(disk / "killed" / str(number) / "x") == last


def test_leftovers_of_dead_exports_are_removed(shm: Path, disk: Path) -> None:
    tier = DirectoryTier(disk / "durable", node="n0")
    saved = save(tier, slots_of(shm, [[plain("a", random_array((3,)))]]))
    me = Writer.of_node(os.uname().nodename)
    dead = Writer(me.owner, me.machine, me.alive, (os.getpid(), 1))
    for name in (dead.temporary("out"), me.temporary("out"), dead.temporary("other")):
        (disk / name).mkdir()
        (disk / name / "file").touch()
    export_safetensors(tier, "gpt", saved.checkpoint, disk / "out")
    left = [name for name in os.listdir(disk) if name.startswith(".tmp")]
    assert sorted(name.rpartition("~")[2] for name in left) == ["other", "out"]
    assert [me.is_live(name) for name in left if name.endswith("~out")] == [True]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_into_boxes_is_put_together_again(data: st.DataObject) -> None:
    """Planning alone: recursive cuts, given to ranks at random, with replicas; one box lost is noticed."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1))
        start, stop = box[axis]
        middle = data.draw(st.integers(start, stop))
        boxes += [
            (*box[:axis], (start, middle), *box[axis + 1 :]),
            (*box[:axis], (middle, stop), *box[axis + 1 :]),
        ]
    boxes = list(dict.fromkeys(box for box in boxes if math.prod(b - a for a, b in box)))
    copies = boxes + data.draw(st.lists(st.sampled_from(boxes), max_size=3))
    merged, notes = merge_boxes(shape, copies)
    assert notes == []
    assert [(one.name, one.shape, len(one.pieces)) for one in merged] == [("w", shape, len(boxes))]
    if len(boxes) > 1:
        merged, notes = merge_boxes(shape, boxes[1:])
        assert "is missing" in notes[0]
        assert all(one.name.startswith("rank") for one in merged)
    grown = (boxes[0][0][0], min(boxes[0][0][1] + 1, shape[0]))
    if len(boxes) > 1 and grown != boxes[0][0]:
        merged, notes = merge_boxes(shape, [(grown, *boxes[0][1:]), *boxes[1:]])
        assert "overlap" in notes[0]


def merge_boxes(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, int], ...]]) -> tuple[list[Merged], list[str]]:
    from baftd.checkpoint.image import parse_image_header, plan_image
    from tests.support.images import token

    images = {}
    for rank, box in enumerate(boxes):
        extent = tuple(stop - start for start, stop in box)
        entry = TensorEntry("w", "F32", extent, 4 * math.prod(extent), global_shape=shape, ranges=box)
        plan = plan_image([entry], 4096, job="j", rank=rank, world=len(boxes))
        images[rank] = parse_image_header(plan.render_header(token(1), step=1, updates=1, small_length=0))
    merger = Merger(images, lambda rank, placement: repr(boxes[rank]).encode())
    return merger.merge(), merger.notes
