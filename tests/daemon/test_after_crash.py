"""What ranks have told outlives them: after a crash it is answered until ranks of a next start declare."""

from __future__ import annotations

import pytest

from baftd.errors import UsageError
from baftd.wire.messages import (
    BubblesReply,
    BubblesRequest,
    LayoutReply,
    LayoutRequest,
    TraceReply,
    TraceRequest,
)
from tests.daemon.test_pacing import AUTO, B, job_of, paced, train
from tests.support.daemon import Daemon, RunDirs, wait_until
from tests.support.paced_rank import PacedRank
from tests.support.wire_rank import WireRank, together


def bubbles(daemon: Daemon) -> BubblesReply:
    reply = daemon.request(BubblesRequest(job="gpt"))
    assert isinstance(reply, BubblesReply)
    return reply


def trace(daemon: Daemon) -> TraceReply:
    reply = daemon.request(TraceRequest(job="gpt"))
    assert isinstance(reply, TraceReply)
    return reply


def layout(daemon: Daemon) -> LayoutReply:
    reply = daemon.request(LayoutRequest(job="gpt"))
    assert isinstance(reply, LayoutReply)
    return reply


def test_the_last_start_is_shown_until_a_next_one_has_declared(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon:
        with paced(run_dirs, 2) as ranks:
            train(ranks, 1, 30)
            wait_until(lambda: job_of(daemon).counters["timings"] == 2 * 29, lambda: f"{job_of(daemon)}")
            wait_until(lambda: bubbles(daemon).pacing is not None, lambda: f"{job_of(daemon)}")
            told, shown, declared = trace(daemon), bubbles(daemon), layout(daemon)
        assert {one.rank for one in told.steps} == {0, 1}
        assert declared.layout
        for incarnation, epoch in ((B, 2), ("c" * 32, 3)):  # the second start fails while it loads, and so does a third
            again = [PacedRank(run_dirs, rank, 2, incarnation) for rank in range(2)]
            try:
                for rank in again:
                    rank.hello()
                together(again, lambda rank: rank.resume(takeover=True))
                together(again, WireRank.restored)
                assert job_of(daemon).epoch == epoch
                assert job_of(daemon).pacing is None, "the running start has told of no step"
                assert (trace(daemon).epoch, trace(daemon).kept, trace(daemon).steps) == (1, told.kept, told.steps)
                after = bubbles(daemon)
                assert (after.epoch, after.rows, after.steps) == (1, shown.rows, shown.steps)
                assert after.pacing is not None
                assert {one.rank for one in after.pacing.ranks} == {0, 1}
                assert (layout(daemon).epoch, layout(daemon).layout) == (1, declared.layout)
                if epoch == 3:
                    again[0].lay_out()
                    assert (trace(daemon).epoch, trace(daemon).steps) == (3, [])
                    assert (bubbles(daemon).epoch, bubbles(daemon).pacing) == (3, None)
                    assert (layout(daemon).epoch, layout(daemon).missing) == (3, [1])
            finally:
                for rank in again:
                    rank.close()
        assert daemon.status().counters["internal_errors"] == 0


def test_where_nothing_was_told_the_sentence_is_true(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon:
        for request in (BubblesRequest(job="gpt"), TraceRequest(job="gpt")):
            with pytest.raises(UsageError, match="job gpt has nothing on node node-a: no rank, and no snapshot"):
                daemon.request(request)
        with paced(run_dirs, 1) as ranks:
            train(ranks, 1, 5)
            wait_until(lambda: job_of(daemon).counters["timings"] == 4, lambda: f"{job_of(daemon)}")
            daemon.restart()
            for request in (BubblesRequest(job="gpt"), TraceRequest(job="gpt")):
                with pytest.raises(UsageError, match=r"has declared anything on node node-a since this daemon started"):
                    daemon.request(request)
