"""The I/O thread alone: connecting with pauses, requests over reconnects, what is owed, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq

from baft_client.io_thread import MAX_OWED, MAX_TOLD, Handler, IoThread, LinkState
from baftd.errors import BaftError, Degraded, ProtocolError, Unreachable
from baftd.wire import codec
from baftd.wire.messages import (
    Ack,
    Begin,
    ErrorReply,
    Finish,
    Hello,
    Message,
    Pong,
    Progress,
    Reply,
    Save,
    Seal,
    Skip,
    Timings,
    Welcome,
    WireToken,
)
from baftd.wire.server import Incoming, Server

TOKEN = WireToken(1, "0" * 32)


def save(step: int = 1) -> Save:
    return Save(token=TOKEN, rank=0, step=step)


def skip(step: int) -> Skip:
    return Skip(token=TOKEN, rank=0, step=step, reason="x")


class Listener(Handler):
    """Records what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.fail_once: Exception | None = None

    def make_hello(self) -> Hello:
        return Hello(job="gpt", rank=0, world=1, incarnation="0" * 32, pid=1, pid_start=2)

    def welcomed(self, welcome: Welcome) -> None:
        self.told.append("welcome")
        error, self.fail_once = self.fail_once, None
        if error is not None:
            raise error

    def turned_away(self, error: BaftError) -> None:
        self.told.append(error)

    def received(self, reply: Reply) -> None:
        self.told.append(reply)

    def went_away(self, why: str) -> None:
        self.told.append(f"away: {why}")

    def failed(self, error: BaseException) -> None:
        self.told.append(error)


