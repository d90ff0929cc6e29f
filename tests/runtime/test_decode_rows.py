"""The two ends of a decode step: each kernel changes and returns what its twin does, and both what
a row's list of tokens would."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from dovetail.api.sampler import Lines
from dovetail_executors.runtime import decode_rows_kernels as kernels
from dovetail_executors.runtime import sampling
from dovetail_executors.runtime.row_state import RowState
from tests.kernels import DEVICE, DTYPES, INTERPRETED, ON_GPU, runs_kernels, take_kernels
from tests.runtime.fakes import Bench, generate, layout
from tests.runtime.recorded import keep_launches
from tests.runtime.test_decode_graphs import PROMPTS, begin, with_graphs
from tests.support import examples

some = examples(quick=100 if ON_GPU else 15 if INTERPRETED else 40, full=1000 if ON_GPU else 300)
NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels(monkeypatch, sampling)


@dataclass(frozen=True)
class Step:
    """A decode of some rows, and what the model and the sampler say."""

    max_len: int
    tokens: list[list[int]]  # of every row there is, one at least each
    drafts: list[list[int]]  # likewise
    rows: list[int]  # of each line, padding included
    ahead: list[int]
    sampled: list[int]
    size: int  # of a hidden state
    oddities: list[tuple[int, int, float]]  # in the hidden states: index in `rows`, place, value
    dtype: torch.dtype

    @property
    def nobody(self) -> int:
        return len(self.tokens)

    def state(self, device: torch.device) -> RowState:
        state = RowState(len(self.tokens), self.max_len, layout(4), device)
        for row, (tokens, drafts) in enumerate(zip(self.tokens, self.drafts, strict=True)):
            state.token_ids[row, : len(tokens + drafts)] = torch.tensor(tokens + drafts)
            state.num_tokens[row] = len(tokens)
        return state

    def numbers(self, device: torch.device) -> tuple[Lines, torch.Tensor, torch.Tensor]:
        """Lines [n], sampled ids [n], hidden states [n, size]."""
        hidden = torch.randn(len(self.rows), self.size).to(self.dtype)
        for index, place, value in self.oddities:
            hidden[index, place] = value
        lines = Lines(
            rows=torch.tensor(self.rows), ahead=torch.tensor(self.ahead, dtype=torch.int32)
        )
        return on(device, lines), torch.tensor(self.sampled, device=device), hidden.to(device)

    def take_drafts(self, state: RowState) -> torch.Tensor:
        """Remove the drafts from the state's rows. Return what `last_tokens` is given instead."""
        for row, tokens in enumerate(self.tokens):
            state.token_ids[row, len(tokens) :] = 0
        of_lines = [
            self.drafts[row][ahead - 1] if ahead else -1
            for row, ahead in zip(self.rows, self.ahead, strict=True)
        ]
        return torch.tensor(of_lines, dtype=torch.int32, device=state.device)


def on(device: torch.device, lines: Lines) -> Lines:
    return Lines(rows=lines.rows.to(device), ahead=lines.ahead.to(device))


