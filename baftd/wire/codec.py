"""MessagePack and back: size, frame and depth caps, and errors that name the field.

A message is one frame. Nothing in it is executed or trusted: what does not decode raises `ProtocolError` with
the field as a path (`hello.rank`, `declare.entries[3].shape`), and the receiver answers, counts and goes on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from baftd.errors import BaftError, ProtocolError, error_class
from baftd.limits import LARGEST
from baftd.wire import messages
from baftd.wire.messages import PROTOCOL, ErrorReply, Message, Reply, Request

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_FRAMES",
    "MAX_ITEMS",
    "decode_reply",
    "decode_request",
    "encode",
    "error_reply",
    "message_id",
    "reply_error",
]

MAX_BYTES = 96 << 20
"""Of one message: the digests of a 4 TiB shard (16 bytes for each 4 MiB) and room for the names of its tensors."""

MAX_FRAMES = 1
"""Of one message, the ROUTER's identity frame not counted."""

MAX_DEPTH = 8
"""Of nested maps and arrays. The deepest real message has five (declare > entries > entry > ranges > pair)."""

MAX_ITEMS = 1 << 22
"""Values in one message, containers included: a declaration of 200,000 tensors. Bounds the time of looking at one."""

_HEAD_SCAN = 1 << 16

_MessageT = TypeVar("_MessageT", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class _Head(msgspec.Struct):
    """What can be said of a message that did not decode: enough to answer it."""

    type: str = ""
    protocol: int = PROTOCOL
    id: int = 0


_heads = msgspec.msgpack.Decoder(_Head)


def encode(message: Message) -> bytes:
    """The message as MessagePack.

    Raises:
        ProtocolError: it would be larger than a receiver takes.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_BYTES:
        kind = type(message).__struct_config__.tag
        raise ProtocolError(
            f"a {kind} message of {len(data)} bytes is larger than the {MAX_BYTES} that a receiver takes.",
            field=str(kind),
            hint="Declare fewer or larger tensors.",
        )
    return data


def decode_request(frames: Sequence[bytes]) -> Request:
    """What a client sent. `ProtocolError` for anything but one well-formed message of this protocol version."""
    return _decode(_requests, frames)


def decode_reply(frames: Sequence[bytes]) -> Reply:
    """What a daemon sent. `ProtocolError` as above."""
    return _decode(_replies, frames)


def _decode(decoder: msgspec.msgpack.Decoder[_MessageT], frames: Sequence[bytes]) -> _MessageT:
    if len(frames) != MAX_FRAMES:
        raise ProtocolError(
            f"{len(frames)} frames came where a message is {MAX_FRAMES}.", field="frames", hint=_FOREIGN
        )
    data = frames[0]
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"{len(data)} bytes are more than the {MAX_BYTES} allowed.", field="size", hint=_FOREIGN)
    _check_depth(data)
    head = _read_head(data)
    if head is not None and head.protocol != PROTOCOL:
        raise ProtocolError(
            f"the {head.type or 'message'} speaks protocol {head.protocol}, this side speaks {PROTOCOL}.",
            field="protocol",
            hint="Install the same version of baftd for the daemon, the training processes and the command line, "
            "and start the daemon again.",
        )
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        text, field = _explain(str(error), head.type if head else "")
        raise ProtocolError(text, field=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise ProtocolError(f"not a MessagePack message: {error}.", field="message", hint=_FOREIGN) from error


_FOREIGN = "Something that is not baftd may be talking on this socket."


def _check_depth(data: bytes) -> None:
    """Refuse nesting before the decoder recurses into it.

    Walks headers only: a byte that opens a map or an array costs one step, runs of text and binary are jumped over.
    Malformed data ends the walk; the decoder then says what is wrong with it.
    """
    position, size, items = 0, len(data), 0
    left: list[int] = []  # values still to come in each open container
    while position < size:
        items += 1
        if items > MAX_ITEMS:
            raise ProtocolError(f"more than {MAX_ITEMS} values in one message.", field="items", hint=_FOREIGN)
        code = data[position]
        position += 1
        children = -1
        if code <= 0x7F or code >= 0xE0 or code in (0xC0, 0xC1, 0xC2, 0xC3):
            pass
        elif code <= 0x8F:
            children = 2 * (code & 0x0F)
        elif code <= 0x9F:
            children = code & 0x0F
        elif code <= 0xBF:
            position += code & 0x1F
        elif code >= 0xDC:
            width = 2 if code in (0xDC, 0xDE) else 4
            children = int.from_bytes(data[position : position + width], "big") * (2 if code >= 0xDE else 1)
            position += width
        else:
            fixed, width = _SCALARS[code]
            position += fixed
            if width:
                position += int.from_bytes(data[position - fixed : position - fixed + width], "big")
        if children > 0:
            left.append(children)
            if len(left) > MAX_DEPTH:
                raise ProtocolError(
                    f"maps and arrays are nested deeper than {MAX_DEPTH}.", field="depth", hint=_FOREIGN
                )
            continue
        while left:
            left[-1] -= 1
            if left[-1]:
                break
            left.pop()
        else:
            return


_SCALARS: dict[int, tuple[int, int]] = {
    # code: (fixed bytes after it, of which the first so many are a length of what follows)
    **{0xC4 + i: (1 << i, 1 << i) for i in range(3)},  # bin
    **{0xC7 + i: ((1 << i) + 1, 1 << i) for i in range(3)},  # ext: length, type
    0xCA: (4, 0),
    0xCB: (8, 0),
    **{0xCC + i: (1 << i, 0) for i in range(4)},  # unsigned
    **{0xD0 + i: (1 << i, 0) for i in range(4)},  # signed
    **{0xD4 + i: ((1 << i) + 1, 0) for i in range(5)},  # fixed ext
    **{0xD9 + i: (1 << i, 1 << i) for i in range(3)},  # text
}


def _read_head(data: bytes) -> _Head | None:
    try:
        return _heads.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError):
        return None


def message_id(frames: Sequence[bytes]) -> int:
    """The id of a message that did not decode, so that the answer finds its asker; 0 where there is none."""
    if len(frames) != MAX_FRAMES or len(frames[0]) > _HEAD_SCAN:
        return 0
    try:
        _check_depth(frames[0])
    except ProtocolError:
        return 0
    head = _read_head(frames[0])
    return head.id if head is not None and 0 <= head.id <= LARGEST else 0


_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN_TYPE = re.compile(r"^Invalid value '(?P<name>.*)'$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>\w+)`$")


def _explain(text: str, kind: str) -> tuple[str, str]:
    """msgspec's words as (message, field path): `Expected int ... - at `$.rank`` becomes `hello.rank`."""
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    if path == ".type" and (unknown := _UNKNOWN_TYPE.match(what)):
        known = ", ".join(sorted(_TAGS))
        return f"no message is called {unknown['name'][:64]!r}; known are {known}.", "type"
    if missing := _MISSING.match(what):
        path = f"{path}.{missing['name']}"
    prefix = kind if kind in _TAGS else ""
    field = (prefix + path).lstrip(".") or "message"
    return f"{field}: {what[:512]}.", field


_TAGS = frozenset(
    str(value.__struct_config__.tag)
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, Message) and value is not Message
)


def error_reply(error: BaftError, *, id: int = 0) -> ErrorReply:
    """The answer that carries `error` to the other side."""
    field = error.field if isinstance(error, ProtocolError) else ""
    return ErrorReply(id=id, code=error.code, message=error.message[:4096], hint=error.hint[:4096], field=field[:4096])


def reply_error(reply: ErrorReply) -> BaftError:
    """The exception that an `ErrorReply` stands for."""
    cls = error_class(reply.code)
    if issubclass(cls, ProtocolError):
        return cls(reply.message, field=reply.field, hint=reply.hint)
    return cls(reply.message, hint=reply.hint)
