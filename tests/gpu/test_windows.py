"""Models of several cache groups on a GPU: in float32 the tokens of transformers, with and without
graphs, in chunks and after preemption."""

from __future__ import annotations

import pytest
import torch

from dovetail import LLMEngine
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.gpu.device import on_a_gpu, settings_for
from tests.models.test_windows import CONFIGS, SHAPE, WINDOW, too_little_memory

pytestmark = on_a_gpu

NAMES = ["gemma2", "gemma3", "gemma4", "gpt_oss"]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(name: str, graphs: bool) -> None:
    prompts = random_prompts([6 * WINDOW, 5 * WINDOW + 3, 1, 20], SHAPE["vocab_size"], seed=1)
    with checkpoint(CONFIGS[name]) as (directory, model):
        outputs = run(
            directory,
            prompts,
            [greedy(24)] * len(prompts),
            **settings_for("triton", max_num_batched_tokens=70, cuda_graphs=graphs),
        )
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            compare_greedy(model, prompt, tokens, Comparison())


@pytest.mark.parametrize("name", NAMES)
def test_requests_preempted_between_recorded_steps_write_the_same_tokens(name: str) -> None:
    prompts = random_prompts([3, 9, 1, 5, 12, 2], SHAPE["vocab_size"], seed=2)
    with checkpoint(CONFIGS[name]) as (directory, model):
        settings = settings_for(
            "triton", max_num_batched_tokens=16, kv_cache_memory=too_little_memory(CONFIGS[name])
        )
        got: dict[str, list[int]] = {}
        with LLMEngine.from_config(
            {"model": str(directory), "dtype": "float32", "generation_config": "none"}, **settings
        ) as engine:
            for index, prompt in enumerate(prompts):
                engine.add_request(str(index), prompt, greedy(5 * WINDOW))
            while engine.has_unfinished_requests():
                got |= {
                    output.request_id: list(output.outputs[0].token_ids) for output in engine.step()
                }
            assert engine.stats().preemptions > 0
        for index, prompt in enumerate(prompts):
            compare_greedy(model, prompt, got[str(index)], Comparison())