ids = st.integers(0, 2**31 - 1)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    max_len = draw(st.integers(1, 33))
    tokens = draw(st.lists(st.lists(ids, min_size=1, max_size=max_len), min_size=1, max_size=6))
    drafts = [draw(st.lists(ids, max_size=min(4, max_len - len(known)))) for known in tokens]
    own = draw(st.permutations(range(len(tokens))))[draw(st.integers(0, len(tokens))) :]
    lines = [(row, ahead) for row in own for ahead in range(1 + len(drafts[row]))]
    sampled = [
        drafts[row][ahead] if ahead < len(drafts[row]) and draw(st.integers(0, 3)) else draw(ids)
        for row, ahead in lines
    ]
    padding = draw(st.integers(0 if own else 1, 4))
    lines += [(len(tokens), 0)] * padding
    sampled += [draw(ids) for _ in range(padding)]
    size = draw(st.sampled_from([1, 2, 48, 64, 1000, 5120]))
    oddity = st.tuples(
        st.integers(0, len(lines) - 1),
        st.sampled_from([0, size // 2, size - 1]),
        st.sampled_from([NAN, -NAN, INF, -INF]),
    )
    odd, dtype = draw(st.lists(oddity, max_size=4)), draw(st.sampled_from(DTYPES))
    return Step(
        max_len,
        tokens,
        drafts,
        [row for row, _ in lines],
        [ahead for _, ahead in lines],
        sampled,
        size,
        odd,
        dtype,
    )


def assert_same(ours: torch.Tensor, twins: torch.Tensor) -> None:
    torch.testing.assert_close(ours.cpu(), twins, rtol=0, atol=0)


# ---- kernels and twins


@runs_kernels
@given(steps())
@some
def test_the_kernels_are_their_twins(step: Step) -> None:
    ours, twins = step.state(DEVICE), step.state(CPU)
    lines, sampled, hidden = step.numbers(DEVICE)
    token_ids, positions = kernels.last_tokens(ours, lines)
    for our, twin in zip(
        (token_ids, positions), sampling.last_tokens(twins, on(CPU, lines)), strict=True
    ):
        assert_same(our, twin)
    outputs = kernels.append(ours, lines, positions, sampled, hidden)
    assert_same(
        outputs,
        sampling.append(twins, on(CPU, lines), positions.cpu(), sampled.cpu(), hidden.cpu()),
    )
    assert_same(ours.num_tokens, twins.num_tokens)
    assert_same(ours.token_ids[: step.nobody], twins.token_ids[: step.nobody])


@pytest.mark.skipif(
    ON_GPU or INTERPRETED, reason="a GPU compiles what it runs, and the interpreter nothing"
)
def test_the_kernels_compile_for_a_hopper() -> None:
    from tests.attention.hopper import SHARED_MEMORY_BYTES, compiling_for_hopper

    state, lines = (
        RowState(8, 100, layout(16), CPU),
        Lines(rows=torch.zeros(3, dtype=torch.int64), ahead=torch.zeros(3, dtype=torch.int32)),
    )
    with compiling_for_hopper() as compiled:
        token_ids, positions = kernels.last_tokens(state, lines)
        kernels.last_tokens(state, lines, lines.ahead)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            kernels.append(state, lines, positions, token_ids, torch.zeros(3, 1024, dtype=dtype))
    assert [kernel.name for kernel in compiled] == [
        "_last_tokens",
        "_last_tokens",
        "_append",
        "_append",
        "_append",
    ]
    for kernel in compiled:
        assert "griddepcontrol.wait" in kernel.ptx
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES
    for kernel in compiled[2:]:
        assert "setp.nan" in kernel.ptx, "the search for NaN isn't optimised away"


# ---- what either does


@pytest.mark.usefixtures("with_kernels")
@given(steps())
@some
def test_drafts_that_come_with_the_lines_are_written_to_their_rows(step: Step) -> None:
    told, untold = step.state(DEVICE), step.state(DEVICE)
    lines = step.numbers(DEVICE)[0]
    drafts = step.take_drafts(told)
    for our, other in zip(
        sampling.last_tokens(told, lines, drafts),
        sampling.last_tokens(untold, lines),
        strict=True,
    ):
        assert_same(our, other.cpu())
    for row in set(step.rows) - {step.nobody}:
        assert_same(told.token_ids[row], untold.token_ids[row].cpu())


@pytest.mark.usefixtures("with_kernels")
@given(steps())
@some
def test_rows_grow_by_what_was_sampled_up_to_a_draft_that_differs_and_nobody_stays_as_it_was(
    step: Step,
) -> None:
    state = step.state(DEVICE)
    lines, sampled, hidden = step.numbers(DEVICE)
    before = [tokens + drafts for tokens, drafts in zip(step.tokens, step.drafts, strict=True)] + [
        [0]
    ]
    lengths = [*map(len, step.tokens), 1]
    token_ids, positions = sampling.last_tokens(state, lines)
    assert positions.tolist() == [
        lengths[row] - 1 + ahead for row, ahead in zip(step.rows, step.ahead, strict=True)
    ]
    assert token_ids.tolist() == [
        before[row][position] for row, position in zip(step.rows, positions.tolist(), strict=True)
    ]
    outputs = sampling.append(state, lines, positions, sampled, hidden)
    grown, counts = [*map(list, step.tokens), [0]], [0] * len(step.rows)
    for first, row in enumerate(step.rows):
        if step.ahead[first] == 0:
            drafts = step.drafts[row] if row < step.nobody else []
            own = step.sampled[first : first + len(drafts) + 1]
            counts[first] = 1 + next(
                (index for index, draft in enumerate(drafts) if own[index] != draft), len(drafts)
            )
            grown[row] += own[: counts[first]] if row < step.nobody else []
    assert outputs.tolist() == [step.sampled, hidden.isnan().any(dim=1).long().tolist(), counts]
    assert state.num_tokens.tolist() == [len(tokens) for tokens in grown]
    for row, tokens in enumerate(grown[: step.nobody]):
        kept = state.token_ids[row].tolist()
        assert kept[: len(tokens)] == tokens
        assert kept[len(tokens) : len(before[row])] == before[row][len(tokens) :]
        assert not any(kept[max(len(tokens), len(before[row])) :]), "what lies behind isn't touched"


@pytest.mark.skipif(
    not INTERPRETED,
    reason="without the interpreter, test_decode_graphs says so of the twins, and tests/gpu of "
    "real graphs",
)
@pytest.mark.usefixtures("with_kernels")
def test_decodes_with_the_kernels_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_launches(monkeypatch)
    bench = Bench(max_rows=4)
    with_graphs(bench)
    tokens = begin(bench, PROMPTS)
    for rows in ((0, 1, 2), (3,), (2, 0)):
        for row, token in zip(
            rows, bench.run(dict.fromkeys(rows, 1)).token_ids.tolist(), strict=True
        ):
            tokens[row].append(token)
    assert tokens == [
        generate(prompt, len(told)) for prompt, told in zip(PROMPTS, tokens, strict=True)
    ]
    assert bench.rows.num_tokens.tolist() == [*bench.rows.known.tolist(), 1]
