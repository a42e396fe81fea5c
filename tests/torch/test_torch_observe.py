"""All schedules of torch.distributed.pipelining, observed on real ranks: operation for operation, wait for wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.torch_launch import Launcher
from tests.support.torch_observe_job import CHECKS, CHUNKS


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Torch, imported once for all starts."""
    with Launcher() as made:
        yield made


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CHUNKS)
def test_every_operation_and_every_wait_of_a_schedule_is_seen(name: str, launcher: Launcher, tmp_path: Path) -> None:
    ended = launcher.run(name, 2, 0, tmp_path, env={}, program="torch_observe_job").check()
    assert all(f"compared {name}" in text for text in ended.outputs)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_four_ranks(name: str, launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(name, 4, 0, tmp_path, env={}, program="torch_observe_job").check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", CHECKS)
def test_what_else_a_schedule_may_meet(what: str, launcher: Launcher, tmp_path: Path) -> None:
    ended = launcher.run(what, 2, 0, tmp_path, env={}, program="torch_observe_job").check()
    if what == "faults":
        assert "failed as it should: Failure" in ended.outputs[0]
        assert "failed as it should: RuntimeError" in ended.outputs[1]
