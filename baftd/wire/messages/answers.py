"""What the daemon says to training processes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from baftd.wire.messages.common import (
    Count,
    Digest,
    Incarnation,
    Message,
    Name,
    Rank,
    Text,
    Tier,
    WireToken,
)

__all__ = [
    "Ack",
    "Cadence",
    "Committed",
    "Declared",
    "ErrorReply",
    "Fence",
    "Grant",
    "NoGrant",
    "RankImage",
    "ResumePlan",
    "ResumeProgress",
    "Saved",
    "Share",
    "SlotImage",
    "SlotPlace",
    "Welcome",
]


# ---------------------------------------------------------------- daemon -> training process


class Ack(Message, tag="ack"):
    """Done."""


class ErrorReply(Message, tag="error"):
    """The request failed. `code` is that of a class in `baftd.errors`."""

    code: Text
    message: Text
    hint: Text = ""
    field: Text = ""


class Welcome(Message, tag="welcome"):
    """Answer to `Hello`."""

    node: Name
    node_incarnation: Incarnation
    daemon_version: Text
    known_epoch: Count = 0
    """Highest epoch known of the job; 0: the job is new."""
    highest_step: Count = 0
    fenced: bool = False
    """The token in `Hello` is older than the job's: write nothing any more."""
    lock_path: Text = ""
    """A file of the daemon's on which the client takes a POSIX record lock, and holds it as long as it lives: how its
    death is known where its PID is not. Empty: none."""


class ResumeProgress(Message, tag="resume_progress"):
    """The rendezvous is not complete yet: who is missing, or which live process is waited for."""

    phase: Text
    missing: list[Rank] = []
    waited: float = 0.0
    deadline: float = 0.0


class SlotImage(Struct, frozen=True):
    """Where a verified image lies: a slot file of this node, pinned for the restore."""

    path: Text
    offset: Count
    """Of the image in the file: the size of the header block."""
    length: Count
    digest: Digest
    """Root digest of the image."""
    chunk_digests: Annotated[bytes, Meta(max_length=1 << 26)] = b""
    """16 bytes a chunk in image order, so that a damaged tensor is named; empty: only the root digest is compared."""


class RankImage(Struct, frozen=True):
    """The image that one rank of the saved world made."""

    rank: Rank
    image: SlotImage


class ResumePlan(Message, tag="resume_plan"):
    """The one plan that the coordinator fixed for this incarnation."""

    token: WireToken
    step: Count
    """0 and `source` None: begin afresh."""
    updates: Count = 0
    epoch: Count = 0
    """Epoch in which `step` was taken; 0 when afresh."""
    source: SlotImage | None = None
    tier: Tier | None = None
    passed_over: list[Text] = []
    """One sentence for each newer step that could not be used."""
    durable: bool = False
    """A durable tier is on."""
    seconds: float = 0.0
    """Time since the last rank arrived, spent in planning, fetching and verifying."""
    world: Count = 0
    """Number of ranks that saved `step`; 0 when afresh."""
    shards: list[RankImage] = []
    """Every saved rank's image, by rank: only for a start with `Resume.reshard`, where `source` is None if the world is
    another than the saved one. Ranks beyond the new world are among them. Also where `divided`."""
    divided: bool = False
    """Replicated ranges of `step` were saved by one holder only, and the start does not reshard: what this rank held is
    read out of `shards`; its small state, and what nobody else had, out of `source`."""


class SlotPlace(Struct, frozen=True):
    """A slot of this rank."""

    slot: Count
    path: Text
    bytes: Count


class Grant(Message, tag="grant"):
    """The slot may be filled next, once, under this generation."""

    token: WireToken
    slot: Count
    generation: Count


class Cadence(Message, tag="cadence"):
    """Job-wide decision: from `from_step` on a step k is snapshot when k % every == 0, but for probes."""

    token: WireToken
    from_step: Count
    every: Annotated[int, Meta(ge=1)]
    probe: Count = 0
    """0: none. N: about one step in N is left without a snapshot, so that steps with and without one can be compared
    (`baftd.checkpoint.facts.is_probe`)."""
    earlier: Annotated[list[tuple[Count, Annotated[int, Meta(ge=1)], Count]], Meta(max_length=8)] = []
    """(from_step, every, probe) of what holds before `from_step`, oldest first."""


class Share(Struct, frozen=True):
    """What a rank is to save of an entry that it has declared. entry: its place; ranges: None: all of it."""

    entry: Count
    ranges: list[tuple[Count, Count]] | None = None


class Declared(Message, tag="declared"):
    """Answer to `Declare`."""

    token: WireToken
    plan_generation: Count
    control_path: Text
    slots: list[SlotPlace]
    small_room: Count
    grants: list[Grant]
    cadence: Cadence
    plan: Annotated[bytes, Meta(max_length=16)] = b""
    """Not empty: replicated ranges are divided among their holders under this plan, and the rank saves `shares`."""
    shares: list[Share] = []


class Committed(Message, tag="committed"):
    """Every part of the step is verified at that tier."""

    token: WireToken
    step: Count
    tier: Tier


class NoGrant(Message, tag="no_grant"):
    """Why there is no slot for the next step (pin, step and age are named). Replaced by the next `Grant`."""

    token: WireToken
    reason: Text


class Fence(Message, tag="fence"):
    """A newer token exists: close the gate for good; the process may live."""

    token: WireToken
    reason: Text


class Saved(Message, tag="saved"):
    """Answer to `Save` and `Finish`."""

    step: Count
    tier: Tier
    path: Text = ""
    note: Text = ""
