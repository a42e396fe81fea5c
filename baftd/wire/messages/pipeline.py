"""Where a step's time goes, and which window copies how much: timings, copy plans, reports."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from baftd.limits import LARGEST
from baftd.wire.messages.common import Count, Job, Message, Name, Nanoseconds, Rank, Text, WireToken

__all__ = [
    "BubbleRow",
    "BubblesReply",
    "BubblesRequest",
    "CopyPlan",
    "DaemonSpan",
    "PacingStatus",
    "RankPacing",
    "RankStep",
    "ScheduleSaid",
    "Timings",
    "TraceReply",
    "TraceRequest",
]


class ScheduleSaid(Struct, frozen=True, kw_only=True):
    """The pipeline schedule of a rank, as its framework has it."""

    name: Text = ""
    """Name of the class ("Schedule1F1B"); empty: only `order` is known."""
    ranks: Count = 0
    """Ranks of the pipeline (p), and the place of this one among them."""
    place: Count = 0
    stages: Count = 0
    """Of the whole pipeline (v * p), and the numbers of those that this rank holds."""
    own: Annotated[list[Count], Meta(max_length=4096)] = []
    micro: Count = 0
    """Micro-batches of a step (m)."""
    order: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    """Operations of this rank in order, as `baftd.pipeline.events.pack_order` packs them; empty: as the name says."""


class Timings(Message, tag="timings"):
    """What one rank did between two boundaries, in one batch. No answer, never sent twice.

    Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a node share."""

    token: WireToken
    rank: Rank
    step: Count
    """The boundary that began the period."""
    begun: Nanoseconds
    """When it returned."""
    period: Count
    """Until the next boundary returned."""
    events: Annotated[bytes, Meta(max_length=1 << 22)] = b""
    """Records of `baftd.pipeline.events`."""
    lost: Count = 0
    """Events for which there was no room."""
    plan: Count = 0
    """Generation of the copy plan in force; 0: none yet."""
    copied: bool = False
    """A snapshot of `step` was being copied in this period."""
    in_windows: Count = 0
    """Bytes of it that were copied inside windows, outside of them (overlap), and at the fence."""
    outside: Count = 0
    at_fence: Count = 0
    fence_ns: Count = 0
    """Time for which the fence waited for bytes that were not copied yet."""
    held_ns: Count = 0
    """Time for which the training thread was held, boundary and fence together."""
    overruns: Count = 0
    """Short windows: they closed before their share was copied. What a trace calls an overrun, a copy that went on
    after its window, is another thing."""
    apart: bool = False
    """The loop did something else in it (`ckpt.paused()`): the period says nothing about training."""
    cadence: tuple[Count, Count, Count] = (0, 0, 0)
    """(from_step, every, probe) of the newest `Cadence` that the rank knows; every 0: it does not say. Where that is
    not the job's, the daemon tells it again."""


class CopyPlan(Message, tag="copy_plan"):
    """Which window copies how many bytes of a snapshot, from the next boundary on."""

    token: WireToken
    rank: Rank
    generation: Count
    """Counts up from 1; an older one is ignored."""
    rung: Name
    """Of the ladder: windows, divided, overlap, fence, device, interval."""
    windows: Annotated[list[Count], Meta(max_length=1 << 16)] = []
    """Most bytes for each window, in the order in which a step opens them."""
    further: Count = 0
    """The same for every window beyond these."""
    outside: Count = 0
    """Bytes a second copied while no window is open; 0: none."""
    timed: Annotated[list[tuple[Count, Count, Count]], Meta(max_length=1 << 16)] = []
    """Clock-anchored windows: begin and end in ns after the boundary, and bytes. For adapters that ask."""
    budget: float = 0.0
    """Part of the time that fences may wait, over some steps: a snapshot that needs more is given up as late. 0: no
    limit, each is waited for."""
    why: Text = ""


