"""The output folder of a job: its lock, its manifest, and the error for what can't be written.

The manifest records the input and the settings of the answers, so that a job resumes only with the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dovetail.checks import shown
from dovetail.errors import ConfigError
from dovetail.whole_files import write_whole
from dovetail_batch.errors import GO_ON, UnwritableOutput

LOCK = ".lock"
MANIFEST = "manifest.json"
VERSION = 1
ANEW = "Give back what it was, name another output folder, or start anew with --anew, which deletes the answers that are there"
_LISTED = 5


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an `OSError`, such as a full disk, to `UnwritableOutput`."""
    try:
        yield
    except OSError as error:
        raise UnwritableOutput(f"{path}: can't be written: {error.strerror or error}; once it can be, {GO_ON}") from None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Create the folder if needed and lock it; the kernel releases the lock however the process ends.

    Raises `ConfigError` if another process holds the lock or the folder isn't writable.
    """
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("w")
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        raise ConfigError(f"output: {directory}: can't be written to: {getattr(error, 'strerror', None) or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"output: {directory}: another run of a job is writing to it: wait until it ends, or end it") from None
        except OSError as error:
            raise ConfigError(f"output: {directory}: can't be locked: {error.strerror or error}; a local disk can") from None
        yield


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `manifest.json`."""

    sha256: str  # of the input
    settings: Mapping[str, Any]  # `Plan.settings`
    rows: int
    starts: tuple[int, ...]  # positions in the input at which shards begin

    def write(self, directory: Path) -> None:
        """Raises `UnwritableOutput`."""
        text = json.dumps({"version": VERSION, **asdict(self)})
        with writing(directory / MANIFEST):
            write_whole(directory / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Return the folder's manifest, or None if there is none. Raises `ConfigError` if it is unreadable."""
        path = directory / MANIFEST
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
        """Raise `ConfigError` with the differences unless the settings are the same."""
        differences = list(_differences("", self.settings, json.loads(json.dumps(settings))))
        if differences:
            more = [f"… and {len(differences) - _LISTED} more"] if len(differences) > _LISTED else []
            told = "\n  ".join([*differences[:_LISTED], *more])
            raise ConfigError(f"output: {directory}: its answers are of other settings than these:\n  {told}\n{ANEW}")

    def check_input(self, directory: Path, sha256: str) -> None:
        """Raise `ConfigError` unless the input has this hash."""
        if sha256 != self.sha256:
            told = f"its answers are of an input with other content: its SHA-256 was {self.sha256[:12]}…, now it is {sha256[:12]}…"
            raise ConfigError(f"output: {directory}: {told}\n{ANEW}")


def _differences(key: str, was: Any, now: Any) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in {**was, **now}:
            yield from _differences(f"{key}.{name}" if key else name, was.get(name), now.get(name))
    elif was != now:
        yield f"{key}: was {shown(was)}, now it is {shown(now)}"
