"""Models with sliding windows: at contexts of several windows, greedy tokens are those of
transformers, whatever happens to a request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    MinistralConfig,
    MistralConfig,
)

from dovetail import LLMEngine
from dovetail.nn.format.fp8 import Fp8
from dovetail.nn.parallel import SINGLE
from dovetail.nn.placed_weights import place_weights
from dovetail.testing import ModelSuite
from dovetail_models.gemma4 import Gemma4
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.models.oracle import CPU, FakeGroup, arch_of, build

WINDOW, MAX_LEN, NEW = 16, 128, 12
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not an equal share of the hidden size
    "max_position_embeddings": MAX_LEN,
    "sliding_window": WINDOW,
    "pad_token_id": None,
}
GEMMA = SHAPE | {"query_pre_attn_scalar": 7}
SCALED = {
    "rope_type": "linear",
    "factor": 8.0,
    "rope_theta": 1e6,
}  # as in Gemma 3 of 4B parameters and more
TURNS = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
}
CONFIGS: dict[str, Any] = {
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(
        **GEMMA
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": SCALED,
                "sliding_attention": {"rope_type": "default"},
            },
        }
    ),
    "gemma4": Gemma4TextConfig(
        **SHAPE
        | {
            "num_hidden_layers": 7,
            "head_dim": 8,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2 + ["full_attention"],
        },
        global_head_dim=16,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=97,
        use_double_wide_mlp=True,
    ),
    "mistral": MistralConfig(**SHAPE),
    "ministral": MinistralConfig(**SHAPE | TURNS),
    "gpt_oss": GptOssConfig(
        **SHAPE,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}


def too_little_memory(config: Any) -> str:
    """Return three quarters of the memory that K and V of a request of the longest length take if
    nothing is released."""
    specs = [spec for spec in arch_of(config).layer_specs(config, SINGLE) if spec.shares is None]
    return f"{sum(2 * 4 * spec.kv_heads * spec.head_size for spec in specs) * MAX_LEN * 3 // 4}B"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow("makes several engines or many tokens")
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    long, middle, short = random_prompts(
        [6 * WINDOW, 5 * WINDOW + 3, 1], SHAPE["vocab_size"], seed=1
    )
    sharing = [*long[: 5 * WINDOW], 3, 4]
    circumstances: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
        "in chunks": ([long, middle, short], {"max_num_batched_tokens": 20}),
        "after a prefix hit": ([long, sharing], {"max_num_seqs": 1}),
    }
    with checkpoint(CONFIGS[name]) as (directory, model):
        for circumstance, (prompts, settings) in circumstances.items():
            outputs = run(
                directory, prompts, [greedy(NEW)] * len(prompts), block_size=8, **settings
            )
            for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
                counts = Comparison()
                compare_greedy(model, prompt, tokens, counts)
                assert (counts.tokens, counts.ties) == (NEW, 0), circumstance
        [forked] = run(directory, [long], [greedy(NEW, n=2)], block_size=8)
        for sample in forked.outputs:
            compare_greedy(model, long, list(sample.token_ids), Comparison())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow("makes several engines or many tokens")
def test_preempted_requests_write_the_same_tokens(name: str) -> None:
    prompts = random_prompts([3, 9, 1, 5, 12, 2], SHAPE["vocab_size"], seed=2)
    settings = {
        "block_size": 8,
        "max_num_batched_tokens": 16,
        "kv_cache_memory": too_little_memory(CONFIGS[name]),
    }
    with checkpoint(CONFIGS[name]) as (directory, model):
        got: dict[str, list[int]] = {}
        with LLMEngine.from_config(
            {"model": str(directory), "dtype": "float32", "generation_config": "none"}, **settings
        ) as engine:
            for index, prompt in enumerate(prompts):
                engine.add_request(str(index), prompt, greedy(3 * WINDOW))
            while engine.has_unfinished_requests():
                got |= {
                    output.request_id: list(output.outputs[0].token_ids) for output in engine.step()
                }
            assert engine.stats().preemptions > 0
        for index, prompt in enumerate(prompts):
            compare_greedy(model, prompt, got[str(index)], Comparison())


class TestShards:
    """Each rank has a share of the heads, in layers with K and V of their own and in those that
    share them."""

    @pytest.mark.slow("makes models of each number of ranks")
    def test_ranks_compute_what_one_does(self) -> None:
        class Suite(ModelSuite):
            component = Gemma4

        Suite().test_shards()

    def test_ranks_hold_the_layer_that_they_share(self) -> None:
        config = CONFIGS["gemma4"]
        whole, half = (
            arch_of(config).layer_specs(config, group) for group in (SINGLE, FakeGroup(1, 2))
        )
        assert [(spec.window, spec.head_size, spec.kv_heads, spec.shares) for spec in whole] == [
            *(
                (WINDOW, 8, 2, None),
                (WINDOW, 8, 2, None),
                (None, 16, 1, None),
                (WINDOW, 8, 2, None),
            ),
            *((WINDOW, 8, 2, 3), (None, 16, 1, 2), (None, 16, 1, 2)),
        ]
        assert [(spec.heads, spec.kv_heads) for spec in half] == [(2, 1)] * 7


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4"])
def test_weights_may_be_quantized(name: str) -> None:
    model = build(CONFIGS[name], weights_later=True)
    place_weights(model, Fp8(None), CPU)
    assert all(
        parameter.dtype == torch.float8_e4m3fn
        for key, parameter in model.named_parameters()
        if key.endswith("_proj.weight")
    )


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        *(
            (name, {"sliding_window": 0}, "sliding_window = 0 must be at least 1")
            for name in CONFIGS
        ),
        (
            "gemma2",
            {"layer_types": ["full_attention"] * 3},
            "layer_types has 3 entries, num_hidden_layers is 4",
        ),
        (
            "gemma3",
            {"layer_types": ["chunked_attention"] * 7},
            "layer_types: 'chunked_attention' is not implemented",
        ),
        (
            "ministral",
            {"sliding_window": None},
            "layer_types has sliding_attention, but sliding_window is null",
        ),
        ("gemma2", {"sliding_window_size": 8}, "sliding_window_size = 8, and sliding_window = 16"),
        (
            "gemma2",
            {"hidden_act": "gelu"},
            "hidden_act = 'gelu', and hidden_activation = 'gelu_pytorch_tanh'",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 must be more than 0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": SCALED}},
            "sliding_attention: rope_parameters: rope_theta = None",
        ),
        (
            "gemma4",
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 5,
                "moe_intermediate_size": 8,
            },
            "top_k_experts (5) is more than num_experts (4)",
        ),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5: no earlier layer"),
        (
            "gemma4",
            {"vocab_size_per_layer_input": 96},
            "vocab_size_per_layer_input = 96 is less than vocab_size (97)",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        (
            "gemma4",
            {"per_layer_config": {1: {"intermediate_size": 24}}},
            "per_layer_config: intermediate_size of layer 1 is not implemented",
        ),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation = 'relu' is not implemented"),
    ],
)
def test_what_it_does_not_compute_is_rejected_by_name(
    name: str, fields: dict[str, Any], said: str
) -> None:
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict())
    for field, value in fields.items():
        setattr(config, field, value)
    reasons = arch_of(config).reasons_against(config)
    assert any(said in reason for reason in reasons)
    assert not any(
        "remove" in reason for reason in reasons if next(iter(fields)) in vars(type(config)())
    )  # another model would be served
