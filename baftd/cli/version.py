"""Print the version of this command, of the protocol, and of what it stands on."""

from __future__ import annotations

import argparse
import platform

from baftd import __version__
from baftd.cli.common import add_json, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd version`."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    from baftd.wire.messages import PROTOCOL

    if arguments.json:
        fields = {"baftd": __version__, "protocol": PROTOCOL, "python": platform.python_version()}
        print_json("version", {**fields, "machine": platform.machine()})
    else:
        print(f"baftd {__version__} (protocol {PROTOCOL}, Python {platform.python_version()}, {platform.machine()})")
    return 0
