"""Reading settings from flags, variables and files; every mistake names its line or variable."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baftd.errors import SettingsError
from baftd.settings.table import MAX_SOCKET_PATH, SETTINGS, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["FILES", "OTHER_VARIABLES", "load_settings"]

FILES = ("/etc/baftd/baftd.toml", "./baftd.toml")
"""Files that are read, later ones over earlier ones; `./` is relative to the working directory."""

OTHER_VARIABLES = frozenset({"BAFTD_INCARNATION"})
"""Variables of ours that are not settings: they differ at every start of a job."""

_MAX_FILE = 1 << 20

_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""


def load_settings(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    files: Sequence[str | os.PathLike[str]] | None = None,
) -> Settings:
    """Read all sources and return the checked settings.

    `flags` maps setting names to text (or already typed values); a None value is a flag that was not given.
    Raises `SettingsError` naming the file and line, the variable or the flag.
    """
    environ = os.environ if environ is None else environ
    directory = Path(cwd) if cwd is not None else Path()
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def take(name: str, value: object, origin: str) -> None:
        try:
            values[name] = SETTINGS[name].parse(value)
        except ValueError as error:
            named = origin in (SETTINGS[name].flag, SETTINGS[name].variable)  # a file's line does not say the name
            raise SettingsError(f"{origin if named else f'{origin}: {name}'}: {error}.", hint=_see(name)) from None
        origins[name] = origin

    for file in FILES if files is None else files:
        for key, value, origin in _read_file(directory / file, str(file)):
            take(_known(key, list(SETTINGS), f"{origin}: there is no setting"), value, origin)
    variables = {setting.variable: setting.name for setting in SETTINGS.values()}
    for variable in sorted(environ):
        if variable.startswith("BAFTD_") and variable not in OTHER_VARIABLES:
            known = _known(variable, [*variables, *OTHER_VARIABLES], "there is no variable")
            take(variables[known], environ[variable], variable)
    for key, value in (flags or {}).items():
        if value is not None:
            name = _known(key, list(SETTINGS), "there is no setting")
            take(name, value, SETTINGS[name].flag)
    for name, setting in SETTINGS.items():
        if name not in values and callable(setting.default):
            values[name] = setting.default(environ)
    settings = Settings(**values, origins=origins)
    _check_socket(settings)
    return settings


def _see(name: str) -> str:
    setting = SETTINGS[name]
    return f"({setting.help}; default {setting.default_text.replace('`', '')})"


def _known(key: str, known: Sequence[str], what: str) -> str:
    """`key` if it is known, else a SettingsError with the nearest known one."""
    if key in known:
        return key
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower().replace("-", "_").replace(".", "_"), folded, n=1, cutoff=0.6)
    hint = f"Did you mean {folded[near[0]]!r}?" if near else "`baftd config show` lists all settings."
    raise SettingsError(f"{what} {key!r}.", hint=hint)


def _read_file(path: Path, shown: str) -> Iterator[tuple[str, object, str]]:
    """(setting name, value, "file:line") of each key of one file; nothing where there is no such file."""
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        problem = f"{shown}: cannot be read: {error.strerror}."
        raise SettingsError(problem, hint="Remove it or make it readable.") from error
    if len(data) > _MAX_FILE:
        raise SettingsError(f"{shown}: larger than 1 MiB; this is no settings file.")
    try:
        text = data.decode()
        tree = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(f"{shown}:{line}: not UTF-8 at byte {error.start}.") from None
    except tomllib.TOMLDecodeError as error:
        line_of = re.search(r"at line (\d+)", str(error))
        where = f"{shown}:{line_of[1]}" if line_of else shown
        hint = 'Texts and values with a unit stand in quotes: "10 min".'
        raise SettingsError(f"{where}: not TOML: {error}.", hint=hint) from None
    lines = _lines_of_keys(text)
    seen: dict[str, str] = {}
    for dotted, value in _flatten(tree):
        origin = f"{shown}:{lines.get(dotted, 1)}"
        name = dotted.replace(".", "_")
        if name in seen:
            problem = f"{origin}: {name} is set a second time; first at {seen[name]}."
            raise SettingsError(problem, hint="Keep one of them.")
        seen[name] = origin
        yield name, value, origin


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Keys with dots: `[durable] every = ...` is `durable.every`, another way to write `durable_every`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _lines_of_keys(text: str) -> dict[str, int]:
    """Dotted key -> line number. A scan for people, run on a text that is known to be TOML: a key inside a string of
    several lines can at worst give a wrong number in a message."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([^\]\[]+?)\s*\]\s*(#.*)?$", line)
        if header:
            table = _bare(header[1]) + "."
            found.setdefault(table[:-1], number)
            continue
        key = re.match(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=", line)
        if key:
            name = table + _bare(key[1])
            found.setdefault(name, number)
            for inner in re.finditer(r"([A-Za-z0-9_-]+)\s*=", line[key.end() :]):  # inline table
                found.setdefault(f"{name}.{inner[1]}", number)
    return found


def _bare(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _check_socket(settings: Settings) -> None:
    length = len(os.fsencode(settings.socket))
    if length > MAX_SOCKET_PATH:
        raise SettingsError(
            f"{settings.origin('run_dir')}: the socket's path {settings.socket} has {length} bytes; the kernel takes "
            f"{MAX_SOCKET_PATH}.",
            hint="Choose a shorter run_dir.",
        )
