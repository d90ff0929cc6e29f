"""Configs of models as transformers reads them, kept on disk, so that an engine with a built-in
model starts without importing transformers.

The import takes seconds, and its result for a `config.json` is always the same. So a process of its
own reads the config while the engine's imports torch, and keeps what it found in
`dovetail/configs` of XDG_CACHE_HOME, by default ~/.cache:

    begin_reading(directory)           # starts the process, unless the config is kept already
    import torch
    found = kept_config(directory)     # waits for the process; None: read it with transformers here

Only configs that consist of plain values are kept. Anything unexpected means None: the caller then
reads the config itself, and its errors are those that the user sees.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from dovetail.base import config_reader
from dovetail.base.bounded_json import read_json
from dovetail.base.config_reader import unpacked
from dovetail.base.config_sizes import check_sizes
from dovetail.base.user_cache import user_cache
from dovetail.errors import DovetailError

READING_S = 60.0  # after which the process is no longer waited for
CONFIG = "config.json"
MOST_BYTES = 8 << 20  # of a config that is kept
OTHER_FILES = "configuration_files"  # key by which transformers reads another file instead
# errors for which a config isn't kept: of files, without a home directory, without transformers
_UNKEPT = (OSError, RuntimeError, ValueError, DovetailError, metadata.PackageNotFoundError)
_reading: dict[Path, subprocess.Popen[bytes]] = {}  # by the file that it writes


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """Attributes of a transformers config; dtypes are names."""

    name: str  # of its class
    fields: dict[str, Any]  # `vars(config)`
    defaults: dict[str, Any]  # `vars(type(config)())`
    derived: dict[str, Any]  # properties and attributes of the class
    # the causal model that transformers has for the config's type
    causal_model: str | None


def begin_reading(directory: Path) -> None:
    """Start a process that reads the config in `directory` and keeps it, unless it is kept or this
    process has imported transformers, which can read it at once."""
    if "transformers" in sys.modules or not sys.executable:
        return
    with suppress(*_UNKEPT):
        path = path_of(directory)
        if path.exists() or path in _reading:
            return
        content = _content(directory)
        config = read_json(content)
        if not isinstance(config, dict) or OTHER_FILES in config:
            return  # the caller refuses it
        # as the caller will, for transformers makes lists of such sizes
        check_sizes(directory / CONFIG, config)
        path.parent.mkdir(parents=True, exist_ok=True)
        script = str(Path(config_reader.__file__).resolve())
        # Python ignores other entries
        search = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        digest = hashlib.sha256(content).hexdigest()
        _reading[path] = subprocess.Popen(
            [sys.executable, "-I", script, search, str(directory), str(path), digest],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the engine
        )


def kept_config(directory: Path) -> KeptConfig | None:
    """Return the config that is kept for `directory`, after waiting for the process that
    `begin_reading` has started; None if none is, or it can't be kept."""
    try:
        path = path_of(directory)
        _wait_for(path)
        kept = json.loads(path.read_bytes())
        if kept is None:
            return None
        config = KeptConfig(**{part.name: unpacked(kept[part.name]) for part in fields(KeptConfig)})
        _check(config)
        config.fields["_name_or_path"] = str(directory)
        return config
    except (*_UNKEPT, TypeError, KeyError, AttributeError):
        return None


def _check(config: KeptConfig) -> None:
    """Raise `ValueError` or `AttributeError` for a file that was damaged."""
    if not config.name.isidentifier() or not isinstance(config.causal_model, str | None):
        raise ValueError("no names")
    for attributes in (config.fields, config.defaults, config.derived):
        if not isinstance(attributes, dict) or not all(
            isinstance(name, str) for name in attributes
        ):
            raise ValueError("attributes without names")


def _wait_for(path: Path) -> None:
    process = _reading.pop(path, None)
    if process is None:
        return
    try:
        process.wait(READING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def path_of(directory: Path) -> Path:
    """Return the file of a config, by its content and the version of transformers."""
    content = _content(directory)
    version = _transformers_version()
    source = Path(config_reader.__file__).read_bytes()  # how it is kept may differ between versions
    digest = hashlib.sha256(b"\0".join((content, version.encode(), source))).hexdigest()
    return user_cache("configs") / f"{digest[:32]}.json"


@cache
def _transformers_version() -> str:
    """Return the version that this process has: every start of an engine asks for it, and parsing
    metadata takes milliseconds."""
    return metadata.version("transformers")


def _content(directory: Path) -> bytes:
    """Return the content of a config. Raises `ValueError` if it is too large."""
    with (directory / CONFIG).open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    return content
