"""Chimera: two pipelines in opposite directions over the same ranks (Li & Hoefler, SC 2021).

Each of D ranks holds two stages, s of the one that goes down and D-1-s of the one that goes up; a unit of D
micro-batches sends half of them each way. With forward and backward of one slot each, micro-batch j of a half runs
forward on the s-th stage of its way in slot s + 2j and backward in slot 2D - 1 - s + 2j: since D is even, the two ways
use slots of different parity on every rank, and the backwards of one way begin behind the forwards of the other. Units
follow each other every 2D slots and fit into each other's bubbles in the same manner.
"""

from __future__ import annotations

from collections.abc import Sequence

from baftd.errors import UsageError
from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import Operation

__all__ = ["chimera"]


def chimera(name: str, ranks: int, micro: int) -> tuple[Sequence[Sequence[Operation]], tuple[tuple[int, ...], ...]]:
    """Operations of each rank, and the two chains of stages: 0 to D-1 down, D to 2D-1 up (on rank D-1 to 0).

    Raises UsageError unless the number of ranks is even and micro-batches come in units of it."""
    if ranks % 2 or micro % ranks:
        raise UsageError(
            f"schedule {name} needs an even number of ranks and a multiple of it of micro-batches, "
            f"not {ranks} and {micro}."
        )
    half = ranks // 2
    slots: list[list[tuple[int, Operation]]] = [[] for _ in range(ranks)]
    for unit in range(micro // ranks):
        for up in (False, True):
            for number in range(half):
                index = unit * ranks + up * half + number
                for place in range(ranks):
                    rank, stage = (ranks - 1 - place, ranks + place) if up else (place, place)
                    begin = 2 * (unit * ranks + number)
                    slots[rank].append((begin + place, Operation(EventKind.FORWARD, stage, index)))
                    back = begin + 2 * ranks - 1 - place
                    slots[rank].append((back, Operation(EventKind.BACKWARD, stage, index)))
    orders = [[operation for _, operation in sorted(one)] for one in slots]
    return orders, (tuple(range(ranks)), tuple(range(ranks, 2 * ranks)))
