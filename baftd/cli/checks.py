"""What `baftd doctor` looks at on this machine. Every check is a function from readings to findings; none changes
anything but for one small file that is written to and removed from the durable directory."""

from __future__ import annotations

import contextlib
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
from baftd.memory import preflight
from baftd.memory.processes import start_time
from baftd.settings import Settings

__all__ = ["Finding", "check_machine", "check_settings"]

_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    name: str
    state: Literal["ok", "warn", "fail"]
    text: str
    advice: str = ""


def check_machine(settings: Settings) -> list[Finding]:
    """Everything that does not need a daemon."""
    found = [
        check_versions(),
        check_kernel(),
        check_ticks(),
        *check_memory(settings.shm_dir),
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
    if start_time(os.getpid()) is None:
        return Finding("process times", "fail", "/proc/self/stat cannot be read", "Mount /proc in this container.")
    return Finding("process times", "ok", f"{ticks} clock ticks a second")


def check_engine() -> Finding:
    """Whether the copy engine was built, and with the digest inside."""
    advice = "Install gcc, python3-dev and libxxhash-dev, then `pip install --force-reinstall --no-deps baftd`."
    try:
        from baft_client.load_engine import load_engine
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


def check_memory(shm_dir: Path) -> list[Finding]:
    """The tmpfs of the slots, the machine's memory, the cgroup's limits, swap."""
    try:
        found = preflight.read(shm_dir)
    except OSError as error:
        return [Finding(f"slots ({shm_dir})", "fail", f"{error.strerror}", "Mount a tmpfs there or set shm_dir.")]
    return [check_shm(found), check_available(found), check_swap(found)]


def check_shm(found: preflight.Readings) -> Finding:
    """The tmpfs of the slots."""
    name = f"slots ({found.shm_dir})"
    text = f"{size(found.fs_free)} free of {size(found.fs_total)}"
    more = "Docker: --shm-size=16g; Kubernetes: an emptyDir with medium Memory; else `mount -o remount,size=...`."
    if not os.access(found.shm_dir, os.W_OK | os.X_OK):
        return Finding(name, "fail", f"{text}, but this user may not write there", f"`chmod 1777 {found.shm_dir}`.")
    if found.fs_type not in ("", *_IN_MEMORY):
        return Finding(name, "warn", f"{text}, but it is {found.fs_type}: a disk", "Set shm_dir to a tmpfs.")
    if found.fs_total <= preflight.DOCKER_SHM:
        return Finding(name, "warn", f"{text}: no more than a container's default", more)
    if found.fs_free < found.fs_total // 10:
        return Finding(name, "warn", f"{text}: nearly full", "`baftd gc --dry-run` shows what could go.")
    return Finding(name, "ok", text)


def check_available(found: preflight.Readings) -> Finding:
    """What slots may take: the machine's memory and the cgroup's limit, past which the daemon is killed."""
    text = f"{size(found.memory_available)} available of {size(found.memory_total)}"
    if not found.cgroups:
        return Finding("memory", "ok", f"{text}, no cgroup limit")
    tight = min(found.cgroups, key=lambda group: group.available)
    text += f", {size(tight.available)} below the limit of cgroup {tight.path} ({size(tight.limit)})"
    if tight.available < tight.limit // 10:
        return Finding("memory", "warn", f"{text}: nearly reached", "Raise the limit: slots are charged to it.")
    return Finding("memory", "ok", text)


def check_swap(found: preflight.Readings) -> Finding:
    """tmpfs pages can be swapped out, which makes a snapshot as slow as the disk."""
    if found.swap_total:
        advice = "Train with swap off (`swapoff -a`) or with memory to spare."
        text = f"{size(found.swap_total - found.swap_free)} used of {size(found.swap_total)}: slots can be swapped out"
        return Finding("swap", "warn", text, advice)
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
    if preflight.read(there).fs_type in _IN_MEMORY:
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
    found = preflight.read(directory)
    text = f"{size(found.fs_free)} free of {size(found.fs_total)}{f' on {found.fs_type}' if found.fs_type else ''}"
    if found.fs_type in _IN_MEMORY:
        return Finding(name, "warn", f"{text}: nothing there survives a reboot", "Set it to a disk.")
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

