"""Runs one job of bench/overhead.py: a daemon, ranks in processes of their own, the trace of what the daemon saw."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _service import Service
from _training import dlrover_segments

from baftd.errors import BaftError
from baftd.pipeline.events import Event, unpack_events
from baftd.wire.client import Connection
from baftd.wire.messages import (
    BubblesReply,
    BubblesRequest,
    PacingStatus,
    StatusReply,
    StatusRequest,
    TraceReply,
    TraceRequest,
)

__all__ = ["Job", "Record", "run_job"]

LOOK_EVERY = 20.0
"""Seconds between two looks at the daemon's trace, which keeps the newest steps only."""


@dataclass
class Record:
    """What came of a job."""

    ranks: list[dict[str, Any]]
    pacing: list[PacingStatus] = field(default_factory=list)
    """As `baftd status` said it, from look to look."""
    bubbles: BubblesReply | None = None
    events: dict[tuple[int, int], list[Event]] = field(default_factory=dict)
    """(rank, boundary) -> events of the period that it began."""
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def absent(self) -> dict[str, str]:
        """Contestants that did not run, and why."""
        return {name: why for rank in self.ranks for name, why in rank["absent"].items()}


@dataclass(frozen=True)
class Job:
    """A job to run. `settings`: of the daemon, by name; None: no baftd in it."""

    name: str
    ranks: int
    spec: dict[str, Any]
    seconds: float
    steps: int = 1_000_000
    contestants: tuple[str, ...] = ()
    none_weight: int = 1
    settle: int = 0
    """Steps at the beginning without contestants: the daemon makes up its mind."""
    settings: dict[str, str] | None = field(default_factory=dict)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_job(job: Job, disk: Path) -> Record:
    """Run it to its end. RuntimeError with what a rank wrote, where one fails."""
    with contextlib.ExitStack() as stack:
        service = None
        if job.settings is not None:
            service = stack.enter_context(Service(durable=disk, settings=job.settings))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baftd-bench-", dir=disk)))
        return _run(job, service, scratch)


def _run(job: Job, service: Service | None, scratch: Path) -> Record:
    spec = {
        **job.spec,
        "job": job.name, "baftd": service is not None, "daemon": service.pid if service else 0,
        "seconds": job.seconds, "steps": job.steps, "contestants": list(job.contestants),
        "none_weight": job.none_weight, "settle": job.settle,
        "scratch": str(scratch), "record": str(scratch / "record"),
    }  # fmt: skip
    environ = service.environ if service else Service.plain_environ()
    environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(job.ranks),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    logs = [tempfile.TemporaryFile() for _ in range(job.ranks)]  # noqa: SIM115 - live as long as the ranks
    command = [sys.executable, str(Path(__file__).with_name("_overhead_rank.py")), json.dumps(spec)]
    ranks = [
        subprocess.Popen(
            command, env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL, stdout=logs[rank], stderr=logs[rank],
        )
        for rank in range(job.ranks)
    ]  # fmt: skip
    record = Record([])
    segments = dlrover_segments()
    try:
        until = time.monotonic() + job.seconds + 300
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > until:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(rank for rank in ranks if rank.poll() is None).wait(LOOK_EVERY)
            if service is not None:
                _look(record, service, job.name)
        failed = [number for number, rank in enumerate(ranks) if rank.poll() != 0]
        if failed:
            # The first to end is the one that failed; the others lost their connection to it.
            number = next((n for n in failed if ranks[n].poll() is not None), failed[0])
            logs[number].seek(0)
            text = logs[number].read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"job {job.name}: rank {number} ended with {ranks[number].poll()}:\n{text}")
        if service is not None:
            _look(record, service, job.name)
        record.ranks = [json.loads((scratch / f"record.{rank}").read_text()) for rank in range(job.ranks)]
        return record
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # the group that it makes for itself
            if rank.poll() is None:
                rank.kill()
            rank.wait(10)
        for path in dlrover_segments() - segments:  # its saver outlives its trainers, and leaves them
            path.unlink(missing_ok=True)
        for log in logs:
            log.close()


def _look(record: Record, service: Service, name: str) -> None:
    """Take what the daemon knows now. A daemon that knows nothing of the job yet says so; then there is nothing."""
    with Connection(service.socket, connect_timeout=5.0) as connection:
        status = connection.request(StatusRequest(job=name), 10.0)
        if isinstance(status, StatusReply):
            for job in status.jobs:
                record.counters = dict(job.counters)
                if job.pacing is not None:
                    record.pacing.append(job.pacing)
        try:
            trace = connection.request(TraceRequest(job=name), 30.0)
            bubbles = connection.request(BubblesRequest(job=name), 10.0)
        except BaftError:
            return
    if isinstance(trace, TraceReply):
        for step in trace.steps:
            record.events[step.rank, step.step] = list(unpack_events(step.events))
    if isinstance(bubbles, BubblesReply):
        record.bubbles = bubbles
