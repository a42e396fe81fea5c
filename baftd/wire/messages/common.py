"""What all messages share: the version, the limits of their fields, the token."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from baftd.limits import LARGEST

__all__ = [
    "PROTOCOL",
    "Count",
    "Digest",
    "Epoch",
    "Incarnation",
    "Job",
    "Message",
    "Name",
    "Nanoseconds",
    "Rank",
    "Text",
    "Tier",
    "WireToken",
    "World",
]

PROTOCOL = 1

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Nanoseconds = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Of CLOCK_MONOTONIC: after 104 days without a restart they no longer fit into a `Count`."""
Epoch = Annotated[int, Meta(ge=1, le=LARGEST)]
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
