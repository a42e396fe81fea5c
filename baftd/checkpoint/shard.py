"""What one rank saves of one step: tensor entries, and where their bytes lie in the image of the shard.

An image is a complete safetensors file (`image.py` makes and reads its header). In image order:

    8-byte length + JSON header, padded with spaces to a multiple of 4 KiB
    the tensors without holes, by falling alignment, then by name; `.pad.N` (U8, zeros) before a large tensor that
        would not begin on a cache line
    `baft.small_state` (U8), the last tensor; nothing after it

so every offset but the end is fixed when the layout is planned, once for each declaration. Digests are xxh3-128 of
chunks of at most 4 MiB. Every entry starts a new chunk: equal ranges saved by two replicas have equal digests,
wherever they lie. Offsets and lengths are bytes; offsets count from the start of the image.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import xxhash

from baftd.errors import UsageError
from baftd.limits import LARGEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "CHUNK",
    "DIGEST_BYTES",
    "LARGE",
    "LINE",
    "NATIVE_DTYPES",
    "PAD_PREFIX",
    "PAGE",
    "SMALL_STATE",
    "BytesLike",
    "Chunk",
    "ImageMap",
    "Kind",
    "Pad",
    "Placement",
    "TensorEntry",
    "check_entries",
    "digest",
    "digest_chunks",
    "map_image",
    "root_digest",
    "small_room_for",
    "tree_digest_of",
]

BytesLike: TypeAlias = "bytes | bytearray | memoryview"
Kind: TypeAlias = Literal["stable", "volatile"]

CHUNK = 4 << 20
"""Bytes covered by one digest, at most."""
PAGE = 4096
DIGEST_BYTES = 16
LINE = 64
"""A large tensor begins at a multiple of this, so that it is copied with full cache lines."""
LARGE = 1 << 20
"""Bytes from which a tensor is worth a pad."""
SMALL_STATE = "baft.small_state"
PAD_PREFIX = ".pad."
MAX_NAME = 1024
MAX_BYTES = LARGEST

NATIVE_DTYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes an element of the types that every safetensors reader since 0.4 opens. Any other type is stored as flat U8,
its own name kept in the metadata: one unknown tag would make older readers refuse the whole file."""

_DTYPE = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,63}")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, or one range of it, as the rank that saves it sees it.

    dtype: a safetensors tag ("F32", "BF16") or the name of a foreign type ("C64", "QINT8").
    shape: of the saved part, in elements. nbytes: of the saved part; must fit shape for safetensors' types.
    kind: "stable" (constant between updates, copied in windows) or "volatile" (copied at the boundary).
    global_shape, ranges: both or neither. Which part of the whole tensor this is: one (start, stop) a dimension, or a
        single (start, stop) over the flattened tensor. Several entries may share a name if their ranges differ.
    aliases: other names of the same bytes (tied tensors).
    strides: in elements, of a dense tensor that is not row-major; the bytes are saved in memory order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: Kind = "stable"
    global_shape: tuple[int, ...] | None = None
    ranges: tuple[tuple[int, int], ...] | None = None
    aliases: tuple[str, ...] = ()
    strides: tuple[int, ...] | None = None

    @property
    def native(self) -> bool:
        """Stored under its own dtype and shape, so that any safetensors reader sees the tensor as it is."""
        return self.dtype in NATIVE_DTYPES and self.strides is None

    @property
    def stored_dtype(self) -> str:
        """The tag in the safetensors header."""
        return self.dtype if self.dtype in NATIVE_DTYPES else "U8"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the safetensors header: flat where a reader would otherwise see elements in a wrong order."""
        if self.native:
            return self.shape
        return (prod(self.shape),) if self.dtype in NATIVE_DTYPES else (self.nbytes,)

    @property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides the size of an element."""
        size = NATIVE_DTYPES.get(self.dtype, 0)
        if not size:
            elements = prod(self.shape)
            size = self.nbytes // elements if elements and self.nbytes % elements == 0 else 1
        return min(size & -size, 16) if size else 1


class Chunk(NamedTuple):
    """Bytes of the image that one digest covers."""

    offset: int
    length: int


class Pad(NamedTuple):
    """A tensor of zeros without meaning, and the number of its first chunk."""

    name: str
    offset: int
    nbytes: int
    first_chunk: int


@dataclass(frozen=True)
class Placement:
    """Where an entry lies. `index` is its place in the sequence that was declared (in a parsed image: in the file)."""

    index: int
    entry: TensorEntry
    stored_name: str
    offset: int
    nbytes: int
    first_chunk: int
    chunk_count: int


