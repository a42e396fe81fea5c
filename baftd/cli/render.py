"""Text for people: tables, sizes, ages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["age", "print_table", "size"]


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
    from rich.table import Table

    terminal = sys.stdout.isatty()
    table = Table(box=None, pad_edge=False, header_style="bold" if terminal else "", padding=(0, 2, 0, 0))
    for column in columns:
        justify = "right" if column in right else "left"
        table.add_column(column, justify=justify, no_wrap=not terminal, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    console = Console(file=sys.stdout, width=None if terminal else 4000, highlight=False, soft_wrap=False)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _plain(cell: str) -> str:
    """Cells hold text of others (reasons, names): neither markup nor control characters of a terminal."""
    from rich.markup import escape

    return escape("".join(character if character.isprintable() else "�" for character in cell))
