"""`unpacked_model`: the directory of small files that stands for a model in one GGUF file.

It has `config.json`, the tokenizer's files and a link to the GGUF file, from which the weights are
read. It is made once, in the user's cache, and again if one of its files is missing or empty.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.base.user_cache import user_cache
from dovetail.errors import ModelLoadError
from dovetail.gguf.config import ROPE_FACTORS, model_config
from dovetail.gguf.header import Header, read_header
from dovetail.gguf.tokenizer import TOKENIZER_FILES, tokenizer_files

SUFFIX = ".gguf"
LINK = "model.gguf"  # the GGUF file in the directory
_OWN_FILES = ("config.json", LINK)  # besides the tokenizer's
_LAYOUT = 1  # of the directory; another one is made if it changes
_OTHERS = "mmproj"  # beginning of the names of vision towers, beside a model


def gguf_in(directory: Path) -> list[Path]:
    """Return the models among a directory's GGUF files; none if it has a `config.json`."""
    if os.path.exists(directory / "config.json"):
        return []
    files = sorted(directory.glob(f"*{SUFFIX}"))
    return [file for file in files if not file.name.startswith(_OTHERS) and os.path.isfile(file)]


def unpacked_model(path: Path) -> Path:
    """Return the directory for a GGUF file, which is made if there is none. Raises `ModelLoadError`
    and `UnsupportedError`, naming the file."""
    path = path.resolve()
    try:
        status = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error.strerror or error}") from None
    key = f"{_LAYOUT} {path} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    directory = _cache(path) / name
    if not _is_whole(directory):
        header = read_header(path)
        files = {
            "config.json": model_config(header, rope_factors(header)),
            **tokenizer_files(header),
        }
        try:
            _make(directory, files, path)
        except OSError as error:
            raise ModelLoadError(
                f"{path}: its config and tokenizer can't be written to {directory}: "
                f"{error.strerror or error}; set XDG_CACHE_HOME to a writable directory"
            ) from None
    return directory


def rope_factors(header: Header) -> list[float] | None:
    """Return the divisors of frequencies that a file has; None if it has none. Raises
    `ModelLoadError`."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    size = tensor.rows * tensor.row_bytes
    if tensor.type.name != "F32" or size > 1 << 16:
        raise ModelLoadError(
            f"{header.path}: {ROPE_FACTORS} is {tensor.type.name}, of {size} bytes"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.start)
        return list(struct.unpack(f"<{size // 4}f", file.read(size)))


def _cache(path: Path) -> Path:
    try:
        return user_cache("gguf")
    except FileNotFoundError:
        raise ModelLoadError(
            f"{path}: there is no home directory for its config and tokenizer; set XDG_CACHE_HOME "
            f"to a writable directory"
        ) from None


def _is_whole(directory: Path) -> bool:
    """Return False if a file is missing or empty, for example after a power failure."""
    try:
        return all((directory / name).stat().st_size for name in (*TOKENIZER_FILES, *_OWN_FILES))
    except OSError:
        return False


def _make(directory: Path, files: dict[str, dict[str, Any]], path: Path) -> None:
    """Make the directory as a whole, in place of whatever is there, unless another process has."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=directory.parent))
    made = beside / "made"
    try:
        made.mkdir(mode=0o700)
        for name, content in files.items():
            (made / name).write_text(json.dumps(content), encoding="utf-8")
        (made / LINK).symlink_to(path)
        if not _is_whole(directory):
            with suppress(FileNotFoundError):
                directory.rename(beside / "broken")
            made.rename(directory)
    except OSError:
        if not _is_whole(directory):  # another process made it
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
