"""The safetensors header of an image: rendered at every step, parsed when a shard is found.

safetensors (0.8) refuses numbers padded with zeros, padding other than spaces, any byte after the last tensor, holes
and overlaps, metadata that is not text, and headers over 100 MB. Fields that change with the step lie in the first
kilobyte and are padded with spaces to a fixed width; the rest of the header is rendered once, with the plan.

Keys of `__metadata__`, all text:

    baft.format       version of this layout of the file: "1"
    baft.job          job name
    baft.rank         rank that saved the shard, and
    baft.world        number of ranks, decimal
    baft.epoch        token: number of the start of the job, decimal, and
    baft.incarnation  its 128 random bits, hexadecimal
    baft.step         boundary at which the state was taken, decimal
    baft.updates      number of optimizer updates by then, decimal
    baft.entries      JSON object: stored name -> what the safetensors entry itself cannot say (keys below)
    baft.plan         where replicated ranges were divided among their holders: the plan of the division, 32
                      hexadecimal digits; all shards of a step have the same, and only together they are its state
    baft.held         with baft.plan: JSON list of what the rank held, one object a tensor (keys below, and `dtype`,
                      `name`, `nbytes` and `shape` always), in the order in which it was declared

Keys of one object in `baft.entries`, each left out where it says nothing new: `name` (of the tensor, where several
ranges of it are stored), `dtype` and `shape` (where stored flat), `kind` ("volatile"), `global_shape`, `ranges`,
`aliases`, `strides`. A tensor without any has no object.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, cast

from baftd.checkpoint.identity import MAX_WORLD, Token, check_incarnation, check_job_name
from baftd.checkpoint.shard import (
    MAX_BYTES,
    NATIVE_DTYPES,
    PAD_PREFIX,
    PAGE,
    SMALL_STATE,
    BytesLike,
    Chunk,
    ImageMap,
    Kind,
    Pad,
    Placement,
    TensorEntry,
    check_entries,
    map_image,
)
from baftd.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FORMAT", "MAX_HEADER", "ImageLayout", "ParsedImage", "header_length", "parse_image_header", "plan_image"]

FORMAT = "1"
MAX_HEADER = 100_000_000
"""Bytes of JSON that safetensors accepts."""

_NUMBER = 22  # room for a quoted 64-bit number
_BYTES = 16  # and for one up to MAX_BYTES
_RANK = 9  # and for a quoted rank or number of ranks
_LIMIT = 10 ** (_NUMBER - 2) - 1


@dataclass(frozen=True)
class ImageLayout(ImageMap):
    """The layout of a rank's shard, planned once for each declaration.

    `small_room`: bytes kept for the small state. `capacity`: length of the image when that is full.
    """

    job: str
    rank: int
    world: int
    small_room: int
    _head: bytes = field(repr=False)
    _tail: bytes = field(repr=False)

    @property
    def capacity(self) -> int:
        """Length of the longest image of this layout."""
        return self.small_offset + self.small_room

    def render_header(self, token: Token, *, step: int, updates: int, small_length: int) -> bytes:
        """The first `data_offset` bytes of the image of `step`.

        Raises UsageError for a number out of range, above all a small state that outgrew its room.
        """
        if not 0 <= small_length <= self.small_room:
            raise UsageError(f"the small state has {small_length} bytes, its room is {self.small_room} bytes.")
        if not (0 <= step <= _LIMIT and 0 <= updates <= _LIMIT and token.epoch <= _LIMIT):
            raise UsageError(f"step {step}, updates {updates} or epoch {token.epoch} is out of range.")
        # fmt: off
        return self._head % (
            small_length,
            self.small_offset - self.data_offset + small_length,
            b'"%d"' % token.epoch,
            token.incarnation.encode(),
            b'"%d"' % step,
            b'"%d"' % updates,
        ) + self._tail
        # fmt: on


@dataclass(frozen=True)
class ParsedImage(ImageMap):
    """What an image says of itself. Offsets, entries and numbers have been checked against each other."""

    job: str
    rank: int
    world: int
    token: Token
    step: int
    updates: int
    small_length: int

    @property
    def length(self) -> int:
        """Length of the image, from its first byte to the last of the small state."""
        return self.small_offset + self.small_length

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors, in image order."""
        return tuple(placement.entry for placement in self.placements)

    def all_chunks(self) -> tuple[Chunk, ...]:
        """All chunks of this very image."""
        return self.chunks(self.small_length)


