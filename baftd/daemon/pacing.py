"""The planning loop of a job on this node: timings of its ranks in, copy plans and an interval out.

The policy is `baftd.pipeline.governor`, which knows no clock; here is what feeds it and carries out what it decides:

    Declare, Timings  ->  bounds checked, events thinned out  ->  Governor.add     at every step of every rank
    a timer           ->  Governor.decide                     ->  CopyPlan to ranks, proposal to the coordinator

What a rank says of itself is bounded before it counts, and changes nothing but the plans of its own job. Scalars count
at every step. Events are looked at closely while a job begins and where plans do not hold, later as often as a fixed
part of a core allows, at the same steps of all ranks: a daemon that thinks is taken from training, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from baftd.checkpoint.facts import CadenceProposal, JobView, is_probe
from baftd.checkpoint.identity import Token
from baftd.daemon.failures import Failures
from baftd.daemon.said_schedules import schedules_of
from baftd.daemon.thinning import CLOSELY_AGAIN, LOOKED_AT_FIRST, SHARE, Thinning
from baftd.daemon.trace_store import TraceStore
from baftd.errors import BaftError, FormatError
from baftd.pipeline.events import EVENT_BYTES
from baftd.pipeline.governor import Decision, Governor, RankSetup, StepRecord
from baftd.pipeline.interval import Interval
from baftd.wire import codec
from baftd.wire.messages import CopyPlan, RankStep, ScheduleSaid, Timings, WireToken

if TYPE_CHECKING:
    from baftd.daemon.clients import Client
    from baftd.daemon.job import JobOnNode

__all__ = ["JobPacing", "Told"]

DECIDE_EVERY = 1.0
"""Seconds between two decisions; a tenth of it for the first steps of a job, more where deciding takes longer than
`SHARE` of it."""
MOST_STEPS_AHEAD = 1 << 20
"""By which a rank's step may be beyond the newest one known of the job."""
JUMP = 256
"""By which it may be at once: ranks of a job go step by step, and few timings are lost. A rank that is further ahead is
believed from its second such step on, and alone it says nothing of where the job is."""
SILENT = 60.0
"""Seconds after which a rank that tells nothing says nothing of it either."""
LONGEST_PERIOD = 7 * 86400 * 10**9
"""ns of one step."""
RESEND_PLAN = 4
"""Steps after which a plan that a rank does not follow is sent again."""
MOST_COUNTED = 1 << 32
"""Windows, or events, of one step."""
MOST_GENERATION = 1 << 48


@dataclass
class _Rank:
    """What is remembered of a rank beside its profile."""

    setup: RankSetup
    said: ScheduleSaid | None
    largest: int
    """Bytes of the largest snapshot that it has declared."""
    newest: int = -1
    """Of its steps."""
    heard: float = 0.0
    """When it told of that."""
    jumped: int = -1
    """Step that it told of last, if that was too far ahead to count; else -1."""
    refused: bool = False
    """Whether its last plan could not be sent: said once, not with every decision."""
    generation: int = 0
    plan: CopyPlan | None = None
    sent_at: int = -1
    """Newest step of the rank when its plan was sent."""


class _Proposal(NamedTuple):
    """What the coordinator has been told, and to which life of it."""

    store: str
    token: Token
    every: int
    probe: int
    slowest: int
    rung: str


class Told(NamedTuple):
    """What the ranks of one start have told, and what was decided for them."""

    epoch: int
    setups: Mapping[int, RankSetup]
    governor: Governor
    traces: TraceStore
    newest: int
    """See `JobPacing.newest`."""
    view: JobView | None
    """The coordinator's last word in that start."""