class RankPacing(Struct, frozen=True, kw_only=True):
    """How one rank's snapshots fit into its windows. Times are seconds of one step, sizes bytes of one snapshot."""

    rank: Rank
    rung: Name
    bytes: Count
    window_seconds: float
    """Sum of the windows of a step, measured."""
    in_windows: Count
    outside: Count
    at_fence: Count
    fence_seconds: float
    held_seconds: float
    overruns: Count
    """Short windows, counted; see `Timings.overruns`."""
    copy_rate: float
    """Bytes a second inside windows."""


class PacingStatus(Struct, frozen=True, kw_only=True):
    """What the planning loop of this node has decided for a job, and why."""

    interval: Count
    """Steps from one snapshot to the next, job-wide, as it is now."""
    rung: Name
    why: Text
    fixed: bool = False
    """The interval is set by the user; else as short as the budget allows."""
    next_interval: Count = 0
    """What follows; 0: no change is ahead."""
    next_step: Count = 0
    """From which step on; 0: it is not agreed yet."""
    next_expected: float = 0.0
    """What snapshots are expected to cost from then on."""
    slowest: int = -1
    """The rank that decides the interval; -1: none does."""
    slowest_node: Text = ""
    step_seconds: float = 0.0
    budget: float = 0.0
    """Part of the step time that snapshots may cost (0.01: 1 %)."""
    expected: float = 0.0
    """What they are expected to cost, at `interval`."""
    overhead: float | None = None
    """What they have been measured to cost, spread over `interval`; None: not enough steps without a snapshot to
    compare with."""
    overhead_error: float | None = None
    """Standard error of it."""
    pairs: Count = 0
    probe: Count = 0
    failures: Count = 0
    """Ends of the job without finish, from which `young_daly` is computed."""
    young_daly: float | None = None
    """Seconds between durable checkpoints after Young and Daly, by the observed failure rate; None: no failure yet."""
    ranks: list[RankPacing] = []


class BubblesRequest(Message, tag="bubbles_request"):
    """Predicted and measured gaps of a job, for `baftd show --bubbles`. Answer: `BubblesReply`."""

    job: Job


class BubbleRow(Struct, frozen=True, kw_only=True):
    """Gaps of one kind on one rank, per step."""

    rank: Rank
    stages: list[Count]
    kind: Name
    """fill, steady, drain, collective, data, tail ..."""
    count: float
    predicted: float | None
    """Seconds a step; None: no model of the schedule."""
    measured: float
    bytes: Count
    """Copied in them, per snapshot."""


class BubblesReply(Message, tag="bubbles_reply"):
    """See `BubblesRequest`."""

    job: Job
    epoch: Count
    steps: Count
    """Steps that the measured values stand on."""
    schedule: Text
    rows: list[BubbleRow]
    error: float | None = None
    """Median of |predicted - measured| / measured over the gaps of pipeline kinds."""
    pacing: PacingStatus | None = None


class TraceRequest(Message, tag="trace_request"):
    """What ranks and daemon did in steps `first` to `last`, for `baftd trace`. Answer: `TraceReply`."""

    job: Job
    first: Count = 0
    last: Count = LARGEST


class RankStep(Struct, frozen=True, kw_only=True):
    """One period of one rank: fields as in `Timings`."""

    rank: Rank
    step: Count
    begun: Nanoseconds
    period: Count
    events: bytes
    plan: Count = 0
    copied: bool = False


class DaemonSpan(Struct, frozen=True, kw_only=True):
    """A piece of the daemon's own work: digest, durable, commit, restore ..."""

    what: Name
    begun: Nanoseconds
    """ns of CLOCK_MONOTONIC."""
    duration: Count
    rank: int = -1
    step: Count = 0
    bytes: Count = 0


class TraceReply(Message, tag="trace_reply"):
    """See `TraceRequest`. Only the newest steps are kept; `kept` says which."""

    job: Job
    node: Name
    epoch: Count
    kept: tuple[Count, Count]
    steps: list[RankStep]
    spans: list[DaemonSpan]
