"""What a slot really holds: header, image and digests read from the file and compared with each other.

Slots are written by training processes, so nothing in them is trusted: every length is checked against the file, and
bytes are read with `preadv` (a file cut short is an error here, not a SIGBUS). The functions block and run in worker
threads; the daemon never maps a slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from baftd.checkpoint.facts import ShardFacts
from baftd.checkpoint.image import ParsedImage, header_length, parse_image_header
from baftd.checkpoint.shard import DIGEST_BYTES, ImageMap, Placement, root_digest
from baftd.errors import Degraded, FormatError, VerificationFailed
from baftd.memory.header import NO_DIGEST, SlotHeader, SlotState

if TYPE_CHECKING:
    from baftd.memory.slot_file import SlotFile

__all__ = [
    "NO_PLACE",
    "Seen",
    "facts_of",
    "read_image_header",
    "read_sealed",
    "replicas_of",
    "shard_of_fetch",
    "verify_slot",
]

NO_PLACE = "0" * 32
"""The incarnation of what is no node's memory."""


@dataclass(frozen=True)
class Seen:
    """A slot whose header, image header and (after `verify_slot`) bytes agree."""

    header: SlotHeader
    image: ParsedImage
    facts: ShardFacts


def read_image_header(slot: SlotFile) -> ParsedImage:
    """Parse the image's own header. Raises `FormatError`."""
    length = header_length(slot.pread(0, 8))
    if length > slot.capacity:
        raise FormatError(f"{slot.path}: the image header claims {length} bytes of a slot of {slot.capacity}.")
    return parse_image_header(slot.pread(0, length))


def read_sealed(slot: SlotFile) -> tuple[SlotHeader, ParsedImage]:
    """Header and image header of a sealed slot, compared with each other.

    Raises `FormatError` naming the slot and what disagrees.
    """
    header = slot.read_header()
    if header is None or header.state not in (SlotState.SEALED, SlotState.VERIFIED):
        state = "free" if header is None else header.state.name.lower()
        raise FormatError(f"{slot.path}: the slot is {state}, not sealed.")
    image = read_image_header(slot)
    pairs = {
        "job": (header.job, image.job),
        "rank": (header.rank, image.rank),
        "world": (header.world, image.world),
        "token": (header.token, image.token),
        "step": (header.step, image.step),
        "updates": (header.updates, image.updates),
        "small_length": (header.small_length, image.small_length),
        "image_length": (header.image_length, image.length),
        "tree_digest": (header.tree_digest, image.tree_digest),
    }
    for name, (said, found) in pairs.items():
        if said != found:
            raise FormatError(f"{slot.path}: slot header and image header disagree about {name}: {said!r}, {found!r}.")
    if image.length > slot.capacity:
        raise FormatError(f"{slot.path}: the image claims {image.length} bytes of a slot of {slot.capacity}.")
    return header, image


def verify_slot(
    slot: SlotFile,
    *,
    digests: bytes = b"",
    cancel: threading.Event | None = None,
    pace: Callable[[int], object] | None = None,
) -> Seen:
    """Check that a sealed slot holds what its header says.

    `digests`: 16 bytes a chunk, as computed by the copy engine while the bytes were hot; then they are compared with
    the header's root digest and no byte is read again. Empty: every chunk is read and digested here; before each of
    them `pace` is called with its bytes, and may hold the thread back.

    Raises `FormatError` (headers) or `VerificationFailed` (bytes), naming the slot; `Degraded` when cancelled.
    """
    header, image = read_sealed(slot)
    chunks = image.all_chunks()
    if not digests:
        digests = slot.digest_chunks(chunks, None if cancel is None else cancel.is_set, pace)
        if len(digests) != DIGEST_BYTES * len(chunks):
            raise Degraded(f"{slot.path}: digesting was stopped because the daemon ends.")
    elif len(digests) != DIGEST_BYTES * len(chunks):
        raise VerificationFailed(
            f"{slot.path}: {len(digests)} bytes of digests for {len(chunks)} chunks of {DIGEST_BYTES}."
        )
    root = root_digest(digests, image.length)
    if header.root_digest not in (root, NO_DIGEST):
        raise VerificationFailed(
            f"{slot.path} (step {header.step}, epoch {header.token.epoch}): the bytes have digest {root.hex()}, "
            f"the header says {header.root_digest.hex()}."
        )
    if header.root_digest == NO_DIGEST and header.state is SlotState.VERIFIED:
        raise VerificationFailed(f"{slot.path}: the slot says it is verified but records no digest.")
    return Seen(header, image, facts_of(header, image, root, digests))


