"""A tokenizer's ids, computed in this process or in another one with a different string hash
seed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.api.tokenizer import Tokenizer, TokenizerContext
from dovetail.errors import RequestError
from dovetail.testing.binding import Binding
from dovetail.testing.processes import run_python

_ELSEWHERE = "from dovetail.testing.suites.tokenizer_elsewhere import _answer; _answer()"


def summary(made: Tokenizer, texts: Sequence[str]) -> dict[str, Any]:
    """Return the ids of texts, and of the rest of a tokenizer what front ends must agree on."""
    return {
        "vocabulary": hashlib.sha256(repr(list(made.vocabulary())).encode()).hexdigest(),
        "special_ids": sorted(map(int, made.special_ids)),
        "eos_ids": sorted(map(int, made.eos_ids)),
        "around": [list(map(int, ids)) for ids in made.around],
        "ids": [_ids(made, text) for text in texts],
    }


def elsewhere(suite: Binding, directory: str | None, texts: Sequence[str]) -> dict[str, Any]:
    """Return the summary of a suite's tokenizer from a new process with another `PYTHONHASHSEED`.
    Raises `CheckFailed` if it fails."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    named = isinstance(suite.component, str)
    component = suite.component if named else suite.component_class
    with tempfile.TemporaryDirectory(prefix="dovetail-test-") as folder:
        answer = Path(folder, "answer")
        told = (component, dict(suite.options), directory or folder, list(texts), str(answer))
        run_python(
            _ELSEWHERE,
            pickle.dumps(told),
            "another process can't encode",
            PYTHONHASHSEED=hash_seed,
        )
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def _ids(made: Tokenizer, text: str) -> list[int] | None:
    try:
        return list(map(int, made.encode(text)))
    except RequestError:
        return None


def _answer() -> None:
    component, options, directory, texts, answer = pickle.load(sys.stdin.buffer)
    body = {"kind": "tokenizer", "component": component, "options": options}
    made = type("Bound", (Binding,), body)().make(TokenizerContext(Path(directory)))
    Path(answer).write_text(json.dumps(summary(made, texts)))
