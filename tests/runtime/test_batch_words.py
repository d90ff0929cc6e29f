"""A batch arrives at other ranks as it was."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.executor import (
    AdapterLoad,
    AdapterRows,
    Batch,
    Drafts,
    Masks,
    NewRow,
    PoolingRows,
    RowChanges,
    RowCheckpoint,
    RowPooling,
)
from dovetail.api.kv_cache import PageCopy
from dovetail.api.sampler import RowSampling
from dovetail_executors.runtime.batch_words import (
    from_words,
    masks_from_words,
    masks_to_words,
    to_words,
)
from tests.support import examples

numbers = st.integers(0, 2**31 - 1)
arrays = st.lists(numbers, max_size=6).map(lambda values: np.array(values, np.int32))
samplings = st.builds(
    RowSampling,
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.lists(st.tuples(numbers, st.floats(-100, 100)), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.lists(numbers, max_size=3).map(tuple),
    bad_words=st.lists(st.lists(numbers, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    extra_args=st.dictionaries(
        st.text(max_size=5), st.tuples(st.text(max_size=3)) | st.booleans(), max_size=2
    ),
)
new_rows = st.builds(
    NewRow,
    row=numbers,
    request_id=st.text(max_size=9),
    token_ids=arrays,
    prompt_len=numbers,
    computed=numbers,
    pages=st.lists(arrays, max_size=3).map(tuple),
    sampling=st.none() | samplings,
)
pooling = st.builds(RowPooling, st.just("embed"), st.none() | st.integers(1, 99), st.booleans())
loads = st.builds(AdapterLoad, numbers, st.text(max_size=9), st.text(max_size=9))
parts = st.tuples() | st.tuples(
    st.builds(PoolingRows, st.dictionaries(numbers, pooling, max_size=2), arrays),
    st.builds(
        AdapterRows,
        st.lists(loads, max_size=2).map(tuple),
        st.dictionaries(numbers, numbers, max_size=2),
    ),
)


changes = st.none() | st.builds(
    RowChanges,
    rows=arrays,
    known=arrays,
    counts=arrays,
    token_ids=arrays,
    computed=arrays,
    samplings=st.lists(samplings, max_size=2).map(tuple),
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    pages, rows = (
        draw(st.lists(st.tuples(numbers, numbers, numbers), max_size=4)),
        draw(st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=5)),
    )
    width = draw(st.integers(0, 4))
    state = st.lists(numbers, min_size=width, max_size=width).map(
        lambda values: np.array(values, np.int32)
    )
    return Batch(
        step=draw(st.integers(-1, 2**40)),
        removed=draw(arrays),
        added=tuple(draw(st.lists(new_rows, max_size=3))),
        new_pages=np.array(pages, np.int32).reshape(-1, 3),
        copies=tuple(
            PageCopy(*pair) for pair in draw(st.lists(st.tuples(numbers, numbers), max_size=3))
        ),
        checkpoints=tuple(
            draw(st.lists(st.builds(RowCheckpoint, numbers, numbers, state), max_size=3))
        ),
        rows=np.array([row[0] for row in rows], np.int32),
        num_tokens=np.array([row[1] for row in rows], np.int32),
        yields_token=np.array([row[2] for row in rows], np.bool_),
        shared_prefix_blocks=draw(numbers),
        late=draw(st.booleans()),
        parts=draw(parts),
        changes=draw(changes),
        drafts=draw(
            st.none()
            | st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)).map(drafted)
        ),
    )


def drafted(counts: list[int]) -> Drafts:
    return Drafts(np.array(counts, np.int32), np.arange(sum(counts), dtype=np.int32) - 1)


def values(one: Any) -> list[Any]:
    """Its fields, arrays with their dtypes as lists."""
    found = [getattr(one, field.name) for field in fields(one)]
    return [as_lists(value) for value in found if not is_added(value)]


def as_lists(value: Any) -> Any:
    if isinstance(value, RowCheckpoint):
        return [as_lists(part) for part in (value.row, value.tokens, value.pages)]
    if isinstance(value, RowChanges):
        return values(value)
    if isinstance(value, PoolingRows):
        return [value.added, as_lists(value.due)]
    if isinstance(value, Drafts):
        return [as_lists(value.counts), as_lists(value.token_ids)]
    if isinstance(value, tuple):
        return [as_lists(item) for item in value]
    return (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value


def is_added(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(item, NewRow) for item in value)


@examples(quick=60, full=2000)
@given(batch=batches())
def test_a_batch_is_the_same_after_the_way_as_words(batch: Batch) -> None:
    arrived = from_words(np.concatenate(to_words(batch)))
    assert values(arrived) == values(batch)
    assert [values(new) for new in arrived.added] == [values(new) for new in batch.added]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_masks_are_the_same_after_the_way_as_words(count: int) -> None:
    masks = Masks(
        np.arange(count, dtype=np.int32),
        np.arange(count * 7, dtype=np.uint32).reshape(count, 7) * np.uint32(2**29),
    )
    assert values(masks_from_words(np.concatenate(masks_to_words(masks)))) == (
        values(masks) if count else [("int32", []), ("uint32", [])]
    )


def test_a_decode_step_is_sent_without_a_python_object_for_each_row() -> None:
    many = np.arange(256, dtype=np.int32)
    nothing = many[:0]
    batch = Batch(7, nothing, (), nothing.reshape(0, 3), (), many, np.ones_like(many), many >= 0)
    assert [array.dtype for array in to_words(batch)] == [np.int32] * 6
    assert sum(map(len, to_words(batch))) < 3 * 256 + 16
