"""Steps that are replayed, whole or in pieces, with graphs that are played on the CPU: the tokens
are those of the model as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.attention import (
    AttentionBackend,
)
from dovetail.api.executor import (
    Pooled,
    PoolingCapacity,
    PoolingMethod,
    PoolingRows,
    PoolingTask,
    PromptLogprobs,
    RowPooling,
)
from dovetail.api.sampler import RowSampling
from dovetail.errors import DovetailError
from dovetail_executors.runtime import recorded_steps
from dovetail_executors.runtime.graphs import Graph
from dovetail_executors.runtime.model_io import MIXED
from dovetail_executors.runtime.pooler import Pooler
from dovetail_executors.runtime.pooling import PoolingPlan
from dovetail_executors.runtime.recorded_steps import mixed_builders
from dovetail_executors.runtime.recording import LayerSplitter
from tests.rounding import assert_rounded
from tests.runtime.fakes import ROUNDINGS, Bench, TinyModel, generate
from tests.runtime.recordable_attention import MixedAttention, RecordableAttention
from tests.runtime.recorded import GraphOnCpu, WatchedGraphs, give_graphs, play_graphs_on_the_cpu
from tests.support import examples

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]]


def bench_with_graphs(
    backend: type[RecordableAttention],
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    max_rows: int = 4,
) -> Bench:
    """With 4 rows recordings of 8 tokens or more compute the states of 4 wanted tokens alone."""
    monkeypatch.setattr(recorded_steps, "padded_sizes", lambda most: tuple(sizes[::-1]))
    bench, splitter = Bench(max_rows, attention=backend), LayerSplitter()
    make_layer = splitter.wrap(bench.pool.wrap(bench.backend.make_layer))
    bench.make_runner(model=TinyModel(make_layer))
    bench.pool.allocate(bench.num_blocks)
    bench.backend.prepare(bench.max_rows, 256, bench.max_len)
    give_graphs(bench, mixed_builders(bench.runner.parts, splitter, 256))
    return bench


def generate_in_chunks(bench: Bench, chunk: int, outputs: int) -> list[list[int]]:
    """Compute all prompts in the same steps, in chunks of `chunk` tokens, until each row has
    `outputs` tokens."""
    added = [bench.new(row, prompt) for row, prompt in enumerate(PROMPTS)]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while work := {
        row: min(chunk, len(prompt) + len(tokens[row]) - computed)
        for row, prompt in enumerate(PROMPTS)
        if (computed := 0 if added else int(bench.rows.computed[row]))
        < len(prompt) + len(tokens[row])
        and len(tokens[row]) < outputs
    }:
        result = bench.run(work, added)
        added = []
        assert result.failed == {}
        for row, token in zip(work, result.token_ids.tolist(), strict=True):
            tokens[row] += [token] if token >= 0 else []
    return tokens


@pytest.mark.parametrize("backend", [RecordableAttention, MixedAttention])
@examples(quick=8, full=100)
@given(
    chunk=st.integers(1, 13),
    sizes=st.sampled_from([[40], [16, 8, 4], [8]]),
    max_rows=st.sampled_from([4, 21]),
)
def test_the_tokens_are_those_of_the_model_however_prompts_are_cut_and_steps_padded(
    backend: type[AttentionBackend], chunk: int, sizes: list[int], max_rows: int
) -> None:
    """With sizes that no step exceeds, that some do, and that most do; with recordings that compute
    all states, and wanted ones alone."""
    with pytest.MonkeyPatch.context() as patch:
        bench = bench_with_graphs(backend, sizes, patch, max_rows)
        assert generate_in_chunks(bench, chunk, 4) == [generate(prompt, 4) for prompt in PROMPTS]


def graphs_of(bench: Bench) -> WatchedGraphs:
    assert isinstance(bench.runner.graphs, WatchedGraphs)
    return bench.runner.graphs


def recorded(bench: Bench, sizes: list[int]) -> list[Graph]:
    graphs = [graphs_of(bench).find(MIXED, size) for size in sizes]
    return [graph for graph in graphs if graph is not None]


@pytest.mark.parametrize(
    ("backend", "pieces"), [(RecordableAttention, [True, True, False]), (MixedAttention, [False])]
)
def test_a_recording_is_cut_at_each_layers_attention_unless_that_can_be_recorded_too(
    backend: type[AttentionBackend], pieces: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for graph in recorded(bench_with_graphs(backend, [8, 4], monkeypatch), [8, 4]):
        assert [piece.layer is not None for piece in graph.recording.pieces] == pieces
        assert graph.whole == (len(pieces) == 1)


@pytest.mark.parametrize("backend", [RecordableAttention, MixedAttention])
def test_recording_that_fails_leaves_nothing_capturing(
    backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise memory that is released next would be released while a stream captures."""
    graphs = graphs_of(bench_with_graphs(backend, [8, 4], monkeypatch))
    play_graphs_on_the_cpu(monkeypatch)

    def fail(*arguments: Any) -> torch.Tensor:
        if GraphOnCpu.active is not None:
            raise DovetailError("another rank has died")
        return run(*arguments)

    run = TinyModel.forward
    monkeypatch.setattr(TinyModel, "forward", fail)
    with pytest.raises(DovetailError, match="another rank has died"):
        graphs.capture()
    assert GraphOnCpu.active is None


