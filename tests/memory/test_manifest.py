"""The node's manifest and identity: across restarts, reboots, torn files and rewrites."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from baftd.checkpoint.facts import EpochFacts, Held, ShardFacts, Source, Tier, newer_incarnation
from baftd.checkpoint.framing import encode_record
from baftd.checkpoint.identity import CheckpointId, Token
from baftd.errors import FormatError, UsageError
from baftd.memory import journal as journal_module
from baftd.memory.arena import ArenaRoot
from baftd.memory.manifest import NodeManifest, node_identity
from tests.support.tmpfs import shm_directory

LIFE, NEXT_LIFE = "1" * 32, "2" * 32
TOKENS = {epoch: Token(epoch, f"{epoch:032x}") for epoch in range(1, 5)}


def held(step: int, *, rank: int = 0, epoch: int = 1, tier: Tier = "durable", **place: object) -> Held:
    replicas = ((b"k", b"v"),)
    facts = ShardFacts(TOKENS[epoch], rank, 4, step, step - 1, b"t" * 16, b"r" * 16, 5000, 10, b"d" * 32, replicas)
    return Held(facts, Source(tier, "node-a", {"path": f"/x/{step}", **place}))


SHARD = held(3).shard.to_record()
HOLD = {"k": "hold", "tier": "memory", "node": "n", "incarnation": LIFE, "shard": SHARD, "place": {}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "manifest"


def reopened(path: Path) -> NodeManifest:
    manifest, problem = NodeManifest.open(path)
    assert problem is None
    return manifest


def test_everything_comes_back(path: Path) -> None:
    manifest = reopened(path)
    assert manifest.inventory("node-a", LIFE).shards == ()
    epochs = [EpochFacts(TOKENS[1], 4, None), EpochFacts(TOKENS[2], 4, CheckpointId(1, 5))]
    for epoch in (*epochs, epochs[0]):
        manifest.begin_epoch(epoch)
    shards = [held(5), held(7, slot=3), held(7, rank=1), held(6, epoch=2), held(9, tier="memory")]
    for one in (*shards, shards[0]):
        manifest.hold(one, LIFE)
    manifest.quarantine(CheckpointId(1, 5), "rank 0: a digest differs")
    manifest.quarantine(CheckpointId(1, 5), "again")
    manifest.release("durable", CheckpointId(1, 7), 1)
    manifest.release("durable", CheckpointId(1, 7), 9)
    manifest.note_step(12)
    before = manifest.inventory("node-a", LIFE)
    manifest.close()

    manifest = reopened(path)
    assert manifest.inventory("node-a", LIFE) == before
    assert before.epochs == tuple(epochs)
    assert before.shards == (shards[3], shards[4], shards[1], shards[0])  # by epoch and step, newest first
    assert before.highest_step == 12
    assert before.quarantined == ((CheckpointId(1, 5), "rank 0: a digest differs"),)
    assert manifest.held(LIFE, "memory") == (shards[4],)
    manifest.close()


def test_failures_and_the_time_trained_come_back_and_an_epoch_fails_once(path: Path) -> None:
    manifest = reopened(path)
    manifest.note_trained(10.5)
    assert manifest.fail(1)
    assert not manifest.fail(1)
    manifest.note_trained(20.0)
    assert manifest.fail(3)
    assert not manifest.fail(2)
    manifest.note_trained(0.25)
    manifest.close()
    manifest = reopened(path)
    assert (manifest.failures, manifest.failed_epoch, manifest.trained) == (2, 3, 30.75)
    for step in range(1, 3):  # a rewrite keeps them
        manifest.hold(held(step), LIFE)
    manifest._journal.rewrite(manifest._records())
    manifest.close()
    manifest = reopened(path)
    assert (manifest.failures, manifest.failed_epoch, manifest.trained) == (2, 3, 30.75)
    manifest.close()


def test_a_kill_loses_time_trained_since_the_last_change_and_no_failure(path: Path) -> None:
    manifest = reopened(path)
    manifest.note_trained(5.0)
    assert manifest.fail(1)
    manifest.note_trained(7.0)  # and is killed: never closed
    again = reopened(path)
    assert (again.failures, again.trained) == (1, 5.0)
    again.close()
    manifest.close()


def test_shards_in_memory_do_not_survive_the_memory(path: Path) -> None:
    manifest = reopened(path)
    for tier in ("memory", "peer", "durable"):
        manifest.hold(held(5, tier=tier), LIFE)
    assert {one.source.tier for one in manifest.held(NEXT_LIFE)} == {"durable"}
    assert len(manifest.held(LIFE)) == 3
    manifest.hold(held(5, tier="memory", again=True), NEXT_LIFE)
    assert {one.source.tier for one in manifest.held(NEXT_LIFE)} == {"memory", "durable"}
    manifest.close()


def test_an_epoch_of_two_incarnations_is_a_conflict_that_is_not_written(path: Path) -> None:
    manifest = reopened(path)
    manifest.begin_epoch(EpochFacts(TOKENS[1], 4, None))
    with pytest.raises(FormatError, match="epoch 1 is known of incarnation"):
        manifest.begin_epoch(EpochFacts(Token(1, "f" * 32), 4, None))
    manifest.begin_epoch(EpochFacts(TOKENS[1], 4, CheckpointId(1, 3)))  # the same epoch, planned again
    manifest.close()
    manifest = reopened(path)
    assert manifest.epochs == {1: EpochFacts(TOKENS[1], 4, CheckpointId(1, 3))}
    manifest.close()


def test_the_highest_step_is_kept_without_a_sync_each_step(path: Path) -> None:
    manifest = reopened(path)
    size = path.stat().st_size
    for step in range(100):
        manifest.note_step(step)
    manifest.note_step(3)
    assert path.stat().st_size == size
    manifest.hold(held(5), LIFE)  # carries the hint along
    manifest._journal.close()  # killed
    manifest = reopened(path)
    assert manifest.highest_step == 99
    manifest.close()
    assert path.stat().st_size > size


def test_a_long_manifest_is_rewritten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "REWRITE_BYTES", 20_000)
    manifest = reopened(path)
    manifest.begin_epoch(EpochFacts(TOKENS[1], 4, None))
    manifest.quarantine(CheckpointId(1, 2), "bad")
    for step in range(500):
        manifest.hold(held(step), LIFE)
        if step >= 3:
            manifest.release("durable", CheckpointId(1, step - 3), 0)
    assert path.stat().st_size < 45_000
    before = manifest.inventory("node-a", LIFE)
    manifest.close()
    manifest = reopened(path)
    assert manifest.inventory("node-a", LIFE) == before
    assert [one.shard.step for one in before.shards] == [499, 498, 497]
    manifest.close()


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"k": "strange"},
        {"k": "epoch"},
        {"k": "epoch", "epoch": {"token": [0, "x"]}},
        {"k": "epoch", "epoch": {"token": [1, "f" * 32], "world": 4, "parent": None}},
        {"k": "hold", "tier": "durable"},
        {**HOLD, "tier": "moon"},
        {**HOLD, "incarnation": "x"},
        {**HOLD, "place": 1},
        {**HOLD, "shard": 5},
        {"k": "release", "tier": "durable", "checkpoint": [1], "rank": 0},
        {"k": "release", "tier": "durable", "checkpoint": [1, 2], "rank": "x"},
        {"k": "quarantine", "checkpoint": 3},
        {"k": "step", "step": "many"},
    ],
    ids=range(14),
)
def test_a_record_that_makes_no_sense_is_named_and_the_rest_counts(path: Path, record: dict[str, object]) -> None:
    manifest = reopened(path)
    manifest.begin_epoch(EpochFacts(TOKENS[1], 4, None))
    manifest.close()
    with path.open("ab") as file:
        file.write(encode_record(record))
        file.write(encode_record({"k": "step", "step": 77}))
    manifest, problem = NodeManifest.open(path)
    assert problem is not None
    assert f"{path}, record 1:" in problem
    assert manifest.highest_step == 77
    assert list(manifest.epochs) == [1]
    manifest.close()


def test_a_torn_manifest_is_told(path: Path) -> None:
    manifest = reopened(path)
    manifest.hold(held(5), LIFE)
    manifest.hold(held(6), LIFE)
    manifest.close()
    os.truncate(path, path.stat().st_size - 3)
    manifest, problem = NodeManifest.open(path)
    assert problem is not None
    assert "cut off" in problem
    assert [one.shard.step for one in manifest.held(LIFE)] == [5]
    manifest.close()


# ---------------------------------------------------------------------------------------------- identity


@pytest.fixture
def root() -> Iterator[ArenaRoot]:
    with shm_directory() as shm:
        made = ArenaRoot(shm)
        made.create()
        yield made


def test_a_node_keeps_its_incarnation_as_long_as_its_memory(tmp_path: Path, root: ArenaRoot) -> None:
    first, new = node_identity(tmp_path, "node-a", root, lambda: 5)
    assert new
    assert json.loads((tmp_path / "node.json").read_text()) == {"node": "node-a", "incarnation": first}
    assert node_identity(tmp_path, "node-a", root, lambda: 6) == (first, False)  # the daemon was restarted

    assert root.remove_if_empty()  # a reboot, or a container that lost its /dev/shm
    root.create()
    second, new = node_identity(tmp_path, "node-a", root, lambda: 7)
    assert new
    assert newer_incarnation(second, first)
    assert node_identity(tmp_path, "node-a", root, lambda: 8) == (second, False)
    assert sorted(os.listdir(tmp_path)) == ["node.json"]


def test_a_node_that_lost_its_state_keeps_its_memory(tmp_path: Path, root: ArenaRoot) -> None:
    first, _ = node_identity(tmp_path, "node-a", root, lambda: 5)
    (tmp_path / "node.json").unlink()
    assert node_identity(tmp_path, "node-a", root, lambda: 6) == (first, False)
    assert json.loads((tmp_path / "node.json").read_text())["incarnation"] == first


def test_memory_of_an_older_life_is_a_new_one(tmp_path: Path, root: ArenaRoot) -> None:
    first, _ = node_identity(tmp_path, "node-a", root, lambda: 5)
    root.set_incarnation("")
    second, new = node_identity(tmp_path, "node-a", root, lambda: 6)
    assert new
    root.set_incarnation(first)  # somebody brought the old files back
    third, new = node_identity(tmp_path, "node-a", root, lambda: 7)
    assert new
    assert newer_incarnation(third, second)


def test_a_daemon_killed_between_the_two_files(
    tmp_path: Path, root: ArenaRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = node_identity(tmp_path, "node-a", root, lambda: 5)
    root.remove_if_empty()
    root.create()

    def killed(_: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(root, "set_incarnation", killed)
        with pytest.raises(KeyboardInterrupt):
            node_identity(tmp_path, "node-a", root, lambda: 6)
    third, new = node_identity(tmp_path, "node-a", root, lambda: 7)
    assert new
    assert newer_incarnation(third, first)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"node": "node-a"}', '{"node": "node-a", "incarnation": "x"}', '{"node": 1, "incarnation": 2}'],
)
def test_a_damaged_identity_is_an_error_that_says_what_to_do(tmp_path: Path, root: ArenaRoot, text: str) -> None:
    (tmp_path / "node.json").write_text(text)
    with pytest.raises(FormatError, match=r"node\.json is damaged") as caught:
        node_identity(tmp_path, "node-a", root, lambda: 5)
    assert "Remove it" in caught.value.hint


def test_the_state_directory_of_another_node_is_refused(tmp_path: Path, root: ArenaRoot) -> None:
    node_identity(tmp_path, "node-a", root, lambda: 5)
    with pytest.raises(UsageError, match=r"that of node 'node-a', but this daemon is node 'node-b'"):
        node_identity(tmp_path, "node-b", root, lambda: 5)
