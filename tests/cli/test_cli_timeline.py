"""`baftd trace`, `show --bubbles`, `status` of a job that really trains; durable writes that somebody waits for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.daemon.test_pacing_life import pipeline, stages, trained_past
from tests.support.cli import Cli
from tests.support.daemon import Daemon, RunDirs, wait_until
from tests.support.numpy_trainer import TrainerProcess


def test_a_timeline_of_a_pipeline_that_trains(run_dirs: RunDirs, cli: Cli, tmp_path: Path) -> None:
    with (
        Daemon(run_dirs, interval="1 step", durable_dir=str(run_dirs.durable), durable_every="5 steps") as daemon,
        pipeline(run_dirs, stages(2, 2, 0.01, 0.02), steps=100_000),
    ):
        wait_until(lambda: daemon.status().jobs and trained_past(daemon, 12), "a dozen steps")
        code, out, err = cli("show", "--bubbles")
        assert (code, err) == (0, "")
        assert "job pipe epoch 1: " in out
        assert "2 micro-batches" in out
        assert {"fill", "steady", "collective"} <= set(out.split())
        code, out, _ = cli("status")
        assert "snapshot every step (a step takes " in out
        assert "overhead: " in out
        code, out, err = cli("trace", "--steps", "4:", "-o", str(tmp_path / "t.json"))
        assert (code, err) == (0, "")
        assert "of 2 ranks of job pipe" in out
        code, _, err = cli("trace", "--steps", "1000000:", "-o", str(tmp_path / "none.json"))
        assert code == 1
        assert "no rank on node-a has told of steps from 1000000 on yet" in err
    document = json.loads((tmp_path / "t.json").read_text())
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }
    seen: dict[str, list[Any]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            seen.setdefault(tracks[(event["pid"], event["tid"])], []).append(event)
    for rank in (0, 1):
        assert {f"F0 s{rank}", f"B1 s{rank}", "wait: receive", "wait: collective"} <= {
            event["name"] for event in seen[f"rank {rank}"]
        }
        windows = seen[f"rank {rank}: windows"]
        assert windows
        copied = seen[f"rank {rank}: copy engine"]
        assert sum(event["args"]["bytes"] for event in copied) > 0
        steps = seen[f"rank {rank}: steps"]
        assert min(int(event["name"].split()[1]) for event in steps) >= 4
        assert any(event["args"]["copied"] for event in steps)
    work = {event["name"].split()[0] for name, events in seen.items() if name.startswith("daemon") for event in events}
    assert {"commit", "durable", "manifest"} <= work


def test_a_durable_write_that_somebody_waits_for_is_not_spread(run_dirs: RunDirs) -> None:
    """The next durable step is due in an hour: left alone, 50 MB would be spread over a minute."""
    with (
        Daemon(run_dirs, durable_dir=str(run_dirs.durable), durable_every="1 h") as daemon,
        TrainerProcess(run_dirs, steps=6, save_at=5, arrays=2, elements=3 << 20, pause=0.05) as trainer,
    ):
        saved = trainer.wait_for("saved", timeout=60)
        assert (saved["step"], saved["tier"]) == (5, "durable"), "within 20 s, or it would have failed"
        assert trainer.wait(60) == 0, trainer.events
        assert daemon.status().counters["internal_errors"] == 0
