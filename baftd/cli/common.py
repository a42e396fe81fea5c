"""What the verbs share: settings flags, the connection, answers as JSON, errors as sentences."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from baftd.cli.render import complain, printable
from baftd.errors import BaftError, ProtocolError, UsageError
from baftd.limits import LARGEST

if TYPE_CHECKING:
    from baftd.settings import Settings
    from baftd.wire.client import Connection
    from baftd.wire.messages import Progress, ResumeProgress

__all__ = [
    "JSON_VERSION",
    "MOST_STEP",
    "ProgressLine",
    "add_json",
    "add_settings",
    "ask",
    "connect",
    "job_name",
    "only_job",
    "positive",
    "print_error",
    "print_json",
    "settings_of",
    "step_number",
]

JSON_VERSION = 1
"""Of every document that `--json` prints. Fields are added under the same number; a field that changes its meaning or
goes raises it."""

MOST_STEP = LARGEST
"""Messages hold no larger numbers."""

R = TypeVar("R")


# ---------------------------------------------------------------- arguments


def add_json(parser: argparse._ActionsContainer) -> None:
    """`--json`, for verbs that read."""
    parser.add_argument("--json", action="store_true", help="print one JSON document (versioned) instead of text")


def add_settings(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """A flag for each of these settings."""
    from baftd.settings import SETTINGS

    group = parser.add_argument_group("settings (flag > BAFTD_* > ./baftd.toml > /etc/baftd/baftd.toml > default)")
    for name in names:
        setting = SETTINGS[name]
        several = "," in setting.kind or " or " in setting.kind
        form = f" ({setting.kind})" if several else ""
        text = f"{setting.help}{form} [{setting.default_text.replace('`', '')}]".replace("%", "%%")
        metavar = "VALUE" if several else setting.kind.upper()
        group.add_argument(setting.flag, dest=f"setting_{name}", metavar=metavar, help=text)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings with this command's flags on top."""
    from baftd.settings import load_settings

    prefix = "setting_"
    given = {key[len(prefix) :]: value for key, value in vars(arguments).items() if key.startswith(prefix)}
    return load_settings(given)


def step_number(text: str) -> int:
    """Argument type: a step, 0 or greater."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: a whole number, 0 or greater")
    if len(text.lstrip("0")) > len(str(MOST_STEP)) or int(text) > MOST_STEP:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: no job gets as far as that")
    return int(text)


def positive(text: str) -> float:
    """Argument type: a duration with a unit, as seconds."""
    from baftd.settings import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def job_name(text: str) -> str:
    """Argument type: a job's name."""
    from baftd.checkpoint.identity import check_job_name
    from baftd.errors import JobNameError

    try:
        return check_job_name(text)
    except JobNameError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# ---------------------------------------------------------------- the daemon


def connect(settings: Settings, *, timeout: float = 5.0) -> Connection:
    """A connection to the node's daemon; `Unreachable` shows at the first request."""
    from baftd.wire.client import Connection

    return Connection(settings.socket, connect_timeout=timeout)


def ask(connection: Connection, message: Any, kind: type[R], *, timeout: float = 30.0, progress: Any = None) -> R:
    """The answer to `message`, which must be a `kind`. Raises what the daemon answered with."""
    reply = connection.request(message, timeout, on_progress=progress)
    if not isinstance(reply, kind):
        raise ProtocolError(
            f"the daemon answered {type(message).__name__} with {type(reply).__name__}, not {kind.__name__}.",
            field="type",
            hint="Do daemon and command have the same version? `baftd doctor` compares them.",
        )
    return reply


def only_job(connection: Connection) -> str:
    """The one job of this node. Raises `UsageError` where there are several, `BaftError` where there is none."""
    from baftd.wire.messages import StatusReply, StatusRequest

    jobs = [job.job for job in ask(connection, StatusRequest(job=None), StatusReply).jobs]
    if not jobs:
        raise BaftError("no job runs on this node.", hint="`baftd list` shows the checkpoints that there are.")
    if len(jobs) > 1:
        raise UsageError(f"there are several jobs on this node: {', '.join(jobs)}.", hint="Name one with --job.")
    return jobs[0]


class ProgressLine:
    """Shows the parts of a long answer on stderr: a line that rewrites itself on a terminal, else a line a change."""

    def __init__(self, *, silent: bool = False) -> None:
        self._silent = silent
        self._live = sys.stderr.isatty()
        self._last = ""
        self._open = False

    def __call__(self, part: Progress | ResumeProgress) -> None:
        """Show a part of the daemon's answer."""
        from baftd.wire.messages import Progress

        if isinstance(part, Progress):
            self.show(part.what, part.done, part.total)

    def show(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` (0: unknown) is done of `what`."""
        if self._silent:
            return
        if self._live:
            text = f"{printable(what)} {100 * done // total:3d} %" if total else printable(what)
            if text != self._last:
                sys.stderr.write(f"\r\x1b[K{text}")
            self._last, self._open = text, True
        elif what != self._last:
            sys.stderr.write(f"{printable(what)}\n")
            self._last = what
        sys.stderr.flush()

    def close(self) -> None:
        """Leave the line clean."""
        if self._open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._open = False


# ---------------------------------------------------------------- output


def print_json(kind: str, fields: Mapping[str, Any]) -> None:
    """One document: `{"version": 1, "kind": kind, ...}`; a field "version" of a reply is the daemon's."""
    renamed = {"daemon_version" if name == "version" else name: value for name, value in fields.items()}
    document = {"version": JSON_VERSION, "kind": kind, **renamed}
    unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    print(json.dumps(document, indent=2, ensure_ascii=not unicode))


def fields_of(reply: Any) -> dict[str, Any]:
    """A message as plain values, without what only the wire needs."""
    import msgspec

    plain = msgspec.to_builtins(reply)
    return {key: value for key, value in plain.items() if key not in ("type", "protocol", "id")}


def print_error(error: BaftError, *, as_json: bool) -> None:
    """The sentence on stderr; with `as_json` also a document on stdout, so that a reader always finds one there."""
    complain(str(error))
    if as_json:
        field = {"field": error.field} if isinstance(error, ProtocolError) and error.field else {}
        problem = {"code": error.code, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        print_json("error", {"error": {**problem, **field}})
