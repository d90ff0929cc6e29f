"""The configs that the model suite asks about are configs that the architecture's own class could
have written."""

from __future__ import annotations

import pytest

from dovetail.testing.suites.model_configs import changes, config_class, tiny, variants

pytest.importorskip("transformers")

ARCHITECTURES = [
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
    "Olmo2ForCausalLM",
    "Gemma2ForCausalLM",
    "GemmaForCausalLM",
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_config_has_a_field_that_the_architectures_own_does_not_have(architecture: str) -> None:
    known = set(vars(tiny(architecture)))
    for change in changes(architecture):
        assert {*change.fields} <= known, f"{change.field}: {change.fields}"
    for config in variants(architecture, ()):
        assert {*vars(config)} <= known


def test_a_config_changes_nothing_of_others() -> None:
    """transformers' config of Qwen3.5 writes `partial_rotary_factor` into the dict that it is
    given."""
    before = [config.to_dict() for config in variants("Gemma4ForCausalLM", ())]
    assert len([*variants("Qwen3_5ForCausalLM", ())]) > 1
    assert [config.to_dict() for config in variants("Gemma4ForCausalLM", ())] == before


@pytest.mark.parametrize("architecture", ["Exaone4ForCausalLM", "Cohere2ForCausalLM"])
def test_some_config_has_a_layer_of_each_kind_that_the_class_makes(architecture: str) -> None:
    """By default each fourth layer is another, and small configs have fewer layers."""
    usual = set(config_class(architecture)().layer_types)
    assert len(usual) == 2
    assert any(set(config.layer_types) == usual for config in variants(architecture, ()))
    assert any(
        set(config.no_rope_layers) == {0, 1} for config in variants("SmolLM3ForCausalLM", ())
    )
