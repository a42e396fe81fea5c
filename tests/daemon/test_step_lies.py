"""One rank speaks of a step where its job cannot be: it is refused, and neither job nor history is moved by it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from baftd.daemon.pacing import JUMP, MOST_STEPS_AHEAD
from baftd.errors import FormatError, VerificationFailed
from baftd.wire.messages import Begin, JobStatus, Message, Ping, Pong, Seal, Skip
from tests.support.daemon import Daemon, RunDirs
from tests.support.wire_rank import WireRank, start_of, tensors, together, train

A = "a" * 32
FAR = {"a_jump": JUMP + 1, "too_far": MOST_STEPS_AHEAD + 1, "absurd": (1 << 53) - 10}
"""Steps ahead of the job."""

Lie = Callable[[WireRank, int], Message]


def begin(rank: WireRank, step: int) -> Message:
    assert rank.token is not None
    return Begin(token=rank.token, rank=rank.rank, step=step, slot=rank.grants[0].slot, generation=10**6)


def skip(rank: WireRank, step: int) -> Message:
    assert rank.token is not None
    return Skip(token=rank.token, rank=rank.rank, step=step, reason="nonsense")


def skip_of_a_slot(rank: WireRank, step: int) -> Message:
    assert rank.token is not None
    grant = take_grant(rank)
    return Skip(
        token=rank.token, rank=rank.rank, step=step, reason="nonsense", slot=grant[0], generation=grant[1]
    )


def seal_of_nothing(rank: WireRank, step: int) -> Message:
    """The slot's header says nothing of it."""
    assert rank.token is not None
    slot, generation = take_grant(rank)
    return Seal(
        token=rank.token, rank=rank.rank, step=step, updates=step, slot=slot, generation=generation, image_length=5000,
        small_length=10, digests=b"",
    )  # fmt: skip


def take_grant(rank: WireRank) -> tuple[int, int]:
    wait_for_grant(rank)
    grant = rank.grants.pop(0)
    return grant.slot, grant.generation


def wait_for_grant(rank: WireRank) -> None:
    for _ in range(100):
        if rank.grants:
            return
        rank.ask(Ping(), Pong)
    raise AssertionError(f"rank {rank.rank} was granted no slot")


LIES: dict[str, tuple[Lie, type[Exception], int]] = {
    "begin": (begin, FormatError, 1),
    "skip": (skip, FormatError, 1),
    "skip_of_a_slot": (skip_of_a_slot, FormatError, 1),
    "seal_of_nothing": (seal_of_nothing, VerificationFailed, 0),
}
"""What it is refused as, and how often it counts as a refused step."""


def job_of(daemon: Daemon) -> JobStatus:
    (job,) = daemon.status().jobs
    return job


def sent_alone(rank: WireRank, message: Message) -> None:
    """Send what wants no answer; raises the error that comes all the same."""
    rank.say(message)
    rank.ask(Ping(), Pong)


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", LIES)
def test_a_step_out_of_this_world_moves_nothing(run_dirs: RunDirs, name: str, far: str) -> None:
    lie, error, counted = LIES[name]
    with Daemon(run_dirs) as daemon, start_of(run_dirs, 2, A) as ranks:
        liar, honest = ranks
        train(ranks, 1, 3)
        for step in range(4, 10):
            wait_for_grant(liar)
            with pytest.raises(error):
                sent_alone(liar, lie(liar, step + FAR[far] - 1))
            train(ranks, step, step)
            job = job_of(daemon)
            assert job.highest_step == step
            assert [client.step for client in job.clients] == [step, step]
        assert job.counters["steps_refused"] == 6 * counted
        assert job.counters["dead"] == job.counters["skipped"] == 0
        assert daemon.status().counters["internal_errors"] == 0
        if counted:
            assert f"speaks of step {FAR[far] + 3} (" in said_once(daemon)
        assert honest.ask(Ping(), Pong).id


def said_once(daemon: Daemon) -> str:
    (line,) = [line for line in daemon.log.splitlines() if "step_refused" in line]
    return line


def test_a_job_that_begins_where_nothing_is_known_is_refused_one_message(run_dirs: RunDirs) -> None:
    """Its first snapshot is committed all the same: the header in the slot says the same step."""
    with Daemon(run_dirs) as daemon, start_of(run_dirs, 1, A) as ranks:
        together(ranks, WireRank.restored)
        together(ranks, lambda rank: rank.declare(tensors(rank.rank)))
        (rank,) = ranks
        rank.snapshot(50_001)
        rank.wait_committed(50_001)
        assert job_of(daemon).counters["steps_refused"] == 1
        assert "speaks of step 50001 (begin), but job gpt was at step 0 last: it counts once" in said_once(daemon)
        train(ranks, 50_002, 50_005)
        assert job_of(daemon).counters["steps_refused"] == 1
        assert rank.ask(Ping(), Pong).id


def test_a_later_step_confirms_a_skip(run_dirs: RunDirs) -> None:
    with Daemon(run_dirs) as daemon, start_of(run_dirs, 1, A) as ranks:
        train(ranks, 1, 1)
        (rank,) = ranks

        def says(step: int, *, refused: int) -> None:
            with suppress(FormatError):
                sent_alone(rank, skip(rank, step))
            assert job_of(daemon).counters["steps_refused"] == refused, step

        says(50_000, refused=1)
        says(50_000, refused=2)  # the same again confirms nothing
        says(2, refused=2)  # so that was nonsense
        says(50_001, refused=3)
        says(50_000 + JUMP + 2, refused=4)  # not close enough
        says(50_000 + JUMP + 3, refused=4)
        assert job_of(daemon).highest_step == 50_000 + JUMP + 3
