"""Seeds by the hundred: no invariant may break. And each rule, switched off, must be missed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.simulation.broken import BROKEN
from tests.simulation.run import simulate

SEEDS = int(os.environ.get("BAFT_SIMULATION_SEEDS", "2000"))
CHUNK = 250


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_seed_breaks_an_invariant(first: int) -> None:
    bad = [outcome for seed in range(first, first + CHUNK) if (outcome := simulate(seed)).violation]
    said = "\n".join(f"python -m tests.simulation --trace --seed {o.seed}: {o.violation}" for o in bad)
    assert not bad, said


def test_runs_are_eventful() -> None:
    """A simulation in which nothing happens proves nothing."""
    outcomes = [simulate(seed) for seed in range(100)]
    assert sum(o.commits for o in outcomes) > 800
    assert sum(o.runs for o in outcomes) > 250
    assert sum(o.rollbacks for o in outcomes) > 8
    assert sum(o.reshards for o in outcomes) > 20
    assert sum(o.changes for o in outcomes) > 100


def test_a_seed_replays_in_another_process() -> None:
    texts = []
    for salt in ("0", "1"):
        command = [sys.executable, "-m", "tests.simulation", "--seed", "7", "--trace"]
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        texts.append(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True))
    assert texts[0].stdout == texts[1].stdout
    assert len(texts[0].stdout.splitlines()) > 100


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_that_is_off_is_missed(rule: str) -> None:
    broken = BROKEN[rule]
    for seed in range(400):
        said = simulate(seed, rules=broken.rules, stress=broken.stress).violation
        if re.search(broken.says, said):
            return
    pytest.fail(f"400 seeds without the rule, and nobody said {broken.says!r}: the simulation does not test it")
