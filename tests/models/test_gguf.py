"""Models in GGUF files compute what transformers' classes do with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dovetail.errors import DovetailError, ModelLoadError, UnsupportedError
from dovetail.gguf.header import TYPES, read_header
from dovetail.gguf.unpacked import unpacked_model
from dovetail.nn.gguf_tensors import GgufTensors
from dovetail.nn.parallel import SINGLE
from dovetail_executors.runtime.loading import ModelPlan, load_model
from tests.models.gguf_files import dequantized, random_blocks, save_gguf
from tests.models.oracle import CPU, MODELS, DenseAttention, executor_config

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 94,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
# architecture -> fields of the config, and metadata that say them
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {"rope_theta": 1e6}, {"qwen2.rope.freq_base": 1e6}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, {}),
    "gemma2": (
        "gemma2",
        GEMMA,
        {
            "gemma2.attention.sliding_window": 8,
            "gemma2.attn_logit_softcapping": 50.0,
            "gemma2.final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "gemma3.attention.sliding_window": 8,
            "gemma3.attention.sliding_window_pattern": 2,
            "gemma3.rope.freq_base": 1e6,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    ),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tiny(model_type: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SIZES | fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model.eval()


def served(path: Path) -> Any:
    config = executor_config(unpacked_model(path), dtype="float32")
    plan = ModelPlan.of(config, MODELS, SINGLE, CPU)
    return load_model(plan, config, DenseAttention, SINGLE, CPU)


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    from dovetail.api.model import ModelInputs

    inputs = ModelInputs(token_ids=torch.tensor(ids), positions=torch.arange(len(ids)))
    found: torch.Tensor = model.logits(model(inputs))
    return found


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q6_K"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_computes_what_transformers_does(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    model_type, fields, metadata = FAMILIES[architecture]
    reference = tiny(model_type, **fields)
    path = tmp_path / "model.gguf"
    with torch.no_grad():
        save_gguf(path, architecture, reference, kind=kind, metadata=metadata)
    ids = [(7 * index) % 94 for index in range(24)]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    found = logits(served(path), ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_scaling_of_llama3_follows_from_the_divisors(tmp_path: Path) -> None:
    reference = tiny("llama", rope_parameters=LLAMA3, max_position_embeddings=16384)
    plain = tiny("llama", rope_theta=LLAMA3["rope_theta"])
    divisors = plain.model.rotary_emb.inv_freq / reference.model.rotary_emb.inv_freq
    path = tmp_path / "model.gguf"
    metadata = {"llama.rope.freq_base": LLAMA3["rope_theta"]}
    save_gguf(path, "llama", reference, metadata=metadata, extra={"rope_freqs.weight": divisors})
    ids = [(7 * index) % 94 for index in range(24)]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(served(path), ids), expected, rtol=1e-4, atol=1e-5)
    save_gguf(path, "llama", plain, metadata=metadata, extra={"rope_freqs.weight": divisors + 1})
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight: only the factors of Llama 3"):
        unpacked_model(path)


QUANTIZED = [kind.name for kind in TYPES.values() if kind.numbers > 1]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_rows_of_each_type_have_the_values_of_transformers(kind: str, tmp_path: Path) -> None:
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    model = tiny("qwen2")
    path = tmp_path / "model.gguf"
    save_gguf(path, "qwen2", model, kind=kind)
    number = next(number for number, known in TYPES.items() if known.name == kind)
    blocks = random_blocks(kind, 256, 256, seed=sum(b"blk.0.ffn_down.weight"))
    size = TYPES[number].size
    if number not in dequant.GGML_BLOCK:
        expected = dequantized(blocks, kind)
    else:
        flat = torch.from_numpy(blocks.reshape(-1, size))
        expected = dequant.dequantize(flat.flatten(), number).reshape(256, 256)
    with GgufTensors(path) as tensors:
        found = tensors.get_slice("model.layers.0.mlp.down_proj.weight")
        assert found.get_shape() == [256, 256]
        torch.testing.assert_close(found[...], expected)
        for part in (slice(3, 90), slice(1, 256, 2), slice(0, 0)):
            assert torch.equal(found[part], found[...][part])
            assert torch.equal(found[part, 32:64], found[...][part, 32:64])


WRONG_METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"llama.attention.clamp": 3.0}, r"attention.clamp.* is unknown and may"),
    "experts": ({"llama.expert_count": 8}, "expert_count = 8 is not implemented"),
    "a window": ({"llama.attention.sliding_window": 8}, "sliding_window isn't implemented"),
    "an encoder": ({"llama.attention.causal": False}, "attention.causal"),
    "another head": ({"llama.attention.value_length": 8}, "value_length is 8, and a head has 64"),
    "a scale": ({"llama.rope.scaling.type": "su"}, "rope.scaling.type = 'su' isn't implemented"),
    "a part of a model": ({"split.count": 3}, "llama-gguf-split --merge"),
    "an adapter": ({"general.type": "adapter"}, "general.type is 'adapter', not a model"),
    "no base": ({"llama.rope.freq_base": 0.0}, "rope.freq_base must be a number above 0"),
    "another tokenizer": ({"tokenizer.ggml.model": "rwkv"}, "only gpt2 and llama are served"),
}


@pytest.mark.parametrize("name", WRONG_METADATA)
def test_what_isnt_implemented_is_refused_by_name(name: str, tmp_path: Path) -> None:
    metadata, said = WRONG_METADATA[name]
    path = tmp_path / "model.gguf"
    tokens = {"tokenizer.ggml.tokens": ["a"]}
    save_gguf(path, "llama", tiny("llama"), metadata=metadata | tokens)
    with pytest.raises(DovetailError, match=said) as caught:
        unpacked_model(path)
    assert str(path) in str(caught.value)


def test_an_unknown_architecture_or_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ones = torch.ones(4)
    save_gguf(path, "llama", tiny("llama"), extra={"blk.0.attn_sinks.weight": ones})
    with pytest.raises(ModelLoadError, match=r"attn_sinks.weight' isn't known of llama"):
        served(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(UnsupportedError, match="architecture is 'mamba'; of GGUF files only llama"):
        unpacked_model(path)


def test_a_directory_is_made_once_and_again_for_another_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, "llama", tiny("llama"))
    made = unpacked_model(path)
    assert unpacked_model(path) == made
    assert read_header(made / "model.gguf").tensors == read_header(path).tensors
    save_gguf(path, "llama", tiny("llama", num_hidden_layers=1))
    assert unpacked_model(path) != made
