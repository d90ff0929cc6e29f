"""Rotary positions on three axes are those of transformers' code for each type, to the bit."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from dovetail.errors import UnsupportedError
from dovetail.nn.model_files import text_of
from dovetail.nn.rotary import RotaryEmbedding, rope_from_config
from tests.models.oracle import CPU, arch_of
from tests.support import examples

MAX_LEN = 128
TYPES = {  # model type -> transformers' rotary embedding of its text
    "glm4v": "Glm4vTextRotaryEmbedding",
    "glm4v_moe": "Glm4vMoeTextRotaryEmbedding",
    "glm_ocr": "GlmOcrTextRotaryEmbedding",
    "qwen2_5_vl": "Qwen2_5_VLRotaryEmbedding",
    "qwen2_vl": "Qwen2VLRotaryEmbedding",
    "qwen3_5": "Qwen3_5TextRotaryEmbedding",
    "qwen3_5_moe": "Qwen3_5MoeTextRotaryEmbedding",
    "qwen3_vl": "Qwen3VLTextRotaryEmbedding",
    "qwen3_vl_moe": "Qwen3VLMoeTextRotaryEmbedding",
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
FIELDS: dict[str, Any] = {  # of checkpoints, where the default doesn't fit sections
    "glm4v": {"rope_parameters": HALF},
    "glm4v_moe": {"head_dim": 128},
    "glm_ocr": {"head_dim": 128, "rope_parameters": HALF},
}
NEIGHBORS = {"glm4v", "glm_ocr"}  # the numbers of a pair follow each other
INTERLEAVED = {"qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"}


def rotaries(model_type: str, **rope: Any) -> tuple[Any, RotaryEmbedding]:
    """Return transformers' rotary embedding, and ours, of the type's default config and these
    `rope_parameters`."""
    config = CONFIG_MAPPING[model_type](text_config=deepcopy(FIELDS.get(model_type)))
    config.text_config.rope_parameters |= rope
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    theirs = getattr(module, TYPES[model_type])(config.text_config)
    text = text_of(config, "model")
    return theirs, RotaryEmbedding(arch_of(text).rope(text, 0), MAX_LEN, device=CPU)


def assert_equal(model_type: str, seed: int, **rope: Any) -> None:
    """Compare cos and sin of each pair at random positions."""
    theirs, ours = rotaries(model_type, **rope)
    generator = torch.Generator().manual_seed(seed)
    axes = torch.randint(MAX_LEN, (3, 11), generator=generator)
    cos, sin = (x[0] for x in theirs(torch.zeros(1), axes[:, None]))
    pairs = cos.shape[1] // 2
    first = slice(0, None, 2) if model_type in NEIGHBORS else slice(0, pairs)
    rotation = ours(torch.zeros(11, dtype=torch.int64), axes)
    assert torch.equal(rotation.cos[:, 0, :pairs], cos[:, first])
    assert torch.equal(rotation.sin[:, 0, pairs:], sin[:, first])


@pytest.mark.parametrize("model_type", TYPES)
def test_sections_that_a_config_leaves_out_are_transformers_defaults(model_type: str) -> None:
    assert_equal(model_type, seed=0)


@given(model_type=st.sampled_from([*TYPES]), seed=st.integers(0, 99), data=st.data())
@examples(quick=30, full=500)
def test_each_pair_rotates_by_its_axis(model_type: str, seed: int, data: st.DataObject) -> None:
    pairs = rotaries(model_type)[1].table.shape[1] // 2
    counts = st.integers(0, pairs)
    sections = [data.draw(counts, label="height"), data.draw(counts, label="width")]
    if model_type in INTERLEAVED:
        sections = [data.draw(counts, label="time"), *sections]
    else:
        sections = [sections[0] // 2, sections[1] // 2]
        sections = [pairs - sum(sections), *sections]
    assert_equal(model_type, seed, mrope_section=sections)


@given(model_type=st.sampled_from([*TYPES]), seed=st.integers(0, 99))
@examples(quick=10, full=100)
def test_equal_axes_are_positions(model_type: str, seed: int) -> None:
    ours = rotaries(model_type)[1]
    positions = torch.randint(MAX_LEN, (7,), generator=torch.Generator().manual_seed(seed))
    plain = ours(positions)
    assert plain.table is ours.table  # text costs no gathering
    on_axes = ours(torch.zeros_like(positions), positions.expand(3, -1))
    assert torch.equal(on_axes.cos, plain.cos)
    assert torch.equal(on_axes.sin, plain.sin)


def test_sections_that_do_not_fit_the_head_are_refused() -> None:
    rope = {"rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    assert rope_from_config(rope, 6).axis == (0, 1, 2)
    with pytest.raises(UnsupportedError, match="mrope_section"):
        rope_from_config(rope, 8)
    assert rope_from_config(rope | {"mrope_interleaved": True}, 8).axis == (0, 1, 2, 0)
