"""The server end: lock and socket, kernel credentials, refusals that never end the loop, bounded queues."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from baftd.errors import ProtocolError, TryAgain, Unreachable, UsageError
from baftd.wire import codec
from baftd.wire.client import Connection
from baftd.wire.credentials import MAX_SOCKET_PATH, Credentials, parse_peer_address
from baftd.wire.messages import (
    Ack,
    ErrorReply,
    Hello,
    Ping,
    Pong,
    Progress,
    Resume,
    StatusRequest,
    StopRequest,
    Welcome,
)
from baftd.wire.server import Incoming, Server

HELLO = Hello(job="gpt", rank=0, world=1, incarnation="0" * 32, pid=1, pid_start=2)


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("w") / "run" / "baftd.sock"


class Echo:
    """A server in a thread: answers hello with welcome and everything else with `answer`."""

    def __init__(self, path: Path, answer: Callable[[Server, Incoming], None] | None = None, **options: Any) -> None:
        self.path, self.options = path, options
        self.answer = answer or (lambda server, incoming: None)
        self.seen: list[Incoming] = []
        self.ready = threading.Event()
        self.ending = False
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self.main()))

    async def main(self) -> None:
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        self.server = Server(self.path, **self.options)
        self.server.bind()
        self.ready.set()
        try:
            while True:
                incoming = await self.server.recv()
                self.seen.append(incoming)
                if isinstance(incoming.message, Hello):
                    welcome = Welcome(id=incoming.message.id, node="n", node_incarnation="0" * 32, daemon_version="1")
                    self.server.send(incoming.peer, welcome)
                else:
                    self.answer(self.server, incoming)
        except asyncio.CancelledError:
            self.ending = True
        except Exception as error:  # noqa: BLE001 - judged in __exit__
            self.failed = error
        finally:
            await self.server.close()

    def call(self, work: Callable[[], object]) -> object:
        """Run something in the loop's thread and wait for it."""

        async def done() -> object:
            return work()

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result(20)

    def __enter__(self) -> Echo:
        self.thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.task is not None
        task = self.task
        with contextlib.suppress(RuntimeError):  # the loop is over already
            self.loop.call_soon_threadsafe(lambda: self.ending or task.cancel())
        self.thread.join(10)
        assert not self.thread.is_alive()
        assert self.failed is None, "the loop must outlive everything a peer sends"


class Raw:
    """A peer that sends whatever it likes."""

    def __init__(self, path: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(f"ipc://{path}")

    def ask(self, *frames: bytes) -> ErrorReply:
        self.socket.send_multipart(frames)
        assert self.socket.poll(10_000), "no answer"
        reply = codec.decode_reply(self.socket.recv_multipart())
        assert isinstance(reply, ErrorReply)
        return reply

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close(0)
        self.context.term()


def ack(server: Server, incoming: Incoming) -> None:
    server.send(incoming.peer, Ack(id=incoming.message.id))


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


# ---------------------------------------------------------------- lock and socket


def test_run_directory_and_socket_are_closed_to_others(path: Path) -> None:
    async def main() -> None:
        before = os.umask(0)
        try:
            server = Server(path)
            server.bind()
        finally:
            assert os.umask(before) == 0, "bind() must put the umask back"
        assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(path).st_mode) & 0o077 == 0
        await server.close()

    run(main())
    assert not path.exists()


def test_a_live_daemon_is_not_taken_over(path: Path) -> None:
    with Echo(path, ack) as echo:
        with pytest.raises(TryAgain, match=rf"process {os.getpid()} holds"):
            Server(path).bind()
        with Connection(path) as connection:
            assert isinstance(connection.request(StatusRequest()), Ack), "the live one must still answer"
        assert echo.server.counters.received == 1


