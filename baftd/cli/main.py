"""`baftd VERB ...`: the parser, and what every error becomes.

Exit codes: 0 ok, 1 error, 2 usage, 3 nothing restorable, 4 verification failed, 5 degraded, 6 daemon or coordinator
unreachable, 75 try again, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from baftd import __version__
from baftd.cli.common import print_error
from baftd.errors import BaftError, UsageError

__all__ = ["build_parser", "main"]

VERBS = {
    "start": "start the daemon of this node",
    "stop": "end the daemon; training goes on",
    "status": "state of the daemon and its jobs",
    "list": "list checkpoints",
    "show": "show one step and its tensors",
    "trace": "write a timeline of a job's steps",
    "verify": "recompute digests of checkpoints",
    "plan": "what checkpoints of a job cost and survive",
    "restore": "fix from where a job goes on, or export a checkpoint",
    "gc": "remove slots and checkpoints that nobody needs",
    "doctor": "check this machine, its settings and its daemon",
    "config": "show the settings and where each value comes from",
    "version": "print versions",
}
"""Each one is a module of this package with `add_arguments(parser)` and `run(arguments) -> exit code`."""

_EPILOG = """\
exit codes: 0 ok, 1 error, 2 usage, 3 nothing restorable, 4 verification failed, 5 degraded,
            6 daemon or coordinator unreachable, 75 try again
settings:   `baftd config show --origin` prints all of them and where each value comes from
"""


class _Parser(argparse.ArgumentParser):
    """Mistakes in the arguments are errors like all others. Raises UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removesuffix('.')}.", hint=f"`{self.prog} --help` shows what it takes.")


def build_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """All verbs, and the arguments of `verb`: the other modules are not even imported."""
    parser = _Parser(
        prog="baftd",
        description="A checkpoint daemon for distributed training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"baftd {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for name, text in VERBS.items():
        added = verbs.add_parser(name, help=text, allow_abbrev=False)
        if name == verb:
            module = importlib.import_module(f"baftd.cli.{'listing' if name == 'list' else name}")
            added.description = module.__doc__
            added.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(added)
            added.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
        near = difflib.get_close_matches(arguments[0], VERBS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(VERBS)}."
        print(f"baftd: there is no verb {arguments[0]!r}. {hint}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names are any Unicode; a terminal that cannot show them gets their escapes, not a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        parsed, unknown = build_parser(arguments[0] if arguments else None).parse_known_args(arguments)
        if unknown:
            hint = f"`baftd {parsed.verb} --help` shows what it takes."
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}.", hint=hint)
        code = int(parsed.run(parsed))
        sys.stdout.flush()
        return code
    except BaftError as error:
        print_error(error, as_json="--json" in arguments)
        return error.exit_code
    except KeyboardInterrupt:
        print("baftd: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`baftd list | head`): nothing more to say, and nothing for the interpreter to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
