"""What only the C extension has: instruction sets, words in the page, its table of offsets, builds without xxhash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import baft_client
from baft_client import _engine
from baft_client.engine import CHUNK, SPANS, EngineState
from baftd.memory import control
from baftd.memory.control import FIELDS, ControlPage, Gate
from baftd.pipeline.events import EventKind
from tests.support.engines import MIB, Rig, expected_digests, noise, soon


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, "native")
    yield made
    made.close()


def test_python_and_c_agree() -> None:
    assert {name: (field.offset, field.size) for name, field in FIELDS.items()} == _engine.FIELDS
    assert _engine.MAGIC == control.MAGIC
    assert _engine.VERSION == control.VERSION
    assert _engine.PAGE_BYTES == control.PAGE_BYTES
    assert _engine.CHUNK == CHUNK
    assert {state.name: state.value for state in EngineState} == _engine.STATES
    assert _engine.SPANS == SPANS
    assert _engine.SPAN_KIND == EventKind.COPY_INSIDE == EventKind.COPY_OUTSIDE - 1 == EventKind.COPY_FENCE - 2
    assert {gate.name: gate.value for gate in Gate} == _engine.GATES
    assert _engine.isa == _engine.isas()[0]


@pytest.mark.parametrize("isa", _engine.isas())
def test_every_instruction_set_at_every_alignment(isa: str) -> None:
    """Sizes and alignments around the strides of the streaming stores, with margins that must stay as they are."""
    rng = np.random.default_rng(3)
    memory, target = noise(40_000), np.empty(40_000, dtype=np.uint8)
    _engine.use_isa(isa)
    try:
        for _ in range(1500):
            a, b = (int(x) for x in rng.integers(0, 130, 2))
            n = int(rng.choice([rng.integers(0, 300), rng.integers(900, 5000), rng.integers(0, 39_000)]))
            target[:] = 0x55
            digests = _engine.bulk(memory.ctypes.data + a, target.ctypes.data + b, n, 1)
            assert np.array_equal(target[b : b + n], memory[a : a + n])
            assert (target[:b] == 0x55).all()
            assert (target[b + n :] == 0x55).all()
            if _engine.digests:
                assert digests == expected_digests([memory[a : a + n]])
                assert _engine.bulk(memory.ctypes.data + a, 0, n, 1) == digests
    finally:
        _engine.use_isa(_engine.isa)


def test_an_instruction_set_this_cpu_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no mmx"):
        _engine.use_isa("mmx")


def test_the_page_tells_what_the_engine_does(rig: Rig) -> None:
    page = rig.control
    table = rig.table([noise(CHUNK + 1), noise(100)])
    assert page.get("engine") == EngineState.IDLE
    for turn in (1, 2):
        rig.start(table)
        assert page.get("bytes_total") == table.total
        assert page.get("bytes_copied") == page.get("chunks_done") == 0
        assert page.get("engine") in (EngineState.WAITING, EngineState.DONE)
        assert page.get("copies") == turn
        rig.engine.open()
        assert page.get("gate") & 15 == Gate.OPEN
        soon(lambda: page.get("engine") == EngineState.DONE, "DONE in the page")
        assert page.get("bytes_copied") == table.total
        assert page.get("chunks_done") == 3
        rig.engine.close_window()
        assert page.get("gate") & 15 == Gate.CLOSED
        assert page.get("window_opened") == page.get("window_closed") == turn
    rig.engine.set_pace(12345)
    assert page.get("pace") == 12345
    rig.engine.set_pace(0)
    rig.engine.cancel()
    assert page.get("engine") == EngineState.IDLE
    rig.engine.stop()
    assert page.get("engine") == EngineState.ABSENT


def test_a_wild_page_makes_no_unarmed_copy(rig: Rig) -> None:
    """Whatever others write into the page, the engine touches only what this process armed."""
    table = rig.table([noise(MIB)])
    rig.start(table)
    rig.engine.cancel()
    with ControlPage.open(rig.control.path) as other:
        for word in (1, 2, 3, 4, 5, 15, 0xFFFFFFF1, 0xFFFFFFFF):
            other.set("gate", word)
            other.set("window", word)
            other.set("budget", 1 << 40)
            other.set("outside_pace", 1 << 40)
            rig.engine.set_pace(0)  # wakes the thread
            other.set("bytes_total", 1 << 40)
            other.set("bytes_copied", 1 << 41)
            assert rig.engine.progress() == 0
            assert rig.engine.state == EngineState.IDLE
    assert (rig.image == 0xAA).all()
    rig.start(table)
    rig.engine.open_window(4096)
    with ControlPage.open(rig.control.path) as other:
        for _ in range(20):
            other.set("budget", 1 << 40)
            other.set("spent", 0)
            rig.engine.set_pace(0)
    soon(lambda: rig.engine.progress() == 4096, "the budget that was given")
    rig.engine.close_window()
    assert rig.engine.flush(20.0)
    assert rig.engine.copied() == (4096, 0, MIB - 4096)
    rig.check()


def test_a_page_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    with path.open("r+b") as file, pytest.raises(OSError, match="Invalid argument"):
        _engine.Engine(file.fileno(), 0, 0, False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _engine.Engine(9999, 0, 0, False)


@pytest.mark.parametrize("data", [b"1", bytes(33), b"\xff" * 64])
def test_a_broken_table_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"32 bytes each|overflow"):
        _engine.Table(data)


def copying_thread() -> int:
    """Thread id of the only engine of this process, once it has named itself."""
    found: list[int] = []

    def named() -> bool:
        tasks = Path("/proc/self/task").glob("*/comm")
        found[:] = [int(p.parent.name) for p in tasks if p.read_text() == "baft-copy\n"]
        return len(found) == 1

    soon(named, "the one copying thread")
    return found[0]


def test_niceness_and_policy_are_the_threads_alone() -> None:
    """It may not push the training thread off its core when it is woken: SCHED_BATCH."""
    engine = _engine.Engine(-1, 7, 0, False)
    try:
        thread = copying_thread()
        soon(lambda: os.getpriority(os.PRIO_PROCESS, thread) == 7, "its niceness")
        soon(lambda: os.sched_getscheduler(thread) == os.SCHED_BATCH, "its policy")
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == 0
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        engine.stop()


def switches(thread: int) -> int:
    """How often a thread has gone to sleep."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:\t")[1].split("\n")[0])


def test_windows_with_nothing_to_copy_wake_nobody(rig: Rig) -> None:
    """A wake-up costs the training thread tens of microseconds, and most windows of a step have nothing left to do."""
    thread = copying_thread()

    def slept_since(before: int) -> int:
        soon(lambda: Path(f"/proc/self/task/{thread}/stat").read_text().rsplit(") ")[1][0] == "S", "sleep")
        return switches(thread) - before

    slept_since(0)
    before = switches(thread)
    for _ in range(200):  # nothing armed
        rig.engine.open_window()
        rig.engine.close_window(1000)
        rig.engine.open()
        rig.engine.close_window()
    assert slept_since(before) == 0
    rig.start(rig.table([noise(MIB)]))
    for _ in range(200):  # nothing granted
        rig.engine.open_window(0)
        rig.engine.close_window()
    assert slept_since(before) == 0
    rig.engine.open_window()
    soon(lambda: rig.engine.state == EngineState.DONE, "the copy")
    assert slept_since(before) > 0
    before = switches(thread)
    for _ in range(200):  # nothing left
        rig.engine.close_window()
        rig.engine.open_window()
    assert slept_since(before) == 0
    rig.check()


def test_the_page_tells_of_windows(rig: Rig) -> None:
    page = rig.control
    table = rig.table([noise(3 * MIB)])
    rig.start(table)
    for window in range(2):
        rig.engine.open_window(MIB)
        assert page.gate == Gate.WINDOW
        assert page.get("window") == window + 1
        assert page.get("budget") == MIB
        soon(lambda window=window: page.get("bytes_inside") == (window + 1) * MIB, "the budget")  # type: ignore[misc]
        assert page.get("spent") == MIB
        rig.engine.close_window(window * 50 * MIB)
        assert page.get("window") == 0
        assert page.gate == (Gate.OUTSIDE if window else Gate.CLOSED)
    assert page.get("outside_pace") == 50 * MIB
    soon(lambda: page.get("bytes_outside") == MIB, "the rest, outside")
    soon(lambda: page.get("engine") == EngineState.DONE, "DONE in the page")
    assert page.get("window_opened") == page.get("window_closed") == 2
    rig.start(table)
    assert page.get("bytes_inside") == page.get("bytes_outside") == 0
    assert rig.engine.flush(20.0)
    assert page.gate == Gate.CLOSED


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_it_is_not_bound_to_the_training_threads_core() -> None:
    everywhere = os.sched_getaffinity(0)
    over = threading.Event()
    other = threading.Thread(target=over.wait)  # keeps the wide mask, as OpenMP's other threads together do
    other.start()
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        engine = _engine.Engine(-1, 0, 0, False)
        try:
            thread = copying_thread()
            soon(lambda: os.sched_getaffinity(thread) == everywhere, "the wide mask")
        finally:
            engine.stop()
    finally:
        os.sched_setaffinity(0, everywhere)
        over.set()
        other.join()


SOURCES = Path(baft_client.__file__).parent


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_build_without_xxhash_copies_and_leaves_digests_to_others(tmp_path: Path) -> None:
    built = tmp_path / "_engine.abi3.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-std=gnu11", "-pthread", "-Wall", "-Wextra", "-Werror", "-DBAFT_NO_XXHASH",
         "-DPy_LIMITED_API=0x030A0000", f"-I{sysconfig.get_paths()['include']}",
         *map(str, sorted(SOURCES.glob("_*.c"))), "-o", str(built)],
        check=True, timeout=100,
    )  # fmt: skip
    script = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("baft_client._engine", {str(built)!r})
module = importlib.util.module_from_spec(spec)
sys.modules["baft_client._engine"] = module
spec.loader.exec_module(module)
import baft_client
baft_client._engine = module
from pathlib import Path
from baftd.pipeline.events import EventKind
from tests.support.engines import Rig, noise, expected_digests
rig = Rig(Path({str(tmp_path)!r}), "native")
assert not rig.engine.digests
rig.start(rig.table([noise(5_000_000), noise(9)]))
assert rig.engine.flush(20.0)
rig.check()
assert rig.engine.digests_of() == b""
a = rig.arrays[0]
assert rig.engine.digest(a.ctypes.data, a.nbytes) == expected_digests([a])
assert rig.engine.copy_digest(a.ctypes.data, rig.image.ctypes.data, a.nbytes) == expected_digests([a])
rig.close()
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "fine", done.stderr
