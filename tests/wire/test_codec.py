"""The codec: every message goes there and back, everything else is refused with the field named."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.errors import BaftError, NoRoom, ProtocolError, Unreachable
from baftd.wire import codec, messages
from baftd.wire.messages import PROTOCOL, Declare, Entry, ErrorReply, Hello, Message, Seal, WireToken

TOKEN = WireToken(3, "ab" * 16)
HELLO = Hello(id=7, job="gpt", rank=0, world=2, incarnation="0" * 32, pid=1, pid_start=2)


def packed(value: object) -> list[bytes]:
    return [msgspec.msgpack.encode(value)]


def hello(**changes: object) -> dict[str, object]:
    return {**msgspec.to_builtins(HELLO), **changes}


def all_types(union: Any) -> list[type[Message]]:
    return list(union.__args__)


def build(kind: type[Message]) -> Message:
    """A message with every field set to something its type allows."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    values = {field.name: _example(field.type) for field in info.fields if field.name != "protocol"}
    return msgspec.convert(values | {"type": kind.__struct_config__.tag}, kind)


def _example(info: Any) -> object:
    inspect = msgspec.inspect
    if isinstance(info, inspect.UnionType):
        return _example(next(part for part in info.types if not isinstance(part, inspect.NoneType)))
    if isinstance(info, inspect.StructType):
        return {field.name: _example(field.type) for field in info.fields}
    if isinstance(info, inspect.IntType):
        return 1
    if isinstance(info, inspect.FloatType):
        return 1.5
    if isinstance(info, inspect.BoolType):
        return True
    if isinstance(info, inspect.BytesType):
        return b"d" * 16
    if isinstance(info, inspect.StrType):
        return "0" * 32
    if isinstance(info, inspect.LiteralType):
        return info.values[0]
    if isinstance(info, inspect.ListType):
        return [_example(info.item_type)]
    if isinstance(info, inspect.TupleType):
        return [_example(item) for item in info.item_types]
    assert isinstance(info, inspect.DictType), info
    return {"key": 1}


@pytest.mark.parametrize("kind", all_types(messages.Request), ids=lambda kind: kind.__name__)
def test_every_request_comes_back_as_it_was_sent(kind: type[Message]) -> None:
    message = build(kind)
    assert codec.decode_request([codec.encode(message)]) == message


@pytest.mark.parametrize("kind", all_types(messages.Reply), ids=lambda kind: kind.__name__)
def test_every_reply_comes_back_as_it_was_sent(kind: type[Message]) -> None:
    message = build(kind)
    assert codec.decode_reply([codec.encode(message)]) == message


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    assert codec.decode_request(packed(hello(colour="blue", more={"a": [1]}))) == HELLO


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (hello(rank=-1), "hello.rank"),
        (hello(rank="0"), "hello.rank"),
        (hello(rank=1 << 20), "hello.rank"),
        (hello(world=0), "hello.world"),
        (hello(incarnation="xyz"), "hello.incarnation"),
        (hello(job=""), "hello.job"),
        (hello(job="a" * 65), "hello.job"),
        (hello(token={"epoch": 0, "incarnation": "0" * 32}), "hello.token.epoch"),
        ({key: value for key, value in hello().items() if key != "pid"}, "hello.pid"),
        ({"type": "nonsense"}, "type"),
        ({"type": 7}, "type"),
        ({"rank": 0}, "type"),
        ([1, 2, 3], "message"),
        ("hello", "message"),
        (None, "message"),
        (hello(protocol=PROTOCOL + 1), "protocol"),
        (hello(protocol=0), "protocol"),
        (hello(protocol="1"), "protocol"),
    ],
)
def test_a_wrong_field_is_named(value: object, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(packed(value))
    assert caught.value.field == field
    assert caught.value.message


def test_a_field_deep_inside_is_named_by_its_path() -> None:
    message = Declare(
        token=TOKEN,
        rank=0,
        small_bytes=0,
        entries=[Entry(name=str(i), dtype="U8", shape=[1], nbytes=1) for i in range(4)],
    )
    raw = msgspec.to_builtins(message)
    raw["entries"][3]["shape"] = [1, -5]
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(packed(raw))
    assert caught.value.field == "declare.entries[3].shape[1]"


def test_another_protocol_version_is_told_apart_from_a_wrong_message() -> None:
    """A message of a future version need not make sense here; what is said is the version."""
    with pytest.raises(ProtocolError, match=r"speaks protocol 9, this side speaks 1\. Install the same version"):
        codec.decode_request(packed({"type": "hello", "protocol": 9, "rank": "new meaning"}))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xa5abc", b"\x81", b"\x81\xa4type", b"{}\n", b"\xc7\xff"]
)
def test_what_is_no_messagepack_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request([data])
    assert caught.value.field in ("message", "type")


