"""Bounds on the sizes in a model's config, checked before anything is built from it: transformers
makes lists of as many entries as there are layers.

Sizes of tensors need none: they are compared with the checkpoint's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ModelLoadError

_MOST = (  # the end of a key's name, what it is, and the largest value
    (re.compile(r"(?:^|_)(?:layers?|blocks|depth|stages)$"), "layers", 2_000),
    (re.compile(r"(?:^|_)experts?$"), "experts", 100_000),
    (
        re.compile(r"(?:^|_)(?:position_embeddings|positions|seq_len|seq_length|sequence_length)$"),
        "positions",
        100_000_000,
    ),
)
_MOST_OF_ANY = 2**63 - 1


def check_sizes(path: Path, config: Mapping[str, Any], within: str = "") -> None:
    """Raise `ModelLoadError` for a size that no model has, in any part of a config of bounded
    depth. `path`: its file, for the error."""
    for name, value in config.items():
        place = f"{within}{name}"
        if isinstance(value, Mapping):
            check_sizes(path, value, f"{place}.")
        elif isinstance(value, int):
            if abs(value) > _MOST_OF_ANY:
                raise ModelLoadError(f"{path}: {place}: {value} is more than any size can be")
            for pattern, what, most in _MOST:
                if value > most and pattern.search(name):
                    raise ModelLoadError(
                        f"{path}: {place}: no model has {value} {what}; at most {most} are read"
                    )
