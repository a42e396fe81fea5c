"""The one thread of a training process that talks to the daemon.

It owns the socket, sleeps in poll, and never lets the training thread wait for the network: messages are handed
over through memory (a deque and an eventfd). Away daemons are a state, not an error: it connects again with growing
pauses, says hello, and sends once more what has not been acknowledged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from baftd.errors import BaftError, ProtocolError, Unreachable
from baftd.telemetry import get_logger
from baftd.wire import codec
from baftd.wire.credentials import check_socket_path
from baftd.wire.messages import (
    ErrorReply,
    Hello,
    Message,
    Ping,
    Pong,
    Progress,
    Reply,
    ResumeProgress,
    Skip,
    Welcome,
)

# os.eventfd_write gives the GIL away: the I/O thread would take it and hold the training thread up for its whole turn
# (0.5 ms measured), at the one moment when the training thread is counted as held. Written with the GIL in hand, the
# other thread's turn comes when the training thread next lets go of it by itself. Read likewise: each time the I/O
# thread gives the GIL away it may wait 5 ms for it beside a training loop of plain Python.
_write_holding_gil = ctypes.PyDLL(None).write
_write_holding_gil.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write_holding_gil.restype = ctypes.c_ssize_t
_read_holding_gil = ctypes.PyDLL(None).read
_read_holding_gil.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_read_holding_gil.restype = ctypes.c_ssize_t
_ONE = (1).to_bytes(8, sys.byteorder)

__all__ = ["Handler", "IoThread", "LinkState", "close_inherited_sockets"]

PING_EVERY = 1.0
"""Seconds between heartbeats."""
SILENCE = 5.0
"""Seconds without a word from the daemon after which the connection is given up and made anew."""
FIRST_PAUSE = 0.05
LAST_PAUSE = 2.0
"""Seconds between attempts to connect: doubled from the first to the last, with jitter."""
MAX_OWED = 64
"""Unacknowledged messages kept for a daemon that is away; beyond it the oldest skip is dropped."""
MAX_TOLD = 8
"""Messages that `tell` lets lie before it wakes the thread for them."""


class LinkState(Enum):
    """How it stands with the daemon."""

    AWAY = "away"
    GREETING = "greeting"
    UP = "up"
    CLOSED = "closed"


class Handler(ABC):
    """What a session does with events. All methods run in the I/O thread and must not block."""

    @abstractmethod
    def make_hello(self) -> Hello:
        """The first message of every connection."""

    @abstractmethod
    def welcomed(self, welcome: Welcome) -> None:
        """The daemon took the hello; owed messages and open requests are sent after this returned."""

    @abstractmethod
    def turned_away(self, error: BaftError) -> None:
        """The daemon refused the hello."""

    @abstractmethod
    def received(self, reply: Reply) -> None:
        """A message that answers no request."""

    @abstractmethod
    def went_away(self, why: str) -> None:
        """A connection that was up is gone."""

    @abstractmethod
    def failed(self, error: BaseException) -> None:
        """Something unexpected happened in the I/O thread; it goes on with a new connection."""


class _Request:
    """A request whose answer somebody waits for."""

    __slots__ = ("done", "error", "heard", "message", "on_progress", "reply")

    def __init__(self, message: Message, on_progress: Callable[[Progress | ResumeProgress], None] | None) -> None:
        self.message = message
        self.on_progress = on_progress
        self.done = threading.Event()
        self.reply: Reply | None = None
        self.error: BaftError | None = None
        self.heard = 0


class _Told:
    """A message that is sent once or not at all, and made where it is sent."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Message]) -> None:
        self.make = make


