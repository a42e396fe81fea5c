"""What of the small state all saved ranks agree on: that much goes on in another layout, the rest begins anew.

A rank of the new layout is no rank of the saved one: a random number generator, a position in the data or a counter
belongs to nobody where it differs among the ranks that saved it. What is equal in every byte on all of them has no
owner, and carries over. Everything else is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baftd.checkpoint.state_tree import encode

__all__ = ["Common", "agreed", "common_state"]


@dataclass
class Common:
    """Small state for a rank of the new layout. Values are as saved (typed trees)."""

    extra: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    """Extra states of modules by the module's name in the new layout."""
    rng: dict[str, Any] = field(default_factory=dict)
    """As `_rng.capture` makes it, without what is not carried."""
    loader: Mapping[str, Any] | None = None
    not_carried: tuple[str, ...] = ()
    """Names, sorted: "extra.<name>", "modules.<name>", "rng.<generator>", "dataloader"."""
    why: dict[str, str] = field(default_factory=dict)
    """Of each of them, in a few words."""

    def leave(self, name: str, why: str) -> None:
        """Note an item that is not carried."""
        self.why[name] = why
        self.not_carried = tuple(sorted(self.why))


def agreed(values: Mapping[int, Any]) -> bool:
    """Whether the values of all ranks are equal in every byte."""
    encoded = iter(values.values())
    first = encode(next(encoded))
    return all(encode(value) == first for value in encoded)


def common_state(
    smalls: Mapping[int, Mapping[str, Any]],
    *,
    modules: Mapping[str, str],
    saved_modules: Mapping[int, Mapping[str, Any]],
    same_data: str,
) -> Common:
    """Sort the small state of all saved ranks into what carries over and what does not.

    Args:
        smalls: decoded small state by rank.
        modules: live modules with an extra state: base name -> name.
        saved_modules: extra states of modules by rank and base name.
        same_data: why a position in the data means something else in the new layout; empty where it means the same.
    """
    found = Common()
    _each(found, "extra", found.extra, {rank: small.get("extra", {}) for rank, small in smalls.items()})
    states: dict[str, Any] = {}
    wanted = {rank: {k: v for k, v in items.items() if k in modules} for rank, items in saved_modules.items()}
    _each(found, "modules", states, wanted)
    found.modules = {modules[name]: state for name, state in states.items()}
    rng = {rank: dict(small.get("rng", {})) for rank, small in smalls.items()}
    generators = {rank: items.pop("generators", {}) for rank, items in rng.items()}
    _each(found, "rng", found.rng, rng)
    named: dict[str, Any] = {}
    _each(found, "rng", named, generators)
    if named:
        found.rng["generators"] = named
    loaders = {rank: small["loader"] for rank, small in smalls.items() if "loader" in small}
    if loaders:
        if not agreed(loaders):
            found.leave("dataloader", "differs among the ranks that saved it")
        elif same_data:
            found.leave("dataloader", same_data)
        else:
            found.loader = next(iter(loaders.values()))
    return found


def _each(found: Common, kind: str, into: dict[str, Any], items: Mapping[int, Mapping[str, Any]]) -> None:
    """Put each item that all its holders agree on into `into`; note the others."""
    for name in dict.fromkeys(name for named in items.values() for name in named):
        values = {rank: named[name] for rank, named in items.items() if name in named}
        if agreed(values):
            into[name] = next(iter(values.values()))
        else:
            found.leave(f"{kind}.{name}", "differs among the ranks that saved it")
