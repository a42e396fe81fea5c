"""How long a pipeline's bubbles are, what fits into them, and what snapshots will cost: `baftd plan` before training.

Schedules are simulated from the times of one micro-batch on each rank (`baftd.pipeline`). What is made of the bubbles
is what the daemon makes of them before it has measured anything: the same ladder, part of a window, and guesses of what
copying costs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from baftd.cli.plan_rows import stages_of
from baftd.cli.plan_sources import JobPacing, count
from baftd.cli.render import print_table, say, size
from baftd.errors import UsageError

if TYPE_CHECKING:
    from baftd.checkpoint.layout import Layout
    from baftd.checkpoint.savers import Assignment
    from baftd.pipeline.operations import Schedule, Times
    from baftd.settings import Every

__all__ = ["Bubbles", "add_bubble_arguments", "bubbles_document", "print_bubbles", "read_bubbles"]

_SIDE_BY_SIDE = ("1F1B", "interleaved", "ZB-H1")
_TWO_STAGES = ("ZBV", "DualPipeV", "Chimera", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
_LOOPS = (
    "interleaved", "LoopedBFS", "InterleavedZeroBubble",
    "ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble",
)  # fmt: skip
_MOST_OPERATIONS = 400_000
"""Forwards and backwards of a schedule that is simulated: some seconds."""
_NO_PIPELINE = "no pipeline"
"""Instead of a schedule's name: nobody waits for another stage."""
_FLAGS = ("micro", "forward_ms", "backward_ms", "step_ms", "chunks", "schedules", "copy_rate")


def add_bubble_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say how long operations take."""
    from baftd.settings import parse_size

    def rate(text: str) -> int:
        try:
            return parse_size(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    group = parser.add_argument_group(
        "bubbles of the pipeline, and how often there is a snapshot (with --forward-ms or --step-ms, and --micro where "
        "there is a pipeline)"
    )
    group.add_argument("--micro", type=count, metavar="M", help="micro-batches of a step")
    group.add_argument(
        "--forward-ms", type=_milliseconds, metavar="MS",
        help="a rank's forward of one micro-batch; or of each rank of the pipeline, such as 30,28x14,35",
    )  # fmt: skip
    group.add_argument("--backward-ms", type=_milliseconds, metavar="MS", help="the same backward [2 x forward]")
    group.add_argument(
        "--step-ms", type=_milliseconds, metavar="MS", help="instead: a step under the first schedule; all ranks alike"
    )
    group.add_argument("--chunks", type=count, metavar="V", help="stages of a rank, interleaved [of the layout, or 2]")
    group.add_argument(
        "--schedules", nargs="+", metavar="NAME",
        help=f"side by side, with commas or spaces between: [{','.join(_SIDE_BY_SIDE)}], or torch's names of classes",
    )  # fmt: skip
    group.add_argument(
        "--copy-rate", type=rate, metavar="SIZE",
        help="a rank copies in a second [4 GB: a third of what one core was measured to copy alone]",
    )  # fmt: skip


_NUMBER = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?:x([0-9]{1,9}))?\s*")
_LEAST_MS, _MOST_MS = 1e-6, 1e9
_MOST_TIMES = 9999


def _milliseconds(text: str) -> tuple[float, ...]:
    """Argument type: positive numbers, each of them once or "x" so many times."""
    found: list[float] = []
    for part in text.split(","):
        match = _NUMBER.fullmatch(part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not a number of milliseconds, such as 30, and no 30x4")
        if not _LEAST_MS <= float(match[1]) <= _MOST_MS:
            raise argparse.ArgumentTypeError(f"{part!r} is not from {_LEAST_MS:.6f} to {_MOST_MS:,.0f} milliseconds")
        if not 1 <= int(match[2] or 1) <= _MOST_TIMES:
            raise argparse.ArgumentTypeError(f"{part!r}: a number stands for 1 to {_MOST_TIMES} ranks")
        found += [float(match[1])] * int(match[2] or 1)
    return tuple(found)


@dataclass(frozen=True)
class StageBubbles:
    """One rank of the pipeline under one schedule. Seconds of a step, bytes of a snapshot."""

    stages: tuple[int, ...]
    """As the layout numbers them."""
    bytes: int
    """Most that a rank there saves."""
    idle: float
    kinds: dict[str, float]
    fits: int
    """Bytes that the windows hold at the copy rate, by the part of them that is spent."""
    rung: str
    cost: float
    """Seconds by which a snapshot is expected to lengthen the step there."""


@dataclass(frozen=True)
class ScheduleBubbles:
    """A schedule, or why there is none for these numbers."""

    name: str
    chunks: int
    problem: str = ""
    step: float = 0.0
    interval: int = 0
    rung: str = ""
    slowest: int = -1
    """Place of the rank that decides the interval."""
    overhead: float = 0.0
    stages: tuple[StageBubbles, ...] = ()
    fits: bool = True
    """Whether the interval keeps within the budget: none that is chosen does not, but for the longest that there is."""

    @property
    def share(self) -> float:
        """Of all ranks' time, idle."""
        return sum(one.idle for one in self.stages) / (len(self.stages) * self.step) if self.stages else 0.0


