"""The containers of the block pool: what Python's own would do, and never much at once."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from dovetail.api.blocks.pool import BlockIndex, BlockPool, BlockQueue

BLOCKS = 12
MANY = 40_000
# bytes: a list of as many may move at once, which is a copy; a dict would need 60 a block, and hash
# all anew
LITTLE = 10 * MANY


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "remove", "pop", "clear"]), st.integers(0, BLOCKS - 1)
        ),
        max_size=60,
    )
)
def test_a_queue_is_an_ordered_dict(acts: list[tuple[str, int]]) -> None:
    queue, model = BlockQueue(BLOCKS), OrderedDict[int, None]()
    for act, block in acts:
        if act == "append" and block not in model:
            queue.append(block)
            model[block] = None
        elif act == "remove" and block in model:
            queue.remove(block)
            del model[block]
        elif act == "pop" and model:
            assert queue.pop_oldest() == model.popitem(last=False)[0]
        elif act == "clear":
            queue.clear()
            model.clear()
        assert list(queue) == list(model)
        assert queue.count == len(model)
        assert [block in queue for block in range(BLOCKS)] == [
            block in model for block in range(BLOCKS)
        ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "delete", "get", "clear"]),
            st.integers(0, 20),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)
def test_an_index_is_a_dict(acts: list[tuple[str, int, int]]) -> None:
    index, model = BlockIndex(), dict[bytes, int]()
    for act, number, block in acts:
        digest, before, changes = bytes([number % 3, number]), dict(model), index.changes
        if act == "set":
            assert index.setdefault(digest, block) == model.setdefault(digest, block)
        elif act == "delete" and digest in model:
            del index[digest], model[digest]
        elif act == "clear":
            index.clear()
            model.clear()
        assert index.get(digest) == model.get(digest)
        assert (digest in index) == (digest in model)
        assert dict(index.items()) == model
        assert len(index) == len(model)
        assert model == before or index.changes != changes


@given(
    known=st.dictionaries(st.integers(0, 9), st.integers(0, 99)), asked=st.lists(st.integers(0, 9))
)
def test_a_run_ends_before_the_first_that_is_not_found(
    known: dict[int, int], asked: list[int]
) -> None:
    index = BlockIndex()
    for number, block in known.items():
        index.setdefault(bytes([number]), block)
    missing = next((place for place, number in enumerate(asked) if number not in known), len(asked))
    assert index.run(bytes([number]) for number in asked) == [
        known[number] for number in asked[:missing]
    ]


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.slow("tries large sizes")
def test_no_block_costs_much_however_many_there_are(reused: bool) -> None:
    """A full cache, then as much again and more: new blocks take the place of old ones, or the same
    are used again."""
    pool = BlockPool(MANY)
    largest = 0
    tracemalloc.start()
    try:
        for number in range(5 * MANY // 2):
            digest = xxh3_128_digest((number % MANY if reused else number).to_bytes(8, "little"))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            block = pool.block_of.get(digest)
            if block is None:
                (block,) = pool.take()
                pool.publish(block, digest)
            else:
                pool.hold([block])
            pool.release([block])
            largest = max(largest, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert pool.counts.cached == MANY
    assert largest < LITTLE
