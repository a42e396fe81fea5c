"""A checkpoint as ordinary safetensors files with whole tensors: `model-00001-of-0000N.safetensors` and an index.

The images are verified first, then their tensors are streamed into a temporary directory beside the wanted one, 16 MiB
at a time; everything is synced before the directory gets its name. Small state (random generators, schedulers, data
position) belongs to ranks and is not part of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from baftd.checkpoint.identity import CheckpointId
from baftd.checkpoint.image import ParsedImage, header_length, parse_image_header
from baftd.checkpoint.shard import CHUNK, DIGEST_BYTES, Placement, root_digest
from baftd.errors import BaftError, FormatError, UsageError, VerificationFailed
from baftd.storage.files import FileOps, OsFiles
from baftd.storage.interface import Tier
from baftd.storage.merge import Merged, Merger, Piece
from baftd.storage.names import Writer, is_temporary
from baftd.storage.problems import explained

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["FILE_LIMIT", "ExportResult", "ImageSource", "export_images", "export_safetensors"]

FILE_LIMIT = 5_000_000_000
"""Bytes of tensors in one file, where no single tensor is larger."""
INDEX = "model.safetensors.index.json"
_BLOCK = 16 << 20


@dataclass(frozen=True)
class ImageSource:
    """Where the image of a rank lies: a shard file (offset 0) or a slot (offset 4096)."""

    rank: int
    path: str
    offset: int
    length: int
    root_digest: bytes
    changing: bool = True
    """Somebody may write to it meanwhile (a slot): it is verified again after it was copied."""


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    files: tuple[Path, ...]
    """The safetensors files, then the index."""
    tensors: int
    nbytes: int
    """Of the tensors."""
    notes: tuple[str, ...]
    """What a person should know, one sentence each."""


Progress = Callable[[int, int], None]


def export_safetensors(
    tier: Tier,
    job: str,
    checkpoint: CheckpointId,
    out_dir: str | Path,
    *,
    progress: Progress | None = None,
    file_limit: int = FILE_LIMIT,
) -> ExportResult:
    """Write a durable checkpoint's tensors, each once and whole, into `out_dir` (new, or empty).

    Raises as `export_images` does, and `VerificationFailed` when the checkpoint is not complete.
    """
    found = tier.describe(job, checkpoint)
    if found is None:
        raise UsageError(f"job {job} has no durable checkpoint {checkpoint}", hint=f"See `baftd list --job {job}`.")
    if found.state != "complete":
        raise VerificationFailed(f"{found.path} is {found.state}: {found.reason}")
    images = [
        ImageSource(part.rank, part.path, 0, part.nbytes, part.root_digest, changing=False) for part in found.parts
    ]
    return export_images(images, out_dir, progress=progress, file_limit=file_limit)


def export_images(
    images: Sequence[ImageSource],
    out_dir: str | Path,
    *,
    progress: Progress | None = None,
    file_limit: int = FILE_LIMIT,
    file_ops: FileOps | None = None,
) -> ExportResult:
    """Write the tensors of one checkpoint's images, each once and whole, into `out_dir` (new, or empty; a link to an
    empty one is followed, and stays).

    `progress(done, total)`: bytes read to verify and written. Raises `VerificationFailed` (rank and chunk range
    named; also when a slot changed meanwhile), `UsageError` (`out_dir` is in use; images that do not belong
    together), `NoRoom` and `Degraded`. After an error `out_dir` is as it was.
    """
    ops = file_ops if file_ops is not None else OsFiles()
    named = os.path.abspath(out_dir)
    with explained(f"exporting to {named}", named, export=True):
        target = _resolve(named)
        _check_target(ops, target)
        with _opened(images) as sources:
            _check_together(sources)
            total = sum(source.where.length for source in sources)
            count = _Count(progress, total)
            for source in sources:
                source.verify(count)
            merger = Merger(
                {source.where.rank: source.image for source in sources},
                lambda rank, placement: sources[rank].digests_of(placement),
            )
            tensors = merger.merge()
            count.total += sum(tensor.nbytes for tensor in tensors)
            files = _split(tensors, file_limit)
            with _temporary_directory(ops, target) as temporary:
                for name, part in files.items():
                    _write_file(ops, f"{temporary}/{name}", part, merger.aliases, sources, count)
                _write_index(ops, f"{temporary}/{INDEX}", files)
                for source in sources:
                    if source.where.changing:
                        source.verify(count)
                ops.fsync_directory(temporary)
                ops.rename(temporary, target)
                ops.fsync_directory(os.path.dirname(target))
    notes = [*merger.notes, "Small state (random generators, schedulers, data position) is not part of it."]
    foreign = sorted(tensor.name for tensor in tensors if not tensor.native)
    if foreign:
        notes.append(
            f"{len(foreign)} tensors of types that safetensors does not have are stored as bytes "
            f"(`baft.foreign` in the metadata): {', '.join(foreign[:5])}."
        )
    paths = [Path(named, name) for name in (*files, INDEX)]
    return ExportResult(tuple(paths), len(tensors), sum(tensor.nbytes for tensor in tensors), tuple(notes))


# ---------------------------------------------------------------------------------------------- reading


class _Source:
    """An open image."""

    def __init__(self, where: ImageSource, fd: int) -> None:
        self.where = where
        self._fd = fd
        first = self.read(0, 8)
        self.image: ParsedImage = parse_image_header(self.read(0, header_length(bytes(first))))
        if self.image.length != where.length:
            raise FormatError(f"{self}: the image has {self.image.length} bytes, not {where.length}.")
        self._chunks = self.image.chunks(self.image.small_length)
        self._digests = b""

    def __str__(self) -> str:
        return f"rank {self.where.rank}: {self.where.path}"

    def read(self, offset: int, length: int) -> bytearray:
        """`length` bytes of the image."""
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return buffer

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer`; raises `VerificationFailed` when the file ends before."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self._fd, [buffer[done:]], self.where.offset + offset + done)
            if got == 0:
                raise VerificationFailed(f"{self} ends after {offset + done} bytes of {self.where.length}.")
            done += got

    def verify(self, count: _Count) -> None:
        """Digest all chunks and compare their root."""
        buffer = memoryview(bytearray(min(CHUNK, self.where.length)))
        digests = bytearray()
        for offset, length in self._chunks:
            self.read_into(buffer[:length], offset)
            digests += xxhash.xxh3_128_digest(buffer[:length])
            count.add(length)
        if root_digest(bytes(digests), self.where.length) != self.where.root_digest:
            raise VerificationFailed(
                f"{self} is not what its digest says.",
                hint="Export another step; `baftd verify` names the damaged part of a durable one.",
            )
        self._digests = bytes(digests)

    def digests_of(self, placement: Placement) -> bytes:
        start = placement.first_chunk * DIGEST_BYTES
        return self._digests[start : start + placement.chunk_count * DIGEST_BYTES]


@dataclass
class _Count:
    """Adds up what was done."""

    progress: Progress | None
    total: int
    done: int = 0

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self.total = max(self.total, self.done)
        if self.progress is not None:
            self.progress(self.done, self.total)


@contextmanager
def _opened(images: Sequence[ImageSource]) -> Iterator[list[_Source]]:
    fds: list[int] = []
    try:
        sources = []
        for where in sorted(images, key=lambda image: image.rank):
            fds.append(os.open(where.path, os.O_RDONLY | os.O_CLOEXEC))
            sources.append(_Source(where, fds[-1]))
        yield sources
    finally:
        for fd in fds:
            os.close(fd)


def _check_together(sources: Sequence[_Source]) -> None:
    if not sources:
        raise UsageError("there is no image to export")
    first = sources[0].image
    identity = (first.job, first.token, first.step, first.world)
    for number, source in enumerate(sources):
        image = source.image
        if (image.job, image.token, image.step, image.world) != identity:
            raise UsageError(f"{source} is of another checkpoint than {sources[0]}")
        if (image.rank, source.where.rank) != (number, number):
            raise UsageError(f"{source} is the image of rank {image.rank}; rank {number} of {first.world} was expected")
    if len(sources) != first.world:
        raise UsageError(f"there are images of {len(sources)} of {first.world} ranks")


# ---------------------------------------------------------------------------------------------- writing


def _split(tensors: Sequence[Merged], limit: int) -> dict[str, list[Merged]]:
    """Tensors by file name, in the order of their names; each file in the order in which it is written."""
    groups: list[list[Merged]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    for group in groups:
        # Without holes and by falling size of an element everything is aligned.
        group.sort(key=lambda tensor: (-(tensor.itemsize if tensor.native else 1), tensor.name))
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def _write_file(
    ops: FileOps,
    path: str,
    tensors: Sequence[Merged],
    aliases: dict[str, str],
    sources: Sequence[_Source],
    count: _Count,
) -> None:
    header = _header(tensors, aliases)
    fd = ops.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        ops.preallocate(fd, len(header) + sum(tensor.nbytes for tensor in tensors))
        output = _Output(ops, fd)
        output.write(memoryview(header))
        for tensor in tensors:
            for block in _blocks(tensor, sources):
                output.write(block)
                count.add(len(block))
        output.finish()
        ops.fsync(fd)
    finally:
        ops.close(fd)


class _Output:
    """A file written from its beginning to its end, its write-back started on the way."""

    def __init__(self, ops: FileOps, fd: int) -> None:
        self._ops = ops
        self._fd = fd
        self._at = 0
        self._started = 0

    def write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._ops.pwrite(self._fd, data[done:], self._at + done)
        self._at += done
        if self._at - self._started >= _BLOCK:
            self.finish()

    def finish(self) -> None:
        self._ops.start_writeback(self._fd, self._started, self._at - self._started)
        self._started = self._at


def _header(tensors: Sequence[Merged], aliases: dict[str, str]) -> bytes:
    names = {tensor.name for tensor in tensors}
    # As `safetensors.torch.save_model` does it: other names of a tied tensor are metadata.
    metadata = {alias: name for alias, name in sorted(aliases.items()) if name in names}
    metadata["format"] = "pt"
    foreign = {t.name: {"dtype": t.dtype, "shape": t.shape} for t in tensors if not t.native}
    if foreign:
        metadata["baft.foreign"] = json.dumps(foreign)
    described: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for tensor in tensors:
        described[tensor.name] = {
            "dtype": tensor.dtype if tensor.native else "U8",
            "shape": tensor.shape if tensor.native else (tensor.nbytes,),
            "data_offsets": (at, at + tensor.nbytes),
        }
        at += tensor.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def _write_index(ops: FileOps, path: str, files: dict[str, list[Merged]]) -> None:
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for group in files.values() for tensor in group)},
        "weight_map": {tensor.name: name for name, group in files.items() for tensor in group},
    }
    fd = ops.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        _Output(ops, fd).write(memoryview(json.dumps(index, indent=2, sort_keys=True).encode()))
        ops.fsync(fd)
    finally:
        ops.close(fd)


def _blocks(tensor: Merged, sources: Sequence[_Source]) -> Iterator[memoryview]:
    """The bytes of a whole tensor, row-major, in blocks of about 16 MiB."""
    if len(tensor.pieces) == 1 and tensor.pieces[0].entry.strides is None:
        piece = tensor.pieces[0]
        for start in range(0, tensor.nbytes, _BLOCK):
            length = min(_BLOCK, tensor.nbytes - start)
            yield memoryview(sources[piece.rank].read(piece.offset + start, length))
        return
    # From here on elements move: numpy, imported here because the daemon never comes this way.
    import numpy as np

    element = np.dtype(f"u{tensor.itemsize}") if tensor.itemsize in (1, 2, 4, 8) else np.dtype(f"V{tensor.itemsize}")
    strided = {
        piece.box: _row_major(piece, sources[piece.rank], element)
        for piece in tensor.pieces
        if piece.entry.strides is not None
    }
    for place in _slabs(tensor.grid, tensor.itemsize):
        slab = np.empty([stop - start for start, stop in place], dtype=element)
        for piece in tensor.pieces:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(place, piece.box, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, place, strict=True))
            part = [(a - c, b - c) for (a, b), (c, _) in zip(common, piece.box, strict=True)]
            if piece.box in strided:
                slab[inside] = strided[piece.box][tuple(slice(a, b) for a, b in part)]
            else:
                slab[inside] = _contiguous(piece, part, sources[piece.rank], element)
        yield slab.reshape(-1).view(np.uint8).data


def _slabs(grid: tuple[int, ...], itemsize: int) -> Iterator[list[tuple[int, int]]]:
    """Boxes of at most about 16 MiB that follow one another in row-major order and cover `grid`."""
    axis = 0
    while axis < len(grid) - 1 and prod(grid[axis + 1 :]) * itemsize > _BLOCK:
        axis += 1
    if not grid:
        yield []
        return
    inner = prod(grid[axis + 1 :]) * itemsize
    rows = max(1, _BLOCK // max(1, inner))
    for outer in product(*(range(size) for size in grid[:axis])):
        for start in range(0, grid[axis], rows):
            stop = min(start + rows, grid[axis])
            yield [*((i, i + 1) for i in outer), (start, stop), *((0, size) for size in grid[axis + 1 :])]


def _contiguous(
    piece: Piece, part: Sequence[tuple[int, int]], source: _Source, element: np.dtype[Any]
) -> npt.NDArray[Any]:
    """[part] of a row-major piece. A slab cuts it so that these bytes lie in one run."""
    import numpy as np

    shape = [stop - start for start, stop in piece.box]
    first = 0
    for (start, _), size in zip(part, shape, strict=True):
        first = first * size + start
    wanted = [stop - start for start, stop in part]
    data = source.read(piece.offset + first * element.itemsize, prod(wanted) * element.itemsize)
    return np.frombuffer(data, dtype=element).reshape(wanted)


def _row_major(piece: Piece, source: _Source, element: np.dtype[Any]) -> npt.NDArray[Any]:
    """A piece whose elements lie in another order, as an array of its shape. Held in memory as a whole."""
    import numpy as np

    entry = piece.entry
    flat = np.frombuffer(source.read(piece.offset, entry.nbytes), dtype=element)
    strides = [stride * element.itemsize for stride in entry.strides or ()]
    found = np.lib.stride_tricks.as_strided(flat, shape=entry.shape, strides=strides, writeable=False)
    return found if len(piece.box) == len(entry.shape) else found.reshape(-1)


# ---------------------------------------------------------------------------------------------- directories


def _resolve(named: str) -> str:
    """What is to be replaced by the export. Of a link, the directory that it leads to: the new one gets its name by
    renaming, which would replace the link."""
    above = os.path.dirname(named)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise UsageError(
            f"{named} cannot be made, since {above} is {_kind(above)}.", hint="Name another directory, or remove that."
        )
    if not os.path.islink(named):
        return named
    if not os.path.isdir(named):
        raise UsageError(f"{named} is {_kind(named)}.", hint="Make that directory, or name another one.")
    return os.path.realpath(named)


def _kind(path: str) -> str:
    """What lies there that is no directory, in words."""
    if not os.path.islink(path):
        return "a file"
    try:
        os.stat(path)
    except FileNotFoundError:
        return f"a link to {os.path.realpath(path)}, which is not there"
    except OSError as error:
        return f"a link that cannot be followed ({error.strerror})"
    return f"a link to {os.path.realpath(path)}, which is no directory"


def _check_target(ops: FileOps, target: str) -> None:
    try:
        names = ops.listdir(target)
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise UsageError(f"{target} is a file.", hint="Name a new directory.") from error
    if names:
        raise UsageError(f"{target} is not empty.", hint="Name a new directory, or empty this one first.")
    if os.path.ismount(target):
        raise UsageError(
            f"{target} is where a file system is mounted, which no new directory can take the place of.",
            hint=f"Name a new directory in it: {target.rstrip('/')}/export.",
        )


@contextmanager
def _temporary_directory(ops: FileOps, target: str) -> Iterator[str]:
    """A new directory beside `target`, removed after an error. What dead exports left there is removed first."""
    parent, name = os.path.split(target)
    os.makedirs(parent, exist_ok=True)
    writer = Writer.of_node(os.uname().nodename)
    for left in ops.listdir(parent):
        if is_temporary(left) and left.endswith(f"~{name}") and writer.is_ours(left) and not writer.is_live(left):
            _remove_directory(ops, f"{parent}/{left}")
    path = f"{parent}/{writer.temporary(name)}"
    ops.mkdir(path)
    try:
        yield path
    except BaseException as error:
        try:
            _remove_directory(ops, path)
        except OSError as second:
            if isinstance(error, BaftError):
                error.message += f" {path} could not be removed ({second.strerror})."
        raise


def _remove_directory(ops: FileOps, path: str) -> None:
    for name in ops.listdir(path):
        ops.unlink(f"{path}/{name}")
    ops.rmdir(path)