class Peer:
    """A daemon's end that the test drives: keeps what came, answers what `answer` says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[Message] = []
        self.answer: Callable[[Message], list[Message]] = lambda message: []
        self.extra: list[Message] = []
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.main(ready)))
        self.thread.start()
        assert ready.wait(10)

    async def main(self, ready: threading.Event) -> None:
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        server = Server(self.path)
        server.bind()
        ready.set()
        try:
            while True:
                incoming: Incoming = await server.recv()
                self.seen.append(incoming.message)
                for reply in [*self.replies(incoming.message), *self.extra]:
                    server.send(incoming.peer, reply)  # type: ignore[arg-type]
                self.extra.clear()
        except asyncio.CancelledError:
            await server.close()

    def replies(self, message: Message) -> list[Message]:
        if isinstance(message, Hello):
            replies = self.answer(message)
            return replies or [Welcome(id=message.id, node="n", node_incarnation="0" * 32, daemon_version="1")]
        return self.answer(message)

    def stop(self) -> None:
        if self.thread is not None:
            assert self.task is not None
            self.loop.call_soon_threadsafe(self.task.cancel)
            self.thread.join(10)
            self.thread = None


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("l") / "run" / "baftd.sock"


@pytest.fixture
def peer(path: Path) -> Iterator[Peer]:
    found = Peer(path)
    yield found
    found.stop()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def link(path: Path, listener: Listener) -> Iterator[IoThread]:
    found = IoThread(path, listener, ping_every=0.2, silence=1.0)
    found.start()
    yield found
    found.close()
    assert found.state is LinkState.CLOSED


def wait_for(ready: Callable[[], object], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_connects_when_there_is_a_daemon_and_stays_quiet_while_there_is_none(
    peer: Peer, link: IoThread, listener: Listener
) -> None:
    assert not link.wait_up(0.3)
    assert listener.told == []
    assert "no socket" in link.last_error
    peer.start()
    assert link.wait_up(5)
    wait_for(lambda: listener.told == ["welcome"])
    for _ in range(3):
        peer.stop()
        wait_for(lambda: link.state is LinkState.AWAY)
        peer.start()
        assert link.wait_up(10)
    assert [told for told in listener.told if told == "welcome"] == ["welcome"] * 4
    assert len([told for told in listener.told if str(told).startswith("away")]) == 3


def test_a_daemon_that_accepts_and_says_nothing_is_named_as_such(path: Path, link: IoThread) -> None:
    import zmq

    path.parent.mkdir(mode=0o700)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        mute.linger = 0
        mute.bind(f"ipc://{path}")
        wait_for(lambda: link.state is LinkState.GREETING)
        assert not link.wait_up(0.3)
        assert "(it does not answer)" in str(link.unreachable("no answer"))


def test_a_dead_socket_is_tried_again(peer: Peer, path: Path, link: IoThread) -> None:
    import socket

    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    wait_for(lambda: "nobody listens" in link.last_error)
    peer.start()
    assert link.wait_up(10)


def test_requests_are_answered_or_refused_or_given_up(peer: Peer, link: IoThread) -> None:
    peer.answer = lambda m: (
        [] if isinstance(m, Hello) else
        [Ack(id=m.id)] if isinstance(m, Save) else
        [ErrorReply(id=m.id, code="degraded", message="no durable tier")] if isinstance(m, Finish) else []
    )  # fmt: skip
    peer.start()
    assert link.wait_up(5)
    assert isinstance(link.request(save(), 5), Ack)
    with pytest.raises(Degraded, match="no durable tier"):
        link.request(Finish(token=TOKEN, rank=0, step=1), 5)
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"no answer to skip within 0\.3 s from the daemon at"):
        link.request(skip(1), 0.3)
    assert time.monotonic() - began < 3


def test_progress_extends_the_wait(peer: Peer, link: IoThread) -> None:
    seen: list[int] = []
    done = threading.Event()

    def slowly(message: Message) -> list[Message]:
        if isinstance(message, Save):
            for i in range(5):
                at = 0.25 * (i + 1)
                peer.loop.call_later(at, later, Progress(id=message.id, what="x", done=i, total=5))
            peer.loop.call_later(1.5, later, Ack(id=message.id))
        return []

    def later(reply: Message) -> None:
        outgoing.append(reply)

    outgoing: list[Message] = []
    peer.answer = slowly
    peer.start()
    assert link.wait_up(5)
    # what is due goes out with the next message that comes in
    peer.extra = outgoing

    def prod() -> None:
        while not done.wait(0.05):
            link.post(skip(1))

    prodder = threading.Thread(target=prod)
    prodder.start()
    try:
        reply = link.request(save(), 0.8, on_progress=lambda p: seen.append(p.done if isinstance(p, Progress) else -1))
    finally:
        done.set()
        prodder.join()
    assert isinstance(reply, Ack)
    assert seen == [0, 1, 2, 3, 4]


def test_a_request_made_while_away_and_one_cut_off_are_both_answered(peer: Peer, link: IoThread) -> None:
    results: list[Reply] = []
    asker = threading.Thread(target=lambda: results.append(link.request(save(1), 20)))
    asker.start()
    peer.start()  # answers nothing yet
    wait_for(lambda: any(isinstance(m, Save) for m in peer.seen))
    peer.stop()
    peer.answer = lambda m: [Ack(id=m.id)] if isinstance(m, Save) else []
    peer.start()
    asker.join(20)
    assert isinstance(results[0], Ack)
    assert len([m for m in peer.seen if isinstance(m, Save)]) == 2


def test_owed_messages_are_sent_again_until_acknowledged(peer: Peer, link: IoThread, listener: Listener) -> None:
    seal = Seal(token=TOKEN, rank=0, step=1, updates=1, slot=0, generation=1, image_length=1, small_length=1)
    link.post(seal)
    for step in range(2, 2 + 3 * MAX_OWED):
        link.post(skip(step))
    peer.start()
    wait_for(lambda: len(peer.seen) >= 1 + MAX_OWED)
    sent = [m for m in peer.seen if not isinstance(m, Hello)]
    assert sent[0] == seal
    assert [m.step for m in sent[1:]] == list(range(2 + 3 * MAX_OWED - (MAX_OWED - 1), 2 + 3 * MAX_OWED))  # type: ignore[attr-defined]
    answered = threading.Event()

    def settle(reply: Reply | BaftError) -> None:
        link.acknowledge(lambda message: not isinstance(message, Seal))
        answered.set()

    peer.answer = lambda m: [Ack(id=m.id)] if isinstance(m, Save) else []
    link.ask(save(), settle)
    assert answered.wait(5)
    peer.seen.clear()
    link.reconnect()
    wait_for(lambda: any(isinstance(m, Seal) for m in peer.seen))
    link.request(save(), 5)
    assert [type(m).__name__ for m in peer.seen] == ["Hello", "Seal", "Save"]


def told(step: int) -> Timings:
    return Timings(token=TOKEN, rank=0, step=step, begun=1, period=2)


def steps(peer: Peer) -> list[int]:
    return [m.step for m in peer.seen if isinstance(m, Timings | Skip)]


def test_what_is_told_is_never_owed_and_never_sent_twice(peer: Peer, link: IoThread) -> None:
    for step in range(1, 6):
        link.tell(partial(told, step))  # nobody is there
    link.post(skip(6))
    wait_for(lambda: not link._inbox)
    peer.start()
    assert link.wait_up(10)
    link.tell(lambda: told(7))
    link.post(skip(8))
    wait_for(lambda: steps(peer) == [6, 7, 8])
    link.reconnect()
    wait_for(lambda: steps(peer) == [6, 7, 8, 6, 8])
    assert link.dropped == 0


def test_what_cannot_be_told_costs_no_connection(peer: Peer, link: IoThread, listener: Listener) -> None:
    peer.start()
    assert link.wait_up(10)

    def fails() -> Timings:
        raise KeyError("a test")

    link.tell(fails)
    link.post(skip(1))
    wait_for(lambda: steps(peer) == [1])
    assert [type(entry) for entry in listener.told if isinstance(entry, Exception)] == [KeyError]
    assert listener.told.count("welcome") == 1


def test_what_is_told_waits_for_what_wakes_the_thread_anyway(
    peer: Peer, link: IoThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.start()
    assert link.wait_up(10)
    woken: list[int] = []
    monkeypatch.setattr(link, "_wake", lambda: woken.append(1))
    link.tell(lambda: told(1))
    assert not woken
    wait_for(lambda: steps(peer) == [1])  # a heartbeat took it along
    monkeypatch.setattr(link, "_drain_inbox", lambda: None)  # a thread that sleeps for long
    for step in range(2, MAX_TOLD + 3):
        link.tell(partial(told, step))
    assert woken, "but the pile does not grow for ever"
    monkeypatch.undo()
    link._wake()
    wait_for(lambda: steps(peer) == list(range(1, MAX_TOLD + 3)))


def test_a_daemon_that_reads_nothing_loses_what_is_told_and_keeps_its_connection(
    path: Path, listener: Listener
) -> None:
    class Full:
        def send(self, *_: object) -> None:
            raise zmq.Again

    link = IoThread(path, listener)  # never started: its thread has no say here
    try:
        link._socket = Full()  # type: ignore[assignment]
        link._send(told(1), or_drop=True)
        assert link.dropped == 1
        assert link._socket is not None
    finally:
        link._socket = None
        link.close()


def test_an_error_reply_to_hello_turns_it_away_and_it_tries_again(
    peer: Peer, link: IoThread, listener: Listener
) -> None:
    refusals = [True, True, False]

    def answer(message: Message) -> list[Message]:
        if isinstance(message, Hello) and refusals.pop(0):
            return [ErrorReply(id=message.id, code="rank", message="claimed twice")]
        return []

    peer.answer = answer
    peer.start()
    assert link.wait_up(10)
    assert [type(told).__name__ for told in listener.told[:2]] == ["RankError", "RankError"]


def test_a_daemon_of_another_version_is_named(path: Path, link: IoThread, listener: Listener) -> None:
    path.parent.mkdir(mode=0o700)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    try:
        router.bind(f"ipc://{path}")
        assert router.poll(10_000)
        identity, data = router.recv_multipart()
        welcome = Welcome(id=1, node="n", node_incarnation="0" * 32, daemon_version="9")
        raw = msgspec.to_builtins(welcome) | {"protocol": 9, "id": codec.decode_request([data]).id}
        raw["type"] = "welcome"
        router.send_multipart([identity, msgspec.msgpack.encode(raw)])
        wait_for(lambda: listener.told)
        assert isinstance(listener.told[0], ProtocolError)
        assert "speaks protocol 9" in str(listener.told[0])
    finally:
        router.close(0)
        context.term()


def test_a_failure_in_the_thread_is_told_and_survived(peer: Peer, link: IoThread, listener: Listener) -> None:
    listener.fail_once = ZeroDivisionError("a bug")
    peer.start()
    wait_for(lambda: listener.told.count("welcome") == 2)
    assert any(isinstance(told, ZeroDivisionError) for told in listener.told)
    assert link.wait_up(5)


def test_closing_fails_open_requests_and_ends_the_thread(peer: Peer, link: IoThread) -> None:
    peer.start()
    assert link.wait_up(5)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            link.request(save(), 30)
        except Unreachable as error:
            errors.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    wait_for(lambda: any(isinstance(m, Save) for m in peer.seen))
    link.close()
    asker.join(5)
    assert not asker.is_alive()
    assert errors
    with pytest.raises(Unreachable):
        link.request(save(), 30)
    link.post(skip(1))  # no harm
    link.close()


def test_what_was_posted_just_before_closing_is_still_sent(peer: Peer, link: IoThread) -> None:
    peer.start()
    assert link.wait_up(5)
    for step in range(50):
        link.post(Begin(token=TOKEN, rank=0, step=step, slot=0, generation=1))
    link.close()
    wait_for(lambda: len([m for m in peer.seen if isinstance(m, Begin)]) == 50)


def test_unasked_answers_are_ignored(peer: Peer, link: IoThread, listener: Listener) -> None:
    peer.answer = lambda m: [Pong(id=99), Pong(), Ack(id=m.id)] if isinstance(m, Save) else []
    peer.start()
    assert isinstance(link.request(save(), 5), Ack)
    assert listener.told == ["welcome"]
