"""A training job that is none: steps of a few ranks as the governor would see them, made of numbers. Pure, seeded.

Each rank computes in operations and waits in windows, which take turns. A snapshot is copied as its plan says: in
windows up to their budgets, beside computation at the pace allowed, the rest at the fence. What that costs the others
is a property of the machine (`inside`, `outside`: seconds lost by a second of copying), which the governor must find.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baftd.pipeline.events import Event, EventKind, pack_event
from baftd.pipeline.governor import Decision, Governor, RankSetup, StepRecord
from baftd.pipeline.pacing import BLOCK, NO_LIMIT, RankPlan

MS = 10**6


@dataclass
class Machine:
    """What a second of copying costs, and how fast copying is."""

    inside: float = 0.0
    outside: float = 0.0
    rate: float = 9e9
    scatter: float = 0.01
    """Standard deviation of an operation's length, as part of it."""
    held: float = 0.2e-3
    wake: float = 60e-6
    fixed: float = 0.0
    """Seconds that a snapshot costs the step that nobody sees: the daemon verifies it on the same cores."""


@dataclass
class Job:
    """Ranks that compute `operation` seconds and wait `window` seconds in turns, `turns` times a step.

    With `pipeline`, even ranks compute while odd ones wait, and operations are recorded.
    """

    ranks: int
    nbytes: int
    operation: float
    window: float
    turns: int = 4
    pipeline: bool = True
    machine: Machine = field(default_factory=Machine)
    change: Callable[[int, Job], None] | None = None
    """Called before each step: may change anything."""
    first_slow: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.plans: dict[int, tuple[int, RankPlan]] = {}
        self.clock = 10**12
        self.spent: list[tuple[bool, float]] = []
        """Of each step: copied, and the seconds that copying cost it."""
        self.fence_bytes: list[int] = []
        self.inside_bytes: list[int] = []
        self.step_seconds = 0.0

    def step(self, number: int, copied: bool) -> list[StepRecord]:
        """The step as all ranks tell of it."""
        if self.change is not None:
            self.change(number, self)
        slow = self.first_slow if number == 0 else 1.0
        copies = [_Copy(self, rank) if copied else None for rank in range(self.ranks)]
        machine = self.machine
        lost = fence = 0.0
        events: list[list[Event]] = [[] for _ in range(self.ranks)]
        at = self.clock
        for turn in range(self.turns):
            for phase in (0, 1):
                computing = [rank for rank in range(self.ranks) if not self.pipeline or rank % 2 == phase]
                waiting = [rank for rank in range(self.ranks) if self.pipeline and rank % 2 != phase]
                length = self.operation * slow * max(0.3, 1 + self.random.gauss(0, machine.scatter))
                window = self.window * slow if self.pipeline else 0.0
                # Copying of those who wait, and of those who compute, slows those who compute.
                busy_in = max((c.inside(window) for r in waiting if (c := copies[r]) is not None), default=0.0)
                busy_out = max((c.beside(length) for r in computing if (c := copies[r]) is not None), default=0.0)
                loss = machine.inside * busy_in + machine.outside * busy_out
                # Only what makes the step longer is lost: who computes has time while the others wait for longer.
                lost += max(length + loss, window) - max(length, window)
                end = at + int((length + loss) * 1e9)
                for rank in computing:
                    if self.pipeline:
                        kind = EventKind.FORWARD if turn < self.turns / 2 else EventKind.BACKWARD
                        events[rank].append(Event(kind, rank, turn, at, end))
                    if (copy := copies[rank]) is not None:
                        events[rank] += copy.spans(EventKind.COPY_OUTSIDE, -1, at)
                until = at + max(int(window * 1e9), 1)
                for rank in waiting:
                    ordinal = turn
                    if window > 0:
                        budget = self.budget(rank, ordinal)
                        events[rank].append(Event(EventKind.WAIT_RECV, -1, -1, at, until))
                        events[rank].append(
                            Event(EventKind.WINDOW, EventKind.WAIT_RECV, ordinal, at, until, budget)
                        )
                    if (copy := copies[rank]) is not None:
                        events[rank] += copy.spans(EventKind.COPY_INSIDE, ordinal, at)
                at = max(end, until)
            if not self.pipeline and self.window > 0:
                until = at + int(self.window * slow * 1e9)
                for rank in range(self.ranks):
                    budget = self.budget(rank, turn)
                    events[rank].append(Event(EventKind.WAIT_COLLECTIVE, -1, -1, at, until))
                    events[rank].append(Event(EventKind.WINDOW, EventKind.WAIT_COLLECTIVE, turn, at, until, budget))
                    if (copy := copies[rank]) is not None:
                        copy.inside(self.window * slow)
                        events[rank] += copy.spans(EventKind.COPY_INSIDE, turn, at)
                at = until
        waits = [copy.flush() if copy is not None else (0, 0.0) for copy in copies]
        fence = max(seconds for _, seconds in waits)
        for rank, (left, seconds) in enumerate(waits):
            if left:
                events[rank].append(Event(EventKind.COPY_FENCE, -1, -1, at, at + int(seconds * 1e9), left))
        held = machine.held if copied else machine.held / 4
        fixed = machine.fixed if copied else 0.0
        at += int((fence + held + fixed) * 1e9)
        period = at - self.clock
        self.step_seconds = period * 1e-9
        self.spent.append((copied, lost + fence + fixed + (held * 3 / 4 if copied else 0.0)))
        if copied:
            self.fence_bytes.append(max(left for left, _ in waits))
            self.inside_bytes.append(min(c.in_windows for c in copies if c is not None))
        found = [
            StepRecord(
                rank=rank,
                step=number,
                begun=self.clock,
                period=period,
                events=b"".join(pack_event(event) for event in events[rank]),
                plan=self.plans.get(rank, (0, RankPlan()))[0],
                copied=copied,
                in_windows=copy.in_windows if (copy := copies[rank]) is not None else 0,
                outside=copy.outside if copy is not None else 0,
                at_fence=waits[rank][0],
                fence_ns=int(waits[rank][1] * 1e9),
                held_ns=int((held + waits[rank][1]) * 1e9),
            )
            for rank in range(self.ranks)
        ]
        self.clock = at
        return found

    def plan(self, rank: int) -> RankPlan:
        """The plan in force: without one, windows have no limit, and without windows copying goes on all the time."""
        known = self.plans.get(rank)
        if known is not None:
            return known[1]
        return RankPlan(outside=0 if self.window > 0 else NO_LIMIT)

    def budget(self, rank: int, ordinal: int) -> int:
        plan = self.plan(rank)
        return plan.windows[ordinal] if ordinal < len(plan.windows) else plan.further


