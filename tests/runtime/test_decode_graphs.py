"""Decode graphs without a GPU: what would be recorded is run anew at each replay, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dovetail.runtime import decode_graphs
from dovetail.runtime.decode_graphs import DecodeGraphs, Inputs, Kind, sharing_sizes
from dovetail.runtime.sampled import Sampled
from dovetail.runtime.step_inputs import TABLE_ENTRIES
from dovetail.runtime.token_sizes import ALWAYS_TOKENS, most_recorded, padded_sizes, row_sizes
from dovetail_attention.sdpa import TorchAttention
from tests.runtime.fakes import Bench, Greedy, generate
from tests.support import examples

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5], [8]]


@dataclass
class Again:
    """Stands for a recording."""

    run: Callable[[], Any]
    outputs: Any

    def replay(self) -> None:
        again = self.run()
        if isinstance(again, torch.Tensor):
            self.outputs.copy_(again)
            return
        self.outputs.tokens.copy_(again.tokens)
        if again.packed is not None and self.outputs.packed is not None:
            self.outputs.packed.copy_(again.packed)

    def pool(self) -> None:
        return None


class GraphsOnCpu(DecodeGraphs):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.replayed: list[tuple[Kind, int]] = []
        self.replayed_rows: list[list[int]] = []
        self.warm_ups: list[int] = []

    def _record(self, run: Callable[[], Any], pool: Any, warm_ups: int) -> Any:
        self.warm_ups.append(warm_ups)
        outputs = run()
        return Again(run, outputs), outputs

    def replay_model(self, host_rows: NDArray[np.int64]) -> torch.Tensor:
        hidden = super().replay_model(host_rows)
        self.replayed.append((Kind.LATE, len(hidden)))
        self.replayed_rows.append(host_rows.tolist())
        return hidden

    def replay(self, kind: Kind, host_rows: NDArray[np.int64], shared_prefix_blocks: int) -> Sampled:
        sampled = super().replay(kind, host_rows, shared_prefix_blocks)
        self.replayed.append((kind, sampled.size))
        self.replayed_rows.append(host_rows.tolist())
        return sampled


class CapturableGreedy(Greedy):
    def capturable(self, host_rows: NDArray[np.int64]) -> bool:
        return True

    def sample_captured(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=1)


class SharingAttention(TorchAttention):
    """Says that it could read a shared prefix once."""

    capabilities = replace(TorchAttention.capabilities, shared_prefix=True)


def with_graphs(bench: Bench, max_tokens: int = 256) -> GraphsOnCpu:
    bench.sampler.__class__ = CapturableGreedy
    graphs = GraphsOnCpu(bench.model, bench.backend, bench.sampler, bench.rows, max_tokens)
    graphs.capture()
    bench.runner.graphs = graphs
    return graphs


def begin(bench: Bench, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt in its own row: the first token of each."""
    result = bench.run({row: len(prompt) for row, prompt in enumerate(prompts)}, [bench.new(row, prompt) for row, prompt in enumerate(prompts)])
    return [[int(token)] for token in result.token_ids]


@examples(quick=8, full=200)
@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5), st.sampled_from([0, 6, TABLE_ENTRIES]))
def test_whichever_rows_are_replayed_get_their_tokens_and_padding_harms_nobody(steps: list[set[int]], table_entries: int) -> None:
    bench = Bench(max_rows=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_graphs, "TABLE_ENTRIES", table_entries)
        graphs = with_graphs(bench)
        tokens = begin(bench, PROMPTS)
        for rows in steps:
            result = bench.run(dict.fromkeys(sorted(rows), 1))
            assert result.failed == {}
            for row, token in zip(sorted(rows), result.token_ids.tolist(), strict=True):
                tokens[row].append(token)
    assert len(graphs.replayed) == len(steps)
    assert tokens == [generate(prompt, len(told)) for prompt, told in zip(PROMPTS, tokens, strict=True)]
    assert bench.rows.num_tokens[:4].tolist() == bench.rows.known.tolist()
    assert bench.rows.num_tokens[4] == 1, "nobody's row stays as it was"


def test_a_step_is_replayed_in_the_smallest_graph_that_holds_it() -> None:
    bench = Bench(max_rows=7, num_blocks=60)
    graphs = with_graphs(bench)
    begin(bench, [[row, row] for row in range(5)])
    for rows in (1, 2, 3, 4, 5):
        bench.run(dict.fromkeys(range(rows), 1))
    assert graphs.replayed == [(Kind.PLAIN, size) for size in (1, 2, 4, 4, 7)]


