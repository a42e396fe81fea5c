"""The slot files of one job on this node: open descriptors, what their headers say, how their images are laid out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection

from baftd.checkpoint.facts import ShardFacts, Writer
from baftd.checkpoint.shard import DIGEST_BYTES, ImageMap, root_digest
from baftd.checkpoint.slots import HeaderFacts
from baftd.checkpoint.slots import SlotState as CoreState
from baftd.daemon.digesting import facts_of, read_sealed, verify_slot
from baftd.errors import FormatError, VerificationFailed
from baftd.memory.arena import JobArena
from baftd.memory.header import SlotHeader, SlotState
from baftd.memory.slot_file import IMAGE_OFFSET, SlotFile
from baftd.wire.messages import SlotImage

__all__ = ["SlotFiles"]


class SlotFiles:
    """Belongs to the event loop; `verify`, `create`, `known_layout` and `prefault` block and run in worker threads."""

    def __init__(self, arena: JobArena) -> None:
        self.arena = arena
        self.layouts: dict[bytes, ImageMap] = {}
        """Tree digest -> layout, of those seen since the daemon started."""
        self._files: dict[tuple[int, int], SlotFile] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ files

    def get(self, rank: int, slot: int) -> SlotFile:
        """The open file of a slot. Raises `FormatError`, `OSError`."""
        with self._lock:
            file = self._files.get((rank, slot))
            if file is None:
                file = self._files[rank, slot] = SlotFile.open_rw(self.arena.slot_path(rank, slot))
            return file

    def find(self, rank: int) -> dict[int, int]:
        """Slots of a rank that exist, can be opened and are as long as they were made: index -> capacity in bytes."""
        found: dict[int, int] = {}
        for ref in self.arena.slots():
            if ref.rank == rank:
                try:
                    file = self.get(rank, ref.index)
                    if os.fstat(file.fd).st_size == file.size:
                        found[ref.index] = file.capacity
                except (FormatError, OSError):
                    continue
        return found

    def create(self, rank: int, slot: int, capacity: int, numa_node: int = -1) -> None:
        """Make a slot file and reserve its memory. Blocks. Raises `NoRoom`."""
        file = self.arena.create_slot(rank, slot, capacity, numa_node=numa_node)
        with self._lock:
            self._files[rank, slot] = file

    def next_index(self, rank: int) -> int:
        """An index that no slot file of the rank has."""
        return max((ref.index + 1 for ref in self.arena.slots() if ref.rank == rank), default=0)

    def remove(self, rank: int, slot: int) -> None:
        """Unlink a slot. A process that maps it keeps its memory until it lets go."""
        with self._lock:
            file = self._files.pop((rank, slot), None)
        if file is not None:
            file.close()
        self.arena.remove_slot(rank, slot)

    def forget(self, rank: int, slot: int) -> None:
        """Close a slot; the file stays."""
        with self._lock:
            file = self._files.pop((rank, slot), None)
        if file is not None:
            file.close()

    def usage(self) -> int:
        """Memory that the slots occupy."""
        return sum(ref.bytes for ref in self.arena.slots())

    def close(self) -> None:
        """Close all descriptors; the files stay."""
        with self._lock:
            files, self._files = list(self._files.values()), {}
        for file in files:
            file.close()

    # ------------------------------------------------------------------ headers

    def header(self, rank: int, slot: int) -> HeaderFacts | None:
        """What the header says; None if it cannot be read."""
        try:
            file = self.get(rank, slot)
            header = file.read_header()
            if header is None:
                state, generation = file.read_state()
                return HeaderFacts(CoreState(int(state)), generation)
        except (FormatError, OSError):
            return None
        if header.job != self.arena.job or header.rank != rank:
            return None
        return HeaderFacts(
            CoreState(int(header.state)),
            header.generation,
            self._claimed(header),
            Writer(header.writer_pid, header.writer_start),
        )

    def headers(self, only: Collection[tuple[int, int]] | None = None) -> dict[tuple[int, int], HeaderFacts | None]:
        """Headers of all slot files, or of some."""
        if only is None:
            only = [(ref.rank, ref.index) for ref in self.arena.slots()]
        return {(rank, slot): self.header(rank, slot) for rank, slot in only}

    def free(self, rank: int, slot: int, generation: int) -> None:
        """Write FREE into the header."""
        self.get(rank, slot).free(generation)

    def mark_verified(self, rank: int, slot: int, shard: ShardFacts) -> None:
        """Write VERIFIED into the header, with the digest if it has none yet."""
        file = self.get(rank, slot)
        header = file.read_header()
        if header is None or header.checkpoint != shard.checkpoint or header.state is SlotState.VERIFIED:
            return
        if header.root_digest == shard.root_digest:
            file.set_state(SlotState.VERIFIED, header.generation)
        else:
            file.write_header(header.with_state(SlotState.VERIFIED, root_digest=shard.root_digest))

    # ------------------------------------------------------------------ content

    def sealed(self, rank: int, slot: int, generation: int, digests: bytes) -> tuple[ShardFacts, bool]:
        """What a slot that was just sealed holds, and whether it is digested: digests computed by the copy engine
        are compared with the header's root digest, and no byte is read again.

        Raises `FormatError` or `VerificationFailed` naming the slot.
        """
        file = self.get(rank, slot)
        header = file.read_header()
        if header is None or header.state not in (SlotState.SEALED, SlotState.VERIFIED):
            raise FormatError(f"{file.path}: the slot is not sealed, though the client says so.")
        if header.generation != generation:
            raise FormatError(f"{file.path}: the header has generation {header.generation}, not {generation}.")
        if header.job != self.arena.job or header.rank != rank:
            raise FormatError(f"{file.path}: the header is that of rank {header.rank} of job {header.job}.")
        layout = self.layouts.get(header.tree_digest)
        if layout is None:
            _, layout = read_sealed(file)
            self.layouts[header.tree_digest] = layout
        if header.image_length != layout.image_length(header.small_length) or header.image_length > file.capacity:
            raise FormatError(f"{file.path}: an image of {header.image_length} bytes does not fit its layout.")
        if not digests:
            return self._claimed(header), False
        chunks = layout.chunks(header.small_length)
        if len(digests) != DIGEST_BYTES * len(chunks):
            raise VerificationFailed(f"{file.path}: {len(digests)} bytes of digests for {len(chunks)} chunks.")
        root = root_digest(digests, header.image_length)
        if root != header.root_digest:
            raise VerificationFailed(f"{file.path}: the digests sent and the header's root digest disagree.")
        return facts_of(header, layout, root, digests), True

    def verify(
        self, rank: int, slot: int, cancel: threading.Event, pace: Callable[[int], object] | None = None
    ) -> ShardFacts:
        """Read every byte of a sealed slot, at a pace, and compare. Blocks.

        Raises `FormatError`, `VerificationFailed`, `Degraded` when cancelled."""
        seen = verify_slot(self.get(rank, slot), cancel=cancel, pace=pace)
        if seen.facts.rank != rank or seen.header.job != self.arena.job:
            raise FormatError(f"{self.arena.slot_path(rank, slot)}: it is a slot of {seen.header.job}.")
        self.layouts.setdefault(seen.facts.tree_digest, seen.image)
        return seen.facts

    def layout_of(self, rank: int, slot: int, tree: bytes) -> ImageMap:
        """The layout of a slot's image. Raises `FormatError` when the slot holds another one."""
        layout = self.layouts.get(tree)
        if layout is None:
            _, image = read_sealed(self.get(rank, slot))
            if image.tree_digest != tree:
                raise FormatError(f"{self.arena.slot_path(rank, slot)}: the slot holds another layout.")
            layout = self.layouts[tree] = image
        return layout

    def known_layout(self, rank: int, tree: bytes) -> ImageMap | None:
        """A layout that was declared or seen since the daemon started, or lies in a sealed slot of the rank. Blocks."""
        for ref in self.arena.slots() if tree not in self.layouts else ():
            if ref.rank == rank:
                try:
                    _, image = read_sealed(self.get(rank, ref.index))
                except (FormatError, OSError):  # free, being filled, or damaged: another may do
                    continue
                self.layouts.setdefault(image.tree_digest, image)
        return self.layouts.get(tree)

    def image(self, rank: int, slot: int, shard: ShardFacts) -> SlotImage:
        """Where the image of a verified slot lies, for a restore."""
        return SlotImage(
            path=self.arena.slot_path(rank, slot),
            offset=IMAGE_OFFSET,
            length=shard.image_length,
            digest=shard.root_digest,
            chunk_digests=shard.digests,
        )

    def _claimed(self, header: SlotHeader) -> ShardFacts:
        """The header's claims, undigested. A free slot has none."""
        return ShardFacts(
            token=header.token,
            rank=header.rank,
            world=header.world,
            step=header.step,
            updates=header.updates,
            tree_digest=header.tree_digest,
            root_digest=header.root_digest,
            image_length=header.image_length,
            small_length=header.small_length,
        )
