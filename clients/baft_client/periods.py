"""What the daemon hears of each period: from one boundary of a rank to the next, in one `Timings`.

Everything is put down as it happens and sent at the next boundary, in the same breath as what that boundary says
anyway. A batch is sent once or not at all: plans stand on many of them, and one more or less changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from baft_client.recorder import Recorder
from baft_client.windows import NO_LIMIT, Windows
from baftd.pipeline.events import EventKind, pack_event, raw_events, unpack_events
from baftd.wire.messages import CopyPlan, Timings, WireToken

__all__ = ["Copied", "Periods", "overruns"]

_INSIDE = int(EventKind.COPY_INSIDE)


class Copied(NamedTuple):
    """How the bytes of one snapshot came into the slot."""

    total: int = 0
    in_windows: int = 0
    outside: int = 0
    at_fence: int = 0
    spans: bytes = b""
    """Events of the engine: when it was copying."""

    def numbered(self, timed_from: int) -> Copied:
        """The same with the engine's own numbers of clock-anchored windows (-2, -3 ...) made those of the period."""
        if timed_from < 0:
            return self
        events = unpack_events(self.spans)
        spans = (event._replace(micro=timed_from - 2 - event.micro) if event.micro < -1 else event for event in events)
        return self._replace(spans=b"".join(map(pack_event, spans)))


def overruns(granted: Sequence[int], copied: Copied, plan: CopyPlan | None) -> int:
    """Windows that closed before their share was copied, while there was something to copy.

    Where every window kept its promise and bytes were left for the fence although the plan's windows hold them all, a
    window did not come: that counts as one.

    Args:
        granted: budgets of the period's windows in their order; 0 and NO_LIMIT promise nothing.
        copied: of the same period.
        plan: the one in force.
    """
    inside: dict[int, int] = {}
    before: dict[int, int] = {}  # number of a window -> bytes copied when it had got its last
    sum_ = 0
    for kind, _, window, _, _, amount in raw_events(copied.spans):
        sum_ += amount
        if kind == _INSIDE:
            inside[window] = inside.get(window, 0) + amount
            before[window] = sum_
    found = reached = 0
    for number, budget in enumerate(granted):
        reached = before.get(number, reached)
        if reached >= copied.total:
            break
        if 0 < budget < NO_LIMIT and inside.get(number, 0) < budget:
            found += 1
    if not found and copied.at_fence and plan is not None and sum(plan.windows) >= copied.total > 0:
        return 1
    return found


def _finished(message: Timings, copied: Copied | None, granted: Sequence[int], plan: CopyPlan | None) -> Timings:
    """The message with what was copied in it: made in the I/O thread, while nobody is held up."""
    if copied is not None:
        message.copied = True
        message.events += copied.spans
        message.in_windows, message.outside, message.at_fence = copied.in_windows, copied.outside, copied.at_fence
        message.overruns = overruns(granted, copied, plan)
    return message


class Periods:
    """Collects what a period was, and tells the daemon. Belongs to the thread that trains."""

    def __init__(
        self,
        rank: int,
        recorder: Recorder,
        windows: Windows,
        *,
        tell: Callable[[Callable[[], Timings]], None],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`tell` sends what is made then to the daemon, once; `now` gives ns of CLOCK_MONOTONIC."""
        self.step = -1
        """The boundary that began this period; -1: none has been passed."""
        self.copied: Copied | None = None
        """What was copied of the snapshot of `step`; set before `turn`, where there was one."""
        self.begun = 0
        """When that boundary returned."""
        self.apart = False
        """Something else went on in this period (an evaluation, a declaration): it says nothing of the others."""
        self._rank = rank
        self._recorder = recorder
        self._windows = windows
        self._tell = tell
        self._now = now
        self._plan: CopyPlan | None = None
        self._held = 0
        self._waited = 0
        self._fenced = False

    def fenced(self, began: int, *, left: int, waited: int) -> None:
        """A fence that began at `began` is over: `left` bytes were not copied yet then, and took it `waited` ns."""
        ended = self._now()
        self._held += ended - began
        self._waited += waited
        if left or not self._fenced:
            self._recorder.add(EventKind.FENCE, -1, -1, began, ended, left)
        self._fenced = True

    def turn(
        self,
        step: int,
        began: int,
        granted: Sequence[int],
        plan: CopyPlan | None,
        token: WireToken | None,
        cadence: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """The boundary of `step`, which began at `began`, is about to return: this period ends, the next begins.

        Args:
            step: the boundary. The same as before (a snapshot that is forced after all): the period goes on.
            began: ns.
            granted: budgets of the windows of the period that ends.
            plan: the one in force in the next period.
            token: to tell the daemon with; None: there is nobody to be told.
            cadence: that this rank goes by, as `Timings` has it.
        """
        now = self._now()
        self._recorder.add(EventKind.BOUNDARY, -1, -1, began, now)
        if step == self.step:
            self._held += now - began
            self._plan = plan
            return
        events, lost = self._recorder.take()
        if self.step >= 0 and token is not None:
            message = Timings(
                token=token,
                rank=self._rank,
                step=self.step,
                begun=self.begun,
                period=now - self.begun,
                events=events,
                lost=lost,
                plan=0 if self._plan is None else self._plan.generation,
                held_ns=self._held,
                fence_ns=self._waited,
                apart=self.apart,
                cadence=cadence,
            )
            self._tell(partial(_finished, message, self.copied, granted, self._plan))
        self.step, self.begun, self.copied, self._plan = step, now, None, plan
        self._held, self._waited, self._fenced, self.apart = now - began, 0, False, False
