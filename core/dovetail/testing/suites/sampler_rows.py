"""Rows for testing samplers: all kinds, mixed in a batch, and greedy ones with rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dovetail.api.sampler import RowSampling
from dovetail.testing.suites.sampler_bench import Row

VOCAB = 1024  # of mixed rows: large enough for a sampler's code for large vocabularies
SMALL = 12  # of rows with rules, so that rules overlap
MANY = 3_000  # of rows with rules that name half of it
LONG = 600  # tokens of some histories

SORTS = (  # of rows that may share a batch
    RowSampling(temperature=0.0),
    RowSampling(),
    RowSampling(temperature=0.6),
    RowSampling(top_k=1),
    RowSampling(top_k=5),
    RowSampling(temperature=1.5, top_k=700, top_p=0.9),
    RowSampling(top_p=0.9),
    RowSampling(temperature=3.0, top_p=0.99, min_p=0.001),
    RowSampling(min_p=0.05),
    RowSampling(temperature=0.0, repetition_penalty=1.3),
    RowSampling(frequency_penalty=0.7, presence_penalty=-0.2),
    RowSampling(top_k=20, logit_bias=((3, 4.0),), bad_words=((1, 2), (5,))),
    RowSampling(allowed_token_ids=(4, 8, 15, 16, 23, 42), top_p=0.8),
    RowSampling(min_tokens=3, stop_token_ids=(0, 1)),
)


def mixed_rows() -> list[Row]:
    """A row of each sort, and of some again with other seeds, logits and histories."""
    rng = np.random.default_rng(3)
    rows = []
    for seed, sampling in enumerate([*SORTS, *SORTS[:9]]):
        prompt, output = (
            tuple(int(t) for t in rng.integers(0, VOCAB, rng.integers(low, 6))) for low in (1, 0)
        )
        logits = rng.normal(size=VOCAB).astype(np.float32) * rng.choice([0.5, 4.0])
        rows.append(Row(logits.tolist(), replace(sampling, seed=seed * 2**57 + 5), prompt, output))
    return rows


def rows_with_long_words() -> list[Row]:
    """Greedy rows with one history, whose most likely token ends a word of 3 and more tokens: now,
    after token 1 has come, or at both times."""
    logits = [float(9 * (token == 9)) for token in range(VOCAB)]
    output = (*(5, 6) * 8, 5, 1)
    now = (output[-2:], output[-4:], output)
    later = ((*output[-1:], 1), (*output[-2:], 1), (*output, 1))
    words: list[tuple[tuple[int, ...], ...]] = [((*before, 9),) for before in (*now, *later)]
    words += [((*output[-2:], 8), (*output[-2:], 9)), ((*output[-3:], 9), (*output[-2:], 1, 9)), ()]
    return [
        Row(
            logits,
            RowSampling(temperature=0.0, presence_penalty=0.5, bad_words=some),
            (0, 2),
            output,
        )
        for some in words
    ]


def random_rows(
    fields: Callable[[np.random.Generator], dict[str, Any]], count: int = 200
) -> list[Row]:
    """Greedy rows with these fields over a small vocabulary. Logits are eighths and penalties
    powers of 2, so that float32 is exact."""
    rng = np.random.default_rng(5)
    rows = []
    for index in range(count):
        sampling = RowSampling(temperature=0.0, **fields(rng))
        long = index % 8 in (0, 1), index % 8 in (0, 2)
        lengths = [
            LONG if is_long else rng.integers(low, 8)
            for is_long, low in zip(long, (1, 0), strict=True)
        ]
        prompt, output = (
            tuple(int(t) for t in rng.integers(0, SMALL, length)) for length in lengths
        )
        # also of all negative ones
        logits = rng.integers(-32, 33, SMALL) / 8 + rng.choice([-5.0, 0.0])
        rows.append(Row(logits.tolist(), sampling, prompt, output))
    return rows


def rows_of_many(fields: Callable[[list[int]], dict[str, Any]]) -> list[Row]:
    """Greedy rows over more tokens, the later the likelier, with the fields made of their ids: in
    this order, and in the other."""
    ids = list(range(MANY))
    logits = [token / 8 for token in ids]
    return [
        Row(logits, RowSampling(temperature=0.0, **fields(tokens))) for tokens in (ids, ids[::-1])
    ]


def some_tokens(rng: np.random.Generator, most: int) -> list[int]:
    """Up to `most` different tokens of the small vocabulary."""
    return [int(token) for token in rng.permutation(SMALL)[: rng.integers(0, most + 1)]]
