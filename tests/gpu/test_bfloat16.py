"""In bfloat16 tokens may differ from the reference's; how far log-probabilities are from float32 is
what can be held to a bound."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from dovetail import LLMEngine, RequestOutput, SamplingParams
from tests.e2e.reference import run, tokens_of
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.gpu.device import make_drafts_pay, on_a_gpu, save, settings_for, skip_unless_usable

pytestmark = on_a_gpu

CONFIG = Qwen3Config(
    vocab_size=997,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
)
PROMPTS = random_prompts([1, 5, 30, 200, 300, 64, 129, 256], 997, 0)
BACKENDS = ["torch", "triton", "flash_attn"]
NEARLY = 0.1  # logprobs of random models have a spread of about 1


class Reference:
    """transformers, of the same weights in float32 and in bfloat16."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._models = {
            dtype: AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().cuda()
            for dtype in (torch.float32, torch.bfloat16)
        }

    @torch.inference_mode()
    def logprobs(self, sequence: list[int], dtype: torch.dtype) -> torch.Tensor:
        """[tokens - 1, vocab] float32: of each next token."""
        logits = self._models[dtype](torch.tensor([sequence], device="cuda")).logits[0, :-1]
        return logits.float().log_softmax(-1).cpu()

    def of_tokens(self, sequence: list[int], dtype: torch.dtype) -> list[float]:
        return (
            self.logprobs(sequence, dtype)
            .gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
            .tolist()
        )


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    torch.backends.cuda.matmul.allow_tf32 = False
    with TemporaryDirectory() as directory:
        save(CONFIG, torch.bfloat16, Path(directory))
        yield Reference(Path(directory))


def generate(directory: Path, attention: str, **fields: Any) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=64,
        ignore_eos=True,
        detokenize=False,
        output_kind="final",
        **fields,
    )
    settings = settings_for(
        attention, dtype="bfloat16", max_model_len=512, max_num_batched_tokens=300
    )
    return run(directory, PROMPTS, [params] * len(PROMPTS), **settings)


@pytest.mark.parametrize("attention", BACKENDS)
def test_logprobs_are_as_near_to_float32_as_transformers_are(
    attention: str, reference: Reference
) -> None:
    """Of the prompts' tokens (prefills and chunks) and of those generated (decodes), each given
    what came before it."""
    skip_unless_usable(attention, "bfloat16", 128)
    ours, theirs = [], []
    for output in generate(reference.directory, attention, logprobs=0, prompt_logprobs=0):
        sequence = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        told = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        exact = reference.of_tokens(sequence, torch.float32)
        ours += [
            abs(entry[token].logprob - right)
            for token, entry, right in zip(sequence[1:], told, exact, strict=True)
        ]
        theirs += [
            abs(logprob - right)
            for logprob, right in zip(
                reference.of_tokens(sequence, torch.bfloat16), exact, strict=True
            )
        ]
    ours_mean, theirs_mean = statistics.fmean(ours), statistics.fmean(theirs)
    print(
        f"\n{attention}: mean |Δ logprob| {ours_mean:.2e}, transformers {theirs_mean:.2e}, ratio "
        f"{ours_mean / theirs_mean:.2f}"
    )
    assert ours_mean <= 1.5 * theirs_mean


def test_logprobs_of_checked_drafts_are_as_near_to_float32_as_those_of_plain_steps(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_pay(monkeypatch)
    means = []
    for speculation in (None, {"drafter": {"name": "ngram", "min_match": 1}, "max_drafts": 4}):
        settings = settings_for(
            "triton",
            model=str(reference.directory),
            dtype="bfloat16",
            generation_config="none",
            speculation=speculation,
        )
        params = SamplingParams(
            temperature=0.0,
            max_tokens=128,
            ignore_eos=True,
            detokenize=False,
            output_kind="final",
            logprobs=0,
        )
        with LLMEngine.from_config(settings, max_model_len=512, overlap=False) as engine:
            for index, prompt in enumerate(PROMPTS):
                engine.add_request(str(index), prompt, params)
            errors = []
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens = list(output.outputs[0].token_ids)
                    exact = reference.of_tokens([*output.prompt_token_ids, *tokens], torch.float32)[
                        -len(tokens) :
                    ]
                    told = output.outputs[0].logprobs or []
                    errors += [
                        abs(entry[token].logprob - right)
                        for token, entry, right in zip(tokens, told, exact, strict=True)
                    ]
            assert (sum(engine.stats().accepted_drafts) > 100) == (speculation is not None)
        means.append(statistics.fmean(errors))
    print(
        f"\nmean |Δ logprob| {means[0]:.2e}, with drafts {means[1]:.2e}, ratio "
        f"{means[1] / means[0]:.2f}"
    )
    assert means[1] <= 1.1 * means[0]


@pytest.mark.parametrize("attention", BACKENDS)
def test_greedy_tokens_from_cuda_graphs_are_nearly_the_likeliest_in_float32(
    attention: str, reference: Reference
) -> None:
    """Without log-probabilities: such steps replay graphs, where the backend has them."""
    skip_unless_usable(attention, "bfloat16", 128)
    outputs = generate(reference.directory, attention)
    for prompt, tokens in zip(PROMPTS, tokens_of(outputs), strict=True):
        logprobs = reference.logprobs([*prompt, *tokens], torch.float32)[len(prompt) - 1 :]
        chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logprobs.max(dim=1).values - chosen).max() < NEARLY


@pytest.mark.parametrize(
    ("attention", "graphs"), [("torch", "none"), ("triton", "decode"), ("flash_attn", "decode")]
)
def test_which_backends_run_in_graphs_is_reported(
    attention: str, graphs: str, reference: Reference
) -> None:
    skip_unless_usable(attention, "bfloat16", 128)
    settings = settings_for(
        attention,
        model=str(reference.directory),
        dtype="bfloat16",
        generation_config="none",
        max_model_len=512,
    )
    with LLMEngine.from_config(settings) as engine:
        assert engine.capacity.details["attention"] == f"dovetail:{attention}"
        assert engine.capacity.details["cuda_graphs"].startswith(graphs)
