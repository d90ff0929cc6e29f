"""Input and output of the command: prints any text, reports a full disk, and exits quietly on a
broken pipe. Tables are wrapped to the terminal's width, and plain, with full cells, when piped."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer

from dovetail.errors import ConfigError, DovetailError

COMFORTABLE = 30  # characters that the last column keeps while others can still shrink


class OutputError(DovetailError):
    """Standard output can't be written to."""


class _Output(io.TextIOWrapper):
    """Standard output whose write errors are distinguishable from those of other files. Once it has
    failed, every write fails."""

    _failure: OSError | None = None

    def write(self, text: str) -> int:
        try:
            if self._failure is not None:
                raise self._failure
            return super().write(text) if text != "" else 0
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        self._failure = error
        discard(self)
        if error.errno == errno.EPIPE:  # the reader has read enough, as with `| head`
            raise typer.Exit(0) from None
        raise OutputError(
            f"standard output can't be written to: {error.strerror or error}"
        ) from None


def guard_output() -> None:
    """Make failed writes to standard output raise `OutputError`, or end the command with exit code
    0 if the reader has gone."""
    old = sys.stdout
    if type(old) is io.TextIOWrapper:  # None if it was closed before we began
        encoding = old.encoding
        by_line = old.line_buffering
        at_once = old.write_through
        sys.stdout = sys.__stdout__ = _Output(  # type: ignore[misc]
            old.detach(), encoding=encoding, line_buffering=by_line, write_through=at_once
        )


def make_any_text_printable() -> None:
    """Escape characters that a stream's encoding lacks, such as lone surrogates."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(
            AttributeError, ValueError
        ):  # None, or another object in a program that calls us
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def tell(text: str) -> None:
    """Print to standard error, or nothing if that fails."""
    try:
        typer.echo(text, err=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO | None) -> None:
    """Redirect a stream to the null device, so that Python doesn't complain on exit."""
    with suppress(AttributeError, OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


def echo_json(value: Any, indent: int | None = None) -> None:
    """Print as JSON; characters that the terminal's encoding doesn't have are printed as
    escapes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=indent)
    typer.echo(text)


def read_text(name: str, option: str) -> str:
    """Return the text of a file, or of standard input for "-". Raises `ConfigError` naming the
    option that asked for it."""
    try:
        if name != "-":
            return Path(name).read_text(encoding="utf-8-sig")
        if sys.stdin is None:
            raise OSError("it is closed")
        return sys.stdin.read()
    except (OSError, ValueError) as error:
        place = "standard input" if name == "-" else name
        raise ConfigError(
            f"{option}: {place}: can't be read: {getattr(error, 'strerror', None) or error}"
        ) from None


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
    """Return the width of each column such that no word is broken and two spaces fit between
    columns; None if `room` is too small for that."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [
        max((len(word) for cell in column for word in cell.split()), default=0)
        for column in columns
    ]
    last = len(columns) - 1
    excess = sum(widths) + 2 * last - room
    others = [(column, words[column]) for column in range(last - 1, -1, -1)]
    for column, least in [(last, max(words[last], COMFORTABLE)), *others, (last, words[last])]:
        cut = max(0, min(excess, widths[column] - least))
        widths[column] -= cut
        excess -= cut
    return widths if excess <= 0 else None


def _print_wrapped(
    console: object, rows: Sequence[Sequence[str]], widths: Sequence[int], indent: int, headed: bool
) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, show_header=headed, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold"
    )
    for heading, width in zip(rows[0], widths, strict=True):
        table.add_column(Text(heading), width=width)
    for row in rows[headed:]:
        table.add_row(*map(Text, row))
    console.print(Padding(table, (0, 0, 0, indent)))  # type: ignore[attr-defined]


def _print_plain(rows: Sequence[Sequence[str]], indent: str) -> None:
    """Print columns as wide as their widest cell; the last isn't padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo(
            (
                indent
                + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            ).rstrip()
        )
