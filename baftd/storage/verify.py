"""Re-reading a shard: is every byte what it was when the shard was written, and which tensors are hit if not."""

from __future__ import annotations

import os
from collections.abc import Sequence

from baftd.checkpoint.image import header_length, parse_image_header
from baftd.errors import BaftError, Degraded, FormatError
from baftd.storage.files import FileOps
from baftd.storage.formats import ShardManifest
from baftd.storage.interface import ShardRecord, VerifyLine
from baftd.storage.inventory import Inventory
from baftd.storage.names import shard_name
from baftd.storage.reader import BulkReader
from baftd.storage.writer import Bounds

__all__ = ["verify_shard"]


def verify_shard(ops: FileOps, inventory: Inventory, record: ShardRecord, bounds: Bounds, threads: int) -> VerifyLine:
    """Read one shard whole. Damage and read errors are the answer; `Degraded` (cancelled) is raised."""
    path = f"{inventory.path}/{shard_name(record.rank)}"
    what = f"rank {record.rank}: {path}"
    try:
        manifest, _ = inventory.shard(record.rank, record.manifest_digest)
        reader = BulkReader(
            ops, manifest.chunks(), manifest.digests, bounds, what, stop_at_first=False, threads=threads
        )
        bad = reader.read(path)
        tensors = _tensors_hit(ops, path, manifest, bad)
    except Degraded:
        raise
    except BaftError as error:
        return VerifyLine(False, f"{what}: {error.message}", record.rank, nbytes=record.nbytes)
    except OSError as error:
        return VerifyLine(False, f"{what}: {error.strerror}", record.rank, nbytes=record.nbytes)
    if not bad:
        return VerifyLine(True, f"{what}: {manifest.nbytes} bytes are whole", record.rank, nbytes=manifest.nbytes)
    more = f" and {len(bad) - 1} more chunks" if len(bad) > 1 else ""
    return VerifyLine(
        False, f"{reader.describe(bad[0])}{more}; {tensors}", record.rank, chunk=bad[0], nbytes=manifest.nbytes
    )


def _tensors_hit(ops: FileOps, path: str, manifest: ShardManifest, bad: Sequence[int]) -> str:
    """Which tensors lie in the damaged chunks, in words."""
    if not bad:
        return ""
    try:
        image = parse_image_header(_header(ops, path))
    except FormatError as error:
        return f"its header cannot be read either ({error.message})"
    chunks = manifest.chunks()
    spans = [(place.offset, place.offset + place.nbytes, place.stored_name) for place in image.placements]
    spans += [(0, image.data_offset, "the header"), (image.small_offset, image.length, "the small state")]
    hit = [
        name
        for start, end, name in sorted(spans)
        if any(chunks[number][0] < end and sum(chunks[number]) > start for number in bad)
    ]
    return "hit: " + ", ".join(hit[:5]) + (f" and {len(hit) - 5} more" if len(hit) > 5 else "")


def _header(ops: FileOps, path: str) -> bytes:
    fd = ops.open(path, os.O_RDONLY)
    try:
        first = bytearray(8)
        if ops.pread_into(fd, memoryview(first), 0) != 8:
            raise FormatError(f"{path} ends inside its header")
        header = bytearray(min(header_length(bytes(first)), ops.size(fd)))
        view = memoryview(header)
        done = 0
        while done < len(view):
            got = ops.pread_into(fd, view[done:], done)
            if got == 0:
                break
            done += got
        return bytes(header)
    finally:
        ops.close(fd)
