"""`Results`: the figures of finished runs in a file of JSON lines, appended after each run, so that a stopped leaderboard can be resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail_lab.leaderboard.board import VERSION, BoardRun, Entry, Figures, fingerprint

FILE = "runs.jsonl"

Key = tuple[str, str, str, int, str]


class Results:
    """The results in `folder`, which must exist. Runs of another board, another version of a scheduler or other requests are ignored.

    Raises `ConfigError` for a file that isn't such results. An incomplete last line, left by a killed process, is dropped.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._figures: dict[Key, Figures] = {}
        try:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                self._path.write_text(whole, encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{self._path}: can't be read or written: {getattr(error, 'strerror', None) or error}") from None
        for number, line in enumerate(whole.splitlines(), 1):
            self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        try:
            row = json.loads(line)
            if row["board"] != VERSION:
                return
            values: dict[str, Any] = {name: math.nan if value is None else value for name, value in row["figures"].items()}
            self._figures[row["scheduler"], row["digest"], row["trace"], row["seed"], row["requests"]] = Figures(**values)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{self._path}:{number}: no result of a leaderboard: move the file away, or choose another --out") from None

    def of(self, entry: Entry, run: BoardRun) -> Figures | None:
        """Return the figures of a run, or None if it hasn't been made."""
        return self._figures.get(_key(entry, run))

    def add(self, entry: Entry, run: BoardRun, figures: Figures) -> None:
        """Add a run and write it. Raises `ConfigError` if the file can't be written."""
        self._figures[_key(entry, run)] = figures
        names = ("scheduler", "digest", "trace", "seed", "requests")
        row = {"board": VERSION, **dict(zip(names, _key(entry, run), strict=True)), "figures": dict(_plain(figures))}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            raise ConfigError(f"{self._path}: can't be written: {error.strerror}") from None


def _key(entry: Entry, run: BoardRun) -> Key:
    return entry.name, entry.digest, run.trace, run.seed, fingerprint(run.trace, run.seed)


def _plain(figures: Figures) -> Iterator[tuple[str, Any]]:
    """Yield the fields as JSON has them: None for NaN."""
    values = asdict(figures)
    for field in fields(figures):
        value = values[field.name]
        yield field.name, None if isinstance(value, float) and math.isnan(value) else value
