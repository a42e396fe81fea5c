"""Replicated ranges are divided anew by what ranks are measured to copy, where that is better by a tenth or more."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from baftd.checkpoint.shard import TensorEntry
from baftd.daemon.division import fullest
from baftd.errors import TryAgain
from tests.support.daemon import Daemon, RunDirs
from tests.support.paced_rank import Machine, PacedRank
from tests.support.wire_rank import WireRank, together

A = "a" * 32
MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "capacity", "expected"),
    [
        ((10, 20), {0: 10, 1: 10}, 2.0),
        ((10, 0), {0: 20, 1: 0}, 0.5),
        ((10, 1), {0: 20, 1: 0}, float("inf")),
        ((), {}, 0.0),
    ],
)
def test_how_full_the_fullest_rank_is(nbytes: tuple[int, ...], capacity: Mapping[int, int], expected: float) -> None:
    assert fullest(nbytes, capacity) == expected


def test_a_rank_with_long_windows_takes_over_from_one_with_short_ones(run_dirs: RunDirs) -> None:
    """Two replicas of 16 MiB: each saves half at first; one copies 32 MB in its windows, the other 2 MB."""
    held = [TensorEntry(f"w{n}", "U8", (MIB,), MIB, "stable", (MIB,), ((0, MIB),)) for n in range(16)]
    machines = (Machine(windows=(8.0, 8.0)), Machine(windows=(0.6, 0.6)))
    with Daemon(run_dirs, redundancy="none", interval="auto", overhead_probe="off") as daemon:
        ranks = [PacedRank(run_dirs, rank, 2, A, machine=machines[rank], nbytes=8 * MIB) for rank in range(2)]
        try:
            for rank in ranks:
                rank.hello()
            together(ranks, lambda rank: rank.resume())
            together(ranks, WireRank.restored)
            together(ranks, lambda rank: rank.declare(held))
            before = [saved(rank) for rank in ranks]
            assert sum(before) == 16 * MIB
            assert max(before) < 9 * MIB
            step = 1
            while not all(rank.asked_to_declare for rank in ranks):
                assert step < 3000, daemon.status()
                for rank in ranks:
                    rank.listen(0.005)
                    rank.tell(step)
                step += 1
            together(ranks, lambda rank: again(rank, held))
            after = [saved(rank) for rank in ranks]
            assert sum(after) == 16 * MIB
            assert after[0] > 2 * after[1]
            (job,) = daemon.status().jobs
            assert job.counters["divided_anew"] == 1
            assert "fills" in daemon.log
        finally:
            for rank in ranks:
                rank.close()


def saved(rank: PacedRank) -> int:
    """Bytes that the daemon has given a rank to save."""
    assert rank.declared is not None
    assert rank.declared.plan
    whole = {place: entry.nbytes for place, entry in enumerate(rank.entries)}
    return sum(
        whole[share.entry] if share.ranges is None else share.ranges[0][1] - share.ranges[0][0]
        for share in rank.declared.shares
    )


def again(rank: PacedRank, held: list[TensorEntry]) -> None:
    """Declare anew; the other rank may not have done so yet."""
    for _ in range(50):
        try:
            rank.declare(held)
        except TryAgain:
            continue
        return
    raise AssertionError(f"rank {rank.rank} was not divided")


