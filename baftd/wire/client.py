"""A blocking connection to the daemon, for commands: one request at a time, every wait with a deadline."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import zmq
from zmq.utils.monitor import recv_monitor_message

from baftd.errors import Unreachable
from baftd.wire import codec
from baftd.wire.credentials import check_socket_path
from baftd.wire.messages import ErrorReply, Message, Progress, Reply, ResumeProgress

__all__ = ["Connection"]

_MAX_SLICE = 0.25
"""Longest single poll, so that a Ctrl-C is never kept waiting."""


class Connection:
    """One DEALER socket and its own context; belongs to one thread of one process (not to a forked child)."""

    def __init__(
        self,
        socket_path: Path,
        *,
        connect_timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects lazily: a daemon that is away shows at the first request.

        Args:
            socket_path: the daemon's socket.
            connect_timeout: seconds within which the daemon must take the first request.
            clock: monotonic seconds.
        """
        self.path = check_socket_path(socket_path)
        self._clock = clock
        self._connect_timeout = connect_timeout
        self._next_id = 1
        self._connected = False
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = 16
        self._socket.rcvhwm = 1024
        self._socket.maxmsgsize = 2 * codec.MAX_BYTES
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )

    def request(
        self,
        message: Message,
        timeout: float = 30.0,
        *,
        on_progress: Callable[[Progress | ResumeProgress], None] | None = None,
    ) -> Reply:
        """Send `message` and return its answer.

        Args:
            message: gets an id of this connection.
            timeout: seconds without any sign of life after which the daemon is taken for dead; `Progress` starts
                the time anew.
            on_progress: called for each part of a long answer.

        Raises:
            Unreachable: no daemon, or no answer in time.
            BaftError: the error that the daemon answered with, as its own class.
            ProtocolError: the answer is no message of this protocol.
        """
        message.id = self._next_id
        self._next_id += 1
        self._send(codec.encode(message))
        deadline = self._clock() + timeout
        while True:
            reply = codec.decode_reply(self._receive(deadline, timeout))
            if reply.id not in (message.id, 0) or (reply.id == 0 and not isinstance(reply, ErrorReply)):
                continue  # of an earlier request that was given up
            if isinstance(reply, Progress | ResumeProgress):
                deadline = self._clock() + timeout
                if on_progress is not None:
                    on_progress(reply)
                continue
            if isinstance(reply, ErrorReply):
                raise codec.reply_error(reply)
            return reply

    def _send(self, data: bytes) -> None:
        if not self.path.exists():
            raise self._absent("there is no such socket")
        if not self._connected:
            self._probe()
            self._socket.connect(f"ipc://{self.path}")
            deadline = self._clock() + self._connect_timeout
            while not self._connected:
                if not self._wait(self._monitor, deadline):
                    raise self._absent(f"nobody took the connection within {self._connect_timeout:g} s")
                self._connected = not self._hung_up()
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again as error:
            raise self._absent("it reads nothing") from error

    def _receive(self, deadline: float, timeout: float) -> list[bytes]:
        gone = False
        while True:
            # What the daemon said before it hung up counts: look once more after the news.
            if self._socket.poll(0) or (not gone and self._wait(self._socket, deadline, self._monitor)):
                if self._socket.poll(0):
                    return self._socket.recv_multipart()
                gone = self._hung_up()
            elif gone:
                raise Unreachable(
                    f"the daemon at {self.path} took the request and hung up before it answered.",
                    hint="Look into its log with `baftd doctor`, and start it again with `baftd start`.",
                )
            else:
                raise Unreachable(
                    f"the daemon at {self.path} took the request but did not answer within {timeout:g} s.",
                    hint="Look into its log with `baftd doctor`; start it anew if it hangs.",
                )

    def _hung_up(self) -> bool:
        """Read the monitor's events: whether the last of them is the end of the connection."""
        gone = False
        while self._monitor.poll(0):
            gone = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
        return gone

    def _probe(self) -> None:
        """ZeroMQ keeps on trying a socket that a dead daemon left behind; the kernel knows at once."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(os.fspath(self.path))
            except BlockingIOError:
                return  # its queue is full: somebody is there
            except ConnectionRefusedError as error:
                raise self._absent("nobody listens, a daemon that is gone left the socket") from error
            except OSError as error:
                raise self._absent(error.strerror or str(error)) from error

    def _absent(self, why: str) -> Unreachable:
        return Unreachable(
            f"no daemon answers at {self.path}: {why}.",
            hint="Start it with `baftd start`, or name its directory with --run-dir or BAFTD_RUN_DIR.",
        )

    def _wait(self, one: zmq.Socket[bytes], deadline: float, other: zmq.Socket[bytes] | None = None) -> bool:
        """Wait until one of the sockets can be read; False at the deadline."""
        poller = zmq.Poller()
        poller.register(one, zmq.POLLIN)
        if other is not None:
            poller.register(other, zmq.POLLIN)
        while True:
            left = deadline - self._clock()
            if poller.poll(int(max(0.0, min(left, _MAX_SLICE)) * 1000)):
                return True
            if left <= 0:
                return False

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
            self._context.term()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
