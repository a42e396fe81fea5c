"""The state of every random number generator that a training step may draw from, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from baftd.errors import FormatError

__all__ = ["capture", "restore"]


def capture(generators: dict[str, torch.Generator]) -> dict[str, Any]:
    """State of python, numpy (the global one), torch and every CUDA device, and of `generators` by name.

    Drawn from nothing: calling it changes no generator.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        # 625 words below 2**32: as bytes they cost a tenth of a tuple of numbers
        "python": (version, np.array(words, dtype=np.uint32).tobytes(), gauss),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [each.numpy().tobytes() for each in torch.cuda.get_rng_state_all()]
    if generators:
        state["generators"] = {name: each.get_state().numpy().tobytes() for name, each in generators.items()}
    return state


def restore(state: dict[str, Any], generators: dict[str, torch.Generator]) -> list[str]:
    """Set every generator to what `capture` saw. Returns one sentence for each that could not be set."""
    missed: list[str] = []
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(np.frombuffer(words, dtype=np.uint32).tolist()), gauss))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(_tensor(state["torch"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise FormatError(f"the saved state of the random number generators cannot be used: {problem}.") from problem
    devices = state.get("cuda", [])
    present = torch.cuda.device_count() if devices and torch.cuda.is_available() else 0
    for index, saved in enumerate(devices):
        if index < present:
            torch.cuda.set_rng_state(_tensor(saved), index)
        else:
            missed.append(f"the generator of CUDA device {index} was saved, but there is no such device here")
    for name, saved in state.get("generators", {}).items():
        if name in generators:
            generators[name].set_state(_tensor(saved))
        else:
            missed.append(f"a generator {name!r} was saved, but this run has none of that name")
    return missed


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
