"""The training state as a session wants it: sources of bytes, made once and refreshed at each boundary.

Stable tensors (parameters, optimizer state) are read by pointer until the fence; volatile ones (buffers, and what has
to be brought into a row first) are copied at the boundary. At each boundary the walk is only checked, in tight loops
over bound methods: a tree that changed is walked again, and what is the same in it keeps its entry and its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from baft_client.source import Source
from baft_torch._models import ModelTree, Named
from baft_torch._optimizers import OptimizerTree
from baft_torch._small import to_tree
from baft_torch._tensors import Extent, Shard, freeze_storage, is_dtensor, plain, reduced, shard_of
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import UsageError

__all__ = ["LARGE_BUFFER", "Item", "TrainingState"]

LARGE_BUFFER = 16 << 20
"""Bytes of a buffer above which the time that its copy holds the training thread is worth a word."""

_UNCHANGING = torch.empty(0)


@dataclass(eq=False)
class Item:
    """One saved tensor: where it lives now and how it is declared."""

    source: Source
    live: torch.Tensor
    """What the framework holds: a Parameter, a state tensor, a buffer, a DTensor."""
    local: torch.Tensor
    """The strided tensor whose pointer and version are read: `live` itself, or a DTensor's local tensor."""
    extent: Extent
    staging: torch.Tensor | None = None

    @property
    def entry(self) -> TensorEntry:
        """As declared."""
        return self.source.entry


