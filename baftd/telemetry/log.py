"""Structured log lines: one line an event, logfmt or JSON, on top of the standard `logging` module.

    log = get_logger("daemon").bind(job="gpt", rank=3)
    log.info("sealed", step=1200, bytes=4096)

    2025-01-31T12:00:00.123Z level=info room=daemon event=sealed job=gpt rank=3 step=1200 bytes=4096

The loggers are `baftd.<room>` of the standard library, so a training process keeps its own configuration: where it
has none, warnings and errors reach stderr and nothing else is said. The daemon calls `configure` once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # cannot be subscripted before 3.11

__all__ = ["LEVELS", "Logger", "configure", "get_logger"]

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_FIRST = ("job", "rank", "step")
"""Fields that come first in a line, in this order, so that lines can be compared by eye."""

_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


class _Event:
    """A record's message: rendered only when a handler wants it."""

    __slots__ = ("fields", "name", "room")

    def __init__(self, room: str, name: str, fields: Mapping[str, object]) -> None:
        self.room = room
        self.name = name
        self.fields = fields

    def __str__(self) -> str:
        """Logfmt without time and level: what a foreign handler prints."""
        return _logfmt({"room": self.room, "event": self.name, **self.fields})


class Logger:
    """Writes events of one room; `bind` gives a logger whose events carry more fields. Thread-safe, never raises
    because of a field's value."""

    __slots__ = ("_bound", "_logger", "_room")

    def __init__(self, room: str, bound: Mapping[str, object] | None = None) -> None:
        self._room = room
        self._bound = dict(bound or {})
        self._logger = logging.getLogger(f"baftd.{room}")

    def bind(self, **fields: object) -> Logger:
        """A logger that adds `fields` to every event."""
        return Logger(self._room, {**self._bound, **fields})

    def enabled(self, level: str) -> bool:
        """Whether events of `level` go anywhere: for fields that are costly to compute."""
        return self._logger.isEnabledFor(LEVELS[level])

    def event(self, name: str, /, *, level: str = "info", **fields: object) -> None:
        """Write one event. `name` is a short verb or noun in snake case; None fields are left out."""
        self._write(LEVELS[level], name, fields, exception=False)

    def debug(self, name: str, /, **fields: object) -> None:
        """Write an event that only a developer wants."""
        self._write(logging.DEBUG, name, fields, exception=False)

    def info(self, name: str, /, **fields: object) -> None:
        """Write an event of normal life."""
        self._write(logging.INFO, name, fields, exception=False)

    def warning(self, name: str, /, **fields: object) -> None:
        """Write an event that somebody should look at; work goes on."""
        self._write(logging.WARNING, name, fields, exception=False)

    def error(self, name: str, /, **fields: object) -> None:
        """Write an event after which something asked for was not done."""
        self._write(logging.ERROR, name, fields, exception=False)

    def exception(self, name: str, /, **fields: object) -> None:
        """`error`, with the traceback of the exception being handled."""
        self._write(logging.ERROR, name, fields, exception=True)

    def _write(self, level: int, name: str, fields: Mapping[str, object], *, exception: bool) -> None:
        if not self._logger.isEnabledFor(level):
            return
        merged = {**self._bound, **fields}
        ordered = {key: merged[key] for key in _FIRST if merged.get(key) is not None}
        ordered.update((key, value) for key, value in merged.items() if key not in _FIRST and value is not None)
        self._logger.log(level, _Event(self._room, name, ordered), exc_info=exception, stacklevel=3)


def get_logger(room: str) -> Logger:
    """The logger of a room: "daemon", "memory", "wire", "client", "torch", ..."""
    return Logger(room)


def configure(
    *,
    level: str = "info",
    format: str = "logfmt",
    stream: TextIO | None = None,
    path: Path | None = None,
    max_bytes: int = 16 << 20,
) -> logging.Handler:
    """Send the events of this process to `stream` (default stderr) and nowhere else; for programs of ours only.

    `format` is "logfmt" or "json". With `path` they go to that file, and so does everything else written to stdout and
    stderr; a file that has grown past `max_bytes` is renamed to `<path>.1` and begun anew. May be called again: the
    previous handler of ours is replaced. Raises `OSError` when the file cannot be opened.
    """
    if level not in LEVELS or format not in ("logfmt", "json"):
        raise ValueError(f"no such log level or format: {level!r}, {format!r}")
    root = logging.getLogger("baftd")
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
        old.close()
    if path is not None:
        handler: _Handler = _FileHandler(path, max_bytes)
    else:
        handler = _Handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_JsonFormatter() if format == "json" else _LogfmtFormatter())
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    root.propagate = False
    return handler


class _Handler(_StreamHandler):
    """Marks the handler that `configure` installed. A closed or full log file must not end the daemon, nor
    print a traceback for every event."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - name given by logging
        """Say once a process that log lines are being lost."""
        if not getattr(_Handler, "_said", False):
            _Handler._said = True  # type: ignore[attr-defined]
            super().handleError(record)


class _FileHandler(_Handler):
    """Appends to a file, keeps one older one, and lets stdout and stderr follow (tracebacks of the interpreter)."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        super().__init__(self._open())

    def _open(self) -> TextIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        return os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; called with the handler's lock held."""
        super().emit(record)
        try:
            if os.fstat(self.stream.fileno()).st_size <= self._max_bytes:
                return
            os.replace(self._path, f"{self._path}.1")
            full, self.stream = self.stream, self._open()
            full.close()
        except (OSError, ValueError):
            self.handleError(record)

    def close(self) -> None:
        """Close the file; stdout and stderr go on into it."""
        super().close()
        self.stream.close()


class _LogfmtFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{_time(record.created)} {_logfmt(_fields(record))}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record.created), **_fields(record)}
        return json.dumps(line, default=str, ensure_ascii=False, separators=(",", ":"))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    line: dict[str, object] = {"level": record.levelname.lower()}
    if isinstance(record.msg, _Event):
        line.update(room=record.msg.room, event=record.msg.name)
        line.update((key if key not in line else f"field_{key}", value) for key, value in record.msg.fields.items())
    else:
        line.update(room=record.name, event="message", text=record.getMessage())
    if record.exc_info:
        line["traceback"] = logging.Formatter().formatException(record.exc_info)
    return {key: _plain(value) for key, value in line.items()}


def _plain(value: object) -> Any:
    """What a line can hold: JSON's scalars, lists and mappings of them; anything else as its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - a log line must not be the thing that fails
        return f"<{type(value).__name__}: str() raised {type(error).__name__}>"


def _logfmt(fields: Mapping[str, object]) -> str:
    return " ".join(f"{key}={_logfmt_value(value)}" for key, value in fields.items())


def _logfmt_value(value: object) -> str:
    plain = _plain(value)
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, list | dict):
        plain = json.dumps(plain, default=str, ensure_ascii=False)
    text = str(plain)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _time(seconds: float) -> str:
    """UTC with milliseconds: lines of several nodes can be sorted together."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds * 1000) % 1000:03d}Z"
