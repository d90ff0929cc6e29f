"""Writing a command's files: each is written whole or not at all, and an error says why."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dovetail.errors import ConfigError


def make_folder(out: Path) -> None:
    """Before the runs, so that nothing is lost for want of a place. Raises `ConfigError` if it can't be made, or written into."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"--out: {out}: can't be made, or written into: {error.strerror}") from None


def write_whole(path: str | Path, content: str | bytes) -> None:
    """In place of what was there, and only when all of it is on the disk: whoever is interrupted leaves the old file, or none. Text is UTF-8.

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
