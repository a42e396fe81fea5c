"""A rank that was away while the others came to another division lays out anew when it is back: message by message."""

from __future__ import annotations

import pytest

from baftd.checkpoint.shard import TensorEntry
from baftd.errors import TryAgain
from tests.support.daemon import Daemon, RunDirs
from tests.support.wire_rank import WireRank, start_of, together

A = "a" * 32


def everywhere(*sizes: int) -> list[TensorEntry]:
    """Tensors of so many bytes that all ranks hold alike."""
    return [TensorEntry(f"w{n}", "U8", (n,), n, "stable", (n,), ((0, n),)) for n in sizes]


def divided(ranks: list[WireRank], held: list[TensorEntry]) -> bytes:
    """The plan under which all ranks have declared."""
    together(ranks, lambda rank: rank.declare(held))
    plans = {rank.declared.plan for rank in ranks if rank.declared is not None}
    assert len(plans) == 1
    return plans.pop()


def come_back(dirs: RunDirs, ranks: list[WireRank]) -> None:
    """Rank 1, which has missed what the daemon said meanwhile."""
    back = WireRank(dirs, 1, 2, A)
    back.token = ranks[1].token
    ranks[1] = back
    back.hello()
    back.wait_asked()


def test_another_tree_was_declared_meanwhile(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, redundancy="none"), start_of(run_dirs, 2, A) as ranks:
        together(ranks, WireRank.restored)
        before = divided(ranks, everywhere(5000))
        assert before
        ranks[1].close()
        with pytest.raises(TryAgain, match="rank 1 has not declared"):
            ranks[0].declare(everywhere(5000, 300))
        come_back(run_dirs, ranks)
        ranks[1].declare(everywhere(5000, 300))  # the last one that was missing
        assert divided(ranks, everywhere(5000, 300)) not in (b"", before)


def test_a_daemon_that_divides_no_more_came_meanwhile(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs, redundancy="none") as daemon, start_of(run_dirs, 2, A) as ranks:
        together(ranks, WireRank.restored)
        assert divided(ranks, everywhere(5000))
        ranks[1].close()
        daemon.kill()
        daemon.more["redundancy"] = "replicas"
        daemon.start()
        ranks[0].hello()
        assert ranks[0].declare(everywhere(5000)).plan == b""
        come_back(run_dirs, ranks)
        assert divided(ranks, everywhere(5000)) == b""
