"""The training state as a session wants it: sources of bytes, made once and refreshed at each boundary.

Stable tensors (parameters, optimizer state) are read by pointer until the fence; volatile ones (buffers, and what has
to be brought into a row first) are copied at the boundary. At each boundary the walk is only checked, in tight loops
over bound methods: a tree that changed is walked again, and what is the same in it keeps its entry and its source.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from baft_client.source import Source
from baft_torch._layout import Held, base_name
from baft_torch._models import ModelTree
from baft_torch._optimizers import OptimizerTree
from baft_torch._rows import Item, rows_of
from baft_torch._small import to_tree
from baft_torch._tensors import freeze_storage, is_dtensor, plain, reduced
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import UsageError

__all__ = ["LARGE_BUFFER", "Item", "TrainingState"]

LARGE_BUFFER = 16 << 20
"""Bytes of a buffer above which the time that its copy holds the training thread is worth a word."""

_UNCHANGING = torch.empty(0)


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
        models.layout.check_used([item.entry.name for item in self.items])
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
        self._held: dict[int, Held] = {}
        known, self._known = self._known, {}
        stable: list[Item] = []
        volatile: list[Item] = []

        def add(items: Iterable[Item]) -> None:
            for item in items:
                (stable if item.entry.kind == "stable" else volatile).append(item)

        layout = self.models.layout
        for named in self.models.parameters():
            held = layout.held(named.name, named.tensor, named.origin)
            self._held.setdefault(id(named.tensor), held)
            add(self._place(known, named.name, named.tensor, held, "stable"))
        for tree in self.optimizers:
            for name, param in tree.params:
                if id(param) not in self._held:
                    held = layout.held_of_stray(f"{tree.prefix}{name}", param)
                    self._held[id(param)] = held
                    add(self._place(known, f"{tree.prefix}{name}", param, held, "stable"))
            for each in tree.tensors:
                held = layout.held_of_state(each.name, each.tensor, self._held[id(each.param)], each.param.shape)
                add(self._place(known, each.name, each.tensor, held, "stable"))
        for named in self.models.buffers():
            kind = "stable" if any(fnmatchcase(named.name, p) for p in self._patterns) else "volatile"
            held = layout.held(named.name, named.tensor, named.origin)
            add(self._place(known, named.name, named.tensor, held, kind))
        self.items = stable + volatile
        self._index(len(stable))

    def _place(self, known: dict[str, Item], name: str, live: torch.Tensor, held: Held, kind: str) -> Sequence[Item]:
        """The items of a tensor; none if its bytes are another item's (a tied tensor, recorded as an alias)."""
        base = base_name(name, self.models.prefixed)
        items = rows_of(name, base, live, held, kind)
        head = items[0]
        if head.extent.nbytes and len(items) == 1:
            place = (head.local.data_ptr(), head.extent)
            twin = self._items_by_place.get(place)
            if twin is not None:
                if name not in (twin.entry.name, *twin.entry.aliases):
                    twin.source.entry = replace(twin.entry, aliases=(*twin.entry.aliases, name))
                    twin.source.entry = self._same_entry(known, twin)
                self._aliases.append((head.local, twin.local))
                return ()
            self._items_by_place[place] = head
        for item in items:
            self._known[item.stored_name] = item
            item.source.entry = self._same_entry(known, item)
            self._locate(item)
        return items

    @staticmethod
    def _same_entry(known: dict[str, Item], item: Item) -> TensorEntry:
        """The entry object of the last walk if it says the same: a session knows an unchanged tree by these objects."""
        old = known.get(item.stored_name)
        return old.entry if old is not None and old.entry == item.entry else item.entry

    @staticmethod
    def _locate(item: Item) -> None:
        source = item.source
        source.device = item.holder.device.type != "cpu"
        source.address = item.address() if item.entry.nbytes and not source.device else 0
        source.keep = item.holder.untyped_storage()
        if item.entry.kind == "stable":
            freeze_storage(item.holder)

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
        self._staged = [item for item in self.items if item.staging is not None and item is item.rows[0]]
        self._alias_pointers = [(a.data_ptr, b.data_ptr) for a, b in self._aliases]
        self._buffers = list(self.models.buffers())
        places = {id(item): i for i, item in enumerate(self.items)}
        self._places = {item.entry.name: places[id(item)] for item in self.items}
        self._facts = self._what_is_known()

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
        found.update(self._facts)
        return found

    def _what_is_known(self) -> dict[str, Any]:
        """What a start from another layout has to know of these tensors, beside their entries."""
        facts: dict[str, Any] = {}
        if self.models.prefixed:
            facts["stages"] = list(self.models.prefixed)
        if self.data_parallel is not None:
            facts["data_parallel"] = self.data_parallel
        if self.models.broadcast_buffers:
            facts["broadcast_buffers"] = list(self.models.broadcast_buffers)
        bound = {item.entry.name: item.held.bound for item in self.items if item.held.bound}
        if bound:
            facts["not_transferable"] = bound
        parts = {item.entry.name: item.held.told for item in self.items if item.held.bound and not item.held.problem}
        if parts:
            facts["parts"] = json.dumps(parts)  # one text: it is encoded at every boundary
        return facts

    def remarks(self) -> list[tuple[str, str, int]]:
        """Why tensors that look like parts of wholes are declared as this rank's own: name of the first, the reason
        as the end of a sentence, and how many there are of it."""
        found: dict[str, list[str]] = {}
        for item in self.items:
            if item.held.remark and item is item.rows[0]:
                found.setdefault(item.held.remark, []).append(item.entry.name)
        return [(names[0], remark, len(names)) for remark, names in found.items()]

    # ------------------------------------------------------------ the job's layout, for a start from another one

    @property
    def stages(self) -> tuple[int, ...]:
        """Pipeline stages of this rank that stand in its names as "stage<k>."."""
        return self.models.prefixed

    @property
    def stage_count(self) -> int:
        """Stages of the pipeline; 0: there is none, or it does not say."""
        return self.models.pipeline.count

    @property
    def data_parallel(self) -> int | None:
        """Replicas of the job that see different data; None where nobody says."""
        return self.models.data_parallel

    def held_of(self, param: torch.Tensor) -> Held:
        """What this rank holds of a parameter of an attached model or optimizer."""
        return self._held[id(param)]

    def held_of_state(self, param: torch.Tensor, shape: Sequence[int]) -> Held:
        """What this rank would hold of a tensor of `param`'s optimizer state. `shape`: of the whole, as saved."""
        held = self.held_of(param)
        return held if len(shape) and tuple(shape) == held.shape else self.models.layout.derived(shape, held)

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
        return item.holder if item.part is None else item.holder[item.part.where]

    @property
    def on_device(self) -> bool:
        """Some tensor does not lie in the memory of the host."""
        return any(item.source.device for item in self.items)

    def by_name(self) -> dict[str, Item]:
        """Every live tensor by its name and its aliases: the first of its items, which knows the others (`rows`)."""
        heads = [item for item in self.items if item is item.rows[0]]
        return {name: item for item in heads for name in (item.entry.name, *item.entry.aliases)}


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors are declared in the same way."""
    return (
        type(a) is torch.Tensor
        and (a.dtype, a.shape, a.stride(), a.device, a.layout) == (b.dtype, b.shape, b.stride(), b.device, b.layout)
        and not (b.is_conj() or b.is_neg())
    )