class JobPacing:
    """See the module's docstring. One job; belongs to the event loop."""

    def __init__(self, job: JobOnNode) -> None:
        settings = job.context.settings
        self._job = job
        self._clock = job.context.clock
        self._budget = settings.overhead_budget
        interval = settings.interval
        self._fixed = Interval() if interval is None else Interval(interval.steps, interval.seconds)
        self._probe = settings.overhead_probe if interval is None else 0
        # Who says how often wants every one of these snapshots, whatever a fence waits for it.
        self._fence_budget = settings.overhead_budget if interval is None else 0.0
        self.traces = TraceStore()
        self.failures = Failures(job)
        self.governor = self._new_governor()
        self._ranks: dict[int, _Rank] = {}
        self._token: Token | None = None
        self._thinning = Thinning()
        self._newest = -1
        """See `newest`."""
        self._view: JobView | None = None
        self._earlier: Told | None = None
        """Of the last start whose ranks declared, until ranks of a newer one do: after a crash one wants to see it."""
        self._proposed: _Proposal | None = None
        self._proposing = False
        self._unlearnt = self._learning = False
        self._deciding = 0.0
        """Seconds of a core that the last decision took."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def _new_governor(self) -> Governor:
        return Governor(self._fixed, self._budget, self._probe)

    # ------------------------------------------------------------------ what ranks are

    def declared(
        self,
        rank: int,
        token: Token,
        *,
        nbytes: int,
        most: int,
        held_bytes: int = 0,
        said: ScheduleSaid | None = None,
    ) -> None:
        """A rank has declared what it saves: `nbytes` copied in windows, `most` in all, and `held_bytes` if nothing
        were divided (0: nothing is).

        A plan for it is made at once, as far as its schedule foretells its windows."""
        self._begin(token)
        self._earlier = None
        known = self._ranks.get(rank)
        schedule = known.setup.schedule if known is not None and known.said == said else None
        setup = RankSetup(
            rank=rank,
            nbytes=nbytes,
            held_bytes=held_bytes,
            schedule=schedule,
            place=said.place if said is not None else 0,
        )
        if known is None:
            self._ranks[rank] = _Rank(setup, said, most)
        else:
            known.setup, known.said, known.largest = setup, said, max(known.largest, most)
        self.governor.declare(setup)
        if said is not None and schedule is None:
            self._unlearnt = True
            if not self._learning:
                self._learning = True
                self._job.context.tasks.start(self._learn_schedules(), f"schedules of {self._job.name}")
        self._decide_after(0.0)  # not here: nothing of planning may hinder a declaration

    async def _learn_schedules(self) -> None:
        """Put the pipelines' schedules together from what all ranks have said so far."""
        try:
            while self._unlearnt and not self._closed:
                self._unlearnt = False
                token, said = self._token, self._said()
                found = await self._job.context.workers.urgent(schedules_of, said)
                if self._closed or token != self._token:
                    continue
                for rank, (schedule, problem) in found.items():
                    one = self._ranks.get(rank)
                    if one is None or one.said != said[rank]:
                        continue
                    if problem:
                        self._job.log.warning("schedule_not_known", rank=rank, why=problem)
                    if schedule != one.setup.schedule:
                        one.setup = replace(one.setup, schedule=schedule)
                        self.governor.declare(one.setup)
                self._decide_after(0.0)
        finally:
            self._learning = False

    def _said(self) -> dict[int, ScheduleSaid]:
        return {rank: one.said for rank, one in self._ranks.items() if one.said is not None}

    def _begin(self, token: Token) -> None:
        """Put away what belonged to another start: its ranks, their steps and plans."""
        if token == self._token:
            return
        self._earlier = self.told
        self._token = token
        self._ranks.clear()
        self.traces = TraceStore()
        self.governor = self._new_governor()
        self._thinning = Thinning()
        self._newest = -1
        self._proposed = None
        if self._view is not None:
            self._tell_governor(self._view)

    def setup(self, rank: int) -> RankSetup | None:
        """What a rank has declared; None: nothing in this start of the job."""
        known = self._ranks.get(rank)
        return known.setup if known is not None else None

    @property
    def told(self) -> Told | None:
        """What is known of the newest start whose ranks have declared here; they may be gone. None: none has."""
        if not self._ranks or self._token is None:
            return self._earlier
        setups = {rank: one.setup for rank, one in sorted(self._ranks.items())}
        return Told(self._token.epoch, setups, self.governor, self.traces, self.newest, self._view)

    @property
    def decision(self) -> Decision | None:
        """What holds; None: nothing was decided yet."""
        return self.governor.decision

    @property
    def ranks(self) -> list[int]:
        """Ranks of this node that have declared."""
        return sorted(self._ranks)

    def capacities(self, ranks: Iterable[int]) -> dict[int, int] | None:
        """Bytes that each of these ranks can copy in the windows of a step; None: of one of them it is not known."""
        found: dict[int, int] = {}
        for rank in ranks:
            can = self.governor.capacity(rank) if rank in self._ranks else None
            if can is None:
                return None
            found[rank] = can
        return found

    @property
    def newest(self) -> int:
        """Newest step of this node's ranks, as they told; -1: none has.

        The job is where its ranks are: one that is far ahead of half of them, because it lies or counts otherwise, must
        not move it away from all others."""
        return self._newest

    def _agreed(self, now: float) -> int:
        told = [one.newest for one in self._ranks.values() if one.newest >= 0 and now - one.heard <= SILENT]
        most = median_low(told) + JUMP
        return max(step for step in told if step <= most)

    def greeted(self, client: Client) -> None:
        """A rank has come back over another connection: what was sent over the old one may be lost."""
        known = self._ranks.get(client.rank)
        if known is not None and known.plan is not None and client.token == self._token:
            self._job.context.server.send(client.peer, known.plan)

    # ------------------------------------------------------------------ every step

    def timings(self, client: Client, token: Token, message: Timings) -> None:
        """What a rank did in a step. Raises FormatError for what cannot be; then nothing has changed."""
        rank = self._ranks.get(client.rank)
        if rank is None or token != self._token:
            return  # it has declared nothing since the daemon began: nothing can be planned for it
        job, step = self._job, message.step
        if step <= rank.newest:
            return  # said again
        self._check(rank, message)
        now = self._clock()
        looked_at = self._thinning.wants(step, message.copied, now)
        began = time.thread_time() if looked_at else 0.0
        self.governor.add(
            StepRecord(
                rank=client.rank,
                step=step,
                begun=message.begun,
                period=message.period,
                events=message.events if looked_at else b"",
                plan=message.plan,
                copied=message.copied,
                in_windows=message.in_windows,
                outside=message.outside,
                at_fence=message.at_fence,
                fence_ns=message.fence_ns,
                held_ns=message.held_ns,
                overruns=message.overruns,
                apart=message.apart,
            )
        )
        rank.newest, rank.heard = step, now
        before, self._newest = self._newest, self._agreed(now)
        if looked_at:
            self._thinning.took(message.copied, time.thread_time() - began)
        if message.overruns or message.at_fence:
            self._thinning.closely(1)
        self.traces.add(
            RankStep(
                rank=client.rank,
                step=step,
                begun=message.begun,
                period=message.period,
                events=message.events,
                plan=message.plan,
                copied=message.copied,
            )
        )
        self._count(message)
        client.step = max(client.step, step + 1)
        if self._newest > before:
            job.pace.boundary(self._newest + 1, now)
            self.failures.trained(message.period * 1e-9)
            if not message.copied:
                self._count_left_out(step)
        if rank.generation and message.plan != rank.generation:
            self._follow(client, rank, message.plan)
        if self._timer is None:
            early = self._thinning.steps <= 2 * LOOKED_AT_FIRST
            self._decide_after(DECIDE_EVERY / 10 if early else max(DECIDE_EVERY, self._deciding / SHARE))

    def _check(self, rank: _Rank, message: Timings) -> None:
        """Raise FormatError for numbers that cannot be, and for a step that nothing confirms yet."""
        say = f"rank {message.rank}, step {message.step}: "
        if len(message.events) % EVENT_BYTES:
            raise FormatError(f"{say}{len(message.events)} bytes of events are no multiple of {EVENT_BYTES}.")
        known = max(rank.newest, self._newest, self._job.core.history.highest_step)
        if message.step > known + MOST_STEPS_AHEAD:
            raise FormatError(f"{say}the job was at step {known} last.")
        if not 0 < message.period <= LONGEST_PERIOD:
            raise FormatError(f"{say}a period of {message.period} ns.")
        held = max(message.fence_ns, message.held_ns)
        if held > LONGEST_PERIOD:  # longer than the period it may be: a boundary that lays out anew ends it
            raise FormatError(f"{say}held for {held} ns.")
        copied = message.in_windows + message.outside + message.at_fence
        if copied > rank.largest:
            raise FormatError(f"{say}{copied} bytes copied of a snapshot of {rank.largest}.")
        if message.plan > MOST_GENERATION:
            raise FormatError(f"{say}a copy plan of generation {message.plan}.")
        if max(message.lost, message.overruns) > MOST_COUNTED:
            raise FormatError(f"{say}{message.lost} events lost, {message.overruns} windows overrun.")
        before, rank.jumped = rank.jumped, -1
        if message.step > known + JUMP and not 0 <= before < message.step <= before + JUMP:
            rank.jumped = message.step
            raise FormatError(f"{say}the job was at step {known} last; it counts once a next step confirms it.")

    def _count(self, message: Timings) -> None:
        add = self._job.counters.add
        add("timings")
        if message.lost:
            add("events_lost", message.lost)
        if message.overruns:
            add("overruns", message.overruns)
        if message.fence_ns:
            add("fence_waits")
        if message.in_windows:
            add("bytes_in_windows", message.in_windows)
        if message.outside:
            add("bytes_outside", message.outside)
        if message.at_fence:
            add("bytes_at_fence", message.at_fence)

    def _count_left_out(self, step: int) -> None:
        """The job has passed a step without a snapshot: by the cadence, or because something went wrong (that is
        counted and logged as a skip)."""
        view = self._view
        if view is None:
            return
        cadence = view.cadence.at(step)
        if step % cadence.every:
            self._job.counters.add("left_out")
        elif is_probe(step, cadence.probe):
            self._job.counters.add("probes")

    def _follow(self, client: Client, rank: _Rank, plan: int) -> None:
        """The rank has another plan in force than the one that it was sent."""
        if plan > rank.generation:
            # It was sent by this daemon's predecessor: ours must be newer to count.
            self._send(client.rank, rank, plan + 1)
        elif rank.newest >= rank.sent_at + RESEND_PLAN:
            self._send(client.rank, rank, rank.generation)

    # ------------------------------------------------------------------ deciding

    def _decide_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._decide_on_time)

    def _decide_on_time(self) -> None:
        self._timer = None
        if not self._closed:
            self._decide()

    def _decide(self) -> None:
        """Ask the governor, send what is new."""
        self.look()
        began = time.thread_time()
        decision = self.governor.decide()
        self._deciding = time.thread_time() - began
        if decision is not None:
            for number in decision.changed:
                self._plan(number, decision)
            if decision.changed:
                self._thinning.closely(CLOSELY_AGAIN)
            self._job.log.debug(
                "paced", rung=decision.rung, interval=decision.interval, slowest=decision.slowest,
                snapshot=f"{decision.snapshot:.5f}", why=decision.why,
            )  # fmt: skip
        self._propose()

    def _plan(self, number: int, decision: Decision) -> None:
        plan, rank = decision.plans.get(number), self._ranks.get(number)
        if plan is None or rank is None or self._token is None:
            return
        made = CopyPlan(
            token=WireToken(self._token.epoch, self._token.incarnation),
            rank=number,
            generation=rank.generation + 1,
            rung=plan.rung,
            windows=list(plan.windows),
            further=plan.further,
            outside=plan.outside,
            timed=list(plan.timed),
            budget=self._fence_budget,
            why=(plan.why or decision.why)[:4000],
        )
        try:
            # As the rank will read it, before it takes the place of a plan that can be sent at any time.
            codec.decode_reply([codec.encode(made)])
        except (BaftError, OverflowError) as error:
            self._job.counters.add("plans_refused")
            say = self._job.log.debug if rank.refused else self._job.log.warning
            say("plan_refused", rank=number, why=str(error), note="the rank goes by the plan before, if it has one")
            rank.refused = True
            return
        rank.plan, rank.refused = made, False
        self._job.counters.add("copy_plans")
        self._send(number, rank, made.generation)

    def _send(self, number: int, rank: _Rank, generation: int) -> None:
        """Send the rank's plan under a generation, and remember it for one that is away."""
        if rank.plan is None:
            return
        rank.generation = rank.plan.generation = generation
        rank.sent_at = rank.newest
        for client in self._job.clients.of_job(self._job.name):
            if client.rank == number and client.alive and client.token == self._token:
                self._job.context.server.send(client.peer, rank.plan)

    # ------------------------------------------------------------------ the interval

    def _propose(self) -> None:
        """Tell the coordinator what this node needs, where it has not been told."""
        wanted, view = self.governor.decision, self._view
        if wanted is None or view is None or self._token is None or self._token != view.token or self._proposing:
            return
        if self._fixed.steps or not wanted.step_seconds:
            return  # the user's word holds; or nothing was measured, and what held before goes on
        proposal = _Proposal(view.store, self._token, wanted.interval, wanted.probe, wanted.slowest, wanted.rung)
        if proposal == self._proposed:
            return
        self._proposing = True
        said = CadenceProposal(
            node=self._job.context.node,
            every=wanted.interval,
            probe=wanted.probe,
            rank=wanted.slowest,
            why=wanted.why,
            step=max(0, self._newest + 1),
            step_seconds=wanted.step_seconds,
        )
        name = f"interval of {self._job.name}"
        self._job.context.tasks.start(self._say_interval(said, self._token, proposal), name)

    async def _say_interval(self, said: CadenceProposal, token: Token, proposal: _Proposal) -> None:
        try:
            await self._job.context.coordinator.propose(self._job.name, token, said)
            self._proposed = proposal
        except BaftError as error:  # away, or a newer start: it is said again with the next decision
            self._job.log.debug("interval_not_said", why=str(error))
        finally:
            self._proposing = False

    def look(self) -> None:
        """Take what the coordinator has published of the job."""
        view, before = self._job.view, self._view
        if view is None or view is before:
            return
        if view.token is not None and self._token is not None:
            self._begin(view.token)  # before the view counts: what is put away keeps its own
        self._view = view
        self.failures.viewed(view, self._clock())
        if before is None or before.cadence != view.cadence:
            self._tell_governor(view)
        cadence, by = view.cadence, view.cadence_by
        if before is None or (before.cadence.every, before.cadence.probe) == (cadence.every, cadence.probe):
            return
        longer = cadence.every > before.cadence.every
        if cadence.every != before.cadence.every:
            self._job.counters.add("intervals_lengthened" if longer else "intervals_shortened")
        say = self._job.log.warning if longer else self._job.log.info
        say(
            "interval", every=cadence.every, before=before.cadence.every, probe=cadence.probe,
            from_step=cadence.from_step, node=by.node if by is not None else None,
            slowest=by.rank if by is not None else None, why=by.why if by is not None else "as the settings say",
        )  # fmt: skip

    def _tell_governor(self, view: JobView) -> None:
        cadence = view.cadence
        self.governor.cadence(cadence.every, cadence.probe, cadence.from_step)

    @property
    def view(self) -> JobView | None:
        """The coordinator's last word."""
        return self._view

    # ------------------------------------------------------------------ the end

    def lost(self, client: Client) -> None:
        """A process of the job has died."""
        if client.token is not None and client.token == self._token:
            self.failures.died(client.token.epoch)

    def close(self) -> None:
        """No timer is left."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
