"""Steps that are sampled late, with masks: the same tokens with and without recorded graphs, and
never one that a mask forbids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.sampler import RowSampling
from dovetail.errors import DovetailError
from dovetail.nn.token_masks import mask_tokens
from tests.runtime.fakes import VOCAB, Bench, generate
from tests.runtime.test_decode_graphs import PROMPTS, begin, with_graphs
from tests.runtime.test_sampling_graphs import with_sampling_graphs
from tests.support import examples

GRAPHS = pytest.mark.parametrize("graphs", [False, True])


def bench_with(graphs: bool) -> Bench:
    bench = Bench()
    if graphs:
        with_sampling_graphs(bench)
        with_graphs(bench)
    return bench


@GRAPHS
@examples(quick=8, full=100)
@given(steps=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5))
def test_late_steps_without_masks_give_the_tokens_of_others(
    graphs: bool, steps: list[set[int]]
) -> None:
    bench = bench_with(graphs)
    tokens = begin(bench, PROMPTS)
    for rows in steps:
        result = bench.run_late(dict.fromkeys(sorted(rows), 1))
        for row, token in zip(sorted(rows), result.token_ids.tolist(), strict=True):
            tokens[row].append(token)
    assert tokens == [
        generate(prompt, len(told)) for prompt, told in zip(PROMPTS, tokens, strict=True)
    ]
    assert bench.rows.num_tokens[:4].tolist() == bench.rows.known.tolist()


def test_a_late_decode_replays_the_model_alone() -> None:
    bench = Bench()
    graphs = with_graphs(bench)
    begin(bench, PROMPTS)
    bench.run_late(dict.fromkeys(range(3), 1))
    bench.run(dict.fromkeys(range(3), 1))
    assert graphs.replayed == [("model", 4), ("decode", 4)]


@GRAPHS
@examples(quick=10, full=200)
@given(data=st.data())
def test_masked_rows_draw_the_likeliest_that_is_allowed_and_others_what_they_would(
    graphs: bool, data: st.DataObject
) -> None:
    bench = bench_with(graphs)
    plain = Bench()
    begin(bench, PROMPTS)
    begin(plain, PROMPTS)
    for _ in range(3):
        rows = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1)))
        allowed = {
            row: sorted(data.draw(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=4)))
            for row in rows
            if data.draw(st.booleans())
        }
        tokens = bench.run_late(dict.fromkeys(rows, 1), allowed=allowed).token_ids.tolist()
        assert (
            plain.run_late(dict.fromkeys(rows, 1), allowed=allowed).token_ids.tolist() == tokens
        ), "with graphs as without"
        for row, token in zip(rows, tokens, strict=True):
            assert token in allowed.get(row, range(VOCAB))


def test_log_probabilities_are_raw_beside_a_mask() -> None:
    bench = Bench()
    raw = bench.run({0: 3}, [bench.new(0, [3, 1, 4], RowSampling(logprobs=3))]).logprobs
    masked = bench.run_late(
        {1: 3}, [bench.new(1, [3, 1, 4], RowSampling(logprobs=3))], allowed={1: [7]}
    ).logprobs
    assert raw is not None
    assert masked is not None
    assert masked.token_ids[0, 0] == 7
    assert masked.token_ids[0, 1:].tolist() == raw.token_ids[0, 1:].tolist()
    assert masked.logprobs[0, 1:].tolist() == raw.logprobs[0, 1:].tolist()


def test_what_is_late_must_be_sampled_and_what_is_not_cannot_be() -> None:
    bench = Bench()
    pending = bench.submit({0: 3}, [bench.new(0, [3, 1, 4])])
    with pytest.raises(DovetailError, match="can't be sampled"):
        bench.runner.sample(pending, None)  # type: ignore[arg-type]
    bench.runner.collect(pending)


# The masks themselves


@examples(quick=30, full=500)
@given(
    vocab=st.integers(1, 100),
    rows=st.integers(1, 4),
    lines=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_mask_forbids_just_the_tokens_whose_bit_is_not_set(
    vocab: int, rows: int, lines: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, vocab), generator=generator)
    words = torch.randint(
        -(2**31), 2**31, (lines, -(-vocab // 32)), generator=generator, dtype=torch.int64
    ).to(torch.int32)
    at = torch.randint(-1, lines, (rows,), generator=generator)
    masked = logits.clone()
    mask_tokens(masked, at, words)
    for row in range(rows):
        for token in range(vocab):
            line = int(at[row])
            allowed = line < 0 or int(words[line, token // 32]) >> token % 32 & 1
            assert masked[row, token] == (logits[row, token] if allowed else -torch.inf)
