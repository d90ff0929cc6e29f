"""Draws follow the distribution that the parameters describe: one chi-square test a filter, alone, 100,000 draws each, alpha 1e-5.

Power, at this size and for these logits: `test_the_chi_square_test_sees_small_errors` shows that a temperature or a repetition penalty (of
the likeliest token) wrong by 5 %, a top-k wrong by one and a top-p that drops the last hundredth are each rejected.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from dovetail.api.sampler import RowSampling
from tests.samplers.helpers import draws
from tests.samplers.oracle import distribution

DRAWS = 100_000
ALPHA = 1e-5
LOGITS = (np.random.default_rng(1).normal(size=40) * 1.5).tolist()
LIKELIEST = int(np.argmax(LOGITS))

FILTERS = {
    "temperature 1": RowSampling(),
    "temperature 0.7": RowSampling(temperature=0.7),
    "temperature 2": RowSampling(temperature=2.0),
    "top_k": RowSampling(top_k=8),
    "top_p": RowSampling(top_p=0.8),
    "min_p": RowSampling(min_p=0.1),
    "logit_bias": RowSampling(logit_bias=((3, 2.0), (5, -1.0))),
    "allowed_token_ids": RowSampling(allowed_token_ids=(1, 2, 3, 30)),
    "repetition_penalty": RowSampling(repetition_penalty=1.5),
    "top_k, then top_p": RowSampling(temperature=0.8, top_k=20, top_p=0.95),
    "top_p, then min_p": RowSampling(temperature=0.8, top_p=0.97, min_p=0.05),
}


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """0 if a token came that can't; tokens expected less than 5 times are counted together."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    observed, expected = counts[possible], probabilities[possible] * counts.sum()
    rare = expected < 5
    if rare.any():
        observed, expected = np.append(observed[~rare], observed[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)
def test_draws_follow_the_distribution(sampling: RowSampling) -> None:
    assert p_value(draws(LOGITS, sampling, DRAWS, prompt=LIKELIEST), distribution(LOGITS, sampling, [LIKELIEST])) > ALPHA


@pytest.mark.parametrize(("both", "first"), [("top_k, then top_p", "top_k"), ("top_p, then min_p", "top_p")])
def test_both_filters_have_something_to_do(both: str, first: str) -> None:
    """Or the draws above wouldn't test their order."""
    neutral = RowSampling()
    without_first = replace(FILTERS[both], **{first: getattr(neutral, first)})
    only_first = RowSampling(temperature=FILTERS[both].temperature, **{first: getattr(FILTERS[both], first)})
    supports = [int((distribution(LOGITS, sampling) > 0).sum()) for sampling in (FILTERS[both], without_first, only_first)]
    assert supports[0] < supports[2]
    assert first != "top_k" or supports[0] < supports[1]


WRONG = {
    "temperature": RowSampling(temperature=0.7 * 1.05),
    "top_k": RowSampling(temperature=0.7, top_k=19),
    "top_p": RowSampling(temperature=0.7, top_p=0.99),
    "repetition_penalty": RowSampling(temperature=0.7, repetition_penalty=1.05),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_chi_square_test_sees_small_errors(wrong: RowSampling) -> None:
    right = replace(wrong, temperature=0.7, top_k=20 if wrong.top_k else 0, top_p=1.0, repetition_penalty=1.0)
    counts = draws(LOGITS, right, DRAWS, prompt=LIKELIEST)
    assert p_value(counts, distribution(LOGITS, right, [LIKELIEST])) > ALPHA
    assert p_value(counts, distribution(LOGITS, wrong, [LIKELIEST])) < ALPHA


def test_a_large_vocabulary_is_drawn_from_in_proportion() -> None:
    """50,000 tokens in five classes of equal logits: rare tokens win races by small exponentials, whose precision this tests."""
    classes = np.arange(50_000) % 5
    logits = classes * -2.0
    counts = draws(logits.tolist(), RowSampling(), 2_000, seeds=50)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    by_class = [counts[classes == c].sum() for c in range(5)]
    assert p_value(np.array(by_class), np.array([probabilities[classes == c].sum() for c in range(5)])) > ALPHA
