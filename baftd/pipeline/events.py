"""What a rank does in a step, as fixed-width records: made by the training thread, read by daemon and command line.

An event is 32 bytes, little-endian:

    kind u8 | 0 u8 | stage i16 | micro-batch i32 | begin u64 | end u64 | amount u64

`begin` and `end` are nanoseconds of CLOCK_MONOTONIC. `stage` and `micro` are -1 where they mean nothing; what else they
hold, and `amount`, is said beside each kind.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from baftd.errors import FormatError

__all__ = ["EVENT_BYTES", "OPERATIONS", "WAITS", "Event", "EventKind", "pack_event", "pack_event_into", "pack_order",
           "raw_events", "unpack_events", "unpack_order"]  # fmt: skip


class EventKind(enum.IntEnum):
    """What an event was. Numbers are part of the wire format."""

    FORWARD = 1
    BACKWARD = 2
    """Gradients of input and weights together."""
    INPUT_GRAD = 3
    WEIGHT_GRAD = 4
    REDUCE = 5
    """Data-parallel reduction of a stage's gradients."""

    WAIT_RECV = 16
    WAIT_SEND = 17
    WAIT_MIXED = 18
    """Sends and receives waited for together."""
    WAIT_COLLECTIVE = 19
    """all-reduce, all-gather, reduce-scatter, barrier ...; amount: bytes, where known."""
    WAIT_DATA = 20
    """For the next batch."""
    TAIL = 21
    """From the end of the schedule (or of the backward pass) to the fence."""

    SCHEDULE = 32
    """A call of schedule.step()."""
    BOUNDARY = 33
    """ckpt.step(): the training thread was held."""
    FENCE = 34
    """The fence. amount: bytes that were not copied yet when it began."""

    WINDOW = 48
    """A window was granted. stage: the EventKind of what was waited for; micro: its number in the step; amount: its
    budget in bytes (2**64 - 1: no limit)."""
    COPY_INSIDE = 49
    """The copy engine was at work in a window. amount: bytes."""
    COPY_OUTSIDE = 50
    """The same while no window was open."""
    COPY_FENCE = 51
    """The same at the fence."""


OPERATIONS = frozenset(
    {EventKind.FORWARD, EventKind.BACKWARD, EventKind.INPUT_GRAD, EventKind.WEIGHT_GRAD, EventKind.REDUCE}
)
"""Kinds that occupy the device."""
WAITS = frozenset(
    {EventKind.WAIT_RECV, EventKind.WAIT_SEND, EventKind.WAIT_MIXED, EventKind.WAIT_COLLECTIVE, EventKind.WAIT_DATA}
)
"""Kinds in which the training thread waits for others."""

_EVENT = struct.Struct("<BxhiQQQ")
EVENT_BYTES = _EVENT.size
pack_event_into = _EVENT.pack_into
"""`pack_event_into(buffer, offset, *event)` writes a record in place."""
raw_events = _EVENT.iter_unpack
"""`raw_events(batch)` iterates over bare tuples (kind, stage, micro, begin, end, amount), at a fifth of the cost."""
_ORDER = struct.Struct("<Bxhi")
_KINDS = {int(kind): kind for kind in EventKind}


class Event(NamedTuple):
    """One event; see the module's docstring."""

    kind: EventKind
    stage: int
    micro: int
    begin: int
    end: int
    amount: int = 0


def pack_event(event: Event) -> bytes:
    """The record of an event."""
    return _EVENT.pack(*event)


def unpack_events(data: bytes) -> Iterator[Event]:
    """Events of a batch. Kinds that this version does not know are left out. Raises FormatError for a torn batch."""
    if len(data) % EVENT_BYTES:
        raise FormatError(f"a batch of events has {len(data)} bytes, which is no multiple of {EVENT_BYTES}.")
    for kind, stage, micro, begin, end, amount in _EVENT.iter_unpack(data):
        known = _KINDS.get(kind)
        if known is not None:
            yield Event(known, stage, micro, begin, end, amount)


def pack_order(operations: Iterable[tuple[int, int, int]]) -> bytes:
    """(kind, stage, micro-batch) of a rank's operations, in their order: 8 bytes each."""
    return b"".join(_ORDER.pack(*operation) for operation in operations)


def unpack_order(data: bytes) -> tuple[tuple[EventKind, int, int], ...]:
    """The reverse of `pack_order`. Raises FormatError for torn data and for kinds that are no operations."""
    if len(data) % _ORDER.size:
        raise FormatError(f"an order of operations has {len(data)} bytes, which is no multiple of {_ORDER.size}.")
    found = []
    for kind, stage, micro in _ORDER.iter_unpack(data):
        known = _KINDS.get(kind)
        if known not in OPERATIONS:
            raise FormatError(f"an order of operations names kind {kind}, which is none.")
        found.append((EventKind(kind), stage, micro))
    return tuple(found)