@dataclass(frozen=True)
class Bubbles:
    """What is known of bubbles before training."""

    micro: int
    forward: tuple[float, ...]
    """Seconds of each rank of the pipeline."""
    backward: tuple[float, ...]
    rate: int
    rate_given: bool
    spend: float
    budget: float
    inside: float
    """What a second of copying inside windows is taken to cost, and outside."""
    outside: float
    interval: Every | None
    """That is set; None: as few steps as the budget allows."""
    held: float
    """Seconds for which a snapshot holds the rank that it holds longest; 0: nothing measured."""
    schedules: tuple[ScheduleBubbles, ...]


def read_bubbles(
    arguments: argparse.Namespace, layout: Layout, saved: Assignment, pacing: JobPacing
) -> Bubbles | None:
    """What the flags ask for; None where they ask for nothing. pacing: how often there are to be snapshots. Raises
    UsageError for flags that miss or contradict each other."""
    given = [f"--{name.replace('_', '-')}" for name in _FLAGS if getattr(arguments, name) is not None]
    if not given:
        return None
    for name in ("micro", "chunks", "copy_rate"):
        if getattr(arguments, name) == 0:
            raise UsageError(f"--{name.replace('_', '-')} is 0: it must be more than 0.")
    places = _places(layout, saved, pacing.held)
    missing = [] if arguments.micro is not None or len(places) == 1 else ["--micro"]
    if arguments.forward_ms is None and arguments.step_ms is None:
        missing.append("--forward-ms or --step-ms")
    if missing:
        raise UsageError(f"{given[0]} is about bubbles: these need {', and '.join(missing)} too.")
    if len(places) == 1 and (wrong := [name for name in ("schedules", "chunks") if getattr(arguments, name)]):
        raise UsageError(f"--{wrong[0]} is about a pipeline, but all ranks of this layout are of one stage.")
    if arguments.step_ms is not None and (arguments.forward_ms is not None or arguments.backward_ms is not None):
        raise UsageError("--step-ms gives the times of operations; so do --forward-ms and --backward-ms.")
    from baftd.pipeline.costs import Belief
    from baftd.pipeline.pacing import ASSUMED_RATE, RankFacts

    micro = arguments.micro or 1
    chunks = arguments.chunks or max(2, max(len(stages) for stages in places))
    names = _SIDE_BY_SIDE if arguments.schedules is None else _names(arguments.schedules)
    if len(places) == 1:
        names = (_NO_PIPELINE,)
    made = [_schedule(name, len(places), micro, chunks) for name in names]
    if all(one.schedule is None for one in made):
        raise UsageError(made[0].problem)
    forward, backward = _times(arguments, len(places), made[0])
    guess = Belief().costs
    found = Bubbles(
        micro=micro,
        forward=forward,
        backward=backward,
        rate=arguments.copy_rate or int(ASSUMED_RATE),
        rate_given=arguments.copy_rate is not None,
        spend=RankFacts(rank=0, bytes=0).spend,
        budget=pacing.budget,
        inside=guess.inside,
        outside=guess.outside,
        interval=pacing.interval,
        held=max(pacing.held.values(), default=0.0),
        schedules=(),
    )
    return replace(found, schedules=tuple(_looked_at(one, found, places) for one in made))


