"""`baftd restore --to`: files of the durable tier without a daemon, slots of this node with one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from safetensors import safe_open

from baftd.checkpoint.shard import root_digest
from baftd.memory.header import SlotHeader, SlotState
from baftd.memory.slot_file import SlotFile
from baftd.storage.directory import DirectoryTier
from baftd.wire.messages import ErrorReply, RestoreReply, RestoreRequest, RestoreSource
from tests.support.cli import Cli, Serve
from tests.support.daemon import RunDirs
from tests.support.images import Slot, make_slot, save, token


def durable(dirs: RunDirs, *steps: int, epoch: int = 1) -> DirectoryTier:
    """A durable directory with these steps of job gpt, two ranks."""
    tier = DirectoryTier(dirs.durable, node="node-a")
    for step in steps:
        save(tier, [make_slot(dirs.shm, step=step, rank=rank, world=2, by=token(epoch)) for rank in (0, 1)])
    return tier


def sealed(dirs: RunDirs, slot: Slot) -> Path:
    """The same image in a slot file as a daemon lays it out."""
    path = dirs.shm / f"rank-{slot.rank:05d}.slot-0"
    with SlotFile.create(path, slot.length) as file:
        file.pwrite(slot.image, 0)
        file.write_header(
            SlotHeader(
                state=SlotState.VERIFIED,
                generation=3,
                token=slot.token,
                job="gpt",
                rank=slot.rank,
                world=slot.world,
                step=slot.checkpoint.step,
                updates=slot.updates,
                image_length=slot.length,
                small_length=len(b"small state"),
                root_digest=root_digest(slot.digests, slot.length),
                tree_digest=slot.tree_digest,
                writer_pid=1,
                writer_start=1,
            )
        )
    return path


def names_in(path: Path) -> set[str]:
    """Tensors of a file, as the safetensors library sees them."""
    with safe_open(path, framework="np") as file:
        return set(file.keys())


def plan_of(*sources: RestoreSource, step: int) -> RestoreReply:
    return RestoreReply(
        job="gpt",
        epoch=1,
        step=step,
        updates=step,
        world=2,
        sources=list(sources),
        passed_over=[],
        fenced=[],
        lost_steps=0,
        seconds=0.0,
        dry_run=True,
    )


def test_export_without_a_daemon(cli: Cli) -> None:
    durable(cli.dirs, 4, 8)
    out = cli.dirs.base / "out"
    arguments = ("restore", "--job", "gpt", "--to", str(out), "--durable-dir", str(cli.dirs.durable))
    code, text, err = cli(*arguments, "--format", "safetensors")
    assert (code, err) == (0, "verifying and writing\n")
    assert "job gpt, step 8 (epoch 1)" in text
    assert f"{out}/model.safetensors" in text
    assert "note: Small state" in text
    assert {"only.on.rank.0", "only.on.rank.1"} <= names_in(out / "model.safetensors")

    code, _, err = cli(*arguments)
    assert code == 2
    assert "not empty" in err


def test_export_of_a_named_step(cli: Cli) -> None:
    durable(cli.dirs, 4, 8)
    where = ("--durable-dir", str(cli.dirs.durable))
    for number, (choice, step) in enumerate(((("--step", "4"), 4), (("--at-most", "7"), 4), (("--epoch", "1"), 8))):
        out = str(cli.dirs.base / f"out-{number}")
        code, document = cli.json("restore", "--job", "gpt", "--to", out, *choice, *where)
        assert code == 0
        assert (document["kind"], document["step"], document["epoch"]) == ("export", step, 1)
        assert document["files"][0] == f"{out}/model.safetensors"
        assert document["bytes"] > 0


def test_an_export_leaves_what_is_no_empty_directory_as_it_is(cli: Cli) -> None:
    durable(cli.dirs, 4)
    base = cli.dirs.base / "targets"
    base.mkdir()
    os.mkfifo(base / "fifo")
    (base / "pipe").symlink_to("fifo")
    (base / "nothing").symlink_to("not-there")
    (base / "file").write_text("old")
    given = ("restore", "--job", "gpt", "--durable-dir", str(cli.dirs.durable), "--to")
    for name in ("fifo", "pipe", "nothing", "file"):
        code, out, err = cli(*given, str(base / name))
        assert code != 0
        assert out == ""
        assert str(base / name) in err
    assert stat.S_ISFIFO((base / "fifo").lstat().st_mode)
    assert [(base / name).is_symlink() for name in ("pipe", "nothing")] == [True, True]
    assert (base / "file").read_text() == "old"
    assert sorted(os.listdir(base)) == ["fifo", "file", "nothing", "pipe"]


@pytest.mark.parametrize("link", ["", "relative", "chain", "slash", "parent", "parent_made"])
def test_an_export_works_through_links_to_an_empty_directory(cli: Cli, tmp_path: Path, link: str) -> None:
    """The link stays, and so does what it leads to; nothing is left beside either."""
    durable(cli.dirs, 4)
    real, links = tmp_path / "disk" / "real", tmp_path / "links"
    real.mkdir(parents=True)
    links.mkdir()
    named = str(links / "out")
    if link == "relative":
        (links / "out").symlink_to("../disk/real")
    elif link == "chain":
        (links / "out").symlink_to("next")
        (links / "next").symlink_to(real)
    elif link.startswith("parent"):
        (links / "out").symlink_to(real)
        named = str(links / "out" / ("in/it" if link == "parent_made" else "it"))
    else:
        (links / "out").symlink_to(real)
        named += "/" if link == "slash" else ""
    given = ("restore", "--job", "gpt", "--to", named, "--durable-dir", str(cli.dirs.durable))
    before = {path: path.readlink() for path in links.iterdir()}
    code, document = cli.json(*given)
    assert code == 0
    assert names_in(Path(document["files"][0]))
    assert document["files"][0] == f"{named.rstrip('/')}/model.safetensors"
    where = Path(os.path.realpath(named))
    assert sorted(os.listdir(where)) == ["model.safetensors", "model.safetensors.index.json"]
    assert where.is_relative_to(real)
    assert {path: path.readlink() for path in links.iterdir()} == before
    assert os.listdir(tmp_path / "disk") == ["real"]
    code, out, err = cli(*given)
    assert (code, out) == (2, "")
    assert "is not empty" in err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "{base}/nothing is a link to {base}/not-there, which is not there."),
        ("loop", "{base}/loop is a link that cannot be followed"),
        ("to_file", "{base}/to_file is a link to {base}/file, which is no directory."),
        ("file", "{base}/file is a file."),
        ("file/out", "{base}/file/out cannot be made, since {base}/file is a file."),
        ("file/a/b", "{base}/file/a/b cannot be made, since {base}/file is a file."),
        ("nothing/out", "{base}/nothing/out cannot be made, since {base}/nothing is a link to {base}/not-there"),
        ("loop/out", "{base}/loop/out cannot be made, since {base}/loop is a link that cannot be followed"),
        ("full", "{base}/full is not empty."),
        ("n" * 300, "File name too long. Name a directory with a shorter path."),
        ("mount", "{base}/mount is where a file system is mounted"),
    ],
)
def test_what_is_no_place_for_an_export_is_said_in_one_sentence(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    durable(cli.dirs, 4)
    (tmp_path / "nothing").symlink_to("not-there")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "to_file").symlink_to("file")
    (tmp_path / "file").write_text("old")
    (tmp_path / "mount").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("old")
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("/mount"))
    before = sorted(os.listdir(tmp_path))
    given = ("restore", "--job", "gpt", "--to", str(tmp_path / name), "--durable-dir", str(cli.dirs.durable))
    code, out, err = cli(*given)
    assert code in (2, 5)
    assert out == ""
    assert said.format(base=tmp_path) in err
    assert "durable_dir" not in err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("baftd")]) == 1
    assert sorted(os.listdir(tmp_path)) == before


def test_an_export_to_no_name_is_not_one_to_the_working_directory(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable(cli.dirs, 4)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, _, err = cli("restore", "--job", "gpt", "--to", "", "--durable-dir", str(cli.dirs.durable))
    assert code == 2
    assert "--to: the name of the directory is empty" in err
    assert os.listdir(tmp_path / "empty") == []


def test_exports_that_cannot_be(cli: Cli) -> None:
    tier = durable(cli.dirs, 4)
    out = str(cli.dirs.base / "out")
    where = ("--to", out, "--durable-dir", str(cli.dirs.durable))
    for arguments, code, words in (
        (("--job", "bert", *where), 3, ["nothing of job bert", "It holds: gpt"]),
        (("--job", "gpt", "--step", "5", *where), 3, ["no such step", "step-4.e1"]),
        (("--job", "gpt", "--epoch", "9", *where), 3, ["no such step"]),
        (("--job", "gpt", "--force", *where), 2, ["--force"]),
        (("--job", "gpt", "--to", out), 6, ["no daemon"]),
        (("--job", "gpt", "--epoch", "1", "--to", out), 2, ["--durable-dir"]),
        (("--job", "gpt", *where, "--format", "parquet"), 2, ["parquet"]),
    ):
        found, _, err = cli("restore", *arguments)
        assert found == code, err
        for word in words:
            assert word in err
    assert not Path(out).exists()

    checkpoint = tier.list("gpt")[0]
    (Path(checkpoint.path) / "MANIFEST").unlink()
    found, _, err = cli("restore", "--job", "gpt", *where)
    assert found == 3
    assert "incomplete" in err


def test_a_flipped_bit_is_not_exported(cli: Cli) -> None:
    tier = durable(cli.dirs, 4)
    shard = Path(tier.list("gpt")[0].parts[1].path)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(data)
    out = cli.dirs.base / "out"
    code, _, err = cli("restore", "--job", "gpt", "--to", str(out), "--durable-dir", str(cli.dirs.durable))
    assert code == 4
    assert "rank 1" in err
    assert not out.exists()


def test_export_from_slots_and_shards(cli: Cli, serve: Serve) -> None:
    slots = [make_slot(cli.dirs.shm, step=6, rank=rank, world=2) for rank in (0, 1)]
    tier = DirectoryTier(cli.dirs.durable, node="node-a")
    stored = save(tier, slots)
    path = sealed(cli.dirs, slots[0])
    memory = RestoreSource(rank=0, tier="memory", where=str(path), bytes=slots[0].length)
    disk = RestoreSource(rank=1, tier="durable", where=stored.parts[1].path, bytes=slots[1].length)
    server = serve({RestoreRequest: plan_of(memory, disk, step=6)})
    out = cli.dirs.base / "out"
    code, text, err = cli("restore", "--job", "gpt", "--to", str(out))
    assert code == 0, err
    assert "step 6 (epoch 1)" in text
    assert server.received[0].dry_run is True
    assert {"only.on.rank.0", "only.on.rank.1"} <= names_in(out / "model.safetensors")


def test_a_slot_that_went_on(cli: Cli, serve: Serve) -> None:
    slots = [make_slot(cli.dirs.shm, step=7, rank=rank, world=2) for rank in (0, 1)]
    sources = [
        RestoreSource(rank=slot.rank, tier="memory", where=str(sealed(cli.dirs, slot)), bytes=slot.length)
        for slot in slots
    ]
    serve({RestoreRequest: plan_of(*sources, step=6)})
    code, _, err = cli("restore", "--job", "gpt", "--to", str(cli.dirs.base / "out"))
    assert code == 4
    assert "does not hold step 6 any more" in err


def test_the_daemons_refusal(cli: Cli, serve: Serve) -> None:
    serve({RestoreRequest: ErrorReply(code="nothing_restorable", message="job gpt has no step.")})
    assert cli("restore", "--job", "gpt", "--to", str(cli.dirs.base / "out"))[0] == 3


@pytest.mark.parametrize("missing", ["slot", "shard"])
def test_a_source_that_is_gone(cli: Cli, serve: Serve, missing: str) -> None:
    if missing == "slot":
        source = RestoreSource(rank=0, tier="memory", where=str(cli.dirs.shm / "rank-00000.slot-0"), bytes=1)
    else:
        where = cli.dirs.durable / "gpt" / "step-6.e1" / "rank-00000.safetensors"
        source = RestoreSource(rank=0, tier="durable", where=str(where), bytes=1)
    serve({RestoreRequest: plan_of(source, step=6)})
    code, _, err = cli("restore", "--job", "gpt", "--to", str(cli.dirs.base / "out"))
    assert code in (2, 4)
    assert "rank 0" in err
