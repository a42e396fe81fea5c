"""scripts/bench/snapshot.py --quick runs against real processes and prints what DESIGN asks of every benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench import quick

FIGURES = {
    "copy_ratio", "digest_gbps", "held_ms_per_gb", "durable_ratio", "restore_ratio", "daemon_rss_mb",
    "daemon_idle_cpu_percent",
}  # fmt: skip


@pytest.mark.timeout(180)
def test_quick_measures_everything(tmp_path: Path) -> None:
    said = quick("snapshot", "--disk", str(tmp_path), timeout=170)
    assert said["machine"]["cores"] >= 1
    by_name = {figure["name"]: figure for figure in said["figures"]}
    assert set(by_name) >= FIGURES
    for figure in said["figures"]:
        assert set(figure) == {"name", "value", "se", "unit", "goal", "better", "met", "how"}
        assert figure["value"] >= 0
        assert figure["se"] >= 0
        assert figure["better"] in ("higher", "lower")
        assert (figure["goal"] is None) == (figure["met"] is None)
        if figure["goal"] is not None:
            low, high = figure["value"] - 2 * figure["se"], figure["value"] + 2 * figure["se"]
            assert figure["met"] == (low >= figure["goal"] if figure["better"] == "higher" else high <= figure["goal"])
    assert not list(tmp_path.iterdir()), "left on the disk"
