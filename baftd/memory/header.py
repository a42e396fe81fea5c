"""The 4 KiB block at the start of a slot file: whose state it holds, of which step, and how far it is.

Little-endian. The state word at byte 8 is one aligned 64-bit number, `generation << 8 | state`: it changes last when a
state is reached and first when a slot is taken, so a reader never sees a state beside another generation's fields.
The other fields carry a checksum of their own; a block caught between two versions is reported as torn.

    0 magic "BAFTSLOT"   8 state word   16 checksum (xxh3-64 of bytes 24..256)   24 version, rank, world, 0
    40 generation   48 epoch   56 incarnation[16]   72 step   80 updates   88 image length   96 small length
    104 root digest[16]   120 tree digest[16]   136 writer pid   144 writer start (clock ticks since boot)
    152 job[64], NUL-padded
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import xxhash

from baftd.checkpoint.identity import CheckpointId, Token, check_job_name
from baftd.errors import FormatError, UsageError

if TYPE_CHECKING:
    from baftd.checkpoint.shard import BytesLike

__all__ = [
    "HEADER_BYTES",
    "HEADER_USED",
    "MAGIC",
    "NO_DIGEST",
    "STATE_OFFSET",
    "SlotHeader",
    "SlotState",
    "pack_state",
    "unpack_state",
]

HEADER_BYTES = 4096
HEADER_USED = 256
"""Bytes that are ever written; the rest of the block stays zero."""
MAGIC = b"BAFTSLOT"
VERSION = 1
STATE_OFFSET = 8
CHECKSUM_OFFSET = 16
FIELDS_OFFSET = 24
NO_DIGEST = bytes(16)

_FIELDS = struct.Struct("<IIIIQQ16sQQQQ16s16sQQ64s")
_WORD = struct.Struct("<Q")
_MAX_GENERATION = (1 << 56) - 1


class SlotState(IntEnum):
    """How far the content of a slot is."""

    FREE = 0
    """Holds nothing that anyone may read."""
    FILLING = 1
    """A writer copies into it."""
    SEALED = 2
    """The writer is done and its witnesses agreed."""
    VERIFIED = 3
    """The daemon knows the digest."""


def pack_state(state: SlotState, generation: int) -> bytes:
    """The state word, 8 bytes."""
    if not 0 <= generation <= _MAX_GENERATION:
        raise UsageError(f"slot generation {generation} is out of range.")
    return _WORD.pack(generation << 8 | state)


def unpack_state(word: BytesLike) -> tuple[SlotState, int]:
    """State and generation of a state word. Raises FormatError for a state that does not exist."""
    (value,) = _WORD.unpack(word)
    try:
        return SlotState(value & 0xFF), value >> 8
    except ValueError as error:
        raise FormatError(f"slot header: state {value & 0xFF} does not exist.") from error


@dataclass(frozen=True)
class SlotHeader:
    """What a slot says of its content. Lengths are bytes; `root_digest` is zero while there are no digests."""

    state: SlotState
    generation: int
    token: Token
    job: str
    rank: int
    world: int
    step: int
    updates: int
    image_length: int
    small_length: int
    tree_digest: bytes
    root_digest: bytes = NO_DIGEST
    writer_pid: int = 0
    writer_start: int = 0

    @property
    def checkpoint(self) -> CheckpointId:
        """Epoch and step of the content."""
        return CheckpointId(self.token.epoch, self.step)

    def with_state(self, state: SlotState, **changes: object) -> SlotHeader:
        """The same header in another state."""
        return replace(self, state=state, **changes)  # type: ignore[arg-type]

    def encode(self) -> bytes:
        """The whole block, HEADER_BYTES long. Raises UsageError for a field out of range."""
        try:
            fields = _FIELDS.pack(
                VERSION,
                self.rank,
                self.world,
                0,
                self.generation,
                self.token.epoch,
                bytes.fromhex(self.token.incarnation),
                self.step,
                self.updates,
                self.image_length,
                self.small_length,
                self.root_digest,
                self.tree_digest,
                self.writer_pid,
                self.writer_start,
                self.job.encode("ascii"),
            ).ljust(HEADER_USED - FIELDS_OFFSET, b"\0")
        except (struct.error, UnicodeEncodeError) as error:
            raise UsageError(f"slot header of job {self.job!r}, rank {self.rank}: {error}.") from error
        if len(self.root_digest) != 16 or len(self.tree_digest) != 16 or len(self.job) > 64:
            raise UsageError(f"slot header of job {self.job!r}, rank {self.rank}: a field has the wrong length.")
        checksum = xxhash.xxh3_64_intdigest(fields)
        block = MAGIC + pack_state(self.state, self.generation) + _WORD.pack(checksum) + fields
        return block.ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, block: BytesLike) -> SlotHeader | None:
        """The header in a block; None for a slot that is FREE.

        Raises FormatError, naming what is wrong, for a block that is torn, damaged, foreign or of another version.
        """
        if len(block) < HEADER_USED:
            raise FormatError(f"slot header: {len(block)} bytes are too few.")
        block = bytes(block[:HEADER_USED])
        if block[:8] != MAGIC:
            raise FormatError(f"slot header: magic {block[:8]!r} is not {MAGIC!r}: not a slot of baftd.")
        state, state_generation = unpack_state(block[STATE_OFFSET:CHECKSUM_OFFSET])
        if state is SlotState.FREE:
            return None
        (checksum,) = _WORD.unpack(block[CHECKSUM_OFFSET:FIELDS_OFFSET])
        if xxhash.xxh3_64_intdigest(block[FIELDS_OFFSET:]) != checksum:
            raise FormatError("slot header: torn or damaged: the fields are not what their checksum says.")
        (
            version, rank, world, _, generation, epoch, incarnation, step, updates, image_length, small_length,
            root_digest, tree_digest, writer_pid, writer_start, job,
        ) = _FIELDS.unpack_from(block, FIELDS_OFFSET)  # fmt: skip
        if version != VERSION:
            raise FormatError(f"slot header: version {version} is not {VERSION}, which this baftd reads.")
        if generation != state_generation:
            raise FormatError(
                f"slot header: torn: the state is of generation {state_generation}, the fields of {generation}."
            )
        try:
            token = Token(epoch, incarnation.hex())
            job_name = check_job_name(job.rstrip(b"\0").decode("ascii"))
        except (UsageError, UnicodeDecodeError) as error:
            raise FormatError(f"slot header: {error}") from error
        if rank >= world or small_length > image_length:
            raise FormatError(
                f"slot header: rank {rank} of {world}, {small_length} of {image_length} bytes make no sense."
            )
        return cls(
            state=state,
            generation=generation,
            token=token,
            job=job_name,
            rank=rank,
            world=world,
            step=step,
            updates=updates,
            image_length=image_length,
            small_length=small_length,
            tree_digest=tree_digest,
            root_digest=root_digest,
            writer_pid=writer_pid,
            writer_start=writer_start,
        )
