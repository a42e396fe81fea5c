"""Benchmarks for tests: their quick form."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.daemon import ROOT

__all__ = ["checked", "quick"]


def quick(name: str, *more: str, timeout: float) -> dict[str, Any]:
    """What `scripts/bench/<name>.py --quick --json` prints, with what DESIGN asks of every benchmark checked."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / f"{name}.py"), "--quick", "--json", *more],
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return checked(name, done.stdout)


def checked(name: str, output: str) -> dict[str, Any]:
    """What a benchmark has printed, with what DESIGN asks of every benchmark checked."""
    said: dict[str, Any] = json.loads(output)
    assert set(said) == {"bench", "machine", "figures", "notes"}
    assert said["bench"] == name
    return said
