"""Priority of background threads: they yield cores and disk to training, and get both back when time runs out.

On Linux the nice value and the input/output class belong to the thread, whatever POSIX says. Nice 19 leaves a thread
some 1.5 % of a core that another one wants (weights 15 and 1024 of kernel/sched/core.c). Taking that back needs
CAP_SYS_NICE or RLIMIT_NICE; where it cannot be taken back a thread that is late would stay late, so it is lowered by 10
only (weight 110: a tenth). The idle class of input/output is honoured by schedulers that know classes (BFQ), and anyone
may leave it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

__all__ = ["Priorities", "io_class"]

LOWEST = 19
_LITTLE = 10
_IOPRIO_WHO_PROCESS = 1
_CLASS_SHIFT = 13
_CLASS_NONE, _CLASS_IDLE = 0, 3
_CALLS = {"x86_64": (251, 252), "aarch64": (30, 31)}
"""Numbers of ioprio_set and ioprio_get, which the C library does not wrap."""

_libc = ctypes.CDLL(None, use_errno=True)


class Priorities:
    """Lowers and raises the calling thread. `nice`: of lowered threads; `refused`: what this process may not do."""

    def __init__(self) -> None:
        self._base = os.getpriority(os.PRIO_PROCESS, 0)
        self._local = threading.local()
        self._lock = threading.Lock()
        self.refused: set[str] = set()
        """Of "nice", "raise" and "io"."""
        if not _can_come_back(self._base):
            self.refused.add("raise")
        self.nice = max(self._base, LOWEST if "raise" not in self.refused else min(LOWEST, self._base + _LITTLE))

    def lower(self) -> None:
        """The calling thread yields from now on."""
        self._set(lowered=True)

    def lift(self) -> None:
        """The calling thread has the daemon's own priority from now on, as far as that is allowed."""
        self._set(lowered=False)

    def _set(self, *, lowered: bool) -> None:
        if getattr(self._local, "lowered", None) is lowered:
            return
        self._local.lowered = lowered
        thread = threading.get_native_id()
        if lowered or "raise" not in self.refused:
            try:
                os.setpriority(os.PRIO_PROCESS, thread, self.nice if lowered else self._base)
            except OSError:  # in some sandboxes
                self._refuse("nice")
        calls = _CALLS.get(platform.machine())
        wanted = (_CLASS_IDLE if lowered else _CLASS_NONE) << _CLASS_SHIFT
        if calls is None or _libc.syscall(calls[0], _IOPRIO_WHO_PROCESS, thread, wanted) != 0:
            self._refuse("io")

    def _refuse(self, what: str) -> None:
        with self._lock:
            self.refused.add(what)


def io_class(thread: int = 0) -> int | None:
    """Class of input/output of a thread (0: the calling one): 0 none, 1 real-time, 2 best-effort, 3 idle. None: this
    machine does not tell."""
    calls = _CALLS.get(platform.machine())
    if calls is None:
        return None
    found = int(_libc.syscall(calls[1], _IOPRIO_WHO_PROCESS, thread or threading.get_native_id()))
    return None if found < 0 else found >> _CLASS_SHIFT


def _can_come_back(base: int) -> bool:
    """Tried in a thread of its own: whether a lowered thread may be raised again."""
    found: list[bool] = []

    def attempt() -> None:
        me = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, me, LOWEST)
            os.setpriority(os.PRIO_PROCESS, me, base)
        except OSError:
            found.append(False)
        else:
            found.append(True)

    thread = threading.Thread(target=attempt, name="baftd-priority")
    thread.start()
    thread.join()
    return found == [True]
