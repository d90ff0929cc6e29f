"""The two ends of a decode step: each kernel changes and returns what its twin does, and both what a row's list of tokens would."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from dovetail.runtime import decode_rows
from dovetail.runtime import decode_rows_kernels as kernels
from dovetail.runtime.row_state import RowState
from tests.kernels import DEVICE, DTYPES, INTERPRETED, ON_GPU, runs_kernels, take_kernels
from tests.runtime.fakes import Bench, generate, layout
from tests.runtime.test_decode_graphs import PROMPTS, begin, with_graphs
from tests.support import examples

some = examples(quick=100 if ON_GPU else 15 if INTERPRETED else 40, full=1000 if ON_GPU else 300)
NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels(monkeypatch, decode_rows)


@dataclass(frozen=True)
class Step:
    """A decode of some rows, and what the model and the sampler say."""

    max_len: int
    tokens: list[list[int]]  # of every row there is, one at least each
    rows: list[int]  # padding included
    sampled: list[int]  # of each of `rows`
    size: int  # of a hidden state
    oddities: list[tuple[int, int, float]]  # in the hidden states: index in `rows`, place, value
    dtype: torch.dtype

    @property
    def nobody(self) -> int:
        return len(self.tokens)

    def state(self, device: torch.device) -> RowState:
        state = RowState(len(self.tokens), self.max_len, layout(4), device)
        for row, tokens in enumerate(self.tokens):
            state.token_ids[row, : len(tokens)] = torch.tensor(tokens)
            state.num_tokens[row] = len(tokens)
        return state

    def numbers(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [n], sampled ids [n], hidden states [n, size]."""
        hidden = torch.randn(len(self.rows), self.size).to(self.dtype)
        for index, place, value in self.oddities:
            hidden[index, place] = value
        return torch.tensor(self.rows, device=device), torch.tensor(self.sampled, device=device), hidden.to(device)


ids = st.integers(0, 2**31 - 1)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    max_len = draw(st.integers(1, 33))
    tokens = draw(st.lists(st.lists(ids, min_size=1, max_size=max_len), min_size=1, max_size=6))
    rows = draw(st.permutations(range(len(tokens))))[draw(st.integers(0, len(tokens))) :]
    rows += [len(tokens)] * draw(st.integers(0 if rows else 1, 4))
    sampled = draw(st.lists(ids, min_size=len(rows), max_size=len(rows)))
    size = draw(st.sampled_from([1, 2, 48, 64, 1000, 5120]))
    oddity = st.tuples(st.integers(0, len(rows) - 1), st.sampled_from([0, size // 2, size - 1]), st.sampled_from([NAN, -NAN, INF, -INF]))
    return Step(max_len, tokens, rows, sampled, size, draw(st.lists(oddity, max_size=4)), draw(st.sampled_from(DTYPES)))


def assert_same(ours: torch.Tensor, twins: torch.Tensor) -> None:
    torch.testing.assert_close(ours.cpu(), twins, rtol=0, atol=0)


# ---- kernels and twins


@runs_kernels
@given(steps())
@some
def test_the_kernels_are_their_twins(step: Step) -> None:
    ours, twins = step.state(DEVICE), step.state(CPU)
    rows, sampled, hidden = step.numbers(DEVICE)
    token_ids, positions = kernels.last_tokens(ours, rows)
    for our, twin in zip((token_ids, positions), decode_rows.last_tokens(twins, rows.cpu()), strict=True):
        assert_same(our, twin)
    outputs = kernels.append(ours, rows, positions, sampled, hidden)
    assert_same(outputs, decode_rows.append(twins, rows.cpu(), positions.cpu(), sampled.cpu(), hidden.cpu()))
    assert_same(ours.num_tokens, twins.num_tokens)
    assert_same(ours.token_ids[: step.nobody], twins.token_ids[: step.nobody])


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="a GPU compiles what it runs, and the interpreter nothing")
def test_the_kernels_compile_for_a_hopper() -> None:
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    state, rows = RowState(8, 100, layout(16), CPU), torch.zeros(3, dtype=torch.int64)
    with compiling_for_hopper() as compiled:
        token_ids, positions = kernels.last_tokens(state, rows)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            kernels.append(state, rows, positions, token_ids, torch.zeros(3, 1024, dtype=dtype))
    assert [kernel.name for kernel in compiled] == ["_last_tokens", "_append", "_append", "_append"]
    for kernel in compiled:
        assert "griddepcontrol.wait" in kernel.ptx
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES
    for kernel in compiled[1:]:
        assert "setp.nan" in kernel.ptx, "the search for NaN isn't optimised away"


# ---- what either does


@pytest.mark.usefixtures("with_kernels")
@given(steps())
@some
def test_rows_grow_by_what_was_sampled_and_nobody_stays_as_it_was(step: Step) -> None:
    state = step.state(DEVICE)
    rows, sampled, hidden = step.numbers(DEVICE)
    lists = [list(tokens) for tokens in step.tokens] + [[0]]
    token_ids, positions = decode_rows.last_tokens(state, rows)
    assert token_ids.tolist() == [lists[row][-1] for row in step.rows]
    assert positions.tolist() == [len(lists[row]) - 1 for row in step.rows]
    outputs = decode_rows.append(state, rows, positions, sampled, hidden)
    assert outputs.tolist() == [step.sampled, hidden.isnan().any(dim=1).long().tolist()]
    for row, token in zip(step.rows, step.sampled, strict=True):
        lists[row] += [token] if row != step.nobody else []
    assert state.num_tokens.tolist() == [len(tokens) for tokens in lists]
    for row, tokens in enumerate(lists):
        kept = state.token_ids[row].tolist()
        assert kept[: len(tokens)] == tokens
        assert row == step.nobody or not any(kept[len(tokens) :]), "what lies behind isn't touched"


@pytest.mark.skipif(not INTERPRETED, reason="without the interpreter, test_decode_graphs says so of the twins, and tests/gpu of real graphs")
@pytest.mark.usefixtures("with_kernels")
def test_decodes_with_the_kernels_say_the_same() -> None:
    bench = Bench(max_rows=4)
    with_graphs(bench)
    tokens = begin(bench, PROMPTS)
    for rows in ((0, 1, 2), (3,), (2, 0)):
        for row, token in zip(rows, bench.run(dict.fromkeys(rows, 1)).token_ids.tolist(), strict=True):
            tokens[row].append(token)
    assert tokens == [generate(prompt, len(told)) for prompt, told in zip(PROMPTS, tokens, strict=True)]
    assert bench.rows.num_tokens.tolist() == [*bench.rows.known.tolist(), 1]
