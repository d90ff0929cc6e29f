"""Rows with LoRA adapters compute what the model with merged weights does, whatever is around
them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import LlamaConfig

from dovetail.api.executor import Executor
from dovetail_executors.local import LocalExecutor
from dovetail_executors.options import LocalOptions, TensorOptions
from dovetail_executors.tensor import TensorExecutor
from tests.e2e.reference import Comparison, checkpoint, compare_greedy
from tests.executors.adapting import Asked, Driver, generated, merged, random_adapter, save
from tests.executors.test_same_tokens_over_ranks import divisible
from tests.models.configs import MAX_LEN, configs, hybrid_configs, latent_configs
from tests.runtime.demo import context
from tests.support import examples

BLOCK = 4


def executor(
    directory: Path, ranks: int = 1, slots: int = 2, max_rank: int = 64, **changes: Any
) -> Executor:
    around = context(
        model=str(directory),
        dtype="float32",
        max_model_len=MAX_LEN,
        max_num_batched_tokens=256,
        block_size=BLOCK,
        max_adapters=slots,
        max_adapter_rank=max_rank,
        **changes,
    )
    if ranks == 1:
        return LocalExecutor(LocalOptions(device="cpu", num_pages=2000), around)
    return TensorExecutor(TensorOptions(device="cpu", size=ranks, num_pages=2000), around)


def assert_tokens_are_those_of_merged_weights(
    config: Any, folder: Path, seed: int, ranks: int = 1, drafts: int = 2
) -> Driver:
    random, counts = Random(seed), Comparison()
    with checkpoint(config) as (directory, model):
        one = executor(directory, ranks, max_drafts=drafts)
        try:
            capacity = one.start()
            assert capacity.adapters is not None
            adapters = {
                index: random_adapter(
                    capacity.adapters,
                    random.choice([0, 1, 2, 3, 8, 16, 33, 64]),
                    seed + index,
                    random.choice([0.2, 1.0, 1.0]),
                )
                for index in range(4)
            }
            models = {None: model} | {
                index: merged(model, weights) for index, weights in adapters.items()
            }
            files = {
                index: save(weights, folder / f"{seed}-{index}.safetensors")
                for index, weights in adapters.items()
            }
            shared = [random.randrange(config.vocab_size) for _ in range(2 * BLOCK)]
            requests = []
            for _ in range(9):
                length, adapter = random.randint(1, 10), random.choice([None, *adapters])
                prompt = [
                    *(shared if random.random() < 0.6 else []),
                    *(random.randrange(config.vocab_size) for _ in range(length)),
                ]
                requests.append(
                    Asked(prompt, adapter, generated(models[adapter], prompt, random.randint(1, 8)))
                )
            driver = Driver(one, capacity, files, 4, random)
            driver.run(requests)
        finally:
            one.stop()
        for asked in requests:
            tokens = asked.tokens[: len(asked.expected)]
            if tokens != asked.expected:
                compare_greedy(models[asked.adapter], asked.prompt, tokens, counts)
    assert counts.ties <= 1
    return driver


@examples(quick=3, full=40)
@given(config=configs(), seed=st.integers(0, 1 << 30))
def test_tokens_are_those_of_merged_weights(config: Any, seed: int, tmp_path: Path) -> None:
    assert_tokens_are_those_of_merged_weights(config, tmp_path, seed)


def llama(**fields: Any) -> LlamaConfig:
    common = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaConfig(**common, num_key_value_heads=2, max_position_embeddings=MAX_LEN, **fields)


def test_the_random_steps_see_prefix_hits_right_drafts_preemptions_and_reused_slots(
    tmp_path: Path,
) -> None:
    driver = assert_tokens_are_those_of_merged_weights(llama(), tmp_path, 8)
    assert driver.saw_loads > 2
    assert min(driver.saw_hits, driver.saw_drafts, driver.saw_preemptions) > 0


@pytest.mark.parametrize(
    "size", [2, pytest.param(4, marks=pytest.mark.slow("adds 4 ranks, several times"))]
)
def test_ranks_read_their_shares_of_adapters(
    threads_as_ranks: None, size: int, tmp_path: Path
) -> None:
    assert_tokens_are_those_of_merged_weights(llama(attention_bias=True), tmp_path, 6, ranks=size)


@pytest.mark.full
@examples(quick=1, full=10)
@given(config=configs(), size=st.sampled_from([2, 4]), seed=st.integers(0, 1 << 30))
def test_tokens_over_ranks_are_those_of_merged_weights(
    config: Any, size: int, seed: int, tmp_path: Path
) -> None:
    assume(divisible(config, size))
    assert_tokens_are_those_of_merged_weights(config, tmp_path, seed, ranks=size)


@pytest.mark.slow("makes several models")
@examples(quick=4, full=20)
@given(config=st.one_of(hybrid_configs(), latent_configs()), seed=st.integers(0, 1 << 30))
def test_layers_that_merge_other_modules_are_adapted(
    config: Any, seed: int, tmp_path: Path
) -> None:
    """Of recurrent layers, and of latent attention."""
    assert_tokens_are_those_of_merged_weights(config, tmp_path, seed, drafts=0)
