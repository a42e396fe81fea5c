"""What the command line asks, and what the daemon answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from baftd.wire.messages.common import Count, Epoch, Job, Message, Name, Rank, Text, Tier
from baftd.wire.messages.pipeline import PacingStatus

__all__ = [
    "CheckpointRow",
    "ClientStatus",
    "GcReply",
    "GcRequest",
    "JobStatus",
    "LayoutReply",
    "LayoutRequest",
    "ListReply",
    "ListRequest",
    "Progress",
    "RankLayout",
    "RestoreReply",
    "RestoreRequest",
    "RestoreSource",
    "StatusReply",
    "StatusRequest",
    "StopRequest",
    "VerifyReply",
    "VerifyRequest",
]


# ---------------------------------------------------------------- command line -> daemon


class StatusRequest(Message, tag="status_request"):
    """Answer: `StatusReply`."""

    job: Job | None = None


class ListRequest(Message, tag="list_request"):
    """Checkpoints known, by tier. Answer: `ListReply`."""

    job: Job | None = None


class LayoutRequest(Message, tag="layout_request"):
    """Which rank of a running job holds which ranges, for `baftd plan`. Answer: `LayoutReply`, or `ErrorReply` for a
    job of which no rank has declared anything here."""

    job: Job


class VerifyRequest(Message, tag="verify_request"):
    """Recompute digests of a step (None: of all). Answers: `Progress`, then `VerifyReply`."""

    job: Job
    step: Count | None = None
    epoch: Epoch | None = None


class RestoreRequest(Message, tag="restore_request"):
    """Fix the job's next restore plan: fence, fetch, verify, pin. Answers: `Progress`, then `RestoreReply`."""

    job: Job
    step: Count | None = None
    at_most: Count | None = None
    dry_run: bool = False
    force: bool = False
    """Also fence processes of the job that are still alive."""


class GcRequest(Message, tag="gc_request"):
    """Answer: `GcReply`."""

    dry_run: bool = False
    job: Job | None = None


class StopRequest(Message, tag="stop_request"):
    """End the daemon after running durable writes (force: at once). Slots stay. Answer: `Ack`."""

    force: bool = False


class ClientStatus(Struct):
    """One training process."""

    rank: Rank
    pid: Count
    state: Text
    """joining, restoring, training, finished, left, dead"""
    step: Count = 0
    slots: list[Text] = []
    """One line a slot: state, step, pins."""


class JobStatus(Struct):
    """One job on this node."""

    job: Job
    epoch: Count
    world: Count
    highest_step: Count
    committed: dict[str, Count]
    """Newest committed step for each tier."""
    clients: list[ClientStatus]
    counters: dict[str, Count]
    """snapshots, skipped, torn, durable_written, quarantined, ..."""
    last_skip: Text = ""
    durable_failure: Text = ""
    """Why the last durable write failed; empty where the last one did not."""
    held_ms_median: float = 0.0
    slot_bytes: Count = 0
    restored: Count | None = None
    """Step that the present epoch began from, kept until it has committed one of its own; None: it has, or began
    afresh."""
    pacing: PacingStatus | None = None
    """None: no rank has told how long its steps take."""


class StatusReply(Message, tag="status_reply"):
    """State of the daemon and its jobs."""

    node: Name
    pid: Count
    version: Text
    uptime: float
    coordinator: Text
    shm_dir: Text
    durable_dir: Text
    rss_bytes: Count
    counters: dict[str, Count]
    jobs: list[JobStatus]


class CheckpointRow(Struct):
    """One checkpoint of `baftd list` and `show`."""

    job: Job
    epoch: Epoch
    step: Count
    updates: Count
    tiers: list[Tier]
    parts: Count
    world: Count
    bytes: Count
    state: Text
    """committed, incomplete, abandoned, dead, quarantined"""
    pinned: bool = False
    path: Text = ""
    reason: Text = ""


class ListReply(Message, tag="list_reply"):
    """Newest first."""

    rows: list[CheckpointRow]


class RankLayout(Struct, frozen=True):
    """What one rank has declared on this node."""

    rank: Rank
    node: Name
    small_room: Count
    """Bytes that the image keeps for the small state."""
    image_bytes: Count
    """Capacity of one slot: tensors, header and small state."""
    slots: Count
    stages: list[Count] = []
    coordinates: dict[Name, Count] = {}
    held_seconds: float = 0.0
    """For which a snapshot holds its training thread, beyond a step without one; 0: nothing measured."""


class LayoutReply(Message, tag="layout_reply"):
    """The layout of a job, as its ranks on this node have declared it."""

    job: Job
    epoch: Count
    world: Count
    layout: Annotated[bytes, Meta(max_length=1 << 26)]
    """`baftd.checkpoint.layout.Layout.encode()` of the ranks in `ranks`, with their places; empty while `problem`."""
    ranks: list[RankLayout]
    """By rank. Fewer than `world`: the others have declared nothing here (yet)."""
    missing: list[Rank] = []
    """Ranks of the world that have declared nothing on this node."""
    problem: Text = ""
    """Why there is no layout: ranks are missing, or their ranges contradict each other. Empty: `layout` is whole."""
    slots: Count = 0
    """Slots of each rank, by the settings of this node."""
    durable: bool = False
    """A durable tier is on."""
    interval_steps: Count = 0
    """Between snapshots, by the settings of this node; or in seconds. Both 0: as few as the budget allows."""
    interval_seconds: float = 0.0
    overhead_budget: float | None = None
    """Part of the step time that snapshots may cost, by the settings of this node."""


class Progress(Message, tag="progress"):
    """Part of a long answer."""

    what: Text
    done: Count
    total: Count


class VerifyReply(Message, tag="verify_reply"):
    """One line a shard: what was read, and whether it is what its digest says."""

    ok: bool
    lines: list[Text]


class RestoreSource(Struct):
    """Where the shard of one rank comes from."""

    rank: Rank
    tier: Tier
    where: Text
    bytes: Count


class RestoreReply(Message, tag="restore_reply"):
    """The plan that the next `resume()` of the job takes."""

    job: Job
    epoch: Count
    step: Count
    updates: Count
    world: Count
    sources: list[RestoreSource]
    passed_over: list[Text]
    fenced: list[Text]
    lost_steps: Count
    """Highest step seen minus the step restored."""
    seconds: float
    dry_run: bool = False


class GcReply(Message, tag="gc_reply"):
    """What was (or, with dry_run, would be) removed."""

    lines: list[Text]
    bytes: Count
