"""CRC-framed MessagePack records: the framing of journals and manifests. Pure: bytes in, values out.

A record is 12 bytes of header, then the payload (all numbers little-endian):

    0  2  magic b"BR"
    2  1  version, 1
    3  1  zero
    4  4  length of the payload in bytes
    8  4  CRC-32 of bytes 0-7 and the payload
    12    payload: one MessagePack value without extension types

A journal is records one after the other, possibly with a torn tail; a manifest is a fixed number of records
and nothing else.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import msgpack

from baftd.errors import FormatError

__all__ = ["HEADER_BYTES", "MAX_RECORD", "Replayed", "encode_record", "read_manifest", "replay", "salvage"]

HEADER_BYTES = 12
MAX_RECORD = 64 << 20
"""Bytes of payload in one record; a longer one is damage, not data."""

_MAGIC = b"BR"
_VERSION = 1
_HEADER = struct.Struct("<2sBBII")
_START = _MAGIC + bytes((_VERSION, 0))


@dataclass(frozen=True)
class Replayed:
    """What a run of records held. `good_bytes` is the length of the intact part from the beginning."""

    records: tuple[Any, ...]
    good_bytes: int
    problem: str | None
    """Why reading stopped before the end of the data; None when everything was read."""
    torn: bool = False
    """The problem is one that an interrupted append leaves behind: the data ends inside the last record, or only
    zeros follow (a file whose length was recorded before its bytes). False for damage before the end."""


def encode_record(value: Any) -> bytes:
    """One framed record. `value`: None, bool, int, float, str, bytes, list, tuple or dict of these.

    Raises `FormatError` when the value cannot be written in MessagePack or is longer than `MAX_RECORD`.
    """
    try:
        payload: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"a record cannot be written: {error}") from error
    if len(payload) > MAX_RECORD:
        raise FormatError(f"a record of {len(payload)} bytes is longer than the limit of {MAX_RECORD}")
    start = _HEADER.pack(_MAGIC, _VERSION, 0, len(payload), 0)[:8]
    return start + struct.pack("<I", zlib.crc32(payload, zlib.crc32(start))) + payload


def replay(data: bytes | memoryview) -> Replayed:
    """Read records from the beginning until the end or the first one that is not intact. Never raises for bad data."""
    view = memoryview(data)
    records: list[Any] = []
    at = 0
    while at < len(view):
        found = _one(view, at)
        if isinstance(found, str):
            return Replayed(tuple(records), at, f"{found} at byte {at}", torn=_is_torn(view, at))
        value, at = found
        records.append(value)
    return Replayed(tuple(records), at, None)


def salvage(data: bytes | memoryview, damaged_at: int) -> tuple[Any, ...]:
    """Intact records behind damage that begins at byte `damaged_at`, found by their magic and checksum."""
    view = memoryview(data)
    raw = bytes(view)
    records: list[Any] = []
    at = raw.find(_START, damaged_at + 1)
    while at >= 0:
        found = _one(view, at)
        if isinstance(found, str):
            at = raw.find(_START, at + 1)
            continue
        value, end = found
        records.append(value)
        at = raw.find(_START, end)
    return tuple(records)


def read_manifest(data: bytes | memoryview, where: str, records: int | None = 1) -> list[Any]:
    """Exactly `records` intact records (None: one or more) and nothing else, or `FormatError` naming `where`."""
    found = replay(data)
    if found.problem is not None:
        raise FormatError(f"{where} is damaged: {found.problem} of {len(data)}.")
    if not found.records or records not in (None, len(found.records)):
        raise FormatError(f"{where} is damaged: it holds {len(found.records)} records instead of {records or 'some'}.")
    return list(found.records)


def _one(view: memoryview, at: int) -> tuple[Any, int] | str:
    """The value at `at` and where the next record begins, or what is wrong."""
    if len(view) - at < HEADER_BYTES:
        return "the header is cut off"
    magic, version, zero, length, crc = _HEADER.unpack_from(view, at)
    if magic != _MAGIC or zero != 0:
        return "no record begins"
    if version != _VERSION:
        return f"a record has framing version {version}, this is {_VERSION}"
    if length > MAX_RECORD:
        return f"a record claims {length} bytes"
    end = at + HEADER_BYTES + length
    if end > len(view):
        return "the payload is cut off"
    payload = view[at + HEADER_BYTES : end]
    if zlib.crc32(payload, zlib.crc32(view[at : at + 8])) != crc:
        return "the checksum of a record is wrong"
    try:
        value = msgpack.unpackb(payload, raw=False, strict_map_key=False, ext_hook=_refuse_extension)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        return f"the payload of a record is not MessagePack ({type(error).__name__})"
    return value, end


def _is_torn(view: memoryview, at: int) -> bool:
    rest = bytes(view[at:])
    written = rest.rstrip(b"\0")  # a file may have grown before its bytes arrived
    if len(rest) < HEADER_BYTES or len(written) < len(_START):
        return _START.startswith(written[: len(_START)])
    magic, version, _, length, _ = _HEADER.unpack_from(rest)
    begun = magic == _MAGIC and version == _VERSION and length <= MAX_RECORD
    return bool(begun and HEADER_BYTES + length >= len(written))


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} ({len(data)} bytes) is not allowed here")
