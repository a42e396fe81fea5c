"""Restore in place: every optimizer goes on exactly where it was, and a changed model is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from baft_torch import _rng
from baft_torch._models import ModelTree
from baft_torch._restore import load
from baft_torch._state import TrainingState
from baftd.errors import ModelMismatch
from tests.support.torch_image import MemoryImage, snapshot
from tests.support.torch_zoo import DIM, Net, Trainer, Variant, variants


def state_of(model: Any, optimizer: Any, **options: Any) -> TrainingState:
    return TrainingState(ModelTree(model), optimizer if isinstance(optimizer, list) else [optimizer], **options)


def take(trainer: Trainer) -> MemoryImage:
    return snapshot(state_of(trainer.model, trainer.optimizer), rng=_rng.capture({}))


def put(image: MemoryImage, trainer: Trainer) -> None:
    load(image, state_of(trainer.model, trainer.optimizer), image.small)
    _rng.restore(image.small["rng"], {})


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_losses_after_restore_equal_those_of_the_uninterrupted_run(variant: Variant) -> None:
    first = Trainer.make(variant)
    for k in range(4):
        first.step(k)
    image = take(first)
    expected = [first.step(k) for k in range(4, 9)]
    again = Trainer.make(variant, seed=99)
    put(image, again)
    assert [again.step(k) for k in range(4, 9)] == expected


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_restored_state_has_the_same_types_and_options(variant: Variant) -> None:
    first = Trainer.make(variant)
    for k in range(3):
        first.step(k)
    image = take(first)
    saved = copy.deepcopy(first.optimizer.state_dict())
    again = Trainer.make(variant, seed=99)
    put(image, again)
    loaded = again.optimizer.state_dict()
    assert loaded["param_groups"] == saved["param_groups"]
    assert describe(loaded["state"]) == describe(saved["state"])


def describe(value: Any) -> Any:
    """Types, shapes, devices and contents, comparable."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), tuple(value.stride()), value.device, value.tolist())
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [describe(item) for item in value]
    return type(value), value


def test_restore_is_in_place_and_shares_no_memory_with_the_image() -> None:
    variant = variants()[0]
    first = Trainer.make(variant)
    for k in range(3):
        first.step(k)
    image = take(first)
    state = state_of(first.model, first.optimizer)
    objects = {name: (item.live, item.live.data_ptr()) for name, item in state.by_name().items()}
    versions = [p._version for p in first.model.parameters()]
    load(image, state, image.small)
    for name, (live, pointer) in objects.items():
        item = state.by_name()[name]
        assert item.live is live, name
        assert item.live.data_ptr() == pointer, name
    assert all(p._version > v for p, v in zip(first.model.parameters(), versions, strict=True))


def test_state_of_a_fresh_optimizer_is_its_own_memory() -> None:
    first, again = Trainer.make(variants()[0]), Trainer.make(variants()[0], seed=5)
    first.step(0)
    image = take(first)
    put(image, again)
    kept = dict(image.data)
    again.step(1)
    assert image.data == kept


def test_fp32_state_of_a_bf16_parameter_keeps_its_bits() -> None:
    # Optimizer.load_state_dict casts floating state to the parameter's type.
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8).to(torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = make()
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.randn(p.shape, dtype=torch.float32)
    image = snapshot(state_of(model, optimizer))
    again, other = make()
    load(image, state_of(again, other), image.small)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])
        assert other.state[q]["momentum_buffer"].dtype is torch.float32


def test_a_learning_rate_that_is_a_tensor_stays_the_same_object() -> None:
    def make(lr: float) -> tuple[nn.Module, Any, torch.Tensor]:
        model = nn.Linear(4, 4)
        rate = torch.tensor(lr)
        return model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False), rate

    model, optimizer, rate = make(0.5)
    image = snapshot(state_of(model, optimizer))
    again, other, lent = make(0.25)
    load(image, state_of(again, other), image.small)
    assert other.param_groups[0]["lr"] is lent
    assert lent.item() == rate.item() == 0.5


