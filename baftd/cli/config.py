"""Print every setting, its value and where the value comes from.

    baftd config show              values
    baftd config show --origin     values, and the flag, variable or file:line each one comes from
"""

from __future__ import annotations

import argparse

from baftd.cli.common import add_json, add_settings, print_json, settings_of
from baftd.cli.render import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baftd config`."""
    from baftd.settings import SETTINGS

    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print all settings", description=__doc__, allow_abbrev=False)
    show.formatter_class = argparse.RawDescriptionHelpFormatter
    form = show.add_mutually_exclusive_group()
    form.add_argument("--origin", action="store_true", help="print where each value comes from")
    form.add_argument("--markdown", action="store_true", help="print the table of all settings that the README has")
    add_json(form)
    add_settings(show, SETTINGS)


def markdown() -> str:
    """The table of all settings, for the README (a test holds the README to it)."""
    from baftd.settings import SETTINGS

    lines = ["| setting | value | default | read by | meaning |", "|---|---|---|---|---|"]
    for name, setting in SETTINGS.items():
        default = setting.default_text if "`" in setting.default_text else f"`{setting.default_text}`"
        lines.append(f"| `{name}` | {setting.kind} | {default} | {setting.reader} | {setting.help} |")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    from baftd.settings import SETTINGS

    settings = settings_of(arguments)
    if arguments.markdown:
        print(markdown())
    elif arguments.json:
        rows = [
            {
                "name": name,
                "value": settings.shown(name),
                "origin": settings.origin(name),
                "default": setting.default_text.replace("`", ""),
                "kind": setting.kind,
                "variable": setting.variable,
                "flag": setting.flag,
                "reader": setting.reader,
                "help": setting.help,
            }
            for name, setting in SETTINGS.items()
        ]
        print_json("settings", {"settings": rows, "socket": str(settings.socket)})
    elif arguments.origin:
        origins = [[name, settings.shown(name), settings.origin(name)] for name in SETTINGS]
        print_table(["setting", "value", "origin"], origins)
    else:
        print_table(
            ["setting", "value", "meaning"], [[name, settings.shown(name), s.help] for name, s in SETTINGS.items()]
        )
    return 0
