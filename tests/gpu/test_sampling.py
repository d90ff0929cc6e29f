"""Penalties, rules and log-probabilities in recorded graphs: the tokens and numbers are those of
steps that are launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from dovetail import LLMEngine, RequestOutput, SamplingParams
from tests.e2e.reference import checkpoint
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.gpu.device import SHAPES, on_a_gpu, settings_for

pytestmark = on_a_gpu

SMALL = Qwen3Config(
    **{**SHAPES[0].fields, "vocab_size": 997}, num_hidden_layers=3, head_dim=SHAPES[0].head_size
)
WAYS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "repetition_penalty": 1.05},
    {"frequency_penalty": 0.7, "logprobs": 5},
    {
        "logit_bias": {3: 2.0, 900: -100.0},
        "min_tokens": 9,
        "stop_token_ids": list(range(0, 900, 3)),
        "logprobs": 0,
    },
    {"allowed_token_ids": [5, 6, 7, 8, 9], "frequency_penalty": 1.1, "top_k": 3},
    {"repetition_penalty": 1.3, "logprobs": 20, "top_p": 0.9},
    {"n": 3, "presence_penalty": 0.4, "logprobs": 2},
    {},
]
PROMPTS = random_prompts([30, 5, 200, 17, 64, 9, 1], 997, 0)


def generated(
    settings: dict[str, Any], directory: Any, dtype: str, extra: dict[str, Any]
) -> list[Any]:
    """Return the tokens and log-probabilities of each sample of each request."""
    with LLMEngine.from_config(
        settings, model=str(directory), dtype=dtype, generation_config="none"
    ) as engine:
        for index, (prompt, way) in enumerate(zip(PROMPTS, WAYS, strict=True)):
            wanted = {
                "temperature": 0.8,
                "seed": index,
                "max_tokens": 40,
                "detokenize": False,
                "output_kind": "final",
                "ignore_eos": True,
            }
            engine.add_request(str(index), prompt, SamplingParams(**{**wanted, **way, **extra}))
        done = {output.request_id: output for output in steps(engine) if output.finished}
        assert not settings.get("speculation") or engine.stats().draft_tokens or settings["overlap"]
    assert all(
        sample.finish_reason != "error" for output in done.values() for sample in output.outputs
    )
    return [
        [(tuple(sample.token_ids), sample.logprobs) for sample in done[str(index)].outputs]
        for index in range(len(WAYS))
    ]


def steps(engine: LLMEngine) -> Iterator[RequestOutput]:
    """Run steps to the end and yield their outputs."""
    while engine.has_unfinished_requests():
        yield from engine.step()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_asked_of_sampling_is_the_same_with_and_without_graphs_and_preemption(
    temperature: float,
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    extra = {"temperature": temperature}
    launched = settings_for(
        "triton", overlap=False, cuda_graphs=False, max_model_len=256, max_num_seqs=12
    )
    replayed = {**launched, "cuda_graphs": True, "overlap": True}
    scarce = {
        **replayed,
        "executor": {"name": "local", "device": "cuda", "num_pages": 24},
        "max_num_batched_tokens": 33,
    }
    with checkpoint(SMALL) as (directory, _):
        expected = generated(launched, directory, "float32", extra)
        for settings in (replayed, scarce):
            for ours, theirs in zip(
                generated(settings, directory, "float32", extra), expected, strict=True
            ):
                assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
                assert [own_logprobs(*sample) for sample in ours] == [
                    pytest.approx(own_logprobs(*sample), abs=1e-3) for sample in theirs
                ]


def own_logprobs(tokens: tuple[int, ...], logprobs: Any) -> list[float]:
    """Return the log-probabilities of the tokens themselves."""
    return [entries[token].logprob for token, entries in zip(tokens, logprobs or [], strict=False)]


def test_in_bfloat16_each_sample_gets_the_logprobs_that_it_asked_for() -> None:
    with checkpoint(SMALL) as (directory, _):
        for way, samples in zip(
            WAYS,
            generated(settings_for("triton", max_model_len=256), directory, "bfloat16", {}),
            strict=True,
        ):
            for tokens, logprobs in samples:
                assert (logprobs is not None) == ("logprobs" in way)
                for token, entries in zip(tokens, logprobs or [], strict=logprobs is not None):
                    assert token in entries
                    assert way["logprobs"] <= len(entries) <= way["logprobs"] + 1


def never(*_: Any, **__: Any) -> None:
    pytest.fail("sampled as it is")


def test_decodes_with_penalties_and_logprobs_are_replayed() -> None:
    """No decode is sampled outside of graphs."""
    with checkpoint(SMALL) as (directory, _):
        settings = settings_for("triton", max_model_len=256)
        with LLMEngine.from_config(
            settings, model=str(directory), dtype="bfloat16", generation_config="none"
        ) as engine:
            runner = engine.core.executor.worker.runner  # type: ignore[attr-defined]
            for recorded in (False, True):
                if recorded:  # by the first requests
                    runner.sampling.sampler.sample = never
                for index, way in enumerate(WAYS):
                    engine.add_request(
                        f"{index} {recorded}",
                        [1, 2, 3],
                        SamplingParams(**way, max_tokens=10, detokenize=False),
                    )
                samples = [sample for output in steps(engine) for sample in output.outputs]
    assert {sample.finish_reason for sample in samples} <= {None, "length", "stop"}, [
        sample.stop_reason for sample in samples
    ]
