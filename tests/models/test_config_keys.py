"""Every field of a native model's config class is handled or in the table, and nothing that changes
numbers is dropped."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig, PretrainedConfig

from dovetail.api.model import ModelContext
from dovetail_models.arch import KEYS, ConfigArch
from tests.models.oracle import MODELS, arch_of

NATIVE: dict[str, ConfigArch] = {}
for ref in MODELS:
    if "*" not in ref.architectures and isinstance(arch := ref.make(ModelContext()), ConfigArch):
        NATIVE.setdefault(arch.model_type, arch)


def reasons(**fields: Any) -> list[str]:
    config = LlamaConfig(architectures=["LlamaForCausalLM"], **fields)
    return list(arch_of(config).reasons_against(config))


def test_each_field_that_all_configs_have_is_in_the_table() -> None:
    names = {field.name for field in dataclasses.fields(PretrainedConfig)} | vars(
        PretrainedConfig()
    ).keys()
    assert not [name for name in names if KEYS.rule(name) is None]


@pytest.mark.parametrize("model_type", NATIVE)
def test_each_field_of_a_native_models_class_is_handled_or_refused(model_type: str) -> None:
    """The default of a field that isn't handled must be off, so that any other value is refused."""
    arch, common = NATIVE[model_type], vars(LlamaConfig())
    handled = arch.handled | {arch.activation_field} | common.keys()
    fields = vars(CONFIG_MAPPING[model_type]())
    assert not {
        name: value
        for name, value in fields.items()
        if value and name not in handled and KEYS.rule(name) is None
    }


def test_fields_of_single_layers_are_refused() -> None:
    [reason] = reasons(per_layer_config={"1": {"rms_norm_eps": 0.5}})
    assert "_heterogeneity_spec" in reason


@pytest.mark.parametrize(
    "field", [{"clip_qkv": 8.0}, {"_scale": 2.0}, {"is_encoder_decoder": True}]
)
def test_a_field_that_no_code_reads_is_refused_by_name(field: dict[str, Any]) -> None:
    [reason] = reasons(**field)
    assert reason.startswith(f"{next(iter(field))} = ")


def test_a_field_that_is_off_or_without_effect_is_accepted() -> None:
    assert not reasons(
        clip_qkv=None,
        use_mrope=False,
        temperature=0.3,
        initializer_range=0.5,
        unsloth_fixed=True,
        attention_dropout=0.5,
    )
