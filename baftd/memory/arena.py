"""Directories of the shared-memory arena: who owns them, which files belong there, what may be removed.

    <shm_dir>/baftd-<uid>/                      0700; incarnation: text, which life of this memory it is
    <shm_dir>/baftd-<uid>/<job>/                0700
        rank-00000.control  rank-00000.lock  rank-00000.slot-0 ...  journal

/dev/shm is open to everyone, so the directory of the daemon is believed only if it is a directory, ours, and writable
by nobody else; what lies inside is then ours as well. Symbolic links are never followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from baftd.checkpoint.identity import check_job_name
from baftd.errors import JobNameError, UsageError
from baftd.memory import acl
from baftd.memory.processes import lock_holder
from baftd.memory.slot_file import SlotFile

__all__ = ["ArenaRoot", "Claim", "JobArena", "SlotRef", "Swept", "sweep"]

_RANK_FILE = re.compile(r"rank-([0-9]{5,7})\.(control|lock|slot-([0-9]{1,9}))")
_JOURNAL_FILES = frozenset({"journal", "journal.new", "journal.damaged"})
_INCARNATION = "incarnation"


@dataclass(frozen=True, order=True)
class SlotRef:
    """A slot file found in a job's directory. `bytes` is the memory it occupies."""

    rank: int
    index: int
    path: str
    bytes: int


class ArenaRoot:
    """The daemon's directory under `shm_dir`."""

    def __init__(self, shm_dir: str | os.PathLike[str], uid: int | None = None) -> None:
        self.shm_dir = os.fspath(shm_dir)
        self.uid = os.geteuid() if uid is None else uid
        self.path = os.path.join(self.shm_dir, f"baftd-{self.uid}")

    def create(self, clients: Iterable[int] = ()) -> None:
        """Make the directory, or check the one that is there. `clients`: uids that may pass through it.

        Raises UsageError if it is somebody else's or not a directory, OSError.
        """
        _make_directory(self.path, self.uid, clients)

    def check(self) -> bool:
        """Whether the directory is there. Raises UsageError, as `create`, if it cannot be trusted."""
        try:
            _check_directory(self.path, self.uid)
        except FileNotFoundError:
            return False
        return True

    def job(self, name: str) -> JobArena:
        """The directory of a job; nothing is made. Raises JobNameError."""
        return JobArena(self, check_job_name(name))

    def jobs(self) -> list[str]:
        """Names of the jobs that have a directory, sorted."""
        names = []
        for entry in _entries(self.path):
            with contextlib.suppress(JobNameError):
                if entry.is_dir(follow_symlinks=False):
                    names.append(check_job_name(entry.name))
        return sorted(names)

    def usage(self) -> int:
        """Bytes of memory that all files here occupy."""
        return sum(self.job(name).usage() for name in self.jobs())

    def incarnation(self) -> str:
        """Which life of this memory it is, as `set_incarnation` wrote it; empty if it has no name (it is new)."""
        try:
            with open(os.path.join(self.path, _INCARNATION), encoding="ascii") as file:
                return file.read(64).strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    def set_incarnation(self, value: str) -> None:
        """Name this life of the memory. The name is lost with the memory, which is its purpose."""
        temporary = os.path.join(self.path, f"{_INCARNATION}.new")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(value)
        os.rename(temporary, os.path.join(self.path, _INCARNATION))

    def remove_if_empty(self) -> bool:
        """Remove the directory if no job is left in it; False if something is."""
        if any(entry.name not in (_INCARNATION, f"{_INCARNATION}.new") for entry in _entries(self.path)):
            return False
        for name in (_INCARNATION, f"{_INCARNATION}.new"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.path)
        return True


