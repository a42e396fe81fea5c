"""The fence: it comes before the first changed byte, once an update, for attached optimizers only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from baft_torch._hooks import UpdateHooks
from tests.support.torch_zoo import Trainer, Variant, variants


class Watch:
    """Remembers, at each fence, whether a parameter had changed since the last one."""

    def __init__(self, trainer: Trainer) -> None:
        self.params = list(trainer.model.parameters())
        self.before = [p.detach().clone() for p in self.params]
        self.untouched: list[bool] = []
        self.hooks = UpdateHooks([trainer.optimizer], self.fence)

    def fence(self) -> None:
        self.untouched.append(all(torch.equal(a, b) for a, b in zip(self.before, self.params, strict=True)))

    def settled(self) -> None:
        self.before = [p.detach().clone() for p in self.params]


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_the_fence_comes_before_the_first_change_of_every_update(variant: Variant) -> None:
    trainer = Trainer.make(variant)
    watch = Watch(trainer)
    try:
        for k in range(3):
            trainer.step(k)
            watch.settled()
            assert not watch.hooks.inside
            watch.hooks.forget()
        assert watch.untouched == [True] * 3
        assert watch.hooks.updates == 3
    finally:
        watch.hooks.remove()


@pytest.mark.parametrize("how", ["positional", "keyword"])
@pytest.mark.parametrize("name", ["AdamW-foreach", "LBFGS"])
def test_with_a_closure_the_fence_comes_at_its_first_return(name: str, how: str) -> None:
    trainer = Trainer.make(next(v for v in variants() if v.name == name))
    events: list[str] = []
    hooks = UpdateHooks([trainer.optimizer], lambda: events.append("fence"))

    def closure() -> torch.Tensor:
        trainer.optimizer.zero_grad()
        loss = trainer.loss(0)
        loss.backward()
        events.append("closure")
        return loss

    try:
        trainer.optimizer.step(closure) if how == "positional" else trainer.optimizer.step(closure=closure)
    finally:
        hooks.remove()
    assert events[:2] == ["closure", "fence"]
    assert events.count("fence") == 1
    assert hooks.updates == 1
    assert not hooks.inside


def test_other_optimizers_and_removed_hooks_do_nothing() -> None:
    mine, other = Trainer.make(variants()[0]), Trainer.make(variants()[0])
    events: list[str] = []
    hooks = UpdateHooks([mine.optimizer], lambda: events.append("fence"))
    other.step(0)
    assert events == []
    mine.step(0)
    hooks.remove()
    mine.step(1)
    assert events == ["fence"]


def test_an_update_that_raised_is_seen_as_unfinished() -> None:
    trainer = Trainer.make(variants()[0])
    hooks = UpdateHooks([trainer.optimizer], lambda: None)
    try:
        trainer.loss(0).backward()
        trainer.optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            trainer.optimizer.step()
        assert hooks.inside
        hooks.forget()
        assert not hooks.inside
    finally:
        hooks.remove()


def test_a_scaler_that_skips_the_update_fires_no_hook() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([param], foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    hooks = UpdateHooks([optimizer], lambda: None)
    try:
        scaler.scale(torch.ones(1))
        param.grad = torch.full((3,), float("inf"))
        scaler.step(optimizer)
        scaler.update()
        assert hooks.updates == 0
        param.grad = torch.ones(3)
        scaler.step(optimizer)
        assert hooks.updates == 1
    finally:
        hooks.remove()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["step", "whole", "made before the hooks"])
def test_compiled_steps_fire_the_hooks(what: str) -> None:
    torch.compiler.reset()
    trainer = Trainer.make(next(v for v in variants() if v.name == "AdamW-foreach"))
    model, optimizer = nn.Linear(4, 4), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    fences: list[int] = []

    def whole() -> None:
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run: Callable[[], Any] = torch.compile(whole if what == "whole" else lambda: optimizer.step(), backend="eager")
    if what == "made before the hooks":
        model(torch.ones(2, 4)).sum().backward()
        run()
    hooks = UpdateHooks([optimizer, trainer.optimizer], lambda: fences.append(model.weight._version))
    try:
        for _ in range(4):
            if what != "whole":
                model(torch.ones(2, 4)).pow(2).sum().backward()
            run()
        assert hooks.updates == len(fences) == 4
    finally:
        hooks.remove()
        torch.compiler.reset()
