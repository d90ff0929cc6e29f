"""Steps whose rows ask for penalties, rules and log-probabilities, replayed: the tokens and numbers
are those of the sampler without kernels or graphs, whoever joins, leaves or comes back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dovetail.api.component import NoOptions
from dovetail.api.executor import Result
from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import Capture, RowSampling, SamplerCapabilities, SamplerContext
from dovetail.api.token_sizes import half_of, row_sizes
from dovetail.nn import logprobs
from dovetail_executors.runtime.recorded_steps import decode_builders
from dovetail_samplers import default, table
from dovetail_samplers.default import DefaultSampler
from tests.kernels import INTERPRETED, take_kernels
from tests.rounding import rounded
from tests.runtime.fakes import NAN_TOKEN, ROUNDINGS, VOCAB, Bench, generate
from tests.runtime.recordable_attention import SharingAttention
from tests.runtime.recorded import WatchedGraphs, give_graphs, keep_launches
from tests.runtime.test_decode_graphs import with_graphs
from tests.runtime.test_sampling_graphs import GreedyWithoutLogprobs, with_sampling_graphs
from tests.support import examples

pytest.importorskip("triton")

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="needs Triton's interpreter, which another test starts"
)
ROWS = 2
BIAS = ((3, 1.5), (4, -2.0), (NAN_TOKEN, -100.0))
token = st.integers(0, NAN_TOKEN - 1)
samplings = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.2, 0.4]),
    logit_bias=st.just(BIAS),
    bad_words=st.sampled_from([(), ((5,), (1, 2))]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (7, 8, 9)]),
    logprobs=st.sampled_from([None, None, 0, 3]),
)


@dataclass(frozen=True)
class Step:
    """What happens before the rows that are there compute: who leaves, who comes back to another
    row, who joins."""

    leaves: int | None
    comes_back: int | None
    joins: tuple[list[int], RowSampling] | None


steps = st.builds(
    Step,
    st.none() | st.integers(0, ROWS - 1),
    st.none() | st.integers(0, ROWS - 1),
    st.none()
    | st.tuples(
        st.lists(token, min_size=1, max_size=6),
        st.one_of(samplings, st.just(RowSampling(temperature=0.0))),
    ),
)


@dataclass
class Story:
    """Plays steps on a bench, and keeps what rows are told."""

    bench: Bench
    tokens: dict[int, list[int]] = field(default_factory=dict)  # row -> prompt and output
    # row -> tokens of the prompt, and the rest
    asked: dict[int, tuple[int, RowSampling]] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)  # rows given up since the last step
    # tokens, and log-probabilities that were asked for
    told: list[float] = field(default_factory=list)

    def play(self, step: Step) -> None:
        leaving = {
            row: row == step.comes_back
            for row in (step.leaves, step.comes_back)
            if row in self.tokens
        }
        gone = {row: (self.tokens.pop(row), self.asked.pop(row)) for row in leaving}
        new = [self.begin(*gone[row]) for row, returns in leaving.items() if returns]
        if step.joins is not None and len(self.tokens) < ROWS:
            prompt, sampling = step.joins
            new.append(self.begin(list(prompt), (len(prompt), sampling)))
        self.gone += gone
        if self.tokens:
            added = [
                self.bench.new(row, self.tokens[row], self.asked[row][1], self.asked[row][0])
                for row in new
            ]
            work = {row: len(known) if row in new else 1 for row, known in self.tokens.items()}
            self.take(list(work), self.bench.run(work, added, self.gone))
            self.gone = []

    def begin(self, tokens: list[int], asked: tuple[int, RowSampling]) -> int:
        """In the last row that is free."""
        row = max(set(range(ROWS)) - set(self.tokens))
        self.tokens[row], self.asked[row] = tokens, asked
        return row

    def take(self, rows: list[int], result: Result) -> None:
        assert not result.failed
        assert (result.logprobs is not None) == any(
            self.asked[row][1].logprobs is not None for row in rows
        )
        for place, (row, sampled) in enumerate(zip(rows, result.token_ids.tolist(), strict=True)):
            self.tokens[row].append(sampled)
            self.told.append(sampled)
            k = self.asked[row][1].logprobs
            if k is not None and result.logprobs is not None:
                self.told += result.logprobs.token_ids[place, : 1 + k].tolist()
                self.told += result.logprobs.logprobs[place, : 1 + k].tolist()
                self.told.append(int(result.logprobs.ranks[place]))


def bench_with_the_default_sampler(max_lines: int = ROWS, **of_bench: Any) -> Bench:
    bench = Bench(max_rows=ROWS, num_blocks=400, max_lines=max_lines, **of_bench)
    sampler = DefaultSampler(
        NoOptions(), SamplerContext("cpu", VOCAB, bench.rows.history, max_lines - ROWS)
    )
    sampler.prepare(ROWS)
    bench.make_runner(sampler=sampler)
    return bench


def replaying(
    patch: pytest.MonkeyPatch, max_lines: int = ROWS, **of_bench: Any
) -> tuple[Bench, WatchedGraphs]:
    """With kernels, and graphs of all that a step samples."""
    take_kernels(patch, default, table, logprobs)
    keep_launches(patch)
    bench = bench_with_the_default_sampler(max_lines, **of_bench)
    graphs = give_graphs(bench, decode_builders(bench.runner.parts, max_lines, bench.recordings))
    patch.setattr(bench.sampler, "sample", lambda *_, **__: pytest.fail("sampled as it is"))
    return bench, graphs


@interpreted
@examples(quick=2, full=100)
@given(story=st.lists(steps, min_size=4, max_size=8))
def test_whoever_joins_leaves_and_comes_back_is_told_what_plain_sampling_says(
    story: list[Step],
) -> None:
    plain = Story(bench_with_the_default_sampler())
    with pytest.MonkeyPatch.context() as patch:
        replayed = Story(replaying(patch)[0])
        for step in story:
            replayed.play(step)
    for step in story:
        plain.play(step)
    assert replayed.told == rounded(plain.told, ROUNDINGS)


@interpreted
@examples(quick=1, full=50)
@given(
    asked=st.tuples(samplings, samplings),
    steps=st.lists(
        st.tuples(*[st.lists(st.booleans(), max_size=2)] * ROWS), min_size=2, max_size=3
    ),
)
def test_lines_are_drawn_in_graphs_as_plain_sampling_draws_tokens_one_by_one(
    asked: tuple[RowSampling, RowSampling], steps: list[tuple[list[bool], list[bool]]]
) -> None:
    """`steps`: of the drafts of each row, which are right."""

    def begun(bench: Bench) -> list[list[int]]:
        first = bench.run(
            {0: 3, 1: 1}, [bench.new(0, [3, 1, 4], asked[0]), bench.new(1, [5], asked[1])]
        )
        return [[token] for token in first.token_ids.tolist()]

    plain = bench_with_the_default_sampler()
    expected = begun(plain)
    for _ in range(9):
        for own, token in zip(expected, plain.run({0: 1, 1: 1}).token_ids.tolist(), strict=True):
            own.append(token)
    with pytest.MonkeyPatch.context() as patch:
        bench, graphs = replaying(patch, 3 * ROWS)
        got = begun(bench)
        for rights in steps:
            comes = [tokens[len(own) :] for tokens, own in zip(expected, got, strict=True)]
            drafts = [
                [
                    token if right else (token + 1) % NAN_TOKEN
                    for token, right in zip(own, flags, strict=False)
                ]
                for own, flags in zip(comes, rights, strict=True)
            ]
            result = bench.check({0: 1, 1: 1}, dict(enumerate(drafts)))
            assert result.counts is not None
            assert (
                result.logprobs is None
                or result.logprobs.token_ids[:, 0].tolist() == result.token_ids.tolist()
            )
            tokens = result.token_ids.tolist()
            for own, flags, count in zip(got, rights, result.counts.tolist(), strict=True):
                assert count == 1 + [*flags, False].index(False)
                own += tokens[:count]
                del tokens[:count]
        assert {kind for kind, _ in graphs.replayed[1:]} <= {"decode", "decode_full"}
    assert got == [tokens[: len(own)] for tokens, own in zip(expected, got, strict=True)]


@interpreted
def test_each_step_replays_the_plainest_graph_that_serves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dovetail_executors.runtime.runner.SHARING_WORTH", 4)
    bench, graphs = replaying(monkeypatch, attention=SharingAttention)
    bench.run(
        {0: 3, 1: 1},
        [
            bench.new(0, [3, 1, 4]),
            bench.new(1, [5], RowSampling(repetition_penalty=2.0, logit_bias=BIAS)),
        ],
    )
    for rows in ([0], [1], [0, 1]):
        bench.run(dict.fromkeys(rows, 1))
    assert graphs.replayed == [
        ("sampling_full", 2),
        ("decode", 1),
        ("decode_full", 1),
        ("decode_full", 2),
    ]
    shared = replace(bench.batch({0: 1, 1: 1}, [], [], []), shared_prefix_blocks=1)
    bench.runner.collect(bench.runner.submit(shared))
    assert graphs.replayed[4:] == [("sampling_full", 2)], (
        "a prefix is read once by the graphs of other steps"
    )


class AsksForWhatTheDeviceLacks(GreedyWithoutLogprobs):
    """Its `sample` raises for `FULL`."""

    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.ALL)

    def capture_for(self, host_rows: NDArray[np.int64]) -> Capture:
        return super().capture_for(host_rows) or Capture.FULL


def test_what_the_device_cannot_sample_in_a_graph_is_sampled_as_it_is() -> None:
    bench = Bench(max_rows=ROWS)
    sampler = with_sampling_graphs(bench, AsksForWhatTheDeviceLacks)
    graphs = with_graphs(bench)
    results = [
        bench.run(
            {0: 3, 1: 1}, [bench.new(0, [3, 1, 4]), bench.new(1, [5], RowSampling(logprobs=2))]
        )
    ]
    results += [bench.run(dict.fromkeys(rows, 1)) for rows in ([0, 1], [1], [0])]
    told = [
        [
            int(result.token_ids[place])
            for result, place in zip(results, places, strict=False)
            if place is not None
        ]
        for places in ((0, 0, None, 0), (1, 1, 0))
    ]
    assert told == [generate([3, 1, 4], 3), generate([5], 3)]
    assert [result.logprobs is not None for result in results] == [True, True, True, False]
    assert (sampler.launched, graphs.replayed) == (5, [("decode", 1)])


@given(st.integers(1, 3000))
@examples(quick=50, full=2000)
def test_of_half_the_sizes_none_is_twice_as_large_as_a_step_needs(most: int) -> None:
    sizes, half = row_sizes(most), half_of(row_sizes(most))
    assert set(half) <= set(sizes)
    assert half[-1] == most
    assert len(half) <= len(sizes) // 2 + 4
    for rows in range(1, most + 1):
        assert min(size for size in half if size >= rows) < rows + max(16, rows // 2)
