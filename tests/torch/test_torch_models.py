"""Names: what is saved under which name, whatever the model is wrapped in; extra states; optimizers that move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from baft_torch._models import ModelTree
from baft_torch._optimizers import MOVING
from baft_torch._restore import load
from baft_torch._state import TrainingState
from baftd.errors import ModelMismatch, UsageError
from tests.support.torch_image import snapshot


def names(model: Any, optimizers: Any = (), **options: Any) -> list[str]:
    state = TrainingState(ModelTree(model, **options), list(optimizers))
    return [source.entry.name for source in state.refresh()]


def test_wrappers_leave_no_trace_in_names() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    expected = names(plain)
    assert expected == [
        "model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias",
        "model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked",
    ]  # fmt: skip
    assert names(torch.compile(plain)) == expected
    assert names(nn.DataParallel(plain)) == expected
    assert names(nn.Sequential(checkpoint_wrapper(plain[0]), torch.compile(plain[1]))) == expected
    assert names([plain]) == expected


def test_several_models_and_optimizers_have_names_of_their_own() -> None:
    one, two = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    assert names([one, two]) == ["model.0.weight", "model.1.weight"]
    assert names({"g": one, "d": two}) == ["model.g.weight", "model.d.weight"]
    loose = nn.Parameter(torch.ones(2))
    first = torch.optim.SGD([{"params": [one.weight]}, {"params": [loose]}], lr=0.1, momentum=0.9)
    second = torch.optim.SGD([two.weight], lr=0.1, momentum=0.9)
    for p in (one.weight, two.weight, loose):
        p.grad = torch.ones_like(p)
    first.step()
    second.step()
    assert names({"g": one, "d": two}, [first, second]) == [
        "model.g.weight", "model.d.weight", "optim.0.group1.0",
        "optim.0.g.weight.momentum_buffer", "optim.0.group1.0.momentum_buffer", "optim.1.d.weight.momentum_buffer",
    ]  # fmt: skip


def test_what_is_no_model_or_given_twice_is_refused() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="given to attach\\(\\) twice"):
        ModelTree([linear, linear])
    with pytest.raises(UsageError, match="Tensor"):
        ModelTree([torch.ones(2)])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="int"):
        ModelTree(3)  # type: ignore[arg-type]


class Counting(nn.Module):
    """A module with state beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "t": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["t"].tolist() == [float(state["seen"])] * 2
        self.seen = state["seen"]


def test_extra_states_of_modules_come_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counting())
    model[1].seen = 7
    image = snapshot(TrainingState(ModelTree(model), []))
    again = nn.Sequential(nn.Linear(2, 2), Counting())
    load(image, TrainingState(ModelTree(again), []), image.small)
    assert again[1].seen == 7
    other = TrainingState(ModelTree(nn.Sequential(nn.Linear(2, 2), nn.Identity())), [])
    with pytest.raises(ModelMismatch, match=r"model\.1"):
        load(image, other, image.small)


class Moving(torch.optim.Optimizer):
    """Its tensors have new names at every step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                number = state.get("n", 0) + 1
                state.clear()
                state.update({"n": number, f"t{number}": torch.full((2,), float(number))})


def test_an_optimizer_whose_tree_changes_at_every_step_becomes_small_state() -> None:
    param = nn.Parameter(torch.ones(2))
    model = nn.ParameterList([param])
    optimizer = Moving([param])
    state = TrainingState(ModelTree(model), [optimizer])
    kinds = []
    for _ in range(MOVING + 3):
        optimizer.step()
        kinds.append(sum(source.entry.name.startswith("optim") for source in state.refresh()))
    assert kinds[0] == 1
    assert kinds[-1] == 0
    image = snapshot(state)
    again, other = nn.Parameter(torch.zeros(2)), None
    other = Moving([again])
    load(image, TrainingState(ModelTree(nn.ParameterList([again])), [other]), image.small)
    assert other.state[again]["n"] == MOVING + 3
    assert torch.equal(other.state[again][f"t{MOVING + 3}"], torch.full((2,), float(MOVING + 3)))


def test_a_parameter_added_to_the_optimizer_or_the_model_is_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(ModelTree(model), [optimizer])
    assert len(state.refresh()) == 1
    model.append(nn.Linear(2, 3, bias=False))
    optimizer.add_param_group({"params": model[1].parameters()})
    assert [source.entry.name for source in state.refresh()] == ["model.0.weight", "model.1.weight"]
    model[0].weight = nn.Parameter(torch.ones(4, 2))
    assert next(iter(state.refresh())).entry.shape == (4, 2)


class Rebinding(nn.Module):
    """Its forward makes new buffers, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.5 + x
        self.count = self.count + 1
        return x


def test_buffers_that_forward_replaces_are_followed_without_a_new_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Rebinding()
    state = TrainingState(ModelTree(model), [])
    state.refresh()
    monkeypatch.setattr(TrainingState, "rebuild", lambda self: pytest.fail("walked again"))
    for k in range(1, 4):
        model(torch.full((4,), 1.0))
        image = snapshot(state)
        assert image.data["model.count"] == k.to_bytes(8, "little")
        assert image.data["model.mean"] == model.mean.numpy().tobytes()
    monkeypatch.undo()
    model.mean = torch.zeros(5)
    assert {source.entry.name: source.entry.shape for source in state.refresh()}["model.mean"] == (5,)
