"""Several nodes and starts of a job in one directory: who may write, and what belongs to whom."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from baftd.checkpoint.identity import Token
from baftd.errors import Fenced
from baftd.storage.directory import DirectoryTier
from baftd.storage.files import OsFiles
from baftd.storage.interface import ShardRecord
from baftd.storage.names import (
    Writer,
    checkpoint_of,
    fence_epoch,
    fence_name,
    is_temporary,
    process_start,
    rank_of_manifest,
    shard_manifest_name,
)
from tests.support.images import PLAN, make_slot, token
from tests.support.memory_files import Killed, MemoryFiles, Op


def tier_on(files: MemoryFiles) -> DirectoryTier:
    return DirectoryTier("/data/ckpt", node="n0", file_ops=files)


class NoLinks(OsFiles):
    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("ops", [OsFiles, NoLinks])
def test_of_many_who_claim_an_epoch_one_gets_it(disk: Path, ops: type[OsFiles]) -> None:
    claims = [token(1, start=number) for number in range(1, 7)]
    won: list[Token] = []
    refused: list[Fenced] = []
    start = threading.Barrier(len(claims))

    def claim(one: Token) -> None:
        tier = DirectoryTier(disk, node=f"n{one.incarnation[-1]}", file_ops=ops())
        start.wait(10)
        try:
            tier.open_epoch("gpt", one)
            won.append(one)
        except Fenced as error:
            refused.append(error)

    crew = [threading.Thread(target=claim, args=(one,)) for one in claims]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(30)
    assert len(won) == 1
    assert len(refused) == len(claims) - 1
    assert DirectoryTier(disk, node="x").newest_token("gpt") == won[0]
    assert [name for name in os.listdir(disk / "gpt") if is_temporary(name)] == []


def test_many_nodes_raise_the_fence_together(disk: Path) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def open_it(node: int, epoch: int) -> None:
        start.wait(10)
        try:
            DirectoryTier(disk, node=f"n{node}").open_epoch("gpt", token(epoch))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    for epoch in (1, 2, 3):
        crew = [threading.Thread(target=open_it, args=(node, epoch)) for node in range(4)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(30)
        assert errors == []
        assert os.listdir(disk / "gpt") == [f"EPOCH-{epoch}"]


def test_an_epoch_that_nobody_finished_claiming_belongs_to_nobody(shm: Path) -> None:
    """Without hard links a crash may leave an empty fence: its epoch is refused, the next one is taken."""
    files = MemoryFiles()

    def no_links(op: Op) -> None:
        if op.kind == "link":
            raise OSError(errno.EPERM, "Operation not permitted")
        if op.kind == "pwrite" and op.path.endswith("gpt/EPOCH-1"):
            raise Killed

    files.before = no_links
    with pytest.raises(Killed):
        tier_on(files).open_epoch("gpt", token(1))
    files.before = None
    with pytest.raises(Fenced, match="somebody unknown"):
        make_slot(shm).write(tier_on(files), "gpt")
    tier_on(files).open_epoch("gpt", token(2))
    make_slot(shm, by=token(2)).write(tier_on(files), "gpt")
    assert [path for path in files.tree() if "EPOCH" in path] == ["/data/ckpt/gpt/EPOCH-2"]


def test_the_fence_holds_without_its_file(shm: Path, disk: Path) -> None:
    """A step directory of a newer epoch proves that epoch."""
    tier = DirectoryTier(disk, node="n0")
    make_slot(shm, by=token(4)).write(tier, "gpt")
    (disk / "gpt" / "EPOCH-4").unlink()
    with pytest.raises(Fenced, match="overtaken by epoch 4"):
        make_slot(shm, by=token(3)).write(tier, "gpt")


def test_overtaken_in_the_middle(shm: Path, disk: Path) -> None:
    """A newer epoch opens while the older one writes its bytes: nothing of the older one gets a name."""

    class Overtaking(OsFiles):
        def __init__(self, at: str) -> None:
            super().__init__()
            self.at = at

        def fsync(self, fd: int) -> None:
            super().fsync(fd)
            if os.readlink(f"/proc/self/fd/{fd}").endswith(self.at):
                DirectoryTier(disk, node="n1").open_epoch("gpt", token(2))

    slot = make_slot(shm)
    for at in (".safetensors", ".manifest"):
        with pytest.raises(Fenced):
            slot.write(DirectoryTier(disk, node="n0", file_ops=Overtaking(at)), "gpt")
        names = os.listdir(disk / "gpt" / "step-8.e1")
        assert names == ([] if at == ".safetensors" else ["rank-00000.safetensors"])
        (disk / "gpt" / "EPOCH-2").unlink()
    tier = DirectoryTier(disk, node="n0", file_ops=Overtaking("MANIFEST"))
    record = slot.write(tier, "gpt")
    with pytest.raises(Fenced):
        tier.commit("gpt", slot.checkpoint, [record], plan_digest=PLAN, token=token(1), updates=8, world=1)
    assert "MANIFEST" not in os.listdir(disk / "gpt" / "step-8.e1")


def test_every_node_writes_its_own_and_one_commits(shm: Path, disk: Path) -> None:
    tiers = [DirectoryTier(disk, node=f"n{number}") for number in range(4)]
    slots = [make_slot(shm, rank=rank, world=4) for rank in range(4)]
    records: dict[int, ShardRecord] = {}
    start = threading.Barrier(4)

    def write(rank: int) -> None:
        start.wait(10)
        records[rank] = slots[rank].write(tiers[rank], "gpt")

    crew = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(60)
    first = slots[0]
    saved = tiers[2].commit(
        "gpt", first.checkpoint, list(records.values()), plan_digest=PLAN, token=first.token, updates=8, world=4
    )
    assert [part.node for part in saved.parts] == ["n0", "n1", "n2", "n3"]
    assert all(line.ok for line in tiers[3].verify("gpt", saved.checkpoint))
    # After a restart rank 0 lives on another node: the same shard is there already.
    assert slots[0].write(tiers[1], "gpt") == saved.parts[0]


def test_names() -> None:
    assert [checkpoint_of(name) for name in ("step-01.e1", "step-1.e0", "step-1.e1x", "step--1.e1")] == [None] * 4
    assert [fence_epoch(name) for name in (fence_name(12), "EPOCH-0", "EPOCH-012", "EPOCH-")] == [12, None, None, None]
    assert [rank_of_manifest(name) for name in (shard_manifest_name(7), "rank-7.manifest", "rank-000007.manifest")] == [
        7,
        None,
        None,
    ]
    assert rank_of_manifest(shard_manifest_name(1_000_000)) == 1_000_000


def test_temporary_names_say_whose_they_are() -> None:
    here = Writer.of_node("node/with~odd name")
    name = here.temporary("MANIFEST")
    assert here.is_ours(name)
    assert here.is_live(name)
    assert name != here.temporary("MANIFEST")
    assert "/" not in name
    similar = Writer.of_node("node_with_odd_name")
    assert not similar.is_ours(name)
    assert similar.is_live(name)  # cannot know, so leaves it alone
    pid, start = os.getpid(), process_start(os.getpid()) or 0
    for other in (
        Writer(here.owner, here.machine, here.alive, (pid, start + 1)),  # the PID was used again
        Writer(here.owner, "00000000", here.alive, (pid, start)),  # before the reboot, or in another container
        Writer(here.owner, here.machine, here.alive, (1 << 30, 1)),
    ):
        assert here.is_ours(other.temporary("x"))
        assert not here.is_live(other.temporary("x"))
    assert not here.is_live(".tmp~garbage")
    assert not here.is_ours(".tmp~garbage")
