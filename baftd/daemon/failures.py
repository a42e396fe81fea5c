"""How often a job ends without finishing, and how long it trains: what Young's and Daly's interval stands on.

A failure is an epoch whose processes ended without finishing the job: one of them died, or a newer start took over from
one that had begun to train. It counts once, however many ranks die, and is kept in the node's manifest, as is the time
trained (that one is written with the next change of the manifest: a killed daemon loses some of it).
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

from baftd.checkpoint.facts import JobView
from baftd.errors import BaftError
from baftd.pipeline.interval import daly

if TYPE_CHECKING:
    from baftd.daemon.job import JobOnNode

__all__ = ["Failures"]

KEPT_WRITES = 9
"""Durable writes whose median is the cost of one."""


class Failures:
    """Of one job on this node. Belongs to the event loop. Times are seconds."""

    def __init__(self, job: JobOnNode) -> None:
        self._job = job
        self._seen: JobView | None = None
        self._trains = False
        """Ranks of the running epoch have passed steps here."""
        self._writing: dict[int, float] = {}
        self._writes: deque[float] = deque(maxlen=KEPT_WRITES)

    @property
    def count(self) -> int:
        """Epochs that failed."""
        manifest = self._job.manifest
        return manifest.failures if manifest is not None else 0

    @property
    def between(self) -> float | None:
        """Mean time trained between failures; None: there was none, or nothing was trained."""
        manifest = self._job.manifest
        if manifest is None or not manifest.failures or manifest.trained <= 0:
            return None
        return manifest.trained / manifest.failures

    @property
    def write_seconds(self) -> float | None:
        """What it takes to make a step durable, from the decision to the manifest; None: not seen yet."""
        return statistics.median(self._writes) if self._writes else None

    def young_daly(self) -> float | None:
        """Seconds between durable checkpoints that lose least by the failures seen (`pipeline.interval.daly`)."""
        between, write = self.between, self.write_seconds
        return None if between is None or not write else daly(write, between)

    # ------------------------------------------------------------------ events

    def trained(self, seconds: float) -> None:
        """The job has gone on for so long."""
        self._trains = True
        if self._job.manifest is not None:
            self._job.manifest.note_trained(seconds)

    def died(self, epoch: int) -> None:
        """A process of the epoch is gone without having finished or left."""
        if epoch == self._job.core.history.epoch:
            self._fail(epoch, "a process of it ended")

    def viewed(self, view: JobView, now: float) -> None:
        """The coordinator has published a view."""
        before, self._seen = self._seen, view
        for step in view.persist:
            self._writing.setdefault(step, now)
        for step in [step for step in self._writing if step not in view.persist]:
            if view.durable is None or view.durable.step != step:
                del self._writing[step]  # given up
        if before is None or before.token is None or before.token == view.token:
            return
        if not before.finished and (before.begun or self._trains):
            self._fail(before.token.epoch, "a newer start took over")
        self._trains = False
        self._writing.clear()

    def durable(self, step: int, now: float) -> None:
        """The step is durable."""
        began = self._writing.pop(step, None)
        if began is not None:
            self._writes.append(now - began)

    def _fail(self, epoch: int, why: str) -> None:
        job = self._job
        if job.manifest is None:
            return  # nothing of the job was ever written: it has not trained
        try:
            if job.manifest.fail(epoch):
                job.log.info("failure", epoch=epoch, why=why, failures=job.manifest.failures)
        except (BaftError, OSError) as error:
            job.log.warning("failure_not_written", epoch=epoch, why=str(error))
