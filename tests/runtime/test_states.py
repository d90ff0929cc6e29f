"""Recurrent states in the pool: where each lies, what a step tells its layers, and how its tokens
are cut into chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.executor import NewRow
from dovetail.api.kv_cache import PageCopy
from dovetail.api.kv_layout import CachedLayer, CachedState, PlannedLayout, plan_layout
from dovetail.api.sampler import RowSampling
from dovetail.api.state import CHUNK, StateSpec, StateTensor
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.nn.state.states import States, cached_state, cut
from dovetail_executors.runtime import kv_pool
from dovetail_executors.runtime.kv_pool import KVPool
from dovetail_executors.runtime.profiling import empty_batch
from dovetail_executors.runtime.row_state import RowState
from tests.support import examples

CPU = torch.device("cpu")
SPECS = [
    StateSpec(
        index=index,
        tensors=(
            StateTensor(rows=10, row_size=3, keeps_inputs=True),
            StateTensor(rows=24, row_size=8),
        ),
    )
    for index in (0, 2, 3)
]
MAX_ROWS, NUM_PAGES = 3, 40


def planned(dtype: torch.dtype = torch.float16) -> PlannedLayout:
    """Two attention layers, whose slots of 256 bytes hold 8 rows of 8 float32 numbers, or 32 rows
    of 3 float16."""
    layers = [
        CachedLayer(index, None, lambda tokens: (tokens * 64, tokens * 48)) for index in (1, 4)
    ]
    return plan_layout(
        layers, 4, "float16", states=[cached_state(spec, dtype, torch.float32) for spec in SPECS]
    )


def bound(value: int = 0) -> tuple[States, torch.Tensor]:
    """States over a pool that is filled with `value`."""
    layout = planned()
    memory = torch.full(
        (len(layout.slot_bytes), NUM_PAGES + 1, layout.slot_bytes[0]), value, dtype=torch.uint8
    )
    states = States(layout, MAX_ROWS, torch.float16, torch.float32, CPU)
    for spec in SPECS:
        states.make_layer(spec)
    states.bind(memory)
    return states, memory


def test_a_state_takes_as_many_small_pages_as_its_units_need() -> None:
    layout = planned()
    assert layout.slot_bytes == (256,) * 4, "slots are equal where there are states"
    group = layout.layout.groups[-1]
    assert group.recurrent
    assert group.pages_per_block == 3, (
        "three layers of a unit of inputs and three units of 8 rows: 12 units in 4 slots"
    )
    assert [layout.layout.pages(tokens) for tokens in (0, 1, 4, 5, 400)] == [0, 4, 4, 5, 103], (
        "one state, however many tokens"
    )
    assert layout.layout.capacity(5) == 8
    assert "3 layers, states of 3 pages a request" in layout.describe()


def test_a_row_larger_than_a_slot_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"rows of 512 bytes, and a block of K or V has 256: raise block_size",
    ):
        plan_layout(
            [CachedLayer(0, None, lambda tokens: (tokens * 64, tokens * 64))],
            4,
            "float16",
            states=[CachedState(1, ((4, 512),))],
        )


@examples(quick=30, full=500)
@given(pages=st.permutations(range(NUM_PAGES)), rows=st.permutations(range(MAX_ROWS)))
def test_states_of_different_rows_and_layers_never_overlap(
    pages: list[int], rows: list[int]
) -> None:
    states, memory = bound(value=7)
    for number, row in enumerate(rows):
        states.put([row], [np.array(pages[3 * number : 3 * number + 3], np.int32)])
    places = torch.tensor(rows)
    written = {}
    for index, layer in states.layers.items():
        for tensor, shape in enumerate(layer.spec.tensors):
            values = torch.randn(MAX_ROWS, shape.rows, shape.row_size).to(
                layer.memory[tensor].dtype
            )
            layer.write(tensor, places, values)
            written[index, tensor] = values
    for (index, tensor), values in written.items():
        assert torch.equal(states.layers[index].read(tensor, places), values)
    others = sorted(set(range(NUM_PAGES + 1)) - set(pages[: 3 * MAX_ROWS]))
    assert (memory[:, others] == 7).all(), "pages of nobody are as they were"


def test_until_a_row_has_a_state_its_place_leads_to_the_waste_page() -> None:
    states, memory = bound(value=7)
    layer = states.layers[2]
    layer.write(1, torch.tensor([MAX_ROWS]), torch.ones(1, 24, 8))
    assert (memory[:, :NUM_PAGES] == 7).all()
    assert (memory[:, NUM_PAGES] != 7).any()


def test_a_layer_that_the_layout_does_not_have_is_named() -> None:
    states, _ = bound()
    with pytest.raises(DovetailError, match="state layer 1, which isn't among its state_specs"):
        states.make_layer(replace(SPECS[0], index=1))


def test_a_layer_that_runs_before_a_step_says_so() -> None:
    states, _ = bound()
    with pytest.raises(DovetailError, match="state layer 0 runs before a step was planned"):
        _ = states.layers[0].batch


rows_of_steps = st.lists(
    st.integers(1, 200).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, tokens))),
    min_size=1,
    max_size=6,
)


@examples(quick=100, full=2000)
@given(rows=rows_of_steps)
def test_chunks_cover_each_row_in_order_and_end_at_its_checkpoint(
    rows: list[tuple[int, int]],
) -> None:
    chunks, starts = cut(*(np.array(column, np.int32) for column in zip(*rows, strict=True)))
    begin = 0
    for row, (tokens, at) in enumerate(rows):
        own = chunks[starts[row] : starts[row + 1]].tolist()
        assert [token for start, end in own for token in range(start, end)] == [
            *range(begin, begin + tokens)
        ]
        assert all(0 < end - start <= CHUNK for start, end in own)
        assert at == 0 or begin + at in [end for _, end in own]
        begin += tokens
    assert starts[-1] == len(chunks)


def test_a_step_of_one_token_a_row_is_a_decode_unless_it_writes_a_checkpoint() -> None:
    states, _ = bound()
    places, starts, lens = (
        torch.tensor([1, 0]),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([5, 1], dtype=torch.int32),
    )
    one, none = np.ones(2, np.int32), np.zeros(2, np.int32)
    assert states.batch(places, starts, lens, one, none).decodes
    batch = states.batch(places, starts, lens, one, np.array([0, 1], np.int32))
    assert not batch.decodes
    assert batch.checkpoint_places is not None
    assert batch.checkpoint_places.tolist() == [MAX_ROWS + 1, MAX_ROWS + 2]


def new(row: int, pages: list[int], state: list[int]) -> NewRow:
    tables = np.array(pages, np.int32), np.array(state, np.int32)
    return NewRow(row, f"r{row}", np.zeros(3, np.int32), 3, 0, tables, RowSampling())


def test_a_new_row_tells_where_its_state_is_and_one_of_another_size_is_refused() -> None:
    states, memory = bound()
    rows = RowState(MAX_ROWS, 16, planned().layout, CPU, states)
    rows.pool_allocated(NUM_PAGES)
    rows.update(empty_batch(added=(new(1, [9], [30, 31, 32]),)))
    states.layers[3].write(1, torch.tensor([1]), torch.ones(1, 24, 8))
    touched = {page for page in range(NUM_PAGES + 1) if memory[:, page].any()}
    assert touched
    assert touched <= {30, 31, 32}
    with pytest.raises(DovetailError, match="a state of 2 pages, not 3"):
        rows.update(empty_batch(added=(new(0, [9], [3, 4]),)))


@examples(quick=30, full=500)
@given(
    copies=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20),
    most=st.integers(1, 4),
)
def test_copies_of_pages_are_as_if_one_after_the_other_however_many_run_at_once(
    copies: list[tuple[int, int]], most: int
) -> None:
    layout = planned()
    states = States(layout, MAX_ROWS, torch.float16, torch.float32, CPU)
    pool, layer = KVPool(layout, CPU, states), states.make_layer(SPECS[0])
    pool.allocate(6)
    held = layer.memory[1].view(len(layout.slot_bytes), 7, -1)  # [slots, pages, numbers]
    held.copy_(torch.arange(held.numel()).view_as(held))
    expected = held.clone()
    for src, dst in copies:
        expected[:, dst] = expected[:, src]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_pool, "COPIED_AT_ONCE", most * layout.layout.page_bytes)
        pool.copy([PageCopy(*copy) for copy in copies])
    assert torch.equal(held, expected)
