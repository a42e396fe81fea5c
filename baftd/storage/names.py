"""Names of files in a durable directory, and of those on their way there.

    <root>/<job>/EPOCH-<n>                              the fence: token of the newest epoch
    <root>/<job>/step-<k>.e<epoch>/rank-00000.safetensors, rank-00000.manifest, MANIFEST
    .tmp~<owner>~<machine>~<pid>~<start>~<n>~<name>     being written, by that process
    .trash~<n>~<pid>~<step directory>                   being deleted, by anybody

`owner` is the node's name with a short hash (two names never become one), `machine` stands for one boot and one PID
namespace: after a reboot, or in another container, the same PID means another process.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from baftd.checkpoint.identity import CheckpointId, parse_step_directory, step_directory

__all__ = [
    "CHECKPOINT_MANIFEST",
    "Writer",
    "checkpoint_of",
    "fence_epoch",
    "fence_name",
    "is_temporary",
    "is_trash",
    "process_start",
    "rank_of_manifest",
    "shard_manifest_name",
    "shard_name",
    "trash_target",
]

CHECKPOINT_MANIFEST = "MANIFEST"

_numbers = itertools.count(1)  # one sequence for the whole process: no two writers in it share a temporary name

_FENCE = re.compile(r"EPOCH-([1-9][0-9]{0,15})")
_SHARD_MANIFEST = re.compile(r"rank-([0-9]{5,7})\.manifest")
_TEMPORARY = re.compile(r"\.tmp~([A-Za-z0-9._-]+)~([0-9a-f]{8})~([0-9]+)~([0-9]+)~([0-9]+)~(.+)")
_TRASH = re.compile(r"\.trash~[0-9]+~[0-9]+~(.+)")


def shard_name(rank: int) -> str:
    """File of a rank's shard."""
    return f"rank-{rank:05d}.safetensors"


def shard_manifest_name(rank: int) -> str:
    """File that says what is in the shard."""
    return f"rank-{rank:05d}.manifest"


def rank_of_manifest(name: str) -> int | None:
    """The rank whose manifest has this name; None for any other file."""
    match = _SHARD_MANIFEST.fullmatch(name)
    return int(match[1]) if match and shard_manifest_name(int(match[1])) == name else None


def fence_name(epoch: int) -> str:
    """File that fences epochs older than `epoch`."""
    return f"EPOCH-{epoch}"


def fence_epoch(name: str) -> int | None:
    """The epoch of a fence file; None for any other file."""
    match = _FENCE.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_of(name: str) -> CheckpointId | None:
    """The checkpoint that a directory stands for; None for any other name, such as one with padded numbers."""
    found = parse_step_directory(name)
    return found if found is not None and found.epoch >= 1 and step_directory(found) == name else None


def is_temporary(name: str) -> bool:
    """A file that has not got its name yet."""
    return name.startswith(".tmp~")


def is_trash(name: str) -> bool:
    """A directory that is being deleted."""
    return name.startswith(".trash~")


def trash_target(name: str) -> str:
    """What a trash directory was called."""
    match = _TRASH.fullmatch(name)
    return match[1] if match else name


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none of that PID."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


@functools.lru_cache(maxsize=1)
def _this_process(pid: int) -> tuple[int, int]:
    return pid, process_start(pid) or 0


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return xxhash.xxh32_hexdigest(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode())


@dataclass(frozen=True)
class Writer:
    """The process that writes: makes names for its temporary files and knows those of others.

    `alive` says whether a process (pid, start) still runs on this machine. `process`: instead of this one.
    """

    owner: str
    machine: str
    alive: Callable[[int, int], bool]
    process: tuple[int, int] | None = None

    @classmethod
    def of_node(cls, node: str, alive: Callable[[int, int], bool] | None = None) -> Writer:
        """This process, on the node called `node`."""
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", node)[:48] or "node"
        owner = f"{readable}-{xxhash.xxh32_hexdigest(node.encode())}"
        return cls(owner, _machine(), alive or _runs)

    def temporary(self, final: str) -> str:
        """A name that nobody else uses, for a file to be called `final`."""
        pid, start = self.process or _this_process(os.getpid())
        return f".tmp~{self.owner}~{self.machine}~{pid}~{start}~{next(_numbers)}~{final}"

    def trash(self, directory: str) -> str:
        """A name for a directory to be deleted."""
        return f".trash~{next(_numbers)}~{os.getpid()}~{directory}"

    def is_live(self, name: str) -> bool:
        """A temporary name whose writer may still be at work: of this node and running, or of another node."""
        match = _TEMPORARY.fullmatch(name)
        if match is None:
            return False
        owner, machine, pid, start = match[1], match[2], int(match[3]), int(match[4])
        if owner != self.owner:
            return True  # nobody here can know
        return machine == self.machine and self.alive(pid, start)

    def is_ours(self, name: str) -> bool:
        """A temporary name made on this node, by this process or an earlier one."""
        match = _TEMPORARY.fullmatch(name)
        return match is not None and match[1] == self.owner


def _runs(pid: int, start: int) -> bool:
    return process_start(pid) == start
