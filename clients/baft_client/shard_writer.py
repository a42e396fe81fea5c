"""Filling a slot: everything between the boundary and the seal that needs no daemon.

One `ShardWriter` serves one declared layout. `begin` runs at the boundary and returns as soon as the copy of the
stable tensors is armed; `seal` runs at the fence, when the state is about to change.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baft_client.engine import CopyEngine, Segment, first_difference
from baft_client.periods import Copied
from baft_client.source import Source
from baftd.checkpoint.identity import Token
from baftd.checkpoint.image import ImageLayout
from baftd.checkpoint.shard import CHUNK, DIGEST_BYTES, Chunk, TensorEntry, digest, digest_chunks, root_digest
from baftd.errors import UsageError
from baftd.memory.header import NO_DIGEST, SlotHeader, SlotState
from baftd.memory.slot_file import SlotFile

__all__ = ["ALL_WITNESSES", "DeviceCopier", "Sealed", "ShardWriter", "Snapshot", "Torn"]

ALL_WITNESSES = frozenset({"updates", "identity", "canary"})
"""Names of the three witnesses of every snapshot; `audit` is the fourth, for every N-th."""


class DeviceCopier(Protocol):
    """Copies sources that live on a device (`Source.device`) into mapped slots, on a stream of its own."""

    def slots(self, ranges: Sequence[tuple[int, int]]) -> None:
        """(address, bytes) of every mapped image; called again when they change, with [] before they are unmapped."""

    def start(self, jobs: Sequence[tuple[Source, int]], *, gated: bool = False) -> None:
        """At the boundary: (source, destination address). Returns at once. `gated`: stable sources wait for windows."""

    def anchor(self, ordinal: int, budget: int) -> None:
        """A window, the period's number `ordinal`: copy up to `budget` bytes behind the operation that was launched
        last, on the copies' own stream. Returns at once, raises nothing; does nothing where no copy is gated."""

    def passed(self, ordinal: int) -> None:
        """That window is over on the host: on the device its gap ends behind what was launched since. Raises
        nothing."""

    def rest(self) -> None:
        """At the fence: enqueue what no window took, and order later work on the device behind it. Returns at once."""

    def flush(self, deadline: float) -> bool:
        """At the fence, after `rest`: wait for the copies; False when `deadline` seconds passed."""

    def copied(self) -> tuple[int, int, int]:
        """Bytes of the newest copy that were enqueued in windows, outside of them, and at the fence."""

    def cancel(self) -> None:
        """Give the copies up: no slot byte is touched after it returned."""

    def check(self) -> str | None:
        """Name of a source that changed since `start`; None for none."""


@dataclass
class Snapshot:
    """A snapshot in progress. Holds every source storage until it is sealed or dropped."""

    step: int
    updates: int
    slot: int
    generation: int
    header: SlotHeader
    digests: bytearray
    """One digest a chunk, those of the stable tensors still zero; empty when the daemon digests."""
    sources: Sequence[Source]
    keep: list[object]
    identities: list[tuple[int, ...]]
    canary: bytes
    recheck: Callable[[], Iterable[tuple[int, ...]]] | None
    began: float
    audited: list[bytes] | None = None
    """Digests of the stable sources as they were at the boundary, where this snapshot is audited."""
    held: float = 0.0
    """Seconds the training thread has spent on it so far."""
    left: int = 0
    """Bytes that were not copied yet when the fence began,"""
    waited: int = 0
    """and ns until they were."""


@dataclass(frozen=True)
class Sealed:
    """The slot holds the state, and the witnesses agree."""

    digests: bytes


@dataclass(frozen=True)
class Torn:
    """The state changed under the copy, or the copy did not finish in time.

    `witness`: updates, identity, canary, audit; late for a copy that did not finish."""

    witness: str
    name: str
    detail: str


@dataclass
class _Slot:
    file: SlotFile
    address: int
    view: npt.NDArray[np.uint8]
    clean: bool = field(default=False)
    """Padding between tensors is known to be zero."""


