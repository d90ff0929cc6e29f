"""CUDA graphs played on the CPU: a recording keeps its operations, and the tensors that they read
and wrote; a replay runs them on these again.

So a replay sees of the present what lies in those tensors, and nothing else: a number that the host
knew when it recorded stays what it was. Kernels in Triton's interpreter are operations too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from dovetail.api.attention import AttentionBatch
from dovetail.testing.recording import Recording
from dovetail_executors.runtime.graphs import Agree, Graph, Graphs
from dovetail_executors.runtime.recorded_steps import Builder
from dovetail_executors.runtime.step_inputs import DecodeInputs
from tests.runtime.fakes import Bench


class GraphOnCpu:
    """Stands for `torch.cuda.CUDAGraph`."""

    active: ClassVar[Recording | None] = None

    def __init__(self) -> None:
        self._recording = Recording()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._recording.__enter__()
        GraphOnCpu.active = self._recording

    def capture_end(self) -> None:
        GraphOnCpu.active = None
        self._recording.__exit__(None, None, None)

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self._recording.replay()


def keep_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels in Triton's interpreter, which isn't itself made of operations to keep."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            run(kernel, *args, **kwargs)
        if GraphOnCpu.active is not None:
            GraphOnCpu.active.operations.append((partial(run, kernel), args, kwargs, None))

    monkeypatch.setattr(InterpretedFunction, "run", launch)


def play_graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What recording asks of `torch.cuda`."""
    stream = SimpleNamespace(wait_stream=lambda other: None, device=None)
    fakes = {
        "CUDAGraph": GraphOnCpu,
        "graph_pool_handle": lambda: None,
        "Stream": lambda device=None: stream,
        "current_stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device: None,
        "current_blas_handle": lambda: 0,
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


class WatchedGraphs(Graphs):
    """Keeps what was replayed."""

    def __init__(
        self, builders: Sequence[Builder], bench: Bench, agree: Agree | None = None
    ) -> None:
        super().__init__(builders, bench.runner.parts, agree)
        self.builders = builders
        self.replayed: list[tuple[str, int]] = []
        self.replayed_rows: list[list[int]] = []  # of decode steps

    def replay(self, graph: Graph, batch: AttentionBatch | None = None) -> Any:
        self.replayed.append((str(graph.key), graph.size))
        if batch is not None and isinstance(graph.inputs, DecodeInputs):
            self.replayed_rows.append(graph.inputs.lines.rows[: batch.num_rows].tolist())
        return super().replay(graph, batch)


def give_graphs(bench: Bench, builders: Sequence[Builder]) -> WatchedGraphs:
    """Capture graphs on the CPU, beside those that the runner has, and let it replay them."""
    had = bench.runner.graphs.builders if isinstance(bench.runner.graphs, WatchedGraphs) else ()
    graphs = WatchedGraphs([*had, *builders], bench)
    with pytest.MonkeyPatch.context() as patch:
        play_graphs_on_the_cpu(patch)
        graphs.capture()
    bench.runner.graphs = graphs
    return graphs
