"""All that the host does for a step, with the backends of GPUs, asks the device for nothing. What
is computed is left out: a model of zeros."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.api.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerSpec
from dovetail.api.clock import WallClock
from dovetail.api.component import NoOptions
from dovetail.api.executor import Batch
from dovetail.api.kv_cache import PageCopy
from dovetail.api.model import ModelInputs
from dovetail.testing.recording import nothing_asked
from dovetail_attention.flash import FlashAttention
from dovetail_executors.runtime.kv_pool import KVPool, kv_layout
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.runner import Runner
from dovetail_executors.runtime.sampling import Sampling
from tests.attention import fake_flash
from tests.runtime.fakes import HIDDEN, VOCAB, Bench, no_processors, spec_of
from tests.runtime.test_decode_graphs import with_graphs

SPECS = [spec_of(index, window) for index, window in enumerate((None, 9))]


class Zeros(nn.Module):
    """Layers that exist, and are never called."""

    def __init__(self, make_layer: Callable[[LayerSpec], AttentionLayer]) -> None:
        super().__init__()
        self.layers = [make_layer(spec) for spec in SPECS]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        tokens = inputs.token_ids if inputs.wanted is None else inputs.wanted
        return torch.zeros(len(tokens), HIDDEN)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB)


def backend_of(name: str, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """On the CPU, where it can plan; attending would take a GPU."""
    context = AttentionContext("cpu", "float32", 256)
    if name == "triton":
        pytest.importorskip("triton")
        from dovetail_attention.triton_backend import TritonAttention

        return TritonAttention(NoOptions(), context)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash.flash_attn_2())
    return FlashAttention(NoOptions(), context)


def bench_of(backend: AttentionBackend) -> Bench:
    bench = Bench(max_rows=4, max_len=600, block_size=256, num_blocks=40, windows=(None, 9))
    pool = KVPool(kv_layout(backend, SPECS, "float32"), torch.device("cpu"))
    bench.backend, bench.model = backend, Zeros(pool.wrap(backend.make_layer))  # type: ignore[assignment]
    pool.allocate(80)
    backend.prepare(4, 256, 600)
    bench.rows = RowState(4, 600, pool.planned.layout, torch.device("cpu"))
    bench.rows.pool_allocated(80)
    sampling = Sampling(bench.sampler, bench.rows, VOCAB, no_processors(bench.rows))
    bench.runner = Runner(bench.model, backend, pool, sampling, WallClock())
    return bench


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_planning_a_step_waits_for_nothing(
    name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(backend_of(name, monkeypatch))
    if graphs:
        with_graphs(bench)

    def step(batch: Batch) -> None:
        with nothing_asked():
            pending = bench.runner.submit(batch)
        bench.runner.collect(pending)

    step(
        bench.batch(
            {0: 200, 1: 3}, [bench.new(0, list(range(20)) * 15), bench.new(1, [1, 2, 3])], [], []
        )
    )
    step(bench.batch({0: 100, 1: 1}, [], [], []))
    step(bench.batch({0: 1, 1: 1}, [], [], []))
    bench.blocks[2] = [bench.free_blocks.pop()]
    step(
        bench.batch(
            {2: 1, 0: 1},
            [bench.new(2, [1, 2, 3], computed=2)],
            [1],
            [PageCopy(bench.blocks[0][0], bench.blocks[2][0])],
        )
    )
    assert np.array_equal(bench.rows.known[[0, 2]], [303, 4])
