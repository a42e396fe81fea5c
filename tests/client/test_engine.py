"""The copy engine: both implementations keep the same promises."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baft_client import load_engine as load_engine_module
from baft_client import native_engine
from baft_client.engine import (
    CHUNK,
    EngineHooks,
    EngineState,
    Segment,
    copy_verify,
    first_difference,
)
from baft_client.load_engine import load_engine
from baftd.errors import UsageError
from baftd.memory.control import ControlPage, Gate
from tests.support.engines import MIB, Rig, expected_digests, noise, soon

Name = Literal["native", "python"]


@pytest.fixture(params=["native", "python"])
def name(request: pytest.FixtureRequest) -> Name:
    """Both legs, always: a checkout without the extension does not pass for one with it."""
    chosen: Name = request.param
    if chosen == "native":
        assert native_engine.AVAILABLE, f"the extension was not built: {native_engine.WHY_NOT}"
    return chosen


@pytest.fixture
def rig(tmp_path: Path, name: Name) -> Iterator[Rig]:
    made = Rig(tmp_path, name)
    yield made
    made.close()


# ---------------------------------------------------------------------------------------- copying


SIZES = [0, 1, 7, 63, 64, 65, 1023, 1024, 2047, 2048, 2049, 4096, 262143, 262144, 262145, 3 * MIB, CHUNK - 1, CHUNK,
         CHUNK + 1, 2 * CHUNK + 12345]


@pytest.mark.parametrize("gap", [0, 1, 64])
def test_copies_and_digests_every_size(rig: Rig, gap: int) -> None:
    arrays = [noise(n, seed) for seed, n in enumerate(SIZES)]
    table = rig.table(arrays, gap=gap)
    assert table.count == len(SIZES)
    assert table.total == sum(SIZES)
    assert table.chunks == sum(-(-n // CHUNK) for n in SIZES)
    rig.start(table)
    assert rig.engine.flush(20.0)
    assert rig.engine.progress() == table.total
    rig.check()


def test_copies_in_an_open_window_without_a_flush(rig: Rig) -> None:
    table = rig.table([noise(9 * MIB), noise(100)])
    rig.start(table)
    rig.engine.open()
    soon(lambda: rig.engine.state == EngineState.DONE, "the copy")
    rig.check()
    assert rig.engine.flush(0.0), "nothing is left, so no time is needed"
    rig.check()


@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=12),
    shift=st.integers(0, 70),
    gap=st.integers(0, 70),
    steps=st.lists(st.sampled_from(["open", "close", "pace", "wait"]), max_size=6),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sizes_places_and_windows(rig: Rig, sizes: list[int], shift: int, gap: int, steps: list[str]) -> None:
    memory = noise(sum(sizes) + shift, seed=sum(sizes))
    at, arrays = shift, []
    for n in sizes:
        arrays.append(memory[at : at + n])
        at += n
    rig.start(rig.table(arrays, gap=gap))
    for step in steps:
        if step == "open":
            rig.engine.open()
        elif step == "close":
            rig.engine.close_window()
        elif step == "pace":
            rig.engine.set_pace(1 << 20)
        else:
            time.sleep(0)
    assert rig.engine.flush(20.0)
    rig.engine.set_pace(0)
    rig.check()


def test_a_table_serves_step_after_step_with_new_addresses(rig: Rig) -> None:
    first, second = [noise(n, 1) for n in (5000, 0, 6 * MIB)], [noise(n, 2) for n in (5000, 0, 6 * MIB)]
    table = rig.table(first)
    for arrays in (first, second, first):
        rig.arrays = arrays
        table.update(np.array([a.ctypes.data for a in arrays], dtype=np.uint64))
        rig.start(table)
        assert rig.engine.flush(20.0)
        rig.check()


def test_nothing_to_copy_is_done_at_once(rig: Rig) -> None:
    for arrays in ([], [noise(0)]):
        rig.start(rig.table(arrays, gap=8))
        assert rig.engine.state == EngineState.DONE
        assert rig.engine.flush(0.0)
        rig.check()
    assert rig.engine.digests_of() == b""


def test_flush_of_an_idle_engine_is_true(rig: Rig) -> None:
    assert rig.engine.state == EngineState.IDLE
    assert rig.engine.flush(0.0)
    assert rig.engine.progress() == 0


# ---------------------------------------------------------------------------------------- gate


def test_a_closed_gate_copies_nothing(rig: Rig) -> None:
    rig.start(rig.table([noise(2 * MIB)]))
    assert rig.engine.state == EngineState.WAITING
    assert rig.engine.progress() == 0
    assert (rig.image == 0xAA).all()


def test_closing_stops_and_opening_goes_on(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=40 * MIB))
    try:
        table = rig.table([noise(3 * MIB), noise(CHUNK + 5), noise(17)])
        rig.start(table)
        seen = 0
        for _ in range(4):
            rig.engine.open()
            soon(lambda seen=seen: rig.engine.progress() > seen, "some progress")  # type: ignore[misc]
            rig.engine.close_window()
            soon(lambda: rig.engine.state != EngineState.COPYING, "the gate to close")
            seen = rig.engine.progress()
            assert 0 < seen < table.total
            still = rig.image.copy()
            time.sleep(0.03)  # an open gate would let 1.2 MiB pass
            assert rig.engine.progress() == seen
            assert np.array_equal(still, rig.image)
        assert rig.engine.flush(20.0)
        rig.check()
    finally:
        rig.close()


def test_closing_takes_effect_within_a_chunk(tmp_path: Path, name: Name) -> None:
    """One chunk of half a second: who looked at the gate between chunks only would copy it to its end."""
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=8 * MIB))
    try:
        table = rig.table([noise(CHUNK)])
        assert table.chunks == 1
        rig.start(table)
        rig.engine.open()
        soon(lambda: rig.engine.progress() > 0, "some progress")
        rig.engine.close_window()
        soon(lambda: rig.engine.state == EngineState.WAITING, "the gate to close")
        assert rig.engine.progress() < CHUNK
        assert rig.engine.flush(20.0)
        rig.check()
    finally:
        rig.close()


def test_a_gate_left_open_takes_the_next_copy(rig: Rig) -> None:
    rig.engine.open()
    for seed in range(3):
        rig.start(rig.table([noise(MIB, seed)]))
        soon(lambda: rig.engine.state == EngineState.DONE, "the copy")
        rig.check()


def test_pace_holds_and_flush_ends_it(rig: Rig) -> None:
    table = rig.table([noise(24 * MIB)])
    rig.engine.set_pace(MIB)
    rig.start(table)
    began = time.monotonic()
    rig.engine.open()
    soon(lambda: rig.engine.progress() > 0, "the first block")
    time.sleep(0.15)
    assert rig.engine.progress() < (time.monotonic() - began) * MIB + MIB, "faster than its pace"
    began = time.monotonic()
    assert rig.engine.flush(20.0)
    assert time.monotonic() - began < 10, "flush kept the pace: 24 s"
    rig.check()


def test_a_new_pace_ends_the_wait_of_the_old(rig: Rig) -> None:
    rig.engine.set_pace(1)
    rig.start(rig.table([noise(8 * MIB)]))
    rig.engine.open()
    soon(lambda: rig.engine.progress() > 0, "the first block")
    rig.engine.set_pace(0)
    soon(lambda: rig.engine.state == EngineState.DONE, "the copy at full speed")
    rig.check()


# ---------------------------------------------------------------------------------------- flush, cancel, stop


def test_flush_keeps_its_deadline(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=4 * MIB))
    try:
        table = rig.table([noise(6 * MIB)])
        rig.start(table)
        began = time.monotonic()
        assert not rig.engine.flush(0.15)
        assert time.monotonic() - began < 1.0
        assert rig.control.gate == Gate.CLOSED
        soon(lambda: rig.engine.state == EngineState.WAITING, "the engine to stop")
        copied = rig.engine.progress()
        assert copied < table.total
        time.sleep(0.1)
        assert rig.engine.progress() == copied
        with pytest.raises(UsageError, match="not done"):
            rig.engine.digests_of()
        assert rig.engine.flush(20.0)
        rig.check()
    finally:
        rig.close()


def test_flush_gives_the_gil_away(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=8 * MIB))
    ticks = 0
    over = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    other = threading.Thread(target=tick)
    try:
        rig.start(rig.table([noise(2 * MIB)]))
        other.start()
        assert rig.engine.flush(20.0)  # a quarter of a second
        assert ticks > 20
    finally:
        over.set()
        other.join()
        rig.close()


def test_cancel_in_the_middle_leaves_the_rest_alone(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=20 * MIB))
    try:
        table = rig.table([noise(8 * MIB)])
        for _ in range(3):
            rig.start(table)
            rig.engine.open()
            soon(lambda: rig.engine.progress() > 0, "some progress")
            rig.engine.cancel()
            assert rig.engine.state == EngineState.IDLE
            assert rig.engine.progress() == 0
            still = rig.image.copy()
            time.sleep(0.02)
            assert np.array_equal(still, rig.image)
            assert (rig.image[-MIB:] == 0xAA).all()
            table.update(np.array([rig.arrays[0].ctypes.data], dtype=np.uint64))
        rig.engine.cancel()  # twice is once
        with pytest.raises(UsageError, match="not done"):
            rig.engine.digests_of()
    finally:
        rig.close()


def test_cancel_from_another_thread_ends_a_flush(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=MIB))
    try:
        rig.start(rig.table([noise(20 * MIB)]))
        other = threading.Timer(0.1, rig.engine.cancel)
        other.start()
        began = time.monotonic()
        assert not rig.engine.flush(15.0)
        assert time.monotonic() - began < 5
        other.join()
    finally:
        rig.close()


def test_stop_in_the_middle_joins(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=MIB))
    rig.start(rig.table([noise(20 * MIB)]))
    rig.engine.open()
    soon(lambda: rig.engine.progress() > 0, "some progress")
    began = time.monotonic()
    rig.engine.stop()
    assert time.monotonic() - began < 5
    assert rig.engine.state == EngineState.ABSENT
    rig.engine.stop()
    rig.engine.open()
    rig.engine.close_window()
    rig.engine.cancel()
    assert not rig.engine.flush(1.0)
    assert rig.engine.progress() == 0
    with pytest.raises(UsageError, match="ABSENT"):
        rig.start(rig.table([noise(1)]))
    rig.close()


def test_a_forgotten_engine_ends_its_thread(tmp_path: Path, name: Name) -> None:
    def use_and_forget() -> int:
        rig = Rig(tmp_path, name)
        rig.start(rig.table([noise(MIB)]))
        rig.engine.open()
        soon(lambda: rig.engine.state == EngineState.DONE, "the copy")
        rig.control.close()
        rig.control.path.unlink()
        return threads_named("baft-copy")

    before = use_and_forget()
    assert before
    soon(lambda: threads_named("baft-copy") < before, "the thread to end")


def threads_named(comm: str) -> int:
    """Threads of this process with that kernel name; Python's own carry it from 3.14 on only."""
    kernel = sum(1 for p in Path("/proc/self/task").glob("*/comm") if p.read_text().strip() == comm)
    return max(kernel, sum(1 for thread in threading.enumerate() if thread.name == comm))


