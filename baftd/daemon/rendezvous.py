"""Who has come to a rendezvous, who is missing, and whether a live predecessor is in the way. Pure.

All ranks of one incarnation must arrive before a restore plan is fixed. The machine takes arrivals, departures and
the time, and says what to tell whom; it does no I/O and reads no clock. One `Rendezvous` serves one job; several
incarnations may be gathering at once (ranks that drew an incarnation each would otherwise wait without ever being
told why).
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from baftd.checkpoint.recovery import name_ranks
from baftd.errors import BaftError, RankError, TryAgain

__all__ = [
    "Completed",
    "Failed",
    "Instruction",
    "Member",
    "Pace",
    "Predecessor",
    "Rendezvous",
    "Waiting",
]

PROGRESS_EVERY = 2.0
"""Seconds between two progress messages to a waiting rank."""

QUIET_AFTER = 60.0
"""A process that passed no boundary for max(this, three median steps) does not count as advancing."""


class Pace:
    """When a job's processes passed boundaries: tells one that trains from one that hangs.

    Times are monotonic seconds. `touch` counts as a sign of life without being a boundary (the end of a restore).
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._step = -1
        self._intervals: deque[float] = deque(maxlen=31)

    def boundary(self, step: int, now: float) -> None:
        """Note that some rank passed the boundary of `step`; only a new highest step counts."""
        if step <= self._step:
            return
        if self._last is not None and self._step >= 0:
            self._intervals.append((now - self._last) / (step - self._step))
        self._step = step
        self._last = now

    def touch(self, now: float) -> None:
        """Note a sign of life that is no boundary."""
        self._last = now

    @property
    def median_step(self) -> float:
        """Median seconds a step; 0 before two boundaries."""
        return statistics.median(self._intervals) if self._intervals else 0.0

    def advances(self, now: float) -> bool:
        """Whether a boundary was passed within max(60 s, three median steps)."""
        return self._last is not None and now - self._last <= self.quiet_after

    @property
    def quiet_after(self) -> float:
        """Seconds after which silence counts as not advancing."""
        return max(QUIET_AFTER, 3 * self.median_step)

    def age(self, now: float) -> float:
        """Seconds since the last boundary or sign of life; infinite before the first."""
        return float("inf") if self._last is None else now - self._last


@dataclass(frozen=True)
class Predecessor:
    """Processes of an earlier incarnation that still live and advance."""

    incarnation: str
    epoch: int
    processes: tuple[str, ...]
    """`rank 0 (pid 4711 on node a)`, for people."""
    nodes: tuple[str, ...]


@dataclass
class Member:
    """One rank that has said hello in this incarnation."""

    rank: int
    pid: int
    pid_start: int
    resumed: bool = False
    fresh: bool = False
    takeover: bool = False
    reshard: bool = False


@dataclass(frozen=True)
class Waiting:
    """Tell `ranks` (those that have asked to resume) how the rendezvous stands."""

    ranks: tuple[int, ...]
    phase: str
    missing: tuple[int, ...]
    waited: float
    deadline: float


@dataclass(frozen=True)
class Completed:
    """All ranks are here and nobody is in the way: fix the restore plan."""

    incarnation: str
    world: int
    ranks: tuple[int, ...]
    fresh: bool
    takeover: bool
    reshard: bool = False


@dataclass(frozen=True)
class Failed:
    """The rendezvous has failed; tell `ranks` why."""

    incarnation: str
    ranks: tuple[int, ...]
    error: BaftError


Instruction = Waiting | Completed | Failed


@dataclass
class _Gathering:
    incarnation: str
    world: int
    since: float
    members: dict[int, Member] = field(default_factory=dict)
    first_resume: float | None = None
    blocked_since: float | None = None
    told: float = float("-inf")
    handed_over: bool = False

    def missing(self) -> tuple[int, ...]:
        here = {rank for rank, member in self.members.items() if member.resumed}
        return tuple(rank for rank in range(self.world) if rank not in here)

    def waiting(self) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, member in self.members.items() if member.resumed))


