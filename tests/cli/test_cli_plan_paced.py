"""`baftd plan`, how often: a running job's own settings and what it measured, what flags change, jobs of one stage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baftd.wire.messages import LayoutReply, LayoutRequest
from tests.cli.test_cli_plan import running
from tests.cli.test_cli_plan_bubbles import FOUR_STAGES
from tests.daemon.test_pacing import job_of, paced
from tests.support.cli import Cli, Serve
from tests.support.daemon import Daemon, RunDirs, wait_until

ONE_STAGE = {"world": 2, "order": ["dp"], "axes": {"dp": 2}, "tensors": [{"name": "w", "shape": [1 << 20]}]}
STEP = ("--step-ms", "100", "--copy-rate", "10 MB")
"""1 MiB saved by each of two ranks take 0.1 s beside computation."""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Declarations by name."""
    found = {}
    for name, declared in (("one", ONE_STAGE), ("four", FOUR_STAGES)):
        path = tmp_path / f"{name}.json"
        tensors = [{"dtype": "F32", **tensor} for tensor in declared["tensors"]]  # type: ignore[attr-defined]
        path.write_text(json.dumps({**declared, "tensors": tensors}))
        found[name] = str(path)
    return found


def bubbles_of(cli: Cli, *given: str) -> dict[str, Any]:
    code, found = cli.json("plan", *given)
    assert code == 0, found
    bubbles: dict[str, Any] = found["bubbles"]
    return bubbles


def job(held: float = 0.0, **settings: Any) -> LayoutReply:
    reply = running(**settings)
    reply.ranks = [msgspec.structs.replace(rank, held_seconds=held * rank.rank) for rank in reply.ranks]
    return reply


# ---------------------------------------------------------------- whose settings


@pytest.mark.parametrize(
    ("set_", "flags", "budget", "interval"),
    [
        ({"overhead_budget": 0.05}, (), 0.05, None),
        ({"overhead_budget": 0.05, "interval_steps": 7}, (), 0.05, {"steps": 7}),
        ({"overhead_budget": 0.05, "interval_seconds": 60.0}, (), 0.05, {"seconds": 60.0}),
        ({"overhead_budget": 0.05, "interval_steps": 7}, ("--interval", "auto"), 0.05, None),
        ({"overhead_budget": 0.05, "interval_steps": 7}, ("--interval", "3 steps"), 0.05, {"steps": 3}),
        ({"overhead_budget": 0.05, "interval_steps": 7}, ("--overhead-budget", "2 %"), 0.02, {"steps": 7}),
        ({"overhead_budget": 0.0}, (), 0.0, None),
    ],
)
def test_a_running_job_is_planned_by_its_own_settings_where_no_flag_says_otherwise(
    cli: Cli,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    set_: dict[str, Any],
    flags: tuple[str, ...],
    budget: float,
    interval: dict[str, Any] | None,
) -> None:
    """This command's own file and environment are about another daemon."""
    monkeypatch.setenv("BAFTD_INTERVAL", "99 steps")
    monkeypatch.setenv("BAFTD_OVERHEAD_BUDGET", "9 %")
    serve({LayoutRequest: job(**set_)})
    found = bubbles_of(cli, "--job", "gpt", *STEP, *flags)
    assert (found["overhead_budget"], found["interval"]) == (budget, interval)
    (one,) = found["schedules"]
    if interval is not None:
        assert one["interval"] == interval.get("steps", 600)


