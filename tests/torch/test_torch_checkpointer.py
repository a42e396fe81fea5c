"""The object that a loop holds, with a real daemon: what is saved when, what is skipped and said, what is raised."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import baft_torch
from baftd.errors import (
    BaftError,
    Degraded,
    ModelMismatch,
    NothingRestorable,
    StateTreeError,
    TornSnapshot,
    Unreachable,
    UnsupportedTensor,
    UsageError,
)
from tests.support.daemon import Daemon, RunDirs, look_for, wait_until
from tests.support.torch_loop import Loop, settle, train


@contextmanager
def attached(daemon: Daemon, loop: Loop, **options: Any) -> Iterator[baft_torch.Checkpointer]:
    """A checkpointer that is closed, not finished, at the end."""
    options.setdefault("settings", daemon.dirs.settings(**daemon.more))
    ckpt = baft_torch.attach(loop.model, loop.optimizer, job="loop", **options)
    try:
        yield ckpt
    finally:
        ckpt.close()


def resumed(daemon: Daemon, loop: Loop | None = None, **options: Any) -> tuple[int, Loop]:
    """Where a new start goes on, and with what."""
    loop = loop or Loop(seed=9)
    with attached(daemon, loop, **options) as ckpt:
        return ckpt.resume(), loop


# ---------------------------------------------------------------- the ordinary course


def test_a_second_start_goes_on_with_the_losses_of_the_first(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop, audit=1) as ckpt:
        assert ckpt.resume() == 0
        train(ckpt, loop, 4)
        assert (ckpt.steps, ckpt.updates, ckpt.counters.sealed, ckpt.counters.torn) == (4, 4, 4, 0)
    expected = [loop.update() for _ in range(3)]
    again = Loop(seed=9)
    with attached(daemon, again) as ckpt:
        assert ckpt.resume() == 4
        assert (ckpt.steps, ckpt.updates) == (4, 4)
        assert [again.update() for _ in range(3)] == expected


def test_left_normally_the_last_step_is_durable_and_the_slots_are_gone(daemon: Daemon) -> None:
    loop = Loop()
    with baft_torch.attach(loop.model, loop.optimizer, job="loop", settings=daemon.dirs.settings()) as ckpt:
        ckpt.resume()
        train(ckpt, loop, 3)
    assert not look_for(daemon.dirs.shm, "*.slot-*")
    step, again = resumed(daemon)
    assert step == 3
    assert all(torch.equal(a, b) for a, b in zip(again.weights(), loop.weights(), strict=True))


def test_left_by_an_exception_every_slot_stays(daemon: Daemon) -> None:
    loop = Loop()

    def crash() -> None:
        with baft_torch.attach(loop.model, loop.optimizer, job="loop", settings=daemon.dirs.settings()) as ckpt:
            ckpt.resume()
            train(ckpt, loop, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    assert look_for(daemon.dirs.shm, "*.slot-*")
    assert resumed(daemon)[0] == 3


def test_save_makes_the_last_boundary_durable_whatever_the_cadence(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt:
        ckpt.resume()
        train(ckpt, loop, 2)
        path = ckpt.save()
        assert path.endswith("loop/step-2.e1")
        assert ckpt.save(durable=False) == ""
        saved = loop.weights()
        train(ckpt, loop, 1)
    # Slots are not needed: the durable checkpoint suffices.
    daemon.kill()
    for slot in look_for(daemon.dirs.shm, "*.slot-*"):
        slot.unlink()
    daemon.start()
    step, again = resumed(daemon)
    assert step == 2
    assert all(torch.equal(a, b) for a, b in zip(again.weights(), saved, strict=True))


def test_steps_that_the_cadence_leaves_out_cost_nothing_and_the_last_is_still_saved(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, interval="3 steps", durable_dir=str(run_dirs.durable), durable_every="1000 steps") as daemon:
        loop = Loop()
        with baft_torch.attach(loop.model, loop.optimizer, job="loop", settings=daemon.dirs.settings()) as ckpt:
            ckpt.resume()
            train(ckpt, loop, 5)
            assert ckpt.counters.sealed == 1
        assert resumed(daemon)[0] == 5


def test_the_job_is_known_from_its_first_boundary_on_and_draws_no_other_numbers(run_dirs: RunDirs) -> None:
    """Nothing is due before step 20: the layout is declared all the same, and what the loop left out is counted."""
    with Daemon(run_dirs, interval="20 steps") as daemon:
        loop, other = Loop(), Loop()

        class Drawing:
            def state_dict(self) -> dict[str, float]:
                return {"drawn": float(torch.rand(()))}

            def load_state_dict(self, state: dict[str, float]) -> None:
                pass

        torch.manual_seed(5)
        expected = [other.update() for _ in range(6)]
        torch.manual_seed(5)
        with attached(daemon, loop, extra={"drawing": Drawing()}) as ckpt:
            ckpt.resume()
            torch.manual_seed(5)
            ckpt.step()
            assert ckpt.counters.declares == 0, "no update yet: the optimizer's tensors are not known"
            losses = train(ckpt, loop, 1)
            assert (ckpt.counters.declares, ckpt.counters.began) == (1, 0)
            losses += train(ckpt, loop, 5)
            assert losses == expected
            assert (ckpt.counters.declares, ckpt.counters.began, ckpt.counters.skipped) == (1, 0, {})
            ckpt._session._link._wake()

            def left_out() -> int:
                (job,) = daemon.status().jobs
                return job.counters["left_out"]

            wait_until(lambda: left_out() == 6, lambda: f"{left_out()}")  # all but the step that goes on


def test_finish_right_after_resume_needs_no_new_snapshot(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt:
        ckpt.resume()
        train(ckpt, loop, 2)
    again = Loop(seed=9)
    with baft_torch.attach(again.model, again.optimizer, job="loop", settings=daemon.dirs.settings()) as ckpt:
        assert ckpt.resume() == 2
    assert resumed(daemon)[0] == 2


# ---------------------------------------------------------------- boundaries and fences


def test_before_the_first_update_nothing_is_declared(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt:
        ckpt.resume()
        ckpt.step()
        assert ckpt.counters.began == 0
        train(ckpt, loop, 1)
        assert ckpt.counters.sealed == 1
    assert resumed(daemon)[0] == 2


def test_an_unfinished_accumulation_is_skipped_and_said_once(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.resume()
        train(ckpt, loop, 1)
        for _ in range(2):
            loop.gradients()
            ckpt.step()
        assert ckpt.counters.sealed == 1
        said = [r for r in caplog.records if "unfinished accumulation" in r.getMessage() and "torch" in r.name]
        assert len(said) == 1
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        ckpt.step()
        settle(ckpt)
        assert ckpt.counters.sealed == 2
    assert resumed(daemon)[0] == 4


@pytest.mark.parametrize("where", ["end", "beginning", "zeros"])
def test_wherever_a_loop_clears_its_gradients_its_updates_are_boundaries(daemon: Daemon, where: str) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt:
        ckpt.resume()
        for _ in range(3):
            if where == "beginning":
                loop.optimizer.zero_grad()
            loop.gradients()
            loop.optimizer.step()
            if where != "beginning":
                loop.optimizer.zero_grad(set_to_none=where == "end")
            ckpt.step()
            settle(ckpt)
        assert ckpt.counters.sealed == 3
        ckpt.step()  # no update since: zeros are no accumulation, and cleared gradients are none
        settle(ckpt)
        assert ckpt.counters.sealed == (3 if where == "beginning" else 4)


def test_two_optimizers_the_first_update_of_either_is_the_fence(daemon: Daemon) -> None:
    loop = Loop()
    one = torch.optim.SGD(loop.model[0].parameters(), lr=0.1, momentum=0.9)
    two = torch.optim.AdamW(loop.model[3].parameters(), lr=0.1)
    loop.optimizer = [one, two]

    def update(optimizers: list[torch.optim.Optimizer]) -> None:
        loop.gradients()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in (one, two):
            optimizer.zero_grad()

    with attached(daemon, loop, audit=1) as ckpt:
        ckpt.resume()
        for optimizers in ([one], [two], [one, two], [two, one]):
            update(optimizers)
            ckpt.step()
            settle(ckpt)
        assert (ckpt.counters.sealed, ckpt.counters.torn, ckpt.updates) == (4, 0, 6)
    again = Loop(seed=9)
    first = torch.optim.SGD(again.model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(again.model[3].parameters(), lr=0.1)
    again.optimizer = [first, second]
    assert resumed(daemon, again)[0] == 4
    for old, new in ((one, first), (two, second)):
        was, now = old.state_dict()["state"], new.state_dict()["state"]
        assert all(torch.equal(was[i][k], now[i][k]) for i in was for k in was[i])


def test_closures_and_an_optimizer_that_is_saved_as_a_whole(daemon: Daemon) -> None:
    loop = Loop()
    loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), lr=0.05, max_iter=3, history_size=3)

    def update(loop: Loop) -> float:
        def closure() -> torch.Tensor:
            loop.optimizer.zero_grad()
            return loop.gradients()

        loss = float(loop.optimizer.step(closure))
        loop.optimizer.zero_grad()
        return loss

    with attached(daemon, loop, audit=1) as ckpt:
        ckpt.resume()
        for _ in range(3):
            update(loop)
            ckpt.step()
            settle(ckpt)
        assert (ckpt.counters.sealed, ckpt.counters.torn) == (3, 0)
    expected = [update(loop) for _ in range(3)]
    again = Loop(seed=9)
    again.optimizer = torch.optim.LBFGS(again.model.parameters(), lr=0.05, max_iter=3, history_size=3)
    assert resumed(daemon, again)[0] == 3
    assert [update(again) for _ in range(3)] == expected


def test_an_overflow_step_is_a_boundary_without_an_update(daemon: Daemon) -> None:
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def update(loop: Loop, scaler: Any, *, overflow: bool = False) -> float:
        loss = loop.model(torch.randn(6, 8)).pow(2).mean()
        scaler.scale(loss).backward()
        if overflow:
            next(loop.model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        return float(loss.detach())

    with attached(daemon, loop, audit=1, extra={"scaler": scaler}) as ckpt:
        ckpt.resume()
        for k in range(4):
            update(loop, scaler, overflow=k == 2)
            ckpt.step()
            settle(ckpt)
        assert (ckpt.steps, ckpt.updates, ckpt.counters.sealed, ckpt.counters.torn) == (4, 3, 4, 0)
    scale = scaler.get_scale()
    expected = [update(loop, scaler) for _ in range(3)]
    again, other = Loop(seed=9), torch.amp.GradScaler("cpu")
    assert resumed(daemon, again, extra={"scaler": other})[0] == 4
    assert other.state_dict()["scale"] == scale
    assert [update(again, other) for _ in range(3)] == expected


def test_weights_changed_without_a_hook_drop_the_snapshot_and_say_what_to_do(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.resume()
        train(ckpt, loop, 2)
        loop.update()
        ckpt.step()
        loop.model[0].weight.data.mul_(0.5)
        ckpt.step()
        assert ckpt.counters.torn == 1
        text = "\n".join(record.getMessage() for record in caplog.records)
        assert "model.0.weight" in text
        assert "call ckpt.fence() before" in text
    assert resumed(daemon)[0] in (2, 4)


def test_fence_by_hand_serves_updates_that_fire_no_hook(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop, audit=1) as ckpt:
        ckpt.resume()
        for _ in range(3):
            ckpt.fence()
            with torch.no_grad():
                for p in loop.model.parameters():
                    p.data.mul_(0.9)
            ckpt.step()
            settle(ckpt)
        assert (ckpt.counters.sealed, ckpt.counters.torn, ckpt.updates) == (3, 0, 3)
    assert resumed(daemon)[0] == 3


def test_paused_lets_weights_be_swapped_and_put_back(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop, audit=1) as ckpt:
        ckpt.resume()
        train(ckpt, loop, 2)
        loop.update()
        ckpt.step()
        with ckpt.paused():
            kept = loop.weights()
            for p in loop.model.parameters():
                p.data.zero_()
            for p, old in zip(loop.model.parameters(), kept, strict=True):
                p.data.copy_(old)
        assert (ckpt.counters.sealed, ckpt.counters.torn) == (3, 0)
        settle(ckpt)
        train(ckpt, loop, 1)
        assert (ckpt.counters.sealed, ckpt.counters.torn) == (4, 0)


def test_an_update_that_raised_is_not_a_boundary(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt:
        ckpt.resume()
        train(ckpt, loop, 1)
        loop.gradients()
        rate = loop.optimizer.param_groups[0]["lr"]
        loop.optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            loop.optimizer.step()
        loop.optimizer.param_groups[0]["lr"] = rate
        loop.optimizer.zero_grad()
        ckpt.step()
        assert ckpt.counters.sealed == 1
        train(ckpt, loop, 1)
        assert ckpt.counters.sealed == 2


# ---------------------------------------------------------------- weak by default, strict on demand


class Unwell:
    """An object whose state_dict fails from the second time on."""

    calls = 0

    def state_dict(self) -> dict[str, int]:
        self.calls += 1
        if self.calls > 1:
            raise ValueError("I am not well")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_a_state_dict_that_raises_skips_the_snapshot_and_not_the_training(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    with attached(daemon, loop, extra={"x": Unwell()}) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.resume()
        for _ in range(3):
            loop.update()
            ckpt.step()
        assert ckpt.counters.sealed == 0
        assert "ValueError: I am not well" in "\n".join(r.getMessage() for r in caplog.records)


def test_strict_raises_at_the_call_what_is_otherwise_only_said(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop, strict=True, extra={"x": Unwell()}) as ckpt:
        ckpt.resume()
        loop.update()
        with pytest.raises(UsageError, match="I am not well"):
            ckpt.step()
    loop = Loop()
    with attached(daemon, loop, strict=True) as ckpt:
        ckpt.resume(fresh=True)
        train(ckpt, loop, 1)
        loop.update()
        ckpt.step()
        loop.model[0].weight.data.mul_(0.5)
        loop.update()  # the hook raises nothing into the loop
        with pytest.raises(TornSnapshot, match=r"model\.0\.weight"):
            ckpt.step()


def test_a_tensor_that_becomes_unsupported_skips_by_name(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.resume()
        train(ckpt, loop, 1)
        loop.model[1].running_mean = torch.eye(16).to_sparse()
        loop.optimizer.step()
        ckpt.step()
        assert ckpt.counters.sealed == 1
        assert "model.1.running_mean" in "\n".join(r.getMessage() for r in caplog.records)


def test_without_a_daemon_training_goes_on(run_dirs: RunDirs) -> None:
    loop = Loop()
    ckpt = baft_torch.attach(loop.model, loop.optimizer, job="loop", settings=run_dirs.settings())
    try:
        with pytest.raises(Unreachable, match=r"baftd\.sock"):
            ckpt.resume(timeout=0.3)
    finally:
        ckpt.close()
    ckpt = baft_torch.attach(loop.model, loop.optimizer, job="loop", settings=run_dirs.settings())
    try:
        assert ckpt.resume(fresh=True, timeout=0.3) == 0
        for _ in range(3):
            loop.update()
            ckpt.step()
        assert ckpt.steps == 3
    finally:
        ckpt.close()


def test_a_daemon_that_dies_and_comes_back_costs_snapshots_not_training(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt:
        ckpt.resume()
        train(ckpt, loop, 2)
        daemon.kill()
        for _ in range(6):
            loop.update()
            ckpt.step()
        daemon.start()
        assert ckpt._session._link.wait_up(10.0)
        settle(ckpt)
        loop.update()
        ckpt.step()
        settle(ckpt)
    assert resumed(daemon)[0] == 9


# ---------------------------------------------------------------- bad input


def test_a_changed_model_is_refused_on_resume_with_all_names(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt:
        ckpt.resume()
        train(ckpt, loop, 2)
    other = Loop(seed=9)
    other.model[3] = nn.Linear(16, 2)
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=1e-2)
    with attached(daemon, other) as ckpt, pytest.raises(ModelMismatch) as caught:
        ckpt.resume()
    for name in ("model.3.weight was saved with shape [1, 16] and has [2, 16]", "model.3.bias"):
        assert name in str(caught.value)
    assert resumed(daemon)[0] == 2  # nothing is lost


def test_extra_or_loader_that_differ_are_refused_on_resume(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop, extra={"counts": {"n": 1}}) as ckpt:
        ckpt.resume()
        train(ckpt, loop, 1)
    with attached(daemon, Loop()) as ckpt, pytest.raises(ModelMismatch, match="counts was saved and is not attached"):
        ckpt.resume()


def test_calls_out_of_order_say_so(daemon: Daemon) -> None:
    loop = Loop()
    with attached(daemon, loop) as ckpt:
        with pytest.raises(UsageError, match=r"before resume\(\)"):
            ckpt.step()
        ckpt.resume()
        with pytest.raises(UsageError, match="called twice"):
            ckpt.resume()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"job": "a/b"}, BaftError, "a/b"),
        ({"optimizer": object()}, UsageError, "fires no hook"),
        ({"model": torch.zeros(3)}, UsageError, "Tensor"),
        ({"extra": {"f": {"g": [print]}}}, StateTreeError, r"f.*g"),
        ({"dataloader": [1, 2]}, UsageError, "list without state_dict"),
        ({"schedule": object()}, UsageError, "no pipeline stage"),
        ({"stable": ["nothing.*"]}, UsageError, "matches no buffer"),
        ({"rank": 3, "world": 2}, BaftError, "3"),
        ({"model": nn.Linear(2, 2, device="meta")}, UnsupportedTensor, "weight"),
    ],
)
def test_bad_arguments_are_refused_at_attach(
    run_dirs: RunDirs, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    loop = Loop()
    usual = {"model": loop.model, "optimizer": loop.optimizer, "job": "loop", "settings": run_dirs.settings()}
    with pytest.raises(error, match=match):
        baft_torch.attach(**{**usual, **change})


def test_save_without_a_durable_tier_says_so(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs) as daemon:
        loop = Loop()
        with attached(daemon, loop) as ckpt:
            ckpt.resume()
            train(ckpt, loop, 1)
            with pytest.raises((UsageError, Degraded), match="durable"):
                ckpt.save(timeout=10.0)


def test_a_job_whose_checkpoints_are_gone_is_not_begun_anew_by_itself(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs) as daemon:
        loop = Loop()
        with attached(daemon, loop) as ckpt:
            ckpt.resume()
            train(ckpt, loop, 3)
        daemon.kill()
        for slot in look_for(daemon.dirs.shm, "*.slot-*"):
            slot.unlink()
        daemon.start()
        with attached(daemon, Loop()) as ckpt, pytest.raises(NothingRestorable, match="3"):
            ckpt.resume()
        with attached(daemon, Loop()) as ckpt:
            assert ckpt.resume(fresh=True) == 0
