"""What `resume()` hands out: a verified image in a pinned slot, copied out and checked while it is copied.

Nothing restored aliases the slot: bytes leave it only by being copied to memory of the caller's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from itertools import product
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from baft_client.engine import CopyEngine
from baftd.checkpoint import state_tree
from baftd.checkpoint.image import ParsedImage, header_length, parse_image_header
from baftd.checkpoint.reshard import Geometry
from baftd.checkpoint.shard import CHUNK, DIGEST_BYTES, Placement, TensorEntry, root_digest
from baftd.errors import FormatError, ModelMismatch, UsageError, VerificationFailed
from baftd.memory.slot_file import IMAGE_OFFSET, SlotFile
from baftd.wire.messages import SlotImage

__all__ = ["RestoredImage"]

SPARSE = 8
"""Bytes that are digested at most for each one that is copied."""

_UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Size of an element -> a type by which it is copied."""


class RestoredImage:
    """The state to load. Not for several threads at once.

    Tensors are asked for under the name in which they are stored: `entry.name`, or `name@start:stop,...` where
    several ranges of one tensor were saved (`stored_names` has them all).
    """

    def __init__(self, source: SlotImage, engine: CopyEngine, *, job: str, rank: int, threads: int = 0) -> None:
        """Map the slot and read its header.

        Args:
            source: where the daemon says the image lies.
            engine: copies and digests.
            job: whose image it must be.
            rank: the same.
            threads: for large tensors; 0: as many as this process may run on, at most 4.

        Raises:
            FormatError: the image is not what it claims to be, or is another job's.
            VerificationFailed: its header or small state differ from their digests.
        """
        self._engine = engine
        self._threads = threads or min(4, len(os.sched_getaffinity(0)))
        self._root = source.digest
        self._slot = SlotFile.open_ro(source.path)
        try:
            self._open(source, job, rank)
        except BaseException:
            self._slot.close()
            raise

    def _open(self, source: SlotImage, job: str, rank: int) -> None:
        slot = self._slot
        if source.offset != IMAGE_OFFSET or source.length > slot.capacity:
            raise FormatError(f"slot {slot.path} has {slot.capacity} bytes of image, not {source.length}.")
        data_offset = header_length(slot.pread(0, 8))
        if data_offset > source.length:
            raise FormatError(f"the image in {slot.path} ends inside its header.")
        header = slot.pread(0, data_offset)
        self.parsed: ParsedImage = parse_image_header(header)
        if self.parsed.length != source.length:
            raise FormatError(
                f"the image in {slot.path} has {self.parsed.length} bytes, the daemon says {source.length}."
            )
        if (self.parsed.job, self.parsed.rank) != (job, rank):
            raise FormatError(
                f"slot {slot.path} holds rank {self.parsed.rank} of job {self.parsed.job}, not rank {rank} of {job}."
            )
        chunks = self.parsed.all_chunks()
        self._known = source.chunk_digests
        if self._known and len(self._known) != DIGEST_BYTES * len(chunks):
            raise FormatError(f"{len(self._known)} bytes of digests came for {len(chunks)} chunks of {slot.path}.")
        if self._known and root_digest(self._known, source.length) != self._root:
            raise VerificationFailed(f"the digests of {slot.path} are not those that its root digest covers.")
        self._seen = self.parsed.digest_table(self.parsed.small_length)
        self._done = np.zeros(len(chunks), dtype=bool)
        self._by_name = {placement.stored_name: placement for placement in self.parsed.placements}
        self._address = slot.address
        for pad in self.parsed.pads:
            self._settle("padding", pad.first_chunk, slot.pread(pad.offset, pad.nbytes), pad.nbytes)
        self._settle("the header", 0, header, len(header))
        small = slot.pread(self.parsed.small_offset, self.parsed.small_length)
        self._settle("the small state", self.parsed.small_first_chunk, small, len(small))
        self._small_bytes = small

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of all tensors, in image order."""
        return tuple(self._by_name)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Stored name -> entry."""
        return {name: placement.entry for name, placement in self._by_name.items()}

    @property
    def step(self) -> int:
        """Boundary at which the state was taken."""
        return self.parsed.step

    @property
    def updates(self) -> int:
        """Optimizer updates by then."""
        return self.parsed.updates

    @property
    def plan(self) -> bytes:
        """Under which replicated ranges were divided among their holders; empty: it is all that its rank held."""
        return self.parsed.plan

    @property
    def held(self) -> tuple[TensorEntry, ...]:
        """What the rank held, as it declared it."""
        return self.parsed.declared

    @property
    def world(self) -> int:
        """Number of ranks that saved."""
        return self.parsed.world

    @property
    def small(self) -> object:
        """The small state, decoded anew at each call.

        Raises:
            FormatError: it is no typed tree.
        """
        return state_tree.decode(self._small_bytes)

    @property
    def small_bytes(self) -> bytes:
        """The small state as it was saved."""
        return self._small_bytes

    def copy_into(self, name: str, address: int, nbytes: int) -> None:
        """Copy a tensor to memory of the caller's and verify it on the way.

        Args:
            name: as stored.
            address: of at least `nbytes` writable bytes, C-contiguous (or with the strides of the entry).
            nbytes: must be the tensor's.

        Raises:
            ModelMismatch: there is no such tensor, or it has another size.
            VerificationFailed: its bytes are not what their digest says; the destination holds them nevertheless.
        """
        placement = self._placement(name)
        if placement.nbytes != nbytes:
            raise ModelMismatch(f"tensor {name!r} has {nbytes} bytes here and {placement.nbytes} in step {self.step}.")
        self._check_open()
        if nbytes:
            threads = self._threads if nbytes >= 4 * CHUNK else 1
            digests = self._engine.copy_digest(self._address + placement.offset, address, nbytes, threads=threads)
            self._record(f"tensor {name!r}", placement.first_chunk, digests)

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as a fresh array (uint8, shape (nbytes,)), verified. Errors as `copy_into`."""
        placement = self._placement(name)
        out = np.empty(placement.nbytes, dtype=np.uint8)
        self.copy_into(name, int(out.ctypes.data), placement.nbytes)
        return out

    def copy_region(self, name: str, region: Geometry, target: npt.NDArray[Any]) -> None:
        """Copy a part of a tensor, and nothing else of it; the chunks that it touches are verified, each once.

        They are not where less than an eighth of them is wanted, so that no more than eight bytes are looked at for
        one that is needed, and not where the daemon gave no digests of chunks: it has verified the image itself.

        Args:
            name: as stored.
            region: which elements (its target half is ignored).
            target: writable, of the region's shape and any strides; its items are the elements.

        Raises:
            ModelMismatch: there is no such tensor.
            VerificationFailed: a chunk is not what its digest says; the target may hold some of its bytes.
        """
        placement = self._placement(name)
        self._check_open()
        if target.shape != region.shape:
            raise UsageError(f"a region of shape {region.shape} of tensor {name!r} does not fit shape {target.shape}.")
        if not target.size:
            return
        run = target.nbytes if _contiguous(region, target.itemsize) and target.flags.c_contiguous else 0
        if run >= CHUNK:
            self._copy_run(placement, region.source_offset, int(target.ctypes.data), run)
            return
        spans = list(_spans(region, target.itemsize))
        touched = [(start // CHUNK, -(-stop // CHUNK)) for start, stop in spans]
        looked_at = sum(min(last * CHUNK, placement.nbytes) - first * CHUNK for first, last in touched)
        if looked_at <= SPARSE * target.nbytes:
            for first, last in touched:
                self._verify(placement, first, last)
        source = self.region(name, region, target.itemsize)
        np.copyto(_as_units(target), _as_units(source), casting="no")

    def region(self, name: str, region: Geometry, itemsize: int) -> npt.NDArray[np.void]:
        """A view of a part of a tensor in the slot, not verified; keep it no longer than the image is open."""
        placement = self._placement(name)
        self._check_open()
        inside = [(count - 1) * step for count, step in zip(region.shape, region.source_strides, strict=True)]
        if region.source_offset < 0 or region.source_offset + sum(inside) + itemsize > placement.nbytes:
            raise UsageError(f"a region of tensor {name!r} lies outside of its {placement.nbytes} bytes.")
        return np.ndarray(
            region.shape,
            np.dtype((np.void, itemsize)),
            self._slot.image(),
            placement.offset + region.source_offset,
            region.source_strides,
        )

    def digests(self, name: str) -> bytes:
        """Digests of the tensor's chunks, 16 bytes each: the daemon's, or made now where it gave none."""
        placement = self._placement(name)
        start = DIGEST_BYTES * placement.first_chunk
        if self._known:
            return bytes(self._known[start : start + DIGEST_BYTES * placement.chunk_count])
        self._verify(placement, 0, placement.chunk_count)
        return bytes(self._seen[start : start + DIGEST_BYTES * placement.chunk_count])

    def _copy_run(self, placement: Placement, start: int, address: int, nbytes: int) -> None:
        """Copy contiguous bytes of a tensor: whole chunks are digested on the way, by several threads."""
        stop = start + nbytes
        first, last = -(-start // CHUNK), stop // CHUNK if stop < placement.nbytes else placement.chunk_count
        head, tail = min(first * CHUNK, stop), max(min(last * CHUNK, stop), min(first * CHUNK, stop))
        base = self._address + placement.offset
        for at, end in ((start, head), (tail, stop)):
            if at < end:
                self._verify(placement, at // CHUNK, -(-end // CHUNK))
                ctypes.memmove(address + at - start, base + at, end - at)
        if head < tail:
            threads = self._threads if tail - head >= 4 * CHUNK else 1
            digests = self._engine.copy_digest(base + head, address + head - start, tail - head, threads=threads)
            self._record(f"tensor {placement.stored_name!r}", placement.first_chunk + first, digests)

    def _verify(self, placement: Placement, first: int, last: int) -> None:
        """Compare chunks `first` to `last` - 1 of a tensor with their digests, those that have not been yet."""
        done = self._done[placement.first_chunk + first : placement.first_chunk + last]
        if done.all():
            return
        what = f"tensor {placement.stored_name!r}"
        for start, stop in _gaps(done):
            at, end = (first + start) * CHUNK, min((first + stop) * CHUNK, placement.nbytes)
            threads = self._threads if end - at >= 4 * CHUNK else 1
            digests = self._engine.digest(self._address + placement.offset + at, end - at, threads=threads)
            self._record(what, placement.first_chunk + first + start, digests)

    def _placement(self, name: str) -> Placement:
        placement = self._by_name.get(name)
        if placement is None:
            raise ModelMismatch(f"step {self.step} of rank {self.parsed.rank} holds no tensor {name!r}.")
        return placement

    def verify_rest(self) -> None:
        """Verify what was not copied, and with it the whole image against its root digest.

        Raises:
            VerificationFailed: naming the tensor where the daemon gave digests of chunks.
        """
        self._check_open()
        for placement in self.parsed.placements:
            self._verify(placement, 0, placement.chunk_count)
        if root_digest(self._seen, self.parsed.length) != self._root:
            raise VerificationFailed(
                f"step {self.step} in {self._slot.path} is not what its root digest says.",
                hint="It will be passed over at the next start.",
            )

    def _settle(self, what: str, first_chunk: int, data: bytes, nbytes: int) -> None:
        if nbytes:
            address = np.frombuffer(data, dtype=np.uint8)
            self._record(what, first_chunk, self._engine.digest(int(address.ctypes.data), nbytes))

    def _record(self, what: str, first_chunk: int, digests: bytes) -> None:
        start, stop = DIGEST_BYTES * first_chunk, DIGEST_BYTES * first_chunk + len(digests)
        if self._known and digests != self._known[start:stop]:
            raise VerificationFailed(
                f"{what} of step {self.step} in {self._slot.path} is not what its digest says.",
                hint="It will be passed over at the next start.",
            )
        self._seen[start:stop] = digests
        self._done[first_chunk : first_chunk + len(digests) // DIGEST_BYTES] = True

    def placement(self, name: str) -> Placement:
        """Where a tensor lies in the image. KeyError for an unknown name."""
        return self._by_name[name]

    def _check_open(self) -> None:
        if self._slot.fd < 0:
            raise UsageError("the restored image is closed: restored() was called already.")

    def close(self) -> None:
        """Unmap the slot. Safe to call twice."""
        self._slot.close()

    def __enter__(self) -> RestoredImage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _contiguous(region: Geometry, itemsize: int) -> bool:
    """Whether the elements of a region follow each other in the saved tensor, in row-major order."""
    expected = itemsize
    for count, stride in zip(reversed(region.shape), reversed(region.source_strides), strict=True):
        if count != 1 and stride != expected:
            return False
        expected *= count
    return True


def _spans(region: Geometry, itemsize: int) -> Iterator[tuple[int, int]]:
    """Ranges of a tensor's bytes that hold all of a region and skip every gap of more than a chunk."""
    far: list[range] = []
    near = itemsize
    for count, stride in zip(region.shape, region.source_strides, strict=True):
        if stride > CHUNK:
            far.append(range(0, count * stride, stride))
        else:
            near += (count - 1) * stride
    for offsets in product(*far):
        start = region.source_offset + sum(offsets)
        yield start, start + near


def _gaps(done: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Ranges of indices where `done` is False."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], done, [True]))))
    yield from edges.reshape(-1, 2).tolist()


def _as_units(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory as plain numbers of the same size: numpy copies those fast whatever the strides, every bit."""
    return array.view(_UNITS.get(array.itemsize, array.dtype))
