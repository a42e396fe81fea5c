"""A strict reader of protobuf's wire format, for small files of known messages.

It knows nothing of `.proto` files: it splits a message into fields and reads numbers, packed numbers and text out of
them. Whoever reads a message says which field numbers it knows and keeps the others. Everything that does not fit its
place (truncated, too large, a wire type that no longer exists) is a FormatError that names file, message and offset.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn

from baftd.errors import FormatError

__all__ = ["BYTES", "FIXED32", "FIXED64", "VARINT", "Field", "Message", "read_message", "signed"]

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

_WIRE_NAMES = {VARINT: "a varint", FIXED64: "8 bytes", BYTES: "bytes", FIXED32: "4 bytes"}
_FIXED_WIDTH = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT = 10  # bytes: seven bits each, 64 in all
_MAX_FIELDS = 4_000_000
_MAX_NUMBER = (1 << 29) - 1


class Field(NamedTuple):
    """One field as it stands in the file. `value`: an unsigned number (varint), or bytes (all other wire types);
    `offset`: where its value begins, in bytes from the start of the file."""

    number: int
    wire: int
    value: int | bytes
    offset: int


class Message:
    """The fields of one message in file order, and checked ways to read them.

    `what` names the message in errors, `source` the file. Nothing is copied twice: parts are slices of the file.
    """

    __slots__ = ("fields", "offset", "source", "what")

    def __init__(self, fields: tuple[Field, ...], source: str, what: str, offset: int) -> None:
        self.fields = fields
        self.source = source
        self.what = what
        self.offset = offset

    def unknown(self, known: frozenset[int]) -> tuple[Field, ...]:
        """Fields whose number is not in `known`, in file order."""
        return tuple(field for field in self.fields if field.number not in known)

    def number(self, number: int, name: str, default: int | None = None) -> int:
        """An unsigned number; the last one counts, as protobuf has it. Without a default it must be there."""
        found = self._last(number, name, VARINT)
        if found is None:
            if default is None:
                self._missing(name)
            return default
        assert isinstance(found.value, int)
        return found.value

    def text(self, number: int, name: str, limit: int) -> str:
        """Text of 1 to `limit` bytes that must be there."""
        found = self._last(number, name, BYTES)
        if found is None:
            self._missing(name)
        assert isinstance(found.value, bytes)
        if not 0 < len(found.value) <= limit:
            self.refuse(f"{name} has {len(found.value)} bytes, not 1 to {limit}", found.offset)
        try:
            return found.value.decode("utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{name} is not UTF-8 text", found.offset)

    def one(self, number: int, name: str) -> Message:
        """A message that must be there exactly once."""
        found = self.many(number, name)
        if len(found) != 1:
            if not found:
                self._missing(name)
            self.refuse(f"{name} is there {len(found)} times, not once", found[1].offset)
        return found[0]

    def many(self, number: int, name: str) -> tuple[Message, ...]:
        """All messages under one number, in file order."""
        return tuple(self._message(field, name) for field in self.fields if field.number == number)

    def numbers(self, number: int, name: str, limit: int) -> tuple[int, ...]:
        """Unsigned numbers, packed or one by one, `limit` at most."""
        found: list[int] = []
        for field in self.fields:
            if field.number != number:
                continue
            if isinstance(field.value, int):
                found.append(field.value)
            elif field.wire == BYTES:
                at = 0
                while at < len(field.value):
                    value, at = _varint(field.value, at, field.offset, self.source, f"{self.what}.{name}")
                    found.append(value)
            else:
                self._wrong_wire(field, name, VARINT)
            if len(found) > limit:
                self.refuse(f"{name} has more than {limit} numbers", field.offset)
        return tuple(found)

    def refuse(self, why: str, offset: int | None = None) -> NoReturn:
        """Raise the FormatError of this message."""
        at = self.offset if offset is None else offset
        raise FormatError(f"{self.source}: {self.what}, byte {at}: {why}.")

    def _message(self, field: Field, name: str) -> Message:
        if field.wire != BYTES:
            self._wrong_wire(field, name, BYTES)
        assert isinstance(field.value, bytes)
        return read_message(field.value, self.source, f"{self.what}.{name}", offset=field.offset)

    def _last(self, number: int, name: str, wire: int) -> Field | None:
        found = None
        for field in self.fields:
            if field.number == number:
                if field.wire != wire:
                    self._wrong_wire(field, name, wire)
                found = field
        return found

    def _wrong_wire(self, field: Field, name: str, wanted: int) -> NoReturn:
        self.refuse(f"{name} is stored as {_WIRE_NAMES[field.wire]}, not as {_WIRE_NAMES[wanted]}", field.offset)

    def _missing(self, name: str) -> NoReturn:
        self.refuse(f"{name} is missing; the file is cut off or of another kind")


def read_message(data: bytes, source: str, what: str, *, offset: int = 0) -> Message:
    """Split a message into its fields. `offset` is where `data` begins in the file named `source`.

    Raises FormatError for a field that does not end within the message, number 0, or a wire type that is not used.
    """
    fields: list[Field] = []
    at = 0
    end = len(data)
    while at < end:
        start = at
        key, at = _varint(data, at, offset, source, what)
        number, wire = key >> 3, key & 7
        if not 0 < number <= _MAX_NUMBER:
            _refuse(source, what, offset + start, f"field number {number} is not possible")
        value: int | bytes
        if wire == VARINT:
            begin = at
            value, at = _varint(data, at, offset, source, what)
        elif wire in _FIXED_WIDTH or wire == BYTES:
            if wire == BYTES:
                length, at = _varint(data, at, offset, source, what)
            else:
                length = _FIXED_WIDTH[wire]
            if length > end - at:
                why = f"field {number} says it has {length} bytes, and {end - at} are left; the file is cut off"
                _refuse(source, what, offset + start, why)
            begin = at
            value = data[at : at + length]
            at += length
        else:
            _refuse(source, what, offset + start, f"field {number} has wire type {wire}, which is not used")
        fields.append(Field(number, wire, value, offset + begin))
        if len(fields) > _MAX_FIELDS:
            _refuse(source, what, offset + start, f"more than {_MAX_FIELDS} fields")
    return Message(tuple(fields), source, what, offset)


def signed(value: int) -> int:
    """A varint of 64 bits read as a signed number (int32 and int64 are both stored so)."""
    return value - (1 << 64) if value >> 63 else value


def _varint(data: bytes, at: int, base: int, source: str, what: str) -> tuple[int, int]:
    """An unsigned number of at most 64 bits at `at`, and where the next byte is."""
    value = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + index + 1
    short = len(data) - at < _MAX_VARINT and not value >> 64
    return _refuse(source, what, base + at, "a number is cut off" if short else "a number has more than 64 bits")


def _refuse(source: str, what: str, offset: int, why: str) -> NoReturn:
    raise FormatError(f"{source}: {what}, byte {offset}: {why}.")
