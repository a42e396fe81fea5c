"""Does what is asked for fit, before anything is reserved?

Each limit ends a run in its own way: a full tmpfs is ENOSPC, past the cgroup's limit `fallocate` succeeds and the
daemon is killed while it touches the pages, too little memory makes the machine swap or the OOM killer choose. So all
of them are read first, and the refusal says the sum and what to change. All sizes are bytes.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from baftd.errors import NoRoom

__all__ = ["CgroupLimit", "Headroom", "Readings", "Sum", "check", "read"]

DOCKER_SHM = 64 << 20
"""Size of /dev/shm that Docker and Kubernetes give a container that does not ask for more."""
_NO_LIMIT_V1 = 1 << 60
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/davinci_manager")
_TMPFS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


@dataclass(frozen=True)
class CgroupLimit:
    """One level of the memory cgroup the daemon runs in. `reclaimable`: file pages that the kernel would give up."""

    path: str
    limit: int
    used: int
    reclaimable: int = 0

    @property
    def available(self) -> int:
        """What may still be used."""
        return max(0, self.limit - self.used + self.reclaimable)


@dataclass(frozen=True)
class Readings:
    """What the machine says of itself. `fs_type` is "" where it is not known; `memlock` is -1 for unlimited.
    `accelerator`: a GPU or NPU is there, whose driver pins the slots it copies into."""

    shm_dir: str
    fs_total: int
    fs_free: int
    fs_type: str
    memory_total: int
    memory_available: int
    swap_total: int = 0
    swap_free: int = 0
    memlock: int = -1
    accelerator: bool = False
    cgroups: tuple[CgroupLimit, ...] = ()


@dataclass(frozen=True)
class Sum:
    """What is asked for: `own` slots, `others`: places for shards of other nodes, `reserve`: what must stay free.
    `held` and `fetched`: slots that are there already, and slots yet to be made, for the checkpoint that a start begins
    from. They are needed until it commits a step of its own."""

    own: int
    others: int = 0
    reserve: int = 0
    held: int = 0
    fetched: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.own + self.others + self.reserve + self.held + self.fetched

    def __str__(self) -> str:
        old = f"slots of the restored step, until the first commit, {_size(self.held + self.fetched)}"
        parts = f"own slots {_size(self.own)}" if self.own or not self.held + self.fetched else old
        if self.own and self.held + self.fetched:
            parts += f" + {old}"
        if self.others:
            parts += f" + places for other nodes {_size(self.others)}"
        if self.reserve:
            parts += f" + reserve {_size(self.reserve)}"
        return parts if parts.count("+") == 0 else f"{parts} = {_size(self.total)}"


@dataclass(frozen=True)
class Headroom:
    """The answer when it fits. `available` is the tightest limit, named by `limit`."""

    available: int
    limit: str
    warnings: tuple[str, ...] = field(default=())


def check(
    shm_dir: str | os.PathLike[str],
    *,
    own: int,
    others: int = 0,
    reserve: int = 0,
    held: int = 0,
    fetched: int = 0,
    readings: Readings | None = None,
) -> Headroom:
    """Check that new slots of `own` bytes, `others`, `fetched` and `reserve` fit beside what is used already.

    `held` bytes of what is used already are slots of the restored checkpoint: they count as needed and as available,
    so that the sum shows both generations. See `Sum`.

    Raises NoRoom naming every limit that is too small, the sum and what to change.
    """
    found = readings if readings is not None else read(shm_dir)
    need = Sum(own, others, reserve, held, fetched)
    limits = [(name, available + held, advice) for name, available, advice in _limits(found, need)]
    short = [(name, available, advice) for name, available, advice in limits if available < need.total]
    if short:
        what = "; ".join(f"{name}: {_size(available)} available" for name, available, _ in short)
        advice = " ".join(dict.fromkeys(advice for _, _, advice in short))
        raise NoRoom(
            f"not enough shared memory: {need}, but {what}.",
            hint=f"{advice} Or: fewer slots, a smaller memory_reserve, or old slots removed (baftd gc --dry-run).",
            missing=need.total - min(available for _, available, _ in short),
        )
    name, available, _ = min(limits, key=lambda limit: limit[1])
    return Headroom(available - held, name, tuple(_warnings(found, need)))


def _limits(found: Readings, need: Sum) -> list[tuple[str, int, str]]:
    """(name, available bytes, what to change) of every limit."""
    want = _size(found.fs_total - found.fs_free - need.held + need.total, up=True)
    if found.fs_total <= DOCKER_SHM:
        enlarge = (
            f"{found.shm_dir} has the {_size(found.fs_total)} that containers get by default: start the container with "
            f"--shm-size={_flag(want)} (Docker), or mount an emptyDir with medium: Memory there "
            "(Kubernetes)."
        )
    else:
        enlarge = f"Enlarge it: mount -o remount,size={_flag(want)} {found.shm_dir}."
    limits = [
        (f"file system {found.shm_dir}, {_size(found.fs_total)} in all", found.fs_free, enlarge),
        (
            f"memory of the machine, {_size(found.memory_total)} in all (MemAvailable)",
            found.memory_available,
            "Take a machine with more memory, or end what uses it.",
        ),
    ]
    for group in found.cgroups:
        wanted = _size(group.used - group.reclaimable - need.held + need.total, up=True)
        limits.append(
            (
                f"memory limit of the daemon's cgroup {group.path}, {_size(group.limit)} in all",
                group.available,
                f"Raise the limit of {group.path} to {wanted} or more (Docker: --memory; Kubernetes: "
                "resources.limits.memory; systemd: MemoryMax); past it the daemon would be killed.",
            )
        )
    return limits


def _warnings(found: Readings, need: Sum) -> list[str]:
    warnings = []
    if found.fs_type and found.fs_type not in _TMPFS:
        warnings.append(
            f"{found.shm_dir} is on {found.fs_type}, not on tmpfs: slots will be written to a device. "
            "Set shm_dir to a tmpfs."
        )
    if found.swap_total:
        warnings.append(
            f"swap of {_size(found.swap_total)} is on: the kernel may swap slots out, and copies then wait for a disk."
        )
    if found.accelerator and 0 <= found.memlock < need.own:
        warnings.append(
            f"memlock is {_size(found.memlock)}: slots of {_size(need.own)} cannot be pinned for the accelerator. "
            "Raise it (ulimit -l unlimited, LimitMEMLOCK=infinity), for the training processes too."
        )
    return warnings


# ---------------------------------------------------------------------------------------------- reading


def read(shm_dir: str | os.PathLike[str], *, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> Readings:
    """Read the limits of this machine. What cannot be read sets no limit. Raises OSError if `shm_dir` is not there."""
    path = os.fspath(shm_dir)
    space = os.statvfs(path)
    memory = _meminfo(f"{proc}/meminfo")
    total = memory.get("MemTotal", 1 << 62)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Readings(
        shm_dir=path,
        fs_total=space.f_blocks * space.f_frsize,
        fs_free=space.f_bavail * space.f_frsize,
        fs_type=_file_system(path, f"{proc}/self/mounts"),
        memory_total=total,
        memory_available=memory.get("MemAvailable", total),
        swap_total=memory.get("SwapTotal", 0),
        swap_free=memory.get("SwapFree", 0),
        memlock=-1 if soft == resource.RLIM_INFINITY else soft,
        accelerator=any(map(os.path.exists, _ACCELERATORS)),
        cgroups=tuple(_cgroups(f"{proc}/self/cgroup", cgroup)),
    )


def _meminfo(path: str) -> dict[str, int]:
    values = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            values[name] = int(fields[0]) * 1024
    return values


def _file_system(path: str, mounts: str) -> str:
    """Type of the file system that `path` lies on: the longest mount point above it, the last one of equals."""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in _text(mounts).splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def _cgroups(membership: str, mount: str) -> list[CgroupLimit]:
    """Every level of the daemon's memory cgroup that has a limit, innermost first."""
    found = []
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            found += _levels(mount, path, _limit_v2)
        elif "memory" in controllers.split(","):
            found += _levels(f"{mount}/memory", path, _limit_v1)
    return found


