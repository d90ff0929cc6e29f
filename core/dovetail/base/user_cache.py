"""`user_cache`: the folders in which files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return the folder `dovetail/NAME` in XDG_CACHE_HOME, by default ~/.cache. It may not exist.
    Raises `FileNotFoundError` without a home directory."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
    return root / "dovetail" / name
