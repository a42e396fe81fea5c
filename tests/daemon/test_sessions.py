"""One process, several sessions: a notebook, or a test, attaches again without ending."""

from __future__ import annotations

import numpy as np

from baft_client.arrays import attach_arrays
from tests.support.daemon import Daemon, RunDirs


def test_a_second_session_in_one_process_is_served(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs) as daemon:
        settings = run_dirs.settings()
        for number in range(3):
            array = np.zeros(1000)
            checkpointer = attach_arrays("again", {"w": array}, settings=settings)
            try:
                first = checkpointer.resume(fresh=number == 1)
                assert first == (0, 0, 3)[number]
                for _ in range(4):
                    with checkpointer.update():
                        array += 1
                    assert checkpointer.session.settle(10)
                    checkpointer.step()
                assert checkpointer.session._standing.committed["memory"] == first + 3
                assert not checkpointer.session.fenced
            finally:
                checkpointer.close()
        (job,) = daemon.status().jobs
        assert job.epoch == 3
        assert job.counters["no_slot"] == 0
