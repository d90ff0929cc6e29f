"""Decode graphs without a GPU, recorded and replayed on the CPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import (
    Capture,
    SampledTokens,
    SampleInputs,
    SamplerCapabilities,
)
from dovetail.api.token_sizes import (
    ALWAYS_TOKENS,
    most_recorded,
    padded_sizes,
    row_sizes,
    sharing_row_sizes,
)
from dovetail.errors import UnsupportedError
from dovetail_executors.runtime import step_inputs
from dovetail_executors.runtime.graphs import Graphs
from dovetail_executors.runtime.model_io import DECODE, MIXED, MODEL, GraphKey
from dovetail_executors.runtime.recorded_steps import Builder, DecodeSteps, decode_builders
from dovetail_executors.runtime.recording import LayerSplitter
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.step_inputs import TABLE_ENTRIES, DecodeInputs, HostLines
from tests.runtime.fakes import Bench, Greedy, generate, layout
from tests.runtime.recordable_attention import SharingAttention
from tests.runtime.recorded import WatchedGraphs, give_graphs, play_graphs_on_the_cpu
from tests.support import examples

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5], [8]]


class CapturableGreedy(Greedy):
    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.DECODE)

    def capture_for(self, host_rows: NDArray[np.int64]) -> Capture | None:
        return Capture.TOKENS

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        if inputs.capture is None:
            return super().sample(inputs)
        if inputs.capture is Capture.FULL:
            raise UnsupportedError("it only returns tokens")
        return SampledTokens(inputs.logits.argmax(dim=1))


def with_graphs(bench: Bench, max_rows: int | None = None) -> WatchedGraphs:
    """Graphs of decode steps of up to all rows; prompts are computed and sampled without graphs."""
    if isinstance(bench.sampler, Greedy) and not isinstance(bench.sampler, CapturableGreedy):
        bench.sampler.__class__ = CapturableGreedy
    return give_graphs(bench, decode_steps(bench, max_rows))


def decode_steps(bench: Bench, max_rows: int | None = None) -> list[Builder]:
    return [
        builder
        for builder in decode_builders(
            bench.runner.parts, max_rows or bench.max_rows, bench.recordings
        )
        if isinstance(builder, DecodeSteps)
    ]


def begin(bench: Bench, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt in its own row: the first token of each."""
    result = bench.run(
        {row: len(prompt) for row, prompt in enumerate(prompts)},
        [bench.new(row, prompt) for row, prompt in enumerate(prompts)],
    )
    return [[int(token)] for token in result.token_ids]


@examples(quick=8, full=200)
@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5),
    st.sampled_from([0, 6, TABLE_ENTRIES]),
)
def test_whichever_rows_are_replayed_get_their_tokens_and_padding_harms_nobody(
    steps: list[set[int]], table_entries: int
) -> None:
    bench = Bench(max_rows=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_inputs, "TABLE_ENTRIES", table_entries)
        graphs = with_graphs(bench)
        tokens = begin(bench, PROMPTS)
        for rows in steps:
            result = bench.run(dict.fromkeys(sorted(rows), 1))
            assert result.failed == {}
            for row, token in zip(sorted(rows), result.token_ids.tolist(), strict=True):
                tokens[row].append(token)
    assert len(graphs.replayed) == len(steps)
    assert tokens == [
        generate(prompt, len(told)) for prompt, told in zip(PROMPTS, tokens, strict=True)
    ]
    assert bench.rows.num_tokens[:4].tolist() == bench.rows.known.tolist()
    assert bench.rows.num_tokens[4] == 1, "nobody's row stays as it was"


def test_a_step_is_replayed_in_the_smallest_graph_that_holds_it() -> None:
    bench = Bench(max_rows=7, num_blocks=60)
    graphs = with_graphs(bench)
    begin(bench, [[row, row] for row in range(5)])
    told = [bench.run(dict.fromkeys(range(rows), 1)).graphs for rows in (1, 2, 3, 4, 5)]
    assert told == [("decode",)] * 5
    assert bench.run({0: 1}, [], [1]).graphs == ("decode",), "and no more of earlier steps"
    graphs.replayed.pop()
    assert graphs.replayed == [("decode", size) for size in (1, 2, 4, 4, 7)]


