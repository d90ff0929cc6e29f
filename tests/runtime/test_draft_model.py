"""The draft model: of its drafts, those are accepted that it would have right if it ran alone,
whatever steps came before."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import DovetailError
from dovetail_executors.runtime.recorded_steps import decode_builders
from tests.runtime.fakes import Bench, generate
from tests.runtime.recorded import WatchedGraphs, give_graphs
from tests.runtime.test_decode_graphs import CapturableGreedy
from tests.support import examples

PROMPTS = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5))
ERROR = 0.2  # of the draft model: it is right often, but not always
MAX_LINES = 12
MOST = 3  # drafts of a row


@cache
def answer(prompt: tuple[int, ...]) -> list[int]:
    return generate(prompt, 30)


@cache
def right(known: tuple[int, ...], expected: tuple[int, ...]) -> int:
    """Return how many tokens the draft model, alone, generates after `known` tokens as
    `expected`."""
    for count in range(len(expected)):
        if generate((*known, *expected[:count]), 1, error=ERROR) != [expected[count]]:
            return count
    return len(expected)


class Drafting:
    """Rows that let the draft model propose, and check how many of its drafts are accepted."""

    def __init__(self, **of_bench: object) -> None:
        self.bench = Bench(max_rows=3, max_lines=MAX_LINES, draft_error=ERROR, **of_bench)  # type: ignore[arg-type]
        self.got: dict[int, list[int]] = {}
        self.accepted = 0

    def with_graphs(self) -> WatchedGraphs:
        self.bench.sampler.__class__ = CapturableGreedy
        return give_graphs(
            self.bench, decode_builders(self.bench.runner.parts, MAX_LINES, self.bench.recordings)
        )

    def begin(self, *rows: int) -> None:
        result = self.bench.run(
            {row: len(PROMPTS[row]) for row in rows},
            [self.bench.new(row, PROMPTS[row]) for row in rows],
        )
        self.got |= {row: [int(token)] for row, token in zip(rows, result.token_ids, strict=True)}

    def known(self, row: int) -> list[int]:
        return [*PROMPTS[row], *self.got[row]]

    def step(self, drafts: dict[int, int], *, exact: bool = True) -> None:
        """A step of decodes, with as many drafts of each row; all 0: one without drafts. `exact`:
        the draft model sees all tokens."""
        if not any(drafts.values()):
            for row, token in zip(
                drafts, self.bench.run(dict.fromkeys(drafts, 1)).token_ids, strict=True
            ):
                self.got[row].append(int(token))
        else:
            before = {row: self.known(row) for row in drafts}
            result = self.bench.check(
                dict.fromkeys(drafts, 1), {row: [-1] * count for row, count in drafts.items()}
            )
            assert result.counts is not None
            ends = result.counts.cumsum()
            for row, start, end in zip(drafts, ends - result.counts, ends, strict=True):
                expected = answer(PROMPTS[row])[len(self.got[row]) :]
                self.got[row] += result.token_ids[start:end].tolist()
                self.accepted += end - start - 1
                if exact:
                    assert end - start - 1 == right(
                        tuple(before[row]), tuple(expected[: drafts[row]])
                    ), (row, before[row])
        for row in drafts:
            assert self.got[row] == answer(PROMPTS[row])[: len(self.got[row])]


counts = st.dictionaries(st.integers(0, 2), st.integers(0, MOST), min_size=1)


@pytest.mark.parametrize("graphs", [False, True])
@examples(quick=15, full=200)
@given(steps=st.lists(counts, min_size=1, max_size=6))
def test_drafts_are_those_of_the_draft_model_alone(
    graphs: bool, steps: list[dict[int, int]]
) -> None:
    """Also after steps without drafts, which it hasn't seen."""
    rows = Drafting()
    if graphs:
        rows.with_graphs()
    rows.begin(0, 1, 2)
    for step in steps:
        rows.step(step)


def test_an_exact_draft_model_is_always_right_in_long_runs() -> None:
    rows = Drafting()
    rows.bench.proposer.model.head = rows.bench.model.head
    rows.begin(0, 1)
    for _ in range(5):
        rows.step({0: 3, 1: 1}, exact=False)
    assert rows.accepted == 5 * 4


def test_many_unseen_tokens_are_computed_in_parts_of_a_step() -> None:
    rows = Drafting(max_tokens=8)
    rows.begin(0, 1)
    for _ in range(13):
        rows.step({0: 0, 1: 0})
    rows.step({0: 3, 1: 2})


def test_a_prefix_that_was_computed_has_the_draft_models_k_and_v_too() -> None:
    rows, prompt = Drafting(), PROMPTS[0]
    rows.begin(0)
    bench = rows.bench
    bench.blocks[1] = bench.blocks[0][:1]
    first = bench.run({1: 1}, [bench.new(1, prompt, computed=bench.block_size)])
    result = bench.check({1: 1}, {1: [-1] * 3})
    assert result.parts == (), "drafts are no part of a result"
    assert result.counts is not None
    assert result.counts[0] - 1 == right(
        (*prompt, *first.token_ids.tolist()), tuple(answer(prompt)[1:4])
    )


def test_prompts_in_chunks_beside_decodes_and_drafts() -> None:
    rows = Drafting()
    bench = rows.bench
    rows.begin(1)
    long = [*PROMPTS[0], *answer(PROMPTS[0])[:9]]
    bench.runner.collect(
        bench.runner.submit(
            bench.batch(
                {1: 1, 0: 6}, [bench.new(0, long, prompt_len=5)], [], [], {1: [-1, -1], 0: []}
            )
        )
    )
    bench.run({0: 7})
    result = bench.run({0: 1})
    assert result.token_ids.tolist() == answer(PROMPTS[0])[9:10]
    rows.got[0] = answer(PROMPTS[0])[:10]
    rows.step({0: 3})


def test_windows_of_the_draft_model() -> None:
    """Tokens before the window are left out, as their blocks may be gone."""
    rows = Drafting(draft_windows=(3, None))
    rows.begin(0, 1)
    for _ in range(9):
        rows.step({0: 0, 1: 0})
    for _ in range(3):
        rows.step({0: 3, 1: 2}, exact=False)


def test_which_graphs_are_replayed() -> None:
    rows = Drafting()
    graphs = rows.with_graphs()
    rows.begin(0, 1)
    graphs.replayed.clear()
    rows.step({0: 3, 1: 1})
    assert graphs.replayed == [
        ("draft_first", 2),
        ("draft", 1),
        ("draft", 1),
        ("decode", 6),
    ]


def test_drafts_of_a_row_that_are_only_partly_the_models_are_refused() -> None:
    rows = Drafting()
    rows.begin(0)
    with pytest.raises(DovetailError, match="of a row's drafts, some are -1"):
        rows.bench.check({0: 1}, {0: [-1, 3]})


def test_without_a_draft_model_its_drafts_are_refused() -> None:
    bench = Bench(max_lines=MAX_LINES)
    bench.run({0: 2}, [bench.new(0, [1, 2])])
    with pytest.raises(DovetailError, match="there is no draft model"):
        bench.check({0: 1}, {0: [-1]})


def test_nan_in_the_cache_of_the_draft_model_harms_no_token() -> None:
    rows = Drafting()
    rows.begin(0)
    for layer, *_ in rows.bench.proposer.model.layers:
        assert layer.cache is not None
        for tensor in layer.cache.memory:
            tensor.view(torch.float32).fill_(torch.nan)
    for _ in range(4):
        rows.step({0: 3}, exact=False)
