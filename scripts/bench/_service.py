"""A daemon of the benchmark's own, in directories of its own, as a user would start it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from baftd.errors import Unreachable
from baftd.wire.client import Connection
from baftd.wire.messages import StatusRequest

__all__ = ["Service"]

ROOT = Path(__file__).resolve().parents[2]


class Service:
    """`baftd start --foreground`; everything is removed at the end."""

    def __init__(self, *, durable: Path, settings: Mapping[str, str] | None = None) -> None:
        """`durable`: where to make the directory of the durable tier, on the disk that is measured. `settings`: others
        than the default, by name."""
        self._settings = dict(settings or {})
        self.base = Path(tempfile.mkdtemp(prefix="baftd-bench-", dir="/tmp"))
        self.shm = Path(tempfile.mkdtemp(prefix="baftd-bench-", dir="/dev/shm"))
        self.durable = Path(tempfile.mkdtemp(prefix="baftd-bench-", dir=durable))
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def plain_environ() -> dict[str, str]:
        """For processes that know the project and no daemon."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BAFTD_")}
        ours = [str(ROOT / part) for part in ("", "clients", "adapters", "scripts/bench")]
        environ["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [environ.get("PYTHONPATH")])])
        return environ

    @property
    def socket(self) -> Path:
        """The daemon's control socket."""
        return self.base / "run" / "baftd.sock"

    @property
    def environ(self) -> dict[str, str]:
        """For every process that belongs to it."""
        environ = self.plain_environ()
        environ.update(
            BAFTD_RUN_DIR=str(self.base / "run"),
            BAFTD_STATE_DIR=str(self.base / "state"),
            BAFTD_SHM_DIR=str(self.shm),
            BAFTD_DURABLE_DIR=str(self.durable),
            BAFTD_DURABLE_EVERY="1000000 steps",
            BAFTD_DURABLE_KEEP="1",
            BAFTD_NODE="bench",
            BAFTD_INTERVAL="1 step",
        )
        environ.update({f"BAFTD_{name.upper()}": value for name, value in self._settings.items()})
        return environ

    @property
    def pid(self) -> int:
        """Of the daemon."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Service:
        try:
            with (self.base / "log").open("wb") as log:
                command = [sys.executable, "-m", "baftd.cli.main", "start", "--foreground"]
                self._process = subprocess.Popen(
                    command, env=self.environ, cwd=self.base, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            self._wait_ready(time.monotonic() + 30)
        except BaseException:
            self._close()
            raise
        return self

    def _wait_ready(self, until: float) -> None:
        socket = self.socket
        while True:
            try:
                if socket.exists():
                    with Connection(socket, connect_timeout=2.0) as connection:
                        connection.request(StatusRequest(), 2.0)
                    return
            except Unreachable:
                pass  # not yet
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the daemon did not start:\n{(self.base / 'log').read_text()[-4000:]}")
            time.sleep(0.05)

    def resident_mb(self) -> float:
        """Memory of the daemon beside shared pages, in 10^6 bytes: slots are shared memory."""
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ":" in line
        )
        return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile")) / 1e6

    def cpu_seconds(self) -> float:
        """Time the daemon's threads have run so far."""
        total = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def log(self) -> str:
        """What it wrote."""
        return (self.base / "log").read_text(errors="replace")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        for directory in (self.base, self.shm, self.durable):
            shutil.rmtree(directory, ignore_errors=True)