class Rendezvous:
    """The rendezvous of one job.

    `gather_wait`: seconds from the first `resume` until the missing ranks are named in an error.
    `restore_wait`: seconds a newcomer waits for a live predecessor before it is told to try again.
    `several_nodes`: whether ranks may come from other nodes (then "not seen here" is no reason for a hint).
    """

    def __init__(
        self, job: str, *, node: str, gather_wait: float, restore_wait: float, several_nodes: bool = False
    ) -> None:
        self.job = job
        self.node = node
        self.gather_wait = gather_wait
        self.restore_wait = restore_wait
        self.several_nodes = several_nodes
        self._gatherings: dict[str, _Gathering] = {}

    # ------------------------------------------------------------------ arrivals

    def hello(self, rank: int, world: int, incarnation: str, pid: int, pid_start: int, now: float) -> None:
        """A process says which rank it is. The same process may say it again.

        Raises `RankError` where world sizes disagree, a rank lies outside the world, or two live processes claim
        one rank number; both are named.
        """
        if rank >= world:
            raise RankError(
                f"rank {rank} (pid {pid}) does not exist in a world of {world}: ranks are 0 to {world - 1}."
            )
        gathering = self._gatherings.get(incarnation)
        if gathering is None:
            gathering = self._gatherings[incarnation] = _Gathering(incarnation, world, now)
        if world != gathering.world:
            other = next(iter(gathering.members.values()), None)
            named = f"rank {other.rank} (pid {other.pid})" if other else "an earlier rank"
            raise RankError(
                f"job {self.job}: rank {rank} (pid {pid}) says the world has {world} ranks, "
                f"{named} of the same start says {gathering.world}.",
                hint="Start all ranks with one world size; is WORLD_SIZE of another launcher in the environment?",
            )
        known = gathering.members.get(rank)
        if known is not None and (known.pid, known.pid_start) != (pid, pid_start):
            raise RankError(
                f"job {self.job}: rank {rank} is claimed twice, by pid {known.pid} and by pid {pid} "
                f"(both on node {self.node}).",
                hint="Each process needs its own RANK; is the launcher's environment passed to all of them?",
            )
        if known is None:
            gathering.members[rank] = Member(rank, pid, pid_start)

    def resume(
        self, incarnation: str, rank: int, *, fresh: bool, takeover: bool, now: float, reshard: bool = False
    ) -> None:
        """The rank asks for the restore plan; repeated asking changes nothing. One rank that says `fresh`, `takeover`
        or `reshard` says it for the whole start."""
        gathering = self._gatherings.get(incarnation)
        member = gathering.members.get(rank) if gathering else None
        if gathering is None or member is None:
            raise RankError(f"job {self.job}: rank {rank} asked to resume before it said hello.")
        member.resumed, member.fresh, member.takeover, member.reshard = True, fresh, takeover, reshard
        if gathering.first_resume is None:
            gathering.first_resume = now

    def gone(self, incarnation: str, rank: int, pid: int) -> tuple[Instruction, ...]:
        """The process of a rank has died or left: a rendezvous it had joined waits for a new process of that rank."""
        gathering = self._gatherings.get(incarnation)
        if gathering is None:
            return ()
        member = gathering.members.get(rank)
        if member is None or member.pid != pid:
            return ()
        del gathering.members[rank]
        if not gathering.members:
            del self._gatherings[incarnation]
            return ()
        if not member.resumed:
            return ()
        # All ranks of one start live and die together: the others would wait in vain.
        del self._gatherings[incarnation]
        error = TryAgain(
            f"job {self.job}: rank {rank} (pid {pid} on node {self.node}) died while the ranks gathered to resume.",
            hint="Start the job again; the output of that rank says why it died.",
        )
        return (Failed(incarnation, gathering.waiting(), error),)

    def close(self, incarnation: str) -> None:
        """The incarnation trains now, or has failed: forget its gathering."""
        self._gatherings.pop(incarnation, None)

    def retry(self, incarnation: str) -> None:
        """A completed rendezvous has to be completed again (the daemon could not act on it yet)."""
        gathering = self._gatherings.get(incarnation)
        if gathering is not None:
            gathering.handed_over = False

    # ------------------------------------------------------------------ state

    @property
    def incarnations(self) -> tuple[str, ...]:
        """Incarnations that are gathering."""
        return tuple(self._gatherings)

    def members(self, incarnation: str) -> dict[int, Member]:
        """Ranks that have said hello in this incarnation."""
        gathering = self._gatherings.get(incarnation)
        return dict(gathering.members) if gathering else {}

    @property
    def next_deadline(self) -> bool:
        """Whether a timer has to call `check` again."""
        return any(g.first_resume is not None and not g.handed_over for g in self._gatherings.values())

    # ------------------------------------------------------------------ decisions

    def check(self, now: float, predecessor: Predecessor | None) -> tuple[Instruction, ...]:
        """What follows from the time and from the live predecessor, if there is one.

        A `Completed` is given once (see `retry`); a `Failed` ends the gathering.
        """
        found: list[Instruction] = []
        for gathering in list(self._gatherings.values()):
            if gathering.first_resume is None or gathering.handed_over:
                continue
            missing = gathering.missing()
            if missing:
                found.extend(self._gathering(gathering, missing, now))
            else:
                found.extend(self._complete(gathering, now, predecessor))
        return tuple(found)

    def _gathering(self, gathering: _Gathering, missing: tuple[int, ...], now: float) -> list[Instruction]:
        assert gathering.first_resume is not None
        waited = now - gathering.first_resume
        if waited >= self.gather_wait:
            del self._gatherings[gathering.incarnation]
            return [Failed(gathering.incarnation, gathering.waiting(), self._missing_error(gathering, missing, waited))]
        return self._tell(gathering, now, "gathering", missing, waited, self.gather_wait)

    def _complete(self, gathering: _Gathering, now: float, predecessor: Predecessor | None) -> list[Instruction]:
        members = gathering.members.values()
        takeover = any(member.takeover for member in members)
        if predecessor is None or predecessor.incarnation == gathering.incarnation or takeover:
            gathering.handed_over = True
            return [
                Completed(
                    incarnation=gathering.incarnation,
                    world=gathering.world,
                    ranks=tuple(sorted(gathering.members)),
                    fresh=any(member.fresh for member in members),
                    takeover=takeover,
                    reshard=any(member.reshard for member in members),
                )
            ]
        if gathering.blocked_since is None:
            gathering.blocked_since = now
        waited = now - gathering.blocked_since
        if waited < self.restore_wait:
            phase = f"waiting for an earlier start that still trains: {', '.join(predecessor.processes[:8])}"
            return self._tell(gathering, now, phase, (), waited, self.restore_wait)
        del self._gatherings[gathering.incarnation]
        error = TryAgain(
            f"job {self.job}: an earlier start (epoch {predecessor.epoch}) still trains on "
            f"{'node' if len(predecessor.nodes) == 1 else 'nodes'} {', '.join(predecessor.nodes)}: "
            f"{', '.join(predecessor.processes[:8])}; waited {waited:.0f} s.",
            hint="Stop it, or resume with takeover=True to fence it.",
        )
        return [Failed(gathering.incarnation, gathering.waiting(), error)]

    def _tell(
        self, gathering: _Gathering, now: float, phase: str, missing: tuple[int, ...], waited: float, deadline: float
    ) -> list[Instruction]:
        if now - gathering.told < PROGRESS_EVERY:
            return []
        gathering.told = now
        return [Waiting(gathering.waiting(), phase, missing, waited, deadline)]

    def _missing_error(self, gathering: _Gathering, missing: tuple[int, ...], waited: float) -> BaftError:
        joined = [rank for rank in missing if rank in gathering.members]
        unseen = [rank for rank in missing if rank not in gathering.members]
        parts: list[str] = []
        if unseen:
            parts.append(f"{name_ranks(unseen)} never said hello on node {self.node}")
        if joined:
            pids = ", ".join(f"pid {gathering.members[rank].pid}" for rank in joined[:8])
            parts.append(f"{name_ranks(joined)} ({pids}) said hello but did not call resume()")
        others = [g for g in self._gatherings.values() if g.incarnation != gathering.incarnation]
        strays = sorted({rank for g in others for rank in g.members if rank in missing})
        hint = ""
        if strays:
            parts.append(f"{name_ranks(strays)} came under another incarnation")
            hint = "Ranks without a process group need one BAFTD_INCARNATION for all of them, new at each start."
        elif unseen and not self.several_nodes:
            hint = (
                f"This daemon coordinates in-process and sees one node only. If the {gathering.world} ranks run on "
                "several nodes, set `redis = ...` in baftd.toml on all of them; else see why those ranks did not start."
            )
        came = f"{len(gathering.waiting())} of {gathering.world} ranks came to resume within {waited:.0f} s"
        text = f"job {self.job}: {came}: "
        return RankError(text + "; ".join(parts) + ".", hint=hint)
