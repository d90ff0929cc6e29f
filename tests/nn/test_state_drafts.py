"""Recurrent layers check drafts: a token's outputs, and the state after those that count, are those
of single tokens: bit for bit if kernels compute them; torch rounds differently for other numbers of
tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rounding import allowed

pytest.importorskip("triton")

from dovetail.nn.state import accept, conv, delta, mamba, norm
from dovetail.testing.memory import BoundStates
from tests.kernels import DTYPES, INTERPRETED, ON_GPU, take_kernels
from tests.nn.states import Net, Tokens, net, state_of
from tests.support import examples

ROWS, MOST, LAYERS = 3, 6, (5, 9)
some = examples(quick=60 if ON_GPU else 4 if INTERPRETED else 8, full=300 if ON_GPU else 60)
kinds = pytest.mark.parametrize("kind", ["delta", "mamba2"])
dtypes = pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.float32], ids=str)
drafted = st.integers(0, MOST - 1).flatmap(
    lambda drafts: st.tuples(st.just(drafts), st.integers(0, drafts))
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels(monkeypatch, accept, conv, delta, mamba, norm)


def same(ours: torch.Tensor, theirs: torch.Tensor, *, exact: bool = True) -> bool:
    return (
        torch.equal(ours, theirs)
        if exact and (INTERPRETED or ON_GPU)
        else torch.allclose(ours, theirs, rtol=allowed(500), atol=allowed(500))
    )


def joined(parts: list[Tokens]) -> Tokens:
    return Tokens(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "a", "b")))


class Rows:
    """Rows of two layers that compute sequences, some of which check drafts, beside the same rows
    token by token."""

    def __init__(
        self, model: Net, state_dtype: torch.dtype, prompts: list[int], max_lines: int = ROWS * MOST
    ) -> None:
        self.model, self.sequences = model, [model.sequence(80) for _ in prompts]
        self.bound = model.bound(ROWS, state_dtype=state_dtype, max_lines=max_lines)
        self.plain = model.bound(ROWS, state_dtype=state_dtype, max_lines=max_lines)
        self.done, self.chunked = [0] * len(prompts), False
        for row, length in enumerate(prompts):
            if length:
                for bound in (self.bound, self.plain):
                    self.compute(bound, [row], [length])
                self.done[row] = length

    def compute(
        self, bound: BoundStates, rows: list[int], lengths: list[int]
    ) -> list[torch.Tensor]:
        bound.plan(rows, lengths, [self.done[row] for row in rows])
        return self.outputs(bound, rows, lengths, [self.sequences[row] for row in rows])

    def outputs(
        self, bound: BoundStates, rows: list[int], lengths: list[int], sequences: list[Tokens]
    ) -> list[torch.Tensor]:
        parts = [
            s.part(self.done[row], self.done[row] + length)
            for row, length, s in zip(rows, lengths, sequences, strict=True)
        ]
        return [self.model.compute(bound, joined(parts), index) for index in LAYERS]

    def check(self, step: dict[int, tuple[int, int]], chunk: int = 0) -> None:
        """A step in which rows check (drafts, right ones), and row 0, if it isn't among them,
        computes a chunk; against single tokens."""
        rows = [*step, *([0] if chunk else [])]
        drafts = [*(drafts for drafts, _ in step.values()), *([0] if chunk else [])]
        lengths = [*(1 + drafts for drafts, _ in step.values()), *([chunk] if chunk else [])]
        sequences = [self.guessed(row, right) for row, (_, right) in step.items()] + [
            self.sequences[0]
        ] * bool(chunk)
        checked = self.bound.plan_drafts(rows, lengths, [self.done[row] for row in rows], drafts)
        got = self.outputs(self.bound, rows, lengths, sequences)
        if chunk:
            last = self.compute(self.plain, [0], [chunk])
            for ours, theirs in zip(got, last, strict=True):
                assert same(ours[-chunk:], theirs, exact=False)
            self.done[0] += chunk
        self.chunked |= chunk > 0
        starts = [sum(lengths[:index]) for index in range(len(step))]
        most = max((right for _, right in step.values()), default=0)
        for ahead in range(1 + most):  # accepted lines, beside single tokens of the same rows
            now = [
                (row, start)
                for (row, (_, right)), start in zip(step.items(), starts, strict=True)
                if right >= ahead
            ]
            one = self.compute(self.plain, [row for row, _ in now], [1] * len(now))
            for ours, theirs in zip(got, one, strict=True):
                assert same(ours[[start + ahead for _, start in now]], theirs, exact=not chunk), (
                    ahead
                )
            for row, _ in now:
                self.done[row] += 1
        self.bound.accept(checked, [done + 1 for done in self.done])
        for row in range(len(self.done)):
            for index in LAYERS:
                for ours, theirs in zip(
                    state_of(self.bound, row, index), state_of(self.plain, row, index), strict=True
                ):
                    assert not self.done[row] or same(ours, theirs, exact=not self.chunked), (
                        f"the state of row {row} in layer {index}"
                    )

    def guessed(self, row: int, right: int) -> Tokens:
        """The row's sequence, wrong after the known token and this many drafts."""
        s, wrong, end = self.sequences[row], self.model.sequence(80), self.done[row] + 1 + right
        return joined([s.part(0, end), wrong.part(end, 80)])


@kinds
@dtypes
@pytest.mark.parametrize(
    "state_dtype",
    [torch.float32, torch.bfloat16] if ON_GPU or INTERPRETED else [torch.float32],
    ids=str,
)
@given(data=st.data(), seed=st.integers(0, 2**31))
@some
def test_numbers_are_those_of_single_tokens(
    kind: str, dtype: torch.dtype, state_dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = Rows(
        net(kind, dtype),
        state_dtype,
        data.draw(st.lists(st.sampled_from([0, 1, 2, 7]), min_size=1, max_size=ROWS), "prompts"),
    )
    for _ in range(1 if INTERPRETED else 2):
        order = data.draw(st.permutations(range(len(rows.done))), "order")
        rows.check({row: data.draw(drafted, "drafts, right ones") for row in order})


@kinds
@pytest.mark.parametrize("chunk", [4] if INTERPRETED else [1, 4])
def test_rows_with_drafts_share_a_step_with_a_chunk(kind: str, chunk: int) -> None:
    """In float32, in which a chunk is computed token by token, too."""
    torch.manual_seed(1)
    rows = Rows(net(kind), torch.float32, [3, 4, 1])
    rows.check({1: (3, 2), 2: (1, 0)}, chunk)
    rows.check({2: (2, 2), 1: (0, 0)}, chunk)


@pytest.mark.parametrize("kind", ["delta"])
def test_more_drafts_than_a_kernel_reads_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:  # which takes long
        monkeypatch.setattr("dovetail.nn.kernels.states.LINES_AT_ONCE", 4)
    torch.manual_seed(2)
    most = 4 if INTERPRETED else 32
    Rows(net(kind), torch.float32, [3, 4], max_lines=4 * most).check(
        {0: (most + 3, most + 3), 1: (most - 1, 2)}
    )
