"""Tensors on CUDA devices: copied into registered slot memory by a stream of their own.

At the boundary the copy stream waits for the compute stream (the state is complete there). Without windows it then
copies every stable tensor while the next step computes. With windows (`gated`) it copies nothing yet: at each `anchor`
it waits for what was launched on the compute stream so far, and then copies as many bytes as the window's budget says:
so the bytes travel in the gap that follows that operation on the device, and the host never waits. `rest` at the fence
enqueues what no window took, and has the compute stream wait for the copy stream's last event, so that no update runs
before the last byte was read. Volatile tensors are copied on the compute stream itself, so that no later kernel can
change them first.

How long a gap is only the device knows: events with times are recorded before and after it (`anchor`, `passed`) and
read at a later boundary. Once the gaps of a step are known, each takes bytes in proportion to its length, and the last
one what is left; the budgets of the copy plan, which knows the host's waits alone, hold until then.

The canary is sampled on the compute stream at the boundary, so that it comes before whatever could change a tensor
next, and by the copy stream after the last byte; the host compares.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

from baft_client.source import Source
from baftd.telemetry import get_logger

__all__ = ["CudaCopier"]

SAMPLED = 16
"""Elements of each tensor that the canary takes."""
POLL = 0.0002
"""Seconds between two looks at an event, where the host must wait."""
PIECE = 1 << 20
"""Bytes: windows end at a multiple of it within a tensor, so that no copy is tiny."""
GAPS = 4096
"""Gaps whose length has not been read yet, at most: older ones are forgotten."""
REMEMBERED = 5
"""Lengths of each gap that are kept; the middle one counts."""

_CUDA: Any = torch.cuda
"""Typed loosely: its stubs leave out most of what is used here."""


@dataclass
class _Piece:
    """What is left to copy of one tensor."""

    tensor: torch.Tensor
    """Its bytes."""
    view: torch.Tensor
    """Where they go."""
    done: int = 0


@dataclass
class _Device:
    """What happens on one device for one snapshot."""

    stream: Any
    """For copies."""
    pieces: deque[_Piece] = field(default_factory=deque)
    """Not enqueued yet."""
    sampled: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Stable tensors by name."""
    before: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    """Samples of them, at the boundary and when the copying was over."""
    event: Any = None
    """After all that was enqueued so far."""