@dataclass(frozen=True)
class ImageMap:
    """Where everything lies in an image. `placements` are in image order; `small_offset` is where the small state
    begins; the JSON header is chunks 0 to `header_chunks` - 1.

    `plan`: identifies the division of replicated ranges under which the shard was saved; empty: not divided. `held`:
    what the rank held then, as it declared it: more than what was saved of it here.
    """

    placements: tuple[Placement, ...]
    pads: tuple[Pad, ...]
    data_offset: int
    small_offset: int
    plan: bytes = field(default=b"", kw_only=True)
    held: tuple[TensorEntry, ...] = field(default=(), kw_only=True, repr=False)

    @property
    def header_chunks(self) -> int:
        """Number of chunks that cover the JSON header."""
        return _chunk_count(self.data_offset)

    @property
    def small_first_chunk(self) -> int:
        """Number of the small state's first chunk: the number of all chunks before it."""
        return len(self._fixed_chunks)

    def image_length(self, small_length: int) -> int:
        """Length of the image when the small state has `small_length` bytes."""
        return self.small_offset + small_length

    def chunks(self, small_length: int) -> tuple[Chunk, ...]:
        """All chunks in image order, the header's first."""
        return (*self._fixed_chunks, *_split(self.small_offset, small_length))

    def digest_table(self, small_length: int) -> bytearray:
        """Room for one digest a chunk, those of the pads filled in. An entry's go to 16 * first_chunk."""
        table = bytearray(DIGEST_BYTES * (len(self._fixed_chunks) + _chunk_count(small_length)))
        for pad in self.pads:
            at = DIGEST_BYTES * pad.first_chunk
            table[at : at + DIGEST_BYTES] = digest(bytes(pad.nbytes))
        return table

    @cached_property
    def by_index(self) -> tuple[Placement, ...]:
        """The placements in the order in which the entries were declared."""
        return tuple(sorted(self.placements, key=lambda placement: placement.index))

    @cached_property
    def tree_digest(self) -> bytes:
        """Identity of the layout, independent of step, rank and order of declaration; of a divided one it covers the
        plan, and what was held."""
        tree = tree_digest_of(self.placements)
        return digest(tree + self.plan + json.dumps(_canonical(self.held)).encode()) if self.plan else tree

    @property
    def declared(self) -> tuple[TensorEntry, ...]:
        """What the rank held."""
        return self.held if self.plan else tuple(placement.entry for placement in self.by_index)

    @cached_property
    def _fixed_chunks(self) -> tuple[Chunk, ...]:
        spans = [(0, self.data_offset)]
        spans += [(placement.offset, placement.nbytes) for placement in self.placements]
        spans += [(pad.offset, pad.nbytes) for pad in self.pads]
        # A stable sort: an empty tensor has no chunk, so it does not matter on which side of its neighbour it falls.
        spans.sort(key=lambda span: span[0])
        return tuple(chunk for offset, length in spans for chunk in _split(offset, length))


def map_image(entries: Sequence[TensorEntry], stored_names: Sequence[str], data_offset: int) -> ImageMap:
    """Place checked entries behind a header of `data_offset` bytes."""
    order = sorted(range(len(entries)), key=lambda i: (-entries[i].alignment, stored_names[i]))
    offset = data_offset
    chunk = _chunk_count(data_offset)
    placements: list[Placement] = []
    pads: list[Pad] = []
    for index in order:
        entry = entries[index]
        if entry.nbytes >= LARGE and offset % LINE:
            pad = Pad(f"{PAD_PREFIX}{len(pads)}", offset, -offset % LINE, chunk)
            pads.append(pad)
            offset += pad.nbytes
            chunk += 1
        count = _chunk_count(entry.nbytes)
        placements.append(Placement(index, entry, stored_names[index], offset, entry.nbytes, chunk, count))
        offset += entry.nbytes
        chunk += count
    return ImageMap(tuple(placements), tuple(pads), data_offset, offset)


def small_room_for(small_bytes: int) -> int:
    """Room kept for the small state when its first size is `small_bytes`."""
    return max(1 << 20, 2 * small_bytes)


def digest(data: BytesLike) -> bytes:
    """xxh3-128 of `data`, 16 bytes, big-endian."""
    return xxhash.xxh3_128_digest(data)


def digest_chunks(image: BytesLike, chunks: Iterable[Chunk]) -> bytes:
    """Digests of chunks of an image in memory, one after the other."""
    view = memoryview(image).cast("B")
    return b"".join(digest(view[offset : offset + length]) for offset, length in chunks)


def root_digest(chunk_digests: BytesLike, image_length: int) -> bytes:
    """Digest of an image: over the digests of its chunks and its length."""
    state = xxhash.xxh3_128(chunk_digests)
    state.update(image_length.to_bytes(8, "little"))
    return state.digest()


