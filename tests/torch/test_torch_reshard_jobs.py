"""Jobs that go on in another layout, as real processes with a real daemon.

At the end of each start the same state is also written by torch.distributed.checkpoint. The next start, in another
layout, loads that into a twin: every parameter and moment must equal what baftd restored, bit for bit, and the losses
of the next steps must be those of the twin (`tests.support.torch_layout_job` compares, each rank for itself).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, RunDirs
from tests.support.torch_launch import Ended, Launcher


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Torch, imported once for all starts."""
    with Launcher() as made:
        yield made


class Chain:
    """One job, started in one layout after another; two steps each time."""

    def __init__(self, launcher: Launcher, daemon: Daemon, out: Path) -> None:
        self.launcher, self.daemon, self.out = launcher, daemon, out
        self.steps = 0
        self.starts = 0

    def go(self, kind: str, world: int, **more: str) -> Ended:
        """Start in a layout; all ranks must go on where the last start ended, as DCP says."""
        first, self.steps = self.steps, self.steps + 2
        ended = self.launch(kind, world, **more).check()
        assert ended.first_steps == [first] * world, ended.outputs
        if first:
            assert all(re.search(r"compared \d\d+ tensors", text) for text in ended.outputs), ended.outputs
        assert all(" torn 0 sealed 2" in text for text in ended.outputs), ended.outputs
        return ended

    def launch(self, kind: str, world: int, **more: str) -> Ended:
        """Start, whatever becomes of it."""
        self.starts += 1
        return self.launcher.run(
            kind,
            world,
            self.steps,
            self.out,
            env=self.daemon.environ(),
            start=str(self.starts),
            program="torch_layout_job",
            **more,
        )


def not_carried(ended: Ended) -> set[str]:
    """What every rank said."""
    found = set()
    for text in ended.outputs:
        said = re.search(r"not carried: (.*)", text)
        assert said is not None, text
        found.add(said[1])
    assert len(found) == 1, found
    return set(found.pop().split(",")) - {""}


@pytest.mark.timeout(120)
def test_fsdp2_on_four_ranks_goes_on_with_two_one_and_two_again(
    launcher: Launcher, daemon: Daemon, tmp_path: Path
) -> None:
    chain = Chain(launcher, daemon, tmp_path)
    assert not_carried(chain.go("fsdp2", 4, tied="")) == set()
    assert not_carried(chain.go("fsdp2", 2, tied="")) == {"extra.rank", "rng.torch"}
    assert not_carried(chain.go("fsdp2", 1, tied="", durable="")) == {"extra.rank", "rng.torch"}
    assert not_carried(chain.go("fsdp2", 2, tied="")) == set()  # one rank agrees with itself
    assert not_carried(chain.go("fsdp2", 2, tied="")) == set()  # the same layout: the plain way


@pytest.mark.timeout(120)
def test_ddp_goes_on_as_fsdp2_and_as_ddp_again(launcher: Launcher, daemon: Daemon, tmp_path: Path) -> None:
    chain = Chain(launcher, daemon, tmp_path)
    chain.go("ddp", 2, loader="")
    assert not_carried(chain.go("fsdp2", 2, loader="")) == {"extra.rank", "rng.torch"}
    assert not_carried(chain.go("ddp", 2, loader="")) == {"extra.rank", "rng.torch"}
    assert not_carried(chain.go("plain", 1, loader="")) == {"dataloader", "extra.rank", "rng.torch"}


@pytest.mark.timeout(120)
def test_ddp_of_which_each_byte_was_saved_once_goes_on_as_it_is_and_alone(
    launcher: Launcher, run_dirs: RunDirs, tmp_path: Path
) -> None:
    with Daemon(run_dirs, redundancy="none") as daemon:
        chain = Chain(launcher, daemon, tmp_path)
        chain.go("ddp", 2, tied="")
        chain.go("ddp", 2, tied="", no_reshard="")
        assert not_carried(chain.go("plain", 1, tied="")) == {"extra.rank", "rng.torch"}
        assert len(re.findall("event=divided ", daemon.log)) == 2


@pytest.mark.timeout(120)
def test_a_pipeline_of_four_stages_goes_on_with_two(launcher: Launcher, daemon: Daemon, tmp_path: Path) -> None:
    chain = Chain(launcher, daemon, tmp_path)
    chain.go("pipeline", 4, loader="")
    assert not_carried(chain.go("interleaved", 2, loader="")) == {"extra.rank", "rng.torch"}
    assert not_carried(chain.go("pipeline", 2, loader="")) == {"extra.rank", "rng.torch"}
    assert not_carried(chain.go("plain", 1, loader="")) == {"extra.rank", "rng.torch"}


@pytest.mark.timeout(120)
def test_what_does_not_fit_is_named_by_every_rank_and_nothing_is_lost(
    launcher: Launcher, daemon: Daemon, tmp_path: Path
) -> None:
    chain = Chain(launcher, daemon, tmp_path)
    chain.go("fsdp2", 2)
    chain.steps = 4
    ended = chain.launch("fsdp2", 2, extra_layer="")
    assert all(ended.codes), ended.outputs
    for rank, text in enumerate(ended.outputs):
        assert re.search(rf"ModelMismatch: step 2, saved by 2 ranks, .*layers\.more\.up\.weight' .* rank {rank}", text)
    ended = chain.launch("plain", 1, no_reshard="")
    assert "resume(reshard=True)" in ended.outputs[0], ended.outputs
    assert re.search(r"saved by 2 ranks", ended.outputs[0]), ended.outputs
    ended = chain.launch("ddp", 2, vanish="1")
    assert ended.codes == [1, 3], ended.outputs
    assert "TryAgain: the other ranks did not come to compare layouts" in ended.outputs[0], ended.outputs
    chain.steps = 2
    chain.go("plain", 1)
