"""What each operation of a schedule waits for: the schedule as a graph, in an order in which it can be walked once.

A node is an operation, or a wait for a send that was fired earlier. It begins when the node before it on its rank has
ended and its message, if it waits for one, has arrived. A message is on its way once it was sent and, where senders are
held (`Sends`), its receiver has asked for it.

How torch 2.13 waits, of which `Sends` speaks (torch/distributed/pipelining/schedules.py):

- GPipe asks for an input when it needs it; sends are kept, and waited for behind the last forward and behind the last
  backward.
- 1F1B fires a send together with the next receive and waits for both. Warm-up and cool-down fire it at once and wait
  for it behind the next operation; the last forward of the warm-up is sent with the first backward's receive.
- Schedules of several stages a rank post receives long before they are needed, and wait for sends when everything else
  is done.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from baftd.errors import UsageError
from baftd.pipeline.events import EventKind
from baftd.pipeline.operations import Operation, Schedule, Sends

__all__ = ["KINDS", "Links", "link"]

KINDS = (
    EventKind.FORWARD,
    EventKind.BACKWARD,
    EventKind.INPUT_GRAD,
    EventKind.WEIGHT_GRAD,
    EventKind.REDUCE,
)
"""A node's `cost` is its stage times their number plus the place of its kind here."""
_PLACE = {kind: place for place, kind in enumerate(KINDS)}
_HANDS_ON = {EventKind.FORWARD: False, EventKind.BACKWARD: True, EventKind.INPUT_GRAD: True}
_NONE = -1


@dataclass(frozen=True)
class Links:
    """The graph. Nodes 0 to ranks - 1 are the step's begin on each rank; every node comes after those it needs."""

    before: array[int]
    """The node before it on its rank; -1 for a begin."""
    sender: array[int]
    """The node after which its message was sent; -1: it waits for none."""
    asker: array[int]
    """The node after which the receiver asked for the message; -1: it comes without being asked for."""
    cost: array[int]
    """See KINDS; -1: no operation, a wait for a send."""
    operations: tuple[array[int], ...]
    """Nodes of each rank's operations, in their order."""
    last: tuple[int, ...]
    """The last node of each rank."""


class _Message(NamedTuple):
    """What a stage hands on: to the next one (forward) or to the one before (backward)."""

    backward: bool
    stage: int
    micro: int


class _Run(NamedTuple):
    """Carry out an operation once its message, if it needs one, has arrived."""

    operation: Operation
    needs: _Message | None


class _Send(NamedTuple):
    message: _Message


class _Ask(NamedTuple):
    """Post a receive."""

    message: _Message


class _Over(NamedTuple):
    """Wait until a message that was sent has arrived."""

    message: _Message


_Action = _Run | _Send | _Ask | _Over


@dataclass
class _Rank:
    """A rank on its walk through its actions."""

    number: int
    actions: Iterator[_Action]
    at: int
    """Its newest node."""
    nodes: array[int] = field(default_factory=lambda: array("i"))
    done: set[Operation] = field(default_factory=set)
    held: _Run | _Over | None = None
    """What it cannot do yet."""


def link(schedule: Schedule) -> Links:
    """See `Schedule.links`."""
    return _Linker(schedule).link()