def test_every_size_has_run_before_it_is_recorded() -> None:
    """Recorded kernels must be compiled. A late step's are those of the plain step of its size, which is recorded before."""
    graphs = with_graphs(Bench(max_rows=7, num_blocks=60))
    plain = late = [7, 4, 2, 1]
    assert graphs.warm_ups == [2, *(1 for _ in plain[1:]), *(0 for _ in late)]


def test_the_longest_rows_are_replayed_first() -> None:
    bench = Bench(max_rows=4)
    graphs = with_graphs(bench)
    begin(bench, PROMPTS)
    for rows in ([0, 1, 2, 3], [1, 3], [0, 1, 3]):
        bench.run(dict.fromkeys(rows, 1))
    assert graphs.replayed_rows == [[0, 2, 1, 3], [1, 3], [0, 1, 3]]


def test_the_sampler_hears_of_a_row_before_it_is_asked_whether_a_graph_serves_it() -> None:
    class Informed(CapturableGreedy):
        def capturable(self, host_rows: NDArray[np.int64]) -> bool:
            return all(row in self.rows for row in host_rows.tolist())

    bench = Bench()
    graphs = with_graphs(bench)
    bench.sampler.__class__ = Informed
    assert bench.run({2: 1}, [bench.new(2, [5])]).token_ids.tolist() == generate([5], 1)
    assert graphs.replayed == [(Kind.PLAIN, 1)]


def test_steps_that_share_a_prefix_have_graphs_of_their_own_where_the_backend_can_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.fakes.TorchAttention", SharingAttention)
    monkeypatch.setattr("dovetail.runtime.runner.SHARING_WORTH", 4)
    bench = Bench(max_rows=4)
    graphs = with_graphs(bench)
    tokens = begin(bench, PROMPTS[:2])
    batch = bench.batch({0: 1, 1: 1}, [], [], [])
    result = bench.runner.collect(bench.runner.submit(replace(batch, shared_prefix_blocks=1)))
    assert graphs.replayed == [(Kind.SHARING, 4)]
    assert [[*told, int(token)] for told, token in zip(tokens, result.token_ids, strict=True)] == [generate(prompt, 2) for prompt in PROMPTS[:2]]


def test_no_graph_is_larger_than_a_step_may_be() -> None:
    bench = Bench(max_rows=8, num_blocks=60)
    bench.backend.prepare(8, 3, 64)
    graphs = with_graphs(bench, max_tokens=3)
    assert sorted(size for _, size in graphs._graphs) == [1, 2, 3]


def test_what_a_graph_reads_of_a_step_is_padded_with_nobodys_row() -> None:
    inputs = Inputs(4, 99, torch.device("cpu"))
    inputs.fill(np.array([5, 6, 7, 8]), np.array([50, 60, 70, 80]), np.array([1, 2, 3, 4]))
    inputs.fill(np.array([3]), np.array([30]), np.array([9]), np.array([[7, 2, 1]], np.int32))
    assert inputs.rows.tolist() == [3, 99, 99, 99]
    assert inputs.slots.tolist() == [30, -1, -1, -1]
    assert inputs.kv_lens.tolist() == [9, 0, 0, 0]
    assert inputs.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert inputs.table(3).tolist() == [[7, 2, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_a_block_table_comes_with_a_steps_other_inputs_where_it_is_small() -> None:
    inputs = Inputs(8, 99, torch.device("cpu"))
    assert inputs.holds_table(TABLE_ENTRIES // 8)
    assert not inputs.holds_table(TABLE_ENTRIES // 8 + 1)
    widest = np.arange(3 * (TABLE_ENTRIES // 8), dtype=np.int32).reshape(3, -1)
    inputs.fill(np.arange(3), np.arange(3), np.arange(3), widest)
    assert inputs.table(widest.shape[1])[:3].numpy().tolist() == widest.tolist()


@given(st.integers(1, 3000))
@examples(quick=50, full=2000)
def test_sizes_rise_from_a_small_one_to_the_largest_step(most: int) -> None:
    for sizes, largest in ((row_sizes(most), most), (sharing_sizes(most + 1), most + 1), (padded_sizes(most), most)):
        assert list(sizes) == sorted(set(sizes))
        assert sizes[0] <= 32
        assert sizes[-1] == largest


@given(st.integers(1, 40_000), st.integers(1, 10**12))
def test_the_smaller_a_model_the_larger_the_steps_that_are_recorded(max_tokens: int, parameters: int) -> None:
    assert min(max_tokens, ALWAYS_TOKENS) <= most_recorded(max_tokens, 2 * parameters) <= most_recorded(max_tokens, parameters) <= max_tokens