HOLDER = """
import asyncio, sys
from pathlib import Path
from baftd.wire.server import Server
async def main():
    Server(Path(sys.argv[1])).bind()
    print("bound", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_lock_and_socket_of_a_killed_daemon_are_taken_over(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as dead:
        assert dead.stdout is not None
        try:
            assert dead.stdout.readline() == "bound\n"
            with pytest.raises(TryAgain, match=rf"process {dead.pid} holds"):
                Server(path).bind()
        finally:
            dead.send_signal(signal.SIGKILL)
        dead.wait(10)
    assert path.exists(), "a killed daemon leaves its socket"
    with Echo(path, ack), Connection(path) as connection:
        assert isinstance(connection.request(StatusRequest()), Ack)


def test_socket_is_free_again_after_close(path: Path) -> None:
    async def main() -> None:
        for _ in range(3):
            server = Server(path)
            server.bind()
            await server.close()

    run(main())


def test_a_path_too_long_is_refused_with_its_length(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120) / "baftd.sock"
    for make in (Server, Connection):
        with pytest.raises(
            UsageError, match=rf"has {len(str(long))} bytes; a Unix socket's path can have {MAX_SOCKET_PATH}"
        ):
            make(long)


@pytest.mark.parametrize("problem", ["mode", "file", "link", "in the way", "lock is a directory"])
def test_a_run_directory_that_is_not_ours_alone_is_refused(path: Path, problem: str) -> None:
    directory = path.parent
    if problem == "mode":
        directory.mkdir(mode=0o755)
    elif problem == "file":
        directory.write_text("")
    elif problem == "link":
        directory.symlink_to(path.parent.parent)
    else:
        directory.mkdir(mode=0o700)
        if problem == "in the way":
            path.write_text("precious")
        else:
            path.with_suffix(".lock").mkdir()
    with pytest.raises(UsageError) as caught:
        Server(path).bind()
    assert str(directory) in str(caught.value)
    if problem == "in the way":
        assert path.read_text() == "precious"
        path.unlink()
        Echo(path).__enter__().__exit__()  # the failed bind gave its lock back


# ---------------------------------------------------------------- who speaks


def test_the_kernel_says_who_speaks(path: Path) -> None:
    with Echo(path, ack) as echo, Connection(path) as connection:
        connection.request(Hello(job="gpt", rank=0, world=1, incarnation="0" * 32, pid=999999, pid_start=2))
        peer = echo.seen[0].peer
        assert (peer.uid, peer.gid, peer.pid) == (os.getuid(), os.getgid(), os.getpid())
        assert echo.server.peers() == [peer]


def test_peer_address_is_parsed_strictly() -> None:
    assert parse_peer_address("localhost:1001:1002:77") == Credentials(1001, 1002, 77)
    for text in (None, "", "None", "localhost", "1:2:3:4:5", "a:b:c:d", "localhost:::", "127.0.0.1:-1:2:3"):
        assert parse_peer_address(text) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to speak as another user")
def test_other_users_are_refused_unless_allowed(path: Path) -> None:
    code = (
        "import os, sys, zmq\n"
        "os.setgid(1234); os.setuid(1001)\n"
        "s = zmq.Context().socket(zmq.DEALER); s.connect(sys.argv[1]); s.send(bytes.fromhex(sys.argv[2]))\n"
        "assert s.poll(10000); print(s.recv().hex()); s.close(0)\n"
    )

    def speak() -> object:
        for directory in path.parents:
            if directory.stat().st_mode & 0o011 == 0 and directory.stat().st_uid == 0:
                directory.chmod(directory.stat().st_mode | 0o011)
        path.chmod(0o777)
        data = codec.encode(StatusRequest(id=3)).hex()
        out = subprocess.run(
            [sys.executable, "-c", code, f"ipc://{path}", data], capture_output=True, text=True, timeout=30, check=True
        )
        return codec.decode_reply([bytes.fromhex(out.stdout.strip())])

    try:
        with Echo(path, ack) as echo:
            reply = speak()
            assert isinstance(reply, ErrorReply)
            assert (reply.field, reply.id) == ("uid", 3)
            assert "user 1001 may not speak" in reply.message
            assert echo.server.counters.refused == {"uid": 1}
        path.parent.chmod(0o700)
        with Echo(path, ack, allow_uids=[1001]) as echo:
            assert isinstance(speak(), Ack)
            assert echo.seen[0].peer.uid == 1001
    except PermissionError:
        pytest.skip("directories above are closed to other users")


# ---------------------------------------------------------------- what is refused


def test_garbage_is_answered_counted_and_survived(path: Path) -> None:
    with Echo(path, ack) as echo, Raw(path) as raw:
        assert raw.ask(b"\xc1 garbage").field == "message"
        assert raw.ask(b"").field == "message"
        assert raw.ask(b"a", b"b").field == "frames"
        assert raw.ask(*[b"x"] * 500).field == "frames"
        assert raw.ask(b"\x91" * 5000).field == "depth"
        wrong = msgspec.to_builtins(HELLO) | {"rank": -1, "id": 12}
        assert (reply := raw.ask(msgspec.msgpack.encode(wrong))).field == "hello.rank"
        assert reply.id == 12, "the answer must find its asker"
        assert raw.ask(msgspec.msgpack.encode(wrong | {"protocol": 2})).field == "protocol"
        assert raw.ask(msgspec.msgpack.encode({"type": "dance"})).field == "type"
        assert raw.ask(codec.encode(Ack())).field == "type", "a reply is not a request"
        assert echo.server.counters.refused == {
            "message": 2, "frames": 2, "depth": 1, "hello": 1, "protocol": 1, "type": 2
        }  # fmt: skip
        with Connection(path) as connection:
            assert isinstance(connection.request(StatusRequest()), Ack)
        assert [type(incoming.message) for incoming in echo.seen] == [StatusRequest]


def test_an_oversized_message_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_BYTES", 10_000)
    with Echo(path, ack) as echo, Raw(path) as raw:
        assert raw.ask(bytes(10_001)).field == "size"
        raw.socket.send(bytes(1_000_000))  # ZeroMQ hangs up on this one
        with Connection(path) as connection:
            assert isinstance(connection.request(StatusRequest()), Ack)
        assert echo.server.counters.refused == {"size": 1}


def test_training_messages_before_hello_are_refused(path: Path) -> None:
    with Echo(path, ack) as echo, Connection(path) as connection:
        with pytest.raises(ProtocolError) as caught:
            connection.request(Resume(job="gpt", rank=0))
        assert caught.value.field == "hello"
        assert isinstance(connection.request(StatusRequest()), Ack), "commands need no hello"
        connection.request(HELLO)
        assert isinstance(connection.request(Resume(job="gpt", rank=0)), Ack)
        echo.call(lambda: echo.server.forget(echo.server.peers()[0]))
        with pytest.raises(ProtocolError):
            connection.request(Resume(job="gpt", rank=0))


def test_a_raw_unix_connection_does_no_harm(path: Path) -> None:
    with Echo(path, ack), socket.socket(socket.AF_UNIX) as plain:
        plain.connect(str(path))
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with Connection(path) as connection:
            assert isinstance(connection.request(StatusRequest()), Ack)


# ---------------------------------------------------------------- sending


def test_pings_are_answered_by_the_server_itself(path: Path) -> None:
    with Echo(path) as echo, Connection(path) as connection:
        connection.request(HELLO)
        peer = echo.server.peers()[0]
        before = echo.server.last_heard(peer)
        time.sleep(0.01)
        assert isinstance(connection.request(Ping()), Pong)
        assert echo.server.last_heard(peer) > before
        assert [type(incoming.message) for incoming in echo.seen] == [Hello]


def test_sending_to_a_peer_that_is_gone_is_counted_not_raised(path: Path) -> None:
    with Echo(path) as echo:
        with Connection(path) as connection:
            connection.request(HELLO)
        peer = echo.server.peers()[0]

        async def send() -> bool:
            deadline = time.monotonic() + 10
            while echo.server.send(peer, Ping()):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            return True

        assert asyncio.run_coroutine_threadsafe(send(), echo.loop).result(20)
        assert echo.server.counters.dropped == 1
        assert echo.server.peers() == []


def test_what_a_dead_process_had_still_sent_is_nobodys_mistake(path: Path) -> None:
    with Echo(path) as echo:
        for _ in range(5):
            with Connection(path) as dead:
                dead.request(HELLO)
                echo.call(echo.server._known.clear)
                dead._socket.send(codec.encode(Resume(job="gpt", rank=0)))
        with Connection(path) as other:
            other.request(HELLO)
        assert echo.server.counters.refused.get("hello", 0) + echo.server.counters.dropped == 5


def test_the_last_reply_before_close_arrives(path: Path) -> None:
    def last(server: Server, incoming: Incoming) -> None:
        ack(server, incoming)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    for _ in range(20):
        with Echo(path, last), Connection(path) as connection:
            assert isinstance(connection.request(StopRequest(), timeout=10), Ack)


def test_a_peer_that_reads_nothing_cannot_fill_the_memory(path: Path) -> None:
    def flood(server: Server, incoming: Incoming) -> None:
        sent = sum(server.send(incoming.peer, Progress(what="x" * 4000, done=i, total=1)) for i in range(20_000))
        counted.append(sent)

    counted: list[int] = []
    with Echo(path, flood) as echo, Raw(path) as raw:
        raw.socket.rcvhwm = 1
        raw.socket.send(codec.encode(StatusRequest()))
        deadline = time.monotonic() + 30
        while not counted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert 0 < counted[0] < 20_000
        assert echo.server.counters.dropped > 0
        with Connection(path) as connection, pytest.raises(Unreachable):
            connection.request(StopRequest(), timeout=0.2)  # flooded as well: the loop still runs


def test_the_number_of_remembered_peers_is_bounded(path: Path) -> None:
    with Echo(path, ack, max_peers=4) as echo:
        with Connection(path) as trainer:
            trainer.request(HELLO)
            for _ in range(8):
                with Connection(path) as command:
                    command.request(StatusRequest())
            assert isinstance(trainer.request(Resume(job="gpt", rank=0)), Ack), "commands must not push a trainer out"
        assert len(echo.server._known) <= 4


# ---------------------------------------------------------------- the blocking client


def test_no_daemon_names_socket_and_next_command(path: Path) -> None:
    with Connection(path) as connection, pytest.raises(Unreachable) as caught:
        connection.request(StatusRequest())
    assert str(path) in str(caught.value)
    assert "baftd start" in str(caught.value)
    assert caught.value.exit_code == 6


def test_a_dead_socket_is_unreachable_soon(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with (
        Connection(path, connect_timeout=0.3) as connection,
        pytest.raises(Unreachable, match="nobody listens"),
    ):
        connection.request(StatusRequest())


def test_a_daemon_that_never_answers_is_given_up(path: Path) -> None:
    silent = pytest.raises(Unreachable, match=r"did not answer within 0\.2 s")
    with Echo(path), Connection(path) as connection, silent:
        connection.request(StatusRequest(), timeout=0.2)


def test_a_daemon_that_hangs_up_is_known_at_once(path: Path) -> None:
    def die(server: Server, incoming: Incoming) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    began = time.monotonic()
    with (
        Echo(path, die),
        Connection(path) as connection,
        pytest.raises(Unreachable, match="hung up before it answered"),
    ):
        connection.request(StatusRequest(), timeout=30)
    assert time.monotonic() - began < 10


def test_progress_is_reported_and_extends_the_wait(path: Path) -> None:
    def slowly(server: Server, incoming: Incoming) -> None:
        for i in range(5):
            asyncio.get_running_loop().call_later(
                0.15 * i, server.send, incoming.peer, Progress(id=incoming.message.id, what="x", done=i, total=5)
            )
        asyncio.get_running_loop().call_later(0.8, ack, server, incoming)

    seen: list[int] = []
    with Echo(path, slowly), Connection(path) as connection:
        reply = connection.request(
            StatusRequest(), timeout=0.6, on_progress=lambda p: seen.append(p.done if isinstance(p, Progress) else -1)
        )
    assert isinstance(reply, Ack)
    assert seen == [0, 1, 2, 3, 4]


def test_answers_of_requests_given_up_are_not_taken_for_the_next(path: Path) -> None:
    def late(server: Server, incoming: Incoming) -> None:
        delay = 0.4 if isinstance(incoming.message, StatusRequest) else 0.0
        reply = Ack(id=incoming.message.id) if delay else Pong(id=incoming.message.id)
        asyncio.get_running_loop().call_later(delay, server.send, incoming.peer, reply)

    with Echo(path, late), Connection(path) as connection:
        with pytest.raises(Unreachable):
            connection.request(StatusRequest(), timeout=0.1)
        time.sleep(0.5)
        assert isinstance(connection.request(StopRequest()), Pong)
