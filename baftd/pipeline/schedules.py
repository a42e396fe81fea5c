"""Pipeline schedules by name: the order of operations of every rank.

Models follow the papers: GPipe (Huang 2019), 1F1B (DAPPLE, Fan 2021), interleaved (Megatron-LM, Narayanan 2021),
breadth first (Lamy-Poirier 2023), zero bubble H1, H2 and V (Qi 2024), Chimera (Li & Hoefler 2021), DualPipe's V form.
Where torch has the same schedule, its order is that of torch 2.13, operation for operation (`torch_schedules.py`).

A stage's gradients are reduced (REDUCE) once, behind the last operation that adds to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from baftd.errors import UsageError
from baftd.pipeline.chimera import chimera
from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import Operation, Schedule, Sends
from baftd.pipeline.torch_schedules import (
    dual_pipe_v,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    zero_bubble_v,
)

__all__ = ["NAMES", "build", "looped", "v_shaped"]

_MOST_RANKS = 4096
_MOST_OPERATIONS = 1 << 23


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Rank of each stage where stages go round the ranks: 0, 1, 2, 0, 1, 2."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Rank of each of 2p stages where they go there and back: 0, 1, 2, 2, 1, 0."""
    return (*range(ranks), *reversed(range(ranks)))


def _gpipe(rank: int, micro: int) -> Iterator[Operation]:
    for kind in (EventKind.FORWARD, EventKind.BACKWARD):
        yield from (Operation(kind, rank, number) for number in range(micro))


def _one_forward_one_backward(rank: int, ranks: int, micro: int) -> Iterator[Operation]:
    ahead = min(micro, ranks - 1 - rank)
    yield from (Operation(EventKind.FORWARD, rank, number) for number in range(ahead))
    for number in range(micro):
        if ahead + number < micro:
            yield Operation(EventKind.FORWARD, rank, ahead + number)
        yield Operation(EventKind.BACKWARD, rank, number)


def _zero_bubble(rank: int, micro: int, ahead: int, deferred: int) -> Iterator[Operation]:
    """Forwards run ahead by so many; weight gradients are put off by so many. Mirror images: what the first rank runs
    ahead, the last one puts off."""
    yield from (Operation(EventKind.FORWARD, rank, number) for number in range(min(ahead, micro)))
    for number in range(micro):
        yield Operation(EventKind.INPUT_GRAD, rank, number)
        if ahead + number < micro:
            yield Operation(EventKind.FORWARD, rank, ahead + number)
        if number >= deferred:
            yield Operation(EventKind.WEIGHT_GRAD, rank, number - deferred)
    for number in range(max(0, micro - deferred), micro):
        yield Operation(EventKind.WEIGHT_GRAD, rank, number)


def _one_stage(orders: Callable[[int, int, int], Iterable[Operation]]) -> Callable[[str, int, int, int], Schedule]:
    def make(name: str, ranks: int, micro: int, chunks: int) -> Schedule:
        _only(name, chunks, 1)
        return _schedule(name, [orders(rank, ranks, micro) for rank in range(ranks)], looped(ranks, 1), micro)

    return make


def _loops(orders: Callable[[int, int, int, int], Iterable[Operation]]) -> Callable[[str, int, int, int], Schedule]:
    def make(name: str, ranks: int, micro: int, chunks: int) -> Schedule:
        found = [orders(rank, ranks, micro, chunks) for rank in range(ranks)]
        return _schedule(name, found, looped(ranks, chunks), micro)

    return make


def _there_and_back(
    orders: Callable[[int, int, int], Iterable[Operation]],
) -> Callable[[str, int, int, int], Schedule]:
    def make(name: str, ranks: int, micro: int, chunks: int) -> Schedule:
        _only(name, chunks, 2)
        return _schedule(name, [orders(rank, ranks, micro) for rank in range(ranks)], v_shaped(ranks), micro)

    return make


def _chimera(name: str, ranks: int, micro: int, chunks: int) -> Schedule:
    _only(name, chunks, 2)
    orders, chains = chimera(name, ranks, micro)
    return _schedule(name, orders, v_shaped(ranks), micro, chains)