_LimitReader: TypeAlias = "Callable[[str, str], CgroupLimit | None]"


def _levels(mount: str, path: str, limit_of: _LimitReader) -> list[CgroupLimit]:
    # In a container the path may be one of the host, of which nothing is mounted: then only the root is there.
    parts = [part for part in path.split("/") if part and part != ".."]
    found = []
    for depth in range(len(parts), -1, -1):
        directory = "/".join([mount, *parts[:depth]])
        limit = limit_of(directory, "/" + "/".join(parts[:depth]))
        if limit is not None:
            found.append(limit)
    return found


def _limit_v2(directory: str, name: str) -> CgroupLimit | None:
    limits = [_number(f"{directory}/{file}") for file in ("memory.max", "memory.high")]
    given = [limit for limit in limits if limit is not None]
    used = _number(f"{directory}/memory.current")
    if not given or used is None:
        return None
    return CgroupLimit(name, min(given), used, _stat(f"{directory}/memory.stat", "inactive_file"))


def _limit_v1(directory: str, name: str) -> CgroupLimit | None:
    limit = _number(f"{directory}/memory.limit_in_bytes")
    used = _number(f"{directory}/memory.usage_in_bytes")
    if limit is None or used is None or limit >= _NO_LIMIT_V1:
        return None
    return CgroupLimit(name, limit, used, _stat(f"{directory}/memory.stat", "total_inactive_file"))


def _stat(path: str, key: str) -> int:
    for line in _text(path).splitlines():
        fields = line.split()
        if len(fields) == 2 and fields[0] == key and fields[1].isdigit():
            return int(fields[1])
    return 0


def _number(path: str) -> int | None:
    """A number in a file; None for "max", for another text, and for a file that is not there."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # not mounted, not readable, other version: sets no limit


def _flag(size: str) -> str:
    """A size such as 3 GiB as Docker and mount take it: 3g."""
    number, unit = size.split()
    return number + unit[0].lower().replace("b", "")


def _size(count: int, *, up: bool = False) -> str:
    """Bytes for people: "1.5 GiB", or with `up` whole units that hold at least as much."""
    value = float(max(count, 0))
    for unit in ("B", "KiB", "MiB"):
        if value < 1024 or (up and value < 10 * 1024):
            return f"{-int(-value // 1)} {unit}" if up or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{-int(-value // 1)} GiB" if up else f"{value:.1f} GiB"
