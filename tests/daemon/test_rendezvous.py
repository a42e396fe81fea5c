"""The rendezvous machine: who is missing, who is claimed twice, who is in the way, and for how long."""

from __future__ import annotations

import pytest

from baftd.daemon.rendezvous import Completed, Failed, Pace, Predecessor, Rendezvous, Waiting
from baftd.errors import RankError, TryAgain

A = "a" * 32
B = "b" * 32
LIVE = Predecessor(incarnation=B, epoch=3, processes=("rank 0 (pid 9 on node n)",), nodes=("n",))


def machine(**changes: float) -> Rendezvous:
    return Rendezvous("gpt", node="n", **{"gather_wait": 30.0, "restore_wait": 60.0, **changes})


def arrive(
    machine: Rendezvous, rank: int, world: int, *, incarnation: str = A, now: float = 0.0, **flags: bool
) -> None:
    machine.hello(rank, world, incarnation, 100 + rank, 1, now)
    machine.resume(incarnation, rank, fresh=flags.get("fresh", False), takeover=flags.get("takeover", False), now=now)


def test_all_ranks_complete_it_once() -> None:
    rendezvous = machine()
    arrive(rendezvous, 1, 2)
    assert rendezvous.check(0.0, None) == (Waiting((1,), "gathering", (0,), 0.0, 30.0),)
    arrive(rendezvous, 0, 2, fresh=True)
    assert rendezvous.check(1.0, None) == (Completed(A, 2, (0, 1), fresh=True, takeover=False),)
    assert rendezvous.check(2.0, None) == ()
    rendezvous.retry(A)
    assert isinstance(rendezvous.check(2.0, None)[0], Completed)


@pytest.mark.parametrize("said", [(True, False), (False, True), (False, False)])
def test_one_rank_speaks_for_all(said: tuple[bool, bool]) -> None:
    rendezvous = machine()
    for rank, reshard in enumerate(said):
        rendezvous.hello(rank, 2, A, 100 + rank, 1, 0.0)
        rendezvous.resume(A, rank, fresh=False, takeover=False, reshard=reshard, now=0.0)
    assert rendezvous.check(0.0, None) == (Completed(A, 2, (0, 1), fresh=False, takeover=False, reshard=any(said)),)


def test_missing_ranks_are_named_at_the_deadline() -> None:
    rendezvous = machine()
    for rank in (0, 1, 5):
        arrive(rendezvous, rank, 16)
    rendezvous.hello(2, 16, A, 102, 1, 0.0)
    assert isinstance(rendezvous.check(29.0, None)[0], Waiting)
    (failed,) = rendezvous.check(30.0, None)
    assert isinstance(failed, Failed)
    assert failed.ranks == (0, 1, 5)
    text = str(failed.error)
    assert isinstance(failed.error, RankError)
    assert "3 of 16" in text
    assert "ranks 3-4, 6-15 never said hello on node n" in text
    assert "rank 2 (pid 102) said hello but did not call resume()" in text
    assert "redis" in text
    assert rendezvous.incarnations == ()


def test_ranks_that_drew_an_incarnation_each_are_told() -> None:
    rendezvous = machine()
    arrive(rendezvous, 0, 2, incarnation=A)
    arrive(rendezvous, 1, 2, incarnation=B)
    failures = [i for i in rendezvous.check(31.0, None) if isinstance(i, Failed)]
    assert "BAFTD_INCARNATION" in str(failures[0].error)


def test_two_processes_with_one_rank_and_two_worlds_are_errors() -> None:
    rendezvous = machine()
    rendezvous.hello(0, 2, A, 100, 1, 0.0)
    rendezvous.hello(0, 2, A, 100, 1, 0.0)
    with pytest.raises(RankError, match=r"pid 100 and by pid 200"):
        rendezvous.hello(0, 2, A, 200, 1, 0.0)
    with pytest.raises(RankError, match=r"has 3 ranks.*says 2"):
        rendezvous.hello(1, 3, A, 101, 1, 0.0)
    with pytest.raises(RankError, match="does not exist"):
        rendezvous.hello(2, 2, A, 102, 1, 0.0)
    with pytest.raises(RankError, match="before it said hello"):
        rendezvous.resume(A, 1, fresh=False, takeover=False, now=0.0)


def test_a_death_while_gathering_tells_the_others() -> None:
    rendezvous = machine()
    arrive(rendezvous, 0, 3)
    arrive(rendezvous, 1, 3)
    assert rendezvous.gone(A, 1, pid=999) == ()
    (failed,) = rendezvous.gone(A, 1, pid=101)
    assert isinstance(failed, Failed)
    assert failed.ranks == (0,)
    assert isinstance(failed.error, TryAgain)
    assert "rank 1 (pid 101" in str(failed.error)


def test_a_live_predecessor_delays_then_refuses_and_a_dead_one_does_not() -> None:
    rendezvous = machine()
    arrive(rendezvous, 0, 1)
    (waiting,) = rendezvous.check(0.0, LIVE)
    assert isinstance(waiting, Waiting)
    assert "pid 9" in waiting.phase
    assert rendezvous.check(1.0, LIVE) == ()  # told a second ago
    assert isinstance(rendezvous.check(20.0, None)[0], Completed)

    rendezvous = machine()
    arrive(rendezvous, 0, 1)
    rendezvous.check(5.0, LIVE)
    (failed,) = rendezvous.check(65.0, LIVE)
    assert isinstance(failed, Failed)
    assert failed.error.exit_code == 75
    assert "epoch 3" in str(failed.error)
    assert "pid 9 on node n" in str(failed.error)


def test_takeover_does_not_wait() -> None:
    rendezvous = machine()
    arrive(rendezvous, 0, 2)
    arrive(rendezvous, 1, 2, takeover=True)
    assert rendezvous.check(0.0, LIVE) == (Completed(A, 2, (0, 1), fresh=False, takeover=True),)


def test_the_incarnation_itself_is_no_predecessor() -> None:
    rendezvous = machine()
    arrive(rendezvous, 0, 1, incarnation=B)
    assert isinstance(rendezvous.check(0.0, LIVE)[0], Completed)


def test_pace() -> None:
    pace = Pace()
    assert not pace.advances(0.0)
    pace.touch(0.0)
    assert pace.advances(60.0)
    for step in range(1, 5):
        pace.boundary(step, 40.0 * step)
        pace.boundary(step, 40.0 * step + 5)  # another rank, the same boundary
    assert pace.median_step == 40.0
    assert pace.advances(160.0 + 120.0)
    assert not pace.advances(160.0 + 121.0)
