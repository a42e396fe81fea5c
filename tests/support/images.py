"""Slots for tests of the durable tier: files on tmpfs that hold a real image behind a 4 KiB header block."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.image import plan_image
from baftd.checkpoint.shard import TensorEntry, digest_chunks
from baftd.storage.directory import DirectoryTier
from baftd.storage.interface import DurableCheckpoint, ShardRecord

IMAGE_OFFSET = 4096
PLAN = b"plan-digest-0123"


def token(epoch: int, start: int = 1) -> Token:
    """A token whose incarnation is `start` in hexadecimal."""
    return Token(epoch, f"{start:032x}")


def default_entries(rank: int = 0, large: int = 0) -> list[TensorEntry]:
    """A few tensors of different sizes; `large`: bytes of one more."""
    entries = [
        TensorEntry("model.weight", "F32", (37, 101), 37 * 101 * 4),
        TensorEntry("model.bias", "BF16", (77,), 154),
        TensorEntry("optim.0.step", "F32", (), 4, "volatile"),
        TensorEntry(f"only.on.rank.{rank}", "U8", (5,), 5),
    ]
    if large:
        entries.append(TensorEntry("model.embedding", "U8", (large,), large))
    return entries


@dataclass
class Slot:
    """An image in a file, and what a seal says about it."""

    path: Path
    rank: int
    world: int
    token: Token
    checkpoint: CheckpointId
    updates: int
    length: int
    chunks: list[tuple[int, int]]
    digests: bytes
    tree_digest: bytes
    image: bytes

    def write(self, tier: DirectoryTier, job: str, **more: object) -> ShardRecord:
        """Have `tier` write it."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            arguments: dict[str, object] = {
                "token": self.token,
                "tree_digest": self.tree_digest,
                "updates": self.updates,
                "world": self.world,
                **more,
            }
            return tier.write_shard(
                job,
                self.checkpoint,
                self.rank,
                fd,
                IMAGE_OFFSET,
                self.length,
                self.chunks,
                self.digests,
                **arguments,  # type: ignore[arg-type]
            )
        finally:
            os.close(fd)


def make_slot(
    directory: Path,
    *,
    job: str = "gpt",
    step: int = 8,
    rank: int = 0,
    world: int = 1,
    by: Token | None = None,
    entries: Sequence[TensorEntry] | None = None,
    contents: dict[str, bytes] | None = None,
    small: bytes = b"small state",
    seed: int = 0,
) -> Slot:
    """A sealed slot in `directory`. Tensors without `contents` get random bytes of (seed, step, rank)."""
    who = by or token(1)
    declared = default_entries(rank) if entries is None else list(entries)
    plan = plan_image(declared, 4096, job=job, rank=rank, world=world)
    draw = random.Random(f"{seed} {step} {rank}")
    image = bytearray(plan.image_length(len(small)))
    header = plan.render_header(who, step=step, updates=step, small_length=len(small))
    image[: len(header)] = header
    for place in plan.placements:
        content = (contents or {}).get(place.entry.name)
        image[place.offset : place.offset + place.nbytes] = draw.randbytes(place.nbytes) if content is None else content
    image[plan.small_offset :] = small
    chunks = plan.chunks(len(small))
    path = directory / f"{job}-{who.epoch}-{step}-{rank}-{seed}.slot"
    padded = -(-plan.capacity // 4096) * 4096
    path.write_bytes(bytes(IMAGE_OFFSET) + bytes(image) + b"\xee" * (padded - len(image)))
    return Slot(
        path=path,
        rank=rank,
        world=world,
        token=who,
        checkpoint=CheckpointId(who.epoch, step),
        updates=step,
        length=len(image),
        chunks=[(chunk.offset, chunk.length) for chunk in chunks],
        digests=digest_chunks(image, chunks),
        tree_digest=plan.tree_digest,
        image=bytes(image),
    )


def save(tier: DirectoryTier, slots: Sequence[Slot], job: str = "gpt") -> DurableCheckpoint:
    """Write the slots of all ranks and commit."""
    first = slots[0]
    records = [slot.write(tier, job) for slot in slots]
    return tier.commit(
        job,
        first.checkpoint,
        records,
        plan_digest=PLAN,
        token=first.token,
        updates=first.updates,
        world=first.world,
    )
