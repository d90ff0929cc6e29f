"""`Results`: the figures of finished runs in a file of JSON lines, appended after each run, so that
a stopped leaderboard can be resumed."""

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

KEYS = ("scheduler", "digest", "trace", "seed", "requests")
FIGURES = frozenset(field.name for field in fields(Figures))


class Results:
    """The results in `folder`, which must exist. Runs of another board, another version of a
    scheduler, other requests or other figures are ignored.

    Raises `ConfigError` unless each line is a JSON object. An incomplete last line, left by a
    killed process, is dropped.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._figures: dict[str, Figures] = {}
        try:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                self._path.write_text(whole, encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"{self._path}: can't be read or written: "
                f"{getattr(error, 'strerror', None) or error}"
            ) from None
        for number, line in enumerate(whole.splitlines(), 1):
            self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(
                f"{self._path}:{number}: no result of a leaderboard: move the file away, or choose "
                f"another --out"
            )
        figures = row.get("figures")
        if row.get("board") == VERSION and isinstance(figures, dict) and figures.keys() == FIGURES:
            values: dict[str, Any] = {
                name: math.nan if value is None else value for name, value in figures.items()
            }
            self._figures[json.dumps([row.get(name) for name in KEYS])] = Figures(**values)

    def of(self, entry: Entry, run: BoardRun) -> Figures | None:
        """Return the figures of a run, or None if it hasn't been made."""
        return self._figures.get(_key(entry, run))

    def add(self, entry: Entry, run: BoardRun, figures: Figures) -> None:
        """Add a run and write it. Raises `ConfigError` if the file can't be written."""
        self._figures[_key(entry, run)] = figures
        row = {
            "board": VERSION,
            **dict(zip(KEYS, _values(entry, run), strict=True)),
            "figures": dict(_plain(figures)),
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            raise ConfigError(f"{self._path}: can't be written: {error.strerror}") from None


def _key(entry: Entry, run: BoardRun) -> str:
    return json.dumps(_values(entry, run))


def _values(entry: Entry, run: BoardRun) -> tuple[str | int, ...]:
    """Return the values of `KEYS`."""
    requests = fingerprint(run.trace, run.seed, run.requests)
    return entry.name, entry.digest, run.trace, run.seed, requests


def _plain(figures: Figures) -> Iterator[tuple[str, Any]]:
    """Yield the fields as JSON has them: None for NaN."""
    values = asdict(figures)
    for field in fields(figures):
        value = values[field.name]
        yield field.name, None if isinstance(value, float) and math.isnan(value) else value
