"""Clock-anchored windows: for steps that are one opaque launch, where nobody can say when a stage waits.

    clock = session.clock_windows
    for step in ...:
        clock.step_begin()        right before the launch
        launch()                  forward, backward and update in one piece; a gate before the update calls
                                  clock.gate_fired()
        session.boundary(...)

The plan (`CopyPlan.timed`) says when after the boundary the engine copies how many bytes; the copying thread itself
keeps the time. Since the update lies within the launch this is right only behind a gate in front of the update that
stops the copy, and only a gate that has been *seen to fire* is believed. Without one everything is copied before the
launch, while training waits, and that is said once.
"""

from __future__ import annotations

from baft_client.source import Outcome

__all__ = ["ClockWindows"]


class ClockWindows:
    """One rank's clock-anchored windows. Made by the session."""

    def step_begin(self) -> bool:
        """The step is launched next. True: the copy goes on beside it, in the plan's windows. False: there is nothing
        to copy, or no gate is known to fire, and the copy has been finished here."""
        raise NotImplementedError

    def gate_fired(self, updates: int | None = None) -> Outcome:
        """Called by the gate in front of the update, in whatever thread it runs, before the first byte changes: ends
        the copy as `Session.fence` does, and shows that the gate works."""
        raise NotImplementedError
