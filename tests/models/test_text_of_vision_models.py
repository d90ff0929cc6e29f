"""The text model of a vision checkpoint is served, with the same tokens as the whole model for
text."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Mistral3Config,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
)

from dovetail import LLMEngine, SamplingParams
from dovetail.errors import ModelLoadError, UnsupportedError
from tests.models.tiny_configs import tiny_whole

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
CONFIGS: dict[str, Any] = {
    "gemma3": lambda: Gemma3Config(
        text_config={**TEXT, "sliding_window": 16},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=299,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 16},
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            },
        },
        vision_config={
            "hidden_size": 32,
            "depth": 1,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [],
        },
    ),
}
OF_STATES = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
EYES = {
    "hidden_size": 32,
    "depth": 1,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}
CONFIGS |= {
    "qwen3_5": lambda: Qwen3_5Config(
        text_config={**TEXT, **OF_STATES, "rope_parameters": MROPE, "tie_word_embeddings": True},
        vision_config=EYES,
        tie_word_embeddings=True,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(
        text_config={**TEXT, **OF_STATES, **EXPERTS, "rope_parameters": MROPE}, vision_config=EYES
    ),
}
CONFIGS |= {
    name: partial(tiny_whole, name)
    for name in (
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl_moe",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "smolvlm",
        "idefics2",
    )
}
PROMPTS = ([5, 6, 7], list(range(3, 43)))


def saved(directory: Path, name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(CONFIGS[name]()).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return model


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(6):
        ids.append(
            int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        )
    return ids[len(prompt) :]


def served(directory: Path) -> list[list[int]]:
    with LLMEngine.from_config(
        {
            "model": str(directory),
            "dtype": "float32",
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
        }
    ) as engine:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(
                str(index),
                {"prompt_token_ids": prompt},
                SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False),
            )
        got = {}
        while engine.has_unfinished_requests():
            got |= {
                output.request_id: list(output.outputs[0].token_ids) for output in engine.step()
            }
    return [got[str(index)] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_those_of_the_whole_model(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved(tmp_path, name)
    with caplog.at_level(logging.INFO, "dovetail"):
        assert served(tmp_path) == [greedy(model, prompt) for prompt in PROMPTS]
    assert "the language model of" in caplog.text


def test_published_experts_of_qwen3_vl_are_transposed(tmp_path: Path) -> None:
    """transformers saves them as [outputs, inputs]; those that are published are [inputs, outputs].
    It reads both."""
    model = saved(tmp_path, "qwen3_vl_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert served(tmp_path) == [greedy(model, prompt) for prompt in PROMPTS]


def test_published_files_of_qwen2_5_vl_name_the_text_at_the_top(tmp_path: Path) -> None:
    """Fields of the text model lie beside `vision_config`, and its tensors are named as without a
    vision model."""
    model = saved(tmp_path, "qwen2_5_vl")
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {key: value for key, value in text.items() if key not in ("model_type", "dtype")}
    config |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    names = {
        name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        for name in tensors
    }
    save_file(
        {names[name]: tensor for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert served(tmp_path) == [greedy(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("params.json", "Mistral's own layout"),
        ("adapter_config.json", "is an adapter"),
    ],
)
def test_a_directory_that_is_no_model_is_named(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(UnsupportedError, match=said):
        LLMEngine.from_config({"model": str(tmp_path)})


def test_a_checkpoint_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}'
    )
    other = tmp_path / "hf_quant_config.json"
    other.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"hf_quant_config.json: quantization: expected keys"):
        LLMEngine.from_config({"model": str(tmp_path)})
    other.write_text('{"quantization": {"quant_algo": "W4A8_AWQ", "exclude_modules": []}}')
    with pytest.raises(UnsupportedError, match="quant_algo = 'W4A8_AWQ' is not implemented"):
        LLMEngine.from_config({"model": str(tmp_path)})
