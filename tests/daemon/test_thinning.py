"""Which steps are looked at: closely at first, then for a fixed part of a core, the same ones of all ranks."""

from __future__ import annotations

from baftd.daemon.thinning import APART, CLOSELY, CLOSELY_AGAIN, LOOKED_AT_FIRST, SHARE, Thinning


def looked_at(thinning: Thinning, steps: range, apart: float, cost: float, copied: bool = True) -> list[int]:
    """Steps that were looked at: one each `apart` seconds, each of which takes `cost` seconds of a core."""
    found = []
    for step in steps:
        if thinning.wants(step, copied, step * apart):
            thinning.took(copied, cost)
            found.append(step)
    return found


def test_the_first_steps_are_all_looked_at_however_fast() -> None:
    assert looked_at(Thinning(), range(100), 0.0001, 1.0) == list(range(LOOKED_AT_FIRST))


def test_slow_steps_are_all_looked_at_until_the_share_is_spent() -> None:
    found = looked_at(Thinning(), range(1000), 1.0, 0.01)
    assert found[:CLOSELY] == list(range(CLOSELY))
    later = [step for step in found if step > 2 * CLOSELY]
    assert len(later) * 0.01 <= 1.1 * SHARE * (1000 - 2 * CLOSELY)
    assert later


def test_cheap_steps_are_looked_at_four_times_a_second() -> None:
    found = looked_at(Thinning(), range(10_000), 0.01, 1e-5)
    assert 0.9 * 100 / APART < len(found) <= 100 / APART + LOOKED_AT_FIRST + 1


def test_all_ranks_of_a_step_get_the_same_answer() -> None:
    thinning = Thinning()
    for step in range(200):
        answers = {thinning.wants(step, True, step * 0.01 + late) for late in (0.0, 0.3, 5.0)}
        assert len(answers) == 1


def test_steps_with_a_snapshot_do_not_use_up_those_without() -> None:
    thinning = Thinning()
    found = {True: 0, False: 0}
    for step in range(3000):
        copied = step % 10 == 0
        if thinning.wants(step, copied, step * 0.05):
            thinning.took(copied, 0.002)
            found[copied] += 1
    assert found[True] > 0.5 * found[False] > 0


def test_trouble_makes_it_look_closely_again() -> None:
    thinning = Thinning()
    looked_at(thinning, range(CLOSELY + 1), 1.0, 10.0)
    assert looked_at(thinning, range(100, 150), 1.0, 10.0) == []
    thinning.closely(1000)
    assert len(looked_at(thinning, range(150, 200), 1.0, 10.0)) == CLOSELY_AGAIN
