"""What a start says while it waits."""

from __future__ import annotations

import logging

import pytest

from baft_client.joining import Teller
from baftd.telemetry import get_logger
from baftd.wire.messages import Progress, ResumeProgress


def test_what_a_start_waits_for_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tell = Teller(get_logger("client"))
    behind = "waiting for an earlier start that still trains: rank 0 (pid 17)"
    for waited in range(0, 31, 2):
        tell(ResumeProgress(id=1, phase="gathering", missing=[1], waited=waited, deadline=300))
    for waited in range(0, 31, 2):
        tell(ResumeProgress(id=1, phase=behind, waited=waited, deadline=60))
    for done in range(9):  # moves by itself: nothing to worry about
        tell(ResumeProgress(id=1, phase=f"restoring step 7: {done} of 9 MB", waited=10 + done))
        tell(Progress(id=1, what="step 7", done=done, total=9))
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 2
    assert "missing=1" in warned[0]
    assert "pid 17" in warned[1]
    assert len(caplog.records) == 50