def test_every_size_has_run_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded kernels must be compiled. A late step's are those of the plain step of its size,
    which is recorded before."""
    bench, runs = Bench(max_rows=7, num_blocks=60), Counter[tuple[str, int]]()
    run = DecodeSteps.run

    def count(builder: DecodeSteps, inputs: DecodeInputs) -> object:
        runs[str(builder.key), inputs.size] += 1
        return run(builder, inputs)

    monkeypatch.setattr(DecodeSteps, "run", count)
    bench.sampler.__class__ = CapturableGreedy
    give_graphs(bench, decode_steps(bench))
    assert runs == {
        (kind, size): times
        for kind, times in (("decode", 2), ("model", 1))
        for size in (1, 2, 4, 7)
    }


def test_the_longest_rows_are_replayed_first() -> None:
    bench = Bench(max_rows=4)
    graphs = with_graphs(bench)
    begin(bench, PROMPTS)
    for rows in ([0, 1, 2, 3], [1, 3], [0, 1, 3]):
        bench.run(dict.fromkeys(rows, 1))
    assert graphs.replayed_rows == [[0, 2, 1, 3], [1, 3], [0, 1, 3]]


def test_the_sampler_hears_of_a_row_before_it_is_asked_whether_a_graph_serves_it() -> None:
    class Informed(CapturableGreedy):
        def capture_for(self, host_rows: NDArray[np.int64]) -> Capture | None:
            return Capture.TOKENS if all(row in self.rows for row in host_rows.tolist()) else None

    bench = Bench()
    graphs = with_graphs(bench)
    bench.sampler.__class__ = Informed
    assert bench.run({2: 1}, [bench.new(2, [5])]).token_ids.tolist() == generate([5], 1)
    assert graphs.replayed == [("decode", 1)]


def test_steps_that_share_a_prefix_have_graphs_of_their_own_where_the_backend_can_read_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dovetail_executors.runtime.runner.SHARING_WORTH", 4)
    bench = Bench(max_rows=4, attention=SharingAttention)
    graphs = with_graphs(bench)
    tokens = begin(bench, PROMPTS[:2])
    batch = bench.batch({0: 1, 1: 1}, [], [], [])
    result = bench.runner.collect(bench.runner.submit(replace(batch, shared_prefix_blocks=1)))
    assert graphs.replayed == [("decode_shared", 4)]
    assert [[*told, int(token)] for told, token in zip(tokens, result.token_ids, strict=True)] == [
        generate(prompt, 2) for prompt in PROMPTS[:2]
    ]


def test_no_graph_is_larger_than_a_step_may_be() -> None:
    bench = Bench(max_rows=8, num_blocks=60)
    bench.sampler.__class__ = CapturableGreedy
    graphs = Graphs.of(bench.runner.parts, LayerSplitter(), 3, 600_000_000)
    bench.backend.prepare(8, 3, 64)
    with pytest.MonkeyPatch.context() as patch:
        play_graphs_on_the_cpu(patch)
        graphs.capture()
    for key in (MIXED, DECODE, MODEL, GraphKey("sampling", Capture.TOKENS)):
        largest = graphs.find(key, 3)
        assert largest is not None
        assert largest.size == 3
        assert graphs.find(key, 4) is None


POOL = 100_000  # pages


def lines(rows: list[int], ahead: int = 0) -> HostLines:
    return HostLines(np.array(rows), np.full(len(rows), ahead, np.int32))


def state_of(lens: dict[int, int], max_rows: int = 99) -> RowState:
    """Rows with so many known tokens, in blocks of 4: row r has the blocks 100 r, 100 r + 1, …"""
    state = RowState(max_rows, 4 * TABLE_ENTRIES, layout(4), torch.device("cpu"))
    state.pool_allocated(POOL)
    for row, known in lens.items():
        state.known[row] = known
        state.host_tables[0, row, : -(-known // 4)] = 100 * row + np.arange(-(-known // 4))
    return state


def test_what_a_graph_reads_of_a_step_is_padded_with_nobodys_row() -> None:
    inputs = DecodeInputs(4, state_of({5: 1, 6: 2, 7: 3, 8: 4, 3: 9}))
    inputs.fill(lines([5, 6, 7, 8]), 0)
    batch = inputs.fill(lines([3]), 2)
    assert inputs.lines.rows.tolist() == [3, 99, 99, 99]
    assert [slots.tolist() for slots in batch.slots] == [[[302 * 4, *[4 * POOL] * 3]]]
    assert batch.kv_lens.tolist() == [9, 0, 0, 0]
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert [table.tolist() for table in batch.block_tables] == [
        [[[300, 301, 302], [0, 0, 0], [0, 0, 0], [0, 0, 0]]]
    ]
    assert (batch.num_rows, batch.num_tokens, batch.shared_prefix_blocks) == (1, 1, 2)
    assert (batch.host_query_lens.tolist(), batch.host_kv_lens.tolist()) == ([1], [9])


@pytest.mark.parametrize("more", [0, 1])
def test_a_block_table_comes_with_a_steps_other_inputs_where_it_is_small(more: int) -> None:
    """A larger one is gathered on the device, which must then know of the blocks; this device knows
    of none."""
    width = TABLE_ENTRIES // 8 + more
    state = state_of(dict.fromkeys(range(3), 4 * width))
    inputs = DecodeInputs(8, state)
    ((table,),) = inputs.fill(lines([0, 1, 2]), 0).block_tables
    assert table.shape == (8, width)
    assert (
        table[:3].tolist()
        == (np.zeros((3, width)) if more else state.host_tables[0, :3, :width]).tolist()
    )
    assert not table[3:].any()


def test_inputs_keep_their_addresses() -> None:
    inputs = DecodeInputs(4, state_of({0: 3, 1: 8}))
    batches = [inputs.fill(lines(rows), 0) for rows in ([0], [1, 0])]
    assert (
        len(
            {
                (batch.slots[0].data_ptr(), batch.kv_lens.data_ptr(), batch.query_starts.data_ptr())
                for batch in batches
            }
        )
        == 1
    )


@given(st.integers(1, 3000))
@examples(quick=50, full=2000)
def test_sizes_rise_from_a_small_one_to_the_largest_step(most: int) -> None:
    for sizes, largest in (
        (row_sizes(most), most),
        (sharing_row_sizes(most + 1), most + 1),
        (padded_sizes(most), most),
    ):
        assert list(sizes) == sorted(set(sizes))
        assert sizes[0] <= 32
        assert sizes[-1] == largest


@given(st.integers(1, 40_000), st.integers(1, 10**12))
def test_the_smaller_a_model_the_larger_the_steps_that_are_recorded(
    max_tokens: int, parameters: int
) -> None:
    assert (
        min(max_tokens, ALWAYS_TOKENS)
        <= most_recorded(max_tokens, 2 * parameters)
        <= most_recorded(max_tokens, parameters)
        <= max_tokens
    )
