"""The daemon's end of the control channel: a ROUTER socket over ipc, behind a lock file.

Nothing a peer sends ends the loop: what is not a well-formed message of an allowed user is answered with an
`ErrorReply` that names the field, and counted. Queues are bounded, sending never blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio

from baftd.errors import BaftError, ProtocolError, Unreachable, UsageError
from baftd.telemetry import get_logger
from baftd.wire import codec, messages
from baftd.wire.credentials import check_socket_path, parse_peer_address, prepare_run_dir
from baftd.wire.lock import DaemonLock
from baftd.wire.messages import Reply, Request

__all__ = ["Incoming", "Peer", "Server", "WireCounters"]

_RECEIVE_QUEUE = 256
_SEND_QUEUE = 1024
"""Messages a peer may have waiting; a peer that reads nothing loses what comes after."""

_NEEDS_HELLO = (
    messages.Resume,
    messages.Restored,
    messages.Declare,
    messages.Begin,
    messages.Seal,
    messages.Skip,
    messages.Save,
    messages.Finish,
    messages.Leave,
    messages.Timings,
)


@dataclass(frozen=True)
class Peer:
    """Who speaks, as the kernel says: one connection of one process."""

    identity: bytes
    """Chosen by the ROUTER for this connection; a reconnect is another peer."""
    uid: int
    gid: int
    pid: int
    """0 for a process in a PID namespace that the daemon cannot see."""


@dataclass(frozen=True)
class Incoming:
    """One good message."""

    peer: Peer
    message: Request


@dataclass
class WireCounters:
    """What passed. `refused` counts by the field at fault: size, frames, depth, protocol, type, uid, hello, ..."""

    received: int = 0
    sent: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    """Answers that could not be sent: the peer is gone or reads nothing."""


class _Known:
    """What is remembered of a connection."""

    __slots__ = ("greeted", "heard", "peer")

    def __init__(self, peer: Peer, heard: float) -> None:
        self.peer = peer
        self.heard = heard
        self.greeted = False


class Server:
    """Receives requests and sends replies; all methods belong to the thread of the running asyncio loop."""

    def __init__(
        self,
        socket_path: Path,
        *,
        allow_uids: Collection[int] = (),
        max_peers: int = 8192,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`allow_uids`: users that may speak beside the daemon's own and root."""
        self.path = check_socket_path(socket_path)
        self.counters = WireCounters()
        self._allowed = frozenset(allow_uids) | {os.geteuid(), 0}
        self._max_peers = max_peers
        self._clock = clock
        self._known: dict[bytes, _Known] = {}
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._lock: DaemonLock | None = None
        self._log = get_logger("wire")

    def bind(self) -> None:
        """Take the lock, then the socket. A dead daemon's leftovers are taken over.

        Raises:
            TryAgain: a live daemon holds the lock (its PID is named).
            UsageError: the directory is not ours alone, or something that is no socket is in the way.
        """
        if self._socket is not None:
            return
        prepare_run_dir(self.path.parent)
        lock = DaemonLock(self.path.with_suffix(".lock"))
        try:
            self._bind_socket()
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def _bind_socket(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                raise UsageError(f"{self.path} is in the way: it is no socket.", hint="Remove it, or set --run-dir.")
            self.path.unlink()
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.router_mandatory = True
        router.rcvhwm = _RECEIVE_QUEUE
        router.sndhwm = _SEND_QUEUE
        # Above our own cap, so that a message somewhat too large is answered; beyond this ZeroMQ hangs up by itself.
        router.maxmsgsize = 2 * codec.MAX_BYTES
        before = os.umask(0o177)
        try:
            router.bind(f"ipc://{self.path}")
        except zmq.ZMQError as error:
            router.close(0)
            context.term()
            raise UsageError(
                f"the socket {self.path} cannot be bound: {error.strerror}.",
                hint="Set --run-dir or BAFTD_RUN_DIR to a directory on a local file system.",
            ) from error
        finally:
            os.umask(before)
        self._context, self._socket = context, router

    async def recv(self) -> Incoming:
        """The next good message. `Ping` is answered here; bad messages are answered and counted here.

        Raises:
            Unreachable: the server is closed.
        """
        while True:
            if self._socket is None:
                raise Unreachable(f"the server at {self.path} is closed.")
            frames = await self._socket.recv_multipart(copy=False)
            incoming = self._accept(frames)
            if incoming is not None:
                return incoming

    def _accept(self, frames: list[zmq.Frame]) -> Incoming | None:
        identity, parts = frames[0].bytes, [frame.bytes for frame in frames[1 : 2 + codec.MAX_FRAMES]]
        if len(frames) - 1 > codec.MAX_FRAMES:
            parts += [b""] * (len(frames) - 1 - len(parts))
        credentials = parse_peer_address(str(frames[-1].get("Peer-Address")))
        if credentials is None:
            self._refuse(identity, "credentials", "the kernel does not say who sent this.", 0)
            return None
        if credentials.uid not in self._allowed:
            text = f"user {credentials.uid} may not speak to the daemon of user {os.geteuid()}."
            self._refuse(identity, "uid", text, codec.message_id(parts))
            return None
        try:
            message = codec.decode_request(parts)
        except ProtocolError as error:
            self._refuse(identity, error.field, error.message, codec.message_id(parts), error.hint)
            return None
        known = self._remember(identity, credentials.uid, credentials.gid, credentials.pid)
        if isinstance(message, messages.Hello):
            known.greeted = True
        elif isinstance(message, _NEEDS_HELLO) and not known.greeted:
            kind = str(type(message).__struct_config__.tag)
            self._refuse(identity, "hello", f"{kind} came before hello on this connection.", message.id)
            return None
        self.counters.received += 1
        if isinstance(message, messages.Ping):
            self.send(known.peer, messages.Pong(id=message.id))
            return None
        if isinstance(message, messages.Pong):
            return None
        return Incoming(known.peer, message)

    def _remember(self, identity: bytes, uid: int, gid: int, pid: int) -> _Known:
        now = self._clock()
        known = self._known.get(identity)
        if known is None or (known.peer.uid, known.peer.pid) != (uid, pid):
            if len(self._known) >= self._max_peers:
                quietest = min(self._known.values(), key=lambda entry: (entry.greeted, entry.heard))
                del self._known[quietest.peer.identity]
            known = self._known[identity] = _Known(Peer(identity, uid, gid, pid), now)
        known.heard = now
        return known

    def _refuse(self, identity: bytes, name: str, text: str, id: int, hint: str = "") -> None:
        kind = name.split(".", 1)[0].split("[", 1)[0] or "message"
        times = self.counters.refused[kind] = self.counters.refused.get(kind, 0) + 1
        told = self._send(identity, codec.error_reply(ProtocolError(text, field=name, hint=hint), id=id))
        if not told and name == "hello":
            self.counters.refused[kind] = times - 1  # what a process that died had still sent: nobody's mistake
            return
        if times in (1, 10, 100) or times % 1000 == 0:
            self._log.warning("refused", field=name, why=text, times=times)

    def send(self, peer: Peer, message: Reply) -> bool:
        """Queue a reply. Never blocks; False (and counted) when the peer is gone or does not read."""
        return self._send(peer.identity, message)

    def _send(self, identity: bytes, message: Reply) -> bool:
        if self._socket is None:
            return False
        try:
            data = codec.encode(message)
        except BaftError as error:
            data = codec.encode(codec.error_reply(error, id=message.id))
        future: asyncio.Future[object] = asyncio.ensure_future(
            self._socket.send_multipart([identity, data], flags=zmq.NOBLOCK)
        )
        if not future.done():
            # ZeroMQ queued nothing: pyzmq waits for room, we do not.
            future.cancel()
            self.counters.dropped += 1
            return False
        if future.exception() is not None:
            self._known.pop(identity, None)
            self.counters.dropped += 1
            return False
        self.counters.sent += 1
        return True

    def last_heard(self, peer: Peer) -> float:
        """When the peer spoke last (by the server's clock); -inf for a peer no longer known."""
        known = self._known.get(peer.identity)
        return known.heard if known is not None and known.peer == peer else float("-inf")

    def peers(self) -> list[Peer]:
        """Connections that have said hello and were not forgotten."""
        return [known.peer for known in self._known.values() if known.greeted]

    def forget(self, peer: Peer) -> None:
        """The peer's process is dead, or it was turned away: what it says next must begin with hello."""
        self._known.pop(peer.identity, None)

    async def close(self, linger: float = 0.5) -> None:
        """Close and unlink the socket, then release the lock. Replies still queued get `linger` seconds."""
        router, context, lock = self._socket, self._context, self._lock
        self._socket = self._context = self._lock = None
        self._known.clear()
        try:
            if router is not None and context is not None:
                with contextlib.suppress(FileNotFoundError):
                    self.path.unlink()
                router.close(linger=int(linger * 1000))
                await asyncio.get_running_loop().run_in_executor(None, context.term)
        finally:
            if lock is not None:
                lock.release()
