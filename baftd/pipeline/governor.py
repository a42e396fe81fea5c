"""The controller of a job's snapshots on one node: measured steps in, decisions out. Pure: no clock, no chance.

    governor = Governor(fixed, budget, probe)
    governor.declare(setup)         a rank has declared what a snapshot of it takes (again: replaced)
    governor.cadence(every, ...)    what is in force job-wide
    governor.add(record)            what a rank did in a step
    governor.decide()               a Decision where something changed, else None: send plans, propose the interval

What becomes worse is answered at once, what becomes better with patience (`steady.py`): decisions settle, and a noisy
measurement cannot make them swing for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from statistics import median

from baftd.pipeline.costs import Belief, Paired, believe
from baftd.pipeline.events import EventKind, unpack_events
from baftd.pipeline.foretell import capped, clock_gaps, foretold
from baftd.pipeline.interference import Interference
from baftd.pipeline.interval import Interval, steps_for
from baftd.pipeline.ladder import RUNGS, Budget, Choice, Option, choose, job_step
from baftd.pipeline.operations import GapKind, Schedule, StageTimes
from baftd.pipeline.overhead import Estimate, OverheadEstimator
from baftd.pipeline.pacing import BLOCK, NO_LIMIT, RankFacts, RankPlan, sure_bytes, timed_plan
from baftd.pipeline.profile import WAKE, Basis, Profile
from baftd.pipeline.reasons import job_reason, rank_reason
from baftd.pipeline.records import Decision, RankSetup, RankSummary, StepRecord
from baftd.pipeline.steady import Steady
from baftd.pipeline.timeline import Step

__all__ = ["Decision", "Governor", "RankSetup", "RankSummary", "StepRecord"]

FIRST_SPEND, MOST_SPEND, LEAST_SPEND = 0.4, 0.95, 0.1
"""Part of the windows that is planned with: at first, at most, at least."""
MORE_SPEND, LESS_SPEND = 0.05, 0.85
"""It rises by so much with every step whose windows were as long as usual, and falls to so much of itself where a
snapshot that the windows should have held was not over at the fence."""
MORE, LESS, KEEP = 0.1, 0.2, 128
"""By which the part of the windows that is granted rises, or falls, before the plan does, and steps for which a plan is
kept though it might grant less: what scatters must not make a plan at every other step."""
SAME = 0.25
"""Part of a snapshot that may be copied elsewhere than before while pairs of steps still measure the same."""
LEAST_HURRY, MOST_HURRY = 1.25, 8.0
SETTLING_PROBE, SETTLING_STEPS = 8, 2048
"""One step in so many is a probe at first, for so many steps at most: while the budget is not two standard errors from
what a snapshot costs."""
UNTOUCHED = 2
"""Interval up to which every step has a snapshot or comes after one."""
OPEN_STEPS = 8
"""Steps that wait for their last rank."""
REMEMBERED = 128
"""Steps for which what a rung did not hold is remembered."""
TOLERATED = 0.95
"""Part of the budget up to which an interval is kept."""
MARGIN = 1.15
"""By which a shorter interval must fit."""
LONGER, SHOWN = 4, 4
"""Times by which the interval becomes longer at once at most, and snapshots that have to show that it is not enough:
few disturbed ones must not make it so long that it takes hours to learn that they were disturbed."""
MISSES, GOOD = 2, 64
"""Snapshots that were not over at the fence until what is copied beside computation is hurried, and those in a row that
were until it is hurried less."""


@dataclass
class _Rank:
    setup: RankSetup
    profile: Profile
    newest: int = -1
    spend: float = FIRST_SPEND
    ceiling: float = MOST_SPEND
    hurry: float = LEAST_HURRY
    missed: int = 0
    good: int = 0
    """Snapshots under a pace that were not, and in a row were, over at the fence."""
    option: Option | None = None
    plan: RankPlan | None = None
    """The last one that was decided, and what it stood on."""
    basis: Basis | None = None
    planned_for: tuple[object, ...] = ()
    """Whatever else makes a new plan when it changes."""
    planned_at: int = 0
    before: int = 0
    """Generation that was in force when it was decided: another one is the new one."""
    seen: int = 0
    in_force: bool = False
    fences: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    """Seconds that the fence waited under the plan."""
    short: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By rung: seconds beyond what was planned, and when that was seen."""
    rung: Steady = field(default_factory=lambda: Steady(0))
    last: Step | None = None


