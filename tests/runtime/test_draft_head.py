"""The draft head: whatever steps came before, its drafts are those of a head that computes all of a
row's tokens at once."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.draft_head import HeadInputs
from dovetail.api.model import ModelInputs
from dovetail_executors.runtime.recorded_steps import decode_builders, mixed_builders
from dovetail_executors.runtime.recording import LayerSplitter
from tests.models.oracle import DenseAttention
from tests.runtime.fakes import NAN_TOKEN, TAPS, Bench, TinyHead, TinyModel, generate, spec_of
from tests.runtime.recorded import WatchedGraphs, give_graphs
from tests.runtime.test_decode_graphs import CapturableGreedy
from tests.support import examples

PROMPTS = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5), (8,))
MAX_LINES = 16
MOST = 3  # drafts of a row


@cache
def answer(prompt: tuple[int, ...]) -> list[int]:
    return generate(prompt, 30)


@cache
@torch.inference_mode()
def drafted(known: tuple[int, ...], count: int) -> list[int]:
    """Return the drafts after `known` tokens: each from all states of the target, without a cache
    of the engine's."""
    tokens = torch.tensor(known)
    positions = torch.arange(len(known) - 1)
    inputs = ModelInputs(token_ids=tokens[:-1], positions=positions)
    _, tapped = TinyModel(DenseAttention).forward_tapped(inputs, TAPS)
    head, drafts = TinyHead(DenseAttention(spec_of(0))), list[int]()
    of_head = HeadInputs(token_ids=tokens[1:], positions=positions, states=head.fuse(tapped))
    states = head(of_head)[-1:]
    while True:
        drafts.append(int(head.logits(states).argmax()))
        if len(drafts) == count:
            return drafts
        latest = torch.tensor(drafts[-1:])
        place = positions[-1:] + len(drafts)
        states = head(HeadInputs(token_ids=latest, positions=place, states=states))


class Drafting:
    """Rows that get their answers, and require of each draft of the head that it is the right
    one."""

    def __init__(self, **of_bench: object) -> None:
        self.bench = Bench(max_rows=4, max_lines=MAX_LINES, head=True, **of_bench)  # type: ignore[arg-type]
        self.got: dict[int, list[int]] = {}
        self.drafts = 0

    def with_graphs(self) -> WatchedGraphs:
        self.bench.sampler.__class__ = CapturableGreedy
        parts = self.bench.runner.parts
        builders = [
            *mixed_builders(parts, LayerSplitter(), 32),
            *decode_builders(parts, MAX_LINES, self.bench.recordings),
        ]
        return give_graphs(self.bench, builders)

    def begin(self, *rows: int) -> None:
        result = self.bench.run(
            {row: len(PROMPTS[row]) for row in rows},
            [self.bench.new(row, PROMPTS[row]) for row in rows],
        )
        self.got |= {row: [int(token)] for row, token in zip(rows, result.token_ids, strict=True)}

    def known(self, row: int) -> tuple[int, ...]:
        return (*PROMPTS[row], *self.got[row])

    def step(self, rows: dict[int, int | list[bool]]) -> None:
        """A step of decodes: of each row, how many tokens the head drafts, or for drafts of the
        host whether each is right."""
        drafts = {}
        for row, asked in rows.items():
            right = answer(PROMPTS[row])[len(self.got[row]) :]
            drafts[row] = (
                [-1] * asked
                if isinstance(asked, int)
                else [t if r else (t + 1) % NAN_TOKEN for t, r in zip(right, asked, strict=False)]
            )
        self.check(drafts)

    def check(self, drafts: dict[int, list[int]]) -> None:
        head, ids = self.bench.proposer, self.bench.rows.token_ids
        assert head is not None
        propose = type(head).propose

        def checked(*args: object) -> None:
            propose(head, *args)  # type: ignore[arg-type]
            for row, own in drafts.items():
                if own and own[0] < 0:
                    known = self.known(row)
                    assert ids[row, len(known) : len(known) + len(own)].tolist() == drafted(
                        known, len(own)
                    ), (row, known)
                    self.drafts += len(own)

        head.propose = checked  # type: ignore[method-assign]
        if any(drafts.values()):
            result = self.bench.check(dict.fromkeys(drafts, 1), drafts)
            assert result.counts is not None
            counts = result.counts.tolist()
        else:
            result, counts = self.bench.run(dict.fromkeys(drafts, 1)), [1] * len(drafts)
        tokens = result.token_ids.tolist()
        for row, count in zip(drafts, counts, strict=True):
            self.got[row] += tokens[:count]
            del tokens[:count]
            assert self.got[row] == answer(PROMPTS[row])[: len(self.got[row])]


asked = st.one_of(st.integers(0, MOST), st.lists(st.booleans(), max_size=MOST))


@pytest.mark.parametrize("graphs", [False, True])
@examples(quick=15, full=300)
@given(
    steps=st.lists(st.dictionaries(st.integers(0, 3), asked, min_size=1), min_size=1, max_size=6)
)
def test_drafts_are_those_of_the_head_alone(
    graphs: bool, steps: list[dict[int, int | list[bool]]]
) -> None:
    """After steps without drafts, and after drafts that were right, wrong, or right at first."""
    rows = Drafting()
    if graphs:
        rows.with_graphs()
    rows.begin(0, 1, 2, 3)
    for step in steps:
        rows.step(step)
    rows.step({0: 2, 1: 3, 2: 1, 3: 3})


