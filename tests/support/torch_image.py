"""An image in private memory, made from a training state as a session makes it, for tests that need no daemon."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from baft_torch._state import TrainingState
from baftd.checkpoint.shard import TensorEntry, check_entries
from baftd.checkpoint.state_tree import decode, encode
from baftd.errors import ModelMismatch


class MemoryImage:
    """What `baft_torch._restore.load` needs of an image."""

    def __init__(self, entries: Mapping[str, TensorEntry], data: Mapping[str, bytes], small: Any) -> None:
        self.entries = entries
        self.data = data
        self.small = small

    def copy_into(self, name: str, address: int, nbytes: int) -> None:
        """Copy a tensor's bytes to `address`."""
        if nbytes != len(self.data[name]):
            raise ModelMismatch(f"{name}: {nbytes} bytes wanted, {len(self.data[name])} saved")
        ctypes.memmove(address, self.data[name], nbytes)

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """A fresh copy."""
        return np.frombuffer(self.data[name], dtype=np.uint8).copy()


def snapshot(state: TrainingState, **small: Any) -> MemoryImage:
    """Copy everything now, small state through the typed tree and back."""
    sources = state.refresh()
    stored = check_entries([source.entry for source in sources])
    data = {
        name: ctypes.string_at(source.address, source.entry.nbytes) if source.entry.nbytes else b""
        for name, source in zip(stored, sources, strict=True)
    }
    entries = {name: source.entry for name, source in zip(stored, sources, strict=True)}
    return MemoryImage(entries, data, decode(encode({**state.small(), **small})))
