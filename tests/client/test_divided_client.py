"""What the client makes of a division: it cuts its sources, watches what it saves, and reads everything back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baft_client.cutting import Cutting
from baft_client.engine import CopyEngine
from baft_client.load_engine import load_engine
from baft_client.saved import SavedShards
from baft_client.source import OutcomeKind, Source
from baftd.checkpoint.cutting import cut_entry
from baftd.checkpoint.division import divide_declared
from baftd.checkpoint.ranges import whole
from baftd.checkpoint.shard import TensorEntry
from baftd.errors import FormatError, LayoutError, ModelMismatch, ProtocolError, TryAgain, VerificationFailed
from baftd.wire.messages import Declare, Seal, Share, Skip
from tests.checkpoint.reshard_cases import Held, Tensor, dtypes, entry_of, layouts, shapes, tensor_of
from tests.client.test_saved_shards import SlotOf, slot_of
from tests.support.trainer import Places, Trainer, places

PLAN = b"p" * 16
Declaration = list[tuple[TensorEntry, bytes]]


@pytest.fixture(scope="module")
def engine() -> Iterator[CopyEngine]:
    made = load_engine(None, prefer="python")
    yield made
    made.stop()


@pytest.fixture
def where() -> Iterator[Places]:
    with places() as found:
        yield found


def saved(directory: Any, declared: dict[int, Declaration], uncut: dict[int, list[int]] | None = None) -> list[SlotOf]:
    """The images of a step in which each rank has saved its part."""
    entries = {rank: [entry for entry, _ in one] for rank, one in declared.items()}
    division = divide_declared(entries, uncut or {})
    slots = []
    for rank, cuts in enumerate(division.cuts):
        parts = []
        for cut in cuts:
            entry, data = declared[rank][cut.entry]
            part, at = cut_entry(entry, cut.ranges)
            parts.append((part, data[at : at + part.nbytes]))
        held = entries[rank]
        slots.append(slot_of(directory, rank, len(declared), parts, plan=division.plan, held=held))
    return slots


def opened(slots: list[SlotOf], engine: CopyEngine) -> SavedShards:
    return SavedShards([slot.said for slot in slots], engine, job="job", world=len(slots), step=7)


# ---------------------------------------------------------------------------------------------- restoring


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, Declaration], dict[int, list[int]]]:
    """What the ranks of a job hold: tensors in all kinds of layouts, tensors of their own, some that cannot be cut."""
    world = draw(st.integers(2, 4))
    declared: dict[int, Declaration] = {rank: [] for rank in range(world)}
    for number in range(draw(st.integers(1, 4))):
        alike = draw(st.booleans())
        shape = draw(st.lists(st.integers(1, 30), max_size=3).map(tuple) if alike else shapes)
        tensor = tensor_of(f"t{number}", draw(dtypes), shape, draw(st.integers(0, 99)))
        everywhere = {rank: [Held(whole(shape), False)] for rank in range(world)}
        held = everywhere if alike else draw(layouts(shape, world))
        tied = draw(st.integers(0, 4)) == 0 and all(len(one) < 2 for one in held.values())
        aliases = (f"other{number}",) if tied else ()
        for rank, some in held.items():
            for one in some:
                entry, data = entry_of(tensor, one)
                declared[rank].append((replace(entry, aliases=aliases), data))
    for rank in range(world):
        own = tensor_of("own", "F32", (3,), rank)
        entry, data = entry_of(own, Held(((0, 3),), False))
        declared[rank].append((replace(entry, global_shape=None, ranges=None), data))
    uncut = {rank: draw(st.lists(st.integers(0, 3), max_size=2)) for rank in range(world)}
    return declared, uncut


@given(jobs())
@settings(max_examples=60, deadline=None)
def test_every_rank_has_back_what_it_held(
    tmp_path_factory: pytest.TempPathFactory, engine: CopyEngine, job: tuple[dict[int, Declaration], Any]
) -> None:
    declared, uncut = job
    try:
        slots = saved(tmp_path_factory.mktemp("images"), declared, uncut)
    except LayoutError:  # ranges that cross: the daemon has every rank save all it holds
        return
    with opened(slots, engine) as shards:
        for rank, held in declared.items():
            image = shards.image(rank)
            assert list(image.entries.values()) == [entry for entry, _ in held]
            assert image.small == {"rank": rank}
            assert (image.step, image.updates, image.world) == (7, 7, len(declared))
            for name, (_, data) in zip(image.stored_names, held, strict=True):
                assert image.array(name).tobytes() == data, (rank, name)
            image.verify_rest()
    for slot in slots:
        slot.path.unlink()


@pytest.fixture
def replicated() -> Tensor:
    return tensor_of("w", "F32", (40, 50), 3)


def test_what_does_not_fit_or_is_damaged_is_named(tmp_path: Any, engine: CopyEngine, replicated: Tensor) -> None:
    everywhere = {rank: [entry_of(replicated, Held(whole(replicated.shape), False))] for rank in range(2)}
    slots = saved(tmp_path, everywhere)
    with opened(slots, engine) as shards:
        image = shards.image(0)
        for name, nbytes in (("x", 4), ("w", 4)):
            with pytest.raises(ModelMismatch, match=name):
                image.copy_into(name, 0, nbytes)
    (stored,) = (place.stored_name for place in slots[1].plan.placements)
    slots[1].damage(stored, 99)
    with opened(slots, engine) as shards, pytest.raises(VerificationFailed, match="saved by rank 1"):
        shards.image(0).array("w")


def test_images_of_two_plans_are_refused(tmp_path: Any, engine: CopyEngine, replicated: Tensor) -> None:
    slots = saved(tmp_path, {rank: [entry_of(replicated, Held(whole(replicated.shape), False))] for rank in range(2)})
    (tmp_path / "other").mkdir()
    entry, data = entry_of(replicated, Held(whole(replicated.shape), False))
    slots[1] = slot_of(tmp_path / "other", 1, 2, [(entry, data)], plan=PLAN, held=[entry])
    with pytest.raises(FormatError, match="another plan"):
        opened(slots, engine)


# ---------------------------------------------------------------------------------------------- saving


def source(name: str, rows: int, *, kind: Any = "stable", device: bool = False) -> Source:
    array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    entry = TensorEntry(name, "F32", array.shape, array.nbytes, kind, array.shape, whole(array.shape))
    return Source(entry, array.ctypes.data, array, 4, identity=(array.ctypes.data, 0), device=device)


def test_sources_are_cut_where_they_lie_now() -> None:
    sources = [source("a", 8), source("b", 6, kind="volatile"), source("c", 5), source("d", 2, device=True)]
    shares = [Share(0, [(2, 5), (0, 4)]), Share(1), Share(3)]
    cutting = Cutting([one.entry for one in sources], shares)
    assert cutting.same_tree(sources)
    assert not cutting.same_tree(sources[:3])
    part, volatile, device = cutting.of(sources)
    assert (part.address, part.entry.shape, part.keep) == (sources[0].address + 32, (3, 4), sources[0].keep)
    assert volatile is sources[1]
    assert device is sources[3]
    sources[0] = replace(sources[0], address=sources[0].address + 4096, identity=(1, 2))
    assert [one.address for one in cutting.of(sources)[:1]] == [sources[0].address + 32]
    assert cutting.of(sources)[0].identity == (1, 2)
    read = cutting.recheck(lambda: [(0,), (2,), (3,)])  # of a, c and d
    assert read is not None
    assert read() == [(0,), (3,)]
    missing = cutting.recheck(lambda: [(0,)])
    assert missing is not None
    assert missing() == [], "another number of tensors is no longer this state"
    assert cutting.recheck(None) is None
    with pytest.raises(ProtocolError, match="tensor 9 of 4"):
        Cutting([one.entry for one in sources], [Share(9)])


def test_a_rank_waits_for_others_in_no_loop(where: Places) -> None:
    """Also a strict one: boundaries are skipped until all ranks have declared, and the step may be taken late."""
    with where.daemon() as scripted, Trainer(where, strict=True) as trainer:
        scripted.refuse[Declare] = TryAgain("rank 1 has not declared its tensors yet.")
        trainer.join()
        for _ in range(3):
            outcome = trainer.one_step()
            assert outcome.kind is OutcomeKind.SKIPPED
            assert outcome.reason == "not_divided: rank 1 has not declared its tensors yet."
        assert trainer.session.counters.skipped == {"not_divided": 3}
        assert [skip.step for skip in scripted.wait_for(Skip, count=2)] == [1, 2], "the third may still be taken"
        del scripted.refuse[Declare]
        trainer.step -= 1
        assert trainer.boundary(force=True).kind is OutcomeKind.BEGAN
        assert trainer.fence().kind is OutcomeKind.SEALED
        assert scripted.wait_for(Seal)[-1].step == 3
        assert len([message for message in scripted.received if isinstance(message, Skip)]) == 2
