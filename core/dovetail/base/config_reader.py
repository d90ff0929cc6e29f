"""Reads a config with transformers and keeps its attributes: the process of `kept_configs`. It is
run as a script and imports nothing of Dovetail."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_PLAIN = (type(None), bool, int, float, str)
# properties of transformers' base class that warn of their names
_DEPRECATED = ("torch_dtype", "use_return_dict")


def keep(directory: str, path: Path, digest: str) -> None:
    """Read the config in `directory` with transformers and keep it in `path`; null if it has other
    than plain values. Nothing is kept if the file's SHA-256 is another than `digest`, after which
    `path` is named: it was changed meanwhile."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    content = Path(directory, "config.json").read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        return
    fields = {name: value for name, value in vars(config).items() if name != "quantization_config"}
    kept = None
    if config.get_text_config(decoder=True) is config and not config.is_encoder_decoder:
        with suppress(TypeError):
            kept = {
                "name": type(config).__name__,
                "fields": packed(fields),
                "defaults": packed(vars(type(config)())),
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
            found[name] = packed(getattr(config, name))
    return found


def packed(value: Any) -> Any:
    """Return JSON of a plain value, in which dicts are lists of pairs, for JSON's keys are texts.
    Raises `TypeError` for other values."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple, set, frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return {type(value).__name__: [packed(item) for item in items]}
    if type(value) is dict:
        return {"dict": [[packed(key), packed(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} isn't kept")


def unpacked(value: Any) -> Any:
    """Return the value of which `packed` made this JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "dict":
        return {unpacked(key): unpacked(item) for key, item in items}
    makers = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return makers[kind](unpacked(item) for item in items)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    # Configs need no torch, whose import would take longer than the rest. transformers sees none.
    sys.modules["torch"] = None  # type: ignore[assignment]
    keep(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
