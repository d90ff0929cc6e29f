"""Models with recurrent layers on a GPU: recorded steps write transformers' tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.gpu.device import on_a_gpu, settings_for
from tests.models import hybrids

pytestmark = on_a_gpu

NEW = 10
CONFIGS: dict[str, Callable[..., Any]] = {
    "lfm2": hybrids.lfm2,
    "lfm2_biased": hybrids.lfm2_biased,
    "lfm2_moe": hybrids.lfm2_moe,
}
WAYS: dict[str, dict[str, Any]] = {
    "recorded": {},
    "launched": {"cuda_graphs": False},
    "in chunks of 33": {"max_num_batched_tokens": 33},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_transformers(name: str, way: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = random_prompts([130, 75, 1], 97, seed=1)
    settings = settings_for("triton", **{"cuda_graphs": True, **WAYS[way]})
    with checkpoint(CONFIGS[name](hidden_size=128)) as (directory, model):
        outputs = run(directory, prompts, [greedy(NEW)] * len(prompts), **settings)
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            counts = Comparison()
            compare_greedy(model, prompt, tokens, counts)
            assert counts.tokens == NEW
            assert counts.ties <= 1
