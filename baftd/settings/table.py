"""Every setting of baftd: name, type, default, unit and meaning, in one table.

The table is the dataclass itself: `baftd config show`, the flags of `baftd start` and the README's table are made
from it.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from baftd.settings.units import (
    Every,
    format_duration,
    format_share,
    format_size,
    parse_duration,
    parse_every,
    parse_share,
    parse_size,
    parse_steps,
)

__all__ = ["SETTINGS", "Setting", "Settings", "default_run_dir", "default_state_dir"]

T = TypeVar("T")

MAX_SOCKET_PATH = 106
"""Longest socket path in bytes: 108 in `sockaddr_un`, less the NUL and one that libzmq keeps."""


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    kind: str
    """What a value looks like: "path", "size", "duration", "interval", "steps", "number", or the choices."""
    parse: Callable[[Any], Any]
    """Raises ValueError with a sentence."""
    default: Any
    """Text of the default; or a function of the environment for those that depend on the user."""
    default_text: str
    help: str
    reader: str
    """Who reads it: "daemon", "trainer" or "both"."""
    show: Callable[[Any], str]

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"BAFTD_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """Name of the command-line flag."""
        return f"--{self.name.replace('_', '-')}"


def _setting(
    parse: Callable[[Any], T],
    default: str | Callable[[Mapping[str, str]], T],
    help: str,
    *,
    kind: str,
    reader: str = "daemon",
    default_text: str = "",
    show: Callable[[Any], str] = str,
) -> T:
    """A dataclass field that carries its row of the table."""
    meta = {
        "kind": kind,
        "parse": parse,
        "default": default,
        "default_text": default_text or (default if isinstance(default, str) else ""),
        "help": help,
        "reader": reader,
        "show": show,
    }
    if callable(default):
        made = default
        return field(default_factory=lambda: made(os.environ), metadata=meta)
    return field(default=parse(default), metadata=meta)


# ---------------------------------------------------------------- parsers without units


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError(f"{value!r} is not a path")
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise ValueError(f"{str(value)!r} is not an absolute path: daemon and trainers may run in other directories")
    return Path(os.path.normpath(path))


def _optional_path(value: object) -> Path | None:
    return None if value in ("", "off") else _path(value)


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _whole(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]+\s*", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{value!r} is not a whole number")
        if not low <= value <= high:
            raise ValueError(f"{value} is not between {low} and {high}")
        return value

    return parse


def _choice(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{value!r} is none of {', '.join(choices)}")
        return value

    return parse


def _slots(value: object) -> int | str:
    if value == "auto":
        return "auto"
    try:
        return _whole(2, 16)(value)
    except ValueError as error:
        raise ValueError(f'{error}; expected "auto" or the number of slots of one rank') from None


def _steps_or_off(value: object) -> int:
    if value in ("off", "0", 0) and not isinstance(value, bool):
        return 0
    try:
        return parse_steps(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "off"') from None


def _probe(value: object) -> int:
    """Of every step none would be left to compare with."""
    steps = _steps_or_off(value)
    if steps == 1:
        raise ValueError(f'{value!r} would leave every step without a snapshot; expected "2 steps" or more, or "off"')
    return steps


def _interval(value: object) -> Every | None:
    """None for "auto". Any number without a unit would do for steps and for seconds."""
    if value in ("auto", None):
        return None
    try:
        return parse_every(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "auto"') from None


def _rate(value: object) -> int:
    if isinstance(value, str):
        value = "0" if value == "off" else re.sub(r"\s*/\s*s\s*$", "", value)
    return parse_size(value)


def _node(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", value):
        raise ValueError(f"{value!r} is no name of a node: letters, digits, '.', '_' and '-', at most 253")
    return value


def _users(value: object) -> tuple[int, ...]:
    """Numbers of users from ["uid:1001", ...], "uid:1001,uid:1002" or ""."""
    items = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"{value!r} is not a list of users")
    users = []
    for item in items:
        match = re.fullmatch(r"\s*(?:uid:)?([0-9]{1,10})\s*", str(item)) if not isinstance(item, bool) else None
        if match is None or int(match[1]) >= (1 << 32) - 1:
            raise ValueError(f'{item!r} is not a user; expected "uid:1001"')
        users.append(int(match[1]))
    return tuple(dict.fromkeys(users))


_DEGREE = re.compile(r"[a-z]+=(?:[0-9]{1,9}|[a-z]+(?:-[a-z]+)*)")


def _parallel(value: object) -> str:
    """Text such as "tp=2,pp=2,dp=2"; what it says is checked where the number of ranks is known."""
    if value in ("", "off", None):
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text such as \"tp=2,pp=2,dp=2\"")
    words = [word.strip() for word in value.replace(";", ",").split(",") if word.strip()]
    for word in words:
        if not _DEGREE.fullmatch(word.replace(" ", "")):
            raise ValueError(f'{word!r} is not understood; expected degrees such as "tp=2,pp=2,dp=2"')
    return ",".join(word.replace(" ", "") for word in words)


def _redis(value: object) -> str:
    if value == "":
        return ""
    raise ValueError(
        "this version coordinates the ranks of one node and needs no Redis; several nodes are not in it yet"
    )


# ---------------------------------------------------------------- defaults that depend on the user


def default_run_dir(environ: Mapping[str, str]) -> Path:
    """/run/baftd for root, else $XDG_RUNTIME_DIR/baftd, else a directory of the user's own under /run/user or /tmp."""
    if os.geteuid() == 0:
        return Path("/run/baftd")
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        return Path(runtime) / "baftd"
    runtime = f"/run/user/{os.geteuid()}"
    return Path(runtime) / "baftd" if os.path.isdir(runtime) else Path(f"/tmp/baftd-{os.geteuid()}")


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """/var/lib/baftd for root, else $XDG_STATE_HOME/baftd, else ~/.local/state/baftd."""
    if os.geteuid() == 0:
        return Path("/var/lib/baftd")
    state = environ.get("XDG_STATE_HOME", "")
    return Path(state) / "baftd" if os.path.isabs(state) else Path("~/.local/state/baftd").expanduser()


