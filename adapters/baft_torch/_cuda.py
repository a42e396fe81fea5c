"""Tensors on CUDA devices: copied into registered slot memory by a stream of their own, while the next step computes.

At the boundary the copy stream waits for the compute stream (the state is complete there), then copies every stable
tensor. Volatile tensors are copied on the compute stream itself, so that no later kernel can change them first. At the
fence the compute stream waits for the copy stream, and the host until the last byte has arrived.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from baft_client.source import Source
from baftd.telemetry import get_logger

__all__ = ["CudaCopier"]

SAMPLED = 16
"""Elements of each tensor that the canary takes."""
POLL = 0.0002

_CUDA: Any = torch.cuda
"""Typed loosely: its stubs leave out most of what is used here."""


class CudaCopier:
    """What a session calls `DeviceCopier`. `tensor_of` gives the device tensor that a source stands for."""

    def __init__(self, tensor_of: Callable[[Source], torch.Tensor]) -> None:
        self._tensor_of = tensor_of
        self._registered: list[int] = []
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self._streams: dict[torch.device, Any] = {}
        self._done: list[tuple[torch.device, Any]] = []
        self._canaries: list[tuple[str, torch.Tensor, torch.Tensor]] = []
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

    def start(self, jobs: Sequence[tuple[Source, int]]) -> None:
        """Enqueue the copy of every source to its address, and return."""
        self._done.clear()
        self._canaries.clear()
        by_device: dict[torch.device, list[tuple[Source, torch.Tensor, torch.Tensor]]] = {}
        for source, address in jobs:
            tensor = self._tensor_of(source)
            by_device.setdefault(tensor.device, []).append((source, tensor, self._view(address, source.entry.nbytes)))
        for device, work in by_device.items():
            self._start_on(device, work)

    def _start_on(self, device: torch.device, work: list[tuple[Source, torch.Tensor, torch.Tensor]]) -> None:
        compute = _CUDA.current_stream(device)
        copies = self._streams.get(device)
        if copies is None:
            copies = self._streams[device] = _CUDA.Stream(device)
        with torch.no_grad(), _CUDA.device(device):
            for source, tensor, view in work:
                if source.entry.kind == "volatile":
                    view.copy_(_bytes_of(tensor), non_blocking=True)
            copies.wait_stream(compute)
            with _CUDA.stream(copies):
                for source, tensor, view in work:
                    if source.entry.kind == "stable":
                        self._canaries.append((source.entry.name, tensor, _sample(tensor)))
                        view.copy_(_bytes_of(tensor), non_blocking=True)
                event = _CUDA.Event()
                event.record(copies)
        self._done.append((device, event))

    def flush(self, deadline: float) -> bool:
        """Order later kernels behind the copies and wait for the last byte; False after `deadline` seconds."""
        until = time.monotonic() + deadline
        for device, event in self._done:
            _CUDA.current_stream(device).wait_event(event)
        for _, event in self._done:
            while not event.query():
                if time.monotonic() > until:
                    return False
                time.sleep(POLL)
        return True

    def cancel(self) -> None:
        """Wait until nothing writes to a slot any more: a copy that was enqueued cannot be taken back."""
        for _, event in self._done:
            event.synchronize()
        self._done.clear()
        self._canaries.clear()

    def check(self) -> str | None:
        """Name of a tensor whose sampled elements changed since `start`."""
        for name, tensor, before in self._canaries:
            if not torch.equal(_sample(tensor), before):
                return name
        return None

    def _view(self, address: int, nbytes: int) -> torch.Tensor:
        """Slot memory as a tensor of bytes."""
        view = self._views.get((address, nbytes))
        if view is None:
            memory = (ctypes.c_uint8 * nbytes).from_address(address)
            view = self._views[address, nbytes] = torch.from_numpy(np.ctypeslib.as_array(memory))
        return view


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in memory order."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return _flat(tensor).view(torch.uint8)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of up to SAMPLED elements, evenly spaced."""
    flat = _flat(tensor)
    return flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].contiguous().view(torch.uint8).clone()

