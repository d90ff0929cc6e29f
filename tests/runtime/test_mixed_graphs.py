"""Steps that are replayed in pieces, with graphs that are played on the CPU: the tokens are those of the model as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.attention import AttentionBatch
from dovetail.runtime import mixed_graphs
from dovetail.runtime.mixed_graphs import Cuts, MixedGraphs
from dovetail_attention.sdpa import TorchAttention
from tests.runtime.fakes import Bench, TinyModel, generate
from tests.runtime.recorded import play_graphs_on_the_cpu
from tests.support import examples

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]]


class SlotsThatStay(TorchAttention):
    """Keeps the slots where they are from step to step, as backends with graphs do."""

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        super().prepare(max_rows, max_tokens, max_len)
        self._kept = torch.zeros(max_tokens, dtype=torch.int64)

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        count = len(batch.slots)
        self._kept[:count] = self.slots
        self.slots = self._kept[:count]


def bench_with_graphs(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("tests.runtime.fakes.TorchAttention", SlotsThatStay)
    monkeypatch.setattr(mixed_graphs, "token_sizes", lambda max_tokens: sizes)
    play_graphs_on_the_cpu(monkeypatch)
    bench, cuts = Bench(), Cuts()
    whole: Any = SimpleNamespace(make_layer=cuts.wrap(bench.backend.make_layer))
    bench.model = bench.runner.model = TinyModel(whole)
    bench.backend.allocate(bench.num_blocks)
    bench.backend.prepare(bench.max_rows, 256, bench.max_len)
    graphs = MixedGraphs(bench.model, cuts, bench.backend, 256, torch.device("cpu"))
    graphs.capture()
    bench.runner.mixed_graphs = graphs
    return bench


def generate_in_chunks(bench: Bench, chunk: int, outputs: int) -> list[list[int]]:
    """All prompts together, each in chunks of so many tokens, until each row has `outputs` tokens."""
    added = [bench.new(row, prompt) for row, prompt in enumerate(PROMPTS)]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while work := {
        row: min(chunk, len(prompt) + len(tokens[row]) - computed)
        for row, prompt in enumerate(PROMPTS)
        if (computed := 0 if added else int(bench.rows.computed[row])) < len(prompt) + len(tokens[row]) and len(tokens[row]) < outputs
    }:
        result = bench.run(work, added)
        added = []
        assert result.failed == {}
        for row, token in zip(work, result.token_ids.tolist(), strict=True):
            tokens[row] += [token] if token >= 0 else []
    return tokens


@examples(quick=8, full=100)
@given(st.integers(1, 13), st.sampled_from([[40], [16, 8, 4], [8]]))
def test_the_tokens_are_those_of_the_model_however_prompts_are_cut_and_steps_padded(chunk: int, sizes: list[int]) -> None:
    """With sizes that no step exceeds, that some do, and that most do."""
    with pytest.MonkeyPatch.context() as patch:
        bench = bench_with_graphs(sizes, patch)
        assert generate_in_chunks(bench, chunk, 4) == [generate(prompt, 4) for prompt in PROMPTS]


def test_a_recording_is_cut_at_each_layers_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_with_graphs([8, 4], monkeypatch)
    graphs = bench.runner.mixed_graphs
    assert graphs is not None
    assert [graphs.size_for(tokens) for tokens in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, None]
    for recording in graphs._recordings.values():
        assert [piece.layer is not None for piece in recording.pieces] == [True, True, False]
