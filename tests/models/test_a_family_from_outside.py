"""A family with a block of its own is one file of public parts, and computes what transformers
does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dovetail.testing import ModelSuite, run
from tests.models import exaone4
from tests.models.exaone4 import Exaone4

PUBLIC = {"dovetail", "dovetail.api", "dovetail.nn"}


def test_it_imports_only_what_is_public() -> None:
    tree = ast.parse(Path(exaone4.__file__).read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = {".".join(name.split(".")[:2]) for name in modules if name.startswith("dovetail")}
    assert ours == PUBLIC - {"dovetail"}


def test_it_computes_what_transformers_does() -> None:
    class Suite(ModelSuite):
        component = Exaone4
        variants = ({"sliding_window": 7},)

    Suite().test_transformers()


@pytest.mark.slow("runs all checks of models")
def test_it_conforms() -> None:
    verdict = run("model", Exaone4)
    assert verdict.conformant, verdict.report
