"""Why a rung was taken, in a sentence with numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from baftd.pipeline.interval import LONGEST, Interval
from baftd.pipeline.ladder import Budget, Choice, Option
from baftd.pipeline.overhead import Estimate
from baftd.pipeline.pacing import RankFacts
from baftd.pipeline.profile import low

__all__ = ["job_reason", "rank_reason"]


def rank_reason(option: Option, facts: RankFacts) -> str:
    """Why a rank is on its rung."""
    size = _bytes(facts.bytes)
    windows = low(facts.usable)
    have = (
        f"windows of {_seconds(windows)} of a step of {_seconds(facts.step)} hold {_bytes(windows * facts.inside)}"
        if windows > 0
        else f"a step of {_seconds(facts.step)} has no windows"
    )
    rate = f"{_bytes(facts.inside)}/s" + ("" if facts.rate or facts.rate_outside else ", assumed")
    text = f"{size} a snapshot; {have} ({rate})"
    if option.rung == "windows":
        return f"{text}."
    if option.rung == "divided":
        return f"{text}; undivided it would be {_bytes(facts.held_bytes)}."
    if option.rung == "overlap":
        late = f", {_bytes(option.plan.left)} at the fence" if option.plan.left > facts.bytes // 100 else ""
        outside = _bytes(option.outside * facts.beside)
        return f"{text}, {outside} are copied beside computation at {_bytes(option.plan.outside)}/s{late}."
    where = "into device memory at the fence" if option.rung == "device" else "at the fence"
    return f"{text}, {_bytes(option.plan.left)} are copied {where} in {_seconds(option.planned)}."


def job_reason(
    choice: Choice,
    slowest: int,
    facts: Mapping[int, RankFacts],
    interval: int,
    budget: Budget,
    fixed: Interval,
    measured: Estimate | None,
) -> str:
    """Why the job has its rung and interval."""
    option = choice.ranks.get(slowest)
    if option is None:
        return "Nothing is measured yet: windows take what they can."
    expected = choice.overhead(interval)
    text = f"Rank {slowest}: {rank_reason(option, facts[slowest])[:-1]}"
    if interval == 1:
        text += f"; a snapshot at every step costs {_part(expected)}"
    else:
        text += f"; a snapshot costs {_part(choice.overhead(1))} of a step, every {interval} steps {_part(expected)}"
    if measured is not None:
        text += f" (measured {_part(measured.value)} +- {_part(measured.error)})"
    if fixed.auto and interval >= LONGEST:
        return f"{text}: no interval is long enough for the budget of {_part(budget.part)}."
    if expected > budget.part:
        said = "" if fixed.auto else " by an interval that is set"
        return f"{text}: over the budget of {_part(budget.part)}{said}."
    return f"{text}, within the budget of {_part(budget.part)}."


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{int(count)} B"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _part(part: float) -> str:
    return f"{part * 100:.2g} %"
