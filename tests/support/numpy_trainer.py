"""A deterministic training process of plain arrays, run as a script; and the handle by which a test drives it.

State after step k can be computed here without training (`state_digest`), so that every restore can be compared with
what the uninterrupted run had. The script writes one JSON line for each event.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from baftd.pipeline.events import EventKind, pack_order
from tests.support.daemon import ROOT, RunDirs

if TYPE_CHECKING:
    from tests.support.zygote import Forked, Zygote

ARRAYS = 4
ELEMENTS = 6000


def fresh_state(arrays: int = ARRAYS, elements: int = ELEMENTS) -> dict[str, npt.NDArray[np.float64]]:
    """What training begins with."""
    return {f"layer{i}.weight": np.arange(elements, dtype=np.float64) * (i + 1) / 7 for i in range(arrays)}


def update(state: dict[str, npt.NDArray[np.float64]], step: int, rank: int) -> None:
    """One training step, in place."""
    for number, array in enumerate(state.values()):
        array *= 0.999
        array += (step + 1) * 0.01 + number + rank * 0.5


def digest(state: dict[str, npt.NDArray[np.float64]]) -> str:
    """Of all bytes."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(state[name].tobytes())
    return found.hexdigest()[:24]


def state_digest(step: int, rank: int = 0, arrays: int = ARRAYS, elements: int = ELEMENTS) -> str:
    """What an uninterrupted run has after `step` steps."""
    state = fresh_state(arrays, elements)
    for number in range(step):
        update(state, number, rank)
    return digest(state)


# ---------------------------------------------------------------------------------------------- the process


def main() -> None:
    """The script. Options come as JSON in the first argument; see `TrainerProcess`."""
    from baft_client.arrays import attach_arrays
    from baft_client.engine import EngineHooks

    options: dict[str, Any] = json.loads(sys.argv[1])
    kill: dict[str, int] = options.get("kill") or {}
    rank = int(os.environ.get("RANK", "0"))
    state = fresh_state(options["arrays"], options["elements"])
    session: dict[str, Any] = {}
    if "chunk" in kill:
        session["engine_hooks"] = EngineHooks(hold=True)
    if options.get("engine"):
        session["engine"] = options["engine"]
    checkpointer = attach_arrays(
        options["job"], state, extra=lambda: {"step": at, "note": "x" * 100}, strict=options.get("strict"), **session
    )
    at = 0
    stage: dict[str, Any] | None = options.get("stage")
    if stage is not None:
        stand_in(checkpointer.session, stage)

    def wait_for_word(name: str) -> None:
        say("waiting", at=name, step=at)
        if not sys.stdin.readline():
            os._exit(3)

    try:
        with checkpointer as ck:
            first = ck.resume(fresh=options.get("fresh", False), takeover=options.get("takeover", False))
            say(
                "resumed", step=first, digest=digest(state), extra=ck.extra_restored.get("step"),
                epoch=ck.session._standing.token.epoch if ck.session._standing.token else 0,
            )  # fmt: skip
            if options.get("fork_worker"):
                fork_worker()
            if options.get("wait_at") == "resumed":
                wait_for_word("resumed")
            for step in range(first, options["steps"]):
                time.sleep(options.get("pause", 0.0))
                if stage is not None:
                    run_stage(ck.session, stage, step + 1)
                with ck.update():
                    update(state, step, rank)
                if options.get("settle", True) and step > first and not ck.session.fenced:
                    settled = ck.session.settle(10.0)
                    say("settled", step=step, ok=settled, committed=ck.session._standing.committed.get("memory", 0))
                if options.get("durable_every"):
                    wait_for_durable(ck.session, options["durable_every"])
                at = step + 1
                if options.get("skip_at") == at:
                    ck.session.skip(at, "the test says so")
                    ck._step = at
                    continue
                if kill.get("step") == at and "chunk" in kill:
                    hold_then_die(ck, kill["chunk"])
                else:
                    ck.step()
                    if "chunk" in kill:
                        ck.session._layout._control.set("hold_at", 1 << 40)
                if options.get("save_at") == at:
                    saved = ck.save(timeout=20)
                    say("saved", step=saved.step, tier=saved.tier, path=saved.path)
                if kill.get("step") == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if options.get("wait_at") == at:
                    wait_for_word("step")
            if options.get("wait_at") == "end":
                wait_for_word("end")
        say("finished", step=at, digest=digest(state), counters=ck.counters.__dict__)
    except Exception as error:  # noqa: BLE001 - the test reads what it was
        say("failed", error=type(error).__name__, text=str(error), exit_code=getattr(error, "exit_code", 1))
        sys.exit(getattr(error, "exit_code", 1))


