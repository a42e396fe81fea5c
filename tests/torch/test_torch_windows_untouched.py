"""What stays as it was while waits are watched: compiled code, copies of a model, functions of torch."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.support.torch_watch import Net, Watch, backward, group_of_one, net, watches


@pytest.fixture
def watching() -> Iterator[Callable[..., Watch]]:
    """Makes watches."""
    with watches() as make:
        yield make


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Made once: torch keeps what a functional collective was called with."""
    with group_of_one():
        yield


def test_a_copy_of_the_model_knows_nothing_of_us(watching: Callable[..., Watch]) -> None:
    watch, model = net(watching)
    averaged = copy.deepcopy(model)
    stored = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert b"baft" not in file.getvalue()
    backward(model)
    assert watch.gate.open
    for other in (averaged, stored, loaded):
        assert torch.equal(other(torch.ones(3, 4)), model.second(model.first(torch.ones(3, 4)).relu()))
        assert watch.gate.open, "the forward of a copy ended the tail"


def test_signatures_and_functions_of_torch_are_its_own(group: None, watching: Callable[..., Watch]) -> None:
    before = {name: getattr(dist, name) for name in ("all_reduce", "barrier", "all_gather", "broadcast")}
    signatures = {name: inspect.signature(each) for name, each in before.items()}
    waits = inspect.signature(functional.wait_tensor)
    watching()
    assert {name: getattr(dist, name) for name in before} == before
    assert {name: inspect.signature(getattr(dist, name)) for name in before} == signatures
    assert inspect.signature(functional.wait_tensor) == waits


class Breaks:
    """A backend for torch.compile that counts graphs and operations."""

    def __init__(self) -> None:
        self.graphs = self.operations = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1
        self.operations += sum(node.op == "call_function" for node in graph.graph.nodes)
        return graph.forward


def graphs_of(function: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """Graphs and operations that torch.compile makes of it, called twice."""
    torch.compiler.reset()
    count = Breaks()
    compiled = torch.compile(function, backend=count)
    for _ in range(2):
        compiled(*args)
    torch.compiler.reset()
    return count.graphs, count.operations


def reduces(t: torch.Tensor) -> torch.Tensor:
    """With a collective in place."""
    dist.all_reduce(t)
    return t * 2


def waits_itself(t: torch.Tensor) -> torch.Tensor:
    """With an asynchronous one."""
    work = dist.all_reduce(t, async_op=True)
    u = t.clone() + 1
    work.wait()
    return u * 2


def reduces_functionally(t: torch.Tensor) -> torch.Tensor:
    """With a functional one."""
    return functional.wait_tensor(functional.all_reduce(t * 2, "sum", [0])) + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [reduces, waits_itself, reduces_functionally], ids=lambda each: each.__name__)
def test_compiled_code_is_compiled_as_before(
    function: Callable[..., Any], group: None, watching: Callable[..., Watch]
) -> None:
    before = graphs_of(function, torch.ones(3))
    watching()
    assert graphs_of(function, torch.ones(3)) == before


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_compiled_whole_and_not_anew(watching: Callable[..., Watch]) -> None:
    torch.compiler.reset()
    model, count = Net(), Breaks()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    x = torch.ones(3, 4)
    compiled(x).sum().backward()
    watch = watching(modules=[model], params=list(model.parameters()))
    for _ in range(3):
        compiled(x).pow(2).sum().backward()
        assert watch.gate.open
        watch.fence()
        watch.step()
    assert count.graphs == 1
    torch.compiler.reset()
    compiled(x).sum().backward()
    assert count.graphs == 2
    assert watch.gate.open
    watch.waits.close()
    compiled(x)
    assert count.graphs == 2
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_that_is_attached_itself_ends_the_tail(watching: Callable[..., Watch]) -> None:
    torch.compiler.reset()
    model = torch.compile(Net(), backend="eager", fullgraph=True)
    watch = watching(modules=[model], params=list(model.parameters()))
    x = torch.ones(3, 4)
    model(x).sum().backward()
    assert watch.gate.open
    loss = model(x).sum()
    assert not watch.gate.open
    loss.backward()
    torch.compiler.reset()