class IoThread:
    """Connection to one daemon. `post` and `request` are for the training thread, everything else is the thread's."""

    def __init__(
        self,
        socket_path: Path,
        handler: Handler,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        ping_every: float = PING_EVERY,
        silence: float = SILENCE,
    ) -> None:
        """`clock` gives monotonic seconds, `jitter` numbers from 0 to 1."""
        self.path = check_socket_path(socket_path)
        self.state = LinkState.AWAY
        self.last_error = f"there is no socket {self.path}"
        """Why the daemon is away, in a few words."""
        self.dropped = 0
        """Messages of `tell` that a daemon that reads too slowly did not get."""
        self._handler = handler
        self._clock = clock
        self._jitter = jitter
        self._ping_every = ping_every
        self._silence = silence
        self._log = get_logger("client")
        self._inbox: deque[Message | _Request | _Told] = deque()
        self._up = threading.Event()
        self._stop = False
        self._drop_link = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._next_id = 1
        self._owed: deque[Message] = deque()
        self._requests: dict[int, _Request] = {}
        self._hello_id = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._heard_at = 0.0
        self._pinged_at = 0.0
        self._retry_at = 0.0
        self._pause = FIRST_PAUSE
        self._thread = threading.Thread(target=self._run, name="baft-io", daemon=True)

    # ------------------------------------------------------------ for the training thread

    def start(self) -> None:
        """Start the thread. It connects by itself."""
        self._thread.start()

    def post(self, message: Message) -> None:
        """Send a message that has no answer; kept and sent again until `acknowledge` drops it."""
        self._inbox.append(message)
        self._wake()

    def tell(self, make: Callable[[], Message]) -> None:
        """Send a message that is of use only now: where the daemon is away it is dropped, and it is never sent again.

        It goes with whatever wakes the thread next (the next `post`, a heartbeat): the thread is not woken for it, to
        want the GIL while the training thread computes. `make` is called in the thread, once, if it is sent."""
        self._inbox.append(_Told(make))
        if len(self._inbox) > MAX_TOLD:
            self._wake()

    def request(
        self,
        message: Message,
        timeout: float,
        *,
        on_progress: Callable[[Progress | ResumeProgress], None] | None = None,
    ) -> Reply:
        """Send `message` and wait for its answer, over reconnects too.

        Args:
            message: sent again after a reconnect: the daemon takes requests as idempotent.
            timeout: seconds without any part of the answer; each `Progress` starts them anew.
            on_progress: called in the I/O thread.

        Raises:
            Unreachable: no answer in time, or this link is closed.
            BaftError: what the daemon answered.
        """
        request = _Request(message, on_progress)
        self._inbox.append(request)
        self._wake()
        heard, deadline = 0, self._clock() + timeout
        while not request.done.wait(min(0.5, max(0.0, deadline - self._clock()))):
            if request.heard != heard:
                heard, deadline = request.heard, self._clock() + timeout
            if self._clock() >= deadline or self.state is LinkState.CLOSED:
                request.error = self.unreachable(f"no answer to {_kind(message)} within {timeout:g} s")
                request.done.set()  # the thread drops it when it sees it next
        if request.error is not None:
            raise request.error
        assert request.reply is not None
        return request.reply

    def unreachable(self, what: str) -> Unreachable:
        """The error for a daemon that does not answer; names the socket."""
        why = "" if self.state is LinkState.UP else f" ({self.last_error})"
        return Unreachable(
            f"{what} from the daemon at {self.path}{why}.",
            hint="Start it with `baftd start`, or name its directory with BAFTD_RUN_DIR.",
        )

    def wait_up(self, timeout: float) -> bool:
        """Wait for a daemon; False when there is none within `timeout` seconds."""
        return self._up.wait(timeout)

    def reconnect(self) -> None:
        """Give the connection up and greet anew."""
        self._drop_link = True
        self._wake()

    def close(self, timeout: float = 2.0) -> None:
        """End the thread and close the socket; open requests fail. Safe to call twice."""
        self._stop = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if not self._thread.is_alive() and self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def abandon_in_child(self) -> None:
        """In a forked child: close what was inherited and never speak again. Takes no lock."""
        self.state = LinkState.CLOSED
        self._stop = True
        if self._wake_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._wake_fd)
            self._wake_fd = -1
        close_inherited_sockets(self.path)

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            _write_holding_gil(self._wake_fd, _ONE, 8)

    # ------------------------------------------------------------ for the handler, in the I/O thread

    def acknowledge(self, settled: Callable[[Message], bool]) -> None:
        """Drop owed messages for which `settled` says so."""
        self._owed = deque(message for message in self._owed if not settled(message))

    def ask(self, message: Message, then: Callable[[Reply | BaftError], None]) -> None:
        """Send a request from the I/O thread; `then` gets the answer there."""
        request = _Call(message, then)
        self._inbox.append(request)
        self._wake()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        # Python runs signal handlers in the main thread; the kernel must not wake this one for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # On busy cores a thread that wakes up would push the training thread off its core, to wait for the GIL there.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        self._poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stop:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on: a new connection is tried
                self._disconnect(f"{type(error).__name__}: {error}")
                self._handler.failed(error)
        self._drain_inbox()
        self._disconnect("closed", quietly=True, linger=0.2)
        self.state = LinkState.CLOSED
        if self._context is not None:
            self._context.term()
            self._context = None
        for request in [*self._requests.values(), *self._take_requests()]:
            request.error = self.unreachable(f"no answer to {_kind(request.message)}: the session is closed,")
            request.done.set()

    def _take_requests(self) -> list[_Request]:
        found = [item for item in self._inbox if isinstance(item, _Request)]
        self._inbox.clear()
        return found

    def _turn(self) -> None:
        if self._drop_link:
            self._drop_link = False
            self._disconnect("the daemon asked for a new hello")
        if self._socket is None and self._clock() >= self._retry_at:
            self._connect()
        events = dict(self._poller.poll(self._poll_ms()))
        if self._wake_fd in events:
            _read_holding_gil(self._wake_fd, ctypes.create_string_buffer(8), 8)
        self._drain_inbox()
        if self._monitor is not None and self._monitor in events:
            self._watch()
        if self._socket is not None and self._socket in events:
            self._receive()
        self._heartbeat()

    def _poll_ms(self) -> int:
        if self._socket is None:
            due = self._retry_at
        else:
            due = min(self._pinged_at + self._ping_every, self._heard_at + self._silence)
        return max(0, min(1000, int((due - self._clock()) * 1000) + 1))

    def _drain_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _Request):
                item.message.id = self._next_id
                self._next_id += 1
                self._requests[item.message.id] = item
                if self.state is LinkState.UP:
                    self._send(item.message)
            elif isinstance(item, _Told):
                if self.state is LinkState.UP:
                    self._tell_now(item)
            else:
                self._owe(item)
                if self.state is LinkState.UP:
                    self._send(item)

    def _tell_now(self, told: _Told) -> None:
        try:
            message = told.make()
        except Exception as error:  # noqa: BLE001 - what has no answer and is not needed must not cost the connection
            self._handler.failed(error)
        else:
            self._send(message, or_drop=True)

    def _owe(self, message: Message) -> None:
        self._owed.append(message)
        if len(self._owed) > MAX_OWED:
            # A long outage makes a skip a step; they must not push out a seal, whose step may yet be committed.
            oldest = next((owed for owed in self._owed if isinstance(owed, Skip)), self._owed[0])
            self._owed.remove(oldest)

    def _connect(self) -> None:
        if not self.path.exists():
            self._retry_later(f"there is no socket {self.path}")
            return
        if self._context is None:
            self._context = zmq.Context()
        link = self._context.socket(zmq.DEALER)
        link.linger = 0
        # A new connection is a new hello: ZeroMQ must not make one by itself. (Never, -1, would also drop what the
        # daemon said just before it hung up.)
        link.reconnect_ivl = 3_600_000
        link.sndhwm = 1024
        link.rcvhwm = 1024
        link.maxmsgsize = 2 * codec.MAX_BYTES
        self._monitor = link.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED)
        link.connect(f"ipc://{self.path}")
        self._socket = link
        self._poller.register(link, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._heard_at = self._pinged_at = self._clock()
        self.state = LinkState.GREETING
        self.last_error = "it does not answer"
        hello = self._handler.make_hello()
        hello.id = self._hello_id = self._next_id
        self._next_id += 1
        self._send(hello)

    def _disconnect(self, why: str, *, quietly: bool = False, linger: float = 0.0) -> None:
        was_up = self.state is LinkState.UP
        self._up.clear()
        if self._socket is not None:
            self._poller.unregister(self._socket)
            if self._monitor is not None:
                self._poller.unregister(self._monitor)
            self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(0)
            self._socket.close(linger=int(linger * 1000))
            self._socket = self._monitor = None
        self._retry_later(why)
        if was_up and not quietly:
            self._handler.went_away(why)

    def _retry_later(self, why: str) -> None:
        self.state = LinkState.AWAY
        self.last_error = why
        self._retry_at = self._clock() + self._pause * (0.75 + 0.5 * self._jitter())
        self._pause = min(LAST_PAUSE, 2 * self._pause)

    def _watch(self) -> None:
        assert self._monitor is not None
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] != zmq.EVENT_MONITOR_STOPPED:
                # What the daemon said before it hung up is still to be read.
                self._receive()
                self._disconnect("nobody listens on the socket" if self.state is not LinkState.UP else "it hung up")

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = self._clock()
            try:
                reply = codec.decode_reply(frames)
            except ProtocolError as error:
                self._disconnect(f"it speaks another language: {error}", quietly=False)
                self._handler.turned_away(error)
                return
            self._dispatch(reply)

    def _dispatch(self, reply: Reply) -> None:
        if self.state is LinkState.GREETING:
            self._greeted(reply)
            return
        if isinstance(reply, Ping):
            self._send(Pong(id=reply.id))
            return
        request = self._requests.get(reply.id) if reply.id else None
        if request is not None:
            self._answer(request, reply)
        elif isinstance(reply, ErrorReply) and reply.field == "hello":
            self._disconnect("it forgot this process")
        elif not isinstance(reply, Pong):
            self._handler.received(reply)

    def _greeted(self, reply: Reply) -> None:
        if reply.id != self._hello_id and not (isinstance(reply, ErrorReply) and reply.id == 0):
            return
        if isinstance(reply, Welcome):
            self.state = LinkState.UP
            self._pause = FIRST_PAUSE
            self._handler.welcomed(reply)
            for message in tuple(self._owed):
                self._send(message)
            for request in tuple(self._requests.values()):
                if request.done.is_set():
                    del self._requests[request.message.id]
                else:
                    self._send(request.message)
            self._up.set()
        elif isinstance(reply, ErrorReply):
            error = codec.reply_error(reply)
            self._disconnect(error.message)
            self._handler.turned_away(error)

    def _answer(self, request: _Request, reply: Reply) -> None:
        request.heard += 1
        if isinstance(reply, Progress | ResumeProgress):
            if request.on_progress is not None:
                request.on_progress(reply)
            return
        del self._requests[reply.id]
        if isinstance(reply, ErrorReply):
            request.error = codec.reply_error(reply)
        else:
            request.reply = reply
        request.done.set()
        if isinstance(request, _Call):
            request.then(request.error if request.error is not None else reply)

    def _heartbeat(self) -> None:
        if self._socket is None:
            return
        now = self._clock()
        if now - self._heard_at >= self._silence:
            self._disconnect(f"silent for {self._silence:g} s")
        elif now - self._pinged_at >= self._ping_every:
            self._pinged_at = now
            if self.state is LinkState.UP:
                self._send(Ping())

    def _send(self, message: Message, *, or_drop: bool = False) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            if or_drop:
                self.dropped += 1
            else:
                self._disconnect("it reads nothing")
        except BaftError as error:
            self._handler.failed(error)


class _Call(_Request):
    """A request made by the I/O thread itself."""

    __slots__ = ("then",)

    def __init__(self, message: Message, then: Callable[[Reply | BaftError], None]) -> None:
        super().__init__(message, None)
        self.then = then


def _kind(message: Message) -> str:
    return str(type(message).__struct_config__.tag)


def close_inherited_sockets(path: Path) -> None:
    """Close every Unix socket of this process that is connected to `path`.

    For a forked child: ZeroMQ's connection has no name there, and as long as the child held it the daemon would
    take a dead trainer for a live one.
    """
    wanted = os.fsencode(path)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            probe = socket.socket(fileno=fd)
            try:
                peer = probe.getpeername() if probe.family == socket.AF_UNIX else ""
            finally:
                probe.detach()
            if peer and os.fsencode(peer) == wanted:
                os.close(fd)
