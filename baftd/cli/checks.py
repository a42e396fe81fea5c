"""What `baftd doctor` looks at on this machine. Every check is a function from readings to findings; none changes
anything but for one small file that is written to and removed from the durable directory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import resource
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from baftd.cli.render import size
from baftd.settings import Settings

__all__ = ["Finding", "check_machine", "check_settings"]

_TMPFS = 0x01021994
_NETWORK = {0x6969: "nfs", 0xFF534D42: "cifs", 0xFE534D42: "smb2", 0x65735546: "fuse"}

_DOCKER = 64 << 20
"""What Docker gives to /dev/shm unless told otherwise."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    name: str
    state: Literal["ok", "warn", "fail"]
    text: str
    advice: str = ""


class _StatFs(ctypes.Structure):
    _fields_ = [("f_type", ctypes.c_long), ("rest", ctypes.c_byte * 248)]


def filesystem_type(path: Path) -> int:
    """The magic number of the file system that holds `path`; 0 when it cannot be asked."""
    buffer = _StatFs()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
        return 0
    return int(buffer.f_type) & 0xFFFFFFFF


def check_machine(settings: Settings) -> list[Finding]:
    """Everything that does not need a daemon."""
    found = [
        check_versions(),
        check_kernel(),
        check_ticks(),
        check_shm(settings.shm_dir),
        check_memory(_text("/proc/meminfo"), cgroup_limits()),
        check_swap(_text("/proc/meminfo")),
        check_limits(),
        check_run_dir(settings.run_dir),
        check_login(settings.run_dir),
        check_state_dir(settings.state_dir),
        check_durable(settings.durable_dir),
        check_engine(),
    ]
    return [finding for finding in found if finding is not None]


def check_settings(settings: Settings) -> Finding:
    """Which settings are not defaults."""
    changed = [f"{name}={settings.shown(name)} ({origin})" for name, origin in settings.origins.items()]
    return Finding("settings", "ok", ", ".join(changed) if changed else "all defaults")


