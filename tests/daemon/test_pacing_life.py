"""The planning loop with real ranks: windows that are slept through, copies that are made, kills, restarts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from baftd.pipeline.events import EventKind, unpack_events
from baftd.pipeline.operations import StageTimes, Times
from baftd.pipeline.schedules import build
from baftd.pipeline.simulate import simulate
from baftd.wire.messages import BubblesReply, BubblesRequest, JobStatus, TraceReply, TraceRequest
from tests.support.daemon import Daemon, RunDirs, look_for, wait_until
from tests.support.numpy_trainer import TrainerProcess

A = "a" * 32
AUTO = {"interval": "auto", "overhead_probe": "off"}


def job_of(daemon: Daemon) -> JobStatus:
    (job,) = daemon.status().jobs
    return job


def trained_past(daemon: Daemon, step: int) -> bool:
    """Whether the running start has told of steps, and has committed one of its own."""
    job = job_of(daemon)
    return job.pacing is not None and job.committed.get("memory", 0) > step


def stages(ranks: int, micro: int, forward: float, backward: float) -> list[dict[str, Any]]:
    """What each rank of a 1F1B pipeline does in a step, by the clock: seconds after its begin."""
    schedule = build("Schedule1F1B", ranks, micro)
    line = simulate(schedule, Times.uniform(ranks, StageTimes(forward=forward, backward=backward)))
    return [
        {
            "said": {
                "name": schedule.name, "ranks": ranks, "place": rank, "stages": ranks, "own": [rank], "micro": micro,
                "order": [[int(op.kind), op.stage, op.micro] for op in schedule.order[rank]],
            },
            "operations": [
                [int(timed.operation.kind), timed.operation.stage, timed.operation.micro, timed.begin, timed.end]
                for timed in line.operations[rank]
            ],
            "period": line.period,
        }
        for rank in range(ranks)
    ]  # fmt: skip


@contextmanager
def pipeline(dirs: RunDirs, told: list[dict[str, Any]], **options: Any) -> Iterator[list[TrainerProcess]]:
    """A process for each stage."""
    meeting = dirs.shm / "meeting"
    meeting.write_bytes(bytes(8 * len(told)))
    told = [{**stage, "meet": str(meeting)} for stage in told]
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                TrainerProcess(
                    dirs, rank=rank, world=len(told), incarnation=A, stage=stage, settle=False, job="pipe", **options
                )
            )
            for rank, stage in enumerate(told)
        ]


def test_durable_steps_are_found_where_not_every_step_is_committed(run_dirs: RunDirs) -> None:
    """Every 10 steps durable, every third in memory: the next committed one is taken, not none, and the last one."""
    with (
        Daemon(run_dirs, interval="3 steps", durable_dir=str(run_dirs.durable), durable_every="10 steps",
               durable_keep="100"),
        TrainerProcess(run_dirs, steps=55, durable_every=10) as trainer,  # a slow disk holds it up: no ten is left out
    ):  # fmt: skip
        assert trainer.wait(60) == 0, trainer.events
        found = sorted(
            int(match[1])
            for path in look_for(run_dirs.durable, "MANIFEST")
            if (match := re.search(r"step-(\d+)\.e1", str(path)))
        )
        assert found == [12, 21, 30, 42, 51, 55]


def test_four_ranks_of_a_pipeline_copy_in_their_windows_and_the_report_foretells_the_gaps(run_dirs: RunDirs) -> None:
    told = stages(4, 8, forward=0.002, backward=0.004)
    with Daemon(run_dirs, **AUTO) as daemon, pipeline(run_dirs, told, steps=10_000, elements=250_000) as ranks:  # 8 MB
        for rank in ranks:
            rank.wait_for("resumed")
        wait_until(
            lambda: bool(daemon.status().jobs) and job_of(daemon).counters["timings"] > 4 * 60,
            lambda: f"{job_of(daemon)}",
            timeout=60,
        )
        reply = daemon.request(BubblesRequest(job="pipe"))
        assert isinstance(reply, BubblesReply)
        trace = daemon.request(TraceRequest(job="pipe"))
        assert isinstance(trace, TraceReply)
        job = job_of(daemon)
    assert reply.schedule == "Schedule1F1B: 4 ranks, 8 micro-batches"
    assert reply.steps > 5
    by_kind = {(row.rank, row.kind): row for row in reply.rows}
    for rank in range(4):
        assert by_kind[rank, "steady" if rank < 3 else "fill"].stages == [rank]
        idle = sum(row.predicted or 0.0 for row in reply.rows if row.rank == rank)
        assert idle == pytest.approx(3 * 0.006, rel=0.5)  # (p - 1)(tf + tb), of operations as long as they took
    fill = by_kind[3, "fill"]
    assert fill.predicted is not None
    assert fill.measured == pytest.approx(fill.predicted, rel=0.5)
    assert reply.error is not None
    assert reply.error < 0.5
    assert reply.pacing is not None
    assert {one.rank for one in reply.pacing.ranks} == {0, 1, 2, 3}
    assert all(one.rung in ("windows", "overlap") for one in reply.pacing.ranks), reply.pacing
    copied = {where: job.counters[f"bytes_{where}"] for where in ("in_windows", "outside", "at_fence")}
    assert copied["in_windows"] > 0.5 * sum(copied.values()), copied
    assert job.counters["copy_plans"] >= 4
    assert {one.rank for one in trace.steps} == {0, 1, 2, 3}
    assert any(event.kind is EventKind.COPY_INSIDE for one in trace.steps for event in unpack_events(one.events))
    assert any(span.what == "commit" for span in trace.spans)


def test_failures_are_counted_once_each_and_kept_and_give_youngs_and_dalys_interval(run_dirs: RunDirs) -> None:
    durable = {"durable_dir": str(run_dirs.durable), "durable_every": "5 steps"}
    with Daemon(run_dirs, **AUTO, **durable) as daemon:
        with TrainerProcess(run_dirs, steps=10_000, pause=0.01) as trainer:
            wait_until(
                lambda: bool(daemon.status().jobs) and job_of(daemon).counters["durable_written"] > 1,
                lambda: f"{job_of(daemon)}",
            )
            pacing = job_of(daemon).pacing
            assert pacing is not None
            assert (pacing.failures, pacing.young_daly) == (0, None)
            trainer.kill()
        wait_until(lambda: "event=failure" in daemon.log, "the failure")
        with TrainerProcess(run_dirs, steps=10_000, pause=0.01) as trainer:
            first = trainer.wait_for("resumed")["step"]
            wait_until(lambda: trained_past(daemon, first), lambda: f"{job_of(daemon)}")
            pacing = job_of(daemon).pacing
            assert pacing is not None
            assert pacing.failures == 1
            assert pacing.young_daly is not None
            assert 0 < pacing.young_daly < 60
            daemon.kill()  # and its rank goes with it, unseen
            trainer.kill()
        daemon.start()
        with TrainerProcess(run_dirs, steps=10_000, pause=0.01) as trainer:
            first = trainer.wait_for("resumed")["step"]
            wait_until(lambda: trained_past(daemon, first), lambda: f"{job_of(daemon)}")
            pacing = job_of(daemon).pacing
            assert pacing is not None
            assert pacing.failures == 2


def test_state_that_is_too_large_for_its_steps_makes_the_interval_longer(run_dirs: RunDirs) -> None:
    """64 MB in steps of a millisecond: no machine copies that every time for a hundredth of a step."""
    with (
        Daemon(run_dirs, interval="auto", overhead_budget="5 %") as daemon,
        TrainerProcess(run_dirs, steps=100_000, settle=False, elements=2_000_000) as trainer,
    ):
        trainer.wait_for("resumed")

        def longer() -> bool:
            jobs = daemon.status().jobs
            return bool(jobs) and jobs[0].pacing is not None and jobs[0].pacing.interval > 1

        wait_until(longer, lambda: f"{daemon.status().jobs}", timeout=60)
        pacing = job_of(daemon).pacing
        assert pacing is not None
        assert pacing.rung == "interval"
        assert pacing.slowest == 0
        assert "budget of 5 %" in pacing.why
        wait_until(lambda: job_of(daemon).counters["left_out"] > 0, lambda: f"{job_of(daemon)}")
