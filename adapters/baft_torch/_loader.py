"""The data loader's place in a checkpoint: its position, and the moment at which random numbers are put back.

`iter(loader)` draws from the default generator (a seed for its workers, some samplers a seed of their own), in the
first run once, long before the boundary. A resumed run draws again, so the generators are set to their saved state
as soon as the iterator exists, and before it fetches anything: a dataset that draws while it loads (augmentation)
then sees the numbers that the uninterrupted run saw.

Where the loader has workers, the wait for their next batch is a window. Without workers the batch is made by the
training thread itself, which is work and no wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from baft_torch._small import from_tree, to_tree
from baftd.errors import UsageError
from baftd.pipeline.events import EventKind

if TYPE_CHECKING:
    from baft_torch._waits import Waits

__all__ = ["LoaderState"]


class LoaderState:
    """Saves and loads the position of one loader: anything with state_dict() and load_state_dict()."""

    def __init__(self, loader: Any) -> None:
        """Raises UsageError for a loader that cannot say where it is."""
        self._loader = loader
        self._disarm: Callable[[], None] | None = None
        self._unwatch: Callable[[], None] | None = None
        missing = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(loader, name, None))]
        if missing:
            raise UsageError(
                f"dataloader is a {type(loader).__name__} without {' and '.join(missing)}: its position in the data "
                "cannot be saved.",
                hint="Use torchdata's StatefulDataLoader, which takes the arguments of DataLoader.",
            )

    def generators(self) -> dict[str, torch.Generator]:
        """Generators of the loader and its sampler: they belong to the state of random numbers."""
        found = {
            "loader": getattr(self._loader, "generator", None),
            "sampler": getattr(getattr(self._loader, "sampler", None), "generator", None),
        }
        return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}

    def state(self) -> dict[str, object]:
        """Where the loader is: the batches it has handed out, and no further."""
        if _is_untouched(self._loader):
            # Asking it would make its iterator, which draws random numbers that training would not have drawn.
            state = getattr(self._loader, "next_iter_state", None)
            return {"iterated": False, "position": None if state is None else to_tree(state, "dataloader")}
        return {"iterated": True, "position": to_tree(self._loader.state_dict(), "dataloader")}

    def load(self, saved: Mapping[str, Any], put_back: Callable[[], None]) -> None:
        """Set the position. `put_back`, which restores random numbers, is called now, and again when the next iterator
        exists, if one existed when the state was saved.

        Raises UsageError if an iterator exists already: it would go on from where it is.
        """
        if getattr(self._loader, "_iterator", None) is not None:
            raise UsageError(
                "the data loader was iterated before resume(), so its position cannot be set.",
                hint="Call iter(dataloader) after ckpt.resume().",
            )
        if saved["position"] is not None:
            self._loader.load_state_dict(from_tree(saved["position"]))
        put_back()
        if saved["iterated"]:
            self._arm(put_back)

    def disarm(self) -> None:
        """Forget `put_back`: training has begun, so whatever iterator comes next is made by training itself."""
        if self._disarm is not None:
            self._disarm()
            self._disarm = None

    def watch(self, waits: Waits) -> None:
        """Tell `waits` when the training thread waits for a batch, of the iterator that exists or of a later one."""
        loader = self._loader
        if not isinstance(loader, DataLoader):  # of another one nobody knows whether it waits or works
            return
        make = loader._get_iterator

        def made() -> Any:
            return _watched(make(), waits)

        if getattr(loader, "_iterator", None) is not None:
            _watched(loader._iterator, waits)
        self._unwatch = _override(loader, "_get_iterator", made)

    def unwatch(self) -> None:
        """Watch no more. Iterators that exist go on, unwatched."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _arm(self, put_back: Callable[[], None]) -> None:
        loader = self._loader
        if isinstance(loader, DataLoader):
            # `DataLoader.__iter__` makes its iterator with self._get_iterator(). StatefulDataLoader calls it twice
            # where the saved epoch had ended; numbers belong between the two, as in the run that was saved.
            make = loader._get_iterator

            def made() -> Any:
                self.disarm()
                iterator = make()
                put_back()
                return iterator

            self._disarm = _override(loader, "_get_iterator", made)
            return
        kind = type(loader)
        begin = getattr(kind, "__iter__", None)
        if begin is None:  # never iterated
            return

        def iterate(which: Any) -> Any:
            if which is not loader:
                return begin(which)
            self.disarm()
            iterator = begin(which)
            put_back()
            return iterator

        own = "__iter__" in kind.__dict__

        def disarm() -> None:
            if own:
                kind.__iter__ = begin
            else:
                del kind.__iter__

        try:
            kind.__iter__ = iterate
        except (AttributeError, TypeError):  # a type that cannot be patched
            return
        self._disarm = disarm


def _is_untouched(loader: Any) -> bool:
    """Whether a StatefulDataLoader has no iterator yet."""
    return hasattr(loader, "next_iter_state") and getattr(loader, "_iterator", 0) is None


def _override(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Give one object a method of its own; returns what puts back what was there before."""
    before = owner.__dict__.get(name)
    setattr(owner, name, method)

    def undo() -> None:
        if before is None:
            owner.__dict__.pop(name, None)
        else:
            setattr(owner, name, before)

    return undo


def _watched(iterator: Any, waits: Waits) -> Any:
    """The iterator itself, which from now on tells when it waits for its workers."""
    fetch = getattr(type(iterator), "_next_data", None)
    if fetch is None or not getattr(iterator, "_num_workers", 0):
        return iterator
    # An iterator stops its workers when the last reference to it goes: this one must not be one.
    reference = weakref.ref(iterator)

    def next_data() -> Any:
        began = waits.begin_here(EventKind.WAIT_DATA)
        try:
            return fetch(reference())
        finally:
            if began:
                waits.end(EventKind.WAIT_DATA, began)

    iterator._next_data = next_data
    return iterator
