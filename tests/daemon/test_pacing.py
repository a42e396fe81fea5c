"""The planning loop, message by message: plans, intervals, bounds on what ranks say, and what status tells of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from baftd.errors import FormatError, ProtocolError
from baftd.pipeline.events import EVENT_BYTES
from baftd.wire.messages import (
    BubblesReply,
    BubblesRequest,
    JobStatus,
    PacingStatus,
    Ping,
    Pong,
    Timings,
    TraceReply,
    TraceRequest,
)
from tests.support.daemon import Daemon, RunDirs, wait_until
from tests.support.paced_rank import Machine, PacedRank
from tests.support.wire_rank import WireRank, together

A, B = "a" * 32, "b" * 32
MIB = 1 << 20
SLOW = Machine(busy=10.0, windows=(1.0, 1.0), inside=4e5, fence=2e5)
"""8 MiB, 21 ms of copying, in steps of 22 ms, of which 2 are windows."""
ROOMY = Machine(busy=5.0, windows=(6.0, 6.0), inside=16e5, fence=2e5)
"""Steps as long, whose windows hold 8 MiB twice."""
AUTO = {"interval": "auto", "overhead_budget": "1 %", "overhead_probe": "off"}


@contextmanager
def paced(dirs: RunDirs, world: int, incarnation: str = A, **how: object) -> Iterator[list[PacedRank]]:
    """All ranks of a start, loaded and declared. how: `machine`, `nbytes`, `job`."""
    ranks = [PacedRank(dirs, rank, world, incarnation, **how) for rank in range(world)]
    try:
        for rank in ranks:
            rank.hello()
        together(ranks, lambda rank: rank.resume(takeover=True))
        together(ranks, WireRank.restored)
        together(ranks, lambda rank: rank.lay_out())
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def train(ranks: Sequence[PacedRank], first: int, last: int, pause: float = 0.002) -> None:
    """Tell of steps, some hundreds a second: the daemon decides by its own clock."""
    for step in range(first, last):
        for rank in ranks:
            rank.listen(pause / len(ranks))
            rank.tell(step)


def until(
    ranks: Sequence[PacedRank], first: int, ready: Callable[[], bool], what: Callable[[], str], most: int = 10_000
) -> int:
    """Train until `ready`, for half a minute at most; returns the next step."""
    deadline = time.monotonic() + 30
    for step in range(first, first + most):
        train(ranks, step, step + 1)
        if step % 10 == 0 and ready():
            return step + 1
        if time.monotonic() > deadline:
            break
    raise AssertionError(f"not at step {step}: {what()}")


def settled(daemon: Daemon, ranks: Sequence[PacedRank]) -> int:
    """Train until a longer interval is in force, as it was published last, and holds the budget; returns the next
    step."""
    newest: list[int] = []

    def stands() -> bool:
        newest.append(ranks[0].cadences[-1].every)
        pacing = job_of(daemon).pacing
        if pacing is None or pacing.expected > pacing.budget:
            return False
        return 1 < pacing.interval == newest[-1] and newest[-8:] == newest[-1:] * 8

    return until(ranks, 1, stands, lambda: f"{job_of(daemon)}")


def job_of(daemon: Daemon, name: str = "") -> JobStatus:
    """The only job, or the one of that name."""
    (job,) = (job for job in daemon.status().jobs if name in ("", job.job))
    return job


def pacing_of(daemon: Daemon) -> PacingStatus:
    found = job_of(daemon).pacing
    assert found is not None
    return found


def test_windows_that_hold_a_snapshot_get_it_and_status_says_so(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 2) as ranks:
        assert job_of(daemon).pacing is None
        step = until(ranks, 1, lambda: all(r.copy_plan for r in ranks), lambda: f"plans: {job_of(daemon)}")
        train(ranks, step, step + 60)
        # What is asked on another connection may be answered before the last of what ranks tell is read.
        wait_until(lambda: job_of(daemon).counters["timings"] == 2 * (step + 59), lambda: f"all told: {job_of(daemon)}")
        for rank in ranks:
            plan = rank.copy_plan
            assert plan is not None
            assert sum(plan.windows) >= rank.nbytes, plan
            assert plan.outside == 0
        job = job_of(daemon)
        assert job.pacing is not None
        assert (job.pacing.rung, job.pacing.interval) == ("windows", 1)
        assert job.pacing.step_seconds == pytest.approx(0.048, rel=0.02)
        assert [(rank.rank, rank.at_fence) for rank in job.pacing.ranks] == [(0, 0), (1, 0)]
        assert all(rank.bytes == rank.in_windows == 8 * MIB for rank in job.pacing.ranks)
        assert all(rank.window_seconds == pytest.approx(0.008, rel=0.05) for rank in job.pacing.ranks)
        assert job.counters["bytes_in_windows"] > 100 * 8 * MIB
        assert job.counters["left_out"] == job.counters["probes"] == 0


def test_plans_are_made_anew_when_windows_have_drifted(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 1) as ranks:
        (rank,) = ranks
        step = until(ranks, 1, lambda: rank.copy_plan is not None, lambda: "no plan")
        train(ranks, step, step + 150)
        before = rank.copy_plan
        assert before is not None
        rank.machine = Machine(windows=(1.0, 9.0))
        step = until(
            ranks,
            step + 150,
            lambda: rank.copy_plan is not None and rank.copy_plan.windows[:1] < before.windows[:1],
            lambda: f"{rank.plans[-3:]} of {pacing_of(daemon)}",
        )
        assert rank.copy_plan is not None
        assert rank.copy_plan.generation > before.generation


def test_a_rank_that_breaks_the_budget_makes_the_interval_longer_and_is_named(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 2, machine=ROOMY) as ranks:
        ranks[1].machine = SLOW
        step = settled(daemon, ranks)
        cadence = ranks[1].cadences[-1]
        assert ranks[0].cadences[-1] == cadence
        train(ranks, step, step + 2 * cadence.every)
        job = job_of(daemon)
        assert job.pacing is not None
        assert (job.pacing.slowest, job.pacing.slowest_node) == (1, "node-a")
        assert "Rank 1" in job.pacing.why
        assert "budget" in job.pacing.why
        assert job.pacing.expected <= job.pacing.budget
        assert job.counters["intervals_lengthened"] >= 1
        assert job.counters["left_out"] > 0
        assert "event=interval job=gpt every=" in daemon.log


def test_an_interval_in_seconds_becomes_steps_of_the_measured_length(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **{**AUTO, "interval": "0.5 s"}) as daemon, paced(run_dirs, 1) as ranks:
        until(ranks, 1, lambda: ranks[0].cadences[-1].every > 1, lambda: f"{job_of(daemon)}")
        assert ranks[0].cadences[-1].every == 10  # of 48 ms


def test_probes_are_counted_and_tell_what_snapshots_cost(run_dirs: RunDirs) -> None:
    """Copies beside computation make these steps 0.4 % longer: within the budget, and seen."""
    machine = Machine(windows=(0.2, 0.2), beside=0.05)
    with (
        Daemon(run_dirs, **{**AUTO, "overhead_probe": "8 steps"}) as daemon,
        paced(run_dirs, 1, machine=machine) as ranks,
    ):

        def measured() -> bool:
            found = job_of(daemon).pacing
            return found is not None and found.overhead is not None and found.pairs >= 10

        until(ranks, 1, measured, lambda: f"{job_of(daemon)}")
        job = job_of(daemon)
        assert job.pacing is not None
        assert job.pacing.overhead is not None
        assert job.pacing.overhead_error is not None
        assert 0 <= job.pacing.overhead < 0.05
        assert job.counters["probes"] + job.counters["left_out"] > 0


def test_what_cannot_be_is_answered_and_counted_and_changes_nothing(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 1) as ranks:
        (rank,) = ranks
        train(ranks, 1, 5)
        refused = 0

        def refuse(word: str, **fields: object) -> None:
            nonlocal refused
            timings = rank.timings(10, copied=True)
            for name, value in fields.items():
                setattr(timings, name, value)
            timings.id = 77
            with pytest.raises((FormatError, ProtocolError), match=word):
                rank.ask(timings, Pong)
            refused += 1

        refuse("no multiple", events=bytes(EVENT_BYTES + 1))
        refuse("was at step", step=1 << 52)
        refuse("a period of 0 ns", period=0)
        refuse("a period of", period=1 << 52)
        refuse("held for", held_ns=1 << 50)
        refuse("held for", fence_ns=1 << 50)
        refuse("bytes copied of a snapshot", in_windows=1 << 40)
        refuse("generation", plan=1 << 52)
        assert job_of(daemon).counters["timings_refused"] == refused
        refuse("at_fence", at_fence=-1)  # not even a message
        train(ranks, 5, 30)
        late = rank.timings(30, copied=True)
        late.held_ns = 10 * late.period  # its boundary laid out anew
        late.id = 78
        rank.say(late)
        assert rank.ask(Ping(), Pong).id
        job = job_of(daemon)
        assert job.counters["timings"] == 30
        assert job.counters["timings_refused"] == refused - 1
        assert daemon.status().counters["internal_errors"] == 0


def test_garbage_in_events_hurts_nobody(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 2) as ranks:
        step = until(ranks, 1, lambda: all(r.copy_plan for r in ranks), lambda: "no plans")
        for number in range(step, step + 200):
            for rank in ranks:
                rank.listen(0.002)
                timings = rank.timings(number, copied=True)
                if rank.rank == 1:
                    timings.events = bytes((number * 37 + at * 11) % 256 for at in range(40 * EVENT_BYTES))
                rank.say(timings)
        assert ranks[0].ask(Ping(), Pong).id
        until(ranks, step + 200, lambda: job_of(daemon).pacing is not None, lambda: "no status", most=50)
        assert daemon.status().counters["internal_errors"] == 0
        reply = daemon.request(TraceRequest(job="gpt"))
        assert isinstance(reply, TraceReply)
        assert {one.rank for one in reply.steps} == {0, 1}
        assert isinstance(daemon.request(BubblesRequest(job="gpt")), BubblesReply)


def test_another_ranks_or_starts_timings_count_for_nothing(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 2) as ranks:
        train(ranks, 1, 5)
        stolen = ranks[1].timings(6, copied=True)
        stolen.id = 5
        with pytest.raises(Exception, match="speaks for rank 1"):
            ranks[0].ask(stolen, Pong)
        with paced(run_dirs, 2, B) as newer:  # nothing was committed: it begins at step 0
            old = ranks[0].timings(7, copied=True)
            old.id = 6
            with pytest.raises(Exception, match="may write nothing"):
                ranks[0].ask(old, Pong)
            train(newer, 1, 4)
            assert job_of(daemon).counters["timings"] == 8 + 6


def test_said_twice_counts_once(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 1) as ranks:
        (rank,) = ranks
        train(ranks, 1, 4)
        again: Timings = rank.timings(2, copied=True)
        rank.say(again)
        train(ranks, 4, 5)
        wait_until(lambda: job_of(daemon).counters["timings"] >= 4, lambda: f"{job_of(daemon)}")
        assert rank.ask(Ping(), Pong).id
        assert job_of(daemon).counters["timings"] == 4


def test_a_daemon_that_was_killed_plans_anew_and_keeps_the_interval(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 1, machine=SLOW) as ranks:
        (rank,) = ranks
        step = settled(daemon, ranks)
        every, plan = rank.cadences[-1].every, rank.copy_plan
        assert plan is not None
        daemon.restart()
        back = PacedRank(run_dirs, 0, 1, A, machine=rank.machine)
        back.token, back.plans, back.at = rank.token, list(rank.plans), rank.at
        back.cadences, back.declared, back.entries = list(rank.cadences), rank.declared, rank.entries
        rank.close()
        ranks[0] = back
        back.hello()
        back.listen(0.2)
        assert back.cadences[-1].every == every
        until(
            ranks,
            step,
            lambda: back.copy_plan is not None and back.copy_plan.generation > plan.generation,
            lambda: f"{back.plans} {job_of(daemon)}",
        )
        pacing = pacing_of(daemon)
        assert pacing.interval > every / 2  # not from the start again
        assert pacing.rung == "interval"
