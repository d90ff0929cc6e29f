"""`answer_elsewhere`: what a component answers in a new process with another string hash seed."""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from dovetail.testing.binding import Binding
from dovetail.testing.processes import run_python

HASH_SEEDS = ("1", "2", "3")  # values of PYTHONHASHSEED; two sets of two may have one order
_CODE = "from dovetail.testing.elsewhere import _answer; _answer()"


def answer_elsewhere(
    suite: Binding, function: str, *arguments: Any, what: str, hash_seed: str
) -> Any:
    """Return what `function`, "package.module:name", returns in a new process, by way of JSON. Its
    first argument is a `Binding` with the suite's component and options.

    Raises `CheckFailed`, with `what`, if the process fails.
    """
    with tempfile.TemporaryDirectory(prefix="dovetail-test-") as folder:
        answer = Path(folder, "answer")
        told = pickled(suite, function, arguments, str(answer))
        run_python(_CODE, told, what, PYTHONHASHSEED=hash_seed)
        return json.loads(answer.read_text())


def pickled(suite: Binding, *others: Any) -> bytes:
    """Return a suite's component and options, and other values, for `unpickled`."""
    named = isinstance(suite.component, str)
    body = {
        "kind": suite.kind,
        "component": suite.component if named else suite.component_class,
        "options": dict(suite.options),
    }
    return pickle.dumps((body, *others))


def unpickled() -> tuple[Any, ...]:
    """Read what `pickled` returned from standard input: a `Binding` with the suite's component and
    options, and the other values."""
    body, *others = pickle.load(sys.stdin.buffer)
    return type("Bound", (Binding,), body)(), *others


def _answer() -> None:
    bound, function, arguments, answer = unpickled()
    module, _, name = function.partition(":")
    found = getattr(import_module(module), name)(bound, *arguments)
    Path(answer).write_text(json.dumps(found))