def test_a_daemon_that_says_nothing_of_its_settings_leaves_those_of_the_command(
    cli: Cli, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAFTD_INTERVAL", "99 steps")
    serve({LayoutRequest: running()})
    found = bubbles_of(cli, "--job", "gpt", *STEP)
    assert (found["overhead_budget"], found["interval"]) == (0.01, {"steps": 99})


def test_what_a_snapshot_was_measured_to_hold_counts_as_its_cost(cli: Cli, serve: Serve) -> None:
    serve({LayoutRequest: job(held=0.02, overhead_budget=0.01)})
    fast = ("--job", "gpt", "--step-ms", "100", "--copy-rate", "100 GB")
    found = bubbles_of(cli, *fast)
    assert found["held_seconds"] == 0.02
    (one,) = found["schedules"]
    assert one["stages"][0]["cost_seconds"] == pytest.approx(0.02, rel=1e-3)
    assert one["interval"] == 26, "20 ms of 100, of which 0.8 % may be spent"
    _, out, _ = cli("plan", *fast)
    assert "held: a snapshot holds training for 20.0 ms besides, as measured in this job\n" in out


def test_a_daemon_tells_its_settings_and_what_it_measured(run_dirs: RunDirs) -> None:
    """Ranks that a snapshot holds for 5 ms in steps of 48."""
    settings = {"interval": "2 steps", "overhead_budget": "3 %"}
    with Daemon(run_dirs, **settings) as daemon, paced(run_dirs, 2) as ranks:
        for step in range(1, 40):
            for rank in ranks:
                timings = rank.timings(step, step % 2 == 0)
                timings.held_ns += 5_000_000 * timings.copied
                rank.say(timings)
        wait_until(lambda: job_of(daemon).counters["timings"] == 78, lambda: f"all told: {job_of(daemon)}")
        reply = daemon.request(LayoutRequest(job="gpt"))
        assert isinstance(reply, LayoutReply)
        assert (reply.interval_steps, reply.interval_seconds, reply.overhead_budget) == (2, 0.0, 0.03)
        assert [rank.held_seconds for rank in reply.ranks] == pytest.approx([0.005, 0.005], abs=0.001)


# ---------------------------------------------------------------- an interval that is set


@pytest.mark.parametrize("name", ["one", "four"])
def test_an_interval_that_is_set_is_kept_and_what_it_costs_is_said(
    cli: Cli, files: dict[str, str], name: str
) -> None:
    given = ("--layout", files[name], "--redundancy", "replicas", *STEP, "--micro", "4")
    for interval, within in (("2 steps", False), ("100000 steps", True)):
        found = bubbles_of(cli, *given, "--interval", interval)
        for one in found["schedules"]:
            assert (f"{one['interval']} steps", one["within_budget"]) == (interval, within)
        code, out, _ = cli("plan", *given, "--interval", interval)
        assert code == 0
        assert f"interval: {interval}, as it is set" in out
        assert "never" not in out
        assert ("over the budget at the interval that is set" in out) is not within
        assert ("no interval is long enough" in out) is False


# ---------------------------------------------------------------- without a pipeline


@pytest.fixture
def one(files: dict[str, str]) -> tuple[str, ...]:
    return ("--layout", files["one"], "--redundancy", "replicas", "--interval", "auto")


def test_one_stage_has_a_rung_and_an_interval(cli: Cli, one: tuple[str, ...]) -> None:
    found = bubbles_of(cli, *one, *STEP)
    (only,) = found["schedules"]
    (stage,) = only["stages"]
    assert (only["name"], only["step_seconds"]) == ("no pipeline", pytest.approx(0.1))
    assert (stage["bubble_seconds"], stage["fits"]) == (0.0, 0)
    assert stage["rung"] in ("overlap", "fence")
    assert only["interval"] > 1
    assert only["overhead"] == pytest.approx(stage["cost_seconds"] / (only["interval"] * 0.1))
    code, out, err = cli("plan", *one, *STEP)
    assert (code, err) == (0, "")
    assert "bubbles: none, as all ranks are of one stage; copying 0.01 GB/s\n" in out
    row = rf"^100\.0 ms +4\.00 MiB +{stage['rung']} +\S+ ms +every {only['interval']} steps +0\.\d\d%$"
    assert re.search(row, out, re.MULTILINE)
    assert "1F1B" not in out


def test_one_stage_does_its_micro_batches_one_after_the_other(cli: Cli, one: tuple[str, ...]) -> None:
    (only,) = bubbles_of(cli, *one, "--micro", "8", "--forward-ms", "30")["schedules"]
    assert only["step_seconds"] == pytest.approx(0.72)
    (only,) = bubbles_of(cli, *one, "--micro", "8", "--step-ms", "720")["schedules"]
    assert only["step_seconds"] == pytest.approx(0.72)
    (only,) = bubbles_of(cli, *one, "--micro", "999999999", "--step-ms", "720")["schedules"]
    assert only["step_seconds"] == pytest.approx(0.72)


def test_one_stage_for_which_no_interval_is_long_enough(cli: Cli, one: tuple[str, ...]) -> None:
    code, out, _ = cli("plan", *one, "--step-ms", "0.001", "--copy-rate", "1 kB")
    assert code == 0
    assert re.search(r" never +-$", out, re.MULTILINE)
    assert "no pipeline: no interval is long enough: a snapshot of a rank (4.00 MiB) is expected to cost" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--step-ms", "100", "--schedules", "1F1B"), "--schedules is about a pipeline, but all ranks of this layout"),
        (("--step-ms", "100", "--chunks", "2"), "--chunks is about a pipeline, but all ranks of this layout"),
        (("--copy-rate", "1 GB"), "--copy-rate is about bubbles: these need --forward-ms or --step-ms too."),
    ],
)
def test_flags_of_a_pipeline_say_that_there_is_none(
    cli: Cli, one: tuple[str, ...], flags: tuple[str, ...], said: str
) -> None:
    code, _, err = cli("plan", *one, *flags)
    assert code == 2
    assert said in err