class _Linker:
    """Walks all ranks, each as far as it can go, until all are through."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._previous, self._next = _neighbours(schedule)
        self._sent: dict[_Message, int] = {}
        self._asked: dict[_Message, int] = {}
        self._waiting: dict[_Message, int] = {}
        ranks = schedule.ranks
        self._before = array("i", [_NONE] * ranks)
        self._sender = array("i", [_NONE] * ranks)
        self._asker = array("i", [_NONE] * ranks)
        self._cost = array("i", [_NONE] * ranks)

    def link(self) -> Links:
        ranks = [_Rank(rank, self._actions(rank), rank) for rank in range(self._schedule.ranks)]
        ready = list(reversed(ranks))
        while ready:
            rank = ready.pop()
            for message in self._walk(rank):
                woken = self._waiting.pop(message, None)
                if woken is not None:
                    ready.append(ranks[woken])
        if self._waiting:
            raise self._stuck(ranks)
        return Links(
            self._before,
            self._sender,
            self._asker,
            self._cost,
            tuple(rank.nodes for rank in ranks),
            tuple(rank.at for rank in ranks),
        )

    def _walk(self, rank: _Rank) -> list[_Message]:
        """Go on until the rank must wait. Returns messages that others may wait for."""
        news: list[_Message] = []
        free = self._schedule.sends is Sends.FREE
        while True:
            action = rank.held or next(rank.actions, None)
            rank.held = None
            if action is None:
                return news
            if isinstance(action, _Send):
                self._sent[action.message] = rank.at
                news.append(action.message)
                continue
            if isinstance(action, _Ask):
                self._asked[action.message] = rank.at
                news.append(action.message)
                continue
            needs, there = (
                (action.needs, self._sent) if isinstance(action, _Run) else (action.message, self._asked)
            )
            if needs is not None and needs not in there:
                rank.held = action
                self._waiting[needs] = rank.number
                return news
            self._before.append(rank.at)
            self._sender.append(_NONE if needs is None else self._sent[needs])
            self._asker.append(_NONE if needs is None or free else self._asked[needs])
            rank.at = len(self._before) - 1
            if isinstance(action, _Run):
                kind, stage, _ = action.operation
                self._cost.append(stage * len(KINDS) + _PLACE[kind])
                rank.nodes.append(rank.at)
                self._finish(rank, action.operation)
            else:
                self._cost.append(_NONE)

    # ------------------------------------------------------------ what a rank does

    def _actions(self, rank: int) -> Iterator[_Action]:
        order = self._schedule.order[rank]
        if self._schedule.sends is Sends.PAIRED:
            return self._paired(order)
        if self._schedule.sends is Sends.PHASES:
            return self._phases(order)
        return self._free(order)

    def _free(self, order: tuple[Operation, ...]) -> Iterator[_Action]:
        for operation in order:
            yield _Run(operation, self._needs(operation))
            made = self._makes(operation)
            if made is not None:
                yield _Send(made)

    def _phases(self, order: tuple[Operation, ...]) -> Iterator[_Action]:
        kept: list[_Message] = []
        kind = None
        for operation in order:
            if operation.kind is not kind:
                for message in kept:
                    yield _Over(message)
                kept = []
                kind = operation.kind
            needs, made = self._needs(operation), self._makes(operation)
            if needs is not None:
                yield _Ask(needs)
            yield _Run(operation, needs)
            if made is not None:
                yield _Send(made)
                kept.append(made)
        for message in kept:
            yield _Over(message)

    def _paired(self, order: tuple[Operation, ...]) -> Iterator[_Action]:
        kinds = [operation.kind for operation in order]
        first_backward = kinds.index(EventKind.BACKWARD) if EventKind.BACKWARD in kinds else len(kinds)
        last_forward = len(kinds) - 1 - kinds[::-1].index(EventKind.FORWARD) if EventKind.FORWARD in kinds else -1
        fired: _Message | None = None  # sent, and not waited for yet
        unsent: _Message | None = None  # to be sent with the next receive
        for place, operation in enumerate(order):
            needs, made = self._needs(operation), self._makes(operation)
            if unsent is not None:
                yield _Send(unsent)
            if needs is not None:
                yield _Ask(needs)
            if unsent is not None:
                yield _Over(unsent)
                unsent = None
            if operation.kind is EventKind.REDUCE and fired is not None:
                yield _Over(fired)
                fired = None
            yield _Run(operation, needs)
            if fired is not None:
                yield _Over(fired)
                fired = None
            if made is None:
                continue
            if first_backward - 1 <= place <= last_forward:
                unsent = made
            else:
                yield _Send(made)
                fired = made
        if unsent is not None:  # no operation follows
            yield _Send(unsent)
            fired = unsent
        if fired is not None:
            yield _Over(fired)

    def _needs(self, operation: Operation) -> _Message | None:
        """The message that an operation waits for; None: it needs nothing of another rank."""
        kind, stage, micro = operation
        backward = _HANDS_ON.get(kind)
        if backward is None:
            return None
        source = (self._next if backward else self._previous)[stage]
        return None if source < 0 or self._same(source, stage) else _Message(backward, source, micro)

    def _makes(self, operation: Operation) -> _Message | None:
        """The message that leaves the rank when an operation has ended."""
        kind, stage, micro = operation
        backward = _HANDS_ON.get(kind)
        if backward is None:
            return None
        target = (self._previous if backward else self._next)[stage]
        return None if target < 0 or self._same(target, stage) else _Message(backward, stage, micro)

    def _same(self, one: int, other: int) -> bool:
        return self._schedule.stage_rank[one] == self._schedule.stage_rank[other]

    # ------------------------------------------------------------ what cannot be

    def _finish(self, rank: _Rank, operation: Operation) -> None:
        """Note that an operation was carried out. Raises UsageError if what it needs of its own rank was not."""
        kind, stage, micro = operation
        done = rank.done
        missing: Operation | None = None
        if kind is EventKind.WEIGHT_GRAD:
            missing = Operation(EventKind.INPUT_GRAD, stage, micro)
        elif kind is EventKind.FORWARD:
            before = self._previous[stage]
            if before >= 0 and self._same(before, stage):
                missing = Operation(EventKind.FORWARD, before, micro)
        elif kind is not EventKind.REDUCE:
            missing = Operation(EventKind.FORWARD, stage, micro)
            after = self._next[stage]
            if missing in done and after >= 0 and self._same(after, stage):
                missing = Operation(kind, after, micro)
                if missing not in done:  # one of them may be split into input and weight gradients
                    other = EventKind.INPUT_GRAD if kind is EventKind.BACKWARD else EventKind.BACKWARD
                    missing = Operation(other, after, micro)
        if missing is not None and missing not in done:
            raise UsageError(
                f"schedule {self._schedule.name}: rank {rank.number} carries out its {operation} before its {missing}."
            )
        if operation in done:
            raise UsageError(f"schedule {self._schedule.name}: rank {rank.number} carries out its {operation} twice.")
        done.add(operation)

    def _stuck(self, ranks: list[_Rank]) -> UsageError:
        """Which rank waits for what for ever: the first one that waits for what nobody does, else the first one."""
        said = []
        for message, number in sorted(self._waiting.items(), key=lambda item: item[1]):
            rank = ranks[number]
            source = self._schedule.stage_rank[message.stage]
            word = "backward" if message.backward else "forward"
            what = f"{word} of stage {message.stage}, micro-batch {message.micro}"
            if isinstance(rank.held, _Run):
                never = message not in map(self._makes, self._schedule.order[source])
                why = "does not have it" if never else f"waits itself before its {_held(ranks[source])}"
                said.append(
                    (not never, f"rank {number} waits for ever before its {rank.held.operation}: it needs the {what} "
                     f"of rank {source}, which {why}.")
                )  # fmt: skip
            else:
                said.append((True, f"rank {number} waits for ever until its {what} is received."))
        return UsageError(f"schedule {self._schedule.name}: {min(said, key=lambda one: one[0])[1]}")


def _held(rank: _Rank) -> str:
    """What a rank waits for, in words."""
    if isinstance(rank.held, _Run):
        return str(rank.held.operation)
    return "sends are received"


def _neighbours(schedule: Schedule) -> tuple[list[int], list[int]]:
    """The stages before and after each, -1 at the ends. Raises UsageError unless the chains hold each stage once."""
    chains = schedule.routes or (tuple(range(schedule.stages)),)
    previous, following = [_NONE] * schedule.stages, [_NONE] * schedule.stages
    if sorted(stage for chain in chains for stage in chain) != list(range(schedule.stages)):
        raise UsageError(f"schedule {schedule.name}: its chains do not hold each of {schedule.stages} stages once.")
    for chain in chains:
        for before, after in pairwise(chain):
            following[before], previous[after] = after, before
    return previous, following
