"""A rank that speaks to a daemon in single messages, from within the test, which can stop at any moment of a start.

It lives in the test's process, so it does not die by itself: `leave` is what a process says that ends unfinished.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import zmq

from baft_client.declared import wire_entry
from baftd.checkpoint.identity import Token
from baftd.checkpoint.image import plan_image
from baftd.checkpoint.shard import TensorEntry, digest_chunks, root_digest
from baftd.memory.header import SlotHeader, SlotState
from baftd.memory.processes import start_time
from baftd.memory.slot_file import SlotFile
from baftd.wire import codec
from baftd.wire.messages import (
    Ack,
    Begin,
    Committed,
    Declare,
    Declared,
    ErrorReply,
    Finish,
    Grant,
    Hello,
    Leave,
    Message,
    Restored,
    Resume,
    ResumePlan,
    Saved,
    Seal,
    SlotImage,
    Welcome,
    WireToken,
)
from tests.support.daemon import RunDirs

T = TypeVar("T", bound=Message)

__all__ = ["WireRank", "content_of", "image_bytes", "start_of", "tensors"]

JOB = "gpt"


def tensors(rank: int, elements: int = 5000) -> list[TensorEntry]:
    """One tensor of all ranks, cut by rows, and one of the rank alone."""
    rows = (rank * elements, (rank + 1) * elements)
    return [
        TensorEntry("w", "U8", (elements,), elements, "stable", (elements * 64,), (rows,)),
        TensorEntry(f"own.{rank}", "U8", (100,), 100),
    ]


def content_of(step: int, rank: int, length: int) -> bytes:
    """What a rank's image holds behind its header at a step."""
    return bytes((step * 31 + rank * 7 + at) % 251 for at in range(257)) * (length // 257 + 1)


class WireRank:
    """One rank of one start. Close it."""

    job = JOB

    def __init__(self, dirs: RunDirs, rank: int, world: int, incarnation: str) -> None:
        self.rank, self.world, self.incarnation = rank, world, incarnation
        self.token: WireToken | None = None
        self.plan: ResumePlan | None = None
        self.grants: list[Grant] = []
        self.committed: list[int] = []
        self.asked_to_declare = 0
        self.declared: Declared | None = None
        self.entries: list[TensorEntry] = []
        self._id = 0
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{dirs.socket}")

    def ask(self, message: Message, kind: type[T], timeout: float = 20.0) -> T:
        """Send, and return the answer; an error is raised. What else comes is kept."""
        self._id += 1
        message.id = self._id
        self._socket.send(codec.encode(message))
        return self.expect(kind, self._id, timeout)

    def say(self, message: Message) -> None:
        """Send what wants no answer."""
        self._socket.send(codec.encode(message))

    def expect(self, kind: type[T], id: int, timeout: float = 20.0) -> T:
        """Wait for the answer to a request."""
        deadline = time.monotonic() + timeout
        while True:
            reply = self._next(deadline, f"no {kind.__name__}")
            if isinstance(reply, ErrorReply) and (reply.id == id or (not reply.id and reply.field != "declare")):
                raise codec.reply_error(reply)
            if isinstance(reply, kind) and reply.id == id:
                return reply

    def _next(self, deadline: float, what: str) -> Message:
        if not self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            raise AssertionError(f"rank {self.rank}: {what} in time")
        reply: Message = codec.decode_reply(self._socket.recv_multipart())
        if isinstance(reply, Grant):
            self.grants.append(reply)
        elif isinstance(reply, Committed) and reply.tier == "memory":
            self.committed.append(reply.step)
        elif isinstance(reply, ErrorReply) and not reply.id and reply.field == "declare":
            self.asked_to_declare += 1
        return reply

    # ------------------------------------------------------------ a start

    def hello(self) -> Welcome:
        """Say who this is."""
        return self.ask(
            Hello(
                job=self.job, rank=self.rank, world=self.world, incarnation=self.incarnation, pid=os.getpid(),
                pid_start=start_time(os.getpid()) or 0, token=self.token,
            ),
            Welcome,
        )  # fmt: skip

    def resume(self, **how: bool) -> ResumePlan:
        """Take part in the rendezvous; `hello` first."""
        self.plan = self.ask(Resume(job=self.job, rank=self.rank, **how), ResumePlan)
        self.token = self.plan.token
        return self.plan

    def restored(self, ok: bool = True, reason: str = "") -> None:
        """Say that it has loaded; answered when all have."""
        assert self.token is not None
        assert self.plan is not None
        self.ask(Restored(token=self.token, rank=self.rank, step=self.plan.step, ok=ok, reason=reason), Ack)

    def declare(
        self,
        entries: Sequence[TensorEntry],
        *,
        stages: Sequence[int] = (),
        coordinates: Mapping[str, int] | None = None,
    ) -> Declared:
        """Lay out the shard."""
        assert self.token is not None
        self.entries = list(entries)
        message = Declare(
            token=self.token,
            rank=self.rank,
            entries=[wire_entry(entry) for entry in entries],
            small_bytes=100,
            stages=list(stages),
            coordinates=dict(coordinates or {}),
        )
        self.declared = self.ask(message, Declared)
        self.grants += self.declared.grants
        return self.declared

    def snapshot(self, step: int, timeout: float = 10.0) -> None:
        """Fill the next granted slot with the state of a step and seal it."""
        assert self.token is not None
        assert self.declared is not None
        deadline = time.monotonic() + timeout
        while not self.grants:
            self._next(deadline, "no grant")
        grant = self.grants.pop(0)
        room = self.declared.small_room
        layout = plan_image(self.entries, room, job=self.job, rank=self.rank, world=self.world)
        small = b"small state of rank %d" % self.rank
        token = Token(self.token.epoch, self.token.incarnation)
        head = layout.render_header(token, step=step, updates=step, small_length=len(small))
        length = layout.image_length(len(small))
        body = content_of(step, self.rank, length)[: length - len(head) - len(small)]
        image = head + body + small
        chunks = layout.chunks(len(small))
        digests = digest_chunks(image, chunks)
        header = SlotHeader(
            SlotState.FILLING, grant.generation, token, self.job, self.rank, self.world, step, step, length, len(small),
            layout.tree_digest, writer_pid=os.getpid(), writer_start=start_time(os.getpid()) or 0,
        )  # fmt: skip
        self.say(Begin(token=self.token, rank=self.rank, step=step, slot=grant.slot, generation=grant.generation))
        path = next(place.path for place in self.declared.slots if place.slot == grant.slot)
        with SlotFile.open_rw(path) as slot:
            slot.write_header(header)
            slot.pwrite(image, 0)
            slot.write_header(header.with_state(SlotState.SEALED, root_digest=root_digest(digests, length)))
        self.say(
            Seal(
                token=self.token, rank=self.rank, step=step, updates=step, slot=grant.slot,
                generation=grant.generation, image_length=length, small_length=len(small), digests=digests,
            )
        )  # fmt: skip

    def wait_committed(self, step: int, timeout: float = 10.0) -> None:
        """Until the daemon says that all ranks' snapshots of a step are verified."""
        deadline = time.monotonic() + timeout
        while step not in self.committed:
            self._next(deadline, f"step {step} not committed")

    def wait_asked(self, timeout: float = 10.0) -> None:
        """Until the daemon has asked it to lay out anew."""
        deadline = time.monotonic() + timeout
        while not self.asked_to_declare:
            self._next(deadline, "not asked to declare")
        self.asked_to_declare = 0

    def finish(self, step: int) -> Saved:
        """Say that the rank is done; answered when all are."""
        assert self.token is not None
        return self.ask(Finish(token=self.token, rank=self.rank, step=step), Saved)

    def leave(self) -> None:
        """End without finishing."""
        self.ask(Leave(token=self.token, rank=self.rank, reason="the test says so"), Ack)

    def close(self) -> None:
        """Close the connection; says nothing."""
        self._socket.close(0)
        self._context.term()


@contextmanager
def start_of(dirs: RunDirs, world: int, incarnation: str, **how: bool) -> Iterator[list[WireRank]]:
    """All ranks of a start, with their restore plans: none has loaded yet. At the end connections are closed."""
    ranks = [WireRank(dirs, rank, world, incarnation) for rank in range(world)]
    try:
        for rank in ranks:
            rank.hello()
        together(ranks, lambda rank: rank.resume(**how))
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def together(ranks: Sequence[WireRank], what: object) -> list[object]:
    """Call `what(rank)` for all ranks at once; their answers come when all have asked."""
    assert callable(what)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(what, ranks))


def train(ranks: Sequence[WireRank], first: int, last: int) -> None:
    """Loaded, declared, and steps `first` to `last` committed, one after the other."""
    if ranks[0].declared is None:
        together(ranks, lambda rank: rank.restored())
        together(ranks, lambda rank: rank.declare(tensors(rank.rank)))
    for step in range(first, last + 1):
        for rank in ranks:
            rank.snapshot(step)
        for rank in ranks:
            rank.wait_committed(step)


def image_bytes(image: SlotImage) -> bytes:
    """The image in a slot, without the slot's header."""
    with open(image.path, "rb") as file:
        file.seek(image.offset)
        return file.read(image.length)
