"""Power cuts: after every operation of a durable checkpoint, in every state that the device may be left in, no manifest
names bytes that are not there, and what was committed is whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import xxhash

from baftd.checkpoint.identity import CheckpointId
from baftd.errors import FormatError, UsageError
from baftd.storage.directory import DirectoryTier
from baftd.storage.formats import CheckpointManifest, FencePost, ShardManifest
from baftd.storage.interface import ShardRecord
from tests.support.images import PLAN, Slot, make_slot, save, token
from tests.support.memory_files import Killed, MemoryFiles, Op

ROOT = "/data/ckpt"
SMALL = 16384
"""Write block: several to an image."""


def tier_on(files: MemoryFiles) -> DirectoryTier:
    return DirectoryTier(ROOT, node="n0", file_ops=files, block=SMALL, threads=1, alive=lambda pid, start: False)


def lies(files: MemoryFiles) -> list[str]:
    """Every manifest that names bytes which are not there. Independent of the tier's own inventory."""
    tree = files.tree()
    found = []
    for path, data in tree.items():
        directory, _, name = path.rpartition("/")
        if ".trash~" in directory or name.startswith(".tmp~"):
            continue
        try:
            if name == "MANIFEST":
                for part in CheckpointManifest.decode(data, path).parts:
                    manifest = tree.get(f"{directory}/rank-{part.rank:05d}.manifest", b"")
                    if xxhash.xxh3_128_digest(manifest) != part.manifest_digest:
                        found.append(f"{path} names the manifest of rank {part.rank}, which is not there")
                    if len(tree.get(f"{directory}/rank-{part.rank:05d}.safetensors", b"")) != part.nbytes:
                        found.append(f"{path} names the shard of rank {part.rank}, which is not there")
            elif name.endswith(".manifest"):
                said = ShardManifest.decode(data, path)
                shard = tree.get(path.replace(".manifest", ".safetensors"), b"")
                now = [xxhash.xxh3_128_digest(shard[offset : offset + size]) for offset, size in said.chunks()]
                bad = [number for number, digest in enumerate(now) if digest != said.digests[16 * number :][:16]]
                if bad or len(shard) != said.nbytes:
                    found.append(f"{path}: {len(shard)} bytes, chunks {bad} are not there")
            elif name.startswith("EPOCH-"):
                FencePost.decode(data, path)
        except FormatError as error:
            found.append(str(error))
    return found


class Cutter:
    """Cuts the power after every operation and looks at what may be left."""

    def __init__(self, files: MemoryFiles, look: Callable[[MemoryFiles], list[str]] | None = None) -> None:
        self.files = files
        self.look = look
        self.must_have: set[CheckpointId] = set()
        """Checkpoints that have to be complete in every state, from now on."""
        self.must_have_files: set[str] = set()
        """Paths that have to be there (what manifests and shards hold is looked at anyhow)."""
        self.must_have_one_of: set[CheckpointId] = set()
        self.states = 0
        self.problems: list[str] = []
        self.stop_at_first = False
        self.on = True
        self.effort = (256, 48)
        """Outcomes up to which all are tried, and how many are drawn beyond."""
        files.after = self._cut

    def settle(self) -> None:
        """Cut once more, with nothing further done."""
        self._cut(Op("end", ""))

    def _cut(self, op: Op) -> None:
        if not self.on or (self.stop_at_first and self.problems):
            return
        for state in self.files.states(len(self.files.log), *self.effort):
            self.states += 1
            found = lies(state)
            if self.must_have or self.must_have_one_of:
                listed = tier_on(state).list("gpt")
                complete = {one.checkpoint for one in listed if one.state == "complete"}
                if not self.must_have <= complete:
                    found.append(f"{self.must_have - complete} is lost: {listed}")
                if self.must_have_one_of and not self.must_have_one_of & complete:
                    found.append(f"none of {self.must_have_one_of} is left")
            lost = self.must_have_files - state.tree().keys()
            if lost:
                found.append(f"{sorted(lost)} were reported durable and are lost")
            if self.look is not None:
                found += self.look(state)
            if found:
                self.problems.append(f"after operation {len(self.files.log)} ({op}): {found[0]}")
                if self.stop_at_first:
                    return


