"""Real files, with a fault at every operation in turn: killed, no room, an input/output error."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baftd.errors import BaftError, Degraded, NoRoom
from baftd.storage.directory import DirectoryTier
from baftd.storage.files import FileOps
from tests.support.faulty_files import FaultyFiles
from tests.support.images import Slot, make_slot, save, token
from tests.support.memory_files import Killed, Op

BLOCK = 16384


def tier_in(disk: Path, ops: FileOps | None = None, **more: object) -> DirectoryTier:
    """A tier to which every other process is dead."""
    return DirectoryTier(disk, node="n0", file_ops=ops, block=BLOCK, threads=1, alive=lambda pid, start: False, **more)  # type: ignore[arg-type]


def two_ranks(shm: Path, step: int, epoch: int = 1) -> list[Slot]:
    return [make_slot(shm, step=step, rank=rank, world=2, by=token(epoch)) for rank in range(2)]


def at(number: int, error: Callable[[], BaseException]) -> Callable[[Op, int], None]:
    """Raise at one operation (of those that are counted), once."""
    raised: list[Op] = []

    def before(op: Op, count: int) -> None:
        if count == number and not raised:
            raised.append(op)
            raise error()

    return before


def count_operations(disk: Path, work: Callable[[DirectoryTier], object]) -> list[Op]:
    ops = FaultyFiles()
    work(tier_in(disk, ops))
    return ops.log


def leftovers(disk: Path) -> list[str]:
    return [name for _, directories, files in os.walk(disk) for name in directories + files if name.startswith(".")]


def check_old_is_whole(disk: Path, old: list[Slot]) -> None:
    lines = tier_in(disk).verify("gpt", old[0].checkpoint)
    assert [line.ok for line in lines] == [True, True], lines


def test_killed_at_every_operation(shm: Path, disk: Path) -> None:
    """A write, a commit and the deletion of the older one: whatever happens, the older one or the new one is whole."""

    def work(tier: DirectoryTier, new: list[Slot], old: list[Slot]) -> None:
        save(tier, new)
        tier.delete("gpt", old[0].checkpoint)

    old, new = two_ranks(shm, 4), two_ranks(shm, 8)
    save(tier_in(disk / "count"), old)
    total = len(count_operations(disk / "count", lambda tier: work(tier, new, old)))
    assert total > 60
    for number in range(total):
        root = disk / str(number)
        save(tier_in(root), old)
        ops = FaultyFiles(at(number, Killed))
        with pytest.raises(Killed):
            work(tier_in(root, ops), new, old)
        ops.bury()
        tier = tier_in(root)
        tier.sweep("gpt")
        complete = [one for one in tier.list("gpt") if one.state == "complete"]
        assert complete, f"killed at {number}: {tier.list('gpt')}"
        for one in complete:
            assert all(line.ok for line in tier.verify("gpt", one.checkpoint))
        assert not [one for one in tier.list("gpt") if one.state == "damaged"]
        work(tier, new, old)
        assert [one.checkpoint.step for one in tier.list("gpt")] == [8]
        assert all(line.ok for line in tier.verify("gpt", new[0].checkpoint))
        assert leftovers(root) == []


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.ENOSPC, NoRoom, "full"),
        (errno.EDQUOT, NoRoom, "quota"),
        (errno.EIO, Degraded, "dmesg"),
        (errno.EROFS, Degraded, "read-only"),
        (errno.EACCES, Degraded, "right"),
    ],
)
def test_an_error_at_every_operation(shm: Path, disk: Path, code: int, kind: type[BaftError], words: str) -> None:
    """The error is ours and says what to do; the older one is whole; nothing is left over; trying again works."""
    old, new = two_ranks(shm, 4), two_ranks(shm, 8)
    save(tier_in(disk), old)
    total = len(count_operations(disk, lambda tier: save(tier, new)))
    step = 1 if code == errno.ENOSPC else 3
    for number in range(0, total, step):
        tier_in(disk).delete("gpt", new[0].checkpoint)
        ops = FaultyFiles(at(number, lambda: OSError(code, os.strerror(code))))
        with pytest.raises(BaftError) as caught:
            save(tier_in(disk, ops), new)
        assert isinstance(caught.value, kind), f"operation {number} {caught.value}"
        assert words in str(caught.value)
        assert "step-8.e1 of job gpt" in str(caught.value)
        assert caught.value.__cause__ is not None
        ops.bury()
        assert leftovers(disk) == [], f"operation {number}"
        check_old_is_whole(disk, old)
    save(tier_in(disk), new)
    assert all(line.ok for line in tier_in(disk).verify("gpt", new[0].checkpoint))


def test_room_is_asked_for_before_anything_is_written(shm: Path, disk: Path) -> None:
    def refuse(op: Op, count: int) -> None:
        if op.kind == "preallocate":
            raise OSError(errno.ENOSPC, "No space left on device")
        assert op.kind != "pwrite" or "EPOCH" in op.path

    slot = make_slot(shm)
    with pytest.raises(NoRoom, match=rf"{slot.length} bytes are needed, [0-9]+ are free.*durable_keep"):
        slot.write(tier_in(disk, FaultyFiles(refuse)), "gpt")


def test_a_temporary_that_cannot_be_removed_is_said(shm: Path, disk: Path) -> None:
    def refuse(op: Op, count: int) -> None:
        if op.kind in ("fsync", "unlink") and "safetensors" in op.path:
            raise OSError(errno.EIO, "Input/output error")

    ops = FaultyFiles(refuse)
    with pytest.raises(Degraded) as caught:
        make_slot(shm).write(tier_in(disk, ops), "gpt")
    assert "could not be removed" in str(caught.value)
    assert len(leftovers(disk)) == 1
    swept = tier_in(disk).sweep("gpt", dry_run=True)
    assert len(swept.lines) == len(leftovers(disk)) == 1
    assert tier_in(disk).sweep("gpt").nbytes == swept.nbytes > 0
    assert leftovers(disk) == []


def test_live_and_foreign_writers_are_left_alone(shm: Path, disk: Path) -> None:
    slot = make_slot(shm)
    ops = FaultyFiles(lambda op, count: (_ for _ in ()).throw(Killed) if op.kind == "rename" else None)
    with pytest.raises(Killed):
        slot.write(tier_in(disk, ops), "gpt")
    ops.bury()
    here = DirectoryTier(disk, node="n0")  # knows that this process lives
    elsewhere = DirectoryTier(disk, node="n1", alive=lambda pid, start: False)
    for tier in (here, elsewhere):
        assert tier.sweep("gpt").lines == ()
        found = tier.describe("gpt", slot.checkpoint)
        assert found is not None
        assert found.being_written
    assert len(tier_in(disk).sweep("gpt").lines) == 1


def test_a_directory_deleted_under_a_stale_writer(shm: Path, disk: Path) -> None:
    """The newer epoch removes the directory of the abandoned step while the old one still writes: it is told so."""
    from baftd.errors import Fenced

    slot = make_slot(shm, by=token(1))

    def overtake(op: Op, count: int) -> None:
        if op.kind == "fsync" and "safetensors" in op.path:
            newer = tier_in(disk)
            newer.open_epoch("gpt", token(2))
            newer.delete("gpt", slot.checkpoint, token=token(2))

    with pytest.raises(Fenced, match="epoch 1 was overtaken by epoch 2"):
        slot.write(tier_in(disk, FaultyFiles(overtake)), "gpt")
    assert tier_in(disk).list("gpt") == []
    assert leftovers(disk) == []


SAVE = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3].split(":")
from tests.support.images import make_slot, save
from tests.support.faulty_files import FaultyFiles
from baftd.storage.directory import DirectoryTier
slot = make_slot(Path(sys.argv[1]))
ops = FaultyFiles()
tier = DirectoryTier(sys.argv[2], node="n0", file_ops=ops, block=16384, threads=1, alive=lambda pid, start: False)
save(tier, [slot])
tier.delete("gpt", slot.checkpoint)
for op in ops.log:
    print(op.kind, op.path, op.target)
"""