def tree_digest_of(placements: Iterable[Placement]) -> bytes:
    """xxh3-128 over the entries in canonical form, sorted by stored name."""
    ordered = sorted(placements, key=lambda placement: placement.stored_name)
    canonical = [
        [p.stored_name, *fields] for p, fields in zip(ordered, _canonical(p.entry for p in ordered), strict=True)
    ]
    return digest(json.dumps(canonical, separators=(",", ":")).encode())


def _canonical(entries: Iterable[TensorEntry]) -> list[list[object]]:
    return [
        [e.name, e.dtype, e.shape, e.nbytes, e.kind, e.global_shape, e.ranges, e.aliases, e.strides] for e in entries
    ]


def check_entries(entries: Sequence[TensorEntry]) -> list[str]:
    """Check entries one by one and together; return the name under which each is stored.

    Raises UsageError naming the entry and what is wrong with it.
    """
    for entry in entries:
        problem = _problem(entry)
        if problem:
            raise UsageError(f"tensor {entry.name!r} cannot be declared: {problem}.")
    shared = Counter(entry.name for entry in entries)
    stored = [_stored_name(entry) if shared[entry.name] > 1 else entry.name for entry in entries]
    owners: dict[str, str] = {}
    for entry, name in zip(entries, stored, strict=True):
        if shared[entry.name] > 1 and entry.ranges is None:
            raise UsageError(f"tensor {entry.name!r} is declared {shared[entry.name]} times, once without ranges.")
        for taken in (name, *entry.aliases):
            if taken in owners or (taken != name and taken in shared):
                raise UsageError(f"the name {taken!r} of tensor {entry.name!r} is declared twice.")
            owners[taken] = entry.name
    return stored


def _problem(entry: TensorEntry) -> str:
    """What is wrong with an entry by itself; empty if nothing is."""
    for name in (entry.name, *entry.aliases):
        if not 0 < len(name) <= MAX_NAME:
            return f"a name has {len(name)} characters, not 1 to {MAX_NAME}"
        if name.startswith(("baft.", PAD_PREFIX, "__metadata__")):
            return f"names beginning with 'baft.', '{PAD_PREFIX}' or '__metadata__' are ours, and {name!r} does"
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            return "its name is not Unicode text"
    if not _DTYPE.fullmatch(entry.dtype):
        return f"dtype {entry.dtype!r} is not a name"
    if entry.kind not in ("stable", "volatile"):
        return f"kind {entry.kind!r} is neither 'stable' nor 'volatile'"
    if min(entry.shape, default=0) < 0 or not 0 <= entry.nbytes <= MAX_BYTES or prod(entry.shape) > MAX_BYTES:
        return f"shape {entry.shape} of {entry.nbytes} bytes is out of range"
    size = NATIVE_DTYPES.get(entry.dtype)
    if size is not None and entry.nbytes != size * prod(entry.shape):
        return f"{entry.dtype} of shape {entry.shape} has {size * prod(entry.shape)} bytes, not {entry.nbytes}"
    return _range_problem(entry) or _stride_problem(entry)


def _range_problem(entry: TensorEntry) -> str:
    if entry.ranges is None and entry.global_shape is None:
        return ""
    if entry.ranges is None or entry.global_shape is None:
        return "ranges and global_shape go together, and only one is given"
    whole = entry.global_shape
    if min(whole, default=0) < 0 or prod(whole) > MAX_BYTES:
        return f"global_shape {whole} is out of range"
    if len(entry.ranges) != len(whole):
        if len(entry.ranges) != 1:
            return f"{len(entry.ranges)} ranges do not fit global_shape {whole}"
        whole = (prod(whole),)  # one range over the flattened tensor
    for (start, stop), size in zip(entry.ranges, whole, strict=True):
        if not 0 <= start <= stop <= size:
            return f"range {start}:{stop} does not lie in 0:{size}"
    part = tuple(stop - start for start, stop in entry.ranges)
    if part != entry.shape:
        return f"ranges {entry.ranges} cut a part of shape {part}, not {entry.shape}"
    return ""


def _stride_problem(entry: TensorEntry) -> str:
    if entry.strides is None:
        return ""
    if len(entry.strides) != len(entry.shape):
        return f"{len(entry.strides)} strides do not fit shape {entry.shape}"
    if prod(entry.shape) == 0:
        return ""
    expected = 1
    for stride, size in sorted(zip(entry.strides, entry.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return f"strides {entry.strides} of shape {entry.shape} leave holes or overlap"
        expected *= size
    return ""


def _stored_name(entry: TensorEntry) -> str:
    ranges = ",".join(f"{start}:{stop}" for start, stop in entry.ranges or ())
    return f"{entry.name}@{ranges}"


def _chunk_count(length: int) -> int:
    return -(-length // CHUNK)


def _split(offset: int, length: int) -> list[Chunk]:
    end = offset + length
    return [Chunk(at, min(CHUNK, end - at)) for at in range(offset, end, CHUNK)]
