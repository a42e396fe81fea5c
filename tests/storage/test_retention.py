"""Which checkpoints retention gives up, decided without a file."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baftd.checkpoint.identity import CheckpointId
from baftd.errors import UsageError
from baftd.storage.interface import DurableCheckpoint
from baftd.storage.retention import to_delete

State = Literal["complete", "incomplete", "damaged"]


def at(step: int, epoch: int = 1, state: State = "complete", *, being_written: bool = False) -> DurableCheckpoint:
    return DurableCheckpoint("gpt", CheckpointId(epoch, step), state, "/x", being_written=being_written)


def steps(found: list[CheckpointId]) -> list[tuple[int, int]]:
    return [(one.epoch, one.step) for one in found]


def test_the_last_and_every_nth_are_kept() -> None:
    all_of_them = [at(step) for step in range(10, 110, 10)]
    assert steps(to_delete(all_of_them, keep_last=3, current_epoch=1)) == [(1, s) for s in range(10, 80, 10)]
    kept = to_delete(all_of_them, keep_last=2, keep_every=40, current_epoch=1)
    assert steps(kept) == [(1, 10), (1, 20), (1, 30), (1, 50), (1, 60), (1, 70)]
    assert to_delete(all_of_them, keep_last=99, current_epoch=1) == []


def test_pinned_and_busy_ones_stay() -> None:
    found = [at(1), at(2), at(3), at(4, state="incomplete"), at(9)]
    gone = to_delete(found, keep_last=1, pinned=[CheckpointId(1, 2)], busy={CheckpointId(1, 4)}, current_epoch=1)
    assert steps(gone) == [(1, 1), (1, 3)]
    found[3] = at(4, state="incomplete", being_written=True)
    assert steps(to_delete(found, keep_last=1, current_epoch=1)) == [(1, 1), (1, 2), (1, 3)]


def test_abandoned_ones_count_for_nothing_and_wait_for_the_new_epoch() -> None:
    """Epoch 2 branched off at step 20: 30 and 40 of epoch 1 are abandoned."""
    found = [at(10), at(20), at(30), at(40)]

    def abandoned(checkpoint: CheckpointId) -> bool:
        return checkpoint.epoch == 1 and checkpoint.step > 20

    assert steps(to_delete(found, keep_last=1, abandoned=abandoned, current_epoch=2)) == [(1, 10)]
    assert to_delete(found, keep_last=2, abandoned=abandoned, current_epoch=2) == []
    found.append(at(22, epoch=2))
    assert steps(to_delete(found, keep_last=2, abandoned=abandoned, current_epoch=2)) == [(1, 10), (1, 30), (1, 40)]
    assert steps(to_delete(found, keep_last=2, abandoned=abandoned, pinned=[CheckpointId(1, 40)], current_epoch=2)) == [
        (1, 10),
        (1, 30),
    ]


def test_bad_ones_wait_for_good_ones() -> None:
    found = [at(10), at(20, state="damaged"), at(30), at(40, state="incomplete")]
    assert to_delete(found, keep_last=2, current_epoch=1) == []
    found += [at(50), at(60)]
    assert steps(to_delete(found, keep_last=2, current_epoch=1)) == [(1, 10), (1, 20), (1, 30), (1, 40)]
    gone = to_delete(found, keep_last=2, quarantined=[CheckpointId(1, 60)], current_epoch=1)
    assert steps(gone) == [(1, 10), (1, 20), (1, 40)]


def test_nothing_good_nothing_deleted() -> None:
    found = [at(10, state="damaged"), at(20, state="incomplete"), at(30)]
    assert to_delete(found, keep_last=1, quarantined=[CheckpointId(1, 30)], current_epoch=1) == []
    assert to_delete([], keep_last=1, current_epoch=1) == []


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError):
        to_delete([], keep_last=0, current_epoch=1)
    with pytest.raises(UsageError):
        to_delete([], keep_last=1, keep_every=-1, current_epoch=1)


@given(data=st.data())
def test_the_newest_good_ones_are_never_given_up(data: st.DataObject) -> None:
    identities = data.draw(
        st.lists(st.builds(CheckpointId, st.integers(1, 3), st.integers(1, 12)), unique=True, max_size=12)
    )
    states: st.SearchStrategy[State] = st.sampled_from(["complete", "complete", "incomplete", "damaged"])
    found = [at(one.step, one.epoch, data.draw(states)) for one in identities]
    some = st.sets(st.sampled_from(identities)) if identities else st.just(set())
    pinned, busy, gone_astray, bad = (data.draw(some) for _ in range(4))
    keep = data.draw(st.integers(1, 4))
    every = data.draw(st.integers(0, 4))
    deleted = to_delete(
        found,
        keep_last=keep,
        keep_every=every,
        pinned=pinned,
        busy=busy,
        abandoned=gone_astray.__contains__,
        quarantined=bad,
        current_epoch=data.draw(st.integers(1, 3)),
    )
    assert deleted == sorted(set(deleted))
    assert not set(deleted) & (pinned | busy)
    good = sorted(
        one.checkpoint
        for one in found
        if one.state == "complete" and one.checkpoint not in gone_astray and one.checkpoint not in bad
    )
    assert not set(deleted) & set(good[-keep:])
    assert not good or len(set(good) - set(deleted)) >= min(keep, len(good))
    assert good or not deleted
    if every:
        assert not [one for one in deleted if one in good and one.step % every == 0]