class _Place(NamedTuple):
    """What a place in the pipeline has to copy: the most of its ranks."""

    bytes: int = 0
    held: float = 0.0
    """Seconds for which a snapshot holds a rank there."""


def _places(layout: Layout, saved: Assignment, held: Mapping[int, float]) -> dict[tuple[int, ...], _Place]:
    """Stages of each rank of the pipeline in their order, and what a rank there saves."""
    found: dict[tuple[int, ...], _Place] = {}
    for rank in range(layout.world):
        stages = stages_of(layout, rank)
        known = found.get(stages, _Place())
        found[stages] = _Place(max(known.bytes, saved.bytes_of(rank)), max(known.held, held.get(rank, 0.0)))
    if () in found and len(found) > 1:
        raise UsageError("bubbles cannot be told where some ranks have a stage of the pipeline and others have none.")
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class _Made:
    name: str
    chunks: int
    schedule: Schedule | None
    problem: str = ""


def _names(given: Sequence[str]) -> tuple[str, ...]:
    """Of schedules, each once. Raises UsageError where there is none."""
    names = tuple(dict.fromkeys(name for name in re.split(r"[,\s]+", " ".join(given)) if name))
    if not names:
        raise UsageError("--schedules names none.", hint=f"Such as {','.join(_SIDE_BY_SIDE)}.")
    return names


def _schedule(name: str, ranks: int, micro: int, chunks: int) -> _Made:
    """A schedule, or why these numbers make none. Raises UsageError for a name that is not known."""
    from baftd.pipeline.schedules import build

    if name == _NO_PIPELINE:
        return _Made(name, 1, build("1F1B", 1, 1, 1))
    own = 2 if name in _TWO_STAGES else chunks if name in _LOOPS else 1
    # All that are known can be made of these: what fails is the name.
    build(name, 4, 16, 2 if name in (*_TWO_STAGES, *_LOOPS) else 1)
    if 2 * ranks * micro * own > _MOST_OPERATIONS:
        said = f"{_many(ranks, 'rank')} with {_many(micro, 'micro-batch')} and {_many(own, 'stage')}"
        return _Made(name, own, None, f"{said} are more operations than are simulated here ({_MOST_OPERATIONS:,}).")
    try:
        return _Made(name, own, build(name, ranks, micro, own))
    except UsageError as error:
        return _Made(name, own, None, error.message)


def _many(count: int, what: str) -> str:
    """ "1 stage", "2 stages"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ch') else 's'}"


def _times(
    arguments: argparse.Namespace, ranks: int, first: _Made
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of forward and backward of each rank of the pipeline."""
    if arguments.step_ms is None:
        forward = _each("--forward-ms", arguments.forward_ms, ranks)
        if arguments.backward_ms is None:
            return forward, tuple(2 * one for one in forward)
        return forward, _each("--backward-ms", arguments.backward_ms, ranks)
    if len(arguments.step_ms) != 1:
        raise UsageError("--step-ms is one number: the ranks of a pipeline share the step.")
    if first.schedule is None:
        raise UsageError(f"--step-ms is the step under {first.name}, but {first.problem}")
    from baftd.pipeline.simulate import simulate

    # Times are proportional to each other: nothing but operations is simulated.
    unit = simulate(first.schedule, _stage_times(first, first.schedule, (1.0,) * ranks, (2.0,) * ranks)).period
    if first.name == _NO_PIPELINE:
        unit *= arguments.micro or 1
    seconds = arguments.step_ms[0] / 1e3 / unit
    return (seconds,) * ranks, (2 * seconds,) * ranks


