"""Data order: after a restore the loader hands out the next batch, and random numbers are those of the first run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from baft_torch import _rng
from baft_torch._loader import LoaderState
from baftd.checkpoint.state_tree import decode, encode
from baftd.errors import UsageError

SIZE, BATCH = 22, 4


class Augmented(Dataset[torch.Tensor]):
    """Items that draw random numbers when they are loaded (in the training process where there are no workers)."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(2)])


class Stream(IterableDataset[torch.Tensor]):
    """A stream that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 3 * SIZE:
            self.at += 1
            yield torch.cat([torch.tensor([float(self.at)]), torch.rand(2)])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _loader(kind: str, workers: int) -> Any:
    common: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers}
    if workers:
        common |= {"prefetch_factor": 3, "multiprocessing_context": "fork"}
    if kind == "map":
        return StatefulDataLoader(Augmented(), **common)
    if kind == "shuffled":
        return StatefulDataLoader(Augmented(), shuffle=True, **common)
    if kind == "generator":
        return StatefulDataLoader(Augmented(), shuffle=True, generator=torch.Generator().manual_seed(7), **common)
    return StatefulDataLoader(Stream(), **common)


class Loop:
    """Draws batches over epochs as a training loop does; each step also draws a number, as dropout would."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batches: Iterator[Any] | None = None

    def step(self) -> tuple[Any, float]:
        while True:
            if self.batches is None:
                self.batches = iter(self.loader)
            try:
                batch = next(self.batches)
            except StopIteration:
                self.batches = None
                continue
            return batch.tolist(), torch.rand(1).item()


PLACES = [(at, 0) for at in (0, 1, 4, 5, 6, 7, 13)] + [(at, 2) for at in (1, 6)]
"""(batches before the boundary, workers); an epoch has 6 batches. Workers are slow to start."""


@pytest.mark.parametrize(("at", "workers"), PLACES)
@pytest.mark.parametrize("kind", ["map", "shuffled", "generator", "stream"])
def test_the_next_batch_and_the_next_numbers_are_those_of_the_uninterrupted_run(
    kind: str, workers: int, at: int
) -> None:
    torch.manual_seed(1)
    first = _loader(kind, workers)
    loop = Loop(first)
    for _ in range(at):
        loop.step()
    state = LoaderState(first)
    saved = decode(encode({"loader": state.state(), "rng": _rng.capture(state.generators())}))
    expected = [loop.step() for _ in range(9)]
    loop.batches = None

    torch.manual_seed(99)
    again = _loader(kind, workers)
    other = LoaderState(again)

    def put_back() -> None:
        _rng.restore(saved["rng"], other.generators())

    other.load(saved["loader"], put_back)
    loop = Loop(again)
    found = [loop.step() for _ in range(9)]
    loop.batches = None
    if workers:  # items are made in the workers, each with its own generator: their draws begin anew with the workers
        strip = lambda steps: [([row[0] for row in batch], number) for batch, number in steps]  # noqa: E731
        found, expected = strip(found), strip(expected)
    assert found == expected


def test_asking_an_untouched_loader_for_its_state_draws_nothing() -> None:
    loader = _loader("shuffled", 0)
    before = torch.get_rng_state()
    assert LoaderState(loader).state() == {"iterated": False, "position": None}
    assert torch.equal(torch.get_rng_state(), before)
    assert loader._iterator is None


def test_an_iterator_made_before_resume_is_an_error() -> None:
    loader = _loader("map", 0)
    iter(loader)
    with pytest.raises(UsageError, match=r"iter\(dataloader\) after"):
        LoaderState(loader).load({"iterated": True, "position": None}, lambda: None)


def test_a_loader_that_cannot_say_where_it_is_is_refused() -> None:
    with pytest.raises(UsageError, match="DataLoader without state_dict and load_state_dict"):
        LoaderState(DataLoader(Augmented()))


class Own:
    """A loader of the user's: no DataLoader."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        torch.rand(3)  # shuffles, say
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_numbers_are_put_back_after_the_iterator_of_any_class_and_only_once() -> None:
    original = Own.__iter__
    loader, bystander = Own(), Own()
    state = LoaderState(loader)
    calls: list[str] = []
    state.load({"iterated": True, "position": {"at": 5}}, lambda: calls.append("back"))
    iter(bystander)
    assert calls == ["back"]
    batches = iter(loader)
    assert calls == ["back", "back"]
    assert next(batches) == 6
    iter(loader)
    assert calls == ["back", "back"]
    assert Own.__iter__ is original


def test_disarming_leaves_class_and_object_as_they_were() -> None:
    original = Own.__iter__
    calls: list[str] = []
    own = Own()
    state = LoaderState(own)
    state.load({"iterated": True, "position": {"at": 5}}, lambda: calls.append("back"))
    assert Own.__iter__ is not original
    state.disarm()
    state.disarm()
    assert Own.__iter__ is original
    loader = _loader("map", 0)
    state = LoaderState(loader)
    state.load({"iterated": True, "position": None}, lambda: calls.append("back"))
    assert "_get_iterator" in vars(loader)
    state.disarm()
    assert "_get_iterator" not in vars(loader)
    iter(own)
    iter(loader)
    assert calls == ["back", "back"]


def test_a_sampler_that_was_given_a_generator_goes_on_with_it() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = StatefulDataLoader(Augmented(), sampler=RandomSampler(Augmented(), generator=generator), batch_size=2)
    assert LoaderState(loader).generators()["sampler"] is generator
