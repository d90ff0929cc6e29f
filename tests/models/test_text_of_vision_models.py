"""The text model of a vision checkpoint is served, with the same tokens as the whole model for text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
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
from dovetail.errors import UnsupportedError

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
    "gemma3": lambda: Gemma3Config(text_config={**TEXT, "sliding_window": 16}, vision_config=VISION, mm_tokens_per_image=4, image_token_index=299),
    "mistral3": lambda: Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"}, vision_config={**VISION, "model_type": "pixtral", "head_dim": 16}
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        vision_config={"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "deepstack_visual_indexes": []},
    ),
}
OF_STATES = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
EYES = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
CONFIGS |= {
    "qwen3_5": lambda: Qwen3_5Config(
        text_config={**TEXT, **OF_STATES, "rope_parameters": MROPE, "tie_word_embeddings": True}, vision_config=EYES, tie_word_embeddings=True
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(text_config={**TEXT, **OF_STATES, **EXPERTS, "rope_parameters": MROPE}, vision_config=EYES),
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
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_those_of_the_whole_model(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = saved(tmp_path, name)
    with (
        caplog.at_level(logging.INFO, "dovetail"),
        LLMEngine.from_config({"model": str(tmp_path), "dtype": "float32", "max_num_batched_tokens": 16, "max_model_len": 64}) as engine,
    ):
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(
                str(index), {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
            )
        got = {}
        while engine.has_unfinished_requests():
            got |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    assert [got[str(index)] for index in range(len(PROMPTS))] == [greedy(model, prompt) for prompt in PROMPTS]
    assert "only the text model" in caplog.text


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
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="ModelOpt"):
        LLMEngine.from_config({"model": str(tmp_path)})
