"""The controller of a job's snapshots on one node: measured steps in, decisions out. Pure: no clock, no chance.

    governor = Governor(fixed, budget, probe)
    governor.declare(setup)         a rank has declared what a snapshot of it takes (again: replaced)
    governor.cadence(every, ...)    what is in force job-wide
    governor.add(record)            what a rank did in a step
    governor.decide()               a Decision where something changed, else None: send plans, propose the interval
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from baftd.pipeline.interval import Interval
from baftd.pipeline.operations import Schedule
from baftd.pipeline.overhead import Estimate
from baftd.pipeline.pacing import RankPlan
from baftd.pipeline.profile import Profile

__all__ = ["Decision", "Governor", "RankSetup", "RankSummary", "StepRecord"]


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
    """What holds from now on. `expected` is a part of the step time; `slowest` the rank that decides, -1: none."""

    rung: str
    interval: int
    probe: int
    plans: Mapping[int, RankPlan]
    slowest: int
    step_seconds: float
    expected: float
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


class Governor:
    """See the module. Not thread-safe; every method returns in time proportional to its argument."""

    def __init__(self, fixed: Interval, budget: float, probe: int) -> None:
        """fixed: the user's interval. budget: part of the step time. probe: one step in this many, 0: never."""
        raise NotImplementedError

    @property
    def decision(self) -> Decision | None:
        """The last one."""
        raise NotImplementedError

    @property
    def estimate(self) -> Estimate | None:
        """What snapshots have been measured to cost, as part of the time of a step with one; None: too few pairs."""
        raise NotImplementedError

    @property
    def overhead(self) -> Estimate | None:
        """The same spread over the interval in force: part of the running time."""
        raise NotImplementedError

    def declare(self, setup: RankSetup) -> None:
        """A rank is there. Its profile is kept if only bytes have changed."""
        raise NotImplementedError

    def forget(self, rank: int) -> None:
        """A rank has left."""
        raise NotImplementedError

    def cadence(self, every: int, probe: int, from_step: int) -> None:
        """What the coordinator has published: at least this governor's own interval, more where another rank decides."""
        raise NotImplementedError

    def add(self, record: StepRecord) -> None:
        """Take in one period. Raises FormatError for torn events, before anything is changed; a period of an unknown
        rank, or of a step that is not newer, is ignored; numbers that cannot be are clipped and counted."""
        raise NotImplementedError

    def decide(self) -> Decision | None:
        """A decision, if it differs from the last one; None: unchanged."""
        raise NotImplementedError

    def profile(self, rank: int) -> Profile:
        """What is known of a rank. KeyError: not declared."""
        raise NotImplementedError

    def capacity(self, rank: int) -> int | None:
        """Bytes that a rank can copy in the windows of a step; 0: it has none; None: nothing measured yet."""
        raise NotImplementedError

    def summary(self, rank: int) -> RankSummary:
        """For status. KeyError: not declared."""
        raise NotImplementedError
