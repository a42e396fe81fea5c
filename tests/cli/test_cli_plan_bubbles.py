"""`baftd plan`, the bubbles: numbers that can be worked out by hand, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from baftd.cli import plan_bubbles
from baftd.pipeline.schedules import NAMES
from tests.support.cli import Cli
from tests.support.daemon import ROOT

MIB = 1 << 20
FOUR_STAGES = {
    "world": 4,
    "order": ["pp"],
    "axes": {"pp": 4},
    "tensors": [{"name": "w.{i}", "each": {"i": 4}, "along": {"i": "pp"}, "shape": [1 << 20], "dtype": "F32"}],
}
"""4 MiB on each of four stages."""


@pytest.fixture(autouse=True)
def no_interval_is_set(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAFTD_INTERVAL")


@pytest.fixture
def given(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "four.json"
    path.write_text(json.dumps(FOUR_STAGES))
    return ("plan", "--layout", str(path), "--redundancy", "replicas")


def _bubbles(cli: Cli, *given: str) -> dict[str, Any]:
    code, found = cli.json(*given)
    assert code == 0, found
    bubbles: dict[str, Any] = found["bubbles"]
    return bubbles


def test_schedules_side_by_side(cli: Cli, given: tuple[str, ...]) -> None:
    """p = 4, m = 8, F 30 ms, B 60 ms: bubbles of 3 * 90 ms, half of it interleaved, 3 * 30 ms without W in the way."""
    found = _bubbles(cli, *given, "--micro", "8", "--forward-ms", "30", "--copy-rate", "1 GB")
    assert (found["micro"], found["copy_rate"], found["spend"]) == (8, 10**9, 0.4)
    assert found["overhead_budget"] == 0.01
    names = [(one["name"], one["chunks"]) for one in found["schedules"]]
    assert names == [("1F1B", 1), ("interleaved", 2), ("ZB-H1", 1)]
    for one, idle in zip(found["schedules"], (0.27, 0.135, 0.09), strict=True):
        assert one["step_seconds"] == pytest.approx(0.72 + idle)
        assert one["bubble_share"] == pytest.approx(idle / (0.72 + idle))
        assert [stage["stages"] for stage in one["stages"]] == [[0], [1], [2], [3]]
        for stage in one["stages"]:
            assert stage["bubble_seconds"] == pytest.approx(idle)
            assert sum(stage["kinds"].values()) == pytest.approx(idle)
            assert stage["bytes"] == 4 * MIB
            assert 0.98 * idle * 0.4e9 <= stage["fits"] <= idle * 0.4e9
    first = found["schedules"][0]["stages"]
    assert first[0]["kinds"] == pytest.approx({"steady": 0.18, "cooldown": 0.09})
    assert first[3]["kinds"] == pytest.approx({"fill": 0.09, "collective": 0.18})


def test_what_fits_is_copied_in_windows_at_every_step(cli: Cli, given: tuple[str, ...]) -> None:
    found = _bubbles(cli, *given, "--micro", "8", "--forward-ms", "30")
    assert found["copy_rate"] == 4_000_000_000
    assert not found["copy_rate_given"]
    for one in found["schedules"]:
        assert (one["rung"], one["interval"]) == ("windows", 1)
        assert 0 <= one["overhead"] < 0.01


def test_what_does_not_fit_takes_other_rungs_within_the_budget(cli: Cli, given: tuple[str, ...]) -> None:
    """4 MiB at 10 MB/s take 0.42 s; bubbles hold 1.0 MB of them at most."""
    slow = (*given, "--micro", "8", "--forward-ms", "30", "--copy-rate", "10 MB")
    found = _bubbles(cli, *slow)
    intervals = []
    for one in found["schedules"]:
        assert one["rung"] != "windows"
        assert one["overhead"] <= 0.01
        intervals.append(one["interval"])
        costs = [stage["cost_seconds"] for stage in one["stages"]]
        assert one["overhead"] == pytest.approx(max(costs) / (one["interval"] * one["step_seconds"]))
    assert intervals[0] > 1
    assert intervals == sorted(intervals), "less bubble, longer interval"
    generous = _bubbles(cli, *slow, "--overhead-budget", "20 %")
    assert generous["overhead_budget"] == 0.2
    assert [one["interval"] for one in generous["schedules"]] == [1, 1, 1]


def test_the_step_gives_the_times(cli: Cli, given: tuple[str, ...]) -> None:
    """A step of 990 ms under 1F1B is F 30 ms, B 60 ms."""
    found = _bubbles(cli, *given, "--micro", "8", "--step-ms", "990")
    assert found["forward_seconds"] == pytest.approx([0.03] * 4)
    assert found["backward_seconds"] == pytest.approx([0.06] * 4)
    assert found["schedules"][0]["step_seconds"] == pytest.approx(0.99)


def test_uneven_ranks(cli: Cli, given: tuple[str, ...]) -> None:
    times = ("--forward-ms", "10,30x2,10", "--backward-ms", "20")
    found = _bubbles(cli, *given, "--micro", "4", *times, "--schedules", "Schedule1F1B")
    assert found["forward_seconds"] == [0.01, 0.03, 0.03, 0.01]
    (one,) = found["schedules"]
    idle = [stage["bubble_seconds"] for stage in one["stages"]]
    assert idle[0] == pytest.approx(idle[1] + 4 * 0.02)
    assert idle[0] == pytest.approx(one["step_seconds"] - 4 * 0.03)


def test_torch_class_names_and_zero_bubble_without_a_barrier(cli: Cli, given: tuple[str, ...]) -> None:
    names = "ScheduleZBVZeroBubble,ScheduleDualPipeV,ScheduleLoopedBFS,ZB-H2,Chimera"
    found = _bubbles(cli, *given, "--micro", "8", "--forward-ms", "20", "--backward-ms", "40", "--schedules", names)
    idle = {one["name"]: one["stages"][0]["bubble_seconds"] for one in found["schedules"]}
    assert idle["ZB-H2"] == pytest.approx(0)
    assert idle["ScheduleZBVZeroBubble"] == pytest.approx(3 * 0.01)
    assert idle["ScheduleLoopedBFS"] == pytest.approx(3 * 0.03)
    assert {one["name"]: one["chunks"] for one in found["schedules"]} == {
        "ScheduleZBVZeroBubble": 2, "ScheduleDualPipeV": 2, "ScheduleLoopedBFS": 2, "ZB-H2": 1, "Chimera": 2,
    }  # fmt: skip


def test_a_default_schedule_that_cannot_be_says_why(cli: Cli, given: tuple[str, ...]) -> None:
    few = (*given, "--micro", "9", "--forward-ms", "30")
    found = _bubbles(cli, *few)
    problems = [one.get("problem", "") for one in found["schedules"]]
    assert problems[0] == problems[2] == ""
    assert "divides into 2 rounds" in problems[1]
    code, out, _ = cli(*few)
    assert code == 0
    assert re.search(r"^interleaved, 2 stages a rank .*divides into 2 rounds", out, re.MULTILINE)


def test_a_named_schedule_that_cannot_be_says_why_beside_those_that_can(cli: Cli, given: tuple[str, ...]) -> None:
    few = (*given, "--micro", "9", "--forward-ms", "30")
    code, out, err = cli(*few, "--schedules", "interleaved,1F1B")
    assert (code, err) == (0, "")
    assert re.search(r"^interleaved, 2 stages a rank +- .*divides into 2 rounds", out, re.MULTILINE)
    assert re.search(r"^1F1B +1\.080 s ", out, re.MULTILINE)
    found = _bubbles(cli, *few, "--schedules", "interleaved,1F1B")
    assert ["problem" in one for one in found["schedules"]] == [True, False]
    code, out, err = cli(*few, "--schedules", "interleaved", "ScheduleInterleaved1F1B")
    assert (code, out) == (2, "")
    assert "divides into 2 rounds" in err
    code, _, err = cli(*few, "--schedules", "1F1B,interleavd")
    assert code == 2, "a name that is not known is a slip of the pen, and no schedule that cannot be"
    assert "schedule 'interleavd' is not known" in err


def test_a_schedule_that_is_too_large_to_simulate_says_so_beside_others(
    cli: Cli, given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_bubbles, "_MOST_OPERATIONS", 100)
    found = _bubbles(cli, *given, "--micro", "8", "--forward-ms", "1", "--schedules", "1F1B,interleaved")
    assert "problem" not in found["schedules"][0]
    assert "4 ranks with 8 micro-batches and 2 stages are more" in found["schedules"][1]["problem"]


@pytest.mark.parametrize("names", [("1F1B GPipe ZB-H1",), ("1F1B", "GPipe", "ZB-H1"), (" 1F1B, GPipe,,ZB-H1 1F1B",)])
def test_schedules_are_named_with_commas_or_spaces_and_told_once(
    cli: Cli, given: tuple[str, ...], names: tuple[str, ...]
) -> None:
    found = _bubbles(cli, *given, "--micro", "8", "--forward-ms", "30", "--schedules", *names)
    assert [one["name"] for one in found["schedules"]] == ["1F1B", "GPipe", "ZB-H1"]


def test_the_names_that_the_readme_lists_can_be_pasted(cli: Cli, given: tuple[str, ...]) -> None:
    listed = re.search(r"`--schedules` takes other names[^`]*`([^`]+)`", (ROOT / "README.md").read_text())
    assert listed is not None
    found = _bubbles(cli, *given, "--micro", "8", "--forward-ms", "30", "--schedules", *listed[1].split())
    assert [one["name"] for one in found["schedules"]] == list(NAMES) == listed[1].split()


@pytest.mark.parametrize("chunks", ["1", "3"])
def test_no_known_name_is_taken_for_an_unknown_one(cli: Cli, given: tuple[str, ...], chunks: str) -> None:
    """Most are impossible with these numbers; 1F1B is not."""
    _, _, err = cli(*given, "--micro", "8", "--forward-ms", "30", "--schedules", "x")
    known = re.findall(r"[\w-]+", err.split("Known are ")[1])
    assert set(NAMES) < set(known)
    few = (*given, "--micro", "3", "--forward-ms", "30", "--chunks", chunks, "--schedules")
    code, _, err = cli(*few, *known)
    assert (code, err) == (0, "")


def test_no_interval_is_long_enough(cli: Cli, given: tuple[str, ...]) -> None:
    slow = (*given, "--micro", "1", "--forward-ms", "0.001", "--copy-rate", "1 kB", "--chunks", "1")
    code, out, _ = cli(*slow)
    assert code == 0
    assert re.search(r"^1F1B .* - +never +-", out, re.MULTILINE)
    assert "every 1048576 steps" not in out
    said = r"^1F1B: no interval is long enough: a snapshot of stage \d \(4\.00 MiB\) is expected to cost \d"
    assert re.search(said, out, re.MULTILINE)
    assert "even once in 1,048,576 steps" in out
    assert "(budget 1.00%)" in out
    assert "bubbles: 1 micro-batch, " in out
    assert "interleaved, 1 stage a rank" in out
    for one in _bubbles(cli, *slow)["schedules"]:
        assert (one["interval"], one["within_budget"]) == (1 << 20, False)
        assert one["overhead"] > 0.01
    fine = _bubbles(cli, *given, "--micro", "8", "--forward-ms", "30", "--copy-rate", "10 MB")
    assert [one["within_budget"] for one in fine["schedules"]] == [True] * 3


def test_the_table(cli: Cli, given: tuple[str, ...]) -> None:
    code, out, err = cli(*given, "--micro", "8", "--forward-ms", "30", "--copy-rate", "1 GB")
    assert (code, err) == (0, "")
    assert "a rank must copy up to 4.00 MiB a step (rank 0); what bubbles hold of that is said below\n" in out
    assert "bubbles: 8 micro-batches, forward 30.0 ms, backward 60.0 ms a rank; copying 1 GB/s in 40% of each\n" in out
    assert re.search(r"^1F1B +990\.0 ms +270\.0 ms +27\.3% +windows +every step +\d\.\d\d%$", out, re.MULTILINE)
    assert re.search(r"^ZB-H1 +810\.0 ms +90\.0 ms +11\.1% +windows +every step", out, re.MULTILINE)
    assert re.search(r"^0 to 3 +4\.00 MiB +270\.0 ms +103 MiB +windows +135\.0 ms +51\.\d MiB", out, re.MULTILINE)
    _, out, _ = cli(*given, "--micro", "8", "--forward-ms", "10,30,30,10", "--backward-ms", "20", "--schedules", "1F1B")
    assert re.search(r"^0 +4\.00 MiB .*\n1 to 2 +4\.00 MiB .*\n3 +4\.00 MiB", out, re.MULTILINE)
    _, out, _ = cli(*given, "--micro", "8", "--forward-ms", "30")
    assert "copying 4 GB/s (supposed: --copy-rate)" in out


def test_without_its_flags_nothing_is_said_of_bubbles(cli: Cli, given: tuple[str, ...]) -> None:
    _, found = cli.json(*given)
    assert "bubbles" not in found


def test_a_model_by_numbers(cli: Cli) -> None:
    """Stages of a rank as --vpp says."""
    cut = ("--preset", "gpt-175b", "--tp", "8", "--pp", "16", "--vpp", "6", "--dp", "1")
    found = _bubbles(cli, "plan", *cut, "--micro", "32", "--forward-ms", "30", "--schedules", "interleaved")
    (one,) = found["schedules"]
    assert one["chunks"] == 6
    assert len(one["stages"]) == 16
    assert one["stages"][0]["bubble_seconds"] == pytest.approx(15 * 0.09 / 6)
    assert one["slowest"] in [stage["stages"] for stage in one["stages"]]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--micro", "8"), "--micro is about bubbles: these need --forward-ms or --step-ms too."),
        (("--forward-ms", "3"), "--forward-ms is about bubbles: these need --micro too."),
        (("--copy-rate", "1 GB"), "--copy-rate is about bubbles: these need --micro, and --forward-ms or"),
        (("--micro", "0"), "--micro is 0: it must be more than 0."),
        (("--micro", "0", "--forward-ms", "3"), "--micro is 0: it must be more than 0."),
        (("--micro", "1000000000"), "'1000000000' is more than 999,999,999, the most that is taken"),
        (("--micro", "8", "--forward-ms", "3", "--step-ms", "90"), "so do --forward-ms"),
        (("--micro", "8", "--forward-ms", "3,4"), "--forward-ms names 2 times, but the pipeline has 4 ranks"),
        (("--micro", "8", "--forward-ms", "3", "--backward-ms", "1x3"), "--backward-ms names 3 times"),
        (("--micro", "8", "--step-ms", "3,4"), "--step-ms is one number"),
        (("--micro", "8", "--forward-ms", "0"), "'0' is not from 0.000001 to 1,000,000,000 milliseconds"),
        (("--micro", "8", "--forward-ms", "1e300"), "'1e300' is not from 0.000001 to 1,000,000,000 milliseconds"),
        (("--micro", "8", "--forward-ms=-3"), "'-3' is not from 0.000001"),
        (("--micro", "8", "--forward-ms", "3x0"), "'3x0': a number stands for 1 to 9999 ranks"),
        (("--micro", "8", "--forward-ms", "3", "--schedules", ", "), "--schedules names none"),
        (("--micro", "8", "--forward-ms", "x"), "'x' is not a number of milliseconds"),
        (("--micro", "8", "--forward-ms", "3", "--schedules", "2F2B"), "schedule '2F2B' is not known"),
        (("--micro", "999999", "--forward-ms", "3"), "more operations than are simulated"),
        (("--micro", "8", "--forward-ms", "3", "--copy-rate", "4"), "'4' has no unit"),
    ],
)
def test_flags_that_miss_or_contradict(cli: Cli, given: tuple[str, ...], flags: tuple[str, ...], said: str) -> None:
    code, _, err = cli(*given, *flags)
    assert code == 2
    assert said in err
