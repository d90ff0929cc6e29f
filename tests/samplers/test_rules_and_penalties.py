"""Bias, allowed ids, bad words, min_tokens and penalties: the changed logits against the oracle,
and what each does alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.sampler import RowSampling
from dovetail.testing.suites.sampler_oracle import changed_logits
from dovetail_samplers.rules import RowRules
from tests.rounding import assert_rounded
from tests.samplers.helpers import Row, changed, tokens
from tests.support import examples

VOCAB = 12
TOKEN = st.integers(0, VOCAB - 1)
TOKENS = st.lists(TOKEN, max_size=8)
FLAT = [0.0] * VOCAB


@st.composite
def rule_rows(draw: st.DrawFn) -> Row:
    sampling = RowSampling(
        temperature=0.0,
        logit_bias=tuple(
            draw(st.dictionaries(TOKEN, st.integers(-8, 8).map(float), max_size=3)).items()
        ),
        allowed_token_ids=draw(st.none() | st.lists(TOKEN, min_size=1, max_size=5).map(tuple)),
        bad_words=tuple(
            tuple(word)
            for word in draw(st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=4))
        ),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=tuple(draw(st.lists(TOKEN, max_size=3))),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 2.0, 4.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
    )
    logits = [x / 8 for x in draw(st.lists(st.integers(-64, 64), min_size=VOCAB, max_size=VOCAB))]
    return Row(
        logits, sampling, tuple(draw(st.lists(TOKEN, min_size=1, max_size=6))), tuple(draw(TOKENS))
    )


@examples(quick=100, full=3000)
@given(st.lists(rule_rows(), min_size=1, max_size=5))
def test_changed_logits_are_those_of_the_oracle(rows: list[Row]) -> None:
    assert_rounded(
        changed(rows), [changed_logits(r.logits, r.sampling, r.prompt, r.output) for r in rows], 4
    )


def greedy(**fields: object) -> RowSampling:
    return RowSampling(temperature=0.0, **fields)  # type: ignore[arg-type]


def test_allowed_tokens_that_the_model_excludes_are_still_the_only_ones() -> None:
    excluded = [0.0, -np.inf, -np.inf, 0.0]
    fields = {"allowed_token_ids": (1, 2), "repetition_penalty": 2.0}
    rows = [Row(excluded, RowSampling(seed=s, **fields), prompt=(1, 2)) for s in range(64)]  # type: ignore[arg-type]
    assert set(tokens(rows)) == {1, 2}


def test_what_lies_behind_a_rows_tokens_is_never_read() -> None:
    """The history's rows hold stale ids (7) behind their tokens."""
    rows = [
        Row(FLAT, greedy(repetition_penalty=2.0, presence_penalty=1.0, bad_words=((7, 1), (1,)))),
        Row(FLAT, greedy(), prompt=(0,) * 9),
    ]
    np.testing.assert_array_equal(
        changed(rows)[0], changed_logits(FLAT, rows[0].sampling, (0,), ())
    )


def test_ids_outside_the_vocabulary_are_left_out() -> None:
    sampling = greedy(
        logit_bias=((99, 5.0),),
        bad_words=((99,),),
        min_tokens=3,
        stop_token_ids=(99,),
        allowed_token_ids=(1, 99),
    )
    assert tokens([Row([2.0, 1.0, 0.0], sampling)]) == [1]


def test_bad_words_take_as_much_memory_as_they_have_tokens_together() -> None:
    """However long the longest is: a table of 1,001 lines as wide as it would have 10 million
    numbers."""
    words = [tuple(range(10_000)), *((token, token + 1, 7) for token in range(1_000))]
    rules = RowRules.of(greedy(bad_words=tuple(words)), 10_000, torch.device("cpu"))
    assert rules is not None
    assert rules.packed.numel() <= 4 * sum(map(len, words))


def test_a_bad_word_longer_than_a_row_can_be_is_never_completed() -> None:
    assert tokens([Row([0.0, 1.0], greedy(bad_words=((0,) * 10_000 + (1,),)))]) == [1]
