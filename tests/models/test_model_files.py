"""Choice of the implementation, dtype and length for a model directory; and every reason to reject
it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from dovetail.api.executor import ComponentRef
from dovetail.errors import ConfigError, DovetailError, ModelLoadError, UnsupportedError
from dovetail.nn.activation import ClampedSwiGLU
from dovetail.nn.kernels import gpu
from dovetail.nn.kernels.gpu import GPU
from dovetail.nn.model_files import read_config
from dovetail.nn.moe import Experts
from dovetail_executors.runtime import architecture
from dovetail_executors.runtime.architecture import (
    find_architecture,
    resolve_dtype,
    resolve_max_model_len,
)
from tests.models.configs import configs
from tests.models.oracle import CPU, MODELS, arch_of, context
from tests.support import examples

CUDA = torch.device("cuda")
AMPERE = GPU("NVIDIA A100", (8, 0), 163 << 10, 164 << 10, 108)
TURING = GPU("NVIDIA T4", (7, 5), 64 << 10, 64 << 10, 40)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}


def place(monkeypatch: pytest.MonkeyPatch, here: GPU) -> None:
    """Let every CUDA device be this one."""
    monkeypatch.setattr(gpu, "_gpu_of", lambda device: here if device.type == "cuda" else None)


def write_config(directory: Path, **fields: Any) -> Path:
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | fields)
    )
    return directory


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_an_architecture_is_found_by_its_name(tmp_path: Path, name: str) -> None:
    kind = name.removesuffix("ForCausalLM")
    arch, config, _ = find_architecture(
        write_config(tmp_path, model_type=kind.lower(), architectures=[name]), MODELS
    )
    assert type(arch).__name__ == kind
    assert config.model_type == kind.lower()


def test_an_unsupported_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_positions=64)
    with pytest.raises(
        UnsupportedError,
        match=r"no installed model serves GPT2LMHeadModel; served are .*LlamaForCausalLM, "
        r".*Qwen3ForCausalLM",
    ):
        find_architecture(
            tmp_path, tuple(model for model in MODELS if "*" not in model.architectures)
        )
    assert type(find_architecture(tmp_path, MODELS).arch).__name__ == "Transformers"


def test_of_several_that_serve_an_architecture_the_built_in_is_used(tmp_path: Path) -> None:
    theirs, others = (
        ComponentRef("model", f"{name}:llama", "mine:Llama", architectures=("LlamaForCausalLM",))
        for name in ("mine", "other")
    )
    arch, *_ = find_architecture(write_config(tmp_path), (theirs, *MODELS, others))
    assert type(arch).__name__ == "Llama"
    with pytest.raises(
        UnsupportedError,
        match=r"served by mine:llama and other:llama; name the one you mean: `model: {path: .*, "
        r"component: mine:llama}`",
    ):
        find_architecture(tmp_path, (theirs, others))
    theirs = ComponentRef("model", "mine:bert", "mine:Bert", architectures=("BertModel",))
    with pytest.raises(
        UnsupportedError, match="mine:bert doesn't serve LlamaForCausalLM; served are BertModel"
    ):
        find_architecture(tmp_path, (theirs,))


def test_reasons_against_are_listed_with_the_name_of_the_model(tmp_path: Path) -> None:
    write_config(tmp_path, hidden_act="gelu", pretraining_tp=2)
    with pytest.raises(
        UnsupportedError, match=r"dovetail:llama can't serve (.|\n)*hidden_act(.|\n)*pretraining_tp"
    ):
        find_architecture(tmp_path, MODELS)


DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '{"model_type": "llama", "x": ' + DEEP + "}",
            "more than 50 lists and objects in one another",
        ),
        ("[" * 100_000, "more than 50 lists and objects in one another"),
        ('{"model_type": ' + "9" * 5000 + "}", "a number of more than 100 digits"),
        ("\udcff", "not valid JSON: "),
        (
            '{"model_type": "llama", "hidden_size": ' + str(2**70) + "}",
            "hidden_size: 1180591620717411303424 is more than any size can be",
        ),
        (
            '{"model_type": "llama", "num_hidden_layers": 1000000000}',
            "num_hidden_layers: no model has 1000000000 layers; at most 2000 are read",
        ),
        (
            '{"model_type": "gpt2", "n_layer": 1000000000}',
            "n_layer: no model has 1000000000 layers",
        ),
        (
            '{"model_type": "gemma3", "text_config": {"num_hidden_layers": 2001}}',
            "text_config.num_hidden_layers: no model has 2001 layers",
        ),
        (
            '{"model_type": "mixtral", "num_local_experts": 1000000000}',
            "num_local_experts: no model has 1000000000 experts",
        ),
        (
            '{"model_type": "llama", "max_position_embeddings": 1000000000}',
            "no model has 1000000000 positions",
        ),
        (
            '{"model_type": "llama", "architectures": [null]}',
            "'architectures' must be a list of names, got [None]",
        ),
        (
            '{"model_type": "llama", "architectures": [[]]}',
            "'architectures' must be a list of names, got [[]]",
        ),
        ('{"model_type": "llama", "architectures": []}', "no 'architectures'"),
    ],
)
def test_odd_configs_are_refused_naming_the_file(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelLoadError) as caught:
        find_architecture(tmp_path, MODELS)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert says in str(caught.value)


ODD_VALUES = st.sampled_from(
    [None, "x", -1, 0, 2**62, 1.5, [], [None], {}, {"a": 1}, True, json.loads("[" * 40 + "]" * 40)]
)


@examples(quick=60, full=5000)
@given(
    st.sampled_from(
        [
            *LlamaConfig().to_dict(),
            "rope_parameters",
            "rope_scaling",
            "sliding_window",
            "layer_types",
            "dtype",
        ]
    ),
    ODD_VALUES,
)
def test_any_value_of_any_key_is_taken_or_refused_with_an_error_of_ours(
    key: str, value: object
) -> None:
    with TemporaryDirectory() as directory, suppress(DovetailError):
        find_architecture(write_config(Path(directory), **{key: value}), MODELS)


def test_a_config_of_another_model_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="model_type = 'llama', expected 'qwen3'"):
        find_architecture(write_config(tmp_path, architectures=["Qwen3ForCausalLM"]), MODELS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("\xff\xfe", "not valid JSON"),
        ("[]", "expected an object, got list"),
        ("{}", "no 'model_type'"),
        (
            '{"model_type": "nobody-knows"}',
            r"transformers \d.* knows no model_type 'nobody-knows'$",
        ),
        (
            '{"model_type": "qwen", "architectures": ["QWenLMHeadModel"], "auto_map": '
            '{"AutoConfig": "configuration_qwen.QWenConfig"}}',
            r"knows no model_type 'qwen'; the code that the checkpoint brings for it \(auto_map\) "
            r"is never run$",
        ),
        ('{"model_type": ["llama"]}', r"knows no model_type \['llama'\]"),
        ('{"model_type": null}', "knows no model_type None"),
        ('{"model_type": "llama"}', "no 'architectures'"),
        ('{"model_type": "llama", "architectures": []}', "no 'architectures'"),
        (
            '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": "many"}',
            "hidden_size",
        ),
        (
            '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 7, '
            '"num_attention_heads": 2}',
            "hidden size",
        ),
        (
            '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_scaling": '
            '{"rope_type": "linear"}}',
            "factor",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=said) as caught:
        find_architecture(tmp_path, MODELS)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "own", "device", "expected"),
    [
        ("auto", "bfloat16", CPU, torch.float32),
        ("auto", "float16", CUDA, torch.float16),
        ("auto", "bfloat16", CUDA, torch.bfloat16),
        ("auto", "float32", CUDA, torch.bfloat16),
        ("auto", None, CUDA, torch.bfloat16),
        ("float16", "bfloat16", CPU, torch.float16),
        ("float32", "bfloat16", CUDA, torch.float32),
    ],
)
def test_dtype(
    tmp_path: Path,
    asked: str,
    own: str | None,
    device: torch.device,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place(monkeypatch, AMPERE)
    assert resolve_dtype(asked, read_config(write_config(tmp_path, dtype=own)), device) == expected


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [
        ("auto", "bfloat16", torch.float16),
        ("auto", "float32", torch.float16),
        ("auto", None, torch.float16),
        ("auto", "float16", torch.float16),
        ("float16", "bfloat16", torch.float16),
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_a_gpu_without_bfloat16_computes_in_float16_and_logs_it_once_unless_requested(
    tmp_path: Path,
    asked: str,
    own: str | None,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place(monkeypatch, TURING)
    architecture._warn_once.cache_clear()
    config = read_config(write_config(tmp_path, dtype=own))
    assert [resolve_dtype(asked, config, CUDA) for _ in range(2)] == [expected] * 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (asked == "auto" and own != "float16")
    assert all(
        text.startswith(
            "dtype: auto is float16, for NVIDIA T4 (compute capability 7.5) has no bfloat16"
        )
        for text in said
    )


def test_bfloat16_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, TURING)
    with pytest.raises(
        UnsupportedError,
        match=r"dtype: NVIDIA T4 .* has no bfloat16, which came with compute capability 8.0; use "
        r"auto, float16 or f",
    ):
        resolve_dtype("bfloat16", LlamaConfig(), CUDA)
    assert resolve_dtype("bfloat16", LlamaConfig(), CPU) == torch.bfloat16


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="'int8', expected auto, float32, float16, bfloat16"):
        resolve_dtype("int8", LlamaConfig(), CPU)


def test_max_model_len_is_the_models_own_or_less() -> None:
    config = LlamaConfig(max_position_embeddings=1000)
    assert resolve_max_model_len(None, config) == 1000
    assert resolve_max_model_len(7, config) == 7
    with pytest.raises(
        UnsupportedError, match="1001 tokens is more than this model's own length of 1000"
    ):
        resolve_max_model_len(1001, config)


def test_yarn_stretches_the_length() -> None:
    assert (
        resolve_max_model_len(None, LlamaConfig(max_position_embeddings=1000, rope_parameters=YARN))
        == 4000
    )
    assert (
        resolve_max_model_len(None, LlamaConfig(max_position_embeddings=4000, rope_parameters=YARN))
        == 4000
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MORE_OF_SMOLLM = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"dtype": "q4"},
    "pretraining_tp": 1,
}
REAL = {  # what is special in configs that people use
    "Llama-3.1": {
        "model_type": "llama",
        "rope_scaling": LLAMA3,
        "rope_theta": 5e5,
        "pretraining_tp": 1,
        "max_position_embeddings": 131072,
    },
    "SmolLM2": {"model_type": "llama", **MORE_OF_SMOLLM},
    "Llama-2": {
        "model_type": "llama",
        "max_length": 4096,
        "torch_dtype": "float16",
        "rope_scaling": None,
    },
    "unsloth": {
        "model_type": "llama",
        "unsloth_fixed": True,
        "unsloth_version": "2024.9",
        "_name_or_path": "x",
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "sliding_window": 131072,
        "use_sliding_window": False,
        "use_mrope": False,
        "max_window_layers": 21,
    },
    "Qwen2.5 with YaRN": {
        "model_type": "qwen2",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "Qwen3": {
        "model_type": "qwen3",
        "head_dim": 128,
        "rope_scaling": None,
        "attention_bias": False,
        "max_window_layers": 36,
    },
    "DeepSeek-R1-0528-Qwen3-8B": {
        "model_type": "qwen3",
        "rope_scaling": {**YARN, "attn_factor": 0.8782488562869419},
    },
    "Falcon3": {
        "model_type": "llama",
        "activation": "swiglu",
        "head_dim": 256,
        "rope_theta": 1000042,
    },
    "Llama made of a Qwen": {
        "model_type": "llama",
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    "Llama with a window that cuts nothing": {
        "model_type": "llama",
        "sliding_window": 4096,
        "max_position_embeddings": 4096,
    },
    "Mistral with a copy of transformers' class": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "somebody/model--modeling_mistral.MistralForCausalLM"},
    },
    "Mistral v0.1": {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 1e4},
    "Mistral v0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e6},
}


@pytest.mark.parametrize("name", REAL)
def test_configs_that_people_use_are_served(tmp_path: Path, name: str) -> None:
    config = AutoConfig.from_pretrained(write_config(tmp_path, **REAL[name]))
    assert arch_of(config).reasons_against(config) == []


@given(config=configs())
@examples(quick=60, full=500)
def test_all_that_is_tested_against_transformers_is_served(config: Any) -> None:
    assert arch_of(config).reasons_against(config) == []


def test_gpt_oss_has_its_own_activation_where_the_config_class_does_not_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers before 5.23 has no such fields."""
    config = GptOssConfig(
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    for name in ("swiglu_alpha", "swiglu_limit"):
        delattr(config, name)
        monkeypatch.delattr(GptOssConfig, name)
    arch = arch_of(config)
    assert arch.reasons_against(config) == []
    layers = [
        layer for layer in arch.build(config, context()).modules() if isinstance(layer, Experts)
    ]
    assert [layer.activation for layer in layers] == [ClampedSwiGLU(1.702, 7.0)]


WINDOWS = {"num_hidden_layers": 2, "sliding_window": 8, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LlamaConfig(hidden_act="gelu"), "hidden_act"),
        (LlamaConfig(pretraining_tp=2), "pretraining_tp"),
        (LlamaConfig(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
            "rope_type 'dynamic'",
        ),
        (LlamaConfig(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (LlamaConfig(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (LlamaConfig(attn_logit_softcapping=30.0), "attn_logit_softcapping"),
        (
            LlamaConfig(sliding_window=128),
            "a Llama has none; transformers ignores it, other engines don't",
        ),
        (
            LlamaConfig(
                sliding_window=128,
                rope_parameters={**YARN, "rope_theta": 1.0},
                max_position_embeddings=128,
            ),
            "sliding_window = 128",
        ),
        (LlamaConfig(sliding_window="many"), "sliding_window = 'many'"),
        (LlamaConfig(activation="gelu"), "activation = 'gelu'"),
        (LlamaConfig(activation="swiglu", hidden_act="gelu"), "hidden_act"),
        (
            LlamaConfig(
                rope_parameters={
                    "rope_type": "linear",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "attn_factor": 1.0,
                }
            ),
            "attn_factor",
        ),
        (LlamaConfig(rope_interleaved=True), "rope_interleaved"),
        (LlamaConfig(num_local_experts=8), "num_local_experts"),
        (LlamaConfig(no_rope_layers=[0, 1]), "no_rope_layers"),
        (
            LlamaConfig(auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}),
            "('modeling_mine.Mine'), which is never run",
        ),
        (
            LlamaConfig(
                architectures=["LlamaForCausalLM"],
                auto_map={"AutoModelForCausalLM": "x.MyLlamaForCausalLM"},
            ),
            "auto_map",
        ),
        (
            LlamaConfig(num_attention_heads=4, num_key_value_heads=3, hidden_size=64),
            "num_key_value_heads",
        ),
        (LlamaConfig(num_hidden_layers=0), "num_hidden_layers"),
        (LlamaConfig(head_dim=3), "head_dim"),
        (LlamaConfig(max_position_embeddings=0), "max_position_embeddings"),
        (Qwen2Config(attention_bias=True), "attention_bias"),
        (Qwen2Config(dual_chunk_attention_config={"chunk_size": 9}), "dual_chunk_attention_config"),
        (Qwen3Config(mlp_bias=True), "mlp_bias"),
        (
            Qwen2Config(**WINDOWS, layer_types=["full_attention", "chunked_attention"]),
            "chunked_attention",
        ),
        (
            Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]),
            "sliding_window is null",
        ),
        (Qwen3Config(**(WINDOWS | {"sliding_window": 0})), "sliding_window"),
        (MistralConfig(sliding_window=0), "sliding_window"),
        (MistralConfig(num_hidden_layers=1, layer_types=["full_attention"]), "layer_types"),
        (MistralConfig(attention_bias=True), "attention_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_field_that_changes_the_numbers_is_rejected_by_name(config: Any, named: str) -> None:
    reasons = arch_of(config).reasons_against(config)
    assert any(named in reason for reason in reasons), reasons