class TrainingState:
    """All tensors and small values of the attached models and optimizers."""

    def __init__(self, models: ModelTree, optimizers: Sequence[Any], stable: Sequence[str] = ()) -> None:
        """`stable`: patterns of buffer names (fnmatch) that are constant between updates. Raises UsageError for a
        pattern that names no buffer, UnsupportedTensor for what cannot be saved."""
        self.models = models
        self._patterns = tuple(stable)
        self._known: dict[str, Item] = {}
        self._names: dict[int, str] = {}
        self._learn_names()
        self.optimizers = [OptimizerTree(i, optimizer, self._name_of) for i, optimizer in enumerate(optimizers)]
        self.items: list[Item] = []
        self._aliases: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rebuild()
        buffers = [buffer.name for buffer in models.buffers()]
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in buffers):
                raise UsageError(
                    f"stable={pattern!r} matches no buffer.",
                    hint=f"The buffers are: {', '.join(buffers[:20]) or 'none'}. Parameters are stable anyway.",
                )

    # ------------------------------------------------------------ names

    def _learn_names(self) -> None:
        self._names = {}
        for named in self.models.parameters():
            self._names.setdefault(id(named.tensor), named.name)

    def _name_of(self, param: torch.Tensor, group: int, place: int) -> str:
        name = self._names.get(id(param))
        # A parameter of no attached module: named by its place in the optimizer.
        return f"group{group}.{place}" if name is None else name.removeprefix("model.")

    # ------------------------------------------------------------ the walk

    def rebuild(self) -> None:
        """Walk models and optimizers, and place every tensor."""
        self._items_by_place: dict[tuple[Any, ...], Item] = {}
        self._aliases = []
        known, self._known = self._known, {}
        stable: list[Item] = []
        volatile: list[Item] = []

        def add(item: Item | None) -> None:
            if item is not None:
                (stable if item.entry.kind == "stable" else volatile).append(item)

        parameters = self.models.parameters()
        by_id = {id(named.tensor): named for named in reversed(parameters)}
        for named in parameters:
            add(self._place(known, named.name, named.tensor, _shard(named), "stable"))
        for tree in self.optimizers:
            for name, param in tree.params:
                if id(param) not in by_id:
                    add(self._place(known, f"{tree.prefix}{name}", param, None, "stable"))
            for each in tree.tensors:
                owner = by_id.get(id(each.param))
                add(self._place(known, each.name, each.tensor, _state_shard(each.tensor, each.param, owner), "stable"))
        for named in self.models.buffers():
            kind = "stable" if any(fnmatchcase(named.name, p) for p in self._patterns) else "volatile"
            add(self._place(known, named.name, named.tensor, _shard(named), kind))
        self.items = stable + volatile
        self._index(len(stable))

    def _place(
        self, known: dict[str, Item], name: str, live: torch.Tensor, shard: Shard | None, kind: str
    ) -> Item | None:
        """The item of a tensor; None if its bytes are another item's (a tied tensor, recorded as an alias)."""
        view = plain(live, name)
        local = live._local_tensor if is_dtensor(live) else live
        extent = Extent.of(view, name)
        if extent.staged:
            kind = "volatile"
        if extent.nbytes:
            place = (view.data_ptr(), extent)
            twin = self._items_by_place.get(place)
            if twin is not None:
                if name not in (twin.entry.name, *twin.entry.aliases):
                    twin.source.entry = replace(twin.entry, aliases=(*twin.entry.aliases, name))
                    twin.source.entry = self._same_entry(known, twin.source.entry)
                self._aliases.append((local, twin.local))
                return None
        entry = TensorEntry(
            name=name,
            dtype=extent.dtype,
            shape=extent.shape,
            nbytes=extent.nbytes,
            kind="stable" if kind == "stable" else "volatile",
            global_shape=shard.global_shape if shard else None,
            ranges=shard.ranges if shard else None,
            strides=extent.strides,
        )
        source = Source(self._same_entry(known, entry), 0, None, view.element_size())
        staging = None
        if extent.staged:
            staging = torch.empty(extent.shape, dtype=view.dtype, device=view.device)
        item = Item(source, live, local, extent, staging)
        self._locate(item)
        if extent.nbytes:
            self._items_by_place[place] = item
        self._known[name] = item
        return item

    @staticmethod
    def _same_entry(known: dict[str, Item], entry: TensorEntry) -> TensorEntry:
        """The entry object of the last walk if it says the same: a session knows an unchanged tree by these objects."""
        old = known.get(entry.name)
        return old.entry if old is not None and old.entry == entry else entry

    @staticmethod
    def _locate(item: Item) -> None:
        holder = item.local if item.staging is None else item.staging
        source = item.source
        source.device = holder.device.type != "cpu"
        source.address = holder.data_ptr() if item.extent.nbytes and not source.device else 0
        source.keep = holder.untyped_storage()
        if item.entry.kind == "stable":
            freeze_storage(holder)

    def _index(self, stable: int) -> None:
        """Bind what is read at every boundary: pointers, sizes and shapes of all, versions of the stable ones."""
        locals_ = [item.local for item in self.items]
        self._sources = [item.source for item in self.items]
        self._stable_count = stable
        self._stable_locals = locals_[:stable]
        self._pointer_of = [t.data_ptr for t in locals_]
        # An inference tensor has no version counter, and cannot be written outside of inference mode.
        self._versioned = [_UNCHANGING if t.is_inference() else t for t in self._stable_locals]
        self._numel_of = [t.numel for t in self._stable_locals]
        self._stride_of = [t.stride for t in locals_]
        self._pointers = [read() for read in self._pointer_of]
        self._strides = [read() for read in self._stride_of]
        self._shapes = [t.shape for t in locals_]
        self._locals = locals_
        self._dtensors = [(item.live, item.local) for item in self.items if is_dtensor(item.live)]
        self._by_source = {id(item.source): item for item in self.items}
        self._staged = [item for item in self.items if item.staging is not None]
        self._alias_pointers = [(a.data_ptr, b.data_ptr) for a, b in self._aliases]
        self._buffers = list(self.models.buffers())
        places = {id(item): i for i, item in enumerate(self.items)}
        self._places = {item.entry.name: places[id(item)] for item in self.items}

    # ------------------------------------------------------------ at every boundary

    def refresh(self) -> list[Source]:
        """Sources as they are now, stable ones first; list and sources are reused at the next boundary. Volatile and
        staged contents are only good until training goes on. Raises UnsupportedTensor for a new tensor of that kind."""
        self._follow()
        pointers = [read() for read in self._pointer_of]
        if pointers != self._pointers:
            for item, new, old in zip(self.items, pointers, self._pointers, strict=True):
                if new != old:
                    self._locate(item)
            self._pointers = pointers
        for source, identity in zip(self._sources, self.identities(pointers), strict=False):
            source.identity = identity
        for item in self._staged:
            assert item.staging is not None
            item.staging.copy_(reduced(plain(item.live, item.entry.name), item.entry.name))
        return self._sources

    def identities(self, pointers: Iterable[int] | None = None) -> Iterator[tuple[int, ...]]:
        """Witness (b) of every stable tensor, in order: pointer, elements, version counter."""
        if pointers is None:
            pointers = [read() for read in self._pointer_of[: self._stable_count]]
        numels = [read() for read in self._numel_of]
        versions = [t._version for t in self._versioned]
        return zip(pointers, numels, versions, strict=False)

    def _follow(self) -> None:
        """Walk again what has changed since the last boundary."""
        moved = self.models.changed()
        if moved:
            self.models.walk()
            self._learn_names()
        changed = [tree for tree in self.optimizers if moved or tree.changed()]
        for tree in changed:
            tree.walk()
        if moved or changed or not self._same_tensors():
            self.rebuild()

    def _same_tensors(self) -> bool:
        """Whether every tensor is still the same object of the same shape, and tied ones are still tied. A buffer that
        was replaced by one of its kind counts as the same, and is followed here."""
        return (
            self._follow_buffers()
            and all(live._local_tensor is local for live, local in self._dtensors)
            and all(a() == b() for a, b in self._alias_pointers)
            and [t.shape for t in self._locals] == self._shapes
            and [read() for read in self._stride_of] == self._strides
        )

    def _follow_buffers(self) -> bool:
        """Take the place of buffers that forward has replaced; False where the tree has to be walked again."""
        buffers = list(self.models.buffers())
        if len(buffers) != len(self._buffers):
            return False
        for i, (old, new) in enumerate(zip(self._buffers, buffers, strict=True)):
            if old.tensor is new.tensor:
                continue
            place = self._places.get(new.name, -1)
            if old.name != new.name or place < self._stable_count or type(new.tensor) is not torch.Tensor:
                return False
            item = self.items[place]
            if item.entry.aliases or item.staging is not None or not _alike(item.local, new.tensor):
                return False
            item.live = item.local = self._locals[place] = new.tensor
            self._pointer_of[place], self._stride_of[place] = new.tensor.data_ptr, new.tensor.stride
            self._pointers[place] = -1  # located anew
            self._buffers[i] = new
        return True

    # ------------------------------------------------------------ small state, and what a user is told

    def small(self) -> dict[str, Any]:
        """Options of the optimizers, their scalars, and extra states of modules, as plain data."""
        found: dict[str, Any] = {"optimizers": [tree.small() for tree in self.optimizers]}
        extra = self.models.extra_states()
        if extra:
            found["modules"] = to_tree(extra, "model")
        return found

    def large_buffers(self) -> list[tuple[str, int]]:
        """Name and bytes of volatile tensors above LARGE_BUFFER: each boundary waits for their copy."""
        return [
            (item.entry.name, item.entry.nbytes)
            for item in self.items
            if item.entry.kind == "volatile" and item.entry.nbytes > LARGE_BUFFER
        ]

    def device_tensor(self, source: Source) -> torch.Tensor:
        """The tensor on a device that a source stands for."""
        item = self._by_source[id(source)]
        return item.local if item.staging is None else item.staging

    @property
    def on_device(self) -> bool:
        """Some tensor does not lie in the memory of the host."""
        return any(item.source.device for item in self.items)

    def by_name(self) -> dict[str, Item]:
        """Every item by its name and its aliases."""
        return {name: item for item in self.items for name in (item.entry.name, *item.entry.aliases)}


def _shard(named: Named) -> Shard | None:
    if is_dtensor(named.tensor):
        return shard_of(named.tensor) if named.ranged else None
    return _whole(named.tensor) if named.replicated else None


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors are declared in the same way."""
    return (
        type(a) is torch.Tensor
        and (a.dtype, a.shape, a.stride(), a.device, a.layout) == (b.dtype, b.shape, b.stride(), b.device, b.layout)
        and not (b.is_conj() or b.is_neg())
    )


def _state_shard(tensor: torch.Tensor, param: torch.Tensor, owner: Named | None) -> Shard | None:
    """Optimizer state is replicated where its parameter is."""
    if owner is None:
        return None
    if is_dtensor(tensor):
        return shard_of(tensor) if owner.ranged else None
    return _whole(tensor) if owner.replicated and not is_dtensor(param) else None


def _whole(tensor: torch.Tensor) -> Shard:
    shape = tuple(tensor.shape)
    return Shard(shape, tuple((0, size) for size in shape))
