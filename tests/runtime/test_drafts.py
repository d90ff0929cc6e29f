"""Steps with drafts: whatever is drafted, rows get the tokens that they get one by one, and their
state is as if they had."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.component import NoOptions
from dovetail.api.executor import Drafts, Masks, Result
from dovetail.api.sampler import (
    Lines,
    RowHistory,
    RowSampling,
    SampledRow,
    SampledTokens,
    SampleInputs,
    SamplerContext,
)
from dovetail.errors import DovetailError
from dovetail_executors.runtime.recorded_steps import decode_builders
from dovetail_samplers.default import DefaultSampler
from tests.rounding import assert_rounded
from tests.runtime.fakes import NAN_TOKEN, ROUNDINGS, VOCAB, Bench, generate
from tests.runtime.recorded import WatchedGraphs, give_graphs
from tests.runtime.test_decode_graphs import CapturableGreedy
from tests.support import examples

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5], [8]]
AHEAD = 24  # tokens of each that are known
MAX_LINES = 12


class Rows:
    """Rows that have some of the tokens that the model generates after their prompts."""

    def __init__(self, *, windows: tuple[int | None, ...] = (None, None)) -> None:
        self.bench = Bench(windows=windows, max_lines=MAX_LINES)
        self.expected = [generate(prompt, AHEAD, windows) for prompt in PROMPTS]
        self.got: list[list[int]] = [[] for _ in PROMPTS]

    def with_graphs(self) -> WatchedGraphs:
        self.bench.sampler.__class__ = CapturableGreedy
        return give_graphs(
            self.bench, decode_builders(self.bench.runner.parts, MAX_LINES, self.bench.recordings)
        )

    def begin(self, *rows: int) -> None:
        added = [self.bench.new(row, PROMPTS[row]) for row in rows]
        self.take(list(rows), self.bench.run({row: len(PROMPTS[row]) for row in rows}, added))

    def take(self, rows: list[int], result: Result) -> None:
        """Note what rows got, and require that it is right, and that host and device agree about
        them."""
        tokens, counts = (
            result.token_ids.tolist(),
            [1] * len(rows) if result.counts is None else result.counts.tolist(),
        )
        assert not result.failed
        assert sum(counts) == len(tokens)
        for row, count in zip(rows, counts, strict=True):
            self.got[row] += tokens[:count]
            del tokens[:count]
            assert self.got[row] == self.expected[row][: len(self.got[row])]
        state, known = self.bench.rows, [len(PROMPTS[row]) + len(self.got[row]) for row in rows]
        assert state.known[rows].tolist() == state.num_tokens[rows].tolist() == known
        assert state.computed[rows].tolist() == [count - 1 for count in known]
        assert state.num_tokens[state.max_rows] == 1
        for row in rows:
            assert state.token_ids[row, : state.known[row]].tolist() == PROMPTS[row] + self.got[row]

    def drafts(self, row: int, rights: list[bool]) -> list[int]:
        """The tokens that come next, or others where `rights` are false."""
        start = len(self.got[row])
        return [
            token if right else (token + 1) % NAN_TOKEN
            for token, right in zip(self.expected[row][start:], rights, strict=False)
        ]


rights = st.lists(st.integers(0, 3).map(bool), max_size=2)  # of a row: 4 rows have 12 lines at most


@pytest.mark.parametrize("graphs", [False, True])
@examples(quick=10, full=200)
@given(
    steps=st.lists(st.dictionaries(st.integers(0, 3), rights, min_size=1), min_size=1, max_size=6),
    window=st.sampled_from([None, 3]),
)
@pytest.mark.slow("takes more than the budget")
def test_rows_get_the_tokens_that_they_would_one_by_one(
    graphs: bool, steps: list[dict[int, list[bool]]], window: int | None
) -> None:
    rows = Rows(windows=(window, None))
    if graphs:
        rows.with_graphs()
    rows.begin(0, 1, 2, 3)
    for step in steps:
        if all(len(rows.got[row]) + len(own) < AHEAD for row, own in step.items()):
            before = {row: len(rows.got[row]) for row in step}
            rows.take(
                list(step),
                rows.bench.check(
                    dict.fromkeys(step, 1),
                    {row: rows.drafts(row, own) for row, own in step.items()},
                ),
            )
            for row, own in step.items():
                assert len(rows.got[row]) == before[row] + 1 + [*own, False].index(False), (
                    "drafts are kept up to the first that is wrong"
                )


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_with_drafts_share_a_step_with_prompts_and_their_chunks(graphs: bool) -> None:
    rows = Rows()
    watched = rows.with_graphs() if graphs else None
    rows.begin(0, 2)
    added = [rows.bench.new(1, PROMPTS[1]), rows.bench.new(3, [*PROMPTS[3], *rows.expected[3]])]
    work = {3: 2, 0: 1, 1: 2, 2: 1}
    result = rows.bench.check(
        work, {0: rows.drafts(0, [True, True]), 2: rows.drafts(2, [True, False])}, added
    )
    assert result.counts is not None
    assert result.counts.tolist() == [0, 3, 1, 2]
    rows.take([0, 1, 2], replace(result, counts=result.counts[1:]))
    assert watched is None or watched.replayed[-1] == ("sampling", 8)
    rows.take([1, 0], rows.bench.run({1: 1, 0: 1}))


def test_a_step_with_drafts_replays_a_decode_of_so_many_lines() -> None:
    rows = Rows()
    graphs = rows.with_graphs()
    rows.begin(0, 1, 2)
    rows.take(
        [0, 1, 2],
        rows.bench.check(
            {0: 1, 1: 1, 2: 1}, {0: rows.drafts(0, [True]), 2: rows.drafts(2, [True, True, False])}
        ),
    )
    assert graphs.replayed[-1] == ("decode", 8)
    assert graphs.replayed_rows[-1] == [0, 0, 2, 2, 2, 2, 1], (
        "the longest rows first, and lines of a row together"
    )
    rows.take([0, 1], rows.bench.check({0: 1, 1: 1}, {}))
    assert graphs.replayed[-1] == ("decode", 2), "a step without any draft is one like others"


def test_each_yielded_token_has_its_log_probabilities() -> None:
    asked = RowSampling(logprobs=2)
    plain, drafting = Bench(), Bench(max_lines=MAX_LINES)
    found = []
    for bench in (plain, drafting):
        first = bench.run({0: 5, 1: 2}, [bench.new(0, PROMPTS[0], asked), bench.new(1, PROMPTS[1])])
        assert first.logprobs is not None
        found.append(
            [(row, first.logprobs.logprobs[place].tolist()) for place, row in enumerate((0, 1))]
        )
    right = generate(PROMPTS[0], 4)
    for _ in range(3):
        logprobs = plain.run({1: 1, 0: 1}).logprobs
        assert logprobs is not None
        found[0].append((0, logprobs.logprobs[1].tolist()))
    result = drafting.check({1: 1, 0: 1}, {0: [*right[1:3], (right[3] + 1) % NAN_TOKEN]})
    assert result.counts is not None
    assert result.logprobs is not None
    assert result.counts.tolist() == [1, 3]
    assert (
        result.logprobs.token_ids[:, 0].tolist()
        == result.token_ids.tolist()
        == [generate(PROMPTS[1], 2)[1], *right[1:4]]
    )
    assert_rounded([line[1] for line in found[0][2:]], result.logprobs.logprobs[1:], ROUNDINGS)


WAYS = [
    RowSampling(temperature=0.9, seed=3),
    RowSampling(temperature=0.7, top_k=5, frequency_penalty=0.8, seed=1),
    RowSampling(
        temperature=0.0,
        repetition_penalty=1.4,
        bad_words=((4, 5), (6,)),
        min_tokens=4,
        stop_token_ids=(1, 2),
    ),
    RowSampling(temperature=1.5, top_p=0.8, presence_penalty=-0.5, seed=9),
]


def default_sampler(history: RowHistory, samplings: list[RowSampling]) -> DefaultSampler:
    sampler = DefaultSampler(NoOptions(), SamplerContext("cpu", VOCAB, history, 2))
    sampler.prepare(len(samplings))
    sampler.update(
        [], [SampledRow(row=row, sampling=sampling) for row, sampling in enumerate(samplings)]
    )
    return sampler


@examples(quick=5, full=100)
@given(
    drafts=st.lists(
        st.lists(st.lists(st.integers(0, NAN_TOKEN - 1), max_size=2), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_each_token_is_what_the_sampler_draws_from_the_logits_of_its_line_alone(
    drafts: list[list[list[int]]],
) -> None:
    bench = Bench(max_lines=MAX_LINES)
    ways = [replace(way, logit_bias=((NAN_TOKEN, -100.0),)) for way in WAYS]
    sampler = default_sampler(bench.rows.history, ways)
    bench.make_runner(sampler=sampler)
    drawn: list[torch.Tensor] = []
    draw = sampler.sample

    def sample(inputs: SampleInputs) -> SampledTokens:
        drawn.append(inputs.logits.clone())
        return draw(inputs)

    sampler.sample = sample  # type: ignore[method-assign]
    tokens = [list(prompt) for prompt in PROMPTS]
    result = bench.run(
        {row: len(prompt) for row, prompt in enumerate(PROMPTS)},
        [bench.new(row, PROMPTS[row], ways[row]) for row in range(4)],
    )
    for row, token in enumerate(result.token_ids.tolist()):
        tokens[row].append(token)
    for step in drafts:
        result = bench.check(dict.fromkeys(range(4), 1), dict(enumerate(step)))
        logits, yielded = iter(drawn[-1]), iter(result.token_ids.tolist())
        for row, (own, count) in enumerate(
            zip(step, result.counts if result.counts is not None else (), strict=True)
        ):
            for ahead, line in enumerate([next(logits) for _ in range(1 + len(own))][:count]):
                before = torch.tensor([tokens[row], tokens[row]], dtype=torch.int32)
                lens = torch.tensor(
                    [[len(tokens[row])] * 2, [len(PROMPTS[row])] * 2], dtype=torch.int32
                )
                alone = default_sampler(RowHistory(before, *lens), [ways[row]])
                one = Lines(
                    rows=torch.zeros(1, dtype=torch.int64), ahead=torch.zeros(1, dtype=torch.int32)
                )
                inputs = SampleInputs(logits=line[None], lines=one, host_rows=np.zeros(1, np.int64))
                token = next(yielded)
                assert alone.sample(inputs).token_ids.tolist() == [token]
                assert ahead == 0 or tokens[row][-1] == own[ahead - 1]
                tokens[row].append(token)


@pytest.mark.parametrize("graphs", [False, True])
def test_masks_are_of_lines(graphs: bool) -> None:
    rows = Rows()
    if graphs:
        rows.with_graphs()
    rows.begin(0, 1)
    drafts = {0: rows.drafts(0, [True, True]), 1: rows.drafts(1, [True])}
    batch = replace(rows.bench.batch({0: 1, 1: 1}, [], [], [], drafts), late=True)
    pending = rows.bench.runner.submit(batch)
    other = (rows.expected[0][2] + 1) % NAN_TOKEN
    words = np.zeros((2, 1), np.uint32)
    # of the second line of row 0, and the first of row 1
    words[0, 0], words[1, 0] = (
        1 << other,
        1 << rows.expected[1][1],
    )
    rows.bench.runner.sample(pending, Masks(np.array([1, 3], np.int32), words))
    result = rows.bench.runner.collect(pending)
    assert result.counts is not None
    assert result.counts.tolist() == [2, 2]
    assert result.token_ids.tolist() == [rows.expected[0][1], other, *rows.expected[1][1:3]]


def test_a_row_fails_if_a_token_that_it_yields_has_no_numbers() -> None:
    rows = Rows()
    rows.with_graphs()
    rows.begin(0, 1, 2)
    state = rows.bench.rows
    state.token_ids[1, state.known[1] - 1] = NAN_TOKEN
    result = rows.bench.check(
        {0: 1, 1: 1, 2: 1}, {0: [rows.expected[0][1], NAN_TOKEN], 1: [3], 2: rows.drafts(2, [True])}
    )
    assert list(result.failed) == [1], "a draft that isn't reached does no harm"
    assert result.counts is not None
    assert (result.counts[0], result.counts[2]) == (2, 2)


def test_a_step_with_drafts_is_alone_in_flight() -> None:
    rows = Rows()
    rows.begin(0, 1)
    pending = rows.bench.submit({0: 1})
    drafting = rows.bench.batch({1: 1}, [], [], [], {1: [4]})
    with pytest.raises(
        DovetailError,
        match=r"step 3 can't be submitted while step 2 is in flight: one of them has drafts",
    ):
        rows.bench.runner.submit(drafting)
    rows.bench.runner.collect(pending)
    pending = rows.bench.runner.submit(drafting)
    with pytest.raises(DovetailError, match=r"step 4 can't be submitted while step 3 is in flight"):
        rows.bench.submit({0: 1})
    rows.bench.runner.collect(pending)


@pytest.mark.parametrize(
    ("counts", "ids", "message"),
    [
        ([1], [VOCAB], "aren't in the vocabulary of 31 tokens"),
        ([1], [-1], "there is no draft model"),
        ([1], [1, 2], "has 2 drafts for 1 rows"),
        ([-1], [], "has 0 drafts for 1 rows"),
        ([1, 0], [1], "has 1 drafts for 1 rows"),
        ([2], [1, 2], "computes these and its last known token"),
        ([MAX_LINES], [1] * MAX_LINES, "samples 13 lines; there is memory for 12"),
        (
            [9],
            [1] * 9,
            r"can't compute 10 tokens after 58: 59 are known and 9 drafted, its blocks hold 60, a "
            r"row holds 64",
        ),
    ],
)
def test_drafts_that_do_not_fit_are_refused(
    counts: list[int], ids: list[int], message: str
) -> None:
    bench = Bench(max_lines=MAX_LINES)
    bench.run({0: 58}, [bench.new(0, [1] * 58)])
    batch = bench.batch({0: 1}, [], [], [], {0: [1]})
    if len(ids) > 2:
        batch = replace(batch, num_tokens=np.array([1 + len(ids)], np.int32))
    before = bench.rows.token_ids.clone()
    with pytest.raises(DovetailError, match=message):
        bench.runner.submit(
            replace(batch, drafts=Drafts(np.array(counts, np.int32), np.array(ids, np.int32)))
        )
    assert torch.equal(bench.rows.token_ids, before)
