"""One rank tells nonsense of itself: the others still get their plans, and the job its interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from baftd.checkpoint.identity import Token
from baftd.daemon.pacing import JobPacing
from baftd.pipeline.events import Event, EventKind, pack_event, unpack_events
from baftd.pipeline.governor import Decision
from baftd.pipeline.pacing import NO_LIMIT, RankPlan
from baftd.telemetry.counters import JOB_COUNTERS, Counters
from baftd.wire.messages import CopyPlan, JobStatus, Ping, Pong, Timings
from tests.daemon.test_pacing import AUTO, job_of, paced
from tests.support.daemon import Daemon, RunDirs, wait_until
from tests.support.paced_rank import Machine

if TYPE_CHECKING:
    from baftd.daemon.clients import Client

FAR = 900_000
MOST = (1 << 64) - 1
HELD = 5_000_000
"""ns for which a snapshot holds the training thread, of steps of 48 ms: one at every step is beyond the budget,
whatever is believed of copying."""
WITHIN = 900
"""Steps in which the interval has to be in force; an honest job takes about two hundred."""
NBYTES = 1 << 20
MACHINE = Machine(inside=NBYTES / 4, fence=NBYTES / 8)
"""It copies a snapshot in half of a step's windows, or in 8 ms at the fence."""

Lie = Callable[[Timings, int], None]


def copied_at_once(kind: EventKind) -> Lie:
    """2^64 - 1 bytes in a moment."""

    def lie(timings: Timings, step: int) -> None:
        at = timings.begun
        timings.events += pack_event(Event(kind, -1, 0, at, at + 51_000, MOST))

    return lie


def all_amounts(timings: Timings, step: int) -> None:
    """Every event of the step is of 2^64 - 1 bytes."""
    events = unpack_events(timings.events)
    timings.events = b"".join(pack_event(event._replace(amount=MOST)) for event in events)


def once_far_ahead(timings: Timings, step: int) -> None:
    if step == 1:
        timings.step = FAR


def further_every_time(timings: Timings, step: int) -> None:
    timings.step = 1000 * step


def for_ever_ahead(timings: Timings, step: int) -> None:
    timings.step = FAR + step


def creeping_ahead(timings: Timings, step: int) -> None:
    timings.step = 250 * step


def stays_behind(timings: Timings, step: int) -> None:
    timings.step = 1


def counts(timings: Timings, step: int) -> None:
    timings.overruns = timings.lost = NO_LIMIT


def bytes_and_generation(timings: Timings, step: int) -> None:
    timings.plan = 1 << 48
    timings.in_windows, timings.outside, timings.at_fence = NBYTES, 0, 0


LIES: dict[str, Lie] = {
    "amount_inside": copied_at_once(EventKind.COPY_INSIDE),
    "amount_outside": copied_at_once(EventKind.COPY_OUTSIDE),
    "amount_fence": copied_at_once(EventKind.COPY_FENCE),
    "all_amounts": all_amounts,
    "once_far_ahead": once_far_ahead,
    "further_every_time": further_every_time,
    "for_ever_ahead": for_ever_ahead,
    "creeping_ahead": creeping_ahead,
    "stays_behind": stays_behind,
    "counts": counts,
    "bytes_and_generation": bytes_and_generation,
}


@pytest.fixture(scope="module")
def dirs() -> Iterator[RunDirs]:
    """Directories of all jobs of this module that have a name of their own."""
    made = RunDirs()
    yield made
    assert not made.close()


@pytest.fixture(scope="module")
def served(dirs: RunDirs) -> Iterator[Daemon]:
    """The daemon of all these jobs."""
    with Daemon(dirs, **AUTO) as running:
        yield running


@pytest.mark.parametrize("name", LIES)
def test_what_one_rank_says_of_itself_takes_nothing_from_the_others(dirs: RunDirs, served: Daemon, name: str) -> None:
    errors = served.status().counters["internal_errors"]
    with paced(dirs, 2, machine=MACHINE, nbytes=NBYTES, job=name) as (liar, honest):
        for step in range(1, WITHIN):
            for rank in (liar, honest):
                rank.listen(0.001)
                timings = rank.timings(step, rank.due(step))
                if timings.copied:
                    timings.held_ns += HELD
                    timings.period += HELD
                if rank is liar:
                    LIES[name](timings, step)
                rank.say(timings)
            in_force = honest.cadences[-1]
            if in_force.every > 1 and in_force.from_step <= step and honest.copy_plan is not None:
                break
        else:
            raise AssertionError(f"{honest.cadences[-1]}, {len(honest.plans)} plans: {job_of(served, name)}")
        for plan in honest.plans + liar.plans:
            assert max((*plan.windows, plan.further, plan.outside)) <= NO_LIMIT
        assert honest.ask(Ping(), Pong).id
        job: JobStatus = job_of(served, name)
        assert job.counters["timings"] >= step
        assert job.counters["plans_refused"] == 0
        assert served.status().counters["internal_errors"] == errors


