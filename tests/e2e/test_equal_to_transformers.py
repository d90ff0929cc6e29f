"""Greedy tokens and log-probabilities are those of transformers, for random small models and ragged
batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import dovetail_models
from dovetail import LLM, SamplingParams
from tests.e2e.reference import Comparison, checkpoint, compare_greedy, greedy, run, tokens_of
from tests.models.configs import configs
from tests.rounding import rounded, roundings_of
from tests.support import examples

MAX_LEN = 720
COUNTS = Comparison()
DEMO = Path(dovetail_models.__file__).parent / "demo"

prompt_lens = st.lists(st.one_of(st.integers(1, 20), st.integers(1, 700)), min_size=1, max_size=6)


def random_prompts(lens: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lens]


@examples(quick=14, full=400)
@given(config=configs(), lens=prompt_lens, seed=st.integers(0, 1000))
@pytest.mark.slow("makes several engines or many tokens")
def test_greedy_tokens_of_a_ragged_batch_are_those_of_transformers(
    config: Any, lens: list[int], seed: int
) -> None:
    config.max_position_embeddings = MAX_LEN
    prompts = random_prompts(lens, config.vocab_size, seed)
    with checkpoint(config, seed) as (directory, model):
        outputs = run(directory, prompts, [greedy(16)] * len(prompts), max_num_batched_tokens=300)
        for prompt, tokens in zip(prompts, tokens_of(outputs), strict=True):
            compare_greedy(model, prompt, tokens, COUNTS)


def test_ties_are_at_most_one_in_ten_thousand() -> None:
    """Ties among the tokens compared above; a handful of ties in a short run is already too
    many."""
    print(f"\n{COUNTS.tokens} tokens compared, {COUNTS.ties} ties")
    assert COUNTS.ties <= max(1, COUNTS.tokens // 10_000)


@pytest.mark.slow("makes several engines or many tokens")
def test_the_demo_model_generates_what_transformers_generate_does() -> None:
    from transformers import AutoModelForCausalLM

    with LLM("demo", max_model_len=512, dtype="float32") as llm:
        prompts = [
            "ROMEO:",
            "JULIET:\nO Romeo",
            "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n",
        ]
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False
        )
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
        for output in outputs:
            ids = torch.tensor([list(output.prompt_token_ids)])
            theirs = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False
            )[0, ids.shape[1] :].tolist()
            assert list(output.outputs[0].token_ids) == theirs
            assert output.outputs[0].text == llm.engine.tokenizer.decode(theirs)


SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "attn_factor": 0.8782488562869419,
    "rope_theta": 1e6,
}
MISTRALS_CLASS = {
    "AutoConfig": "configuration_mistral.MistralConfig",
    "AutoModelForCausalLM": "modeling_mistral.MistralForCausalLM",
}
# what configs of published models have that their classes in transformers don't read
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-R1-0528-Qwen3-8B": (
        "qwen3",
        {"rope_scaling": YARN, "rope_theta": 1e6, "rope_parameters": YARN},
    ),
    "Falcon3": ("llama", {"activation": "swiglu"}),
    "a Llama with a window that cuts nothing": ("llama", {"sliding_window": 256}),
    "a Llama whose window is off": ("llama", {"sliding_window": 8, "use_sliding_window": False}),
    "a Mistral with a copy of transformers' class": (
        "mistral",
        {"auto_map": MISTRALS_CLASS, "sliding_window": 16},
    ),
    "a bare model": ("llama", {"tie_word_embeddings": True}),
    "a bare model with a head": ("qwen2", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_checkpoints_unlike_those_that_transformers_writes_are_served_as_it_serves_them(
    name: str,
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = PUBLISHED[name]
    with checkpoint(
        AutoConfig.for_model(
            kind, **SHAPE | {"tie_word_embeddings": fields.get("tie_word_embeddings", False)}
        )
    ) as (directory, _):
        path, weights = directory / "config.json", directory / "model.safetensors"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        if "bare" in name:
            save_file(
                {
                    tensor.removeprefix("model."): value
                    for tensor, value in load_file(weights).items()
                },
                weights,
                {"format": "pt"},
            )
        model, loading = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not loading["missing_keys"]
        prompts = random_prompts([1, 30, 200], 61, 0)
        for prompt, tokens in zip(
            prompts, tokens_of(run(directory, prompts, [greedy(16)] * 3)), strict=True
        ):
            compare_greedy(model, prompt, tokens, Comparison())


@pytest.mark.parametrize("budget", [7, 512])
def test_logprobs_are_the_log_softmax_of_the_reference(budget: int) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    prompts = random_prompts([1, 9, 33], 61, 0)
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=12,
        logprobs=4,
        prompt_logprobs=2,
        ignore_eos=True,
        detokenize=False,
        output_kind="final",
    )
    with checkpoint(config) as (directory, model):
        for output in run(
            directory, prompts, [params] * 3, max_num_batched_tokens=budget, max_model_len=64
        ):
            check_logprobs(output, model)


@torch.inference_mode()
def check_logprobs(output: Any, model: Any) -> None:
    sample, prompt = output.outputs[0], list(output.prompt_token_ids)
    expected = model(torch.tensor([prompt + list(sample.token_ids)])).logits[0].log_softmax(-1)
    roundings = roundings_of(model.config, len(expected))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    assert len(sample.logprobs) == len(sample.token_ids)
    maps = [*output.prompt_logprobs[1:], *sample.logprobs]
    for position, (token, entries) in enumerate(
        zip([*prompt[1:], *sample.token_ids], maps, strict=True)
    ):
        alternatives = 2 if position < len(prompt) - 1 else 4
        best = expected[position].topk(alternatives).indices.tolist()
        assert set(entries) == {token, *best}
        for candidate, entry in entries.items():
            assert entry.logprob == rounded(expected[position, candidate].item(), roundings)
            assert entry.rank == 1 + int((expected[position] > expected[position, candidate]).sum())
    chosen = [
        expected[len(prompt) - 1 + i, token].item() for i, token in enumerate(sample.token_ids)
    ]
    assert sample.cumulative_logprob == rounded(sum(chosen), len(chosen) * roundings)