def two_ranks(shm: Path, step: int = 8, seed: int = 0, epoch: int = 1) -> list[Slot]:
    return [make_slot(shm, step=step, rank=rank, world=2, seed=seed, by=token(epoch)) for rank in range(2)]


def test_a_checkpoint_is_never_half_there(shm: Path) -> None:
    files = MemoryFiles()
    cutter = Cutter(files)
    slots = two_ranks(shm)
    saved = save(tier_on(files), slots)
    cutter.must_have.add(saved.checkpoint)
    cutter.settle()
    assert cutter.problems == []
    assert cutter.states > 100
    assert [line.ok for line in tier_on(files).verify("gpt", saved.checkpoint)] == [True, True]


def test_forgetting_a_kind_of_sync_is_noticed(shm: Path) -> None:
    slots = two_ranks(shm)
    directories = ["/step-8.e1", "/gpt", "/ckpt", "/data"]
    for kind in ["rank-00001.safetensors", "rank-00001.manifest", "MANIFEST", "EPOCH-1", *directories]:
        files = MemoryFiles()
        files.drop = lambda op, at, kind=kind: op.path.endswith(kind)  # type: ignore[misc]
        cutter = Cutter(files)
        cutter.stop_at_first = True
        saved = save(tier_on(files), slots)
        cutter.must_have.add(saved.checkpoint)
        cutter.settle()
        assert cutter.problems, f"nothing notices that {kind} is never synced"


def killed_at(number: int, work: Callable[[MemoryFiles], object], disk: MemoryFiles | None = None) -> MemoryFiles:
    """The disk after `work` was killed before its operation `number`."""
    files = disk or MemoryFiles()
    end = len(files.log) + number

    def before(op: Op) -> None:
        if len(files.log) >= end:
            raise Killed

    files.before = before
    with contextlib.suppress(Killed):
        work(files)
    files.before = None
    return files


def operations(work: Callable[[MemoryFiles], object], disk: MemoryFiles | None = None) -> int:
    files = disk or MemoryFiles()
    start = len(files.log)
    work(files)
    return len(files.log) - start


def save_watched(cutter: Cutter, slots: list[Slot]) -> None:
    """Save, and from the return of every call on demand what it has promised."""
    tier = tier_on(cutter.files)
    tier.open_epoch("gpt", slots[0].token)
    cutter.must_have_files.add(f"{ROOT}/gpt/EPOCH-{slots[0].token.epoch}")
    cutter.settle()
    records = []
    for slot in slots:
        records.append(slot.write(tier, "gpt"))
        cutter.must_have_files |= {records[-1].path, records[-1].path.replace(".safetensors", ".manifest")}
        cutter.settle()
    commit_watched(cutter, slots[0], records)


def commit_watched(cutter: Cutter, slot: Slot, records: Sequence[ShardRecord]) -> None:
    tier_on(cutter.files).commit(
        "gpt",
        slot.checkpoint,
        records,
        plan_digest=PLAN,
        token=slot.token,
        updates=slot.updates,
        world=slot.world,
    )
    cutter.must_have.add(slot.checkpoint)
    cutter.settle()


