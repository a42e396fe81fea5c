"""What each verb asks, prints and exits with, against a real socket with written-down answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from baftd import __version__
from baftd.cli import start
from baftd.settings import Settings
from baftd.wire.messages import (
    Ack,
    CheckpointRow,
    ClientStatus,
    ErrorReply,
    GcReply,
    GcRequest,
    JobStatus,
    ListReply,
    ListRequest,
    Progress,
    RestoreReply,
    RestoreRequest,
    RestoreSource,
    StatusReply,
    StatusRequest,
    StopRequest,
    VerifyReply,
    VerifyRequest,
)
from tests.support.cli import Cli, Serve
from tests.support.daemon import RunDirs

ROWS = [
    CheckpointRow(
        job="gpt", epoch=2, step=12, updates=12, tiers=["memory"], parts=2, world=2, bytes=3 << 20, state="committed"
    ),
    CheckpointRow(
        job="gpt",
        epoch=2,
        step=10,
        updates=10,
        tiers=["memory", "durable"],
        parts=2,
        world=2,
        bytes=3 << 20,
        state="committed",
        pinned=True,
        path="/ckpt/gpt/step-10.e2",
    ),
    CheckpointRow(
        job="gpt",
        epoch=1,
        step=10,
        updates=9,
        tiers=["durable"],
        parts=2,
        world=2,
        bytes=3 << 20,
        state="quarantined",
        reason="rank 1: [red]chunk 3[/red] is not what its digest says\x1b[2J",
    ),
]

STATUS = StatusReply(
    node="node-a",
    pid=4321,
    version=__version__,
    uptime=250.0,
    coordinator="in-process",
    shm_dir="/dev/shm",
    durable_dir="/ckpt",
    rss_bytes=50 << 20,
    counters={"messages": 100, "bad_messages": 2, "internal_errors": 0},
    jobs=[
        JobStatus(
            job="gpt",
            epoch=2,
            world=2,
            highest_step=12,
            committed={"memory": 12, "durable": 10},
            clients=[
                ClientStatus(rank=0, pid=100, state="training", step=12, slots=["committed 12", "free"]),
                ClientStatus(rank=1, pid=101, state="training", step=12),
            ],
            counters={"snapshots": 12, "skipped": 1, "torn": 0},
            last_skip="step 7, rank 1: no slot was free",
            held_ms_median=0.42,
            slot_bytes=12 << 20,
        )
    ],
)

PLAN = RestoreReply(
    job="gpt",
    epoch=2,
    step=10,
    updates=10,
    world=2,
    sources=[
        RestoreSource(rank=0, tier="memory", where="/dev/shm/baftd-0/gpt/rank-00000.slot-1", bytes=2_000_000_000),
        RestoreSource(rank=1, tier="durable", where="/ckpt/gpt/step-10.e2/rank-00001.safetensors", bytes=3_000_000_000),
    ],
    passed_over=["step 12: rank 1 has no verified shard"],
    fenced=[],
    lost_steps=2,
    seconds=1.25,
)


def test_status(cli: Cli, serve: Serve) -> None:
    server = serve({StatusRequest: STATUS})
    code, out, err = cli("status")
    assert (code, err) == (0, "")
    for text in (
        f"baftd {__version__} on node-a, pid 4321, up 4.2 min",
        "durable tier in /ckpt",
        "bad_messages 2",
        "job gpt: epoch 2, 2 ranks, highest step 12, slots 12.0 MiB",
        "committed(memory): step 12\n",
        "committed(durable): step 10, 2 behind",
        "snapshots 12, skipped 1",
        "held 0.42 ms",
        "last skip: step 7, rank 1: no slot was free",
        "training",
        "committed 12; free",
    ):
        assert text in out
    assert "torn" not in out
    code, document = cli.json("status", "--job", "gpt")
    assert code == 0
    assert document["kind"] == "status"
    assert document["jobs"][0]["committed"] == {"memory": 12, "durable": 10}
    assert document["daemon_version"] == __version__
    assert "id" not in document
    assert server.received[-1].job == "gpt"


def test_list(cli: Cli, serve: Serve) -> None:
    serve({ListRequest: ListReply(rows=ROWS)})
    code, out, _ = cli("list")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:4] == ["job", "step", "epoch", "state"]
    assert lines[1].split() == ["gpt", "12", "2", "committed", "memory", "2/2", "3.00", "MiB"]
    assert "committed (pinned)" in lines[2]
    assert "memory+durable" in lines[2]
    assert "/ckpt/gpt/step-10.e2" in lines[2]
    assert "[red]chunk 3[/red]" in lines[3]
    assert "\x1b" not in out
    code, document = cli.json("list")
    assert [row["step"] for row in document["rows"]] == [12, 10, 10]


def test_list_of_nothing(cli: Cli, serve: Serve) -> None:
    serve({ListRequest: ListReply(rows=[])})
    assert cli("list")[:2] == (0, "No checkpoint.\n")
    assert cli("list", "--job", "gpt")[1] == "No checkpoint of job gpt.\n"
    assert cli.json("list")[1]["rows"] == []


def test_show(cli: Cli, serve: Serve) -> None:
    serve({ListRequest: ListReply(rows=ROWS)})
    code, out, _ = cli("show", "10", "--job", "gpt")
    assert code == 0
    assert "job gpt step 10 epoch 2: committed (pinned)" in out
    assert "job gpt step 10 epoch 1: quarantined" in out
    assert "path     /ckpt/gpt/step-10.e2" in out
    assert "\x1b" not in out
    assert [row["epoch"] for row in cli.json("show", "10", "--epoch", "1")[1]["rows"]] == [1]
    code, _, err = cli("show", "11", "--job", "gpt")
    assert code == 1
    assert "no checkpoint of step 11 of job gpt" in err
    assert "gpt 12, gpt 10" in err
    assert "`baftd list --job gpt` shows all of them." in err
    code, _, err = cli("show", "11", "--epoch", "1")
    assert code == 1
    assert "no checkpoint of step 11 in epoch 1." in err
    assert "gpt 12 (epoch 2)" in err
    code, _, err = cli("show", "12", "--tensors")
    assert code == 2
    assert "not durable" in err


def test_show_where_there_is_nothing_says_what_to_do_next(cli: Cli, serve: Serve) -> None:
    serve({ListRequest: ListReply(rows=[])})
    code, _, err = cli("show", "11", "--job", "gpt")
    assert code == 1
    assert "no checkpoint of step 11 of job gpt. There is none of this job at all; `baftd list` shows" in err
    code, _, err = cli("show", "11")
    assert code == 1
    assert "no checkpoint of step 11. There is none at all here; `baftd status` shows" in err


@pytest.mark.parametrize("step", ["9007199254740992", "9" * 5000])
def test_a_step_that_no_message_holds(cli: Cli, step: str) -> None:
    code, _, err = cli("show", step)
    assert code == 2
    assert "no job gets as far as that" in err


class _InTurn(list[StatusReply]):
    """An answer to each request, where the server would send them all to one."""

    def __iter__(self) -> Iterator[StatusReply]:
        return iter([self.pop(0)])


def test_status_of_a_job_that_is_not_there_is_an_error(cli: Cli, serve: Serve) -> None:
    nothing = msgspec.structs.replace(STATUS, jobs=[])
    server = serve({StatusRequest: _InTurn([nothing, STATUS])})
    code, out, err = cli("status", "--job", "nope")
    assert (code, out) == (1, "")
    assert f"no job nope runs on {STATUS.node}. There is gpt. `baftd list --job nope` shows" in err
    server.answers[StatusRequest] = [nothing]
    code, document = cli.json("status", "--job", "nope")
    assert (code, document["kind"]) == (1, "error")
    assert "no job nope runs" in document["error"]["message"]
    code, out, _ = cli("status")
    assert code == 0, "no job at all is no error where none is named"
    assert "No job on this node." in out


def test_show_a_step_of_two_jobs(cli: Cli, serve: Serve) -> None:
    other = CheckpointRow(
        job="bert", epoch=1, step=12, updates=1, tiers=["memory"], parts=1, world=1, bytes=1, state="committed"
    )
    serve({ListRequest: ListReply(rows=[*ROWS, other])})
    code, _, err = cli("show", "12")
    assert code == 2
    assert "bert, gpt" in err


def test_verify(cli: Cli, serve: Serve) -> None:
    progress = Progress(what="reading step 10", done=1, total=2)
    reply = VerifyReply(ok=True, lines=["step 10 rank 0: 12 chunks, all as digested"])
    server = serve({VerifyRequest: [progress, reply]})
    code, out, err = cli("verify", "10", "--job", "gpt", "--epoch", "2")
    assert code == 0
    assert out.splitlines() == ["step 10 rank 0: 12 chunks, all as digested", "All verified."]
    assert err == "reading step 10\n"
    assert (server.received[0].step, server.received[0].epoch) == (10, 2)


def test_verify_that_fails(cli: Cli, serve: Serve) -> None:
    serve({VerifyRequest: VerifyReply(ok=False, lines=["step 10 rank 1: chunk 3 is damaged"])})
    code, out, _ = cli("verify", "--job", "gpt")
    assert code == 4
    assert "Damaged" in out
    assert cli.json("verify", "--job", "gpt")[0] == 4


def test_restore(cli: Cli, serve: Serve) -> None:
    server = serve({RestoreRequest: PLAN})
    code, out, _ = cli("restore", "--job", "gpt", "--at-most", "11", "--force")
    assert code == 0
    request = server.received[0]
    assert (request.at_most, request.step, request.force, request.dry_run) == (11, None, True, False)
    for text in (
        "restore plan of job gpt: step 10 (epoch 2, 10 updates), 2 ranks, 4.66 GiB",
        "/ckpt/gpt/step-10.e2/rank-00001.safetensors",
        "passed over: step 12: rank 1 has no verified shard",
        "steps lost: 2 (the job had reached 12)",
        "verified and pinned in 1.2 s",
        "torchrun --nproc-per-node 2",
    ):
        assert text in out


def test_restore_dry_run(cli: Cli, serve: Serve) -> None:
    serve({RestoreRequest: RestoreReply(**{name: getattr(PLAN, name) for name in (
        "job", "epoch", "step", "updates", "world", "sources", "passed_over", "fenced", "lost_steps", "seconds"
    )}, dry_run=True)})  # fmt: skip
    code, out, _ = cli("restore", "--job", "gpt", "--dry-run")
    assert code == 0
    assert "would restore job gpt: step 10" in out
    assert "estimate: 4 s" in out
    assert "torchrun" not in out
    document = cli.json("restore", "--job", "gpt", "--dry-run")[1]
    assert document["estimate_seconds"] == 4.0
    assert document["dry_run"] is True


def test_restore_refuses_contradictions(cli: Cli) -> None:
    assert cli("restore", "--job", "gpt", "--step", "3", "--at-most", "4")[0] == 2
    assert cli("restore", "--job", "gpt", "--epoch", "3")[0] == 2
    code, _, err = cli("restore", "--job", "gpt", "--format", "safetensors")
    assert code == 2
    assert "--to DIR" in err
    assert cli("restore")[0] == 2


def test_gc(cli: Cli, serve: Serve) -> None:
    server = serve({GcRequest: GcReply(lines=["slots of job old: finished"], bytes=5 << 30)})
    code, out, _ = cli("gc", "--dry-run")
    assert code == 0
    assert out.splitlines() == ["slots of job old: finished", "5.00 GiB would be freed."]
    assert server.received[0].dry_run is True
    assert cli("gc")[1].endswith("5.00 GiB freed.\n")
    assert cli.json("gc")[1]["dry_run"] is False


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("nothing_restorable", 3), ("format", 4), ("no_room", 5), ("try_again", 75), ("fenced", 1), ("new_one", 1)],
)
def test_the_daemons_errors_become_exit_codes(cli: Cli, serve: Serve, code: str, exit_code: int) -> None:
    serve({RestoreRequest: ErrorReply(code=code, message="it failed on rank 3.", hint="Do this.")})
    found, out, err = cli("restore", "--job", "gpt")
    assert (found, out, err) == (exit_code, "", "baftd: it failed on rank 3. Do this.\n")
    found, document = cli.json("restore", "--job", "gpt")
    assert found == exit_code
    assert document["kind"] == "error"
    assert document["error"]["exit_code"] == exit_code
    assert document["error"]["message"] == "it failed on rank 3."


def test_an_answer_of_another_kind(cli: Cli, serve: Serve) -> None:
    serve({ListRequest: Ack()})
    code, _, err = cli("list")
    assert code == 1
    assert "answered ListRequest with Ack" in err


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("list",), ("show", "1"), ("verify", "--job", "j"), ("restore", "--job", "j"), ("gc",)],
)
def test_no_daemon(cli: Cli, arguments: tuple[str, ...]) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (6, "")
    assert str(cli.dirs.socket) in err
    assert "baftd start" in err
    code, document = cli.json(*arguments)
    assert (code, document["error"]["code"]) == (6, "unreachable")


def test_stop_of_nothing(cli: Cli) -> None:
    assert cli("stop")[:2] == (0, f"baftd does not run in {cli.dirs.run}.\n")


def test_stop_of_a_daemon_that_goes_on(cli: Cli, serve: Serve) -> None:
    serve({StatusRequest: STATUS, StopRequest: Ack()})
    code, _, err = cli("stop", "--timeout", "100 ms")
    assert code == 75
    assert "still runs" in err


def test_start_of_a_running_daemon(cli: Cli, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAFTD_SHM_DIR", "/dev/shm")
    monkeypatch.setenv("BAFTD_DURABLE_DIR", "/ckpt")
    serve({StatusRequest: STATUS})
    assert cli("start")[:2] == (0, "baftd runs already on node-a (pid 4321).\n")
    code, _, err = cli("start", "--durable-dir", "/other")
    assert code == 5
    assert "durable_dir=/ckpt (asked for: /other)" in err


def test_start_says_when_the_durable_directory_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(durable_dir=tmp_path)
    start._warn_of_durable(settings)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(os, "access", lambda *_: False)
    for directory in (tmp_path, tmp_path / "not" / "there"):
        start._warn_of_durable(replace(settings, durable_dir=directory))
        said = capsys.readouterr().err
        assert str(directory) in said
        assert "stay in memory" in said


def test_start_refuses_redis(cli: Cli) -> None:
    code, _, err = cli("start", "--redis", "redis://head:6379")
    assert code == 2
    assert "--redis" in err
    assert "one node" in err


def test_config_show(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAFTD_NODE")
    (cli.dirs.base / "baftd.toml").write_text('node = "here"\n')
    code, out, _ = cli("config", "show", "--origin", "--slots", "6")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["node", "here", "./baftd.toml:1"] in lines
    assert ["slots", "6", "--slots"] in lines
    assert ["run_dir", str(cli.dirs.run), "BAFTD_RUN_DIR"] in lines
    assert "how often a committed step" in cli("config", "show")[1]
    rows = {row["name"]: row for row in cli.json("config", "show")[1]["settings"]}
    assert rows["node"]["origin"] == "./baftd.toml:1"
    assert rows["durable_every"] == {
        "name": "durable_every",
        "value": "10 min",
        "origin": "default",
        "default": "10 min",
        "kind": "interval",
        "variable": "BAFTD_DURABLE_EVERY",
        "flag": "--durable-every",
        "reader": "daemon",
        "help": "how often a committed step is made durable: steps or time",
    }
    (cli.dirs.base / "baftd.toml").write_text('\ndurable_evry = "1 min"\n')
    code, _, err = cli("config", "show")
    assert code == 2
    assert "./baftd.toml:2" in err
    assert "durable_every" in err


def test_version(cli: Cli) -> None:
    assert cli("version")[1].startswith(f"baftd {__version__} ")
    assert cli("--version")[1] == f"baftd {__version__}\n"
    assert cli.json("version")[1]["baftd"] == __version__


def test_mistakes_in_arguments(cli: Cli) -> None:
    for arguments, words in (
        (("stauts",), ["'stauts'", "'status'"]),
        (("xyz",), ["'xyz'", "start, stop"]),
        (("list", "--jbo", "x"), ["--jbo"]),
        (("list", "--job", "../x"), ["../x"]),
        (("show",), ["STEP"]),
        (("show", "-3"), ["3"]),
        (("show", "1.5"), ["1.5"]),
        (("stop", "--timeout", "10"), ["no unit"]),
        ((), ["VERB"]),
        (("config",), ["ACTION"]),
    ):
        code, out, err = cli(*arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("baftd: ")
        assert ".. `" not in err, "one full stop ends a sentence"
        for word in words:
            assert word in err


def test_every_verb_has_help(cli: Cli) -> None:
    from baftd.cli.main import VERBS

    for verb in VERBS:
        code, out, _ = cli(verb, "--help")
        assert code == 0
        assert f"usage: baftd {verb}" in out


def test_a_reader_that_goes_away(run_dirs: RunDirs) -> None:
    command = [sys.executable, "-m", "baftd.cli.main", "config", "show"]
    with subprocess.Popen(command, env=run_dirs.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""
