"""Table output: wrapped to the terminal's width; plain, with full cells, when piped."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

COMFORTABLE = 30  # characters that the last column keeps while others can still shrink


def print_table(rows: Sequence[Sequence[str]], indent: str = "", *, headed: bool = False) -> None:
    """Print rows of equally many cells; `headed`: the first row is the header."""
    if sys.stdout is not None and sys.stdout.isatty():
        from rich.console import Console  # here, since it imports slowly

        console = Console(highlight=False)
        widths = fitting_widths(rows, console.width - len(indent))
        if widths is not None:
            _print_wrapped(console, rows, widths, len(indent), headed)
            return
    _print_plain(rows, indent)


def fitting_widths(rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Return the width of each column such that no word is broken and two spaces fit between columns; None if `room` is too small for that."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    last = len(columns) - 1
    excess = sum(widths) + 2 * last - room
    others = [(column, words[column]) for column in range(last - 1, -1, -1)]
    for column, least in [(last, max(words[last], COMFORTABLE)), *others, (last, words[last])]:
        cut = max(0, min(excess, widths[column] - least))
        widths[column] -= cut
        excess -= cut
    return widths if excess <= 0 else None


def _print_wrapped(console: object, rows: Sequence[Sequence[str]], widths: Sequence[int], indent: int, headed: bool) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=headed, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading, width in zip(rows[0], widths, strict=True):
        table.add_column(Text(heading), width=width)
    for row in rows[headed:]:
        table.add_row(*map(Text, row))
    console.print(Padding(table, (0, 0, 0, indent)))  # type: ignore[attr-defined]


def _print_plain(rows: Sequence[Sequence[str]], indent: str) -> None:
    """Print columns as wide as their widest cell; the last isn't padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo((indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip())
