"""Rotary embedding equals transformers', to the bit where the order of operations is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from dovetail.errors import UnsupportedError
from dovetail.nn.rotary import RotaryEmbedding, apply_rotary, rope_from_config, rope_reasons_against
from tests.models.configs import ropes
from tests.rounding import assert_rounded
from tests.support import examples

MAX_LEN = 128


def transformers_rotary(parameters: dict[str, Any], head_size: int) -> Any:
    config = LlamaConfig(
        hidden_size=head_size * 2,
        num_attention_heads=2,
        rope_parameters=dict(parameters),
        max_position_embeddings=MAX_LEN,
    )
    return LlamaRotaryEmbedding(config)


@given(parameters=ropes(), head_size=st.sampled_from([2, 6, 16, 64, 128]))
@examples(quick=100, full=2000)
def test_tables_equal_transformers_to_the_bit(parameters: dict[str, Any], head_size: int) -> None:
    rope, theirs = (
        rope_from_config(parameters, head_size),
        transformers_rotary(parameters, head_size),
    )
    assert torch.equal(rope.frequencies(), theirs.inv_freq)
    assert rope.attention_factor == theirs.attention_scaling
    positions = torch.arange(MAX_LEN)
    cos, sin = (x[0] for x in theirs(torch.zeros(1), positions[None]))
    ours = RotaryEmbedding(rope, MAX_LEN, device=torch.device("cpu"))(positions)
    assert torch.equal(ours.cos[:, 0], cos)
    assert torch.equal(ours.sin[:, 0].abs(), sin.abs())


@given(parameters=ropes(), head_size=st.sampled_from([2, 8, 64]), seed=st.integers(0, 99))
@examples(quick=30, full=300)
def test_turned_heads_equal_transformers(
    parameters: dict[str, Any], head_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    positions, x = torch.randint(MAX_LEN, (11,)), torch.randn(11, 3, head_size)
    cos, sin = transformers_rotary(parameters, head_size)(x, positions[None])
    expected = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0]
    rotation = RotaryEmbedding(
        rope_from_config(parameters, head_size), MAX_LEN, device=torch.device("cpu")
    )(positions)
    assert_rounded(apply_rotary(x, rotation), expected, 3)


def test_half_precision_heads_are_turned_in_float32_and_rounded_once() -> None:
    rotation = RotaryEmbedding(
        rope_from_config({"rope_theta": 10000.0}, 64), MAX_LEN, device=torch.device("cpu")
    )(torch.arange(MAX_LEN))
    x = torch.randn(MAX_LEN, 2, 64).bfloat16()
    assert torch.equal(apply_rotary(x, rotation), apply_rotary(x.float(), rotation).bfloat16())


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "rope_type 'dynamic'"),
        ({"rope_type": "longrope", "rope_theta": 1e4}, "rope_type 'longrope'"),
        ({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}, "mrope_section"),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "partial_rotary_factor",
        ),
        ({"rope_type": "default", "rope_theta": None}, "rope_theta"),
        ({"full_attention": {"rope_type": "default"}, "rope_theta": 1e4}, "full_attention"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}, "factor"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}, "factor"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor"),
        (LLAMA3 | {"beta_fast": 32}, "beta_fast"),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 8,
                "beta_fast": "x",
            },
            "beta_fast",
        ),
    ],
)
def test_what_is_not_implemented_is_rejected_by_name(
    parameters: dict[str, Any], named: str
) -> None:
    assert any(named in reason for reason in rope_reasons_against(parameters))
    with pytest.raises(UnsupportedError, match=named):
        rope_from_config(parameters, 8)
