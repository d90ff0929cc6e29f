"""Models with recurrent layers in the lab: their sizes, the layout of states, and how long steps
take."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail_lab.cache_layout import layout_of, measured_groups, pool_tokens
from dovetail_lab.model_sizes import ModelSizes
from dovetail_lab.traces import Span
from tests.lab.runs import request, run

BLOCK = 16
H200 = {"kind": "roofline", "device": "h200"}
LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120,
    "vocab_size": 151_936,
    "linear_conv_kernel_dim": 4,
    **LINEAR,
}
QWEN3_5_4B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248_320,
        "tie_word_embeddings": True,
        "linear_conv_kernel_dim": 4,
        **LINEAR,
    },
    "vision_config": {"depth": 24},
}
CONFIGS = {"qwen3-next": QWEN3_NEXT, "qwen3.5-4b": QWEN3_5_4B}


@pytest.fixture(scope="module", params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    """Name of a config whose model is built: the import of its code takes a second."""
    built(request.param)
    return str(request.param)


@cache
def built(name: str) -> Any:
    """Return transformers' model of a config, without memory."""
    transformers, torch = (
        pytest.importorskip("transformers", reason="the lab runs without it"),
        pytest.importorskip("torch"),
    )
    text = CONFIGS[name].get("text_config", CONFIGS[name])
    full = transformers.AutoConfig.for_model(
        text["model_type"], **{key: value for key, value in text.items() if key != "model_type"}
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(full)


def test_weights_are_counted_as_transformers_does(name: str) -> None:
    assert ModelSizes.of(CONFIGS[name]).parameters == pytest.approx(
        built(name).num_parameters(), rel=0.001
    )


def test_the_pool_is_laid_out_as_the_engine_s(name: str) -> None:
    torch = pytest.importorskip("torch", reason="the lab runs without it")
    from dovetail.api.attention import AttentionContext
    from dovetail.api.component import NoOptions
    from dovetail.nn.parallel import SINGLE
    from dovetail.nn.state.states import cached_state
    from dovetail_attention.sdpa import TorchAttention
    from dovetail_executors.runtime.kv_pool import kv_layout
    from tests.models.oracle import arch_of

    full = built(name).config
    arch = arch_of(full)
    backend = TorchAttention(NoOptions(), AttentionContext("cpu", "bfloat16", BLOCK))
    states = [
        cached_state(spec, torch.bfloat16, torch.float32) for spec in arch.state_specs(full, SINGLE)
    ]
    engines = kv_layout(backend, arch.layer_specs(full, SINGLE), "bfloat16", states).layout
    ours = ModelSizes.of(CONFIGS[name]).cache_layout(BLOCK).layout
    assert (ours.groups, ours.page_bytes) == (engines.groups, engines.page_bytes)


def test_a_state_takes_no_more_than_the_memory_that_it_needs() -> None:
    layout = ModelSizes.of(QWEN3_NEXT).cache_layout(BLOCK).layout
    needed = 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert needed <= layout.state_pages * layout.page_bytes < 1.02 * needed
    assert 40e9 // (layout.pages(300) * layout.page_bytes) >= 440


def test_a_simulation_holds_a_state_for_each_request_and_finds_checkpoints() -> None:
    step_time = {**H200, "model": QWEN3_5_4B}
    sizes = {"max_num_batched_tokens": 8192, "max_model_len": 8000, "block_size": BLOCK}
    requests = [
        request(index, 5.0 * index, prompt=2200, output=20, spans=(Span(7, 0, 1500),))
        for index in range(4)
    ]
    result = run(
        requests, executor={"step_time": step_time, "num_pages": None}, kv_cache="prefix", **sizes
    )
    assert result.settings["cache_groups"] == ["full", "states"]
    layout = ModelSizes.of(QWEN3_5_4B).cache_layout(BLOCK).layout
    assert max(result.timeline.kv_held) <= layout.pages(2220) + layout.state_pages, (
        "one at a time, and a checkpoint while it is written"
    )
    assert [record.cached_tokens for record in result.requests] == [0, 0, 1488, 1488], (
        "the second writes a checkpoint where both part"
    )


def test_a_decode_reads_and_writes_the_states() -> None:
    def decode_s(model: dict[str, Any]) -> float:
        [record] = run(
            [request(0, prompt=30, output=3)],
            executor={"step_time": {**H200, "model": model}, "num_pages": None},
            max_model_len=4000,
        )
        return float(np.diff(record.token_times_s).mean())

    text = QWEN3_5_4B["text_config"]
    small = {**QWEN3_5_4B, "text_config": {**text, "linear_key_head_dim": 64}}
    sizes, fewer = ModelSizes.of(QWEN3_5_4B), ModelSizes.of(small)
    read = 2 * (sizes.state_bytes - fewer.state_bytes) + 2 * (
        sizes.dense_weights - fewer.dense_weights
    )
    assert decode_s(QWEN3_5_4B) - decode_s(small) == pytest.approx(read / (4800e9 * 0.78), rel=0.05)


def test_a_profile_keeps_the_states_of_the_measured_engine() -> None:
    layout = ModelSizes.of(QWEN3_NEXT).cache_layout(BLOCK).layout
    again = layout_of(measured_groups(layout), BLOCK)
    assert [group.recurrent for group in again.groups] == [False, True]
    assert (again.state_pages, again.pages(100)) == (layout.state_pages, layout.pages(100))
    assert pool_tokens(layout, layout.state_pages + 10) == 10 * BLOCK
    assert pool_tokens(layout, 2 * layout.state_pages, requests=3) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"linear_num_value_heads": 0}, "linear_num_value_heads as a positive integer, got 0"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types as a list of 48"),
        (
            {"layer_types": ["linear_attention", "chunked_attention"] * 24},
            "chunked_attention.*not supported",
        ),
    ],
)
def test_layers_that_do_not_add_up_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelSizes.of({**QWEN3_NEXT, **changes})
