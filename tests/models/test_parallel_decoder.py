"""A decoder split over ranks computes what the whole one computes. The ranks are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dovetail.errors import UnsupportedError
from dovetail.runtime.weights import dummy_weights
from tests.models.oracle import arch_of, build, run
from tests.support import examples


class ThreadGroup:
    """One of `size` ranks that are threads of one process."""

    def __init__(self, rank: int, shares: list[Any], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(shares)
        self.shares, self.barrier = shares, barrier

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.shares[self.rank] = x.clone()
        self.barrier.wait(timeout=20)
        everyones = list(self.shares)
        self.barrier.wait(timeout=20)
        return everyones

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=dim)


def on_ranks(size: int, act: Any) -> list[Any]:
    """What `act(group)` returns on each rank."""
    shares, barrier = [None] * size, Barrier(size)

    def one(rank: int) -> Any:
        try:
            return act(ThreadGroup(rank, shares, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@st.composite
def splittable_configs(draw: st.DrawFn) -> Any:
    make = draw(st.sampled_from([LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig]))
    heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (4, 1), (8, 2)]))
    biases = {"attention_bias": True, "mlp_bias": True} if make is LlamaConfig else {}
    return make(
        vocab_size=draw(st.sampled_from([8, 13])),
        hidden_size=heads * 4,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=4,
        max_position_embeddings=32,
        tie_word_embeddings=draw(st.booleans()),
        **biases,
    )


@given(config=splittable_configs(), size=st.sampled_from([2, 4]), seed=st.integers(0, 99))
@examples(quick=25, full=300)
def test_all_ranks_get_the_logits_of_the_whole_model(config: Any, size: int, seed: int) -> None:
    tokens = torch.randint(config.vocab_size, (9,), generator=torch.Generator().manual_seed(seed))

    def logits(group: Any = None) -> torch.Tensor:
        model = build(config, **({"parallel": group} if group else {}))
        dummy_weights(model, seed)
        for parameter in model.parameters():
            parameter.mul_(10)  # 0.2, not 0.02: what is lost shows
        return run(model, tokens)[1]

    whole = logits()
    for share in on_ranks(size, logits):
        torch.testing.assert_close(share, whole, atol=1e-4 * max(1.0, whole.abs().max().item()), rtol=1e-4)


def test_layer_specs_are_those_of_the_rank() -> None:
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    specs = arch_of(config).layer_specs(config, ThreadGroup(1, [None] * 4, Barrier(1)))
    assert [(spec.index, spec.heads, spec.kv_heads, spec.head_size) for spec in specs] == [(0, 2, 1, 8), (1, 2, 1, 8)]


def test_heads_that_cannot_be_split_are_refused() -> None:
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6, hidden_size=48)
    with pytest.raises(UnsupportedError, match="num_attention_heads"):
        arch_of(config).layer_specs(config, ThreadGroup(0, [None] * 4, Barrier(1)))
