"""Shared by the tests on a GPU: when they run, and models with few different shapes.

A kernel is compiled for each new shape, in one to two seconds, and a model has some ten of them:
random shapes, as on the CPU, would be a test of the compiler's patience. So shapes come from a
short list, and everything else about a model is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dovetail_executors.runtime import worker
from tests.models.configs import ropes
from tests.support import FULL

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@dataclass(frozen=True)
class Shape:
    """Sizes that kernels are compiled for."""

    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    window: int  # where a model has one

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "vocab_size": 61,
            "hidden_size": self.heads * self.head_size,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }


SHAPES = [Shape(4, 2, 64, 192, 40), Shape(6, 2, 80, 160, 5)]
if FULL:
    SHAPES += [Shape(2, 1, 128, 96, 100), Shape(3, 3, 96, 64, 1), Shape(8, 1, 8, 20, 17)]


@st.composite
def configs(draw: st.DrawFn) -> Any:
    """A model of any of the four architectures, in one of `SHAPES`."""
    shape = draw(st.sampled_from(SHAPES))
    fields = {
        **shape.fields,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(ropes()),
    }
    windows = {
        "use_sliding_window": draw(st.booleans()),
        "sliding_window": shape.window,
        "max_window_layers": draw(st.integers(0, 3)),
    }
    bias = draw(st.booleans())
    kind = draw(st.sampled_from([Qwen3Config, Qwen2Config, LlamaConfig, MistralConfig]))
    if kind is Qwen3Config:
        return Qwen3Config(**fields, head_dim=shape.head_size, attention_bias=bias, **windows)
    if kind is Qwen2Config:
        return Qwen2Config(**fields, **windows)
    if kind is LlamaConfig:
        return LlamaConfig(**fields, attention_bias=bias, mlp_bias=draw(st.booleans()))
    return MistralConfig(**fields, sliding_window=draw(st.sampled_from([None, shape.window])))


def settings_for(attention: str, **config: Any) -> dict[str, Any]:
    """Of a small engine on the GPU."""
    return {
        "attention": attention,
        "executor": {"name": "local", "device": "cuda"},
        "kv_cache_memory": "256MiB",
        "max_num_seqs": 8,
        **config,
    }


def make_drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines without overlap check drafts whenever there are some: what costs nothing pays,
    however small the model is."""
    monkeypatch.setattr(worker, "line_costs", lambda *asked: ((1, 1e-3), (1024, 1e-3)))
    monkeypatch.setattr(worker, "draft_costs", lambda *asked: ((1, 1e-6),))


def skip_unless_usable(attention: str, dtype: str, head_size: int) -> None:
    """Skip with the backend's own reasons."""
    from dovetail.api.attention import AttentionContext, LayerSpec
    from dovetail_executors.runtime.attention_choice import backend_class
    from tests.runtime.demo import context

    backend = backend_class(
        next(target for target in context().attention if target.name == f"dovetail:{attention}")
    )
    asked = AttentionContext("cuda:0", dtype, backend.capabilities.default_block_size())
    reasons = backend.reasons_against(asked, [LayerSpec(0, 4, 2, head_size, 1.0)])
    if reasons:
        pytest.skip(f"{attention}: {'; '.join(reasons)}")


def save(config: Any, dtype: torch.dtype, directory: Path) -> None:
    """A checkpoint of random weights that keep activations near 1 through all layers, as trained
    ones do."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(
                0.0, parameter.shape[-1] ** -0.5
            )
    model.to(dtype).save_pretrained(directory)