class JobArena:
    """The directory of one job."""

    def __init__(self, root: ArenaRoot, job: str) -> None:
        self.root = root
        self.job = job
        self.path = os.path.join(root.path, job)
        self._clients: tuple[int, ...] = ()

    def create(self, clients: Iterable[int] = ()) -> None:
        """Make the directory, or check the one that is there. `clients`: uids whose trainers get their files."""
        self._clients = tuple(clients)
        self.root.create(self._clients)
        _make_directory(self.path, self.root.uid, self._clients)

    # ------------------------------------------------------------------------------------ names

    def slot_path(self, rank: int, index: int) -> str:
        """Path of a slot."""
        return os.path.join(self.path, f"rank-{rank:05d}.slot-{index}")

    def control_path(self, rank: int) -> str:
        """Path of a rank's control page."""
        return os.path.join(self.path, f"rank-{rank:05d}.control")

    def lock_path(self, rank: int) -> str:
        """Path of the file on which the rank's process holds its record lock; nothing else ever opens it there."""
        return os.path.join(self.path, f"rank-{rank:05d}.lock")

    @property
    def journal_path(self) -> str:
        """Path of the journal of the slots' lives."""
        return os.path.join(self.path, "journal")

    # ------------------------------------------------------------------------------------ files

    def create_slot(self, rank: int, index: int, image_capacity: int, *, numa_node: int = -1) -> SlotFile:
        """Make a slot and let the job's clients in. Raises NoRoom, FileExistsError, UsageError."""
        slot = SlotFile.create(self.slot_path(rank, index), image_capacity, numa_node=numa_node)
        try:
            self.let_in(slot.path)
        except BaseException:
            slot.close()
            os.unlink(slot.path)
            raise
        return slot

    def create_lock(self, rank: int) -> str:
        """Make the rank's lock file unless it is there; return its path."""
        path = self.lock_path(rank)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return path
        os.close(fd)
        self.let_in(path)
        return path

    def let_in(self, path: str) -> None:
        """Let the job's clients read and write a file."""
        acl.grant(path, self._clients, acl.READ | acl.WRITE, owner=acl.READ | acl.WRITE)

    def slots(self) -> list[SlotRef]:
        """Slot files that are there, by rank and index."""
        found = []
        for entry in _entries(self.path):
            match = _RANK_FILE.fullmatch(entry.name)
            if match and match[3] is not None and entry.is_file(follow_symlinks=False):
                found.append(SlotRef(int(match[1]), int(match[3]), entry.path, _occupied(entry)))
        return sorted(found)

    def ranks(self) -> list[int]:
        """Ranks that have a file here."""
        matches = (_RANK_FILE.fullmatch(entry.name) for entry in _entries(self.path))
        return sorted({int(match[1]) for match in matches if match})

    def usage(self) -> int:
        """Bytes of memory that the files occupy."""
        return sum(_occupied(entry) for entry in _entries(self.path))

    def last_change(self) -> float:
        """When a file here was last written by a system call or made (wall clock of this node, seconds); 0: never.

        Only for deciding what is oldest: copies through a mapping need not show.
        """
        times = [entry.stat(follow_symlinks=False).st_mtime for entry in _entries(self.path)]
        return max(times, default=0.0)

    def holders(self) -> dict[int, int]:
        """Ranks whose lock is held by a living process, with its PID (0: in another PID namespace)."""
        held = {rank: lock_holder(self.lock_path(rank)) for rank in self.ranks()}
        return {rank: pid for rank, pid in held.items() if pid is not None}

    # ------------------------------------------------------------------------------------ removing

    def remove_slot(self, rank: int, index: int) -> None:
        """Remove a slot's name. Processes that map it keep the memory until they let go; nothing is truncated."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.slot_path(rank, index))

    def remove_rank(self, rank: int) -> None:
        """Remove all files of a rank."""
        self._remove(lambda match: match is not None and int(match[1]) == rank)

    def remove(self) -> list[str]:
        """Remove all files of ours and the directory; return what is not ours and stays (the directory with it)."""
        self._remove(lambda match: True)
        strange = sorted(entry.path for entry in _entries(self.path))
        if not strange:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(self.path)
        return strange

    def _remove(self, chosen: Callable[[re.Match[str] | None], bool]) -> None:
        for entry in _entries(self.path):
            match = _RANK_FILE.fullmatch(entry.name)
            ours = (match is not None or entry.name in _JOURNAL_FILES) and not entry.is_dir(follow_symlinks=False)
            if ours and chosen(match):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)


# ---------------------------------------------------------------------------------------------- sweep


class Claim(Enum):
    """What the daemon knows of a job that has files here."""

    LIVE = "live"
    """Training, restoring, or pinned: nothing is removed."""
    UNFINISHED = "unfinished"
    """Crashed, or ended without `finish`: kept for the retention time, unless room is needed."""
    FINISHED = "finished"
    """Removed at once."""
    UNKNOWN = "unknown"
    """No job of that name: kept as an unfinished one, for its slots may be all that is left of it."""


@dataclass(frozen=True)
class Swept:
    """What was removed, or with dry_run would be. `bytes` of memory become free."""

    job: str
    path: str
    bytes: int
    reason: str


def sweep(
    root: ArenaRoot,
    *,
    claim: Callable[[str], Claim],
    retention: float,
    now: float,
    need: int = 0,
    dry_run: bool = False,
) -> list[Swept]:
    """Remove what nobody holds and no job wants.

    A job whose lock a living process holds stays, whatever `claim` says. Finished jobs go; unfinished ones `retention`
    seconds after the last change (`now`: wall clock of this node, seconds), and before that, oldest first, as long as
    `need` bytes have not become free: none of them where all together would not be enough. Raises UsageError if the
    arena's directory cannot be trusted.
    """
    if not root.check():
        return []
    removed: list[Swept] = []
    waiting: list[tuple[float, JobArena]] = []
    for name in root.jobs():
        arena = root.job(name)
        wanted = claim(name)
        if wanted is Claim.LIVE or arena.holders():
            continue
        age = now - arena.last_change()
        if wanted is Claim.FINISHED:
            removed.append(_sweep_job(arena, "the job has finished", dry_run))
        elif age >= retention:
            removed.append(_sweep_job(arena, f"{wanted.value}, untouched for {age / 3600:.1f} h", dry_run))
        else:
            waiting.append((-age, arena))
    freed = sum(swept.bytes for swept in removed)
    if freed + sum(arena.usage() for _, arena in waiting) < need:
        return removed  # what is lost would have been lost for nothing
    for negative_age, arena in sorted(waiting, key=lambda pair: (pair[0], pair[1].job)):
        if freed >= need:
            break
        age = -negative_age
        swept = _sweep_job(arena, f"room is needed; untouched for {age / 3600:.1f} h", dry_run)
        removed.append(swept)
        freed += swept.bytes
    return removed


def _sweep_job(arena: JobArena, reason: str, dry_run: bool) -> Swept:
    size = arena.usage()
    if not dry_run:
        strange = arena.remove()
        if strange:
            reason += f"; {len(strange)} files that are not of baftd stay ({strange[0]} ...)"
    return Swept(arena.job, arena.path, size, reason)


# ---------------------------------------------------------------------------------------------- helpers


def _make_directory(path: str, uid: int, clients: Iterable[int]) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _check_directory(path, uid)
    acl.grant(path, clients, acl.EXECUTE, owner=acl.READ | acl.WRITE | acl.EXECUTE)


def _check_directory(path: str, uid: int) -> None:
    found = os.stat(path, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} is not a directory (or a symbolic link), so it cannot hold slots.", hint="Remove it.")
    if found.st_uid != uid:
        raise UsageError(
            f"{path} belongs to uid {found.st_uid}, not to {uid}: somebody else made it.",
            hint="Remove it, or choose another shm_dir.",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{path} is writable by others (mode {stat.S_IMODE(found.st_mode):04o}), so its files cannot be trusted.",
            hint="Remove it, or chmod 0700 if you know what lies in it.",
        )


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise


def _occupied(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0