CALLS = {
    "mkdir": "mkdir",
    "rmdir": "rmdir",
    "unlink": "unlink",
    "rename": "rename",
    "link": "link",
    "fallocate": "preallocate",
    "pwrite64": "pwrite",
    "ftruncate": "truncate",
    "fsync": "fsync",
    "fdatasync": "fsync",
}


def test_nothing_happens_beside_the_recorded_operations(shm: Path, disk: Path) -> None:
    """The kernel sees the operations that the record shows, in that order, and no other on the directory."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trace = disk / "trace"
    root = disk / "ckpt"
    calls = "mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,open,openat,openat2,creat,"
    calls += "fallocate,pwrite64,write,pwritev,pwritev2,writev,sendfile,copy_file_range,splice,ftruncate,truncate,"
    calls += "fsync,fdatasync,sync_file_range,symlink,symlinkat,fchmod,chmod,fchown,chown,utimensat,setxattr"
    command = ["strace", "-f", "-y", "-qq", "-e", f"trace={calls}", "-o", str(trace), sys.executable, "-c", SAVE]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    result = subprocess.run(
        [*command, str(shm), str(root), path], capture_output=True, text=True, timeout=100, check=False
    )
    if result.returncode != 0 and "ptrace" in result.stderr:
        pytest.skip("this machine does not allow ptrace")
    assert result.returncode == 0, result.stderr
    recorded = [line.split() for line in result.stdout.splitlines()]
    changing = [entry for entry in recorded if entry[0] not in ("open", "close")]
    seen = list(traced(trace.read_text(), str(root)))
    expected = [("fsync" if kind == "fsync_directory" else kind, first) for kind, first, *_ in changing]
    # Directories above the root are synced too, once; strace shows them by the path of their descriptor.
    inside = [entry for entry in expected if entry[1].startswith(str(root))]
    assert [entry for entry in seen if entry[1].startswith(str(root))] == inside


def traced(text: str, root: str) -> list[tuple[str, str]]:
    """(operation, path) of every call in an strace that touches `root`; a call not in the table keeps its name."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\d+ +(\w+)\((.*)\) += (-?\d+)", line)
        if match is None or root not in match[2] or match[3].startswith("-"):
            continue
        call, arguments = match[1], match[2]
        if call in ("open", "openat"):
            if "O_CREAT" in arguments:
                found.append(("create", re.findall(r'"([^"]*)"', arguments)[0]))
            continue
        path = re.match(r"\d+<([^>]*)>", arguments) or re.match(r'(?:AT_FDCWD(?:<[^>]*>)?, )?"([^"]*)"', arguments)
        assert path is not None, line
        found.append((CALLS.get(call, call), path[1].removesuffix(" (deleted)")))
    return found
