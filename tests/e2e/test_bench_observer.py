"""scripts/bench/observer.py --quick counts on real ranks, measures, and prints what DESIGN asks of every benchmark."""

from __future__ import annotations

import pytest

from tests.support.bench import quick


@pytest.mark.timeout(150)
def test_quick_counts_and_measures() -> None:
    said = quick("observer", timeout=140)
    by_name = {figure["name"]: figure for figure in said["figures"]}
    cost = by_name["observer_percent_of_100ms"]
    assert (cost["goal"], cost["better"], cost["unit"]) == (0.1, "lower", "%")
    assert cost["met"] is (cost["value"] + 2 * cost["se"] <= 0.1)
    # 8 micro-batches forward and back, and one reduction; a middle rank waits for each receive and for its sends.
    assert "17 x operation, 21 x wait, 21 x start" in cost["how"]
    assert cost["value"] > 0
    assert by_name["observer_cold_percent_of_100ms"]["goal"] is None
    assert any("--quick" in note for note in said["notes"])
