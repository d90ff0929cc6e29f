"""`write_whole`: a file is there whole or not at all, whoever is killed and whenever."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BESIDE = ".tmp"  # what is behind the name of a file that isn't whole yet


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` write a file under another name, see that it is on the disk, and give it its name. Raises `OSError`, and what
    `write` raises, leaving nothing."""
    beside = path.with_name(path.name + BESIDE)
    try:
        write(beside)
        _sync(beside)
        os.replace(beside, path)
        _sync(path.parent)
    except Exception:
        with suppress(OSError):
            beside.unlink()
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
