"""A family with a block of its own is one file of public parts, and computes what transformers
does."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from dovetail.api.attention import LayerSpec
from dovetail.nn.rotary import Rope, rope_from_config
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


def test_layers_that_few_models_have_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fourth layer of EXAONE 4 has no positions."""

    class Suite(ModelSuite):
        component = Exaone4

    def turning(config: Any, spec: LayerSpec) -> Rope:
        return rope_from_config(config.rope_parameters, spec.head_size)

    monkeypatch.setattr(exaone4, "rope", turning)
    with pytest.raises(AssertionError, match="full_attention"):
        Suite().test_transformers()


@pytest.mark.full  # as those of `plugins new`; `test_builtins.py` runs the suite with built-in models
def test_it_conforms() -> None:
    verdict = run("model", Exaone4)
    assert verdict.conformant, "\n".join(verdict.report())
