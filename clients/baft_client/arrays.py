"""Checkpoints of plain numpy arrays.

with baft_client.attach_arrays("demo", {"w": w, "m": m}, extra=lambda: {"seed": seed}) as ckpt:
    for step in range(ckpt.resume(), 1000):
        gradient = ...
        with ckpt.update():         # the arrays change in here and nowhere else
            m *= 0.9
            m += gradient
            w -= 0.01 * m
        ckpt.step()

Where the loop waits (for another rank, for data) it may say so; snapshots are then copied in these waits:

        with ckpt.window():
            neighbour.recv_into(buffer)

With `parts` a rank says which part of a whole each array is. A later start may then have other ranks, or cut the
wholes otherwise: `ckpt.resume(reshard=True)` reads what each array needs out of what all ranks saved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any, cast

import numpy.typing as npt

from baft_client.restore import RestoredImage
from baft_client.saved import SavedShards, split_small
from baft_client.session import Session
from baft_client.source import Counters, Outcome, Source
from baft_client.whole import WholeImage
from baft_client.windows import Windows
from baftd.checkpoint.ranges import said
from baftd.checkpoint.reshard import Wanted, plan_reads
from baftd.checkpoint.shard import TensorEntry, check_entries
from baftd.errors import FormatError, LayoutError, ModelMismatch, UnsupportedTensor, UsageError
from baftd.pipeline.events import EventKind
from baftd.settings import Settings
from baftd.telemetry import get_logger
from baftd.wire.messages import Saved

__all__ = ["ArrayCheckpointer", "Part", "attach_arrays"]

_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "complex128": "C128",
}  # fmt: skip

_UNSAID = (
    "Arrays that are parts of one whole, or equal on some ranks, must have been said to be so when they were saved: "
    "attach_arrays(parts=...); to say it now, go on with the ranks that saved for a step with it."
)

Extra = Mapping[str, object] | Callable[[], Mapping[str, object]] | None


@dataclass(frozen=True)
class Part:
    """Which part of a whole an array of this rank is. Ranks with equal ranges hold the same elements (replicas)."""

    shape: tuple[int, ...]
    """Of the whole."""
    ranges: tuple[tuple[int, int], ...]
    """One (start, stop) a dimension; or a single one over the flattened whole, for an array of one dimension."""
    name: str = ""
    """Of the whole, where it is not the array's: several arrays may be parts of one."""


def attach_arrays(
    job: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    *,
    parts: Mapping[str, Part] | None = None,
    extra: Extra = None,
    load_extra: Callable[[dict[str, Any]], None] | None = None,
    volatile: tuple[str, ...] = (),
    rank: int | None = None,
    world: int | None = None,
    settings: Settings | None = None,
    strict: bool | None = None,
    audit: int | None = None,
    **session: Any,
) -> ArrayCheckpointer:
    """A checkpointer for arrays that are changed in place.

    Args:
        job: name of the training run.
        arrays: C-contiguous, writable; the same objects throughout. They are restored in place.
        parts: which part of a whole an array is, for those that are one. Any other belongs to its rank alone.
        extra: small state beside them (seeds, counters), or what makes it; saved at each step.
        load_extra: called by `resume()` with what was saved; without it read `extra_restored`.
        volatile: names of arrays that also change between updates; copied at once in `step()`.
        rank: overrides the launcher's variables, together with `world`.
        world: number of ranks.
        settings: None: read as the command line reads them.
        strict: raise what is otherwise a skipped snapshot; None: as in the settings.
        audit: compare every byte of every N-th snapshot; None: as in the settings.
        session: further arguments of `Session.attach`.

    Raises:
        UnsupportedTensor: an array is not contiguous, not writable or not numeric; it is named.
        UsageError: `parts` or `volatile` name what is no array, or an array is not of the shape of its part.
        RankError, JobNameError, SettingsError: as `Session.attach`.
    """
    parts = parts or {}
    for what, named in (("volatile", volatile), ("parts", parts)):
        if unknown := set(named) - set(arrays):
            raise UsageError(f"{what} names {sorted(unknown)}, which are not among the arrays.")
    sources = [_source(name, array, name in volatile, parts.get(name)) for name, array in arrays.items()]
    stored = dict(zip(arrays, check_entries([source.entry for source in sources]), strict=True))
    attached = Session.attach(
        job, rank=rank, world=world, settings=settings, strict=strict, audit=audit, framework="numpy", **session
    )
    return ArrayCheckpointer(attached, arrays, stored, sources, extra, load_extra)


