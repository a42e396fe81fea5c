"""What goes into the governor and what comes out of it, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from baftd.pipeline.operations import Schedule
from baftd.pipeline.pacing import RankPlan

__all__ = ["Decision", "RankSetup", "RankSummary", "StepRecord"]


class StepRecord(NamedTuple):
    """One period of one rank, as `wire.messages.Timings` brings it. Times ns, sizes bytes.

    Events may be left out (b"") to save time; then for all ranks of the step, or none: what one rank's copying costs
    the others is only seen where both are there."""

    rank: int
    step: int
    begun: int
    period: int
    events: bytes = b""
    plan: int = 0
    copied: bool = False
    in_windows: int = 0
    outside: int = 0
    at_fence: int = 0
    fence_ns: int = 0
    held_ns: int = 0
    overruns: int = 0
    apart: bool = False
    """The loop did something else: the period says nothing about training."""


@dataclass(frozen=True)
class RankSetup:
    """What a rank has declared."""

    rank: int
    nbytes: int
    """Of a snapshot: what this rank saves."""
    held_bytes: int = 0
    """What it would save if nothing were divided among replicas; 0: nothing is."""
    schedule: Schedule | None = None
    place: int = 0
    """Of the rank in the pipeline."""
    device_free: int = 0
    """Bytes of device memory that a stage at the fence may take; 0: no device, or no room."""
    device_rate: float = 0.0


@dataclass(frozen=True)
class Decision:
    """What holds from now on. `slowest`: the rank that decides, -1: none."""

    rung: str
    interval: int
    probe: int
    plans: Mapping[int, RankPlan]
    slowest: int
    step_seconds: float
    snapshot: float
    """Part of a step's time that a snapshot is expected to cost."""
    why: str
    changed: tuple[int, ...]
    """Ranks whose plan is new; the interval or the reason may be new without any."""


@dataclass(frozen=True)
class RankSummary:
    """Fields of `wire.messages.RankPacing`: seconds of one step, bytes of one snapshot, medians."""

    rank: int
    rung: str
    bytes: int
    window_seconds: float
    in_windows: int
    outside: int
    at_fence: int
    fence_seconds: float
    held_seconds: float
    overruns: int
    """Counted since the rank declared."""
    copy_rate: float
