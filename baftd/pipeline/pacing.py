"""Which window copies how many bytes: the copy plan of one rank. Pure.

A plan gives each window, in the order in which a step opens them, the *most* that may be copied in it: what it holds at
the rate measured, times the part of it that may be spent. The engine copies in every window until nothing is left, so
early windows do the work and late ones stand in reserve for those that turn out shorter. What all windows together do
not hold is `left`: to be copied outside of them at a pace (overlap), or at the fence.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLOCK", "NO_LIMIT", "RankFacts", "RankPlan", "copy_plan", "window_bytes"]

BLOCK = 256 * 1024
"""Bytes: the engine stops at whole blocks only."""
NO_LIMIT = (1 << 53) - 1
"""The budget of a window that has none."""
WAKE = 100e-6
"""Seconds from opening a window until the copying thread has begun, and from closing it until it has stopped."""


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank when its plan is made. Sizes are bytes of one snapshot, times seconds of one step."""

    rank: int
    bytes: int
    step: float = 0.0
    """0: nothing measured yet."""
    windows: tuple[float, ...] = ()
    """Seconds that each window of a step lasts at least (nine times in ten), in their order."""
    rate: float = 0.0
    """Bytes a second inside windows; 0: not known."""
    rate_outside: float = 0.0
    """The same while the rank computes; 0: not known."""
    rate_fence: float = 0.0
    """The same at the fence, where nothing else runs; 0: not known."""
    held: float = 0.0
    """Seconds for which a snapshot holds the training thread, without waiting for bytes at the fence."""
    held_bytes: int = 0
    """What the rank would save if nothing were divided among replicas; 0: nothing is."""
    device_free: int = 0
    """Bytes of device memory that a stage at the fence may take; 0: no device."""
    device_rate: float = 0.0
    """Bytes a second within the device."""


@dataclass(frozen=True)
class RankPlan:
    """See `wire.messages.CopyPlan`: bytes for each window, for further ones, bytes a second outside of them."""

    windows: tuple[int, ...] = ()
    further: int = NO_LIMIT
    outside: int = 0
    left: int = 0
    """Bytes that the windows are not expected to hold."""
    rung: str = "windows"
    generation: int = 0
    why: str = ""


def window_bytes(seconds: float, rate: float, spend: float) -> int:
    """Bytes that a window of so many seconds holds: whole blocks; none where it is over before the thread is awake."""
    raise NotImplementedError


def copy_plan(facts: RankFacts, spend: float) -> RankPlan:
    """The plan that spends `spend` (0 to 1) of each window. `left` is what the windows do not hold."""
    raise NotImplementedError