def _default_node(environ: Mapping[str, str]) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).lstrip("._-")
    return name or "localhost"


def _show_size(value: int) -> str:
    return format_size(value)


def _show_flag(value: bool) -> str:
    return "true" if value else "false"


def _show_off(value: object) -> str:
    return str(value) if value else "off"


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one process, checked. `Settings()` holds the defaults; `load_settings` reads the sources."""

    run_dir: Path = _setting(
        _path, default_run_dir, "directory of socket, lock and log, mode 0700",
        kind="path", reader="both", default_text="`$XDG_RUNTIME_DIR/baftd`; root: `/run/baftd`",
    )  # fmt: skip
    state_dir: Path = _setting(
        _path, default_state_dir, "directory of history and manifests; must survive a reboot",
        kind="path", default_text="`~/.local/state/baftd`; root: `/var/lib/baftd`",
    )  # fmt: skip
    shm_dir: Path = _setting(_path, "/dev/shm", "tmpfs that holds the slots", kind="path")
    node: str = _setting(_node, _default_node, "name of this node", kind="name", default_text="host name")
    redis: str = _setting(
        _redis, "", "coordinator for several nodes; refused, this version coordinates one node",
        kind="address", default_text="off", show=_show_off,
    )  # fmt: skip
    clients: tuple[int, ...] = _setting(
        _users, "", 'other users whose training processes may join, such as `["uid:1001"]`',
        kind="users", default_text="none",
        show=lambda users: ", ".join(f"uid:{user}" for user in users) or "none",
    )  # fmt: skip

    interval: Every | None = _setting(
        _interval, "auto",
        "from one snapshot in memory to the next: steps or time; auto: the fewest steps that `overhead_budget` allows",
        kind="auto or interval", show=lambda interval: "auto" if interval is None else str(interval),
    )  # fmt: skip
    overhead_budget: float = _setting(
        parse_share, "1 %", "how much longer snapshots may make a step", kind="share", show=format_share
    )
    overhead_probe: int = _setting(
        _probe, "64 steps",
        "with `interval` auto one step in this many, at random, is left without a snapshot, to measure what they cost",
        kind="steps or off", show=lambda steps: str(Every(steps=steps)) if steps else "off",
    )  # fmt: skip
    slots: int | str = _setting(
        _slots, "auto", "slots of each rank; auto: 3, with a durable tier 4", kind="auto or number"
    )
    redundancy: str = _setting(
        _choice("replicas", "none"), "replicas",
        "replicas: every rank saves all it holds; none: of equal ranges of several ranks one rank saves each byte",
        kind="replicas or none",
    )  # fmt: skip
    memory_reserve: int = _setting(
        parse_size, "16 MiB", "room in `shm_dir` and in memory that slots leave free", kind="size", show=_show_size
    )
    memory_retention: float = _setting(
        parse_duration, "24 h", "how long slots of a crashed or unfinished job are kept",
        kind="duration", show=format_duration,
    )  # fmt: skip

    durable_dir: Path | None = _setting(
        _optional_path, "", "directory of durable checkpoints; off: the durable tier is off",
        kind="path or off", default_text="off", show=_show_off,
    )  # fmt: skip
    durable_every: Every = _setting(
        parse_every, "10 min", "how often a committed step is made durable: steps or time", kind="interval"
    )
    durable_keep: int = _setting(_whole(1, 1 << 20), "3", "newest durable checkpoints that are kept", kind="number")
    durable_keep_every: int = _setting(
        _steps_or_off, "off", "keep also every durable checkpoint whose step this number divides",
        kind="steps or off", show=lambda steps: str(Every(steps=steps)) if steps else "off",
    )  # fmt: skip
    durable_readback: bool = _setting(
        _flag, "false", "read each durable shard again before it counts", kind="true or false", show=_show_flag
    )
    durable_rate: int = _setting(
        _rate, "off", 'most bytes a second written to `durable_dir`, such as "500 MB/s"',
        kind="size/s or off", show=lambda rate: f"{format_size(rate)}/s" if rate else "off",
    )  # fmt: skip

    connect_timeout: float = _setting(
        parse_duration, "60 s", "how long `resume()` waits for a daemon before it raises",
        kind="duration", reader="trainer", show=format_duration,
    )  # fmt: skip
    rendezvous_timeout: float = _setting(
        parse_duration, "5 min", "how long a start of a job waits for all its ranks",
        kind="duration", show=format_duration,
    )  # fmt: skip
    restore_wait: float = _setting(
        parse_duration, "60 s", "how long a new start of a job waits for a live predecessor (then exit 75)",
        kind="duration", show=format_duration,
    )  # fmt: skip
    declare_timeout: float = _setting(
        parse_duration, "5 min", "how long a training process waits for its slots to be laid out",
        kind="duration", reader="trainer", show=format_duration,
    )  # fmt: skip
    strict: bool = _setting(
        _flag, "false", "raise in the training loop what is otherwise a skipped snapshot and a warning",
        kind="true or false", reader="trainer", show=_show_flag,
    )  # fmt: skip
    audit: int = _setting(
        _whole(0, 1 << 30), "0", "compare every byte of every N-th snapshot at the fence; 0: never",
        kind="number", reader="trainer",
    )  # fmt: skip
    engine: str = _setting(
        _choice("auto", "native", "python"), "auto", "copy engine; auto: native where its extension was built",
        kind="auto, native or python", reader="trainer",
    )  # fmt: skip

    parallel: str = _setting(
        _parallel, "", 'degrees of parallelism of the job, such as `"tp=2,pp=2,dp=2"`; where `attach()` is not told',
        kind="degrees or off", reader="trainer", default_text="off", show=_show_off,
    )  # fmt: skip

    log_level: str = _setting(
        _choice("debug", "info", "warning", "error"), "info", "least level of log lines of the daemon",
        kind="debug, info, warning or error",
    )  # fmt: skip
    log_format: str = _setting(
        _choice("logfmt", "json"), "logfmt", "form of the daemon's log lines", kind="logfmt or json"
    )

    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Setting name -> where its value came from ("--node", "BAFTD_NODE", "./baftd.toml:3"); missing: default."""

    @property
    def socket(self) -> Path:
        """The daemon's control socket."""
        return self.run_dir / "baftd.sock"

    @property
    def first_interval(self) -> int:
        """Steps between snapshots before anything was measured."""
        return self.interval.steps or 1 if self.interval is not None else 1

    def origin(self, name: str) -> str:
        """Where the value of `name` came from."""
        return self.origins.get(name, "default")

    def shown(self, name: str) -> str:
        """The value as text that the setting's parser reads back."""
        return SETTINGS[name].show(getattr(self, name))


SETTINGS: Mapping[str, Setting] = {
    entry.name: Setting(name=entry.name, **entry.metadata) for entry in fields(Settings) if entry.metadata
}
"""The table, in the order in which it is shown."""
