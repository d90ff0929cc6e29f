"""The CUDA graphs of one model's steps, and compiling the kernels for them beforehand."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

from dovetail.nn.kernels.available import has_triton
from dovetail.nn.kernels.launch import compiling_ahead
from dovetail.runtime.decode_graphs import DecodeGraphs
from dovetail.runtime.mixed_graphs import LayerSplitter, MixedGraphs
from dovetail.runtime.runner import Runner
from dovetail.runtime.sampling_graphs import SamplingGraphs
from dovetail.runtime.token_sizes import most_recorded
from dovetail.runtime.weights import Progress

log = logging.getLogger("dovetail")

MOST_THREADS = 16  # that compile: as many kernels are worth a thread, and Python's part of compiling runs in one at a time


class StepGraphs:
    """The CUDA graphs that `runner` may replay: the model's part of any step that isn't too large; and, if its sampler can be recorded, the rest of
    such a step and whole decode steps."""

    def __init__(self, runner: Runner, splitter: LayerSplitter, max_tokens: int, parameters: int) -> None:
        """Prepare graphs of steps of up to `max_tokens`, for a model that multiplies each token by so many `parameters`. Attention can be
        recorded, at least beside the model."""
        rows, model, backend = runner.rows, runner.model, runner.backend
        self._runner = runner
        self.mixed = MixedGraphs(model, splitter, backend, rows, most_recorded(max_tokens, parameters))
        self.decode: DecodeGraphs | None = None
        self.sampling: SamplingGraphs | None = None
        if runner.sampler.capabilities.cuda_graph:
            self.decode = DecodeGraphs(model, backend, runner.sampler, rows, max_tokens)
            self.sampling = SamplingGraphs(model, runner.sampler, rows, runner.masks, min(rows.max_rows, max_tokens))

    def __str__(self) -> str:
        return "decode, mixed" if self.decode else "mixed"

    def compile_ahead(self, prepare: Callable[[], None], progress: Progress | None = None) -> None:
        """Compile what recording will launch, many kernels at once. `prepare` prepares the backend, for a pool of any size."""
        if not has_triton():
            return
        tell = None if progress is None else partial(progress, "compiling kernels")
        try:
            with compiling_ahead(self._runner.device, min(MOST_THREADS, os.cpu_count() or 1), tell):
                prepare()
                self.mixed.rehearse()
                if self.decode and self.sampling:
                    self.decode.rehearse()
                    self.sampling.rehearse()
        except Exception as error:  # nothing is lost: what is really wrong is told when it is launched
            log.info("kernels are compiled one by one: %s: %s", type(error).__name__, error)

    def capture(self, progress: Progress | None = None) -> None:
        """Record all sizes, and let the runner replay them. The KV pool must be there."""
        runner = self._runner
        self.mixed.capture(progress)
        runner.mixed_graphs = self.mixed
        if self.decode and self.sampling:
            self.decode.capture(progress)
            self.sampling.capture(self.mixed.hidden, self.decode.pool, progress)
            runner.graphs, runner.sampling_graphs = self.decode, self.sampling
