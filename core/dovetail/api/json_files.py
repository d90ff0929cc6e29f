"""Reader for a model's untrusted JSON files: each must be an object or a list of bounded size and
depth. Errors name the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.base.bounded_json import JsonBounds, WrongJsonError, excess_of, read_json
from dovetail.errors import ModelLoadError

MAX_BYTES = 64 << 20  # the index of a model of 700 billion parameters has 9 MB
MAX_DEPTH = 50  # nested lists and objects
BOUNDS = JsonBounds(parts=1_000_000, depth=MAX_DEPTH)  # that index has 92,000 parts


def read_json_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file. `missing_ok`: if there is no file, return an empty one.
    Raises `ModelLoadError` otherwise."""
    if missing_ok and not path.exists():
        return {}
    content = _read(path)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Return the JSON list in a file. Raises `ModelLoadError` otherwise."""
    content = _read(path)
    if not isinstance(content, list):
        raise ModelLoadError(f"{path}: expected a list, got {type(content).__name__}")
    return content


def check_json_file(path: Path, bounds: JsonBounds) -> None:
    """Raise `ModelLoadError` if a file that others will read is too large, has too many parts, or
    is nested too deeply."""
    if (excess := excess_of(_bytes_of(path), bounds)) is not None:
        raise ModelLoadError(f"{path}: {excess}")


def _read(path: Path) -> Any:
    try:
        return read_json(_bytes_of(path), BOUNDS)
    except WrongJsonError as error:
        raise ModelLoadError(f"{path}: {error}") from None


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            # which allocates as much
            text = file.read(min(os.fstat(file.fileno()).st_size, MAX_BYTES) + 1)
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error.strerror or error}") from None
    if len(text) > MAX_BYTES:
        raise ModelLoadError(f"{path}: more than {MAX_BYTES >> 20} MiB: that is no file of a model")
    return text


def is_deep(content: Mapping[str, Any] | list[Any]) -> bool:
    """True if a value read from JSON has more lists and objects in one another than any file of
    ours needs, and than Python may be able to walk."""
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        inner = [
            value
            for part in level
            for value in (part.values() if isinstance(part, Mapping) else part)
        ]
        level = [value for value in inner if isinstance(value, Mapping | list | tuple)]
    return bool(level)