class CudaCopier:
    """What a session calls `DeviceCopier`. `tensor_of` gives the device tensor that a source stands for."""

    def __init__(self, tensor_of: Callable[[Source], torch.Tensor]) -> None:
        self._tensor_of = tensor_of
        self._registered: list[int] = []
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._devices: dict[torch.device, _Device] = {}
        self._inside = self._outside = self._late = 0
        self._at_fence = self._refused = False
        self._open: list[tuple[int, Any, Any]] = []
        self._gaps: deque[tuple[int, Any, Any]] = deque(maxlen=GAPS)
        self._lengths: dict[int, deque[float]] = {}
        self._log = get_logger("torch")

    def slots(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Register the memory of mapped slots, so that copies into it are asynchronous; forget what was before."""
        self.cancel()
        runtime = _CUDA.cudart()
        for address in self._registered:
            runtime.cudaHostUnregister(address)
        self._registered.clear()
        self._views.clear()
        for address, nbytes in ranges:
            code = int(runtime.cudaHostRegister(address, nbytes, 0))
            if code == 0:
                self._registered.append(address)
            else:
                # Copies into ordinary memory are right too, only slower: the driver stages them.
                self._log.warning("not_registered", bytes=nbytes, code=code, note="copies to the slot are slower")

    # ------------------------------------------------------------ from boundary to fence

    def start(self, jobs: Sequence[tuple[Source, int]], *, gated: bool = False) -> None:
        """Enqueue the copy of every source to its address, and return. `gated`: of volatile ones only, and leave the
        others to windows."""
        self._forget()
        self._read_gaps()
        self._inside = self._outside = self._late = 0
        self._at_fence = False
        by_device: dict[torch.device, list[tuple[Source, torch.Tensor, torch.Tensor]]] = {}
        for source, address in jobs:
            tensor = self._tensor_of(source)
            by_device.setdefault(tensor.device, []).append((source, tensor, self._view(address, source.entry.nbytes)))
        for device, work in by_device.items():
            self._start_on(device, work)
            if not gated:
                self._outside += self._enqueue(device, None)

    def _start_on(self, device: torch.device, work: list[tuple[Source, torch.Tensor, torch.Tensor]]) -> None:
        compute = _CUDA.current_stream(device)
        copies = self._streams.get(device)
        if copies is None:
            copies = self._streams[device] = _CUDA.Stream(device)
        at = self._devices[device] = _Device(copies)
        with torch.no_grad(), _CUDA.device(device):
            for source, tensor, view in work:
                if source.entry.kind == "volatile":
                    view.copy_(_bytes_of(tensor), non_blocking=True)
                else:
                    at.sampled.append((source.entry.name, tensor))
                    at.pieces.append(_Piece(_bytes_of(tensor), view))
            at.before = [_sample(tensor) for _, tensor in at.sampled]
            copies.wait_stream(compute)
            at.event = _recorded(copies)

    def anchor(self, ordinal: int, budget: int) -> None:
        """A gap follows what was launched last: let up to `budget` bytes travel once that is done. Nothing waits.

        While a graph is captured nothing is enqueued: a copy would become a part of the graph. Raises nothing: what a
        device refuses is said once, and left to the fence, where it fails once more and is counted as torn.
        """
        if self._at_fence or self._refused:
            return
        try:
            if not _CUDA.is_current_stream_capturing():
                self._anchor(ordinal, budget)
        except RuntimeError as error:
            self._refuse(error)

    def _refuse(self, error: RuntimeError) -> None:
        self._refused = True
        self._log.warning("no_windows", why=str(error), note="tensors on the device are copied at the fence")

    def _anchor(self, ordinal: int, budget: int) -> None:
        for device, at in self._devices.items():
            compute = _CUDA.current_stream(device)
            begins = _CUDA.Event(enable_timing=True)
            begins.record(compute)
            self._open.append((ordinal, begins, compute))
            share = self._share(ordinal, at)
            most = budget if share is None else share
            if at.pieces and most > 0:
                at.stream.wait_event(begins)
                taken = self._enqueue(device, most)
                self._inside += taken
                if share is None:
                    budget -= taken

    def _share(self, ordinal: int, at: _Device) -> int | None:
        """Bytes for a gap: of what is left as much as it has of the time that is left. None: not known yet."""
        if ordinal not in self._lengths:
            return None
        coming = {number: median(seen) for number, seen in self._lengths.items() if number >= ordinal}
        left = sum(piece.tensor.numel() - piece.done for piece in at.pieces)
        if len(coming) == 1:
            return left
        share = left * coming[ordinal] / max(sum(coming.values()), 1e-9)
        return -(-int(share) // PIECE) * PIECE

    def passed(self, ordinal: int) -> None:
        """What was waited for in that gap has been launched: the gap ends behind it. Raises nothing."""
        still = []
        for number, begins, compute in self._open:
            if number != ordinal or self._refused:
                still.append((number, begins, compute))
                continue
            try:
                if not _CUDA.is_current_stream_capturing():
                    ends = _CUDA.Event(enable_timing=True)
                    ends.record(compute)
                    self._gaps.append((number, begins, ends))
            except RuntimeError as error:
                self._refuse(error)
        self._open = still

    def _read_gaps(self) -> None:
        """Learn the length of the gaps that have gone by."""
        newest = -1
        while self._gaps and self._gaps[0][2].query():
            number, begins, ends = self._gaps.popleft()
            self._lengths.setdefault(number, deque(maxlen=REMEMBERED)).append(begins.elapsed_time(ends))
            newest = max(newest, number)
        if newest >= 0:  # a step with fewer gaps: what is known of others is of no use
            self._lengths = {number: seen for number, seen in self._lengths.items() if number <= newest}

    def rest(self) -> None:
        """The fence: enqueue what no window took, and order later kernels behind the copies. Nothing waits."""
        if self._at_fence:
            return
        self._at_fence = True
        self._open.clear()
        for device, at in self._devices.items():
            self._late += self._enqueue(device, None)
            with torch.no_grad(), _CUDA.device(device), _CUDA.stream(at.stream):
                at.after = [_sample(tensor) for _, tensor in at.sampled]
                at.event = _recorded(at.stream)
            _CUDA.current_stream(device).wait_event(at.event)

    def arrived(self) -> bool:
        """Whether the last byte that was enqueued has arrived."""
        return all(at.event.query() for at in self._devices.values())

    def copied(self) -> tuple[int, int, int]:
        """Bytes of stable tensors since `start`: enqueued in windows, outside of them, and at the fence."""
        return self._inside, self._outside, self._late

    def flush(self, deadline: float) -> bool:
        """`rest`, and wait for the last byte; False after `deadline` seconds."""
        self.rest()
        until = time.monotonic() + deadline
        while not self.arrived():
            if time.monotonic() > until:
                return False
            time.sleep(POLL)
        return True

    def cancel(self) -> None:
        """Wait until nothing writes to a slot any more: a copy that was enqueued cannot be taken back."""
        for at in self._devices.values():
            at.event.synchronize()
        self._forget()

    def check(self) -> str | None:
        """Name of a tensor whose sampled elements changed between `start` and `rest`. Waits for the copy stream."""
        for at in self._devices.values():
            with _CUDA.stream(at.stream):
                for (name, _), before, after in zip(at.sampled, at.before, at.after, strict=True):
                    if not torch.equal(before, after):
                        return name
        return None

    # ------------------------------------------------------------ within

    def _forget(self) -> None:
        self._devices.clear()
        self._open.clear()

    def _enqueue(self, device: torch.device, budget: int | None) -> int:
        """Enqueue up to `budget` bytes (None: all) of what is left; returns how many."""
        at, taken = self._devices[device], 0
        with torch.no_grad(), _CUDA.device(device), _CUDA.stream(at.stream):
            while at.pieces:
                piece = at.pieces[0]
                size = piece.tensor.numel() - piece.done
                if budget is not None and size > budget - taken:
                    size = (budget - taken) // PIECE * PIECE
                    if not size:
                        break
                end = piece.done + size
                piece.view[piece.done : end].copy_(piece.tensor[piece.done : end], non_blocking=True)
                piece.done, taken = end, taken + size
                if end < piece.tensor.numel():
                    break
                at.pieces.popleft()
            if taken:
                at.event = _recorded(at.stream)
        return taken

    def _view(self, address: int, nbytes: int) -> torch.Tensor:
        """Slot memory as a tensor of bytes."""
        view = self._views.get((address, nbytes))
        if view is None:
            memory = (ctypes.c_uint8 * nbytes).from_address(address)
            view = self._views[address, nbytes] = torch.from_numpy(np.ctypeslib.as_array(memory))
        return view


def _recorded(stream: Any) -> Any:
    """An event after all that was enqueued on the stream."""
    event = _CUDA.Event()
    event.record(stream)
    return event


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in memory order."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return _flat(tensor).view(torch.uint8)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of up to SAMPLED elements, evenly spaced."""
    flat = _flat(tensor)
    taken = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED]
    return taken.clone(memory_format=torch.contiguous_format).view(torch.uint8)
