"""Figures of a real job: a daemon, a training process, both measured from outside and inside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _report import Report, median, ratio
from _service import Service

__all__ = ["dlrover_segments", "training"]

LIMIT = 1500.0
"""Seconds that one training process may take."""


def dlrover_segments() -> set[Path]:
    """Shared memory of dlrover's."""
    return set(Path("/dev/shm").glob("ckpt_shm_*"))


class _Trainer:
    """`_trainer.py` in a process of its own; yields the JSON lines that it says."""

    def __init__(self, service: Service, **spec: object) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environ = {**service.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_trainer.py")), json.dumps(spec)],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        self._segments = dlrover_segments()

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it says, until it ends. RuntimeError with its stderr when it fails or takes too long."""
        process = self._process
        assert process.stdout is not None
        until, pending = time.monotonic() + LIMIT, b""
        while True:
            if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                process.kill()
                break
            data = process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
            if not data:
                break
            *complete, pending = (pending + data).split(b"\n")
            for line in complete:
                yield json.loads(line)
        if process.wait(30):
            self._log.seek(0)
            text = self._log.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"the training process ended with {process.returncode}:\n{text}")

    def go_on(self) -> None:
        """Answer a process that waits."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it, if it still runs, and what a peer left behind: dlrover's saver outlives its trainer."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group that it makes for itself
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        for path in dlrover_segments() - self._segments:
            path.unlink(missing_ok=True)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()


def training(
    report: Report, *, nbytes: int, rounds: int, durable_rounds: int, work: float, idle: float, disk: Path
) -> None:
    """Add held_ms_per_gb and its peers, durable_ratio, restore_ratio, daemon_rss_mb, daemon_idle_cpu_percent."""
    with Service(durable=disk) as service, tempfile.TemporaryDirectory(prefix="baftd-bench-", dir=disk) as scratch:
        spec: dict[str, object] = {"nbytes": nbytes, "durable": str(service.durable), "scratch": scratch}
        trainer = _Trainer(
            service, mode="train", rounds=rounds, durable_rounds=durable_rounds, work=work, **spec
        )
        try:
            for line in trainer.lines():
                if "absent" in line:
                    report.note(f"absent: {line['absent']}")
                if "held" in line:
                    _held(report, line["held"], nbytes, work)
                if "durable" in line:
                    _durable(report, line["durable"])
                if "idle" in line:
                    _daemon(report, service, idle, nbytes)
                    trainer.go_on()
        finally:
            trainer.close()
        trainer = _Trainer(service, mode="restore", rounds=rounds, **spec)
        try:
            for line in trainer.lines():
                if "restore" in line:
                    _restore(report, line["restore"])
        finally:
            trainer.close()


def _held(report: Report, series: dict[str, list[float]], nbytes: int, work: float) -> None:
    ways = {
        "baftd": ("held_ms_per_gb", 1.0, f"begin + seal + fence wait, {work:g} s of work on one core between"),
        "memcpy": ("held_memcpy", None, "numpy.copyto of the state: the least that a synchronous snapshot costs"),
        "torch_save": ("held_torch_save", None, "torch.save to the disk's page cache"),
        "dcp_async_save": ("held_dcp_async_save", None, "DCP async_save with a kept stager"),
        "dcp_async_save_background": (
            "held_dcp_background",
            None,
            "the same, staged in its thread and waited for before the update",
        ),
        "dlrover": ("held_dlrover", None, "dlrover flash checkpoint, memory only"),
    }
    if statistics.median(series["memcpy"]) * 1e3 / (nbytes / 1e9) < 5:
        report.note("held_ms_per_gb is not discriminating here: a whole copy of the state clears the goal almost too.")
    for name, seconds in series.items():
        figure, goal, how = ways[name]
        milliseconds = [s * 1e3 / (nbytes / 1e9) for s in seconds]
        report.add(figure, median(milliseconds), unit="ms/GB", goal=goal, better="lower", how=how)


def _durable(report: Report, series: dict[str, list[float]]) -> None:
    report.steady("durable_ratio", series["plain"])
    report.add("durable_ratio", ratio(series["plain"], series["baftd"]), unit="", goal=0.9, better="higher",
               how="a committed step made durable, fsync and manifests too, against an O_DIRECT write")  # fmt: skip
    report.add("durable_gbps", median([1e-9 / s for s in series["baftd"]]), unit="GB/s", goal=None, better="higher",
               how="the same, bytes a second")  # fmt: skip


def _restore(report: Report, series: dict[str, list[float]]) -> None:
    report.steady("restore_ratio", series["plain"])
    report.add("restore_ratio", ratio(series["plain"], series["baftd"]), unit="", goal=0.8, better="higher",
               how="slot to tensors, verified, against numpy.copyto between the same memory")  # fmt: skip


def _daemon(report: Report, service: Service, idle: float, nbytes: int) -> None:
    report.add("daemon_rss_mb", (service.resident_mb(), 0.0), unit="MB", goal=80.0, better="lower",
               how=f"after snapshots and durable writes of {nbytes / 1e6:.0f} MB, shared memory left out")  # fmt: skip
    shares = []
    for _ in range(4):
        before, began = service.cpu_seconds(), time.monotonic()
        time.sleep(idle / 4)
        shares.append(100 * (service.cpu_seconds() - before) / (time.monotonic() - began))
    report.add("daemon_idle_cpu_percent", median(shares), unit="%", goal=1.0, better="lower",
               how=f"of one core over {idle:g} s, one training process attached and idle")  # fmt: skip
