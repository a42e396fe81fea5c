"""All shards of a saved step, open at once: what a start with another number of ranks, or another layout, reads from.

    resumed = session.resume(reshard=True)
    shards = resumed.shards
    fills = plan_reads(shards.saved(), wanted, rank=session.rank)    # or names all that is missing
    for fill in fills:
        shards.read(fill, address)                                  # exactly the bytes that are wanted

The daemon has verified every image before it named it. Headers and small states are compared with their digests again
when they are opened, and so is every chunk of which at least an eighth is read, once, when it is read first. Where less
of it is wanted (a few columns of a large matrix) the daemon is believed: nothing is read for the sake of the rest.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from baft_client.engine import CopyEngine
from baft_client.restore import RestoredImage
from baft_client.whole import WholeImage
from baftd.checkpoint import state_tree
from baftd.checkpoint.ranges import Box, said, volume
from baftd.checkpoint.reshard import Fill, Geometry, Read, SavedSet, SavedTensor, Wanted, geometry
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import FormatError, UsageError, VerificationFailed
from baftd.wire.messages import RankImage

__all__ = ["SavedShards", "split_small"]


class SavedShards:
    """The images of all ranks that saved a step. Not for several threads at once."""

    def __init__(self, shards: Sequence[RankImage], engine: CopyEngine, *, job: str, world: int, step: int) -> None:
        """Map all slots, read their headers and small states.

        Args:
            shards: where the daemon says that they lie, one for each rank.
            engine: copies and digests.
            job: whose images they must be.
            world: ranks that saved.
            step: that they must be of.

        Raises:
            FormatError: an image is missing, is of another step, or is not what it claims to be.
            VerificationFailed: a header or small state differs from its digest.
        """
        self.bytes_read = 0
        """Copied out of the images so far."""
        self._images: dict[int, RestoredImage] = {}
        missing = sorted(set(range(world)) - {shard.rank for shard in shards})
        if missing or len(shards) != world:
            raise FormatError(f"{len(shards)} images came for step {step} of {world} ranks; missing: {missing[:16]}.")
        try:
            for shard in sorted(shards, key=lambda shard: shard.rank):
                image = RestoredImage(shard.image, engine, job=job, rank=shard.rank)
                self._images[shard.rank] = image
                if (image.world, image.step) != (world, step):
                    it = f"step {image.step} of {image.world} ranks"
                    raise FormatError(f"{shard.image.path} holds {it}, not step {step} of {world}.")
                if image.plan != self._images[min(self._images)].plan:
                    raise FormatError(f"{shard.image.path} was saved under another plan than other ranks' shards.")
        except BaseException:
            self.close()
            raise

    @property
    def world(self) -> int:
        """Number of ranks that saved."""
        return len(self._images)

    @property
    def step(self) -> int:
        """Boundary at which the state was taken."""
        return self._images[0].step

    @property
    def updates(self) -> int:
        """Optimizer updates by then."""
        return self._images[0].updates

    def image(self, rank: int) -> RestoredImage | WholeImage:
        """What one rank held when it saved. KeyError for another rank.

        Where replicated ranges were divided among their holders, it is read out of all images."""
        image = self._images[rank]
        return WholeImage(self, image, rank) if image.plan else image

    def entries(self, rank: int) -> Mapping[str, TensorEntry]:
        """Stored name -> entry of one rank's image."""
        return self._images[rank].entries

    def small(self, rank: int) -> Any:
        """The small state that a rank saved, decoded anew at each call. FormatError: it is no typed tree."""
        return self._images[rank].small

    def small_bytes(self, rank: int) -> bytes:
        """The same, encoded."""
        return self._images[rank].small_bytes

    def saved(self, *, base: Callable[[str], str] = str, exact: bool = False) -> SavedSet:
        """All tensors by name; the arguments as for `SavedSet.of`."""
        saved = {rank: image.entries.items() for rank, image in self._images.items()}
        return SavedSet.of(saved, self.same_bytes, base=base, exact=exact)

    def same_bytes(self, a: SavedTensor, b: SavedTensor, box: Box | None = None) -> bool:
        """Whether two saved tensors are equal in `box` of the whole tensor (None: in all that they have, stored alike).

        Where the digests of their chunks say so, nothing is read.
        """
        one, other = self._images[a.rank], self._images[b.rank]
        alike = _form(a.entry) == _form(b.entry)
        if alike and one.digests(a.stored_name) == other.digests(b.stored_name):
            return True
        if box is None or (alike and volume(box) == prod(a.entry.shape)):
            return False
        return self._view(a, box).tobytes() == self._view(b, box).tobytes()

    def _view(self, tensor: SavedTensor, box: Box) -> npt.NDArray[np.void]:
        entry = tensor.entry
        shape = entry.shape if entry.global_shape is None else entry.global_shape
        wanted = Wanted(entry.name, entry.dtype, shape, box, entry.nbytes // prod(entry.shape))
        region = geometry(Read(tensor, box), wanted)
        return self._images[tensor.rank].region(tensor.stored_name, region, wanted.itemsize)

    # ------------------------------------------------------------------------------------ reading

    def read(self, fill: Fill, address: int) -> None:
        """Copy a wanted box to the contiguous, row-major buffer of `fill.wanted.nbytes` bytes at `address`.

        Raises:
            VerificationFailed: a chunk is not what its digest says; tensor, rank and range are named.
        """
        if fill.wanted.nbytes:
            shape = tuple(stop - start for start, stop in fill.wanted.box)
            memory = memoryview((ctypes.c_char * fill.wanted.nbytes).from_address(address)).cast("B")
            flat = np.frombuffer(memory, dtype=np.dtype((np.void, fill.wanted.itemsize)))
            self.read_array(fill, flat.reshape(shape))

    def read_array(self, fill: Fill, target: npt.NDArray[Any]) -> None:
        """Copy a wanted box into an array of its shape, whose items have its item size, with any strides.

        Raises:
            UsageError: the array does not fit.
            VerificationFailed: as `read`.
        """
        wanted = fill.wanted
        shape = tuple(stop - start for start, stop in wanted.box)
        if target.shape != shape or target.itemsize != wanted.itemsize:
            raise UsageError(
                f"{said(wanted.box)} of tensor {wanted.name!r} has shape {shape} of {wanted.itemsize}-byte elements, "
                f"the array {target.shape} of {target.itemsize}-byte ones."
            )
        for read in fill.reads:
            cut: list[Any] = [
                slice(start - low, stop - low) for (start, stop), (low, _) in zip(read.box, wanted.box, strict=True)
            ]
            cut.append(...)  # of a 0-dimensional array, too, a view and not its element
            self._copy(read, geometry(read, wanted), target[tuple(cut)])

    def _copy(self, read: Read, region: Geometry, part: npt.NDArray[Any]) -> None:
        source = read.source
        try:
            self._images[source.rank].copy_region(source.stored_name, region, part)
        except VerificationFailed as error:
            where = f"{said(read.box)} of tensor {source.entry.name!r}, saved by rank {source.rank}"
            raise VerificationFailed(f"{where}: {error.message}", hint=error.hint) from error
        self.bytes_read += part.nbytes

    # ------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """Unmap all slots. Safe to call twice."""
        for image in self._images.values():
            image.close()

    def __enter__(self) -> SavedShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _form(entry: TensorEntry) -> tuple[object, ...]:
    """What two entries have in common if equal bytes mean equal elements at equal places."""
    return entry.dtype, entry.shape, entry.strides, entry.global_shape, entry.ranges


def split_small(trees: Mapping[int, Mapping[str, object]]) -> tuple[dict[str, object], tuple[str, ...]]:
    """The items that all ranks saved with equal bytes, and the names of the others, sorted.

    What differs among ranks (random numbers, a position in the data) belongs to each of them, and none of it can be
    given to a rank of another layout.
    """
    first = trees[min(trees)]
    names = sorted({name for tree in trees.values() for name in tree})
    carried: dict[str, object] = {}
    for name in names:
        if all(name in tree for tree in trees.values()):
            encoded = state_tree.encode(first[name])
            if all(state_tree.encode(tree[name]) == encoded for tree in trees.values()):
                carried[name] = first[name]
    return carried, tuple(name for name in names if name not in carried)
