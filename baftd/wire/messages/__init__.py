"""Every message of the control channel: type, fields, units and meaning. A file for each of who speaks.

A message is a `msgspec.Struct` with a `type` tag, encoded as a MessagePack map. Three fields are common:
`protocol` (the version below), `id` (chosen by the asking side, repeated in the answer; 0 for a message that
wants no answer) and, in training messages, `token` (epoch and incarnation). Steps, epochs, slots and
generations are non-negative integers; bytes are bytes; times are seconds. Everything a client sends may be
sent again: the daemon treats (token, rank, step, generation) as the identity of a request.

Unknown fields are ignored, unknown types and other protocol versions are answered with `ErrorReply`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from baftd.wire.messages.answers import (
    Ack,
    Cadence,
    Committed,
    Declared,
    ErrorReply,
    Fence,
    Grant,
    NoGrant,
    RankImage,
    ResumePlan,
    ResumeProgress,
    Saved,
    Share,
    SlotImage,
    SlotPlace,
    Welcome,
)
from baftd.wire.messages.common import (
    PROTOCOL,
    Message,
    Tier,
    WireToken,
)
from baftd.wire.messages.operator import (
    CheckpointRow,
    ClientStatus,
    GcReply,
    GcRequest,
    JobStatus,
    LayoutReply,
    LayoutRequest,
    ListReply,
    ListRequest,
    Progress,
    RankLayout,
    RestoreReply,
    RestoreRequest,
    RestoreSource,
    StatusReply,
    StatusRequest,
    StopRequest,
    VerifyReply,
    VerifyRequest,
)
from baftd.wire.messages.pipeline import (
    BubbleRow,
    BubblesReply,
    BubblesRequest,
    CopyPlan,
    DaemonSpan,
    PacingStatus,
    RankPacing,
    RankStep,
    ScheduleSaid,
    Timings,
    TraceReply,
    TraceRequest,
)
from baftd.wire.messages.training import (
    Begin,
    Declare,
    Entry,
    Finish,
    Hello,
    Leave,
    Ping,
    Pong,
    Restored,
    Resume,
    Save,
    Seal,
    Skip,
)

__all__ = [
    "PROTOCOL",
    "Ack",
    "Begin",
    "BubbleRow",
    "BubblesReply",
    "BubblesRequest",
    "Cadence",
    "CheckpointRow",
    "ClientStatus",
    "Committed",
    "CopyPlan",
    "DaemonSpan",
    "Declare",
    "Declared",
    "Entry",
    "ErrorReply",
    "Fence",
    "Finish",
    "GcReply",
    "GcRequest",
    "Grant",
    "Hello",
    "JobStatus",
    "LayoutReply",
    "LayoutRequest",
    "Leave",
    "ListReply",
    "ListRequest",
    "Message",
    "NoGrant",
    "PacingStatus",
    "Ping",
    "Pong",
    "Progress",
    "RankImage",
    "RankLayout",
    "RankPacing",
    "RankStep",
    "Reply",
    "Request",
    "RestoreReply",
    "RestoreRequest",
    "RestoreSource",
    "Restored",
    "Resume",
    "ResumePlan",
    "ResumeProgress",
    "Save",
    "Saved",
    "ScheduleSaid",
    "Seal",
    "Share",
    "Skip",
    "SlotImage",
    "SlotPlace",
    "StatusReply",
    "StatusRequest",
    "StopRequest",
    "Tier",
    "Timings",
    "TraceReply",
    "TraceRequest",
    "VerifyReply",
    "VerifyRequest",
    "Welcome",
    "WireToken",
]

Request: TypeAlias = (
    Hello | Resume | Restored | Declare | Begin | Seal | Skip | Save | Finish | Leave | Ping | Pong | Timings
    | StatusRequest | ListRequest | LayoutRequest | BubblesRequest | TraceRequest | VerifyRequest | RestoreRequest
    | GcRequest | StopRequest
)  # fmt: skip
"""What a daemon accepts."""

Reply: TypeAlias = (
    Ack | ErrorReply | Welcome | ResumeProgress | ResumePlan | Declared | Grant | NoGrant | Cadence | Committed
    | CopyPlan | Fence | Saved | Ping | Pong | StatusReply | ListReply | LayoutReply | BubblesReply | TraceReply
    | Progress | VerifyReply | RestoreReply | GcReply
)  # fmt: skip
"""What a daemon sends."""

msgspec.msgpack.Decoder(Request)  # a union that cannot be decoded fails here, at import, not in a running daemon
msgspec.msgpack.Decoder(Reply)