def _text(path: str | Path) -> str:
    """A file of the kernel's; empty where there is none."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


# ---------------------------------------------------------------- software


def check_versions() -> Finding:
    """Python and the libraries baftd stands on."""
    import zmq

    parts = [f"Python {platform.python_version()}", f"libzmq {zmq.zmq_version()}"]
    for name in ("pyzmq", "msgspec", "msgpack", "numpy", "xxhash"):
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            return Finding("versions", "fail", f"{name} is not installed", "Install baftd again: `pip install baftd`.")
    return Finding("versions", "ok", ", ".join(parts))


def check_kernel() -> Finding:
    """How the death of a process is seen."""
    release = platform.release()
    if sys.platform != "linux":
        return Finding("kernel", "fail", f"{sys.platform} is not Linux", "baftd runs on Linux only.")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "kernel",
            "warn",
            f"Linux {release}, pidfd_open: {error.strerror}; a dead trainer is known by its record lock instead",
            "Linux 5.3 or newer has it; a container's seccomp profile may forbid it.",
        )
    return Finding("kernel", "ok", f"Linux {release}, pidfd works")


def check_ticks() -> Finding:
    """Start times of processes, by which a reused PID is told."""
    ticks = os.sysconf("SC_CLK_TCK")
    if ticks <= 0 or not _text("/proc/self/stat"):
        return Finding(
            "process times", "fail", "/proc/self/stat cannot be read", "Mount /proc in this container."
        )
    return Finding("process times", "ok", f"{ticks} clock ticks a second")


def check_engine() -> Finding:
    """Whether the copy engine was built, and with the digest inside."""
    advice = "Install gcc, python3-dev and libxxhash-dev, then `pip install --force-reinstall --no-deps baftd`."
    try:
        from baft_client.engine import load_engine
        from baftd.errors import UsageError
    except ImportError as error:
        return Finding("copy engine", "fail", f"baft_client cannot be imported: {error}", "Install baftd again.")
    try:
        engine = load_engine(None, prefer="native")
    except UsageError as error:
        return Finding("copy engine", "warn", f"{error.message} The Python engine is used: slower", advice)
    try:
        if not engine.digests:
            return Finding("copy engine", "warn", "native, built without xxhash: the daemon digests", advice)
        return Finding("copy engine", "ok", "native, digests while it copies")
    finally:
        engine.stop()


# ---------------------------------------------------------------- memory


def check_shm(directory: Path) -> Finding:
    """The tmpfs of the slots."""
    name = f"slots ({directory})"
    try:
        space = os.statvfs(directory)
    except OSError as error:
        return Finding(name, "fail", f"{error.strerror}", "Mount a tmpfs there or set shm_dir.")
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    text = f"{size(free)} free of {size(total)}"
    more = "Docker: --shm-size=16g; Kubernetes: an emptyDir with medium Memory; else `mount -o remount,size=...`."
    if filesystem_type(directory) != _TMPFS:
        return Finding(name, "warn", f"{text}, but it is no tmpfs: slots would go to a disk", "Set shm_dir to a tmpfs.")
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding(name, "fail", f"{text}, but this user may not write there", f"`chmod 1777 {directory}`.")
    if total <= _DOCKER:
        return Finding(name, "warn", f"{text}: no more than a container's default", more)
    if free < total // 10:
        return Finding(name, "warn", f"{text}: nearly full", "`baftd gc --dry-run` shows what could go.")
    return Finding(name, "ok", text)


def cgroup_limits() -> dict[str, tuple[int, int]]:
    """File -> (limit, used) in bytes of each memory cgroup above this process that has a limit (v2 and v1)."""
    found: dict[str, tuple[int, int]] = {}
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, used_name = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        while here == root or root in here.parents:
            limit, used = _text(here / limit_name).strip(), _text(here / used_name).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < 1 << 60:
                found[str(here / limit_name)] = (int(limit), int(used))
            here = here.parent
    return found


def meminfo(text: str) -> dict[str, int]:
    """Bytes by name."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def check_memory(meminfo_text: str, limits: dict[str, tuple[int, int]]) -> Finding:
    """What slots may take: the machine's memory and the cgroup's limit, past which the daemon is killed."""
    available = meminfo(meminfo_text).get("MemAvailable", 0)
    if not available:
        return Finding("memory", "warn", "/proc/meminfo names no MemAvailable", "Mount /proc.")
    text = f"{size(available)} available"
    if not limits:
        return Finding("memory", "ok", f"{text}, no cgroup limit")
    path, (limit, used) = min(limits.items(), key=lambda item: item[1][0] - item[1][1])
    text += f", cgroup limit {size(limit)} with {size(used)} used ({path})"
    if limit - used < limit // 10:
        return Finding("memory", "warn", f"{text}: nearly reached", "Raise the limit: slots are charged to it.")
    return Finding("memory", "ok", text)


def check_swap(meminfo_text: str) -> Finding:
    """tmpfs pages can be swapped out, which makes a snapshot as slow as the disk."""
    total = meminfo(meminfo_text).get("SwapTotal", 0)
    if total:
        advice = "Train with swap off (`swapoff -a`) or with memory to spare."
        return Finding("swap", "warn", f"{size(total)} of swap: slots can be swapped out", advice)
    return Finding("swap", "ok", "none")


