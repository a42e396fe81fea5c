"""Why a rung was taken, in a sentence with numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log10

from baftd.pipeline.interval import LONGEST, Interval
from baftd.pipeline.ladder import HEADROOM, Budget, Choice, Option
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
    """Why the job has its rung and interval.

    measured: spread over the interval in force. Its figure is not told here: who asks sees the newest one beside it."""
    option = choice.ranks.get(slowest)
    if option is None:
        return "Nothing is measured yet: windows take what they can."
    expected = choice.overhead(interval)
    text = f"Rank {slowest}: {rank_reason(option, facts[slowest])[:-1]}"
    if interval == 1:
        text += f"; a snapshot at every step costs {_part(expected)}"
    else:
        text += f"; a snapshot costs {_part(choice.overhead(1))} of a step, every {interval} steps {_part(expected)}"
    if fixed.auto and interval >= LONGEST:
        return f"{text}: no interval is long enough for the budget of {_part(budget.part)}."
    said = "" if fixed.auto else " by an interval that is set"
    if expected > budget.part:
        return f"{text}: over the budget of {_part(budget.part)}{said}."
    if measured is not None and measured.value - 2 * measured.error > budget.part:
        # Two standard errors: what is expected is a model's word, and this is not chance.
        return f"{text} by expectation, but it is measured above the budget of {_part(budget.part)}{said}."
    if fixed.auto and interval > 1:
        # Said, since a cost between the planned part and the whole looks as if a shorter interval would do.
        planned = f"{HEADROOM:g} of it is planned with, and a shorter interval is tried with patience"
        return f"{text}, within the budget of {_part(budget.part)} ({planned})."
    return f"{text}, within the budget of {_part(budget.part)}."


def _bytes(count: float) -> str:
    """In the units of all other output, so that numbers of one look can be compared."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return f"{int(count)} B"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _part(part: float) -> str:
    """Two digits that count, never an exponent."""
    value = part * 100
    if abs(value) >= 10 or value == 0:
        return f"{value:.0f} %"
    digits = max(0, 1 - floor(log10(abs(value))))
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"