def restarted(
    files: MemoryFiles, slots: list[Slot], *, cuts: bool = True, inventory: bool = True, thorough: bool = True
) -> Cutter:
    """A second process saves again on the disk that the first one left, with the power cut after every operation."""
    cutter = Cutter(files)
    cutter.stop_at_first = True
    cutter.on = cuts
    cutter.effort = (256, 48) if thorough else (16, 6)
    found = tier_on(files).describe("gpt", slots[0].checkpoint)
    if inventory and found is not None and len(found.parts) == len(slots):
        # The shards are there: the inventory of a new daemon is enough to commit.
        commit_watched(cutter, slots[0], found.parts)
    save_watched(cutter, slots)
    return cutter


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.full)], ids=["sampled", "all"])
@pytest.mark.parametrize("again", [0, 1], ids=["same bytes", "other bytes"])
def test_killed_anywhere_then_saved_again_then_cut(shm: Path, again: int, thorough: bool) -> None:
    slots = two_ranks(shm)
    others = two_ranks(shm, seed=again) if again else slots
    states = refused = 0
    for number in range(operations(lambda files: save(tier_on(files), slots)) + 1):
        files = killed_at(number, lambda files: save(tier_on(files), slots))
        assert lies(files) == []
        found = tier_on(files).describe("gpt", slots[0].checkpoint)
        if again and found is not None and found.state == "complete":
            with pytest.raises(UsageError, match="is committed"):
                restarted(files, others)
            refused += 1
            continue
        cutter = restarted(files, others, inventory=not again, thorough=thorough)
        assert cutter.problems == [], f"killed at {number}"
        states += cutter.states
        swept = tier_on(files).sweep("gpt")
        assert not swept.problems
        assert not [path for path in files.tree() if ".tmp~" in path]
    assert states > (5000 if thorough else 2000)
    assert (refused > 0) == bool(again)


def test_what_a_daemon_finds_at_its_start_survives_a_cut(shm: Path) -> None:
    slots = two_ranks(shm)
    found_complete = 0
    for number in range(operations(lambda files: save(tier_on(files), slots)) + 1):
        files = killed_at(number, lambda files: save(tier_on(files), slots))
        cutter = Cutter(files)
        tier_on(files).sweep("gpt")
        for one in tier_on(files).list("gpt"):
            if one.state == "complete":
                found_complete += 1
                cutter.must_have.add(one.checkpoint)
        cutter.settle()
        assert cutter.problems == []
    assert found_complete >= 2  # killed right before, and right after, the directory was synced


def test_after_every_cut_a_new_daemon_saves_and_sweeps(shm: Path) -> None:
    """Whatever a power cut leaves (retention included) is something that the next daemon can work on."""
    old, new = two_ranks(shm, step=4), two_ranks(shm, step=8)
    files = MemoryFiles()
    save(tier_on(files), old)
    problems: list[str] = []
    count = 0

    def recover(op: Op) -> None:
        nonlocal count
        for state in files.states(seed=len(files.log), exhaustive=8, samples=4):
            count += 1
            tier = tier_on(state)
            swept = tier.sweep("gpt")
            save(tier, new)
            tier.delete("gpt", old[0].checkpoint)
            left = [path for path in state.tree() if "/.t" in path or "step-4" in path]
            whole = [line.ok for line in tier.verify("gpt", new[0].checkpoint)]
            if swept.problems or left or whole != [True, True]:
                problems.append(f"after operation {len(files.log)} ({op}): {swept} {left} {whole}")

    files.after = recover
    save(tier_on(files), new)
    tier_on(files).delete("gpt", old[0].checkpoint)
    assert problems == []
    assert count > 150


def old_and_new(shm: Path) -> tuple[MemoryFiles, list[Slot], list[Slot]]:
    """A disk with a settled checkpoint of step 4, and the slots of step 8."""
    files = MemoryFiles()
    old = two_ranks(shm, step=4)
    save(tier_on(files), old)
    return files, old, two_ranks(shm, step=8)


def test_retention_never_leaves_nothing(shm: Path) -> None:
    files, old, new = old_and_new(shm)
    cutter = Cutter(files)
    cutter.must_have_one_of = {old[0].checkpoint, new[0].checkpoint}
    save(tier_on(files), new)
    cutter.must_have.add(new[0].checkpoint)
    assert tier_on(files).delete("gpt", old[0].checkpoint) > 0
    cutter.settle()
    assert cutter.problems == []
    assert not [path for path in files.tree() if "step-4" in path]


def test_the_manifest_goes_before_the_directory_is_renamed(shm: Path) -> None:
    """Mounted object stores rename a directory file by file: by then nobody may restore from it any more."""
    files, old, _ = old_and_new(shm)
    start = len(files.log)
    tier_on(files).delete("gpt", old[0].checkpoint)
    done = [(op.kind, op.path.rpartition("/")[2]) for op in files.log[start:]]
    assert done[:4] == [
        ("unlink", "MANIFEST"),
        ("fsync_directory", "step-4.e1"),
        ("rename", "step-4.e1"),
        ("fsync_directory", "gpt"),
    ]


