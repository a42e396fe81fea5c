"""Counters: whole numbers that only grow, each with a name and a meaning written down in one table."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from baftd.limits import LARGEST

__all__ = ["DAEMON_COUNTERS", "JOB_COUNTERS", "Counters"]

JOB_COUNTERS: Mapping[str, str] = {
    "snapshots": "steps committed at the memory tier",
    "sealed": "shards sealed by ranks of this node",
    "verified": "shards of this node whose digest was recorded",
    "skipped": "skips reported by ranks of this node",
    "torn": "snapshots dropped because the state changed under the copy",
    "dead": "steps declared dead",
    "no_slot": "boundaries for which no slot was free",
    "durable_written": "checkpoints committed at the durable tier",
    "durable_failed": "durable writes that failed",
    "durable_bytes": "bytes written to the durable tier",
    "durable_removed": "durable checkpoints removed by retention or gc",
    "quarantined": "checkpoints quarantined after a failed verification",
    "restores": "restore plans taken by resume()",
    "passed_over": "newer steps passed over by restore plans",
    "fenced": "processes of an older start that were told to write nothing any more",
    "lost_ranks": "training processes that ended without finish() or leave()",
    "timings": "steps of ranks of this node of which timings came",
    "timings_refused": "timings that could not be, answered with an error",
    "steps_refused": "begins and skips of a step far ahead of the job, answered with an error",
    "events_lost": "events of steps for which a rank had no room",
    "cadences_told_again": "times that a rank went by an outdated cadence and was told the job's once more",
    "left_out": "steps without a snapshot because the interval is longer than a step",
    "probes": "steps left without a snapshot to measure what snapshots cost",
    "intervals_lengthened": "changes of the job's interval to more steps",
    "intervals_shortened": "changes of the job's interval to fewer steps",
    "divided_anew": "divisions of replicated ranges that were replaced by a better one",
    "copy_plans": "copy plans made for ranks of this node",
    "plans_refused": "copy plans that could not be made a message of: the rank goes by the one before",
    "overruns": "windows that closed before their share was copied",
    "fence_waits": "steps of ranks whose fence waited for bytes that were not copied yet",
    "bytes_in_windows": "bytes of snapshots copied inside windows",
    "bytes_outside": "bytes of snapshots copied while no window was open",
    "late_work": "digests and durable writes that got full speed because their deadline came near",
    "bytes_at_fence": "bytes of snapshots copied at the fence",
}
"""Counters of one job on one node."""

DAEMON_COUNTERS: Mapping[str, str] = {
    "messages": "messages received",
    "bad_messages": "messages refused: not a message, another protocol version, a wrong field",
    "foreign_peers": "messages of users that may not speak to this daemon",
    "errors_answered": "requests answered with an error",
    "reconnects": "hellos that brought a token along",
    "swept_files": "files removed by the sweep at start and by gc",
    "journal_repairs": "journals and manifests with a torn or damaged tail",
    "internal_errors": "unexpected exceptions; each is in the log with its traceback",
}
"""Counters of one daemon."""

MOST = LARGEST
"""At which a counter stays: the largest number that a message takes. Some hundred GB a step come to it in a week."""


class Counters:
    """Thread-safe counters over one of the tables above; a name that is not in the table is a `KeyError`."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(table, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Add `count` (not negative) to `name`, up to `MOST`."""
        if count < 0:
            raise ValueError(f"counter {name} cannot go down by {-count}")
        with self._lock:
            self._values[name] = min(MOST, self._values[name] + count)

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def as_dict(self) -> dict[str, int]:
        """A copy of all values, in the order of the table."""
        with self._lock:
            return dict(self._values)
