"""Directories on tmpfs: one under /dev/shm, and small file systems of their own where mounting is permitted."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def shm_directory() -> Iterator[Path]:
    """An empty directory under /dev/shm, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="baftd-test-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def small_tmpfs(where: Path, size: str, *, options: str = "") -> Iterator[Path]:
    """A tmpfs of `size` mounted at `where`; skips the test where mounting is not permitted."""
    where.mkdir(exist_ok=True)
    wanted = f"size={size}" + (f",{options}" if options else "")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", wanted, "baftd-test", str(where)], capture_output=True, text=True, timeout=30
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True, timeout=30)


def as_user(uid: int, work: str, *arguments: str) -> str:
    """Run Python source `work` as another user (root only) with `arguments` in sys.argv; its output."""
    if os.geteuid() != 0:
        pytest.skip("needs root: the test acts as other users")
    script = f"import os, sys; os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n{work}"
    # The system's Python and no paths of ours: another user may not be able to read this tree.
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-I", "-c", script, *arguments], capture_output=True, text=True, timeout=60, cwd="/"
    )
    return (done.stdout + done.stderr).strip()
