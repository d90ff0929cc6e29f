"""Slots of the tokens of several groups: those of a plain loop, on a CPU as by the kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from dovetail.api.executor import Batch, NewRow
from dovetail.api.sampler import RowSampling
from dovetail_executors.runtime import row_state
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.step_inputs import DecodeInputs, HostInputs, HostLines, MixedInputs
from tests.kernels import DEVICE, INTERPRETED, ON_GPU, take_kernels
from tests.runtime.fakes import layout
from tests.support import examples

MAX_ROWS, MAX_LEN, POOL, SIZE = 4, 40, 90, 160
GROUPS = [(3, (6, 8, 2)), (4, (4, 8, 1)), ((8, 5, 2), (16, 5, 3), (8, 9, 1))]
NOTHING = np.zeros(0, np.int32)
some = examples(quick=60 if ON_GPU else 6 if INTERPRETED else 20, full=500)


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels(monkeypatch, row_state)


def state_of(groups: int, lens: list[int], seed: int) -> RowState:
    """Return rows with these numbers of tokens and random pages."""
    state = RowState(MAX_ROWS, MAX_LEN, layout(*GROUPS[groups]), DEVICE)
    state.pool_allocated(POOL)
    rng = np.random.default_rng(seed)
    pages = [
        [
            rng.integers(0, POOL, -(-count // group.block_tokens) * group.pages_per_block).astype(
                np.int32
            )
            for group in state.layout.groups
        ]
        for count in lens
    ]
    added = [
        NewRow(row, str(row), np.zeros(count, np.int32), count, 0, tuple(pages[row]), RowSampling())
        for row, count in enumerate(lens)
    ]
    state.update(
        Batch(
            0,
            NOTHING,
            tuple(added),
            NOTHING.reshape(0, 3),
            (),
            NOTHING,
            NOTHING,
            np.zeros(0, np.bool_),
        )
    )
    return state


def slots_of(state: RowState, tokens: list[tuple[int, int] | None]) -> list[list[int]]:
    """By table: of tokens (row, position); None: padding."""
    slots = []
    for table, size in enumerate(state.block_tokens.tolist()):
        pages = [
            POOL if token is None else int(state.host_tables[table, token[0], token[1] // size])
            for token in tokens
        ]
        slots.append(
            [
                page * size + (0 if token is None else token[1] % size)
                for page, token in zip(pages, tokens, strict=True)
            ]
        )
    return slots


@given(
    groups=st.integers(0, 2),
    lens=st.lists(st.integers(1, MAX_LEN), min_size=1, max_size=MAX_ROWS),
    seed=st.integers(0, 99),
)
@some
def test_each_token_of_a_step_has_its_slots_and_padding_the_waste_page(
    groups: int, lens: list[int], seed: int
) -> None:
    state = state_of(groups, lens, seed)
    rows, counts = np.arange(len(lens), dtype=np.int32), np.array(lens, np.int32)
    batch = Batch(
        1, NOTHING, (), NOTHING.reshape(0, 3), (), rows, counts, np.zeros(len(lens), np.bool_)
    )
    host = HostInputs.of(batch, state)
    tokens = [(row, position) for row, count in enumerate(lens) for position in range(count)]
    assert host.to_device(state).slots.tolist() == slots_of(state, [*tokens])
    fixed = MixedInputs(SIZE, state, 0)
    assert fixed.rows(0).slots.tolist() == slots_of(state, [None] * SIZE)
    padding = [None] * (SIZE - len(tokens))
    assert fixed.fill(host, np.zeros(0, np.int64)).slots.tolist() == slots_of(
        state, [*tokens, *padding]
    )
    decode = DecodeInputs(MAX_ROWS, state).fill(
        HostLines(rows[::-1].astype(np.int64), np.zeros(len(rows), np.int32)), 0
    )
    last = [(row, count - 1) for row, count in enumerate(lens)][::-1]
    assert torch.cat(decode.slots).tolist() == slots_of(
        state, [*last, *[None] * (MAX_ROWS - len(lens))]
    )