# ---------------------------------------------------------------------------------------- refusals


def test_start_is_refused_while_a_copy_is_unfinished(rig: Rig) -> None:
    table = rig.table([noise(MIB)])
    rig.start(table)
    with pytest.raises(UsageError, match=r"unfinished|left"):
        rig.start(table)
    with pytest.raises(UsageError, match="cannot change now"):
        table.update(np.array([rig.arrays[0].ctypes.data], dtype=np.uint64))
    assert rig.engine.flush(20.0)
    rig.check()
    table.update(np.array([rig.arrays[0].ctypes.data], dtype=np.uint64))


def test_a_slot_too_small_is_refused(rig: Rig) -> None:
    table = rig.table([noise(1000)])
    with pytest.raises(UsageError, match="end at byte 1000, the destination at 999"):
        rig.engine.start(rig.image.ctypes.data, 999, table)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(4096, 0, 10), Segment(8192, 9, 10)], "overlapping"),
        ([Segment(4096, 0, 10, 4)], "whole number"),
        ([Segment(4096, 0, 10, 0)], "whole number"),
        ([Segment(0, 0, 10)], "address 0"),
        ([Segment(4096, (1 << 64) - 5, 10)], "overlapping"),
    ],
)
def test_bad_segments_are_refused(rig: Rig, segments: list[Segment], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rig.engine.prepare(segments)


@pytest.mark.parametrize(
    "addresses", [np.zeros(1, np.uint64), np.zeros(2, np.int64), np.zeros((1, 2), np.uint64)], ids=["few", "int", "2d"]
)
def test_bad_addresses_are_refused(rig: Rig, addresses: Any) -> None:
    table = rig.table([noise(10), noise(10)])
    with pytest.raises(UsageError, match="addresses"):
        table.update(addresses)


def test_tables_of_the_other_engine_are_refused(tmp_path: Path) -> None:
    one, other = Rig(tmp_path, "native"), Rig(tmp_path, "python")
    try:
        with pytest.raises(UsageError, match="not for the native"):
            one.engine.start(other.image.ctypes.data, 0, other.table([]))
        with pytest.raises(UsageError, match="not for the Python"):
            other.engine.start(one.image.ctypes.data, 0, one.table([]))
    finally:
        one.close()
        other.close()


# ---------------------------------------------------------------------------------------- canary, compare, digests


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_the_canary_names_the_tensor(rig: Rig, itemsize: int) -> None:
    arrays = [noise(itemsize * n, n) for n in (0, 1, 2, 15, 16, 17, 31, 1000, 40000)]
    table = rig.table(arrays, itemsize=itemsize)
    before = rig.engine.canary(table)
    assert len(before) % table.count == 0
    assert first_difference(before, rig.engine.canary(table), table.count) == -1
    for index, array in enumerate(arrays):
        elements = array.nbytes // itemsize
        m = min(elements, 16)
        for k in range(m):  # every sample counts, with each of its bytes
            at = (k if elements <= 16 else k * (elements - 1) // 15) * itemsize + k % itemsize
            array[at] ^= 1 << (k % 8)
            assert first_difference(before, rig.engine.canary(table), table.count) == index
            array[at] ^= 1 << (k % 8)
    assert rig.engine.canary(table) == before
    table.update(np.array([a.ctypes.data if a.nbytes else 0 for a in arrays], dtype=np.uint64))
    assert rig.engine.canary(table) == before


def test_the_canary_sees_two_tensors_change_places(rig: Rig) -> None:
    arrays = [noise(4000, 1), noise(4000, 2)]
    table = rig.table(arrays, itemsize=4)
    before = rig.engine.canary(table)
    table.update(np.array([a.ctypes.data for a in reversed(arrays)], dtype=np.uint64))
    assert first_difference(before, rig.engine.canary(table), table.count) == 0


def test_compare_finds_the_first_difference(rig: Rig) -> None:
    arrays = [noise(5000, 1), noise(0), noise(CHUNK + 4097, 2), noise(3, 3)]
    table = rig.table(arrays)
    rig.start(table)
    assert rig.engine.flush(20.0)
    where = rig.image.ctypes.data
    assert rig.engine.compare(table, where) is None
    for segment, at in ((3, 2), (2, CHUNK + 4096), (2, CHUNK), (2, 4095), (2, 0), (0, 4999), (0, 7)):
        rig.image[rig.offsets[segment] + at] ^= 4
        assert rig.engine.compare(table, where) == (segment, at)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("nbytes", [0, 1, 5000, CHUNK, 3 * CHUNK + 17])
def test_copy_digest_and_verify(rig: Rig, nbytes: int, threads: int) -> None:
    source, target = noise(nbytes + 3)[3:], np.full(nbytes + 2, 0xAA, dtype=np.uint8)
    a, b = source.ctypes.data, target.ctypes.data + 1
    digests = rig.engine.copy_digest(a, b, nbytes, threads=threads)
    assert digests == expected_digests([source])
    assert np.array_equal(target[1:-1], source)
    assert target[0] == target[-1] == 0xAA
    assert rig.engine.digest(b, nbytes, threads=threads) == digests
    assert copy_verify(rig.engine, b, a, nbytes, digests, threads=threads) == -1
    if nbytes:
        target[nbytes] ^= 1  # its last byte
        assert copy_verify(rig.engine, b, a, nbytes, digests, threads=threads) == (nbytes - 1) // CHUNK
        with pytest.raises(UsageError, match="digests for"):
            copy_verify(rig.engine, b, a, nbytes, digests + bytes(16), threads=threads)


# ---------------------------------------------------------------------------------------- hooks, choice


def test_hold_stops_before_every_chunk(tmp_path: Path, name: Name) -> None:
    rig = Rig(tmp_path, name, hooks=EngineHooks(hold=True))
    sizes = [CHUNK, 100, CHUNK + 1]  # four chunks
    try:
        rig.start(rig.table([noise(n, n) for n in sizes]))
        rig.engine.open()
        for chunk, copied in enumerate([0, CHUNK, CHUNK + 100, 2 * CHUNK + 100]):
            with ControlPage.open(rig.control.path) as seen:  # as the test of a killed process would
                soon(lambda seen=seen, chunk=chunk: seen.get("chunks_done") == chunk, "the chunk before")  # type: ignore[misc]
                soon(lambda seen=seen: seen.get("engine") == EngineState.HELD, "HELD in the page")  # type: ignore[misc]
                assert rig.engine.state == EngineState.HELD
                assert seen.get("bytes_copied") == copied
                assert not rig.engine.flush(0.02), "a flush is held too"
                rig.engine.open()
                seen.set("hold_at", chunk + 1)
        soon(lambda: rig.engine.state == EngineState.DONE, "the end")
        rig.check()
        rig.control.set("hold_at", 0)
        assert rig.control.get("copies") == 1
        rig.start(rig.table([noise(n, n) for n in sizes]))
        assert rig.control.get("copies") == 2, "whoever waits for the next copy would wait for ever"
        assert rig.control.get("chunks_done") == 0, "of the copy before"
        rig.control.set("hold_at", 4)
        assert rig.engine.flush(20.0)
        rig.check()
    finally:
        rig.close()


def test_hold_needs_a_page() -> None:
    with pytest.raises(UsageError, match="hold_at"):
        load_engine(None, hooks=EngineHooks(hold=True))


def test_without_the_extension_the_fallback_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_engine, "AVAILABLE", False)
    monkeypatch.setattr(native_engine, "WHY_NOT", "No module named 'baft_client._engine'")
    monkeypatch.setattr(load_engine_module, "_said_python", False)
    for _ in range(2):
        engine = load_engine(None)
        assert engine.name == "python"
        engine.stop()
    said = [r for r in caplog.records if "python_engine" in r.getMessage()]
    assert len(said) == 1
    assert "libxxhash-dev" in said[0].getMessage()
    with pytest.raises(UsageError, match="not built"):
        load_engine(None, prefer="native")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UsageError, match="no such engine"):
        load_engine(None, prefer="fast")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------- under load


