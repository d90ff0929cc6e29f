"""`HostInputs` against plain loops; `MixedInputs` hold the last step and nothing of those
before."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.executor import Batch, NewRow
from dovetail.api.sampler import RowSampling
from dovetail_executors.runtime import step_inputs
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.step_inputs import DeviceInputs, HostInputs, MixedInputs
from tests.runtime.fakes import layout
from tests.support import examples

CPU = torch.device("cpu")
MAX_ROWS, MAX_LEN, BLOCK_SIZE, SIZE, POOL = 5, 12, 4, 32, 70
NONE = np.zeros(0, np.int32)

Step = list[tuple[int, int, int]]  # row, tokens computed before, tokens to compute
steps = st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, unique=True).flatmap(
    lambda rows: st.tuples(
        *(st.tuples(st.just(row), st.integers(0, 6), st.integers(1, 6)) for row in rows)
    ).map(list)
)


def blocks_of(row: int) -> list[int]:
    return [10 * row + 3, 10 * row + 1, 10 * row + 2]


def rows_of() -> RowState:
    state = RowState(MAX_ROWS, MAX_LEN, layout(BLOCK_SIZE), CPU)
    state.pool_allocated(POOL)
    return state


def inputs_of(step: Step) -> HostInputs:
    state = rows_of()
    tokens = np.zeros(MAX_LEN, np.int32)
    added = tuple(
        NewRow(
            row,
            str(row),
            tokens,
            MAX_LEN,
            computed,
            (np.array(blocks_of(row), np.int32),),
            RowSampling(),
        )
        for row, computed, _ in step
    )
    rows, _, counts = (np.array(column, np.int32) for column in zip(*step, strict=True))
    batch = Batch(
        0, NONE, added, NONE.reshape(0, 3), (), rows, counts, np.zeros(len(rows), np.bool_)
    )
    state.update(batch)
    return HostInputs.of(batch, state)


def lists_of(inputs: HostInputs | DeviceInputs) -> dict[str, list[Any]]:
    return {field.name: getattr(inputs, field.name).tolist() for field in fields(DeviceInputs)}


def expected_of(step: Step) -> dict[str, list[Any]]:
    tokens = [
        (row, position)
        for row, computed, count in step
        for position in range(computed, computed + count)
    ]
    return {
        "token_indices": [row * rows_of().row_width + position for row, position in tokens],
        "positions": [position for _, position in tokens],
        "slots": [
            [
                blocks_of(row)[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for row, position in tokens
            ]
        ],
        "rows": [row for row, _, _ in step],
        "query_starts": [
            sum(count for _, _, count in step[:index]) for index in range(len(step) + 1)
        ],
        "kv_lens": [computed + count for _, computed, count in step],
        "tables": [
            [
                blocks_of(row)[
                    : -(-max(computed + count for _, computed, count in step) // BLOCK_SIZE)
                ]
                for row, _, _ in step
            ]
        ],
    }


@examples(quick=50, full=1000)
@given(steps)
def test_a_batch_is_flat(step: Step) -> None:
    host = inputs_of(step)
    expected = expected_of(step)
    assert lists_of(host) == lists_of(host.to_device(rows_of())) == expected
    assert len(host.positions) == len(expected["token_indices"])
    assert host.ends.tolist() == expected["query_starts"][1:]


@examples(quick=50, full=1000)
@given(steps, st.data())
def test_rows_are_divided_where_tokens_attend_in_both_directions(
    step: Step, data: st.DataObject
) -> None:
    host = inputs_of(step)
    total = len(host.positions)
    told = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    divided = host.divided(np.array(told))
    assert divided.both_ways is not None
    pieces: list[list[int]] = []  # row, first token, K and V, whether in both directions
    token = 0
    for row, computed, count in step:
        for place in range(count):
            if place == 0 or told[token] != told[token - 1]:
                pieces.append([row, token, 0, told[token]])
            pieces[-1][2] = computed + place + 1
            token += 1
    assert [list(piece) for piece in zip(*pieces, strict=True)] == [
        divided.rows.tolist(),
        divided.query_starts[:-1].tolist(),
        divided.kv_lens.tolist(),
        divided.both_ways.tolist(),
    ]
    assert divided.query_starts[-1] == total
    own = dict(zip(host.rows.tolist(), inputs_of(step).tables[0].tolist(), strict=True))  # type: ignore[index]
    assert divided.tables is not None
    assert divided.tables[0].tolist() == [own[row] for row in divided.rows.tolist()]
    assert lists_of(divided)["slots"] == lists_of(host)["slots"]


@examples(quick=50, full=1000)
@given(st.lists(steps, min_size=1, max_size=4))
def test_fixed_inputs_hold_the_last_step_and_padding_that_is_harmless(sequence: list[Step]) -> None:
    fixed = MixedInputs(SIZE, rows_of(), MAX_ROWS)
    names = [field.name for field in fields(DeviceInputs) if field.name != "tables"]
    at = [getattr(fixed.rows(1), name).data_ptr() for name in names]
    for step in sequence:
        host = inputs_of(step)
        filled, expected, padding = (
            lists_of(fixed.fill(host, host.ends.astype(np.int64) - 1)),
            expected_of(step),
            SIZE - len(host.positions),
        )
        for padded, number in (
            (expected["token_indices"], 0),
            (expected["positions"], 0),
            (expected["slots"][0], POOL * BLOCK_SIZE),
        ):
            padded += [number] * padding
        assert filled == expected
        assert fixed.wanted[: len(step)].tolist() == (host.ends - 1).tolist()
        assert [getattr(fixed.rows(1), name).data_ptr() for name in names] == at
    assert (fixed.token_indices.tolist(), fixed.positions.tolist()) == (
        expected["token_indices"],
        expected["positions"],
    )


def test_a_table_of_many_blocks_is_left_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    step = [(0, 0, 5), (1, 0, 1), (2, 0, 9)]  # three blocks each
    for entries, comes in ((9, True), (8, False)):
        monkeypatch.setattr(step_inputs, "TABLE_ENTRIES", entries)
        host = inputs_of(step)
        assert host.max_blocks == 3
        fixed = MixedInputs(SIZE, rows_of(), 0).fill(host, np.zeros(0, np.int64))
        assert [
            inputs.tables is not None for inputs in (host, host.to_device(rows_of()), fixed)
        ] == [comes] * 3


def test_fixed_inputs_begin_as_padding() -> None:
    fixed = MixedInputs(SIZE, rows_of(), 0)
    tokens = fixed.rows(0)
    assert [
        set(part.tolist()) for part in (tokens.token_indices, tokens.positions, tokens.slots[0])
    ] == [{0}, {0}, {POOL * BLOCK_SIZE}]
    assert (
        len(tokens.rows),
        tokens.query_starts.tolist(),
        len(tokens.kv_lens),
        len(fixed.wanted),
    ) == (0, [0], 0, 0)
