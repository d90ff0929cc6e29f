"""`Manifest`: what the answers in a folder are of, so that a job goes on only with the same input and the same settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dovetail.checks import shown
from dovetail.errors import ConfigError
from dovetail.whole_files import write_whole
from dovetail_batch.files import writing

NAME = "manifest.json"
VERSION = 1
ANEW = "Give back what it was, name another output folder, or start anew with --anew, which deletes the answers that are there"
_LISTED = 5


@dataclass(frozen=True, slots=True)
class Manifest:
    """The file `manifest.json` of an output folder."""

    sha256: str  # of the input
    settings: Mapping[str, Any]  # `Plan.settings`
    rows: int
    starts: tuple[int, ...]  # positions in the input at which shards begin

    def write(self, directory: Path) -> None:
        """Raises `UnwritableOutput`."""
        text = json.dumps({"version": VERSION, **asdict(self)})
        with writing(directory / NAME):
            write_whole(directory / NAME, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Return that of a folder, None if it has none. Raises `ConfigError` for one that can't be read."""
        path = directory / NAME
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("version") != VERSION:
                raise ValueError("another version of Dovetail wrote it")
            found = cls(values["sha256"], values["settings"], values["rows"], tuple(values["starts"]))
            if not all(type(number) is int for number in (found.rows, *found.starts)) or not isinstance(found.settings, dict):
                raise ValueError("it isn't a manifest")
            return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path}: can't be read: {error}; {ANEW}") from None

    def check_settings(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Raise `ConfigError`, saying what differs, unless this is of the same settings."""
        differences = list(_differences("", self.settings, json.loads(json.dumps(settings))))
        if differences:
            more = [f"… and {len(differences) - _LISTED} more"] if len(differences) > _LISTED else []
            told = "\n  ".join([*differences[:_LISTED], *more])
            raise ConfigError(f"output: {directory}: its answers are of other settings than these:\n  {told}\n{ANEW}")

    def check_input(self, directory: Path, sha256: str) -> None:
        """Raise `ConfigError` unless this is of an input with that hash."""
        if sha256 != self.sha256:
            told = f"its answers are of an input with other content: its SHA-256 was {self.sha256[:12]}…, now it is {sha256[:12]}…"
            raise ConfigError(f"output: {directory}: {told}\n{ANEW}")


def _differences(key: str, was: Any, now: Any) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in {**was, **now}:
            yield from _differences(f"{key}.{name}" if key else name, was.get(name), now.get(name))
    elif was != now:
        yield f"{key}: was {shown(was)}, now it is {shown(now)}"
