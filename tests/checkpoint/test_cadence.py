"""One cadence out of what nodes propose: the longest counts, ranks that hear of it in time agree, late ones say so."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baftd.checkpoint.cadence import Cadence, CadenceProposal, is_probe
from baftd.checkpoint.commit import JobCoordinator, NotJoined, Policy, Publish
from baftd.checkpoint.commit_cadence import CADENCE_MARGIN, CADENCE_SECONDS, CadenceAgreement
from baftd.checkpoint.facts import JobView, Ready, Record, Report, ShardFacts, next_incarnation
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.recovery import RestorePlan, plan_restore
from baftd.errors import Fenced, FormatError, UsageError

STORE = next_incarnation(None, 1)
LIFE = next_incarnation(None, 7)
NEXT = next_incarnation(LIFE, 8)


def token(epoch: int) -> Token:
    return Token(epoch, f"{epoch:032x}")


def coordinator(*, fixed: bool = False, interval: int = 1, world: int = 2, nodes: int = 2) -> JobCoordinator:
    core = JobCoordinator("job", store=STORE, policy=Policy(interval=interval, interval_fixed=fixed))
    core.open_epoch(token(1).incarnation, plan_restore(core.history, []), world=world, expected=0, now=0.0)
    for node in range(nodes):
        core.join(f"n{node}", LIFE, None, 0.0)
    return core


def again(core: JobCoordinator, records: list[Record] | None = None) -> JobCoordinator:
    kept = core.to_records() if records is None else records
    return JobCoordinator.replay("job", kept, store=next_incarnation(STORE, 2), policy=core.policy)


def proposal(node: int, every: int, probe: int = 0, **more: object) -> CadenceProposal:
    return CadenceProposal(f"n{node}", every, probe, **more)  # type: ignore[arg-type]


def reach(core: JobCoordinator, step: int) -> list[JobView]:
    """Every rank holds this step and has passed it; what is published at that."""
    published = []
    for rank in (0, 1):
        shard = ShardFacts(token(core.history.epoch), rank, 2, step, step, b"tree", b"root%d" % rank, 1)
        published += views(core.report(Report(core.store, "n0", LIFE, shard, "memory", step, (step,)), 0.0))
    return published


def views(ready: Ready[object]) -> list[JobView]:
    return [order.view for order in ready.announce if isinstance(order, Publish)]


# ---------------------------------------------------------------- values


def test_a_cadence_answers_for_steps_before_it_too() -> None:
    cadence = Cadence(20, 4, 0, (Cadence(0, 1), Cadence(10, 5)))
    assert [step for step in range(1, 30) if cadence.due(step)] == [*range(1, 10), 10, 15, 20, 24, 28]
    later = Cadence(20, 4, 0, (Cadence(10, 5),))
    assert later.due(5)
    assert not later.due(6)


def test_probes_are_left_out_at_about_the_rate_that_is_asked_for() -> None:
    out = [step for step in range(1, 64 * 500) if is_probe(step, 64)]
    assert 400 < len(out) < 600
    distances = {later - earlier for earlier, later in itertools.pairwise(out)}
    assert len(distances) > 100, "not at regular distances: what repeats every 64 steps would be taken for overhead"
    assert not any(is_probe(step, 0) for step in range(1000))


simple = st.builds(Cadence, st.integers(0, 60), st.integers(1, 12), st.sampled_from([0, 1, 3, 8]))
cadences = st.builds(
    lambda one, earlier: replace(one, earlier=tuple(sorted(earlier, key=lambda c: c.from_step))),
    simple,
    st.lists(simple, max_size=3, unique_by=lambda cadence: cadence.from_step),
)


@given(cadences, cadences, st.integers(0, 80))
@example(Cadence(0, 1), Cadence(0, 5), 14)
def test_what_a_late_rank_left_out_is_named_or_settled_by_a_newer_step(known: Cadence, new: Cadence, at: int) -> None:
    missed = new.missed(known, at)
    lost = [step for step in range(1, at + 1) if new.due(step) and not known.due(step)]
    held = [step for step in range(1, at + 1) if new.due(step) and known.due(step)]
    if missed is not None:
        assert missed in lost
    newest = max([*held, missed or 0], default=0)
    assert all(step <= newest for step in lost), "the rank's word about a newer step declares all before it dead"
    assert (missed is None) == (max(lost, default=0) <= max(held, default=0))


def test_a_long_interval_is_not_walked_step_by_step() -> None:
    begun = time.process_time()
    for _ in range(100):
        assert Cadence(0, 10**9).missed(Cadence(0, 7), 10**9 - 1) is None
        assert Cadence(0, 10**9).missed(Cadence(0, 7), 3 * 10**9) == 3 * 10**9
    assert time.process_time() - begun < 1.0


# ---------------------------------------------------------------- who decides


def test_the_longest_interval_of_all_nodes_is_the_jobs() -> None:
    core = coordinator()
    assert core.view.cadence == Cadence(0, 1)
    assert core.view.cadence_by is None
    first = core.propose(token(1), LIFE, proposal(0, 3, rank=2, why="rank 2 needs 3"))
    assert [record["k"] for record in first.records] == ["cadence"]
    assert views(first)[0].cadence.every == 3
    assert views(first)[0].cadence_by == proposal(0, 3, rank=2, why="rank 2 needs 3")
    less = core.propose(token(1), LIFE, proposal(1, 2, rank=5))
    assert less == Ready(), "another node that needs less changes nothing"
    more = core.propose(token(1), LIFE, proposal(1, 4, rank=5))
    assert core.view.cadence.every == 4
    assert (core.view.cadence_by or proposal(9, 1)).rank == 5
    assert views(more)
    core.propose(token(1), LIFE, proposal(1, 1, rank=5))
    assert core.view.cadence.every == 3, "what a node takes back counts no more"
    assert (core.view.cadence_by or proposal(9, 1)).rank == 2


def test_the_same_again_changes_nothing() -> None:
    core = coordinator()
    core.propose(token(1), LIFE, proposal(0, 3))
    version = core.view.version
    assert core.propose(token(1), LIFE, proposal(0, 3)) == Ready()
    assert core.propose(token(1), LIFE, proposal(1, 1)) == Ready()
    assert core.view.version == version
    told = core.propose(token(1), LIFE, proposal(0, 3, why="for another reason"))
    assert (told.records, len(views(told))) == ((), 1), "a new reason is told, and not worth a write to disk"


def test_one_node_can_turn_probes_off_else_the_rarest_count() -> None:
    core = coordinator()
    core.propose(token(1), LIFE, proposal(0, 1, 64))
    assert core.view.cadence.probe == 64
    core.propose(token(1), LIFE, proposal(1, 1, 256))
    assert core.view.cadence.probe == 256
    core.propose(token(1), LIFE, proposal(1, 1, 0))
    assert core.view.cadence.probe == 0


def test_a_node_that_leaves_stops_counting() -> None:
    core = coordinator()
    core.propose(token(1), LIFE, proposal(0, 2))
    core.propose(token(1), LIFE, proposal(1, 9))
    lost = core.node_lost("n1", LIFE, "its lease has run out")
    assert core.view.cadence.every == 2
    assert [record["k"] for record in lost.records] == ["cadence"]
    assert views(lost)[-1].cadence.every == 2
    core.node_lost("n0", LIFE, "too")
    assert core.view.cadence.every == 2, "with nobody left it stays as it is"


def test_a_node_whose_memory_is_new_has_proposed_nothing() -> None:
    core = coordinator()
    core.propose(token(1), LIFE, proposal(0, 2))
    core.propose(token(1), LIFE, proposal(1, 9))
    core.join("n1", LIFE, None, 0.0)
    assert core.view.cadence.every == 9, "a daemon that was restarted beside its slots"
    joined = core.join("n1", NEXT, None, 0.0)
    assert core.view.cadence.every == 2
    assert [record["k"] for record in joined.records] == ["cadence"]
    assert core.propose(token(1), LIFE, proposal(1, 9)).announce == (NotJoined("n1", LIFE),)
    assert core.view.cadence.every == 2


def test_old_tokens_and_nonsense_are_refused() -> None:
    core = coordinator()
    with pytest.raises(Fenced):
        core.propose(Token(1, "f" * 32), LIFE, proposal(0, 2))
    for wrong in (proposal(0, 0), proposal(0, -3), proposal(0, 1, -1), proposal(0, 1, 1)):
        with pytest.raises(UsageError):
            core.propose(token(1), LIFE, wrong)
    assert isinstance(core.propose(token(1), LIFE, proposal(7, 2)).announce[0], NotJoined)
    assert core.view.cadence == Cadence(0, 1)


def test_a_fixed_interval_is_nobodys_to_change() -> None:
    core = coordinator(fixed=True, interval=4)
    assert core.propose(token(1), LIFE, proposal(0, 9, 64)) == Ready()
    assert core.view.cadence == Cadence(0, 4)


# ---------------------------------------------------------------- when


def test_a_change_begins_beyond_every_rank_and_says_what_holds_until_then() -> None:
    core = coordinator()
    reach(core, 40)
    core.propose(token(1), LIFE, proposal(0, 5))
    cadence = core.view.cadence
    assert cadence.from_step == 40 + CADENCE_MARGIN
    assert [step for step in range(44, 60) if cadence.due(step)] == [44, 45, 46, 47, 50, 55]


def test_between_steps_that_are_due_ranks_are_further_than_they_have_said() -> None:
    core = coordinator(interval=100)
    reach(core, 200)
    core.propose(token(1), LIFE, proposal(0, 1))
    assert core.view.cadence.from_step >= 299 + CADENCE_MARGIN
    told = coordinator(interval=100)
    reach(told, 200)
    told.propose(token(1), LIFE, proposal(0, 1, step=231))
    assert told.view.cadence.from_step == 231 + CADENCE_MARGIN, "unless the node says where they are"


def test_the_margin_is_seconds_where_steps_are_short() -> None:
    core = coordinator()
    core.propose(token(1), LIFE, proposal(0, 2, step=10, step_seconds=0.001))
    assert core.view.cadence.from_step == 10 + round(CADENCE_SECONDS / 0.001)
    slow = coordinator()
    slow.propose(token(1), LIFE, proposal(0, 2, step=10, step_seconds=4.0))
    assert slow.view.cadence.from_step == 10 + CADENCE_MARGIN
    tiny = coordinator()
    tiny.propose(token(1), LIFE, proposal(0, 2, step=10, step_seconds=1e-9))
    assert tiny.view.cadence.from_step < 100_000


def test_a_new_start_holds_what_was_agreed_from_its_first_step_and_hears_its_own_nodes() -> None:
    core = coordinator()
    reach(core, 3)
    core.propose(token(1), LIFE, proposal(0, 7))
    plan = RestorePlan(CheckpointId(1, 3), token(1), 2, 3, {}, (), 3)
    core.open_epoch(token(2).incarnation, plan, world=2, expected=1, now=0.0)
    assert core.view.cadence == Cadence(0, 7)
    with pytest.raises(Fenced):
        core.propose(token(1), LIFE, proposal(0, 9))
    core.propose(token(2), LIFE, proposal(1, 2))
    assert core.view.cadence.every == 2, "n0's ranks of the former start are no more"


@pytest.mark.parametrize("rewritten", [True, False])
def test_it_survives_a_restart_with_who_decided(rewritten: bool) -> None:
    core = coordinator()
    records = list(core.to_records())
    reach(core, 40)
    records += core.propose(token(1), LIFE, proposal(0, 5, 32, rank=3, why="rank 3 needs 5")).records
    back = again(core, None if rewritten else records)
    assert back.view.cadence == core.view.cadence
    assert back.view.cadence.earlier
    by = back.view.cadence_by
    assert by is not None
    assert (by.node, by.every, by.rank, by.why) == ("n0", 5, 3, "rank 3 needs 5")


def test_after_a_restart_a_change_begins_beyond_the_highest_step_ever_seen() -> None:
    core = coordinator()
    reach(core, 40)
    back = again(core)
    back.set_cadence(3)
    assert back.view.cadence.from_step >= 40 + CADENCE_MARGIN


def test_a_record_that_makes_no_sense_is_refused() -> None:
    agreement = CadenceAgreement(1, fixed=False)
    for wrong in ({"every": 0}, {"every": 2, "earlier": [[0, 0, 0]]}):
        with pytest.raises(FormatError):
            agreement.apply({"k": "cadence", "from": 4, **wrong})
    assert agreement.cadence == Cadence(0, 1)


def test_many_changes_at_once_wait_for_those_before_them() -> None:
    core = coordinator()
    reach(core, 40)
    for every in range(2, 9):
        core.propose(token(1), LIFE, proposal(0, every, step=39 + every))
    assert core.view.cadence.every == 5
    assert len(core.view.cadence.earlier) <= 6
    reach(core, core.view.cadence.from_step + 1)
    assert core.view.cadence.every == 8, "the last word comes into force without being said again"


@given(st.integers(0, 2**32), st.integers(2, 60), st.sampled_from([0.1, 0.4, 1.0]))
@example(3034, 56, 0.4)
def test_ranks_that_hear_within_the_margin_agree_about_every_step(seed: int, steps: int, changes: float) -> None:
    """Views come out of order, some steps late, or (but for the newest) not at all."""
    rng = random.Random(seed)
    core = coordinator(interval=rng.choice([1, 1, 7]))
    known = [core.view] * 3
    mail: list[tuple[int, int, JobView]] = []
    for step in range(1, steps + 1):
        said = set()
        for rank in range(3):
            for _, _, view in [one for one in mail if one[0] == rank and one[1] <= step]:
                if view.version > known[rank].version:  # as a node does
                    known[rank] = view
            said.add(known[rank].cadence.due(step))
        assert len(said) == 1, f"ranks disagree about step {step}"
        mail = [one for one in mail if one[1] > step]
        published = []
        if rng.random() < changes:
            say = proposal(rng.randrange(2), rng.randint(1, 9), rng.choice([0, 0, 3]), step=step)
            published += views(core.propose(token(1), LIFE, say))
        if rng.random() < 0.3:
            published += reach(core, step)
        for view in published:
            mail += [(rank, step + rng.randint(1, CADENCE_MARGIN - 1), view) for rank in range(3)]