def facts_of(header: SlotHeader, image: ImageMap, root: bytes, digests: bytes) -> ShardFacts:
    """What the cores need to know of a shard."""
    return ShardFacts(
        token=header.token,
        rank=header.rank,
        world=header.world,
        step=header.step,
        updates=header.updates,
        tree_digest=header.tree_digest,
        root_digest=root,
        image_length=header.image_length,
        small_length=header.small_length,
        digests=digests,
        replicas=replicas_of(image, header.tree_digest, digests),
        plan=image.plan,
    )


@dataclass(frozen=True)
class ReplicaGroup:
    """Stable ranges that other ranks may hold too: what they are, and which chunks hold them."""

    key: bytes
    chunks: tuple[tuple[int, int], ...]
    """(first byte, byte behind the last) of each entry's part of the chunk digests."""


def replica_groups(placements: tuple[Placement, ...]) -> tuple[ReplicaGroup, ...]:
    """The stable ranges of a layout, in two groups: whole tensors, and parts of tensors.

    Two ranks with the same key hold the same ranges, so their digests must agree (invariant 3). Whole tensors are a
    group of their own because ranks often replicate those and divide others (sharded optimizers).
    """
    groups: dict[bool, list[Placement]] = {True: [], False: []}
    for placement in placements:
        entry = placement.entry
        if entry.kind != "stable" or entry.global_shape is None or entry.ranges is None:
            continue
        whole = all(span == (0, size) for span, size in zip(entry.ranges, entry.global_shape, strict=False))
        groups[whole].append(placement)
    found: list[ReplicaGroup] = []
    for group in groups.values():
        if not group:
            continue
        key = xxhash.xxh3_128()
        chunks: list[tuple[int, int]] = []
        for placement in sorted(group, key=lambda p: (p.entry.name, p.entry.ranges)):
            entry = placement.entry
            key.update(repr((entry.name, entry.dtype, entry.global_shape, entry.ranges, entry.strides)).encode())
            first = DIGEST_BYTES * placement.first_chunk
            chunks.append((first, first + DIGEST_BYTES * placement.chunk_count))
        found.append(ReplicaGroup(key.digest(), tuple(chunks)))
    return tuple(found)


_KEPT_LAYOUTS = 256
_groups: dict[bytes, tuple[ReplicaGroup, ...]] = {}


def replicas_of(image: ImageMap, tree: bytes, digests: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """(key, digest) of each group of stable ranges. `tree`: the layout's digest."""
    groups = _groups.get(tree)
    if groups is None:  # at every seal they would cost more than all the rest
        if len(_groups) >= _KEPT_LAYOUTS:
            _groups.clear()
        groups = _groups[tree] = replica_groups(image.placements)
    return tuple(
        (group.key, xxhash.xxh3_128_digest(b"".join(digests[first:end] for first, end in group.chunks)))
        for group in groups
    )


def shard_of_fetch(slot: SlotFile, claimed: ShardFacts, digests: bytes) -> tuple[ParsedImage, ShardFacts]:
    """What a shard that was just fetched into a slot is. `digests`: of the bytes written there, verified on the way.

    Raises `FormatError` or `VerificationFailed` where the image is not the shard that was asked for.
    """
    image = read_image_header(slot)
    said = (image.token, image.rank, image.step, image.length, image.tree_digest)
    asked = (claimed.token, claimed.rank, claimed.step, claimed.image_length, claimed.tree_digest)
    if said != asked:
        raise FormatError(f"the fetched shard is of {said[:4]}, not of {asked[:4]} (token, rank, step, bytes).")
    root = root_digest(digests, image.length)
    if root != claimed.root_digest:
        raise VerificationFailed(f"the fetched shard has digest {root.hex()}, not {claimed.root_digest.hex()}.")
    shard = ShardFacts(
        token=image.token,
        rank=image.rank,
        world=image.world,
        step=image.step,
        updates=image.updates,
        tree_digest=image.tree_digest,
        root_digest=root,
        image_length=image.length,
        small_length=image.small_length,
        digests=digests,
        replicas=replicas_of(image, image.tree_digest, digests),
        plan=image.plan,
    )
    return image, shard