def _each(flag: str, given: Sequence[float], ranks: int) -> tuple[float, ...]:
    if len(given) not in (1, ranks):
        raise UsageError(f"{flag} names {_many(len(given), 'time')}, but the pipeline has {_many(ranks, 'rank')}.")
    return tuple(one / 1e3 for one in (list(given) * ranks if len(given) == 1 else given))


def _stage_times(made: _Made, schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> Times:
    """Times of each stage: a rank's, divided among its stages; a split backward is half one, half the other. All but
    ZB-H2, which is made for steps without one, end with a barrier."""
    from baftd.pipeline.operations import StageTimes, Times

    # Chimera's two stages of a rank are copies of each other: a micro-batch passes one of them.
    parts = 1 if made.name == "Chimera" else made.chunks
    each = []
    for rank in schedule.stage_rank:
        one, other = forward[rank] / parts, backward[rank] / parts
        each.append(StageTimes(forward=one, backward=other, input_grad=other / 2, weight_grad=other / 2))
    return Times(tuple(each), barrier=made.name != "ZB-H2")


def _looked_at(made: _Made, known: Bubbles, places: Mapping[tuple[int, ...], _Place]) -> ScheduleBubbles:
    """Simulate, and let the ladder choose as it does before anything is measured."""
    if made.schedule is None:
        return ScheduleBubbles(made.name, made.chunks, made.problem)
    from baftd.pipeline.interval import LONGEST, Interval
    from baftd.pipeline.ladder import Budget, SecondCosts, choose
    from baftd.pipeline.pacing import RankFacts, sure_bytes
    from baftd.pipeline.profile import WAKE
    from baftd.pipeline.simulate import simulate

    line = simulate(made.schedule, _stage_times(made, made.schedule, known.forward, known.backward))
    # One stage does all micro-batches one after the other, and needs no model of them.
    step = line.period * (known.micro if made.name == _NO_PIPELINE else 1)
    facts = []
    for place, (nbytes, held) in enumerate(places.values()):
        windows = tuple(gap.seconds for gap in line.gaps(place))
        usable = sum(max(0.0, one - WAKE) for one in windows)
        facts.append(
            RankFacts(
                rank=place, bytes=nbytes, step=step, windows=windows, usable=(usable,), spend=known.spend,
                rate=known.rate, rate_outside=known.rate, rate_fence=known.rate, held=held,
            )
        )  # fmt: skip
    fixed = Interval() if known.interval is None else Interval(known.interval.steps, known.interval.seconds)
    choice = choose(facts, Budget(known.budget), SecondCosts(known.inside, known.outside), fixed)
    found = []
    for place, (stages, one) in enumerate(zip(places, facts, strict=True)):
        kinds = {kind.value: seconds for kind, seconds in line.idle_by_kind(place).items()}
        option = choice.ranks[place]
        found.append(
            StageBubbles(
                stages, one.bytes, line.idle(place), kinds, sure_bytes(one, known.spend), option.rung, option.cost
            )
        )
    overhead = choice.overhead(choice.interval)
    return ScheduleBubbles(
        made.name, made.chunks, "", step, choice.interval, choice.rung, choice.slowest, overhead, tuple(found),
        fits=(fixed.auto and choice.interval < LONGEST) or overhead <= known.budget,
    )  # fmt: skip


# ---------------------------------------------------------------- for people


def print_bubbles(bubbles: Bubbles) -> None:
    """A line for each schedule, then what each stage has."""
    assumed = "" if bubbles.rate_given else " (supposed: --copy-rate)"
    copying = f"copying {bubbles.rate / 1e9:.3g} GB/s{assumed}"
    if bubbles.schedules[0].name == _NO_PIPELINE:
        _print_one_stage(bubbles, bubbles.schedules[0], copying)
        return
    forward, backward = _span(bubbles.forward), _span(bubbles.backward)
    say(
        f"bubbles: {_many(bubbles.micro, 'micro-batch')}, forward {forward}, backward {backward} a rank; {copying} in "
        f"{bubbles.spend:.0%} of each"
    )
    _say_pacing(bubbles)
    rows = []
    for one in bubbles.schedules:
        name = f"{one.name}, {_many(one.chunks, 'stage')} a rank" if one.name in _LOOPS else one.name
        if one.problem:
            rows.append([name, "-", "-", "-", "-", "-", f"-  ({one.problem.rstrip('.')})"])
            continue
        idle = [stage.idle for stage in one.stages]
        steps = "every step" if one.interval == 1 else f"every {one.interval} steps"
        over = "" if one.fits else "  (over budget, see below)"
        cost = [one.rung, steps, f"{one.overhead:.2%}{over}"] if _ever(bubbles, one) else ["-", "never", f"-{over}"]
        rows.append([name, _seconds(one.step), _span(idle), f"{one.share:.1%}", *cost])
    columns = ["schedule", "step", "bubble of a rank", "of the step", "rung", "snapshot", "overhead"]
    print_table(columns, rows, right=["step", "bubble of a rank", "of the step"])
    print()
    shown = [one for one in bubbles.schedules if not one.problem]
    alike: dict[tuple[object, ...], list[tuple[StageBubbles, ...]]] = {}
    number = 0
    for row in zip(*(one.stages for one in shown), strict=True):
        key = (size(row[0].bytes), *((_seconds(one.idle), one.rung) for one in row))
        number += key != (next(reversed(alike))[1:] if alike else None)
        alike.setdefault((number, *key), []).append(row)
    columns, rows = ["stages", "must copy"], []
    for one in shown:
        columns += [one.name, "holds", "rung"]
    for same in alike.values():
        names = [_stages(row[0].stages) for row in same]
        cells = [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", size(same[0][0].bytes)]
        for which, stage in enumerate(same[0]):  # holds: the least, where their gaps are cut into other pieces
            cells += [_seconds(stage.idle), size(min(row[which].fits for row in same)), stage.rung]
        rows.append(cells)
    print_table(columns, rows, right=columns[1:])
    for one in shown:
        if not one.fits:
            _say_over(bubbles, one)
        elif one.interval > 1 or one.rung != "windows":
            slowest = one.stages[one.slowest]
            say(
                f"{one.name}: stage {_stages(slowest.stages)} decides: bubbles hold {size(slowest.fits)} of "
                f"{size(slowest.bytes)}, a snapshot is expected to cost {_seconds(slowest.cost)} of a step "
                f"(budget {bubbles.budget:.2%})"
            )
    say(
        f"until the daemon has measured it, a second of copying is taken to cost {bubbles.inside:.3g} s in bubbles and "
        f"{bubbles.outside:.3g} s beside computation; it learns both, and how much of a bubble it may spend"
    )


def _ever(bubbles: Bubbles, one: ScheduleBubbles) -> bool:
    """Whether there are snapshots at all: at an interval that is set there are, whatever they cost."""
    return one.fits or bubbles.interval is not None


def _say_pacing(bubbles: Bubbles) -> None:
    """What is set or measured, and not supposed."""
    if bubbles.interval is not None:
        say(f"interval: {bubbles.interval}, as it is set (--interval auto: as often as the budget allows)")
    if bubbles.held:
        say(f"held: a snapshot holds training for {_seconds(bubbles.held)} besides, as measured in this job")


def _say_over(bubbles: Bubbles, one: ScheduleBubbles) -> None:
    """Why a schedule's snapshots cost more than they may."""
    slowest = one.stages[one.slowest]
    stage = "a rank" if one.name == _NO_PIPELINE else f"stage {_stages(slowest.stages)}"
    cost = f"a snapshot of {stage} ({size(slowest.bytes)}) is expected to cost {_seconds(slowest.cost)}"
    times = f"once in {one.interval:,} steps" if one.interval > 1 else "at every step"
    share = f"that is {one.overhead:.2%} of the time (budget {bubbles.budget:.2%})"
    if bubbles.interval is None:
        say(f"{one.name}: no interval is long enough: {cost}; even {times} {share}")
    else:
        say(f"{one.name}: over the budget at the interval that is set: {cost}; {times} {share}")


def _print_one_stage(bubbles: Bubbles, one: ScheduleBubbles, copying: str) -> None:
    """Without a pipeline: the step has no gaps that could be foretold, and the rung says what is done instead."""
    (stage,) = one.stages
    say(f"bubbles: none, as all ranks are of one stage; {copying}")
    _say_pacing(bubbles)
    often = "every step" if one.interval == 1 else f"every {one.interval:,} steps"
    cost = [often, f"{one.overhead:.2%}"] if _ever(bubbles, one) else ["never", "-"]
    row = [_seconds(one.step), size(stage.bytes), stage.rung, _seconds(stage.cost), *cost]
    columns = ["step", "must copy", "rung", "a snapshot costs", "snapshot", "overhead"]
    print_table(columns, [row], right=["step", "must copy", "a snapshot costs"])
    print()
    if not one.fits:
        _say_over(bubbles, one)
    say(
        f"until the daemon has measured it, a second of copying is taken to cost {bubbles.outside:.3g} s beside "
        "computation; it learns that, and which waits (for collectives, for data) hold a part of the snapshot"
    )


def _stages(stages: Sequence[int]) -> str:
    return "+".join(map(str, stages)) or "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"


def _span(values: Sequence[float]) -> str:
    least, most = _seconds(min(values)), _seconds(max(values))
    return least if least == most else f"{least} to {most}"


# ---------------------------------------------------------------- for programs


def bubbles_document(bubbles: Bubbles) -> dict[str, Any]:
    """The same for programs. Times are seconds, sizes bytes, rates bytes a second, parts numbers from 0 to 1."""
    return {
        "micro": bubbles.micro,
        "forward_seconds": list(bubbles.forward),
        "backward_seconds": list(bubbles.backward),
        "copy_rate": bubbles.rate,
        "copy_rate_given": bubbles.rate_given,
        "spend": bubbles.spend,
        "overhead_budget": bubbles.budget,
        "costs": {"inside": bubbles.inside, "outside": bubbles.outside},
        "interval": None if bubbles.interval is None else _interval_document(bubbles.interval),
        "held_seconds": bubbles.held,
        "schedules": [_schedule_document(one) for one in bubbles.schedules],
    }


def _interval_document(interval: Every) -> dict[str, Any]:
    return {"steps": interval.steps} if interval.steps else {"seconds": interval.seconds}


def _schedule_document(one: ScheduleBubbles) -> dict[str, Any]:
    if one.problem:
        return {"name": one.name, "chunks": one.chunks, "problem": one.problem}
    return {
        "name": one.name,
        "chunks": one.chunks,
        "step_seconds": one.step,
        "bubble_share": one.share,
        "interval": one.interval,
        "rung": one.rung,
        "overhead": one.overhead,
        "within_budget": one.fits,
        "slowest": list(one.stages[one.slowest].stages),
        "stages": [
            {
                "stages": list(stage.stages),
                "bytes": stage.bytes,
                "bubble_seconds": stage.idle,
                "kinds": stage.kinds,
                "fits": stage.fits,
                "rung": stage.rung,
                "cost_seconds": stage.cost,
            }
            for stage in one.stages
        ],
    }
