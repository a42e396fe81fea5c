"""`baftd trace`, `show --bubbles` and the pacing of `status`, against a real socket with written-down answers."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baftd.cli.pacing_text import percent, seconds
from baftd.pipeline.events import Event, EventKind, pack_event
from baftd.wire.messages import (
    BubbleRow,
    BubblesReply,
    BubblesRequest,
    DaemonSpan,
    ErrorReply,
    JobStatus,
    PacingStatus,
    RankPacing,
    RankStep,
    StatusReply,
    StatusRequest,
    TraceReply,
    TraceRequest,
)
from tests.support.cli import Cli, Serve

START, MS = 10**12, 10**6
NEWEST = (1 << 53) - 1

PACING = PacingStatus(
    interval=3,
    rung="interval",
    why="rank 5 copies 310 MB of 1.0 GB in its windows; the rest takes 41 ms, 1 % of 3 steps is 45 ms",
    slowest=5,
    slowest_node="n1",
    step_seconds=1.5,
    budget=0.01,
    expected=0.0091,
    overhead=0.0084,
    overhead_error=0.0003,
    pairs=212,
    probe=64,
    failures=2,
    young_daly=5400.0,
    ranks=[
        RankPacing(
            rank=4,
            rung="fence",
            bytes=1 << 30,
            window_seconds=0.21,
            in_windows=310 << 20,
            outside=0,
            at_fence=714 << 20,
            fence_seconds=0.041,
            held_seconds=0.0004,
            overruns=2,
            copy_rate=9.0e9,
        )
    ],
)


def status(*jobs: str, pacing: PacingStatus | None = None) -> StatusReply:
    return StatusReply(
        node="n0", pid=1, version="0.1", uptime=5.0, coordinator="in-process", shm_dir="/dev/shm", durable_dir="",
        rss_bytes=1, counters={},
        jobs=[
            JobStatus(
                job=job, epoch=1, world=8, highest_step=40, committed={"memory": 39}, clients=[],
                counters={"probes": 3, "overruns": 2}, pacing=pacing,
            )
            for job in jobs
        ],
    )  # fmt: skip


def rank_step(rank: int, step: int) -> RankStep:
    begun = START + step * 20 * MS
    found = [
        Event(EventKind.FORWARD, 0, 0, begun + MS, begun + 4 * MS),
        Event(EventKind.WINDOW, int(EventKind.WAIT_RECV), 0, begun + 4 * MS, begun + 9 * MS, 1 << 20),
        Event(EventKind.COPY_INSIDE, -1, 0, begun + 4 * MS, begun + 5 * MS, 1 << 20),
        Event(EventKind.BACKWARD, 0, 0, begun + 9 * MS, begun + 15 * MS),
    ]
    return RankStep(
        rank=rank, step=step, begun=begun, period=20 * MS, events=b"".join(map(pack_event, found)), copied=True
    )


def trace(*steps: RankStep, kept: tuple[int, int] = (0, 0), **more: Any) -> TraceReply:
    spans = [DaemonSpan(what="digest", begun=steps[0].begun, duration=MS, rank=0, step=steps[0].step)] if steps else []
    kept = (min(s.step for s in steps), max(s.step for s in steps)) if steps and kept == (0, 0) else kept
    return TraceReply(job="gpt", node="n0", epoch=1, kept=kept, steps=list(steps), spans=spans, **more)


# ---------------------------------------------------------------- trace


def test_a_trace_is_written_whole_and_says_what_is_in_it(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    server = serve({TraceRequest: trace(rank_step(0, 12), rank_step(1, 12), rank_step(0, 13))})
    out_file = tmp_path / "t.json"
    code, out, err = cli("trace", "--job", "gpt", "--steps", "12:13", "-o", str(out_file))
    assert (code, err) == (0, "")
    assert f"{out_file}: steps 12 to 13 of 2 ranks of job gpt on n0" in out
    assert "ui.perfetto.dev" in out
    (asked,) = server.received
    assert isinstance(asked, TraceRequest)
    assert (asked.job, asked.first, asked.last) == ("gpt", 12, 13)
    document = json.loads(out_file.read_text())
    names = {event["args"].get("name") for event in document["traceEvents"] if event["ph"] == "M"}
    assert {"node n0", "rank 0", "rank 1: windows", "rank 0: copy engine", "daemon: digest"} <= names
    assert document["otherData"]["first_step"] == 12
    assert [path.name for path in tmp_path.iterdir() if path.name != "t.json" and path.is_file()] == []
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE(out_file.stat().st_mode) == 0o666 & ~mask


def test_a_trace_goes_to_standard_output_or_comes_with_facts_as_json(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    serve({TraceRequest: trace(rank_step(0, 12)), StatusRequest: status("gpt")})
    code, out, err = cli("trace", "-o", "-")
    assert (code, err) == (0, "")
    assert json.loads(out)["otherData"]["job"] == "gpt"
    code, document = cli.json("trace", "-o", str(tmp_path / "t.json"))
    assert (code, document["kind"], document["steps"], document["ranks"]) == (0, "trace", [12, 12], [0])
    code, _, err = cli("trace", "-o", "-", "--json")
    assert code == 2
    assert "standard output" in err


@pytest.mark.parametrize(
    ("text", "first", "last"), [("7", 7, 7), ("7:", 7, NEWEST), (":9", 0, 9), ("7:9", 7, 9), (":", 0, NEWEST)]
)
def test_spans_of_steps(cli: Cli, serve: Serve, tmp_path: Path, text: str, first: int, last: int) -> None:
    server = serve({TraceRequest: trace(rank_step(0, 8))})
    assert cli("trace", "--job", "gpt", "--steps", text, "-o", str(tmp_path / "t.json"))[0] == 0
    (asked,) = server.received
    assert isinstance(asked, TraceRequest)
    assert (asked.first, asked.last) == (first, last)


def test_a_span_without_an_end_is_told_without_one(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    serve({TraceRequest: trace(rank_step(0, 12), kept=(12, 12))})
    for text, said in (("5:", "steps from 5 on"), ("5:12", "steps 5 to 12"), ("12:14", "steps 12 to 14")):
        code, out, _ = cli("trace", "--job", "gpt", "--steps", text, "-o", str(tmp_path / "t.json"))
        assert code == 0
        assert f"asked for were {said}; kept are 12 to 12" in out
        assert "9007199254740991" not in out


@pytest.mark.parametrize("text", ["", "a", "-3", "1:2:3", "9:7", "1.5:2", "²:3", "9007199254740992", "9" * 5000 + ":"])
def test_what_is_no_span_of_steps(cli: Cli, text: str) -> None:
    code, out, err = cli("trace", "--job", "gpt", f"--steps={text}", "-o", "t.json")
    assert (code, out) == (2, "")
    assert "--steps" in err


def test_a_trace_without_data_is_one_sentence_and_no_file(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    server = serve({TraceRequest: trace(), StatusRequest: status("gpt")})
    file = tmp_path / "t.json"
    code, out, err = cli("trace", "--job", "gpt", "-o", str(file))
    assert (code, out) == (1, "")
    assert "no rank of job gpt on n0 has told what it did in a step." in err
    server.answers[TraceRequest] = [trace(kept=(120, 375))]
    code, _, err = cli("trace", "--job", "gpt", "--steps", "900:950", "-o", str(file))
    assert code == 1
    assert "no rank on n0 has told of steps 900 to 950 yet; the newest step is 375." in err
    assert "steps 120 to 375" in err
    assert "Only the newest" not in err, "these were never run"
    code, _, err = cli("trace", "--job", "gpt", "--steps", "900:", "-o", str(file))
    assert "no rank on n0 has told of steps from 900 on yet" in err
    code, _, err = cli("trace", "--job", "gpt", "--steps", "7", "-o", str(file))
    assert code == 1
    assert "step 7 is not kept on n0; steps 120 to 375 are. Only the newest steps are kept." in err
    code, _, err = cli("trace", "--job", "gpt", "--steps", "130:140", "-o", str(file))
    assert "steps 130 to 140 are not kept on n0; steps 120 to 375 are." in err
    assert "newest" not in err
    assert not file.exists()


def test_which_job_is_meant_must_be_clear(cli: Cli, serve: Serve) -> None:
    server = serve({StatusRequest: status(), TraceRequest: ErrorReply(code="usage", message="no job x here.")})
    code, _, err = cli("trace", "-o", "t.json")
    assert code == 1
    assert "no job runs on this node." in err
    server.answers[StatusRequest] = [status("gpt", "vit")]
    code, _, err = cli("trace", "-o", "t.json")
    assert code == 2
    assert "several jobs on this node: gpt, vit." in err
    code, _, err = cli("trace", "--job", "x", "-o", "t.json")
    assert code == 2
    assert "no job x here." in err


def test_a_file_that_cannot_be_written(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    serve({TraceRequest: trace(rank_step(0, 12))})
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for path, why in ((tmp_path / "none" / "t.json", "No such file"), (circle, "symbolic links")):
        code, out, err = cli("trace", "--job", "gpt", "-o", str(path))
        assert (code, out) == (1, "")
        assert f"{path} cannot be written" in err
        assert why in err
    assert circle.is_symlink()
    assert [path.name for path in tmp_path.rglob("*") if "t.json" in path.name or ".baftd-" in path.name] == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", "-o: the name of the file is empty."),
        (".", "-o . is a directory."),
        ("/", "-o / is a directory."),
        ("d/", "-o d/ is a directory."),
        ("none/", "-o none/ names a directory, which is not there."),
    ],
)
def test_what_names_no_file_is_refused_before_anybody_is_asked(cli: Cli, path: str, said: str) -> None:
    (cli.dirs.base / "d").mkdir()
    code, out, err = cli("trace", "--job", "gpt", "-o", path)
    assert (code, out) == (2, "")
    assert said in err, "and no daemon is missed"


def test_a_trace_into_a_pipe(cli: Cli, serve: Serve, tmp_path: Path) -> None:
    serve({TraceRequest: trace(rank_step(0, 12))})
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(fifo.read_text)
        code, out, err = cli("trace", "--job", "gpt", "-o", str(fifo))
        assert (code, err) == (0, "")
        assert json.loads(read.result(10))["otherData"]["job"] == "gpt"
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert f"{fifo}: step 12" in out


# ---------------------------------------------------------------- show --bubbles


def bubbles(**changes: Any) -> BubblesReply:
    rows = [
        BubbleRow(rank=4, stages=[0], kind="steady", count=1, predicted=0.052, measured=0.050, bytes=200 << 20),
        BubbleRow(rank=4, stages=[0], kind="data", count=1, predicted=None, measured=0.0012, bytes=0),
    ]
    fields = {"schedule": "1F1B, 4 ranks, 8 micro-batches", "rows": rows, "error": 0.04, "pacing": PACING, **changes}
    return BubblesReply(job="gpt", epoch=2, steps=64, **fields)


def test_bubbles_are_shown_predicted_and_measured(cli: Cli, serve: Serve) -> None:
    serve({BubblesRequest: bubbles(), StatusRequest: status("gpt")})
    code, out, err = cli("show", "--bubbles")
    assert (code, err) == (0, "")
    assert "job gpt epoch 2: 1F1B, 4 ranks, 8 micro-batches, measured over 64 steps" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "4 0 steady 1 52.0 ms 50.0 ms 4.00 % 200 MiB" in lines
    assert "4 0 data 1 - 1.20 ms - -" in lines
    assert "median error of the prediction: 4.00 % of the measured length" in out
    row = next(line for line in out.splitlines() if "fence wait" in line)
    assert row.split()[-2:] == ["short", "windows"]
    assert "overrun" not in out, "which is another thing, in a trace"
    assert "4 fence 1.00 GiB 310 MiB 0 B 714 MiB 210 ms 8.38 GiB/s 41.0 ms 400 us 2" in lines
    code, document = cli.json("show", "--bubbles", "--job", "gpt")
    assert (code, document["kind"], document["rows"][0]["predicted"]) == (0, "bubbles", 0.052)


def test_bubbles_of_a_job_that_has_told_nothing(cli: Cli, serve: Serve) -> None:
    serve({BubblesRequest: bubbles(rows=[], pacing=None, error=None, schedule="")})
    code, out, err = cli("show", "--bubbles", "--job", "gpt")
    assert (code, out) == (1, "")
    assert "no rank of job gpt on this node has told" in err


def test_bubbles_go_with_no_step_and_show_needs_one(cli: Cli) -> None:
    code, _, err = cli("show", "12", "--bubbles")
    assert code == 2
    assert "baftd trace" in err
    code, _, err = cli("show")
    assert code == 2
    assert "STEP is missing." in err


# ---------------------------------------------------------------- status


def test_status_says_rung_interval_why_slowest_and_cost(cli: Cli, serve: Serve) -> None:
    serve({StatusRequest: status("gpt", pacing=PACING)})
    code, out, _ = cli("status")
    assert code == 0
    for line in (
        "snapshot every 3 steps (a step takes 1.50 s): rung interval, the fewest steps for 0.8 of the budget (fewer "
        "are tried with patience); each copied in windows, the rest at the fence (rung fence)",
        "why: rank 5 copies 310 MB",
        "slowest: rank 5 on n1",
        "overhead: 0.84 % +- 0.03 % measured (212 pairs of steps), 0.91 % expected, budget 1.00 %",
        "durable: every 90 min would lose least (Young, Daly; 2 failures seen)",
        "probes 3, short_windows 2",
    ):
        assert line in out
    assert "overruns" not in out
    assert cli.json("status")[1]["jobs"][0]["pacing"]["slowest_node"] == "n1"


def test_status_says_an_interval_that_is_ahead_and_the_cost_of_both(cli: Cli, serve: Serve) -> None:
    ahead = msgspec.structs.replace(
        PACING, interval=1, next_interval=19, next_step=130, expected=0.0418, next_expected=0.0022, overhead=None
    )
    server = serve({StatusRequest: status("gpt", pacing=ahead)})
    _, out, _ = cli("status")
    assert "snapshot every step, from step 130 on every 19 steps (a step takes 1.50 s): rung interval" in out
    assert "4.18 % expected now, 0.22 % from step 130 on, budget 1.00 %" in out
    server.answers[StatusRequest] = [status("gpt", pacing=msgspec.structs.replace(ahead, next_step=0))]
    _, out, _ = cli("status")
    assert "snapshot every step, as soon as it is agreed every 19 steps" in out
    assert "0.22 % then" in out


def test_status_of_an_interval_that_is_set_says_so(cli: Cli, serve: Serve) -> None:
    several = [msgspec.structs.replace(PACING.ranks[0], rung=rung) for rung in ("windows", "overlap", "windows")]
    serve({StatusRequest: status("gpt", pacing=msgspec.structs.replace(PACING, fixed=True, ranks=several))})
    _, out, _ = cli("status")
    assert "rung interval, as set; ranks are on rungs windows, overlap\n" in out
    assert "too large" not in out


def test_status_before_anything_was_measured(cli: Cli, serve: Serve) -> None:
    young = PacingStatus(interval=1, rung="windows", why="", expected=0.0, budget=0.01, probe=64)
    serve({StatusRequest: status("gpt", pacing=young)})
    _, out, _ = cli("status")
    assert "snapshot every step: rung windows" in out
    assert "overhead: not measured yet (about one step in 64 is left out to compare), 0.00 % expected" in out
    assert "slowest" not in out


def test_numbers_for_people() -> None:
    assert [percent(share) for share in (0.01, 0.00421, 0.00003, 1e-8, 0.0, -0.002, 1.5)] == [
        "1.00 %", "0.42 %", "0.0030 %", "0.0000010 %", "0.00 %", "-0.20 %", "150.00 %",
    ]  # fmt: skip
    assert [seconds(value) for value in (3.2, 0.184, 0.0125, 1e-6, 3e-8, 0.0, 99.96)] == [
        "3.20 s", "184 ms", "12.5 ms", "1.00 us", "30 ns", "0 s", "100.0 s",
    ]  # fmt: skip
