"""Directories for tests of the durable tier."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory on tmpfs, for slots."""
    with tempfile.TemporaryDirectory(prefix=f"baftd-test-{os.getpid()}-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory on the disk of /tmp, for checkpoints."""
    with tempfile.TemporaryDirectory(prefix="baftd-test-") as directory:
        yield Path(directory)
