"""The page "Port a model from transformers" shows all of the package that it is about, and the
suite finds the mistakes that it says it does. `tests/third_party.sh` installs the package and tests
it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NamedTuple

import pytest
from tools import docs_hooks

from dovetail.testing import ModelSuite
from dovetail.testing.checks import CheckFailed, checks_of
from tests.docs.pages import DOCS, ROOT

PACKAGE = "examples/plugins/dovetail-olmo2"
MODEL = f"{PACKAGE}/src/dovetail_olmo2/model.py"


class Mistake(NamedTuple):
    """One that the page lists, made by writing `wrong` instead of `right` in the model."""

    name: str
    found_by: str
    right: str
    wrong: str


MISTAKES = (
    Mistake(
        "the norm before attention, as in a Llama",
        "model.transformers",
        "self.attention_norm(self.attention(x, rotation, wanted))",
        "self.attention(self.attention_norm(x), rotation, wanted)",
    ),
    Mistake(
        "the two norms of a block swapped",
        "model.transformers",
        """"post_attention_layernorm": (self.attention_norm, None),
            "mlp.gate_proj": (mlp.gate_up_proj, "gate"),
            "mlp.up_proj": (mlp.gate_up_proj, "up"),
            "mlp.down_proj": (mlp.down_proj, None),
            "post_feedforward_layernorm": (self.mlp_norm, None),""",
        """"post_attention_layernorm": (self.mlp_norm, None),
            "mlp.gate_proj": (mlp.gate_up_proj, "gate"),
            "mlp.up_proj": (mlp.gate_up_proj, "up"),
            "mlp.down_proj": (mlp.down_proj, None),
            "post_feedforward_layernorm": (self.attention_norm, None),""",
    ),
    Mistake(
        "q and k normed head by head, as in a Qwen3",
        "model.transformers",
        "rms_norm(x.contiguous(), self.weight, self.eps)",
        "rms_norm(x.reshape(len(x), -1, 8), self.weight.view(-1, 8), self.eps).flatten(1)",
    ),
    Mistake(
        "the usual eps in q's and k's norm instead of the config's",
        "model.transformers",
        "rms_norm(x.contiguous(), self.weight, self.eps)",
        "rms_norm(x.contiguous(), self.weight, 1e-6)",
    ),
    Mistake(
        "each rank norms by the mean square of its own heads",
        "model.shards",
        "self.group.all_reduce(wide.square().mean(-1, keepdim=True)) / self.group.size",
        "wide.square().mean(-1, keepdim=True)",
    ),
    Mistake(
        "attention without biases",
        "model.config_fields",
        "bias = config.attention_bias",
        "bias = False",
    ),
    Mistake(
        "`hidden_act` ignored", "model.config_fields", 'if config.hidden_act != "silu"', "if False"
    ),
    Mistake(
        "unknown fields ignored",
        "model.unknown_fields",
        "if value and name not in known",
        "if False",
    ),
    Mistake(
        "`model_type` treated as an unknown field: only configs from files have it",
        "model.checkpoint",
        '{*vars(type(config)()), "model_type"}',
        "vars(type(config)())",
    ),
    Mistake(
        "a separate head for a model whose head is tied",
        "model.tied",
        "self.embedding if config.tie_word_embeddings else None",
        "None",
    ),
    Mistake(
        "`wanted` ignored: the states of all tokens are returned",
        "model.wanted",
        "last(x, rotation, inputs.wanted)",
        "last(x, rotation)",
    ),
)


def suite_of(source: str, monkeypatch: pytest.MonkeyPatch) -> type[ModelSuite]:
    """The suite of the architecture `Olmo2` of a model file."""
    module = ModuleType("olmo2_of_the_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, MODEL, "exec"), vars(module))
    body = {
        "component": module.Olmo2,
        "architectures": ("Olmo2ForCausalLM",),
        "__module__": __name__,
    }
    return type("SuiteOfOlmo2", (ModelSuite,), body)


@pytest.fixture(scope="module")
def the_model_is_right() -> None:
    """Without a mistake nothing is found. This also imports what the checks need."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        suite = suite_of((ROOT / MODEL).read_text(), monkeypatch)
        getattr(suite(), checks_of(suite)["model.transformers"].attribute)()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
@pytest.mark.usefixtures("the_model_is_right")
def test_the_check_that_the_page_names_finds_the_mistake(
    mistake: Mistake, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (ROOT / MODEL).read_text()
    assert f"| {mistake.name} | `{mistake.found_by}` |" in page
    assert source.count(mistake.right) == 1
    suite = suite_of(source.replace(mistake.right, mistake.wrong), monkeypatch)
    with pytest.raises(CheckFailed):
        getattr(suite(), checks_of(suite)[mistake.found_by].attribute)()


def test_the_page_lists_no_other_mistakes(page: str) -> None:
    assert page.count("| `model.") == len(MISTAKES)


@pytest.fixture(scope="module")
def page() -> str:
    return docs_hooks.fill_in((DOCS / "plugins/port-a-model.md").read_text(encoding="utf-8"))


def test_the_page_shows_every_definition_of_the_model_once_and_in_order(page: str) -> None:
    sources = docs_hooks.definitions((ROOT / MODEL).read_text()).values()
    assert [page.count(source) for source in sources] == [1] * len(sources)
    places = [page.index(source) for source in sources]
    assert places == sorted(places)


def test_the_page_shows_how_the_package_is_declared_and_compared(page: str) -> None:
    assert (ROOT / PACKAGE / "src/dovetail_olmo2/__init__.py").read_text().strip() in page
    tests = docs_hooks.definitions((ROOT / PACKAGE / "tests/test_olmo2.py").read_text())
    assert tests["test_an_engine_generates_the_tokens_that_transformers_does"] in page


def test_the_model_is_as_short_as_the_page_says(page: str) -> None:
    assert "one file of less than 220 lines" in " ".join(page.split())
    assert len((ROOT / MODEL).read_text().splitlines()) < 220


def test_a_definition_that_is_gone_is_an_error() -> None:
    with pytest.raises(KeyError):
        docs_hooks.fill_in(f"<!-- generated: code {MODEL} Nothing -->")


def test_a_definition_is_shown_with_its_decorators() -> None:
    shown = docs_hooks.definitions(
        "import x\n\n@x.one\n@x.two(\n    3)\ndef f():\n    pass\n\n\nclass C:\n    a = 1\n"
    )
    assert shown == {"f": "@x.one\n@x.two(\n    3)\ndef f():\n    pass", "C": "class C:\n    a = 1"}
