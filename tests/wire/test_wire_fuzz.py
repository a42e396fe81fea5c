"""Anything at all, thrown at a live server and at a live daemon: it answers, counts, and goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baftd.wire import codec, messages
from baftd.wire.client import Connection
from baftd.wire.messages import ErrorReply, Message, Ping, Pong, StatusReply, StatusRequest
from baftd.wire.server import Server
from tests.support.daemon import Daemon

LIVE = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 40) | st.floats(allow_nan=False)
    | st.text(max_size=12) | st.binary(max_size=24),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def value_of(info: Any) -> st.SearchStrategy[Any]:
    """Values that a field's type allows, small ones."""
    inspect = msgspec.inspect
    if isinstance(info, inspect.UnionType):
        return st.one_of([value_of(part) for part in info.types])
    if isinstance(info, inspect.NoneType):
        return st.none()
    if isinstance(info, inspect.StructType):
        return st.fixed_dictionaries({field.name: value_of(field.type) for field in info.fields})
    if isinstance(info, inspect.IntType):
        low = int(info.ge or 0)
        return (
            st.just(low)
            | st.just(low)
            | st.integers(low, low + 3)
            | st.just(min(info.le or 1 << 53, (info.lt or 1 << 53) - 1))
        )
    if isinstance(info, inspect.FloatType):
        return st.floats(0, 10)
    if isinstance(info, inspect.BoolType):
        return st.booleans()
    if isinstance(info, inspect.BytesType):
        return st.binary(min_size=info.min_length or 0, max_size=max(32, info.min_length or 0))
    if isinstance(info, inspect.StrType):
        return (
            st.sampled_from(["0" * 32] * 3 + ["1" * 32])
            if info.pattern
            else st.sampled_from(["fuzz"] * 6 + ["a/b", "..", "x" * 64])
        )
    if isinstance(info, inspect.LiteralType):
        return st.sampled_from(info.values)
    if isinstance(info, inspect.ListType):
        return st.lists(value_of(info.item_type), max_size=3)
    if isinstance(info, inspect.TupleType):
        return st.tuples(*[value_of(item) for item in info.item_types])
    assert isinstance(info, inspect.DictType), info
    return st.dictionaries(value_of(info.key_type), value_of(info.value_type), max_size=2)


def message_of(kind: type[Message]) -> st.SearchStrategy[dict[str, Any]]:
    """Well-formed messages of a type, whatever sense they make."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    fields = {field.name: value_of(field.type) for field in info.fields if field.name != "protocol"}
    return st.fixed_dictionaries(
        {**fields, "type": st.just(kind.__struct_config__.tag), "protocol": st.just(messages.PROTOCOL)}
    )


KINDS: list[type[Message]] = [kind for kind in messages.Request.__args__ if kind is not messages.StopRequest]
well_formed = st.one_of([message_of(kind) for kind in KINDS])
broken = st.builds(
    lambda base, key, value: {**base, key: value},
    well_formed,
    st.sampled_from(["rank", "token", "id", "job", "entries", "type"]),
    anything,
)
frames = st.lists(
    st.binary(max_size=64) | st.builds(msgspec.msgpack.encode, anything | broken | well_formed), min_size=1, max_size=3
)


class Thrower:
    """A raw peer: throws frames, takes what comes back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.context = zmq.Context()
        self.socket = self.fresh()

    def fresh(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndtimeo = 10_000
        socket.connect(f"ipc://{self.path}")
        return socket

    def throw(self, parts: list[bytes]) -> None:
        self.socket.send_multipart(parts)
        while self.socket.poll(0):
            codec.decode_reply(self.socket.recv_multipart())  # every answer is a message of ours

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Message]]]:
    path = tmp_path_factory.mktemp("f") / "run" / "baftd.sock"
    ready, got = threading.Event(), list[Message]()
    control: dict[str, Any] = {}

    async def main() -> None:
        control["loop"], control["task"] = asyncio.get_running_loop(), asyncio.current_task()
        server = Server(path)
        server.bind()
        ready.set()
        try:
            while True:
                got.append((await server.recv()).message)
        except asyncio.CancelledError:
            await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(10)
    yield path, got
    control["loop"].call_soon_threadsafe(control["task"].cancel)
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.leaks("the server lives as long as the module's tests")
@given(thrown=st.lists(frames, min_size=1, max_size=8))
@LIVE
def test_a_server_survives_whatever_frames_come(served: tuple[Path, list[Message]], thrown: list[list[bytes]]) -> None:
    path, got = served
    thrower = Thrower(path)
    try:
        for parts in thrown:
            thrower.throw(parts)
        with Connection(path) as connection:
            assert isinstance(connection.request(Ping(), timeout=20), Pong)
        assert all(isinstance(message, Message) for message in got)
        got.clear()
    finally:
        thrower.close()


@pytest.mark.leaks("a module's fixture may begin or end with this test")
def test_a_daemon_survives_whatever_messages_come(daemon: Daemon) -> None:
    """Well-formed messages in any order: of jobs, ranks, tokens and slots that do not exist or are not theirs."""
    before = daemon.status().counters.get("internal_errors", 0)
    thrower = Thrower(daemon.dirs.socket)
    seen: list[bytes] = []

    @given(thrown=st.lists(well_formed | broken, min_size=1, max_size=12))
    @settings(LIVE, max_examples=60, database=None)
    def throw(thrown: list[dict[str, Any]]) -> None:
        for message in thrown:
            data = msgspec.msgpack.encode(message)
            seen.append(data)
            thrower.throw([data])

    try:
        throw()
        deadline = time.monotonic() + 20
        while thrower.socket.poll(200):
            assert time.monotonic() < deadline
            reply = codec.decode_reply(thrower.socket.recv_multipart())
            if isinstance(reply, ErrorReply):
                assert reply.message, reply
    finally:
        thrower.close()
    assert daemon.running
    reply = daemon.request(StatusRequest())
    assert isinstance(reply, StatusReply)
    assert reply.counters.get("internal_errors", 0) == before, daemon.log[-6000:]
