"""Write a command's files atomically."""

from __future__ import annotations

import csv
import io
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from dovetail.errors import ConfigError

Cell = str | int | float | None


def make_folder(out: Path) -> None:
    """Create the output folder. Called before the runs, so that no results are lost. Raises
    `ConfigError` if it can't be created or written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out: {out}: can't be created or written to: {error.strerror}"
        ) from None


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Replace the file atomically. Text is UTF-8.

    Raises `ConfigError`.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from None
    finally:
        if unfinished.exists():
            unfinished.unlink()


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return CSV with numbers in full precision; NaN and None are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(
        [None if isinstance(cell, float) and math.isnan(cell) else cell for cell in row]
        for row in rows
    )
    return text.getvalue()
