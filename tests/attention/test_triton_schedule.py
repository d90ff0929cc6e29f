"""The division of work: every key of every row is computed once, in shares of equal cost, for any
step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail_attention.triton_schedule import (
    LEAST_KEYS,
    LEAST_KEYS_OF_HALF,
    LEAST_STEPS,
    DecodeTables,
    Prefix,
    Split,
    StepRows,
    cut_evenly,
    most_prefill_tiles,
    prefill_tiles,
)
from tests.support import examples

row_steps = st.lists(st.integers(0, 60), max_size=30)
lengths = st.lists(st.integers(1, 500), min_size=1, max_size=20)


@given(row_steps, st.integers(1, 40), st.integers(0, 8))
@examples(quick=200, full=5000)
def test_every_step_of_every_row_is_in_one_share(
    steps: list[int], shares: int, beginning: int
) -> None:
    cut = cut_evenly(np.array(steps, np.int64), shares, beginning)
    covered = [
        (row, step)
        for row, first, last in zip(cut.row, cut.first, cut.last, strict=True)
        for step in range(first, last)
    ]
    assert covered == [(row, step) for row, count in enumerate(steps) for step in range(count)]
    assert cut.share_starts[0] == 0
    assert cut.share_starts[-1] == len(cut.row)
    assert (np.diff(cut.share_starts) >= 0).all()


@given(row_steps, st.integers(1, 40), st.integers(0, 8))
@examples(quick=200, full=5000)
def test_no_share_costs_more_than_its_part_and_one_beginning(
    steps: list[int], shares: int, beginning: int
) -> None:
    cut = cut_evenly(np.array(steps, np.int64), shares, beginning)
    fair = sum(count + beginning for count in steps) / shares
    for first, last in zip(cut.share_starts, cut.share_starts[1:], strict=False):
        begun = sum(1 for i in range(first, last) if cut.first[i] == 0)
        assert (
            sum(cut.last[first:last] - cut.first[first:last]) + begun * beginning
            <= fair + 1 + beginning
        )


@given(
    lengths,
    st.one_of(st.none(), st.integers(1, 300)),
    st.sampled_from([1, 3, 16, 64]),
    st.integers(1, 30),
    st.integers(0, 3),
)
@examples(quick=200, full=5000)
def test_segments_cover_what_each_row_sees_and_fit_their_table(
    lens: list[int], window: int | None, step: int, shares: int, padding: int
) -> None:
    rows = StepRows.of(np.ones(len(lens), np.int32), np.array(lens, np.int32))
    tables = DecodeTables(shares, max_rows=len(lens) + padding)
    buffer = tables.fill(rows, window, step, Prefix(), padding, len(lens))
    assert len(buffer) <= tables.size
    records = buffer[tables.rows_at : tables.segments_at].reshape(-1, 3)
    segments = buffer[tables.segments_at :].reshape(-1, 5)
    starts = buffer[: shares + 1]
    assert starts[0] == 0
    assert starts[-1] == len(segments)
    keys = sum(min(length, window or length) for length in lens) + 2 * step * len(lens)
    used = np.count_nonzero(np.diff(starts))
    assert used <= max(1, keys // LEAST_KEYS) or used <= min(
        shares // 2, keys // LEAST_KEYS_OF_HALF
    )
    for row, length in enumerate(lens):
        own = segments[segments[:, 0] == row]
        assert own[0, 2] == max(0, length - (window or length))
        assert own[-1, 3] == length
        assert (own[1:, 2] == own[:-1, 3]).all()
        assert (own[1:, 2] % step == 0).all()
        _, first, count = records[row]
        assert np.array_equal(segments[first : first + count], own)
        assert own[:, 4].tolist() == ([row] * count if count > 1 else [-1 - row])


@pytest.mark.parametrize(
    ("rows", "length", "used"),
    [(1, 100, 3), (1, 800, 25), (4, 800, 66), (8, 800, 100), (64, 800, 132), (1, 32_000, 132)],
)
def test_few_keys_are_cut_finely_while_programs_are_idle(rows: int, length: int, used: int) -> None:
    tables = DecodeTables(132, max_rows=rows)
    buffer = tables.fill(
        StepRows.of(np.ones(rows, np.int32), np.full(rows, length, np.int32)),
        None,
        16,
        Prefix(),
        0,
        rows,
    )
    assert np.count_nonzero(np.diff(buffer[:133])) == used


@given(
    lengths,
    st.one_of(st.none(), st.integers(1, 300)),
    st.sampled_from([1, 16, 64]),
    st.integers(1, 30),
    st.data(),
)
@examples(quick=200, full=5000)
def test_tables_that_are_filled_again_are_as_new_ones(
    lens: list[int], window: int | None, step: int, shares: int, data: st.DataObject
) -> None:
    again = DecodeTables(shares, max_rows=len(lens) + 4)
    known, prefix = np.array(lens, np.int32), Prefix()
    for _ in range(4):
        known = known + np.array(
            data.draw(st.lists(st.integers(0, 2), min_size=len(known), max_size=len(known))),
            np.int32,
        )
        kept = (
            np.array(
                data.draw(st.lists(st.integers(0, 9), min_size=len(known), max_size=len(known)))
            )
            > 0
        )
        if kept.any() and data.draw(st.integers(0, 4)) == 0:
            known = known[kept]
        if window is None and data.draw(st.booleans()):
            prefix = data.draw(
                st.sampled_from([Prefix(), Prefix((int(known.min()) - 1) // step * step, 1)])
            )
        padding = data.draw(st.integers(0, 3))
        rows = StepRows.of(np.ones(len(known), np.int32), known)
        new = DecodeTables(shares, max_rows=len(lens) + 4).fill(
            rows, window, step, prefix, padding, len(known)
        )
        assert np.array_equal(again.fill(rows, window, step, prefix, padding, len(known)), new)


@given(
    st.lists(st.tuples(st.integers(2, 90), st.integers(0, 90)), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from([16, 64]),
)
@examples(quick=100, full=3000)
def test_tiles_cover_every_query_of_every_head_once(
    rows: list[tuple[int, int]], group: int, tile: int
) -> None:
    queries, history = np.array(rows, np.int32).T
    records = prefill_tiles(StepRows.of(queries, queries + history), group, tile)
    assert len(records) <= most_prefill_tiles(len(rows), int(queries.sum()), group, tile)
    firsts = sorted((int(row), int(first)) for row, _, _, _, first, *_ in records)
    assert firsts == [
        (row, first)
        for row, count in enumerate(queries)
        for first in range(0, int(count) * group, tile)
    ]


@given(
    st.lists(st.tuples(st.integers(2, 300), st.integers(0, 5000)), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from([64, 128]),
    st.integers(1, 132),
)
@examples(quick=200, full=5000)
def test_parts_of_tiles_cover_their_keys_once_and_have_a_slot_each(
    rows: list[tuple[int, int]], group: int, step: int, most: int
) -> None:
    queries, history = np.array(rows, np.int32).T
    step_rows, split = StepRows.of(queries, queries + history), Split(step, most)
    whole, records = (
        prefill_tiles(step_rows, group, 128),
        prefill_tiles(step_rows, group, 128, split),
    )
    assert len(records) <= most_prefill_tiles(len(rows), int(queries.sum()), group, 128, split)
    parts_of: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for record in records.tolist():
        parts_of.setdefault(tuple(record[:5]), []).append(tuple(record[5:]))
    assert [(*tile, 0, parts[-1][1], 0, 1, 0, 0) for tile, parts in parts_of.items()] == [
        tuple(record) for record in whole.tolist()
    ]
    slots = []
    for parts in parts_of.values():
        begins, ends = [part[0] for part in parts], [part[1] for part in parts]
        assert begins == [0, *ends[:-1]], "one after the other"
        assert all(
            begin < end and begin % step == 0 for begin, end in zip(begins, ends, strict=True)
        )
        assert [part[2:4] for part in parts] == [(i, len(parts)) for i in range(len(parts))]
        if len(parts) > 1:
            slots += [first + i for _, _, i, _, first, _ in parts]
            assert (
                min(end - begin for begin, end in zip(begins[:-1], ends[:-1], strict=True))
                >= LEAST_STEPS * step
            )
    assert slots == list(range(len(slots)))
    assert len(slots) <= most


def test_few_queries_after_many_tokens_use_the_whole_gpu() -> None:
    rows = StepRows.of(np.array([64], np.int32), np.array([16_384], np.int32))
    assert len(prefill_tiles(rows, group=2, tile=128)) == 1
    assert len(prefill_tiles(rows, group=2, tile=128, split=Split(128, 16))) == 16


@given(
    st.lists(st.integers(0, 5000), min_size=2, max_size=8),
    st.sampled_from([64, 128]),
    st.integers(1, 132),
)
@examples(quick=50, full=2000)
def test_parts_of_a_row_do_not_follow_from_other_rows_if_shapes_are_fixed(
    history: list[int], step: int, most: int
) -> None:
    split = Split(step, most, of_row=most // len(history))

    def parts(lens: list[int]) -> list[list[list[int]]]:
        queries = np.full(len(lens), 32, np.int32)
        records = prefill_tiles(
            StepRows.of(queries, queries + np.array(lens, np.int32)), 8, 128, split
        )
        slots = records[records[:, 8] > 1, 9] + records[records[:, 8] > 1, 7]
        assert sorted(slots.tolist()) == [*range(len(slots))]
        assert len(slots) <= most
        return [records[records[:, 0] == row, 4:9].tolist() for row in range(len(lens))]

    assert parts(history) == [parts([own])[0] for own in history]