def test_a_jump_counts_once_a_next_step_confirms_it(run_dirs: RunDirs) -> None:
    """A job that begins where the daemon does not know of: one refused step, then all is as ever."""
    with Daemon(run_dirs, **AUTO) as daemon, paced(run_dirs, 2) as ranks:

        def tells(step: int, *, counted: int, refused: int) -> None:
            for rank in ranks:
                rank.say(rank.timings(step, copied=True))
            wait_until(
                lambda: job_of(daemon).counters["timings"] + job_of(daemon).counters["timings_refused"]
                == counted + refused,
                lambda: f"step {step}: {job_of(daemon)}",
            )
            assert job_of(daemon).counters["timings_refused"] == refused

        tells(500_000, counted=0, refused=2)
        tells(500_001, counted=2, refused=2)
        tells(500_200, counted=4, refused=2)
        tells(700_000, counted=4, refused=4)
        tells(500_201, counted=6, refused=4)  # so that was nonsense
        tells(700_001, counted=6, refused=6)
        tells(700_300, counted=6, refused=8)  # not close enough
        tells(700_301, counted=8, refused=8)


def test_a_plan_that_cannot_be_sent_keeps_no_other_rank_from_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the policy makes of a rank's data: it is said once, counted, and the rank keeps the plan it had."""
    sent: list[CopyPlan] = []
    said: list[tuple[str, Any]] = []
    token = Token(1, "a" * 32)
    clients = [SimpleNamespace(rank=rank, alive=True, token=token, peer=rank) for rank in range(2)]
    log = SimpleNamespace(warning=lambda event, **fields: said.append((event, fields)), debug=lambda *_, **__: None)
    job: Any = SimpleNamespace(
        name="gpt", view=None, log=log, counters=Counters(JOB_COUNTERS),
        clients=SimpleNamespace(of_job=lambda name: clients),
        context=SimpleNamespace(
            settings=SimpleNamespace(overhead_budget=0.01, overhead_probe=0, interval=None), clock=lambda: 0.0,
            server=SimpleNamespace(send=lambda peer, message: sent.append(copy(message))),
        ),
    )  # fmt: skip
    pacing = JobPacing(job)
    monkeypatch.setattr(pacing, "_decide_after", lambda seconds: None)
    for rank in range(2):
        pacing.declared(rank, token, nbytes=1 << 20, most=1 << 20)

    def decide(first: RankPlan) -> None:
        decision = Decision("windows", 1, 0, {0: first, 1: RankPlan((7,))}, 0, 0.1, 0.0, "", (0, 1))
        monkeypatch.setattr(pacing.governor, "decide", lambda: decision)
        pacing._decide()

    decide(RankPlan((1,)))
    timed = RankPlan(timed=((0, 1, MOST),))
    for bad in (RankPlan((MOST + 1,)), RankPlan((NO_LIMIT + 1,)), RankPlan(outside=-1), timed):
        decide(bad)
    assert [(plan.rank, plan.generation) for plan in sent] == [(0, 1), *((1, number) for number in range(1, 6))]
    assert job.counters["plans_refused"] == 4
    assert job.counters["copy_plans"] == 6
    ((event, fields),) = said
    assert (event, fields["rank"]) == ("plan_refused", 0)
    assert fields["why"]
    pacing.greeted(cast("Client", clients[0]))
    assert sent[-1].windows == [1], "the one that it has"
    decide(RankPlan((2,)))
    assert [(plan.windows, plan.generation) for plan in sent if plan.rank == 0][-1] == ([2], 2)
    decide(RankPlan((MOST + 1,)))
    assert len(said) == 2, "it was well in between"


def test_counters_stay_at_what_a_message_takes() -> None:
    counters = Counters(JOB_COUNTERS)
    for _ in range(3):
        counters.add("bytes_in_windows", NO_LIMIT - 1)
    assert counters["bytes_in_windows"] == NO_LIMIT
