"""Small state: values of torch through the typed tree and back, schedulers and scalers, random numbers."""

from __future__ import annotations

import enum
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as lrs

from baft_torch import _rng
from baft_torch._extra import ExtraState
from baft_torch._small import from_tree, to_tree
from baftd.checkpoint.state_tree import decode, encode
from baftd.errors import FormatError, ModelMismatch, StateTreeError, UnsupportedTensor, UsageError


def round_trip(value: Any) -> Any:
    return from_tree(decode(encode(to_tree(value))))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


VALUES: list[Any] = [
    None, True, 1, -(2**80), 1.5, float("inf"), float("nan"), "text", b"bytes", 1 + 2j, (1, (2,)), [1, [2]],
    {1: 2, "a": (3,)},
    {1, 2}, np.float32(1.5), np.arange(4, dtype=np.int16), torch.tensor(3.5), torch.randn(2, 3), torch.empty(0, 4),
    torch.randn(3).to(torch.bfloat16), torch.randn(4, 4).t(), torch.randn(6)[::2], torch.tensor([1 + 2j]).conj(),
    torch.tensor([True, False]), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), Counter({3: 2, 5: 1}),
    OrderedDict(b=1, a=torch.ones(2)), deque([1, torch.ones(2)], maxlen=3), {"nested": [{"x": (torch.ones(1),)}]},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}")
def test_values_come_back_with_their_type(value: Any) -> None:
    found = round_trip(value)
    expected = value.resolve_conj().contiguous() if isinstance(value, torch.Tensor) else value
    assert same(found, expected)


def test_what_to_tree_returns_shares_no_memory() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    tree = to_tree({"t": tensor, "a": array})
    tensor.fill_(1)
    array.fill(1)
    found = from_tree(tree)
    assert found["t"].tolist() == found["a"].tolist() == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner),
        max_leaves=12,
    )
)
def test_any_plain_tree_is_unchanged(value: Any) -> None:
    assert same(round_trip(value), value)


def test_what_is_not_data_is_refused_with_its_path() -> None:
    for value, path in (
        ({"lr": {"lr_lambdas": [lambda: 1]}}, r"lr.*lr_lambdas.*0"),
        ({"model": nn.Linear(2, 2)}, "model"),
        ({"rng": {"a": object()}}, "rng.*a"),
    ):
        with pytest.raises(StateTreeError, match=path):
            encode(to_tree(value))
    with pytest.raises(UnsupportedTensor, match=r"extra\.x"):
        to_tree({"x": torch.eye(2).to_sparse()}, "extra")
    with pytest.raises(FormatError, match="kind 'later'"):
        from_tree({"baft.kind": "later", "value": 1})


class Mode(enum.Enum):
    FAST = "fast"


def test_enums_and_default_dicts_come_back_as_their_values() -> None:
    counts: defaultdict[str, int] = defaultdict(int, a=1)
    assert round_trip({"counts": counts}) == {"counts": {"a": 1}}
    assert round_trip(Mode.FAST) == "fast"


# ---------------------------------------------------------------- the objects that loops hold


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5, momentum=0.9)


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lrs.LinearLR(o),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.1, 0.5, 3),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda e: 0.9),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.CosineAnnealingLR(o, 8)], [3]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(name: str) -> None:
    def drive(optimizer: Any, scheduler: Any, steps: range) -> list[float]:
        rates = []
        for k in steps:
            optimizer.step()
            scheduler.step(*([1.0 + k % 2] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    optimizer = _optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    drive(optimizer, scheduler, range(5))
    saved = decode(encode(ExtraState({"lr": scheduler}).state()))
    options = optimizer.state_dict()
    expected = drive(optimizer, scheduler, range(5, 12))
    again = _optimizer()
    other = SCHEDULERS[name](again)
    ExtraState({"lr": other}).load(saved)
    again.load_state_dict(options)
    assert drive(again, other, range(5, 12)) == expected


def test_grad_scaler_averages_generators_and_dicts() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.ones(1))
    counts = {"tokens": 5, "best": torch.tensor(0.5)}
    generator = torch.Generator().manual_seed(3)
    extra = ExtraState({"scaler": scaler, "counts": counts, "g": generator})
    saved = decode(encode(extra.state()))
    rng = _rng.capture(extra.generators())
    expected = torch.rand(3, generator=generator)
    other_counts: dict[str, Any] = {"tokens": 0}
    other = torch.amp.GradScaler("cpu")
    again = ExtraState({"scaler": other, "counts": other_counts, "g": torch.Generator()})
    again.load(saved)
    _rng.restore(rng, again.generators())
    assert other.state_dict() == scaler.state_dict()
    assert other_counts == {"tokens": 5, "best": torch.tensor(0.5)}
    assert torch.equal(torch.rand(3, generator=again.generators()["extra.g"]), expected)


def test_extra_refuses_what_would_not_be_saved() -> None:
    for value, why in (
        (5, "no state_dict"),
        (nn.Linear(2, 2), "list of models"),
        (_optimizer(), "list of optimizers"),
        ([1], "no state_dict"),
    ):
        with pytest.raises(UsageError, match=rf"extra\['x'\].*{why}"):
            ExtraState({"x": value})
    with pytest.raises(StateTreeError, match=r"x.*f"):
        ExtraState({"x": {"f": print}})
    with pytest.raises(ModelMismatch, match=r"a was saved and is not attached; b is attached and was not saved"):
        ExtraState({"b": {}}).load({"a": {}})


# ---------------------------------------------------------------- random numbers


def _draw() -> tuple[Any, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(2).tolist(),
        np.random.randn(1).tolist(),
        torch.rand(3).tolist(),
    )


def test_generators_go_on_where_they_were() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    random.gauss(0, 1)  # leaves half of a pair behind
    np.random.randn(1)
    saved = decode(encode(_rng.capture({})))
    expected = _draw()
    _draw()
    _rng.restore(saved, {})
    assert _draw() == expected


def test_taking_the_state_draws_nothing() -> None:
    torch.manual_seed(0)
    before = _rng.capture({})
    _rng.capture({})
    after = _rng.capture({})
    assert encode(before) == encode(after)


def test_a_generator_that_is_missing_is_named_and_bad_state_is_an_error() -> None:
    saved = _rng.capture({"loader": torch.Generator()})
    assert _rng.restore(saved, {}) == ["a generator 'loader' was saved, but this run has none of that name"]
    saved["cuda"] = [b"\0" * 16]
    if not torch.cuda.is_available():
        assert any("CUDA device 0" in line for line in _rng.restore(saved, {}))
    with pytest.raises(FormatError, match="random number"):
        _rng.restore({**saved, "torch": b"short"}, {})
