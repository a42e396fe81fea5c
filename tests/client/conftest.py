"""Fixtures of the sessions' tests: places on disk, a scripted daemon, a rank that has joined it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baft_client.source import OutcomeKind
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.trainer import Places, Trainer, places


@pytest.fixture
def where() -> Iterator[Places]:
    """Directories of one test."""
    with places() as found:
        yield found


@pytest.fixture
def scripted(where: Places) -> Iterator[ScriptedDaemon]:
    """A daemon there that says what the test wants. (`daemon` is a real one.)"""
    with where.daemon() as running:
        yield running


@pytest.fixture(params=["native", "python"])
def trainer(request: pytest.FixtureRequest, where: Places, scripted: ScriptedDaemon) -> Iterator[Trainer]:
    """Joined, its layout of 4 tensors of 1 MiB declared, one step behind it, with every byte of every snapshot
    compared."""
    with Trainer(where, tensors=4, size=256 << 10, engine=request.param, audit=1) as made:
        made.join()
        assert made.one_step().kind is OutcomeKind.SEALED
        yield made
