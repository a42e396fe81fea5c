"""`finish` and `save` keep the step that the loop is at, for whatever reason its boundary took no snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import baft_torch
from baftd.wire.messages import Grant
from tests.support.daemon import Daemon, RunDirs
from tests.support.torch_loop import Loop, train

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def daemon(run_dirs: RunDirs) -> Iterator[Daemon]:
    with Daemon(run_dirs, interval="1 step", durable_dir=str(run_dirs.durable), durable_every="1000 steps") as started:
        yield started


def attached(daemon: Daemon, loop: Loop) -> baft_torch.Checkpointer:
    return baft_torch.attach(loop.model, loop.optimizer, job="loop", settings=daemon.dirs.settings())


def without_slots(ckpt: baft_torch.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no boundary finds a slot that does not wait for one, as in a loop faster than the daemon."""
    standing: Any = ckpt._session._standing
    take = standing.take_grant

    def patient(timeout: float = 0.0) -> Grant | None:
        granted: Grant | None = take(timeout) if timeout else None
        return granted

    monkeypatch.setattr(standing, "take_grant", patient)


def fast(ckpt: baft_torch.Checkpointer, loop: Loop, steps: int) -> None:
    """As a loop does it: waiting for nothing."""
    for _ in range(steps):
        loop.update()
        ckpt.step()


@pytest.mark.parametrize("how", ["finish", "save"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_boundary_that_found_no_slot(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, how: str, after: int) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt:
        ckpt.resume()
        train(ckpt, loop, after)
        without_slots(ckpt, monkeypatch)
        fast(ckpt, loop, 3)
        assert sum(ckpt.counters.skipped.values()) == 3
        if how == "save":
            assert ckpt.save().endswith(f"step-{after + 3}.e1")
            monkeypatch.undo()
            train(ckpt, loop, 1)
        last, saved = ckpt.steps, loop.weights()
    again = Loop(seed=7)
    with attached(daemon, again) as ckpt:
        assert ckpt.resume() == last
        assert all(a.equal(b) for a, b in zip(again.weights(), saved, strict=True))


def test_a_loop_that_outruns_its_slots_loses_nothing_at_its_end(daemon: Daemon) -> None:
    for end in (60, 120, 180):
        loop = Loop()
        with attached(daemon, loop) as ckpt:
            begin = ckpt.resume()
            assert begin == end - 60
            fast(ckpt, loop, 60)
