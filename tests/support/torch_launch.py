"""Starts the ranks of `tests.support.torch_job` or `torch_layout_job`, waits for them, and reads their losses."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.daemon import ROOT

GRACE = 3.0
"""Seconds that other ranks may live after one was killed: a launcher would end them."""


@dataclass(frozen=True)
class Ended:
    """How one start of a job ended: exit status and output of each rank."""

    codes: list[int]
    outputs: list[str]

    def check(self) -> Ended:
        """Fail with the outputs unless every rank ended well."""
        if any(self.codes):
            raise AssertionError(f"exit {self.codes}\n" + "\n".join(text[-4000:] for text in self.outputs))
        return self

    @property
    def first_steps(self) -> list[int]:
        """The step at which each rank began."""
        lines = [line for text in self.outputs for line in text.splitlines()]
        return [int(line.rsplit(" ", 1)[1]) for line in lines if " begins at step " in line]


class Launcher:
    """A process that has imported torch and forks ranks."""

    def __init__(self) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("BAFTD_")}
        paths = [str(ROOT), str(ROOT / "clients"), str(ROOT / "adapters"), environ.get("PYTHONPATH", "")]
        environ.update(PYTHONPATH=os.pathsep.join(p for p in paths if p), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.torch_zygote"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._buffer = b""
        if not self._hear(90.0).get("ready"):
            raise AssertionError("the process that forks ranks did not start")

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def run(
        self,
        kind: str,
        world: int,
        steps: int,
        out: Path,
        *,
        env: Mapping[str, str],
        start: str = "0",
        timeout: float = 90.0,
        meanwhile: Callable[[], None] | None = None,
        program: str = "torch_job",
        **more: str,
    ) -> Ended:
        """Run one start to its end. When a rank was killed the others are ended after a moment.

        `more`: options of the job, such as `kill="7:backward:1"`, `no_baft=""`. `meanwhile` is called often.
        """
        options = [text for key, value in more.items() for text in (f"--{key.replace('_', '-')}", value) if text]
        logs = [out / f"output-{start}-{rank}.log" for rank in range(world)]
        environ = {k: v for k, v in env.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environ.update(
            OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
        ranks = [{"RANK": str(r), "WORLD_SIZE": str(world), "LOCAL_RANK": str(r)} for r in range(world)]
        command = {
            "program": program,
            "argv": ["--kind", kind, "--steps", str(steps), "--out", str(out), "--start", start, *options],
            "env": environ,
            "ranks": ranks if world > 1 else [{}],
            "logs": [str(log) for log in logs],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        codes = self._wait(world, timeout, meanwhile)
        return Ended(codes, [log.read_text(errors="replace") for log in logs])

    def _wait(self, world: int, timeout: float, meanwhile: Callable[[], None] | None) -> list[int]:
        pids: dict[int, int] = {}
        codes: dict[int, int] = {}
        deadline = time.monotonic() + timeout
        ending = False
        while len(codes) < world:
            message = self._hear(0.02)
            if "pid" in message:
                pids[message["rank"]] = message["pid"]
            if "code" in message:
                codes[message["rank"]] = message["code"]
                if message["code"] != 0:
                    deadline = min(deadline, time.monotonic() + GRACE)
            if meanwhile is not None:
                meanwhile()
            if time.monotonic() > deadline:
                for rank, pid in pids.items():
                    if rank not in codes:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL if ending else signal.SIGTERM)
                deadline, ending = time.monotonic() + GRACE, True
        return [codes[rank] for rank in range(world)]

    def _hear(self, timeout: float) -> dict[str, Any]:
        """The next message; empty when none came in time."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return {}
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise AssertionError(f"the process that forks ranks ended with {self._process.wait(5.0)}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def losses(out: Path, start: str, rank: int) -> dict[int, str]:
    """Losses of one start by step, as they were written (hexadecimal: equal means equal in every bit)."""
    path = out / f"losses-{start}-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): loss for step, loss in (line.split() for line in lines)}
