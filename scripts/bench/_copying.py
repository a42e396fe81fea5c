"""Figures of the copy engine alone: speed into a slot, digests, the gate, the canary."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from _report import Report, interleave, median, ratio, timed

from baft_client.engine import CopyEngine, EngineState, Segment
from baft_client.load_engine import load_engine
from baftd.pipeline.events import EventKind, unpack_events

__all__ = ["copying", "pattern", "shared_memory"]

Bytes = npt.NDArray[np.uint8]


def pattern(nbytes: int) -> Bytes:
    """Bytes that no part of the machine can take a short cut for."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[:nbytes]


@contextmanager
def shared_memory(nbytes: int, directory: str = "/dev/shm") -> Iterator[Bytes]:
    """A prefaulted, nameless file on tmpfs, mapped: what a slot is."""
    fd, name = tempfile.mkstemp(prefix=f"baftd-bench-{os.getpid()}-", dir=directory)
    os.unlink(name)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        mapped = mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
    view = np.frombuffer(mapped, dtype=np.uint8)
    del mapped  # goes with the last view of it
    view[:] = 1
    yield view


def copying(report: Report, *, nbytes: int, rounds: int) -> None:
    """Add copy_ratio, digest_gbps, restore_copy_ratio and what the gate and the canary cost."""
    engine = load_engine(None)
    report.note(f"copy engine: {engine.name}, digests: {'its own' if engine.digests else 'the daemon'}")
    try:
        with shared_memory(nbytes) as slot:
            _speeds(report, engine, slot, rounds)
        _gate(report, engine, min(nbytes, 64 << 20), rounds)
        _windows(report, engine, min(nbytes, 16 << 20), rounds)
        _canary(report, engine, 1000 if nbytes >= 256 << 20 else 100, rounds)
    finally:
        engine.stop()


def _speeds(report: Report, engine: CopyEngine, slot: Bytes, rounds: int) -> None:
    state = pattern(slot.nbytes)
    source, place, size = state.ctypes.data, slot.ctypes.data, slot.nbytes
    share = max(1, size // 100 // 4096 * 4096)  # a hundred tensors
    table = engine.prepare([Segment(source + at, at, min(share, size - at)) for at in range(0, size, share)])

    def in_window() -> float:
        """Through an open gate, by the engine's thread alone."""
        engine.start(place, size, table)
        began = time.perf_counter()
        engine.open()
        while engine.state != EngineState.DONE:
            time.sleep(0.0005)  # half a percent of the copy; asking more often takes CPU from it on a busy machine
        took = time.perf_counter() - began
        engine.close_window()
        return took

    def flushed() -> float:
        engine.start(place, size, table)
        return timed(lambda: engine.flush(60.0))

    times = interleave(
        {
            "numpy": lambda: timed(lambda: np.copyto(slot, state)),
            "window": in_window,
            "flush": flushed,
            "digest": lambda: timed(lambda: engine.digest(place, size)),
        },
        rounds,
    )
    report.steady("copy_ratio", times["numpy"])
    report.add("copy_ratio", ratio(times["numpy"], times["window"]), unit="", goal=0.9, better="higher",
               how="the engine's thread into a prefaulted slot, digest included, against numpy.copyto")  # fmt: skip
    report.add("flush_ratio", ratio(times["numpy"], times["flush"]), unit="", goal=None, better="higher",
               how="the same with everything left to the fence, where the training thread helps")  # fmt: skip
    report.add("copy_gbps", median([size / t / 1e9 for t in times["window"]]), unit="GB/s", goal=None, better="higher",
               how="the engine's copy with digest")  # fmt: skip
    report.add("digest_gbps", median([size / t / 1e9 for t in times["digest"]]), unit="GB/s", goal=None,
               better="higher", how="xxh3-128 of the slot, one thread")  # fmt: skip


def _gate(report: Report, engine: CopyEngine, nbytes: int, rounds: int) -> None:
    source, target = pattern(nbytes), np.ones(nbytes, dtype=np.uint8)
    table = engine.prepare([Segment(source.ctypes.data, 0, nbytes)])
    late: list[float] = []
    for _ in range(20 * rounds):
        if engine.state in (EngineState.DONE, EngineState.IDLE):
            engine.start(target.ctypes.data, nbytes, table)
        engine.open_window()
        until = time.perf_counter() + 0.0003
        while time.perf_counter() < until:
            time.sleep(0)
        began = time.perf_counter()
        engine.close_window()
        while engine.state == EngineState.COPYING:
            time.sleep(0)
        late.append((time.perf_counter() - began) * 1e6)
    engine.cancel()
    report.add("gate_close_us", median(late), unit="us", goal=200.0, better="lower",
               how="from closing the gate in mid-copy until the engine's thread has stopped")  # fmt: skip


def _windows(report: Report, engine: CopyEngine, nbytes: int, rounds: int) -> None:
    source, target = pattern(nbytes), np.ones(nbytes, dtype=np.uint8)
    table = engine.prepare([Segment(source.ctypes.data, 0, nbytes)])
    engine.start(target.ctypes.data, nbytes, table)

    def pairs() -> None:
        """With a copy armed that has no share in these windows, as in most of a step."""
        for _ in range(500):
            engine.open_window(0)
            engine.close_window()

    pair = [timed(pairs) / 500 * 1e6 for _ in range(5 * rounds)]
    engine.flush(60.0)
    opening: list[float] = []
    first: list[float] = []
    for _ in range(20 * rounds):
        engine.start(target.ctypes.data, nbytes, table)
        engine.spans()
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:
            pass  # the training thread computes
        began = time.monotonic_ns()
        engine.open_window()
        opening.append((time.monotonic_ns() - began) / 1e3)
        time.sleep(0.002)  # it waits
        engine.close_window()
        engine.flush(60.0)
        told = next((event for event in unpack_events(engine.spans()) if event.kind == EventKind.COPY_INSIDE), None)
        if told is not None:
            first.append((told.begin - began) / 1e3)
    report.add("window_pair_us", median(pair), unit="us", goal=1.5, better="lower",
               how="opening and closing a window that has nothing to copy")  # fmt: skip
    report.add("window_open_us", median(opening), unit="us", goal=None, better="lower",
               how="opening one that wakes the engine's thread")  # fmt: skip
    if first:
        report.add("window_first_byte_us", median(first), unit="us", goal=200.0, better="lower",
                   how="from opening until the engine begins; windows in which it did not are left out: "
                       f"{20 * rounds - len(first)} of {20 * rounds}")  # fmt: skip


def _canary(report: Report, engine: CopyEngine, tensors: int, rounds: int) -> None:
    arrays = [pattern(256 << 10) for _ in range(tensors)]
    table = engine.prepare([Segment(a.ctypes.data, i << 18, a.nbytes, 4) for i, a in enumerate(arrays)])
    other = np.ones(64 << 20, dtype=np.uint8)

    def cold() -> float:
        other[:] += np.uint8(1)  # larger than the caches: the samples have to come from memory, as at a boundary
        return timed(lambda: engine.canary(table)) * 1e3

    report.add("canary_ms", median([cold() for _ in range(3 * rounds)]), unit="ms", goal=None, better="lower",
               how=f"16 elements of each of {tensors} tensors, caches cold; at begin and at the fence")  # fmt: skip
