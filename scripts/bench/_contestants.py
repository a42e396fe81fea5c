"""Ways to checkpoint a rank's state in a step: what baftd is compared with.

Each has `begin(step)` after an update, `fence()` before the next one, and `settle()` outside of what is timed, which
waits for what it left running, so that no contestant pays for another.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from baft_client.engine import Segment
from baft_client.load_engine import load_engine

__all__ = ["Contestant", "make_contestants", "same_on_all"]

State = Mapping[str, torch.Tensor]


class Contestant(Protocol):
    """See the module's docstring."""

    def begin(self, step: int) -> None:
        """The update of `step` is done."""

    def fence(self) -> None:
        """The next update begins."""

    def settle(self) -> None:
        """Outside of the timing."""

    def close(self) -> None:
        """Give back what it took."""


class _Nothing:
    def begin(self, step: int) -> None:
        """Nothing."""

    def fence(self) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Clone(_Nothing):
    """A fresh copy of everything, in the training thread."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._kept: list[torch.Tensor] = []

    def begin(self, step: int) -> None:
        self._kept = [tensor.clone() for tensor in self._state.values()]

    def settle(self) -> None:
        self._kept = []


class _Memory:
    """Prefaulted shared memory for a whole state."""

    def __init__(self, state: State) -> None:
        total = sum((t.nbytes + 63) // 64 * 64 for t in state.values())
        fd, name = tempfile.mkstemp(prefix="baftd-bench-", dir="/dev/shm")
        os.unlink(name)
        os.posix_fallocate(fd, 0, total)
        self.map = mmap.mmap(fd, total)
        os.close(fd)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)
        self.bytes[:: mmap.PAGESIZE] = 0
        self.offsets = []
        at = 0
        for tensor in state.values():
            self.offsets.append(at)
            at += (tensor.nbytes + 63) // 64 * 64


class _Copy(_Nothing):
    """A copy into prefaulted shared memory, in the training thread."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._memory = _Memory(state)
        self._views = [
            torch.from_numpy(self._memory.bytes[at : at + t.nbytes]).view(t.dtype)
            for at, t in zip(self._memory.offsets, state.values(), strict=True)
        ]

    def begin(self, step: int) -> None:
        for view, tensor in zip(self._views, self._state.values(), strict=True):
            view.copy_(tensor)


class _Ungated(_Nothing):
    """The same by a background thread of our own engine, from update to update, without any windows."""

    def __init__(self, state: State) -> None:
        self._memory = _Memory(state)
        self._engine = load_engine(None, prefer="native")
        self._table = self._engine.prepare(
            [
                Segment(t.data_ptr(), at, t.nbytes, t.element_size())
                for at, t in zip(self._memory.offsets, state.values(), strict=True)
            ]
        )

    def begin(self, step: int) -> None:
        self._engine.start(self._memory.bytes.ctypes.data, self._memory.bytes.nbytes, self._table)
        self._engine.open()

    def fence(self) -> None:
        if not self._engine.flush(60.0):
            raise RuntimeError("the ungated copy did not end within a minute")

    def settle(self) -> None:
        self._engine.cancel()

    def close(self) -> None:
        self._engine.stop()


class _Save(_Nothing):
    """torch.save into the page cache of the disk."""

    def __init__(self, state: State, directory: Path) -> None:
        self._state, self._path = dict(state), directory / "state.pt"

    def begin(self, step: int) -> None:
        torch.save(self._state, self._path)

    def settle(self) -> None:
        self._path.unlink(missing_ok=True)


class _AsyncSave(_Nothing):
    """torch.distributed.checkpoint.async_save of this rank's own state (no_dist), by default or with a stager."""

    def __init__(self, state: State, directory: Path, how: str) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        self._state, self._path = dict(state), directory / how
        self._options: dict[str, Any] = {"no_dist": True}
        plain = {"use_pinned_memory": False, "use_shared_memory": False, "use_non_blocking_copy": False}
        if how == "thread":
            self._options["async_stager"] = DefaultStager(StagingOptions(use_async_staging=True, **plain))
        elif how == "process":
            self._options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
            shared = {**plain, "use_shared_memory": True}
            self._options["async_stager"] = DefaultStager(StagingOptions(use_async_staging=False, **shared))
        self._save: Any = async_save
        self._answer: Any = None

    def begin(self, step: int) -> None:
        self._answer = self._save(self._state, checkpoint_id=self._path, **self._options)

    def fence(self) -> None:
        if hasattr(self._answer, "staging_completion"):
            self._answer.staging_completion.result(60)

    def settle(self) -> None:
        if self._answer is not None:
            (self._answer.upload_completion if hasattr(self._answer, "upload_completion") else self._answer).result(120)
        self._answer = None
        shutil.rmtree(self._path, ignore_errors=True)


class _Dlrover(_Nothing):
    """dlrover's flash checkpoint of every rank into its shared memory, in the training thread; nothing is persisted."""

    def __init__(self, state: State, directory: Path) -> None:
        from dlrover.python.common.storage import PosixDiskStorage
        from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointConfig
        from dlrover.trainer.torch.flash_checkpoint.full_ckpt_engine import FullCheckpointEngine

        class Engine(FullCheckpointEngine):  # type: ignore[misc]
            """Its engine for replicas lets one rank save; here each rank has a state of its own."""

            def get_saving_ranks(self) -> None:
                """All."""

            def get_local_shard_num(self) -> int:
                """One a rank."""
                return dist.get_world_size()

            def get_global_shard_num(self) -> int:
                """One a rank."""
                return dist.get_world_size()

        self._state, self._path, self._config = dict(state), directory / "dlrover", CheckpointConfig
        self._engine: Any = Engine(checkpoint_dir=str(self._path), storage=PosixDiskStorage())

    def begin(self, step: int) -> None:
        config = self._config(step=step + 1, paths={"state": str(self._path / str(step))})
        if not self._engine.save_state_dict_to_memory({"state": self._state}, config):
            raise RuntimeError("dlrover did not save")


def make_contestants(names: list[str], state: State, directory: Path) -> tuple[dict[str, Contestant], dict[str, str]]:
    """(contestants by name, those that cannot run here -> why). "none" is always there."""
    made: dict[str, Contestant] = {"none": _Nothing()}
    absent: dict[str, str] = {}
    makers: dict[str, Any] = {
        "clone": lambda: _Clone(state),
        "copy": lambda: _Copy(state),
        "ungated": lambda: _Ungated(state),
        "torch_save": lambda: _Save(state, directory),
        "dcp_default": lambda: _AsyncSave(state, directory, "default"),
        "dcp_thread": lambda: _AsyncSave(state, directory, "thread"),
        "dcp_process": lambda: _AsyncSave(state, directory, "process"),
        "dlrover": lambda: _Dlrover(state, directory),
    }
    for name in names:
        if name == "dlrover" and importlib.util.find_spec("dlrover") is None:
            absent[name] = "not installed (pip install dlrover==0.6.1 grpcio tornado psutil)"
            continue
        try:
            made[name] = makers[name]()
        except Exception as error:  # noqa: BLE001 - a peer that cannot start here is reported as absent
            absent[name] = f"{type(error).__name__}: {error}"
    return made, absent


def same_on_all(found: set[str]) -> set[str]:
    """Names that every rank has: a step is one contestant's on all of them."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sorted(found))
    return set.intersection(*map(set, everywhere))