class ShardWriter:
    """Machinery of one layout: slots mapped, segments prepared, places of digests computed."""

    def __init__(
        self,
        layout: ImageLayout,
        sources: Sequence[Source],
        engine: CopyEngine,
        slots: dict[int, SlotFile],
        *,
        device: DeviceCopier | None = None,
        witnesses: frozenset[str] = ALL_WITNESSES,
    ) -> None:
        """Map the slots and prepare the engine.

        Raises:
            UsageError: a source cannot be copied, a slot is too small for the layout.
        """
        self.layout = layout
        self.entries: list[TensorEntry] = [source.entry for source in sources]
        self._engine = engine
        self._device = device
        self._witnesses = witnesses
        self._files = slots
        self._slots: dict[int, _Slot] = {}
        for number, file in slots.items():
            if file.capacity < layout.capacity:
                raise UsageError(f"slot {file.path} has {file.capacity} bytes, the layout needs {layout.capacity}.")
            self._slots[number] = _Slot(file, file.address, file.image())
        places = layout.by_index
        copied = [i for i, source in enumerate(sources) if source.entry.nbytes and not source.device]
        self._stable = [i for i in copied if sources[i].entry.kind == "stable"]
        self._volatile = [i for i in copied if sources[i].entry.kind == "volatile"]
        self._on_device = [i for i, source in enumerate(sources) if source.entry.nbytes and source.device]
        self._all_stable = [i for i, source in enumerate(sources) if source.entry.kind == "stable"]
        if self._on_device and device is None:
            name = sources[self._on_device[0]].entry.name
            raise UsageError(f"tensor {name!r} lies on a device, and nothing was given that copies from there.")
        self._table = engine.prepare(
            [
                Segment(sources[i].address, places[i].offset, places[i].nbytes, max(1, sources[i].itemsize))
                for i in self._stable
            ]
        )
        numbers = [
            np.arange(places[i].first_chunk, places[i].first_chunk + places[i].chunk_count) for i in self._stable
        ]
        self._stable_chunks = np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.intp)
        self._addresses = [sources[i].address for i in self._stable]
        self._digests = engine.digests and not self._on_device
        self._header_chunks = layout.chunks(0)[: layout.header_chunks]
        self._gated = False
        """The device copies in windows only."""
        if device is not None:
            device.slots([(slot.address, slot.file.capacity) for slot in self._slots.values()])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.layout.small_offset - self.layout.data_offset

    def same_tree(self, sources: Sequence[Source]) -> bool:
        """Whether these are the tensors that were declared. Cheap where the entries are the same objects."""
        return [source.entry for source in sources] == self.entries

    def owns(self, slot: int) -> bool:
        """Whether the slot is one of this layout's."""
        return slot in self._slots

    def prefault(self, slot: int) -> None:
        """Fill the page table for a slot, so that the first copy into it does not."""
        self._files[slot].prefault()

    def begin(
        self,
        slot: int,
        generation: int,
        token: Token,
        *,
        step: int,
        updates: int,
        sources: Sequence[Source],
        small: bytes,
        recheck: Callable[[], Iterable[tuple[int, ...]]] | None,
        writer: tuple[int, int],
        now: float,
        pace: int | None = None,
        windows: bool = False,
        audit: bool = False,
    ) -> Snapshot:
        """Mark the slot FILLING, copy what is volatile, arm the engine for what is stable.

        Args:
            slot: a granted one, and
            generation: under which it was granted.
            token: who writes.
            step: boundary.
            updates: optimizer updates so far.
            sources: the declared tensors, at their present addresses.
            small: the encoded small state; fits the room.
            recheck: see `Session.boundary`.
            writer: pid and start time.
            now: the session's clock.
            pace: bytes a second that the engine copies outside of windows, 0 for none; None: no windows and no limit.
            windows: windows come that open what lies on a device; where none do, it is copied at once.
            audit: remember what every stable byte is now, for `seal` to compare with. Reads the whole state.
        """
        layout, place = self.layout, self._slots[slot]
        header = SlotHeader(
            state=SlotState.FILLING,
            generation=generation,
            token=token,
            job=layout.job,
            rank=layout.rank,
            world=layout.world,
            step=step,
            updates=updates,
            image_length=layout.image_length(len(small)),
            small_length=len(small),
            tree_digest=layout.tree_digest,
            writer_pid=writer[0],
            writer_start=writer[1],
        )
        place.file.write_header(header)
        snapshot = Snapshot(
            step=step,
            updates=updates,
            slot=slot,
            generation=generation,
            header=header,
            digests=layout.digest_table(len(small)) if self._digests else bytearray(),
            sources=sources,
            keep=[source.keep for source in sources],
            identities=[sources[i].identity for i in self._all_stable],
            canary=b"",
            recheck=recheck,
            began=now,
            audited=[_digest_at(sources[i].address, sources[i].entry.nbytes) for i in self._stable] if audit else None,
        )
        if self._stable:
            addresses = [sources[i].address for i in self._stable]
            if addresses != self._addresses:
                self._table.update(np.array(addresses, dtype=np.uint64))
                self._addresses = addresses
            if "canary" in self._witnesses:
                snapshot.canary = self._engine.canary(self._table)
            # Closed before it is armed: a gate that was left open must not let the first blocks through.
            self._engine.close_window()
            self._engine.start(place.address, layout.capacity, self._table)
            if pace is None:
                self._engine.open()
            elif pace:
                self._engine.close_window(pace)
        if self._on_device and self._device is not None:
            offsets = layout.by_index
            self._gated = pace is not None and windows
            jobs = [(sources[i], place.address + offsets[i].offset) for i in self._on_device]
            self._device.start(jobs, gated=self._gated)
        self._fill_small(place, snapshot, token, small)
        self._copy_volatile(place, snapshot)
        return snapshot

    def _fill_small(self, place: _Slot, snapshot: Snapshot, token: Token, small: bytes) -> None:
        layout, view = self.layout, place.view
        head = layout.render_header(token, step=snapshot.step, updates=snapshot.updates, small_length=len(small))
        view[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        end = layout.small_offset + len(small)
        view[layout.small_offset : end] = np.frombuffer(small, dtype=np.uint8)
        if not place.clean:
            for pad in layout.pads:
                view[pad.offset : pad.offset + pad.nbytes] = 0
            place.clean = True
        if self._digests:
            snapshot.digests[: DIGEST_BYTES * layout.header_chunks] = digest_chunks(head, self._header_chunks)
            pieces = range(0, len(small), CHUNK)
            snapshot.digests[DIGEST_BYTES * layout.small_first_chunk :] = digest_chunks(
                small, [Chunk(offset, min(CHUNK, len(small) - offset)) for offset in pieces]
            )

    def _copy_volatile(self, place: _Slot, snapshot: Snapshot) -> None:
        places = self.layout.by_index
        for i in self._volatile:
            source, where = snapshot.sources[i], places[i]
            found = self._engine.copy_digest(source.address, place.address + where.offset, where.nbytes)
            if self._digests:
                start = DIGEST_BYTES * where.first_chunk
                snapshot.digests[start : start + DIGEST_BYTES * where.chunk_count] = found

    def seal(self, snapshot: Snapshot, *, updates: int | None, deadline: float) -> Sealed | Torn:
        """Finish the copy, compare the witnesses, and mark the slot SEALED.

        Args:
            snapshot: in progress.
            updates: the update counter now; None where nobody counts.
            deadline: seconds the rest of the copy may take.

        On Torn the engine has been cancelled and the slot stays FILLING.
        """
        problem = self._finish(snapshot, deadline) or self._compare(snapshot, updates)
        if problem is not None:
            self.cancel()
            return problem
        digests = b""
        root = NO_DIGEST
        if self._digests:
            if self._stable:
                table = np.frombuffer(snapshot.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
                found = np.frombuffer(self._engine.digests_of(), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
                table[self._stable_chunks] = found
            digests = bytes(snapshot.digests)
            root = root_digest(digests, snapshot.header.image_length)
        header = snapshot.header.with_state(SlotState.SEALED, root_digest=root)
        self._slots[snapshot.slot].file.write_header(header)
        return Sealed(digests)

    def _finish(self, snapshot: Snapshot, deadline: float) -> Torn | None:
        began = time.monotonic_ns()
        try:
            device = self._device if self._on_device else None
            if device is not None:
                device.rest()
            if self._stable:
                total = self._table.total
                snapshot.left = total - self._engine.progress()
                if not self._engine.flush(deadline):
                    detail = f"{self._engine.progress()} of {total} bytes were copied after {deadline * 1e3:.3g} ms"
                    return Torn("late", "", detail)
            if device is not None:
                snapshot.left += device.copied()[2]
                if not device.flush(deadline):
                    return Torn("late", "", f"the device had not copied everything after {deadline * 1e3:.3g} ms")
            return None
        finally:
            if snapshot.left:
                snapshot.waited = time.monotonic_ns() - began

    def gates(self) -> tuple[CopyEngine | None, DeviceCopier | None]:
        """What carries the snapshot in progress in windows: the engine for what lies in memory, the device's copier."""
        return self._engine if self._stable else None, self._device if self._on_device and self._gated else None

    def copied(self) -> Copied:
        """How the bytes of the newest snapshot came into the slot, so far."""
        found = Copied(self._table.total, *self._engine.copied(), self._engine.spans()) if self._stable else Copied()
        if not self._on_device or self._device is None:
            return found
        inside, outside, at_fence = self._device.copied()
        return Copied(
            found.total + sum(self.layout.by_index[i].nbytes for i in self._on_device),
            found.in_windows + inside,
            found.outside + outside,
            found.at_fence + at_fence,
            found.spans,
        )

    def _compare(self, snapshot: Snapshot, updates: int | None) -> Torn | None:
        if "updates" in self._witnesses and updates is not None and updates != snapshot.updates:
            detail = f"{updates} updates at the fence, {snapshot.updates} at the boundary"
            return Torn("updates", "", detail)
        if "identity" in self._witnesses and (torn := self._compare_identities(snapshot)) is not None:
            return torn
        if "canary" in self._witnesses:
            if self._stable:
                after = self._engine.canary(self._table)
                if after != snapshot.canary:
                    index = first_difference(snapshot.canary, after, self._table.count)
                    return Torn("canary", self._stable_name(index), "a sampled element changed")
            if self._on_device and self._device is not None and (name := self._device.check()) is not None:
                return Torn("canary", name, "a sampled element changed on the device")
        return self._compare_all(snapshot) if snapshot.audited is not None and self._stable else None

    def _compare_all(self, snapshot: Snapshot) -> Torn | None:
        """The audit. What was written after the copy differs from the slot; what was written before it is in both, and
        differs from what the boundary saw."""
        place = self._slots[snapshot.slot]
        found = self._engine.compare(self._table, place.address)
        if found is not None:
            return Torn("audit", self._stable_name(found[0]), f"byte {found[1]} is not what was copied")
        places = self.layout.by_index
        for index, before in enumerate(snapshot.audited or ()):
            where = places[self._stable[index]]
            if _digest_at(place.address + where.offset, where.nbytes) != before:
                return Torn("audit", self._stable_name(index), "what was copied is not what the boundary saw")
        return None

    def _compare_identities(self, snapshot: Snapshot) -> Torn | None:
        if snapshot.recheck is not None:
            found = snapshot.recheck()
            now = found if isinstance(found, list) else list(found)
        else:
            now = [
                before if (witness := snapshot.sources[i].witness) is None else witness()
                for i, before in zip(self._all_stable, snapshot.identities, strict=True)
            ]
        if now == snapshot.identities:
            return None
        if len(now) != len(snapshot.identities):
            return Torn("identity", "", f"{len(now)} stable tensors, {len(snapshot.identities)} at the boundary")
        index = next(i for i, pair in enumerate(zip(now, snapshot.identities, strict=True)) if pair[0] != pair[1])
        name = self.entries[self._all_stable[index]].name
        return Torn("identity", name, f"storage and version {now[index]}, {snapshot.identities[index]} at the boundary")

    def _stable_name(self, index: int) -> str:
        return self.entries[self._stable[index]].name

    def cancel(self) -> None:
        """Give the copy up; no source and no slot is touched after this returned."""
        self._engine.cancel()
        if self._device is not None:
            self._device.cancel()

    def close(self) -> None:
        """Cancel and unmap the slots."""
        self.cancel()
        self.unmap()

    def unmap(self) -> None:
        """Unmap the slots and close their files. The engine must not be copying."""
        if self._device is not None:
            self._device.slots([])
        self._slots.clear()
        for file in self._files.values():
            file.close()


def _digest_at(address: int, nbytes: int) -> bytes:
    return digest(memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B"))