class _Copy:
    """A snapshot of one rank on its way."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.left = job.nbytes
        self.ordinal = 0
        self.in_windows = self.outside = 0
        self._span = (0.0, 0)

    def inside(self, seconds: float) -> float:
        """Copy in the next window. Returns the seconds of copying."""
        self._span = (0.0, 0)
        if seconds <= 0:
            return 0.0
        budget = self.job.budget(self.rank, self.ordinal)
        self.ordinal += 1
        can = int(max(0.0, seconds - self.job.machine.wake) * self.job.machine.rate)
        done = min(self.left, budget, BLOCK * (can // BLOCK + 1) if can else 0)
        self.left -= done
        self.in_windows += done
        self._span = (done / self.job.machine.rate, done)
        return self._span[0]

    def beside(self, seconds: float) -> float:
        """Copy beside an operation of that length."""
        pace = self.job.plan(self.rank).outside
        done = min(self.left, int(seconds * min(pace, self.job.machine.rate)))
        self.left -= done
        self.outside += done
        self._span = (done / self.job.machine.rate, done)
        return self._span[0]

    def spans(self, kind: EventKind, ordinal: int, begin: int) -> list[Event]:
        seconds, done = self._span
        return [Event(kind, -1, ordinal, begin, begin + int(seconds * 1e9), done)] if done else []

    def flush(self) -> tuple[int, float]:
        left, self.left = self.left, 0
        return left, left / self.job.machine.rate


@dataclass
class Run:
    """Drives a job by a governor, as the daemon does: decisions now and then, plans and cadence with some delay."""

    job: Job
    governor: Governor
    decide_every: int = 2
    number: int = 0
    every: int = 1
    probe: int = 0
    decisions: list[tuple[int, Decision]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.job.seed + 1)
        for rank in range(self.job.ranks):
            self.governor.declare(RankSetup(rank, self.job.nbytes))
        self._generation = 0

    def steps(self, count: int) -> None:
        """Train on."""
        for _ in range(count):
            copied = self.number % self.every == 0 and not (self.probe and self.random.random() < 1 / self.probe)
            for record in self.job.step(self.number, copied and self.number > 0):
                self.governor.add(record)
            self.number += 1
            if self.number % self.decide_every == 0 and (decision := self.governor.decide()) is not None:
                self.decisions.append((self.number, decision))
                self.every, self.probe = decision.interval, decision.probe
                self.governor.cadence(self.every, self.probe, self.number)
                for rank in decision.changed:
                    self._generation += 1
                    self.job.plans[rank] = (self._generation, decision.plans[rank])

    def overhead(self, last: int) -> float:
        """What copying cost in the last steps, as part of their time: the machine's truth."""
        spent = sum(seconds for _, seconds in self.job.spent[-last:])
        return spent / (last * self.job.step_seconds)

    @property
    def intervals(self) -> list[int]:
        """That were decided, without repetitions."""
        found: list[int] = []
        for _, decision in self.decisions:
            if not found or found[-1] != decision.interval:
                found.append(decision.interval)
        return found
