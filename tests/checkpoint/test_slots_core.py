"""The slots of one rank: which is granted next, what may become of each, and the table made again after a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baftd.checkpoint.facts import Cadence, JobView, Record, ShardFacts, Writer
from baftd.checkpoint.history import History
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.checkpoint.slots import (
    DAEMON,
    Fate,
    HeaderFacts,
    Reason,
    Slot,
    SlotState,
    SlotTable,
    rebuild_table,
    slot_record,
    table_records,
)
from baftd.errors import FormatError

FREE, FILLING, SEALED, VERIFIED = SlotState
TRAINER = Writer(100, 1)


def token(epoch: int) -> Token:
    return Token(epoch, f"{epoch:032x}")


def shard(epoch: int, step: int) -> ShardFacts:
    return ShardFacts(token(epoch), 0, 1, step, step, b"tree", b"root", 1)


def verified(index: int, epoch: int, step: int, **flags: bool) -> Slot:
    found = Slot(index, 1, VERIFIED, step=step, shard=shard(epoch, step), reported=True)
    return replace(found, **flags)  # type: ignore[arg-type]


def filling(index: int, generation: int = 1, writer: Writer = TRAINER) -> Slot:
    return Slot(index, generation, FILLING, writer, token(1))


def table(*slots: Slot) -> SlotTable:
    return SlotTable(0, {slot.index: slot for slot in slots})


def history(*parents: tuple[int, int] | None) -> History:
    found = History()
    for epoch, parent in enumerate(parents, 1):
        found.open_epoch(token(epoch), world=1, parent=CheckpointId(*parent) if parent else None, expected=epoch - 1)
    return found


def view(line: History, committed: tuple[int, int] | None = None, **more: tuple[object, ...]) -> JobView:
    lists = {"dead": (), "persist": (), "quarantined": (), **more}
    chosen = CheckpointId(*committed) if committed else None
    return JobView("s", 1, line.line, chosen, None, cadence=Cadence(0, 1), **lists)  # type: ignore[arg-type]


# ---------------------------------------------------------------- fates

AFRESH, BRANCHED = history(None), history(None, (1, 5))
BEGUN, IN_NEW = view(AFRESH, (1, 3)), view(BRANCHED, (2, 7))


@pytest.mark.parametrize(
    ("slot", "line", "said", "reason"),
    [
        (Slot(0), AFRESH, BEGUN, Reason.EMPTY),
        (filling(0), AFRESH, BEGUN, Reason.GRANTED),
        (Slot(0, 1, SEALED, shard=shard(1, 1)), AFRESH, BEGUN, Reason.DIGESTING),
        (verified(0, 1, 1), AFRESH, None, Reason.UNHEARD),
        (verified(0, 1, 3), AFRESH, BEGUN, Reason.COMMITTED),
        (verified(0, 1, 2), AFRESH, BEGUN, Reason.SUPERSEDED),
        (verified(0, 1, 4), AFRESH, BEGUN, Reason.WAITING),
        (verified(0, 1, 4, reported=False), AFRESH, BEGUN, Reason.UNREPORTED),
        (verified(0, 1, 4, dead=True), AFRESH, BEGUN, Reason.DEAD),
        (verified(0, 1, 4), AFRESH, view(AFRESH, (1, 3), dead=(4,)), Reason.DEAD),
        (verified(0, 1, 4), AFRESH, view(AFRESH, (1, 3), quarantined=(CheckpointId(1, 4),)), Reason.QUARANTINED),
        (verified(0, 1, 3), AFRESH, view(AFRESH, (1, 3), quarantined=(CheckpointId(1, 3),)), Reason.COMMITTED),
        (verified(0, 1, 2, persisting=True), AFRESH, BEGUN, Reason.PERSIST),
        (verified(0, 1, 2), AFRESH, view(AFRESH, (1, 3), persist=(2,)), Reason.PERSIST),
        (replace(verified(0, 1, 2), sending=1), AFRESH, BEGUN, Reason.SEND),
        (verified(0, 2, 9), AFRESH, BEGUN, Reason.AHEAD),
        (verified(0, 1, 5), BRANCHED, view(BRANCHED, (1, 5)), Reason.RESTORE),
        (verified(0, 1, 6), BRANCHED, view(BRANCHED, (1, 5)), Reason.LEFT),
        (verified(0, 1, 6), BRANCHED, IN_NEW, Reason.ABANDONED),
        (verified(0, 1, 5), BRANCHED, IN_NEW, Reason.SUPERSEDED),
        (verified(0, 1, 2), BRANCHED, view(BRANCHED, (1, 5), persist=(2,)), Reason.SUPERSEDED),
    ],
)
def test_why_a_slot_is_kept_or_not(slot: Slot, line: History, said: JobView | None, reason: Reason) -> None:
    assert table(slot).reason(slot, line, said) is reason
    assert reason.words.split()[0] in table(slot).why(slot, line, said)


# ---------------------------------------------------------------- choosing


def test_a_free_slot_comes_first_and_the_least_used_of_them() -> None:
    found = table(Slot(0, 4), Slot(1, 2), Slot(2, 2), verified(3, 1, 1))
    assert found.choose(AFRESH, BEGUN) is found.slots[1]
    assert found.choose(AFRESH, BEGUN, fitting=[0, 3]) is found.slots[0]


def test_what_is_abandoned_goes_before_what_nobody_has_heard_of() -> None:
    here = verified(0, 2, 6, reported=False)
    left = verified(1, 1, 9)
    said = view(BRANCHED, (1, 5))
    assert table(here, left, verified(2, 1, 5)).choose(BRANCHED, said) is left
    assert table(here, verified(2, 1, 5)).choose(BRANCHED, said) is here


def test_the_oldest_unreported_step_rotates() -> None:
    slots = [verified(index, 1, step, reported=False) for index, step in enumerate((6, 4, 5))]
    assert table(*slots, verified(3, 1, 3)).choose(AFRESH, BEGUN) is slots[1]


def test_nothing_is_chosen_that_is_kept_retired_or_too_small() -> None:
    kept = [filling(0), Slot(1, 1, SEALED, shard=shard(1, 5)), verified(2, 1, 3), verified(3, 1, 4)]
    assert table(*kept).choose(AFRESH, BEGUN) is None
    assert table(*kept, replace(Slot(4), retired=True)).choose(AFRESH, BEGUN) is None
    assert table(*kept, Slot(4)).choose(AFRESH, BEGUN, fitting=[0, 1]) is None
    assert table(*kept, Slot(4)).choose(AFRESH, None) is not None


flags = st.fixed_dictionaries({name: st.booleans() for name in ("reported", "dead", "persisting", "retired")})
steps = st.integers(1, 6)
contents = st.builds(lambda at, more: verified(0, *at, **more), st.tuples(st.integers(1, 2), steps), flags)
anything = st.one_of(contents, st.builds(Slot, st.just(0), st.integers(0, 3)), st.just(filling(0)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(anything, min_size=1, max_size=5),
    st.sampled_from([AFRESH, BRANCHED]),
    st.none() | st.tuples(steps, st.sets(steps, max_size=2), st.sets(steps, max_size=2)),
)
def test_what_is_chosen_can_be_wanted_by_nobody(
    drawn: list[Slot], line: History, said: tuple[int, set[int], set[int]] | None
) -> None:
    found = table(*(replace(slot, index=index) for index, slot in enumerate(drawn)))
    last = None
    if said is not None:
        step = said[0] if line is AFRESH else min(said[0], 5)
        last = view(line, (1, step), dead=tuple(said[1]), persist=tuple(said[2]))
    chosen = found.choose(line, last)
    free = [slot for slot in found if slot.state is FREE and not slot.retired]
    assert (chosen in free) == bool(free)
    if chosen is None:
        assert all(slot.retired or found.fate(slot, line, last) is Fate.KEEP for slot in found)
        return
    assert not chosen.retired
    assert chosen.state in (FREE, VERIFIED)
    if chosen.shard is not None:
        assert last is not None
        assert not chosen.persisting
        assert not line.on_line(chosen.shard.token, chosen.shard.step) or (
            chosen.shard.checkpoint not in (last.committed, last.restored)
            and (chosen.shard.token != last.token or chosen.shard.step not in last.persist)
        )


# ---------------------------------------------------------------- a new layout


def test_slots_of_an_older_layout_retire_and_come_back() -> None:
    found = table(Slot(0), Slot(1))
    assert [slot.index for slot in found.lay([1, 2])] == [0]
    assert [slot.index for slot in found if not slot.retired] == [1, 2]
    assert found.lay([1, 2]) == []
    found.lay([0])
    assert not found.slots[0].retired


def test_a_slot_made_anew_goes_on_with_its_generation() -> None:
    found = table(Slot(0, 7), Slot(1, 2))
    found.remove(0)
    again = SlotTable(0)
    rebuild_table(again, table_records(found), {1: HeaderFacts(FREE, 2)})
    for each in (found, again):
        each.lay([0, 1])
        assert {slot.index: slot.generation for slot in each} == {0: 7, 1: 2}


# ---------------------------------------------------------------- after a restart


def rebuilt(records: list[Record], *headers: HeaderFacts | None) -> tuple[Slot, list[Record]]:
    found = SlotTable(0)
    written = rebuild_table(found, records, dict(enumerate(headers)))
    return found.slots[0], written


def header(state: SlotState, generation: int, step: int = 1) -> HeaderFacts:
    return HeaderFacts(state, generation, shard(1, step), TRAINER)


GRANT = slot_record("grant", 0, filling(0, 3))
VERIFIED_1 = slot_record("verified", 0, replace(verified(0, 1, 1), generation=3))
FREE_3 = slot_record("free", 0, Slot(0, 3))


@pytest.mark.parametrize(
    ("records", "found", "state"),
    [
        ([GRANT], header(FILLING, 3), FILLING),
        ([GRANT], header(SEALED, 3), SEALED),
        ([GRANT], header(VERIFIED, 2), FILLING),
        ([GRANT], HeaderFacts(FREE, 2), FILLING),
        ([GRANT], None, FILLING),
        ([GRANT, VERIFIED_1], header(SEALED, 3), VERIFIED),
        ([GRANT, VERIFIED_1], header(VERIFIED, 3), VERIFIED),
        ([GRANT, VERIFIED_1], header(VERIFIED, 3, step=2), FREE),
        ([GRANT, VERIFIED_1], HeaderFacts(FREE, 3), FREE),
        ([GRANT, VERIFIED_1], None, FREE),
        ([GRANT, VERIFIED_1, FREE_3], header(VERIFIED, 3), FREE),
        ([FREE_3, GRANT], header(VERIFIED, 2), FILLING),
        # The journal, or its tail, is lost: the header alone counts, and its content is digested again.
        ([], header(VERIFIED, 3), SEALED),
        ([], header(FILLING, 3), FILLING),
        ([], HeaderFacts(FREE, 3), FREE),
        ([], None, FREE),
        ([GRANT, VERIFIED_1], header(VERIFIED, 4), SEALED),
        ([GRANT], header(FILLING, 4), FILLING),
        # What the daemon itself was fetching is fetched again, unless it was complete.
        ([slot_record("grant", 0, filling(0, 3, DAEMON))], header(FILLING, 3), FREE),
        ([slot_record("grant", 0, filling(0, 3, DAEMON))], header(SEALED, 3), SEALED),
    ],
)
def test_journal_and_header_together_say_what_a_slot_is(
    records: list[Record], found: HeaderFacts | None, state: SlotState
) -> None:
    slot, written = rebuilt(records, found)
    assert slot.state is state
    assert slot.generation == max([record["gen"] for record in records] + [found.generation if found else 0])
    assert [record["k"] for record in written] == (["free"] if state is FREE else [])
    if state is FILLING:
        assert (slot.writer, slot.token) == (TRAINER, token(1))
    # To be restarted once more changes nothing.
    again, _ = rebuilt([*records, *written], found)
    assert again == slot


def test_other_ranks_and_other_records_are_passed_over() -> None:
    others: list[Record] = [{**VERIFIED_1, "rank": 1}, {"k": "layout", "rank": 0}, {"k": "epoch"}]
    slot, _ = rebuilt([GRANT, *others], header(FILLING, 3))
    assert (slot.state, slot.step) == (FILLING, 1)


def test_a_slot_without_a_file_is_gone() -> None:
    found = SlotTable(0)
    assert rebuild_table(found, [GRANT, VERIFIED_1], {}) == []
    assert list(found) == []


@pytest.mark.parametrize("wrong", [{"gen": "x"}, {"writer": [1]}, {"token": 1}, {"slot": None}])
def test_a_record_that_cannot_be_one_is_an_error(wrong: Record) -> None:
    with pytest.raises(FormatError):
        rebuilt([{**GRANT, **wrong}], None)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["grant", "verified", "free"]), steps), max_size=12))
def test_a_compacted_journal_says_the_same(done: list[tuple[int, str, int]]) -> None:
    records, headers = [], {index: HeaderFacts(FREE, 0) for index in range(3)}
    for generation, (index, kind, step) in enumerate(done, 1):
        slot = replace(filling(index, generation), shard=shard(1, step))
        records.append(slot_record(kind, 0, slot))
        headers[index] = header(FILLING if kind == "grant" else VERIFIED, generation, step)
    found, again = SlotTable(0), SlotTable(0)
    rebuild_table(found, records, headers)
    rebuild_table(again, table_records(found), headers)
    assert again == found
