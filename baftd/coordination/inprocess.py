"""The coordinator of one node: the daemon's own state machine, kept in its state directory. No server.

    <state_dir>/<job>/coordinator.json     who coordinates this job, and which life of the coordinator this is
    <state_dir>/<job>/history              epochs, lineage, quarantine, cadence, durable steps (a log of records)

What is not in the history (which steps are committed in memory) is rebuilt after a restart from the node's report of
what it holds: every start is a new *store*, and a node that sees one reports everything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from baftd.checkpoint.commit import CoordinatorInstruction, JobCoordinator, Joined, NotJoined, Policy, WriteManifest
from baftd.checkpoint.facts import (
    Answer,
    CadenceProposal,
    Inventory,
    JobView,
    Ready,
    Record,
    Report,
    RestoredRank,
    Skipped,
    needs_fsync,
    next_incarnation,
)
from baftd.checkpoint.history import BadSource, History
from baftd.checkpoint.identity import CheckpointId, Token, check_job_name
from baftd.checkpoint.recovery import RestorePlan
from baftd.coordination.files import RecordLog, StateFiles
from baftd.coordination.interface import Listener
from baftd.errors import BaftError, FormatError, JobNameError, TryAgain, UsageError
from baftd.telemetry import get_logger

__all__ = ["InProcessCoordinator"]

_KIND = "in-process"
_VERSION = 1

T = TypeVar("T")


@dataclass
class _Job:
    core: JobCoordinator
    log: RecordLog | None
    """None: nothing was ever stored of this job."""
    store: str
    unsaved: list[Record] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    holder: str = ""
    lease_ends: float = 0.0


class InProcessCoordinator:
    """`Coordinator` for the ranks of one node. All methods belong to one event loop."""

    def __init__(
        self,
        state_dir: Path,
        *,
        policy: Policy,
        files: StateFiles,
        random_bits: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """`random_bits` gives 64 random bits, `clock` monotonic seconds."""
        self._state_dir = state_dir
        self._policy = policy
        self._files = files
        self._random_bits = random_bits
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._opening = asyncio.Lock()
        self._node = ""
        self._incarnation = ""
        self._listener: Listener = lambda job, instruction: None
        self._log = get_logger("coordination")

    @property
    def name(self) -> str:
        """ "in-process"."""
        return _KIND

    @property
    def several_nodes(self) -> bool:
        """False: this coordinator sees one node."""
        return False

    async def start(self, node: str, incarnation: str, listener: Listener) -> None:
        """Remember who asks. Raises `UsageError` when another coordinator owns a job of this state directory."""
        self._node, self._incarnation, self._listener = node, incarnation, listener
        for job in await self.jobs():
            self._check_owner(job)

    async def close(self) -> None:
        """Close all logs."""
        for job in self._jobs.values():
            async with job.lock:
                if job.log is not None:
                    job.log.close()
        self._jobs.clear()

    async def jobs(self) -> Sequence[str]:
        """Jobs that have a history here."""
        # A name that was only asked about is no job: what was mistyped once would count as known from then on.
        found = {name for name, job in self._jobs.items() if job.log is not None or job.unsaved}
        for name in await asyncio.to_thread(self._files.directories, self._state_dir):
            with contextlib.suppress(JobNameError):
                found.add(check_job_name(name))
        return sorted(found)

    async def history(self, job: str) -> History:
        """The live history: read it, do not keep it."""
        return (await self._job(job)).core.history

    async def view(self, job: str) -> JobView:
        """The view in force."""
        return (await self._job(job)).core.view

    async def join(self, job: str, inventory: Inventory | None) -> Joined:
        """See `Coordinator.join`."""
        announced = await self._do(job, lambda core: core.join(self._node, self._incarnation, inventory, self._clock()))
        return _one(announced, Joined)

    # ------------------------------------------------------------------ every step

    async def report(self, job: str, report: Report) -> Answer:
        """See `Coordinator.report`."""
        return _one(await self._do(job, lambda core: core.report(report, self._clock())), Answer)

    async def skip(self, job: str, skipped: Skipped) -> Answer:
        """See `Coordinator.skip`."""
        return _one(await self._do(job, lambda core: core.skip(skipped, self._clock())), Answer)

    async def tick(self) -> float | None:
        """See `Coordinator.tick`."""
        for name, job in list(self._jobs.items()):
            due = job.core.next_tick(self._clock())
            if due is not None and due <= 0:
                await self._do(name, lambda core: core.tick(self._clock()))
        waits = [job.core.next_tick(self._clock()) for job in self._jobs.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    # ------------------------------------------------------------------ cadence

    async def propose(self, job: str, token: Token, proposal: CadenceProposal) -> JobView:
        """See `Coordinator.propose`."""
        announced = await self._do(job, lambda core: core.propose(token, self._incarnation, proposal))
        if any(isinstance(news, NotJoined) for news in announced):
            raise TryAgain(f"job {job}: node {proposal.node} has not joined, so it cannot propose an interval.")
        return await self.view(job)

    # ------------------------------------------------------------------ durable tier

    async def want_durable(self, job: str, token: Token, step: int) -> None:
        """See `Coordinator.want_durable`."""
        await self._do(job, lambda core: core.want_durable(token, step, self._clock()))

    async def manifest_written(self, job: str, checkpoint: CheckpointId) -> None:
        """See `Coordinator.manifest_written`."""
        await self._do(job, lambda core: core.manifest_written(checkpoint, self._clock()))

    async def durable_failed(self, job: str, token: Token, step: int, rank: int, reason: str) -> None:
        """See `Coordinator.durable_failed`."""
        await self._do(job, lambda core: core.durable_failed(token, step, rank, reason, self._clock()))

    async def finish(self, job: str, token: Token, rank: int, step: int) -> None:
        """See `Coordinator.finish`."""
        await self._do(job, lambda core: core.finish(token, rank, step, self._clock()))

    # ------------------------------------------------------------------ restore

    async def plan(
        self,
        job: str,
        inventories: Sequence[Inventory],
        *,
        world: int | None = None,
        step: int | None = None,
        at_most: int | None = None,
        fresh: bool = False,
        reshard: bool = False,
        prefer: Mapping[int, str] | None = None,
    ) -> RestorePlan:
        """See `Coordinator.plan`."""
        core = (await self._job(job)).core
        return core.plan(
            inventories, world=world, step=step, at_most=at_most, fresh=fresh, reshard=reshard, prefer=prefer
        )

    async def open_epoch(self, job: str, incarnation: str, plan: RestorePlan, *, world: int, expected: int) -> JobView:
        """See `Coordinator.open_epoch`."""
        await self._do(
            job,
            lambda core: core.open_epoch(incarnation, plan, world=world, expected=expected, now=self._clock()),
        )
        return await self.view(job)

    async def source_failed(self, job: str, token: Token, bad: BadSource) -> None:
        """See `Coordinator.source_failed`."""
        await self._do(job, lambda core: core.source_failed(token, bad))

    async def reparent(self, job: str, token: Token, plan: RestorePlan) -> JobView:
        """See `Coordinator.reparent`."""
        await self._do(job, lambda core: core.reparent(token, plan))
        return await self.view(job)

    async def restored(self, job: str, restored: RestoredRank) -> Answer:
        """See `Coordinator.restored`."""
        return _one(await self._do(job, lambda core: core.restored(restored, self._clock())), Answer)

    async def quarantine(self, job: str, checkpoint: CheckpointId, reason: str) -> None:
        """See `Coordinator.quarantine`."""
        await self._do(job, lambda core: core.quarantine(checkpoint, reason))

    async def lease(self, job: str, holder: str, seconds: float) -> None:
        """See `Coordinator.lease`."""
        held = await self._job(job)
        now = self._clock()
        if held.holder not in ("", holder) and now < held.lease_ends:
            raise TryAgain(
                f"job {job}: {held.holder} is changing the restore plan (for {held.lease_ends - now:.0f} s at most)."
            )
        held.holder, held.lease_ends = holder, now + seconds

    async def release(self, job: str, holder: str) -> None:
        """See `Coordinator.release`."""
        held = await self._job(job)
        if held.holder == holder:
            held.holder = ""

    async def forget(self, job: str) -> None:
        """See `Coordinator.forget`."""
        held = await self._job(job)
        async with held.lock:
            if held.log is not None:
                held.log.close()
            self._jobs.pop(job, None)
            await asyncio.to_thread(self._remove, job)

    # ------------------------------------------------------------------ state

    async def _do(
        self, name: str, change: Callable[[JobCoordinator], Ready[CoordinatorInstruction]]
    ) -> tuple[CoordinatorInstruction, ...]:
        """Let the core decide, store what it says must be stored, then announce. One at a time for each job."""
        job = await self._job(name)
        async with job.lock:
            ready = change(job.core)
            job.unsaved += ready.records
            if job.unsaved:
                await self._store(name, job)
        for instruction in ready.announce:
            if isinstance(instruction, Answer | Joined | NotJoined):
                continue
            if isinstance(instruction, WriteManifest) and instruction.node != self._node:
                continue
            self._listener(name, instruction)
        return ready.announce

    async def _store(self, name: str, job: _Job) -> None:
        """Write what is not written yet. What failed is written before anything else is announced: the core has
        moved on, and a decision must not be seen before it is stored."""
        records = tuple(job.unsaved)
        sync = any(needs_fsync(record) for record in records)
        try:
            if job.log is None or job.log.wants_rewrite:
                await asyncio.to_thread(self._write_all, name, job)
            elif sync:
                await asyncio.to_thread(job.log.append, *records, sync=True)
            else:
                job.log.append(*records, sync=False)  # to the page cache: not worth a thread
        except (OSError, BaftError) as error:
            if sync:
                raise
            self._log.warning("history_not_written", job=name, why=str(error))
            return
        job.unsaved.clear()

    def _write_all(self, name: str, job: _Job) -> None:
        if job.log is None:
            directory = self._state_dir / name
            self._files.make_directory(directory)
            self._files.replace(directory / "coordinator.json", self._owner(job.store))
            job.log = self._files.open_log(directory / "history").log
        job.log.rewrite(job.core.to_records())

    async def _job(self, name: str) -> _Job:
        job = self._jobs.get(name)
        if job is None:
            async with self._opening:
                job = self._jobs.get(name)
                if job is None:
                    job = self._jobs[name] = await asyncio.to_thread(self._open, check_job_name(name))
        return job

    def _open(self, name: str) -> _Job:
        directory = self._state_dir / name
        previous = self._check_owner(name)
        store = next_incarnation(previous, self._random_bits())
        if previous is None and not self._files.directories(directory.parent).count(name):
            core = JobCoordinator(name, store=store, policy=self._policy, now=self._clock())
            return _Job(core, None, store)
        opened = self._files.open_log(directory / "history")
        if opened.problem:
            self._log.warning("history_damaged", job=name, why=opened.problem)
        records = self._sane(name, opened.records)
        self._files.replace(directory / "coordinator.json", self._owner(store))
        core = JobCoordinator.replay(name, records, store=store, policy=self._policy, now=self._clock())
        if self._policy.interval_fixed:
            change = core.set_cadence(self._policy.interval)
            if change.records:
                opened.log.append(*change.records, sync=True)
        return _Job(core, opened.log, store)

    def _sane(self, name: str, records: Sequence[Record]) -> list[Record]:
        """Records that the core can read; the others are named in the log and left out."""
        kept: list[Record] = []
        for record in records:
            try:
                JobCoordinator.replay(name, [record], store="", policy=self._policy)
            except (FormatError, UsageError, KeyError, TypeError, ValueError) as error:
                self._log.warning("history_record_dropped", job=name, why=str(error), record=str(record)[:200])
            else:
                kept.append(record)
        return kept

    def _owner(self, store: str) -> bytes:
        text = {"version": _VERSION, "coordinator": _KIND, "node": self._node, "store": store}
        return (json.dumps(text, indent=1) + "\n").encode()

    def _check_owner(self, job: str) -> str | None:
        """The last store of a job that is ours; None where nothing is known. Raises `UsageError` for another's."""
        path = self._state_dir / job / "coordinator.json"
        data = self._files.read(path)
        if data is None:
            return None
        try:
            found = json.loads(data)
            kind, node, store = str(found["coordinator"]), str(found["node"]), str(found["store"])
            next_incarnation(store, 0)
        except (ValueError, KeyError, TypeError) as error:
            self._log.warning("coordinator_file_damaged", job=job, path=path, why=repr(error))
            return None
        if kind != _KIND:
            raise UsageError(
                f"job {job}: {path} says that {kind} coordinates it, this daemon coordinates in-process.",
                hint="Start the daemon with that coordinator, or use another state_dir.",
            )
        if node != self._node:
            raise UsageError(
                f"job {job}: {path} belongs to node {node!r}, this is node {self._node!r}.",
                hint=f"Set node = {node!r} if it was renamed; two nodes cannot share one state_dir.",
            )
        return store

    def _remove(self, job: str) -> None:
        directory = self._state_dir / job
        for name in ("history", "history.new", "history.damaged", "coordinator.json", "manifest"):
            self._files.remove(directory / name)
        self._files.remove_directory(directory)


def _one(announced: tuple[CoordinatorInstruction, ...], kind: type[T]) -> T:
    return next(instruction for instruction in announced if isinstance(instruction, kind))