def test_a_deletion_killed_anywhere_is_finished_by_a_sweep(shm: Path) -> None:
    files, _, _ = old_and_new(shm)
    count = operations(lambda files: tier_on(files).delete("gpt", CheckpointId(1, 4)), files)
    for number in range(count):
        files, old, new = old_and_new(shm)
        killed_at(number, lambda files: tier_on(files).delete("gpt", CheckpointId(1, 4)), files)
        cutter = Cutter(files)
        tier = tier_on(files)
        tier.sweep("gpt")
        state = tier.describe("gpt", old[0].checkpoint)
        if state is not None:
            assert state.state == ("complete" if number == 0 else "incomplete")
            tier.delete("gpt", old[0].checkpoint)
        save(tier, new)
        cutter.must_have.add(new[0].checkpoint)
        cutter.settle()
        assert cutter.problems == []
        assert not [path for path in files.tree() if ".trash" in path or "step-4" in path]


def test_without_the_sync_of_the_rename_a_deletion_lies(shm: Path) -> None:
    files, old, _ = old_and_new(shm)
    files.drop = lambda op, at: op.path.endswith("/gpt")
    cutter = Cutter(files)
    tier_on(files).delete("gpt", old[0].checkpoint)
    assert any("are not there" in problem for problem in cutter.problems)


def test_overwriting_without_removing_the_manifest_first_would_lie(shm: Path) -> None:
    """A shard that was written but never committed takes other bytes: its manifest goes first, synced."""
    first, second = make_slot(shm, seed=0), make_slot(shm, seed=1)
    for forget in (False, True):
        files = MemoryFiles()
        first.write(tier_on(files), "gpt")
        log = files.log

        def before_naming(op: Op, at: int, log: list[Op] = log, start: int = len(log)) -> bool:
            return op.path.endswith("step-8.e1") and not any(entry.kind == "rename" for entry in log[start:])

        if forget:
            files.drop = before_naming
        cutter = Cutter(files)
        second.write(tier_on(files), "gpt")
        assert bool(cutter.problems) == forget


def test_every_single_sync_is_needed_by_somebody(shm: Path) -> None:
    """Each sync of the sequence, dropped alone, is noticed: if not in a first run, then in one after a kill, whose
    leftovers nobody may take for durable. Those that only repeat another one of the same run are listed."""
    slots = [make_slot(shm)]

    def run(files: MemoryFiles) -> object:
        return save(tier_on(files), slots)

    count = operations(run)
    unnoticed: dict[str, int] = {}
    noticed: set[str] = set()
    for number in range(count + 1):
        plain = killed_at(number, run)
        start = len(plain.log)
        restarted(plain, slots, cuts=False)
        for at in range(start, len(plain.log)):
            if not plain.log[at].kind.startswith("fsync") or plain.log[at].idle:
                continue
            name = site(plain.log, start, at)
            if name in noticed:
                continue
            files = killed_at(number, run)
            files.drop = lambda op, place, at=at: place == at  # type: ignore[misc]
            if restarted(files, slots).problems:
                noticed.add(name)
                unnoticed.pop(name, None)
            else:
                unnoticed[name] = unnoticed.get(name, 0) + 1
    assert not unnoticed
    assert len(noticed) > 10


def site(log: list[Op], start: int, at: int) -> str:
    """A name for a sync that does not depend on what was there before: what is synced, between which operations."""
    op = log[at]
    name = op.path.rpartition("~")[2].removeprefix(ROOT) or op.path

    def kind(entry: Op) -> str:
        return f"{entry.kind} {(entry.target or entry.path).rpartition('~')[2].removeprefix(ROOT)}"

    before = kind(log[at - 1]) if at > start else "the start"
    after = kind(log[at + 1]) if at + 1 < len(log) else "the end"
    return f"{op.kind} {name} between {before} and {after}"