def test_options_of_every_group_come_back() -> None:
    def make() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "weight_decay": 0.5}]
        return model, torch.optim.AdamW(groups)

    model, optimizer = make()
    optimizer.param_groups[0]["lr"] = 0.025
    optimizer.param_groups[1]["initial_lr"] = 0.75
    image = snapshot(state_of(model, optimizer))
    again, other = make()
    load(image, state_of(again, other), image.small)
    strip = lambda o: [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]  # noqa: E731
    assert strip(other) == strip(optimizer)


class Nested(torch.optim.Optimizer):
    """State with containers, scalars, None, and a key that is no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["global"] = {"count": self.state.get("global", {}).get("count", 0) + 1, "t": torch.ones(3)}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    blocks = [torch.zeros_like(p), {"inner": torch.zeros(2, 3)}]
                    state.update(n=0, none=None, blocks=blocks, plain=p * 0)
                state["n"] += 1
                state["blocks"][0].add_(p.grad)
                state["blocks"][1]["inner"].add_(1)
                with torch.no_grad():
                    p.sub_(state["blocks"][0], alpha=0.01)


def test_containers_scalars_and_free_keys_of_a_foreign_optimizer() -> None:
    model = nn.Linear(4, 3)
    optimizer = Nested(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    image = snapshot(state_of(model, optimizer))
    assert "optim.0.weight.blocks.1.inner" in image.entries
    again = nn.Linear(4, 3)
    other = Nested(again.parameters())
    load(image, state_of(again, other), image.small)
    assert describe(other.state[again.weight]) == describe(optimizer.state[model.weight])
    assert describe(other.state["global"]) == describe(optimizer.state["global"])


def test_every_difference_of_a_changed_model_is_named() -> None:
    trainer = Trainer.make(variants()[0])
    trainer.step(0)
    image = take(trainer)

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(DIM, DIM, bias=False)  # missing
            self.added = nn.Linear(2, 2, bias=False)  # extra
            self.bn = nn.BatchNorm1d(DIM + 1)  # reshaped
            self.emb = nn.Embedding(12, DIM, dtype=torch.float64)  # retyped
            self.out.weight = self.emb.weight

    model = Other()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ModelMismatch) as caught:
        load(image, state_of(model, torch.optim.Adadelta(model.parameters())), image.small)
    for sentence in (
        "model.a.bias was saved but is not in the model",
        "model.added.weight is in the model but was not saved",
        "model.bn.weight was saved with shape [16] and has [17]",
        "model.emb.weight was saved as F32 and is F64",
        "optimizer 0 had the parameter a.bias, which it has no more",
        "optimizer 0 has the parameter added.weight, which it had not",
    ):
        assert sentence in str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_another_optimizer_or_number_of_optimizers_is_named() -> None:
    trainer = Trainer.make(variants()[0])
    trainer.step(0)
    image = take(trainer)
    again = Trainer.make(variants()[0])
    with pytest.raises(ModelMismatch, match="optimizer 0 was Adadelta and is SGD"):
        load(image, state_of(again.model, torch.optim.SGD(again.model.parameters(), lr=1.0)), image.small)
    two = state_of(again.model, [again.optimizer, torch.optim.SGD([nn.Parameter(torch.ones(1))])])
    with pytest.raises(ModelMismatch, match="1 optimizers were saved and 2 are attached"):
        load(image, two, image.small)


def test_a_parameter_that_is_in_another_group_is_named() -> None:
    """By the number of the group it would get the options of others."""

    def groups(model: nn.Linear, *names: str) -> Any:
        decay = {"weight": 0.5, "bias": 0.0}
        return torch.optim.SGD([{"params": [getattr(model, n)], "weight_decay": decay[n]} for n in names], lr=0.1)

    model = nn.Linear(3, 3)
    image = snapshot(state_of(model, groups(model, "weight", "bias")))
    other = groups(model, "bias", "weight")
    with pytest.raises(ModelMismatch, match="optimizer 0 has the parameter bias in group 0, and had it in group 1; "):
        load(image, state_of(model, other), image.small)
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.5]


def test_a_parameter_in_another_memory_order_gets_the_same_elements() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    image = snapshot(state_of(model, optimizer))
    assert image.entries["model.weight"].strides == tuple(model.weight.stride())
    again = nn.Conv2d(3, 4, 2)
    load(image, state_of(again, torch.optim.SGD(again.parameters(), lr=0.1)), image.small)
    assert torch.equal(again.weight, model.weight)
    assert again.weight.is_contiguous()