@pytest.mark.parametrize("graphs", [False, True])
def test_prompts_in_chunks_beside_decodes_and_drafts(graphs: bool) -> None:
    rows = Drafting()
    if graphs:
        rows.with_graphs()
    bench = rows.bench
    rows.begin(1)
    long = [*PROMPTS[0], *answer(PROMPTS[0])[:9]]
    bench.runner.collect(
        bench.runner.submit(
            bench.batch(
                {1: 1, 0: 6},
                [bench.new(0, long, prompt_len=5)],
                [],
                [],
                {1: [NAN_TOKEN - 1], 0: []},
            )
        )
    )
    rows.got[1] = bench.rows.token_ids[1, 2 : bench.rows.known[1]].tolist()
    bench.run({0: 7})
    assert bench.run({0: 1}).token_ids.tolist() == answer(PROMPTS[0])[9:10]
    rows.got[0] = answer(PROMPTS[0])[:10]
    rows.step({0: 3, 1: 2})
    rows.step({1: 2, 0: 3})
    assert rows.drafts == 10


def test_a_found_prefix_has_the_heads_k_and_v_too() -> None:
    """As long as the token after it is the same."""
    rows, prompt = Drafting(), PROMPTS[0]
    rows.begin(0)
    bench = rows.bench
    bench.blocks[1] = bench.blocks[0][:1]
    bench.run({1: 1}, [bench.new(1, prompt, computed=bench.block_size)])
    result = bench.check({1: 1}, {1: [-1] * 3})
    assert result.counts is not None
    expected, drafts = answer(prompt)[1:4], drafted((*prompt, *answer(prompt)[:1]), 3)
    assert result.counts[0] - 1 == next(
        (i for i, (a, b) in enumerate(zip(expected, drafts, strict=True)) if a != b), 3
    )


@pytest.mark.parametrize("graphs", [False, True])
def test_late_sampling(graphs: bool) -> None:
    rows = Drafting()
    if graphs:
        rows.with_graphs()
    bench = rows.bench
    rows.begin(0, 1)
    result = bench.run_late({0: 1, 1: 1}, allowed={1: [7]})
    rows.got[0].append(int(result.token_ids[0]))
    assert rows.known(0) == (*PROMPTS[0], *answer(PROMPTS[0])[:2])
    rows.step({0: 3})
    assert rows.drafts == 3


def test_which_graphs_are_replayed() -> None:
    rows = Drafting()
    graphs = rows.with_graphs()
    rows.begin(0, 1)
    graphs.replayed.clear()
    rows.step({0: 3, 1: 1})
    assert graphs.replayed == [("draft", 2), ("draft", 1), ("draft", 1), ("decode", 6)]


def test_a_rehearsal_runs_what_follows_a_recorded_step_and_changes_no_draft() -> None:
    rows = Drafting()
    graphs, head = rows.with_graphs(), rows.bench.proposer
    rows.begin(0, 1)
    stored, store = list[int](), head.model.store
    head.model.store = lambda inputs: (stored.append(len(inputs.token_ids)), store(inputs))[1]
    graphs.rehearse()
    assert {4, 32} <= {*stored}, "as many tokens as a step of a recorded size"
    rows.step({0: 3, 1: 2})


def test_a_request_that_comes_back_drafts_nothing_from_anothers_state() -> None:
    """It keeps its blocks, and drafts at once in another row. What the head made of its last state
    is lost."""

    def drafts_after(other: int) -> list[int]:
        rows = Drafting()
        rows.begin(0)
        bench, known = rows.bench, rows.known(0)
        bench.run({2: len(PROMPTS[other])}, [bench.new(2, PROMPTS[other])])
        blocks = bench.blocks.pop(0)
        bench.run({1: 2}, [bench.new(1, PROMPTS[1])], removed=[2])
        bench.blocks[2] = blocks
        head, drafts = bench.proposer, list[int]()
        propose = head.propose
        head.propose = lambda *args: (
            propose(*args),
            drafts.extend(bench.rows.token_ids[2, len(known) : len(known) + 2].tolist()),
        )  # type: ignore
        result = bench.check(
            {2: 1}, {2: [-1, -1]}, [bench.new(2, known, prompt_len=5, computed=len(known) - 1)]
        )
        assert result.token_ids[0] == answer(PROMPTS[0])[1]
        return drafts

    assert drafts_after(2) == drafts_after(3)


def test_nan_in_the_cache_of_the_head_harms_no_token() -> None:
    rows = Drafting()
    rows.begin(0)
    layer = rows.bench.proposer.model.layer
    for tensor in layer.cache.memory:
        tensor.view(torch.float32).fill_(torch.nan)
    got = list(rows.got[0])
    for _ in range(4):
        result = rows.bench.check({0: 1}, {0: [-1] * 3})
        got += result.token_ids.tolist()
    assert got == answer(PROMPTS[0])[: len(got)]
