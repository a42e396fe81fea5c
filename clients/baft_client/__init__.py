"""What a training process links: session, I/O thread, copy engine. Knows no framework.

`attach_arrays` is the whole of it for numpy; adapters of frameworks build on `Session`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baft_client.arrays import ArrayCheckpointer, Part, attach_arrays
    from baft_client.session import Session
    from baft_client.source import Outcome, OutcomeKind, Resumed, Source

__all__ = ["ArrayCheckpointer", "Outcome", "OutcomeKind", "Part", "Resumed", "Session", "Source", "attach_arrays"]

_PLACES = {
    "ArrayCheckpointer": "arrays",
    "Part": "arrays",
    "attach_arrays": "arrays",
    "Session": "session",
    "Outcome": "source",
    "OutcomeKind": "source",
    "Resumed": "source",
    "Source": "source",
}


def __getattr__(name: str) -> object:
    """Import on first use: the daemon and the command line import parts of this package without numpy."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{place}"), name)
