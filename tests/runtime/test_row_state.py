"""The row state against plain lists: for any rows that are added, grow and are removed, it holds
what was written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.executor import Batch, NewRow, RowChanges
from dovetail.api.kv_cache import HOLE
from dovetail.api.sampler import Lines, RowSampling
from dovetail.errors import DovetailError
from dovetail_executors.runtime import row_state
from dovetail_executors.runtime.row_state import PIECE, RowState, counts_within
from dovetail_executors.runtime.sampling import append, last_tokens
from tests.runtime.fakes import layout
from tests.support import examples

MAX_ROWS, MAX_LEN, BLOCK_SIZE = 4, 24, 3

LAYOUT = layout(BLOCK_SIZE)


@dataclass
class PlainRow:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


def batch(
    removed: list[int] | None = None,
    added: list[NewRow] | None = None,
    blocks: list[tuple[int, int]] | None = None,
) -> Batch:
    nothing = np.zeros(0, np.int32)
    return Batch(
        0,
        np.array(removed or [], np.int32),
        tuple(added or []),
        np.array([(0, row, page) for row, page in blocks or []], np.int32).reshape(-1, 3),
        (),
        nothing,
        nothing,
        np.zeros(0, np.bool_),
    )


def new(row: int, tokens: list[int], blocks: list[int]) -> NewRow:
    return NewRow(
        row,
        f"r{row}",
        np.array(tokens, np.int32),
        len(tokens),
        0,
        (np.array(blocks, np.int32),),
        RowSampling(),
    )


def grow(state: RowState, rows: list[int], tokens: list[int]) -> None:
    """Append a token to each of these rows, as a step does."""
    lines = Lines(
        rows=torch.tensor(rows, dtype=torch.int64), ahead=torch.zeros(len(rows), dtype=torch.int32)
    )
    append(
        state,
        lines,
        last_tokens(state, lines)[1],
        torch.tensor(tokens, dtype=torch.int64),
        torch.zeros(len(rows), 1),
    )
    state.known[rows] += 1


def assert_tables(state: RowState, plain: dict[int, PlainRow]) -> None:
    for row, expected in plain.items():
        tables = state.tables[0, row].tolist(), state.host_tables[0, row].tolist()
        assert [table[: len(expected.blocks)] for table in tables] == [expected.blocks] * 2


@given(st.data())
@examples(quick=40, full=1000)
def test_rows_hold_what_they_were_told(data: st.DataObject) -> None:
    state = RowState(MAX_ROWS, MAX_LEN, LAYOUT, torch.device("cpu"))
    plain: dict[int, PlainRow] = {}
    ids = st.integers(0, 99)
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        removed = data.draw(
            st.lists(st.sampled_from(sorted(plain)), unique=True) if plain else st.just([]),
            label="removed",
        )
        for row in removed:
            del plain[row]
        free = [row for row in range(MAX_ROWS) if row not in plain]
        added = []
        for row in data.draw(
            st.lists(st.sampled_from(free), unique=True) if free else st.just([]), label="added"
        ):
            plain[row] = PlainRow(
                data.draw(st.lists(ids, min_size=1, max_size=12)),
                data.draw(st.lists(ids, max_size=4)),
            )
            added.append(new(row, plain[row].tokens, plain[row].blocks))
        appended = []
        for row in data.draw(
            st.lists(st.sampled_from(sorted(plain)), max_size=3) if plain else st.just([]),
            label="appended to",
        ):
            if len(plain[row].blocks) < MAX_LEN // BLOCK_SIZE:
                appended.append((row, data.draw(ids)))
                plain[row].blocks.append(appended[-1][1])
        state.update(batch(removed, added, appended))
        sampling = data.draw(
            st.lists(st.sampled_from(sorted(plain)), unique=True) if plain else st.just([]),
            label="sampling",
        )
        sampled = [data.draw(ids) for _ in sampling]
        for row, token in zip(sampling, sampled, strict=True):
            plain[row].tokens.append(token)
        grow(state, sampling, sampled)
        if data.draw(st.booleans(), label="the table is read"):
            assert_tables(state, plain)
    assert_tables(state, plain)
    for row, expected in plain.items():
        assert state.token_ids[row, : len(expected.tokens)].tolist() == expected.tokens
        assert state.num_tokens[row] == state.known[row] == len(expected.tokens)
        assert state.num_pages[0, row] == len(expected.blocks)


def test_tokens_of_any_length_are_written_to_their_row_only() -> None:
    lengths = [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE]
    tokens = {row: [*range(100 * row, 100 * row + n)] for row, n in enumerate(lengths)}
    # two batches, so that each row lies between others that are written earlier or later
    for order in ([1, 3, 5, 0, 2, 4], [4, 2, 0, 5, 3, 1]):
        state = RowState(len(lengths), 3 * PIECE, LAYOUT, torch.device("cpu"))
        for rows in (order[:3], order[3:]):
            state.update(batch(added=[new(row, tokens[row], [row]) for row in rows]))
        for row, expected in tokens.items():
            assert state.token_ids[row, : len(expected)].tolist() == expected
            assert not state.token_ids[row, len(expected) :].any()
            assert state.num_tokens[row] == state.prompt_lens[row] == len(expected)
            assert state.tables[0, row, 0] == row


def test_a_row_is_deterministic_as_long_as_its_request() -> None:
    state = RowState(MAX_ROWS, MAX_LEN, LAYOUT, torch.device("cpu"))
    marked = replace(new(1, [1], [1]), sampling=RowSampling(deterministic=True))
    state.update(batch(added=[new(0, [1], [1]), marked]))
    assert state.are_deterministic(np.array([1, 0, 1])).tolist() == [True, False, True]
    state.update(batch([0, 1], [replace(marked, row=0), replace(marked, sampling=None)]))
    assert state.are_deterministic(np.array([0, 1])).tolist() == [True, False]


def changed(
    row: int, known: int, token_ids: list[int], computed: int, **sampling: Any
) -> RowChanges:
    numbers = [np.array([each], np.int32) for each in (row, known, len(token_ids), computed)]
    rows, kept, counts, done = numbers
    ids = np.array(token_ids, np.int32)
    return RowChanges(rows, kept, counts, ids, done, (RowSampling(**sampling),))


def test_a_row_that_changes_forgets_tokens_and_samples_otherwise() -> None:
    state = RowState(MAX_ROWS, MAX_LEN, LAYOUT, torch.device("cpu"))
    first = new(0, [1, 2, 3, 4, 5], [1, 2])
    other = new(1, [7, 8], [3])
    state.update(batch(added=[first, replace(other, sampling=RowSampling(logprobs=2))]))
    asked = changed(0, 3, [9], 2, deterministic=True, logprobs=1, prompt_logprobs=4)
    state.update(replace(batch(), changes=asked))
    assert state.token_ids[0, :4].tolist() == [1, 2, 3, 9]
    assert state.num_tokens.tolist()[:2] == state.known.tolist()[:2] == [4, 2]
    assert state.computed.tolist()[:2] == [2, 0]
    assert state.prompt_lens.tolist()[:2] == [5, 2]
    assert state.num_pages[0].tolist()[:2] == [2, 1]
    assert state.logprobs.tolist()[:2] == [1, 2]
    assert state.prompt_logprobs == {0: 4}
    assert state.are_deterministic(np.array([0, 1])).tolist() == [True, False]
    state.update(replace(batch(), changes=changed(0, 4, [], 3)))
    assert state.token_ids[0, :4].tolist() == [1, 2, 3, 9]
    assert state.logprobs.tolist()[:2] == [-1, 2]
    assert state.prompt_logprobs == {}
    assert not state.are_deterministic(np.array([0])).any()


@pytest.mark.parametrize(
    ("known", "more", "computed"), [(6, 0, 2), (5, MAX_LEN, 2), (3, 1, 4)], ids=str
)
def test_a_row_refuses_changes_that_do_not_fit(known: int, more: int, computed: int) -> None:
    state = RowState(MAX_ROWS, MAX_LEN, LAYOUT, torch.device("cpu"))
    state.update(batch(added=[new(0, [1, 2, 3, 4, 5], [1, 2])]))
    with pytest.raises(DovetailError, match=r"request 'r0' \(row 0\) can't go on with"):
        state.update(replace(batch(), changes=changed(0, known, [1] * more, computed)))


@given(st.lists(st.integers(1, 5), max_size=6))
@examples(quick=30, full=500)
def test_counts_within_begin_at_zero_in_each_group(sizes: list[int]) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    assert counts_within(groups).tolist() == [place for size in sizes for place in range(size)]


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (new(MAX_ROWS, [1], [1]), "was given row 4; there are 4"),
        (
            new(0, [1] * (MAX_LEN + 1), [1]),
            "has 25 tokens in 1 pages of a group; a row holds 24 tokens in 8 pages",
        ),
        (new(0, [1], [1] * 9), "has 1 tokens in 9 pages"),
    ],
)
def test_a_request_that_fits_no_row_is_rejected_by_name(added: NewRow, message: str) -> None:
    with pytest.raises(DovetailError, match=message):
        RowState(MAX_ROWS, MAX_LEN, LAYOUT, torch.device("cpu")).update(batch(added=[added]))


def test_appended_blocks_are_sent_when_the_table_is_read_or_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, sent, send = (
        RowState(MAX_ROWS, 300, layout(1), torch.device("cpu")),
        [],
        row_state.all_to_device,
    )
    monkeypatch.setattr(
        row_state,
        "all_to_device",
        lambda arrays, device: sent.append(len(arrays[0])) or send(arrays, device),
    )
    state.update(batch(added=[new(1, [1], [7])]))
    sent.clear()
    for block in (8, 9):
        state.update(batch(blocks=[(1, block)]))
    assert sent == []
    assert state.tables[0, 1, :3].tolist() == state.tables[0, 1, :3].tolist() == [7, 8, 9]
    assert sent == [2], "together, once"
    for block in range(row_state.MOST_UNSENT + 1):
        state.update(batch(blocks=[(1, block)]))
    assert sent == [2, row_state.MOST_UNSENT + 1]


def test_more_blocks_than_a_row_holds_are_refused() -> None:
    state = RowState(MAX_ROWS, MAX_LEN, LAYOUT, torch.device("cpu"))
    state.update(batch(added=[new(1, [1], [1] * 7)]))
    with pytest.raises(DovetailError, match="request 'r1' was given more than the 8 blocks"):
        state.update(batch(blocks=[(1, 5), (1, 6)]))


def test_a_full_row_samples_once_more_and_writes_into_no_other_row() -> None:
    state = RowState(MAX_ROWS, MAX_LEN, LAYOUT, torch.device("cpu"))
    state.update(batch(added=[new(0, [5] * MAX_LEN, [1]), new(1, [7], [2])]))
    grow(state, [0, 1], [9, 8])
    assert state.token_ids[0, : MAX_LEN + 1].tolist() == [5] * MAX_LEN + [9]
    assert state.token_ids[1, :2].tolist() == [7, 8]
    assert state.known[:2].tolist() == [MAX_LEN + 1, 2]


def test_a_step_beyond_the_end_of_a_row_is_refused() -> None:
    # the last block could hold one token more
    state = RowState(MAX_ROWS, 2 * BLOCK_SIZE - 1, LAYOUT, torch.device("cpu"))
    state.update(batch(added=[new(0, [5] * 5, [1, 2])]))
    grow(state, [0], [9])
    beyond = replace(
        batch(),
        rows=np.array([0], np.int32),
        num_tokens=np.array([6], np.int32),
        yields_token=np.array([True]),
    )
    with pytest.raises(DovetailError, match=r"request 'r0'.*a row holds 5"):
        state.check(beyond)


def test_blocks_of_several_rows_may_come_in_any_order_of_rows() -> None:
    state = RowState(MAX_ROWS, MAX_LEN, LAYOUT, torch.device("cpu"))
    state.update(batch(added=[new(2, [1], [10]), new(0, [1], [20])]))
    state.update(batch(blocks=[(2, 11), (0, 21), (2, 12), (0, 22), (2, 13)]))
    assert state.tables[0, 2, :4].tolist() == [10, 11, 12, 13]
    assert state.tables[0, 0, :3].tolist() == [20, 21, 22]


def test_a_block_of_several_pages_has_each_in_a_table_of_its_own() -> None:
    state = RowState(MAX_ROWS, MAX_LEN, layout(3, (6, 8, 2)), torch.device("cpu"))
    state.pool_allocated(50)
    pages = np.array([5, 6, 7], np.int32), np.array([HOLE, HOLE, 20, 21], np.int32)
    state.update(batch(added=[replace(new(1, [1] * 9, []), pages=pages)]))
    grown = [(1, 1, 30), (0, 1, 8), (1, 1, 31)]
    state.update(replace(batch(), new_pages=np.array(grown, np.int32)))
    assert state.tables[:, 1, :4].tolist() == [[5, 6, 7, 8], [0, 20, 30, 0], [0, 21, 31, 0]]
    assert [table.tolist() for table in state.by_group(state.tables[:, 1, 1])] == [[6], [20, 21]]
    assert state.waste_slots.tolist() == [150, 300, 300]
    slots = torch.zeros((3, 3), dtype=torch.int64)
    state.put_slots(torch.tensor([state.row_width + 8, state.row_width + 11, 0]), 2, slots)
    assert slots.tolist() == [
        [7 * 3 + 2, 8 * 3 + 2, 150],
        [20 * 6 + 2, 20 * 6 + 5, 300],
        [21 * 6 + 2, 21 * 6 + 5, 300],
    ]


def test_a_row_holds_as_many_tokens_as_its_shortest_table() -> None:
    state = RowState(MAX_ROWS, MAX_LEN, layout(3, (6, 8, 2)), torch.device("cpu"))
    state.update(
        batch(
            added=[
                replace(
                    new(0, [1] * 12, []),
                    pages=(np.arange(4, dtype=np.int32), np.array([9, 10, 11], np.int32)),
                )
            ]
        )
    )
    beyond = replace(
        batch(),
        rows=np.array([0], np.int32),
        num_tokens=np.array([7], np.int32),
        yields_token=np.array([False]),
    )
    with pytest.raises(DovetailError, match="its blocks hold 6"):
        state.check(beyond)
    state.check(replace(beyond, num_tokens=np.array([6], np.int32)))


def test_a_new_row_without_a_table_for_each_group_is_refused() -> None:
    with pytest.raises(
        DovetailError, match="request 'r0' has 1 block tables; the layout has 2 groups"
    ):
        RowState(MAX_ROWS, MAX_LEN, layout(3, (3, 8, 1)), torch.device("cpu")).update(
            batch(added=[new(0, [1], [1])])
        )