@pytest.mark.parametrize("frames", [[], [b"", b""], [codec.encode(HELLO)] * 3])
def test_a_message_is_one_frame(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(frames)
    assert caught.value.field == "frames"


def test_size_is_capped_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_BYTES", 1000)
    seal = Seal(
        token=TOKEN,
        rank=0,
        step=1,
        updates=1,
        slot=0,
        generation=1,
        image_length=1,
        small_length=1,
        digests=bytes(1008),
    )
    with pytest.raises(ProtocolError, match="seal message of"):
        codec.encode(seal)
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request([bytes(1001)])
    assert caught.value.field == "size"


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"k": x}, lambda x: [1, {"a": x}, 2]])
def test_depth_is_capped_before_anything_recurses(wrap: Any) -> None:
    value: object = 1
    for _ in range(codec.MAX_DEPTH - 1):
        value = wrap(value) if wrap(0) != [1, {"a": 0}, 2] else [value]
    codec.decode_request(packed(hello(extra=value)))
    for _ in range(3):
        value = wrap(value)
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(packed(hello(extra=value)))
    assert caught.value.field == "depth"
    with pytest.raises(ProtocolError):
        codec.decode_request([b"\x91" * 1_000_000])


def test_number_of_values_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_ITEMS", 100)
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(packed(hello(extra=[0] * 200)))
    assert caught.value.field == "items"


def test_digests_are_jumped_over_not_walked_through() -> None:
    seal = Seal(
        token=TOKEN,
        rank=0,
        step=1,
        updates=1,
        slot=0,
        generation=1,
        image_length=1,
        small_length=1,
        digests=bytes(1 << 24),
    )
    data = codec.encode(seal)
    began = time.thread_time()
    codec._check_depth(data)
    assert time.thread_time() - began < 0.1


def test_errors_cross_the_wire_as_their_own_class() -> None:
    for error in (NoRoom("too small", hint="enlarge it"), Unreachable("gone"), ProtocolError("bad", field="a.b[1]")):
        reply = codec.decode_reply([codec.encode(codec.error_reply(error, id=5))])
        assert isinstance(reply, ErrorReply)
        assert reply.id == 5
        back = codec.reply_error(reply)
        assert type(back) is type(error)
        assert (back.message, back.hint) == (error.message, error.hint)
        assert getattr(back, "field", "") == getattr(error, "field", "")
    assert type(codec.reply_error(ErrorReply(code="of the future", message="x"))) is BaftError


def test_the_id_of_a_bad_message_is_found_for_the_answer() -> None:
    assert codec.message_id(packed(hello(rank=-1))) == 7
    assert codec.message_id(packed(hello(id=-1))) == 0
    assert codec.message_id(packed([1])) == 0
    assert codec.message_id([b"\xc1"]) == 0
    assert codec.message_id([b"\x91" * 100]) == 0


def decoded(decode: Any, frames: list[bytes]) -> None:
    """A message, or a ProtocolError that names a field; anything else fails the test."""
    outcome: Message | ProtocolError
    try:
        outcome = decode(frames)
    except ProtocolError as error:
        outcome = error
    assert outcome.field if isinstance(outcome, ProtocolError) else isinstance(outcome, Message)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(data=st.binary(max_size=300))
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode in (codec.decode_request, codec.decode_reply):
        decoded(decode, [data])


@given(
    value=json_like,
    kind=st.sampled_from(sorted(codec._TAGS)),
    fields=st.dictionaries(st.text(max_size=12), json_like, max_size=6),
)
@settings(max_examples=400, deadline=None)
def test_any_messagepack_is_a_message_or_a_protocol_error(value: object, kind: str, fields: dict[str, object]) -> None:
    for candidate in (value, {**fields, "type": kind}, hello(**fields)):
        decoded(codec.decode_request, packed(candidate))


@given(index=st.integers(0, 400), value=st.integers(0, 255), kind=st.sampled_from(all_types(messages.Request)))
@settings(max_examples=400, deadline=None)
def test_a_flipped_byte_of_a_real_message_is_a_message_or_a_protocol_error(
    index: int, value: int, kind: type[Message]
) -> None:
    data = bytearray(codec.encode(build(kind)))
    data[index % len(data)] = value
    for changed in (bytes(data), bytes(data[: index % len(data)])):
        decoded(codec.decode_request, [changed])
