"""What tests of whole programs share: torch, imported once for all of their processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon import ROOT
from tests.support.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks the ranks of benchmarks and examples."""
    path = [ROOT / "scripts" / "bench", ROOT / "scripts" / "examples"]
    with Zygote("_overhead_rank", "pipeline_gpt", path=path) as running:
        yield running
