"""`plain_config`: an engine's config as other machines can be sent it."""

from __future__ import annotations

import os
from typing import Any

from dovetail.config import EngineConfig


def plain_config(config: EngineConfig) -> dict[str, Any]:
    """Return the keys of `engine.yaml`. Paths are absolute, as of a folder that all machines see."""
    plain = config.model_dump(mode="json")
    for key in ("model", "tokenizer"):
        if isinstance(plain[key], str) and os.path.isdir(plain[key]):
            plain[key] = os.path.abspath(plain[key])
    return plain