@dataclass
class _Open:
    """A step of which not all ranks have told."""

    ranks: set[int] = field(default_factory=set)
    seconds: float = 0.0
    copied: int = 0
    looked_at: list[Step] = field(default_factory=list)


class Governor:
    """See the module. Not thread-safe; every method returns in time proportional to its argument."""

    def __init__(self, fixed: Interval, budget: float, probe: int) -> None:
        """fixed: the user's interval. budget: part of the step time. probe: one step in this many, 0: never."""
        self._fixed = fixed
        self._budget = Budget(budget)
        self._probe = probe
        self._ranks: dict[int, _Rank] = {}
        self._open: dict[int, _Open] = {}
        self._pairs = OverheadEstimator()
        self._interference = Interference()
        self._guess = Belief()
        self._guessed = 0
        """Step from which the guess is."""
        self._shown = 0
        """Snapshots at the interval in force."""
        self._paired_for: dict[int, tuple[int, Option]] = {}
        """By rank: its bytes and what was done with them when pairs began."""
        self._interval = Steady(fixed.steps or 1)
        self._first = self._newest = -1
        self._every = 1
        self._decision: Decision | None = None
        self._uncertain = 1.0
        """Standard error of what a snapshot costs, as part of a step."""
        self.refused = 0
        """Numbers that could not be, and were clipped."""

    # ------------------------------------------------------------ what it knows

    @property
    def decision(self) -> Decision | None:
        """The last one, with figures as they are now."""
        return self._decision

    @property
    def estimate(self) -> Estimate | None:
        """What snapshots have been measured to cost, as part of the time of a step without one; None: too few pairs."""
        return self._pairs.estimate()

    @property
    def overhead(self) -> Estimate | None:
        """The same spread over the interval in force: part of the running time."""
        found = self.estimate
        if found is None:
            return None
        return replace(found, value=found.value / self._every, error=found.error / self._every)

    def profile(self, rank: int) -> Profile:
        """What is known of a rank. KeyError: not declared."""
        return self._ranks[rank].profile

    def capacity(self, rank: int) -> int | None:
        """Bytes that a rank can copy in the windows of a step; 0: it has none; None: nothing measured yet."""
        known = self._ranks.get(rank)
        if known is None or not known.profile.looked_at:
            return None
        return sure_bytes(self._facts(known), known.spend)

    def summary(self, rank: int) -> RankSummary:
        """For status. KeyError: not declared."""
        known = self._ranks[rank]
        profile = known.profile
        inside, outside, at_fence = profile.bytes()
        return RankSummary(
            rank=rank,
            rung=known.plan.rung if known.plan is not None else "",
            bytes=known.setup.nbytes,
            window_seconds=profile.window_seconds,
            in_windows=inside,
            outside=outside,
            at_fence=at_fence,
            fence_seconds=profile.fence_seconds,
            held_seconds=profile.held_seconds,
            overruns=profile.overruns,
            copy_rate=profile.rate(EventKind.COPY_INSIDE),
        )

    # ------------------------------------------------------------ what happens

    def declare(self, setup: RankSetup) -> None:
        """A rank is there. Its profile is kept if only bytes have changed."""
        known = self._ranks.get(setup.rank)
        if known is not None and known.setup.schedule == setup.schedule and known.setup.place == setup.place:
            known.setup = setup
            known.short.clear()
            return
        self._interference.forget(setup.rank)
        self._ranks[setup.rank] = _Rank(setup, Profile(setup.rank))
        self._open.clear()

    def forget(self, rank: int) -> None:
        """A rank has left."""
        self._ranks.pop(rank, None)
        self._interference.forget(rank)
        self._open.clear()

    def cadence(self, every: int, probe: int, from_step: int) -> None:
        """What the coordinator has published: this governor's own interval, or a longer one of another node.

        Where nothing is measured yet it is what an earlier governor has learnt: this one begins with it."""
        self._every = max(1, every)
        if self._fixed.auto and not any(known.profile.taken for known in self._ranks.values()):
            self._interval = Steady(self._every)

    def add(self, record: StepRecord) -> None:
        """Take in one period. Raises FormatError for a period or events that cannot be, before anything is changed.

        A period of an unknown rank, of a step that is not newer, or apart from training is ignored; other numbers that
        cannot be are clipped and counted (`refused`)."""
        known = self._ranks.get(record.rank)
        if known is None or record.step <= known.newest:
            return
        looked_at = None
        if record.events or not 0 < record.period <= _LONGEST:
            looked_at = Step.of(record.rank, record.step, record.begun, record.period, unpack_events(record.events))
        known.newest = record.step
        if record.apart:
            return
        period = record.period
        fence = self._clip(record.fence_ns, period)
        held = self._clip(record.held_ns, period)
        inside, outside, at_fence = (
            self._clip(one, NO_LIMIT) for one in (record.in_windows, record.outside, record.at_fence)
        )
        seconds = period * 1e-9
        known.profile.add(
            seconds,
            copied=record.copied,
            in_windows=inside,
            outside=outside,
            at_fence=at_fence,
            fence=fence * 1e-9,
            held=max(0, held - fence) * 1e-9,
            overruns=self._clip(record.overruns, NO_LIMIT),
        )
        if looked_at is not None:
            known.profile.look(looked_at, record.copied)
            known.last = looked_at if known.profile.looked_at <= _MODELLED else None
            self._learn_windows(known, looked_at)
        known.seen = record.plan
        if record.plan != known.before:
            known.in_force = True
        if record.copied and known.in_force and known.plan is not None:
            self._learn_plan(known, known.plan, at_fence, fence * 1e-9)
        self._gather(record, seconds, looked_at)

    def _clip(self, value: int, most: int) -> int:
        if 0 <= value <= most:
            return value
        self.refused += 1
        return min(max(0, value), most)

    def _learn_windows(self, known: _Rank, step: Step) -> None:
        """Windows as long as usual may be planned with a little further."""
        usable = known.profile.usable()
        if step.windows and usable and usable[-1] >= 0.9 * median(usable):
            known.spend = min(known.ceiling, known.spend + MORE_SPEND)
            known.ceiling = min(MOST_SPEND, known.ceiling + MORE_SPEND / 16)

    def _learn_plan(self, known: _Rank, plan: RankPlan, at_fence: int, fence: float) -> None:
        """A snapshot under the plan is over: did it hold what was planned?"""
        known.fences.append(fence)
        if at_fence <= plan.left + max(BLOCK, known.setup.nbytes // 100):
            known.good += 1
            if known.good >= GOOD:
                known.hurry, known.missed, known.good = max(LEAST_HURRY, known.hurry / 1.25), 0, 0
            return
        known.good = 0
        if plan.outside:
            known.missed += 1
            if known.missed >= MISSES:
                known.hurry, known.missed = min(MOST_HURRY, known.hurry * 1.25), 0
        else:
            known.ceiling = max(LEAST_SPEND, LESS_SPEND * min(known.spend, known.ceiling))
            known.spend = min(known.spend, known.ceiling)

    def _gather(self, record: StepRecord, seconds: float, looked_at: Step | None) -> None:
        """Put the ranks of a step together; what all have told goes to the estimators."""
        if record.step <= self._newest:
            return
        one = self._open.setdefault(record.step, _Open())
        one.ranks.add(record.rank)
        one.seconds += seconds
        one.copied += record.copied
        if looked_at is not None:
            one.looked_at.append(looked_at)
        if len(one.ranks) < len(self._ranks):
            if len(self._open) > OPEN_STEPS:
                del self._open[min(self._open)]
            return
        self._newest = record.step
        if self._first < 0:
            self._first = record.step
        for older in [step for step in self._open if step <= record.step]:
            del self._open[older]
        count = len(one.ranks)
        self._shown += one.copied > 0
        if one.copied in (0, count):
            self._pairs.add(record.step, one.seconds / count, one.copied > 0)
        if len(one.looked_at) == count:
            self._interference.add(one.looked_at)

    # ------------------------------------------------------------ deciding

    def decide(self) -> Decision | None:
        """A decision, if it differs from the last one; None: unchanged."""
        measured = [known for known in self._ranks.values() if known.profile.looked_at or known.profile.taken >= _BLIND]
        changed = [known.setup.rank for known in self._ranks.values() if known not in measured and self._begin(known)]
        if not measured:
            return self._say(Choice(self._interval.level), {}, changed) if changed else None
        step = max(known.newest for known in measured)
        for known in measured:
            self._note_short(known)
        facts = {known.setup.rank: self._facts(known) for known in measured}
        every = list(facts.values())
        belief = self._believe(measured)
        choice = choose(every, self._budget, belief.costs, self._fixed, self._interval.level)
        if self._fixed.auto:
            self._settle(choice, step)
        else:
            self._interval.to(choice.interval, step)
        keep = {
            known.setup.rank: known.plan.rung
            for known in measured
            if known.plan is not None and known.rung.wait(step)
        }
        choice = choose(every, self._budget, belief.costs, Interval(steps=self._interval.level), keep=keep)
        for known in measured:
            rank = known.setup.rank
            if self._take(known, choice.ranks[rank], facts[rank], step):
                changed.append(rank)
        self._uncertain = max(
            hypot(belief.inside_error * one.inside, belief.outside_error * one.outside, belief.fixed_error)
            for one in choice.ranks.values()
        ) / max(choice.step, 1e-9)
        self._pair_anew(
            {known.setup.rank: (known.setup.nbytes, known.option) for known in measured if known.option}, belief
        )
        return self._say(choice, facts, changed)

    def _pair_anew(self, copying: dict[int, tuple[int, Option]], belief: Belief) -> None:
        """Pairs begin anew where other bytes are copied, or a part of them that counts elsewhere: a rung that comes and
        goes for little says nothing else than before."""
        before = self._paired_for
        if copying.keys() == before.keys() and not any(
            nbytes != before[rank][0] or option.elsewhere(before[rank][1]) > SAME
            for rank, (nbytes, option) in copying.items()
        ):
            return
        if before:
            self._guess = belief.carried()
            self._guessed = self._first = self._newest
        self._paired_for = copying
        self._pairs.forget()

    def _begin(self, known: _Rank) -> bool:
        """Before anything is measured: where a schedule says that windows will come, they may take what they can."""
        if known.plan is not None or known.setup.schedule is None:
            return False
        known.plan = RankPlan(why="Nothing is measured yet: windows take what they can.")
        return True

    def _note_short(self, known: _Rank) -> None:
        """Remember what the fence waited for without a plan, under the rung that was tried."""
        step = known.newest
        for rung in [rung for rung, (_, seen) in known.short.items() if step - seen > REMEMBERED]:
            del known.short[rung]
        if known.option is not None and len(known.fences) >= 3:
            known.short[known.option.rung] = (max(0.0, median(known.fences) - known.option.planned), step)

    def _facts(self, known: _Rank) -> RankFacts:
        profile, setup = known.profile, known.setup
        windows, usable = profile.windows(), profile.usable()
        if known.last is not None and setup.schedule is not None:
            modelled = self._modelled(known, setup.schedule, known.last)
            if modelled is not None:
                windows = modelled
                usable = (sum(one - WAKE for one in modelled if one > WAKE),)
        return RankFacts(
            rank=setup.rank,
            bytes=setup.nbytes,
            step=profile.step_seconds,
            windows=windows,
            usable=usable,
            spend=known.spend,
            hurry=known.hurry,
            rate=profile.rate(EventKind.COPY_INSIDE),
            rate_outside=profile.rate(EventKind.COPY_OUTSIDE),
            rate_fence=profile.rate(EventKind.COPY_FENCE),
            held=profile.held,
            short=tuple((rung, seconds) for rung, (seconds, _) in known.short.items()),
            held_bytes=setup.held_bytes,
            rung=known.plan.rung if known.plan is not None else "",
            device_free=setup.device_free,
            device_rate=setup.device_rate,
        )

    def _modelled(self, known: _Rank, schedule: Schedule, last: Step) -> tuple[float, ...] | None:
        """Windows of the first steps, no longer than the model of the schedule has them."""
        stages: dict[int, StageTimes] = {}
        for other in self._ranks.values():
            if other.setup.schedule == schedule:
                stages.update(other.profile.stage_times())
        barrier = any(window.gap == GapKind.COLLECTIVE for window in last.windows)
        line = foretold(schedule, stages, barrier)
        return capped(last, line, known.setup.place) if line is not None else None

    def _believe(self, measured: Sequence[_Rank]) -> Belief:
        """What a second of copying costs, by all that is known."""
        profiles = [known.profile for known in measured]
        step = job_step([profile.step_seconds for profile in profiles])
        inside, outside = (
            sum(profile.copying(kind) for profile in profiles) / len(profiles)
            for kind in (EventKind.COPY_INSIDE, EventKind.COPY_OUTSIDE)
        )
        found = self._pairs.estimate()
        paired = None
        if found is not None and inside + outside > 0:
            held = max(profile.held + profile.fence_seconds for profile in profiles)
            paired = Paired(found.value * step - held, found.error * step, inside, outside)
        costs = self._interference
        guess = self._guess.faded(self._newest - self._guessed)
        return believe(guess, costs.cost(EventKind.COPY_INSIDE), costs.cost(EventKind.COPY_OUTSIDE), paired, step)

    def _settle(self, choice: Choice, step: int) -> None:
        """Another interval: a longer one where the budget is broken, a shorter one with patience.

        A rung that promises to be cheaper than the present one is tried first, and makes the interval shorter when it
        was."""
        now = self._interval
        spent = choice.least / (now.level * choice.step) if choice.step > 0 else 0.0
        if choice.interval > now.level:
            if spent > TOLERATED * self._budget.part and (now.level == 1 or self._shown >= SHOWN):
                self._to_interval(min(choice.interval, LONGER * now.level), step)
        elif not now.wait(step):
            least = max(choice.least, choice.present)
            shorter = max(choice.interval, steps_for(least * MARGIN, self._budget.planned, choice.step))
            if shorter < now.level:
                self._to_interval(shorter, step)

    def _to_interval(self, interval: int, step: int) -> None:
        self._interval.to(interval, step)
        self._shown = 0

    def _take(self, known: _Rank, option: Option, facts: RankFacts, step: int) -> bool:
        """Make the option the rank's plan, unless the one it has will do. Returns whether it is new."""
        plan, basis = option.plan, known.profile.basis()
        setup = known.setup
        if setup.schedule is not None and not known.profile.has_operations:
            gaps = clock_gaps(setup.schedule, setup.place, facts.step)
            plan = replace(plan, timed=timed_plan(gaps, setup.nbytes, facts.inside, FIRST_SPEND))
        drifted = known.basis is not None and known.basis.drifted(basis)
        planned_for = (plan.rung, facts.hurry, setup.nbytes, bool(plan.timed), known.last is None)
        alike = not drifted and planned_for == known.planned_for
        if alike and known.option is not None:
            more = option.spend - known.option.spend
            if -LESS <= more <= MORE or (more < 0 and step - known.planned_at < KEEP):
                return False
        if drifted:
            known.ceiling = MOST_SPEND  # what was learnt was of other windows
            known.short = {option.rung: known.short[option.rung]} if option.rung in known.short else {}
        known.rung.to(RUNGS.index(plan.rung), step)
        known.plan = replace(plan, why=rank_reason(option, facts))
        known.option, known.basis, known.planned_for = option, basis, planned_for
        known.planned_at, known.before, known.in_force = step, known.seen, False
        known.fences.clear()
        return True

    def _probing(self, expected: float) -> int:
        """How often a snapshot is left out to measure what snapshots cost: where no step is otherwise free of both a
        snapshot and of what the daemon does with one afterwards."""
        interval = max(self._interval.level, self._every)
        if not self._fixed.auto or not self._probe or interval > UNTOUCHED:
            return 0
        if interval > 1:
            return self._probe
        clear = max(self._budget.part / 20, abs(self._budget.part - expected) / 2)
        settling = self._newest - self._first < SETTLING_STEPS and self._uncertain > clear
        return min(self._probe, SETTLING_PROBE) if settling else self._probe

    def _say(self, choice: Choice, facts: Mapping[int, RankFacts], changed: Sequence[int]) -> Decision | None:
        """The decision; None: the last one, whose figures are brought up to date."""
        last = self._decision
        interval = max(self._interval.level, self._every)
        slowest = choice.slowest
        if last is not None and last.slowest in choice.ranks and choice.ranks[last.slowest].cost >= 0.9 * choice.cost:
            slowest = last.slowest  # two ranks that cost alike do not take turns
        plans = {rank: known.plan for rank, known in self._ranks.items() if known.plan is not None}
        decision = Decision(
            rung=choice.rung,
            interval=self._interval.level,
            probe=self._probing(choice.overhead(interval)),
            plans=plans,
            slowest=slowest,
            step_seconds=choice.step,
            snapshot=choice.overhead(1),
            why=job_reason(choice, slowest, facts, interval, self._budget, self._fixed, self.overhead),
            changed=tuple(sorted(changed)),
        )
        self._decision = decision
        if last is None or changed:
            return decision
        same = (last.rung, last.interval, last.probe, last.slowest) == (
            decision.rung, decision.interval, decision.probe, decision.slowest,
        )  # fmt: skip
        return None if same else decision


_LONGEST = 7 * 86400 * 10**9
"""ns of a period that needs no second look."""
_MODELLED = 2
"""Steps that the model of the schedule bounds."""
_BLIND = 16
"""Steps without any events after which a rank has no windows."""
