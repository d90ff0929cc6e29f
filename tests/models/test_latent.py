"""Models with latent attention: what they keep, what they are split into, which tensors they skip,
and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Glm4MoeLiteConfig

from dovetail.api.attention import AttentionContext
from dovetail.api.component import NoOptions
from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format.dense import DENSE, Dense
from dovetail.nn.format.fp8 import Fp8
from dovetail.nn.parallel import SINGLE
from dovetail.nn.placed_weights import place_weights
from dovetail.nn.weights import load_weights
from dovetail.testing import ModelSuite
from dovetail.testing.suites.model_configs import OF_LATENTS, TINY
from dovetail_attention.sdpa import TorchAttention
from dovetail_models.deepseek import DeepseekV3
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.models.configs import latent_configs
from tests.models.oracle import (
    CPU,
    FakeGroup,
    arch_of,
    build,
    checkpoint_tensors,
    reference,
    run_reference,
)
from tests.models.oracle import run as forward
from tests.models.test_decoders import a_pair, assert_close, some_tokens
from tests.support import examples


def small(**fields: Any) -> DeepseekV3Config:
    values = {
        name: value
        for name, value in (TINY | OF_LATENTS).items()
        if name in vars(DeepseekV3Config()) and name not in fields
    }
    config = DeepseekV3Config(**values, **fields)
    config.architectures = ["DeepseekV3ForCausalLM"]
    return config


@given(config=latent_configs(), length=st.integers(1, 64), seed=st.integers(0, 99))
@examples(quick=25, full=1000)
def test_hidden_states_and_logits_equal_transformers(config: Any, length: int, seed: int) -> None:
    theirs, ours = a_pair(config, seed)
    tokens = some_tokens(config, length, seed)
    for mine, expected in zip(forward(ours, tokens), run_reference(theirs, tokens), strict=True):
        assert_close(mine, expected)


def test_greedy_tokens_of_a_ragged_batch_are_those_of_transformers() -> None:
    prompts = random_prompts([1, 120, 33, 7], 61, 0)
    with checkpoint(
        small(max_position_embeddings=256, n_group=2, topk_group=1, num_experts_per_tok=2), 0
    ) as (directory, model):
        for prompt, tokens in zip(
            prompts,
            tokens_of(run(directory, prompts, [greedy(12)] * 4, max_num_batched_tokens=90)),
            strict=True,
        ):
            compare_greedy(model, prompt, tokens, Comparison())


class TestShards:
    """Ranks split the heads, and each has all latents."""

    @pytest.mark.slow("makes models of each number of ranks")
    def test_ranks_compute_what_one_does(self) -> None:
        class Suite(ModelSuite):
            component = DeepseekV3

        Suite().test_shards()

    def test_latents_are_not_split(self) -> None:
        config = small()
        [whole, *_], [half, *_] = (
            arch_of(config).layer_specs(config, group) for group in (SINGLE, FakeGroup(1, 2))
        )
        assert (whole.heads, half.heads, whole.kv_heads, half.kv_heads) == (4, 2, 1, 1)
        assert whole.head_size == half.head_size


@pytest.mark.parametrize(
    ("config", "bytes_per_token", "times"),
    [(DeepseekV3Config(), 70_272, 85), (Glm4MoeLiteConfig(), 54_144, 17)],  # in bfloat16
)
def test_a_token_takes_a_fraction_of_what_k_and_v_of_all_heads_would(
    config: Any, bytes_per_token: int, times: int
) -> None:
    backend = TorchAttention(NoOptions(), AttentionContext("cpu", "bfloat16", 16))
    taken = (
        sum(
            sum(backend.tensor_bytes(spec, 16))
            for spec in arch_of(config).layer_specs(config, SINGLE)
        )
        // 16
    )
    # what V would be padded to
    size = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    padded = 2 * 2 * config.num_hidden_layers * config.num_attention_heads * size
    assert (taken, padded // taken) == (bytes_per_token, times)


@pytest.mark.parametrize(("layer", "skipped"), [(2, True), (3, False)])
def test_only_layers_that_predict_further_tokens_are_skipped(
    layer: int, skipped: bool, tmp_path: Path
) -> None:
    config = small(num_nextn_predict_layers=1)
    save_file(checkpoint_tensors(reference(config)), tmp_path / "model.safetensors")
    extra = load_file(tmp_path / "model.safetensors") | {
        f"model.layers.{layer}.eh_proj.weight": torch.zeros(2, 2)
    }
    save_file(extra, tmp_path / "model.safetensors")
    if skipped:
        load_weights(build(config), tmp_path)
    else:
        with pytest.raises(ModelLoadError, match="eh_proj"):
            load_weights(build(config), tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_group": 3}, "n_group"),
        ({"n_group": 4}, "n_group"),  # groups of one expert, of which the best two count
        ({"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, "topk_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"mlp_layer_types": ["sparse"] * 2}, "mlp_layer_types"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"qk_rope_head_dim": 3, "head_dim": 3}, "qk_rope_head_dim"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"index_topk": 2048}, "index_topk"),
        ({"attention_bias": True, "q_lora_rank": None}, "attention_bias"),
    ],
)
def test_what_it_does_not_compute_is_rejected_by_name(fields: dict[str, Any], named: str) -> None:
    config = small(**fields)
    assert any(named in reason for reason in arch_of(config).reasons_against(config))


@pytest.mark.parametrize(("dense", "refused"), [(1, False), (0, True), (2, True)])
def test_two_fields_that_disagree_on_the_layers_with_experts_are_refused(
    dense: int, refused: bool
) -> None:
    config = Glm4MoeLiteConfig(first_k_dense_replace=dense)
    assert (
        any("first_k_dense_replace" in reason for reason in arch_of(config).reasons_against(config))
        == refused
    )


def in_blocks(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in FP8 with a scale for each block, as DeepSeek stores it."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % size, 0, -rows % size))
    blocks = padded.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    scales = blocks.abs().amax((1, 3)) / 448
    narrow = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return narrow.to(torch.float8_e4m3fn), scales


def widened(narrow: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    spread = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return narrow.float() * spread[: narrow.shape[0], : narrow.shape[1]]


@pytest.mark.parametrize("rank", [None, 1])
def test_deepseeks_own_fp8_computes_what_its_dequantized_weights_do(
    rank: int | None, tmp_path: Path
) -> None:
    """Also the projection that is multiplied from both sides, which is kept plain."""
    tensors = checkpoint_tensors(reference(small()))
    narrow: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            narrow[name] = plain[name] = tensor
            continue
        narrow[name], scales = in_blocks(tensor, 4)
        narrow[f"{name}_scale_inv"] = scales
        plain[name] = widened(narrow[name], scales, 4)
    said = {"quant_method": "fp8", "weight_block_size": [4, 4], "fmt": "e4m3"}
    group = SINGLE if rank is None else FakeGroup(rank, 2)
    tokens = some_tokens(small(), 20, 0)
    found = []
    for name, content, quantization in (("plain", plain, None), ("fp8", narrow, Fp8(said))):
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors")
        model = build(small(), parallel=group, weights_later=quantization is not None)
        if quantization is not None:
            place_weights(model, quantization, CPU)
        load_weights(model, tmp_path / name)
        found.append(forward(model, tokens)[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_a_weight_that_stays_plain_needs_a_format_that_is_read(monkeypatch: Any) -> None:
    said: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    made = Fp8({**said, "modules_to_not_convert": ["q_b_proj"]})
    monkeypatch.setattr(made, "of_module", lambda name: Rounded() if "kv_b" in name else DENSE)
    with pytest.raises(
        UnsupportedError, match=r"layers\.0\.self_attn\.kv_b_proj must be stored in 16 bits"
    ):
        place_weights(build(small(), weights_later=True), made, CPU)
    place_weights(build(small(), weights_later=True), Fp8(None), CPU)


class Rounded(Dense):
    """A format without tensors of its own."""
