"""Kernels of attention to selected tokens, against the plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from dovetail.api.attention import AttentionContext, Indexer, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.errors import DovetailError
from dovetail.testing.suites.attention_bench import Bench, Case
from dovetail_attention import triton_selected, triton_trial
from dovetail_attention.triton_backend import TritonAttention
from tests.attention import interpreter
from tests.kernels import INTERPRETED, ON_GPU
from tests.runtime.recorded import GraphOnCpu, keep_launches

if INTERPRETED:
    interpreter.mend()

DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not ON_GPU,
    reason="needs a GPU or the interpreter: tests/test_interpreter.py starts it",
)
INDEXER = Indexer(5, 3, 8)
CASE = Case(
    (40, 3, 0),
    (1, 1, 2),
    heads=3,
    kv_heads=1,
    head_size=24,
    v_in_k=16,
    indexers=(INDEXER,),
    device=DEVICE,
)


def bench_of(case: Case) -> Bench:
    return Bench(lambda context: TritonAttention(NoOptions(), context), case)


@pytest.mark.parametrize(("tokens", "top_k"), [(9, 1), (9, 8), (1030, 700), (1030, 1029), (40, 40)])
def test_the_highest_scores_are_found_and_of_equals_the_earliest(tokens: int, top_k: int) -> None:
    from dovetail_attention import triton_index

    drawn = torch.randn(3, tokens, generator=torch.Generator().manual_seed(0))
    scores = torch.stack((drawn[0], (drawn[1] * 2).round(), drawn[2] * 1e-30))
    scores[1, ::7] = -0.0
    scores[0, 3] = torch.inf
    lines = torch.tensor([[0, tokens]] * 3, dtype=torch.int32, device=DEVICE)
    selected = torch.full((3, top_k), -1, dtype=torch.int32, device=DEVICE)
    triton_index.choose[(3,)](
        scores.to(DEVICE), lines, selected, 0, SCORES_STRIDE=tokens, TOP_K=top_k, N=1024
    )
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    assert selected.tolist() == best.sort(dim=1).values.tolist()


def test_lines_are_scored_in_any_number_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(CASE)
    [whole] = bench.run()
    monkeypatch.setattr(triton_selected, "SCORES", 3 * bench.max_len)
    bench.bind()
    [turns] = bench.run()
    assert torch.equal(whole, turns)
    assert torch.allclose(whole, bench.expected()[0], atol=1e-5)


def test_parts_of_a_line_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than tiles: some are empty."""
    monkeypatch.setattr(triton_selected, "PROGRAMS", 100)
    monkeypatch.setattr(triton_selected, "MOST_SPLITS", 3)
    case = replace(CASE, indexers=(replace(INDEXER, top_k=17),))
    bench = bench_of(case)
    assert torch.allclose(bench.run()[0], bench.expected()[0], atol=1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="graphs are played on the CPU")
def test_a_recorded_step_serves_any_other_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_launches(monkeypatch)
    case = replace(CASE, queries=(1, 1, 1))
    bench = bench_of(case)
    bench.compute()
    [layer] = bench.layers
    q, index_q, weights = (
        bench.tensor(rows) for rows in (bench.q[0], bench.index[0].q, bench.index[0].weights)
    )
    bench.plan((2, 3, 0), (3, 4, 0), padding=1)
    graph = GraphOnCpu()
    graph.capture_begin()
    layer.select(index_q, weights)
    out = layer.attend(q)
    graph.capture_end()
    bench.plan(case.history, case.lens)
    graph.replay()
    assert torch.allclose(out.double(), bench.expected()[0], atol=1e-5)


@pytest.mark.full
def test_the_trial_accepts_them() -> None:
    indexer = Indexer(2048, 4, 16)
    spec = LayerSpec(0, 4, 1, 24, 0.2, v_in_k=True, v_head_size=16, indexer=indexer)
    triton_trial.check(TritonAttention, AttentionContext(DEVICE, "float32", 16), spec)


def test_indexers_that_the_kernels_do_not_fit_are_refused() -> None:
    spec = CASE.specs[0]
    context = AttentionContext("cuda:0", "float16", 16)
    for indexer in (Indexer(5, 129, 8), Indexer(5, 4, 12), Indexer(5, 4, 264)):
        reasons = triton_selected.reasons_against([replace(spec, indexer=indexer)])
        assert str(indexer.heads) in reasons[0]
    layer = TritonAttention(NoOptions(), replace(context, device=DEVICE)).make_layer(
        replace(spec, indexer=None)
    )
    with pytest.raises(DovetailError, match="has no indexer"):
        layer.select(torch.zeros(1, 3, 8), torch.zeros(1, 3))
