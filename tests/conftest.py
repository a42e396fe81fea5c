"""Shared fixtures: the leak gate that every test passes through, directories and real daemons."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, RunDirs
from tests.support.leaks import Holdings, leaked


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the larger matrices too (marker: full)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: part of a larger matrix; runs only with --full")
    config.addinivalue_line("markers", "leaks(reason): the test may leave things behind, for the reason given")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    kept = [item for item in items if item.get_closest_marker("full") is None]
    left_out = [item for item in items if item.get_closest_marker("full") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(autouse=True)
def leak_gate(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test ends with the descriptors, threads, children and /dev/shm names of ours that it began with."""
    before = Holdings.now()
    yield
    if request.node.get_closest_marker("leaks") is not None:
        return
    left = leaked(before)
    if left:
        pytest.fail(f"{request.node.name} left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def shm_path() -> Iterator[Path]:
    """A directory on tmpfs, removed afterwards; keep what you put there to a few MB."""
    with tempfile.TemporaryDirectory(prefix=f"baftd-test-{os.getpid()}-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def run_dirs() -> Iterator[RunDirs]:
    """Directories for a daemon and its clients, removed afterwards; a process left running in them fails the test."""
    dirs = RunDirs()
    yield dirs
    left = dirs.close()
    if left:
        pytest.fail("still running after the test:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def daemon(run_dirs: RunDirs) -> Iterator[Daemon]:
    """A running daemon with a durable tier that writes only when asked (every 1,000,000 steps)."""
    with Daemon(run_dirs, durable_dir=str(run_dirs.durable), durable_every="1000000 steps") as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of the test's daemons when it fails."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, RunDirs):
                report.sections.extend((f"log {title}", text) for title, text in value.logs())
    return report
