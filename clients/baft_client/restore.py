"""What `resume()` hands out: a verified image in a pinned slot, copied out and checked while it is copied.

Nothing restored aliases the slot: bytes leave it only by being copied to memory of the caller's.
"""

from __future__ import annotations

import os
from types import TracebackType

import numpy as np
import numpy.typing as npt

from baft_client.engine import CopyEngine
from baftd.checkpoint import state_tree
from baftd.checkpoint.image import ParsedImage, header_length, parse_image_header
from baftd.checkpoint.shard import CHUNK, DIGEST_BYTES, Placement, TensorEntry, root_digest
from baftd.errors import FormatError, ModelMismatch, UsageError, VerificationFailed
from baftd.memory.slot_file import IMAGE_OFFSET, SlotFile
from baftd.wire.messages import SlotImage

__all__ = ["RestoredImage"]


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
        placement = self._by_name.get(name)
        if placement is None:
            raise ModelMismatch(f"step {self.step} holds no tensor {name!r}.")
        if placement.nbytes != nbytes:
            raise ModelMismatch(f"tensor {name!r} has {nbytes} bytes here and {placement.nbytes} in step {self.step}.")
        self._check_open()
        if nbytes:
            threads = self._threads if nbytes >= 4 * CHUNK else 1
            digests = self._engine.copy_digest(self._address + placement.offset, address, nbytes, threads=threads)
            self._record(f"tensor {name!r}", placement.first_chunk, digests)

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes as a fresh array (uint8, shape (nbytes,)), verified. Errors as `copy_into`."""
        placement = self._by_name.get(name)
        if placement is None:
            raise ModelMismatch(f"step {self.step} holds no tensor {name!r}.")
        out = np.empty(placement.nbytes, dtype=np.uint8)
        self.copy_into(name, int(out.ctypes.data), placement.nbytes)
        return out

    def verify_rest(self) -> None:
        """Verify what was not copied, and with it the whole image against its root digest.

        Raises:
            VerificationFailed: naming the tensor where the daemon gave digests of chunks.
        """
        self._check_open()
        for placement in self.parsed.placements:
            if placement.chunk_count and not self._done[placement.first_chunk]:
                digests = self._engine.digest(self._address + placement.offset, placement.nbytes, threads=self._threads)
                self._record(f"tensor {placement.stored_name!r}", placement.first_chunk, digests)
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
