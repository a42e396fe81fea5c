"""Which window copies how many bytes: the copy plan of one rank. Pure.

A plan gives each window, in the order in which a step opens them, the *most* that may be copied in it: what it holds at
the rate measured, times the part of it that may be spent. The engine copies in every window until nothing is left, so
early windows do the work and late ones stand in reserve for those that turn out shorter. What all windows together do
not surely hold is `left`: to be copied outside of them at a pace (overlap), or at the fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from baftd.limits import LARGEST
from baftd.pipeline.profile import WAKE, low

__all__ = [
    "ASSUMED_RATE", "BLOCK", "NO_LIMIT", "RankFacts", "RankPlan", "copy_plan", "expected_left", "pace_for",
    "spend_needed", "sure_bytes", "timed_plan", "window_bytes",
]  # fmt: skip

BLOCK = 256 * 1024
"""Bytes: the engine stops at whole blocks only."""
NO_LIMIT = LARGEST
"""The budget of a window that has none; the largest number that a message takes. No number of a plan is above it,
whatever was measured: a plan that cannot be sent would leave a rank without any."""
ASSUMED_RATE = 4e9
"""Bytes a second, until a copy has been measured: a third of what one core copies where nothing else runs."""
_MIB = 1 << 20
RESERVE = 1.25
"""Part of the windows that is granted, over the part that would just do."""


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank when its plan is made. Sizes are bytes of one snapshot, times seconds of one step."""

    rank: int
    bytes: int
    step: float = 0.0
    """0: nothing measured yet."""
    windows: tuple[float, ...] = ()
    """Seconds of each window of a step, in their order (medians)."""
    usable: tuple[float, ...] = ()
    """Seconds of all windows together in which the engine is awake, in each of the newest steps."""
    spend: float = 0.4
    """Part of the windows that may be planned with."""
    hurry: float = 1.25
    """By how much copying outside of windows is faster than would just do."""
    rate: float = 0.0
    """Bytes a second inside windows; 0: not measured."""
    rate_outside: float = 0.0
    """The same while the rank computes."""
    rate_fence: float = 0.0
    """The same at the fence."""
    held: float = 0.0
    """Seconds for which a snapshot holds the training thread, without waiting for bytes at the fence."""
    short: tuple[tuple[str, float], ...] = ()
    """Seconds that the fence waited for bytes, beyond what was planned, under the rungs tried so far."""
    held_bytes: int = 0
    """What the rank would save if nothing were divided among replicas; 0: nothing is."""
    rung: str = ""
    """That it is on; empty: none yet."""
    device_free: int = 0
    """Bytes of device memory that a stage at the fence may take; 0: no device."""
    device_rate: float = 0.0
    """Bytes a second within the device."""

    @property
    def inside(self) -> float:
        """Bytes a second to plan with inside windows."""
        return self.rate or self.rate_outside or ASSUMED_RATE

    @property
    def beside(self) -> float:
        """The same outside of windows."""
        return self.rate_outside or self.rate or ASSUMED_RATE

    @property
    def alone(self) -> float:
        """The same at the fence."""
        return self.rate_fence or max(self.rate, self.rate_outside) or ASSUMED_RATE


@dataclass(frozen=True)
class RankPlan:
    """See `wire.messages.CopyPlan`: bytes for each window, for further ones, bytes a second outside of them."""

    windows: tuple[int, ...] = ()
    further: int = NO_LIMIT
    outside: int = 0
    left: int = 0
    """Bytes that windows and overlap are not expected to hold: the fence copies them, or the device takes them."""
    rung: str = "windows"
    timed: tuple[tuple[int, int, int], ...] = ()
    """Clock-anchored windows: begin and end in ns after the boundary, and bytes."""
    why: str = ""


def _whole(value: float) -> int:
    """As a message takes it: at most NO_LIMIT; 0 for what is below 0 or no number."""
    return int(min(value, NO_LIMIT)) if value > 0 else 0


def window_bytes(seconds: float, rate: float, spend: float) -> int:
    """Bytes that a window of so many seconds holds: whole blocks, the nearest number of them; none where it is over
    before the engine is awake."""
    blocks = _whole(max(0.0, seconds - WAKE) * rate * spend / BLOCK + 0.5)
    return BLOCK * min(blocks, NO_LIMIT // BLOCK)


def sure_bytes(facts: RankFacts, spend: float) -> int:
    """Bytes that the windows of a step hold nine times in ten."""
    return _whole(low(facts.usable) * facts.inside * spend)


def expected_left(facts: RankFacts, spend: float, carried: float = 0.0) -> float:
    """Bytes that the windows of the newest steps would not have held, on average, where `carried` are copied besides.
    """
    if not facts.usable:
        return max(0.0, facts.bytes - carried)
    rate = facts.inside * spend
    return sum(max(0.0, facts.bytes - carried - one * rate) for one in facts.usable) / len(facts.usable)


def spend_needed(facts: RankFacts) -> float:
    """The part of the windows to be granted, at most `facts.spend`: a quarter more than would surely do, in twentieths,
    so that small changes change no plan."""
    sure = sure_bytes(facts, 1.0)
    needed = RESERVE * facts.bytes / sure if sure else 1.0
    return min(facts.spend, max(0.4, ceil(needed * 20 - 1e-9) / 20))


def copy_plan(facts: RankFacts, spend: float, rung: str = "windows", outside: int = 0, left: int = 0) -> RankPlan:
    """The plan that grants `spend` (0 to 1) of each window, and of every further one as much as of the usual."""
    granted = tuple(window_bytes(seconds, facts.inside, spend) for seconds in facts.windows)
    usual = sorted(granted)[len(granted) // 2] if granted else facts.bytes
    return RankPlan(granted, _whole(max(BLOCK, usual)), _whole(outside), _whole(left), rung)


def pace_for(left: float, facts: RankFacts) -> int:
    """Bytes a second at which `left` bytes are over, outside of windows, before the step is: slower hurts less, faster
    leaves nothing for the fence. At most what was measured; whole MiB, so that small changes change no plan."""
    computing = max(facts.step - low(facts.usable), facts.step / 10)
    if computing <= 0:
        return _whole(facts.beside)
    pace = min(left / computing * facts.hurry, facts.beside, NO_LIMIT) / _MIB
    return _MIB * min(max(1, ceil(pace) if pace > 0 else 0), NO_LIMIT // _MIB)


def timed_plan(
    gaps: Sequence[tuple[float, float]], nbytes: int, rate: float, spend: float
) -> tuple[tuple[int, int, int], ...]:
    """Clock-anchored windows from gaps (begin and end, seconds after the boundary): the middle of each, since a clock
    does not know when a gap really begins; as many bytes as it holds, none beyond `nbytes` in all."""
    found = []
    for begin, end in gaps:
        if nbytes <= 0:
            break
        margin = (end - begin) * (1 - spend) / 2
        granted = min(nbytes, window_bytes(end - begin, rate, spend))
        if granted:
            found.append((_whole((begin + margin) * 1e9), _whole((end - margin) * 1e9), granted))
            nbytes -= granted
    return tuple(found)