def test_recordings_twice_as_large_as_there_are_rows_compute_the_states_of_as_many_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = recorded(bench_with_graphs(MixedAttention, [16, 8, 7, 4], monkeypatch), [16, 8, 7, 4])
    assert [len(graph.recording.outputs.hidden) for graph in graphs] == [4, 4, 7, 4]
    assert [graph.inputs.all_states for graph in graphs] == [False, False, True, True]


def test_a_step_that_needs_all_states_is_not_replayed_in_a_recording_of_wanted_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = bench_with_graphs(MixedAttention, [16, 4], monkeypatch)
    backend: Any = bench.backend
    prompt = [3, 1, 4, 1, 5, 9, 2]
    result = bench.run({0: len(prompt)}, [bench.new(0, prompt, RowSampling(prompt_logprobs=2))])
    assert not backend.planned[-1].mixed_graph
    alone = Bench()
    expected = alone.run({0: len(prompt)}, [alone.new(0, prompt, RowSampling(prompt_logprobs=2))])
    assert_rounded(
        result.values(PromptLogprobs)[0].logprobs,
        expected.values(PromptLogprobs)[0].logprobs,
        ROUNDINGS,
    )
    bench.run({0: 1, 1: 5}, [bench.new(1, prompt[:5])])
    assert backend.planned[-1].mixed_graph, "its prompt is computed"


def test_recordings_of_all_sizes_hand_q_over_in_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = recorded(bench_with_graphs(RecordableAttention, [16, 8, 4], monkeypatch), [16, 8, 4])
    splitter = [
        (piece.q, piece.out)
        for graph in graphs
        for piece in graph.recording.pieces
        if piece.layer is not None
    ]
    assert (
        len(
            {
                (q.data_ptr(), out.data_ptr())
                for q, out in splitter
                if q is not None and out is not None
            }
        )
        == 1
    )


