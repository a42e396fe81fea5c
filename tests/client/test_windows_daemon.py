"""Windows with the real daemon: it plans for what it is told, and the plan is carried out."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from baft_client import OutcomeKind, attach_arrays
from baftd.pipeline.events import EventKind
from tests.support.daemon import Daemon, RunDirs, wait_until

NBYTES = 1 << 20


@pytest.mark.parametrize("windows", [True, False])
def test_a_loop_is_planned_for_and_goes_on(run_dirs: RunDirs, windows: bool) -> None:
    """What is watched is the machinery, not the time: how much fits is the machine's affair."""
    with Daemon(run_dirs) as daemon:
        array = np.zeros(NBYTES // 4, dtype=np.float32)
        ckpt = attach_arrays("windows", {"w": array}, settings=run_dirs.settings(), audit=1, incarnation="a" * 32)
        try:
            ckpt.resume()
            session, wait = ckpt.session, threading.Event()

            def step() -> None:
                with ckpt.update():
                    array[:] += 1
                outcome = ckpt.step()
                assert outcome.kind in (OutcomeKind.BEGAN, OutcomeKind.SKIPPED)
                for micro in range(3):
                    begin = time.monotonic_ns()
                    session.recorder.add(EventKind.FORWARD, 0, micro, begin, begin + 100_000)
                    if windows:
                        with ckpt.window():
                            wait.wait(0.002)
                    else:
                        wait.wait(0.002)

            def planned() -> bool:
                step()
                plan = session._standing.plan
                return plan is not None and bool(plan.windows) == windows

            wait_until(planned, "a plan that knows the windows", timeout=40)
            before = ckpt.counters.sealed

            def sealed() -> bool:
                step()
                return ckpt.counters.sealed >= before + 5

            wait_until(sealed, "five snapshots under the plan", timeout=40)
            assert session.settle(10)
            (job,) = daemon.status().jobs
            assert job.pacing is not None
            (rank,) = job.pacing.ranks
            assert rank.bytes >= NBYTES
            assert (rank.window_seconds > 0) == windows
            counters = ckpt.counters
            assert (counters.torn, counters.refused, session._link.dropped) == (0, 0, 0)
        finally:
            ckpt.close()
