"""scripts/bench/layout.py --quick plans for thousands of ranks and prints what DESIGN asks of every benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_quick_plans_for_thousands_of_ranks() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bench/layout.py"), "--quick", "--json"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said) == {"bench", "machine", "figures", "notes"}
    assert said["bench"] == "layout"
    by_name = {figure["name"]: figure for figure in said["figures"]}
    assert set(by_name) >= {"plan_s_1024", "plan_s_4096", "layout_mb_4096", "decode_s_4096"}
    assert (by_name["plan_s_4096"]["goal"], by_name["layout_mb_4096"]["goal"]) == (10, 8)
    assert all(figure["value"] > 0 and figure["better"] == "lower" for figure in said["figures"])
    assert any("--quick" in note for note in said["notes"])
