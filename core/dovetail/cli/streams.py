"""Input and output of the command: prints any text, reports a full disk, and exits quietly on a broken pipe."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer

from dovetail.errors import ConfigError, DovetailError


class OutputError(DovetailError):
    """Standard output can't be written to."""


class _Output(io.TextIOWrapper):
    """Standard output whose write errors are distinguishable from those of other files. Once it has failed, every write fails."""

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
        raise OutputError(f"standard output can't be written to: {error.strerror or error}") from None


def guard_output() -> None:
    """Make failed writes to standard output raise `OutputError`, or end the command with exit code 0 if the reader has gone."""
    old = sys.stdout
    if type(old) is io.TextIOWrapper:  # None if it was closed before we began
        encoding, by_line, at_once = old.encoding, old.line_buffering, old.write_through
        sys.stdout = sys.__stdout__ = _Output(old.detach(), encoding=encoding, line_buffering=by_line, write_through=at_once)  # type: ignore[misc]


def make_any_text_printable() -> None:
    """Escape characters that a stream's encoding lacks, such as lone surrogates."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # None, or another object in a program that calls us
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
    """Print as JSON; characters that the terminal's encoding doesn't have are printed as escapes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=indent)
    typer.echo(text)


def read_text(name: str, option: str) -> str:
    """Return the text of a file, or of standard input for "-". Raises `ConfigError` naming the option that asked for it."""
    try:
        if name != "-":
            return Path(name).read_text(encoding="utf-8-sig")
        if sys.stdin is None:
            raise OSError("it is closed")
        return sys.stdin.read()
    except (OSError, ValueError) as error:
        place = "standard input" if name == "-" else name
        raise ConfigError(f"{option}: {place}: can't be read: {getattr(error, 'strerror', None) or error}") from None
