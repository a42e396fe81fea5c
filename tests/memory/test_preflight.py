"""Preflight: every limit is read and named, with the sum and what to change."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from baftd.errors import NoRoom
from baftd.memory.preflight import CgroupLimit, Readings, Sum, check, read
from tests.support.tmpfs import small_tmpfs

GIB = 1 << 30
MIB = 1 << 20

ROOMY = Readings("/dev/shm", 64 * GIB, 60 * GIB, "tmpfs", 128 * GIB, 100 * GIB)


def refusal(readings: Readings, **asked: int) -> str:
    with pytest.raises(NoRoom) as caught:
        check("/dev/shm", readings=readings, **asked)
    return str(caught.value)


def test_what_fits_is_answered_with_the_tightest_limit() -> None:
    found = check("/dev/shm", own=50 * GIB, readings=ROOMY)
    assert found.available == 60 * GIB
    assert found.limit.startswith("file system /dev/shm")
    assert found.warnings == ()
    group = CgroupLimit("/pod/x", 40 * GIB, 20 * GIB, 5 * GIB)
    found = check("/dev/shm", own=25 * GIB, readings=replace(ROOMY, cgroups=(group,)))
    assert found.available == 25 * GIB
    assert "/pod/x" in found.limit


def test_the_sum_is_written_out() -> None:
    message = refusal(ROOMY, own=40 * GIB, others=20 * GIB, reserve=4 * GIB)
    assert "own slots 40.0 GiB + places for other nodes 20.0 GiB + reserve 4.0 GiB = 64.0 GiB" in message
    assert "file system /dev/shm, 64.0 GiB in all: 60.0 GiB available" in message
    assert "mount -o remount,size=68g /dev/shm" in message
    assert "memory of the machine" not in message
    assert str(Sum(5 * MIB)) == "own slots 5.0 MiB"


def test_both_generations_are_in_the_sum() -> None:
    """Slots of the restored step are there already: they are needed and available, and change nothing but the words."""
    message = refusal(ROOMY, own=61 * GIB, held=20 * GIB, reserve=GIB)
    assert (
        "own slots 61.0 GiB + slots of the restored step, until the first commit, 20.0 GiB + reserve 1.0 GiB = 82.0 GiB"
    ) in message
    assert "file system /dev/shm, 64.0 GiB in all: 80.0 GiB available" in message
    assert "remount,size=66g" in message
    check("/dev/shm", own=59 * GIB, held=20 * GIB, reserve=GIB, readings=ROOMY)
    assert check("/dev/shm", own=GIB, held=20 * GIB, readings=ROOMY).available == 60 * GIB
    message = refusal(ROOMY, own=0, held=GIB, fetched=60 * GIB, reserve=GIB)
    assert (
        "shared memory: slots of the restored step, until the first commit, 61.0 GiB + reserve 1.0 GiB = 62.0 GiB"
    ) in message


def test_what_is_missing_is_counted_by_the_tightest_limit() -> None:
    with pytest.raises(NoRoom) as caught:
        check("/dev/shm", own=110 * GIB, reserve=GIB, readings=ROOMY)
    assert caught.value.missing == 51 * GIB


def test_exactly_enough_is_enough() -> None:
    check("/dev/shm", own=59 * GIB, reserve=GIB, readings=ROOMY)
    refusal(ROOMY, own=59 * GIB, reserve=GIB + 1)


def test_memory_of_the_machine() -> None:
    message = refusal(replace(ROOMY, memory_available=10 * GIB), own=11 * GIB)
    assert "memory of the machine, 128.0 GiB in all (MemAvailable): 10.0 GiB available" in message
    assert "remount" not in message


def test_every_level_of_the_cgroup_counts() -> None:
    groups = (CgroupLimit("/pod/inner", 30 * GIB, 1 * GIB), CgroupLimit("/pod", 16 * GIB, 12 * GIB, 2 * GIB))
    message = refusal(replace(ROOMY, cgroups=groups), own=8 * GIB)
    assert "memory limit of the daemon's cgroup /pod, 16.0 GiB in all: 6.0 GiB available" in message
    assert "Raise the limit of /pod to 18 GiB or more" in message
    assert "would be killed" in message
    assert "/pod/inner" not in message
    assert CgroupLimit("/x", GIB, 3 * GIB).available == 0


def test_the_64_mib_of_a_container() -> None:
    message = refusal(replace(ROOMY, fs_total=64 * MIB, fs_free=60 * MIB), own=3 * GIB)
    assert "/dev/shm has the 64.0 MiB that containers get by default" in message
    assert "--shm-size=3076m (Docker)" in message
    assert "emptyDir with medium: Memory" in message


def test_all_limits_that_are_too_small_are_named_at_once() -> None:
    small = replace(ROOMY, fs_free=GIB, memory_available=GIB, cgroups=(CgroupLimit("/g", GIB, 0),))
    message = refusal(small, own=2 * GIB)
    for part in ("file system", "memory of the machine", "cgroup /g", "remount", "Raise the limit of /g"):
        assert part in message


def test_warnings() -> None:
    odd = replace(ROOMY, fs_type="ext4", swap_total=GIB, memlock=64 * 1024, accelerator=True)
    disk, swap, memlock = check("/dev/shm", own=GIB, readings=odd).warnings
    assert "ext4, not on tmpfs" in disk
    assert "swap of 1.0 GiB is on" in swap
    assert "memlock is 64.0 KiB" in memlock
    for fine in (replace(odd, memlock=2 * GIB), replace(odd, accelerator=False), replace(odd, memlock=-1)):
        assert len(check("/dev/shm", own=GIB, readings=fine).warnings) == 2


# ---------------------------------------------------------------------------------------------- reading


def test_this_machine_can_be_read() -> None:
    found = read("/dev/shm")
    assert found.fs_type == "tmpfs"
    assert 0 < found.memory_available <= found.memory_total < 1 << 60
    assert 0 <= found.fs_free <= found.fs_total
    with pytest.raises(FileNotFoundError):
        read("/dev/shm/baftd-nobody-made-this")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A made-up /proc and /sys/fs/cgroup."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        "MemTotal:       1048576 kB\nMemFree: 1 kB\nMemAvailable:    524288 kB\n"
        "SwapTotal: 2048 kB\nSwapFree: 1024 kB\nHugePages_Total:       0\nnonsense\n"
    )
    (proc / "self" / "mounts").write_text(
        f"overlay / overlay rw 0 0\nshm {str(tmp_path).replace(' ', chr(92) + '040')} tmpfs rw 0 0\nbroken\n"
    )
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def put(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def reading(machine: Path) -> Readings:
    return read(machine, proc=str(machine / "proc"), cgroup=str(machine / "cgroup"))


def test_memory_and_mounts(machine: Path) -> None:
    found = reading(machine)
    assert (found.memory_total, found.memory_available) == (GIB, GIB // 2)
    assert (found.swap_total, found.swap_free) == (2 * MIB, MIB)
    assert found.fs_type == "tmpfs"
    assert found.cgroups == ()


def test_cgroup_v2(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/pod/inner\n")
    put(machine / "cgroup/pod/inner", memory__max="max\n", memory__high="max\n", memory__current="5\n")
    put(
        machine / "cgroup/pod", memory__max="1000\n", memory__high="800\n", memory__current="300\n",
        memory__stat="anon 1\ninactive_file 50\nactive_file 7\n",
    )  # fmt: skip
    put(machine / "cgroup", memory__stat="inactive_file 9\n")
    assert reading(machine).cgroups == (CgroupLimit("/pod", 800, 300, 50),)


def test_cgroup_v2_in_a_namespace(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/../../\n")
    put(machine / "cgroup", memory__max="5000\n", memory__current="1000\n")
    assert reading(machine).cgroups == (CgroupLimit("/", 5000, 1000, 0),)


def test_cgroup_v1(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n")
    put(
        machine / "cgroup/memory", memory__limit_in_bytes="4000\n", memory__usage_in_bytes="1000\n",
        memory__stat="cache 1\ntotal_inactive_file 70\n",
    )  # fmt: skip
    assert reading(machine).cgroups == (CgroupLimit("/", 4000, 1000, 70),)
    put(
        machine / "cgroup/memory/docker/abc", memory__limit_in_bytes=f"{2**63 - 4096}\n",
        memory__usage_in_bytes="900\n",
    )  # fmt: skip
    assert [group.path for group in reading(machine).cgroups] == ["/"]


def test_a_proc_that_is_not_there_sets_no_limit(tmp_path: Path) -> None:
    found = read(tmp_path, proc=str(tmp_path / "no"), cgroup=str(tmp_path / "no"))
    assert found.cgroups == ()
    assert found.fs_type == ""
    assert check(tmp_path, own=1, readings=found).available > 0


def test_a_real_small_tmpfs(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "container", "64m") as container:
        check(container, own=60 * MIB)
        with pytest.raises(NoRoom, match=r"own slots 65\.0 MiB") as caught:
            check(container, own=65 * MIB)
        assert "containers get by default" in str(caught.value)
        (container / "used").write_bytes(bytes(32 * MIB))
        with pytest.raises(NoRoom, match=r"32\.0 MiB available"):
            check(container, own=60 * MIB)
        assert read(container).fs_type == "tmpfs"
        os.unlink(container / "used")
