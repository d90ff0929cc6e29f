"""Models with recurrent layers in an engine: greedy tokens are those of transformers, whatever
happens to a request."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail import LLMEngine
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.models import hybrids
from tests.models.hybrids import FAMILIES, SHAPE, THROUGH_TRANSFORMERS
from tests.models.tiny_configs import tiny
from tests.support import FULL

NEW = 10
ONE_OF_EACH = ["qwen3_next", "nemotron_h", "granite", "lfm2"]  # recurrences and decoders
# an attention that keeps a state, and no attention at all
THROUGH = ["zaya", "mamba2"]
TRIED = [*FAMILIES, *THROUGH_TRANSFORMERS] if FULL else [*ONE_OF_EACH, *THROUGH]
SETTINGS: dict[str, Any] = {"dtype": "float32", "generation_config": "none", "block_size": 8}


def config_of(name: str) -> Any:
    return FAMILIES[name]() if name in FAMILIES else tiny(name)


def assert_greedy(model: Any, prompt: list[int], tokens: list[int], what: str = "") -> None:
    counts = Comparison()
    compare_greedy(model, prompt, tokens, counts)
    assert (counts.tokens, counts.ties) == (NEW, 0), what


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.slow("makes several engines or many tokens")
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    long, middle, short = random_prompts([130, 75, 1], SHAPE["vocab_size"], seed=1)
    sharing = [*long[:101], 3, 4]
    circumstances: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
        "in chunks of 7": ([long, middle, short], {"max_num_batched_tokens": 7}),
        "after a prefix hit": ([long, sharing, long], {"max_num_seqs": 1}),
    }
    with checkpoint(config_of(name)) as (directory, model):
        for circumstance, (prompts, settings) in circumstances.items():
            outputs = run(
                directory, prompts, [greedy(NEW)] * len(prompts), block_size=8, **settings
            )
            for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
                assert_greedy(model, prompt, tokens, circumstance)
            assert bool(outputs[-1].num_cached_tokens) == (circumstance == "after a prefix hit")
        [forked] = run(directory, [long], [greedy(NEW, n=3)], block_size=8)
        for sample in forked.outputs:
            assert_greedy(model, long, list(sample.token_ids), "of several samples")


@pytest.mark.parametrize("name", ONE_OF_EACH if FULL else ["granite"])
def test_single_tokens_are_a_chunk_too(name: str) -> None:
    [prompt] = random_prompts([17], SHAPE["vocab_size"], seed=3)
    with checkpoint(FAMILIES[name]()) as (directory, model):
        [tokens] = tokens_of(
            run(directory, [prompt], [greedy(NEW)], max_num_batched_tokens=1, max_num_seqs=1)
        )
        assert_greedy(model, prompt, tokens)


@pytest.mark.slow("long answers in scarce memory")
@pytest.mark.parametrize(
    "name", [*ONE_OF_EACH, "kimi_linear", "zaya"] if FULL else ["qwen3_next", "zaya"]
)
def test_preempted_requests_write_the_same_tokens(name: str) -> None:
    prompts, new = random_prompts([3, 9, 1, 5, 12], SHAPE["vocab_size"], seed=2), 30
    with checkpoint(config_of(name)) as (directory, model):
        got: dict[str, list[int]] = {}
        settings = {
            **SETTINGS,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "executor": scarce(directory, requests=3),
        }
        with LLMEngine.from_config({"model": str(directory), **settings}) as engine:
            for index, prompt in enumerate(prompts):
                engine.add_request(str(index), prompt, greedy(new))
            while engine.has_unfinished_requests():
                got |= {
                    output.request_id: list(output.outputs[0].token_ids) for output in engine.step()
                }
            assert engine.stats().preemptions > 0
        for index, prompt in enumerate(prompts):
            compare_greedy(model, prompt, got[str(index)], Comparison())


def scarce(directory: Any, requests: int) -> dict[str, Any]:
    """An executor with pages for the states of this many requests, and for the K and V of a request
    of 64 tokens."""
    executor = {"name": "local", "num_pages": 500}
    with LLMEngine.from_config(
        {"model": str(directory), **SETTINGS, "max_model_len": 64, "executor": executor}
    ) as engine:
        layout = engine.core.kv.context.layout
    return {
        "name": "local",
        "num_pages": requests * layout.state_pages
        + layout.groups[0].blocks(64) * layout.groups[0].pages_per_block,
    }


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"] if FULL else ["nemotron_h"])
@pytest.mark.slow("starts ranks: processes that import torch")
@pytest.mark.usefixtures("ranks_in_threads")
def test_two_ranks_write_the_same_tokens(name: str) -> None:
    prompts = random_prompts([70, 33, 1], SHAPE["vocab_size"], seed=1)
    ranks = {"name": "tensor", "size": 2, "device": "cpu"}
    with checkpoint(FAMILIES[name]()) as (directory, model):
        outputs = run(
            directory,
            prompts,
            [greedy(NEW)] * 3,
            block_size=8,
            max_num_batched_tokens=40,
            executor=ranks,
        )
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            assert_greedy(model, prompt, tokens)


@pytest.mark.slow("makes several engines")
@pytest.mark.parametrize("name", FAMILIES if FULL else ["qwen3_next"])
def test_weights_in_float8_do_not_depend_on_the_steps(name: str) -> None:
    prompts = random_prompts([70, 33, 1], SHAPE["vocab_size"], seed=1)
    with checkpoint(FAMILIES[name]()) as (directory, _):
        alone, together = (
            tokens_of(
                run(
                    directory,
                    prompts,
                    [greedy(NEW)] * 3,
                    block_size=8,
                    quantization="fp8",
                    **settings,
                )
            )
            for settings in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 20})
        )
    assert alone == together


def test_a_model_without_recurrent_layers_is_one_of_attention() -> None:
    """Granite 4 without H."""
    [prompt] = random_prompts([70], SHAPE["vocab_size"], seed=1)
    config = hybrids.granite_dense(layer_types=["full_attention"] * 4)
    with checkpoint(config) as (directory, model):
        assert_greedy(
            model,
            prompt,
            tokens_of(run(directory, [prompt], [greedy(NEW)], max_num_batched_tokens=20))[0],
        )
