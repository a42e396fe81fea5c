"""Settings: sources and their order, origins, and errors that name file:line, variable or flag."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baftd.errors import SettingsError
from baftd.settings import SETTINGS, Every, Settings, load_settings

ETC, HERE = "etc.toml", "./baftd.toml"


class Machine:
    """Two files, an environment, flags."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def load(self, flags: Mapping[str, Any] | None = None, **environ: str) -> Settings:
        return load_settings(flags, environ=environ, cwd=self.directory, files=(ETC, HERE))

    def refusal(self, flags: Mapping[str, Any] | None = None, **environ: str) -> str:
        with pytest.raises(SettingsError) as caught:
            self.load(flags, **environ)
        assert caught.value.exit_code == 2
        return str(caught.value)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_defaults(machine: Machine) -> None:
    settings = machine.load()
    assert settings.durable_dir is None
    assert settings.durable_every == Every(seconds=600)
    assert settings.interval is None
    assert settings.overhead_budget == 0.01
    assert settings.overhead_probe == 64
    assert settings.slots == "auto"
    assert settings.origin("slots") == "default"
    assert settings.socket == settings.run_dir / "baftd.sock"
    assert settings == Settings(**{name: getattr(settings, name) for name in SETTINGS})


def test_order_of_the_sources(machine: Machine) -> None:
    machine.write("etc.toml", 'node = "etc"\nshm_dir = "/etc-shm"\nslots = 5\naudit = 5\n')
    machine.write("baftd.toml", '\nnode = "here"\nslots = 4\naudit = 4\n')
    settings = machine.load({"node": "flag", "audit": None}, BAFTD_NODE="variable", BAFTD_SLOTS="3")
    assert (settings.node, settings.origin("node")) == ("flag", "--node")
    assert (settings.slots, settings.origin("slots")) == (3, "BAFTD_SLOTS")
    assert (settings.audit, settings.origin("audit")) == (4, "./baftd.toml:4")
    assert (settings.shm_dir, settings.origin("shm_dir")) == (Path("/etc-shm"), "etc.toml:2")
    assert settings.origin("engine") == "default"


def test_tables_are_another_way_to_write_names(machine: Machine) -> None:
    machine.write(
        "baftd.toml",
        '# comment\noverhead = { budget = "2 %" }\n[durable]\ndir = "/ckpt"\n\nevery = "100 steps"  # often\n'
        "keep_every = 1000\n",
    )
    settings = machine.load()
    assert settings.durable_dir == Path("/ckpt")
    assert settings.durable_every == Every(steps=100)
    assert settings.durable_keep_every == 1000
    assert settings.overhead_budget == 0.02
    assert settings.origin("durable_every") == "./baftd.toml:6"
    assert settings.origin("overhead_budget") == "./baftd.toml:2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('nod = "x"', ["./baftd.toml:1", "'nod'", "Did you mean 'node'?"]),
        ('\n\n[durable]\nevry = "1 min"', ["./baftd.toml:4", "'durable_evry'", "Did you mean 'durable_every'?"]),
        ('[zebra]\nstripes = 3', ["./baftd.toml:2", "'zebra_stripes'", "baftd config show"]),
        ('durable_every = "10 parsecs"', ["./baftd.toml:1", "durable_every", "'parsecs'", "10 min"]),
        ("durable_every = 10", ["./baftd.toml:1", "no unit"]),
        ("interval = 3", ["./baftd.toml:1", "interval", "no unit", '"auto"']),
        ('interval = "0 steps"', ["interval", "positive"]),
        ("overhead_budget = 0.01", ["./baftd.toml:1", "overhead_budget", "1 %"]),
        ('overhead_budget = "0 %"', ["overhead_budget", "above 0 %"]),
        ('overhead_probe = "10 min"', ["overhead_probe", "counted in steps"]),
        ('overhead_probe = "1 step"', ["./baftd.toml:1: overhead_probe: '1 step' would leave every step", '"off"']),
        ("overhead_probe = 1", ["1 would leave every step without a snapshot", '"2 steps" or more']),
        ('overhead_probe = "often"', ["'often' is not a number", '"100 steps", or "off"']),
        ("overhead_probe = 64.0", ["64.0 is not a whole number of steps"]),
        ('overhead_probe = "9999999999999999 steps"', ["more than 9,007,199,254,740,991 steps"]),
        ('interval = "9999999999999999 steps"', ["more than 9,007,199,254,740,991 steps"]),
        ('interval = "1.5 steps"', ["interval", "not a whole number of steps"]),
        ('memory_reserve = "4 min"', ["./baftd.toml:1", "memory_reserve", "'min'", "GiB"]),
        ("slots = 1", ["slots", "not between 2 and 16"]),
        ("slots = 2.5", ["slots", "not a whole number"]),
        ('shm_dir = "shm"', ["shm_dir", "not an absolute path"]),
        ("strict = 1.0", ["strict", "neither true nor false"]),
        ('engine = "fast"', ["engine", "none of auto, native, python"]),
        ('parallel = "tp=2,pp"', ["parallel", "'pp'", "tp=2,pp=2,dp=2"]),
        ("parallel = 8", ["parallel", "8 is not a text"]),
        ('clients = ["bob"]', ["clients", "'bob'", "uid:1001"]),
        ('clients = "uid:4294967295"', ["clients"]),
        ('node = "a b"', ["node", "no name of a node"]),
        ('redis = "redis://x"', ["redis", "one node", "not in it yet"]),
        ("origins = 1", ["'origins'"]),
        ('node = "a"\n[durable]\nkeep = 2\n', []),
        ('durable_keep = 2\n[durable]\nkeep = 2\n', ["second time", "./baftd.toml:1", "./baftd.toml:3"]),
        ("node = a", ["./baftd.toml:1", "not TOML", "quotes"]),
        ("x = 1\ny = [1,\n", ["./baftd.toml", "not TOML"]),
        ('node = "a"\nnode = "b"\n', ["./baftd.toml:2", "not TOML"]),
    ],
)
def test_mistakes_in_a_file(machine: Machine, text: str, words: list[str]) -> None:
    machine.write("baftd.toml", text)
    if not words:
        machine.load()
        return
    refusal = machine.refusal()
    for word in words:
        assert word in refusal


