"""The command line, run inside the test's process against directories of the test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from baftd.cli.main import main
from tests.support.answers import AnsweringServer
from tests.support.daemon import RunDirs

Serve = Callable[[dict[type, Any]], AnsweringServer]
"""Starts a server that answers each request class with the given reply or replies."""


class Cli:
    """The command, run in this process against directories of the test."""

    def __init__(self, dirs: RunDirs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.dirs = dirs
        self._capsys = capsys
        for name in [name for name in os.environ if name.startswith("BAFTD_")]:
            monkeypatch.delenv(name)
        for name, value in dirs.environ().items():
            if name.startswith("BAFTD_"):
                monkeypatch.setenv(name, value)
        monkeypatch.chdir(dirs.base)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def json(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit code and the document."""
        code, out, _ = self(*arguments, "--json")
        document: dict[str, Any] = json.loads(out)
        assert document["version"] == 1
        return code, document
