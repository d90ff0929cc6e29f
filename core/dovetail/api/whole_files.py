"""`write_whole`: atomic file writes, durable across crashes. `user_cache` says where to keep files."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dovetail.base.user_cache import user_cache as user_cache  # for packages that see the API alone

BESIDE = ".tmp"  # suffix of a file that isn't complete yet


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` write a temporary file, sync it to disk and rename it. Raises `OSError` and what
    `write` raises, leaving no file."""
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
