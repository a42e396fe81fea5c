"""Clock-anchored windows: for steps that are one opaque launch, where nobody can say when a stage waits.

    clock = session.clock_windows
    for step in ...:
        clock.step_begin()        right before the launch
        launch()                  forward, backward and update in one piece; a gate in front of the update calls
                                  clock.gate_fired()
        session.boundary(...)

The plan (`CopyPlan.timed`) says when after the boundary the engine copies how many bytes; the copying thread keeps the
time by itself. Since the update lies within the launch this is right only behind a gate in front of the update that
ends the copy, and only a gate that has been *seen to fire* is believed. Without one everything is copied before the
launch, while training waits, and that is said once.

A launch beside a copy whose gate stays silent costs that snapshot (nobody knows what the update overwrote), and the
gate is not believed again until it has been seen again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from baft_client.source import Outcome, OutcomeKind
from baft_client.windows import Windows
from baftd.telemetry import Logger

if TYPE_CHECKING:
    from baft_client.declared import Layout
    from baft_client.periods import Periods
    from baft_client.snapshotting import Snapshotting

__all__ = ["ClockWindows"]

USUAL = 9
"""Steps over which the usual time from boundary to launch is taken."""


class ClockWindows:
    """One rank's clock-anchored windows. Made by the session."""

    def __init__(
        self,
        snapshots: Snapshotting,
        layout: Layout,
        windows: Windows,
        periods: Periods,
        *,
        log: Logger,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`now` gives ns of CLOCK_MONOTONIC."""
        self.believed = False
        """The gate has been seen to fire, in the last launch too."""
        self._snapshots = snapshots
        self._layout = layout
        self._windows = windows
        self._periods = periods
        self._log = log
        self._now = now
        self._launched = False
        """A launch is under way whose gate has not fired yet,"""
        self._beside = False
        """and a copy with it."""
        self._delays: deque[int] = deque(maxlen=USUAL)
        self._said = False

    def step_begin(self) -> bool:
        """The step is launched next. True: the copy goes on beside it, in the plan's windows. False: there is nothing
        to copy, or no gate is known to fire, and the copy has been finished here."""
        delay = self._now() - self._periods.begun
        self._delays.append(delay)
        self._launched = True
        snapshots = self._snapshots
        if snapshots.snapshot is None:
            return False
        if not self.believed:
            if not self._said:
                self._said = True
                note = "each snapshot is copied before the launch, while training waits"
                self._log.warning("no_gate", why="no gate in front of the update has been seen to fire", note=note)
            updates = snapshots.snapshot.updates
            snapshots.guard(snapshots.snapshot.step, lambda: snapshots.seal(updates))
            return False
        self._beside = True
        # Planned from the boundary on, for a step that is launched as soon after it as usual.
        start = self._periods.begun + delay - int(median(self._delays))
        snapshots.guard(self._periods.step, lambda: self._set(start))
        return snapshots.snapshot is not None

    def _set(self, start: int) -> Outcome:
        plan = self._snapshots.plan
        if plan is not None and plan.timed:
            spans = [(start + begin, start + end, budget) for begin, end, budget in plan.timed]
            self._layout.timed(spans)
            self._windows.timed(spans)
        return Outcome(OutcomeKind.NOTHING, self._periods.step)

    def gate_fired(self, updates: int | None = None) -> Outcome:
        """Called by the gate in front of the update, in whatever thread it runs while the training thread waits for the
        launch, before the first byte changes. Ends the copy as `Session.fence` does, and shows that the gate works.
        Raises nothing."""
        if self._launched:
            self.believed = True
        self._launched = self._beside = False
        snapshots = self._snapshots
        return snapshots.guard(self._periods.step, lambda: snapshots.fence(updates))

    def missed(self) -> bool:
        """Asked by the session at fence and boundary: whether a launch ran beside the copy in progress and its gate
        stayed silent. The gate is then believed no more."""
        beside, silent = self._beside, self._launched
        self._launched = self._beside = False
        if not silent:
            return False
        if self.believed:
            self.believed = self._said = False
        return beside
