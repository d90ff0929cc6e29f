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
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

READING_S = 60.0  # after which the process is no longer waited for
_PLAIN = (type(None), bool, int, float, str)
# properties of transformers' base class that warn of their names
_DEPRECATED = ("torch_dtype", "use_return_dict")
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
    with suppress(OSError, metadata.PackageNotFoundError):
        path = path_of(directory)
        if path.exists() or path in _reading:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        script = str(Path(__file__).resolve())
        _reading[path] = subprocess.Popen(
            [sys.executable, "-I", script, json.dumps(sys.path), str(directory), str(path)],
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
        parts = ("name", "fields", "defaults", "derived", "causal_model")
        name, fields, defaults, derived, causal_model = (_unpacked(kept[part]) for part in parts)
        fields["_name_or_path"] = str(directory)
        return KeptConfig(str(name), fields, defaults, derived, causal_model)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    except metadata.PackageNotFoundError:
        return None


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
    content = (directory / "config.json").read_bytes()
    version = metadata.version("transformers")
    source = Path(__file__).read_bytes()  # how it is kept may differ between versions of this file
    digest = hashlib.sha256(b"\0".join((content, version.encode(), source))).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "dovetail" / "configs" / f"{digest[:32]}.json"


def keep(directory: str, path: Path) -> None:
    """Read the config in `directory` with transformers and keep it in `path`; null if it has other
    than plain values."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    fields = {name: value for name, value in vars(config).items() if name != "quantization_config"}
    kept = None
    if config.get_text_config(decoder=True) is config and not config.is_encoder_decoder:
        with suppress(TypeError):
            kept = {
                "name": type(config).__name__,
                "fields": _packed(fields),
                "defaults": _packed(vars(type(config)())),
                "derived": {"dict": [*_derived(config).items()]},
                "causal_model": CAUSAL.get(config.model_type),
            }
    own = path.with_name(f"{path.name}.{os.getpid()}")  # another process may be writing, too
    own.write_text(json.dumps(kept))
    os.replace(own, path)


def _derived(config: Any) -> dict[str, Any]:
    """Return the attributes with plain values of a config that aren't its own, packed: those of its
    class, properties, and other names for its own."""
    found = {}
    for name in (*dir(config), *config.attribute_map):
        if name.startswith("__") or name in vars(config) or name in _DEPRECATED:
            continue
        with suppress(AttributeError, TypeError):  # of a property; of one that isn't plain
            found[name] = _packed(getattr(config, name))
    return found


def _packed(value: Any) -> Any:
    """Return JSON of a plain value, in which dicts are lists of pairs, for JSON's keys are texts.
    Raises `TypeError` for other values."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple, set, frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return {type(value).__name__: [_packed(item) for item in items]}
    if type(value) is dict:
        return {"dict": [[_packed(key), _packed(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} isn't kept")


def _unpacked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "dict":
        return {_unpacked(key): _unpacked(item) for key, item in items}
    makers = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return makers[kind](_unpacked(item) for item in items)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    # Configs need no torch, whose import would take longer than the rest. transformers sees none.
    sys.modules["torch"] = None  # type: ignore[assignment]
    keep(sys.argv[2], Path(sys.argv[3]))