def _source(name: str, array: npt.NDArray[Any], volatile: bool, part: Part | None) -> Source:
    tag = _DTYPES.get(array.dtype.name)
    if tag is None or not array.dtype.isnative:
        raise UnsupportedTensor(f"array {name!r} has dtype {array.dtype}: not a native number.")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise UnsupportedTensor(
            f"array {name!r} is not {'writable' if array.flags.c_contiguous else 'C-contiguous'}.",
            hint="It is restored in place; pass the array that owns the data, or a contiguous copy.",
        )
    entry = TensorEntry(
        name=(part.name if part else "") or name,
        dtype=tag,
        shape=tuple(array.shape),
        nbytes=array.nbytes,
        kind="volatile" if volatile else "stable",
        global_shape=tuple(part.shape) if part else None,
        ranges=tuple((start, stop) for start, stop in part.ranges) if part else None,
    )
    return Source(
        entry=entry,
        address=int(array.ctypes.data),
        keep=array,
        itemsize=array.itemsize,
    )


def _pointer(array: npt.NDArray[Any]) -> ctypes.c_size_t:
    """The field of an array that says where its data lies: `resize(refcheck=False)` and assigning `data` move it.

    It is the first behind the object header (numpy's ABI); read there it takes 0.1 us, through `array.ctypes.data`
    2 us, which for 300 arrays at boundary and fence is most of a millisecond.
    """
    cell = ctypes.c_size_t.from_address(id(array) + object.__basicsize__)
    if cell.value != array.ctypes.data:
        raise UnsupportedTensor("this numpy keeps an array's pointer elsewhere than where its ABI says.")
    return cell


