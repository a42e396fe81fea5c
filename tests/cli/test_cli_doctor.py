"""The doctor's checks, each on a machine that has the trouble and on one that has not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from baftd.cli import checks
from baftd.cli.main import main
from baftd.memory.preflight import CgroupLimit, Readings
from baftd.settings import load_settings
from tests.support.daemon import RunDirs

GB = 1 << 30

HEALTHY = Readings(
    shm_dir="/dev/shm",
    fs_total=64 * GB,
    fs_free=60 * GB,
    fs_type="tmpfs",
    memory_total=128 * GB,
    memory_available=100 * GB,
)


def test_slots() -> None:
    assert checks.check_shm(HEALTHY).state == "ok"
    docker = checks.check_shm(replace(HEALTHY, fs_total=64 << 20, fs_free=64 << 20))
    assert docker.state == "warn"
    assert "--shm-size" in docker.advice
    assert checks.check_shm(replace(HEALTHY, fs_free=GB)).state == "warn"
    assert "disk" in checks.check_shm(replace(HEALTHY, fs_type="ext4")).text
    assert checks.check_memory(Path("/no/such/place"))[0].state == "fail"


def test_memory_and_swap() -> None:
    assert checks.check_available(HEALTHY).state == "ok"
    tight = CgroupLimit("/job", limit=10 * GB, used=9 * GB + GB // 2)
    roomy = CgroupLimit("/", limit=100 * GB, used=GB)
    limited = checks.check_available(replace(HEALTHY, cgroups=(roomy, tight)))
    assert limited.state == "warn"
    assert "/job" in limited.text
    assert checks.check_available(replace(HEALTHY, cgroups=(roomy,))).state == "ok"
    assert checks.check_swap(HEALTHY).state == "ok"
    assert checks.check_swap(replace(HEALTHY, swap_total=GB, swap_free=GB)).state == "warn"


def test_run_directory(run_dirs: RunDirs) -> None:
    assert checks.check_run_dir(run_dirs.run).state == "ok"
    run_dirs.run.mkdir(mode=0o755)
    run_dirs.run.chmod(0o755)
    assert "chmod 700" in checks.check_run_dir(run_dirs.run).advice
    run_dirs.run.chmod(0o700)
    assert checks.check_run_dir(run_dirs.run).state == "ok"
    link = run_dirs.base / "link"
    link.symlink_to(run_dirs.run)
    assert checks.check_run_dir(link).state == "fail"


def test_a_run_directory_of_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    assert checks.check_login(Path("/tmp/run")) is None
    found = checks.check_login(Path("/run/user/4000000/baftd"))
    assert found is not None
    assert "enable-linger" in found.advice


def test_state_directory(run_dirs: RunDirs) -> None:
    assert checks.check_state_dir(run_dirs.state).state == "ok"
    assert checks.check_state_dir(run_dirs.shm / "state").state == "warn"


def test_durable_directory(run_dirs: RunDirs) -> None:
    assert "off" in checks.check_durable(None).text
    assert checks.check_durable(run_dirs.base / "none").state == "warn"
    assert "survives a reboot" in checks.check_durable(run_dirs.shm).text
    assert checks.check_durable(run_dirs.durable).state in ("ok", "warn")
    assert list(run_dirs.durable.iterdir()) == []


def test_direct_writes_refused(run_dirs: RunDirs) -> None:
    target = run_dirs.durable / "gone"
    assert checks._direct_write(target) == "No such file or directory"


def test_software() -> None:
    for finding in (checks.check_versions(), checks.check_kernel(), checks.check_ticks(), checks.check_limits()):
        assert finding.state in ("ok", "warn")
        assert finding.text
    assert checks.check_engine().state in ("ok", "warn")


def test_settings_that_are_not_defaults() -> None:
    settings = load_settings({"node": "x"}, environ={}, files=())
    assert checks.check_settings(settings).text == "node=x (--node)"


def test_the_command(run_dirs: RunDirs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in run_dirs.environ().items():
        if name.startswith("BAFTD_"):
            monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "does not run" in out
    assert "daemon: `baftd start`." in out
    run_dirs.run.mkdir()
    run_dirs.run.chmod(0o777)
    assert main(["doctor", "--json"]) == 5
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [finding["name"] for finding in document["findings"] if finding["state"] == "fail"] == [
        f"run directory ({run_dirs.run})"
    ]
