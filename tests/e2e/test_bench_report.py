"""The arithmetic of the benchmarks: what counts as met, what an error is, who takes turns."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "_report.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_report_under_test", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("value", "se", "goal", "better", "met"),
    [
        (0.95, 0.02, 0.9, "higher", True),
        (0.95, 0.03, 0.9, "higher", False),
        (1.0, 0.0, 1.0, "higher", True),
        (0.8, 0.05, 1.0, "lower", True),
        (0.95, 0.05, 1.0, "lower", False),
        (0.5, 0.0, None, "lower", None),
    ],
)
def test_a_goal_is_met_with_twice_the_error(
    bench: ModuleType, value: float, se: float, goal: float | None, better: str, met: bool | None
) -> None:
    report = bench.Report("t")
    assert report.add("f", (value, se), unit="", goal=goal, better=better, how="x").met is met


def test_ratio_and_its_error(bench: ModuleType) -> None:
    assert bench.ratio([2.0], [1.0]) == (2.0, 0.0)
    assert bench.ratio([2.0] * 9, [4.0] * 9) == (0.5, 0.0)
    value, se = bench.ratio([1.0, 1.1, 0.9, 1.05, 0.95] * 4, [1.0] * 20)
    assert value == 1.0
    assert 0.005 < se < 0.05
    assert bench.ratio([1.0, 1.1, 0.9, 1.05, 0.95] * 4, [1.0] * 20) == (value, se), "the same data, the same error"
    with pytest.raises(ValueError, match="no pairs"):
        bench.ratio([1.0], [])


def test_noise_shows_in_the_error(bench: ModuleType) -> None:
    quiet, noisy = bench.median([10.0, 10.1, 9.9] * 5), bench.median([10.0, 15.0, 5.0] * 5)
    assert quiet[0] == noisy[0] == 10.0
    assert noisy[1] > 10 * quiet[1]


def test_contestants_take_turns(bench: ModuleType) -> None:
    order: list[str] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    series = bench.interleave({name: lambda name=name: contestant(name) for name in "abc"}, 5, warm_up=2)
    assert [len(series[name]) for name in "abc"] == [5, 5, 5]
    rounds = [order[i : i + 3] for i in range(0, 21, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "always in the same order"
    assert min(min(values) for values in series.values()) > 6, "the warm-up counts"


def test_json_and_table(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench.Report("t")
    report.add("speed", (1.0, 0.1), unit="GB/s", goal=0.5, better="higher", how="so")
    report.note("absent: nothing")
    report.print(as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["figures"][0]["met"] is True
    assert said["machine"]["cores"] >= 1
    report.print(as_json=False)
    text = capsys.readouterr().out
    assert "speed" in text
    assert "absent: nothing" in text


def test_a_wild_baseline_is_said_to_prove_nothing(bench: ModuleType) -> None:
    report = bench.Report("t")
    report.steady("calm", [1.0, 1.01, 0.99, 1.02, 1.0])
    report.steady("few", [1.0, 9.0])
    assert not report.notes
    report.steady("wild", [1.0, 2.0, 0.5, 3.0, 1.0])
    assert report.notes
    assert report.notes[0].startswith("wild is not discriminating here")
