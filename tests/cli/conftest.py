"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.answers import AnsweringServer
from tests.support.cli import Cli, Serve
from tests.support.daemon import RunDirs


@pytest.fixture
def cli(run_dirs: RunDirs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(run_dirs, capsys, monkeypatch)


@pytest.fixture
def serve(run_dirs: RunDirs) -> Iterator[Serve]:
    """Start a server that answers each request class with the given replies."""
    started: list[AnsweringServer] = []

    def start(answers: dict[type, Any]) -> AnsweringServer:
        lists = {kind: given if isinstance(given, list) else [given] for kind, given in answers.items()}
        server = AnsweringServer(run_dirs.socket, lists)
        started.append(server)
        return server.__enter__()

    yield start
    for server in started:
        server.stop()