def wait_for_durable(session: Any, every: int) -> None:
    """Train no further before what is committed in memory of each `every` steps has become durable."""
    standing = session._standing

    def written() -> bool:
        committed = standing.committed
        return bool(committed.get("durable", 0) // every >= committed.get("memory", 0) // every)

    with standing.changed:
        if not standing.changed.wait_for(written, 30.0):
            raise AssertionError(f"{standing.committed} are committed")


def stand_in(session: Any, stage: dict[str, Any]) -> None:
    """Say which stage of a pipeline this rank is, and that its waits are windows."""
    from baftd.wire.messages import ScheduleSaid

    said = dict(stage["said"])
    session.schedule = ScheduleSaid(order=pack_order(tuple(one) for one in said.pop("order")), **said)
    session.stages = tuple(said["own"])
    session.windows.register("stage")


def run_stage(session: Any, stage: dict[str, Any], step: int) -> None:
    """The operations and waits of one step, by the clock: they occupy nothing. A barrier of all ranks ends it."""
    begun = time.monotonic()
    for kind, number, micro, begin, end in stage["operations"]:
        if begun + begin - time.monotonic() > 2e-4:
            with waited(session, EventKind.WAIT_RECV):
                sleep_until(begun + begin)
        started = time.monotonic_ns()
        sleep_until(begun + end)
        session.recorder.add(EventKind(kind), number, micro, started, time.monotonic_ns())
    with waited(session, EventKind.WAIT_COLLECTIVE):
        sleep_until(begun + stage["period"])
        meet(stage["meet"], session.rank, step)


@contextmanager
def waited(session: Any, kind: EventKind) -> Iterator[None]:
    """A wait: put down, and a window."""
    began = time.monotonic_ns()
    with session.windows.waiting(kind):
        yield
    session.recorder.add(kind, -1, -1, began, time.monotonic_ns())


def meet(path: str, rank: int, step: int) -> None:
    """Wait until every rank has come to `step`: one counter a rank in a file of shared memory."""
    counters = np.memmap(path, dtype=np.int64, mode="r+")
    counters[rank] = step
    deadline = time.monotonic() + 60
    while counters.min() < step:
        if time.monotonic() > deadline:
            raise AssertionError(f"rank {rank}: ranks {counters.tolist()} did not come to step {step}")
        time.sleep(1e-4)


def sleep_until(moment: float) -> None:
    """Of `time.monotonic`."""
    time.sleep(max(0.0, moment - time.monotonic()))


def hold_then_die(checkpointer: Any, chunk: int) -> None:
    """Begin a snapshot that stops before chunk number `chunk`, and die there."""
    page = checkpointer.session._layout._control
    page.set("hold_at", chunk)
    copies = page.get("copies")
    checkpointer.step()
    deadline = time.monotonic() + 60
    while page.get("copies") == copies or page.get("chunks_done") != chunk:
        if time.monotonic() > deadline:
            raise AssertionError(f"the copy did not stop before chunk {chunk}: {page.read()}")
        time.sleep(0.0005)
    say("dying", chunks=page.get("chunks_done"))
    os.kill(os.getpid(), signal.SIGKILL)


def fork_worker() -> None:
    """A loader worker that outlives its trainer."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(120)
        os._exit(0)
    say("worker", pid=pid)


def say(event: str, **fields: Any) -> None:
    """One line of the script's output."""
    sys.stdout.write(json.dumps({"event": event, **fields}, default=str) + "\n")
    sys.stdout.flush()


# ---------------------------------------------------------------------------------------------- the handle


class TrainerProcess:
    """One rank, started as a script of its own."""

    def __init__(
        self,
        dirs: RunDirs,
        *,
        steps: int,
        job: str = "fault",
        rank: int = 0,
        world: int = 1,
        incarnation: str = "",
        arrays: int = ARRAYS,
        elements: int = ELEMENTS,
        environ: dict[str, str] | None = None,
        zygote: Zygote | None = None,
        **options: Any,
    ) -> None:
        """`options`: kill={"step": k, "chunk": c}, settle, pause, wait_at, fork_worker, engine, strict, fresh,
        takeover, stage, durable_every: see `main`. With `zygote` the process is forked there."""
        self.job, self.rank = job, rank
        self.events: list[dict[str, Any]] = []
        self._waits = False
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        env = dirs.environ(connect_timeout="20 s")
        env.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(environ or {})})
        if world > 1:
            env.update({"RANK": str(rank), "WORLD_SIZE": str(world), "BAFTD_INCARNATION": incarnation})
        arguments = json.dumps({"steps": steps, "job": job, "arrays": arrays, "elements": elements, **options})
        self._log = Path(dirs.base, f"trainer-{rank}-{id(self):x}.log").open("ab")  # noqa: SIM115 - closed in close()
        self.process: subprocess.Popen[bytes] | Forked
        if zygote is not None:
            self.process = zygote.start(
                "tests.support.numpy_trainer",
                [arguments],
                env=env,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from tests.support.numpy_trainer import main; main()", arguments],
                env=env,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), name="trainer-output")
        self._reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def wait_for(self, event: str, timeout: float = 30.0) -> dict[str, Any]:
        """The next event of that kind; those before it are kept in `events`. Fails at the end of the output."""
        if event == "waiting" and self._waits:
            self._waits = False
            return self.events[-1]
        deadline = time.monotonic() + timeout
        while True:
            try:
                found = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event!r} within {timeout:g} s; so far: {self.events}") from None
            if found is None:
                self._queue.put(None)
                raise AssertionError(f"the trainer ended without {event!r}: {self.events}")
            self.events.append(found)
            if found["event"] == event:
                return found

    def go_on(self) -> None:
        """Answer `waiting`."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for the end; all events are in `events` then. Negative: the signal that killed it."""
        status = self.process.wait(timeout)
        self._drain()
        return status

    def kill(self) -> None:
        """SIGKILL and wait."""
        self.process.kill()
        self.wait(10)

    def _drain(self) -> None:
        workers = [event["pid"] for event in self.events if event["event"] == "worker"]
        if not workers:  # else the forked worker holds the pipe
            self._reader.join(10)
        while not self._queue.empty():
            found = self._queue.get_nowait()
            if found is not None:
                self.events.append(found)
        self._queue.put(None)

    @property
    def finished_waiting(self) -> bool:
        """Whether it waits for a word, or has ended."""
        while not self._queue.empty():
            found = self._queue.get_nowait()
            if found is None:
                self._queue.put(None)
                return True
            self.events.append(found)
            if found["event"] == "waiting":
                self._waits = True
        return self._waits

    def greeted(self, dirs: RunDirs) -> bool:
        """Whether a daemon there has heard this process."""
        return any(
            f"event=hello job={self.job} rank={self.rank} pid={self.process.pid}" in log for _, log in dirs.logs()
        )

    def last(self, event: str) -> dict[str, Any] | None:
        """The newest event of a kind."""
        return next((found for found in reversed(self.events) if found["event"] == event), None)

    @property
    def committed(self) -> int:
        """The newest step that this rank has seen committed in memory."""
        return max((e["committed"] or 0 for e in self.events if e["event"] == "settled"), default=0)

    def close(self) -> None:
        """Kill what still runs, close pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for event in self.events:
            if event["event"] == "worker":
                try:
                    os.kill(event["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    continue
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
