"""What is true on a CPU is true on a GPU: run with `pytest -m gpu tests/gpu` on a machine that has one; skipped elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from dovetail import SamplingParams
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import MAX_LEN, random_prompts
from tests.models.configs import configs
from tests.support import examples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

COUNTS = Comparison()
MEMORY = "64MiB"


def on_gpu(attention: str, **config: Any) -> dict[str, Any]:
    return {"attention": attention, "kv_cache_memory": MEMORY, "max_num_seqs": 8, **config}


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("attention", ["torch", "triton"])
@examples(quick=10, full=60)
@given(config=configs(), lens=st.lists(st.one_of(st.integers(1, 20), st.integers(1, 700)), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_greedy_tokens_in_float32_are_those_of_transformers(attention: str, graphs: bool, config: Any, lens: list[int], seed: int) -> None:
    config.max_position_embeddings = MAX_LEN
    if attention == "triton" and config.to_dict().get("head_dim", 8) % 8:
        config.head_dim = 8
    prompts = random_prompts(lens, config.vocab_size, seed)
    with checkpoint(config, seed) as (directory, model):
        try:
            outputs = run(directory, prompts, [greedy(16)] * len(prompts), **on_gpu(attention, max_num_batched_tokens=300, cuda_graphs=graphs))
        except Exception as error:
            if "head size" in str(error):
                return
            raise
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            compare_greedy(model, prompt, tokens, COUNTS)


SMALL = Qwen3Config(
    vocab_size=997, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=64
)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_the_same_with_and_without_graphs_overlap_chunks_and_preemption(temperature: float) -> None:
    prompts = random_prompts([1, 5, 30, 200, 17, 64], 997, 0)
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True, detokenize=False, output_kind="final") for i in range(6)
    ]
    with checkpoint(SMALL) as (directory, _):
        plain = on_gpu("triton", overlap=False, cuda_graphs=False, max_model_len=256)
        expected = tokens_of(run(directory, prompts, params, **plain))
        changed = [{"cuda_graphs": True, "overlap": True}, {"max_num_batched_tokens": 33}, {"executor": {"name": "local", "num_blocks": 20}}]
        changed += [{"attention": "torch"}, {"block_size": 64}]
        for change in changed:
            assert tokens_of(run(directory, prompts, params, **{**plain, "cuda_graphs": True, "overlap": True, **change})) == expected, change
