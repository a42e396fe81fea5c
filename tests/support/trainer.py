"""A rank for the client's tests: a few arrays, a session, and the four calls of a training loop."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baft_client.session import Session
from baft_client.source import Outcome, Source
from baftd.checkpoint.shard import TensorEntry
from baftd.settings import Settings, load_settings
from tests.support.scripted_daemon import ScriptedDaemon

INCARNATION = "5e" * 16


class Places:
    """Directories of one test: run (short) and shm."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="baftd-c", dir="/tmp"))
        self.shm = Path(tempfile.mkdtemp(prefix="baftd-test-client-", dir="/dev/shm"))
        self.socket = self.base / "run" / "baftd.sock"

    def settings(self, **more: str) -> Settings:
        """Settings of a trainer here: short waits."""
        flags = {
            "run_dir": str(self.socket.parent),
            "shm_dir": str(self.shm),
            "connect_timeout": "5 s",
            "restore_wait": "5 s",
            "rendezvous_timeout": "5 s",
            "declare_timeout": "5 s",
            **more,
        }
        return load_settings(flags=flags, environ={}, files=())

    def daemon(self, **options: Any) -> ScriptedDaemon:
        """A scripted daemon, not started."""
        return ScriptedDaemon(self.socket, self.shm, **options)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.base)
        shutil.rmtree(self.shm)


@contextmanager
def places() -> Iterator[Places]:
    """Directories for the length of a block."""
    found = Places()
    try:
        yield found
    finally:
        found.close()


class Trainer:
    """One rank with `tensors` stable float32 arrays of `size` elements and one volatile array."""

    def __init__(
        self,
        where: Places,
        *,
        tensors: int = 3,
        size: int = 1000,
        options: dict[str, str] | None = None,
        **session: Any,
    ) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {
            f"w{i}": np.arange(size, dtype=np.float32) + i for i in range(tensors)
        }
        self.arrays["buffer"] = np.zeros(100, dtype=np.int64)
        self.small: dict[str, object] = {"seed": 1}
        self.versions = dict.fromkeys(self.arrays, 0)
        self.step = self.updates = 0
        self.sources: list[Source] = []
        self.build()
        session.setdefault("rank", 0)
        session.setdefault("world", 1)
        session.setdefault("incarnation", INCARNATION)
        self.session = Session.attach("job", settings=where.settings(**(options or {})), framework="test", **session)

    def build(self) -> None:
        """Make the sources anew: the tree changed."""
        self.sources = [self.source(name, array) for name, array in self.arrays.items()]

    def source(self, name: str, array: npt.NDArray[Any]) -> Source:
        """A source with a version counter that the test raises by hand."""
        entry = TensorEntry(
            name=name,
            dtype={"float32": "F32", "int64": "I64"}[array.dtype.name],
            shape=array.shape,
            nbytes=array.nbytes,
            kind="volatile" if name == "buffer" else "stable",
        )
        return Source(
            entry=entry,
            address=array.ctypes.data,
            keep=array,
            itemsize=array.itemsize,
            identity=self.identity(name),
            witness=lambda: self.identity(name),
        )

    def identity(self, name: str) -> tuple[int, ...]:
        """Pointer, bytes, version."""
        array = self.arrays[name]
        return array.ctypes.data, array.nbytes, self.versions[name]

    def join(self, **options: Any) -> Trainer:
        """Resume afresh."""
        self.session.resume(**options)
        self.session.restored()
        return self

    def boundary(self, **options: Any) -> Outcome:
        """The next boundary."""
        self.step += 1
        for source in self.sources:
            source.keep = self.arrays[source.entry.name]
            source.identity = self.identity(source.entry.name)
            source.address = source.identity[0]
        return self.session.boundary(self.step, self.updates, self.sources, self.small, **options)

    def fence(self) -> Outcome:
        """Before the update."""
        return self.session.fence(self.updates)

    def update(self) -> None:
        """Every array changes."""
        self.updates += 1
        for array in self.arrays.values():
            array += 1

    def one_step(self) -> Outcome:
        """Update, boundary, fence: the outcome of the fence if the boundary began a snapshot."""
        self.update()
        outcome = self.boundary()
        return self.fence() if outcome.kind == "began" else outcome

    def wait_for_grant(self, timeout: float = 5.0) -> None:
        """Until a slot is granted for the next boundary."""
        standing = self.session._standing
        with standing.changed:
            assert standing.changed.wait_for(lambda: standing.granted > 0, timeout)

    def bytes(self) -> dict[str, bytes]:
        """A copy of the state."""
        return {name: array.tobytes() for name, array in self.arrays.items()}

    def close(self) -> None:
        """Leave."""
        self.session.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