def check_limits() -> Finding:
    """Limits of this login, which a daemon started from it inherits."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    written = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    text = f"{_limit(files)} files, memlock {_limit(locked, size)}"
    if written != resource.RLIM_INFINITY:
        return Finding(
            "limits", "warn", f"{text}, files of at most {size(written)}", "`ulimit -f unlimited` before the start."
        )
    if files != resource.RLIM_INFINITY and files < 4096:
        return Finding("limits", "warn", f"{text}: few for many ranks", "`ulimit -Hn 65536` before the start.")
    return Finding("limits", "ok", text)


def _limit(value: int, show: Callable[[int], str] = str) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else show(value)


# ---------------------------------------------------------------- directories


def check_run_dir(directory: Path) -> Finding:
    """The directory of socket, lock and log."""
    name = f"run directory ({directory})"
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return Finding(name, "ok", "does not exist yet; `baftd start` makes it")
    except OSError as error:
        return Finding(name, "fail", f"{error.strerror}", "Set run_dir to a directory of yours.")
    if not stat.S_ISDIR(found.st_mode):
        return Finding(name, "fail", "is no directory", "Set run_dir to a directory of yours.")
    if found.st_uid != os.geteuid():
        return Finding(name, "fail", f"belongs to uid {found.st_uid}", "Set run_dir to a directory of yours.")
    if found.st_mode & 0o077:
        return Finding(name, "fail", f"mode {stat.S_IMODE(found.st_mode):04o}", f"`chmod 700 {directory}`.")
    return Finding(name, "ok", "yours, mode 0700")


def check_login(run_dir: Path) -> Finding | None:
    """A run directory of the login session goes with the last logout, and the daemon's socket with it."""
    owner = os.geteuid()
    if Path(f"/run/user/{owner}") not in run_dir.parents:
        return None
    user = _user_name(owner)
    if Path(f"/var/lib/systemd/linger/{user}").exists():
        return Finding("login session", "ok", "lingers")
    advice = f"`loginctl enable-linger {user}`, or set run_dir elsewhere."
    return Finding("login session", "warn", f"{run_dir} is removed when you log out for the last time", advice)


def _user_name(uid: int) -> str:
    import pwd

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def check_state_dir(directory: Path) -> Finding:
    """History and manifests must survive a reboot."""
    name = f"state directory ({directory})"
    there = _nearest(directory)
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, "fail", f"{there} cannot be written to", "Set state_dir to a directory of yours.")
    if filesystem_type(there) == _TMPFS:
        return Finding(name, "warn", "lies on a tmpfs: a reboot loses the history", "Set state_dir to a disk.")
    return Finding(name, "ok", "writable" if there == directory else "does not exist yet; `baftd start` makes it")


def check_durable(directory: Path | None) -> Finding:
    """The durable tier: room, direct writes, and whether it outlives a reboot."""
    if directory is None:
        return Finding("durable tier", "warn", "off", "Set durable_dir; without it nothing survives a reboot.")
    name = f"durable tier ({directory})"
    if not directory.is_dir():
        state: Literal["warn", "fail"] = "warn" if os.access(_nearest(directory), os.W_OK | os.X_OK) else "fail"
        return Finding(name, state, "does not exist", f"`mkdir -p {directory}`.")
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding(name, "fail", "cannot be written to", "Is it mounted read-only, or another user's?")
    kind = filesystem_type(directory)
    space = os.statvfs(directory)
    text = f"{size(space.f_bavail * space.f_frsize)} free of {size(space.f_blocks * space.f_frsize)}"
    if kind == _TMPFS:
        return Finding(name, "warn", f"{text}, on a tmpfs: nothing there survives a reboot", "Set it to a disk.")
    if kind in _NETWORK:
        text += f", {_NETWORK[kind]}"
    problem = _direct_write(directory)
    if problem:
        return Finding(name, "warn", f"{text}; no O_DIRECT ({problem}): writes are buffered, which costs more CPU")
    return Finding(name, "ok", f"{text}; O_DIRECT works")


def _direct_write(directory: Path) -> str:
    """Write one block past the page cache and remove it; the kernel's reason when it refuses."""
    path = directory / f".baftd-doctor-{os.getpid()}"
    block = mmap.mmap(-1, 4096)  # page-aligned, as O_DIRECT wants it
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    try:
        os.write(descriptor, block)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(descriptor)
        block.close()
    return ""


def _nearest(directory: Path) -> Path:
    """`directory`, or the nearest of its parents that exists."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory

