"""The engines and what happens to a process: fork, signals, exit, memory taken away after cancel."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from baft_client.engine import EngineHooks, EngineState
from baftd.errors import UsageError
from tests.support.engines import MIB, Rig, noise, soon

Name = Literal["native", "python"]


@pytest.fixture(params=["native", "python"])
def name(request: pytest.FixtureRequest) -> Name:
    chosen: Name = request.param
    return chosen


@pytest.fixture
def slow(tmp_path: Path, name: Name) -> Iterator[Rig]:
    """An engine in the middle of a copy of 6 MiB that takes a third of a second."""
    rig = Rig(tmp_path, name, hooks=EngineHooks(throttle=18 * MIB))
    rig.start(rig.table([noise(5 * MIB), noise(MIB)]))
    rig.engine.open()
    soon(lambda: rig.engine.progress() > 0, "some progress")
    yield rig
    rig.close()


def in_child(work: Callable[[], object]) -> int:
    """Exit status of a forked child that ran `work`; 13 for an exception."""
    pid = os.fork()
    if pid == 0:
        status = 13
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return wait_for(pid)


def wait_for(pid: int, timeout: float = 20.0) -> int:
    """Exit status of a child, killed after `timeout`."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hung")


def test_a_forked_child_has_no_engine_and_the_parent_goes_on(slow: Rig) -> None:
    image = slow.image.copy()

    def child() -> None:
        assert slow.engine.state == EngineState.ABSENT
        assert slow.engine.progress() == 0
        assert not slow.engine.flush(1.0)
        slow.engine.open()
        slow.engine.set_pace(1)
        slow.engine.close_window()
        slow.engine.cancel()
        with pytest.raises(UsageError, match="ABSENT"):
            slow.start(slow.table([noise(10)]))
        slow.engine.stop()

    assert in_child(child) == 0
    assert slow.engine.state in (EngineState.WAITING, EngineState.COPYING, EngineState.DONE)
    assert slow.engine.flush(20.0)
    slow.check()
    assert image.shape == slow.image.shape


def test_forks_at_any_moment(tmp_path: Path, name: Name) -> None:
    """Twenty children born while blocks are copied; each can make an engine of its own."""
    rig = Rig(tmp_path, name)
    table = rig.table([noise(3 * MIB), noise(70_000)])
    try:
        for turn in range(20):
            rig.start(table)
            rig.engine.open()

            def child(turn: int = turn) -> None:
                if turn % 5 == 0:
                    own = Rig(tmp_path, name)
                    own.start(own.table([noise(100_000)]))
                    assert own.engine.flush(20.0)
                    own.check()
                    own.close()
                assert rig.engine.state == EngineState.ABSENT

            assert in_child(child) == 0
            assert rig.engine.flush(20.0)
            rig.check()
    finally:
        rig.close()


def test_a_fork_that_python_does_not_see(tmp_path: Path) -> None:
    """A library's own fork(): the native engine hears of it from libc."""
    rig = Rig(tmp_path, "native", hooks=EngineHooks(throttle=18 * MIB))
    libc = ctypes.PyDLL(None)
    try:
        rig.start(rig.table([noise(4 * MIB)]))
        rig.engine.open()
        soon(lambda: rig.engine.progress() > 0, "some progress")
        pid = libc.fork()
        if pid == 0:
            os._exit(0 if rig.engine.state == EngineState.ABSENT else 13)
        assert wait_for(pid) == 0
        assert rig.engine.flush(20.0)
        rig.check()
    finally:
        rig.close()


def test_a_subprocess_and_its_parent(slow: Rig) -> None:
    assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, timeout=20).stdout == b"1\n"
    assert slow.engine.flush(20.0)
    slow.check()


def test_the_thread_takes_no_signal(slow: Rig) -> None:
    blocked = []
    for task in Path("/proc/self/task").iterdir():
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        blocked.append(int(status["SigBlk"], 16))
    terminating = sum(1 << (s - 1) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD))
    assert sum(mask & terminating == terminating for mask in blocked) >= 1
    assert blocked[0] & terminating == 0, "the main thread still takes them"
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.001)
        assert got
        assert slow.engine.flush(20.0)
        slow.check()
    finally:
        signal.signal(signal.SIGUSR1, before)


def run_script(tmp_path: Path, body: str, name: Name) -> subprocess.CompletedProcess[str]:
    """Run `body` in a fresh interpreter, with an engine in mid-copy as `engine`."""
    head = f"""
    import ctypes, faulthandler, mmap, os, sys, threading, time
    from pathlib import Path
    faulthandler.enable()
    from baft_client.engine import EngineHooks, EngineState, Segment
    from baft_client.load_engine import load_engine
    from tests.support.engines import MIB, Rig, noise, soon
    rig = Rig(Path({str(tmp_path)!r}), {name!r}, hooks=EngineHooks(throttle=8 * MIB))
    engine = rig.engine
    rig.start(rig.table([noise(32 * MIB)]))
    engine.open()
    soon(lambda: engine.progress() > 0, "some progress")
    """
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(head) + textwrap.dedent(body)],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("raise SystemExit", 0),
        ("raise RuntimeError('over')", 1),
        ("threading.Thread(target=lambda: engine.flush(30.0), daemon=True).start(); time.sleep(0.05)", 0),
        ("threading.Thread(target=lambda: sys.exit(0)).start()", 0),
        ("del rig.arrays[:]; globals().clear()", 0),
        ("os._exit(5)", 5),
    ],
    ids=["end", "exit", "bare exit", "exception", "flushing thread", "thread", "globals gone", "at once"],
)
def test_the_interpreter_exits_in_the_middle_of_a_copy(tmp_path: Path, name: Name, body: str, code: int) -> None:
    began = time.monotonic()
    done = run_script(tmp_path, body, name)
    assert done.returncode == code, done.stderr
    assert "Fatal" not in done.stderr
    assert time.monotonic() - began < 30


def test_a_forked_child_that_exits_as_usual(tmp_path: Path, name: Name) -> None:
    """The child runs the atexit handlers it inherited; the parent's copy must not notice."""
    done = run_script(
        tmp_path,
        """
        pid = os.fork()
        if pid == 0:
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert engine.state in (EngineState.WAITING, EngineState.COPYING), engine.state
        before = engine.progress()
        soon(lambda: engine.progress() > before, "progress after the child")
        print("fine")
        """,
        name,
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_sources_may_go_once_cancel_has_returned(tmp_path: Path, name: Name) -> None:
    """Sources and slot are unmapped right after cancel, again and again: one late touch is a crash."""
    done = run_script(
        tmp_path,
        """
        engine.cancel()
        engine.stop()
        engine = load_engine(None, prefer=engine.name)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        n, halfway = 8 * MIB, 0
        for turn in range(300):
            source = libc.mmap(None, n, 3, 0x22, -1, 0)
            target = libc.mmap(None, n, 3, 0x22, -1, 0)
            engine.start(target, n, engine.prepare([Segment(source, 0, n)]))
            engine.open()
            until = time.perf_counter() + turn % 30 * 1e-4
            while time.perf_counter() < until:
                time.sleep(0)  # gives the GIL away: the Python engine needs it between blocks
            halfway += 0 < engine.progress() < n
            engine.cancel()
            libc.munmap(source, n)
            libc.munmap(target, n)
        print("fine", halfway)
        """,
        name,
    )
    assert done.stdout.startswith("fine"), done.stderr
    assert int(done.stdout.split()[1]) > 20, "hardly ever in the middle: proves nothing"
