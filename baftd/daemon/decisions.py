"""What the coordinator has decided, carried to whom it concerns on this node."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baftd.checkpoint.commit import (
    Committed,
    CoordinatorInstruction,
    Dead,
    Finished,
    Publish,
    Quarantined,
    Retain,
    Withdrawn,
    WriteManifest,
)
from baftd.daemon.context import Context
from baftd.daemon.durable import DurableWriter
from baftd.daemon.job import JobOnNode
from baftd.daemon.waiting import Waiters
from baftd.wire.messages import Saved

__all__ = ["Decisions"]


class Decisions:
    """The coordinator's listener. `release` frees a finished job's memory; it is called before the ranks are told."""

    def __init__(
        self,
        context: Context,
        jobs: Mapping[str, JobOnNode],
        waiters: Waiters,
        durable: DurableWriter | None,
        release: Callable[[JobOnNode], None],
    ) -> None:
        self._context = context
        self._jobs = jobs
        self._waiters = waiters
        self._durable = durable
        self._release = release

    def __call__(self, name: str, news: CoordinatorInstruction) -> None:
        """Take one decision. Never raises: a job of which this node has nothing is passed over."""
        job = self._jobs.get(name)
        if job is None or job.closed:
            return
        try:
            self._take(job, news)
        except Exception:
            self._context.counters.add("internal_errors")
            job.log.exception("decision_not_taken", decision=type(news).__name__)

    def _take(self, job: JobOnNode, news: CoordinatorInstruction) -> None:
        if isinstance(news, Publish):
            job.apply(job.core.take_view(news.view))
            job.pacing.look()
            self._waiters.settle(job, self._path(job))
        elif isinstance(news, Committed):
            self._committed(job, news)
        elif isinstance(news, Dead):
            job.counters.add("dead")
            job.log.info("dead", rank=news.rank, step=news.checkpoint.step, why=news.reason)
            self._waiters.dead(job, news.checkpoint, f"rank {news.rank}: {news.reason}")
        elif isinstance(news, Quarantined):
            job.counters.add("quarantined")
            where = [f"rank {rank} on node {node}" if node else f"rank {rank}, durable" for rank, node in news.ranks]
            step, epoch = news.checkpoint.step, news.checkpoint.epoch
            job.log.error("quarantined", step=step, epoch=epoch, ranks=where, why=news.reason)
        elif isinstance(news, Withdrawn):
            job.log.warning("withdrawn", step=news.checkpoint.step, ranks=list(news.ranks), why=news.reason)
        elif isinstance(news, WriteManifest) and self._durable is not None:
            self._durable.write_manifest(job, news)
        elif isinstance(news, Retain) and self._durable is not None:
            self._durable.retain(job, news)
        elif isinstance(news, Finished):
            self._finished(job, news)

    def _committed(self, job: JobOnNode, news: Committed) -> None:
        if news.tier == "memory":
            job.counters.add("snapshots")
            begun = job.training.committed(news.checkpoint.step)
            if begun is not None:
                job.spans.add("commit", begun, step=news.checkpoint.step)
            job.log.debug("committed", step=news.checkpoint.step, epoch=news.checkpoint.epoch, tier=news.tier)
        elif self._durable is not None:
            job.pacing.failures.durable(news.checkpoint.step, self._context.clock())
            self._durable.committed(job, news)

    def _path(self, job: JobOnNode) -> str:
        view = job.view
        if self._durable is None or view is None or view.durable is None:
            return ""
        return self._durable.path(job, view.durable)

    def _finished(self, job: JobOnNode, news: Finished) -> None:
        step = news.checkpoint.step if news.checkpoint is not None else 0
        if news.tier == "durable":
            path = self._durable.path(job, news.checkpoint) if self._durable and news.checkpoint else ""
            job.log.info("finished", step=step, tier="durable", path=path)
            self._release(job)
            self._waiters.finished(job, Saved(step=step, tier="durable", path=path))
            return
        if self._durable is None:
            note = "no durable tier is on (set durable_dir)"
        elif failure := self._durable.last_failure.get(job.name, ""):
            note = f"the step could not be made durable ({failure})"
        else:
            note = f"nothing was trained since step {step} was restored from memory, so it was not made durable"
        note += f"; the slots stay in {job.arena.path} until `baftd gc --job {job.name}`, or for memory_retention."
        job.log.warning("finished", step=step, tier="memory", note=note)
        self._waiters.finished(job, Saved(step=step, tier="memory", note=note))
