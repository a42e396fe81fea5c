"""What status says while a change of the interval is ahead: both intervals, and each with what it costs."""

from __future__ import annotations

import pytest

from baftd.wire.messages import PacingStatus
from tests.daemon.test_pacing import AUTO, SLOW, job_of, paced, train, until
from tests.support.daemon import Daemon, RunDirs


def test_a_change_that_is_ahead_is_said_with_its_step_and_cost(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 1, machine=SLOW) as ranks:
        ahead: list[PacingStatus] = []

        def changing() -> bool:
            found = job_of(daemon).pacing
            if found is not None and found.next_step:
                ahead.append(found)
            return bool(ahead)

        step = until(ranks, 1, changing, lambda: f"{job_of(daemon)}")
        (found,) = ahead
        assert (found.interval, found.fixed) == (1, False)
        assert found.next_interval > 1
        assert found.next_step > step - 10
        assert found.expected == pytest.approx(found.next_expected * found.next_interval)
        assert f"every {found.next_interval} steps" in found.why
        assert found.expected > found.budget


def test_an_interval_that_is_set_has_no_change_ahead(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, **{**AUTO, "interval": "3 steps"}) as daemon, paced(run_dirs, 1, machine=SLOW) as ranks:
        train(ranks, 1, 40)
        until(ranks, 40, lambda: job_of(daemon).pacing is not None, lambda: f"{job_of(daemon)}")
        found = job_of(daemon).pacing
        assert found is not None
        assert (found.interval, found.fixed, found.next_interval, found.next_expected) == (3, True, 0, 0.0)
