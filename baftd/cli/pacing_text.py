"""What the planning loop has decided for a job, in sentences: for `baftd status` and `baftd show --bubbles`."""

from __future__ import annotations

from math import floor, log10
from typing import TYPE_CHECKING

from baftd.cli.render import age

if TYPE_CHECKING:
    from baftd.wire.messages import PacingStatus

__all__ = ["pacing_lines", "percent", "seconds"]

_RUNGS = {
    "windows": "copied in windows",
    "divided": "divided among replicas, copied in windows",
    "overlap": "copied in windows and, slowly, beside the computation",
    "fence": "copied in windows, the rest at the fence",
    "device": "staged on the device at the fence",
}


def percent(share: float) -> str:
    """A part of a step: "0.42 %"; one that is below a ten-thousandth has two digits that count: "0.0030 %"."""
    value = share * 100
    if 0 < abs(value) < 0.01:
        return f"{value:.{min(15, 1 - floor(log10(abs(value))))}f} %"
    return f"{value:.2f} %"


def seconds(value: float) -> str:
    """A duration of a step or a part of one: "184 ms", "12.5 us", "3.20 s"."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= factor:
            scaled = value / factor
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f} {unit}"
    return "0 s" if value == 0 else f"{value * 1e9:.0f} ns"


def pacing_lines(pacing: PacingStatus) -> list[str]:
    """Rung, interval and who needs it; what it costs, expected and measured; Young and Daly's interval."""
    every = _every(pacing.interval) + (f", {_next(pacing)}" if pacing.next_interval else "")
    step = f" (a step takes {seconds(pacing.step_seconds)})" if pacing.step_seconds > 0 else ""
    lines = [f"snapshot {every}{step}: {_rung(pacing)}"]
    if pacing.why:
        lines.append(f"why: {pacing.why}")
    if pacing.slowest >= 0:
        where = f" on {pacing.slowest_node}" if pacing.slowest_node else ""
        lines.append(f"slowest: rank {pacing.slowest}{where}")
    lines.append(_cost(pacing))
    if pacing.young_daly is not None:
        plural = "s" if pacing.failures != 1 else ""
        lines.append(
            f"durable: every {age(pacing.young_daly)} would lose least (Young, Daly; {pacing.failures} "
            f"failure{plural} seen)"
        )
    return lines


def _every(interval: int) -> str:
    return "every step" if interval == 1 else f"every {interval} steps"


def _next(pacing: PacingStatus) -> str:
    since = f"from step {pacing.next_step} on" if pacing.next_step else "as soon as it is agreed"
    return f"{since} {_every(pacing.next_interval)}"


def _rung(pacing: PacingStatus) -> str:
    """The job's rung; where that is a longer interval, also how its snapshots are copied, as each rank's row says."""
    if pacing.rung != "interval":
        return f"rung {pacing.rung}, {_RUNGS.get(pacing.rung, 'as it says')}"
    if pacing.fixed:
        text = "rung interval, as set"
    else:
        from baftd.pipeline.ladder import HEADROOM

        text = f"rung interval, the fewest steps for {HEADROOM:g} of the budget (fewer are tried with patience)"
    rungs = list(dict.fromkeys(rank.rung for rank in pacing.ranks if rank.rung in _RUNGS))
    if len(rungs) == 1:
        return f"{text}; each {_RUNGS[rungs[0]]} (rung {rungs[0]})"
    return f"{text}; ranks are on rungs {', '.join(rungs)}" if rungs else text


def _cost(pacing: PacingStatus) -> str:
    parts = []
    if pacing.overhead is not None:
        error = f" +- {percent(pacing.overhead_error)}" if pacing.overhead_error is not None else ""
        parts.append(f"{percent(pacing.overhead)}{error} measured ({pacing.pairs} pairs of steps)")
    else:
        probes = f"about one step in {pacing.probe} is left out to compare" if pacing.probe else "no steps to compare"
        parts.append(f"not measured yet ({probes})")
    expected = f"{percent(pacing.expected)} expected"
    if pacing.next_interval:
        since = f"from step {pacing.next_step} on" if pacing.next_step else "then"
        expected += f" now, {percent(pacing.next_expected)} {since}"
    parts.append(expected)
    if pacing.budget > 0:
        parts.append(f"budget {percent(pacing.budget)}")
    return "overhead: " + ", ".join(parts)
