"""Stories told to the cores, with every word of theirs. `BAFT_REWRITE=1` writes the answers anew; read the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baftd.checkpoint.facts import Ready
from baftd.checkpoint.node_slots import NodeSlots
from tests.simulation.broken import NoIncarnation
from tests.simulation.script import run_script

SCENARIOS = Path(__file__).parent / "scenarios"
NAMES = sorted(path.stem for path in SCENARIOS.glob("*.txt"))


@pytest.mark.parametrize("name", NAMES)
def test_scenario(name: str) -> None:
    path = SCENARIOS / f"{name}.txt"
    told = path.read_text()
    said = run_script(told)
    if os.environ.get("BAFT_REWRITE"):
        path.write_text(said)
    assert said == told


def test_a_former_life_of_a_node_would_commit_without_the_rule() -> None:
    told = (SCENARIOS / "node_incarnation.txt").read_text()
    assert "committed (memory)" not in told
    assert "committed (memory)" in run_script(told, NoIncarnation)


def test_what_a_plan_has_chosen_would_be_freed_without_the_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    told = (SCENARIOS / "planning.txt").read_text()
    monkeypatch.setattr(NodeSlots, "hold", lambda self: None)
    monkeypatch.setattr(NodeSlots, "release", lambda self: Ready())
    assert "n0: rank 0 slot 1 is free" not in told
    assert "n0: rank 0 slot 1 is free" in run_script(told)
