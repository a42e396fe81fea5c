"""Orders of operations of torch 2.13's schedules with several stages a rank (torch.distributed.pipelining).

The facts are torch's; tests compare every order with what torch itself makes. GPipe and 1F1B are those of
`schedules.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from baftd.errors import UsageError
from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import Operation

__all__ = ["dual_pipe_v", "interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "zero_bubble_v"]

_F, _B, _I, _W = EventKind.FORWARD, EventKind.BACKWARD, EventKind.INPUT_GRAD, EventKind.WEIGHT_GRAD


def looped_bfs(rank: int, ranks: int, micro: int, chunks: int) -> Iterator[Operation]:
    """Breadth first: all micro-batches through a stage before its rank's next stage; all of it backwards."""
    for chunk in range(chunks):
        yield from (Operation(_F, chunk * ranks + rank, number) for number in range(micro))
    for chunk in reversed(range(chunks)):
        yield from (Operation(_B, chunk * ranks + rank, number) for number in reversed(range(micro)))


class _Rounds:
    """Depth first: micro-batches in rounds; a round passes all stages of a rank before the next one."""

    def __init__(self, name: str, rank: int, ranks: int, micro: int, chunks: int) -> None:
        rounds = max(1, micro // ranks)
        if micro % rounds:
            raise UsageError(
                f"{name} needs a number of micro-batches that divides into {rounds} rounds (one for each {ranks}), "
                f"not {micro}."
            )
        self.each = micro // rounds
        """Micro-batches of a round."""
        self.all = micro * chunks
        """Forwards of the rank in a step."""
        self._rank, self._ranks, self._chunks = rank, ranks, chunks

    def _micro(self, number: int) -> tuple[int, int]:
        """Which of the rank's stages a number among its forwards falls on, and the micro-batch."""
        turn, place = divmod(number, self.each)
        again, chunk = divmod(turn, self._chunks)
        return chunk, again * self.each + place

    def forward(self, number: int) -> Operation:
        chunk, micro = self._micro(number)
        return Operation(_F, chunk * self._ranks + self._rank, micro)

    def backward(self, kind: EventKind, number: int) -> Operation:
        chunk, micro = self._micro(number)
        return Operation(kind, (self._chunks - 1 - chunk) * self._ranks + self._rank, micro)


def interleaved_1f1b(rank: int, ranks: int, micro: int, chunks: int) -> Iterator[Operation]:
    """Megatron-LM's interleaved 1F1B, also for micro-batches that are no multiple of the ranks."""
    rounds = _Rounds("interleaved 1F1B", rank, ranks, micro, chunks)
    ahead = min(rounds.all, (chunks - 1) * rounds.each + 2 * (ranks - 1 - rank))
    yield from map(rounds.forward, range(ahead))
    for number in range(rounds.all):
        if ahead + number < rounds.all:
            yield rounds.forward(ahead + number)
        yield rounds.backward(_B, number)


def interleaved_zero_bubble(rank: int, ranks: int, micro: int, chunks: int) -> Iterator[Operation]:
    """The same with half the warm-up; a rank's weight gradients are put off by its number."""
    rounds = _Rounds("interleaved zero bubble", rank, ranks, micro, chunks)
    ahead = min(rounds.all, (chunks - 1) * rounds.each + ranks - 1 - rank)
    yield from map(rounds.forward, range(ahead))
    for number in range(rounds.all):
        if ahead + number < rounds.all:
            yield rounds.forward(ahead + number)
        yield rounds.backward(_I, number)
        if number >= rank:
            yield rounds.backward(_W, number - rank)
    yield from (rounds.backward(_W, number) for number in range(max(0, rounds.all - rank), rounds.all))


class _Counting:
    """Hands out the next micro-batch of each stage and kind."""

    def __init__(self) -> None:
        self._next: dict[tuple[EventKind, int], int] = {}

    def count(self, kind: EventKind, stage: int) -> int:
        """How many there were."""
        return self._next.get((kind, stage), 0)

    def take(self, kind: EventKind, stage: int) -> Operation:
        """The next one. A whole backward counts as input and as weight gradient."""
        counted = (_I, _W) if kind is _B else (kind,)
        number = self.count(counted[0], stage)
        for one in counted:
            self._next[one, stage] = self.count(one, stage) + 1
        return Operation(kind, stage, number)


def zero_bubble_v(rank: int, ranks: int, micro: int) -> Iterator[Operation]:
    """ZB-V: laid out for 2p - 1 micro-batches or more; with fewer, the surplus is left out of that layout."""
    down, up = rank, 2 * ranks - 1 - rank
    for kind, stage, number in _whole_zero_bubble_v(rank, ranks, max(2 * ranks - 1, micro), down, up):
        if number < micro:
            yield Operation(kind, stage, number)


def _whole_zero_bubble_v(rank: int, ranks: int, micro: int, down: int, up: int) -> Iterator[Operation]:
    counting = _Counting()
    take, count = counting.take, counting.count
    behind = ranks - rank  # ranks from here to the turn of the V
    for _ in range(2 * behind - 1):
        yield take(_F, down)
    for _ in range(rank):
        yield take(_F, up)
        yield take(_F, down)
    for _ in range(behind):
        yield from (take(kind, up) for kind in (_F, _I, _W))
    while count(_F, down) < micro or count(_F, up) < count(_F, down):
        if count(_F, down) < micro:
            yield take(_F, down)
        yield from (take(kind, down) for kind in (_I, _W))
        yield from (take(kind, up) for kind in (_F, _I, _W))
    for _ in range(rank):
        yield take(_I, down)
        yield take(_I, up)
    for _ in range(behind):
        yield take(_I, down)
        yield take(_W, down)
    for stage in (up, down):
        while count(_W, stage) < count(_I, stage):
            yield take(_W, stage)


def dual_pipe_v(rank: int, ranks: int, micro: int) -> Iterator[Operation]:
    """DualPipeV. Where a forward and a backward overlap on the device, torch carries them out one after the other.

    Raises UsageError for fewer micro-batches than stages."""
    if micro < 2 * ranks:
        raise UsageError(f"DualPipeV needs a micro-batch for each of {2 * ranks} stages, but there are {micro}.")
    down, up = rank, 2 * ranks - 1 - rank
    take = _Counting().take
    behind = ranks - 1 - rank
    deferred: deque[Operation] = deque()

    def backward(split: bool, stage: int) -> Operation:
        operation = take(_I if split else _B, stage)
        if split:
            deferred.append(operation)
        return operation

    def weights() -> Iterator[Operation]:
        if deferred:
            yield take(_W, deferred.popleft().stage)

    for _ in range(2 * behind):
        yield take(_F, down)
    for _ in range(rank + 1):
        yield take(_F, down)
        yield take(_F, up)
    for _ in range(behind):
        yield backward(True, up)
        yield from weights()
        yield take(_F, up)
    for _ in range(micro - 2 * ranks + rank + 1):
        for forward_stage, backward_stage in ((down, up), (up, down)):
            yield take(_F, forward_stage)
            yield backward(False, backward_stage)
    for _ in range(behind):
        yield backward(False, up)
        yield take(_F, up)
        yield backward(False, down)
    half = (rank + 1) // 2
    for number in range(rank + 1):
        # the second half is split: on odd ranks from its first operation, on even ranks from its second
        yield backward(number > half or (number == half and rank % 2 == 1), up)
        yield backward(number >= half, down)
    for _ in range(behind):
        yield from weights()
        yield backward(True, down)
    for _ in range(rank + 1):
        yield from weights()
