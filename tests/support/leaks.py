"""What a test process holds: file descriptors, threads, children, names in /dev/shm; and what a test left of them."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_KEPT_FDS = ("/dev/urandom", "/dev/random", "/dev/null", "/proc/")
"""Targets that libraries open once a process and keep."""

_KEPT_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Helpers of the standard library that live as long as the process."""


@dataclass(frozen=True)
class Holdings:
    """A moment's holdings, each as a set of texts that name the thing for people."""

    fds: frozenset[str]
    threads: frozenset[str]
    children: frozenset[str]
    names: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        """Of this process."""
        return cls(_fds(), _threads(), _children(), _names())

    def added_since(self, before: Holdings) -> list[str]:
        """One line for each thing that was not there before."""
        lines = []
        for kind, mine, theirs in (
            ("file descriptor", self.fds, before.fds),
            ("thread", self.threads, before.threads),
            ("child process", self.children, before.children),
            ("name in /dev/shm", self.names, before.names),
        ):
            lines += [f"{kind} {text}" for text in sorted(mine - theirs)]
        return lines


def leaked(before: Holdings, *, grace: float = 5.0, clock: Callable[[], float] = time.monotonic) -> list[str]:
    """What is held now and was not `before`, after waiting up to `grace` seconds for it to go."""
    added = Holdings.now().added_since(before)
    if not added:
        return []
    gc.collect()  # objects in cycles close their descriptors only now
    deadline = clock() + grace
    while (added := Holdings.now().added_since(before)) and clock() < deadline:
        time.sleep(0.02)
    return added


def _fds() -> frozenset[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that listed the directory
            continue
        if not target.startswith(_KEPT_FDS):
            found.add(f"{name} -> {target}")
    return frozenset(found)


def _threads() -> frozenset[str]:
    """Python threads, and native ones that carry a name of ours; pools of libraries (OpenMP) are left out."""
    found = {f"{thread.name!r} ({thread.native_id})" for thread in threading.enumerate()}
    known = {thread.native_id for thread in threading.enumerate()}
    for entry in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{entry}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("baft") and int(entry) not in known:
            found.add(f"{name!r} ({entry})")
    return frozenset(found)


def _children() -> frozenset[str]:
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if int(parent) == os.getpid() and not any(kept in command for kept in _KEPT_CHILDREN):
            found.add(f"{entry}: {'not waited for' if state == 'Z' else command}")
    return frozenset(found)


def _names() -> frozenset[str]:
    """Names of this run (`baftd-test-<pid>-...`) and, where this run is alone (CI), all that begin with baftd."""
    alone = bool(os.environ.get("CI"))
    mine = f"baftd-test-{os.getpid()}-"
    return frozenset(name for name in os.listdir("/dev/shm") if name.startswith("baftd" if alone else mine))
