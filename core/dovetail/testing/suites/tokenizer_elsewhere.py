"""A tokenizer's ids, to be compared with those of another, or of one in another process."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.api.tokenizer import Tokenizer, TokenizerContext
from dovetail.errors import RequestError
from dovetail.testing.binding import Binding


def summary(made: Tokenizer, texts: Sequence[str]) -> dict[str, Any]:
    """Return the ids of texts, and of the rest of a tokenizer what front ends must agree on."""
    return {
        "vocabulary": hashlib.sha256(repr(list(made.vocabulary())).encode()).hexdigest(),
        "special_ids": sorted(map(int, made.special_ids)),
        "eos_ids": sorted(map(int, made.eos_ids)),
        "around": [list(map(int, ids)) for ids in made.around],
        "ids": [_ids(made, text) for text in texts],
    }


def made_summary(suite: Binding, directory: str | None, texts: Sequence[str]) -> dict[str, Any]:
    """Return the summary of a new tokenizer of the suite's. `directory`: None for an empty one."""
    with tempfile.TemporaryDirectory(prefix="dovetail-test-") as folder:
        return summary(suite.make(TokenizerContext(Path(directory or folder))), texts)


def _ids(made: Tokenizer, text: str) -> list[int] | None:
    try:
        return list(map(int, made.encode(text)))
    except RequestError:
        return None
