"""A daemon of a few lines for the client's tests: it speaks the protocol, commits what it is sent, and can be told to
misbehave. No coordinator, no journal, no storage: those are the real daemon's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from baftd.checkpoint.image import ImageLayout, plan_image
from baftd.checkpoint.shard import TensorEntry, root_digest, small_room_for
from baftd.errors import BaftError
from baftd.memory.control import ControlPage
from baftd.memory.slot_file import IMAGE_OFFSET, SlotFile
from baftd.wire.codec import error_reply
from baftd.wire.messages import (
    Ack,
    Begin,
    Cadence,
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
    Save,
    Saved,
    Seal,
    Skip,
    SlotImage,
    SlotPlace,
    Welcome,
    WireToken,
)
from baftd.wire.server import Incoming, Peer, Server
from tests.support.engines import soon

MessageT = TypeVar("MessageT", bound=Message)


class Shard:
    """What the daemon keeps of one rank."""

    def __init__(self) -> None:
        self.layout: ImageLayout | None = None
        self.files: list[SlotFile] = []
        self.generation = 0
        self.free: list[int] = []
        self.granted: dict[int, int] = {}
        self.newest: tuple[int, Seal] | None = None


class ScriptedDaemon:
    """Runs in a thread of the test. `received` holds every message but pings, in order."""

    def __init__(self, socket: Path, shm: Path, *, slots: int = 3, every: int = 1) -> None:
        """`slots` for each rank; `every`: the cadence."""
        self.socket, self.shm, self.slots, self.every = socket, shm, slots, every
        self.received: list[Message] = []
        self.changed = threading.Condition()
        self.token: WireToken | None = None
        self.ranks: dict[int, Shard] = {}
        self.peers: dict[int, Peer] = {}
        self.grant = True
        self.commit = True
        self.refuse: dict[type[Message], BaftError] = {}
        """Message type -> error answered instead."""
        self.ignore: set[type[Message]] = set()
        """Message types that get no answer."""
        self.knows_layout = True
        self.fenced = False
        self.plan: Callable[[Resume], ResumePlan] | None = None
        self.lock_path = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self.server: Server | None = None

    # ------------------------------------------------------------ for the test

    def start(self) -> ScriptedDaemon:
        """Bind and serve."""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), name="scripted-daemon")
        self._thread.start()
        assert ready.wait(10)
        return self

    def stop(self) -> None:
        """End as a daemon that is killed would: nothing is said, slots and control pages stay."""
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        if self._thread is not None:
            self._thread.join(10)
            assert not self._thread.is_alive()
        self._loop = self._task = self._thread = None

    def close(self) -> None:
        """Stop and remove the slots."""
        self.stop()
        for shard in self.ranks.values():
            for file in shard.files:
                file.close()
                Path(file.path).unlink(missing_ok=True)
        for path in self.shm.glob("rank-*"):
            path.unlink()

    def __enter__(self) -> ScriptedDaemon:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_for(self, kind: type[MessageT], *, count: int = 1, timeout: float = 10.0) -> list[MessageT]:
        """All messages of a type, once there are `count`."""
        deadline = time.monotonic() + timeout
        with self.changed:
            while True:
                found = [message for message in self.received if isinstance(message, kind)]
                if len(found) >= count:
                    return found
                assert self.changed.wait(max(0.0, deadline - time.monotonic())), (
                    f"{len(found)} of {count} {kind.__name__} came: {self.received}"
                )

    def push(self, message: Message, rank: int = 0) -> None:
        """Send something unasked."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: self.server.send(self.peers[rank], message))  # type: ignore[union-attr,arg-type]

    # ------------------------------------------------------------ the loop

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self.server = Server(self.socket)
        self.server.bind()
        ready.set()
        try:
            while True:
                incoming = await self.server.recv()
                with self.changed:
                    self.received.append(incoming.message)
                    replies = self._answer(incoming)
                    self.changed.notify_all()
                for reply in replies:
                    self.server.send(incoming.peer, reply)  # type: ignore[arg-type]
        except asyncio.CancelledError:
            pass
        finally:
            await self.server.close()

    def _answer(self, incoming: Incoming) -> list[Message]:
        message = incoming.message
        if type(message) in self.ignore:
            return []
        if type(message) in self.refuse:
            return [error_reply(self.refuse[type(message)], id=message.id)]
        if isinstance(message, Hello):
            self.peers[message.rank] = incoming.peer
            return self._welcome(message)
        if isinstance(message, Resume):
            if self.plan is not None:
                plan = self.plan(message)
                plan.id = message.id
                self.token = plan.token
                return [plan]
            hello = next(m for m in self.received if isinstance(m, Hello))
            self.token = WireToken(1, hello.incarnation)
            return [ResumePlan(id=message.id, token=self.token, step=0)]
        if isinstance(message, Restored | Leave):
            return [Ack(id=message.id)]
        if isinstance(message, Declare):
            return self._declare(message)
        if isinstance(message, Save | Finish):
            return [Saved(id=message.id, step=message.step, tier="memory", note="no durable tier")]
        if isinstance(message, Begin):
            return self._grants(message.rank)
        if isinstance(message, Seal):
            return self._seal(message)
        if isinstance(message, Skip):
            shard = self.ranks.get(message.rank)
            if shard is not None and message.slot is not None and shard.granted.pop(message.slot, None) is not None:
                shard.free.append(message.slot)
            return self._grants(message.rank)
        return []

    def _welcome(self, hello: Hello) -> list[Message]:
        replies: list[Message] = [
            Welcome(
                id=hello.id,
                node="test",
                node_incarnation="0" * 32,
                daemon_version="test",
                fenced=self.fenced,
                lock_path=self.lock_path,
            )
        ]
        if hello.token is not None and hello.rank in self.ranks:
            if self.knows_layout:
                replies += [
                    Grant(token=hello.token, slot=slot, generation=generation)
                    for slot, generation in self.ranks[hello.rank].granted.items()
                ]
            else:
                self.ranks.pop(hello.rank)
                replies.append(ErrorReply(code="usage", message="unknown layout", field="declare"))
        return replies

    def _declare(self, message: Declare) -> list[Message]:
        old = self.ranks.pop(message.rank, None)
        for file in old.files if old is not None else []:
            file.close()
            Path(file.path).unlink()
        shard = self.ranks[message.rank] = Shard()
        hello = next(m for m in self.received if isinstance(m, Hello) and m.rank == message.rank)
        room = small_room_for(message.small_bytes)
        shard.layout = plan_image(
            [to_entry(entry) for entry in message.entries], room, job=hello.job, rank=message.rank, world=hello.world
        )
        base = f"rank-{message.rank:05d}"
        for number in range(self.slots):
            shard.files.append(SlotFile.create(self.shm / f"{base}.slot-{number}", shard.layout.capacity))
        control = self.shm / f"{base}.control"
        if not control.exists():
            ControlPage.create(control, rank=message.rank).close()
        shard.free = list(range(self.slots))
        return [
            Declared(
                id=message.id,
                token=message.token,
                plan_generation=1,
                control_path=str(control),
                slots=[SlotPlace(i, file.path, file.size) for i, file in enumerate(shard.files)],
                small_room=room,
                grants=[grant for grant in self._grants(message.rank) if isinstance(grant, Grant)],
                cadence=Cadence(token=message.token, from_step=0, every=self.every),
            )
        ]

    def _grants(self, rank: int) -> list[Message]:
        """Keep one slot granted."""
        shard = self.ranks.get(rank)
        unused = 0 if shard is None else sum(1 for slot in shard.granted if slot not in self._busy(rank))
        if shard is None or self.token is None or not self.grant or unused or not shard.free:
            return []
        slot = shard.free.pop(0)
        shard.generation += 1
        shard.granted[slot] = shard.generation
        return [Grant(token=self.token, slot=slot, generation=shard.generation)]

    def _busy(self, rank: int) -> set[int]:
        shard = self.ranks[rank]
        return {m.slot for m in self.received if isinstance(m, Begin) and shard.granted.get(m.slot) == m.generation}

    def _seal(self, seal: Seal) -> list[Message]:
        shard = self.ranks[seal.rank]
        if shard.granted.get(seal.slot) != seal.generation:
            return []  # said twice
        del shard.granted[seal.slot]
        if not self.commit:
            return self._grants(seal.rank)
        if shard.newest is not None:
            shard.free.append(shard.newest[0])
        shard.newest = (seal.slot, seal)
        assert self.token is not None
        return [Committed(token=self.token, step=seal.step, tier="memory"), *self._grants(seal.rank)]

    def image(self, rank: int = 0) -> SlotImage:
        """The newest committed image, as a plan names it. Waits for the first one: what a rank has sealed is told
        behind its back."""
        soon(lambda: self.ranks[rank].newest is not None, f"rank {rank} tells of a sealed snapshot")
        slot, seal = self.ranks[rank].newest or (0, None)
        assert seal is not None
        file, layout = self.ranks[rank].files[slot], self.ranks[rank].layout
        assert layout is not None
        digests = seal.digests or file.digest_chunks(layout.chunks(seal.small_length))
        return SlotImage(
            path=file.path,
            offset=IMAGE_OFFSET,
            length=seal.image_length,
            digest=root_digest(digests, seal.image_length),
            chunk_digests=digests,
        )


def to_entry(entry: object) -> TensorEntry:
    """A declared entry as the pure core has it."""
    names = ("name", "dtype", "shape", "nbytes", "kind", "global_shape", "ranges", "aliases", "strides")
    values = {name: getattr(entry, name) for name in names}
    for name in ("shape", "global_shape", "aliases", "strides"):
        values[name] = None if values[name] is None else tuple(values[name])
    values["ranges"] = None if values["ranges"] is None else tuple(tuple(pair) for pair in values["ranges"])
    return TensorEntry(**values)
