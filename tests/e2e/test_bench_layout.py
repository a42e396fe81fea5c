"""scripts/bench/layout.py --quick plans for thousands of ranks and prints what DESIGN asks of every benchmark."""

from __future__ import annotations

from tests.support.bench import quick


def test_quick_plans_for_thousands_of_ranks() -> None:
    said = quick("layout", timeout=100)
    by_name = {figure["name"]: figure for figure in said["figures"]}
    assert set(by_name) >= {"plan_s_1024", "plan_s_4096", "layout_mb_4096", "decode_s_4096"}
    assert (by_name["plan_s_4096"]["goal"], by_name["layout_mb_4096"]["goal"]) == (10, 8)
    assert all(figure["value"] > 0 and figure["better"] == "lower" for figure in said["figures"])
    assert any("--quick" in note for note in said["notes"])