class ArrayCheckpointer:
    """Checkpoints a set of arrays. As a context it finishes, or keeps the slots where it is left by an exception."""

    def __init__(
        self,
        session: Session,
        arrays: Mapping[str, npt.NDArray[Any]],
        stored: Mapping[str, str],
        sources: list[Source],
        extra: Extra,
        load_extra: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        """Use `attach_arrays`."""
        self.session = session
        self.extra_restored: dict[str, Any] = {}
        """The small state of the step that `resume` restored."""
        self.not_carried: tuple[str, ...] = ()
        """Items of the small state that differed among the ranks that saved, and so belong to none of this start's."""
        self._log = get_logger("client").bind(job=session.job, rank=session.rank)
        # Stable ones first: their identities are those that the fence reads again.
        by_name = sorted(zip(arrays.items(), sources, strict=True), key=lambda one: one[1].entry.kind)
        sources = [source for _, source in by_name]
        self._in_order = [array for (_, array), _ in by_name]
        self._pointers = [_pointer(array) for array in self._in_order]
        self._by_stored_name = {stored[name]: source for (name, _), source in by_name}
        self._stable = sum(source.entry.kind == "stable" for source in sources)
        self._where: list[int] = []
        self._sizes: list[int] = []
        self._identities: list[tuple[int, ...]] = []
        self._sources = sources
        self._extra = extra
        self._load_extra = load_extra
        self._step = 0
        self._updates = 0
        self._changed = True  # since the last boundary

    @property
    def counters(self) -> Counters:
        """What the session has done so far."""
        return self.session.counters

    @property
    def windows(self) -> Windows:
        """For a loop that wants more of windows than `window`: several sources, kinds of waits, other threads."""
        return self.session.windows

    def window(self, kind: EventKind = EventKind.WAIT_RECV) -> AbstractContextManager[None]:
        """The loop waits within, so the snapshot in progress may be copied.

        From the boundary after the first one on, snapshots are copied in these windows and no longer all the time:
        open them at every step. What does not fit is copied as the daemon plans it (`baftd status`). `kind` is for its
        reports.
        """
        self.session.windows.register("loop")
        return self.session.windows.waiting(kind)

    def resume(
        self, *, fresh: bool = False, takeover: bool = False, reshard: bool = False, timeout: float | None = None
    ) -> int:
        """Load the newest step that all ranks can restore; return the step to go on with.

        Args:
            fresh: begin at step 0 whatever is known.
            takeover: do not wait for a predecessor that still runs.
            reshard: the number of ranks, or the parts that they hold, may be others than those that saved. Where this
                rank's are the same, nothing differs from an ordinary start.
            timeout: seconds to wait for a daemon.

        Raises:
            ModelMismatch: the saved arrays are others; all differences are named.
            LayoutError: with `reshard`: what this rank holds was not saved, or not so; all of it is named.
            BaftError: as `Session.resume`.
        """
        resumed = self.session.resume(fresh=fresh, takeover=takeover, reshard=reshard, timeout=timeout)
        try:
            shards = resumed.shards
            if resumed.image is not None:
                self._load(resumed.image)
            elif shards is not None and shards.world == self.session.world and self._is_mine(shards):
                self._load(shards.image(self.session.rank))
            elif shards is not None:
                self._load_parts(shards)
            if (resumed.image or shards) is not None and self._load_extra is not None:
                self._load_extra(self.extra_restored)
        except BaseException as error:
            self.session.restored(ok=False, reason=f"{type(error).__name__}: {error}")
            raise
        self.session.restored()
        self._step, self._updates = resumed.step, resumed.updates
        return resumed.step

    def _load(self, image: RestoredImage | WholeImage) -> None:
        """What this very rank saved."""
        entries = {name: source.entry for name, source in self._by_stored_name.items()}
        _compare(entries, image.entries, image.step)
        for name, source in self._by_stored_name.items():
            image.copy_into(name, source.address, source.entry.nbytes)
        image.verify_rest()
        self.extra_restored = dict(cast(dict[str, Any], image.small))

    def _is_mine(self, shards: SavedShards) -> bool:
        """Whether this rank's arrays are those that the same rank saved."""
        saved = shards.image(self.session.rank).entries
        return {name: source.entry for name, source in self._by_stored_name.items()} == saved

    def _load_parts(self, shards: SavedShards) -> None:
        """Cut from what all ranks saved."""
        wanted: list[Wanted] = []
        targets: list[npt.NDArray[Any]] = []
        for source, array in zip(self._sources, self._in_order, strict=True):
            entry, done = source.entry, 0
            whole = array.shape if entry.global_shape is None else entry.global_shape
            for one in Wanted.of(entry.name, entry.dtype, whole, entry.ranges, array.itemsize):
                # The boxes of one array follow each other in it: several there are only of a flattened range.
                shape = tuple(stop - start for start, stop in one.box)
                targets.append(array.reshape(-1)[done : done + prod(shape)].reshape(shape))
                wanted.append(one)
                done += prod(shape)
        try:
            fills = plan_reads(shards.saved(), wanted, rank=self.session.rank)
        except LayoutError as error:
            error.hint = error.hint or _UNSAID
            raise
        smalls: dict[int, dict[str, object]] = {}
        for rank in range(shards.world):
            smalls[rank] = shards.small(rank)
            if not isinstance(smalls[rank], dict):
                raise FormatError(f"the small state of rank {rank} is a {type(smalls[rank]).__name__}, not a dict.")
        for fill, target in zip(fills, targets, strict=True):
            shards.read_array(fill, target)
        self.extra_restored, self.not_carried = split_small(smalls)
        if self.not_carried:
            note = "each rank that saved had its own, and none of these belongs to a rank of this start"
            self._log.warning("not_carried", items=", ".join(self.not_carried), note=note)

    @contextmanager
    def update(self) -> Iterator[None]:
        """The arrays change within. What is left of the copy of the last step is finished first."""
        self.session.fence(self._updates)
        self._changed = True
        yield
        self._updates += 1

    def fence(self) -> Outcome:
        """For loops that cannot use `update`: call it before the arrays change."""
        outcome = self.session.fence(self._updates)
        self._changed = True
        self._updates += 1
        return outcome

    def step(self) -> Outcome:
        """A step is complete: its snapshot begins."""
        self._step += 1
        return self._boundary(force=False)

    def _boundary(self, *, force: bool) -> Outcome:
        if self._look():
            for source, identity in zip(self._sources, self._identities, strict=True):
                source.identity, source.address = identity, identity[0]
        outcome = self.session.boundary(
            self._step, self._updates, self._sources, self._small(), recheck=self._recheck, force=force
        )
        self._changed = False
        return outcome

    def _look(self) -> bool:
        """Read address and bytes of every array again (numpy counts no versions); True where one of them changed."""
        where, sizes = [cell.value for cell in self._pointers], [array.nbytes for array in self._in_order]
        if where == self._where and sizes == self._sizes:
            return False
        self._where, self._sizes = where, sizes
        self._identities = list(zip(where, sizes, strict=True))
        return True

    def _recheck(self) -> list[tuple[int, ...]]:
        self._look()
        return self._identities[: self._stable]

    def _small(self) -> object:
        extra = self._extra
        return dict(extra() if callable(extra) else extra or {})

    def save(self, *, timeout: float | None = None) -> Saved:
        """Make the present step durable now (all ranks at the same step). Errors as `Session.save`."""
        self._take_last(timeout)
        return self.session.save(timeout=timeout)

    def finish(self, timeout: float | None = None) -> Saved | None:
        """Training is complete: the last step is made durable, where there is a durable tier, and the slots go."""
        self._take_last(timeout)
        return self.session.finish(timeout)

    def _take_last(self, timeout: float | None) -> None:
        """Take now what the cadence left out or what found no slot or daemon: all ranks come here at the same step."""
        if self._step and not self._changed and not self.session.taken(self._step):
            self.session.reach(timeout)
            self._boundary(force=True)

    def close(self) -> None:
        """End without finishing; the slots stay."""
        self.session.close()

    def __enter__(self) -> ArrayCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.session.leave(f"{kind.__name__}: {value}"[:1000])


def _compare(mine: Mapping[str, TensorEntry], saved: Mapping[str, TensorEntry], step: int) -> None:
    """Raise ModelMismatch naming every array that is missing, extra, reshaped, of another type or another part."""
    problems = [f"{name}: not in the checkpoint" for name in mine if name not in saved]
    problems += [f"{name}: only in the checkpoint" for name in saved if name not in mine]
    for name in (name for name in mine if name in saved):
        here, there = mine[name], saved[name]
        if there.shape != here.shape:
            problems.append(f"{name}: shape {here.shape} here, {there.shape} in the checkpoint")
        elif _part(here) != _part(there):
            problems.append(f"{name}: {_part(here)} here, {_part(there)} in the checkpoint")
        if there.dtype != here.dtype:
            problems.append(f"{name}: {here.dtype} here, {there.dtype} in the checkpoint")
    if problems:
        hint = "Start with the arrays that were saved, or begin anew with resume(fresh=True)."
        if any(entry.ranges is not None for entry in (*mine.values(), *saved.values())):
            hint += " resume(reshard=True) cuts them anew where only the parts of the ranks are others."
        raise ModelMismatch(f"step {step} holds other arrays than these: {'; '.join(problems)}.", hint=hint)


def _part(entry: TensorEntry) -> str:
    """Which part of a whole an entry is, in words."""
    if entry.ranges is None or entry.global_shape is None:
        return "the rank's own"
    return f"part {said(entry.ranges)} of {entry.global_shape}"
