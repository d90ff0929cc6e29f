"""`StepGraphs`: what recording launches was compiled before, many kernels at once; where that isn't possible, recording compiles it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.compiling import GPUS
from bench.shapes import SHAPES, write_checkpoint

from dovetail.api.attention import AttentionContext
from dovetail.api.clock import WallClock
from dovetail.api.component import NoOptions
from dovetail.api.sampler import SamplerContext
from dovetail.config import EngineConfig
from dovetail.nn.kernels import available, gpu, launch
from dovetail.parts import find_parts
from dovetail.registry.registry import Registry
from dovetail.runtime import step_graphs
from dovetail.runtime.loading import load_model
from dovetail.runtime.mixed_graphs import LayerSplitter
from dovetail.runtime.parallel import SINGLE
from dovetail.runtime.row_state import RowState
from dovetail.runtime.runner import Runner
from dovetail.runtime.step_graphs import StepGraphs
from dovetail_attention import triton_backend
from dovetail_attention.triton_backend import TritonAttention
from dovetail_attention.triton_tuning import HOPPER
from tests.kernels import INTERPRETED
from tests.runtime.recorded import play_graphs_on_the_cpu

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="what a GPU would be given is noted, and nothing is launched")

MAX_ROWS, MAX_TOKENS, BLOCK_SIZE = 64, 1024, 16


class Noting(launch.Compiler):
    """What is launched, by the kernel's name; a pool that compiles nothing."""

    def __init__(self) -> None:
        super().__init__(self, torch.device("cpu"))  # type: ignore[arg-type]
        self.names: dict[tuple[Any, ...], str] = {}

    def submit(self, *job: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def add(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        super().add(kernel, grid, *args, **options)
        self.names[list(self._jobs)[-1]] = kernel.fn.__name__

    @contextmanager
    def instead(self) -> Iterator[None]:
        token = launch._compiler.set(self)
        yield
        launch._compiler.reset(token)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> StepGraphs:
    """Of a small model with the layers of a large one, which takes the kernels of a Hopper for its own."""
    monkeypatch.setattr(gpu, "_gpu_of", lambda device: GPUS[90])
    monkeypatch.setattr(triton_backend, "_loads_apart_well", lambda shape, limits: True)
    write_checkpoint(replace(SHAPES[request.param], layers=1, vocab=4096, intermediate=1024, max_len=2048), tmp_path)
    config = EngineConfig.load({"model": str(tmp_path), "load_format": "dummy", "dtype": "bfloat16"})
    parts, backend = find_parts(config, Registry.discover()), TritonAttention(NoOptions(), AttentionContext("cpu", "bfloat16", BLOCK_SIZE))
    assert (backend.tilings, backend.processors) == (HOPPER, 132)
    splitter, device = LayerSplitter(), torch.device("cpu")
    targets = tuple(model.ref() for model in parts.models)
    model = load_model(tmp_path, config.executor_config(tmp_path), targets, splitter.wrap(backend.make_layer), SINGLE, device, None)
    rows = RowState(MAX_ROWS, model.max_model_len, BLOCK_SIZE, device)
    sampler = parts.sampler.ref().make(SamplerContext("cpu", model.vocab_size, rows.history))
    runner = Runner(model.module, backend, sampler, rows, WallClock(), model.vocab_size)
    for module in list(sys.modules.values()):  # but not where they come from: what is imported meanwhile would keep them
        for name in ("use_kernels", "has_many_rows"):
            if module.__name__.startswith("dovetail") and module is not available and hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *asked: True)
    sampler.prepare(MAX_ROWS)
    play_graphs_on_the_cpu(monkeypatch)
    graphs = StepGraphs(runner, splitter, MAX_TOKENS, 600_000_000)
    prepare(graphs)
    return graphs


def prepare(graphs: StepGraphs) -> None:
    backend = graphs._runner.backend
    backend.allocate(1)
    backend.prepare(MAX_ROWS, MAX_TOKENS, 2048)


@pytest.mark.parametrize("graphs", ["qwen3-0.6b", "llama-3.2-1b"], indirect=True)
def test_what_recording_launches_was_compiled_before(graphs: StepGraphs) -> None:
    ahead, recording = Noting(), Noting()
    with ahead.instead():
        graphs.mixed.rehearse()
        assert graphs.decode is not None
        graphs.decode.rehearse()
        graphs.sampling.rehearse()
    with recording.instead():
        graphs.capture()
    assert {"_linear", "prefill_hopper", "decode_shares", "_choose", "_change", "_append", "_embed"} <= set(recording.names.values())
    assert {kind: name for kind, name in recording.names.items() if kind not in ahead.names} == {}


@pytest.mark.parametrize("graphs", ["qwen3-0.6b"], indirect=True)
def test_what_fails_ahead_is_told_and_left_to_the_recording(graphs: StepGraphs, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dovetail")

    def fails() -> None:
        raise MemoryError("no room")

    told: list[tuple[str, int, int]] = []
    graphs.compile_ahead(fails, lambda *progress: told.append(progress))
    assert not told
    assert "one by one: MemoryError: no room" in caplog.text
    assert not launch.is_compiling_ahead()


@pytest.mark.parametrize("graphs", ["qwen3-0.6b"], indirect=True)
def test_without_triton_nothing_is_done_ahead(graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "has_triton", lambda: False)
    monkeypatch.setattr(graphs.mixed, "rehearse", lambda: pytest.fail("nothing to rehearse"))
    graphs.compile_ahead(lambda: pytest.fail("nothing to prepare for"))


@pytest.mark.parametrize("graphs", ["qwen3-0.6b"], indirect=True)
def test_the_runner_gets_what_was_recorded(graphs: StepGraphs) -> None:
    runner = graphs._runner
    assert (runner.mixed_graphs, runner.graphs, runner.sampling_graphs) == (None, None, None)
    with Noting().instead():
        graphs.capture()
    assert (runner.mixed_graphs, runner.graphs, runner.sampling_graphs) == (graphs.mixed, graphs.decode, graphs.sampling)
    assert str(graphs) == "decode, mixed"
