"""Deterministic rows are computed once, in forwards of the same number of slabs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dovetail.api.graphs import GraphSupport
from dovetail.api.model import ModelInputs
from dovetail.api.sampler import (
    Capture,
    RowSampling,
    SampledTokens,
    SampleInputs,
    SamplerCapabilities,
)
from dovetail.nn.logprobs import top_logprobs
from dovetail_executors.runtime.slab_steps import LineOutputs, RecordedLines, RecordedSlabs
from dovetail_executors.runtime.slabs import (
    LINES,
    MORE_PLACES,
    PLACES,
    SLAB,
    cheapest,
    sizes_of_forwards,
)
from dovetail_executors.runtime.step_inputs import SamplingInputs
from tests.runtime.fakes import VOCAB, Bench, Greedy, TinyModel
from tests.runtime.recorded import give_graphs, play_graphs_on_the_cpu

MARKED = RowSampling(temperature=0.0, logprobs=2, deterministic=True)
USUAL = RowSampling(temperature=0.0, logprobs=2)
LENGTHS = (40, 33, 1)


def prompt(row: int, length: int) -> list[int]:
    return [(7 * row + 3 * place) % (VOCAB - 1) for place in range(length)]


def bits_of(bench: Bench, lengths: dict[int, int], marked: Sequence[int]) -> list[list[Any]]:
    """Prefill rows of these lengths, then decode twice. Returns each row's ids and
    log-probabilities."""
    added = [
        bench.new(row, prompt(row, length), MARKED if row in marked else USUAL)
        for row, length in lengths.items()
    ]
    found: list[list[Any]] = [[] for _ in lengths]
    for counts in (lengths, dict.fromkeys(lengths, 1), dict.fromkeys(lengths, 1)):
        result = bench.run(counts, added)
        added = []
        assert result.logprobs is not None
        for line, of_row in enumerate(found):
            values = result.logprobs.logprobs[line, :3].tobytes()
            of_row.append((int(result.token_ids[line]), values))
    return found


def forwards(bench: Bench) -> list[tuple[list[int], int, bool]]:
    """Return the queries of rows, the padded number of tokens, and whether shapes are fixed, of
    each forward."""
    return [
        (batch.host_query_lens.tolist(), batch.slots[0].shape[1], batch.fixed_shapes)
        for batch in bench.backend.planned
    ]


def test_each_token_is_computed_once() -> None:
    bench = Bench(max_len=96)
    added = [bench.new(0, prompt(0, 40), MARKED), bench.new(1, prompt(1, 9), USUAL)]
    bench.run({0: 40, 1: 9}, added)
    slab = ([SLAB], SLAB, True)
    assert forwards(bench) == [([9], 9, False), slab, slab]
    bench.backend.planned.clear()
    bench.run({0: 1})
    assert forwards(bench) == [slab]


def test_slabs_are_computed_together_in_forwards_of_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PLACES, "cpu", 4)
    lengths = dict(enumerate(LENGTHS))
    bench = Bench(max_len=96)
    together = bits_of(bench, lengths, marked=(0, 1, 2))
    tried = [([SLAB] * 4, 4 * SLAB, True)]
    prefill = [([SLAB] * 4, 4 * SLAB, True), ([SLAB], 4 * SLAB, True)]
    decode = ([SLAB] * 3, 4 * SLAB, True)
    assert forwards(bench) == [*tried, *prefill, decode, decode]
    for row, length in lengths.items():
        for company in ({}, {3: 20}):
            alone = bits_of(Bench(max_len=96), {row: length, **company}, marked=(row,))
            assert alone[0] == together[row]


def test_slabs_are_computed_one_by_one_where_places_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uneven(TinyModel):
        def forward(self, inputs: ModelInputs) -> torch.Tensor:
            states = super().forward(inputs)
            states[2 * SLAB :] = torch.nextafter(states[2 * SLAB :], torch.tensor(torch.inf))
            return states

    monkeypatch.setitem(PLACES, "cpu", 4)
    found = []
    for lengths in ({2: 70}, {0: 40, 1: 33, 2: 70}):
        bench = Bench(max_len=96)
        bench.model.__class__ = Uneven
        found.append(bits_of(bench, lengths, marked=tuple(lengths))[-1])
        assert ([SLAB], SLAB, True) in forwards(bench)
    assert found[0] == found[1]


def test_few_slabs_take_a_small_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACES, "cpu", 4)
    lengths = dict(enumerate(LENGTHS))
    fixed = bits_of(Bench(max_len=96), lengths, marked=(0, 1, 2))
    monkeypatch.setitem(MORE_PLACES, "cpu", (1, 2))
    bench = Bench(max_len=96)
    assert bits_of(bench, lengths, marked=(0, 1, 2)) == fixed
    tried = [(4, 4), (1, 1), (2, 2)]
    prefill = [(4, 4), (1, 1)]
    decode = (3, 4)
    assert [(len(lens), size // SLAB) for lens, size, _ in forwards(bench)] == [
        *tried,
        *prefill,
        decode,
        decode,
    ]


def test_a_size_that_answers_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByRows(TinyModel):
        """Its products depend on the number of rows, as those of cuBLAS do."""

        def forward(self, inputs: ModelInputs) -> torch.Tensor:
            states = super().forward(inputs)
            return states if len(states) >= 2 * SLAB else torch.nextafter(states, states + 1)

    monkeypatch.setitem(PLACES, "cpu", 4)
    found = []
    used = []
    for more in ((), (1, 2)):
        monkeypatch.setitem(MORE_PLACES, "cpu", more)
        bench = Bench(max_len=96)
        bench.model.__class__ = ByRows
        found.append(bits_of(bench, {0: 40}, marked=(0,)))
        used.append({size // SLAB for _, size, _ in forwards(bench)[-3:]})
    assert found[0] == found[1]
    assert used == [{4}, {2}]


def test_forwards_fit_a_step() -> None:
    assert sizes_of_forwards("cuda", 8192) == [1, 2, 8, 16, 64]
    assert sizes_of_forwards("cuda", 64 * SLAB - 1) == [1, 2, 8, 16]
    assert sizes_of_forwards("cpu", 8192) == [1]
    assert [cheapest([1, 8, 64], slabs) for slabs in (1, 8, 30, 64, 300)] == [1, 8, 8, 64, 64]


def test_recorded_slabs_have_the_bits_of_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACES, "cpu", 4)
    monkeypatch.setitem(LINES, "cpu", 8)
    play_graphs_on_the_cpu(monkeypatch)
    lengths = dict(enumerate(LENGTHS))
    launched = bits_of(Bench(max_len=96), lengths, marked=(0, 2))
    bench = Bench(max_len=96)
    graphs = give_graphs(bench, [RecordedSlabs(bench.runner.parts, 4 * SLAB)])
    assert not graphs.record_next()
    recorded = bits_of(bench, lengths, marked=(0, 2))
    assert set(graphs.replayed) == {("slabs", 4 * SLAB)}
    assert (recorded[0], recorded[2]) == (launched[0], launched[2])


class Recordable(Greedy):
    """Its work can be recorded."""

    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.ALL, logprobs=True)

    def capture_for(self, host_rows: NDArray[np.integer[Any]]) -> Capture:
        return Capture.FULL

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        if inputs.capture is None:
            return super().sample(inputs)
        token_ids = inputs.logits.argmax(dim=1)
        return SampledTokens(token_ids, top_logprobs(inputs.logits, token_ids, 2))


@pytest.mark.parametrize("lines", [2, 8])
def test_recorded_lines_have_the_bits_of_launched_ones(
    monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    monkeypatch.setitem(PLACES, "cpu", 4)
    monkeypatch.setitem(LINES, "cpu", lines)
    lengths = dict(enumerate(LENGTHS))
    found = []
    for records in (False, True):
        bench = Bench(max_len=96)
        bench.sampler.__class__ = Recordable
        if records:
            play_graphs_on_the_cpu(monkeypatch)
            parts = bench.runner.parts
            builders = [RecordedLines(parts, capture, bench.runner.slabs) for capture in Capture]
            graphs = give_graphs(bench, builders)
            assert not graphs.record_next()
        found.append(bits_of(bench, lengths, marked=(0, 1, 2)))
    assert found[0] == found[1]
    steps = 3
    parts_of_a_step = -(-len(LENGTHS) // lines)
    sampled = [size for part, size in graphs.replayed if part == "lines_full"]
    assert sampled == [lines] * parts_of_a_step * steps


def test_lines_are_launched_if_their_recording_has_other_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PLACES, "cpu", 4)
    monkeypatch.setitem(LINES, "cpu", 8)
    play_graphs_on_the_cpu(monkeypatch)
    lengths = dict(enumerate(LENGTHS))
    plain, bench = Bench(max_len=96), Bench(max_len=96)
    plain.sampler.__class__ = bench.sampler.__class__ = Recordable
    launched = bits_of(plain, lengths, marked=(0, 1, 2))

    class Other(RecordedLines):
        def run(self, inputs: SamplingInputs) -> LineOutputs:
            logits, sampled = super().run(inputs)
            return LineOutputs(torch.nextafter(logits, logits + 1), sampled)

    parts = bench.runner.parts
    builders = [Other(parts, capture, bench.runner.slabs) for capture in Capture]
    graphs = give_graphs(bench, builders)
    assert bits_of(bench, lengths, marked=(0, 1, 2)) == launched
    assert "lines_full" not in [part for part, _ in graphs.replayed]


@pytest.mark.parametrize("drafter", [{"head": True}, {"draft_error": 0.0}])
def test_what_drafts_follows_deterministic_rows(
    monkeypatch: pytest.MonkeyPatch, drafter: dict[str, Any]
) -> None:
    monkeypatch.setitem(PLACES, "cpu", 4)
    lengths = dict(enumerate(LENGTHS))
    plain = bits_of(Bench(max_len=96), lengths, marked=(0, 1))
    bench = Bench(max_len=96, max_lines=12, **drafter)
    followed = bits_of(bench, lengths, marked=(0, 1))
    assert followed[:2] == plain[:2]
    assert forwards(bench)[0] == ([*LENGTHS], sum(LENGTHS), False)
    # of whose tokens a head stores K and V once they are sampled
    assert forwards(bench)[-1] == ([1, 1, 1], 3, False)