def plan_image(
    entries: Sequence[TensorEntry],
    small_room: int,
    *,
    job: str,
    rank: int,
    world: int,
    plan: bytes = b"",
    held: Sequence[TensorEntry] = (),
) -> ImageLayout:
    """Plan the image of a rank. Pure: client and daemon come to the same layout from the same arguments.

    `plan`: of the division by which `entries` are a part of what the rank holds, which is `held`; empty: they are all.

    Raises UsageError naming the entry that makes no sense, or a header that safetensors would refuse.
    """
    check_job_name(job)
    if not 0 <= rank < world <= MAX_WORLD:
        raise UsageError(f"rank {rank} of {world} is out of range.")
    if not 0 <= small_room <= MAX_BYTES:
        raise UsageError(f"room of {small_room} bytes for the small state is out of range.")
    stored = check_entries(entries)
    # Offsets in the header count from the end of the header: first place everything behind a header of no length.
    flat = map_image(entries, stored, 0)
    if flat.small_offset + small_room > MAX_BYTES:
        raise UsageError(f"the tensors have {flat.small_offset} bytes together, which is out of range.")
    more = {}
    if plan:
        check_entries(held)
        more = {"baft.plan": plan.hex(), "baft.held": _json([_described(entry) for entry in held])}
    head = _render_head(flat.small_offset, job, rank, world, flat.placements, more)
    tail = _render_tensors(flat)
    filled = len(head % (0, 0, b"", b"", b"", b"")) + 32  # the incarnation fills its place
    length = filled + len(tail) + 1
    data_offset = -(-length // PAGE) * PAGE
    if data_offset - 8 > MAX_HEADER:
        raise UsageError(
            f"{len(entries)} tensors of rank {rank} need a header of {data_offset / 1e6:.0f} MB; "
            f"safetensors opens at most {MAX_HEADER / 1e6:.0f} MB.",
            hint="Save fewer, larger tensors (a fused or flattened optimizer) or shorten their names.",
        )
    head = (data_offset - 8).to_bytes(8, "little").replace(b"%", b"%%") + head[8:]
    tail += b"}" + b" " * (data_offset - length)
    real = map_image(entries, stored, data_offset)
    return ImageLayout(
        placements=real.placements,
        pads=real.pads,
        data_offset=data_offset,
        small_offset=real.small_offset,
        job=job,
        rank=rank,
        world=world,
        small_room=small_room,
        plan=plan,
        held=tuple(held) if plan else (),
        _head=head,
        _tail=tail,
    )


def _render_head(
    begin: int,
    job: str,
    rank: int,
    world: int,
    placements: Sequence[Placement],
    more: dict[str, str],
) -> bytes:
    """Template for `%` of everything up to the end of the metadata: 8 bytes for the length, the small state, the
    metadata. Placeholders: small length, small end, epoch, incarnation, step, updates.

    Of fixed width, too, is what differs between ranks with the same entries: their images, which have one tree digest,
    have headers of one length, so one map serves them all.
    """
    table = {p.stored_name: extra for p in placements if (extra := _extra(p))}
    fixed = {
        "baft.format": FORMAT,
        "baft.job": job,
        "baft.entries": _json(table),
        **more,
    }
    return b"".join(
        (
            bytes(8),
            b'{"%s":{"dtype":"U8","shape":[%%%dd],' % (SMALL_STATE.encode(), _BYTES),
            b'"data_offsets":[%d,%%%dd]},"__metadata__":{' % (begin, _BYTES),
            b'"baft.epoch":%%%ds,"baft.incarnation":"%%s",' % _NUMBER,
            b'"baft.step":%%%ds,"baft.updates":%%%ds,' % (_NUMBER, _NUMBER),
            b'"baft.rank":%*s,' % (_RANK, b'"%d"' % rank),
            b'"baft.world":%*s,' % (_RANK, b'"%d"' % world),
            _json(fixed)[1:].encode().replace(b"%", b"%%"),
        )
    )


def _render_tensors(plan: ImageMap) -> bytes:
    parts: list[str] = []
    for p in plan.placements:
        described = {
            "dtype": p.entry.stored_dtype,
            "shape": p.entry.stored_shape,
            "data_offsets": (p.offset, p.offset + p.nbytes),
        }
        parts.append(f",{_json(p.stored_name)}:{_json(described)}")
    for pad in plan.pads:
        described = {"dtype": "U8", "shape": (pad.nbytes,), "data_offsets": (pad.offset, pad.offset + pad.nbytes)}
        parts.append(f",{_json(pad.name)}:{_json(described)}")
    return "".join(parts).encode()


def _extra(placement: Placement) -> dict[str, object]:
    """What the safetensors entry cannot say."""
    entry = placement.entry
    extra: dict[str, object] = {}
    if placement.stored_name != entry.name:
        extra["name"] = entry.name
    if entry.dtype != entry.stored_dtype:
        extra["dtype"] = entry.dtype
    if entry.shape != entry.stored_shape:
        extra["shape"] = entry.shape
    return {**extra, **_beyond(entry)}


def _beyond(entry: TensorEntry) -> dict[str, object]:
    """What no safetensors entry can say."""
    extra: dict[str, object] = {}
    if entry.kind != "stable":
        extra["kind"] = entry.kind
    if entry.ranges is not None:
        extra["global_shape"] = entry.global_shape
        extra["ranges"] = entry.ranges
    if entry.aliases:
        extra["aliases"] = entry.aliases
    if entry.strides is not None:
        extra["strides"] = entry.strides
    return extra


def _described(entry: TensorEntry) -> dict[str, object]:
    """All of an entry."""
    named = {"name": entry.name, "dtype": entry.dtype, "shape": entry.shape, "nbytes": entry.nbytes}
    return {**named, **_beyond(entry)}


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


# ---------------------------------------------------------------------------------------------- reading


def header_length(first8: bytes) -> int:
    """Length of the whole header, the 8 bytes included: where the tensors begin.

    Raises FormatError if no image of ours begins like this.
    """
    if len(first8) < 8:
        _bad("length", f"the image ends after {len(first8)} bytes")
    length = int.from_bytes(first8[:8], "little")
    if not 2 <= length <= MAX_HEADER:
        _bad("length", f"{length} is not between 2 and {MAX_HEADER}")
    if (length + 8) % PAGE:
        _bad("length", f"tensors would begin at byte {length + 8}, which is not a multiple of {PAGE}")
    return length + 8


def parse_image_header(data: BytesLike) -> ParsedImage:
    """Read the header at the start of `data` (which may go on behind it).

    Raises FormatError naming the field that is wrong. Whatever is accepted is consistent in itself: tensors cover
    the data without hole or overlap, and sizes fit shapes.
    """
    data_offset = header_length(bytes(data[:8]))
    if len(data) < data_offset:
        _bad("length", f"the header has {data_offset} bytes, but only {len(data)} are there")
    root = _parse_json(bytes(memoryview(data)[8:data_offset]), "header")
    metadata = root.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _bad("__metadata__", "missing, or not an object of texts: the file was not written by baftd")
    version = metadata.get("baft.format")
    if version != FORMAT:
        _bad("baft.format", f"{version!r} is not the format {FORMAT} that this version of baftd reads")
    table = _parse_json(_text(metadata, "baft.entries").encode("utf-8", "surrogatepass"), "baft.entries")
    job, rank, world = _text(metadata, "baft.job"), _number(metadata, "baft.rank"), _number(metadata, "baft.world")
    try:
        check_job_name(job)
        token = Token(_number(metadata, "baft.epoch"), check_incarnation(_text(metadata, "baft.incarnation")))
    except UsageError as error:
        raise FormatError(f"image header: {error}") from error
    if not 0 <= rank < world <= MAX_WORLD:
        _bad("baft.rank", f"{rank} of {world} is out of range")
    plan, held = _read_division(metadata)
    placements, pads, small_offset, small_length = _read_tensors(root, table, data_offset)
    if table:
        _bad("baft.entries", f"{next(iter(table))!r} is not in the file")
    return ParsedImage(
        placements=placements,
        pads=pads,
        data_offset=data_offset,
        small_offset=small_offset,
        job=job,
        rank=rank,
        world=world,
        token=token,
        step=_number(metadata, "baft.step"),
        updates=_number(metadata, "baft.updates"),
        small_length=small_length,
        plan=plan,
        held=held,
    )


def _read_division(metadata: dict[str, Any]) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """The plan under which the shard was saved, and what its rank held; empty where nothing was divided."""
    text = metadata.get("baft.plan", "")
    if not re.fullmatch("([0-9a-f]{32})?", text):
        _bad("baft.plan", f"{text[:40]!r} is not 32 hexadecimal digits")
    if not text:
        return b"", ()
    text_held = _text(metadata, "baft.held").encode("utf-8", "surrogatepass")
    listed = _parse_json(b'{"held":' + text_held + b"}", "baft.held")
    if set(listed) != {"held"} or not isinstance(listed["held"], list):
        _bad("baft.held", "is not a list")
    held: list[TensorEntry] = []
    for described in listed["held"]:
        if not isinstance(described, dict) or not {"name", "dtype", "shape", "nbytes"} <= set(described):
            _bad("baft.held", "a tensor has no name, dtype, shape or nbytes")
        name = str(described["name"])
        (nbytes,) = _sizes([described.pop("nbytes")], f"baft.held: {name}: nbytes")
        held.append(_read_entry(name, "", (), nbytes, described))
    try:
        check_entries(held)
    except UsageError as error:
        raise FormatError(f"image header: baft.held: {error}") from error
    return bytes.fromhex(text), tuple(held)


def _read_tensors(
    root: dict[str, Any], table: dict[str, Any], data_offset: int
) -> tuple[tuple[Placement, ...], tuple[Pad, ...], int, int]:
    """Check the tensors of the file; take what the table says of them out of it."""
    spans: list[tuple[int, int, str]] = []
    for name, described in root.items():
        if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
            _bad(name, "is not an object of dtype, shape and data_offsets")
        begin_end = _sizes(described["data_offsets"], f"{name}: data_offsets")
        if len(begin_end) != 2 or begin_end[0] > begin_end[1]:
            _bad(name, f"data_offsets {list(begin_end)} are not a begin and an end")
        spans.append((begin_end[0], begin_end[1], name))
    spans.sort(key=lambda span: (span[0], span[1], span[2] == SMALL_STATE))
    if not spans or spans[-1][2] != SMALL_STATE:
        _bad(SMALL_STATE, "is not the last tensor")

    reached = 0
    entries: list[TensorEntry] = []
    stored: list[str] = []
    pads: dict[str, int] = {}
    for begin, end, name in spans:
        if begin != reached:
            _bad(name, f"begins at {begin}, but the tensor before it ends at {reached}")
        reached = end
        dtype, shape = root[name]["dtype"], _sizes(root[name]["shape"], f"{name}: shape")
        if dtype not in NATIVE_DTYPES:
            _bad(name, f"dtype {dtype!r} is not one that baftd writes")
        if prod(shape) * NATIVE_DTYPES[dtype] != end - begin:
            _bad(name, f"{dtype} of shape {list(shape)} does not have {end - begin} bytes")
        if name == SMALL_STATE or name.startswith(PAD_PREFIX):
            if dtype != "U8" or len(shape) != 1:
                _bad(name, "is not a row of U8")
            pads[name] = begin
            continue
        entry = _read_entry(name, dtype, shape, end - begin, table.pop(name, {}))
        if entry.stored_dtype != dtype or entry.stored_shape != shape:
            _bad(name, f"is stored as {dtype} {list(shape)}, but baft.entries says {entry.dtype} {entry.shape}")
        entries.append(entry)
        stored.append(name)
    try:
        if check_entries(entries) != stored:
            _bad("baft.entries", "stored names do not fit the tensors' names")
    except UsageError as error:
        raise FormatError(f"image header: {error}") from error

    # The same places as planned from the same entries: this proves order, pads and chunks at once.
    plan = map_image(entries, stored, data_offset)
    for placement in plan.placements:
        begin = root[placement.stored_name]["data_offsets"][0] + data_offset
        if begin != placement.offset:
            _bad(placement.stored_name, f"lies at {begin}, not at {placement.offset} where this format puts it")
    expected = {pad.name: pad.offset - data_offset for pad in plan.pads}
    small_begin = pads.pop(SMALL_STATE)
    if pads != expected or small_begin + data_offset != plan.small_offset:
        _bad(PAD_PREFIX, "the pads are not where this format puts them")
    return plan.placements, plan.pads, plan.small_offset, reached - small_begin


def _read_entry(name: str, dtype: str, shape: tuple[int, ...], nbytes: int, extra: object) -> TensorEntry:
    where = f"baft.entries: {name}"
    known = {"name", "dtype", "shape", "kind", "global_shape", "ranges", "aliases", "strides"}
    if not isinstance(extra, dict) or not known.issuperset(extra):
        _bad(where, f"is not an object with keys among {', '.join(sorted(known))}")
    for key in ("name", "dtype", "kind"):
        if not isinstance(extra.get(key, ""), str):
            _bad(where, f"{key} is not a text")
    aliases, ranges = extra.get("aliases", []), extra.get("ranges")
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        _bad(where, "aliases is not a list of texts")
    if ranges is not None and not isinstance(ranges, list):
        _bad(where, "ranges is not a list")
    pairs = None if ranges is None else tuple(_sizes(pair, f"{where}: ranges") for pair in ranges)
    if pairs is not None and any(len(pair) != 2 for pair in pairs):
        _bad(where, "ranges is not a list of begin and end")
    return TensorEntry(
        name=extra.get("name", name),
        dtype=extra.get("dtype", dtype),
        shape=_sizes(extra["shape"], f"{where}: shape") if "shape" in extra else shape,
        nbytes=nbytes,
        kind=cast("Kind", extra.get("kind", "stable")),
        global_shape=_sizes(extra["global_shape"], f"{where}: global_shape") if "global_shape" in extra else None,
        ranges=cast("tuple[tuple[int, int], ...] | None", pairs),
        aliases=tuple(aliases),
        strides=_sizes(extra["strides"], f"{where}: strides") if "strides" in extra else None,
    )


def _parse_json(data: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            _bad(what, f"{twice!r} stands there twice")
        return found

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"image header: {what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        _bad(what, "is not a JSON object")
    return cast("dict[str, Any]", value)


def _text(metadata: dict[str, Any], key: str) -> str:
    if key not in metadata:
        _bad(key, "is missing")
    return cast("str", metadata[key])


def _number(metadata: dict[str, Any], key: str) -> int:
    text = _text(metadata, key)
    if not (text.isascii() and text.isdigit() and len(text) <= _NUMBER):
        _bad(key, f"{text[:40]!r} is not a number")
    return int(text)


def _sizes(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size <= MAX_BYTES for size in value):
        _bad(where, "is not a list of sizes")
    return tuple(value)


def _bad(field_name: str, problem: str) -> NoReturn:
    raise FormatError(f"image header: {field_name}: {problem}.")