def test_random_life(rig: Rig) -> None:
    """Windows, paces, flushes, cancels from two threads in any order: what is said to be done is right."""
    rng = random.Random(7)
    arrays = [noise(rng.choice([10, 70_000, MIB, CHUNK + 3]), seed) for seed in range(6)]
    table = rig.table(arrays)
    over, cancelling = threading.Event(), threading.Lock()

    def windows() -> None:
        dice = random.Random(8)
        while not over.wait(dice.random() * 0.002):
            match dice.randrange(12):
                case 0 | 1 | 2 | 3:
                    rig.engine.open()
                case 4 | 5 | 6 | 7:
                    rig.engine.close_window()
                case 8:
                    with cancelling:
                        rig.engine.cancel()  # as the I/O thread does when a newer start has taken over
                case _:
                    rig.engine.set_pace(dice.choice([0, 10**9]))

    other = threading.Thread(target=windows)
    other.start()
    done = 0
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            rig.start(table)
            time.sleep(rng.random() * 0.003)
            if rng.random() < 0.3:
                rig.engine.cancel()
                rig.image[:] = 0xAA
                continue
            if rig.engine.flush(20.0):
                with cancelling:
                    if rig.engine.state == EngineState.DONE:
                        rig.check()
                        done += 1
    finally:
        over.set()
        other.join()
    assert done > 3


def test_the_native_thread_needs_no_gil(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "native")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    try:
        rig.start(rig.table([noise(16 * MIB)]))
        rig.engine.open()
        until = time.monotonic() + 20
        while rig.engine.state != EngineState.DONE and time.monotonic() < until:
            pass  # never gives the GIL away
        rig.check()
    finally:
        sys.setswitchinterval(interval)
        rig.close()
