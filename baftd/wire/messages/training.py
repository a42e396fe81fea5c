"""What training processes say."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from baftd.wire.messages.common import Count, Incarnation, Job, Message, Name, Rank, Text, WireToken, World
from baftd.wire.messages.pipeline import ScheduleSaid

__all__ = [
    "Begin",
    "Declare",
    "Entry",
    "Finish",
    "Hello",
    "Leave",
    "Ping",
    "Pong",
    "Restored",
    "Resume",
    "Save",
    "Seal",
    "Skip",
]


# ---------------------------------------------------------------- training process -> daemon: joining


class Hello(Message, tag="hello"):
    """First message on a connection, repeated after every reconnect. Answer: `Welcome` or `ErrorReply`."""

    job: Job
    rank: Rank
    world: World
    incarnation: Incarnation
    pid: Count
    pid_start: Count
    """Start time of the process in clock ticks since boot (/proc/self/stat field 22): tells a reused PID."""
    framework: Text = ""
    client_version: Text = ""
    token: WireToken | None = None
    """Set when the process already trains under a token (the daemon or the connection was restarted)."""
    strict: bool = False


class Resume(Message, tag="resume"):
    """Take part in the rendezvous of all ranks.

    Answers: `ResumeProgress` (several), then `ResumePlan` or `ErrorReply`."""

    job: Job
    rank: Rank
    fresh: bool = False
    """Begin at step 0 whatever is known; earlier steps become abandoned."""
    takeover: bool = False
    """Fence a live predecessor instead of waiting for it."""
    reshard: bool = False
    """This start may have another world or layout than the ranks that saved: `ResumePlan.shards` then names every saved
    rank's image. One rank that says so speaks for all."""


class Restored(Message, tag="restored"):
    """The rank has loaded (or failed to load) what `ResumePlan` named. Answer: `Ack`, once every rank has answered;
    `ErrorReply` on all ranks when one failed."""

    token: WireToken
    rank: Rank
    step: Count
    ok: bool
    reason: Text = ""


class Entry(Struct, frozen=True, omit_defaults=True):
    """One tensor of a shard, as declared. Field meanings: `baftd.checkpoint.shard.TensorEntry`."""

    name: Name
    dtype: Name
    shape: list[Count]
    nbytes: Count
    kind: Literal["stable", "volatile"] = "stable"
    global_shape: list[Count] | None = None
    ranges: list[tuple[Count, Count]] | None = None
    aliases: list[Name] = []
    strides: list[Count] | None = None


class Declare(Message, tag="declare"):
    """Layout of the rank's shard; new whenever the state tree changes. Answer: `Declared` or `ErrorReply` (no_room)."""

    token: WireToken
    rank: Rank
    entries: list[Entry]
    small_bytes: Count
    """Size of the small state now; the image keeps max(1 MiB, twice this)."""
    numa_node: int = -1
    stages: Annotated[list[Count], Meta(max_length=4096)] = []
    """Pipeline stages whose layers this rank holds."""
    coordinates: Annotated[dict[Name, Count], Meta(max_length=64)] = {}
    """Place of the rank on each named mesh axis (dp, tp, pp ...)."""
    uncut: list[Count] = []
    """Places of entries that can only be saved whole (they lie on a device)."""
    schedule: ScheduleSaid | None = None
    """The pipeline schedule that this rank runs; None: no pipeline, or none that the adapter knows."""


# ---------------------------------------------------------------- training process -> daemon: every step


class Begin(Message, tag="begin"):
    """The slot is being filled with state(step). No answer."""

    token: WireToken
    rank: Rank
    step: Count
    slot: Count
    generation: Count


class Seal(Message, tag="seal"):
    """The slot holds state(step), witnesses agreed, header says SEALED. No answer; `Grant` and `Committed` follow."""

    token: WireToken
    rank: Rank
    step: Count
    updates: Count
    slot: Count
    generation: Count
    image_length: Count
    small_length: Count
    digests: Annotated[bytes, Meta(max_length=1 << 26)] = b""
    """16 bytes a chunk in image order (xxh3-128, as `xxhash.xxh3_128_digest`); empty: the daemon digests."""
    held_ms: float = 0.0
    """Time the training thread was held for this snapshot: begin + seal + fence wait."""
    copy_ms: float = 0.0


class Skip(Message, tag="skip"):
    """No snapshot of `step` from this rank: the step is dead for the whole job. No answer."""

    token: WireToken
    rank: Rank
    step: Count
    reason: Text
    torn: bool = False
    """The state changed under the copy (a witness disagreed)."""
    slot: Count | None = None
    """Set when a slot had been begun for it."""
    generation: Count = 0


class Save(Message, tag="save"):
    """Make the newest committed step >= `step` durable now. Answer: `Saved`."""

    token: WireToken
    rank: Rank
    step: Count


class Finish(Message, tag="finish"):
    """The rank is done. When all ranks have said so, the last step is made durable (where a durable tier is on) and the
    slots are freed. Answer: `Saved`."""

    token: WireToken
    rank: Rank
    step: Count


class Leave(Message, tag="leave"):
    """The rank ends without finishing (an exception, or close). Slots stay. Answer: `Ack`."""

    token: WireToken | None
    rank: Rank
    reason: Text = ""


class Ping(Message, tag="ping"):
    """Heartbeat, either way. Answer: `Pong`."""


class Pong(Message, tag="pong"):
    """Answer to `Ping`."""
