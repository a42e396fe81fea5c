"""A device that runs its streams in any order that their events allow, to try what code does with streams.

No GPU is needed: within `Device.installed` copies and clones of tensors are not carried out but put into the queue of
the current stream, as on a device that lags behind its host. `step` carries out the next operation of one stream that
is not held back, chosen at random; so a missing wait shows as bytes that are wrong for some seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Token:
    """A moment in a stream."""

    def __init__(self) -> None:
        self.passed_at = -1


class Stream:
    """Operations in their order."""

    def __init__(self, world: Device) -> None:
        self.world = world
        self.queue: deque[Callable[[], bool]] = deque()
        """Each says whether it could be carried out."""
        world.streams.append(self)

    def put(self, work: Callable[[], object]) -> None:
        """Enqueue an operation."""

        def run() -> bool:
            work()
            return True

        self.queue.append(run)

    def mark(self) -> Token:
        """Enqueue a moment."""
        token = Token()
        self.put(lambda: setattr(token, "passed_at", self.world.done))
        return token

    def hold(self, token: Token) -> None:
        """Nothing enqueued from here on before that moment."""
        self.queue.append(lambda: token.passed_at >= 0)

    def wait_stream(self, other: Stream) -> None:
        """As torch.cuda.Stream's."""
        self.hold(other.mark())

    def wait_event(self, event: Event) -> None:
        """As torch.cuda.Stream's: does nothing where the event was never recorded."""
        if event.token is not None:
            self.hold(event.token)


class Event:
    """As torch.cuda.Event."""

    def __init__(self, world: Device) -> None:
        self.world = world
        self.token: Token | None = None

    def record(self, stream: Stream) -> None:
        """The newest record is the one that counts."""
        self.token = stream.mark()

    def query(self) -> bool:
        """Whether it has passed. Looking gives the device the time for one operation."""
        self.world.step()
        return self.token is None or self.token.passed_at >= 0

    def synchronize(self) -> None:
        """Wait."""
        while not self.query():
            pass

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds: one for each operation between the two."""
        assert self.token is not None
        assert other.token is not None
        return float(other.token.passed_at - self.token.passed_at)


class _Lagging(TorchDispatchMode):
    """Puts copies and clones into the queue of the current stream."""

    def __init__(self, world: Device) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_":
            target, source = args[:2]
            self.world.enqueue("copy", lambda: target.copy_(source))
            return target
        if name == "clone":
            made = torch.empty_like(args[0], memory_format=torch.contiguous_format)
            self.world.enqueue("clone", lambda: made.copy_(args[0]))
            return made
        return func(*args, **(kwargs or {}))


class Device:
    """What `torch.cuda` is for one device, as far as it is used here."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.compute = Stream(self)
        self.current = self.compute
        self.capturing = False
        self.done = 0
        """Operations carried out."""
        self.launched = 0
        """Operations of the compute stream that were launched by `launch`, and"""
        self.computed = 0
        """those that are over."""
        self.early: list[str] = []
        """Copies that ran before something was over that had been launched when they were enqueued."""
        self.watched = False

    def launch(self, work: Callable[[], object]) -> None:
        """An operation of the user's on the compute stream."""
        self.launched += 1

        def run() -> None:
            with torch.no_grad(), _disable_current_modes():
                work()
            self.computed += 1

        self.compute.put(run)

    def enqueue(self, what: str, work: Callable[[], object]) -> None:
        """An operation on the current stream."""
        launched, watched = self.launched, self.watched

        def run() -> None:
            if watched and what == "copy" and self.computed < launched:
                self.early.append(f"{what} after {self.computed} of {launched}")
            with torch.no_grad(), _disable_current_modes():
                work()

        self.current.put(run)

    def step(self) -> bool:
        """Carry out one operation; False where there is none left."""
        order = [stream for stream in self.streams if stream.queue]
        self.random.shuffle(order)
        for stream in order:
            if stream.queue[0]():
                stream.queue.popleft()
                self.done += 1
                return True
        assert not order, "every stream waits for another"
        return False

    def drain(self) -> None:
        """Carry out everything."""
        while self.step():
            pass

    # ------------------------------------------------------------ torch.cuda

    def current_stream(self, device: object = None) -> Stream:
        """As torch.cuda's."""
        return self.current

    def Stream(self, device: object = None) -> Stream:  # noqa: N802  torch's name
        """As torch.cuda's."""
        return Stream(self)

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802  torch's name
        """As torch.cuda's."""
        return Event(self)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """As torch.cuda's."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        """As torch.cuda's."""
        yield

    def is_current_stream_capturing(self) -> bool:
        """As torch.cuda's."""
        return self.capturing

    def cudart(self) -> Device:
        """As torch.cuda's."""
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  torch's name
        """As the runtime's."""
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  torch's name
        """As the runtime's."""
        return 0

    @contextmanager
    def installed(self) -> Iterator[Device]:
        """Copies and clones lag behind."""
        with _Lagging(self):
            yield self