def test_mistakes_in_variables_and_flags(machine: Machine) -> None:
    refusal = machine.refusal(BAFTD_DURABEL_DIR="/ckpt")
    assert "'BAFTD_DURABEL_DIR'" in refusal
    assert "Did you mean 'BAFTD_DURABLE_DIR'?" in refusal
    assert "BAFTD_RESTORE_WAIT" in machine.refusal(BAFTD_RESTORE_WAIT="soon")
    assert "--restore-wait" in machine.refusal({"restore_wait": "12"})
    assert "Did you mean 'node'" in machine.refusal({"nodes": "x"})
    assert machine.load(BAFTD_INCARNATION="0" * 32) == machine.load()
    assert machine.load(OTHER="1", PATH="/bin").origins == {}


def test_a_flag_and_a_variable_are_named_once(machine: Machine) -> None:
    assert machine.refusal({"interval": "3"}).startswith("--interval: '3' has no unit: steps or time?")
    assert machine.refusal(BAFTD_INTERVAL="3").startswith("BAFTD_INTERVAL: '3' has no unit: steps or time?")


def test_the_fewest_steps_between_probes(machine: Machine) -> None:
    assert machine.load({"overhead_probe": "2 steps"}).overhead_probe == 2
    assert machine.load({"overhead_probe": "64"}).overhead_probe == 64
    assert machine.load({"durable_keep_every": "every step"}).durable_keep_every == 1


def test_not_utf8_names_the_line(machine: Machine) -> None:
    (machine.directory / "baftd.toml").write_bytes(b'# ok\nnode = "\xff"\n')
    assert "./baftd.toml:2" in machine.refusal()


def test_unreadable_and_huge_files(machine: Machine) -> None:
    (machine.directory / "baftd.toml").mkdir()
    assert "cannot be read" in machine.refusal()
    (machine.directory / "baftd.toml").rmdir()
    machine.write("baftd.toml", "# padding\n" * 200_000)
    assert "larger than 1 MiB" in machine.refusal()


def test_the_socket_path_must_fit(machine: Machine) -> None:
    refusal = machine.refusal({"run_dir": "/tmp/" + "x" * 100})
    assert "bytes" in refusal
    assert "--run-dir" in refusal
    fits = "/tmp/" + "x" * (106 - len("/tmp/") - len("/baftd.sock"))
    assert len(os.fsencode(machine.load({"run_dir": fits}).socket)) == 106


def test_every_setting_is_described_typed_and_reads_back(machine: Machine) -> None:
    settings = machine.load()
    assert [entry.name for entry in dataclasses.fields(Settings)][:-1] == list(SETTINGS)
    for name, setting in SETTINGS.items():
        assert setting.help
        assert setting.kind
        assert setting.default_text
        assert setting.reader in ("daemon", "trainer", "both")
        shown = settings.shown(name)
        if shown not in ("none",) and name != "redis":
            assert setting.parse(shown) == getattr(settings, name), name


def test_values_of_every_kind_read_back(machine: Machine) -> None:
    given = {
        "clients": ["uid:1001", "1002", "uid:1001"],
        "durable_rate": "500 MB/s",
        "durable_keep_every": "every 100 steps",
        "memory_retention": "36 h",
        "strict": "yes",
        "slots": "6",
        "durable_dir": "/a/../b",
        "interval": "every 3 steps",
        "overhead_budget": "0.25%",
        "overhead_probe": "off",
    }
    settings = machine.load(given)
    assert settings.clients == (1001, 1002)
    assert settings.durable_rate == 500_000_000
    assert settings.durable_dir == Path("/b")
    assert (settings.interval, settings.overhead_budget, settings.overhead_probe) == (Every(steps=3), 0.0025, 0)
    again = machine.load({name: settings.shown(name) for name in given})
    assert again == settings


def test_defaults_depend_on_the_user(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    settings = machine.load(XDG_RUNTIME_DIR="/run/user/0")
    assert (str(settings.run_dir), str(settings.state_dir)) == ("/run/baftd", "/var/lib/baftd")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    settings = machine.load(XDG_RUNTIME_DIR="/run/user/12345", XDG_STATE_HOME="/state/of/u")
    assert (str(settings.run_dir), str(settings.state_dir)) == ("/run/user/12345/baftd", "/state/of/u/baftd")
    settings = machine.load(XDG_RUNTIME_DIR="relative")
    assert str(settings.run_dir) == "/tmp/baftd-12345"


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().node = "x"  # type: ignore[misc]


def test_degrees_of_parallelism_are_kept_as_they_were_said(machine: Machine) -> None:
    settings = machine.load(BAFTD_PARALLEL="tp=2, pp = 2,order=tp-cp-ep-dp-pp")
    assert settings.parallel == "tp=2,pp=2,order=tp-cp-ep-dp-pp"
    assert machine.load(BAFTD_PARALLEL=settings.shown("parallel")).parallel == settings.parallel
    assert machine.load(BAFTD_PARALLEL="off").shown("parallel") == machine.load().shown("parallel") == "off"
