"""What is known of a rank's steps: running medians of the newest ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from baftd.pipeline.operations import StageTimes

__all__ = ["GapSum", "Profile"]


class GapSum(NamedTuple):
    """Gaps of one kind, per step: how many, their seconds, and the bytes copied in them per snapshot."""

    count: float
    seconds: float
    bytes: int


class Profile:
    """Medians over the newest steps of a rank. Times are seconds, rates bytes a second."""

    rank: int

    def gaps(self) -> Mapping[str, GapSum]:
        """Measured idle time by the kind of gap (`GapKind` values; "tail" for the wait before the fence)."""
        raise NotImplementedError

    def stage_times(self) -> Mapping[int, StageTimes]:
        """Median seconds of the operations of each stage that the rank holds."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Steps that the medians stand on."""
        raise NotImplementedError
