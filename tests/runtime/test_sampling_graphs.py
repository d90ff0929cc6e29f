"""Sampling that is replayed at the end of steps with prefills, with graphs that are played on the
CPU: the tokens are those of sampling as it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dovetail.api.sampler import Capture, RowSampling, SampledTokens, SampleInputs
from dovetail_executors.runtime.recorded_steps import SamplingSteps, decode_builders
from tests.runtime.fakes import NAN_TOKEN, Bench, generate
from tests.runtime.recorded import give_graphs
from tests.runtime.test_decode_graphs import CapturableGreedy
from tests.runtime.test_mixed_graphs import (
    PROMPTS,
    RecordableAttention,
    bench_with_graphs,
    generate_in_chunks,
)
from tests.support import examples


class GreedyWithoutLogprobs(CapturableGreedy):
    """Counts the rows that it is asked for outside of graphs: those that want log-probabilities."""

    launched = 0

    def capture_for(self, host_rows: NDArray[np.int64]) -> Capture | None:
        return (
            Capture.TOKENS
            if all(self.rows[row].logprobs is None for row in host_rows.tolist())
            else None
        )

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        self.launched += 0 if inputs.host_rows is None else len(inputs.host_rows)
        return super().sample(inputs)


def with_sampling_graphs(
    bench: Bench, of: type[GreedyWithoutLogprobs] = GreedyWithoutLogprobs
) -> GreedyWithoutLogprobs:
    bench.sampler.__class__ = of
    give_graphs(
        bench,
        [
            builder
            for builder in decode_builders(bench.runner.parts, bench.max_rows, bench.recordings)
            if isinstance(builder, SamplingSteps)
        ],
    )
    assert isinstance(bench.sampler, GreedyWithoutLogprobs)
    return bench.sampler


@pytest.mark.parametrize("model_is_replayed", [False, True])
@examples(quick=8, full=100)
@given(chunk=st.integers(1, 13))
def test_the_tokens_are_those_of_the_model_however_prompts_are_cut(
    model_is_replayed: bool, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bench = (
            bench_with_graphs(RecordableAttention, [16, 8, 4], patch)
            if model_is_replayed
            else Bench()
        )
        sampler = with_sampling_graphs(bench)
        assert generate_in_chunks(bench, chunk, 4) == [generate(prompt, 4) for prompt in PROMPTS]
        assert not sampler.launched
    assert bench.rows.num_tokens[: bench.max_rows].tolist() == bench.rows.known.tolist()
    assert bench.rows.num_tokens[bench.max_rows] == 1, "nobody's row stays as it was"


def test_a_step_with_a_row_that_no_graph_serves_is_sampled_as_it_is() -> None:
    bench = Bench()
    sampler = with_sampling_graphs(bench)
    added = [bench.new(0, PROMPTS[0]), bench.new(1, PROMPTS[1], RowSampling(logprobs=2))]
    result = bench.run({0: len(PROMPTS[0]), 1: len(PROMPTS[1])}, added)
    assert sampler.launched == 2
    assert result.logprobs is not None
    assert [[token] for token in result.token_ids.tolist()] == [
        generate(prompt, 1) for prompt in PROMPTS[:2]
    ]


def test_a_row_whose_hidden_state_is_nan_fails_alone() -> None:
    bench = Bench()
    with_sampling_graphs(bench)
    result = bench.run(
        {0: 2, 1: 2, 2: 2},
        [bench.new(0, [3, 1]), bench.new(1, [4, NAN_TOKEN]), bench.new(2, [5, 9, 2])],
    )
    assert list(result.failed) == [1]
    assert result.token_ids.tolist()[2] == -1, "it has a token to compute before it samples"
    assert [result.token_ids.tolist()[0]] == generate([3, 1], 1)
