"""An engine whose K and V are kept in FP8 finds over long contexts what it finds without, says the
same however a request is computed, and errs no more than the rounding of K and V explains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.lookup import VALUES, write_lookup_model
from tests.e2e.reference import greedy, run
from tests.runtime.demo import BLOCK_BYTES, DEMO
from tests.support import FULL

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
PROMPTS = [
    [(7 * i * i + 13 * row + i) % 400 + 10 for i in range(20 + 11 * row)] for row in range(6)
]


def recall(directory: Path, pairs: int, **settings: Any) -> float:
    """Return the share of pairs that are found among this many tokens, with one request per
    pair."""
    generator = torch.Generator().manual_seed(1)
    context, asked = (
        torch.randperm(pairs, generator=generator).tolist(),
        torch.randint(pairs, (64,), generator=generator).tolist(),
    )
    outputs = run(
        directory,
        [[*context, pairs + pair] for pair in asked],
        [greedy(1)] * len(asked),
        kv_cache_memory="1GiB",
        **settings,
    )
    return sum(
        output.outputs[0].token_ids[0] == pair % VALUES
        for output, pair in zip(outputs, asked, strict=True)
    ) / len(asked)


@pytest.fixture(
    scope="module",
    params=[
        (1024, 4.0),
        *(pytest.param((32_768, sharpness), marks=pytest.mark.full) for sharpness in (8.0, 10.0)),
    ],
)
def lookup(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, float, float]:
    """Return a model that looks pairs up, their number, its sharpness and its recall in
    bfloat16."""
    pairs, sharpness = request.param
    directory = tmp_path_factory.mktemp("lookup")
    write_lookup_model(directory, pairs, sharpness, pairs + 64)
    return directory, pairs, sharpness, recall(directory, pairs, dtype="bfloat16")


@pytest.mark.parametrize("scales", ["auto", "calibrate"])
def test_what_lies_far_back_is_found_as_often_as_in_bfloat16(
    lookup: tuple[Path, int, float, float], scales: str
) -> None:
    """Also if the needle hardly exceeds the sum of all others, so that many are missed with any
    dtype."""
    directory, pairs, sharpness, wide = lookup
    small = recall(directory, pairs, dtype="bfloat16", kv_cache_scales=scales, **FP8)
    print(
        f"\n{pairs} tokens, sharpness {sharpness}: recall {wide:.0%} in bfloat16, {small:.0%} in "
        f"FP8 ({scales})"
    )
    assert small >= wide - 0.05
    assert wide > 0.2


@pytest.mark.slow("makes several engines or many tokens")
def test_tokens_are_the_same_however_a_request_is_computed() -> None:
    """In chunks, recomputed after preemption, after a cached prefix, or alone: the stored values of
    a token are always the same."""
    params = [greedy(12)] * len(PROMPTS)

    def tokens(**settings: Any) -> list[tuple[int, ...]]:
        return [
            tuple(output.outputs[0].token_ids)
            for output in run(Path(DEMO), PROMPTS, params, **FP8, **settings)
        ]

    expected = tokens(kv_cache_memory=400 * BLOCK_BYTES)
    assert (
        tokens(kv_cache_memory=400 * BLOCK_BYTES, max_num_batched_tokens=16, max_num_seqs=2)
        == expected
    )
    assert tokens(**{"executor.num_pages": 12, "max_model_len": 96}) == expected, "preempted"
    assert tokens(**{"executor.num_pages": 400, "kv_cache.reuse": False}) == expected


@pytest.mark.slow("makes several engines or many tokens")
def test_calibrated_scales_leave_the_rounding_alone_to_err() -> None:
    """Teacher-forced, against float32: about three times bfloat16's own error on this model,
    whatever the scales; K's rounding makes most of it. What shifts all log-probabilities together,
    as sums that lose bits would, is a fraction of that."""
    exact, wide, small = (
        _logprobs(**settings)
        for settings in (
            {},
            {"dtype": "bfloat16"},
            {"dtype": "bfloat16", "kv_cache_scales": "calibrate", **FP8},
        )
    )
    errors = [(told - exact).abs().mean().item() for told in (wide, small)]
    shift = (small - exact).mean().item()
    print(
        f"\nmean |Δ logprob|: bfloat16 {errors[0]:.4f}, with K and V in FP8 {errors[1]:.4f}; mean "
        f"Δ {shift:+.4f}"
    )
    assert errors[1] <= 4.5 * errors[0]
    assert abs(shift) <= 0.2 * errors[1]


def _logprobs(**settings: Any) -> torch.Tensor:
    """Log-probabilities of the tokens of some texts, each given the preceding tokens, [tokens]
    float64."""
    text = (Path(DEMO) / "README.md").read_bytes()
    length = 250 if FULL else 120
    prompts = [
        [byte % 400 + 10 for byte in text[i : i + length]] for i in range(0, 4 * length, length)
    ]
    outputs = run(
        Path(DEMO),
        prompts,
        [greedy(1, prompt_logprobs=0)] * len(prompts),
        kv_cache_memory=4000 * BLOCK_BYTES,
        **settings,
    )
    told = [
        entry[token].logprob
        for prompt, output in zip(prompts, outputs, strict=True)
        for token, entry in zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
        if entry is not None
    ]
    return torch.tensor(told, dtype=torch.float64)
