"""scripts/bench/overhead.py --quick runs against real processes; its rules are tried on series with a known answer."""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from baftd.pipeline.events import Event, EventKind
from tests.support.bench import checked
from tests.support.zygote import Zygote, as_subprocess

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts/bench"))

import _overhead_analysis as analysis  # noqa: E402
import _overhead_run  # noqa: E402


def series(costs: dict[str, float], after: float, *, interval: int = 1, steps: int = 4000, seed: int = 3) -> Any:
    """Two ranks' records: steps of some 100 ms that drift and scatter, with what each contestant adds, and what baftd
    adds to the step after its own. Every seventh step is disturbed by another process."""
    dice = random.Random(seed)
    ranks: list[dict[str, Any]] = [{"rank": rank, "steps": [], "operations": []} for rank in range(2)]
    before, at = "none", 0.0
    for number in range(steps):
        mode = dice.choice(sorted(costs))
        if mode == "ours" and number % interval:
            mode = "none"
        disturbed = number % 7 == 0
        seconds = (0.1 + 0.01 * number / steps) * (1 + dice.gauss(0, 0.02) + costs[mode])
        seconds += after * 0.1 * (before == "ours") + 0.05 * disturbed
        for rank in ranks:
            rank["steps"].append(
                {"number": number, "mode": mode, "begin": at, "fence": at + seconds, "end": at + seconds,
                 "cpu": seconds / 2, "busy": seconds + (0.5 * seconds if disturbed else 0.0), "boundary": number}
            )  # fmt: skip
        before, at = mode, at + seconds
    return analysis.Series.of(ranks, 10)


def test_the_overhead_of_a_known_series_is_found() -> None:
    """Drift, scatter and disturbed steps do not move it; what the daemon does in the step after is not forgotten."""
    found = series({"none": 0.0, "ours": 0.03, "copy": 0.2}, after=0.01)
    ours, copy = found.ours(1), found.peer("copy")
    assert ours is not None
    assert copy is not None
    assert abs(ours.value - 4.0) < 3 * ours.error < 1.0
    assert abs(copy.value - 20.0) < 3 * copy.error < 1.0
    assert found.dropped >= 4000 // 7 - 10


def test_an_interval_divides_the_cost_of_a_snapshot_and_of_the_step_after_it() -> None:
    found = series({"none": 0.0, "ours": 0.05}, after=0.01, interval=3).ours(3)
    assert found is not None
    assert abs(found.value - 2.0) < 3 * found.error < 1.0


def test_nothing_is_said_of_too_few_steps() -> None:
    assert series({"none": 0.0, "ours": 0.03}, after=0.0, steps=14).ours(1) is None


def test_bytes_are_inside_only_while_nothing_is_computed_before_the_fence() -> None:
    rank = {"rank": 0, "operations": [("F", 0, 0, 1.0, 2.0), ("F", 0, 1, 3.0, 4.0)],
            "steps": [{"mode": "ours", "boundary": 7, "begin": 0.0, "fence": 5.0}]}  # fmt: skip
    spans = [(0.0, 1.0, 100), (1.5, 2.5, 100), (2.0, 3.0, 100), (4.5, 6.0, 100)]
    events = [Event(EventKind.COPY_INSIDE, -1, 0, int(b * 1e9), int(e * 1e9), n) for b, e, n in spans]
    assert analysis.inside_share([rank], {(0, 7): events}, 0) == [pytest.approx(2.5 / 4)]


def test_gaps_are_compared_where_one_of_both_is_long_enough() -> None:
    assert analysis.gap_errors([[1.0, 0.0, 0.5]], [[0.8, 0.01, 0.5]], least=0.1) == [pytest.approx(25.0), 0.0]


@pytest.mark.timeout(240)
def test_quick_measures_everything(
    tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script itself runs in this process, so that its ranks can be forked: ten of them would import torch."""
    command = ["overhead.py", "--quick", "--json", "--disk", str(tmp_path), "--only", "sleep_200,gap_error_sleep"]
    monkeypatch.setattr(_overhead_run, "subprocess", as_subprocess(zygote))
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(ROOT / "scripts/bench/overhead.py"), run_name="__main__")
    said = checked("overhead", capsys.readouterr().out)
    by_name = {figure["name"]: figure for figure in said["figures"]}
    assert set(by_name) >= {"held_ms", "inside_window_percent", "gap_error_sleep_percent"}, said["notes"]
    notes = "\n".join(said["notes"])
    assert "overhead_sleep_200mb_percent: step " in notes
    assert "rung" in notes
    assert by_name["inside_window_percent"]["value"] > 50
    assert not list(tmp_path.iterdir()), "left on the disk"