_MODELS: dict[str, Callable[[str, int, int, int], Schedule]] = {
    "GPipe": _one_stage(lambda rank, ranks, micro: _gpipe(rank, micro)),
    "1F1B": _one_stage(_one_forward_one_backward),
    "interleaved": _loops(interleaved_1f1b),
    "LoopedBFS": _loops(looped_bfs),
    "InterleavedZeroBubble": _loops(interleaved_zero_bubble),
    "ZBV": _there_and_back(zero_bubble_v),
    "DualPipeV": _there_and_back(dual_pipe_v),
    "ZB-H1": _one_stage(lambda rank, ranks, micro: _zero_bubble(rank, micro, ranks - rank, rank)),
    "ZB-H2": _one_stage(lambda rank, ranks, micro: _zero_bubble(rank, micro, 2 * (ranks - 1 - rank) + 1, 2 * rank)),
    "Chimera": _chimera,
}
NAMES = tuple(_MODELS)
"""What `build` knows; names of torch's classes ("Schedule1F1B") as well."""
_TORCH: dict[str, tuple[str, Sends]] = {
    "ScheduleGPipe": ("GPipe", Sends.PHASES),
    "Schedule1F1B": ("1F1B", Sends.PAIRED),
    "ScheduleInterleaved1F1B": ("interleaved", Sends.FREE),
    "ScheduleLoopedBFS": ("LoopedBFS", Sends.FREE),
    "ScheduleInterleavedZeroBubble": ("InterleavedZeroBubble", Sends.FREE),
    "ScheduleZBVZeroBubble": ("ZBV", Sends.FREE),
    "ScheduleDualPipeV": ("DualPipeV", Sends.FREE),
}
_TWO_STAGES = ("ZBV", "DualPipeV", "Chimera")


def build(name: str, ranks: int, micro: int, chunks: int | None = None) -> Schedule:
    """The schedule of that name for p ranks, m micro-batches and v stages a rank [1; 2 where the schedule has two].

    A torch class name gives torch's own order and its waits for sends; the other names give the model, in which a
    sender is never held. Raises UsageError for a name or numbers that make no schedule."""
    known, sends = _TORCH.get(name, (name, Sends.FREE))
    make = _MODELS.get(known)
    if make is None:
        raise UsageError(f"schedule {name!r} is not known. Known are {', '.join((*_MODELS, *_TORCH))}.")
    if chunks is None:
        chunks = 2 if known in _TWO_STAGES else 1
    if min(ranks, micro, chunks) < 1:
        raise UsageError(f"schedule {name}: {ranks} ranks, {micro} micro-batches, {chunks} stages a rank make none.")
    if ranks > _MOST_RANKS or ranks * micro * chunks > _MOST_OPERATIONS:
        raise UsageError(
            f"schedule {name}: {ranks} ranks with {micro} micro-batches and {chunks} stages are more than can be "
            f"looked at ({_MOST_RANKS} ranks, {_MOST_OPERATIONS:,} forwards)."
        )
    if name == "Schedule1F1B" and micro < ranks:
        raise UsageError(f"schedule {name} needs a micro-batch for each of {ranks} ranks, but there are {micro}.")
    made = make(name, ranks, micro, chunks)
    return made if sends is Sends.FREE else replace(made, sends=sends)


def _only(name: str, chunks: int, needed: int) -> None:
    if chunks != needed:
        one = "one stage" if needed == 1 else f"{needed} stages"
        raise UsageError(f"schedule {name} has {one} a rank, not {chunks}.")


def _schedule(
    name: str,
    orders: Sequence[Iterable[Operation]],
    stage_rank: tuple[int, ...],
    micro: int,
    chains: tuple[tuple[int, ...], ...] = (),
) -> Schedule:
    each = {chain_stage: micro // len(chains) for chain in chains for chain_stage in chain}
    found = tuple(tuple(_reduced(order, each, micro)) for order in orders)
    return Schedule(name, len(found), micro, len(stage_rank), stage_rank, found, routes=chains)


def _reduced(order: Iterable[Operation], each: dict[int, int], micro: int) -> Iterator[Operation]:
    """Add the reduction of each stage behind the last operation that adds to its gradients."""
    left: dict[int, int] = {}
    for operation in order:
        yield operation
        if operation.kind in (EventKind.BACKWARD, EventKind.WEIGHT_GRAD):
            stage = operation.stage
            left[stage] = left.get(stage, each.get(stage, micro)) - 1
            if not left[stage]:
                yield Operation(EventKind.REDUCE, stage, -1)
