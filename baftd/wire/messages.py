"""Every message of the control channel: type, fields, units and meaning, in one file.

A message is a `msgspec.Struct` with a `type` tag, encoded as a MessagePack map. Three fields are common:
`protocol` (the version below), `id` (chosen by the asking side, repeated in the answer; 0 for a message that
wants no answer) and, in training messages, `token` (epoch and incarnation). Steps, epochs, slots and
generations are non-negative integers; bytes are bytes; times are seconds. Everything a client sends may be
sent again: the daemon treats (token, rank, step, generation) as the identity of a request.

Unknown fields are ignored, unknown types and other protocol versions are answered with `ErrorReply`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

__all__ = ["PROTOCOL"]  # extended below by every message class

PROTOCOL = 1

Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Epoch = Annotated[int, Meta(ge=1, le=(1 << 53) - 1)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
World = Annotated[int, Meta(ge=1, le=1 << 20)]
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Job = Annotated[str, Meta(min_length=1, max_length=64)]
Incarnation = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Tier = Literal["memory", "peer", "durable"]


class WireToken(Struct, frozen=True):
    """Which start of the job speaks."""

    epoch: Epoch
    incarnation: Incarnation


class Message(Struct, tag_field="type", kw_only=True):
    """Common part of all messages."""

    protocol: int = PROTOCOL
    id: Count = 0


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
    """Job-wide decision: from `from_step` on a step k is snapshot when k % memory_every == 0."""

    token: WireToken
    from_step: Count
    memory_every: Annotated[int, Meta(ge=1)]


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


Request: TypeAlias = (
    Hello | Resume | Restored | Declare | Begin | Seal | Skip | Save | Finish | Leave | Ping | Pong | StatusRequest
    | ListRequest | LayoutRequest | VerifyRequest | RestoreRequest | GcRequest | StopRequest
)  # fmt: skip
"""What a daemon accepts."""

Reply: TypeAlias = (
    Ack | ErrorReply | Welcome | ResumeProgress | ResumePlan | Declared | Grant | NoGrant | Cadence | Committed
    | Fence | Saved | Ping | Pong | StatusReply | ListReply | LayoutReply | Progress | VerifyReply | RestoreReply
    | GcReply
)  # fmt: skip
"""What a daemon sends."""

__all__ += sorted(
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Struct) and value is not Struct
)
__all__ += ["Reply", "Request", "Tier"]

msgspec.msgpack.Decoder(Request)  # a union that cannot be decoded fails here, at import, not in a running daemon
msgspec.msgpack.Decoder(Reply)