@pytest.mark.parametrize("backend", [RecordableAttention, MixedAttention])
def test_a_step_is_replayed_in_the_smallest_recording_that_holds_it(
    backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = graphs_of(bench_with_graphs(backend, [8, 4], monkeypatch))
    found = [graphs.for_model(tokens, frozenset(), all_states=False) for tokens in (1, 4, 5, 8, 9)]
    assert [graph and graph.size for graph in found] == [4, 4, 8, 8, None]


def test_steps_that_share_a_prefix_have_recordings_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dovetail_executors.runtime.runner.SHARING_WORTH", 4)
    bench = bench_with_graphs(MixedAttention, [8, 4], monkeypatch)
    backend: Any = bench.backend
    assert [batch.shared_prefix_blocks for batch in backend.planned] == [0, 0, 1], (
        "few: the largest, and powers of two from 256 on"
    )
    batch = bench.batch(
        {0: 5, 1: 5}, [bench.new(0, [1, 2, 3, 4, 5]), bench.new(1, [1, 2, 3, 4, 6])], [], []
    )
    bench.runner.collect(bench.runner.submit(replace(batch, shared_prefix_blocks=1)))
    assert (backend.planned[-1].mixed_graph, backend.planned[-1].shared_prefix_blocks) == (
        False,
        1,
    ), "ten tokens are too many"
    batch = bench.batch({0: 1, 1: 1}, [], [], [])
    bench.runner.collect(bench.runner.submit(replace(batch, shared_prefix_blocks=1)))
    assert (backend.planned[-1].mixed_graph, backend.planned[-1].slots[0].shape[1]) == (True, 8)


def pooled_in_chunks(
    bench: Bench, method: PoolingMethod, tasks: Sequence[PoolingTask], chunk: int
) -> list[Any]:
    """Return the pooled result of each prompt, for its task, computed beside a request that
    generates. The runner keeps its graphs."""
    plan = PoolingPlan(Path(), PoolingCapacity(tuple(tasks), method, 1), normalize=False)
    graphs = bench.runner.graphs
    bench.make_runner(Pooler(plan, [], [], bench.rows))
    bench.runner.graphs = graphs
    added = [
        bench.new(3, PROMPTS[0]),
        *(replace(bench.new(row, prompt), sampling=None) for row, prompt in enumerate(PROMPTS)),
    ]
    pooling = {row: RowPooling(task) for row, task in enumerate(tasks)}
    left = {3: len(PROMPTS[0]), **{row: len(prompt) for row, prompt in enumerate(PROMPTS)}}
    found: dict[int, Any] = {}
    while any(row < 3 for row in left):
        work = {row: min(chunk, count) for row, count in left.items()}
        batch = bench.batch(work, added, [], [])
        due = [index for index, row in enumerate(work) if row < 3 and work[row] == left[row]]
        pools = np.array([row < 3 for row in work])
        batch = replace(
            batch,
            yields_token=batch.yields_token & ~pools,
            parts=(PoolingRows(pooling if added else {}, np.array(due, np.int32)),),
        )
        result = bench.runner.collect(bench.runner.submit(batch))
        found |= {
            row: result.values(Pooled)[index] for index, row in enumerate(work) if index in due
        }
        left = {row: count - work[row] for row, count in left.items() if count > work[row]}
        left = {3: 1, **left}  # it goes on
        added = []
    return [found[row] for row in range(3)]


@pytest.mark.parametrize("backend", [RecordableAttention, MixedAttention])
@pytest.mark.parametrize("method", ["last", "mean", "cls"])
def test_rows_pool_from_recordings_what_they_pool_without(
    backend: type[AttentionBackend], method: PoolingMethod
) -> None:
    """With recordings of all states and of wanted ones alone, too small ones, and with more wanted
    tokens than these compute."""
    for tasks in (("embed",) * 3, ("embed", "token_embed", "embed")):
        expected = pooled_in_chunks(Bench(), method, tasks, 13)
        for sizes, chunk, max_rows in (
            ([40], 5, 4),
            ([16, 8, 4], 13, 4),
            ([8], 2, 4),
            ([16, 8], 3, 21),
        ):
            with pytest.MonkeyPatch.context() as patch:
                found = pooled_in_chunks(
                    bench_with_graphs(backend, sizes, patch, max_rows), method, tasks, chunk
                )
            for one, other in zip(found, expected, strict=True):
                assert_rounded(one, other, ROUNDINGS)
