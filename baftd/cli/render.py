"""Text for people: tables, sizes, ages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["age", "complain", "print_table", "printable", "say", "size"]


def printable(text: str) -> str:
    """Lines hold text of others (reasons, names, paths): no control characters reach a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


def say(text: str) -> None:
    """Print one line."""
    print(printable(text))


def complain(text: str) -> None:
    """Print one line on stderr, in the form of all errors."""
    print(f"baftd: {printable(text)}", file=sys.stderr)


def size(count: int) -> str:
    """Bytes with three digits: "1.50 GiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{count} B"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def age(seconds: float) -> str:
    """A duration with its largest unit: "3 min", "2.5 h"."""
    for unit, factor, limit in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0)):
        if seconds < limit:
            value = seconds / factor
            return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print aligned columns; `right` names those that hold numbers. On a terminal long cells wrap, elsewhere a row is
    always one line."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    terminal = sys.stdout.isatty()
    table = Table(box=None, pad_edge=False, header_style="bold" if terminal else "", padding=(0, 2, 0, 0))
    for column in columns:
        justify = "right" if column in right else "left"
        table.add_column(column, justify=justify, no_wrap=not terminal, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    console = Console(file=sys.stdout, width=None if terminal else 4000, highlight=False, soft_wrap=False)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())
